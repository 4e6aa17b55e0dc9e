"""Recorded reports, and what README.md and the documentation make of them."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tk_kernel_core.bench import environment
from tk_kernel_core.device import known_device
from tk_kernel_core.results import BaselineResult, BenchResult, Report, StageResult, Timing
from tk_kernel_core.roofline import place
from tk_kernel_core.spec import Cost, installed_specs
from tk_kernel_core.timing import summarise

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "perf"))
reports, pages = map(importlib.import_module, ("reports", "report_pages"))
H200 = known_device("H200").model_copy(update={"name": "NVIDIA H200", "driver_version": "580.1"})
COST = Cost(flops=1e6, bytes_read=10**7, bytes_written=10**7)
FILES = [(machine, package) for machine, files in reports.kept().items() for package in files]


def timing(latency_us: float) -> Timing:
    measured = summarise([latency_us] * 3, 10, "cuda-graph", host_us=7.5)
    return Timing(latency_us=latency_us, spread_us=0.0, host_us=7.5, rounds=(measured,))


def baseline(name: str, ratio: float | None, bar: float | None = None) -> BaselineResult:
    if ratio is None:
        return BaselineResult(name=name, unavailable="not installed", bar=bar)
    met = None if bar is None else ratio <= bar
    return BaselineResult(name=name, timing=timing(10 / ratio), ratio=ratio, host_ratio=0.5, bar=bar, bar_met=met)


def result(package: str, case: str, *baselines: BaselineResult, **changes: Any) -> BenchResult:
    fields = {
        "source": "a model",
        "params": {"rows": len(case) // 4, "eps": 1e-6},
        "cost": COST,
        "timing": timing(10.0),
        "baselines": baselines,
    }
    fields |= {"package": package, "case": case, "placement": place(COST, H200, 10.0)}
    return BenchResult(**{**fields, **changes})


def report(*results: BenchResult, setting: Any = "gpu", commit: str | None = "0" * 40) -> Report:
    made_in = environment(setting, H200).model_copy(update={"commit": commit, "torch": "2.11", "triton": "3.6"})
    return Report(environment=made_in, results=results)


def as_json(made: Report) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(made.to_json())
    return loaded


SAMPLE = report(
    result("tk-one", "decode", baseline("torch", 0.5), baseline("copy", 0.9, 1.0), baseline("liger", None)),
    result("tk-one", "prefill", baseline("torch", 0.25), baseline("copy", 1.2, 1.1)),
    result("tk-one", "odd", baseline("torch", 0.125)),
    result("tk-two", "broken", timing=None, error="RuntimeError: a | b"),
)


def test_readme_says_what_the_reports_say() -> None:
    text = reports.README.read_text(encoding="utf-8")
    assert text == reports.with_section(text, reports.measured()), "run `python3 perf/reports.py`"


@pytest.mark.parametrize(("machine", "package"), FILES)
def test_kept_reports_are_whole_and_of_the_cases_there_are(machine: str, package: str) -> None:
    kept = Report.model_validate_json(reports.kept()[machine][package].read_text(encoding="utf-8"))
    assert kept.environment.setting == "gpu"
    assert reports.machine_name(kept.environment.device.name) == machine
    assert {one.package for one in kept.results} == {package}
    spec = installed_specs()[package]
    barred = {one.case for one in kept.results if any(against.bar is not None for against in one.baselines)}
    assert barred == spec.bars.keys()
    assert {one.case for one in kept.results} <= spec.cases.keys()
    # Above its roof nothing can be: a peak, a cost or a time is wrong.
    assert [one.case for one in kept.results if one.placement.above_roof] == []


def test_a_report_is_split_by_package_and_loses_nothing_but_its_samples() -> None:
    split = reports.split(as_json(SAMPLE), None)
    assert list(split) == ["tk-one", "tk-two"]
    one = Report.model_validate(split["tk-one"])
    assert [kept.case for kept in one.results] == ["decode", "prefill", "odd"]
    (measured,) = one.results[0].timing.rounds if one.results[0].timing else ()
    assert measured.samples_us == ()
    assert measured.latency_us == 10.0
    assert one.results[0].baselines[1].bar_met is True
    assert one.environment == SAMPLE.environment


@pytest.mark.parametrize(
    ("made", "commit", "message"),
    [
        (report(*SAMPLE.results, setting="interpreter"), None, "made on a GPU, got one of the setting 'interpreter'"),
        (report(), None, "got one without results"),
        (report(*SAMPLE.results, commit=None), None, "names no commit, give it with --commit"),
    ],
)
def test_what_is_no_measurement_of_a_commit_is_refused(made: Report, commit: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        reports.split(as_json(made), commit)


def test_a_commit_that_a_report_names_counts_before_the_one_given() -> None:
    for named, kept in (("a" * 40 + "-dirty", "a" * 40 + "-dirty"), (None, "b" * 40)):
        split = reports.split(as_json(report(*SAMPLE.results, commit=named)), "b" * 40)
        assert split["tk-one"]["environment"]["commit"] == kept


def test_the_table_has_the_range_of_barred_ratios_and_where_they_come_from() -> None:
    split = reports.split(as_json(SAMPLE), None)
    versions, day = "torch 2.11, Triton 3.6", f"{SAMPLE.environment.made_at:%Y-%m-%d}"
    made = f"NVIDIA H200 (driver 580.1), {versions}, {day}, commit 000000000000"
    lines = reports.table(split).splitlines()
    assert lines[2:] == [
        "| `tk-one` | copy | 2 | 0.90 `decode` | 1.20 `prefill` | 1 of 2 |",
        "",
        f"- `tk-one`, `tk-two`: {made}",
    ]
    unjudged = reports.split(as_json(report(result("tk-one", "decode", baseline("liger", None, 0.9)))), None)
    assert reports.table(unjudged).splitlines()[2] == "| `tk-one` | liger | 1 | – | – | 0 of 1 |"


def test_the_command_keeps_a_report_and_writes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme, folder, bench = tmp_path / "README.md", tmp_path / "reports", tmp_path / "bench.json"
    for name, value in (("ROOT", tmp_path), ("README", readme), ("REPORTS", folder)):
        monkeypatch.setattr(reports, name, value)
    readme.write_text(f"before\n{reports.BEGIN}\nold\n{reports.END}\nafter\n")
    bench.write_text(SAMPLE.to_json())
    assert reports.main([str(bench)]) == 0
    assert sorted(path.name for path in (folder / "nvidia-h200").iterdir()) == ["tk-one.json", "tk-two.json"]
    text = readme.read_text()
    assert text.startswith(f"before\n{reports.BEGIN}\n\n| package |")
    assert text.endswith(f"\n{reports.END}\nafter\n")
    assert "old" not in text
    with pytest.raises(SystemExit):
        reports.main([str(bench), "--commit", "no-such-revision"])
    readme.write_text("no markers")
    with pytest.raises(ValueError, match="must have <!-- measured:begin --> once, has it 0 times"):
        reports.main([])


WHOLE_MODEL: dict[str, Any] = {
    "provenance": {
        "hardware": "NVIDIA H200", "driver": "580.1", "torch": "2.11", "triton": "3.6", "transformers": "5",
        "made_at": "2026-11-30T19:53:46+00:00",
    },
    "settings": {"prompt_tokens": 512, "new_tokens": 64, "dtype": "bfloat16"},
    "rows": [
        {
            "model": "llama", "step": step, "how": how, "batch": 1, "prefill_tokens_per_s": 1000.0 * speed,
            "decode_tokens_per_s": 10.0 * speed, "weight_bytes": 2 * 10**9, "peak_bytes": 3 * 10**9,
            "logit_difference": 0.25,
        }
        for step, how, speed in (("as it was", "eager", 2), ("as it was", "torch.compile", 4), ("int8", "eager", 3))
    ],
}  # fmt: skip


def test_a_report_of_whole_models_is_kept_and_shown_with_its_speeds_over_the_originals() -> None:
    machine, named = reports.to_keep(WHOLE_MODEL, "c" * 40)
    assert (machine, list(named)) == ("nvidia-h200", ["llama_decode"])
    text = pages.whole_models(named["llama_decode"])
    made = "NVIDIA H200 (driver 580.1), torch 2.11, Triton 3.6, 2026-11-30, commit cccccccccccc, transformers 5"
    assert f"{made}; prompts of 512 tokens, 64 new ones, bfloat16.\n" in text
    last = "| llama | int8 | eager | 1 | 3,000<br>1.50<br>0.75 | 30<br>1.50<br>0.75 | 2 GB<br>3 GB | 0.25 |"
    assert text.rstrip().splitlines()[-1] == last
    compiled = {**WHOLE_MODEL, "rows": [*WHOLE_MODEL["rows"], {**WHOLE_MODEL["rows"][2], "how": "torch.compile"}]}
    ((name, its),) = reports.to_keep(compiled, "c" * 40)[1].items()
    assert name == "llama_decode-compiled"
    assert pages.whole_models(its).startswith("## NVIDIA H200, steps compiled\n")
    assert text.startswith("## NVIDIA H200\n")
    for made_by, rows in (({**WHOLE_MODEL["provenance"], "driver": None}, WHOLE_MODEL["rows"]), ({"driver": "1"}, [])):
        with pytest.raises(ValueError, match="wanted a report with rows, made on a GPU"):
            reports.to_keep({**WHOLE_MODEL, "provenance": made_by, "rows": rows}, "c" * 40)


def test_a_page_shows_every_case_with_its_ratios_its_bar_and_its_roof() -> None:
    text = pages.section(SAMPLE, "figure.png", "perf/reports/nvidia-h200/tk-one.json")
    assert "commit 000000000000. All that was recorded is in `perf/reports/nvidia-h200/tk-one.json`." in text
    with_bar, other = text.split("### Other cases")
    assert "| case | time | of roof | × torch | × copy |" in with_bar
    assert "| `decode` | 10 µs | 41.7 % | 0.500<br>20 µs | 0.900<br>11.1 µs<br>bar 1 met |" in with_bar
    assert "| `prefill` | 10 µs | 41.7 % | 0.250<br>40 µs | 1.200<br>8.33 µs<br>bar 1.1 **missed** |" in with_bar
    other, host = other.split("### Host time of one eager call")
    assert "| `odd` | 10 µs | 41.7 % | 0.125<br>80 µs |" in other
    assert r"| `broken` | RuntimeError: a \| b |" in other
    assert "| `decode` | 7.5 µs | 0.500 | 0.500 |" in host
    assert "Unless it is said otherwise: rows 1, eps 1e-06.\n" in host
    assert "- `prefill`: a model; 20 MB and 1 MFLOP; at least 4.17 µs, bound by memory\n" in host
    assert "- `odd`: a model; rows 0; 20 MB and 1 MFLOP; at least 4.17 µs, bound by memory\n" in host
    assert "decode: baseline liger could not run: not installed" in host


def test_stages_are_kept_beside_a_report_and_shown_below_it() -> None:
    stage = StageResult(name="GEMM 1", latency_us=30.0, kernels=("gemm_kernel",))
    other = StageResult(name="combine", latency_us=5.0)
    none = StageResult(name="between kernels", latency_us=0.0)
    staged = report(result("tk-one", "decode", stages=(stage, none)), result("tk-one", "prefill", stages=(other,)))
    ((name, kept),) = reports.split(as_json(staged), None).items()
    assert name == "stages-tk-one"
    text = pages.stages(Report.model_validate(kept))
    (header,) = (line for line in text.splitlines() if line.startswith("| case"))
    assert header == "| case, the call | GEMM 1 | combine |"
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == ["| `decode`<br>10 µs | 30 µs | – |", "| `prefill`<br>10 µs | – | 5 µs |"]
    assert "commit 000000000000" in text


def test_pages_are_written_for_every_package_measured_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The documentation's own session has what draws.
    monkeypatch.setattr(pages, "roofline_png", lambda drawn: drawn.results[0].package.encode())
    names = ["tk-none", *sorted({package for _, package in FILES})]
    (tmp_path / "stale.md").write_text("of a package that is gone")
    pages.write_pages(tmp_path, names)
    figures = [f"{package}-{machine}.png" for machine, package in FILES]
    written = ["index.md", "llama_decode.md", *figures, *(f"{name}.md" for name in names)]
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(written)
    for name in names:
        page = (tmp_path / f"{name}.md").read_text(encoding="utf-8")
        assert page.startswith(f"# {name}, measured\n")
        assert (name == "tk-none") == ("No report has been recorded yet" in page)
        for figure in re.findall(r"!\[.+\]\((.+)\)", page):
            assert (tmp_path / figure).read_bytes() == name.encode()
