"""What `asv continuous` has left of two commits, read by asv's own loader; what cannot be compared is refused.

asv writes a failed benchmark as null and a skipped one as NaN, and passes over files that it cannot read. A gate may
pass over nothing: here each of these becomes a problem with a message and a verdict.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from asv.benchmarks import Benchmarks
from asv.machine import Machine
from asv.results import Results
from asv.util import UserError, load_json

Refusal = Literal["no data", "error"]
State = Literal["measured", "skipped", "failed", "absent"]

MIN_SAMPLES = 7
"""Fewest samples a side: asv's test calls no difference significant, however large, between six and six."""

TIMING_FACTS = ("gpu", "driver", "torch", "triton")
"""What must be known of the machine and the environment before times are compared."""

# What asv's loader and the code below raise on files of another structure.
_MALFORMED = (UserError, OSError, ValueError, TypeError, KeyError, AttributeError, IndexError)


@dataclass(frozen=True)
class Problem:
    """Why two commits cannot be compared: the verdict, and the reason in words."""

    verdict: Refusal
    message: str


@dataclass(frozen=True)
class Figure:
    """One side of a benchmark at one set of parameters."""

    state: State
    value: Any = None
    samples: tuple[float, ...] = ()


@dataclass(frozen=True)
class Pair:
    """A benchmark at one set of parameters, on both sides."""

    benchmark: str
    parameters: tuple[str, ...]
    unit: str
    base: Figure
    head: Figure

    @property
    def name(self) -> str:
        """The name as asv writes it, without quotation marks: `gpu.Kernels.track_latency_us(tk-rmsnorm smoke)`."""
        return f"{self.benchmark}({', '.join(self.parameters)})" if self.parameters else self.benchmark

    @property
    def is_latency(self) -> bool:
        """Whether this is the time of a kernel, which statistics judge and which decides the verdict."""
        return self.benchmark.endswith(".track_latency_us")

    @property
    def is_timed(self) -> bool:
        """Whether statistics can judge it."""
        return bool(self.base.samples and self.head.samples)

    @property
    def is_exact(self) -> bool:
        """Whether this was read off machine code, where any difference is real."""
        return self.benchmark.startswith("resources.")


@dataclass
class Comparison:
    """The results of both commits.

    Attributes:
        environment: Machine, GPU, driver and versions; the same on both sides.
        pairs: What both sides measured, or both skipped.
        problems: All that forbids a comparison.
    """

    environment: dict[str, str] = field(default_factory=dict)
    pairs: list[Pair] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def refuse(self, message: str, verdict: Refusal = "error") -> None:
        """Add a problem."""
        self.problems.append(Problem(verdict, message))


def result_files(folder: Path) -> list[Path]:
    """Return the result files under `folder`, one per commit and environment."""
    return sorted(file for file in folder.glob("*/*.json") if file.name != "machine.json")


def commits_in(folder: Path) -> list[str]:
    """Return the commits that `folder` holds results of.

    Raises:
        ValueError: A file is not a result file of asv.
    """
    try:
        return sorted({str(Results.load(str(file)).commit_hash) for file in result_files(folder)})
    except _MALFORMED as error:
        raise ValueError(_words(error)) from error


