"""How a call is carried out: check, choose the backend, choose the launch, allocate, launch.

All of that but the allocation and the launch depends on shapes, strides, dtypes, devices and numbers only.
It is decided once for each such combination and kept as a plan.

Inside the package one form serves all: with the layout `separate`, `gate` and `up` are two tensors, and so are
their biases; with `concat` and `interleaved`, `gate` and `bias` hold both halves, and `up` and `bias_up` are None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from tk_kernel_core.checks import (
    check_choice,
    check_number,
    check_same_device,
    check_shape,
    check_tensor,
    check_writable,
)
from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.launch import Kernel, PlanCache, PreparedLaunch, allocator, launch_target
from tk_kernel_core.layout import RowLayout, aligned_strides, overlap_check, row_layout
from tk_kernel_core.reduction import sum_rows
from tk_swiglu._launch import BackwardConfig, ForwardConfig, QuantConfig, backward_config, forward_config
from tk_swiglu._reference import swiglu_backward_torch, swiglu_torch, unpacked

_FORWARD = Kernel("tk_swiglu._kernels", "swiglu_forward_kernel")
_BACKWARD = Kernel("tk_swiglu._kernels", "swiglu_backward_kernel")


class Form(NamedTuple):
    """Everything about a call but its tensors; see `swiglu_fused` and `swiglu_packed` for the numbers."""

    layout: str
    gate_first: bool
    alpha: float
    beta: float
    limit: float | None


Plan = Callable[[Any, Any, Any, Any, Any], torch.Tensor]
_PLANS: PlanCache[Plan] = PlanCache()
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
BackwardPlan = Callable[[Any, Any, Any, Any, Any], Gradients]
_BACKWARD_PLANS: PlanCache[BackwardPlan] = PlanCache()


def check_arguments(gate: Any, up: Any, bias: Any, bias_up: Any, form: Form, out: Any = None) -> None:
    """Raise TypeError or ValueError for arguments that no call takes."""
    check_choice("layout", form.layout, ("separate", "concat", "interleaved"))
    separate = form.layout == "separate"
    name = "gate" if separate else "x"
    check_tensor(name, gate)
    if gate.dim() == 0:
        raise ValueError(f"{name} must have at least one dimension, got a scalar tensor")
    if separate:
        check_tensor("up", up)
        check_shape("up", up, gate.shape)
        check_same_device("up", up, gate.device, "gate")
    elif up is not None or bias_up is not None:
        raise ValueError("up and bias_up must be None where x holds both halves")
    elif gate.shape[-1] % 2:
        raise ValueError(f"x must have an even last dimension, got shape {tuple(gate.shape)}")
    if separate and (bias is None) != (bias_up is None):
        check_tensor("bias_gate", bias)
        check_tensor("bias_up", bias_up)
    for bias_name, value in (("bias_gate" if separate else "bias", bias), ("bias_up", bias_up)):
        if value is not None:
            check_tensor(bias_name, value)
            check_shape(bias_name, value, gate.shape[-1:])
            check_same_device(bias_name, value, gate.device, name)
    check_numbers(form.alpha, form.beta, form.limit)
    if out is not None:
        check_tensor("out", out, (gate.dtype,))
        check_shape("out", out, result_shape(gate, form.layout))
        check_same_device("out", out, gate.device, name)
        if not torch.compiler.is_compiling():
            # Compiled, the result is copied into out, and the copy looks for itself.
            check_writable("out", out)


def check_numbers(alpha: Any, beta: Any, limit: Any) -> None:
    """Raise TypeError or ValueError for numbers that no call takes."""
    # The kernel multiplies it by the binary logarithm of e.
    if abs(check_number("alpha", alpha)) > 2e38:
        raise ValueError(f"alpha must lie between -2e38 and 2e38, got {alpha:g}")
    check_number("beta", beta)
    if limit is not None:
        if isinstance(limit, bool) or not isinstance(limit, (int, float)):
            raise TypeError(f"limit must be None or a number, got {type(limit).__name__}")
        # In fp32, as the kernel has it; an int may be too large even for a float.
        if not 0 < limit <= torch.finfo(torch.float32).max:
            raise ValueError(f"limit must be None or a positive finite number, got {limit}")


def result_shape(gate: torch.Tensor, layout: str) -> tuple[int, ...]:
    """Return the shape of the result."""
    return tuple(gate.shape) if layout == "separate" else (*gate.shape[:-1], gate.shape[-1] // 2)


def forward(gate: Any, up: Any, bias: Any, bias_up: Any, form: Form, out: Any = None) -> torch.Tensor:
    return plan_of(gate, up, bias, bias_up, form, out)(gate, up, bias, bias_up, out)


def plan_of(gate: Any, up: Any, bias: Any, bias_up: Any, form: Form, out: Any) -> Plan:
    try:
        # What decides the plan, asked for in the cheapest way.
        key = (
            gate.shape,
            gate.is_contiguous() or gate.stride(),
            gate.dtype,
            gate.device,
            up is not None and (up.shape, up.is_contiguous() or up.stride(), up.dtype, up.device),
            form,
            bias is not None and (bias.shape, bias.stride(), bias.dtype, bias.device),
            bias_up is not None and (bias_up.shape, bias_up.stride(), bias_up.dtype, bias_up.device),
            out is not None and (out.shape, out.stride(), out.dtype, out.device),
        )
        plan = _PLANS.get(key)
    except (AttributeError, TypeError):
        # Some argument is not what it should be; the check says which.
        check_arguments(gate, up, bias, bias_up, form, out)
        raise
    if plan is None:
        check_arguments(gate, up, bias, bias_up, form, out)
        plan = _plan(gate, up, bias, bias_up, form, out)
        if out is not None and not out.is_meta:
            plan = _into(plan, gate, up, bias, bias_up, form, out)
        _PLANS.remember(key, plan, gate.device)
    return plan


def _plan(gate: Any, up: Any, bias: Any, bias_up: Any, form: Form, out: Any) -> Plan:
    shape = result_shape(gate, form.layout)
    if gate.numel() == 0 or backend_of("gate" if form.layout == "separate" else "x", gate) == "reference":

        def by_reference(gate: Any, up: Any, bias: Any, bias_up: Any, out: Any) -> torch.Tensor:
            parts = unpacked(gate, up, bias, bias_up, form.layout, form.gate_first)
            return _deliver(swiglu_torch(*parts, alpha=form.alpha, beta=form.beta, limit=form.limit), out)

        return by_reference

    dense = torch.empty(shape, device="meta").stride()
    rows = rows_of(gate, up, bias, form.layout, dense if out is None else out.stride())
    if rows is None or not all(tensor is None or tensor.is_contiguous() for tensor in (bias, bias_up)):

        def on_copies(gate: Any, up: Any, bias: Any, bias_up: Any, out: Any) -> torch.Tensor:
            gate, up, bias, bias_up = contiguous(gate, up, bias, bias_up)
            return _deliver(forward(gate, up, bias, bias_up, form), out)

        return on_copies

    n_elements = rows.n_rows * rows.width
    config = forward_config(n_elements, form.layout, launch_target(gate.device))
    launch = PreparedLaunch(
        _FORWARD,
        (-(-n_elements // config.block), 1, 1),
        (n_elements // rows.unit, rows.n_inner, *rows.strides, *scalars_of(form)),
        {
            "WIDTH": 0 if rows.is_flat else rows.width,
            **constexprs_of(form, rows),
            "BLOCK": config.block,
            "DEPENDENT_LAUNCH": config.dependent_launch,
        },
        gate.device,
        num_warps=config.num_warps,
        **options_of(config),
    )
    new_out = allocator(shape, gate.dtype, gate.device)

    def by_kernel(gate: Any, up: Any, bias: Any, bias_up: Any, out: Any) -> torch.Tensor:
        result: torch.Tensor = new_out() if out is None else out
        if bias is not None:
            launch(result, gate, up, bias, bias_up)
        elif up is not None:
            launch(result, gate, up)
        else:
            launch(result, gate)
        return result

    return by_kernel


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows that a kernel works on.

    Attributes:
        n_rows: Their number.
        n_inner: Rows per outer step.
        width: Columns of the result.
        unit: Elements in which the kernel counts strides and the width.
        strides: Outer and inner stride of each tensor, in units.
        is_flat: Whether one row holds all elements.
    """

    n_rows: int
    n_inner: int
    width: int
    unit: int
    strides: list[int]
    is_flat: bool


