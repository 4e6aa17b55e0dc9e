"""The roofline figure. matplotlib comes with the extra `plot` and is imported when a figure is drawn."""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from tk_kernel_core.device import DeviceInfo
    from tk_kernel_core.results import BenchResult, Report
    from tk_kernel_core.roofline import Placement
    from tk_kernel_core.spec import Cost

# The colours of Okabe and Ito, which colour-blind readers tell apart; shapes repeat the distinction.
_STYLES = (
    ("#0072B2", "o"),
    ("#D55E00", "s"),
    ("#009E73", "^"),
    ("#CC79A7", "D"),
    ("#E69F00", "v"),
    ("#56B4E9", "P"),
    ("#000000", "X"),
)
_DPI = 150
_WIDTH_INCHES = 10.0
_LABEL_INCHES = 0.19


class _Point(NamedTuple):
    intensity: float
    flops_per_s: float
    label: str
    series: str


def require_matplotlib() -> None:
    """Make sure that figures can be drawn.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to get it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            "drawing the roofline needs matplotlib, which is not installed: pip install 'tk-kernel-core[plot]'",
            name="matplotlib",
        )


def roofline_png(report: Report) -> bytes:
    """Return the figure of `roofline_figure` as a PNG, at least 1500 pixels wide."""
    figure = roofline_figure(report)
    from matplotlib.transforms import Bbox

    target = io.BytesIO()
    # Never smaller than the figure, and larger where a long name would be cut off.
    whole = Bbox.union([figure.bbox_inches, figure.get_tightbbox()])
    figure.savefig(target, format="png", bbox_inches=whole)
    return target.getvalue()


def roofline_figure(report: Report) -> Figure:
    """Draw every case of a report, and every stage inside it, on the roofline of its device.

    On a GPU they lie where their times put them, otherwise on the roof itself. One without operations,
    without a known roof, or without a time on a GPU has no place on the figure; the figure says how many there
    are.

    Args:
        report: What to draw.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    require_matplotlib()
    # Figures made this way draw with Agg and never look for a display.
    from matplotlib.figure import Figure

    measured = report.environment.setting == "gpu"
    device = report.environment.device
    places = [place for result in report.results for place in _places(result, measured)]
    points = [point for place in places if (point := _point(*place)) is not None]
    points.sort(key=lambda point: (-point.flops_per_s, -point.intensity))
    height = max(6.0, 1.8 + _LABEL_INCHES * len(points))
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI)
    axes = figure.add_axes((0.09, 0.75 / height, 0.56, 1 - 1.2 / height))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("arithmetic intensity (FLOP/byte)")
    axes.set_ylabel("performance (FLOP/s; OP/s for int8)")
    how = "measured" if measured else "predicted, not measured"
    axes.set_title(f"Roofline of {device.name}: {how}", loc="left", fontweight="bold")
    axes.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    _draw_roofs(axes, device, points)
    _draw_points(axes, points, measured)
    missing = len(places) - len(points)
    if missing:
        what = "cases and stages" if len(places) > len(report.results) else "cases"
        figure.text(
            0.99, 0.01, f"{missing} of {len(places)} {what} not drawn, for want of operations, a roof or a time",
            ha="right", va="bottom", fontsize=8, color="#555555",
        )  # fmt: skip
    return figure


def _places(result: BenchResult, measured: bool) -> Iterator[tuple[str, str, Cost, Placement, float | None]]:
    """Return the series, the label, the work, the place and the time of a case and of its stages."""
    latency_us = result.timing.latency_us if result.timing else None
    yield (
        result.package,
        result.case,
        result.cost,
        result.placement,
        latency_us if measured else result.placement.roof_us,
    )
    for stage in result.stages:
        if stage.cost is not None and stage.placement is not None:
            time_us = stage.latency_us if measured else stage.placement.roof_us
            yield stage.name, f"{result.case}, {stage.name}", stage.cost, stage.placement, time_us


