"""Public functions."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from tk_int8_gemm import _operators, _packed_plans, _plans
from tk_int8_gemm._packing import PackedInt8Weight
from tk_int8_gemm._plans import Plan
from tk_kernel_core.recent import RecentPlans
from tk_kernel_core.registration import takes_operator

_RECENT: RecentPlans[Plan] = RecentPlans()


def int8_gemm(
    x: torch.Tensor,
    weight_int8: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    weight_transposed: Any = None,
    scale_fp16: Any = None,
    use_cublas: Any = None,
    *,
    zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply activations by an int8 weight (W8A16): only the weight is quantised, whatever the number of rows.

    `y = (x @ (weight_int8 - zero_point).T) * scale + bias`, summed up in fp32 and rounded once. Above a few hundred
    rows the weight is dequantised to the dtype of `x` first, rounded by that, and multiplied by PyTorch, whose
    `torch.backends.cuda.matmul` says how sums are formed. On a weight that is used often, `int8_linear` is faster.

    Args:
        x: [..., K], float16, bfloat16 or float32, any strides.
        weight_int8: int8 codes, [N, K]. A transposed view is copied in every call.
        scale: Floating point, rounded to float32; of shape [N], [N, 1], [1, N], (1,) or ().
        bias: [N], or None.
        weight_transposed: Ignored; a switch of an earlier interface.
        scale_fp16: Ignored, likewise.
        use_cublas: Ignored, likewise.
        zero_point: int8, int32 or floating point, of a shape of `scale`; None for 0.

    Returns:
        A new contiguous tensor, [..., N], with the dtype and device of `x`.

    Raises:
        TypeError: An argument is no tensor or has an unsupported dtype.
        ValueError: Shapes or devices do not fit.
        NotImplementedError: The weight, a scale or a zero point requires a gradient.
    """
    switches = {"weight_transposed": weight_transposed, "scale_fp16": scale_fp16, "use_cublas": use_cublas}
    for name, value in switches.items():
        if value is not None:
            warnings.warn(f"{name} is ignored: the kernel is chosen by the shapes", DeprecationWarning, stacklevel=2)
    operands = x, weight_int8, scale, bias, zero_point
    y: torch.Tensor = _RECENT.call(
        "int8_gemm", operands, (), _plans.check_arguments, _plans.int8_gemm_plan, _operators.int8_gemm
    )
    return y


def w8a8_gemm(
    x: torch.Tensor,
    weight_int8: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    zero_point: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply int8 activations by an int8 weight (W8A8), on the matrix units' int8 instructions.

    `y = (x_int8 @ (weight_int8 - zero_point).T) * x_scale * scale + bias`, the sums exact in int32 for K up to 131 071,
    and in fp32 beyond. Activations in floating point are quantised first, each row by itself as by
    `quantize_per_token`. Their gradient is as if they had not been. A row with an infinity or NaN gives a row of NaN,
    and touches no other.

    Args:
        x: [..., K], float16, bfloat16 or float32; or int8 codes. Any strides.
        weight_int8: int8 codes, [N, K]. A transposed view is copied in every call.
        scale: As for `int8_gemm`.
        bias: [N], or None.
        zero_point: As for `int8_gemm`.
        x_scale: float32, the shape of `x` without its last dimension; for int8 codes, and only for those.
        out_dtype: float16, bfloat16 or float32; that of a floating-point `x` if None.

    Returns:
        A new contiguous tensor, [..., N], of `out_dtype`, on the device of `x`.

    Raises:
        TypeError: An argument is no tensor or has an unsupported dtype.
        ValueError: Shapes or devices do not fit, or `x_scale` or `out_dtype` is missing for int8 codes.
        NotImplementedError: The weight, a scale or a zero point requires a gradient.
    """
    operands = x, weight_int8, scale, bias, zero_point, x_scale
    check, plan_of = _plans.check_w8a8_arguments, _plans.w8a8_gemm_plan
    y: torch.Tensor = _RECENT.call("w8a8_gemm", operands, (out_dtype,), check, plan_of, _operators.w8a8_gemm)
    return y


def int8_linear(x: torch.Tensor, weight: PackedInt8Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply activations by a prepared int8 weight (W8A16).

    `y = (x @ (codes - zero_point).T) * scale + bias`, summed up in fp32 and rounded once, as `int8_gemm` on the codes
    that were packed. Above 256 rows, for weights of many output features on an H200 above 768, the weight is
    dequantised to the dtype of `x` first, rounded by that, and multiplied by PyTorch, whose
    `torch.backends.cuda.matmul` says how sums are formed.

    Args:
        x: [..., in_features], float16, bfloat16 or float32, any strides.
        weight: A weight of `PackedInt8Weight.pack`.
        bias: [out_features], or None.

    Returns:
        A new contiguous tensor, [..., out_features], with the dtype and device of `x`.

    Raises:
        TypeError: An argument is of another type, or has an unsupported dtype.
        ValueError: Shapes or devices do not fit.
        NotImplementedError: The weight requires a gradient.
    """
    if not isinstance(weight, PackedInt8Weight):
        raise TypeError(f"weight must be a PackedInt8Weight, got {type(weight).__name__}: prepare it by its pack")
    operands = x, weight.codes, weight.scale, weight.zero_point, bias
    sizes = weight.out_features, weight.in_features
    check, plan_of = _packed_plans.check_arguments, _packed_plans.int8_linear_plan
    y: torch.Tensor = _RECENT.call("int8_linear", operands, sizes, check, plan_of, _operators.int8_linear)
    return y


def quantize_per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row to int8, symmetrically, in one kernel.

    `x_scale = absmax / 127` and `codes = round(x * (127 / absmax))` in fp32, halves to even: bit for bit what
    `quantize_symmetric` gives over the last dimension. A row whose magnitudes all lie below 2**-110 has scale 1 and
    codes 0; one with an infinity or NaN has scale NaN and codes 0, so that its products are NaN.

    Args:
        x: [..., K], float16, bfloat16 or float32, any strides.

    Returns:
        `(codes, x_scale)`: int8 [..., K] and float32 [...], new and contiguous.

    Raises:
        TypeError: `x` is no tensor or has an unsupported dtype.
        ValueError: It has no last dimension, or that is empty.
        NotImplementedError: A gradient is wanted.
    """
    if takes_operator(x):
        if not torch.compiler.is_compiling():
            _plans.check_rows(x)
        pair: tuple[torch.Tensor, torch.Tensor] = _operators.quantize_per_token(x)
        return pair
    return _plans.quantize_per_token(x)
