"""Write the documentation's pages on performance from the reports that perf/reports keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import mode
from typing import Any

from reports import ORIGINAL, ROOT, STAGES, WHOLE_MODEL, compiles_steps, kept, made_in_words, measured
from tk_kernel_core.plot import roofline_png
from tk_kernel_core.report import NOTHING, microseconds, notes, params_in_words, percent_of_roof, ratio, scaled
from tk_kernel_core.results import BaselineResult, BenchResult, Report, StageResult

INDEX = """# Measured performance

The tables here are written from recorded reports of `tk-kernels bench` whenever this documentation is built: no figure
is typed. {doc}`/roofline` tells how they are measured, and what the baselines are. A ratio is the kernel's time over a
baseline's in the same run: below 1 the kernel is faster. A bar is the highest ratio that the package accepts of itself.

"""
PAGES = """
```{toctree}
:maxdepth: 1

PAGES
```
"""
MODELS = """# Whole models, measured

What {doc}`the last example </examples>` says of models whose modules are replaced step by step. It tells how the
figures come about. × eager and × compiled give the speed over that of the model as it was: above 1 is faster.

"""
NO_REPORT = "No report has been recorded yet.\n"
HOW_TO_READ = """{doc}`How to read these tables <index>`, {doc}`how the figures are made </roofline>`, and what the
kernels do, {doc}`in their guide </kernels/GUIDE>`.

