"""Values of every form of the activation, against float64."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_swiglu
from tk_kernel_core.launch import recording
from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.spec import Tolerance
from tk_swiglu import _plans, swiglu_fused, swiglu_packed, swiglu_packed_torch, swiglu_torch, swiglu_with_bias
from tk_swiglu._launch import forward_config
from tk_testkit.close import assert_close
from tk_testkit.strategies import assert_guards_intact, floating_dtypes, guarded_view, shapes, strides_for

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PACKINGS = list(itertools.product(("concat", "interleaved"), ("gate_first", "up_first")))
GPT_OSS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
# 352 is a width after tensor-parallel slicing, the others are odd, prime or of real models. 701 takes several programs,
# of which the interpreter takes its time for each: longer rows are left to GPUs.
WIDTHS = (1, 7, 352, 701, *(pytest.param(width, marks=pytest.mark.gpu) for width in (2731, 11_009, 18_944)))


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def tolerance(dtype: torch.dtype, magnitude: float = 0.0) -> Tolerance:
    # exp turns the rounding of its argument, here below 12, into as many roundings of its result.
    return rounding_tolerance(dtype, 12**2, magnitude=magnitude)


def exact(gate: torch.Tensor, up: torch.Tensor, *biases: torch.Tensor, **numbers: object) -> torch.Tensor:
    return swiglu_torch(gate.double(), up.double(), *(bias.double() for bias in biases), **numbers).to(gate.dtype)


def pack(gate: torch.Tensor, up: torch.Tensor, layout: str, order: str) -> torch.Tensor:
    halves = (gate, up) if order == "gate_first" else (up, gate)
    return torch.cat(halves, -1) if layout == "concat" else torch.stack(halves, -1).flatten(-2)


def unpack(x: torch.Tensor, layout: str, order: str) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = x.chunk(2, -1) if layout == "concat" else (x[..., ::2], x[..., 1::2])
    return (first, second) if order == "gate_first" else (second, first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.usefixtures("poisoned_memory")
def test_any_width_and_start_without_reading_past_the_row(width: int, dtype: torch.dtype, device: str) -> None:
    for offset in (0, 1):
        gate = guarded_view((3, width), (width + 5, 1), dtype, device=device, offset=offset)
        up = guarded_view((3, width), (width + 3, 1), dtype, device=device, seed=1, offset=offset)
        biases = [guarded_view((width,), (1,), dtype, device=device, seed=2 + i, offset=offset) for i in (0, 1)]
        assert_close(swiglu_fused(gate, up), exact(gate, up), tolerance(dtype))
        got = swiglu_with_bias(gate, up, *biases, **GPT_OSS)
        # The sum of up, its bias and beta may be much smaller than they are.
        assert_close(got, exact(gate, up, *biases, **GPT_OSS), tolerance(dtype, magnitude=16.0))
        for view in (gate, up, *biases):
            assert_guards_intact(view)


@pytest.mark.parametrize(("layout", "order"), PACKINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.usefixtures("poisoned_memory")
def test_packed_equals_separate_bit_for_bit(
    width: int, dtype: torch.dtype, layout: str, order: str, device: str
) -> None:
    form = {"layout": layout, "order": order}
    x = guarded_view((3, 2 * width), (2 * width + 3, 1), dtype, device=device, offset=1)
    bias = guarded_view((2 * width,), (1,), dtype, device=device, seed=1, offset=1)
    gate, up = (half.contiguous() for half in unpack(x, layout, order))
    biases = [half.contiguous() for half in unpack(bias, layout, order)]
    for numbers in ({}, GPT_OSS):
        assert torch.equal(swiglu_packed(x, **form, **numbers), swiglu_fused(gate, up, **numbers))
        got = swiglu_packed(x, bias, **form, **numbers)
        assert torch.equal(got, swiglu_with_bias(gate, up, *biases, **numbers))
        assert torch.equal(swiglu_packed_torch(x, bias, **form, **numbers), swiglu_torch(gate, up, *biases, **numbers))
    assert_guards_intact(x)
    assert_guards_intact(bias)


@pytest.mark.parametrize("shape", [(96,), (5, 96), (2, 3, 96)], ids=str)
def test_every_pair_of_dtypes(shape: tuple[int, ...], device: str) -> None:
    for dtype, up_dtype in itertools.product(DTYPES, repeat=2):
        gate = random(*shape, dtype=dtype, device=device)
        up = random(*shape, dtype=up_dtype, device=device, seed=1)
        y = swiglu_fused(gate, up)
        assert y.dtype == dtype
        assert_close(y, exact(gate, up), tolerance(dtype))
        for bias_dtypes in itertools.product(DTYPES, repeat=2):
            biases = [random(96, dtype=bias_dtypes[i], device=device, seed=2 + i) for i in (0, 1)]
            y = swiglu_with_bias(gate, up, *biases, **GPT_OSS)
            assert y.dtype == dtype
            assert_close(y, exact(gate, up, *biases, **GPT_OSS), tolerance(dtype, magnitude=16.0))


@pytest.mark.parametrize(("layout", "order"), PACKINGS)
def test_every_pair_of_dtypes_packed(layout: str, order: str, device: str) -> None:
    for dtype, bias_dtype in itertools.product(DTYPES, DTYPES):
        x, bias = random(5, 192, dtype=dtype, device=device), random(192, dtype=bias_dtype, device=device, seed=1)
        y = swiglu_packed(x, bias, layout=layout, order=order, **GPT_OSS)
        assert (y.dtype, y.shape) == (dtype, (5, 96))
        want = exact(*unpack(x, layout, order), *unpack(bias, layout, order), **GPT_OSS)
        assert_close(y, want, tolerance(dtype, magnitude=16.0))


@pytest.mark.usefixtures("few_programs")
def test_equals_torch_within_its_two_roundings(device: str) -> None:
    for dtype in DTYPES:
        gate, up = random(2, 16, 1000, dtype=dtype, device=device)
        want = torch.nn.functional.silu(gate) * up
        assert_close(swiglu_fused(gate, up), want, rounding_tolerance(dtype, 12**2, roundings=2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("few_programs")
def test_gpt_oss_written_out_by_hand(dtype: torch.dtype, device: str) -> None:
    # Wide enough that every clamp bites.
    gate, up = 6 * random(2, 16, 500, dtype=torch.float32, device=device).to(dtype)
    g = torch.minimum(gate.double(), torch.tensor(7.0, dtype=torch.float64, device=device))
    u = up.double().clamp(-7.0, 7.0)
    want = g / (1.0 + torch.exp(-1.702 * g)) * (u + 1.0)
    assert (gate > 7).any()
    assert (up.abs() > 7).any()
    allowed = rounding_tolerance(dtype, 64**2)
    assert_close(swiglu_fused(gate, up, **GPT_OSS), want.to(dtype), allowed)
    torch.testing.assert_close(swiglu_torch(gate.double(), up.double(), **GPT_OSS), want, rtol=1e-14, atol=1e-300)
    for layout, order in PACKINGS:
        x = pack(gate, up, layout, order)
        assert_close(swiglu_packed(x, layout=layout, order=order, **GPT_OSS), want.to(dtype), allowed)


@pytest.mark.parametrize("name", ["alpha", "beta", "limit"])
def test_each_number_counts_alone(name: str, device: str) -> None:
    gate, up = 3 * random(2, 8, 200, dtype=torch.float32, device=device)
    numbers = {name: {"alpha": -0.5, "beta": 2.5, "limit": 2.0}[name]}
    y = swiglu_fused(gate, up, **numbers)
    assert_close(y, exact(gate, up, **numbers), tolerance(torch.float32, magnitude=16.0))
    assert not torch.equal(y, swiglu_fused(gate, up))


def test_alpha_of_zero_leaves_half_the_gate(device: str) -> None:
    gate, up = random(2, 8, 200, dtype=torch.float32, device=device)
    assert_close(swiglu_fused(gate, up, alpha=0.0), gate * 0.5 * up, rounding_tolerance(torch.float32, 4))


def test_numbers_may_be_integers(device: str) -> None:
    gate, up = 3 * random(2, 8, 64, dtype=torch.float16, device=device)
    assert torch.equal(
        swiglu_fused(gate, up, alpha=2, beta=1, limit=3), swiglu_fused(gate, up, alpha=2.0, beta=1.0, limit=3.0)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("few_programs")
def test_rounds_once(dtype: torch.dtype, device: str) -> None:
    gate, up = random(2, 64, 512, dtype=dtype, device=device)
    silu = gate.double() * torch.sigmoid(gate.double())
    want = (silu * up.double()).to(dtype)
    y = swiglu_fused(gate, up)
    # A handful of values lie so near the middle of two neighbours that fp32 rounds them the other way.
    assert (y != want).float().mean() < 0.002
    rounded_between = (silu.to(dtype).double() * up.double()).to(dtype)
    assert (y != rounded_between).float().mean() > 0.1


@pytest.mark.parametrize("form", ["separate", *(f"{layout} {order}" for layout, order in PACKINGS)])
@pytest.mark.usefixtures("few_programs")
def test_biases_are_added_unrounded(form: str, device: str) -> None:
    gate, up = random(2, 64, 512, dtype=torch.bfloat16, device=device)
    biases = random(2, 512, dtype=torch.bfloat16, device=device, seed=1)
    if form == "separate":
        y = swiglu_with_bias(gate, up, *biases)
    else:
        layout, order = form.split()
        y = swiglu_packed(pack(gate, up, layout, order), pack(*biases, layout, order), layout=layout, order=order)
    assert (y != exact(gate, up, *biases)).float().mean() < 0.002
    assert (y != exact(gate + biases[0], up, torch.zeros_like(biases[0]), biases[1])).float().mean() > 0.1
    assert (y != exact(gate, up + biases[1], biases[0], torch.zeros_like(biases[1]))).float().mean() > 0.1


def test_biases_keep_a_half_that_bfloat16_would_drop(device: str) -> None:
    # 256 + 0.5 is 256 in bfloat16.
    gate = torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    up = torch.full((1, 64), 256.0, dtype=torch.bfloat16, device=device)
    zero, half = torch.zeros(64, device=device), torch.full((64,), 0.5, device=device)
    y = swiglu_with_bias(gate, up, zero.bfloat16(), half.bfloat16(), beta=-256.0)
    assert_close(y, exact(gate, half.expand(1, 64)), tolerance(torch.bfloat16))
    # Before the clamp: 256.5 is above a limit of 256.25.
    y = swiglu_with_bias(up, up, half, half, limit=256.25, beta=-256.0)
    assert_close(y, torch.full_like(up, 256.25 * 0.25), tolerance(torch.bfloat16))


def strided_inputs(device: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    dense, dense_up = random(2, 5, 352, dtype=torch.float16, device=device, seed=5)
    columns, columns_up = random(2, 352, 5, dtype=torch.float16, device=device)
    wide = random(10, 2 * 352, dtype=torch.float16, device=device, seed=1)
    deep = random(2, 4, 3, 352, dtype=torch.float16, device=device, seed=2)
    deepest = random(2, 4, 6, 8, 16, dtype=torch.float16, device=device, seed=3)
    return {
        "halves": tuple(wide[:5].chunk(2, -1)),
        "halves in the other order": tuple(wide[:5].chunk(2, -1))[::-1],
        "both transposed": (columns.t(), columns_up.t()),
        "gate transposed": (columns.t(), dense_up),
        "up transposed": (dense, columns_up.t()),
        "gate expanded": (dense[:1].expand(5, 352), dense_up),
        "up expanded": (dense, dense_up[0].expand(5, 352)),
        "both expanded": (dense[:1].expand(5, 352), dense_up[:1].expand(5, 352)),
        "one value": (dense[0, 0].expand(5, 352), dense_up),
        "every other column": (wide[:5, ::2], wide[:5, 1::2]),
        "every other row": (wide[::2, :352], wide[1::2, 352:]),
        "inner columns": (wide[:5, 16:-16][:, :352], dense_up),
        "three dimensions permuted": (deep[0].permute(1, 0, 2), deep[1].permute(1, 0, 2)),
        "last dimension permuted": (deep[0].permute(2, 1, 0), deep[1].permute(2, 1, 0)),
        "experts of a projection": tuple(wide[:, :512].unflatten(1, (2, 256)).chunk(2, -1)),
        "three strides": (deepest[0, ::2, ::3, ::4], deepest[1, ::2, ::3, ::4]),
        "odd start": (wide.flatten()[1 : 1 + 5 * 352].view(5, 352), wide.flatten()[3 : 3 + 5 * 352].view(5, 352)),
        "the same tensor": (dense, dense),
    }


@pytest.mark.parametrize("name", list(strided_inputs("cpu")))
def test_strides_give_the_contiguous_result(name: str, device: str) -> None:
    gate, up = strided_inputs(device)[name]
    biases = random(2, gate.shape[-1], dtype=torch.float16, device=device, seed=4)
    spread = torch.stack([biases, biases], -1)[..., 0]
    before = gate.clone(), up.clone()
    y = swiglu_fused(gate, up)
    assert y.is_contiguous()
    assert torch.equal(y, swiglu_fused(gate.contiguous(), up.contiguous()))
    assert y.untyped_storage().data_ptr() not in {part.untyped_storage().data_ptr() for part in (gate, up)}
    want = swiglu_with_bias(gate.contiguous(), up.contiguous(), *biases, **GPT_OSS)
    for parts in (biases, spread):
        y = swiglu_with_bias(gate, up, *parts, **GPT_OSS)
        assert y.is_contiguous()
        assert torch.equal(y, want)
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])


@pytest.mark.parametrize(("layout", "order"), PACKINGS)
@pytest.mark.parametrize("name", list(strided_inputs("cpu")))
def test_strides_of_a_packed_tensor(name: str, layout: str, order: str, device: str) -> None:
    x = strided_inputs(device)[name][0]
    bias = random(2 * x.shape[-1], dtype=torch.float16, device=device, seed=4)[::2]
    form = {"layout": layout, "order": order}
    y = swiglu_packed(x, **form)
    assert y.is_contiguous()
    assert torch.equal(y, swiglu_packed(x.contiguous(), **form))
    assert torch.equal(swiglu_packed(x, bias, **form), swiglu_packed(x.contiguous(), bias.contiguous(), **form))


@pytest.mark.parametrize(
    "name",
    [
        "halves",
        "halves in the other order",
        "gate expanded",
        "up expanded",
        "every other row",
        "inner columns",
        "three dimensions permuted",
        "experts of a projection",
        "odd start",
    ],
)
def test_views_that_two_strides_reach_are_not_copied(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up = strided_inputs(device)[name]
    want = swiglu_fused(gate.contiguous(), up.contiguous())
    with recording() as launches:
        swiglu_fused(gate, up)
    if device == "cpu" and not launches:
        pytest.skip("needs a GPU or TRITON_INTERPRET=1: the reference launches nothing")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an input was copied")

    for method in ("contiguous", "clone", "copy_", "reshape"):
        monkeypatch.setattr(torch.Tensor, method, refuse)
    with recording() as launches:
        y = swiglu_fused(gate, up)
    monkeypatch.undo()
    assert len(launches) == 1
    assert torch.equal(y, want)


@settings(max_examples=25)
@given(data=st.data(), shape=shapes(max_rank=4, max_elements=2048), dtype=floating_dtypes())
def test_any_layout_property(device: str, data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    gate, up = (guarded_view(shape, data.draw(strides_for(shape)), dtype, device=device, seed=seed) for seed in (0, 1))
    assert torch.equal(swiglu_fused(gate, up), swiglu_fused(gate.contiguous(), up.contiguous()))
    assert_guards_intact(gate)
    assert_guards_intact(up)


@settings(max_examples=25)
@given(
    data=st.data(), shape=shapes(max_rank=4, max_elements=1024), dtype=floating_dtypes(), form=st.sampled_from(PACKINGS)
)
def test_any_packed_layout_property(
    device: str, data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype, form: tuple[str, str]
) -> None:
    shape = (*shape[:-1], 2 * shape[-1])
    x = guarded_view(shape, data.draw(strides_for(shape)), dtype, device=device)
    gate, up = (half.contiguous() for half in unpack(x, *form))
    assert torch.equal(swiglu_packed(x, layout=form[0], order=form[1]), swiglu_fused(gate, up))
    assert_guards_intact(x)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 2520), (0, 0), (4, 0), (0,)], ids=str)
def test_empty_inputs(shape: tuple[int, ...], device: str) -> None:
    gate = torch.empty(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
    bias = torch.ones(shape[-1], dtype=torch.bfloat16, device=device, requires_grad=True)
    x = torch.empty((*shape[:-1], 2 * shape[-1]), dtype=torch.bfloat16, device=device, requires_grad=True)
    packed_bias = torch.ones(2 * shape[-1], dtype=torch.bfloat16, device=device, requires_grad=True)
    for activation in (
        lambda: swiglu_fused(gate, gate),
        lambda: swiglu_with_bias(gate, gate, bias, bias, **GPT_OSS),
        lambda: swiglu_fused(gate.detach(), gate.detach(), out=gate.detach().clone()),
        *(
            lambda layout=layout, order=order: swiglu_packed(x, packed_bias, layout=layout, order=order)
            for layout, order in PACKINGS
        ),
    ):
        y = activation()
        assert (y.shape, y.dtype, y.device) == (gate.shape, gate.dtype, gate.device)
        if y.requires_grad:
            y.sum().backward()
    for tensor in (gate, bias, x, packed_bias):
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))
    # A launch with an empty grid would surface here.
    assert torch.ones(1, device=device).sum().item() == 1


@pytest.mark.parametrize("form", ["separate", *(f"{layout} {order}" for layout, order in PACKINGS)])
@pytest.mark.usefixtures("poisoned_memory")
def test_programs_that_begin_and_end_within_rows(form: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def small_blocks(*arguments: object) -> object:
        return dataclasses.replace(forward_config(*arguments), block=64)

    monkeypatch.setattr(_plans, "forward_config", small_blocks)
    # Shorter and longer than a block, and never a multiple of it.
    for width in (18, 150):
        gate, up = random(2, 7, width, dtype=torch.bfloat16, device=device)
        biases = random(2, width, dtype=torch.bfloat16, device=device, seed=1)
        if form == "separate":
            y = swiglu_with_bias(gate, up, *biases)
        else:
            layout, order = form.split()
            y = swiglu_packed(pack(gate, up, layout, order), pack(*biases, layout, order), layout=layout, order=order)
        assert_close(y, exact(gate, up, *biases), tolerance(torch.bfloat16, magnitude=16.0))


def test_rows_do_not_depend_on_how_many_there_are(device: str) -> None:
    for width in (96, 97, 1024):
        gate, up = random(2, 9, width, dtype=torch.bfloat16, device=device)
        whole = swiglu_fused(gate, up)
        assert all(torch.equal(swiglu_fused(gate[i : i + 1], up[i : i + 1]), whole[i : i + 1]) for i in range(9))
        assert torch.equal(swiglu_fused(gate[3], up[3]), whole[3])
        assert torch.equal(swiglu_fused(gate.flatten(), up.flatten()), whole.flatten())


def test_views_with_a_pending_sign(device: str) -> None:
    values = torch.randn(5, 8, dtype=torch.cfloat, device=device)
    turned = values.conj().imag
    plain = turned.clone().resolve_neg().contiguous()
    assert turned.is_neg()
    other = torch.randn(5, 8, device=device)
    assert torch.equal(swiglu_fused(turned, other), swiglu_fused(plain, other))
    assert torch.equal(swiglu_fused(other, turned), swiglu_fused(other, plain))
    assert torch.equal(swiglu_with_bias(other, other, turned[0], plain[1]), swiglu_with_bias(other, other, *plain[:2]))
    assert torch.equal(swiglu_with_bias(other, other, plain[0], turned[1]), swiglu_with_bias(other, other, *plain[:2]))
    for layout, order in PACKINGS:
        form = {"layout": layout, "order": order}
        assert torch.equal(swiglu_packed(turned, turned[0], **form), swiglu_packed(plain, plain[0], **form))


def test_repeatable_bit_for_bit(device: str) -> None:
    gate, up = random(2, 7, 300, dtype=torch.float16, device=device)
    first = swiglu_fused(gate, up)
    assert all(torch.equal(swiglu_fused(gate, up), first) for _ in range(3))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_aligned_and_misaligned_addresses_take_turns(dtype: torch.dtype, device: str) -> None:
    buffer = random(1 + 4 * 256, dtype=dtype, device=device)
    starts = (0, 1, 0, 1)
    for start, up_start in (*zip(starts, starts, strict=True), *zip(starts, starts[::-1], strict=True)):
        gate, up = (buffer[first : first + 4 * 256].view(4, 256) for first in (start, up_start))
        assert_close(swiglu_fused(gate, up), exact(gate, up), tolerance(dtype))
        for layout, order in PACKINGS:
            want = exact(*unpack(gate, layout, order))
            assert_close(swiglu_packed(gate, layout=layout, order=order), want, tolerance(dtype))


def test_public_names() -> None:
    assert set(tk_swiglu.__all__) == {
        "SwiGLU",
        "SwiGLUMLP",
        "replace_swiglu",
        "swiglu_fused",
        "swiglu_packed",
        "swiglu_packed_quant_int8",
        "swiglu_packed_torch",
        "swiglu_quant_int8",
        "swiglu_torch",
        "swiglu_with_bias",
    }
