from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk_kernel_core.device import PEAKS, DeviceInfo, Fact, known_device, known_devices
from tk_kernel_core.roofline import Placement, place, roof_us
from tk_kernel_core.spec import Cost

counts = st.integers(0, 10**18)
operations = st.floats(0, 1e21)
latencies = st.floats(1e-3, 1e9)
costs = st.builds(Cost, operations, counts, counts, st.sampled_from(PEAKS))
devices = st.sampled_from(known_devices()).map(known_device)

# Products and quotients of a few float64 numbers.
ROUNDING = 1e-12


def with_facts(device: DeviceInfo, *, bandwidth: float | None = None, peak: float | None = None) -> DeviceInfo:
    """The device with another bandwidth and another peak for everything; None makes one unknown."""

    def fact(value: float | None) -> Fact:
        return Fact() if value is None else Fact(value=value, provenance="override")

    changes = {"bandwidth_bytes_per_s": fact(bandwidth), "peak_flops": dict.fromkeys(PEAKS, fact(peak))}
    return device.model_copy(update=changes)


def roof_of(cost: Cost, device: DeviceInfo) -> float:
    roof, _ = roof_us(cost, device)
    assert roof is not None
    return roof


def test_memory_bound_work_on_h200() -> None:
    # 8192 x 8192 bfloat16 read and written, 5 operations each, at 4.8 TB/s.
    elements = 8192 * 8192
    roof, bound = roof_us(Cost(5 * elements, 2 * elements, 2 * elements), known_device("H200"))
    assert bound == "memory"
    assert roof == pytest.approx(55.924, abs=0.001)


def test_compute_bound_work_on_h200() -> None:
    # 8192 x 8192 x 8192 in bfloat16 at 989.5 TFLOP/s.
    cost = Cost(2 * 8192**3, 2 * 2 * 8192**2, 2 * 8192**2, peak="bfloat16")
    roof, bound = roof_us(cost, known_device("H200"))
    assert bound == "compute"
    assert roof == pytest.approx(1111.18, abs=0.01)


def test_each_peak_is_the_one_asked_for() -> None:
    device = known_device("RTX-4090")
    for peak in PEAKS:
        value = device.peak_flops[peak].value
        assert value is not None
        roof, bound = roof_us(Cost(value, 0, 0, peak), device)
        assert roof == pytest.approx(1e6)
        assert bound == "compute"


@given(costs, devices)
def test_roof_is_the_slower_of_memory_and_arithmetic(cost: Cost, device: DeviceInfo) -> None:
    roof, bound = roof_us(cost, device)
    memory = roof_of(replace(cost, flops=0), device)
    compute = roof_of(replace(cost, bytes_read=0, bytes_written=0), device)
    assert roof == max(memory, compute)
    assert bound == ("compute" if compute > memory else "memory")


@given(costs, devices, counts)
def test_more_bytes_never_lower_the_roof(cost: Cost, device: DeviceInfo, more: int) -> None:
    for name in ("bytes_read", "bytes_written"):
        assert roof_of(replace(cost, **{name: getattr(cost, name) + more}), device) >= roof_of(cost, device)


@given(costs, devices, operations)
def test_more_operations_never_lower_the_roof(cost: Cost, device: DeviceInfo, more: float) -> None:
    assert roof_of(replace(cost, flops=cost.flops + more), device) >= roof_of(cost, device)


@given(costs, devices, st.floats(1e9, 1e14), st.floats(1, 1000))
def test_more_bandwidth_never_raises_the_roof(cost: Cost, device: DeviceInfo, bandwidth: float, factor: float) -> None:
    slow, fast = (with_facts(device, bandwidth=value, peak=1e15) for value in (bandwidth, bandwidth * factor))
    assert roof_of(cost, fast) <= roof_of(cost, slow)


@given(costs, devices, st.integers(1, 1000))
def test_scaled_work_has_a_scaled_roof(cost: Cost, device: DeviceInfo, factor: int) -> None:
    scaled = replace(
        cost,
        flops=cost.flops * factor,
        bytes_read=cost.bytes_read * factor,
        bytes_written=cost.bytes_written * factor,
    )
    assert roof_of(scaled, device) == pytest.approx(roof_of(cost, device) * factor, rel=ROUNDING)


