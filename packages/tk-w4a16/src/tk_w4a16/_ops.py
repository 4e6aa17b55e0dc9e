"""Public functions."""

from __future__ import annotations

import torch  # noqa: TC002 - annotations of public functions may be looked up at run time

from tk_kernel_core.recent import RecentPlans
from tk_w4a16 import _operators, _plans
from tk_w4a16._packing import PackedInt4Weight
from tk_w4a16._plans import Plan

_RECENT: RecentPlans[Plan] = RecentPlans()


def w4a16_linear(x: torch.Tensor, weight: PackedInt4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply activations by a prepared 4-bit weight (W4A16).

    `y = x @ ((codes - zeros) * scales).T + bias`, summed up in fp32 and rounded once; only the weight is quantised.
    From 17 rows on, and for float32, the dequantised weight may be rounded to the dtype of `x` before it is multiplied.
    Above 256 rows, for weights of many output features on an H200 above 1024, and for float32, it is dequantised at
    most 128 MiB at a time and multiplied by PyTorch, whose `torch.backends.cuda.matmul` says how sums are formed.

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
    y: torch.Tensor = _RECENT.call("w4a16_linear", operands, settings, check, plan_of, _operators.w4a16_linear)
    return y


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
    y: torch.Tensor = _RECENT.call(
        "w4a16_gemm", operands, (group_size,), _plans.check_gemm, _plans.gemm_plan, _operators.w4a16_gemm
    )
    return y
