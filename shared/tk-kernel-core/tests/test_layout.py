"""Row layouts, held against PyTorch's own indexing and against a search through all layouts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_kernel_core.layout import RowLayout, row_layout
from tk_testkit import shapes, strides_for

Tensors = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


@st.composite
def views(draw: st.DrawFn, min_side: int = 1) -> tuple[torch.Tensor, ...]:
    """One to three views of one shape, each made by slicing, permuting and expanding: rows as callers pass them."""
    rank = draw(st.integers(1, 5))
    shape = tuple(draw(st.lists(st.integers(min_side, 4), min_size=rank, max_size=rank)))
    tensors = []
    for _ in range(draw(st.integers(1, 3))):
        order = draw(st.permutations(range(rank)))
        if draw(st.booleans()):
            # Permuted among themselves, rows stay rows.
            order = [*(axis for axis in order if axis != rank - 1), rank - 1]
        sides = [shape[axis] for axis in order]
        steps = [draw(st.integers(1, 2)) if draw(st.booleans()) else 1 for _ in sides]
        expanded = [draw(st.integers(0, 5)) == 0 for _ in sides]
        held = [1 if flat else side * step for side, step, flat in zip(sides, steps, expanded, strict=True)]
        buffer = torch.arange(math.prod(held)).view(held)
        for axis, (step, flat) in enumerate(zip(steps, expanded, strict=True)):
            buffer = buffer if flat else buffer[(slice(None),) * axis + (slice(None, None, step),)]
        tensors.append(buffer.expand(sides).permute([order.index(axis) for axis in range(rank)]))
    assert all(tuple(tensor.shape) == shape for tensor in tensors)
    return tuple(tensors)


def starts(layout: RowLayout, tensor: int) -> list[int]:
    """Where the rows begin, as a kernel computes it."""
    outer, inner = layout.strides[tensor]
    return [row // layout.n_inner * outer + row % layout.n_inner * inner for row in range(layout.n_rows)]


def assert_reaches_the_rows(layout: RowLayout, tensors: Sequence[torch.Tensor]) -> None:
    for position, x in enumerate(tensors):
        rows = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty(math.prod(x.shape[:-1]), x.shape[-1])
        assert layout.n_rows == len(rows)
        memory = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        for row, start in zip(rows, starts(layout, position), strict=True):
            begin = x.storage_offset() + start
            assert torch.equal(memory[begin : begin + len(row)], row)


def has_a_layout(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> bool:
    """Search through every split into outer and inner rows."""
    if shape[-1] > 1 and any(stride[-1] != 1 for stride in strides):
        return False
    indices = list(itertools.product(*map(range, shape[:-1])))
    wanted = [[sum(map(int.__mul__, index, stride)) for index in indices] for stride in strides]
    return any(
        all(
            offsets
            == [
                row // n_inner * (offsets[n_inner] if n_inner < len(offsets) else 0)
                + row % n_inner * (offsets[1] if n_inner > 1 else 0)
                for row in range(len(offsets))
            ]
            for offsets in wanted
        )
        for n_inner in range(1, len(indices) + 1)
    )


@given(views())
def test_every_row_of_a_view_is_reached(tensors: tuple[torch.Tensor, ...]) -> None:
    shape, strides = tuple(tensors[0].shape), [tensor.stride() for tensor in tensors]
    layout = row_layout(shape, *strides)
    assert (layout is not None) == has_a_layout(shape, strides)
    if layout is not None:
        assert len(layout.strides) == len(tensors)
        assert_reaches_the_rows(layout, tensors)


@given(
    shapes(max_rank=5, max_side=4).flatmap(lambda shape: st.tuples(st.just(shape), strides_for(shape, unit_last=True)))
)
def test_rows_with_gaps_in_any_order(problem: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    shape, strides = problem
    layout = row_layout(shape, strides)
    assert (layout is not None) == has_a_layout(shape, [strides])
    if layout is not None:
        extent = 1 + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True))
        assert_reaches_the_rows(layout, [torch.arange(extent).as_strided(shape, strides)])


@given(views(min_side=0))
def test_empty_tensors_have_no_rows_or_empty_ones(tensors: tuple[torch.Tensor, ...]) -> None:
    shape = tensors[0].shape
    layout = row_layout(shape, *(tensor.stride() for tensor in tensors))
    if layout is not None:
        assert layout.n_rows == math.prod(shape[:-1])
        assert layout.n_inner >= 1 or layout.n_rows == 0


@pytest.mark.parametrize(
    ("shape", "strides", "want"),
    [
        ((8,), [(1,)], RowLayout(1, 1, ((0, 0),))),
        ((1,), [(7,)], RowLayout(1, 1, ((0, 0),))),
        ((5, 8), [(8, 1)], RowLayout(5, 1, ((8, 0),))),
        # Heads of a fused projection: tokens 24 apart, heads 8 apart.
        ((5, 2, 8), [(24, 8, 1)], RowLayout(10, 2, ((24, 8),))),
        ((5, 2, 8), [(16, 8, 1)], RowLayout(10, 1, ((8, 0),))),
        # One tensor's gap keeps the other's rows apart too.
        ((5, 2, 8), [(16, 8, 1), (24, 8, 1)], RowLayout(10, 2, ((16, 8), (24, 8)))),
        # The second tensor is one row for all.
        ((5, 2, 8), [(16, 8, 1), (0, 0, 1)], RowLayout(10, 1, ((8, 0), (0, 0)))),
        ((5, 1, 2, 8), [(16, 999, 8, 1)], RowLayout(10, 1, ((8, 0),))),
        # A last dimension of one element is contiguous, whatever its stride.
        ((5, 1), [(3, 3)], RowLayout(5, 1, ((3, 0),))),
        ((5, 8), [(1, 5)], None),
        ((5, 8), [(16, 2)], None),
        ((5, 8), [(8, 1), (1, 0)], None),
        ((2, 3, 4, 8), [(1000, 100, 10, 1)], None),
        # Two strides would do for each of them, but not the same two.
        ((2, 3, 4, 8), [(96, 32, 8, 1), (300, 100, 8, 1)], RowLayout(24, 4, ((32, 8), (100, 8)))),
        ((2, 3, 4, 8), [(200, 32, 8, 1), (300, 100, 8, 1)], None),
    ],
    ids=str,
)
def test_examples(shape: tuple[int, ...], strides: list[tuple[int, ...]], want: RowLayout | None) -> None:
    assert row_layout(shape, *strides) == want
