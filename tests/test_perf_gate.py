"""The gate between two commits: its five verdicts, what it refuses, and how it says so."""

from __future__ import annotations

import importlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(__file__).resolve().parent / "data" / "perf_gate"
GATE = ROOT / "perf" / "gate.py"
sys.path.insert(0, str(ROOT / "perf"))
gate, decision, results = map(importlib.import_module, ("gate", "gate_decision", "gate_results"))

HASHES = {
    "first": "ac080f8082ed3e327d70586a83b464779fb1b2ea",
    "slow": "52c511668fb18c59c5e812c10f68dc73472abf30",
    "spill": "88a9b21157bbf6eb587420d7c78766da8e4bb107",
    "broken": "42062909bc031efa40f561986a0e1fe494d2cf9c",
    "again": "84957dcab98cd904df1e4e5bad47d2d5e166dc79",
}
LATENCY, SPILL, CALL = (
    "gpu.Kernels.track_latency_us",
    "resources.Resources.track_spill_bytes",
    "host.Host.track_call_us",
)
PREFILL, DECODE, SWIGLU = (
    f"{LATENCY}({case})"
    for case in ("tk-rmsnorm llama3-8b-prefill", "tk-rmsnorm llama3-8b-decode", "tk-swiglu llama3-8b-prefill")
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commits of the recorded data: only what decides their hashes is in them."""
    folder = tmp_path_factory.mktemp("repository")
    person = {"NAME": "nobody", "EMAIL": "nobody@example.org", "DATE": "2026-01-01T00:00:00Z"}
    environment = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in person.items()}

    def git(*arguments: str) -> str:
        command = ["git", "-c", "commit.gpgsign=false", "-c", "core.autocrlf=false", *arguments]
        environ = {**os.environ, **environment, "GIT_CONFIG_GLOBAL": os.devnull}
        done = subprocess.run(command, cwd=folder, env=environ, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q", "-b", "main", "--object-format=sha1")
    made = {}
    for name, slow, spill, broken in (
        ("first", 1.0, 0, False),
        ("slow", 1.1, 0, False),
        ("spill", 1.0, 16, False),
        ("broken", 1.0, 0, True),
    ):
        (folder / "toy.py").write_text(f"SLOW = {slow}\nSPILL = {spill}\nBROKEN = {broken}\n")
        git("add", "toy.py")
        git("commit", "-q", "-m", name)
        git("tag", name)
        made[name] = git("rev-parse", "HEAD")
    made["again"] = git("commit-tree", "first^{tree}", "-p", "first", "-m", "again")
    git("tag", "again", made["again"])
    assert made == HASHES
    return folder


def spoil(folder: Path, commit: str, change: Callable[[list[Any]], object]) -> None:
    """Change the samples of the latencies in a result file, case by case."""
    (file,) = folder.glob(f"*/{HASHES[commit][:8]}-*.json")
    content = json.loads(file.read_text())
    change(content["results"][LATENCY][content["result_columns"].index("samples")])
    file.write_text(json.dumps(content))


def judge(repository: Path, folder: Path, head: str, base: str = "first", floor: Path | None = None) -> dict[str, Any]:
    report: dict[str, Any] = gate.gate(repository, base, head, folder, floor)
    return report


def named(report: dict[str, Any], verdict: str) -> list[str]:
    return [row["name"] for row in report["benchmarks"] if row["verdict"] == verdict]


def problems(report: dict[str, Any]) -> str:
    return "\n".join(f"{problem['verdict']}: {problem['message']}" for problem in report["problems"])


# The five verdicts.


def test_the_same_files_twice_are_ok_and_state_the_rate_of_false_alarms(repository: Path) -> None:
    report = judge(repository, DATA / "a_a", "again")
    assert (report["verdict"], report["exit_code"], report["problems"]) == ("ok", 0, [])
    assert report["a_a"] == {"judged": 3, "alarms": 0, "by_test_alone": 0}
    assert {PREFILL, DECODE, SWIGLU} < set(named(report, "ok"))
    assert named(report, "skipped") == [
        "gpu.Kernels.track_gap_to_roof(tk-swiglu too-large)",
        "gpu.Kernels.track_latency_us(tk-swiglu too-large)",
    ]


def test_ten_percent_in_one_kernel_is_a_regression_of_that_kernel_and_no_other(repository: Path) -> None:
    report = judge(repository, DATA / "slow", "slow")
    assert (report["verdict"], report["exit_code"], report["a_a"]) == ("regression", 10, None)
    assert named(report, "regression") == [SWIGLU]
    (row,) = [row for row in report["benchmarks"] if row["name"] == SWIGLU]
    assert row["ratio"] == pytest.approx(1.1, abs=0.02)
    assert (row["unit"], row["floor"], row["differs"], row["base"]["samples"]) == ("us", 0.03, True, 16)


def test_a_slower_call_on_the_host_is_listed_and_decides_nothing(repository: Path) -> None:
    report = judge(repository, DATA / "slow", "slow")
    assert named(report, "change") == [f"{CALL}(tk-rmsnorm llama3-8b-decode)"]
    assert not [row for row in report["benchmarks"] if row["name"].startswith(CALL) and row["decides"]]


def test_the_way_back_is_an_improvement(repository: Path) -> None:
    report = judge(repository, DATA / "slow", "first", base="slow")
    assert (report["verdict"], report["exit_code"]) == ("improvement", 0)
    assert named(report, "improvement") == [SWIGLU]


def test_spilled_registers_are_a_regression_and_more_registers_a_change(repository: Path) -> None:
    report = judge(repository, DATA / "spill", "spill")
    assert report["verdict"] == "regression"
    assert named(report, "regression") == [f"{SPILL}(tk-swiglu llama3-8b-prefill, cuda:90)"]
    assert named(report, "change") == [
        f"resources.Resources.track_registers(tk-swiglu llama3-8b-prefill, {target})"
        for target in ("cuda:90", "hip:gfx942")
    ]
    assert judge(repository, DATA / "spill", "first", base="spill")["verdict"] == "improvement"


def test_a_broken_benchmark_is_an_error_naming_its_case(repository: Path) -> None:
    report = judge(repository, DATA / "broken", "broken")
    assert (report["verdict"], report["exit_code"]) == ("error", 30)
    assert f"error: {DECODE} failed in head" in problems(report).splitlines()
    assert PREFILL not in problems(report)


def test_an_error_outranks_a_regression_and_both_are_named(repository: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DATA / "slow", tmp_path / "slow"))
    spoil(folder, "slow", lambda samples: samples[0].__setitem__(-1, math.nan))
    report = judge(repository, folder, "slow")
    assert report["verdict"] == "error"
    assert named(report, "regression") == [SWIGLU]
    assert problems(report) == f"error: {PREFILL} must have finite samples above 0, got nan in head"


def test_times_skipped_on_both_sides_are_no_data_although_machine_code_was_compared(repository: Path) -> None:
    report = judge(repository, DATA / "no_gpu", "again")
    assert (report["verdict"], report["exit_code"]) == ("no data", 20)
    assert problems(report) == f"no data: {LATENCY} was skipped on both sides, in all of its 4 cases"


@pytest.mark.parametrize("revision", ["nowhere", "f" * 40, "--all", ""])
def test_a_commit_that_the_repository_lacks_is_an_error(repository: Path, revision: str) -> None:
    report = judge(repository, DATA / "a_a", revision)
    assert report["verdict"] == "error"
    assert f"has no commit {revision!r}" in problems(report)


def test_one_commit_against_itself_is_an_error(repository: Path) -> None:
    report = judge(repository, DATA / "a_a", HASHES["first"])
    assert (report["verdict"], report["problems"][0]["message"][:29]) == ("error", "base and head are both first,")


# The rule.

TIMES = st.lists(st.floats(50, 5000), min_size=7, max_size=30)
FLOORS = st.floats(0.03, 0.5)
OPPOSITE = {"ok": "ok", "regression": "improvement", "improvement": "regression"}


def around(centre: float, count: int = 8) -> list[float]:
    return [centre * (1 + 0.001 * number) for number in range(count)]


@pytest.mark.parametrize(
    ("base", "head", "floor", "verdict"),
    [
        (around(100), around(110), 0.03, "regression"),
        (around(100), around(110), 0.12, "ok"),
        (around(100), around(102), 0.03, "ok"),
        (around(110), around(100), 0.03, "improvement"),
        (around(4), around(4.4), 0.03, "ok"),
        (around(4), around(4.6), 0.03, "regression"),
        ([90, 95, 100, 105, 110, 115, 120], [95, 100, 105, 110, 115, 120, 125], 0.03, "ok"),
        (around(100, 7), around(1000, 7), 0.03, "regression"),
        ([100.0] * 8, [110.0] * 8, 0.03, "regression"),
    ],
)  # fmt: skip
def test_a_change_counts_if_it_is_significant_above_the_floor_and_above_half_a_microsecond(
    base: list[float], head: list[float], floor: float, verdict: str
) -> None:
    assert decision.decide(base, head, floor)[1] == verdict


def test_fewer_samples_than_are_wanted_could_never_show_a_regression() -> None:
    fewer = results.MIN_SAMPLES - 1
    assert decision.decide(around(100, fewer), around(1000, fewer), 0.03) == (False, "ok")


@given(TIMES, TIMES, FLOORS, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(base: list[float], head: list[float], floor: float, random: Any) -> None:
    shuffled = [random.sample(side, len(side)) for side in (base, head)]
    assert decision.decide(*shuffled, floor) == decision.decide(base, head, floor)


@given(TIMES, TIMES, FLOORS, st.sampled_from([0.5, 2, 1024]))
def test_scaling_both_sides_leaves_the_verdict(
    base: list[float], head: list[float], floor: float, factor: float
) -> None:
    # From 25 us on, the floor of 3 % is more than half a microsecond.
    scaled = [[sample * factor for sample in side] for side in (base, head)]
    assert decision.decide(*scaled, floor) == decision.decide(base, head, floor)


@given(TIMES, TIMES, FLOORS)
def test_exchanging_the_sides_turns_the_verdict_round(base: list[float], head: list[float], floor: float) -> None:
    differs, verdict = decision.decide(base, head, floor)
    assert decision.decide(head, base, floor) == (differs, OPPOSITE[verdict])


@given(TIMES, FLOORS)
def test_the_same_samples_are_ok(samples: list[float], floor: float) -> None:
    assert decision.decide(samples, samples, floor) == (False, "ok")


@given(TIMES, TIMES, FLOORS, FLOORS)
def test_a_higher_floor_never_adds_a_verdict(base: list[float], head: list[float], one: float, other: float) -> None:
    low, high = (decision.decide(base, head, floor)[1] for floor in sorted((one, other)))
    assert high in (low, "ok")


@settings(max_examples=25)
@given(
    st.integers(0, 2), st.integers(0, 15), st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -1.0, None, "1", True])
)
def test_no_sample_that_is_no_time_ever_passes(case: int, position: int, value: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(shutil.copytree(DATA / "a_a", Path(folder) / "a_a"))
        spoil(copy, "again", lambda samples: samples[case].__setitem__(position, value))
        compared = results.read(copy, HASHES["first"], HASHES["again"])
        assert decision.overall(compared, decision.judge(compared, None)) == "error"


@settings(max_examples=25)
@given(st.integers(0, 2), st.floats(1.1, 3), st.randoms(use_true_random=False))
def test_a_planted_slow_down_names_its_case_and_no_other(case: int, factor: float, random: Any) -> None:
    centres = [120.0, 12.0, 310.0]
    pairs = [
        results.Pair(
            LATENCY, (str(number),), "us",
            *(
                results.Figure("measured", centre, tuple(centre * slow * random.uniform(0.99, 1.01) for _ in range(16)))
                for slow in (1, factor if number == case else 1)
            ),
        )
        for number, centre in enumerate(centres)
    ]  # fmt: skip
    rows = decision.judge(results.Comparison(pairs=pairs), None)
    assert [row.name for row in rows if row.verdict != "ok"] == [f"{LATENCY}({case})"]


# The noise floor.


def run(spread: float, **environment: str) -> Any:
    """An A/A run of one latency whose medians are `spread` apart."""
    figures = (results.Figure("measured", value, tuple(around(value))) for value in (100.0, 100.0 * (1 + spread)))
    return results.Comparison({"gpu": "G", **environment}, [results.Pair(LATENCY, ("a",), "us", *figures)])


def test_the_floor_is_three_times_the_largest_spread_and_at_least_three_percent() -> None:
    floor = decision.make_floor([run(0.01), run(0.02), run(-0.015)])
    assert floor.spread == {f"{LATENCY}(a)": pytest.approx(0.02)}
    assert (floor.runs, floor.judged, floor.alarms) == (3, 3, 0)
    assert decision.judge(run(0.059), floor)[0].verdict == "ok"
    assert decision.judge(run(0.061), floor)[0].verdict == "regression"
    assert decision.judge(run(0.061), floor)[0].floor == pytest.approx(0.06)
    assert decision.judge(run(0.029), decision.make_floor([run(0.001)]))[0].verdict == "ok"
    assert decision.judge(run(0.031), decision.make_floor([run(0.001)]))[0].verdict == "regression"


def test_a_run_is_judged_by_the_floor_of_the_others() -> None:
    floor = decision.make_floor([run(0.001), run(0.001), run(-0.05)])
    assert (floor.judged, floor.alarms) == (3, 1)
    # A head that is 5 % faster is a base that is 5.3 % slower.
    assert floor.spread == {f"{LATENCY}(a)": pytest.approx(1 / 0.95 - 1)}


def test_a_floor_from_different_machines_is_refused() -> None:
    with pytest.raises(ValueError, match="gpu differs: G in run 1, H in run 2"):
        decision.make_floor([run(0.01), run(0.01, gpu="H")])


# The command.


def command(repository: Path, *arguments: object) -> tuple[int, str]:
    line = [sys.executable, str(GATE), *map(str, arguments), "--repository", str(repository)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "base", "head", "verdict", "code"),
    [
        ("a_a", "first", "again", "ok", 0),
        ("slow", "slow", "first", "improvement", 0),
        ("slow", "first", "slow", "regression", 10),
        ("no_gpu", "first", "again", "no data", 20),
        ("nothing", "first", "again", "no data", 20),
        ("broken", "first", "broken", "error", 30),
    ],
)
def test_the_command_has_an_exit_code_for_each_verdict_and_writes_both_reports(
    repository: Path, tmp_path: Path, name: str, base: str, head: str, verdict: str, code: int
) -> None:
    text, data = tmp_path / "report.md", tmp_path / "report.json"
    got, printed = command(repository, base, head, "--results", DATA / name, "--markdown", text, "--json", data)
    report = json.loads(data.read_text())
    assert (got, report["verdict"], report["exit_code"]) == (code, verdict, code)
    assert text.read_text().startswith(f"## Performance gate: {verdict}\n")
    assert text.read_text() == gate.markdown(report)
    assert text.read_text().strip() in printed


def test_the_comment_shows_figures_environment_and_floor(repository: Path, tmp_path: Path) -> None:
    floor = tmp_path / "floor.json"
    assert command(repository, "--floor-from", DATA / "a_a", "--floor", floor) == (
        0, "1 A/A runs: 0 false alarms in 3 latencies (0.0%)\n",
    )  # fmt: skip
    text = gate.markdown(judge(repository, DATA / "slow", "slow", floor=floor))
    lines = text.splitlines()
    assert "`ac080f8082 (first)` → `52c511668f (slow)`" in lines
    (line,) = [line for line in lines if "regression" in line and line.startswith("|")]
    assert line.startswith(f"| {SWIGLU} | 3")
    assert line.endswith(" | 3.0% | **regression** |")
    assert line.count(" ± ") == 2
    assert "Spreads from 1 A/A runs on NVIDIA H200." in text
    assert "Not listed: 8 read off machine code and unchanged, 3 not judged, 2 skipped on both sides." in lines
    assert "clocks 1980/3201 MHz" in lines[-1]
    assert "driver 575.57.08" in lines[-1]
    assert "torch 2.13.0, triton 3.6.0." in lines[-1]


def test_the_comment_on_an_a_a_run_states_the_rate_of_false_alarms(repository: Path) -> None:
    text = gate.markdown(judge(repository, DATA / "a_a", HASHES["again"]))
    assert "`ac080f8082 (first)` → `84957dcab9`" in text
    assert "False alarms: 0 of 3 latencies (0.0%); asv's test alone would have given 0." in text
    assert "No A/A runs were given: the least floor holds for all." in text


def test_a_floor_of_another_gpu_is_an_error(repository: Path, tmp_path: Path) -> None:
    floor = tmp_path / "floor.json"
    floor.write_text(decision.make_floor([run(0.01)]).model_dump_json())
    report = judge(repository, DATA / "a_a", "again", floor=floor)
    assert (report["verdict"], report["floor"]["runs"]) == ("error", 1)
    assert problems(report) == "error: the noise floor was measured on G, these times on NVIDIA H200"


@pytest.mark.parametrize("content", [None, "", "{}", '{"spread": {"a": NaN}}', '{"spread": {"a": -1}}'])
def test_a_missing_or_bad_floor_file_is_an_error(repository: Path, tmp_path: Path, content: str | None) -> None:
    floor = tmp_path / "floor.json"
    if content is not None:
        floor.write_text(content)
    assert judge(repository, DATA / "a_a", "again", floor=floor)["verdict"] == "error"


@pytest.mark.parametrize(
    ("name", "message"),
    [("slow", "wanted two commits with the same tree, got 52c511"), ("nothing", "got none"), ("no_gpu", "was skipped")],
)
def test_no_floor_is_made_from_what_is_no_a_a_run(repository: Path, tmp_path: Path, name: str, message: str) -> None:
    floor = tmp_path / "floor.json"
    code, printed = command(repository, "--floor-from", DATA / "a_a", DATA / name, "--floor", floor)
    assert (code, floor.exists()) == (20 if name == "no_gpu" else 30, False)
    assert message in printed


@pytest.mark.parametrize(
    "arguments", [[], ["a"], ["a", "b"], ["--floor-from", "x"], ["a", "b", "--floor-from", "x", "--floor", "f"]]
)
def test_a_bad_command_line_is_told_so(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        gate.main(arguments)
    assert exit_.value.code == 2
