"""Gradients, against float64 autograd through the reference."""

import dataclasses
import itertools

import pytest
import torch

from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.spec import Tolerance
from tk_swiglu import _plans, swiglu_fused, swiglu_packed, swiglu_packed_torch, swiglu_torch, swiglu_with_bias
from tk_swiglu._launch import backward_config
from tk_swiglu._operators import swiglu_backward
from tk_testkit.close import assert_close
from tk_testkit.strategies import assert_guards_intact, guarded_view

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PLAIN = {"alpha": 1.0, "beta": 0.0, "limit": None}
GPT_OSS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
# Bites for a third of the values.
TIGHT = {"alpha": 1.702, "beta": 1.0, "limit": 1.0}
FORMS = (
    "separate",
    *(
        f"{layout} {order}"
        for layout, order in itertools.product(("concat", "interleaved"), ("gate_first", "up_first"))
    ),
)


def leaf(*shape: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device=device, dtype=dtype).requires_grad_()


def exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().requires_grad_()


def gradient_tolerance(dtype: torch.dtype, terms: int = 1) -> Tolerance:
    # Gradients are sums and differences of terms of about this size.
    return rounding_tolerance(dtype, terms, magnitude=16.0)


def leaves_of(
    form: str, shape: tuple[int, ...], has_bias: bool, dtype: torch.dtype, device: str, bias_dtype: object = None
) -> list[torch.Tensor]:
    """Inputs of a form: gate and up, or x; then the biases, if any."""
    width = shape[-1] * (1 if form == "separate" else 2)
    count = 2 if form == "separate" else 1
    tensors = [leaf(*shape[:-1], width, dtype=dtype, device=device, seed=seed) for seed in range(count)]
    biases = [leaf(width, dtype=bias_dtype or dtype, device=device, seed=seed + 2) for seed in range(count)]
    return tensors + biases * has_bias


def activate(form: str, tensors: list[torch.Tensor], **numbers: object) -> torch.Tensor:
    """Call the form, or its reference where the inputs are float64."""
    by_reference = tensors[0].dtype == torch.float64
    if form != "separate":
        layout, order = form.split()
        packed = swiglu_packed_torch if by_reference else swiglu_packed
        return packed(*tensors, layout=layout, order=order, **numbers)
    if by_reference:
        return swiglu_torch(*tensors, **numbers)
    return (swiglu_fused if len(tensors) == 2 else swiglu_with_bias)(*tensors, **numbers)


def assert_gradients(
    form: str, tensors: list[torch.Tensor], gradient: torch.Tensor, rows: int, **numbers: object
) -> None:
    got = torch.autograd.grad(activate(form, tensors, **numbers), tensors, gradient)
    exact_tensors = [exact(tensor) for tensor in tensors]
    want = torch.autograd.grad(activate(form, exact_tensors, **numbers), exact_tensors, gradient.double())
    for index, (tensor, one, other) in enumerate(zip(tensors, got, want, strict=True)):
        assert one.dtype == tensor.dtype
        terms = rows if tensor.dim() == 1 else 1
        assert_close(one, other.to(tensor.dtype), gradient_tolerance(tensor.dtype, terms), f"gradient {index}")


