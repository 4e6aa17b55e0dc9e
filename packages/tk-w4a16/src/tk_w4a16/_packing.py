"""4-bit weights in the order in which the matrix units' operand registers hold them.

A multiplication of few rows takes as long as reading its weight does. Laid out like this, 16 consecutive bytes are what
one thread feeds to four instructions of 16 rows and 16 columns: a warp reads 512 consecutive bytes at once, and no
weight passes through shared memory. One packed weight serves every kernel, tuning and number of rows, and every
checkpoint format becomes the same.

A tile is 16 output features ("rows") of 64 input features ("columns"): 32 lanes of four words of eight codes. A word
holds eight consecutive columns of one row, so that the lanes 4 r to 4 r + 3 of a tile need 32 consecutive activations,
eight each, of which plain loads of 16 bytes bring them.

Which columns an instruction multiplies at once is free where both operands agree. For m16n8k16, whose lane 4 r + c has
four columns of rows r and r + 8 of the first operand, the weight, and four of row r of the second, the activations:
instruction 2 s + d of a tile takes columns 4 d to 4 d + 3 of the words 2 s and 2 s + 1, and activations
32 s + 8 c + 4 d to 3 further. To Triton that is a product over columns in the order (s, d, c, 4 columns).

Within a word the codes of even columns are in the lower half and those of odd ones in the upper:
`(word >> 4 * p) & 0x000F000F` is the pair of columns 2 p and 2 p + 1, and two 16-bit floats by one OR: with 0x64006400
they are 1024 + q in fp16, with 0x43004300 128 + q in bf16. A zero point is a byte for the same reason: the bits
0xE400 + z are -(1024 + z) in fp16 and 0xC300 + z -(128 + z) in bf16, so that one addition gives q - z exactly.

What is padded: rows to whole multiples of 64, with the scale 0. Columns to whole groups and to a multiple of 128;
groups of nothing but padding have the scale 0. Padding has its group's zero point as its code, so that it stands for 0,
which no scale makes infinite; but no code is 16, and there it stands for -1 times the scale. So it counts for nothing
only if the activation is 0: a kernel takes 0 for column j where j >= in_features, or where `permutation[j]` is -1, and
never reads beyond the activations.

Columns whose groups are not consecutive (GPTQ's act-order) are sorted by group, in their old order within it, and each
group is padded to whole groups of the layout, of the same scale: a group of 200 columns takes two of 128.
`permutation[j]` is the input feature whose activation column j needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tk_kernel_core.checks import check_choice
from tk_kernel_core.packing import COLUMN_MULTIPLE, ROW_MULTIPLE, by_rows, by_tiles, int4_codes, int4_words
from tk_kernel_core.quantization import SYMMETRIC_ZERO, decode_groups, readable, row_chunks
from tk_w4a16._formats import (
    Int4Weight,
    read_awq,
    read_compressed_tensors,
    read_float,
    read_gptq,
    read_int4,
)
from tk_w4a16._quantize import FLOATS

GROUP_SIZES = (32, 64, 128, 256)
"""Columns that share a scale, where not all of them do."""


@dataclass(frozen=True, eq=False, repr=False)
class PackedInt4Weight:
    """A 4-bit weight prepared for the kernels, made by one of `from_...`.

    N and K stand for the padded sizes here, and G for the number of groups, K / group_size or 1.

    Attributes:
        codes: int32, [N / 16, K / 64, 32, 4], contiguous. Bits 4 p + 16 h to 4 p + 16 h + 3 of word `2 * s + b` of lane
            `4 * r + c` in tile [t, u] hold the code, from 0 to 15, of row `16 * t + 8 * b + r` and column
            `64 * u + 32 * s + 8 * c + 2 * p + h`.
        scales: fp16, bf16 or fp32, [N / 16, G, 8, 2], contiguous: element [t, g, r, b] is the scale of row
            `16 * t + 8 * b + r` in group g, columns `g * group_size` and following.
        zeros: uint8, arranged like the scales, from 0 to 16; None where every zero point is 8.
        permutation: int32, [K]: the input feature of each column, -1 for padding. None where column j is input
            feature j, and padding all that follows in_features.
        group_size: 32, 64, 128 or 256; -1 where there is one group.
        out_features: Rows of the weight, without padding.
        in_features: Columns of the weight, without padding.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    permutation: torch.Tensor | None
    group_size: int
    out_features: int
    in_features: int

    @classmethod
    def from_float(cls, weight: torch.Tensor, group_size: int = 128, *, symmetric: bool = False) -> PackedInt4Weight:
        """Quantise a weight to nearest, by the rule of `quantize_weight_int4_grouped`.

        Args:
            weight: fp16, bf16 or fp32, [out_features, in_features], any strides; the scales get its dtype.
            group_size: 32, 64, 128 or 256; -1, or any from in_features, for one group.
            symmetric: Whether every zero point is 8.

        Raises:
            TypeError: The weight has another dtype, or the group size is no integer.
            ValueError: The weight is empty, no matrix or not finite, or there is no such group size.
        """
        return cls.pack(read_float(weight, group_size, symmetric))

    @classmethod
    def from_int4(
        cls, packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group_size: int = 128
    ) -> PackedInt4Weight:
        """Prepare a weight in the plain layout, that of `pack_int4` and `quantize_weight_int4_grouped`.

        Args:
            packed: int32, [in_features / 8, out_features].
            scales: fp16, bf16 or fp32, [in_features / group_size, out_features].
            zeros: Floating point, shaped like the scales, integers within [0, 16]; None for 8.
            group_size: As for `from_float`.

        Raises:
            TypeError: A tensor has another dtype, or the group size is no integer.
            ValueError: A tensor has another shape or device, scales are not finite, zeros no such integers, or there is
                no such group size.
        """
        return cls.pack(read_int4(packed, scales, zeros, group_size))

    @classmethod
    def from_gptq(
        cls,
        qweight: torch.Tensor,
        qzeros: torch.Tensor | None,
        scales: torch.Tensor,
        g_idx: torch.Tensor | None = None,
        *,
        group_size: int = 128,
        checkpoint_format: str = "gptq",
        symmetric: bool = False,
        desc_act: bool = False,
        bits: int = 4,
    ) -> PackedInt4Weight:
        """Prepare a weight of a GPTQ checkpoint, whose tensors have the names of the arguments.

        Args:
            qweight: int32, [in_features / 8, out_features].
            qzeros: int32, [G, ceil(out_features / 8)]. With `symmetric` it is not looked at, and may be None.
            scales: fp16, bf16 or fp32, [G, out_features].
            g_idx: int32 or int64, [in_features]: the group of each input feature, in any order and number, and always
                followed, one of zeros too; None for `k // group_size`.
            group_size: As for `from_float`. With a `g_idx` that has groups of other sizes, a slice of a larger one
                say, the weight may get a smaller one.
            checkpoint_format: "gptq": zero points are stored minus one, and a stored 15 stands for 16; "gptq_v2": they
                are stored as they are. GPTQModel subtracts from whole words of "gptq", where a zero point of 0 borrows
                from the next one: what it saved with `sym=False` is `qzeros + 0x11111111` of "gptq_v2".
            symmetric: Whether every zero point is 8: `sym` of the quantisation config.
            desc_act: Whether there must be a `g_idx`: `desc_act` of the quantisation config.
            bits: 4: `bits` of the quantisation config.

        Raises:
            TypeError: A tensor has another dtype, or the group size is no integer.
            ValueError: A tensor is missing, has another shape or device, scales are not finite, an index is not within
                [0, G), or bits, format or group size are others.
        """
        return cls.pack(
            read_gptq(
                qweight,
                qzeros,
                scales,
                g_idx,
                group_size=group_size,
                checkpoint_format=checkpoint_format,
                symmetric=symmetric,
                desc_act=desc_act,
                bits=bits,
            )
        )

    @classmethod
    def from_awq(
        cls,
        qweight: torch.Tensor,
        qzeros: torch.Tensor,
        scales: torch.Tensor,
        *,
        group_size: int = 128,
        version: str = "gemm",
        bits: int = 4,
    ) -> PackedInt4Weight:
        """Prepare a weight of an AWQ checkpoint, whose tensors have the names of the arguments.

        Args:
            qweight: int32, [in_features, out_features / 8].
            qzeros: int32, [G, out_features / 8].
            scales: fp16, bf16 or fp32, [G, out_features].
            group_size: As for `from_float`.
            version: "gemm": `version` of the quantisation config. Others have other layouts.
            bits: 4: `bits` of the quantisation config.

        Raises:
            TypeError: As from `from_gptq`.
            ValueError: As from `from_gptq`.
        """
        return cls.pack(read_awq(qweight, qzeros, scales, group_size=group_size, version=version, bits=bits))

    @classmethod
    def from_compressed_tensors(
        cls,
        weight_packed: torch.Tensor,
        weight_scale: torch.Tensor,
        weight_shape: torch.Tensor | Sequence[int],
        weight_zero_point: torch.Tensor | None = None,
        weight_g_idx: torch.Tensor | None = None,
        *,
        group_size: int = 128,
        symmetric: bool = False,
        bits: int = 4,
    ) -> PackedInt4Weight:
        """Prepare a weight of a compressed-tensors checkpoint, format `pack-quantized`.

        Args:
            weight_packed: int32, [out_features, ceil(in_features / 8)].
            weight_scale: fp16, bf16 or fp32, [out_features, G].
            weight_shape: `(out_features, in_features)`.
            weight_zero_point: int32, [ceil(out_features / 8), G]. With `symmetric` it is not looked at.
            weight_g_idx: As `g_idx` for `from_gptq`; one of -1 alone counts as None.
            group_size: As for `from_gptq`; -1 for the strategy "channel".
            symmetric: Whether every zero point is 8, which stands for 0 of signed codes: `symmetric` of the config.
            bits: 4: `num_bits` of the config.

        Raises:
            TypeError: As from `from_gptq`.
            ValueError: As from `from_gptq`.
        """
        return cls.pack(
            read_compressed_tensors(
                weight_packed,
                weight_scale,
                weight_shape,
                weight_zero_point,
                weight_g_idx,
                group_size=group_size,
                symmetric=symmetric,
                bits=bits,
            )
        )

    @classmethod
    def pack(cls, weight: Int4Weight) -> PackedInt4Weight:
        """Lay a weight in neutral form out.

        Raises:
            ValueError: Its group size is not 32, 64, 128, 256 or -1.
        """
        check_choice("group_size", weight.group_size, (*GROUP_SIZES, -1))
        (n, k), device = weight.codes.shape, weight.codes.device
        group_size, position, source = _arrange(weight)
        width = COLUMN_MULTIPLE if group_size == -1 else max(COLUMN_MULTIPLE, group_size)
        used = k if source is None else len(source) * group_size
        height, columns = n + -n % ROW_MULTIPLE, used + -used % width
        groups = 1 if group_size == -1 else columns // group_size
        scales = _per_group(weight.scales, source, groups, height)
        zeros = None if weight.zeros is None else _per_group(weight.zeros, source, groups, height)
        codes = torch.empty(height // 16, columns // 64, 32, 4, dtype=torch.int32, device=device)
        for rows in row_chunks(height, columns, ROW_MULTIPLE):
            tiles = slice(rows.start // 16, rows.stop // 16)
            part = torch.full((rows.stop - rows.start, columns), SYMMETRIC_ZERO, dtype=torch.uint8, device=device)
            if zeros is not None:
                part.view(-1, groups, columns // groups).copy_(by_rows(zeros[tiles]).clamp(max=15)[..., None])
            given = weight.codes[rows]
            if position is None:
                part[: len(given), :k] = given
            else:
                part[: len(given)].index_copy_(1, position, given)
            codes[tiles] = int4_words(part)
        permutation = None
        if position is not None:
            permutation = torch.full((columns,), -1, dtype=torch.int32, device=device)
            permutation[position] = torch.arange(k, dtype=torch.int32, device=device)
        return cls(codes, scales, zeros, permutation, group_size, n, k)

    def unpack(self) -> torch.Tensor:
        """Return the codes, uint8 [out_features, in_features] in the order of the input features, exactly."""
        n, k = self.out_features, self.in_features
        codes = torch.empty(n, k, dtype=torch.uint8, device=self.codes.device)
        position = self._position()
        for rows in self._chunks():
            codes[rows] = self._in_order(self._columns(rows), position)[: n - rows.start]
        return codes

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return `(code - zero) * scale`, computed in fp32 (fp64 for that `dtype`) and rounded once.

        Args:
            dtype: fp16, bf16, fp32 or fp64; that of the scales if None. A value beyond its range becomes infinite.

        Returns:
            [out_features, in_features], in the order of the input features: what the checkpoint's format defines.

        Raises:
            ValueError: `dtype` is another.
        """
        dtype = self.scales.dtype if dtype is None else check_choice("dtype", dtype, FLOATS)
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        n, k = self.out_features, self.in_features
        weight = torch.empty(n, k, dtype=dtype, device=self.codes.device)
        position = self._position()
        for rows in self._chunks():
            tiles = slice(rows.start // 16, rows.stop // 16)
            scales = by_rows(self.scales[tiles])
            zeros = None if self.zeros is None else by_rows(self.zeros[tiles])
            values = decode_groups(self._columns(rows), scales, zeros, self.group_size, compute)
            weight[rows] = self._in_order(values, position)[: n - rows.start].to(dtype)
        return weight

    def to(self, device: torch.device | str | int) -> PackedInt4Weight:
        """Return the weight on another device, or the same one where it is there already.

        Raises:
            TypeError: `device` is no device, but a dtype, say.
        """
        if not isinstance(device, (torch.device, str, int)):
            raise TypeError(f"device must be a torch.device, str or int, got {type(device).__name__}")
        names = ("codes", "scales", "zeros", "permutation")
        held = {name: value for name in names if (value := getattr(self, name)) is not None}
        moved = {name: value.to(device) for name, value in held.items()}
        return self if all(moved[name] is held[name] for name in held) else replace(self, **moved)

    def __repr__(self) -> str:
        scheme = "symmetric" if self.zeros is None else "asymmetric"
        order = "" if self.permutation is None else "act-order, "
        return (
            f"PackedInt4Weight(out_features={self.out_features}, in_features={self.in_features}, "
            f"group_size={self.group_size}, {scheme}, {order}dtype={self.scales.dtype}, device={self.codes.device})"
        )

    def _chunks(self) -> list[slice]:
        height, columns = 16 * self.codes.shape[0], 64 * self.codes.shape[1]
        return row_chunks(height, columns, ROW_MULTIPLE)

    def _columns(self, rows: slice) -> torch.Tensor:
        """Return the codes of some rows, whole tiles, in the order of columns: uint8 [rows, K]."""
        tiles = self.codes[rows.start // 16 : rows.stop // 16]
        return int4_codes(tiles)

    def _position(self) -> torch.Tensor | None:
        """Return the column of each input feature, None where they are the same."""
        # Padding, -1, comes first.
        return None if self.permutation is None else self.permutation.argsort()[-self.in_features :]

    def _in_order(self, values: torch.Tensor, position: torch.Tensor | None) -> torch.Tensor:
        return values[:, : self.in_features] if position is None else values.index_select(1, position)


def _arrange(weight: Int4Weight) -> tuple[int, torch.Tensor | None, torch.Tensor | None]:
    """Sort columns by group.

    Returns:
        Group size of the layout; the column of each input feature, None where they are the same; and the weight's group
        that each group of the layout is part of, None where they are the same, up to padding.
    """
    index, group_size = weight.group_index, weight.group_size
    if index is None:
        return group_size, None, None
    n_groups, k = weight.scales.shape[1], index.numel()
    features = torch.arange(k, device=index.device)
    if not readable(index):
        # As if every group were full: only values can tell.
        return group_size, features, torch.arange(-(-k // group_size), device=index.device)
    counts = torch.bincount(index, minlength=n_groups)

    def columns(size: int) -> int:
        return size * int((-(-counts // size)).sum())

    if columns(group_size) > -(-k // group_size) * group_size:
        # Many groups are not full: the least memory, at half a byte for a column and up to five for a group.
        sizes = [size for size in GROUP_SIZES if size <= group_size]
        group_size = min(sizes, key=lambda size: columns(size) * (0.5 + 5 / size))
    blocks = -(-counts // group_size)
    order = index.argsort(stable=True)
    before = group_size * (blocks.cumsum(0) - blocks) - (counts.cumsum(0) - counts)
    position = torch.empty_like(order)
    position[order] = features + before[index[order]]
    source = torch.repeat_interleave(torch.arange(n_groups, device=index.device), blocks)
    return group_size, (None if torch.equal(position, features) else position), source


def _per_group(values: torch.Tensor, source: torch.Tensor | None, groups: int, height: int) -> torch.Tensor:
    """Bring [N, G] scales or zero points to [N / 16, G, 8, 2] of padded sizes."""
    if source is not None:
        values = values.index_select(1, source)
    return by_tiles(values, groups, height)
