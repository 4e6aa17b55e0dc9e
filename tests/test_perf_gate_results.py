"""What the gate refuses to compare: each kind of bad input has a verdict and a message, and never passes."""

from __future__ import annotations

import importlib
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).resolve().parent / "data" / "perf_gate"
sys.path.insert(0, str(ROOT / "perf"))
decision, results = map(importlib.import_module, ("gate_decision", "gate_results"))

FIRST, AGAIN = "ac080f8082ed3e327d70586a83b464779fb1b2ea", "84957dcab98cd904df1e4e5bad47d2d5e166dc79"
THIRD = "52c511668fb18c59c5e812c10f68dc73472abf30"
LATENCY, SPILL = "gpu.Kernels.track_latency_us", "resources.Resources.track_spill_bytes"
PREFILL = f"{LATENCY}(tk-rmsnorm llama3-8b-prefill)"
NO_FIGURE, ONE_SIDE = "must be a finite number of 0 or more, got", "is on one side only:"
Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Results of an A/A run, to be spoiled."""
    return Path(shutil.copytree(DATA / "a_a", tmp_path / "a_a"))


def result_file(folder: Path, commit: str) -> Path:
    (file,) = folder.glob(f"*/{commit[:8]}-*.json")
    return file


def edit(file: Path, change: Edit) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def change_column(benchmark: str, column: str, index: int, value: Any) -> Edit:
    """Replace what a result file says of one case: its `result` or its `samples`."""

    def change(content: dict[str, Any]) -> None:
        content["results"][benchmark][content["result_columns"].index(column)][index] = value

    return change


def verdict(folder: Path) -> tuple[str, str]:
    """The verdict on the folder, and the problems' messages."""
    compared = results.read(folder, FIRST, AGAIN)
    messages = "\n".join(problem.message for problem in compared.problems)
    return decision.overall(compared, decision.judge(compared, None)), messages


def test_the_data_are_good_before_they_are_spoiled(folder: Path) -> None:
    assert verdict(folder) == ("ok", "")


def test_no_results_are_no_data(tmp_path: Path) -> None:
    assert verdict(tmp_path) == ("no data", f"{tmp_path} holds no results")


def test_results_of_one_side_only_are_no_data(folder: Path) -> None:
    result_file(folder, FIRST).unlink()
    assert verdict(folder) == ("no data", f"there are no results of base, {FIRST}")


@pytest.mark.parametrize(
    ("left", "message"), [(set(), "both sides' results are empty"), ({"host.Host.track_call_us"}, "")]
)
def test_results_with_nothing_to_judge_are_no_data(folder: Path, left: set[str], message: str) -> None:
    def drop(content: dict[str, Any]) -> None:
        content["results"] = {name: row for name, row in content["results"].items() if name in left}

    for commit in (FIRST, AGAIN):
        edit(result_file(folder, commit), drop)
    assert verdict(folder) == ("no data", message)


def test_all_results_null_are_no_data(folder: Path) -> None:
    def empty(content: dict[str, Any]) -> None:
        for row in content["results"].values():
            row[0], row[2:] = None, row[2:3]

    for commit in (FIRST, AGAIN):
        edit(result_file(folder, commit), empty)
    assert verdict(folder) == ("no data", "every one of 34 results is null: nothing ran")


def test_one_case_null_on_both_sides_is_an_error(folder: Path) -> None:
    for commit in (FIRST, AGAIN):
        edit(result_file(folder, commit), change_column(LATENCY, "result", 0, None))
    assert verdict(folder) == ("error", f"{PREFILL} failed in base\n{PREFILL} failed in head")


def samples_of(value: Any) -> Edit:
    return change_column(LATENCY, "samples", 0, value)


def environment(key: str, value: Any) -> Edit:
    return lambda content: content["params"].update({key: value})


def rename(content: dict[str, Any]) -> None:
    content["results"]["gpu.Kernels.track_time_us"] = content["results"].pop(LATENCY)


