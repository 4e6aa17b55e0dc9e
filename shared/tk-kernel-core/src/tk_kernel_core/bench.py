"""Checking and timing kernels from their specs alone."""

from __future__ import annotations

import math
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tk_kernel_core.results import BaselineResult, BenchResult, CheckResult, Environment, Setting, Timing
from tk_kernel_core.roofline import place
from tk_kernel_core.spec import BaselineUnavailable, Case, Inputs, KernelSpec, Tolerance
from tk_kernel_core.timing import Measurement, measure, rotated_inputs, summarise

if TYPE_CHECKING:
    from tk_kernel_core.device import DeviceInfo

Progress = Callable[[str], None]
"""Is told what is about to run, once per case."""

GPU_ROUNDS = 3
"""Kernel and baselines take turns this often, so that a drifting clock favours none of them."""

GPU_ROUND_S = 0.17
INTERPRETER_ROUND_S = 0.02


def environment(setting: Setting, device: DeviceInfo) -> Environment:
    """Describe this machine.

    Args:
        setting: How kernels run.
        device: The GPU here, or the card that predictions are for.
    """
    return Environment(
        setting=setting,
        device=device,
        made_at=datetime.now(timezone.utc),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=_triton_version(),
        system=f"{platform.system()} {platform.machine()}",
        commit=_commit_of(Path(__file__)),
    )


def check_kernel(
    spec: KernelSpec, cases: Iterable[Case], device: str, progress: Progress | None = None
) -> list[CheckResult]:
    """Compare a kernel with its reference.

    Args:
        spec: The kernel.
        cases: Cases to run; on a CPU each is cut down with `spec.shrink` first.
        device: Where to run, `cuda` or `cpu`.
        progress: Is told about every case before it runs.

    Returns:
        One result per case. An exception in a case is that case's failed result.
    """
    return [_check_case(spec, case, device) for case in _announced(spec, cases, progress)]


def bench_kernel(
    spec: KernelSpec,
    cases: Iterable[Case],
    device: str,
    card: DeviceInfo,
    baselines: Iterable[str] | None = None,
    progress: Progress | None = None,
) -> list[BenchResult]:
    """Time a kernel and its baselines in turns, and place the kernel on the roof.

    Args:
        spec: The kernel.
        cases: Cases to run; on a CPU each is cut down with `spec.shrink` first.
        device: Where to run, `cuda` or `cpu`.
        card: The GPU that `cuda` is; for `cpu`, the card whose roof is shown.
        baselines: Names of the baselines to time, all of them by default.
        progress: Is told about every case before it runs.

    Returns:
        One result per case. An exception in a case is recorded in its result.

    Raises:
        ValueError: A baseline, or a bar of the spec, names a case or baseline that the spec lacks.
    """
    _check_bars(spec)
    names = tuple(spec.baselines) if baselines is None else tuple(baselines)
    for name in names:
        if name not in spec.baselines:
            raise ValueError(f"baselines of {spec.name} are {sorted(spec.baselines)}, got {name!r}")
    return [_bench_case(spec, case, device, card, names) for case in _announced(spec, cases, progress)]


def predict_kernel(spec: KernelSpec, cases: Iterable[Case], card: DeviceInfo) -> list[BenchResult]:
    """Place a kernel's cases on a card's roof without running anything.

    Args:
        spec: The kernel.
        cases: Cases to place.
        card: The card.
    """
    return [_unmeasured(spec, case, card) for case in cases]


