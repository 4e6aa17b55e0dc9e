"""Values of every form of the norm, against float64."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tk_rmsnorm
from tk_kernel_core.launch import recording
from tk_kernel_core.numerics import rounding_tolerance
from tk_rmsnorm import fused_add_rmsnorm, fused_add_rmsnorm_, rmsnorm, rmsnorm_residual_fused, rmsnorm_torch
from tk_rmsnorm._reference import fused_add_rmsnorm_torch
from tk_testkit.close import assert_close
from tk_testkit.strategies import assert_guards_intact, floating_dtypes, guarded_view, shapes, strides_for

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# The longest are many more turns of the same loop, for each of which the interpreter takes its time.
LONGEST = (pytest.param(131_072, marks=pytest.mark.gpu), pytest.param(1_048_577, marks=pytest.mark.gpu))
HIDDEN_SIZES = (1, 2, 3, 127, 128, 2520, 4097, 16_384, 65_536, 65_537, *LONGEST)


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def exact_norm(x: torch.Tensor, weight: torch.Tensor | None, **numbers: object) -> torch.Tensor:
    return rmsnorm_torch(x.double(), None if weight is None else weight.double(), **numbers).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
@pytest.mark.usefixtures("poisoned_memory")
def test_any_hidden_size_without_reading_past_the_row(hidden_size: int, dtype: torch.dtype, device: str) -> None:
    x = guarded_view((3, hidden_size), (hidden_size + 5, 1), dtype, device=device)
    weight = guarded_view((hidden_size,), (1,), dtype, device=device, seed=1)
    tolerance = rounding_tolerance(dtype, hidden_size)
    assert_close(rmsnorm(x, weight), exact_norm(x, weight), tolerance)
    y, total = fused_add_rmsnorm(x, x, weight)
    assert_close(y, exact_norm(x.float() * 2, weight).to(dtype), tolerance)
    assert torch.equal(total, x + x)
    assert_guards_intact(x)
    assert_guards_intact(weight)


@pytest.mark.parametrize("casting", ["fp32", "llama"])
@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), list(itertools.product(DTYPES, (*DTYPES, None))), ids=lambda value: str(value)
)
@pytest.mark.parametrize("shape", [(96,), (5, 96), (2, 3, 96)], ids=str)
def test_every_pair_of_dtypes(
    shape: tuple[int, ...], dtype: torch.dtype, weight_dtype: torch.dtype | None, casting: str, device: str
) -> None:
    x = random(*shape, dtype=dtype, device=device)
    weight = None if weight_dtype is None else random(96, dtype=weight_dtype, device=device, seed=1)
    y = rmsnorm(x, weight, casting=casting)
    assert y.dtype == dtype
    assert_close(y, rmsnorm_torch(x, weight, casting=casting), rounding_tolerance(dtype, 96, roundings=2))


@pytest.mark.parametrize("casting", ["fp32", "llama"])
@pytest.mark.parametrize("hidden_size", [512, 10_000])
def test_the_two_castings_round_where_they_say(hidden_size: int, casting: str, device: str) -> None:
    x = random(16, hidden_size, dtype=torch.bfloat16, device=device)
    weight = random(hidden_size, dtype=torch.bfloat16, device=device, seed=1)
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
    if casting == "llama":
        normed = normed.to(torch.bfloat16).double()
    want = (normed * weight.double()).to(torch.bfloat16)
    # A handful of values lie so near the middle of two bfloat16 that fp32 rounds them the other way.
    assert (rmsnorm(x, weight, casting=casting) != want).float().mean() < 0.002
    other = rmsnorm(x, weight, casting="llama" if casting == "fp32" else "fp32")
    assert (other != want).float().mean() > 0.1


def test_equals_torch_within_one_rounding(device: str) -> None:
    for dtype in DTYPES:
        x = random(16, 1000, dtype=dtype, device=device)
        weight = random(1000, dtype=dtype, device=device, seed=1)
        want = torch.nn.functional.rms_norm(x, (1000,), weight, 1e-5)
        assert_close(rmsnorm(x, weight, 1e-5), want, rounding_tolerance(dtype, 1000))


def test_weight_offset_is_added_in_float32(device: str) -> None:
    x = random(8, 64, dtype=torch.bfloat16, device=device)
    # 1 + 2^-10 is 1 in bfloat16.
    weight = torch.full((64,), 2.0**-10, dtype=torch.bfloat16, device=device)
    got = rmsnorm(x, weight, weight_offset=1.0)
    assert_close(got, exact_norm(x, weight, weight_offset=1.0), rounding_tolerance(torch.bfloat16, 64))
    in_float32 = rmsnorm(x.float(), weight.float(), weight_offset=1.0)
    assert_close(in_float32, rmsnorm(x.float()) * (1 + 2.0**-10), rounding_tolerance(torch.float32, 64))


# The longer rows are read twice.
@pytest.mark.parametrize("hidden_size", [64, 65_537])
def test_eps_counts_where_the_row_is_small(hidden_size: int, device: str) -> None:
    x = random(2, hidden_size, dtype=torch.float32, device=device) * 1e-4
    tolerance = rounding_tolerance(torch.float32, hidden_size)
    for eps in (0.0, 1e-8, 1e-6, 1.0):
        want = exact_norm(x, None, eps=eps)
        assert_close(rmsnorm(x, eps=eps), want, tolerance)
        y, _ = fused_add_rmsnorm(x / 2, x / 2, None, eps=eps)
        assert_close(y, want, tolerance)


def test_a_missing_weight_ignores_the_offset(device: str) -> None:
    x = random(4, 64, dtype=torch.float32, device=device)
    assert torch.equal(rmsnorm(x, weight_offset=1.0), rmsnorm(x))


@pytest.mark.parametrize("value", [100.0, 256.0, 1000.0, 60_000.0])
def test_squares_beyond_float16_do_not_overflow(value: float, device: str) -> None:
    signs = torch.where(torch.arange(4096) % 2 == 0, 1.0, -1.0)
    weight = random(4096, dtype=torch.float16, device=device, seed=1)
    for x in (torch.full((1, 4096), value), value * signs[None]):
        x = x.to(device=device, dtype=torch.float16)
        assert_close(rmsnorm(x, weight), x.sign() * weight, rounding_tolerance(torch.float16, 4096))


def test_one_large_value_among_small_ones(device: str) -> None:
    x = torch.full((1, 4096), 1e-3, dtype=torch.float16, device=device)
    x[0, 17] = 60_000
    assert_close(rmsnorm(x), exact_norm(x, None), rounding_tolerance(torch.float16, 4096))


def test_squares_beyond_float32_give_zeros_as_in_torch(device: str) -> None:
    x = torch.full((1, 64), 1e30, dtype=torch.bfloat16, device=device)
    assert torch.equal(rmsnorm(x), torch.zeros_like(x))


def test_bad_values_stay_in_their_row(device: str) -> None:
    x = random(6, 200, dtype=torch.float32, device=device)
    clean = rmsnorm(x)
    x[1, 3], x[3, 7] = float("nan"), float("inf")
    y = rmsnorm(x)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2, 4, 5]], clean[[0, 2, 4, 5]])


def test_forms_agree_bit_for_bit(device: str) -> None:
    for dtype, residual_dtype in itertools.product(DTYPES, DTYPES):
        x = random(5, 300, dtype=dtype, device=device)
        residual = random(5, 300, dtype=residual_dtype, device=device, seed=1)
        weight = random(300, dtype=dtype, device=device, seed=2)
        before = x.clone(), residual.clone()
        y, total = fused_add_rmsnorm(x, residual, weight)
        assert torch.equal(rmsnorm_residual_fused(x, residual, weight), y)
        assert torch.equal(x, before[0])
        assert torch.equal(residual, before[1])
        result = fused_add_rmsnorm_(x, residual, weight)
        assert result[0] is x
        assert result[1] is residual
        assert torch.equal(x, y)
        assert torch.equal(residual, total)
        assert (y.dtype, total.dtype) == (dtype, residual_dtype)


def test_the_norm_takes_the_unrounded_sum(device: str) -> None:
    # 256 + 0.5 is 256 in bfloat16; the sum that is normalised must still see the half.
    x = torch.full((1, 64), 0.5, dtype=torch.bfloat16, device=device)
    residual = torch.full((1, 64), 256.0, dtype=torch.bfloat16, device=device)
    x[0, ::2] = -0.5
    y, total = fused_add_rmsnorm(x.clone(), residual, None)
    want_y, want_total = fused_add_rmsnorm_torch(x.double(), residual.double())
    assert_close(y, want_y.to(torch.bfloat16), rounding_tolerance(torch.bfloat16, 64))
    assert torch.equal(total, want_total.to(torch.bfloat16))
    in_float32 = rmsnorm_residual_fused(x.float(), residual.float())
    assert in_float32[0, 0] < in_float32[0, 1]


def strided_inputs(device: str) -> dict[str, torch.Tensor]:
    base = random(16, 1000, dtype=torch.float16, device=device)
    return {
        "transposed": random(1000, 8, dtype=torch.float16, device=device).t(),
        "every other column": base[:, ::2],
        "inner columns": base[:, 16:-16],
        "expanded row": base[:1].expand(8, 1000),
        "every other row": base[::2],
        "reversed axes": random(4, 3, 40, dtype=torch.float16, device=device).permute(1, 0, 2),
        "query heads of a projection": base[:, :512].unflatten(1, (4, 128)),
        "four dimensions": random(2, 3, 4, 5, 6, dtype=torch.float16, device=device)[:, :, :, 1:3, :],
        "three strides": random(4, 6, 8, 16, dtype=torch.float16, device=device)[::2, ::3, ::4],
        "odd start": base.flatten()[1 : 1 + 15 * 1000].view(15, 1000),
    }


@pytest.mark.parametrize("weight_stride", [1, 2])
@pytest.mark.parametrize("name", list(strided_inputs("cpu")))
def test_strides_give_the_contiguous_result(name: str, weight_stride: int, device: str) -> None:
    x = strided_inputs(device)[name]
    weight = random(2 * x.shape[-1], dtype=torch.float16, device=device, seed=1)[::weight_stride][: x.shape[-1]]
    dense, dense_weight = x.contiguous(), weight.contiguous()
    y = rmsnorm(x, weight)
    assert y.is_contiguous()
    assert torch.equal(y, rmsnorm(dense, dense_weight))
    for other in (dense, x):
        got = fused_add_rmsnorm(x, other, weight)
        want = fused_add_rmsnorm(dense, dense, dense_weight)
        assert all(part.is_contiguous() for part in got)
        assert torch.equal(torch.stack(got), torch.stack(want))


@pytest.mark.parametrize(
    ("name", "n_inner", "row_strides"),
    [
        ("inner columns", 1, (1000, 0)),
        ("expanded row", 1, (0, 0)),
        ("every other row", 1, (2000, 0)),
        ("query heads of a projection", 4, (1000, 128)),
    ],
)
def test_views_that_two_strides_reach_are_not_copied(
    name: str, n_inner: int, row_strides: tuple[int, int], device: str
) -> None:
    x = strided_inputs(device)[name]
    with recording() as launches:
        rmsnorm(x)
    if device == "cpu" and not launches:
        pytest.skip("needs a GPU or TRITON_INTERPRET=1: the reference launches nothing")
    (arguments,) = (dict(launch.arguments) for launch in launches)
    assert arguments["n_inner"] == n_inner
    strides = arguments["stride_x_outer"], arguments["stride_x_inner"]
    assert tuple(stride * arguments["ALIGNMENT"] for stride in strides) == row_strides


@pytest.mark.parametrize("name", [name for name in strided_inputs("cpu") if name != "expanded row"])
def test_in_place_writes_strided_tensors_and_nothing_else(name: str, device: str) -> None:
    x = strided_inputs(device)[name].clone(memory_format=torch.preserve_format)
    surrounding = torch.full((x.shape[0], 2, *x.shape[1:]), 7.0, dtype=x.dtype, device=device)
    residual = surrounding[:, 0]
    residual.copy_(x)
    want = fused_add_rmsnorm(x, residual)
    fused_add_rmsnorm_(x, residual)
    assert torch.equal(x, want[0])
    assert torch.equal(residual, want[1])
    assert bool((surrounding[:, 1] == 7.0).all())


@settings(max_examples=25)
@given(data=st.data(), shape=shapes(max_rank=4, max_elements=2048), dtype=floating_dtypes())
def test_any_layout_property(device: str, data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    strides = data.draw(strides_for(shape))
    x = guarded_view(shape, strides, dtype, device=device)
    # Another layout is another compilation, which may add up a row in another order.
    assert_close(rmsnorm(x), rmsnorm(x.contiguous()), rounding_tolerance(dtype, shape[-1]))
    assert_guards_intact(x)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 2520), (0, 0), (4, 0), (0,)], ids=str)
def test_empty_inputs(shape: tuple[int, ...], device: str) -> None:
    x = torch.empty(shape, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.ones(shape[-1], dtype=torch.bfloat16, device=device, requires_grad=True)
    for norm in (
        lambda: rmsnorm(x, weight),
        lambda: rmsnorm_residual_fused(x, x, weight),
        lambda: fused_add_rmsnorm(x, x, weight)[0],
        lambda: fused_add_rmsnorm_(x.detach().clone(), x.detach().clone(), weight.detach())[0],
    ):
        y = norm()
        assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
        if y.requires_grad:
            y.sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    # A launch with an empty grid would surface here.
    assert torch.ones(1, device=device).sum().item() == 1


def test_rows_do_not_depend_on_how_many_there_are(device: str) -> None:
    for hidden_size in (96, 4096):
        x = random(9, hidden_size, dtype=torch.bfloat16, device=device)
        whole = rmsnorm(x)
        assert all(torch.equal(rmsnorm(x[i : i + 1]), whole[i : i + 1]) for i in range(9))


def test_rows_of_every_form_and_size_are_their_own(device: str) -> None:
    for hidden_size in (97, 20_000):
        x, residual = random(2, 3, hidden_size, dtype=torch.float16, device=device)
        whole = torch.stack(fused_add_rmsnorm(x, residual))
        parts = [torch.stack(fused_add_rmsnorm(x[i : i + 1], residual[i : i + 1])) for i in range(3)]
        assert torch.equal(torch.cat(parts, 1), whole)


def test_views_with_a_pending_sign(device: str) -> None:
    values = torch.randn(5, 8, dtype=torch.cfloat, device=device)
    x = values.conj().imag
    assert x.is_neg()
    assert torch.equal(rmsnorm(x[:, :1]), rmsnorm(x[:, :1].clone().resolve_neg()))
    assert torch.equal(rmsnorm(x), rmsnorm(x.resolve_neg().contiguous()))


def test_repeatable_bit_for_bit(device: str) -> None:
    x = random(7, 3000, dtype=torch.float16, device=device)
    first = rmsnorm(x)
    assert all(torch.equal(rmsnorm(x), first) for _ in range(3))


def test_aligned_and_misaligned_addresses_take_turns(device: str) -> None:
    buffer = random(1 + 4 * 256, dtype=torch.float16, device=device)
    for start in (0, 1, 0, 1):
        x = buffer[start : start + 4 * 256].view(4, 256)
        assert_close(rmsnorm(x), exact_norm(x, None), rounding_tolerance(torch.float16, 256))


def test_public_names() -> None:
    assert set(tk_rmsnorm.__all__) == {
        "TritonRMSNorm",
        "fused_add_rmsnorm",
        "fused_add_rmsnorm_",
        "fused_add_rmsnorm_quant_int8",
        "replace_rmsnorm",
        "rmsnorm",
        "rmsnorm_quant_int8",
        "rmsnorm_residual_fused",
        "rmsnorm_residual_torch",
        "rmsnorm_torch",
    }
