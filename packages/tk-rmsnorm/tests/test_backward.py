"""Gradients, against float64 autograd through the reference."""

import dataclasses

import pytest
import torch

from tk_kernel_core.launch import launch_target
from tk_kernel_core.numerics import rounding_tolerance
from tk_rmsnorm import _plans, fused_add_rmsnorm, fused_add_rmsnorm_, rmsnorm, rmsnorm_residual_fused, rmsnorm_torch
from tk_rmsnorm._launch import backward_config
from tk_rmsnorm._plans import rmsnorm_backward
from tk_rmsnorm._reference import fused_add_rmsnorm_torch, rmsnorm_residual_torch
from tk_testkit.close import assert_close

# The last is read in tiles, the one before just in one.
HIDDEN_SIZES = (1, 40, 128, 2520, 4097, 8200)


def leaf(*shape: int, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(device=device, dtype=dtype).requires_grad_()


def exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().double().requires_grad_()


def gradient_tolerance(dtype: torch.dtype, terms: int, roundings: int = 1) -> object:
    # Gradients are differences of terms of about this size.
    return rounding_tolerance(dtype, terms, roundings=roundings, magnitude=8.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("hidden_size", HIDDEN_SIZES)
def test_norm(hidden_size: int, dtype: torch.dtype, device: str) -> None:
    x = leaf(2, 5, hidden_size, dtype=dtype, device=device, seed=0)
    weight = leaf(hidden_size, dtype=dtype, device=device, seed=1)
    gradient = torch.randn_like(x)
    rmsnorm(x, weight, 1e-5, weight_offset=0.5).backward(gradient)
    exact_x, exact_weight = exact(x), exact(weight)
    rmsnorm_torch(exact_x, exact_weight, 1e-5, weight_offset=0.5).backward(gradient.double())
    tolerance = gradient_tolerance(dtype, hidden_size)
    assert_close((x.grad, weight.grad), (exact_x.grad.to(dtype), exact_weight.grad.to(dtype)), tolerance)


@pytest.mark.parametrize("hidden_size", [128, 20_000])
def test_llama_casting(hidden_size: int, device: str) -> None:
    x = leaf(40, hidden_size, dtype=torch.bfloat16, device=device, seed=0)
    weight = leaf(hidden_size, dtype=torch.bfloat16, device=device, seed=1)
    gradient = torch.randn_like(x)
    rmsnorm(x, weight, casting="llama").backward(gradient)
    exact_x, exact_weight = exact(x), exact(weight)
    normed = exact_x * torch.rsqrt(exact_x.square().mean(-1, keepdim=True) + 1e-6)
    rounded = normed + (normed.detach().to(torch.bfloat16).double() - normed.detach())
    (rounded * exact_weight).backward(gradient.double())
    want = exact_x.grad.to(torch.bfloat16), exact_weight.grad.to(torch.bfloat16)
    # A normalised value may round the other way, which moves the sum over rows by one such rounding.
    assert_close(x.grad, want[0], gradient_tolerance(torch.bfloat16, hidden_size))
    assert_close(weight.grad, want[1], gradient_tolerance(torch.bfloat16, hidden_size, roundings=2))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32)], ids=str)
@pytest.mark.parametrize("function", [fused_add_rmsnorm, fused_add_rmsnorm_], ids=lambda f: f.__name__)
def test_both_outputs_of_the_fused_add_carry_gradients(
    function: object, dtypes: tuple[torch.dtype, torch.dtype], device: str
) -> None:
    x = leaf(6, 300, dtype=dtypes[0], device=device, seed=0)
    residual = leaf(6, 300, dtype=dtypes[1], device=device, seed=1)
    weight = leaf(300, dtype=dtypes[0], device=device, seed=2)
    # In place needs tensors that are no leaves.
    y, total = function(x * 1, residual * 1, weight)
    dy, dtotal = torch.randn_like(y), torch.randn_like(total)
    torch.autograd.backward((y, total), (dy, dtotal))
    exact_x, exact_residual, exact_weight = exact(x), exact(residual), exact(weight)
    torch.autograd.backward(
        fused_add_rmsnorm_torch(exact_x, exact_residual, exact_weight), (dy.double(), dtotal.double())
    )
    tolerance = gradient_tolerance(dtypes[0], 300, roundings=2)
    for got, want in ((x, exact_x), (residual, exact_residual), (weight, exact_weight)):
        assert got.grad is not None
        assert_close(got.grad, want.grad.to(got.dtype), tolerance)


