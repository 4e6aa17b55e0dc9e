"""When a difference between two commits counts, and how the noise floor is made that it has to rise above."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from asv._stats import is_different
from asv_runner.statistics import quantile
from pydantic import BaseModel, ConfigDict, Field

from gate_results import Comparison, Pair

Verdict = Literal["ok", "improvement", "regression", "no data", "error"]
RowVerdict = Literal["ok", "improvement", "regression", "change", "shown", "skipped"]

EXIT_CODES: dict[Verdict, int] = {"ok": 0, "improvement": 0, "regression": 10, "no data": 20, "error": 30}

LEAST_FLOOR = 0.03
"""Relative change that is never judged, even where the spread is smaller."""

SPREADS = 3
"""The floor in units of the spread."""

LEAST_CHANGE_US = 0.5
"""Change of a time that is never judged, in microseconds."""


class Floor(BaseModel):
    """The noise of a machine, from A/A runs: two commits with the same tree, measured as any two commits are.

    Attributes:
        format: Version of this file's format.
        environment: Machine, GPU, driver and versions of the runs.
        runs: Number of A/A runs.
        judged: Latencies judged in all runs together, each run by the floor that the other runs make.
        alarms: How many of them were called a regression or an improvement: all of these were false.
        spread: Largest relative difference between the medians of the two sides in any run, by benchmark.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    environment: dict[str, str]
    runs: Annotated[int, Field(ge=1)]
    judged: Annotated[int, Field(ge=0)]
    alarms: Annotated[int, Field(ge=0)]
    spread: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]

    @classmethod
    def load(cls, file: Path) -> Floor:
        """Read a floor file.

        Raises:
            OSError: There is no such file.
            ValueError: It is not a floor file.
        """
        return cls.model_validate_json(file.read_text())


@dataclass(frozen=True)
class Side:
    """One side of a row: median, half the distance between the quartiles, number of samples."""

    value: float
    spread: float | None = None
    samples: int = 0


@dataclass(frozen=True)
class Row:
    """What was found of a benchmark at one set of parameters.

    Attributes:
        name: Benchmark and parameters.
        unit: Unit of the figures.
        base: Figure of the commit compared with; None where skipped.
        head: Figure of the commit judged; None where skipped.
        ratio: `head` over `base`; None where there is none.
        floor: Relative change that a difference must exceed; None where differences are exact or not judged.
        differs: What asv's statistical test says by itself; None where there are no samples.
        decides: Whether it takes part in the verdict.
        verdict: `change` is a difference that does not decide, `shown` is a figure that nothing judges.
    """

    name: str
    unit: str
    base: Side | None
    head: Side | None
    ratio: float | None
    floor: float | None
    differs: bool | None
    decides: bool
    verdict: RowVerdict


def decide(base: Sequence[float], head: Sequence[float], floor: float) -> tuple[bool, RowVerdict]:
    """Judge one time: returns what asv's test says by itself, and the verdict.

    Args:
        base: Samples of the commit compared with, in microseconds.
        head: Samples of the commit judged, in microseconds.
        floor: Relative change that is noise.
    """
    # The test falls back to confidence intervals only with fewer samples than any side here has.
    differs = bool(is_different(base, head, None, None))
    before, after = statistics.median(base), statistics.median(head)
    if not differs or abs(after - before) <= LEAST_CHANGE_US:
        return differs, "ok"
    if after > before * (1 + floor):
        return differs, "regression"
    return differs, "improvement" if before > after * (1 + floor) else "ok"


def judge(compared: Comparison, floor: Floor | None) -> list[Row]:
    """Judge everything that both sides have; without a floor, the least one holds."""
    return [_row(pair, floor) for pair in compared.pairs]


def _row(pair: Pair, floor: Floor | None) -> Row:
    if pair.base.state == "skipped":
        return Row(pair.name, pair.unit, None, None, None, None, None, False, "skipped")
    verdict: RowVerdict
    if pair.is_timed:
        base, head = _side(pair.base.samples), _side(pair.head.samples)
        limit = max(LEAST_FLOOR, SPREADS * (floor.spread.get(pair.name, 0.0) if floor else 0.0))
        differs, verdict = decide(pair.base.samples, pair.head.samples, limit)
        if verdict != "ok" and not pair.is_latency:
            verdict = "change"
        return Row(pair.name, pair.unit, base, head, head.value / base.value, limit, differs, pair.is_latency, verdict)

    base, head = Side(pair.base.value), Side(pair.head.value)
    if not pair.is_exact:
        verdict = "shown"
    elif base.value == head.value:
        verdict = "ok"
    elif pair.benchmark.endswith(".track_spill_bytes"):
        verdict = "regression" if head.value > base.value else "improvement"
    else:
        verdict = "change"
    ratio = head.value / base.value if base.value else None
    return Row(pair.name, pair.unit, base, head, ratio, None, None, pair.is_exact, verdict)


def _side(samples: Sequence[float]) -> Side:
    spread = (quantile(samples, 0.75) - quantile(samples, 0.25)) / 2
    return Side(statistics.median(samples), spread, len(samples))


def overall(compared: Comparison, rows: Sequence[Row]) -> Verdict:
    """Return the verdict over everything: the first that holds of error, regression, no data, improvement, ok."""
    refusals = {problem.verdict for problem in compared.problems}
    deciding = [row.verdict for row in rows if row.decides]
    if "error" in refusals:
        return "error"
    if "regression" in deciding:
        return "regression"
    if refusals or not deciding:
        return "no data"
    return "improvement" if "improvement" in deciding else "ok"


def alarms(rows: Sequence[Row]) -> tuple[int, int, int]:
    """Count the latencies judged, those called changed, and those that asv's test alone would have called so."""
    judged = [row for row in rows if row.decides and row.differs is not None]
    changed = [row for row in judged if row.verdict != "ok"]
    return len(judged), len(changed), len([row for row in judged if row.differs])


def make_floor(runs: Sequence[Comparison]) -> Floor:
    """Make the noise floor from A/A runs without problems, and count their false alarms.

    Raises:
        ValueError: The runs' environments differ.
    """
    first = runs[0].environment
    for number, run in enumerate(runs[1:], start=2):
        for key in sorted(first.keys() | run.environment.keys()):
            if first.get(key) != run.environment.get(key):
                raise ValueError(
                    f"{key} differs: {first.get(key)} in run 1, {run.environment.get(key)} in run {number}"
                )
    judged = false = 0
    for run in runs:
        others = [other for other in runs if other is not run]
        floor = (
            Floor(environment=first, runs=len(others), judged=0, alarms=0, spread=_spread(others)) if others else None
        )
        counted = alarms(judge(run, floor))
        judged, false = judged + counted[0], false + counted[1]
    return Floor(environment=first, runs=len(runs), judged=judged, alarms=false, spread=_spread(runs))


def _spread(runs: Sequence[Comparison]) -> dict[str, float]:
    spread: dict[str, float] = {}
    for row in (row for run in runs for row in judge(run, None)):
        if row.differs is not None and row.ratio is not None:
            spread[row.name] = max(spread.get(row.name, 0.0), row.ratio - 1, 1 / row.ratio - 1)
    return dict(sorted(spread.items()))
