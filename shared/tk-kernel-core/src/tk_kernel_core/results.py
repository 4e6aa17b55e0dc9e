"""The records of what checking and timing kernels found out, and their JSON."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter

from tk_kernel_core.device import DeviceInfo
from tk_kernel_core.roofline import Placement
from tk_kernel_core.spec import CaseValue, Cost
from tk_kernel_core.timing import Measurement

Setting = Literal["gpu", "interpreter", "prediction"]
"""Kernels run on a GPU, run in Triton's interpreter on a CPU, or do not run at all."""

_PLAIN_VALUES: TypeAdapter[Any] = TypeAdapter(Any, config=ConfigDict(ser_json_inf_nan="strings"))


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Environment(_Record):
    """Where and when results were made.

    Attributes:
        setting: Whether kernels ran on a GPU, in the interpreter, or not at all.
        device: The GPU that ran; without one, the card that predictions are for.
        made_at: UTC.
        python: Version.
        torch: Version.
        triton: Version, None where it is not installed.
        system: Operating system and machine.
        commit: Git commit of the source tree that ran, ending in `-dirty` where files differ from it; None where
            packages are installed from wheels.
    """

    setting: Setting
    device: DeviceInfo
    made_at: datetime
    python: str
    torch: str
    triton: str | None
    system: str
    commit: str | None = None


class CheckResult(_Record):
    """How far a kernel's result on one case lies from its reference.

    Attributes:
        package: Distribution that provides the kernel.
        case: Name of the case.
        params: What was run: the case's own parameters, or the cut-down ones on a CPU.
        passed: Whether every element lies within the tolerance.
        largest_error: Largest absolute difference; infinite where only one side is finite; None where
            nothing could be compared.
        error_over_tolerance: Largest difference as a multiple of what is accepted at its element.
        message: Why the check failed; empty when it passed.
    """

    package: str
    case: str
    params: Mapping[str, CaseValue]
    passed: bool
    largest_error: float | None = None
    error_over_tolerance: float | None = None
    message: str = ""


class Timing(_Record):
    """Times of one contender over all rounds.

    Attributes:
        latency_us: Median over the samples of all rounds.
        spread_us: Interquartile range over the samples of all rounds.
        host_us: Median host time of one eager call, where it was measured.
        rounds: The measurement of each round.
    """

    latency_us: float
    spread_us: float
    host_us: float | None
    rounds: tuple[Measurement, ...]


class BaselineResult(_Record):
    """A baseline beside the kernel.

    Attributes:
        name: Name of the baseline.
        timing: Its times; None where it could not run.
        unavailable: Why it could not run.
        ratio: The kernel's time over the baseline's, the median of the rounds' ratios.
        host_ratio: The same of the host time of an eager call; None off a GPU.
        bar: Highest accepted ratio, where the package sets one.
        bar_met: Whether the ratio lies within the bar. None without a bar, without a ratio, and off a GPU.
    """

    name: str
    timing: Timing | None = None
    unavailable: str = ""
    ratio: float | None = None
    host_ratio: float | None = None
    bar: float | None = None
    bar_met: bool | None = None


class StageResult(_Record):
    """One step inside a call.

    Attributes:
        name: Name of the stage; `other` for kernels of no stage, `between kernels` for the time no kernel runs.
        cost: Compulsory work of the stage at full size; None for those two.
        placement: The stage on the roof of the environment's device; the roof alone where it has no time of its
            own. None for those two.
        latency_us: Median over profiled calls; None where no kernel of its own ran, or nothing was run.
        kernels: Names of its kernels, each once, in the order they ran.
    """

    name: str
    cost: Cost | None = None
    placement: Placement | None = None
    latency_us: float | None = None
    kernels: tuple[str, ...] = ()


class BenchResult(_Record):
    """One case of a kernel on the roofline, with its times and its baselines' where they were measured.

    Attributes:
        package: Distribution that provides the kernel.
        case: Name of the case.
        source: The model and layer the case is taken from.
        params: What was run: the case's own parameters, or the cut-down ones on a CPU.
        cost: Compulsory work of the case at full size.
        placement: The case at full size on the roof of the environment's device. Without a GPU it holds the
            roof alone.
        timing: The kernel's times; None where it was not run or failed.
        baselines: Every baseline, also those that could not run.
        error: Why the kernel has no times although it was run.
        stages: The steps inside the call, where they were asked for.
    """

    package: str
    case: str
    source: str
    params: Mapping[str, CaseValue]
    cost: Cost
    placement: Placement
    timing: Timing | None = None
    baselines: tuple[BaselineResult, ...] = ()
    error: str = ""
    stages: tuple[StageResult, ...] = ()


class Report(_Record):
    """Everything one command found out."""

    environment: Environment
    checks: tuple[CheckResult, ...] = ()
    results: tuple[BenchResult, ...] = ()

    def to_json(self) -> str:
        """Return the report as JSON; `Report.model_validate_json` restores it, infinities and NaN included."""
        # As plain values first: models nested in this one have their own ways with infinities and NaN.
        return _PLAIN_VALUES.dump_json(self.model_dump(mode="json"), indent=2).decode()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was checked and nothing placed."""
        return not self.checks and not self.results

    @property
    def failures(self) -> list[str]:
        """Every failed check, failed run and missed bar, in words."""
        failed = [f"{check.package} {check.case}: {check.message}" for check in self.checks if not check.passed]
        for result in self.results:
            if result.error:
                failed.append(f"{result.package} {result.case}: {result.error}")
            failed += [
                f"{result.package} {result.case}: {baseline.ratio:.3f} times {baseline.name}, "
                f"the bar is {baseline.bar:g}"
                for baseline in result.baselines
                if baseline.bar_met is False
            ]
        return failed

    @property
    def unjudged_bars(self) -> list[str]:
        """Every bar that could not be judged on this GPU because its baseline could not run, in words."""
        if self.environment.setting != "gpu":
            return []
        return [
            f"{result.package} {result.case}: no ratio to {baseline.name} ({baseline.unavailable})"
            for result in self.results
            for baseline in result.baselines
            if baseline.bar is not None and baseline.bar_met is None and not result.error
        ]