def new_version(content: dict[str, Any]) -> None:
    content["results"][LATENCY][content["result_columns"].index("version")] = "2"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (samples_of([120.0] * 15 + [math.nan]), f"{PREFILL} must have finite samples above 0, got nan in head"),
        (samples_of([120.0] * 15 + [math.inf]), f"{PREFILL} must have finite samples above 0, got inf in head"),
        (samples_of([120.0] * 15 + [0.0]), f"{PREFILL} must have finite samples above 0, got 0.0 in head"),
        (samples_of([120.0] * 15 + [-1]), f"{PREFILL} must have finite samples above 0, got -1 in head"),
        (samples_of([120.0] * 15 + [None]), f"{PREFILL} must have finite samples above 0, got None in head"),
        (samples_of([120.0] * 15 + ["120"]), f"{PREFILL} must have finite samples above 0, got '120' in head"),
        (samples_of([120.0] * 6), f"{PREFILL} needs at least 7 samples a side, got 6 in head"),
        (samples_of(None), f"{PREFILL} needs at least 7 samples a side, got 0 in head"),
        (samples_of([120.0] * 8), f"{PREFILL} has 16 samples in base and 8 in head: a round has failed"),
        (samples_of(120.0), "the results are not as asv writes them: TypeError"),
        (change_column(LATENCY, "result", 0, None), f"{PREFILL} failed in head"),
        (change_column(LATENCY, "result", 0, math.nan), f"{PREFILL} {NO_FIGURE} nan in head"),
        (change_column(LATENCY, "result", 3, 1.0), f"too-large) {ONE_SIDE} skipped in base, measured in head"),
        (change_column(SPILL, "result", 0, math.nan), f"cuda:90) {ONE_SIDE} measured in base, skipped in head"),
        (change_column(SPILL, "result", 0, math.inf), f"cuda:90) {NO_FIGURE} inf in head"),
        (change_column(SPILL, "result", 0, "many"), f"cuda:90) {NO_FIGURE} 'many' in head"),
        (change_column(SPILL, "result", 0, None), "cuda:90) failed in head"),
        (rename, f"{PREFILL} {ONE_SIDE} measured in base, absent in head"),
        (rename, "gpu.Kernels.track_time_us(tk-swiglu too-large) is not in benchmarks.json"),
        (new_version, f"{PREFILL} has version 1 in base and 2 in head"),
        (environment("gpu", "NVIDIA H100"), "gpu differs: NVIDIA H200 in base, NVIDIA H100 in head"),
        (environment("driver", "580.1"), "driver differs: 575.57.08 in base, 580.1 in head"),
        (environment("clocks", "locked"), "clocks differs: 1980/3201 MHz in base, locked in head"),
        (environment("torch", "2.14.0"), "torch differs: 2.13.0 in base, 2.14.0 in head"),
        (environment("triton", "3.7.0"), "triton differs: 3.6.0 in base, 3.7.0 in head"),
        (environment("machine", "other"), "machine name is not 'nvidia-h200'"),
        (lambda content: content["env_vars"].update(X="1"), "X differs: None in base, 1 in head"),
        (lambda content: content.update(env_name="other"), "environment differs: virtualenv-py3.11-asv"),
        (lambda content: content.update(commit_hash=THIRD), f"is of the unknown commit {THIRD}; wanted"),
        (lambda content: content.update(commit_hash="f" * 40), f"is of the unknown commit {'f' * 40}; wanted"),
        (lambda content: content.update(version=1), "is not a result file of asv: UserError"),
        (lambda content: content.pop("params"), "is not a result file of asv: UserError"),
        (lambda content: content.update(results=[]), "is not a result file of asv: AttributeError"),
    ],
)  # fmt: skip
def test_a_bad_result_is_an_error(folder: Path, change: Edit, message: str) -> None:
    edit(result_file(folder, AGAIN), change)
    called, messages = verdict(folder)
    assert called == "error"
    assert message in messages


@pytest.mark.parametrize("length", [0, 1, 700, -1])
def test_a_truncated_result_file_is_an_error(folder: Path, length: int) -> None:
    file = result_file(folder, AGAIN)
    # The last line ends in a newline, without which the file is still whole.
    file.write_text(file.read_text().rstrip()[:length])
    called, messages = verdict(folder)
    assert called == "error"
    assert f"{file.name} is not a result file of asv" in messages


@pytest.mark.parametrize("name", ["benchmarks.json", "nvidia-h200/machine.json"])
@pytest.mark.parametrize("content", [None, "", "{}", "[1]"])
def test_a_missing_or_empty_description_is_an_error(folder: Path, name: str, content: str | None) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    assert verdict(folder)[0] == "error"


def test_a_machine_file_of_another_machine_is_an_error(folder: Path) -> None:
    edit(folder / "nvidia-h200" / "machine.json", lambda content: content.update(gpu="NVIDIA H100"))
    assert verdict(folder) == ("error", "gpu differs: NVIDIA H100 in machine.json, NVIDIA H200 in the results")


@pytest.mark.parametrize("fact", ["gpu", "driver", "torch", "triton"])
@pytest.mark.parametrize("value", [None, "unknown"])
def test_times_measured_with_something_unknown_are_an_error(folder: Path, fact: str, value: str | None) -> None:

    def change(content: dict[str, Any]) -> None:
        facts = content.get("params", content)
        del facts[fact]
        if value:
            facts[fact] = value

    for file in folder.glob("*/*.json"):
        edit(file, change)
    assert verdict(folder) == ("error", f"the results do not say which {fact} the times were measured with")


def test_a_latency_in_another_unit_is_an_error(folder: Path) -> None:
    edit(folder / "benchmarks.json", lambda content: content[LATENCY].update(unit="ms"))
    called, messages = verdict(folder)
    assert called == "error"
    assert f"{PREFILL} must be in us, got ms" in messages


def test_two_machines_are_an_error(folder: Path) -> None:
    (folder / "other").mkdir()
    shutil.copy(folder / "nvidia-h200" / "machine.json", folder / "other")
    edit(folder / "other" / "machine.json", lambda content: content.update(machine="other"))
    moved = folder / "other" / result_file(folder, AGAIN).name
    result_file(folder, AGAIN).rename(moved)
    edit(moved, environment("machine", "other"))
    called, messages = verdict(folder)
    assert called == "error"
    assert "results of several machines cannot be compared: nvidia-h200, other" in messages


def test_two_environments_of_one_commit_are_an_error(folder: Path) -> None:
    file = result_file(folder, AGAIN)
    shutil.copy(file, file.with_name(file.name.replace("py3.11", "py3.12")))
    called, messages = verdict(folder)
    assert called == "error"
    assert "head has results of several environments, one was wanted" in messages


def test_a_third_commit_among_the_results_is_an_error(folder: Path) -> None:
    shutil.copy(result_file(DATA / "slow", THIRD), folder / "nvidia-h200")
    called, messages = verdict(folder)
    assert called == "error"
    assert f"is of the unknown commit {THIRD}" in messages
