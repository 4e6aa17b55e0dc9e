"""Strided tensors: reaching every row by two strides without a copy, wide accesses, and memory that is shared."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How to reach row `i` of several tensors of one shape.

    The row starts `(i // n_inner) * outer + (i % n_inner) * inner` elements into a tensor, where
    `(outer, inner)` is that tensor's entry in `strides`.

    Attributes:
        n_rows: Number of rows: the product of all dimensions but the last.
        n_inner: Rows per outer step; 1 where one stride reaches every row of every tensor.
        strides: Outer and inner row stride of each tensor, in elements.
    """

    n_rows: int
    n_inner: int
    strides: tuple[tuple[int, int], ...]


def row_layout(shape: Sequence[int], *strides: Sequence[int]) -> RowLayout | None:
    """Collapse all dimensions but the last, jointly for several tensors of one shape.

    Args:
        shape: The common shape, at least one dimension.
        strides: Strides of each tensor, in elements.

    Returns:
        The layout, or None where some tensor's elements within a row are not contiguous or where more than
        two row strides would be needed: such tensors must be copied first.
    """
    if shape[-1] > 1 and any(stride[-1] != 1 for stride in strides):
        return None
    # Dimensions as [size, stride of each tensor], outermost first, merged where every tensor allows it.
    merged: list[tuple[int, tuple[int, ...]]] = []
    for axis, size in enumerate(shape[:-1]):
        if size == 1:
            continue
        steps = tuple(stride[axis] for stride in strides)
        if merged and all(outer == size * step for outer, step in zip(merged[-1][1], steps, strict=True)):
            merged[-1] = (merged[-1][0] * size, steps)
        else:
            merged.append((size, steps))
    if len(merged) > 2:
        return None
    none = (0,) * len(strides)
    outer = merged[0] if merged else (1, none)
    inner = merged[1] if len(merged) == 2 else (1, none)
    return RowLayout(outer[0] * inner[0], inner[0], tuple(zip(outer[1], inner[1], strict=True)))


def aligned_strides(width: int, layout: RowLayout) -> tuple[int, list[int]]:
    """Count strides in the largest power of two up to 16 elements that divides every row's start.

    A kernel that multiplies them by that unit again shows the compiler how wide it may load, without being
    compiled for each stride.

    Args:
        width: Elements in a row.
        layout: The rows.

    Returns:
        The unit in elements, which divides `width` too, and the outer and inner stride of each tensor in units.
    """
    strides = [stride for pair in layout.strides for stride in pair]
    combined = functools.reduce(operator.or_, strides, width | 16)
    unit = combined & -combined
    return unit, [stride // unit for stride in strides]


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to the end of its last one; 0 for an empty tensor."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def overlap_check(a: torch.Tensor, b: torch.Tensor) -> Callable[[int], bool]:
    """Prepare the question whether two tensors of one shape share memory, for all calls with these strides.

    Args:
        a: Any strided tensor.
        b: Another one of the same shape; the dtypes may differ.

    Returns:
        A function of the distance from `a`'s first element to `b`'s, in bytes. It is False where the tensors
        certainly lie apart: their extents do, or they are columns of one matrix.
    """
    extent_a, extent_b = extent_bytes(a), extent_bytes(b)
    layout = row_layout(a.shape, a.stride(), b.stride()) if a.dim() else None
    pitch = 0
    if layout is not None and layout.n_inner == 1:
        pitches = {stride * tensor.element_size() for (stride, _), tensor in zip(layout.strides, (a, b), strict=True)}
        pitch = pitches.pop() if len(pitches) == 1 else 0
    row_a, row_b = (tensor.shape[-1] * tensor.element_size() if tensor.dim() else 0 for tensor in (a, b))

    def may_share(distance: int) -> bool:
        if not -extent_b < distance < extent_a:
            return False
        return not (pitch and row_a <= distance % pitch <= pitch - row_b)

    return may_share


def rows_of(x: Any, longest_row: int | None = None) -> Any:
    """Bring a tensor [..., K] to [M, K] with neighbouring elements in each row, copying it where it must be.

    Args:
        x: Of at least one dimension.
        longest_row: Most elements between the starts of two rows; None allows any number.
    """
    if x.dim() != 2:
        x = x.reshape(-1, x.shape[-1])
    is_reached = longest_row is None or row_stride(x) <= longest_row
    return x if is_reached and (x.stride(1) == 1 or x.shape[1] == 1) else x.contiguous()


def row_stride(rows: torch.Tensor) -> int:
    """Return the distance of two rows of [M, K], in elements; a single row has none of its own."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
