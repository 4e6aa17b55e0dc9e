"""Public functions."""

from __future__ import annotations

from typing import Any, Literal

import torch

from tk_kernel_core.recent import RecentPlans
from tk_kernel_core.registration import takes_operator
from tk_rmsnorm import _operators, _plans
from tk_rmsnorm._plans import Form, Plan

Casting = Literal["fp32", "llama"]
_RECENT: RecentPlans[Plan] = RecentPlans()


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    casting: Casting = "fp32",
) -> torch.Tensor:
    """Normalise the last dimension by its root mean square.

    `y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset)`, in fp32 whatever the dtypes. A row whose mean
    square overflows fp32 gives zeros, as in PyTorch.

    Args:
        x: [..., hidden_size], float16, bfloat16 or float32, any strides.
        weight: [hidden_size], any of these dtypes; None for ones (without the offset).
        eps: Added to the mean square; at least 0.
        weight_offset: Added to the weight in fp32; 1.0 for Gemma.
        casting: `fp32` rounds once, at the end, and equals torch.nn.functional.rms_norm; `llama` rounds the
            normalised value to `x.dtype` before it is multiplied by the weight, as Llama's modules do.

    Returns:
        A new contiguous tensor with the shape, dtype and device of `x`.

    Raises:
        TypeError: An argument is no tensor or has an unsupported dtype.
        ValueError: Shapes or devices do not fit, or a number lies outside its range.

    Source:
        Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    """
    y: torch.Tensor = _call("norm", x, None, weight, eps, weight_offset, casting)
    return y


def rmsnorm_residual_fused(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    casting: Casting = "fp32",
) -> torch.Tensor:
    """Normalise `x + residual`; the sum itself is not returned (see `fused_add_rmsnorm`).

    Args:
        x: [..., hidden_size], float16, bfloat16 or float32, any strides.
        residual: Same shape as `x`, any of these dtypes.
        weight: [hidden_size], or None.
        eps: Added to the mean square; at least 0.
        weight_offset: Added to the weight in fp32.
        casting: As for `rmsnorm`.

    Returns:
        A new contiguous tensor with the shape, dtype and device of `x`.

    Raises:
        TypeError: An argument is no tensor or has an unsupported dtype.
        ValueError: Shapes or devices do not fit, or a number lies outside its range.
    """
    y: torch.Tensor = _call("norm_of_sum", x, residual, weight, eps, weight_offset, casting)
    return y


def fused_add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    casting: Casting = "fp32",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add `x` to the residual stream and normalise the sum, in one pass.

    The sum is formed in fp32, normalised unrounded, and returned rounded once.

    Args:
        x: [..., hidden_size], float16, bfloat16 or float32, any strides.
        residual: Same shape as `x`, any of these dtypes.
        weight: [hidden_size], or None.
        eps: Added to the mean square; at least 0.
        weight_offset: Added to the weight in fp32.
        casting: As for `rmsnorm`.

    Returns:
        `(y, new_residual)`: new contiguous tensors with the dtypes of `x` and of `residual`.

    Raises:
        TypeError: An argument is no tensor or has an unsupported dtype.
        ValueError: Shapes or devices do not fit, or a number lies outside its range.
    """
    y_and_sum: tuple[torch.Tensor, torch.Tensor] = _call(
        "norm_and_sum", x, residual, weight, eps, weight_offset, casting
    )
    return y_and_sum


def fused_add_rmsnorm_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    casting: Casting = "fp32",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add and normalise in place: `residual` becomes the sum and `x` becomes its norm.

    The same numbers as `fused_add_rmsnorm`, without new tensors: the contract of serving engines.

    Args:
        x: [..., hidden_size], float16, bfloat16 or float32; overwritten by the norm.
        residual: Same shape as `x`, any of these dtypes; overwritten by the sum.
        weight: [hidden_size], or None.
        eps: Added to the mean square; at least 0.
        weight_offset: Added to the weight in fp32.
        casting: As for `rmsnorm`.

    Returns:
        `(x, residual)`, the same tensors.

    Raises:
        TypeError: An argument is no tensor or has an unsupported dtype.
        ValueError: Shapes or devices do not fit, a number lies outside its range, or `x` and `residual`
            share memory or are expanded.
        RuntimeError: `x` or `residual` is a leaf that requires a gradient.
    """
    if x is residual:
        raise ValueError("x and residual are both written in place and must not share memory")
    _call("in_place", x, residual, weight, eps, weight_offset, casting)
    return x, residual