@pytest.mark.parametrize("hidden_size", [64, 9000])
def test_a_program_with_many_rows_adds_up_all_of_them(
    hidden_size: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_programs(*arguments: object) -> object:
        return dataclasses.replace(backward_config(*arguments), n_programs=2)

    monkeypatch.setattr(_plans, "backward_config", two_programs)
    # More rows than two programs take in two steps, and not a multiple of it.
    rows = 4 * backward_config(1, hidden_size, 12, launch_target(torch.device(device))).block_m + 3
    x = leaf(rows, hidden_size, dtype=torch.float32, device=device, seed=0)
    residual = leaf(rows, hidden_size, dtype=torch.float32, device=device, seed=1)
    weight = leaf(hidden_size, dtype=torch.float32, device=device, seed=2)
    gradients = torch.randn(2, rows, hidden_size, device=device)
    torch.autograd.backward(fused_add_rmsnorm(x, residual, weight), tuple(gradients))
    exact_x, exact_residual, exact_weight = exact(x), exact(residual), exact(weight)
    torch.autograd.backward(fused_add_rmsnorm_torch(exact_x, exact_residual, exact_weight), tuple(gradients.double()))
    tolerance = gradient_tolerance(torch.float32, max(rows, hidden_size))
    for got, want in ((x, exact_x), (residual, exact_residual), (weight, exact_weight)):
        assert_close(got.grad, want.grad.float(), tolerance)


def test_each_output_alone_carries_its_gradient(device: str) -> None:
    for which in (0, 1):
        x = leaf(4, 64, dtype=torch.float32, device=device, seed=0)
        residual = leaf(4, 64, dtype=torch.float32, device=device, seed=1)
        weight = leaf(64, dtype=torch.float32, device=device, seed=2)
        gradient = torch.randn(4, 64, device=device)
        fused_add_rmsnorm(x, residual, weight)[which].backward(gradient)
        exact_x, exact_residual = exact(x), exact(residual)
        fused_add_rmsnorm_torch(exact_x, exact_residual, exact(weight))[which].backward(gradient.double())
        tolerance = gradient_tolerance(torch.float32, 64)
        assert_close(x.grad, exact_x.grad.float(), tolerance)
        assert_close(residual.grad, exact_residual.grad.float(), tolerance)


def test_norm_of_a_sum(device: str) -> None:
    x = leaf(4, 64, dtype=torch.float32, device=device, seed=0)
    residual = leaf(4, 64, dtype=torch.float32, device=device, seed=1)
    weight = leaf(64, dtype=torch.float32, device=device, seed=2)
    gradient = torch.randn(4, 64, device=device)
    rmsnorm_residual_fused(x, residual, weight).backward(gradient)
    exact_x, exact_residual, exact_weight = exact(x), exact(residual), exact(weight)
    rmsnorm_residual_torch(exact_x, exact_residual, exact_weight).backward(gradient.double())
    tolerance = gradient_tolerance(torch.float32, 64)
    assert_close(x.grad, exact_x.grad.float(), tolerance)
    assert_close(residual.grad, exact_residual.grad.float(), tolerance)
    assert_close(weight.grad, exact_weight.grad.float(), tolerance)


@pytest.mark.parametrize("layout", ["expanded", "transposed", "sliced"])
def test_incoming_gradients_of_any_layout_are_read_right_and_left_alone(layout: str, device: str) -> None:
    x = leaf(2, 8, 256, dtype=torch.bfloat16, device=device, seed=0)
    gradient = {
        "expanded": torch.tensor(1.0, device=device).expand(2, 8, 256),
        "transposed": torch.randn(2, 256, 8, device=device).transpose(1, 2),
        "sliced": torch.randn(2, 8, 512, device=device)[..., ::2],
    }[layout].to(torch.bfloat16)
    if layout == "expanded":
        gradient = torch.ones((), dtype=torch.bfloat16, device=device).expand(2, 8, 256)
    before = gradient.clone()
    y = rmsnorm(x)
    first = torch.autograd.grad(y, x, gradient, retain_graph=True)[0]
    again = torch.autograd.grad(y, x, gradient)[0]
    assert torch.equal(first, again)
    assert torch.equal(gradient, before)
    exact_x = exact(x)
    rmsnorm_torch(exact_x).backward(gradient.double())
    assert_close(first, exact_x.grad.to(torch.bfloat16), gradient_tolerance(torch.bfloat16, 256))


def test_sum_backward(device: str) -> None:
    x = leaf(2, 16, 256, dtype=torch.float32, device=device, seed=0)
    weight = leaf(256, dtype=torch.float32, device=device, seed=1)
    rmsnorm(x, weight).sum().backward()
    exact_x, exact_weight = exact(x), exact(weight)
    rmsnorm_torch(exact_x, exact_weight).sum().backward()
    tolerance = gradient_tolerance(torch.float32, 256)
    assert_close((x.grad, weight.grad), (exact_x.grad.float(), exact_weight.grad.float()), tolerance)


def test_a_zero_weight_gives_no_nan(device: str) -> None:
    x = leaf(4, 64, dtype=torch.float32, device=device, seed=0)
    weight = leaf(64, dtype=torch.float32, device=device, seed=1)
    with torch.no_grad():
        weight[3] = 0
    rmsnorm(x, weight).sum().backward()
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    assert weight.grad[3] != 0


def test_only_the_wanted_gradients(device: str) -> None:
    x = leaf(4, 64, dtype=torch.float32, device=device, seed=0)
    weight = leaf(64, dtype=torch.float32, device=device, seed=1)
    rmsnorm(x.detach(), weight).sum().backward()
    assert weight.grad is not None
    weight.grad = None
    rmsnorm(x, weight.detach()).sum().backward()
    assert x.grad is not None
    assert weight.grad is None


def test_weight_gradients_repeat_bit_for_bit(device: str) -> None:
    x = leaf(700, 64, dtype=torch.bfloat16, device=device, seed=0)
    weight = leaf(64, dtype=torch.bfloat16, device=device, seed=1)
    dy = torch.randn_like(x)
    numbers = {"eps": 1e-6, "weight_offset": 0.0, "casting": "fp32"}
    first = rmsnorm_backward(dy, None, x.detach(), weight.detach(), **numbers)
    for _ in range(3):
        again = rmsnorm_backward(dy, None, x.detach(), weight.detach(), **numbers)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_second_derivatives(device: str) -> None:
    def penalty(norm: object, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        (dx, dweight) = torch.autograd.grad(norm(x, weight).square().sum(), (x, weight), create_graph=True)
        return dx.square().sum() + dweight.square().sum()

    x = leaf(3, 16, dtype=torch.float32, device=device, seed=0)
    weight = leaf(16, dtype=torch.float32, device=device, seed=1)
    exact_x, exact_weight = exact(x), exact(weight)
    got = torch.autograd.grad(penalty(lambda x, w: rmsnorm(x, w, 1e-3), x, weight), (x, weight))
    want = torch.autograd.grad(
        penalty(lambda x, w: rmsnorm_torch(x, w, 1e-3), exact_x, exact_weight), (exact_x, exact_weight)
    )
    largest = max(float(part.abs().max()) for part in want)
    tolerance = rounding_tolerance(torch.float32, 16, magnitude=8 * largest)
    assert_close(got, tuple(part.float() for part in want), tolerance)


def test_in_place_writes_are_seen_by_autograd(device: str) -> None:
    leaf_x = leaf(4, 64, dtype=torch.float32, device=device, seed=0)
    hidden = leaf_x * 1
    loss = (hidden * hidden).sum()
    with torch.no_grad():
        fused_add_rmsnorm_(hidden, torch.ones(4, 64, device=device))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        x, residual = torch.ones(2, 4, 64, device=device)
        fused_add_rmsnorm_(x, residual)
    with torch.no_grad(), pytest.raises(RuntimeError, match="must not be inference tensors outside of inference mode"):
        fused_add_rmsnorm_(x, residual)


def test_the_backward_operator_checks_what_it_is_given() -> None:
    x, weight = torch.ones(4, 8), torch.ones(8)
    numbers = (1e-6, 0.0, "fp32", True)
    for dy, dsum, error, message in (
        (x[:3], None, ValueError, r"dy must have shape \(4, 8\), got \(3, 8\)"),
        (x, x[:, :4], ValueError, r"dsum must have shape \(4, 8\), got \(4, 4\)"),
        (x.int(), None, TypeError, "dy must have dtype float16, bfloat16, float32, got int32"),
    ):
        with pytest.raises(error, match=message):
            torch.ops.tk_rmsnorm.rmsnorm_backward(dy, dsum, x, weight, *numbers)


def test_operators_without_a_derivative_refuse_gradients(device: str) -> None:
    x, residual = torch.randn(2, 4, 64, device=device)
    weight = leaf(64, dtype=torch.float32, device=device, seed=0)
    numbers = (1e-6, 0.0, "fp32")
    with pytest.raises(NotImplementedError, match="fused_add_rmsnorm_ has no derivative"):
        torch.ops.tk_rmsnorm.fused_add_rmsnorm_(x, residual, weight, *numbers)
    with pytest.raises(NotImplementedError, match="rmsnorm_backward has no derivative"):
        torch.ops.tk_rmsnorm.rmsnorm_backward(x, None, residual, weight, *numbers, True)
    with torch.no_grad():
        torch.ops.tk_rmsnorm.fused_add_rmsnorm_(x, residual, weight, *numbers)


def test_a_frozen_weight_costs_no_gradient(device: str) -> None:
    x, weight = torch.randn(4, 64, device=device), torch.randn(64, device=device)
    numbers = {"eps": 1e-6, "weight_offset": 0.0, "casting": "fp32"}
    dx, dweight = rmsnorm_backward(x, None, x, weight, **numbers)
    dx_alone, nothing = rmsnorm_backward(x, None, x, weight, **numbers, wants_dweight=False)
    assert torch.equal(dx, dx_alone)
    assert (dweight.numel(), nothing.numel()) == (64, 0)


def test_the_gradient_of_a_large_float16_sum_is_finite(device: str) -> None:
    x = torch.full((2, 64), 40_000.0, dtype=torch.float16, device=device, requires_grad=True)
    rmsnorm_residual_fused(x, x.detach()).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hidden_size", [130, 9000])
def test_strided_inputs_and_other_weight_dtypes(hidden_size: int, dtype: torch.dtype, device: str) -> None:
    base = leaf(3, 4, hidden_size + 6, dtype=dtype, device=device, seed=0)
    x = base[:, :2, :hidden_size]
    weight = leaf(hidden_size, dtype=torch.float32, device=device, seed=1)
    gradient = torch.randn(3, 2, hidden_size, device=device).to(dtype)
    dx, dweight = torch.autograd.grad(rmsnorm(x, weight), (x, weight), gradient)
    exact_x, exact_weight = exact(x), exact(weight)
    want = torch.autograd.grad(rmsnorm_torch(exact_x, exact_weight), (exact_x, exact_weight), gradient.double())
    assert_close(dx, want[0].to(dtype), gradient_tolerance(dtype, hidden_size))
    assert_close(dweight, want[1].float(), gradient_tolerance(torch.float32, hidden_size))


def test_in_place_on_a_leaf_says_so(device: str) -> None:
    x = leaf(4, 64, dtype=torch.float32, device=device, seed=0)
    with pytest.raises(RuntimeError, match="must not be leaves that require a gradient"):
        fused_add_rmsnorm_(x, torch.ones(4, 64, device=device))
