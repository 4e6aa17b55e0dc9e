from __future__ import annotations

import dataclasses
import math
import shutil
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

from tk_kernel_core import bench
from tk_kernel_core.bench import bench_kernel, check_kernel, compare, environment, predict_kernel
from tk_kernel_core.device import known_device
from tk_kernel_core.results import BaselineResult, BenchResult, CheckResult, Report, Timing
from tk_kernel_core.roofline import place
from tk_kernel_core.spec import BaselineUnavailable, Case, Cost, Inputs, KernelSpec, Tolerance
from tk_kernel_core.timing import Measurement, summarise

H200 = known_device("H200")
EXACT = Tolerance(absolute=0.0, relative=0.0)
INF, NAN = math.inf, math.nan


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(int(case.params["n"]), generator=generator)}  # type: ignore[arg-type]


def doubled(inputs: Inputs) -> torch.Tensor:
    return inputs["x"] + inputs["x"]


def make_spec(**changes: Any) -> KernelSpec:
    spec = KernelSpec(
        name="tk-sample",
        summary="Doubles.",
        cases={name: Case(name, {"n": 1 << 20}, source="a model") for name in ("first", "second")},
        make_inputs=make_inputs,
        run=doubled,
        reference=lambda inputs: inputs["x"].double() * 2,
        cost=lambda case: Cost(float(case.params["n"]), 4 * case.params["n"], 4 * case.params["n"]),  # type: ignore
        tolerance=lambda case: EXACT,
        shrink=lambda case: dataclasses.replace(case, params={"n": 16}),
    )
    return dataclasses.replace(spec, **changes)


def check(spec: KernelSpec) -> list[CheckResult]:
    return check_kernel(spec, spec.cases.values(), "cpu")


def measurement(latency_us: float, **changes: Any) -> Measurement:
    fields: dict[str, Any] = {
        "latency_us": latency_us,
        "spread_us": 0.0,
        "samples_us": (latency_us,) * 3,
        "calls_per_sample": 1,
        "method": "cpu-clock",
        "note": "",
        "clock_mhz_before": None,
        "clock_mhz_after": None,
        "host_us": None,
    }
    return Measurement(**{**fields, **changes})


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[Any, list[float]]], list[Any]]:
    """Replace the timer by given times per function, and return the order in which functions were timed."""

    def script(times: dict[Any, list[float]]) -> list[Any]:
        left: dict[Any, Iterator[float]] = {function: iter(values) for function, values in times.items()}
        order: list[Any] = []

        def measure(function: Any, input_sets: Any, *, budget_s: float = 0.5) -> Measurement:
            order.append(function)
            function(input_sets[0])
            return measurement(next(left[function]))

        monkeypatch.setattr(bench, "measure", measure)
        monkeypatch.setattr(bench, "rotated_inputs", lambda make, device: [make(0)])
        return order

    return script


@pytest.mark.parametrize(
    ("got", "want", "error", "multiple"),
    [
        ([1.0, 2.5], [1.0, 2.0], 0.5, 0.5 / 0.3),
        ([1.05, 20.1], [1.0, 20.0], 0.1, 0.25),
        ([NAN, INF, -INF], [NAN, INF, -INF], 0.0, 0.0),
        ([NAN], [1.0], INF, INF),
        ([1.0], [NAN], INF, INF),
        ([INF], [1.0], INF, INF),
        ([1.0], [INF], INF, INF),
        ([-INF], [INF], INF, INF),
        ([NAN], [INF], INF, INF),
    ],
)
def test_compare_floating_point(got: list[float], want: list[float], error: float, multiple: float) -> None:
    found = compare(*(torch.tensor(side, dtype=torch.float64) for side in (got, want)), Tolerance(0.1, 0.1))
    assert found == pytest.approx((error, multiple), rel=1e-6)


def test_compare_accepts_nothing_where_the_tolerance_is_zero() -> None:
    assert compare(torch.zeros(3), torch.zeros(3), EXACT) == (0.0, 0.0)
    assert compare(torch.full((3,), 1e-30), torch.zeros(3), EXACT)[1] == INF


def test_compare_never_passes_an_undefined_tolerance() -> None:
    assert compare(torch.ones(3), torch.zeros(3), Tolerance(absolute=NAN, relative=0.0))[1] == INF


