"""What the commands of `tk-kernels` do.

Everything that a command needs is imported when it runs: help must come without torch, and `TRITON_INTERPRET`
only counts when it is set before triton is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tk_kernel_core.selection import (
    CANNOT_RUN,
    FAILED,
    NO_DATA,
    OK,
    USAGE,
    Selection,
    Stop,
    compile_targets,
    known_card,
    select,
)

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tk_kernel_core.bench import Progress
    from tk_kernel_core.budget import Budget
    from tk_kernel_core.device import DeviceInfo
    from tk_kernel_core.resources import CaseResources
    from tk_kernel_core.results import Report, Setting
    from tk_kernel_core.spec import KernelSpec

DEFAULT_CARD = "H200"


def run_list(options: argparse.Namespace) -> int:
    """List kernels and cases."""
    selected = select(options)
    if options.json:
        listing = [
            {
                "name": spec.name,
                "summary": spec.summary,
                "baselines": list(spec.baselines),
                "cases": [{**dataclasses.asdict(case), "tags": sorted(case.tags)} for case in cases],
            }
            for spec, cases in selected
        ]
        print(json.dumps(listing, indent=2))
        return OK
    from tk_kernel_core.report import list_table

    _print(list_table((spec.name, cases) for spec, cases in selected))
    return OK


def run_device(options: argparse.Namespace) -> int:
    """Show the facts of a card."""
    from tk_kernel_core.device import current_device, known_devices

    if options.gpu:
        device, title = known_card(options.gpu), "Known card, not read from this machine"
    elif _has_gpu():
        device, title = current_device(), "The GPU of this machine"
    else:
        raise Stop(
            NO_DATA,
            f"there is no GPU here; --gpu NAME shows the facts of a known card: {', '.join(known_devices())}",
        )
    if options.json:
        print(device.model_dump_json(indent=2))
        return OK
    from tk_kernel_core.report import device_table

    _print(device_table(device, f"{title}: {device.name}"))
    return OK


def run_check(options: argparse.Namespace) -> int:
    """Compare kernels with their references."""
    setting, card = _prepare(DEFAULT_CARD)
    report = _run(setting, card, select(options), check=True)
    from tk_kernel_core.report import check_table

    return _finish(options, report, check_table(report))


def run_bench(options: argparse.Namespace) -> int:
    """Time kernels and their baselines."""
    setting, card = _prepare(options.gpu)
    report = _run(setting, card, select(options), bench=True)
    from tk_kernel_core.report import bench_table

    return _finish(options, report, bench_table(report))


def run_roofline(options: argparse.Namespace) -> int:
    """Place kernels on the roofline."""
    if options.png:
        _require_matplotlib()
        _make_folder(options.png.parent)
    selected = select(options)
    if options.stages and (lacking := [spec.name for spec, _ in selected if spec.stages is None]):
        raise Stop(USAGE, f"no stages are described by {', '.join(lacking)}; --stages takes kernels that have them")
    if options.gpu or not _has_gpu():
        report = _predict(known_card(options.gpu or DEFAULT_CARD), selected, stages=options.stages)
    else:
        setting, card = _prepare(None)
        if options.stages and setting != "gpu":
            raise Stop(CANNOT_RUN, "TRITON_INTERPRET keeps kernels off the GPU: unset it, or name a card with --gpu")
        report = _run(setting, card, selected, bench=not options.stages, stages=options.stages, baselines=())
    from tk_kernel_core.report import bench_table, stage_table

    if options.png:
        from tk_kernel_core.plot import roofline_png

        _write(options.png, roofline_png(report))
    return _finish(options, report, stage_table(report) if options.stages else bench_table(report))


def run_resources(options: argparse.Namespace) -> int:
    """Compile kernels ahead of time, and report what they need, or check or write their budget."""
    from tk_kernel_core.interpreter import interpreting

    if options.write_budget and options.budget is None:
        raise Stop(USAGE, "--write-budget needs --budget FILE")
    if options.write_budget and (options.targets or options.cases or options.tag):
        raise Stop(USAGE, "--write-budget takes every case and target: leave out --target, --case and --tag")
    _require_triton()
    if interpreting():
        raise Stop(CANNOT_RUN, "TRITON_INTERPRET replaces Triton's compiler by its interpreter: unset it")
    targets = compile_targets(options.targets)
    selected = select(options)
    if options.budget is not None and len(selected) > 1:
        raise Stop(USAGE, f"a budget belongs to one kernel; name one of {', '.join(spec.name for spec, _ in selected)}")
    from tk_kernel_core.budget import check_budget
    from tk_kernel_core.report import resource_table
    from tk_kernel_core.resources import report_resources

    checks_budget = options.budget is not None and not options.write_budget
    budget = _read_budget(options.budget) if checks_budget else None
    try:
        with _working("Compiling", sum(len(cases) for _, cases in selected)) as progress:
            reports = [
                report for spec, cases in selected for report in report_resources(spec, targets, cases, progress)
            ]
    except RuntimeError as reason:
        raise Stop(FAILED, str(reason)) from reason
    if options.write_budget:
        _write_budget(selected[0].spec, reports, options.budget)
    check = None if budget is None else check_budget(selected[0].spec, reports, budget)
    if options.json:
        checked = None if check is None else {**check.model_dump(mode="json"), "outcome": check.outcome}
        print(json.dumps({"resources": [report.model_dump(mode="json") for report in reports], "budget": checked}))
    else:
        _print(resource_table(reports))
    if check is None:
        return OK
    listing = "\n  ".join([f"{options.budget} is violated:", *map(str, check.violations)])
    if check.outcome == "violated":
        raise Stop(FAILED, listing)
    if check.outcome == "other-triton":
        _say(f"{listing}\nThat does not count: it was made by Triton {check.budget_triton}, not {check.used_triton}.")
    else:
        _say(f"{options.budget} is kept.")
    return OK


def run_demo(options: argparse.Namespace) -> int:
    """Check and time kernels, and write the report folder."""
    _require_matplotlib()
    selected = select(options)
    # Before the work, whose results would be lost.
    _make_folder(options.report)
    setting, card = _prepare(options.gpu)
    report = _run(setting, card, selected, check=True, bench=True)
    from tk_kernel_core.plot import roofline_png
    from tk_kernel_core.report import bench_table, html_page

    figure = roofline_png(report)
    _write(options.report / "report.json", report.to_json().encode())
    _write(options.report / "roofline.png", figure)
    _write(options.report / "report.html", html_page(report, figure).encode())
    return _finish(options, report, bench_table(report))


def _prepare(named: str | None) -> tuple[Setting, DeviceInfo]:
    """Choose between the GPU and the interpreter, before anything imports triton.

    Args:
        named: The card that predictions are for where no GPU is used.
    """
    from tk_kernel_core.device import current_device
    from tk_kernel_core.interpreter import interpreting

    card = known_card(named or DEFAULT_CARD)
    _require_triton()
    if not interpreting() and _has_gpu():
        return "gpu", current_device()
    if not interpreting():
        if os.environ.get("TRITON_INTERPRET"):
            raise Stop(CANNOT_RUN, "there is no GPU here, and TRITON_INTERPRET switches the interpreter off")
        if "triton" in sys.modules:
            raise Stop(CANNOT_RUN, "there is no GPU here, and triton was imported before its interpreter was on")
        os.environ["TRITON_INTERPRET"] = "1"
    return "interpreter", card


def _predict(card: DeviceInfo, selected: list[Selection], *, stages: bool) -> Report:
    from tk_kernel_core.bench import environment, predict_kernel
    from tk_kernel_core.results import Report
    from tk_kernel_core.stages import predict_stages

    _say(f"The roofline predicts for {card.name}; nothing is run.")
    predict = predict_stages if stages else predict_kernel
    results = [result for spec, cases in selected for result in predict(spec, cases, card)]
    return Report(environment=environment("prediction", card), results=tuple(results))


def _run(
    setting: Setting,
    card: DeviceInfo,
    selected: list[Selection],
    *,
    check: bool = False,
    bench: bool = False,
    stages: bool = False,
    baselines: Sequence[str] | None = None,
) -> Report:
    from tk_kernel_core.bench import bench_kernel, check_kernel, environment
    from tk_kernel_core.results import Report

    if setting == "gpu":
        device = "cuda"
        _say(f"Kernels run on the GPU of this machine, {card.name}.")
    else:
        device = "cpu"
        _say(
            f"No GPU is used: kernels run in Triton's interpreter on the CPU, on cut-down inputs. Times are not GPU "
            f"times; the roofline predicts for {card.name}."
        )
    checks, results = [], []
    total = sum(len(cases) for _, cases in selected)
    if check:
        with _working("Checking", total) as progress:
            for spec, cases in selected:
                checks += check_kernel(spec, cases, device, progress)
    if bench:
        with _working("Timing", total) as progress:
            for spec, cases in selected:
                results += bench_kernel(spec, cases, device, card, baselines, progress)
    if stages:
        from tk_kernel_core.stages import time_stages

        with _working("Timing stages of", total) as progress:
            for spec, cases in selected:
                results += time_stages(spec, cases, card, progress)
    return Report(environment=environment(setting, card), checks=tuple(checks), results=tuple(results))


@contextlib.contextmanager
def _working(verb: str, total: int) -> Iterator[Progress]:
    """Show a bar on stderr where that is a terminal, or where FORCE_COLOR makes rich take it for one.

    What kernels and compilers print meanwhile goes to stderr, because stdout may have to be JSON.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with (
        contextlib.redirect_stdout(sys.stderr),
        Bar(*columns, console=console, disable=not console.is_terminal, redirect_stdout=False) as bar,
    ):
        task = bar.add_task(verb, total=total)
        begun = 0

        def announce(case: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=f"{verb} {case}")
            begun += 1

        yield announce
        bar.update(task, completed=total, description=f"{verb} done")


