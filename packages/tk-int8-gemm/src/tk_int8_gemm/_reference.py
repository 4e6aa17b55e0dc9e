"""The same mathematics in PyTorch: the CPU path without Triton, and the ground truth of the tests."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from tk_int8_gemm._quantize import FLOATS, ZERO_POINTS, channel_vector
from tk_kernel_core.checks import check_choice, check_shape, check_tensor
from tk_kernel_core.quantization import quantize_per_token_torch as quantize_per_token_torch


def int8_gemm_torch(
    x: torch.Tensor,
    weight_int8: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by a quantised weight by PyTorch operations, in fp32 (fp64 for a float64 `x`).

    `y = (x @ (weight_int8 - zero_point).T) * scale + bias`, rounded once. PyTorch differentiates it by `x` and `bias`.

    An infinity or NaN in a row of `x` makes this row of the result infinite or NaN, and no other. The weight is held
    in the compute dtype meanwhile.

    Args:
        x: [..., K], any strides; fp16, bf16, fp32 or fp64.
        weight_int8: int8 codes, [N, K].
        scale: Floating point; of shape (), (1,), [N], [N, 1] or [1, N]; rounded to fp32.
        bias: [N], or None.
        zero_point: int8, int32 or floating point, of a shape as for `scale`, or None for 0.

    Returns:
        [..., N], with the dtype of `x`.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A tensor has another shape.
    """
    _check_operands(check_tensor("x", x, FLOATS), weight_int8)
    values = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    return _affine(values, None, weight_int8, scale, bias, zero_point).to(x.dtype)


def w8a8_gemm_torch(
    x: torch.Tensor,
    weight_int8: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    zero_point: torch.Tensor | None = None,
    x_scale: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Multiply quantised activations by a quantised weight by PyTorch operations, in fp64.

    `y = (x_int8 @ (weight_int8 - zero_point).T) * x_scale * scale + bias`, rounded once. The sums of codes are exact.
    Where `x` is quantised here, its gradient is as if it had not been (straight through).

    An infinity or NaN in a row of a floating-point `x` makes all of this row of the result NaN, and no other. The
    weight is held in fp64 meanwhile.

    Args:
        x: [..., K], any strides; floating point, to be quantised as by `quantize_per_token_torch`, or int8 codes.
        weight_int8: int8 codes, [N, K].
        scale: As for `int8_gemm_torch`.
        bias: [N], or None.
        zero_point: As for `int8_gemm_torch`.
        x_scale: fp32, of the shape of `x` without its last dimension; for int8 codes, and only for those.
        out_dtype: Dtype of the result; that of a floating-point `x` if None.

    Returns:
        [..., N], of dtype `out_dtype`.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A tensor has another shape, `x_scale` or `out_dtype` is missing for int8 codes, or `x_scale` is
            given for others.
    """
    _check_operands(check_tensor("x", x, (*FLOATS, torch.int8)), weight_int8)
    if x.dtype == torch.int8:
        if x_scale is None or out_dtype is None:
            missing = "x_scale" if x_scale is None else "out_dtype"
            raise ValueError(f"{missing} must be given for an int8 x, got None")
        check_shape("x_scale", check_tensor("x_scale", x_scale, (torch.float32,)), x.shape[:-1])
        values = x.to(torch.float64)
    else:
        if x_scale is not None:
            raise ValueError(f"x_scale must be None unless x is int8, got {tuple(x_scale.shape)} with {x.dtype}")
        codes, x_scale = quantize_per_token_torch(x)
        steps = x.to(torch.float64) / x_scale.unsqueeze(-1)
        # The difference is zero, and carries the gradient.
        values = codes + (steps - steps.detach())
    dtype = check_choice("out_dtype", x.dtype if out_dtype is None else out_dtype, FLOATS)
    return _affine(values, x_scale, weight_int8, scale, bias, zero_point).to(dtype)


def _affine(
    values: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight_int8: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    zero_point: torch.Tensor | None,
) -> torch.Tensor:
    channels, dtype = weight_int8.shape[0], values.dtype
    weight = weight_int8.to(dtype)
    if zero_point is not None:
        weight = weight - channel_vector("zero_point", zero_point, channels, ZERO_POINTS).to(dtype).unsqueeze(-1)
    with no_autocast(values.device.type):
        y = values @ weight.T
    if x_scale is not None:
        y = y * x_scale.to(dtype).unsqueeze(-1)
    y = y * channel_vector("scale", scale, channels, FLOATS).to(dtype)
    if bias is not None:
        check_shape("bias", check_tensor("bias", bias, FLOATS), (channels,))
        y = y + bias.to(dtype)
    return y


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Keep autocast from rounding the operands of a product to 16 bits."""
    # Which devices have autocast at all torch.compile cannot ask, of PyTorch 2.11.
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


def _check_operands(x: torch.Tensor, weight_int8: torch.Tensor) -> None:
    if check_tensor("weight_int8", weight_int8, (torch.int8,)).ndim != 2:
        raise ValueError(f"weight_int8 must have shape [N, K], got {tuple(weight_int8.shape)}")
    if x.ndim == 0 or x.shape[-1] != weight_int8.shape[1]:
        raise ValueError(f"x must have shape [..., {weight_int8.shape[1]}], got {tuple(x.shape)}")