def test_compare_wants_integers_and_flags_equal() -> None:
    wide = Tolerance(absolute=10.0, relative=10.0)
    assert compare(torch.tensor([3, 4]), torch.tensor([3, 5]), wide) == (1.0, INF)
    assert compare(torch.tensor([True]), torch.tensor([False]), wide)[1] == INF
    assert compare(torch.tensor([3, 5]), torch.tensor([3, 5]), EXACT) == (0.0, 0.0)


def test_compare_looks_at_every_tensor() -> None:
    good, bad = torch.ones(2), torch.tensor([1.0, 3.0])
    assert compare((good, bad), (good, good), Tolerance(absolute=1.0, relative=0.0)) == (2.0, 2.0)
    assert compare((bad, good), (good, good), Tolerance(absolute=1.0, relative=0.0)) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("got", "want", "message"),
    [
        ((), (), "wanted 0 result tensors, got 0"),
        (torch.ones(2), (torch.ones(2), torch.ones(2)), "wanted 2 result tensors, got 1"),
        (torch.ones(1), torch.ones(2), r"result 0 must have shape \(2,\), got \(1,\)"),
    ],
)
def test_compare_refuses_results_of_another_form(got: Any, want: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compare(got, want, EXACT)


def test_check_runs_the_cut_down_case_on_a_cpu() -> None:
    results = check(make_spec())
    assert [(result.case, result.passed, result.params, result.message) for result in results] == [
        ("first", True, {"n": 16}, ""),
        ("second", True, {"n": 16}, ""),
    ]


def test_check_fails_a_wrong_kernel_and_says_by_how_much() -> None:
    wrong = make_spec(run=lambda inputs: doubled(inputs) + 1.0, tolerance=lambda case: Tolerance(0.25, 0.0))
    result = check(wrong)[0]
    assert not result.passed
    assert result.error_over_tolerance == pytest.approx(4.0, rel=1e-5)
    assert "4 times what is accepted" in result.message


def test_check_turns_an_exception_into_that_case_s_failure() -> None:
    def run(inputs: Inputs) -> torch.Tensor:
        if inputs["x"].numel() == 5:
            raise RuntimeError("no launch choice for 5")
        return doubled(inputs)

    def shrink(case: Case) -> Case:
        return dataclasses.replace(case, params={"n": 5 if case.name == "first" else 16})

    first, second = check(make_spec(run=run, shrink=shrink))
    assert (first.passed, first.message) == (False, "RuntimeError: no launch choice for 5")
    assert first.largest_error is None
    assert second.passed


def test_check_keeps_an_in_place_kernel_away_from_the_reference_s_inputs() -> None:
    assert all(result.passed for result in check(make_spec(run=lambda inputs: inputs["x"].mul_(2))))


def test_progress_hears_of_every_case_before_it_runs() -> None:
    events: list[str] = []
    spec = make_spec(run=lambda inputs: events.append("run") or doubled(inputs))
    check_kernel(spec, spec.cases.values(), "cpu", events.append)
    assert events == ["tk-sample first", "run", "tk-sample second", "run"]


def test_no_cases_give_no_results() -> None:
    assert check_kernel(make_spec(), [], "cpu") == []
    assert bench_kernel(make_spec(), [], "cpu", H200) == []


def test_bench_lets_kernel_and_baselines_take_turns(scripted: Any) -> None:
    def other(inputs: Inputs) -> torch.Tensor:
        return doubled(inputs)

    # The machine slows down: the ratio of medians would be 30 / 80, the ratio within each round is 1 / 4.
    order = scripted({doubled: [10.0, 20.0, 30.0], other: [40.0, 80.0, 120.0]})
    spec = make_spec(baselines={"torch": other}, bars={"first": {"torch": 0.3}})
    (result,) = bench_kernel(spec, [spec.cases["first"]], "cuda", H200)
    assert order == [doubled, other] * bench.GPU_ROUNDS
    assert result.timing is not None
    assert result.timing.latency_us == 20.0
    assert result.timing.spread_us == 20.0
    assert [measured.latency_us for measured in result.timing.rounds] == [10.0, 20.0, 30.0]
    (baseline,) = result.baselines
    assert (baseline.ratio, baseline.bar, baseline.bar_met) == (0.25, 0.3, True)


def test_a_kernel_alone_takes_no_turns(scripted: Any) -> None:
    order = scripted({doubled: [10.0]})
    spec = make_spec()
    (result,) = bench_kernel(spec, [spec.cases["first"]], "cuda", H200, baselines=())
    assert order == [doubled]
    assert result.timing is not None
    assert result.timing.latency_us == 10.0


def test_the_ratio_is_the_median_of_the_rounds(scripted: Any) -> None:
    def other(inputs: Inputs) -> torch.Tensor:
        return doubled(inputs)

    scripted({doubled: [10.0, 10.0, 90.0], other: [20.0, 10.0, 30.0]})
    spec = make_spec(baselines={"torch": other})
    (result,) = bench_kernel(spec, [spec.cases["first"]], "cuda", H200)
    assert result.baselines[0].ratio == 1.0


def test_a_missed_bar_is_a_failure(scripted: Any) -> None:
    def other(inputs: Inputs) -> torch.Tensor:
        return doubled(inputs)

    scripted({doubled: [11.0] * 3, other: [10.0] * 3})
    spec = make_spec(baselines={"torch": other}, bars={"first": {"torch": 1.0}})
    report = Report(
        environment=environment("gpu", H200),
        results=tuple(bench_kernel(spec, [spec.cases["first"]], "cuda", H200)),
    )
    assert report.failures == ["tk-sample first: 1.100 times torch, the bar is 1"]


def test_bars_are_not_judged_off_a_gpu(scripted: Any) -> None:
    def other(inputs: Inputs) -> torch.Tensor:
        return doubled(inputs)

    scripted({doubled: [11.0], other: [10.0]})
    spec = make_spec(baselines={"torch": other}, bars={"first": {"torch": 1.0}})
    (result,) = bench_kernel(spec, [spec.cases["first"]], "cpu", H200)
    assert (result.baselines[0].bar, result.baselines[0].bar_met) == (1.0, None)
    report = Report(environment=environment("interpreter", H200), results=(result,))
    assert report.failures == []
    assert report.unjudged_bars == []


def test_a_baseline_that_cannot_run_is_recorded_with_the_reason(scripted: Any) -> None:
    def absent(inputs: Inputs) -> torch.Tensor:
        raise BaselineUnavailable("liger_kernel is not installed")

    def broken(inputs: Inputs) -> torch.Tensor:
        raise ZeroDivisionError("division by zero")

    scripted({doubled: [10.0] * 3})
    spec = make_spec(baselines={"liger": absent, "broken": broken}, bars={"first": {"liger": 1.0}})
    (result,) = bench_kernel(spec, [spec.cases["first"]], "cuda", H200)
    assert [(baseline.name, baseline.unavailable) for baseline in result.baselines] == [
        ("liger", "liger_kernel is not installed"),
        ("broken", "ZeroDivisionError: division by zero"),
    ]
    report = Report(environment=environment("gpu", H200), results=(result,))
    assert report.unjudged_bars == ["tk-sample first: no ratio to liger (liger_kernel is not installed)"]


def test_host_times_are_compared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(function: object, input_sets: object, *, budget_s: float) -> Measurement:
        return summarise([10.0], 1, "cuda-graph", host_us=6.0 if function is doubled else 8.0)

    monkeypatch.setattr(bench, "rotated_inputs", lambda make, device: [make(0)])
    monkeypatch.setattr(bench, "measure", measured)
    spec = make_spec(baselines={"torch": lambda inputs: None})
    (result,) = bench_kernel(spec, [spec.cases["first"]], "cuda", H200)
    assert result.baselines[0].host_ratio == 0.75


def test_a_kernel_that_cannot_be_timed_is_a_failure_of_its_case_alone(scripted: Any) -> None:
    def run(inputs: Inputs) -> torch.Tensor:
        raise RuntimeError("out of shared memory")

    scripted({run: []})
    spec = make_spec(run=run)
    results = bench_kernel(spec, spec.cases.values(), "cuda", H200)
    assert [(result.timing, result.error) for result in results] == [(None, "RuntimeError: out of shared memory")] * 2
    assert len(Report(environment=environment("gpu", H200), results=tuple(results)).failures) == 2


def test_a_measured_case_lies_on_the_roof_of_the_gpu(scripted: Any) -> None:
    scripted({doubled: [10.0] * 3})
    spec = make_spec()
    (result,) = bench_kernel(spec, [spec.cases["first"]], "cuda", H200)
    assert result.placement == place(Cost(2.0**20, 2**22, 2**22), H200, 10.0)
    assert result.placement.percent_of_roof is not None


def test_an_interpreted_case_shows_the_roof_of_the_uncut_case() -> None:
    spec = make_spec()
    (result,) = bench_kernel(spec, [spec.cases["first"]], "cpu", H200)
    assert result.timing is not None
    assert result.timing.latency_us > 0
    assert result.params == {"n": 16}
    assert result.cost == Cost(2.0**20, 2**22, 2**22)
    assert result.placement == place(result.cost, H200, None)


def test_a_prediction_runs_nothing() -> None:
    def run(inputs: Inputs) -> torch.Tensor:
        raise AssertionError("must not run")

    spec = make_spec(run=run, make_inputs=run)
    results = predict_kernel(spec, spec.cases.values(), H200)
    assert [result.placement for result in results] == [place(Cost(2.0**20, 2**22, 2**22), H200, None)] * 2
    assert results[0].params == {"n": 1 << 20}


@pytest.mark.parametrize("bars", [{"third": {"torch": 1.0}}, {"first": {"cublas": 1.0}}])
def test_bars_must_name_what_exists(bars: dict[str, dict[str, float]]) -> None:
    with pytest.raises(ValueError, match="which it lacks"):
        bench_kernel(make_spec(baselines={"torch": doubled}, bars=bars), [], "cpu", H200)


def test_baselines_must_exist() -> None:
    with pytest.raises(ValueError, match="'cublas'"):
        bench_kernel(make_spec(), [], "cpu", H200, baselines=["cublas"])


def test_host_time_is_the_median_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([7.0, 1.0, 9.0, 1.0, 8.0, 1.0])
    monkeypatch.setattr(bench, "measure", lambda *args, **options: measurement(5.0, host_us=next(times)))
    monkeypatch.setattr(bench, "rotated_inputs", lambda make, device: [make(0)])
    spec = make_spec(baselines={"torch": doubled})
    (result,) = bench_kernel(spec, [spec.cases["first"]], "cuda", H200)
    assert result.timing is not None
    assert result.timing.host_us == 8.0


def test_a_report_survives_json() -> None:
    spec = make_spec()
    report = Report(
        environment=environment("interpreter", H200),
        checks=tuple(check(spec)),
        results=tuple(bench_kernel(spec, spec.cases.values(), "cpu", H200)),
    )
    assert Report.model_validate_json(report.to_json()) == report


def test_infinities_and_nan_survive_json() -> None:
    checked = CheckResult(
        package="tk-sample", case="first", params={"n": 1}, passed=False, largest_error=INF, error_over_tolerance=-INF
    )
    cost = Cost(INF, 0, 0)
    placement = place(Cost(1.0, 1, 1), H200, None)
    result = BenchResult(
        package="tk-sample",
        case="first",
        source="",
        params={},
        cost=cost,
        placement=placement,
        timing=Timing(latency_us=INF, spread_us=0.0, host_us=None, rounds=(measurement(INF),)),
        baselines=(BaselineResult(name="torch", ratio=NAN),),
    )
    text = Report(environment=environment("gpu", H200), checks=(checked,), results=(result,)).to_json()
    restored = Report.model_validate_json(text)
    assert restored.checks == (checked,)
    assert restored.results[0].cost == cost
    assert restored.results[0].timing == result.timing
    ratio = restored.results[0].baselines[0].ratio
    assert ratio is not None
    assert math.isnan(ratio)
    assert restored.to_json() == text


def test_the_environment_names_versions_and_a_time_with_a_zone() -> None:
    made = environment("prediction", H200)
    assert made.torch == torch.__version__
    assert made.made_at.tzinfo == timezone.utc
    assert abs((datetime.now(timezone.utc) - made.made_at).total_seconds()) < 60


@pytest.mark.skipif(shutil.which("git") is None, reason="needs Git")
def test_the_environment_names_the_commit_of_a_source_tree_and_of_nothing_else(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    tracked, installed = tmp_path / "bench.py", tmp_path / "site-packages" / "bench.py"
    tracked.write_text("1")
    installed.parent.mkdir()
    installed.write_text("1")
    assert bench._commit_of(tracked) is None
    git("init")
    git("add", "bench.py")
    git("commit", "-m", "first")
    git("tag", "v1")
    assert bench._commit_of(tracked) == git("rev-parse", "HEAD")
    assert bench._commit_of(installed) is None
    tracked.write_text("2")
    assert bench._commit_of(tracked) == git("rev-parse", "HEAD") + "-dirty"


def test_an_empty_report_says_so() -> None:
    assert Report(environment=environment("gpu", H200)).is_empty
