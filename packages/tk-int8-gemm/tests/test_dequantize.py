"""Dequantisation, error measures, and what holds for every tensor there and back."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_int8_gemm import _quantize
from tk_int8_gemm._quantize import (
    QuantScheme,
    calculate_quantization_error,
    channel_vector,
    dequantize,
    quantize,
    quantize_asymmetric,
    quantize_symmetric,
)
from tk_testkit.strategies import shapes

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INF, NAN = math.inf, math.nan
Q = torch.tensor([[10, -3, 0, 7], [127, -128, 1, -1]], dtype=torch.int8)


def test_dequantize_subtracts_the_zero_point_and_scales_per_row(device: str) -> None:
    q, scale = Q.to(device), torch.tensor([0.5, 0.25], device=device)
    want = [[3.5, -3.0, -1.5, 2.0], [63.75, 0.0, 32.25, 31.75]]
    for dtype in (torch.int8, torch.int32, torch.float16, torch.float32):
        zero_point = torch.tensor([3, -128], device=device).to(dtype)
        for dim in (None, 0, -2):
            got = dequantize(q, scale, dim=dim, zero_point=zero_point)
            assert (got.dtype, got.tolist()) == (torch.float16, want)
    assert dequantize(q, scale).tolist() == [[5.0, -1.5, 0.0, 3.5], [31.75, -32.0, 0.25, -0.25]]


def test_dequantize_scales_per_column_with_dim_one(device: str) -> None:
    q, scale = Q.to(device), torch.tensor([1.0, 2.0, 4.0, 8.0], device=device)
    want = [[10.0, -6.0, 0.0, 56.0], [127.0, -256.0, 4.0, -8.0]]
    for dim in (1, -1):
        assert dequantize(q, scale, dim=dim).tolist() == want
    # What shape () or (1,) scales, and all that broadcasts, is the whole tensor.
    for one in (scale[1], scale[1:2], scale[1].view(1, 1), scale[1].expand(2, 4)):
        assert dequantize(q, one).tolist() == (2.0 * Q).tolist()
    assert dequantize(q, scale.view(1, 4)).tolist() == want


def test_dequantize_takes_a_scale_for_every_row_of_more_dimensions(device: str) -> None:
    q = torch.randint(-127, 128, (2, 3, 4), dtype=torch.int8, generator=torch.Generator().manual_seed(0)).to(device)
    scale = torch.arange(1.0, 7.0, device=device).view(2, 3)
    assert torch.equal(dequantize(q, scale, torch.float32), q * scale.unsqueeze(-1))
    assert torch.equal(dequantize(q, scale[0], torch.float32, dim=1), q * scale[0].view(1, 3, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_rounds_once_to_the_dtype(dtype: torch.dtype, device: str) -> None:
    codes, scale, zero_point = quantize_asymmetric(
        torch.randn(4, 33, generator=torch.Generator().manual_seed(0)).to(device), dim=1
    )
    exact = (codes.double() - zero_point.double().unsqueeze(1)) * scale.double().unsqueeze(1)
    wanted = exact if dtype == torch.float64 else exact.float()
    got = dequantize(codes, scale, dtype, zero_point=zero_point)
    assert (got.dtype, torch.equal(got, wanted.to(dtype))) == (dtype, True)


def test_dequantize_gives_infinity_beyond_the_dtype_and_nan_where_the_scale_is(device: str) -> None:
    q, scale = Q.to(device), torch.tensor([1e4, NAN], device=device)
    got = dequantize(q, scale)
    assert got[0].tolist() == [INF, -30000.0, 0.0, INF]
    assert bool(got[1].isnan().all())
    assert dequantize(q, scale, torch.bfloat16)[0].isfinite().all()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: dequantize(Q, torch.ones(4)),
            ValueError,
            "scale must have shape (), (1,), (2,) or one of 2 dimensions that broadcasts to (2, 4), got (4,)",
        ),
        (
            lambda: dequantize(Q, torch.ones(2), dim=1),
            ValueError,
            "scale must have shape (), (1,), (4,) or one of 2 dimensions that broadcasts to (2, 4), got (2,)",
        ),
        (
            lambda: dequantize(Q, torch.ones(2), zero_point=torch.ones(4, 2)),
            ValueError,
            "zero_point must have shape (), (1,), (2,) or one of 2 dimensions that broadcasts to (2, 4), got (4, 2)",
        ),
        (
            lambda: dequantize(Q.view(2, 1, 4), torch.ones(2, 2), dim=2),
            ValueError,
            "scale must have shape (), (1,), (4,) or one of 3 dimensions that broadcasts to (2, 1, 4), got (2, 2)",
        ),
        (lambda: dequantize(Q, torch.ones(2), dim=2), ValueError, "dim must be one of None, -2, -1, 0, 1, got 2"),
        (lambda: dequantize(Q.int(), torch.ones(2)), TypeError, "q must have dtype int8, got int32"),
        (
            lambda: dequantize(Q, torch.ones(2).int()),
            TypeError,
            "scale must have dtype float16, bfloat16, float32, float64, got int32",
        ),
        (
            lambda: dequantize(Q, torch.ones(2), zero_point=torch.ones(2).bool()),
            TypeError,
            "zero_point must have dtype int8, int32, float16, bfloat16, float32, float64, got bool",
        ),
        (
            lambda: dequantize(Q, torch.ones(2), torch.int8),
            ValueError,
            "dtype must be one of torch.float16, torch.bfloat16, torch.float32, torch.float64, got torch.int8",
        ),
    ],
)
def test_dequantize_names_what_it_refuses(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()


def test_error_measures_of_an_example_by_hand(device: str) -> None:
    original = torch.tensor([[10.0, -4.0, 1.0, 0.5], [0.0, 2.0, -8.0, 3.0]], device=device)
    q = torch.tensor([[5, -2, 0, 0], [0, 1, -3, 1]], dtype=torch.int8, device=device)
    # Dequantised [[10, -4, 0, 0], [0, 2, -6, 2]]: errors 1, 0.5, 2 and 1. Beyond 1 lie 10, -4, 2, -8 and 3.
    got = calculate_quantization_error(original, q, torch.tensor(2.0, device=device))
    assert got == {
        "max_abs_error": 2.0,
        "mean_abs_error": 4.5 / 8,
        "relative_error_pct": pytest.approx(100 * (2 / 8 + 1 / 3) / 5, rel=1e-15),
        "snr_db": pytest.approx(10 * math.log10(194.25 / 6.25), rel=1e-15),
    }
    assert all(type(value) is float for value in got.values())


def test_error_measures_take_scales_and_zero_points_like_dequantize(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(5, 9, generator=generator).to(device)
    for dim in (0, 1):
        codes, scale, zero_point = quantize_asymmetric(weight, dim=dim)
        got = calculate_quantization_error(weight, codes, scale, 1 - dim, zero_point)
        error = (weight - dequantize(codes, scale, torch.float32, 1 - dim, zero_point)).abs()
        assert got["max_abs_error"] == pytest.approx(error.max().item(), rel=1e-6)
        assert got["mean_abs_error"] == pytest.approx(error.mean().item(), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_exact_match_has_an_infinite_ratio(dtype: torch.dtype, device: str) -> None:
    original = torch.tensor([[127.0, -3.0, 0.0], [64.0, 2.0, -127.0]], dtype=dtype, device=device)
    nothing = {"max_abs_error": 0.0, "mean_abs_error": 0.0, "relative_error_pct": 0.0, "snr_db": INF}
    assert calculate_quantization_error(original, *quantize_symmetric(original)) == nothing
    zeros = torch.zeros_like(original)
    assert calculate_quantization_error(zeros, *quantize_symmetric(zeros)) == nothing


def test_errors_of_zeros_have_a_ratio_of_minus_infinity(device: str) -> None:
    ones = torch.ones(2, 3, dtype=torch.int8, device=device)
    got = calculate_quantization_error(ones.float() * 0, ones, torch.tensor(2.0, device=device))
    assert got == {"max_abs_error": 2.0, "mean_abs_error": 2.0, "relative_error_pct": 0.0, "snr_db": -INF}


def test_what_is_not_finite_shows_in_the_measures(device: str) -> None:
    q = torch.ones(1, 3, dtype=torch.int8, device=device)
    scale = torch.tensor(1.0, device=device)
    got = calculate_quantization_error(torch.tensor([[1.0, NAN, 1.0]], device=device), q, scale)
    assert math.isnan(got["max_abs_error"])
    assert math.isnan(got["snr_db"])
    got = calculate_quantization_error(torch.tensor([[1.0, INF, 1.0]], device=device), q, scale)
    assert got["max_abs_error"] == got["mean_abs_error"] == INF


def test_error_measures_do_not_depend_on_chunks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randint(-500, 500, (13, 10), generator=torch.Generator().manual_seed(0)).half().to(device)
    codes = (weight / 4).round().clamp(-127, 127).to(torch.int8)
    want = calculate_quantization_error(weight, codes, torch.tensor(4.0, device=device))
    monkeypatch.setattr(_quantize, "_CHUNK", 35)
    got = calculate_quantization_error(weight, codes, torch.tensor(4.0, device=device))
    assert got.pop("relative_error_pct") == pytest.approx(want.pop("relative_error_pct"), rel=1e-14)
    assert got == want


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2, 3), Q), ValueError, "original must have shape (2, 4), got (2, 3)"),
        ((Q, Q), TypeError, "original must have dtype float16, bfloat16, float32, float64, got int8"),
        ((Q.float(), Q.int()), TypeError, "q must have dtype int8, got int32"),
        ((Q[:0].half(), Q[:0]), ValueError, "original must have at least one element, got shape (0, 4)"),
    ],
)
def test_error_measures_name_what_they_refuse(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        calculate_quantization_error(*arguments, torch.ones(1))


@pytest.mark.parametrize("dim", [None, 1])
@pytest.mark.parametrize("skewed", ["relu", "exponential"])
def test_asymmetric_is_six_decibels_better_on_skewed_weights(skewed: str, dim: int | None, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(64, 2048, generator=generator)
    weight = (weight.relu() if skewed == "relu" else torch.rand(64, 2048, generator=generator).log().neg()).to(device)
    ratios = []
    for scheme in QuantScheme:
        codes, scale, zero_point = quantize(weight, scheme, dim=dim)
        ratios.append(calculate_quantization_error(weight, codes, scale, None, zero_point)["snr_db"])
    # The same range in 255 steps instead of 127.
    assert ratios[1] - ratios[0] == pytest.approx(20 * math.log10(255 / 127), abs=0.15)


def test_a_scale_per_channel_is_better_than_one_for_all(device: str) -> None:
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 1, 64).unsqueeze(1)
    weight = weight.to(device)
    per_channel = calculate_quantization_error(weight, *quantize_symmetric(weight, dim=1))
    per_tensor = calculate_quantization_error(weight, *quantize_symmetric(weight))
    assert per_channel["snr_db"] > per_tensor["snr_db"]
    assert per_channel["mean_abs_error"] < per_tensor["mean_abs_error"] / 2


def test_channel_vectors_are_fp32_with_one_value_per_channel(device: str) -> None:
    values = torch.arange(1, 4, device=device)
    for dtype in (torch.int8, torch.int32, torch.float16, torch.float64):
        for shape in ((3,), (3, 1), (1, 3)):
            got = channel_vector("scale", values.to(dtype).view(shape), 3, (dtype,))
            assert (got.dtype, got.tolist(), got.stride()) == (torch.float32, [1.0, 2.0, 3.0], (1,))
        for one in (values[1], values[1:2]):
            got = channel_vector("scale", one.to(dtype), 3, (dtype,))
            assert (got.dtype, got.tolist(), got.stride()) == (torch.float32, [2.0, 2.0, 2.0], (1,))
    for shape in ((2,), (4,), (1, 1), (3, 3), (1, 3, 1), (0,)):
        wanted = f"scale must have shape (3,), or (), (1,), (3, 1) or (1, 3), got {shape}"
        with pytest.raises(ValueError, match=f"^{re.escape(wanted)}$"):
            channel_vector("scale", torch.ones(shape, device=device), 3, (torch.float32,))
    vector = values.float()
    assert channel_vector("scale", vector, 3, (torch.float32,)).data_ptr() == vector.data_ptr()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(shapes(max_elements=128))
    width = 16 if dtype == torch.float16 else 32
    largest = 60000.0 if width == 16 else 2.0**100
    elements = st.one_of(
        st.floats(-largest, largest, width=width, allow_subnormal=False), st.floats(-2.0, 2.0, width=16)
    )
    count = math.prod(shape)
    values = draw(st.lists(elements, min_size=count, max_size=count))
    return torch.tensor(values, dtype=torch.float64).view(shape).to(dtype)


@given(tensors(), st.booleans())
def test_symmetric_values_come_back_within_half_a_step(tensor: torch.Tensor, per_row: bool) -> None:
    codes, scale = quantize_symmetric(tensor, dim=-1 if per_row else None)
    assert bool((scale > 0).all())
    assert int(codes.min()) >= -127
    steps = (scale.unsqueeze(-1) if per_row else scale).double()
    error = (tensor.float().double() - codes.double() * steps).abs()
    # The quotients and products before the rounding err by three units of fp32, of up to 127 steps.
    assert bool((error <= steps * (0.5 + 127 * 3 * 2.0**-24)).all())


@given(tensors(), st.booleans())
def test_asymmetric_values_come_back_within_one_step_and_zero_exactly(tensor: torch.Tensor, per_row: bool) -> None:
    codes, scale, zero_point = quantize_asymmetric(tensor, dim=-1 if per_row else None)
    assert bool((scale > 0).all())
    steps, zeros = (value.unsqueeze(-1).double() if per_row else value.double() for value in (scale, zero_point))
    values = (codes.double() - zeros) * steps
    assert bool(((tensor.float().double() - values).abs() <= steps * (1 + 255 * 6 * 2.0**-24)).all())
    assert bool((values[tensor == 0] == 0).all())


@given(tensors())
def test_larger_values_never_get_smaller_codes(tensor: torch.Tensor) -> None:
    ordered = tensor.flatten().sort().values
    for scheme in QuantScheme:
        codes = quantize(ordered, scheme)[0]
        assert bool((codes[1:] >= codes[:-1]).all())


@given(tensors())
def test_the_largest_magnitude_of_a_row_has_code_127(tensor: torch.Tensor) -> None:
    codes, _ = quantize_symmetric(tensor, dim=-1)
    largest = tensor.float().abs().amax(-1)
    assert torch.equal(codes.abs().amax(-1), torch.where(largest >= 2.0**-110, 127, 0).to(torch.int8))


@given(tensors())
def test_the_sign_turns_with_the_tensor(tensor: torch.Tensor) -> None:
    codes, scale = quantize_symmetric(tensor, dim=-1)
    other, other_scale = quantize_symmetric(-tensor, dim=-1)
    assert torch.equal(other, -codes)
    assert torch.equal(other_scale, scale)