def _finish(options: argparse.Namespace, report: Report, table: RenderableType) -> int:
    from tk_kernel_core.report import notes_text

    if options.json:
        print(report.to_json())
    else:
        _print(table, notes_text(report))
    if report.is_empty:
        raise Stop(NO_DATA, "nothing was checked and nothing was placed")
    if report.failures:
        raise Stop(FAILED, "\n  ".join([f"{len(report.failures)} failed:", *report.failures]))
    if report.unjudged_bars:
        raise Stop(CANNOT_RUN, "\n  ".join(["bars that could not be judged:", *report.unjudged_bars]))
    return OK


def _write_budget(spec: KernelSpec, reports: list[CaseResources], path: Path) -> None:
    from tk_kernel_core.budget import make_budget, write_budget

    try:
        write_budget(path, make_budget(spec, reports))
    except ValueError as reason:
        raise Stop(USAGE, str(reason)) from reason
    except OSError as reason:
        raise Stop(CANNOT_RUN, f"cannot write {path}: {reason}") from reason
    _say(f"wrote {path}")


def _read_budget(path: Path) -> Budget:
    from tk_kernel_core.budget import load_budget

    try:
        return load_budget(path)
    except FileNotFoundError as reason:
        raise Stop(NO_DATA, f"there is no budget {path}; --write-budget makes it") from reason
    except OSError as reason:
        raise Stop(CANNOT_RUN, f"cannot read {path}: {reason}") from reason
    except ValueError as reason:
        raise Stop(USAGE, str(reason)) from reason


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise Stop(CANNOT_RUN, "triton is not installed, which kernels need: python -m pip install triton")


def _require_matplotlib() -> None:
    from tk_kernel_core.plot import require_matplotlib

    try:
        require_matplotlib()
    except ModuleNotFoundError as reason:
        raise Stop(CANNOT_RUN, str(reason)) from reason


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        raise Stop(CANNOT_RUN, f"cannot make the folder {path}: {reason}") from reason


def _write(path: Path, content: bytes) -> None:
    _make_folder(path.parent)
    try:
        path.write_bytes(content)
    except OSError as reason:
        raise Stop(CANNOT_RUN, f"cannot write {path}: {reason}") from reason
    _say(f"wrote {path}")


def _say(message: str) -> None:
    print(message, file=sys.stderr)


def _print(*parts: RenderableType) -> None:
    from rich.console import Console

    # A pipe has no width of its own, and tables cut to 80 columns could not be read in a log.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    for part in parts:
        console.print(part)
