"""INT8 quantisation of weights, and what it costs in accuracy.

One rule for every path, all of it in fp32 whatever the dtype of the input, so that results agree bit for bit:
a row with absolute maximum `a` has the scale `a / 127` and the codes `round_half_even(t * (127 / a))` within
[-127, 127]; both quotients are IEEE divisions. With a zero point the range from minimum to maximum, which always
includes 0, takes the place of `a`, 255 the place of 127, and [-128, 127] that of [-127, 127].

A range below 2**-110, and so a row of zeros, has the scale 1 and codes 0: what is lost is less than fp16 can hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any

import torch

from tk_kernel_core.checks import check_choice, check_shape, check_tensor
from tk_kernel_core.quantization import encode, steps, symmetric_steps

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ZERO_POINTS = (torch.int8, torch.int32, *FLOATS)

# Elements that are in fp32 at a time.
_CHUNK = 2**22


class QuantScheme(str, Enum):
    """How codes stand for values."""

    SYMMETRIC = "symmetric"
    """`value = code * scale`, codes in [-127, 127]."""
    ASYMMETRIC = "asymmetric"
    """`value = (code - zero_point) * scale`, codes in [-128, 127]."""


def quantize(
    tensor: torch.Tensor, scheme: QuantScheme | str = "symmetric", bits: int = 8, dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Quantise by `quantize_symmetric` or `quantize_asymmetric`.

    Args:
        tensor: As for these.
        scheme: `symmetric` or `asymmetric`.
        bits: 8.
        dim: As for these.

    Returns:
        `(codes, scale, zero_point)`; the zero point is None for the symmetric scheme.

    Raises:
        TypeError: As from these.
        ValueError: As from these, or another scheme.
    """
    if check_choice("scheme", scheme, [member.value for member in QuantScheme]) == QuantScheme.SYMMETRIC:
        return (*quantize_symmetric(tensor, bits, dim), None)
    return quantize_asymmetric(tensor, bits, dim)


