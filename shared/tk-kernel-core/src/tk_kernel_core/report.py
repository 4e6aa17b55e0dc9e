"""Results as terminal tables and as one self-contained HTML page."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tk_kernel_core.device import DeviceInfo, Fact
    from tk_kernel_core.resources import CaseResources
    from tk_kernel_core.results import BaselineResult, BenchResult, Environment, Report, Timing
    from tk_kernel_core.roofline import Placement
    from tk_kernel_core.spec import Case, CaseValue

UNKNOWN = "unknown"
NOTHING = "–"


def setting_in_words(environment: Environment) -> str:
    """Say in a few words how the results came about; every heading carries this."""
    card = environment.device.name
    if environment.setting == "gpu":
        return f"measured on {card}"
    if environment.setting == "interpreter":
        return f"Triton interpreter on a CPU, cut-down inputs: times are not GPU times; roof predicted for {card}"
    return f"predicted for {card}, nothing was run"


def list_table(kernels: Iterable[tuple[str, Iterable[Case]]]) -> RenderableType:
    """Return a table of kernels, by name, and their cases."""
    table = _table("kernel", "case", "tags", "taken from")
    for name, cases in kernels:
        for case in cases:
            table.add_row(name, case.name, ", ".join(sorted(case.tags)), case.source)
        table.add_section()
    return _titled("Installed kernels", table)


def device_table(device: DeviceInfo, title: str) -> RenderableType:
    """Return a table of a card's facts and where each comes from."""
    table = _table("fact", ">value", "provenance", "source")
    for row in device_facts(device):
        table.add_row(*row)
    return _titled(title, table)


def check_table(report: Report) -> RenderableType:
    """Return a table of check results."""
    table = _table("kernel", "case", "result", ">largest error", ">of accepted", "message")
    for check in report.checks:
        table.add_row(
            check.package,
            check.case,
            _verdict(check.passed),
            number(check.largest_error, "{:.3g}"),
            number(check.error_over_tolerance, "{:.2f}"),
            check.message,
        )
    return _titled(f"Kernels against their references, {setting_in_words(report.environment)}", table)


def bench_table(report: Report) -> RenderableType:
    """Return a table of times, baselines and places on the roofline, and of check results where there are any."""
    checks = {(check.package, check.case): check for check in report.checks}
    columns = ["kernel", "case", *(["check"] if checks else [])]
    measured = report.environment.setting != "prediction"
    on_gpu = report.environment.setting == "gpu"
    if measured:
        columns += [">time", ">spread", *([">host, eager"] if on_gpu else []), "time / baseline's time"]
    columns += [f">roof of {report.environment.device.name}, full size", "bound by", *([">of roof"] if on_gpu else [])]
    table = _table(*columns)
    for result in report.results:
        row: list[str | Text] = [result.package, result.case]
        if checks:
            check = checks.get((result.package, result.case))
            row.append(_verdict(check.passed) if check else NOTHING)
        if measured:
            # What could not run is in the notes, once for all cases.
            ran = [_baseline_text(baseline) for baseline in result.baselines if baseline.timing is not None]
            row += _times(result.timing)
            if on_gpu:
                row.append(microseconds(result.timing.host_us) if result.timing else NOTHING)
            row += [Text("\n").join(ran) if ran or not result.baselines else "none, see notes"]
            if result.error:
                row[-1] = Text(result.error, style="bold red")
        row += [microseconds(result.placement.roof_us), result.placement.bound]
        if on_gpu:
            row.append(percent_of_roof(result.placement))
        table.add_row(*row)
    return _titled(f"Kernels on the roofline, {setting_in_words(report.environment)}", table)


