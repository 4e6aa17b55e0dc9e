"""The steps inside a call: their kernels, their times, and their places on the roofline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.autograd.profiler_util import FunctionEvent

from tk_kernel_core import bench, cli, commands, device, report, selection
from tk_kernel_core import stages as stages_module
from tk_kernel_core.device import known_device
from tk_kernel_core.plot import roofline_figure
from tk_kernel_core.results import Report
from tk_kernel_core.spec import Case, Cost, Inputs, KernelSpec, Stages, Tolerance
from tk_kernel_core.stages import (
    KernelRun,
    kernel_runs,
    place_stages,
    predict_stages,
    profile,
    split_calls,
    time_stages,
)
from tk_kernel_core.timing import summarise

DeviceType = torch._C._autograd.DeviceType
H200 = known_device("H200")
COSTS = {"sine": Cost(4.8e6, 2_400_000, 2_400_000), "sort": Cost(0, 480_000, 0), "cosine": Cost(1e6, 1, 1)}


def assign(kernels: Sequence[str]) -> list[str | None]:
    return [
        next((stage for stage, word in (("sine", "sin"), ("cosine", "cos")) if word in name), None) for name in kernels
    ]


WAVE, STAGES = Case("wave", {"n": 2**20}), Stages(lambda case: COSTS, assign)


def run(inputs: Inputs) -> torch.Tensor:
    return inputs["x"].sin().exp().cos()


SPEC = KernelSpec(
    name="tk-waves",
    summary="Sine and cosine.",
    cases={"wave": WAVE},
    make_inputs=lambda case, device, seed: {"x": torch.randn(case.params["n"], device=device)},
    run=run,
    reference=run,
    cost=lambda case: Cost(5.8e6, 2_400_000, 2_400_000),
    tolerance=lambda case: Tolerance(0.0, 0.0),
    shrink=lambda case: case,
    stages=STAGES,
)


def event(name: str, start_us: float, end_us: float, kind: Any = DeviceType.CUDA) -> FunctionEvent:
    return FunctionEvent(
        id=0, name=name, thread=0, start_us=start_us, end_us=end_us, device_type=kind, device_resource_id=7
    )


# Two calls as a profiler has them: the second kernel is launched early, the fourth late.
EVENTS = [
    event("cudaGraphLaunch", 0.0, 3.0, DeviceType.CPU),
    *(
        event(name, at + start, at + end)
        for at, last in ((10.0, 9.0), (20.0, 9.5))
        for name, start, end in (
            ("sin_kernel.kd", 0.0, 2.0),
            ("cos_kernel", 1.0, 5.0),
            ("Memset (Device)", 5.0, 6.0),
            ("cos_kernel", 7.0, last),
        )
    ),
]


def test_kernels_are_read_off_a_profile_and_cut_into_calls() -> None:
    calls = split_calls(kernel_runs(reversed(EVENTS)), 2)
    assert [[run.name for run in call] for call in calls] == [
        ["sin_kernel", "cos_kernel", "Memset (Device)", "cos_kernel"]
    ] * 2
    assert calls[1][0] == KernelRun("sin_kernel", 20.0, 22.0)


@pytest.mark.parametrize("left_out", [slice(1, None), slice(1, 2), slice(2, 4)])
def test_an_incomplete_profile_is_refused(left_out: slice) -> None:
    events = list(EVENTS)
    del events[left_out]
    with pytest.raises(RuntimeError, match=r"wanted the same kernels in each of 2 calls, the profiler saw \d in all"):
        split_calls(kernel_runs(events), 2)


def test_times_of_stages_other_kernels_and_gaps_add_up_to_the_call() -> None:
    placed = place_stages(STAGES, WAVE, H200, split_calls(kernel_runs(EVENTS), 2))
    assert {stage.name: (stage.latency_us, stage.kernels) for stage in placed} == {
        "sine": (2.0, ("sin_kernel",)),
        "sort": (None, ()),
        # Not what it waits for the sine; the median of 3 + 2 and 3 + 2.5.
        "cosine": (5.25, ("cos_kernel",)),
        "other": (1.0, ("Memset (Device)",)),
        "between kernels": (1.0, ()),
    }
    assert sum(stage.latency_us or 0.0 for stage in placed) == 9.25
    places = {stage.name: stage.placement for stage in placed}
    assert places["sine"]
    assert places["sort"]
    assert places["sine"].percent_of_roof == pytest.approx(50.0)
    assert places["sort"].roof_us == pytest.approx(0.1)
    assert places["sort"].percent_of_roof is None
    assert places["other"] is places["between kernels"] is None


def test_a_kernel_hidden_behind_the_one_before_takes_no_time() -> None:
    (sine, _, cosine, gaps) = place_stages(STAGES, WAVE, H200, [[KernelRun("sin", 0, 4), KernelRun("cos", 1, 4)]])
    assert (sine.latency_us, cosine.latency_us, gaps.latency_us) == (4.0, 0.0, 0.0)
    assert cosine.placement
    assert cosine.placement.percent_of_roof is None


def test_calls_that_overlap_share_no_time() -> None:
    calls = [[KernelRun("sin", 0, 4)], [KernelRun("sin", 3, 6)]]
    assert place_stages(STAGES, WAVE, H200, calls)[0].latency_us == 3.0


@pytest.mark.parametrize("wrong", [["sine"], ["sine", "tangent"]])
def test_a_wrong_assignment_is_named(wrong: list[str | None]) -> None:
    calls = [[KernelRun("sin", 0, 1), KernelRun("cos", 1, 2)]]
    with pytest.raises(ValueError, match=r"each kernel of \['sin', 'cos'\] one of \['sine', 'sort', 'cosine', None\]"):
        place_stages(Stages(lambda case: COSTS, lambda names: wrong), WAVE, H200, calls)


def install(monkeypatch: pytest.MonkeyPatch, spec: KernelSpec = SPEC, *, gpu: bool = False) -> None:
    monkeypatch.setattr(commands, "_has_gpu", lambda: gpu)
    monkeypatch.setattr(selection, "installed_specs", lambda: {spec.name: spec})


def test_without_a_gpu_the_stages_are_predicted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch)
    assert cli.main(["roofline", "--stages", "--json"]) == selection.OK
    shown = Report.model_validate_json(capsys.readouterr().out)
    assert shown.environment.setting == "prediction"
    (result,) = shown.results
    assert [(stage.name, stage.cost, stage.latency_us) for stage in result.stages] == [
        (name, cost, None) for name, cost in COSTS.items()
    ]
    assert cli.main(["roofline", "--stages"]) == selection.OK
    text = capsys.readouterr().out
    assert "Stages on the roofline, predicted for H200, nothing was run" in text
    assert [line.split("│")[3].strip() for line in text.splitlines() if "tk-waves" in line] == ["the call", *COSTS]
    assert cli.main(["roofline", "--json"]) == selection.OK
    assert Report.model_validate_json(capsys.readouterr().out).results[0].stages == ()


def test_a_kernel_without_stages_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = KernelSpec(**{**vars(SPEC), "stages": None})
    install(monkeypatch, plain)
    assert cli.main(["roofline", "--stages"]) == selection.USAGE
    assert "no stages are described by tk-waves; --stages takes kernels that have them" in capsys.readouterr().err
    for ask in (lambda: predict_stages(plain, [], H200), lambda: time_stages(plain, [], H200)):
        with pytest.raises(ValueError, match="tk-waves describes no stages"):
            ask()


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with an H200, on which a call takes 9.5 µs and the profiler sees the events above."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setattr(device, "current_device", lambda: H200)
    for module in (bench, stages_module):
        monkeypatch.setattr(module, "rotated_inputs", lambda make, device: [{}])
    monkeypatch.setattr(bench, "measure", lambda *_, budget_s: summarise([9.5], 1, "cuda-graph"))
    monkeypatch.setattr(stages_module, "profile", lambda *_: split_calls(kernel_runs(EVENTS), 2))
    install(monkeypatch, gpu=True)


@pytest.mark.usefixtures("with_gpu")
def test_on_a_gpu_the_table_and_the_figure_show_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["roofline", "--stages", "--json"]) == selection.OK
    shown = Report.model_validate_json(capsys.readouterr().out)
    assert shown.environment.setting == "gpu"
    assert cli.main(["roofline", "--stages"]) == selection.OK
    text = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("│")[3:-1]] for line in text.splitlines() if "tk-waves" in line]
    sine = ["sine", "4.8 MB", "4.8 MFLOP", "2 µs", "2.4 TB/s", "2.4 TFLOP/s", "1 µs", "memory", "50 %", "sin_kernel"]
    assert sine in rows
    assert ["other", "–", "–", "1 µs", "–", "–", "–", "–", "–", "Memset (Device)"] in rows
    assert [row[:1] + row[3:4] for row in rows] == [
        ["the call", "9.5 µs"], ["sine", "2 µs"], ["sort", "–"], ["cosine", "5.25 µs"],
        ["other", "1 µs"], ["between kernels", "1 µs"],
    ]  # fmt: skip
    figure = roofline_figure(shown)
    texts = [part.get_text() for part in (*figure.axes[0].texts, *figure.texts)]
    assert "wave, sine (50 % of roof)" in texts
    assert [part for part in texts if part.startswith("1 of 4 cases and stages not drawn")]


@pytest.mark.usefixtures("with_gpu")
def test_a_profile_that_fails_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(stages_module, "profile", fail)
    assert cli.main(["roofline", "--stages"]) == selection.FAILED
    output = capsys.readouterr()
    assert "RuntimeError: no CUPTI" in output.out
    assert "tk-waves wave: RuntimeError: no CUPTI" in output.err


@pytest.mark.usefixtures("with_gpu")
def test_the_interpreter_has_no_stages(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli.main(["roofline", "--stages"]) == selection.CANNOT_RUN
    assert "unset it, or name a card with --gpu" in capsys.readouterr().err


def test_a_stage_above_its_roof_is_a_note() -> None:
    (result,) = predict_stages(SPEC, SPEC.cases.values(), H200)
    calls = [[KernelRun("sin", 0.0, 0.5)]]
    result = result.model_copy(update={"stages": place_stages(STAGES, WAVE, H200, calls)})
    shown = Report(environment=bench.environment("gpu", H200), results=(result,))
    assert [note for note in report.notes(shown) if "the stage sine is faster than the roof" in note]


@pytest.mark.gpu
def test_stages_of_a_captured_call_on_a_gpu() -> None:
    (result,) = time_stages(SPEC, SPEC.cases.values(), device.current_device())
    assert result.error == ""
    assert result.timing is not None
    times = {stage.name: stage.latency_us for stage in result.stages}
    assert list(times) == ["sine", "sort", "cosine", "other", "between kernels"]
    assert times["sort"] is None
    # Three passes over as many bytes.
    passes = [times[name] or 0.0 for name in ("sine", "cosine", "other")]
    assert 0 < max(passes) < 3 * min(passes)
    # The profiler delays kernels but makes none faster.
    whole = sum(time or 0.0 for time in times.values())
    assert 0.7 * result.timing.latency_us < whole < 3 * result.timing.latency_us + 20


@pytest.mark.gpu
def test_every_call_of_a_graph_is_profiled_on_a_gpu() -> None:
    sets = [{"x": torch.randn(2**20, device="cuda")} for _ in range(7)]
    calls = profile(run, sets)
    assert len(calls) == 63
    assert {len(call) for call in calls} == {3}
