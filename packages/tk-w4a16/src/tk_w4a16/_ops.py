"""Public functions."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from tk_kernel_core.recent import RecentPlans
from tk_kernel_core.registration import takes_operator
from tk_w4a16 import _operators, _plans
from tk_w4a16._packing import PackedInt4Weight
from tk_w4a16._plans import Plan

_RECENT: RecentPlans[Plan] = RecentPlans()


def w4a16_linear(x: torch.Tensor, weight: PackedInt4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply activations by a prepared 4-bit weight (W4A16).

    `y = x @ ((codes - zeros) * scales).T + bias`, summed up in fp32 and rounded once; only the weight is quantised.
    From 17 rows on, and for float32, the dequantised weight may be rounded to the dtype of `x` before it is multiplied.
    Above 256 rows, and for float32, it is dequantised at most 128 MiB at a time and multiplied by PyTorch, whose
    `torch.backends.cuda.matmul` says how sums are formed.

    Args:
        x: [..., in_features], float16, bfloat16 or float32, any strides.
        weight: A weight of one of `PackedInt4Weight.from_...`. Its scales may have another dtype than `x`.
        bias: [out_features], or None.

    Returns:
        A new contiguous tensor, [..., out_features], with the dtype and device of `x`. It has gradients for `x` and
        `bias`.

    Raises:
        TypeError: An argument is of another type, or has an unsupported dtype.
        ValueError: Shapes or devices do not fit.
        NotImplementedError: The weight requires a gradient.
    """
    if not isinstance(weight, PackedInt4Weight):
        raise TypeError(
            f"weight must be a PackedInt4Weight, got {type(weight).__name__}: prepare it by one of its from_..."
        )
    operands = x, weight.codes, weight.scales, weight.zeros, weight.permutation, bias
    settings = weight.group_size, weight.out_features, weight.in_features
    check, plan_of = _plans.check_linear, _plans.linear_plan
    return _call("w4a16_linear", operands, settings, check, plan_of, _operators.w4a16_linear)


def w4a16_gemm(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int = 128
) -> torch.Tensor:
    """Multiply activations by a 4-bit weight in the plain layout, that of `pack_int4` (W4A16).

    `y = x @ ((q - zeros) * scales)`, the weight dequantised in fp32 and rounded to the dtype of `x`, products summed
    up in fp32 and rounded once. Nothing is packed anew: up to 384 rows every program dequantises its tiles on the way,
    above that, and for float32, the weight is dequantised once, at most 128 MiB at a time, and multiplied by PyTorch.
    A weight that is used often is faster prepared, by `PackedInt4Weight.from_int4`, and multiplied by `w4a16_linear`.

    Args:
        x: [..., K], float16, bfloat16 or float32, any strides.
        packed: int32, [K / 8, N]: bits 4 j to 4 j + 3 of word i hold input feature 8 i + j. It, the scales and the zero
            points are copied in every call where they are not contiguous.
        scales: Floating point, [ceil(K / group_size), N]; float64 is rounded to float32.
        zeros: As `scales`, not necessarily integers; None for 8.
        group_size: Input features in a group, any number, the last of which may be shorter; -1, or K and more, for
            one group.

    Returns:
        A new contiguous tensor, [..., N], with the dtype and device of `x`. It has a gradient for `x`.

    Raises:
        TypeError: An argument is no tensor or has an unsupported dtype, or the group size is no integer.
        ValueError: Shapes or devices do not fit, or the group size is neither positive nor -1.
        NotImplementedError: Scales or zero points require a gradient.
    """
    operands = x, packed, scales, zeros
    return _call("w4a16_gemm", operands, (group_size,), _plans.check_gemm, _plans.gemm_plan, _operators.w4a16_gemm)


def _call(
    name: str,
    operands: tuple[Any, ...],
    settings: tuple[Hashable, ...],
    check: Callable[..., None],
    plan_of: Callable[..., Plan],
    operator: Callable[..., Any],
) -> torch.Tensor:
    """Carry out a product: by the plan of a call like it, by a new plan, or by the operator.

    Args:
        name: Of the product.
        operands: Tensors, or None for those left out. A plan takes these.
        settings: What else there is to say. All that follow take operands and settings.
        check: Raises errors for arguments that the product does not take.
        plan_of: Returns the plan.
        operator: The registered operator.
    """
    tensors = tuple(operand for operand in operands if operand is not None)
    known_as = name, settings, tuple(operand is None for operand in operands)
    plan = _RECENT.find(known_as, tensors)
    if plan is None:
        if takes_operator(*tensors):
            if not torch.compiler.is_compiling():
                # Before the dispatcher words the error; while compiling, the fake implementation checks.
                check(*operands, *settings)
            y: torch.Tensor = operator(*operands, *settings)
            return y
        plan = plan_of(*operands, *settings)
        _RECENT.remember(known_as, tensors, plan)
    result: torch.Tensor = plan(*operands)
    return result