def compare(got: Any, want: Any, tolerance: Tolerance) -> tuple[float, float]:
    """Measure how far a result lies from its reference.

    Args:
        got: The result: a tensor or a tuple of tensors.
        want: The reference, of the same shapes.
        tolerance: What is accepted of floating-point values; integers and flags must be equal.

    Returns:
        The largest absolute difference, and the largest difference as a multiple of what is accepted at its
        element; at most 1 means that `got` is right. A NaN or an infinity that only one side has is
        infinitely far.

    Raises:
        ValueError: There is nothing to compare, or the number of tensors or their shapes differ.
    """
    got, want = _tensors(got), _tensors(want)
    if not want or len(got) != len(want):
        raise ValueError(f"wanted {len(want)} result tensors, got {len(got)}")
    worst = multiple = 0.0
    for index, (result, reference) in enumerate(zip(got, want, strict=True)):
        if result.shape != reference.shape:
            raise ValueError(f"result {index} must have shape {tuple(reference.shape)}, got {tuple(result.shape)}")
        if reference.numel() == 0:
            continue
        inexact = result.is_floating_point() and reference.is_floating_point()
        absolute, relative = (tolerance.absolute, tolerance.relative) if inexact else (0.0, 0.0)
        result, reference = result.detach().double(), reference.detach().double().to(result.device)
        same = (result == reference) | (result.isnan() & reference.isnan())
        distance = (result - reference).abs().masked_fill_(same, 0.0).nan_to_num_(nan=math.inf, posinf=math.inf)
        # Equal elements count as 0 even where nothing is accepted; 0 / 0 and infinity / infinity are NaN.
        ratio = (distance / (absolute + relative * reference.abs())).masked_fill_(same, 0.0)
        worst = max(worst, distance.max().item())
        multiple = max(multiple, ratio.nan_to_num_(nan=math.inf, posinf=math.inf).max().item())
    return worst, multiple


def _check_case(spec: KernelSpec, case: Case, device: str) -> CheckResult:
    params = dict(case.params)
    try:
        run = _case_to_run(spec, case, device)
        params = dict(run.params)
        got = spec.run(spec.make_inputs(run, device, 0))
        # Inputs of its own, because a kernel may work in place.
        want = spec.reference(spec.make_inputs(run, device, 0))
        error, multiple = compare(got, want, spec.tolerance(run))
    except Exception as problem:  # noqa: BLE001 - whatever a kernel raises is its failed check
        return CheckResult(package=spec.name, case=case.name, params=params, passed=False, message=_in_words(problem))
    passed = multiple <= 1.0
    message = "" if passed else f"the largest error is {error:.3g}, {multiple:.3g} times what is accepted"
    return CheckResult(
        package=spec.name,
        case=case.name,
        params=params,
        passed=passed,
        largest_error=error,
        error_over_tolerance=multiple,
        message=message,
    )


def _bench_case(spec: KernelSpec, case: Case, device: str, card: DeviceInfo, baselines: tuple[str, ...]) -> BenchResult:
    on_gpu = device != "cpu"
    unmeasured = _unmeasured(spec, case, card)
    try:
        run = _case_to_run(spec, case, device)
        input_sets = rotated_inputs(lambda seed: spec.make_inputs(run, device, seed), device)
        kernel, others, refused = _take_turns(spec, input_sets, baselines, on_gpu)
    except Exception as problem:  # noqa: BLE001 - whatever a kernel raises is recorded
        return unmeasured.model_copy(update={"error": _in_words(problem)})
    timing = _pooled(kernel)
    bars = spec.bars.get(case.name, {})
    compared = tuple(
        BaselineResult(name=name, unavailable=refused[name], bar=bars.get(name))
        if name in refused
        else _against(name, kernel, others[name], bars.get(name), on_gpu)
        for name in baselines
    )
    return unmeasured.model_copy(
        update={
            "params": dict(run.params),
            "placement": place(unmeasured.cost, card, timing.latency_us if on_gpu else None),
            "timing": timing,
            "baselines": compared,
        }
    )