def rows_of(
    gate: Any, up: Any, bias: Any, layout: str, result_strides: tuple[int, ...], may_merge: bool = True
) -> _Rows | None:
    """Find the rows of a tensor shaped like the result, of gate and of up; None where one must be copied first.

    Unless they `may_merge`, none of several rows is part of a longer one.
    """
    width = result_shape(gate, layout)[-1]
    if width == 1:
        # Its stride says nothing, but gate may have two columns, whose stride does.
        result_strides = (*result_strides[:-1], 1)
    rows = row_layout(gate.shape, result_strides, gate.stride(), (gate if up is None else up).stride())
    if rows is None:
        return None
    # Where nothing tells one row from the next, one row holds them all.
    dense = (width, 0), (gate.shape[-1], 0), (gate.shape[-1], 0)
    is_flat = may_merge and bias is None and layout != "concat" and (rows.n_rows == 1 or rows.strides == dense)
    if is_flat:
        width *= rows.n_rows
        rows = RowLayout(1, 1, ((0, 0),) * 3)
    return _Rows(rows.n_rows, rows.n_inner, width, *aligned_strides(width, rows), is_flat)


def scalars_of(form: Form) -> tuple[float, float, float]:
    return float(form.alpha), float(form.beta), 0.0 if form.limit is None else float(form.limit)


