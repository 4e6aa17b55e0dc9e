"""How a product is quantised: as in `_plans`, with codes and scales for results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.launch import Kernel, PlanCache, PreparedLaunch, allocator, launch_target
from tk_kernel_core.quantization import check_rows, quantize_per_token_torch
from tk_swiglu import _plans
from tk_swiglu._launch import quant_config
from tk_swiglu._plans import Form
from tk_swiglu._reference import swiglu_torch, unpacked

_QUANT = Kernel("tk_swiglu._quant_kernels", "swiglu_quant_kernel")

CodesAndScale = tuple[torch.Tensor, torch.Tensor]
Plan = Callable[[Any, Any, Any, Any], CodesAndScale]
_PLANS: PlanCache[Plan] = PlanCache()


def check_arguments(gate: Any, up: Any, bias: Any, bias_up: Any, form: Form) -> None:
    """Raise TypeError or ValueError for arguments that no call takes."""
    _plans.check_arguments(gate, up, bias, bias_up, form)
    check_rows(gate)


def quantised(gate: Any, up: Any, bias: Any, bias_up: Any, form: Form) -> CodesAndScale:
    return plan_of(gate, up, bias, bias_up, form)(gate, up, bias, bias_up)


def plan_of(gate: Any, up: Any, bias: Any, bias_up: Any, form: Form) -> Plan:
    try:
        tensors = (
            part is not None and (part.shape, part.stride(), part.dtype, part.device)
            for part in (gate, up, bias, bias_up)
        )
        key = (form, *tensors)
        plan = _PLANS.get(key)
    except (AttributeError, TypeError):
        # Some argument is not what it should be; the check says which.
        check_arguments(gate, up, bias, bias_up, form)
        raise
    if plan is None:
        check_arguments(gate, up, bias, bias_up, form)
        plan = _PLANS.remember(key, _plan(gate, up, bias, bias_up, form), gate.device)
    return plan


def _plan(gate: Any, up: Any, bias: Any, bias_up: Any, form: Form) -> Plan:
    shape = _plans.result_shape(gate, form.layout)
    if gate.numel() == 0 or backend_of("gate" if form.layout == "separate" else "x", gate) == "reference":

        def by_reference(gate: Any, up: Any, bias: Any, bias_up: Any) -> CodesAndScale:
            parts = unpacked(gate, up, bias, bias_up, form.layout, form.gate_first)
            y = swiglu_torch(*parts, alpha=form.alpha, beta=form.beta, limit=form.limit)
            return quantize_per_token_torch(y)

        return by_reference

    dense = torch.empty(shape, device="meta").stride()
    rows = _plans.rows_of(gate, up, bias, form.layout, dense, may_merge=False)
    if rows is None or not all(tensor is None or tensor.is_contiguous() for tensor in (bias, bias_up)):

        def on_copies(gate: Any, up: Any, bias: Any, bias_up: Any) -> CodesAndScale:
            gate, up, bias, bias_up = _plans.contiguous(gate, up, bias, bias_up)
            return quantised(gate, up, bias, bias_up, form)

        return on_copies

    config = quant_config(rows.width, bias is not None, launch_target(gate.device))
    launch = PreparedLaunch(
        _QUANT,
        (-(-rows.n_rows // config.block_m), 1, 1),
        # Codes are contiguous.
        (rows.n_rows, rows.n_inner, *rows.strides[2:], *_plans.scalars_of(form)),
        {
            "WIDTH": rows.width,
            **_plans.constexprs_of(form, rows),
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "DEPENDENT_LAUNCH": config.dependent_launch,
        },
        gate.device,
        num_warps=config.num_warps,
        **_plans.options_of(config),
    )
    new_codes = allocator(shape, torch.int8, gate.device)
    new_x_scale = allocator(shape[:-1], torch.float32, gate.device)

    def by_kernel(gate: Any, up: Any, bias: Any, bias_up: Any) -> CodesAndScale:
        codes, x_scale = new_codes(), new_x_scale()
        if bias is not None:
            launch(codes, x_scale, gate, up, bias, bias_up)
        elif up is not None:
            launch(codes, x_scale, gate, up)
        else:
            launch(codes, x_scale, gate)
        return codes, x_scale

    return by_kernel
