"""How a call is carried out: check, choose the backend, choose the launch, allocate, launch.

All of that but the allocation and the launch depends on shapes, strides, dtypes, devices and numbers only.
It is decided once for each such combination and kept as a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

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
from tk_kernel_core.layout import aligned_strides, overlap_check, row_layout
from tk_kernel_core.quantization import check_rows, quantize_per_token_torch
from tk_kernel_core.reduction import sum_rows
from tk_rmsnorm._launch import backward_config, forward_config
from tk_rmsnorm._reference import fused_add_rmsnorm_torch, rmsnorm_backward_torch, rmsnorm_torch

_FORWARD = Kernel("tk_rmsnorm._kernels", "rmsnorm_forward_kernel")
_QUANT = Kernel("tk_rmsnorm._kernels", "rmsnorm_quant_kernel")
_BACKWARD = Kernel("tk_rmsnorm._kernels", "rmsnorm_backward_kernel")

Form = Literal["norm", "norm_of_sum", "norm_and_sum", "in_place", "codes", "codes_and_sum"]
Plan = Callable[[Any, Any, Any], Any]
_PLANS: PlanCache[Plan] = PlanCache()
BackwardPlan = Callable[[Any, Any, Any, Any], tuple[torch.Tensor, torch.Tensor]]
_BACKWARD_PLANS: PlanCache[BackwardPlan] = PlanCache()


def check_arguments(
    x: Any, residual: Any, weight: Any, eps: float, weight_offset: float, casting: str, form: Form
) -> None:
    """Raise TypeError or ValueError for arguments no form of the norm takes."""
    check_tensor("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, got a scalar tensor")
    if form in ("codes", "codes_and_sum"):
        check_rows(x)
    if form not in ("norm", "codes"):
        check_tensor("residual", residual)
        check_shape("residual", residual, x.shape)
        check_same_device("residual", residual, x.device, "x")
    if weight is not None:
        check_tensor("weight", weight)
        check_shape("weight", weight, x.shape[-1:])
        check_same_device("weight", weight, x.device, "x")
    check_number("eps", eps, minimum=0.0)
    check_number("weight_offset", weight_offset)
    check_choice("casting", casting, ("fp32", "llama"))


def forward(x: Any, residual: Any, weight: Any, eps: float, weight_offset: float, casting: str, form: Form) -> Any:
    return plan_of(x, residual, weight, eps, weight_offset, casting, form)(x, residual, weight)


def plan_of(x: Any, residual: Any, weight: Any, eps: float, weight_offset: float, casting: str, form: Form) -> Plan:
    try:
        # What decides the plan, asked for in the cheapest way. A weight is a vector, or there is no plan.
        key = (
            form,
            x.shape,
            x.is_contiguous() or x.stride(),
            x.dtype,
            x.device,
            eps,
            weight_offset,
            casting,
            weight is not None and (weight.dim(), weight.numel(), weight.is_contiguous(), weight.dtype, weight.device),
            residual is not None
            and (residual.shape, residual.is_contiguous() or residual.stride(), residual.dtype, residual.device),
        )
        plan = _PLANS.get(key)
    except (AttributeError, TypeError):
        # Some argument is not what it should be; the check says which.
        check_arguments(x, residual, weight, eps, weight_offset, casting, form)
        raise
    if plan is None:
        plan = _plan(x, residual, weight, eps, weight_offset, casting, form)
        if form == "in_place" and not x.is_meta:
            plan = _in_place(plan, x, residual)
        _PLANS.remember(key, plan, x.device)
    return plan


def _plan(x: Any, residual: Any, weight: Any, eps: float, weight_offset: float, casting: str, form: Form) -> Plan:
    check_arguments(x, residual, weight, eps, weight_offset, casting, form)
    in_place = form == "in_place"
    if in_place:
        check_writable("x", x)
        check_writable("residual", residual)
    numbers: dict[str, Any] = {"eps": eps, "weight_offset": weight_offset, "casting": casting}

    if x.numel() == 0 or backend_of("x", x) == "reference":

        def by_reference(x: Any, residual: Any, weight: Any) -> Any:
            if residual is None:
                y = rmsnorm_torch(x.contiguous(), weight, **numbers)
                return quantize_per_token_torch(y) if form == "codes" else y
            results = fused_add_rmsnorm_torch(x.contiguous(), residual.contiguous(), weight, **numbers)
            return _deliver(form, x, residual, *results)

        return by_reference

    dense = torch.empty(x.shape, device="meta").stride()
    summand = x if residual is None else residual
    layout = row_layout(
        x.shape,
        x.stride() if in_place else dense,
        x.stride(),
        summand.stride(),
        residual.stride() if in_place else dense,
    )
    if layout is None or not (weight is None or weight.is_contiguous()):

        def on_copies(x: Any, residual: Any, weight: Any) -> Any:
            copies = (None if part is None else part.contiguous() for part in (x, residual, weight))
            dense_x, dense_residual, dense_weight = copies
            its_form: Form = "norm_and_sum" if in_place else form
            results = forward(dense_x, dense_residual, dense_weight, eps, weight_offset, casting, its_form)
            return _deliver(form, x, residual, *results) if in_place else results

        return on_copies

    unit, strides = aligned_strides(x.shape[-1], layout)
    is_light = unit >= 8 and all(tensor is None or tensor.element_size() == 2 for tensor in (x, residual, weight))
    config = forward_config(x.shape[-1], residual is not None, is_light, launch_target(x.device))
    kernel, max_registers = _FORWARD, config.max_registers
    if form in ("codes", "codes_and_sum"):
        # Codes are contiguous. To hold what is quantised beside what was loaded takes more registers.
        kernel, max_registers, strides = _QUANT, None, strides[2:]
    launch = PreparedLaunch(
        kernel,
        (-(-layout.n_rows // config.block_m), 1, 1),
        (layout.n_rows, layout.n_inner, *strides, float(eps), float(weight_offset)),
        {
            "HIDDEN_SIZE": x.shape[-1],
            "CAST_FIRST": casting == "llama",
            "HAS_OFFSET": weight_offset != 0,
            "ALIGNMENT": unit,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "DEPENDENT_LAUNCH": config.dependent_launch,
        },
        x.device,
        num_warps=config.num_warps,
        **({"maxnreg": max_registers} if max_registers else {}),
        **({"launch_pdl": True} if config.dependent_launch else {}),
    )
    if in_place:
        return lambda x, residual, weight: launch(x, x, weight, residual, residual)
    new_y = allocator(x.shape, x.dtype, x.device)
    new_total = allocator(x.shape, summand.dtype, x.device)
    new_codes = allocator(x.shape, torch.int8, x.device)
    new_x_scale = allocator(x.shape[:-1], torch.float32, x.device)

    def norm(x: Any, residual: Any, weight: Any) -> Any:
        y = new_y()
        launch(y, x, weight)
        return y

    def norm_of_sum(x: Any, residual: Any, weight: Any) -> Any:
        y = new_y()
        launch(y, x, weight, residual)
        return y

    def norm_and_sum(x: Any, residual: Any, weight: Any) -> Any:
        y, total = new_y(), new_total()
        launch(y, x, weight, residual, total)
        return y, total

    def codes(x: Any, residual: Any, weight: Any) -> Any:
        codes, x_scale = new_codes(), new_x_scale()
        launch(codes, x_scale, x, weight)
        return codes, x_scale

    def codes_and_sum(x: Any, residual: Any, weight: Any) -> Any:
        codes, x_scale, total = new_codes(), new_x_scale(), new_total()
        launch(codes, x_scale, x, weight, residual, total)
        return codes, x_scale, total

    plans: dict[Form, Plan] = {"norm": norm, "norm_of_sum": norm_of_sum, "norm_and_sum": norm_and_sum}
    plans |= {"codes": codes, "codes_and_sum": codes_and_sum}
    return plans[form]


def _in_place(plan: Plan, x: torch.Tensor, residual: torch.Tensor) -> Plan:
    """Add to an in-place plan what the addresses decide, and what autograd must know of the writes."""
    may_share = overlap_check(x, residual)

    def checked(x: Any, residual: Any, weight: Any) -> Any:
        if not torch.is_inference_mode_enabled() and (x.is_inference() or residual.is_inference()):
            raise RuntimeError(
                "x and residual must not be inference tensors outside of inference mode: they are written"
            )
        if may_share(residual.data_ptr() - x.data_ptr()):
            raise ValueError("x and residual are both written in place and must not share memory")
        plan(x, residual, weight)
        for tensor in (x, residual):
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)

    return checked


def _deliver(form: Form, x: torch.Tensor, residual: torch.Tensor, y: torch.Tensor, total: torch.Tensor) -> Any:
    """Hand results over in the form that was asked for."""
    if form == "in_place":
        x.copy_(y)
        residual.copy_(total)
        return None
    if form == "codes_and_sum":
        return *quantize_per_token_torch(y), total.contiguous()
    return y.contiguous() if form == "norm_of_sum" else (y.contiguous(), total.contiguous())


def rmsnorm_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    casting: str,
    wants_dweight: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of `y = rmsnorm(x, weight)`; `dsum` is a further gradient that reaches `x`.

    Args:
        dy: Gradient of y, [..., hidden_size].
        dsum: Same shape, or None.
        x: What was normalised: the sum, where there was a residual.
        weight: [hidden_size], or None.
        eps: As in the forward call.
        weight_offset: As in the forward call.
        casting: As in the forward call.
        wants_dweight: Whether the weight's gradient is wanted; a frozen weight needs none.

    Returns:
        `(dx, dweight)`, with the dtypes of `x` and `weight`; `dweight` is empty where there is none.
    """
    wants_dweight = wants_dweight and weight is not None
    key = (
        dy.shape,
        *((tensor.stride(), tensor.dtype) for tensor in (dy, x)),
        None if dsum is None else (dsum.stride(), dsum.dtype),
        None if weight is None else (weight.stride(), weight.dtype),
        x.device,
        eps,
        weight_offset,
        casting,
        wants_dweight,
    )
    plan = _BACKWARD_PLANS.get(key)
    if plan is None:
        plan = _backward_plan(dy, dsum, x, weight, eps, weight_offset, casting, wants_dweight)
        _BACKWARD_PLANS.remember(key, plan, x.device)
    return plan(dy, dsum, x, weight)