def constexprs_of(form: Form, rows: _Rows) -> dict[str, Any]:
    return {
        "LAYOUT": form.layout,
        "GATE_FIRST": form.gate_first,
        "HAS_BETA": form.beta != 0,
        "HAS_LIMIT": form.limit is not None,
        "ALIGNMENT": rows.unit,
    }


def options_of(config: ForwardConfig | BackwardConfig | QuantConfig) -> dict[str, Any]:
    return {"launch_pdl": True} if config.dependent_launch else {}


def contiguous(*tensors: Any) -> list[Any]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _deliver(result: torch.Tensor, out: Any) -> torch.Tensor:
    if out is None:
        return result.contiguous()
    delivered: torch.Tensor = out.copy_(result)
    return delivered


def _into(plan: Plan, gate: Any, up: Any, bias: Any, bias_up: Any, form: Form, out: torch.Tensor) -> Plan:
    """Add to a plan that writes into `out` what the addresses decide, and what autograd must know of the write."""
    separate = form.layout == "separate"
    names = ("gate", "up", "bias_gate", "bias_up") if separate else ("x", "x", "bias", "bias")
    owners = (0, 1, 2, 3) if separate else (0, 0, 2, 2)
    arguments = gate, up, bias, bias_up
    checks = []
    for part, name, owner in zip(unpacked(*arguments, form.layout, form.gate_first), names, owners, strict=True):
        if part is not None:
            start = part.data_ptr() - arguments[owner].data_ptr()
            places = part.expand(out.shape)
            checks.append((name, owner, start, overlap_check(places, out), _same_places(places, out)))

    def checked(gate: Any, up: Any, bias: Any, bias_up: Any, out: Any) -> torch.Tensor:
        if out.is_inference() and not torch.is_inference_mode_enabled():
            raise RuntimeError("out is an inference tensor and must not be written outside of inference mode")
        arguments = gate, up, bias, bias_up
        for name, owner, start, may_share, same in checks:
            distance = out.data_ptr() - arguments[owner].data_ptr() - start
            # Every element is read before it is written, by the program that writes it.
            if may_share(distance) and not (same and distance == 0):
                raise ValueError(f"out must not share memory with {name} unless it is the same elements")
        result = plan(gate, up, bias, bias_up, out)
        if not out.is_inference():
            torch.autograd.graph.increment_version(out)
        return result

    return checked


