"""Argument checks: what passes, what does not, and that messages say what was wanted and what came."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_kernel_core.checks import (
    ACTIVATION_DTYPES,
    check_choice,
    check_number,
    check_same_device,
    check_shape,
    check_tensor,
    check_writable,
)
from tk_testkit.strategies import guarded_view, shapes, strides_for


@pytest.mark.parametrize("dtype", ACTIVATION_DTYPES, ids=str)
@pytest.mark.parametrize("make", [torch.empty, lambda *a, **k: torch.nn.Parameter(torch.empty(*a, **k))])
def test_a_dense_tensor_is_handed_back(make: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    x = make(2, 3, dtype=dtype)
    assert check_tensor("x", x) is x
    assert check_tensor("x", x, [dtype]) is x
    assert check_tensor("x", x, iter([torch.int8, dtype])) is x


def test_strides_do_not_make_a_tensor_less_dense() -> None:
    x = torch.empty(4, 4).T[::2]
    assert check_tensor("x", x) is x


@pytest.mark.parametrize("value", [None, 1.0, [1.0], "x", torch.float32])
def test_what_is_no_tensor_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=f"^weight must be a torch.Tensor, got {type(value).__name__}$"):
        check_tensor("weight", value)


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^x must be a dense \(strided\) tensor, got layout torch.sparse_coo$"):
        check_tensor("x", torch.eye(2).to_sparse())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    came = str(dtype).removeprefix("torch.")
    with pytest.raises(TypeError, match=f"^x must have dtype float16, bfloat16, float32, got {came}$"):
        check_tensor("x", torch.empty(2, dtype=dtype))
    with pytest.raises(TypeError, match=f"^scale must have dtype int32, got {came}$"):
        check_tensor("scale", torch.empty(2, dtype=dtype), (torch.int32,))


@pytest.mark.parametrize("shape", [(2, 3), [2, 3], torch.Size((2, 3))], ids=repr)
def test_the_same_shape(shape: Any) -> None:
    check_shape("x", torch.empty(2, 3), shape)


@pytest.mark.parametrize("shape", [(), (2,), (3, 2), (2, 3, 1), (2, 4)], ids=str)
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"residual must have shape {shape}, got (2, 3)")):
        check_shape("residual", torch.empty(2, 3), shape)


def test_devices() -> None:
    check_same_device("weight", torch.empty(1), torch.device("cpu"), "x")
    with pytest.raises(ValueError, match=r"^weight must be on the device of x, cuda:1, got cpu$"):
        check_same_device("weight", torch.empty(1), torch.device("cuda", 1), "x")
    with pytest.raises(ValueError, match=r"^bias must be on the device of gate, cpu, got meta$"):
        check_same_device("bias", torch.empty(1, device="meta"), torch.device("cpu"), "gate")


@pytest.mark.parametrize(("value", "minimum"), [(0, 0.0), (1e-6, 0.0), (-3, -math.inf), (2**60, 1.0), (-1.5, -1.5)])
def test_a_number_becomes_a_float(value: float, minimum: float) -> None:
    number = check_number("eps", value, minimum=minimum)
    assert type(number) is float
    assert number == value


@pytest.mark.parametrize("value", [True, None, "1e-6", 1j, torch.tensor(1.0), [1.0]], ids=repr)
def test_what_is_no_number_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match=f"^eps must be a number, got {type(value).__name__}$"):
        check_number("eps", value)


@pytest.mark.parametrize(
    "value", [math.inf, -math.inf, math.nan, 10**400, -(10**400)], ids=lambda value: f"{value!r:.9}"
)
def test_what_is_not_finite_is_refused(value: float) -> None:
    came = {10**400: "inf", -(10**400): "-inf"}.get(value, str(value))
    with pytest.raises(ValueError, match=f"^eps must be finite, got {came}$"):
        check_number("eps", value)


@pytest.mark.parametrize(("value", "came"), [(1e39, "1e+39"), (-1e300, "-1e+300"), (10**39, "1e+39")])
def test_what_float32_cannot_hold_is_refused(value: float, came: str) -> None:
    with pytest.raises(ValueError, match=rf"^eps must be within the range of float32, got {re.escape(came)}$"):
        check_number("eps", value)
    largest = torch.finfo(torch.float32).max
    assert check_number("eps", largest) == largest


@pytest.mark.parametrize(("value", "came"), [(-1, "-1"), (-1e-9, "-1e-09"), (math.nan, "nan"), (math.inf, "inf")])
def test_a_number_below_the_minimum_is_refused(value: float, came: str) -> None:
    with pytest.raises(ValueError, match=f"^eps must be finite and at least 0, got {came}$"):
        check_number("eps", value, minimum=0.0)


def test_a_choice_is_handed_back() -> None:
    assert check_choice("casting", "llama", ("fp32", "llama")) == "llama"
    assert check_choice("bits", 8, iter([4, 8])) == 8


@pytest.mark.parametrize("value", ["LLAMA", "", None, 1])
def test_no_choice_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=f"^casting must be one of 'fp32', 'llama', got {value!r}$"):
        check_choice("casting", value, iter(["fp32", "llama"]))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x[:, ::2],
        lambda x: x[:0],
        lambda x: x[:1].expand(1, 6),
        lambda x: x[1:3, 1:2],
    ],
)
def test_views_without_overlap_can_be_written(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    check_writable("x", make(torch.empty(4, 6)))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[:1].expand(5, 6),
        lambda x: x[:, :1].expand(4, 3),
        lambda x: x.as_strided((4, 6), (4, 1)),
        lambda x: x.as_strided((3, 3), (2, 2)),
    ],
    ids=["rows", "columns", "rows that overlap", "equal strides"],
)
def test_expanded_tensors_cannot_be_written(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = make(torch.empty(4, 6))
    said = f"must not be expanded or overlap itself: shape {tuple(x.shape)}, strides {x.stride()}"
    with pytest.raises(ValueError, match=re.escape(said)):
        check_writable("residual", x)


@given(value=st.one_of(st.integers(), st.floats()), minimum=st.one_of(st.just(-math.inf), st.floats(-10, 10)))
def test_exactly_finite_numbers_from_the_minimum_on_are_taken(value: float, minimum: float) -> None:
    try:
        is_fine = abs(float(value)) <= torch.finfo(torch.float32).max and float(value) >= minimum
    except OverflowError:
        is_fine = False
    if is_fine:
        assert check_number("eps", value, minimum=minimum) == float(value)
    else:
        with pytest.raises(ValueError, match=r"eps must be (finite|within the range of float32)"):
            check_number("eps", value, minimum=minimum)


@given(shape=shapes(min_side=0, max_side=4), wanted=shapes(min_side=0, max_side=4))
def test_exactly_the_wanted_shape_is_taken(shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    value = torch.empty(shape)
    if shape == wanted:
        check_shape("x", value, wanted)
    else:
        with pytest.raises(ValueError, match=re.escape(f"x must have shape {wanted}, got {shape}")):
            check_shape("x", value, wanted)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_a_tensor_whose_elements_share_memory_is_never_written(sizes: list[int], data: st.DataObject) -> None:
    strides = [data.draw(st.integers(0, 12)) for _ in sizes]
    value = torch.empty(128).as_strided(sizes, strides)
    addresses = torch.arange(128).as_strided(sizes, strides).flatten().tolist()
    if len(set(addresses)) < len(addresses):
        with pytest.raises(ValueError, match="must not be expanded or overlap itself"):
            check_writable("x", value)


@given(data=st.data(), shape=shapes(max_side=6))
def test_a_tensor_with_gaps_and_axes_in_any_order_can_be_written(data: st.DataObject, shape: tuple[int, ...]) -> None:
    strides = data.draw(strides_for(shape))
    check_writable("x", guarded_view(shape, strides))