def stage_table(report: Report) -> RenderableType:
    """Return a table of calls and of the stages inside them on the roofline."""
    from tk_kernel_core.results import StageResult

    on_gpu = report.environment.setting == "gpu"
    measured = (">time", ">bandwidth", ">rate") if on_gpu else ()
    roof = (f">roof of {report.environment.device.name}", "bound by", *((">of roof", "kernels") if on_gpu else ()))
    table = _table("kernel", "case", "stage", ">bytes", ">operations", *measured, *roof)
    for result in report.results:
        time_us = result.timing.latency_us if result.timing else None
        call = StageResult(name="the call", cost=result.cost, placement=result.placement, latency_us=time_us)
        for stage in (call, *result.stages):
            cost, placement = stage.cost, stage.placement
            row = [result.package, result.case, stage.name]
            row += [scaled(cost.bytes_moved, "B"), scaled(cost.flops, "FLOP")] if cost else [NOTHING] * 2
            if on_gpu:
                rates = (placement.bandwidth_bytes_per_s, placement.flops_per_s) if placement else (None, None)
                row.append(NOTHING if stage.latency_us is None else microseconds(stage.latency_us))
                row += [
                    NOTHING if rate is None else scaled(rate, unit)
                    for rate, unit in zip(rates, ("B/s", "FLOP/s"), strict=True)
                ]
            row += [microseconds(placement.roof_us), placement.bound] if placement else [NOTHING] * 2
            if on_gpu:
                row += [percent_of_roof(placement) if placement else NOTHING, "\n".join(stage.kernels)]
            table.add_row(*row)
        if result.error:
            table.add_row(result.package, result.case, Text(result.error, style="bold red"))
        table.add_section()
    return _titled(f"Stages on the roofline, {setting_in_words(report.environment)}", table)


def resource_table(reports: Iterable[CaseResources]) -> RenderableType:
    """Return a table of what compiled kernels need on each target."""
    numbers = (">registers", ">spills, bytes", ">shared, bytes", ">warps", ">code, bytes")
    table = _table("package", "case", "target", "kernel", *numbers, "instructions")
    for report in reports:
        for kernel in report.kernels:
            counts = (kernel.registers, kernel.spill_bytes, kernel.shared_bytes, kernel.num_warps, kernel.code_bytes)
            instructions = ", ".join(f"{count} {family}" for family, count in kernel.instructions.items())
            table.add_row(report.package, report.case, report.target, kernel.kernel, *map(str, counts), instructions)
    return _titled("Resources after ahead-of-time compilation, no GPU involved", table)


def notes(report: Report) -> list[str]:
    """Return what a reader of the tables must know: doubtful roofs, baselines that could not run, timing methods.

    What holds for several cases of a package is said once, with their names.
    """
    cases: dict[tuple[str, str], list[str]] = {}
    for result in report.results:
        for note in dict.fromkeys(_notes_of(result, report.environment.device.name)):
            cases.setdefault((result.package, note), []).append(result.case)
    totals = Counter(result.package for result in report.results)
    return [
        f"{package}, {'all cases' if len(names) == totals[package] else ', '.join(names)}: {note}"
        for (package, note), names in cases.items()
    ]


def notes_text(report: Report) -> RenderableType:
    """Return the notes for a terminal."""
    return Group(*(Text(f"note: {note}") for note in notes(report)))


def html_page(report: Report, roofline_png: bytes) -> str:
    """Return the report as one HTML page without scripts or external resources.

    Args:
        report: What to show.
        roofline_png: The figure.
    """
    import jinja2

    templates = jinja2.Environment(
        loader=jinja2.PackageLoader("tk_kernel_core", ""), autoescape=True, undefined=jinja2.StrictUndefined
    )
    filters: Mapping[str, Callable[..., str]] = {
        "microseconds": microseconds,
        "number": number,
        "params": params_in_words,
        "percent_of_roof": percent_of_roof,
        "ratio": ratio,
        "scaled": scaled,
    }
    templates.filters.update(filters)
    return templates.get_template("report.html.jinja").render(
        report=report,
        environment=report.environment,
        setting=setting_in_words(report.environment),
        facts=device_facts(report.environment.device),
        notes=notes(report),
        roofline=base64.b64encode(roofline_png).decode("ascii"),
    )


class FactRow(NamedTuple):
    """One fact of a card, in words."""

    fact: str
    value: str
    provenance: str
    source: str


