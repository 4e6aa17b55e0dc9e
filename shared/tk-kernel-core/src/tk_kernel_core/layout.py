"""Rows of strided tensors: finding two row strides that reach every row without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
