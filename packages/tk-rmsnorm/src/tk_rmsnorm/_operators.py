"""The operators `torch.ops.tk_rmsnorm.*`: for torch.compile, export, fake tensors and autograd."""

from __future__ import annotations

import functools
from typing import Any

import torch

from tk_kernel_core.registration import define_operator
from tk_rmsnorm import _plans
from tk_rmsnorm._reference import rmsnorm_backward_torch

_LIBRARY = torch.library.Library("tk_rmsnorm", "DEF")
_NUMBERS = "Tensor? weight, float eps, float weight_offset, str casting"


def _empty(like: torch.Tensor) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def _fake_norm(x: Any, weight: Any, eps: float, weight_offset: float, casting: str) -> Any:
    _plans.check_arguments(x, None, weight, eps, weight_offset, casting, "norm")
    return _empty(x)


def _fake_residual(x: Any, residual: Any, weight: Any, eps: float, weight_offset: float, casting: str) -> Any:
    _plans.check_arguments(x, residual, weight, eps, weight_offset, casting, "norm_of_sum")
    return _empty(x)


def _fake_fused_add(x: Any, residual: Any, weight: Any, eps: float, weight_offset: float, casting: str) -> Any:
    return _fake_residual(x, residual, weight, eps, weight_offset, casting), _empty(residual)


def _fake_in_place(x: Any, residual: Any, weight: Any, eps: float, weight_offset: float, casting: str) -> None:
    _plans.check_arguments(x, residual, weight, eps, weight_offset, casting, "norm_of_sum")


def _fake_codes(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(x.shape, dtype=torch.int8, device=x.device),
        torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device),
    )


def _fake_quant(x: Any, weight: Any, eps: float, weight_offset: float, casting: str) -> Any:
    _plans.check_arguments(x, None, weight, eps, weight_offset, casting, "codes")
    return _fake_codes(x)


def _fake_fused_add_quant(x: Any, residual: Any, weight: Any, eps: float, weight_offset: float, casting: str) -> Any:
    _plans.check_arguments(x, residual, weight, eps, weight_offset, casting, "codes_and_sum")
    return *_fake_codes(x), _empty(residual)


def _fake_backward(
    dy: Any, dsum: Any, x: Any, weight: Any, eps: float, weight_offset: float, casting: str, wants_dweight: bool
) -> Any:
    return _empty(x), _empty(weight) if wants_dweight and weight is not None else x.new_empty(0)


rmsnorm_backward = define_operator(
    _LIBRARY,
    f"rmsnorm_backward(Tensor dy, Tensor? dsum, Tensor x, {_NUMBERS}, bool wants_dweight) -> (Tensor, Tensor)",
    _plans.rmsnorm_backward,
    _fake_backward,
)


def _gradients(ctx: Any, dy: Any, dsum: Any, x: torch.Tensor, weight: Any, wants_dweight: bool) -> tuple[Any, Any]:
    """Gradients of what was normalised and, where it is wanted, of the weight."""
    if dy is None:
        return dsum, None
    if torch.is_grad_enabled():
        # A second derivative is wanted: differentiate a formula that PyTorch can differentiate again.
        return rmsnorm_backward_torch(dy, dsum, x, weight, *ctx.numbers)
    dx, dweight = rmsnorm_backward(dy, dsum, x, weight, *ctx.numbers, wants_dweight)
    return dx, dweight if wants_dweight else None


def _save_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, *ctx.numbers = inputs
    ctx.save_for_backward(x, weight)


def _backward_norm(ctx: Any, dy: Any) -> Any:
    x, weight = ctx.saved_tensors
    dx, dweight = _gradients(ctx, dy, None, x, weight, ctx.needs_input_grad[1])
    return dx, dweight, None, None, None


def _save_residual(ctx: Any, inputs: Any, output: Any) -> None:
    x, residual, weight, *ctx.numbers = inputs
    ctx.save_for_backward(x, residual, weight)


def _backward_residual(ctx: Any, dy: Any) -> Any:
    x, residual, weight = ctx.saved_tensors
    # In fp32, where the sum cannot overflow; like the kernel, which never rounds it.
    total, dweight = _gradients(ctx, dy, None, x.float() + residual.float(), weight, ctx.needs_input_grad[2])
    return total.to(x.dtype), total.to(residual.dtype), dweight, None, None, None


def _save_fused_add(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, weight, *ctx.numbers = inputs
    ctx.x_dtype = x.dtype
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)


def _backward_fused_add(ctx: Any, dy: Any, dsum: Any) -> Any:
    total, weight = ctx.saved_tensors
    dtotal, dweight = _gradients(ctx, dy, dsum, total, weight, ctx.needs_input_grad[2])
    if dtotal is None:
        return (None,) * 6
    return dtotal.to(ctx.x_dtype), dtotal.to(total.dtype), dweight, None, None, None


rmsnorm = define_operator(
    _LIBRARY,
    f"rmsnorm(Tensor x, {_NUMBERS}) -> Tensor",
    lambda x, weight, eps, weight_offset, casting: _plans.forward(x, None, weight, eps, weight_offset, casting, "norm"),
    _fake_norm,
    backward=_backward_norm,
    setup_context=_save_norm,
)
rmsnorm_residual = define_operator(
    _LIBRARY,
    f"rmsnorm_residual(Tensor x, Tensor residual, {_NUMBERS}) -> Tensor",
    functools.partial(_plans.forward, form="norm_of_sum"),
    _fake_residual,
    backward=_backward_residual,
    setup_context=_save_residual,
)
fused_add_rmsnorm = define_operator(
    _LIBRARY,
    f"fused_add_rmsnorm(Tensor x, Tensor residual, {_NUMBERS}) -> (Tensor, Tensor)",
    functools.partial(_plans.forward, form="norm_and_sum"),
    _fake_fused_add,
    backward=_backward_fused_add,
    setup_context=_save_fused_add,
)
fused_add_rmsnorm_ = define_operator(
    _LIBRARY,
    f"fused_add_rmsnorm_(Tensor(a!) x, Tensor(b!) residual, {_NUMBERS}) -> ()",
    functools.partial(_plans.forward, form="in_place"),
    _fake_in_place,
)
rmsnorm_quant_int8 = define_operator(
    _LIBRARY,
    f"rmsnorm_quant_int8(Tensor x, {_NUMBERS}) -> (Tensor, Tensor)",
    lambda x, weight, eps, weight_offset, casting: _plans.forward(
        x, None, weight, eps, weight_offset, casting, "codes"
    ),
    _fake_quant,
)
fused_add_rmsnorm_quant_int8 = define_operator(
    _LIBRARY,
    f"fused_add_rmsnorm_quant_int8(Tensor x, Tensor residual, {_NUMBERS}) -> (Tensor, Tensor, Tensor)",
    functools.partial(_plans.forward, form="codes_and_sum"),
    _fake_fused_add_quant,
)
