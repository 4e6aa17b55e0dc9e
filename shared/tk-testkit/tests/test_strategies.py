"""Guarded views hold their values, give stray accesses away, and strides never overlap."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_testkit import assert_guards_intact, dense_strides, floating_dtypes, guarded_view, shapes, strides_for


@given(st.data(), shapes(max_side=6, min_side=0), st.booleans())
def test_strides_never_let_two_elements_share_an_address(
    data: st.DataObject, shape: tuple[int, ...], unit_last: bool
) -> None:
    strides = data.draw(strides_for(shape, unit_last=unit_last))
    addresses = [
        sum(i * stride for i, stride in zip(index, strides, strict=True))
        for index in itertools.product(*map(range, shape))
    ]
    assert len(set(addresses)) == len(addresses)
    if unit_last:
        assert strides[-1] == 1


@given(shapes(max_side=6))
def test_dense_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert dense_strides(shape) == torch.empty(shape).stride()


@given(st.data(), shapes(max_side=8, min_side=0), floating_dtypes(), st.integers(0, 3))
def test_view_is_finite_inside_and_nan_all_around(
    data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype, offset: int
) -> None:
    strides = data.draw(strides_for(shape))
    view = guarded_view(shape, strides, dtype, offset=offset)
    assert view.shape == shape
    assert view.stride() == strides
    assert view.isfinite().all()
    elements = view.untyped_storage().nbytes() // view.element_size()
    whole = view.as_strided((elements,), (1,), 0)
    assert int(whole.isfinite().sum()) == view.numel()
    assert_guards_intact(view)


def test_same_seed_gives_same_values_in_any_layout() -> None:
    one = guarded_view((4, 5), seed=3)
    assert torch.equal(one, guarded_view((4, 5), (1, 4), seed=3))
    assert not torch.equal(one, guarded_view((4, 5), seed=4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("position", [-1, 3, 8])
def test_stray_write_is_found(dtype: torch.dtype, position: int) -> None:
    # Rows of 3 elements, 5 apart: offset 3 lies in a gap, 8 behind the end.
    view = guarded_view((2, 3), (5, 1), dtype)
    view.as_strided((1,), (1,), view.storage_offset() + position).fill_(1)
    with pytest.raises(
        AssertionError, match=f"1 elements outside the view were written, the first at offset {position}"
    ):
        assert_guards_intact(view)
