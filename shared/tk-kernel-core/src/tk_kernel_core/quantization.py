"""The rules of int8 and int4 quantisation, for all packages that make codes.

All of int8 is fp32 whatever the dtype of the input, so that results agree bit for bit: a row with absolute maximum `a`
has the scale `a / 127` and the codes `round_half_even(t * (127 / a))` within [-127, 127]; both quotients are IEEE
divisions. A row below 2**-110, and so a row of zeros, has the scale 1 and codes 0: what is lost is less than fp16 can
hold. One with an infinity or NaN has the scale NaN and codes 0. `quantization_kernels` is the same in device code.

Int4 weights have scales for groups along the input features. A symmetric group with absolute maximum `a` has the
scale `a / 7` and the zero point 8. An asymmetric one has the range from minimum to maximum, which always includes 0,
the scale `(max - min) / 15` and the zero point `round(-min / scale)` within [0, 15]. The scale is rounded to the dtype
of the weight first, so that codes, `round(w / scale) + zero` within [0, 15], fit the scale they are stored with.
All roundings are half to even, and all quotients IEEE divisions.

A group whose scale would be 0 in this dtype has the scale 1, and the code of every value is the zero point.
"""

from __future__ import annotations

import math

import torch

from tk_kernel_core.checks import ACTIVATION_DTYPES, check_tensor

SYMMETRIC_ZERO = 8
"""The zero point of every group of a symmetric int4 weight."""

_LEAST_RANGE = 2.0**-110
# Elements that are in fp32 at a time.
_CHUNK = 2**22


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


def quantize_groups(
    weight: torch.Tensor, group_size: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise a floating-point weight to int4, with one scale and zero point for every group of a row.

    Args:
        weight: [N, K], fp16, bf16, fp32 or fp64 (rounded to fp32 first), any strides.
        group_size: Columns in a group, the last of which may be shorter; -1, or K and more, for one group.
        symmetric: Whether every zero point is 8.

    Returns:
        `(codes, scales, zeros)`: uint8 [N, K], the weight's dtype [N, ceil(K / group_size)], and uint8 of that shape.

    Raises:
        TypeError: The group size is no integer.
        ValueError: The weight is not a matrix, or is empty; the group size is neither positive nor -1; or a value is
            not finite in fp32, or its group too wide. The last cannot be seen in meta and fake tensors.
    """
    if weight.ndim != 2:
        raise ValueError(f"weight must have two dimensions, got shape {tuple(weight.shape)}")
    if weight.numel() == 0:
        raise ValueError(f"weight must have at least one element, got shape {tuple(weight.shape)}")
    n, k = weight.shape
    groups = count_groups(k, group_size)
    codes = torch.empty(n, k, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(n, groups, dtype=weight.dtype, device=weight.device)
    zeros = torch.empty(n, groups, dtype=torch.uint8, device=weight.device)
    for rows in row_chunks(n, k):
        # Zeros that fill the last group up do not change its range.
        values = grouped(weight.detach()[rows].to(torch.float32), groups, group_size)
        low, high = values.aminmax(dim=-1, keepdim=True)
        if symmetric:
            extent, levels = torch.maximum(-low, high), 7.0
        else:
            low = low.clamp(max=0.0)
            extent, levels = high.clamp(min=0.0) - low, 15.0
        _check_extent(extent)
        # PyTorch divides by a number, on GPUs, by way of a reciprocal.
        scale = (extent / torch.full_like(extent, levels)).to(weight.dtype)
        flat = scale == 0
        step = torch.where(flat, 1.0, scale).to(torch.float32)
        zero = torch.full_like(step, 8.0) if symmetric else (-low / step).round_().clamp_(0, 15)
        coded = torch.where(flat, zero, (values / step).round_().add_(zero).clamp_(0, 15))
        codes[rows] = coded.flatten(1)[:, :k].to(torch.uint8)
        scales[rows], zeros[rows] = step.squeeze(-1).to(weight.dtype), zero.squeeze(-1).to(torch.uint8)
    return codes, scales, zeros


def decode_groups(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group_size: int,
    compute: torch.dtype | None = None,
) -> torch.Tensor:
    """Return `(codes - zeros) * scales` in one dtype, by default fp64 for fp64 scales and fp32 for others.

    Args:
        codes: uint8 [N, K].
        scales: Floating point, [N, ceil(K / group_size)].
        zeros: Integers or floating point, shaped like the scales; None for 8.
        group_size: Input features in a group; -1, or K and more, for one group.
        compute: The dtype of all operations, and of the result.
    """
    if compute is None:
        compute = torch.float64 if scales.dtype == torch.float64 else torch.float32
    values = grouped(codes.to(compute), scales.shape[1], group_size)
    values = values - (SYMMETRIC_ZERO if zeros is None else zeros.to(compute).unsqueeze(-1))
    return (values * scales.to(compute).unsqueeze(-1)).flatten(1)[:, : codes.shape[1]]


def grouped(values: torch.Tensor, groups: int, group_size: int) -> torch.Tensor:
    """View [N, K] as [N, groups, group_size], after zeros that fill the last group up."""
    n, k = values.shape
    width = k if groups == 1 else group_size
    return torch.nn.functional.pad(values, (0, groups * width - k)).view(n, groups, width)


def count_groups(k: int, group_size: object) -> int:
    """Return how many groups `k` input features have.

    Raises:
        TypeError: The group size is no integer.
        ValueError: It is neither positive nor -1.
    """
    if isinstance(group_size, bool) or not isinstance(group_size, int):
        raise TypeError(f"group_size must be an int, got {type(group_size).__name__}")
    if group_size != -1 and group_size < 1:
        raise ValueError(f"group_size must be positive, or -1 for one group, got {group_size}")
    return 1 if group_size == -1 else -(-k // group_size)


def row_chunks(n: int, k: int, multiple: int = 1) -> list[slice]:
    """Split `n` rows of `k` elements into parts of about four million elements and of whole multiples of rows."""
    step = max(1, _CHUNK // max(1, k) // multiple) * multiple
    return [slice(start, min(n, start + step)) for start in range(0, n, step)]


def readable(*tensors: torch.Tensor) -> bool:
    """Whether the values of tensors can be looked at."""
    return not torch.compiler.is_compiling() and all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta for tensor in tensors
    )


def _check_extent(extent: torch.Tensor) -> None:
    """Refuse weights that are not finite, where values can be looked at: a NaN would surface in results only."""
    if readable(extent) and not bool(extent.isfinite().all()):
        bad = int((~extent.isfinite()).sum())
        raise ValueError(
            "weight must be finite in float32, and so must be the width of its range; "
            f"got infinities, NaN or too wide a range in {bad} groups or more"
        )
