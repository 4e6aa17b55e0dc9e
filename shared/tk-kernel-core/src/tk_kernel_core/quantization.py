"""The rule of int8 quantisation, for all packages whose results are codes.

All of it is fp32 whatever the dtype of the input, so that results agree bit for bit: a row with absolute maximum `a`
has the scale `a / 127` and the codes `round_half_even(t * (127 / a))` within [-127, 127]; both quotients are IEEE
divisions. A row below 2**-110, and so a row of zeros, has the scale 1 and codes 0: what is lost is less than fp16 can
hold. One with an infinity or NaN has the scale NaN and codes 0. `quantization_kernels` is the same in device code.
"""

from __future__ import annotations

import math

import torch

from tk_kernel_core.checks import ACTIVATION_DTYPES, check_tensor

_LEAST_RANGE = 2.0**-110


def quantize_per_token_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row over the last dimension symmetrically, by PyTorch operations in fp32.

    A row whose magnitudes all lie below 2**-110 has the scale 1 and codes 0. A row with an infinity or NaN has the
    scale NaN and codes 0.

    Args:
        x: [..., K], any strides; fp16, bf16, fp32 or fp64 (rounded to fp32 first).

    Returns:
        `(codes, x_scale)`: int8 [..., K], contiguous, and fp32 [...], both without gradients.

    Raises:
        TypeError: `x` has another dtype.
        ValueError: It has no last dimension, or that is empty.
    """
    check_rows(check_tensor("x", x, (*ACTIVATION_DTYPES, torch.float64)))
    values = x.detach().to(torch.float32)
    scale, factor = symmetric_steps(*values.aminmax(dim=-1, keepdim=True))
    return encode(values, factor, None, -127).contiguous(), scale.squeeze(-1)


def check_rows(x: torch.Tensor) -> None:
    """Raise ValueError unless the tensor has a last dimension that is not empty: no elements have no scale."""
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have shape [..., K] with K from 1, got {tuple(x.shape)}")


def symmetric_steps(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and factor, `absmax / 127` and `127 / absmax`, of values in fp32 from `low` to `high`.

    Ranges that are not finite have the scale NaN, too small ones 1; the factor is 0 for both.
    """
    return steps(torch.maximum(-low, high), 127.0)


def steps(extent: torch.Tensor, levels: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scale and factor, `extent / levels` and `levels / extent`, as `symmetric_steps` for any range in fp32."""
    # PyTorch divides a number by a tensor, and on GPUs a tensor by a number, by way of a reciprocal.
    top = torch.full_like(extent, levels)
    tiny = extent < _LEAST_RANGE
    finite = extent.isfinite()
    scale = torch.where(tiny, 1.0, torch.where(finite, extent / top, math.nan))
    return scale, torch.where(finite & ~tiny, top / extent, 0.0)


def encode(values: torch.Tensor, factor: torch.Tensor, zero_point: torch.Tensor | None, lowest: int) -> torch.Tensor:
    """Return `round_half_even(values * factor + zero_point)` within [lowest, 127], as int8; 0 for NaN."""
    scaled = values.to(torch.float32) * factor
    if zero_point is not None:
        scaled = scaled.add_(zero_point)
    # What int8 makes of NaN depends on the machine.
    return scaled.round_().clamp_(lowest, 127).nan_to_num_(0.0).to(torch.int8)
