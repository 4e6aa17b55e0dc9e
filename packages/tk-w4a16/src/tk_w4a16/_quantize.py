"""INT4 quantisation of weights in groups along the input features, in the plain layout.

The rule is that of `quantization` in the core.
"""

from __future__ import annotations

import torch

from tk_kernel_core.checks import check_same_device, check_shape, check_tensor
from tk_kernel_core.quantization import count_groups, decode_groups, quantize_groups, readable, row_chunks

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def pack_int4(q: torch.Tensor) -> torch.Tensor:
    """Pack eight codes along the input features into a word.

    Args:
        q: Codes within [0, 15], [K, N], any integer dtype and strides.

    Returns:
        int32 [ceil(K / 8), N], contiguous: bits 4 j to 4 j + 3 of word i hold the code of input feature 8 i + j; 0
        where there is none.

    Raises:
        TypeError: `q` has another dtype.
        ValueError: It is not a matrix, or a code lies beyond [0, 15].
    """
    _check_matrix("q", check_tensor("q", q, INTEGERS))
    if q.numel() and readable(q):
        low, high = (int(bound) for bound in q.aminmax())
        if low < 0 or high > 15:
            raise ValueError(f"q must hold codes within [0, 15], got {low} to {high}")
    k, n = q.shape
    octets = -(-k // 8)
    codes = torch.nn.functional.pad(q.to(torch.uint8), (0, 0, 0, 8 * octets - k)).view(octets, 4, 2, n)
    packed = torch.empty(octets, n, 4, dtype=torch.uint8, device=q.device)
    join_nibbles(codes[:, :, 0], codes[:, :, 1], packed.permute(0, 2, 1))
    return packed.view(torch.int32).squeeze(-1)


def unpack_int4(packed: torch.Tensor, k: int) -> torch.Tensor:
    """Return the codes that `pack_int4` packed.

    Args:
        packed: int32 [ceil(K / 8), N], any strides.
        k: K, the number of input features.

    Returns:
        uint8 [K, N].

    Raises:
        TypeError: `packed` is not int32.
        ValueError: It is not a matrix of that many rows.
    """
    return _plain_codes(packed, k).t()


def quantize_weight_int4_grouped(
    weight: torch.Tensor, group_size: int = 128, symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantise a weight to nearest, with one scale and zero point for every group of input features.

    Args:
        weight: [K, N], the transpose of a linear layer's; fp16, bf16, fp32 or fp64 (rounded to fp32 first), any
            strides.
        group_size: Input features in a group, the last of which may be shorter; -1, or K and more, for one group.
        symmetric: Whether every zero point is 8.

    Returns:
        `(packed, scales, zeros)`: int32 [ceil(K / 8), N] as from `pack_int4`, and [ceil(K / group_size), N] twice, with
        the dtype of the weight. None has a gradient.

    Raises:
        TypeError: The weight has another dtype, or the group size is no integer.
        ValueError: The weight is not a matrix, or is empty; the group size is neither positive nor -1; or a value is
            not finite in fp32, or its group too wide. The last cannot be seen in meta and fake tensors.
    """
    _check_matrix("weight", check_tensor("weight", weight, FLOATS))
    codes, scales, zeros = quantize_groups(weight.t(), group_size, symmetric)
    return pack_int4(codes.t()), scales.t().contiguous(), zeros.t().to(weight.dtype).contiguous()


def dequantize_int4(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int = 128
) -> torch.Tensor:
    """Return `(q - zero) * scale`, computed in fp32 (fp64 for fp64 scales) and rounded once.

    Args:
        packed: int32 [K / 8, N], as from `pack_int4` with K a multiple of 8.
        scales: Floating point, [ceil(K / group_size), N].
        zeros: Floating point, shaped like the scales, not necessarily integers; None for 8.
        group_size: Input features in a group; -1, or K and more, for one group.

    Returns:
        [K, N], with the dtype of the scales.

    Raises:
        TypeError: A tensor has another dtype, or the group size is no integer.
        ValueError: A tensor has another shape or device, or the group size is neither positive nor -1.
    """
    codes = check_plain(packed, scales, zeros, group_size)
    weight = torch.empty_like(codes, dtype=scales.dtype)
    shift = None if zeros is None else zeros.t()
    for rows in row_chunks(*codes.shape):
        weight[rows] = decode_groups(codes[rows], scales.t()[rows], None if shift is None else shift[rows], group_size)
    return weight.t()


def check_plain(
    packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int
) -> torch.Tensor:
    """Check a weight in the plain layout, K a multiple of 8, and return its codes: uint8 [N, K].

    Raises:
        TypeError: A tensor has another dtype, or the group size is no integer.
        ValueError: A tensor has another shape or device, or the group size is neither positive nor -1.
    """
    _check_matrix("packed", check_tensor("packed", packed, (torch.int32,)))
    k, n = 8 * packed.shape[0], packed.shape[1]
    groups = count_groups(k, group_size)
    for name, value in (("scales", scales), *([] if zeros is None else [("zeros", zeros)])):
        check_shape(name, check_tensor(name, value, FLOATS), (groups, n))
        check_same_device(name, value, packed.device, "packed")
    return _plain_codes(packed, k)


def join_nibbles(low: torch.Tensor, high: torch.Tensor, out: torch.Tensor) -> None:
    """Write `low + 16 * high`, all of them uint8, without a temporary tensor."""
    torch.bitwise_left_shift(high, 4, out=out)
    out.bitwise_or_(low)


def split_nibbles(packed: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
    """Write the lower and upper half of every byte, all of them uint8, without a temporary tensor."""
    torch.bitwise_and(packed, 15, out=low)
    torch.bitwise_right_shift(packed, 4, out=high)


def split_words(words: torch.Tensor) -> torch.Tensor:
    """Return the eight codes of every word of int32 [R, C], lowest bits first: uint8 [R, 8 C]."""
    # A contiguous tensor with a side of 1 may have strides that no view as bytes can have; a copy has not.
    parts = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    codes = torch.empty(*parts.shape, 2, dtype=torch.uint8, device=words.device)
    split_nibbles(parts, codes[..., 0], codes[..., 1])
    return codes.flatten(1)


def _plain_codes(packed: torch.Tensor, k: int) -> torch.Tensor:
    _check_matrix("packed", check_tensor("packed", packed, (torch.int32,)))
    if k < 0 or packed.shape[0] != -(-k // 8):
        raise ValueError(f"packed must have shape ({-(-k // 8)}, N) for k = {k}, got {tuple(packed.shape)}")
    return split_words(packed.t())[:, :k]


def _check_matrix(name: str, value: torch.Tensor) -> None:
    if value.ndim != 2:
        raise ValueError(f"{name} must have two dimensions, got shape {tuple(value.shape)}")