def read(folder: Path, base: str, head: str) -> Comparison:
    """Read the results of two commits.

    Args:
        folder: What `results_dir` of asv.conf.json was when asv ran; it holds these two commits and no other.
        base: Full hash of the commit compared with.
        head: Full hash of the commit that is judged.
    """
    found = Comparison()
    files = result_files(folder)
    if not files:
        found.refuse(f"{folder} holds no results", "no data")
        return found
    machines = sorted({file.parent.name for file in files})
    if len(machines) > 1:
        found.refuse(f"results of several machines cannot be compared: {', '.join(machines)}")

    sides: dict[str, list[Results]] = {"base": [], "head": []}
    for file in files:
        try:
            results = Results.load(str(file), machine_name=file.parent.name)
        except _MALFORMED as error:
            found.refuse(f"{file.name} is not a result file of asv: {_words(error)}")
            continue
        names = [name for name, commit in (("base", base), ("head", head)) if commit == results.commit_hash]
        if not names:
            found.refuse(f"{file.name} is of the unknown commit {results.commit_hash}; wanted {base} and {head}")
        for name in names:
            sides[name].append(results)
    for name, commit in (("base", base), ("head", head)):
        if len(sides[name]) > 1:
            environments = ", ".join(sorted(str(results.env_name) for results in sides[name]))
            found.refuse(f"{name} has results of several environments, one was wanted: {environments}")
        elif not sides[name] and not found.problems:
            found.refuse(f"there are no results of {name}, {commit}", "no data")
    if found.problems:
        return found

    try:
        _compare(folder, sides["base"][0], sides["head"][0], found)
    except _MALFORMED as error:
        found.refuse(f"the results are not as asv writes them: {_words(error)}")
    return found


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _compare(folder: Path, base: Results, head: Results, found: Comparison) -> None:
    _compare_environments(folder / base.params["machine"] / "machine.json", base, head, found)
    known = load_json(str(folder / "benchmarks.json"), Benchmarks.api_version)
    figures = {"base": dict(_figures(base)), "head": dict(_figures(head))}
    states = [figure.state for side in figures.values() for figure in side.values()]
    if not states:
        found.refuse("both sides' results are empty", "no data")
        return
    if set(states) == {"failed"}:
        found.refuse(f"every one of {len(states)} results is null: nothing ran", "no data")
        return

    absent = Figure("absent")
    for key in sorted(figures["base"].keys() | figures["head"].keys()):
        benchmark, parameters = key
        pair = Pair(
            benchmark,
            tuple(parameter.strip("'\"") for parameter in parameters),
            str(known.get(benchmark, {}).get("unit")),
            figures["base"].get(key, absent),
            figures["head"].get(key, absent),
        )
        faults = list(_faults(pair))
        if benchmark not in known:
            faults.append("is not in benchmarks.json")
        versions = [results.benchmark_version.get(benchmark) for results in (base, head)]
        if versions[0] != versions[1] and "absent" not in (pair.base.state, pair.head.state):
            faults.append(f"has version {versions[0]} in base and {versions[1]} in head")
        for fault in faults:
            found.refuse(f"{pair.name} {fault}")
        if not faults:
            found.pairs.append(pair)

    for benchmark, pairs in itertools.groupby(found.pairs, key=lambda pair: pair.benchmark):
        group = list(pairs)
        if (group[0].is_latency or group[0].is_exact) and all(pair.base.state == "skipped" for pair in group):
            found.refuse(f"{benchmark} was skipped on both sides, in all of its {len(group)} cases", "no data")
    if any(pair.is_latency and pair.is_timed for pair in found.pairs):
        for fact in TIMING_FACTS:
            if found.environment.get(fact, "unknown") == "unknown":
                found.refuse(f"the results do not say which {fact} the times were measured with")


def _compare_environments(machine_file: Path, base: Results, head: Results, found: Comparison) -> None:
    described = load_json(str(machine_file), Machine.api_version)
    described.pop("version", None)
    before, after = (
        {**results.params, **results.env_vars, "environment": results.env_name} for results in (base, head)
    )
    found.environment = {key: str(value) for key, value in sorted(after.items())}
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            found.refuse(f"{key} differs: {before.get(key)} in base, {after.get(key)} in head")
        elif key in described and described[key] != after[key]:
            found.refuse(f"{key} differs: {described[key]} in machine.json, {after[key]} in the results")


def _figures(results: Results) -> Iterator[tuple[tuple[str, tuple[str, ...]], Figure]]:
    """Yield benchmark, parameters and figure of everything in a result file."""
    for benchmark in results.get_all_result_keys():
        parameters = results.get_result_params(benchmark)
        values = results.get_result_value(benchmark, parameters)
        samples = results.get_result_samples(benchmark, parameters)
        for combination, value, taken in zip(itertools.product(*parameters), values, samples, strict=True):
            if value is None:
                figure = Figure("failed")
            elif taken is None and isinstance(value, float) and math.isnan(value):
                figure = Figure("skipped")
            else:
                figure = Figure("measured", value, tuple(taken or ()))
            yield (benchmark, combination), figure


def _faults(pair: Pair) -> Iterator[str]:
    """Say in words what forbids comparing the sides of a pair."""
    sides = (("base", pair.base), ("head", pair.head))
    states = {figure.state for _, figure in sides}
    for name, figure in sides:
        if figure.state == "failed":
            yield f"failed in {name}"
    if "failed" not in states and len(states) > 1:
        yield f"is on one side only: {pair.base.state} in base, {pair.head.state} in head"
    if states != {"measured"}:
        return
    for name, figure in sides:
        if not _is_number(figure.value) or figure.value < 0:
            yield f"must be a finite number of 0 or more, got {figure.value!r} in {name}"
        wrong = [sample for sample in figure.samples if not _is_number(sample) or sample <= 0]
        if wrong:
            yield f"must have finite samples above 0, got {wrong[0]!r} in {name}"
        if len(figure.samples) < MIN_SAMPLES and (pair.is_latency or figure.samples):
            yield f"needs at least {MIN_SAMPLES} samples a side, got {len(figure.samples)} in {name}"
    counts = [len(figure.samples) for _, figure in sides]
    if counts[0] != counts[1]:
        # asv drops what it had when a round fails, and takes the rounds after it.
        yield f"has {counts[0]} samples in base and {counts[1]} in head: a round has failed"
    if pair.is_latency and pair.unit != "us":
        yield f"must be in us, got {pair.unit}"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