def _take_turns(
    spec: KernelSpec, input_sets: list[Inputs], baselines: tuple[str, ...], on_gpu: bool
) -> tuple[list[Measurement], dict[str, list[Measurement]], dict[str, str]]:
    """Return the rounds of the kernel, those of each baseline, and why a baseline could not run."""
    kernel: list[Measurement] = []
    others: dict[str, list[Measurement]] = {name: [] for name in baselines}
    refused: dict[str, str] = {}
    budget_s = GPU_ROUND_S if on_gpu else INTERPRETER_ROUND_S
    # A kernel alone has nobody to take turns with.
    for _ in range(GPU_ROUNDS if on_gpu and baselines else 1):
        kernel.append(measure(spec.run, input_sets, budget_s=budget_s))
        for name in baselines:
            if name in refused:
                continue
            try:
                others[name].append(measure(spec.baselines[name], input_sets, budget_s=budget_s))
            except BaselineUnavailable as reason:
                refused[name] = str(reason) or "no reason given"
            except Exception as problem:  # noqa: BLE001 - a broken baseline stops no kernel
                refused[name] = _in_words(problem)
    return kernel, others, refused


def _against(
    name: str, kernel: list[Measurement], baseline: list[Measurement], bar: float | None, on_gpu: bool
) -> BaselineResult:
    rounds = list(zip(kernel, baseline, strict=True))
    ratio = statistics.median(mine.latency_us / other.latency_us for mine, other in rounds)
    hosts = [mine.host_us / other.host_us for mine, other in rounds if mine.host_us and other.host_us]
    # A comparison with NaN is false, so a bar is never met by one.
    met = ratio <= bar if bar is not None and on_gpu else None
    return BaselineResult(
        name=name,
        timing=_pooled(baseline),
        ratio=ratio,
        host_ratio=statistics.median(hosts) if hosts else None,
        bar=bar,
        bar_met=met,
    )


def _pooled(rounds: list[Measurement]) -> Timing:
    samples = [sample for measured in rounds for sample in measured.samples_us]
    whole = summarise(samples, rounds[0].calls_per_sample, rounds[0].method)
    host = [measured.host_us for measured in rounds if measured.host_us is not None]
    return Timing(
        latency_us=whole.latency_us,
        spread_us=whole.spread_us,
        host_us=statistics.median(host) if host else None,
        rounds=tuple(rounds),
    )


def _unmeasured(spec: KernelSpec, case: Case, card: DeviceInfo) -> BenchResult:
    cost = spec.cost(case)
    return BenchResult(
        package=spec.name,
        case=case.name,
        source=case.source,
        params=dict(case.params),
        cost=cost,
        placement=place(cost, card, None),
    )


def _check_bars(spec: KernelSpec) -> None:
    for case, bars in spec.bars.items():
        if case not in spec.cases:
            raise ValueError(f"{spec.name} sets a bar for the case {case!r}, which it lacks")
        for baseline in bars:
            if baseline not in spec.baselines:
                raise ValueError(f"{spec.name} sets a bar against the baseline {baseline!r}, which it lacks")


def _announced(spec: KernelSpec, cases: Iterable[Case], progress: Progress | None) -> Iterable[Case]:
    for case in cases:
        if progress is not None:
            progress(f"{spec.name} {case.name}")
        yield case


def _case_to_run(spec: KernelSpec, case: Case, device: str) -> Case:
    return spec.shrink(case) if device == "cpu" else case


def _tensors(result: Any) -> tuple[torch.Tensor, ...]:
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)


def _in_words(problem: Exception) -> str:
    return f"{type(problem).__name__}: {problem}"


def _triton_version() -> str | None:
    # ROCm builds of PyTorch bring Triton along under another distribution name.
    for name in ("triton", "triton-rocm", "pytorch-triton-rocm"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _commit_of(file: Path) -> str | None:
    """Return the commit that a file is checked out from, with `-dirty` after local changes; None outside Git."""
    git = ["git", "-C", str(file.parent)]
    # An installed package may lie inside a checkout of something else, which does not track it.
    tracked, described = ["ls-files", "--error-unmatch", file.name], ["describe", "--always", "--abbrev=40", "--dirty"]
    try:
        subprocess.run([*git, *tracked], capture_output=True, check=True)
        command = [*git, *described, "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
