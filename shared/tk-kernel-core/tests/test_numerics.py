"""Tolerances: wide enough for a correct sum, too narrow for one more rounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_kernel_core.numerics import rounding_tolerance
from tk_testkit import assert_close, floating_dtypes

FP32_EPS = torch.finfo(torch.float32).eps
NARROW = (torch.float16, torch.bfloat16)


def sum_in_order(values: torch.Tensor) -> torch.Tensor:
    """Add the columns in fp32 one at a time, the least accurate of all orders."""
    total = torch.zeros(len(values))
    for column in values.T:
        total += column
    return total


@given(floating_dtypes(), st.integers(1, 1024), st.integers(0, 2**32))
def test_sums_in_fp32_are_within(dtype: torch.dtype, terms: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(8, terms, generator=generator)
    want = values.double().sum(1).to(dtype)
    assert_close(sum_in_order(values).to(dtype), want, rounding_tolerance(dtype, terms))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_values_two_units_apart_are_not(dtype: torch.dtype) -> None:
    tolerance = rounding_tolerance(dtype, 8192)
    # Just above a power of two a unit in the last place is largest.
    one = torch.tensor([1.0, -1.0, 1024.0], dtype=dtype)
    unit = one.abs() * torch.finfo(dtype).eps
    assert_close(one + unit, one, tolerance)
    with pytest.raises(AssertionError, match="3 of 3 elements differ"):
        assert_close(one + 2 * unit, one, tolerance)


@pytest.mark.parametrize("terms", [1, 64, 8192, 2**20])
def test_fp32_is_held_to_its_own_unit(terms: int) -> None:
    tolerance = rounding_tolerance(torch.float32, terms)
    assert tolerance.relative == (4 + terms**0.5) * FP32_EPS
    # Nothing is rounded to another dtype.
    assert rounding_tolerance(torch.float32, terms, roundings=3).relative == tolerance.relative


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_every_rounding_adds_a_unit(dtype: torch.dtype) -> None:
    kind = torch.finfo(dtype)
    for roundings in (0, 1, 2, 5):
        tolerance = rounding_tolerance(dtype, 100, roundings=roundings)
        assert tolerance.relative == pytest.approx(roundings * kind.eps + 14 * FP32_EPS, rel=1e-12)
        # Subnormal results: a unit in the last place is the smallest subnormal, whatever the value.
        assert tolerance.absolute == roundings * kind.smallest_normal * kind.eps


def test_cancelling_terms_are_allowed_their_own_error() -> None:
    terms, magnitude = 256, 100.0
    tolerance = rounding_tolerance(torch.float32, terms, magnitude=magnitude)
    plain = rounding_tolerance(torch.float32, terms)
    assert tolerance.relative == plain.relative
    assert tolerance.absolute == pytest.approx(plain.absolute + magnitude * 20 * FP32_EPS, rel=1e-12)
    generator = torch.Generator().manual_seed(0)
    half = magnitude * torch.rand(64, terms // 2, generator=generator)
    values = torch.cat((half, -half), dim=1)[:, torch.randperm(terms, generator=generator)]
    got, want = values.sum(1), torch.zeros(64)
    assert_close(got, want, tolerance)
    with pytest.raises(AssertionError):
        assert_close(got, want, plain)
