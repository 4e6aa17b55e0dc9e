"""Tails, infinities, NaN and clamps, and every value that 16-bit gates can take."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.spec import Tolerance
from tk_swiglu import swiglu_fused, swiglu_packed, swiglu_torch, swiglu_with_bias
from tk_testkit.close import assert_close

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INF, NAN = math.inf, math.nan
GATES = (-1e4, -100.0, -89.0, -88.0, -87.5, -20.0, -0.0, 0.0, 20.0, 100.0, INF, -INF, NAN)
# exp turns the rounding of its argument, up to 88, into as many roundings of its result.
EXPONENT_TERMS = 88**2


def row(values: object, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.tensor([*values], dtype=dtype, device=device)


def every_pattern(dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype).view(64, 1024)


def tolerance(dtype: torch.dtype) -> Tolerance:
    return rounding_tolerance(dtype, EXPONENT_TERMS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_table_of_tails_and_infinities(dtype: torch.dtype, device: str) -> None:
    gate = row(GATES, dtype, device)
    y = swiglu_fused(gate, torch.ones_like(gate))
    tails = (-0.0, -3.72008e-42, -1.98235e-37, -5.32805e-37, -8.73456e-37, -4.12231e-8)
    want = row((*tails, -0.0, 0.0, 20.0, 100.0, INF, NAN, NAN), torch.float64, device)
    # The table has six digits.
    allowed = tolerance(dtype)
    assert_close(y, want.to(dtype), Tolerance(absolute=allowed.absolute, relative=allowed.relative + 1e-5))
    assert torch.signbit(y[:7]).all()
    assert not torch.signbit(y[7:11]).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_table_times_zero_and_infinity(dtype: torch.dtype, device: str) -> None:
    gate = row(GATES, dtype, device)
    y = swiglu_fused(gate, torch.zeros_like(gate))
    assert torch.equal(y.isnan(), row([False] * 10 + [True] * 3, torch.bool, device))
    assert bool((y[:10] == 0).all())
    assert torch.equal(torch.signbit(y[:10]), torch.signbit(gate[:10]))
    for up, sign in ((INF, 1), (-INF, -1)):
        y = swiglu_fused(gate, torch.full_like(gate, up))
        assert torch.equal(y[1:6], row([-sign * INF] * 5, dtype, device))
        assert torch.equal(y[8:11], row([sign * INF] * 3, dtype, device))
        # Zero times infinity.
        assert bool(y[[0, 6, 7, 11, 12]].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_reference_gives_the_table_too(dtype: torch.dtype, device: str) -> None:
    gate = row(GATES, dtype, device)
    for up in (0.0, 1.0, -3.0):
        y = swiglu_torch(gate, torch.full_like(gate, up))
        assert torch.equal(
            y.isnan(), row([False] * (10 if up == 0 else 11) + [True] * (3 if up == 0 else 2), torch.bool, device)
        )
        want = swiglu_torch(gate.double(), torch.full_like(gate, up).double())
        # Below -88.7, fp32's exp(-x) is infinite, and its sigmoid zero. The kernels have no such limit.
        may_be_zero = (gate.double() < -88.7) & (y == 0)
        assert_close(y, torch.where(may_be_zero, 0.0, want).to(dtype), tolerance(dtype))


@pytest.mark.parametrize(("alpha", "limit"), [(1.0, None), (1.702, 7.0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("few_programs")
def test_every_gate_of_16_bits(dtype: torch.dtype, alpha: float, limit: float | None, device: str) -> None:
    gate = every_pattern(dtype, device)
    for value in (1.0, -0.375):
        up = torch.full_like(gate, value)
        y = swiglu_fused(gate, up, alpha=alpha, limit=limit)
        want = swiglu_torch(gate.double(), up.double(), alpha=alpha, limit=limit)
        assert_close(y, want.to(dtype), tolerance(dtype))
        assert not y[gate.isfinite()].isnan().any()
        assert bool(y[gate.isnan() | (gate == -INF)].isnan().all())
        signs = torch.signbit(gate) ^ (value < 0)
        assert torch.equal(torch.signbit(y)[gate.isfinite()], signs[gate.isfinite()])


@pytest.mark.parametrize("limit", [None, 7.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("few_programs")
def test_every_up_of_16_bits(dtype: torch.dtype, limit: float | None, device: str) -> None:
    up = every_pattern(dtype, device)
    gate = torch.full_like(up, 0.75)
    y = swiglu_fused(gate, up, alpha=1.702, beta=1.0, limit=limit)
    want = swiglu_torch(gate.double(), up.double(), alpha=1.702, beta=1.0, limit=limit)
    assert_close(y, want.to(dtype), rounding_tolerance(dtype, EXPONENT_TERMS, magnitude=1.0))
    assert torch.equal(y.isnan(), up.isnan())


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(DTYPES),
    alpha=st.sampled_from((1.0, 1.702, -1.0, 0.0)),
    limit=st.sampled_from((None, 7.0)),
    data=st.data(),
)
def test_no_finite_gate_gives_nan_property(
    device: str, dtype: torch.dtype, alpha: float, limit: float | None, data: st.DataObject
) -> None:
    width = torch.finfo(dtype).bits
    floats = st.integers(0, 2**width - 1).map(lambda bits: bits - 2 ** (width - 1))
    bits = data.draw(st.lists(floats, min_size=1, max_size=64))
    gate = torch.tensor(bits, dtype=torch.int16 if width == 16 else torch.int32, device=device).view(dtype)
    gate = torch.where(gate.isfinite(), gate, torch.finfo(dtype).max)
    for up in (0.0, 1.0, -1.0):
        assert not swiglu_fused(gate, torch.full_like(gate, up), alpha=alpha, limit=limit).isnan().any()


@pytest.mark.parametrize("limit", [None, 7.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_passes_every_clamp_and_stays_in_its_element(dtype: torch.dtype, limit: float | None, device: str) -> None:
    values = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0))
    gate, up = 8 * values.to(device=device, dtype=dtype)
    clean = swiglu_fused(gate, up, limit=limit)
    gate[1, 3] = up[2, 7] = NAN
    bad = torch.zeros_like(gate, dtype=torch.bool)
    bad[1, 3] = bad[2, 7] = True
    bias = torch.zeros(40, device=device)
    bias_up = bias.clone()
    bias_up[11] = NAN
    packed = torch.cat((gate, up), -1), torch.stack((gate, up), -1).flatten(-2)
    for y in (
        swiglu_fused(gate, up, limit=limit),
        swiglu_packed(packed[0], limit=limit),
        swiglu_packed(packed[1], layout="interleaved", limit=limit),
        swiglu_torch(gate, up, limit=limit),
    ):
        assert torch.equal(y.isnan(), bad)
    assert torch.equal(swiglu_fused(gate, up, limit=limit)[~bad], clean[~bad])
    bad[:, 11] = True
    for biases in ((bias, bias_up), (bias_up, bias)):
        assert torch.equal(swiglu_with_bias(gate, up, *biases, limit=limit).isnan(), bad)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_are_clamped(dtype: torch.dtype, device: str) -> None:
    gate = row((INF, INF, 1.0, 1.0, INF, -INF), dtype, device)
    up = row((INF, -INF, INF, -INF, 0.0, 1.0), dtype, device)
    y = swiglu_fused(gate, up, alpha=1.702, beta=1.0, limit=7.0)
    clamped_gate = row((7.0, 7.0, 1.0, 1.0, 7.0), dtype, device)
    clamped_up = row((7.0, -7.0, 7.0, -7.0, 0.0), dtype, device)
    assert torch.equal(y[:5], swiglu_fused(clamped_gate, clamped_up, alpha=1.702, beta=1.0))
    assert y[5].isnan()
    # Without a limit they are what PyTorch makes of them.
    y = swiglu_fused(gate, up)
    want = torch.nn.functional.silu(gate.double()) * up.double()
    assert_close(y, want.to(dtype), tolerance(dtype))


def test_gates_are_clamped_from_above_only(device: str) -> None:
    gate = row((-30.0, -7.0, 7.0, 7.5, 30.0), torch.float32, device)
    ones = torch.ones_like(gate)
    y = swiglu_fused(gate, ones, limit=7.0)
    plain = swiglu_fused(gate, ones)
    assert torch.equal(y[:3], plain[:3])
    assert torch.equal(y[3:], plain[2].expand(2))
    y = swiglu_fused(ones, gate, limit=7.0)
    assert torch.equal(y, swiglu_fused(ones, gate.clamp(-7.0, 7.0)))


def test_results_beyond_the_dtype_are_infinite(device: str) -> None:
    for dtype in DTYPES:
        largest = row((torch.finfo(dtype).max,), dtype, device)
        two = torch.full_like(largest, 2.0)
        assert torch.equal(swiglu_fused(largest, two / 2), largest)
        assert torch.equal(swiglu_fused(largest, two), largest * two)
        assert torch.equal(swiglu_fused(largest, -two), -largest * two)
        # Twice the largest float16 fits into float32, where biases are added and clamps are taken.
        bias = row((torch.finfo(torch.float16).max,), torch.float32, device)
        y = swiglu_with_bias(bias.to(dtype), two / 2, bias, two * 0)
        assert_close(y, (bias * 2).to(dtype), tolerance(dtype))
        y = swiglu_with_bias(bias.to(dtype), two / 2, bias, two * 0, limit=40_000.0)
        assert_close(y, torch.full_like(two, 40_000.0), tolerance(dtype))


def test_the_smallest_values_survive(device: str) -> None:
    for dtype, sign in itertools.product((torch.float16, torch.bfloat16), (1.0, -1.0)):
        kind = torch.finfo(dtype)
        # Below the smallest normal value, where a sum of two is as exact as any.
        small = row((sign * kind.smallest_normal / 4, sign * kind.smallest_normal), dtype, device)
        y = swiglu_fused(small, torch.full_like(small, 2.0))
        assert torch.equal(y, small)