@pytest.mark.parametrize(("turn", "numbers"), [(0, PLAIN), (1, GPT_OSS), (2, TIGHT)], ids=["plain", "gpt-oss", "tight"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, has_bias: bool, turn: int, numbers: dict[str, object], device: str) -> None:
    widths = (1, 40, 353)
    # Over the numbers, every dtype meets every width.
    for dtype, width in zip(DTYPES, widths[turn:] + widths[:turn], strict=True):
        tensors = leaves_of(form, (2, 5, width), has_bias, dtype, device)
        gradient = torch.randn(2, 5, width, device=device).to(dtype)
        assert_gradients(form, tensors, gradient, 10, **numbers)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("poisoned_memory")
def test_long_rows_without_reading_past_them(form: str, device: str) -> None:
    width = 2731
    count = 1 if form == "separate" else 2
    views = [
        guarded_view((3, count * width), (count * width + 5, 1), torch.bfloat16, device=device, seed=seed, offset=1)
        for seed in range(3 - count)
    ]
    bias_views = [guarded_view((count * width,), device=device, seed=5 + seed, offset=1) for seed in range(3 - count)]
    gradient = guarded_view((3, width), (width + 3, 1), torch.bfloat16, device=device, seed=9, offset=1)
    tensors = [view.requires_grad_() for view in (*views, *bias_views)]
    assert_gradients(form, tensors, gradient, 3, **TIGHT)
    for view in (*tensors, gradient):
        assert_guards_intact(view.detach())


@pytest.mark.parametrize("form", FORMS)
def test_every_pair_of_dtypes(form: str, device: str) -> None:
    for dtype, other_dtype in itertools.product(DTYPES, DTYPES):
        tensors = leaves_of(form, (5, 64), True, dtype, device, other_dtype)
        if form == "separate":
            tensors[1] = leaf(5, 64, dtype=other_dtype, device=device, seed=1)
        assert_gradients(form, tensors, torch.randn(5, 64, device=device).to(dtype), 5, **TIGHT)


@pytest.mark.parametrize("form", FORMS)
def test_a_clamp_that_bites_stops_the_gradient_and_equality_lets_it_pass(form: str, device: str) -> None:
    gate = torch.tensor([0.5, 1.0, 1.5, -5.0, 2.0, 0.5, 0.5, 0.5, -1.0], device=device)
    up = torch.tensor([0.5, 0.5, 0.5, 0.5, 3.0, 1.0, -1.0, -1.5, 2.0], device=device)
    passes_gate, passes_up = gate <= 1, up.abs() <= 1
    if form == "separate":
        tensors = [gate.requires_grad_(), up.requires_grad_()]
        dgate, dup = torch.autograd.grad(activate(form, tensors, **TIGHT).sum(), tensors)
    else:
        layout, order = form.split()
        pair = (gate, up) if order == "gate_first" else (up, gate)
        x = torch.cat(pair) if layout == "concat" else torch.stack(pair, -1).flatten()
        (dx,) = torch.autograd.grad(activate(form, [x.requires_grad_()], **TIGHT).sum(), x)
        first, second = dx.chunk(2) if layout == "concat" else (dx[::2], dx[1::2])
        dgate, dup = (first, second) if order == "gate_first" else (second, first)
    # An up of -1 and beta of 1 leave nothing for gate.
    nonzero = passes_gate & (up.clamp(-1, 1) != -1)
    assert torch.equal(dgate != 0, nonzero)
    assert torch.equal(dup != 0, passes_up)


@pytest.mark.parametrize("form", FORMS)
def test_biases_count_before_the_clamp(form: str, device: str) -> None:
    tensors = leaves_of(form, (4, 8), True, torch.float32, device)
    with torch.no_grad():
        for bias in tensors[len(tensors) // 2 :]:
            bias.fill_(100.0)
    gradients = torch.autograd.grad(activate(form, tensors, **TIGHT).sum(), tensors)
    assert all(bool((gradient == 0).all()) for gradient in gradients)


@pytest.mark.parametrize(("width", "numbers"), [(64, PLAIN), (64, TIGHT), (200, TIGHT)], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("poisoned_memory")
def test_a_program_with_many_rows_adds_up_all_of_them(
    width: int, form: str, numbers: dict[str, object], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = []

    def two_programs(*arguments: object) -> object:
        configs.append(dataclasses.replace(backward_config(*arguments), n_row_programs=2))
        return configs[-1]

    monkeypatch.setattr(_plans, "backward_config", two_programs)
    # More rows than two programs take in one step, and not a multiple of it.
    rows = 2 * 16 * 2 + 7 if width == 64 else 2 * 8 * 2 + 7
    tensors = leaves_of(form, (rows, width), True, torch.float32, device)
    assert_gradients(form, tensors, torch.randn(rows, width, device=device), rows, **numbers)
    assert all(config.n_row_programs * config.block_m < rows for config in configs)


def test_bias_gradients_sum_what_was_not_rounded(device: str) -> None:
    # Gradients of 1 + 2^-9 each, which bfloat16 rounds to 1.
    rows = 512
    gate = torch.full((rows, 8), 100.0, dtype=torch.bfloat16, device=device)
    up = torch.full((rows, 8), 2.0**-9, dtype=torch.bfloat16, device=device)
    bias = torch.zeros(8, device=device, requires_grad=True)
    bias_up = torch.zeros(8, device=device)
    (dbias,) = torch.autograd.grad(swiglu_with_bias(gate, up, bias, bias_up, beta=1.0).float().sum(), bias)
    assert_close(dbias, torch.full_like(dbias, rows + 1.0), rounding_tolerance(torch.float32, rows))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", ["expanded", "transposed", "sliced"])
def test_incoming_gradients_of_any_layout_are_read_right_and_left_alone(layout: str, form: str, device: str) -> None:
    for has_bias in (False, True):
        tensors = leaves_of(form, (2, 8, 96), has_bias, torch.bfloat16, device)
        gradient = {
            "expanded": torch.ones((), dtype=torch.bfloat16, device=device).expand(2, 8, 96),
            "transposed": torch.randn(2, 96, 8, device=device).to(torch.bfloat16).transpose(1, 2),
            "sliced": torch.randn(2, 8, 192, device=device).to(torch.bfloat16)[..., ::2],
        }[layout]
        before = gradient.clone()
        y = activate(form, tensors)
        first = torch.autograd.grad(y, tensors, gradient, retain_graph=True)
        again = torch.autograd.grad(y, tensors, gradient)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
        assert torch.equal(gradient, before)
        assert_gradients(form, tensors, gradient, 16)


@pytest.mark.parametrize("form", FORMS)
def test_sum_backward(form: str, device: str) -> None:
    tensors = leaves_of(form, (2, 16, 96), True, torch.float32, device)
    activate(form, tensors).sum().backward()
    exact_tensors = [exact(tensor) for tensor in tensors]
    activate(form, exact_tensors).sum().backward()
    for got, want in zip(tensors, exact_tensors, strict=True):
        assert_close(got.grad, want.grad.float(), gradient_tolerance(torch.float32, 32))


@pytest.mark.parametrize("form", FORMS)
def test_only_the_wanted_gradients(form: str, device: str) -> None:
    tensors = leaves_of(form, (4, 64), True, torch.float32, device)
    gradient = torch.randn(4, 64, device=device)
    whole = torch.autograd.grad(activate(form, tensors, **TIGHT), tensors, gradient)
    for wanted in itertools.product((False, True), repeat=len(tensors)):
        if not any(wanted):
            continue
        some = [tensor.detach().requires_grad_(want) for tensor, want in zip(tensors, wanted, strict=True)]
        activate(form, some, **TIGHT).backward(gradient)
        for tensor, want, full in zip(some, wanted, whole, strict=True):
            assert (tensor.grad is not None) == want
            assert tensor.grad is None or torch.equal(tensor.grad, full)


def backward_arguments(form: str, tensors: list[torch.Tensor]) -> tuple[object, ...]:
    """Arguments of the backward operator behind dy, up to the numbers."""
    plain = [tensor.detach() for tensor in tensors]
    if form == "separate":
        return (*plain, *(None,) * (4 - len(plain)), "separate", True)
    layout, order = form.split()
    return plain[0], None, plain[1] if len(plain) == 2 else None, None, layout, order == "gate_first"


@pytest.mark.parametrize("form", FORMS)
def test_bias_gradients_repeat_bit_for_bit(form: str, device: str) -> None:
    # The interpreter runs one program after the other, and cannot show more with more rows.
    rows = 7001 if device == "cuda" else 49
    tensors = leaves_of(form, (rows, 64), True, torch.bfloat16, device)
    dy = torch.randn(rows, 64, device=device).to(torch.bfloat16)
    arguments = (dy, *backward_arguments(form, tensors), 1.0, 0.0, None, True)
    first = swiglu_backward(*arguments)
    for _ in range(3):
        again = swiglu_backward(*arguments)
        assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_frozen_biases_cost_no_gradient(form: str, device: str) -> None:
    tensors = leaves_of(form, (4, 64), True, torch.float32, device)
    arguments = (torch.randn(4, 64, device=device), *backward_arguments(form, tensors), 1.702, 1.0, 1.0)
    whole = swiglu_backward(*arguments, True)
    alone = swiglu_backward(*arguments, False)
    assert torch.equal(whole[0], alone[0])
    assert torch.equal(whole[1], alone[1])
    sizes = (256, 256, 64, 64) if form == "separate" else (512, 0, 128, 0)
    assert [part.numel() for part in whole] == [*sizes]
    assert [part.numel() for part in alone] == [*sizes[:2], 0, 0]
    absent = swiglu_backward(
        arguments[0], *backward_arguments(form, tensors[: len(tensors) // 2]), 1.702, 1.0, 1.0, True
    )
    assert [part.numel() for part in absent] == [*sizes[:2], 0, 0]


@pytest.mark.parametrize("numbers", [PLAIN, TIGHT], ids=["plain", "tight"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("form", FORMS)
def test_second_derivatives(form: str, has_bias: bool, numbers: dict[str, object], device: str) -> None:
    def penalty(tensors: list[torch.Tensor]) -> torch.Tensor:
        loss = activate(form, tensors, **numbers).square().sum()
        return sum(part.square().sum() for part in torch.autograd.grad(loss, tensors, create_graph=True))

    tensors = leaves_of(form, (3, 16), has_bias, torch.float32, device)
    exact_tensors = [exact(tensor) for tensor in tensors]
    got = torch.autograd.grad(penalty(tensors), tensors)
    want = torch.autograd.grad(penalty(exact_tensors), exact_tensors)
    largest = max(float(part.abs().max()) for part in want)
    tolerance = rounding_tolerance(torch.float32, 16, magnitude=8 * largest)
    assert_close(got, tuple(part.float() for part in want), tolerance)


@pytest.mark.parametrize(("alpha", "limit"), [(1.0, None), (1.702, 7.0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("few_programs")
def test_every_finite_gate_of_16_bits(dtype: torch.dtype, alpha: float, limit: float | None, device: str) -> None:
    gate = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
    gate = torch.where(gate.isfinite(), gate, 0.0).view(64, 1024).requires_grad_()
    up = torch.full_like(gate, 0.75, requires_grad=True)
    numbers = {"alpha": alpha, "beta": 0.0, "limit": limit}
    ones = torch.ones_like(gate)
    dgate, dup = torch.autograd.grad(swiglu_fused(gate, up, **numbers), (gate, up), ones)
    assert dgate.isfinite().all()
    assert dup.isfinite().all()
    exact_gate, exact_up = exact(gate), exact(up)
    want = torch.autograd.grad(swiglu_torch(exact_gate, exact_up, **numbers), (exact_gate, exact_up), ones.double())
    # exp turns the rounding of its argument, up to 88, into as many roundings of its result.
    relative = rounding_tolerance(dtype, 88**2)
    argument = alpha * gate.detach().double()
    for got, right in zip((dgate, dup), want, strict=True):
        right = right.to(dtype)
        # The gradient of gate changes its sign near -1.28; elsewhere nothing cancels.
        crosses = (argument + 1.28).abs() < 0.7
        assert_close(got[~crosses], right[~crosses], relative)
        assert_close(got[crosses], right[crosses], gradient_tolerance(dtype))


def test_bad_values_have_the_gradients_of_the_reference(device: str) -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.5, 3.0], device=device)
    for limit in (None, 1.0):
        gate = values.repeat_interleave(5).requires_grad_()
        up = values.repeat(5).requires_grad_()
        got = torch.autograd.grad(swiglu_fused(gate, up, limit=limit).sum(), (gate, up))
        exact_gate, exact_up = exact(gate), exact(up)
        want = torch.autograd.grad(swiglu_torch(exact_gate, exact_up, limit=limit).sum(), (exact_gate, exact_up))
        assert_close(got, tuple(part.float() for part in want), gradient_tolerance(torch.float32))


def test_operators_without_a_derivative_refuse_gradients(device: str) -> None:
    dy, gate = torch.randn(2, 4, 64, device=device)
    up = leaf(4, 64, dtype=torch.float32, device=device, seed=0)
    arguments = (dy, gate, up, None, None, "separate", True, 1.0, 0.0, None, True)
    with pytest.raises(NotImplementedError, match="swiglu_backward has no derivative"):
        torch.ops.tk_swiglu.swiglu_backward(*arguments)
    with torch.no_grad():
        torch.ops.tk_swiglu.swiglu_backward(*arguments)


@pytest.mark.parametrize("name", ["halves", "transposed", "expanded"])
def test_strided_inputs(name: str, device: str) -> None:
    base = leaf(6, 704, dtype=torch.bfloat16, device=device, seed=0)
    views = {
        "halves": lambda x: tuple(x.chunk(2, -1)),
        "transposed": lambda x: (x[:, :6].t(), x[:, 6:12].t()),
        "expanded": lambda x: (x[:1, :352].expand(6, 352), x[:, 352:]),
    }[name]
    pair, exact_pair = views(base), views(exact(base))
    gradient = torch.randn(pair[0].shape, device=device).to(torch.bfloat16)
    got = torch.autograd.grad(swiglu_fused(*pair, **TIGHT), pair, gradient)
    want = torch.autograd.grad(swiglu_torch(*exact_pair, **TIGHT), exact_pair, gradient.double())
    assert all(part.is_contiguous() for part in got)
    assert_close(got, tuple(part.to(torch.bfloat16) for part in want), gradient_tolerance(torch.bfloat16))


def test_a_tensor_that_is_gate_and_up_gets_both_gradients(device: str) -> None:
    x = leaf(5, 64, dtype=torch.float32, device=device, seed=0)
    exact_x = exact(x)
    swiglu_fused(x, x).sum().backward()
    swiglu_torch(exact_x, exact_x).sum().backward()
    assert_close(x.grad, exact_x.grad.float(), gradient_tolerance(torch.float32))
