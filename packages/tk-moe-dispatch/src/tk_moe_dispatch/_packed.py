"""Experts' weights of 8 and 4 bits, in the order in which the matrix units' operand registers hold them.

The layout of each expert is that of the core's `packing`, which one-matrix packages use too. Where SwiGLU follows, rows
of gate and up are brought together here, once: a tile of 16 rows is 8 of gate, and the same 8 of up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tk_kernel_core.checks import check_choice, check_same_device, check_shape, check_tensor
from tk_kernel_core.packing import (
    COLUMN_MULTIPLE,
    ROW_MULTIPLE,
    by_rows,
    by_tiles,
    int4_codes,
    int4_words,
    int8_codes,
    int8_words,
)
from tk_kernel_core.quantization import (
    SYMMETRIC_ZERO,
    count_groups,
    decode_groups,
    quantize_groups,
    quantize_per_token_torch,
    readable,
)
from tk_moe_dispatch._checks import FLOATS, LAYOUTS
from tk_moe_dispatch._reference import GatedLayout, gate_and_up

GROUP_SIZES = (32, 64, 128, 256)
"""Columns that share a scale of weights of 4 bits, where not all of them do."""

_SCALES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_ZERO = 16

Experts = torch.Tensor | Sequence[torch.Tensor]
"""One matrix for each expert: a tensor, or a sequence of them, of which one is looked at after the other."""


class PackedExperts(torch.nn.Module):
    """Weights [E, N, K] of experts, `(code - zero) * scale`, for `fused_experts`, `FusedMoE` and `ExpertParallelMoE`.

    They are made by `from_int8`, `from_int4`, `quantize_int8` or `quantize_int4`, once, when a model is loaded. N and K
    stand for padded sizes below, multiples of 64 and 128 (256 where groups have that many columns), and G for the
    number of groups in a row. Converting the module does not change the dtype of the scales.

    Attributes:
        codes: Buffer int32, [E, N / 16, K / 64, 2, 32, 4] for 8 bits and [E, N / 16, K / 64, 32, 4] for 4: those of an
            expert as `int8_words` or `int4_words` of `tk_kernel_core.packing` describe them.
        scales: Buffer, [E, N / 16, G, 8, 2]: element [e, t, g, r, b] is that of row `16 * t + 8 * b + r` in group g.
            float32, and one for each row, for 8 bits.
        zeros: Buffer arranged like the scales, or None where all are 0 for 8 bits and 8 for 4. int8 for 8 bits, uint8
            from 0 to 16 for 4.
        bits: 8 or 4.
        group_size: 32, 64, 128 or 256; -1 where there is one group.
        out_features: Rows of an expert, without padding: 2 * F for w13.
        in_features: Columns, without padding.
        layout: How gate and up lay in the rows of what was packed, `concat` or `interleaved`: they are brought
            together; None for w2.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    def __init__(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        zeros: torch.Tensor | None,
        group_size: int,
        out_features: int,
        in_features: int,
        layout: GatedLayout | None,
    ) -> None:
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)
        self.group_size, self.layout = group_size, layout
        self.out_features, self.in_features = out_features, in_features

    @property
    def bits(self) -> int:
        """8 or 4."""
        return bits_of(self.codes)

    @property
    def shape(self) -> torch.Size:
        """Of what was packed: experts, out_features, in_features."""
        return torch.Size((self.codes.shape[0], self.out_features, self.in_features))

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    @classmethod
    def from_int8(
        cls,
        codes: Experts,
        scales: Experts,
        zeros: Experts | None = None,
        *,
        layout: GatedLayout | None = None,
    ) -> PackedExperts:
        """Pack int8 codes and a scale for each row.

        Args:
            codes: int8 [E, N, K], or E matrices [N, K], any strides.
            scales: Floating point [E, N], rounded to float32.
            zeros: int8 [E, N], or None for 0.
            layout: For w13 how gate and up lie in its rows, as for `fused_experts`; None for w2.

        Raises:
            TypeError: A tensor has another dtype.
            ValueError: There is no expert, or no element; shapes or devices do not fit, or scales are not finite.
        """
        return cls._pack(codes, scales, zeros, None, layout)

    @classmethod
    def from_int4(
        cls,
        codes: Experts,
        scales: Experts,
        zeros: Experts | None,
        group_size: int = 128,
        *,
        layout: GatedLayout | None = None,
    ) -> PackedExperts:
        """Pack 4-bit codes, with a scale for every group of columns.

        Checkpoints hold such codes as nibbles in words, in an order of their own, for each projection of each expert:
        they are to be unpacked, and gate and up put together, before. Groups are of neighbouring columns: GPTQ's
        act-order is not served.

        Args:
            codes: uint8 [E, N, K] from 0 to 15, or E matrices [N, K], any strides.
            scales: fp16, bf16 or fp32 [E, N, ceil(K / group_size)], which should be the dtype of the tokens: others
                cost time.
            zeros: uint8, shaped like the scales, from 0 to 16; None for 8, which is 0 for codes from -8 to 7.
            group_size: 32, 64, 128 or 256; -1 for one group.
            layout: As for `from_int8`.

        Raises:
            TypeError: A tensor has another dtype, or the group size is no integer.
            ValueError: There is no such group size, no expert, or no element; codes or zeros are out of range; shapes
                or devices do not fit, or scales are not finite.
        """
        check_choice("group_size", group_size, (*GROUP_SIZES, -1))
        return cls._pack(codes, scales, zeros, group_size, layout)

    @classmethod
    def quantize_int8(cls, weight: Experts, *, layout: GatedLayout | None = None) -> PackedExperts:
        """Quantise weights to nearest, with a scale for each row: its largest magnitude becomes 127.

        Args:
            weight: [E, N, K], or E matrices [N, K]; fp16, bf16 or fp32, any strides.
            layout: As for `from_int8`.

        Raises:
            TypeError: The weight has another dtype.
            ValueError: As from `from_int8`, or a value is not finite.
        """
        pairs = [quantize_per_token_torch(check_tensor("weight", matrix, FLOATS)) for matrix in weight]
        return cls.from_int8([codes for codes, _ in pairs], [scale for _, scale in pairs], layout=layout)

    @classmethod
    def quantize_int4(
        cls, weight: Experts, group_size: int = 128, *, symmetric: bool = False, layout: GatedLayout | None = None
    ) -> PackedExperts:
        """Quantise weights to nearest, with a scale in their dtype for every group of columns.

        Args:
            weight: As for `quantize_int8`.
            group_size: As for `from_int4`.
            symmetric: Whether every zero point is 8; else the group's range from minimum to maximum, 0 included, is
                used in full.
            layout: As for `from_int8`.

        Raises:
            TypeError: As from `from_int4`.
            ValueError: Likewise, or a value is not finite.
        """
        parts = [quantize_groups(check_tensor("weight", matrix, _SCALES), group_size, symmetric) for matrix in weight]
        codes, scales, zeros = ([part[i] for part in parts] for i in range(3))
        return cls.from_int4(codes, scales, None if symmetric else zeros, group_size, layout=layout)

    @classmethod
    def _pack(
        cls, codes: Experts, scales: Experts, zeros: Experts | None, group_size: int | None, layout: GatedLayout | None
    ) -> PackedExperts:
        """Pack expert after expert; int8 where there is no group size."""
        if layout is not None:
            check_choice("layout", layout, LAYOUTS)
        dtype = torch.int8 if group_size is None else torch.uint8
        for name, values in (("codes", codes), ("scales", scales), ("zeros", zeros)):
            if values is not None and (len(values) != len(codes) or len(values) == 0):
                raise ValueError(f"{name} must be of as many experts as codes, at least one, got {len(values)}")
        first = check_tensor("codes[0]", codes[0], (dtype,))
        if first.dim() != 2 or first.numel() == 0 or (layout is not None and first.shape[0] % 2):
            rows = "N" if layout is None else "2 * F"
            raise ValueError(f"codes[0] must have shape [{rows}, K], both at least 1, got {tuple(first.shape)}")
        (n, k), device = first.shape, first.device
        groups = () if group_size is None else (count_groups(k, group_size),)
        scale_dtype = torch.float32 if group_size is None else check_tensor("scales[0]", scales[0], _SCALES).dtype
        packed: dict[str, list[torch.Tensor]] = {}

        def checked(name: str, value: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> torch.Tensor:
            check_shape(name, check_tensor(name, value, dtypes), shape)
            check_same_device(name, value, device, "codes[0]")
            return _with_gate_and_up_together(value, layout)

        for i in range(len(codes)):
            part = {"codes": checked(f"codes[{i}]", codes[i], (dtype,), (n, k))}
            part["scales"] = checked(f"scales[{i}]", scales[i], FLOATS, (n, *groups)).to(scale_dtype)
            if readable(part["scales"]) and not bool(part["scales"].isfinite().all()):
                raise ValueError(f"scales[{i}] must be finite in {scale_dtype}, not all are")
            if zeros is not None:
                part["zeros"] = checked(f"zeros[{i}]", zeros[i], (dtype,), (n, *groups))
            for name, most in (("codes", 15), ("zeros", _LARGEST_ZERO)):
                if group_size is not None and name in part:
                    _check_range(f"{name}[{i}]", part[name], most)
            for name, value in _laid_out(part, group_size).items():
                packed.setdefault(name, []).append(value)
        stacked = {name: torch.stack(parts) for name, parts in packed.items()}
        size = -1 if group_size is None else group_size
        return cls(stacked["codes"], stacked["scales"], stacked.get("zeros"), size, n, k, layout)

    def of(self, experts: slice) -> PackedExperts:
        """Return some of the experts, which share this module's memory."""
        zeros = None if self.zeros is None else self.zeros[experts]
        sizes = self.group_size, self.out_features, self.in_features
        return PackedExperts(self.codes[experts], self.scales[experts], zeros, *sizes, self.layout)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return `(code - zero) * scale`, computed in fp32 (fp64 for that `dtype`) and rounded once.

        Args:
            dtype: fp16, bf16, fp32 or fp64.

        Returns:
            [E, out_features, in_features], rows in the order in which they were packed.

        Raises:
            ValueError: `dtype` is another.
        """
        check_choice("dtype", dtype, FLOATS)
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        weight = torch.empty(self.shape, dtype=dtype, device=self.device)
        for i, words in enumerate(self.codes):
            scales = by_rows(self.scales[i])
            zeros = None if self.zeros is None else by_rows(self.zeros[i])
            if self.bits == 8:
                values = int8_codes(words).to(compute)
                values = (values if zeros is None else values - zeros) * scales.to(compute)
            else:
                values = decode_groups(int4_codes(words), scales, zeros, self.group_size, compute)
            rows = _with_gate_and_up_apart(values, self.out_features, self.layout)
            weight[i] = rows[:, : self.in_features].to(dtype)
        return weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedExperts:
        before = self.scales
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self.scales.dtype != before.dtype:
            self.scales = before.to(self.scales.device)
        return self

    def extra_repr(self) -> str:
        """Return the sizes and the format."""
        scheme = "symmetric" if self.zeros is None else "asymmetric"
        return f"shape={tuple(self.shape)}, bits={self.bits}, group_size={self.group_size}, {scheme}, {self.layout}"


def packed_shapes(
    n_experts: int, n: int, k: int, bits: int, group_size: int, *, gated: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the codes, and of the scales and zeros, of experts with n rows and k columns.

    Args:
        n_experts: Experts.
        n: Rows of each.
        k: Columns of each.
        bits: 8 or 4.
        group_size: As in `PackedExperts`.
        gated: Whether the rows are gate and up, which are padded by themselves.
    """
    rows = n + (-n % 16 if gated else 0)
    tiles, width = -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE // 16, max(COLUMN_MULTIPLE, group_size)
    columns = -(-k // width) * width
    words = (2, 32, 4) if bits == 8 else (32, 4)
    n_groups = 1 if group_size == -1 else columns // group_size
    return (n_experts, tiles, columns // 64, *words), (n_experts, tiles, n_groups, 8, 2)


def bits_of(codes: torch.Tensor) -> int:
    """Return 8 or 4."""
    return 8 if codes.dim() == 6 else 4


def _laid_out(part: dict[str, torch.Tensor], group_size: int | None) -> dict[str, torch.Tensor]:
    """Bring an expert's codes, scales and zeros to the layout; there are no groups where their size is None."""
    codes = part.pop("codes")
    (n, k), n_groups = codes.shape, 1
    rows = {name: value.view(n, -1) for name, value in part.items()}
    if group_size is None:
        words = int8_words(codes)
    else:
        height, width = n + -n % ROW_MULTIPLE, k + -k % max(COLUMN_MULTIPLE, group_size)
        n_groups = 1 if group_size == -1 else width // group_size
        padded = torch.full((height, width), SYMMETRIC_ZERO, dtype=torch.uint8, device=codes.device)
        if "zeros" in rows:
            # What is padded stands for 0, or at least for what no scale makes infinite.
            zeros = torch.nn.functional.pad(rows["zeros"], (0, n_groups - rows["zeros"].shape[1]))
            padded[:n].view(n, n_groups, -1).copy_(zeros.clamp(max=15)[..., None])
        padded[:n, :k] = codes
        words = int4_words(padded)
    return {"codes": words, **{name: by_tiles(value, n_groups, 16 * words.shape[0]) for name, value in rows.items()}}


def _check_range(name: str, values: torch.Tensor, most: int) -> None:
    if values.numel() and readable(values) and int(values.max()) > most:
        raise ValueError(f"{name} must be within [0, {most}], got up to {int(values.max())}")


def _with_gate_and_up_together(values: torch.Tensor, layout: GatedLayout | None) -> torch.Tensor:
    """Bring what belongs to rows of gate and up, [2 * F, ...], to 8 of gate and 8 of up by turns, padded by zeros."""
    if layout is None:
        return values
    both = torch.stack(gate_and_up(values, layout, axis=0))
    padding = (0, 0) * (values.dim() - 1) + (0, -both.shape[1] % 8)
    rows: torch.Tensor = torch.nn.functional.pad(both, padding).unflatten(1, (-1, 8)).transpose(0, 1).flatten(0, 2)
    return rows


def _with_gate_and_up_apart(values: torch.Tensor, n: int, layout: GatedLayout | None) -> torch.Tensor:
    """Undo `_with_gate_and_up_together`, and what was padded behind it: n rows."""
    if layout is None:
        return values[:n]
    both: torch.Tensor = values.unflatten(0, (-1, 2, 8)).transpose(0, 1).flatten(1, 2)[:, : n // 2]
    return (both if layout == "concat" else both.transpose(0, 1)).flatten(0, 1)
