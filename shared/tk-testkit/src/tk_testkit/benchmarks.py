"""Benchmarks that every kernel package has, written once, for pytest-benchmark: `nox -s bench` runs them.

A package's benchmarks/bench_name.py derives a class::

    class TestHeadlines(SpecBenchmarks):
        spec = SPEC

All are about the package's headline cases. Planning and compilation are timed anywhere, calls and kernels only on
a GPU: on a CPU a call runs the reference or the interpreter, whose times say nothing about a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from tk_kernel_core import aot
from tk_kernel_core.launch import planning
from tk_kernel_core.spec import KernelSpec
from tk_kernel_core.targets import COMPILE_TARGETS, INTERPRETED_TARGET
from tk_kernel_core.timing import Measurement, measure, rotated_inputs

COMPILE_ROUNDS = 3


class _Replay:
    """A clock that goes on by what was measured before, so that pytest-benchmark reports the core timer's samples."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def tk_kernel_core_timing(self) -> float:
        """Return the time in seconds; pytest-benchmark records this name as that of its timer."""
        return self._now_s

    def advance(self, duration_us: float) -> None:
        self._now_s += 1e-6 * duration_us


_replay = _Replay()
_replayed = pytest.mark.benchmark(timer=_replay.tk_kernel_core_timing)


def _report(benchmark: Any, samples_us: tuple[float, ...], **facts: Any) -> None:
    benchmark.extra_info.update(facts)
    samples: Iterator[float] = iter(samples_us)
    benchmark.pedantic(_replay.advance, setup=lambda: ((next(samples),), {}), rounds=len(samples_us))


class SpecBenchmarks:
    """What a package's headline cases cost: to plan, to compile, to call and to run.

    Attributes:
        spec: The package's spec.
    """

    spec: ClassVar[KernelSpec]

    @classmethod
    def headlines(cls) -> list[str]:
        """Return the names of the cases that are benchmarked."""
        return [name for name, case in cls.spec.cases.items() if "headline" in case.tags]

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Run a benchmark with an argument `name` on every headline case, one with `target` on every target."""
        for argument, values in (("name", cls.headlines()), ("target", list(COMPILE_TARGETS))):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, values, scope="class")

    @pytest.fixture
    def benchmark(self, benchmark: Any, request: pytest.FixtureRequest) -> Any:
        """Give every benchmark of every package a table of its own."""
        benchmark.group = f"{self.spec.name} {request.function.__name__.removeprefix('test_')}"
        return benchmark

    @pytest.fixture(scope="class")
    def measurement(self, name: str) -> Measurement:
        """Time a case on the GPU, once for all that is reported of it."""
        case = self.spec.cases[name]
        return measure(self.spec.run, rotated_inputs(lambda seed: self.spec.make_inputs(case, "cuda", seed), "cuda"))

    @pytest.mark.benchmark(max_time=0.5)
    def test_host_time_of_planning_a_first_call(self, benchmark: Any, name: str) -> None:
        """Checks, launch choice and preparation for shapes not seen before, on tensors without memory.

        Neither compilation nor a launch is in it; the launch is described instead, which a real call does not do.
        Later calls find the plan.
        """
        inputs = self.spec.make_inputs(self.spec.cases[name], "meta", 0)

        def plan() -> None:
            with planning(INTERPRETED_TARGET):
                self.spec.run(inputs)

        # Imports triton, once per process.
        plan()
        benchmark(plan)

    @pytest.mark.compiler
    def test_compile_time_of_all_headlines(self, benchmark: Any, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every distinct kernel of the headline cases for one target, nothing taken from a cache; no GPU needed."""
        monkeypatch.setenv("TRITON_ALWAYS_COMPILE", "1")
        architecture = COMPILE_TARGETS[target]
        launches = {
            aot.specialization_key(launch, architecture): launch
            for name in self.headlines()
            for launch in self.spec.launches(self.spec.cases[name], architecture)
        }

        def forget() -> None:
            monkeypatch.setattr(aot, "_compiled", {})

        def compile_all() -> None:
            for launch in launches.values():
                aot.compile_launch(launch, architecture)

        benchmark.extra_info["kernels"] = len(launches)
        benchmark.pedantic(compile_all, setup=forget, rounds=COMPILE_ROUNDS)

    @_replayed
    @pytest.mark.gpu
    def test_host_time_of_a_later_call(self, benchmark: Any, measurement: Measurement) -> None:
        """An eager call whose plan and kernel are there, without waiting for the GPU."""
        assert measurement.host_us is not None
        _report(benchmark, (measurement.host_us,))

    @_replayed
    @pytest.mark.gpu
    def test_kernel_latency(self, benchmark: Any, measurement: Measurement) -> None:
        """Time on the GPU by the core's timer, as `tk-kernels bench` has it."""
        _report(benchmark, measurement.samples_us, method=measurement.method, note=measurement.note)