def _point(series: str, label: str, cost: Cost, placement: Placement, time_us: float | None) -> _Point | None:
    if not time_us:
        return None
    intensity, flops_per_s = cost.intensity, cost.flops / (time_us * 1e-6)
    if not (0 < intensity < math.inf and 0 < flops_per_s < math.inf):
        return None
    if placement.percent_of_roof is not None:
        label = f"{label} ({placement.percent_of_roof:.3g} % of roof)"
    return _Point(intensity, flops_per_s, label, series)


def _draw_roofs(axes: Axes, device: DeviceInfo, points: list[_Point]) -> None:
    bandwidth = device.bandwidth_bytes_per_s.value
    peaks: dict[float, list[str]] = {}
    for kind, fact in device.peak_flops.items():
        if fact.value:
            peaks.setdefault(fact.value, []).append(kind)
    intensities = [point.intensity for point in points] or [1.0]
    ridges = [peak / bandwidth for peak in peaks] if bandwidth else []
    # Flat roofs are long enough for their names.
    left, right = min(intensities) / 8, max(4 * max(intensities), 60 * max(ridges, default=0.0))
    highest = max(peaks, default=math.inf)
    ceilings = [highest, *(point.flops_per_s for point in points)]
    if bandwidth:
        knee = min(right, highest / bandwidth)
        axes.plot([left, knee], [left * bandwidth, knee * bandwidth], color="#222222", linewidth=1.8)
    for peak, kinds in peaks.items():
        start = peak / bandwidth if bandwidth else left
        axes.plot([start, right], [peak, peak], color="#222222", linewidth=1.8)
        unit = "TOP/s" if kinds == ["int8"] else "TFLOP/s"
        axes.annotate(
            f"{', '.join(kinds)} {peak / 1e12:.4g} {unit}",
            (right, peak), xytext=(-4, -4), textcoords="offset points",
            ha="right", va="top", fontsize=9, color="#222222",
        )  # fmt: skip
    axes.set_xlim(left, right)
    lowest = min([*(point.flops_per_s for point in points), *([left * bandwidth] if bandwidth else [])], default=1e9)
    top = max((ceiling for ceiling in ceilings if ceiling < math.inf), default=1e15)
    axes.set_ylim(lowest / 2, top * 3)
    if bandwidth:
        (x0, y0), (x1, y1) = axes.transData.transform([(left, left * bandwidth), (10 * left, 10 * left * bandwidth)])
        axes.annotate(
            f"memory {bandwidth / 1e12:.4g} TB/s",
            (left, left * bandwidth), xytext=(6, 14), textcoords="offset points", fontsize=9, color="#222222",
            rotation=math.degrees(math.atan2(y1 - y0, x1 - x0)), rotation_mode="anchor",
        )  # fmt: skip


def _draw_points(axes: Axes, points: list[_Point], measured: bool) -> None:
    """Mark the points, and name them in a column beside the axes, because many lie close together."""
    styles = dict(zip(sorted({point.series for point in points}), _STYLES * len(points), strict=False))
    height_inches = axes.get_window_extent().height / _DPI
    step = _LABEL_INCHES / height_inches
    # The column is centred on the axes and in the order of the points, so that its lines hardly cross.
    top = 0.5 + step * (len(points) - 1) / 2
    for index, point in enumerate(points):
        color, marker = styles[point.series]
        axes.plot(
            point.intensity, point.flops_per_s, marker, color=color, markersize=8,
            markerfacecolor=color if measured else "white", markeredgewidth=1.6, zorder=3,
        )  # fmt: skip
        axes.annotate(
            point.label,
            (point.intensity, point.flops_per_s), xytext=(1.04, top - step * index), textcoords="axes fraction",
            va="center", fontsize=9, annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": color, "linewidth": 0.6, "alpha": 0.7,
                "relpos": (0, 0.5), "shrinkA": 0, "shrinkB": 0,
            },
        )  # fmt: skip
    for series, (color, marker) in styles.items():
        axes.plot([], [], marker, color=color, markerfacecolor=color if measured else "white", label=series)
    if styles:
        axes.legend(loc="lower right", fontsize=9, framealpha=1.0)
