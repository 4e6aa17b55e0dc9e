"""The roofline: the least time that a card's bandwidth and arithmetic allow for a piece of work."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

from tk_kernel_core.device import PEAKS, DeviceInfo, Fact

if TYPE_CHECKING:
    from tk_kernel_core.spec import Cost

Bound = Literal["memory", "compute", "unknown"]


class Placement(BaseModel):
    """Where a measured time lies under the roof.

    Attributes:
        roof_us: Least time the card allows, in microseconds; None if its bandwidth is unknown.
        bound: What the roof is made of.
        percent_of_roof: 100 * roof / time; None without a roof or without a time.
        bandwidth_bytes_per_s: Achieved bandwidth on compulsory traffic, in bytes/s; None without a time.
        flops_per_s: Achieved rate, in operations/s; None without a time.
        above_roof: Whether the time beats the roof. That shows a wrong measurement, cost or peak (data left
            in a cache, for example), so it is reported and the percentage is left as it is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    roof_us: float | None
    bound: Bound
    percent_of_roof: float | None
    bandwidth_bytes_per_s: float | None
    flops_per_s: float | None
    above_roof: bool


def roof_us(cost: Cost, device: DeviceInfo) -> tuple[float | None, Bound]:
    """Return the least time that a card allows for some work, and what bounds it.

    roof = max(bytes / bandwidth, operations / peak)

    Args:
        cost: The work.
        device: The card. Where its peak for `cost.peak` is unknown, the bandwidth alone makes the roof.

    Returns:
        Microseconds and `memory` or `compute`; None and `unknown` where the bandwidth is unknown.

    Raises:
        ValueError: A number of `cost` is negative or not finite, or `cost.peak` is not a known peak.
    """
    for name in ("flops", "bytes_read", "bytes_written"):
        value = getattr(cost, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"cost.{name} must be finite and not negative, got {value}")
    if cost.peak not in PEAKS:
        raise ValueError(f"cost.peak must be one of {', '.join(PEAKS)}, got {cost.peak!r}")
    bandwidth = device.bandwidth_bytes_per_s.value
    if bandwidth is None:
        return None, "unknown"
    memory_us = cost.bytes_moved / bandwidth * 1e6
    peak = device.peak_flops.get(cost.peak, Fact()).value
    compute_us = cost.flops / peak * 1e6 if peak is not None else 0.0
    return (compute_us, "compute") if compute_us > memory_us else (memory_us, "memory")


def place(cost: Cost, device: DeviceInfo, latency_us: float | None) -> Placement:
    """Place a measured time under the roof of a card.

    Args:
        cost: The work that was timed.
        device: The card.
        latency_us: Measured time in microseconds; None gives the roof alone.

    Raises:
        ValueError: As `roof_us`, or `latency_us` is not finite and above zero.
    """
    roof, bound = roof_us(cost, device)
    if latency_us is None:
        return Placement(
            roof_us=roof,
            bound=bound,
            percent_of_roof=None,
            bandwidth_bytes_per_s=None,
            flops_per_s=None,
            above_roof=False,
        )
    if not (math.isfinite(latency_us) and latency_us > 0):
        raise ValueError(f"latency_us must be finite and above zero, got {latency_us}")
    percent = None if roof is None else roof / latency_us * 100
    return Placement(
        roof_us=roof,
        bound=bound,
        percent_of_roof=percent,
        bandwidth_bytes_per_s=cost.bytes_moved / latency_us * 1e6,
        flops_per_s=cost.flops / latency_us * 1e6,
        above_roof=percent is not None and percent > 100,
    )