def device_facts(device: DeviceInfo) -> list[FactRow]:
    """Return a card's facts with their units and where each comes from."""

    def known(name: str, fact: Fact, unit: str, scale: float = 1.0) -> FactRow:
        value = UNKNOWN if fact.value is None else f"{fact.value / scale:,.4g} {unit}".strip()
        return FactRow(name, value, fact.provenance, ", ".join(filter(None, (fact.source, fact.date))))

    rows = [
        FactRow("architecture", device.arch, "", ""),
        FactRow("driver", device.driver_version or NOTHING, "", ""),
        known("compute units", device.compute_units, ""),
        known("L2 cache", device.l2_bytes, "MiB", 2**20),
        known("memory", device.memory_bytes, "GiB", 2**30),
        known("memory bandwidth", device.bandwidth_bytes_per_s, "TB/s", 1e12),
        *(
            known(f"peak {kind}", fact, "TOP/s" if kind == "int8" else "TFLOP/s", 1e12)
            for kind, fact in device.peak_flops.items()
        ),
    ]
    above = ["", *(row.source for row in rows)]
    return [
        row._replace(source="as above") if row.source and row.source == source else row
        for row, source in zip(rows, above, strict=False)
    ]


def microseconds(value: float | None) -> str:
    """Return a time with a unit that suits its size."""
    if value is None:
        return UNKNOWN
    for scale, unit in ((1.0, "µs"), (1e3, "ms")):
        if abs(value) < 999.5 * scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e6:.3g} s"


def scaled(value: float, unit: str) -> str:
    """Return a quantity with the decimal prefix that suits its size."""
    for prefix in ("", "k", "M", "G"):
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} T{unit}"


def number(value: float | None, form: str) -> str:
    """Return a number in the given form, or a dash where there is none."""
    return NOTHING if value is None else form.format(value)


def ratio(value: float | None) -> str:
    """Return a ratio of times; far from 1 its decimals mean nothing."""
    return number(value, "{:.3f}" if value is None or value < 10 else "{:,.0f}")


def percent_of_roof(placement: Placement) -> str:
    """Return how close to its roof something comes, flagged where it lies above."""
    percent = number(placement.percent_of_roof, "{:.3g} %")
    return f"{percent} (above!)" if placement.above_roof else percent


def params_in_words(params: Mapping[str, CaseValue]) -> str:
    """Return a case's parameters on one line."""
    return ", ".join(f"{name} {value}" for name, value in params.items())


def _notes_of(result: BenchResult, card: str) -> Iterator[str]:
    above = "faster than the roof, so a peak or the cost is wrong, or the data stayed in a cache"
    if result.placement.above_roof:
        yield above
    for stage in result.stages:
        if stage.placement and stage.placement.above_roof:
            yield f"the stage {stage.name} is {above}"
    if result.placement.roof_us is None:
        yield f"no roof, because the bandwidth of {card} is unknown"
    for baseline in result.baselines:
        if baseline.timing is None:
            yield f"baseline {baseline.name} could not run: {baseline.unavailable}"
    for timing in (result.timing, *(baseline.timing for baseline in result.baselines)):
        yield from (measured.note for measured in (timing.rounds if timing else ()) if measured.note)


def _times(timing: Timing | None) -> tuple[str, str]:
    if timing is None:
        return NOTHING, NOTHING
    return microseconds(timing.latency_us), microseconds(timing.spread_us)


def _baseline_text(baseline: BaselineResult) -> Text:
    latency_us = baseline.timing.latency_us if baseline.timing else None
    text = Text(f"{ratio(baseline.ratio)} × {baseline.name} ({microseconds(latency_us)})")
    if baseline.host_ratio is not None:
        text.append(f", host {ratio(baseline.host_ratio)} ×")
    if baseline.bar_met is not None:
        text.append(f", bar {baseline.bar:g} ")
        text.append(*(("met", "green") if baseline.bar_met else ("MISSED", "bold red")))
    return text


def _verdict(passed: bool) -> Text:
    return Text("passed", style="green") if passed else Text("FAILED", style="bold red")


def _table(*columns: str) -> Table:
    """Return an empty table; columns that begin with ">" are numbers and stand to the right."""
    table = Table(box=box.ROUNDED)
    for column in columns:
        # A name that does not fit goes on below: cut off, several would look the same.
        table.add_column(
            column.removeprefix(">"), justify="right" if column.startswith(">") else "left", overflow="fold"
        )
    return table


def _titled(title: str, table: Table) -> RenderableType:
    # rich would wrap a table's own title to the width of the table.
    return Group(Text(title, style="bold"), table)