def quantize_symmetric(
    tensor: torch.Tensor, bits: int = 8, dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise to `tensor ~ codes * scale`, codes within [-127, 127].

    Args:
        tensor: Any shape and strides, fp16, bf16, fp32 or fp64 (rounded to fp32 first).
        bits: 8.
        dim: The dimension that shares a scale: 1 of an [out, in] weight gives one scale per output channel.
            None: one scale for the whole tensor.

    Returns:
        `(codes, scale)`: int8 of the tensor's shape, contiguous, and fp32 of that shape without `dim`, or of shape
        () if that is None. A range of zero has the scale 1. Neither has a gradient.

    Raises:
        TypeError: The tensor has another dtype.
        ValueError: Other bits, no such dimension, nothing along it, or a value that is not finite in fp32. The last
            cannot be seen in meta and fake tensors, nor while compiling: scales are then NaN, and their codes 0.
    """
    return _symmetric("tensor", tensor, bits, dim)


def quantize_asymmetric(
    tensor: torch.Tensor, bits: int = 8, dim: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise to `tensor ~ (codes - zero_point) * scale`, codes within [-128, 127].

    The range includes 0, which therefore is exact; a constant c has the range from 0 to c.

    Args:
        tensor: As for `quantize_symmetric`.
        bits: 8.
        dim: As for `quantize_symmetric`.

    Returns:
        `(codes, scale, zero_point)`: as from `quantize_symmetric`, and int8 of the shape of the scale. A range of zero
        has the scale 1 and the zero point 0.

    Raises:
        TypeError: The tensor has another dtype.
        ValueError: As from `quantize_symmetric`, or a range beyond fp32.
    """
    return _asymmetric("tensor", tensor, bits, dim)


def quantize_weight_per_channel(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight with one symmetric scale per output channel.

    Args:
        weight: [out_features, in_features]; dtypes as for `quantize_symmetric`.

    Returns:
        `(weight_int8, scale)`: int8 [out_features, in_features], fp32 [out_features].

    Raises:
        TypeError: The weight has another dtype.
        ValueError: It is not a matrix, has no input features, or a value that is not finite.
    """
    return _symmetric("weight", _matrix(weight), 8, 1)


def quantize_weight_per_channel_asymmetric(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise a weight with one scale and one zero point per output channel.

    Args:
        weight: [out_features, in_features]; dtypes as for `quantize_symmetric`.

    Returns:
        `(weight_int8, scale, zero_point)`: int8 [out_features, in_features], fp32 and int8 [out_features].

    Raises:
        TypeError: The weight has another dtype.
        ValueError: As from `quantize_weight_per_channel`, or a range beyond fp32.
    """
    return _asymmetric("weight", _matrix(weight), 8, 1)


def dequantize(
    q: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype = torch.float16,
    dim: int | None = None,
    zero_point: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `(q - zero_point) * scale`, computed in fp32 (fp64 for that `dtype`) and rounded once.

    Args:
        q: int8 codes of any shape.
        scale: Floating point; of shape () or (1,), of as many dimensions as `q` and broadcastable to it, or one of:
            without `dim`, the shape of `q` but for its last dimension (per row); with `dim`, a vector along it. The
            scales of `quantize_symmetric(weight, dim=1)` are per row, which here is `dim` None or 0.
        dtype: fp16, bf16, fp32 or fp64. A value beyond its range becomes infinite.
        dim: The dimension of `q` along which the vectors `scale` and `zero_point` lie.
        zero_point: int8, int32 or floating point, of a shape as for `scale`, or None for 0.

    Returns:
        A tensor of the shape of `q`. Where the scale is NaN, so are the values.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A shape does not fit, or no such dtype or dimension.
    """
    check_choice("dtype", dtype, FLOATS)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    check_tensor("q", q, (torch.int8,))
    scale = _broadcastable("scale", check_tensor("scale", scale, FLOATS), q, dim).to(torch.float32)
    values = q.to(compute)
    if zero_point is not None:
        check_tensor("zero_point", zero_point, ZERO_POINTS)
        values = values - _broadcastable("zero_point", zero_point, q, dim).to(torch.float32)
    return (values * scale).to(dtype)


def calculate_quantization_error(
    original: torch.Tensor,
    q: torch.Tensor,
    scale: torch.Tensor,
    dim: int | None = None,
    zero_point: torch.Tensor | None = None,
) -> dict[str, float]:
    """Compare codes with what they stand for, in fp64; values dequantised to fp32, or to fp64 for such an `original`.

    Args:
        original: What was quantised.
        q: Its int8 codes.
        scale: As for `dequantize`.
        dim: As for `dequantize`.
        zero_point: As for `dequantize`.

    Returns:
        `max_abs_error`, `mean_abs_error`, `relative_error_pct`: the mean of |error| / |value| in per cent, over the
        values beyond 10 % of the largest magnitude (0 if there are none), and `snr_db`: 10 log10 of the sum of squares
        over that of the errors, infinite without an error, minus infinity if zeros have errors. NaN and infinities
        in the operands make them NaN or infinite.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: As from `dequantize`, `original` has another shape than `q`, or nothing in it.
    """
    check_tensor("original", original, FLOATS)
    check_tensor("q", q, (torch.int8,))
    check_shape("original", original, q.shape)
    _check_extent("original", original, None)
    shift = torch.zeros_like(scale) if zero_point is None else zero_point
    spread = [_broadcastable("scale", scale, q, dim), _broadcastable("zero_point", shift, q, dim)]
    dtype = torch.float64 if original.dtype == torch.float64 else torch.float32
    low, high = original.detach().aminmax()
    threshold = 0.1 * torch.maximum(-low, high).to(torch.float64)
    parts = []
    for value, codes, factor, zero in _chunks(original.detach(), q, *(side.detach().expand_as(q) for side in spread)):
        size = value.to(torch.float64).abs()
        error = (value.to(torch.float64) - dequantize(codes, factor, dtype, zero_point=zero)).abs()
        large = size > threshold
        relative = torch.where(large, error / size, 0.0).sum()
        parts.append(
            torch.stack((error.amax(), error.sum(), relative, large.sum(), size.square().sum(), error.square().sum()))
        )
    table = torch.stack(parts)
    total, relative_total, count, signal, noise = table[:, 1:].sum(0).tolist()
    return {
        "max_abs_error": table[:, 0].amax().item(),
        "mean_abs_error": total / original.numel(),
        "relative_error_pct": 100.0 * relative_total / max(count, 1.0),
        "snr_db": math.inf if noise == 0 else 10.0 * (_log10(signal) - _log10(noise)),
    }


def channel_vector(name: str, value: torch.Tensor, channels: int, dtypes: Sequence[torch.dtype]) -> torch.Tensor:
    """Bring scales or zero points to one fp32 value per output channel.

    Args:
        name: Argument name for messages.
        value: Of shape (), (1,), [channels], [channels, 1] or [1, channels].
        channels: Number of output channels.
        dtypes: What is accepted.

    Returns:
        fp32 [channels], contiguous; it shares the memory of `value` where that is fp32 and one per channel.

    Raises:
        TypeError: It has another dtype.
        ValueError: It has another shape.
    """
    check_channels(name, value, channels, dtypes)
    return value.to(torch.float32).reshape(-1).expand(channels).contiguous()


def check_channels(name: str, value: Any, channels: int, dtypes: Sequence[torch.dtype]) -> None:
    """Raise TypeError or ValueError unless a tensor holds one value for all output channels, or one for each."""
    shape = tuple(check_tensor(name, value, dtypes).shape)
    if shape not in ((), (1,), (channels,), (channels, 1), (1, channels)):
        raise ValueError(
            f"{name} must have shape ({channels},), or (), (1,), ({channels}, 1) or (1, {channels}), got {shape}"
        )


def _symmetric(name: str, tensor: torch.Tensor, bits: int, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    low, high = _range(name, tensor, bits, dim)
    scale, factor = symmetric_steps(low, high)
    _check_scale(name, scale)
    return _encode_chunks(tensor, factor, torch.zeros_like(factor), -127), _without(dim, scale)


def _asymmetric(
    name: str, tensor: torch.Tensor, bits: int, dim: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    low, high = _range(name, tensor, bits, dim)
    low, high = low.clamp(max=0.0), high.clamp(min=0.0)
    scale, factor = steps(high - low, 255.0)
    _check_scale(name, scale)
    # Without a range the zero point is 0.
    zero_point = torch.where(factor == 0, 0.0, (-128.0 - low * factor).round().clamp(-128, 127))
    codes = _encode_chunks(tensor, factor, zero_point, -128)
    return codes, _without(dim, scale), _without(dim, zero_point.to(torch.int8))


def _range(name: str, tensor: torch.Tensor, bits: int, dim: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return minimum and maximum in fp32, over `dim` or everything, with the tensor's number of dimensions."""
    check_tensor(name, tensor, FLOATS)
    check_choice("bits", bits, (8,))
    check_choice("dim", dim, (None, *range(-tensor.ndim, tensor.ndim)))
    _check_extent(name, tensor, dim)
    values = tensor.detach()
    # Rounding to fp32 keeps the order, so that it may come last.
    low, high = values.aminmax() if dim is None else values.aminmax(dim=dim, keepdim=True)
    if dim is None:
        sides = [1] * tensor.ndim
        low, high = low.reshape(sides), high.reshape(sides)
    return low.to(torch.float32), high.to(torch.float32)


def _without(dim: int | None, value: torch.Tensor) -> torch.Tensor:
    return value.reshape(()) if dim is None else value.squeeze(dim)


def _encode_chunks(tensor: torch.Tensor, factor: torch.Tensor, zero_point: torch.Tensor, lowest: int) -> torch.Tensor:
    codes = torch.empty(tensor.shape, dtype=torch.int8, device=tensor.device)
    spread = (factor.expand_as(tensor), zero_point.expand_as(tensor))
    for values, factors, zeros, target in _chunks(tensor.detach(), *spread, codes):
        target.copy_(encode(values, factors, zeros, lowest))
    return codes


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Split tensors of one shape along the first dimension, into views of about `_CHUNK` elements."""
    views = [torch.atleast_1d(tensor) for tensor in tensors]
    per_row = math.prod(views[0].shape[1:])
    return zip(*(view.split(max(1, _CHUNK // max(1, per_row))) for view in views), strict=True)


def _matrix(weight: torch.Tensor) -> torch.Tensor:
    if check_tensor("weight", weight, FLOATS).ndim != 2:
        raise ValueError(f"weight must have shape [out_features, in_features], got {tuple(weight.shape)}")
    return weight


def _check_extent(name: str, tensor: torch.Tensor, dim: int | None) -> None:
    if (tensor.numel() if dim is None else tensor.shape[dim]) == 0:
        where = "" if dim is None else f" along dim {dim}"
        raise ValueError(f"{name} must have at least one element{where}, got shape {tuple(tensor.shape)}")


def _check_scale(name: str, scale: torch.Tensor) -> None:
    """Refuse weights that are not finite, where values can be looked at: a NaN would surface in results only."""
    if torch.compiler.is_compiling() or type(scale) is not torch.Tensor or scale.is_meta:
        return
    bad = int(scale.isnan().sum())
    if bad:
        raise ValueError(
            f"{name} must be finite in float32, and so must be the width of its range; "
            f"got infinities, NaN or too wide a range in {bad} of {scale.numel()} channels"
        )


def _broadcastable(name: str, value: torch.Tensor, like: torch.Tensor, dim: int | None) -> torch.Tensor:
    """Return a view of scales or zero points that has the dimensions of `like` and broadcasts to it."""
    check_choice("dim", dim, (None, *range(-like.ndim, like.ndim)))
    sides = [1] * like.ndim
    view = value
    if value.numel() == 1:
        view = value.reshape(sides)
    elif value.ndim != like.ndim and dim is None:
        view = value.unsqueeze(-1)
    elif value.ndim != like.ndim and dim is not None and value.ndim == 1:
        sides[dim] = -1
        view = value.reshape(sides)
    if view.ndim != like.ndim or any(side not in (1, full) for side, full in zip(view.shape, like.shape, strict=True)):
        usual = tuple(like.shape[:-1]) if dim is None else (like.shape[dim],)
        raise ValueError(
            f"{name} must have shape (), (1,), {usual} or one of {like.ndim} dimensions that broadcasts to "
            f"{tuple(like.shape)}, got {tuple(value.shape)}"
        )
    return view


def _log10(value: float) -> float:
    return math.log10(value) if value != 0 else -math.inf
