"""The same mathematics in PyTorch: the CPU path without Triton, and the ground truth of the tests."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from tk_kernel_core.checks import check_same_device, check_shape, check_tensor
from tk_kernel_core.quantization import decode_groups
from tk_w4a16._packing import PackedInt4Weight
from tk_w4a16._quantize import FLOATS, check_plain


def w4a16_reference(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int = 128
) -> torch.Tensor:
    """Multiply by a weight in the plain layout by PyTorch operations, in fp32 (fp64 for a float64 `x`).

    `y = x @ ((q - zeros) * scales)`, rounded once; the dequantised weight, which is held in the compute dtype
    meanwhile, is not. PyTorch differentiates it by `x`.

    An infinity or NaN in a row of `x` makes this row of the result infinite or NaN, and no other.

    Args:
        x: [..., K], any strides; fp16, bf16, fp32 or fp64.
        packed: int32, [K / 8, N], as from `pack_int4`.
        scales: Floating point, [ceil(K / group_size), N].
        zeros: Floating point, shaped like the scales, not necessarily integers; None for 8.
        group_size: Input features in a group; -1, or K and more, for one group.

    Returns:
        [..., N], with the dtype of `x`.

    Raises:
        TypeError: A tensor has another dtype, or the group size is no integer.
        ValueError: A tensor has another shape or device, or the group size is neither positive nor -1.
    """
    check_tensor("x", x, FLOATS)
    codes = check_plain(packed, scales, zeros, group_size)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    shift = None if zeros is None else zeros.t()
    return _multiply(x, decode_groups(codes, scales.t(), shift, group_size, compute), None)


def w4a16_linear_torch(x: torch.Tensor, weight: PackedInt4Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply by a prepared weight by PyTorch operations, in fp32 (fp64 for a float64 `x`).

    `y = x @ weight.T + bias`, rounded once; the dequantised weight, which is held in the compute dtype meanwhile, is
    not. PyTorch differentiates it by `x` and `bias`.

    An infinity or NaN in a row of `x` makes this row of the result infinite or NaN, and no other.

    Args:
        x: [..., in_features], any strides; fp16, bf16, fp32 or fp64.
        weight: A prepared weight.
        bias: Floating point, [out_features], or None.

    Returns:
        [..., out_features], with the dtype of `x`.

    Raises:
        TypeError: A tensor has another dtype, or the weight is not a prepared one.
        ValueError: A tensor has another shape or device.
    """
    check_tensor("x", x, FLOATS)
    if not isinstance(weight, PackedInt4Weight):
        raise TypeError(f"weight must be a PackedInt4Weight, got {type(weight).__name__}")
    return _multiply(x, weight.dequantize(torch.float64 if x.dtype == torch.float64 else torch.float32), bias)


def _multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    n, k = weight.shape
    if x.ndim == 0 or x.shape[-1] != k:
        raise ValueError(f"x must have shape [..., {k}], got {tuple(x.shape)}")
    check_same_device("x", x, weight.device, "the weight")
    with no_autocast(x.device.type):
        y = x.to(weight.dtype) @ weight.T
    if bias is not None:
        check_shape("bias", check_tensor("bias", bias, FLOATS), (n,))
        check_same_device("bias", bias, weight.device, "the weight")
        y = y + bias.to(weight.dtype)
    return y.to(x.dtype)


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Keep autocast from rounding the operands of a product to 16 bits."""
    # Which devices have autocast at all torch.compile cannot ask, of PyTorch 2.11.
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)