def _same_places(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape that start at one address have every element at the same place."""
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return a.dtype == b.dtype and all(one == other for size, one, other in strides if size > 1)


def swiglu_backward(dy: Any, gate: Any, up: Any, bias: Any, bias_up: Any, form: Form, wants_bias: bool) -> Gradients:
    """Return the gradients of `forward`.

    Args:
        dy: Gradient of the result, [..., width].
        gate: As in the forward call, like all that follow.
        up: As in the forward call.
        bias: As in the forward call.
        bias_up: As in the forward call.
        form: As in the forward call.
        wants_bias: Whether gradients of the biases are wanted.

    Returns:
        The gradients of gate, up, bias and bias_up, each with the dtype of what it belongs to; empty where that
        is absent, and for biases where they are not wanted.
    """
    key = (
        dy.shape,
        *((tensor.stride(), tensor.dtype) for tensor in (dy, gate)),
        *(None if tensor is None else (tensor.stride(), tensor.dtype) for tensor in (up, bias, bias_up)),
        gate.device,
        form,
        wants_bias,
    )
    plan = _BACKWARD_PLANS.get(key)
    if plan is None:
        plan = _backward_plan(dy, gate, up, bias, bias_up, form, wants_bias)
        _BACKWARD_PLANS.remember(key, plan, gate.device)
    return plan(dy, gate, up, bias, bias_up)


def _backward_plan(dy: Any, gate: Any, up: Any, bias: Any, bias_up: Any, form: Form, wants_bias: bool) -> BackwardPlan:
    check_arguments(gate, up, bias, bias_up, form)
    check_tensor("dy", dy)
    check_shape("dy", dy, result_shape(gate, form.layout))
    check_same_device("dy", dy, gate.device, "gate")
    wants_bias = wants_bias and bias is not None
    if gate.numel() == 0 or backend_of("gate", gate) == "reference":

        def by_reference(dy: Any, gate: Any, up: Any, bias: Any, bias_up: Any) -> Gradients:
            gradients = swiglu_backward_torch(dy, gate, up, bias, bias_up, *form)
            return _present(gradients[:2] + (gradients[2:] if wants_bias else (None, None)), gate)

        return by_reference

    rows = rows_of(gate, up, bias, form.layout, dy.stride())
    if rows is None or not all(tensor is None or tensor.is_contiguous() for tensor in (bias, bias_up)):

        def on_copies(dy: Any, gate: Any, up: Any, bias: Any, bias_up: Any) -> Gradients:
            dy, gate, up, bias, bias_up = contiguous(dy, gate, up, bias, bias_up)
            return swiglu_backward(dy, gate, up, bias, bias_up, form, wants_bias)

        return on_copies

    config = backward_config(rows.n_rows, rows.width, bias is not None, launch_target(gate.device))
    n_tiles = -(-rows.width // config.block_n)
    launch = PreparedLaunch(
        _BACKWARD,
        (n_tiles * config.n_row_programs, 1, 1),
        (
            rows.n_rows,
            rows.width // rows.unit,
            config.n_row_programs,
            rows.n_inner,
            0 if rows.is_flat else gate.shape[-1] // rows.unit,
            *rows.strides,
            *scalars_of(form),
        ),
        {
            **constexprs_of(form, rows),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "STAGES": config.stages,
            "DEPENDENT_LAUNCH": config.dependent_launch,
        },
        gate.device,
        num_warps=config.num_warps,
        **options_of(config),
    )
    new_dgate = allocator(gate.shape, gate.dtype, gate.device)
    new_dup = None if up is None else allocator(up.shape, up.dtype, up.device)
    new_partial = allocator((config.n_row_programs, gate.shape[-1]), torch.float32, gate.device)

    def by_kernel(dy: Any, gate: Any, up: Any, bias: Any, bias_up: Any) -> Gradients:
        dgate, dup = new_dgate(), None if new_dup is None else new_dup()
        partial = new_partial() if wants_bias else None
        partial_up = new_partial() if wants_bias and bias_up is not None else None
        launch(dgate, dup, partial, partial_up, dy, gate, up, bias, bias_up)
        dbias = None if partial is None else sum_rows(partial, bias.dtype)
        dbias_up = None if partial_up is None else sum_rows(partial_up, bias_up.dtype)
        return _present((dgate, dup, dbias, dbias_up), gate)

    return by_kernel


def _present(gradients: tuple[Any, ...], like: torch.Tensor) -> tuple[Any, Any, Any, Any]:
    """Let empty tensors stand for gradients that are missing: an operator must return tensors."""
    first, second, third, fourth = (like.new_empty(0) if part is None else part.contiguous() for part in gradients)
    return first, second, third, fourth
