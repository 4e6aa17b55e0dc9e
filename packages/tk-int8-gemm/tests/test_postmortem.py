"""The script that measures the INT8 post-mortem computes what it says, and its table is the page's."""

from __future__ import annotations

import importlib.util
from datetime import datetime, timezone
from pathlib import Path
from types import ModuleType

import pytest

from tk_kernel_core.device import known_device
from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.results import BenchResult, Environment, Report, Timing
from tk_kernel_core.roofline import place
from tk_kernel_core.spec import Cost
from tk_kernel_core.timing import summarise

PACKAGE = Path(__file__).resolve().parents[1]
PAGE = PACKAGE.parents[1] / "docs" / "int8-postmortem.md"
reads_the_page = pytest.mark.skipif(
    not (PACKAGE.parents[1] / "noxfile.py").exists(), reason="the page is in the repository, not in an sdist"
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("postmortem", PACKAGE / "benchmarks" / "postmortem.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def report_of(times_us: dict[str, float], m: int) -> Report:
    card, cost = known_device("H200"), Cost(flops=1, bytes_read=1, bytes_written=1)
    placement = place(cost, card, None)
    results = [
        BenchResult(
            package="tk-int8-gemm",
            case=f"{name}, M = {m}",
            source="",
            params={"m": m},
            cost=cost,
            placement=placement,
            timing=Timing(
                latency_us=time_us, spread_us=0.0, host_us=None, rounds=(summarise([time_us], 1, "cuda-graph"),)
            ),
        )
        for name, time_us in times_us.items()
    ]
    made_at = datetime(2026, 11, 30, tzinfo=timezone.utc)
    versions = {"python": "3.12", "torch": "2.11.0", "triton": "3.6.0", "system": "Linux"}
    made_in = Environment(setting="gpu", device=card, made_at=made_at, **versions)
    return Report(environment=made_in, results=tuple(results))


@pytest.mark.skipif(not interpreting(), reason="needs TRITON_INTERPRET=1; a GPU runs the script itself")
def test_every_formulation_is_right(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--quick", "--json", str(tmp_path / "results.json")]) == 0
    report = Report.model_validate_json((tmp_path / "results.json").read_text())
    assert report.environment.setting == "interpreter"
    assert [check.case for check in report.checks] == [
        f"{name}, M = {m}" for m in script.QUICK_ROWS for name in script.FORMULATIONS
    ]
    assert all(check.passed for check in report.checks)
    assert capsys.readouterr().out == f"{len(report.checks)} results are right; without a GPU nothing is timed\n"


def test_a_wrong_formulation_fails(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = script.SPEC.make_inputs(script.case_of(2, 16, 32), "cpu", 0)
    right = script.Formulation(script.weight_only_reference)
    wrong = script.Formulation(lambda inputs: script.weight_only_reference(inputs) * 1.01)
    monkeypatch.setattr(script, "FORMULATIONS", {"right": right, "wrong": wrong, "broken": script.Formulation(len)})
    case = script.case_of(2, 16, 32)
    assert [script.check(name, case, inputs).passed for name in script.FORMULATIONS] == [True, False, False]


def test_many_rows_are_held_against_the_weight_as_it_is(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    # The package dequantises and rounds it for so many; the formulations with faults do not.
    case = script.case_of(300, 32, 256)
    inputs = script.SPEC.make_inputs(case, "cpu", 0)
    sums = inputs["x"].double() @ inputs["codes"].double().T * inputs["scale"].double()
    monkeypatch.setattr(script, "FORMULATIONS", {"exact": script.Formulation(lambda _: sums.half())})
    assert script.check("exact", case, inputs).passed


def test_times_stand_beside_their_multiple_of_cublas(script: ModuleType) -> None:
    names = list(script.FORMULATIONS)
    table = script.table(report_of({names[0]: 25.0, names[2]: 330.04}, 16)).splitlines()
    assert table[:2] == ["| formulation | M = 16 |", "| --- | ---: |"]
    assert table[2:5] == [f"| {names[0]} | 25.0 (1.00) |", f"| {names[1]} | – |", f"| {names[2]} | 330.0 (13.20) |"]
    assert len(table) == 2 + len(names)


@reads_the_page
def test_the_page_is_rewritten_between_its_markers_alone(script: ModuleType) -> None:
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(script.BEGIN)
    shown, after = rest.split(script.END)
    text = script.section(report_of({next(iter(script.FORMULATIONS)): 25.0}, 1))
    made_in = "One H200 (driver unknown), torch 2.11.0, Triton 3.6.0, 2026-11-30."
    assert text.startswith(f"{made_in}\n\n| formulation | M = 1 |\n")
    changed = script.with_section(page, text)
    assert changed == f"{before}{script.BEGIN}\n\n{text}\n{script.END}{after}"
    assert script.with_section(changed, shown.strip("\n") + "\n") == page
    with pytest.raises(ValueError, match="must have <!-- postmortem:end --> once, has it 0 times"):
        script.with_section(page.replace(script.END, ""), text)


@reads_the_page
def test_the_page_has_the_rows_of_the_script(script: ModuleType) -> None:
    shown = PAGE.read_text(encoding="utf-8").split(script.BEGIN)[1].split(script.END)[0]
    first_cells = [line.split(" | ")[0].removeprefix("| ") for line in shown.splitlines() if line.startswith("| ")]
    assert first_cells == ["formulation", "---", *script.FORMULATIONS]


def test_refuses_what_would_measure_nothing(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        script.main([])
    assert "set TRITON_INTERPRET=1 and give --quick" in capsys.readouterr().err
