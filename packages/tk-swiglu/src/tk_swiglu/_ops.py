"""Public functions."""

from __future__ import annotations

from typing import Any, Literal

import torch

from tk_kernel_core.checks import check_choice, check_tensor
from tk_kernel_core.recent import RecentPlans
from tk_kernel_core.registration import takes_operator
from tk_swiglu import _operators, _plans, _quant_plans
from tk_swiglu._plans import Form, Plan

Layout = Literal["concat", "interleaved"]
Order = Literal["gate_first", "up_first"]
_RECENT: RecentPlans[Plan] = RecentPlans()
_RECENT_QUANT: RecentPlans[_quant_plans.Plan] = RecentPlans()


def swiglu_fused(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply the SiLU of the gate by the up projection: what a gated MLP does between its matrix products.

    `y = g * sigmoid(alpha * g) * (u + beta)`, with g the gate clamped from above by `limit` and u = `up` clamped
    to [-limit, limit]; in fp32 whatever the dtypes, and rounded once. With the defaults that is
    `silu(gate) * up`; gpt-oss has alpha 1.702, beta 1 and limit 7. NaN stays NaN. A gate of minus infinity gives
    NaN, as in PyTorch.

    Args:
        gate: [..., width], float16, bfloat16 or float32, any strides.
        up: Same shape, any of these dtypes and any strides.
        alpha: Slope inside the sigmoid.
        beta: Added to u.
        limit: Bound of the clamps, greater than 0; None for no clamps.
        out: Where to write the result: a tensor with the shape, dtype and device of `gate`. It may be `gate` or
            `up` itself.

    Returns:
        `out`, or a new contiguous tensor with the shape, dtype and device of `gate`.

    Raises:
        TypeError: An argument is no tensor or number, or has an unsupported dtype.
        ValueError: Shapes or devices do not fit, a number lies outside its range, or `out` shares memory with
            an input without being the same elements.
        RuntimeError: `out` is given where a gradient is wanted.

    Source:
        Shazeer, "GLU Variants Improve Transformer", 2020; the clamps and the slope are those of gpt-oss.
    """
    return _swiglu(gate, up, None, None, Form("separate", True, alpha, beta, limit), out)


def swiglu_with_bias(
    gate: torch.Tensor,
    up: torch.Tensor,
    bias_gate: torch.Tensor,
    bias_up: torch.Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `swiglu_fused(gate + bias_gate, up + bias_up)`, the sums in fp32 and not rounded.

    Args:
        gate: [..., width], float16, bfloat16 or float32, any strides.
        up: Same shape, any of these dtypes and any strides.
        bias_gate: [width], any of these dtypes.
        bias_up: [width], any of these dtypes.
        alpha: As for `swiglu_fused`.
        beta: As for `swiglu_fused`.
        limit: As for `swiglu_fused`; the clamps come after the sums.
        out: As for `swiglu_fused`.

    Returns:
        `out`, or a new contiguous tensor with the shape, dtype and device of `gate`.

    Raises:
        TypeError: As for `swiglu_fused`.
        ValueError: As for `swiglu_fused`.
        RuntimeError: As for `swiglu_fused`.
    """
    # Further down None stands for no bias.
    check_tensor("bias_gate", bias_gate)
    check_tensor("bias_up", bias_up)
    return _swiglu(gate, up, bias_gate, bias_up, Form("separate", True, alpha, beta, limit), out)


def swiglu_packed(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    layout: Layout = "concat",
    order: Order = "gate_first",
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `swiglu_fused` of the gate and the up projection inside one tensor, without taking it apart.

    Args:
        x: [..., 2 * width], float16, bfloat16 or float32, any strides: the result of one fused projection.
        bias: [2 * width], laid out like `x`, any of these dtypes; added in fp32. None for none.
        layout: `concat` for one half after the other, as Phi-3 and most serving engines have it; `interleaved`
            for their elements in turns, as gpt-oss has it.
        order: Which half, or which element of a pair, is the gate: `gate_first` or `up_first`.
        alpha: As for `swiglu_fused`.
        beta: As for `swiglu_fused`.
        limit: As for `swiglu_fused`.
        out: [..., width], as for `swiglu_fused`. It may be one of the halves of a `concat` tensor.

    Returns:
        `out`, or a new contiguous tensor, [..., width], with the dtype and device of `x`.

    Raises:
        TypeError: As for `swiglu_fused`.
        ValueError: As for `swiglu_fused`; also for an odd last dimension, or another layout or order.
        RuntimeError: As for `swiglu_fused`.
    """
    check_choice("layout", layout, ("concat", "interleaved"))
    check_choice("order", order, ("gate_first", "up_first"))
    return _swiglu(x, None, bias, None, Form(layout, order == "gate_first", alpha, beta, limit), out)


def swiglu_quant_int8(
    gate: torch.Tensor,
    up: torch.Tensor,
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `swiglu_fused`, or `swiglu_with_bias`, and quantise the product to int8, row by row, in one kernel.

    Bit for bit what these give, rounded to `gate.dtype` and then quantised symmetrically: `x_scale = absmax / 127` and
    `codes = round(y * (127 / absmax))` in fp32, halves to even. Nothing is written but codes and scales, which are
    what `tk_int8_gemm.w8a8_gemm(codes, …, x_scale=x_scale, out_dtype=…)` takes. A row of the product whose magnitudes
    all lie below 2**-110 has scale 1 and codes 0; one with an infinity or NaN has scale NaN and codes 0.

    Args:
        gate: [..., width] with width from 1, float16, bfloat16 or float32, any strides.
        up: Same shape, any of these dtypes and any strides.
        bias_gate: [width], any of these dtypes; None for none, of both.
        bias_up: [width], any of these dtypes; None for none, of both.
        alpha: As for `swiglu_fused`.
        beta: As for `swiglu_fused`.
        limit: As for `swiglu_fused`.

    Returns:
        `(codes, x_scale)`: int8 [..., width] and float32 [...], new and contiguous.

    Raises:
        TypeError: As for `swiglu_fused`, or one bias without the other.
        ValueError: As for `swiglu_fused`.
        NotImplementedError: A gradient is wanted.
    """
    return _quantised(gate, up, bias_gate, bias_up, Form("separate", True, alpha, beta, limit))


def swiglu_packed_quant_int8(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    layout: Layout = "concat",
    order: Order = "gate_first",
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `swiglu_packed` and quantise the product as `swiglu_quant_int8` does, in one kernel.

    Args:
        x: [..., 2 * width] with width from 1, float16, bfloat16 or float32, any strides.
        bias: As for `swiglu_packed`.
        layout: As for `swiglu_packed`.
        order: As for `swiglu_packed`.
        alpha: As for `swiglu_fused`.
        beta: As for `swiglu_fused`.
        limit: As for `swiglu_fused`.

    Returns:
        `(codes, x_scale)`: int8 [..., width] and float32 [...], new and contiguous.

    Raises:
        TypeError: As for `swiglu_packed`.
        ValueError: As for `swiglu_packed`.
        NotImplementedError: A gradient is wanted.
    """
    check_choice("layout", layout, ("concat", "interleaved"))
    check_choice("order", order, ("gate_first", "up_first"))
    return _quantised(x, None, bias, None, Form(layout, order == "gate_first", alpha, beta, limit))


def _swiglu(gate: Any, up: Any, bias: Any, bias_up: Any, form: Form, out: Any) -> torch.Tensor:
    tensors: tuple[Any, ...] = (gate,) if up is None else (gate, up)
    if bias is not None:
        tensors += (bias,) if bias_up is None else (bias, bias_up)
    in_place = out is gate, out is up
    if out is not None and not any(in_place):
        tensors += (out,)
    known_as = form, bias is None, out is not None and in_place
    plan = _RECENT.find(known_as, tensors)
    if plan is None:
        if takes_operator(*tensors):
            return _call_operator(gate, up, bias, bias_up, form, out)
        plan = _plans.plan_of(gate, up, bias, bias_up, form, out)
        _RECENT.remember(known_as, tensors, plan)
    return plan(gate, up, bias, bias_up, out)


def _call_operator(gate: Any, up: Any, bias: Any, bias_up: Any, form: Form, out: Any) -> torch.Tensor:
    if out is not None or not torch.compiler.is_compiling():
        # Before the dispatcher words the error; while compiling, the fake implementation checks.
        _plans.check_arguments(gate, up, bias, bias_up, form, out)
    if out is not None and torch.is_grad_enabled():
        tensors = [tensor for tensor in (gate, up, bias, bias_up, out) if tensor is not None]
        if any(tensor.requires_grad for tensor in tensors):
            raise RuntimeError("out cannot be combined with gradients: call without it, or under torch.no_grad()")
    result: torch.Tensor = _operators.swiglu(gate, up, bias, bias_up, *form)
    return result if out is None else out.copy_(result)


def _quantised(gate: Any, up: Any, bias: Any, bias_up: Any, form: Form) -> _quant_plans.CodesAndScale:
    operands = gate, up, bias, bias_up
    tensors = tuple(operand for operand in operands if operand is not None)
    known_as = form, tuple(operand is None for operand in operands)
    plan = _RECENT_QUANT.find(known_as, tensors)
    if plan is None:
        if takes_operator(*tensors):
            if not torch.compiler.is_compiling():
                _quant_plans.check_arguments(*operands, form)
            pair: _quant_plans.CodesAndScale = _operators.swiglu_quant_int8(*operands, *form)
            return pair
        plan = _quant_plans.plan_of(*operands, form)
        _RECENT_QUANT.remember(known_as, tensors, plan)
    return plan(*operands)