"""


def write_pages(folder: Path, packages: Sequence[str]) -> None:
    """Write an index, and for each package a page with its tables and a figure for each machine.

    Args:
        folder: Where the pages go; what was there is removed.
        packages: Names of the packages. One without a report has a page that says so.
    """
    folder.mkdir(exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    table = measured() or "Nothing has been recorded yet.\n"
    names = "\n".join((*packages, WHOLE_MODEL))
    (folder / "index.md").write_text(INDEX + table + PAGES.replace("PAGES", names), encoding="utf-8")
    models = (file for files in kept(f"{WHOLE_MODEL}*").values() for file in files.values())
    text = "\n".join(whole_models(json.loads(file.read_text(encoding="utf-8"))) for file in models)
    (folder / f"{WHOLE_MODEL}.md").write_text(MODELS + (text or NO_REPORT), encoding="utf-8")
    machines, staged = kept(), kept(f"{STAGES}*")
    for package in packages:
        files = {machine: files[package] for machine, files in machines.items() if package in files}
        text = f"# {package}, measured\n\n{HOW_TO_READ.replace('GUIDE', package.removeprefix('tk-'))}"
        for machine, file in files.items():
            report = Report.model_validate_json(file.read_text(encoding="utf-8"))
            figure = f"{package}-{machine}.png"
            (folder / figure).write_bytes(roofline_png(report))
            text += section(report, figure, str(file.relative_to(ROOT)))
            if stages_file := staged[machine].get(STAGES + package):
                text += stages(Report.model_validate_json(stages_file.read_text(encoding="utf-8")))
        (folder / f"{package}.md").write_text(text if files else text + NO_REPORT, encoding="utf-8")


def section(report: Report, figure: str, file: str) -> str:
    """Return what a page says of one report.

    Args:
        report: The report of one package on one GPU.
        figure: Name of its roofline.
        file: Where the report is kept in the repository.
    """
    headline = [result for result in report.results if any(one.bar is not None for one in result.baselines)]
    others = [result for result in report.results if result not in headline]
    device = report.environment.device
    parts = [
        f"## {device.name}\n",
        f"{made_in_words(report.environment.model_dump(mode='json'))}. All that was recorded is in `{file}`.\n",
        f"![Roofline of {device.name} with every case]({figure})\n",
    ]
    if headline:
        parts += ["### Cases with a bar\n", _times(headline)]
    if others:
        parts += ["### Other cases\n", _times(others)]
    if host := _host(report.results):
        parts += ["### Host time of one eager call\n", host]
    parts += ["### What the cases are\n", _cases(report.results)]
    if remarks := notes(report):
        parts += ["### Remarks\n", "".join(f"- {remark}\n" for remark in remarks)]
    return "\n".join(parts)


def stages(report: Report) -> str:
    """Return what a page says of the stages of calls, as `tk-kernels roofline --stages` timed them."""
    timed = [result for result in report.results if result.timing and result.stages]
    names = dict.fromkeys(stage.name for result in timed for stage in result.stages if stage.latency_us)
    rows = []
    for result in timed:
        found = {stage.name: stage for stage in result.stages if stage.latency_us is not None}
        whole = microseconds(result.timing.latency_us) if result.timing else NOTHING
        rows.append([f"`{result.case}`<br>{whole}", *(_stage(found.get(name)) for name in names)])
    parts = [
        "### Stages of a call\n",
        f"{made_in_words(report.environment.model_dump(mode='json'))}. Times, and shares of the stages' own roofs. A "
        "stage without a time is done within another.\n",
        _table(["case, the call", *(f">{name}" for name in names)], rows),
    ]
    return "\n" + "\n".join(parts)


def whole_models(report: dict[str, Any]) -> str:
    """Return what the page on whole models says of one report of docs/examples/llama_decode.py."""
    settings, rows = report["settings"], report["rows"]
    speeds = {(row["model"], row["how"], row["batch"]): row for row in rows if row["step"] == ORIGINAL}
    lines = []
    for row in rows:
        line = [row["model"], row["step"], row["how"], str(row["batch"])]
        for kind in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            others = (speeds.get((row["model"], how, row["batch"])) for how in ("eager", "torch.compile"))
            ratios = [f"{row[kind] / other[kind]:.2f}" if other else NOTHING for other in others]
            line.append("<br>".join((f"{row[kind]:,.0f}", *ratios)))
        memory = (f"{row[size] / 1e9:.3g} GB" for size in ("weight_bytes", "peak_bytes"))
        lines.append([*line, "<br>".join(memory), f"{row['logit_difference']:.2g}"])
    speed = "tokens/s<br>× eager<br>× compiled"
    columns = ["model", "step", "how", ">batch", f">prefill {speed}", f">decode {speed}"]
    columns += [">weights<br>peak", ">logits<br>differ by"]
    made = f"{made_in_words(report['provenance'])}, transformers {report['provenance']['transformers']}"
    sizes = f"prompts of {settings['prompt_tokens']} tokens, {settings['new_tokens']} new ones, {settings['dtype']}"
    title = report["provenance"]["hardware"] + ", steps compiled" * compiles_steps(report)
    return f"## {title}\n\n{made}; {sizes}.\n\n{_table(columns, lines)}\n"


def _times(results: Sequence[BenchResult]) -> str:
    names = _baselines(results, lambda baseline: baseline.timing is not None or baseline.bar is not None)
    rows = []
    for result in results:
        if result.timing is None:
            rows.append([f"`{result.case}`", result.error or "not timed", *[""] * (len(names) + 1)])
            continue
        compared = {baseline.name: baseline for baseline in result.baselines}
        row = [f"`{result.case}`", microseconds(result.timing.latency_us), percent_of_roof(result.placement)]
        rows.append([*row, *(_against(compared.get(name)) for name in names)])
    return _table(["case", ">time", ">of roof", *(f">× {name}" for name in names)], rows)


def _host(results: Sequence[BenchResult]) -> str:
    names = _baselines(results, lambda baseline: baseline.host_ratio is not None)
    rows = []
    for result in results:
        if result.timing and result.timing.host_us is not None:
            ratios = {baseline.name: baseline.host_ratio for baseline in result.baselines}
            rows.append(
                [f"`{result.case}`", microseconds(result.timing.host_us), *(ratio(ratios.get(n)) for n in names)]
            )
    return _table(["case", ">host time", *(f">× {name}" for name in names)], rows) if rows else ""


def _cases(results: Sequence[BenchResult]) -> str:
    """Return a list of the cases, with the parameters in which they are not as most others."""
    names = dict.fromkeys(name for result in results for name in result.params)
    usual = {name: mode(result.params.get(name) for result in results) for name in names}
    lines = [f"Unless it is said otherwise: {params_in_words(usual)}.\n\n"]
    for result in results:
        own = {name: value for name, value in result.params.items() if value != usual[name]}
        parts = (
            result.source,
            params_in_words(own),
            f"{scaled(result.cost.bytes_moved, 'B')} and {scaled(result.cost.flops, 'FLOP')}",
            f"at least {microseconds(result.placement.roof_us)}, bound by {result.placement.bound}",
        )
        lines.append(f"- `{result.case}`: {'; '.join(filter(None, parts))}\n")
    return "".join(lines)


def _baselines(results: Iterable[BenchResult], wanted: Callable[[BaselineResult], bool]) -> list[str]:
    """Return the names of the baselines that are as wanted in any case, in the order of the package."""
    return list(dict.fromkeys(one.name for result in results for one in result.baselines if wanted(one)))


def _against(baseline: BaselineResult | None) -> str:
    """Return the ratio, the baseline's time, and the bar where there is one, below each other."""
    if baseline is None or (baseline.timing is None and baseline.bar is None):
        return NOTHING
    lines = [ratio(baseline.ratio)]
    if baseline.timing is not None:
        lines.append(microseconds(baseline.timing.latency_us))
    if baseline.bar is not None:
        verdict = {True: "met", False: "**missed**", None: "not judged"}[baseline.bar_met]
        lines.append(f"bar {baseline.bar:g} {verdict}")
    return "<br>".join(lines)


def _stage(stage: StageResult | None) -> str:
    if stage is None or stage.latency_us is None:
        return NOTHING
    share = [percent_of_roof(stage.placement)] if stage.placement else []
    return "<br>".join([microseconds(stage.latency_us), *share])


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; columns that begin with ">" are numbers and stand to the right."""
    lines = [[column.removeprefix(">") for column in columns]]
    lines.append(["---:" if column.startswith(">") else "---" for column in columns])
    lines += [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
