"""Readers of 4-bit checkpoints: every format brought to one form, `Int4Weight`, exactly.

| format | codes | zero points |
|---|---|---|
| GPTQ | int32 [K / 8, N], 8 consecutive k in a word, lowest bits first | int32 [G, N / 8], 8 consecutive n in a word |
| AWQ | int32 [K, N / 8], the columns 0, 2, 4, 6, 1, 3, 5, 7 of each 8 in a word | int32 [G, N / 8], in the same order |
| compressed-tensors | int32 [N, K / 8], 8 consecutive k in a word | int32 [N / 8, G], 8 consecutive n in a word |

Scales are [G, N] in GPTQ and AWQ, and [N, G] in compressed-tensors. GPTQ of `checkpoint_format="gptq"` stores zero
points minus one, "gptq_v2" as they are. compressed-tensors has signed codes and zero points, each stored plus 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tk_kernel_core.checks import ACTIVATION_DTYPES, check_choice, check_same_device, check_shape, check_tensor
from tk_kernel_core.quantization import count_groups, quantize_groups, readable
from tk_w4a16._quantize import check_plain, split_nibbles, split_words

LARGEST_ZERO = 16
"""The largest zero point: what GPTQ's 15, stored minus one, stands for."""


@dataclass(frozen=True, eq=False)
class Int4Weight:
    """A 4-bit weight in neutral form: `(codes[n, k] - zeros[n, g]) * scales[n, g]`, g the group of k.

    Attributes:
        codes: uint8 [N, K], within [0, 15].
        scales: fp16, bf16 or fp32, finite, [N, G].
        zeros: uint8 [N, G], within [0, 16]; None where all of them are 8.
        group_index: int64 [K], the group of each input feature; None for k // group_size.
        group_size: Input features in a group, the last of which may be shorter; -1 for one group.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_index: torch.Tensor | None
    group_size: int


def read_float(weight: torch.Tensor, group_size: int, symmetric: bool) -> Int4Weight:
    """Quantise a weight [N, K] by the rule of `quantize_weight_int4_grouped`; fp16, bf16 or fp32."""
    codes, scales, zeros = quantize_groups(check_tensor("weight", weight), group_size, symmetric)
    neutral = _neutral("weight", codes, "scales", scales, None, group_size)
    return neutral if symmetric else replace(neutral, zeros=zeros)


def read_int4(packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int) -> Int4Weight:
    """Read the plain layout of `pack_int4`, whose zero points must be integers within [0, 16]."""
    check_tensor("scales", scales)
    codes = check_plain(packed, scales, zeros, group_size)
    neutral = _neutral("packed", codes, "scales", scales.t(), None, group_size)
    if zeros is None:
        return neutral
    if readable(zeros) and not bool(((zeros >= 0) & (zeros <= LARGEST_ZERO) & (zeros == zeros.round())).all()):
        raise ValueError(
            f"zeros must be integers within [0, {LARGEST_ZERO}] in a prepared weight, got "
            f"{zeros.min().item():g} to {zeros.max().item():g}: w4a16_reference takes any"
        )
    return replace(neutral, zeros=zeros.t().to(torch.uint8))


def read_gptq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor | None,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    *,
    group_size: int,
    checkpoint_format: str,
    symmetric: bool,
    desc_act: bool,
    bits: int,
) -> Int4Weight:
    """Read a GPTQ weight; `PackedInt4Weight.from_gptq` describes the arguments."""
    check_choice("checkpoint_format", checkpoint_format, ("gptq", "gptq_v2"))
    check_choice("bits", bits, (4,))
    if desc_act and g_idx is None:
        raise ValueError("g_idx must be given where desc_act is True, got None")
    _check_matrix("qweight", qweight, "[K / 8, N]")
    _check_matrix("scales", scales, "[G, N]", ACTIVATION_DTYPES)
    codes, n = split_words(qweight.t()), qweight.shape[1]
    neutral = _neutral("qweight", codes, "scales", scales.t(), g_idx, group_size, transposed=True)
    if symmetric:
        return neutral
    stored = _check_zeros("qzeros", qzeros, (scales.shape[0], -(-n // 8)), "qweight", qweight)
    # Without a mask: a stored 15 is 16 and not 0.
    return replace(neutral, zeros=split_words(stored)[:, :n].t() + (1 if checkpoint_format == "gptq" else 0))


def read_awq(
    qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, *, group_size: int, version: str, bits: int
) -> Int4Weight:
    """Read an AWQ weight; `PackedInt4Weight.from_awq` describes the arguments."""
    check_choice("version", version, ("gemm", "GEMM"))
    check_choice("bits", bits, (4,))
    _check_matrix("qweight", qweight, "[K, N / 8]")
    _check_matrix("scales", scales, "[G, N]", ACTIVATION_DTYPES)
    neutral = _neutral("qweight", _split_awq(qweight), "scales", scales.t(), None, group_size, transposed=True)
    stored = _check_zeros("qzeros", qzeros, (scales.shape[0], qweight.shape[1]), "qweight", qweight)
    return replace(neutral, zeros=_split_awq(stored))


def read_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_shape: torch.Tensor | Sequence[int],
    weight_zero_point: torch.Tensor | None,
    weight_g_idx: torch.Tensor | None,
    *,
    group_size: int,
    symmetric: bool,
    bits: int,
) -> Int4Weight:
    """Read a pack-quantized weight; `PackedInt4Weight.from_compressed_tensors` describes the arguments."""
    check_choice("bits", bits, (4,))
    _check_matrix("weight_packed", weight_packed, "[N, ceil(K / 8)]")
    _check_matrix("weight_scale", weight_scale, "[N, G]", ACTIVATION_DTYPES)
    if isinstance(weight_shape, torch.Tensor) and readable(weight_shape):
        weight_shape = weight_shape.flatten().tolist()
    if not isinstance(weight_shape, Sequence):
        kind = type(weight_shape).__name__
        raise TypeError(f"weight_shape must be a sequence, or a tensor whose values can be read, got {kind}")
    n, octets = weight_packed.shape
    if len(weight_shape) != 2 or weight_shape[0] != n or weight_shape[1] not in range(8 * octets - 7, 8 * octets + 1):
        raise ValueError(
            f"weight_shape must be (N, K) of a weight packed to [N, ceil(K / 8)] = {(n, octets)}, "
            f"got {tuple(weight_shape)}"
        )
    if isinstance(weight_g_idx, torch.Tensor) and readable(weight_g_idx) and bool((weight_g_idx == -1).all()):
        # What the format fills an index with that is not in use.
        weight_g_idx = None
    codes = split_words(weight_packed)[:, : int(weight_shape[1])]
    neutral = _neutral("weight_packed", codes, "weight_scale", weight_scale, weight_g_idx, group_size, "weight_g_idx")
    if symmetric:
        return neutral
    shape = (-(-n // 8), weight_scale.shape[1])
    stored = _check_zeros("weight_zero_point", weight_zero_point, shape, "weight_packed", weight_packed)
    return replace(neutral, zeros=split_words(stored.t())[:, :n].t())


def _neutral(
    owner: str,
    codes: torch.Tensor,
    name: str,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
    group_size: int,
    g_name: str = "g_idx",
    *,
    transposed: bool = False,
) -> Int4Weight:
    """Return a symmetric weight, its scales [N, G] checked and its group index, `transposed` if stored as [G, N]."""
    n, k = codes.shape
    if codes.numel() == 0:
        raise ValueError(f"{owner} must hold at least one code, got a weight of shape {(n, k)}")
    groups = count_groups(k, group_size)
    if g_idx is not None and group_size != -1:
        # Any number of groups, of which a slice of the input features may use a few.
        groups = max(1, scales.shape[1])
    if tuple(scales.shape) != (n, groups):
        wanted, got = ((groups, n), tuple(scales.t().shape)) if transposed else ((n, groups), tuple(scales.shape))
        raise ValueError(
            f"{name} must have shape {wanted} for {n} output features and {k} input features in groups of "
            f"{group_size}, got {got}"
        )
    check_same_device(name, scales, codes.device, owner)
    if readable(scales) and not bool(scales.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {int((~scales.isfinite()).sum())} infinities and NaN")
    if g_idx is not None:
        check_shape(g_name, check_tensor(g_name, g_idx, (torch.int32, torch.int64)), (k,))
        check_same_device(g_name, g_idx, codes.device, owner)
        if readable(g_idx):
            low, high = (int(bound) for bound in g_idx.aminmax())
            if low < 0 or high >= groups:
                raise ValueError(
                    f"{g_name} must be within [0, {groups - 1}], the groups of {name}, got {low} to {high}"
                )
        g_idx = None if groups == 1 else g_idx.to(torch.int64)
    return Int4Weight(codes, scales.detach(), None, g_idx, -1 if groups == 1 else group_size)


def _check_zeros(
    name: str, value: torch.Tensor | None, shape: tuple[int, int], owner: str, like: torch.Tensor
) -> torch.Tensor:
    """Check the packed zero points of a weight that is not symmetric."""
    if value is None or (isinstance(value, torch.Tensor) and value.numel() == 0):
        got = "None" if value is None else f"an empty tensor of shape {tuple(value.shape)}"
        raise ValueError(f"{name} must be given unless the weight is symmetric, got {got}")
    check_shape(name, check_tensor(name, value, (torch.int32,)), shape)
    check_same_device(name, value, like.device, owner)
    return value


def _check_matrix(name: str, value: torch.Tensor, form: str, dtypes: Sequence[torch.dtype] = (torch.int32,)) -> None:
    if check_tensor(name, value, dtypes).ndim != 2:
        raise ValueError(f"{name} must have shape {form}, got {tuple(value.shape)}")


def _split_awq(words: torch.Tensor) -> torch.Tensor:
    """Return the codes of AWQ's words [R, C], transposed: uint8 [8 C, R]."""
    r, c = words.shape
    # Bits 16 a + 8 b + 4 h of a word hold its column 4 b + 2 h + a.
    parts = words.t().clone(memory_format=torch.contiguous_format).view(torch.uint8)
    codes = torch.empty(c, 2, 2, 2, r, dtype=torch.uint8, device=words.device)
    split_nibbles(parts.view(c, r, 2, 2).permute(0, 3, 2, 1), codes[:, :, 0], codes[:, :, 1])
    return codes.view(8 * c, r)
