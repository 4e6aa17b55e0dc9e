"""Hypothesis strategies for tensors, and views whose surroundings give stray accesses away."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

GUARD_ELEMENTS = 1024
"""Guard values before and behind a view: enough for a whole block of a kernel to reach into."""


def floating_dtypes() -> st.SearchStrategy[torch.dtype]:
    """Return the dtypes kernels compute in: float16, bfloat16 and float32."""
    return st.sampled_from((torch.float16, torch.bfloat16, torch.float32))


def shapes(
    *, min_rank: int = 1, max_rank: int = 3, min_side: int = 1, max_side: int = 64, max_elements: int = 16_384
) -> st.SearchStrategy[tuple[int, ...]]:
    """Return shapes of bounded rank, side and element count."""

    def small_enough(shape: tuple[int, ...]) -> bool:
        elements = 1
        for side in shape:
            elements *= side
        return elements <= max_elements

    sides = st.integers(min_side, max_side)
    return st.lists(sides, min_size=min_rank, max_size=max_rank).map(tuple).filter(small_enough)


@st.composite
def strides_for(draw: st.DrawFn, shape: Sequence[int], *, unit_last: bool = False) -> tuple[int, ...]:
    """Return strides under which no two elements of the shape share an address.

    Axes come in any order in memory, with gaps between them.

    Args:
        draw: Given by Hypothesis.
        shape: Sizes of the axes.
        unit_last: Keep the last axis innermost and without gaps, as for contiguous rows.
    """
    last = len(shape) - 1
    if unit_last:
        order = [last, *draw(st.permutations(range(last)))]
        step = 1
    else:
        order = draw(st.permutations(range(len(shape))))
        step = draw(st.integers(1, 3))
    strides = [0] * len(shape)
    for axis in order:
        strides[axis] = step
        step = step * max(shape[axis], 1) + draw(st.integers(0, 7))
    return tuple(strides)


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides: list[int] = []
    step = 1
    for side in reversed(shape):
        strides.append(step)
        step *= max(side, 1)
    return tuple(reversed(strides))


def guarded_view(
    shape: Sequence[int],
    strides: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    *,
    device: str = "cpu",
    seed: int = 0,
    offset: int = 0,
) -> torch.Tensor:
    """Return a view of random values with guard values before, behind and in the gaps of it.

    Guards are NaN for floating-point dtypes and the largest value for integers, so that a stray read spoils
    the result; `assert_guards_intact` finds stray writes.

    Args:
        shape: Sizes of the axes.
        strides: In elements; those of a contiguous tensor by default.
        dtype: Element type.
        device: Where the buffer lives.
        seed: For the values: standard normal, or the dtype's whole range for integers.
        offset: Elements by which the view's start is moved, to take alignment away.
    """
    shape = tuple(shape)
    strides = dense_strides(shape) if strides is None else tuple(strides)
    extent = 1 + sum((side - 1) * stride for side, stride in zip(shape, strides, strict=True) if side)
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        values = torch.randn(shape, generator=generator).to(dtype)
    else:
        limits = torch.iinfo(dtype)
        values = torch.randint(limits.min, limits.max, shape, generator=generator, dtype=dtype)
    buffer = torch.full((2 * GUARD_ELEMENTS + offset + extent,), _guard(dtype), dtype=dtype, device=device)
    view = buffer.as_strided(shape, strides, GUARD_ELEMENTS + offset)
    view.copy_(values)
    return view


def assert_guards_intact(view: torch.Tensor) -> None:
    """Check that nothing outside a `guarded_view` was written.

    Raises:
        AssertionError: A guard value is gone; the message tells where, relative to the view's start.
    """
    elements = view.untyped_storage().nbytes() // view.element_size()
    surroundings = view.as_strided((elements,), (1,), 0).clone()
    guard = _guard(view.dtype)
    surroundings.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(guard)
    changed = ~surroundings.isnan() if view.dtype.is_floating_point else surroundings != guard
    if changed.any():
        first = int(changed.nonzero()[0]) - view.storage_offset()
        raise AssertionError(
            f"{int(changed.sum())} elements outside the view were written, the first at offset {first}"
        )


def _guard(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