@given(costs, devices, latencies)
def test_percent_times_latency_is_the_roof(cost: Cost, device: DeviceInfo, latency: float) -> None:
    placement = place(cost, device, latency)
    assert placement.percent_of_roof is not None
    assert placement.percent_of_roof / 100 * latency == pytest.approx(placement.roof_us, rel=ROUNDING)
    assert placement.above_roof == (placement.percent_of_roof > 100)


@given(costs, devices, latencies)
def test_achieved_rates(cost: Cost, device: DeviceInfo, latency: float) -> None:
    placement = place(cost, device, latency)
    assert placement.bandwidth_bytes_per_s == pytest.approx(cost.bytes_moved / (latency * 1e-6), rel=ROUNDING)
    assert placement.flops_per_s == pytest.approx(cost.flops / (latency * 1e-6), rel=ROUNDING)


@given(costs.filter(lambda cost: cost.bytes_moved > 0), devices, st.floats(1.01, 1000))
def test_time_under_the_roof_is_flagged_and_not_clipped(cost: Cost, device: DeviceInfo, factor: float) -> None:
    placement = place(cost, device, roof_of(cost, device) / factor)
    assert placement.above_roof
    assert placement.percent_of_roof == pytest.approx(100 * factor, rel=ROUNDING)


def test_time_on_the_roof_is_not_flagged() -> None:
    placement = place(Cost(0, 4800, 0), known_device("H200"), 1e-3)
    assert placement.percent_of_roof == 100
    assert not placement.above_roof


@given(costs, devices)
def test_without_time_only_the_roof_is_placed(cost: Cost, device: DeviceInfo) -> None:
    roof, bound = roof_us(cost, device)
    assert place(cost, device, None) == Placement(
        roof_us=roof,
        bound=bound,
        percent_of_roof=None,
        bandwidth_bytes_per_s=None,
        flops_per_s=None,
        above_roof=False,
    )


@given(costs, devices, latencies)
def test_unknown_bandwidth_gives_no_roof(cost: Cost, device: DeviceInfo, latency: float) -> None:
    unknown = with_facts(device, peak=1e15)
    placement = place(cost, unknown, latency)
    assert roof_us(cost, unknown) == (None, "unknown")
    assert (placement.roof_us, placement.bound, placement.percent_of_roof) == (None, "unknown", None)
    assert not placement.above_roof
    assert placement.bandwidth_bytes_per_s == cost.bytes_moved / latency * 1e6


@given(costs, devices)
def test_unknown_peak_leaves_the_memory_roof(cost: Cost, device: DeviceInfo) -> None:
    unknown = with_facts(device, bandwidth=1e12)
    roof, bound = roof_us(cost, unknown)
    assert roof == pytest.approx(cost.bytes_moved / 1e6, rel=ROUNDING)
    assert bound == "memory"


def test_no_work_has_a_roof_of_zero() -> None:
    placement = place(Cost(0, 0, 0), known_device("H200"), 1.0)
    assert (placement.roof_us, placement.percent_of_roof, placement.above_roof) == (0.0, 0.0, False)


@pytest.mark.parametrize("latency", [0.0, -1.0, math.inf, -math.inf, math.nan])
def test_impossible_time_is_refused(latency: float) -> None:
    with pytest.raises(ValueError, match="latency_us must be finite and above zero"):
        place(Cost(1, 1, 1), known_device("H200"), latency)


@pytest.mark.parametrize("name", ["flops", "bytes_read", "bytes_written"])
@pytest.mark.parametrize("value", [-1, math.inf, math.nan])
def test_impossible_cost_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"cost\.{name} must be finite and not negative"):
        roof_us(replace(Cost(1, 1, 1), **{name: value}), known_device("H200"))


def test_unknown_kind_of_peak_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cost\.peak must be one of vector, float16, bfloat16, int8, got 'float8'"):
        roof_us(Cost(1, 1, 1, peak="float8"), known_device("H200"))


numbers = st.floats() | st.none()


@given(numbers, st.sampled_from(["memory", "compute", "unknown"]), numbers, numbers, numbers, st.booleans())
def test_json_round_trip(
    roof: float | None, bound: Any, percent: float | None, bandwidth: float | None, flops: float | None, above: bool
) -> None:
    placement = Placement(
        roof_us=roof,
        bound=bound,
        percent_of_roof=percent,
        bandwidth_bytes_per_s=bandwidth,
        flops_per_s=flops,
        above_roof=above,
    )
    # As text, because NaN equals nothing.
    assert repr(Placement.model_validate_json(placement.model_dump_json())) == repr(placement)
