"""Row layouts and shared memory, held against PyTorch's own indexing and a search through all layouts and bytes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_kernel_core.layout import (
    RowLayout,
    aligned_strides,
    extent_bytes,
    next_power_of_two,
    overlap_check,
    row_layout,
    row_stride,
    rows_of,
)
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


strides_in_memory = st.one_of(st.integers(0, 64), st.integers(0, 2**40), st.integers(0, 2**20).map(lambda n: 64 * n))


@given(
    width=st.one_of(st.integers(0, 2**20), st.integers(1, 2**12).map(lambda n: 16 * n)),
    strides=st.lists(st.tuples(strides_in_memory, strides_in_memory), min_size=1, max_size=4),
)
def test_strides_are_counted_in_the_largest_unit_that_divides_them(width: int, strides: list[tuple[int, int]]) -> None:
    unit, counted = aligned_strides(width, RowLayout(6, 2, tuple(strides)))
    assert unit in (1, 2, 4, 8, 16)
    flat = [stride for pair in strides for stride in pair]
    assert [unit * count for count in counted] == flat
    assert width % unit == 0
    assert unit == 16 or any(value % (2 * unit) for value in (width, *flat))


@pytest.mark.parametrize(
    ("width", "strides", "want"),
    [
        (4096, ((4096, 0),), (16, [256, 0])),
        # One row for all: its width alone decides.
        (48, ((0, 0), (0, 0)), (16, [0, 0, 0, 0])),
        (40, ((0, 0),), (8, [0, 0])),
        (4097, ((8192, 4096),), (1, [8192, 4096])),
        # The worst tensor decides for all of them.
        (64, ((64, 0), (68, 0)), (4, [16, 0, 17, 0])),
        (64, ((96, 2), (64, 0)), (2, [48, 1, 32, 0])),
        (0, ((0, 0),), (16, [0, 0])),
    ],
    ids=str,
)
def test_units_of_strides(width: int, strides: tuple[tuple[int, int], ...], want: tuple[int, list[int]]) -> None:
    assert aligned_strides(width, RowLayout(6, 2, strides)) == want


@given(st.integers(1, 2**40))
def test_next_power_of_two(n: int) -> None:
    power = next_power_of_two(n)
    assert power // 2 < n <= power
    assert power & (power - 1) == 0


def test_next_power_of_two_of_small_numbers() -> None:
    assert [next_power_of_two(n) for n in range(10)] == [1, 1, 2, 4, 4, 8, 8, 8, 8, 16]


def bytes_of(tensor: torch.Tensor) -> set[int]:
    """Addresses of all bytes of a tensor."""
    size, addresses = tensor.element_size(), [tensor.data_ptr()]
    for side, stride in zip(tensor.shape, tensor.stride(), strict=True):
        addresses = [address + size * stride * index for address in addresses for index in range(side)]
    return {address + byte for address in addresses for byte in range(size)}


def may_share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Ask both ways round, which must not matter."""
    distance = b.data_ptr() - a.data_ptr()
    answer = overlap_check(a, b)(distance)
    assert overlap_check(b, a)(-distance) == answer
    return answer


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@given(shapes(max_rank=4, max_side=4, min_side=0).flatmap(lambda shape: st.tuples(st.just(shape), strides_for(shape))))
def test_the_extent_ends_with_the_last_byte(
    dtype: torch.dtype, problem: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    tensor = torch.empty(4096, dtype=dtype).as_strided(*problem)
    addresses = bytes_of(tensor)
    assert extent_bytes(tensor) == (max(addresses) + 1 - tensor.data_ptr() if addresses else 0)


def test_extents() -> None:
    assert extent_bytes(torch.empty(3, 5)) == 60
    assert extent_bytes(torch.empty(3, 5, dtype=torch.bfloat16)[:, :2]) == 24
    assert extent_bytes(torch.empty(5).expand(1000, 5)) == 20
    assert extent_bytes(torch.tensor(1.0)) == 4
    assert extent_bytes(torch.empty(4, 0)) == extent_bytes(torch.empty(0, 4)[:, :2]) == 0
    assert extent_bytes(torch.empty(2**40, 8, device="meta")) == 2**45


@given(
    shape=st.lists(st.integers(1, 4), max_size=4).map(tuple),
    strides=st.tuples(*[st.lists(st.integers(0, 12), min_size=4, max_size=4)] * 2),
    dtypes=st.tuples(*[st.sampled_from([torch.int8, torch.float16, torch.float32])] * 2),
    starts=st.tuples(*[st.integers(0, 60)] * 2),
)
def test_no_shared_byte_is_missed(
    shape: tuple[int, ...],
    strides: tuple[list[int], list[int]],
    dtypes: tuple[torch.dtype, torch.dtype],
    starts: tuple[int, int],
) -> None:
    buffer = torch.zeros(1024, dtype=torch.int8)
    a, b = (
        buffer.view(dtype).as_strided(shape, steps[: len(shape)], start)
        for dtype, steps, start in zip(dtypes, strides, starts, strict=True)
    )
    left, right = bytes_of(a), bytes_of(b)
    if left & right:
        assert may_share(a, b)
    elif max(left) < min(right) or max(right) < min(left):
        assert not may_share(a, b)


@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 5),
    pitch=st.integers(0, 16),
    sizes=st.tuples(*[st.sampled_from([1, 2, 4])] * 2),
    starts=st.tuples(*[st.integers(0, 40)] * 2),
)
def test_for_rows_of_one_pitch_the_answer_is_exact(
    rows: int, width: int, pitch: int, sizes: tuple[int, int], starts: tuple[int, int]
) -> None:
    buffer = torch.zeros(1024, dtype=torch.int8)
    kinds = {1: torch.int8, 2: torch.float16, 4: torch.float32}
    # The pitch is the same in bytes, whatever the elements are.
    a, b = (
        buffer.view(kinds[size]).as_strided((rows, width), (4 * pitch // size, 1), start)
        for size, start in zip(sizes, starts, strict=True)
    )
    assert may_share(a, b) == bool(bytes_of(a) & bytes_of(b))


def test_columns_of_one_matrix_lie_apart() -> None:
    matrix = torch.empty(3, 4, 16)
    assert not may_share(matrix[..., :8], matrix[..., 8:])
    assert not may_share(matrix[..., :5], matrix[..., 11:])
    assert may_share(matrix[..., :8], matrix[..., 7:15])
    assert may_share(matrix[..., 7:15], matrix[..., :8])
    assert may_share(matrix[..., :8], matrix[..., :8])
    # Rows that begin further down are columns all the same.
    assert not may_share(matrix[0, :3, :8], matrix[0, 1:, 8:])
    assert may_share(matrix[0, :3, :8], matrix[0, 1:, :8])
    # Two row strides, and elements apart from one another: not looked at closely.
    assert may_share(matrix[:, :2, :8], matrix[:, :2, 8:])
    assert may_share(matrix[..., ::2], matrix[..., 1::2])


def test_columns_of_different_dtypes_lie_apart() -> None:
    rows = torch.empty(5, 24, dtype=torch.int8)
    narrow, wide = rows[:, :8].view(torch.float16), rows[:, 8:].view(torch.float32)
    assert narrow.shape == wide.shape == (5, 4)
    assert not may_share(narrow, wide)
    assert may_share(narrow, rows[:, 4:20].view(torch.float32))


def test_tensors_of_one_dimension_and_of_none() -> None:
    line = torch.empty(16)
    assert not may_share(line[:8], line[8:])
    assert may_share(line[:8], line[7:15])
    assert may_share(line[0], line[0])
    assert not may_share(line[0], line[1])
    # The same elements of which one dtype takes more bytes.
    assert may_share(line[1], line.view(torch.float16)[3])
    assert not may_share(line[1], line.view(torch.float16)[4])


def test_empty_tensors_share_nothing() -> None:
    matrix = torch.empty(4, 8)
    for empty in (matrix[:0], matrix[:, :0], matrix[:0, :0]):
        assert not may_share(empty, empty)


def test_one_answer_serves_all_distances() -> None:
    matrix = torch.empty(4, 16)
    shares = overlap_check(matrix[:, :8], matrix[:, 8:])
    # Rows of 32 bytes every 64 bytes: the last of four ends after 224.
    assert [distance for distance in range(-256, 257, 32) if not shares(distance)] == [
        distance for distance in range(-256, 257, 32) if distance % 64 == 32 or abs(distance) >= 224
    ]
    assert all(shares(distance) for distance in (-31, -1, 0, 1, 31, 33, 63, 64, 65))


def test_rows_are_taken_as_they_lie_where_their_elements_are_neighbours() -> None:
    base = torch.arange(48.0).view(4, 12)
    for x, shape, stride in (
        (base, (4, 12), 12),
        (base[:, 2:7], (4, 5), 12),
        (base.view(2, 2, 12), (4, 12), 12),
        (base[0], (1, 12), 12),
        # A column's elements have no neighbours, and need none.
        (base[:, :1], (4, 1), 12),
        # A single row has no stride of its own.
        (base[2:3, 2:7], (1, 5), 5),
    ):
        rows = rows_of(x)
        assert rows.data_ptr() == x.data_ptr()
        assert (tuple(rows.shape), row_stride(rows)) == (shape, stride)
        assert torch.equal(rows, x.reshape(shape))


def test_rows_that_are_not_reached_are_copied() -> None:
    base = torch.arange(48.0).view(4, 12)
    for x, longest_row in ((base.T, None), (base[:, ::2], None), (base[:, 2:7], 11)):
        rows = rows_of(x, longest_row)
        assert rows.is_contiguous()
        assert rows.data_ptr() != x.data_ptr()
        assert torch.equal(rows, x)
    assert rows_of(base[:, 2:7], 12).data_ptr() == base[:, 2:7].data_ptr()