def _backward_plan(
    dy: Any, dsum: Any, x: Any, weight: Any, eps: float, weight_offset: float, casting: str, wants_dweight: bool
) -> BackwardPlan:
    check_arguments(x, None, weight, eps, weight_offset, casting, "norm")
    for name, tensor in (("dy", dy), ("dsum", dsum)):
        if tensor is not None:
            check_tensor(name, tensor)
            check_shape(name, tensor, x.shape)
            check_same_device(name, tensor, x.device, "x")
    if x.numel() == 0 or backend_of("x", x) == "reference":

        def by_reference(dy: Any, dsum: Any, x: Any, weight: Any) -> Any:
            dx, dweight = rmsnorm_backward_torch(dy, dsum, x, weight, eps, weight_offset, casting)
            return dx.contiguous(), dweight if wants_dweight and dweight is not None else dx.new_empty(0)

        return by_reference

    addend = x if dsum is None else dsum
    layout = row_layout(x.shape, dy.stride(), addend.stride(), x.stride())
    if layout is None or not (weight is None or weight.is_contiguous()):

        def on_copies(dy: Any, dsum: Any, x: Any, weight: Any) -> Any:
            dy, dsum, x, weight = (None if part is None else part.contiguous() for part in (dy, dsum, x, weight))
            return rmsnorm_backward(dy, dsum, x, weight, eps, weight_offset, casting, wants_dweight)

        return on_copies

    hidden_size = x.shape[-1]
    bytes_per_element = sum(tensor.element_size() for tensor in (dy, dsum, x) if tensor is not None)
    config = backward_config(layout.n_rows, hidden_size, bytes_per_element, launch_target(x.device))
    unit, strides = aligned_strides(hidden_size, layout)
    launch = PreparedLaunch(
        _BACKWARD,
        (config.n_programs, 1, 1),
        (layout.n_rows, layout.n_inner, *strides, float(eps), float(weight_offset)),
        {
            "HIDDEN_SIZE": hidden_size,
            "CAST_FIRST": casting == "llama",
            "HAS_OFFSET": weight_offset != 0,
            "ALIGNMENT": unit,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "STAGES": config.stages,
            "DEPENDENT_LAUNCH": config.dependent_launch,
        },
        x.device,
        num_warps=config.num_warps,
        **({"launch_pdl": True} if config.dependent_launch else {}),
    )
    new_dx = allocator(x.shape, x.dtype, x.device)
    new_partial = allocator((config.n_programs, hidden_size), torch.float32, x.device)

    def by_kernel(dy: Any, dsum: Any, x: Any, weight: Any) -> Any:
        dx, partial = new_dx(), new_partial() if wants_dweight else None
        launch(dx, partial, dy, dsum, x, weight)
        return dx, dx.new_empty(0) if partial is None else sum_rows(partial, weight.dtype)

    return by_kernel
