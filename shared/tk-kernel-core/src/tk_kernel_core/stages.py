"""The steps inside one call: which kernels ran, how long each took, and where each step lies on the roofline.

Times are those of a captured call, as a profiler saw its kernels in replays of the graph. Kernels may overlap:
one that is launched early waits, on the GPU, for the one before it. So a kernel's time runs from the end of all
kernels before it, or from its own start if that is later, to its end. These times and the gaps between kernels
add up to the call.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tk_kernel_core.bench import Progress, bench_kernel, predict_kernel
from tk_kernel_core.results import BenchResult, StageResult
from tk_kernel_core.roofline import place
from tk_kernel_core.spec import Case, Inputs, KernelSpec, Stages
from tk_kernel_core.timing import capture, rotated_inputs

if TYPE_CHECKING:
    from tk_kernel_core.device import DeviceInfo

OTHER = "other"
"""Kernels that belong to no stage."""

GAPS = "between kernels"
"""Time within a call in which no kernel runs."""

PROFILED_CALLS = 60
"""At least as many calls are profiled."""


class KernelRun(NamedTuple):
    """One run of a kernel on the GPU, by a clock of the profiler, in microseconds."""

    name: str
    start_us: float
    end_us: float


def predict_stages(spec: KernelSpec, cases: Iterable[Case], card: DeviceInfo) -> list[BenchResult]:
    """Place a kernel's cases and their stages on a card's roof without running anything.

    Args:
        spec: The kernel.
        cases: Cases to place.
        card: The card.

    Raises:
        ValueError: The spec describes no stages.
    """
    stages, results = _stages_of(spec), []
    for case in cases:
        (result,) = predict_kernel(spec, [case], card)
        results.append(result.model_copy(update={"stages": place_stages(stages, case, card)}))
    return results


def time_stages(
    spec: KernelSpec, cases: Iterable[Case], card: DeviceInfo, progress: Progress | None = None
) -> list[BenchResult]:
    """Time a kernel's cases on the GPU as `bench_kernel` does, without baselines, and the stages inside a call.

    Args:
        spec: The kernel.
        cases: Cases to run.
        card: The GPU.
        progress: Is told about every case before it runs.

    Returns:
        One result per case. An exception in a case is recorded in its result.

    Raises:
        ValueError: The spec describes no stages.
    """
    stages, results = _stages_of(spec), []
    for case in cases:
        (result,) = bench_kernel(spec, [case], "cuda", card, (), progress)
        if not result.error:
            make = functools.partial(spec.make_inputs, case, "cuda")
            try:
                calls = profile(spec.run, rotated_inputs(make, "cuda"))
                result = result.model_copy(update={"stages": place_stages(stages, case, card, calls)})
            except Exception as problem:  # noqa: BLE001 - whatever a kernel or its profile raises is recorded
                result = result.model_copy(update={"error": f"{type(problem).__name__}: {problem}"})
        results.append(result)
    return results


def profile(function: Callable[[Inputs], Any], input_sets: Sequence[Inputs]) -> list[list[KernelRun]]:
    """Return the kernels of captured calls on each of the input sets in turn, several times, call by call.

    Args:
        function: Called with one input set.
        input_sets: At least one set; all of one shape, on the current GPU.

    Raises:
        RuntimeError: The profiler saw no kernels, or not the same in each call.
    """
    activities = [torch.profiler.ProfilerActivity.CUDA]
    # A graph that is captured before CUPTI is first used may be seen as a whole, or not at all.
    with torch.profiler.profile(activities=activities, acc_events=True):
        for inputs in input_sets:
            function(inputs)
        torch.cuda.synchronize()
    replay = capture(function, input_sets)
    n_replays = -(-PROFILED_CALLS // len(input_sets))
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        for _ in range(n_replays):
            replay()
        torch.cuda.synchronize()
    return split_calls(kernel_runs(profiler.events()), n_replays * len(input_sets))


def kernel_runs(events: Iterable[Any]) -> list[KernelRun]:
    """Return what ran on the GPU, copies and fills included, in the order it began.

    Args:
        events: As `torch.profiler.profile.events` gives them; those of the host are passed over.
    """
    runs = (
        # AMD's tools name a kernel by its descriptor.
        KernelRun(event.name.removesuffix(".kd"), event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type != torch._C._autograd.DeviceType.CPU
    )
    return sorted(runs, key=lambda run: run[1:])


def split_calls(runs: Sequence[KernelRun], n_calls: int) -> list[list[KernelRun]]:
    """Cut the runs of equal calls into calls.

    Raises:
        RuntimeError: There are no runs, or not the same in each call.
    """
    size, left_over = divmod(len(runs), n_calls)
    calls = [list(runs[call * size : (call + 1) * size]) for call in range(n_calls)]
    if not size or left_over or any([run.name for run in call] != [run.name for run in calls[0]] for call in calls):
        raise RuntimeError(f"wanted the same kernels in each of {n_calls} calls, the profiler saw {len(runs)} in all")
    return calls


def place_stages(
    stages: Stages, case: Case, card: DeviceInfo, calls: Sequence[Sequence[KernelRun]] = ()
) -> tuple[StageResult, ...]:
    """Place stages on the roof, by the median time of each over calls.

    Args:
        stages: The stages.
        case: The case.
        card: The card.
        calls: The kernels of each call, the same in all; none gives the roofs alone.

    Returns:
        The stages in the order of their costs; then, where there are calls, kernels of no stage, if any, and the
        time between kernels.

    Raises:
        ValueError: A kernel is assigned to a stage that has no cost, or not every kernel is assigned.
    """
    costs = stages.cost(case)
    names = [run.name for run in calls[0]] if calls else []
    assigned = list(stages.assign(names)) if calls else []
    if len(assigned) != len(names) or not set(assigned) <= {*costs, None}:
        raise ValueError(f"wanted for each kernel of {names} one of {[*costs, None]}, got {assigned}")
    owners = [stage or OTHER for stage in assigned]
    times = _times(calls, owners)
    results = []
    for name in (*costs, *(name for name in (OTHER, GAPS) if name in times)):
        cost, latency_us = costs.get(name), times.get(name)
        # A kernel that ends no later than those before it takes no time of its own.
        placement = place(cost, card, latency_us or None) if cost else None
        kernels = tuple(dict.fromkeys(run for run, owner in zip(names, owners, strict=True) if owner == name))
        results.append(StageResult(name=name, cost=cost, placement=placement, latency_us=latency_us, kernels=kernels))
    return tuple(results)


def _times(calls: Sequence[Sequence[KernelRun]], owners: Sequence[str]) -> dict[str, float]:
    """Return the median over calls of the time of each owner's kernels, and of the gaps."""
    samples: dict[str, list[float]] = {name: [] for name in (*owners, GAPS)} if calls else {}
    reached = -math.inf
    for call in calls:
        sample = dict.fromkeys(samples, 0.0)
        reached = max(reached, call[0].start_us)
        for run, owner in zip(call, owners, strict=True):
            sample[GAPS] += max(0.0, run.start_us - reached)
            sample[owner] += max(0.0, run.end_us - max(run.start_us, reached))
            reached = max(reached, run.end_us)
        for name, time_us in sample.items():
            samples[name].append(time_us)
    return {name: statistics.median(values) for name, values in samples.items()}


def _stages_of(spec: KernelSpec) -> Stages:
    if spec.stages is None:
        raise ValueError(f"{spec.name} describes no stages")
    return spec.stages