def rmsnorm_quant_int8(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    casting: Casting = "fp32",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the last dimension and quantise the norm to int8, row by row, in one kernel.

    What `rmsnorm` gives, rounded to `x.dtype`, is quantised symmetrically: `x_scale = absmax / 127` and
    `codes = round(norm * (127 / absmax))` in fp32, halves to even. Nothing is written but codes and scales, which are
    what `tk_int8_gemm.w8a8_gemm(codes, …, x_scale=x_scale, out_dtype=…)` takes. A row of the norm whose magnitudes all
    lie below 2**-110 has scale 1 and codes 0; one with an infinity or NaN has scale NaN and codes 0.

    Args:
        x: [..., hidden_size] with hidden_size from 1, float16, bfloat16 or float32, any strides.
        weight: As for `rmsnorm`.
        eps: As for `rmsnorm`.
        weight_offset: As for `rmsnorm`.
        casting: As for `rmsnorm`.

    Returns:
        `(codes, x_scale)`: int8 with the shape of `x`, and float32 with that shape without its last dimension; new
        and contiguous.

    Raises:
        TypeError: An argument is no tensor or has an unsupported dtype.
        ValueError: Shapes or devices do not fit, or a number lies outside its range.
        NotImplementedError: A gradient is wanted.
    """
    codes_and_scale: tuple[torch.Tensor, torch.Tensor] = _call("codes", x, None, weight, eps, weight_offset, casting)
    return codes_and_scale


def fused_add_rmsnorm_quant_int8(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    casting: Casting = "fp32",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add `x` to the residual stream, and normalise and quantise the sum, in one kernel.

    What `fused_add_rmsnorm` gives, its norm quantised as by `rmsnorm_quant_int8`.

    Args:
        x: [..., hidden_size] with hidden_size from 1, float16, bfloat16 or float32, any strides.
        residual: Same shape as `x`, any of these dtypes.
        weight: As for `rmsnorm`.
        eps: As for `rmsnorm`.
        weight_offset: As for `rmsnorm`.
        casting: As for `rmsnorm`.

    Returns:
        `(codes, x_scale, new_residual)`: as from `rmsnorm_quant_int8`, and the sum with the dtype of `residual`; new
        and contiguous.

    Raises:
        TypeError: An argument is no tensor or has an unsupported dtype.
        ValueError: Shapes or devices do not fit, or a number lies outside its range.
        NotImplementedError: A gradient is wanted.
    """
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _call(
        "codes_and_sum", x, residual, weight, eps, weight_offset, casting
    )
    return results


def _call(form: Form, x: Any, residual: Any, weight: Any, eps: float, weight_offset: float, casting: str) -> Any:
    tensors: tuple[Any, ...] = (x, weight) if residual is None else (x, residual, weight)
    if weight is None:
        tensors = tensors[:-1]
    known_as = form, weight is None, eps, weight_offset, casting
    plan = _RECENT.find(known_as, tensors)
    if plan is None:
        if takes_operator(*tensors):
            return _call_operator(form, x, residual, weight, eps, weight_offset, casting)
        plan = _plans.plan_of(x, residual, weight, eps, weight_offset, casting, form)
        _RECENT.remember(known_as, tensors, plan)
    return plan(x, residual, weight)


def _call_operator(
    form: Form, x: Any, residual: Any, weight: Any, eps: float, weight_offset: float, casting: str
) -> Any:
    if not torch.compiler.is_compiling():
        # Before the dispatcher words the error; while compiling, the fake implementation checks.
        _plans.check_arguments(x, residual, weight, eps, weight_offset, casting, form)
    if form == "norm":
        return _operators.rmsnorm(x, weight, eps, weight_offset, casting)
    if form == "norm_of_sum":
        return _operators.rmsnorm_residual(x, residual, weight, eps, weight_offset, casting)
    if form == "norm_and_sum":
        return _operators.fused_add_rmsnorm(x, residual, weight, eps, weight_offset, casting)
    if form == "codes":
        return _operators.rmsnorm_quant_int8(x, weight, eps, weight_offset, casting)
    if form == "codes_and_sum":
        return _operators.fused_add_rmsnorm_quant_int8(x, residual, weight, eps, weight_offset, casting)
    if torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in (x, residual, weight)
    ):
        # Before anything is written.
        for tensor in (x, residual):
            if tensor.is_leaf and tensor.requires_grad:
                raise RuntimeError("x and residual are written in place and must not be leaves that require a gradient")
        y, total = _operators.fused_add_rmsnorm(x, residual, weight, eps, weight_offset, casting)
        # Autograd tracks in-place writes through copy_.
        x.copy_(y)
        residual.copy_(total)
        return None
    return _operators.fused_add_rmsnorm_(x, residual, weight, eps, weight_offset, casting)
