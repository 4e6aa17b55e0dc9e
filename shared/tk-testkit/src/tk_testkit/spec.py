"""Tests that every kernel package's spec must pass, written once.

A package's tests/test_spec.py derives a class, which pytest collects with all of them::

    class TestSpec(SpecTests):
        spec = SPEC
        budget = Path(__file__).parents[1] / "perf_budget.json"
        unseen = ("eps", 1.1e-6)

What does not hold for a package is overridden there, with the reason.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tk_kernel_core.bench import check_kernel
from tk_kernel_core.budget import check_budget, load_budget
from tk_kernel_core.device import known_device
from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.launch import KernelLaunch, launch_target, planning, recording
from tk_kernel_core.resources import report_resources
from tk_kernel_core.roofline import roof_us
from tk_kernel_core.spec import CaseValue, Inputs, KernelSpec
from tk_kernel_core.targets import COMPILE_TARGETS
from tk_kernel_core.timing import bytes_in
from tk_testkit.close import assert_close
from tk_testkit.plugin import kernel_device


def runs_kernels(device: str) -> bool:
    """Whether calls on a device launch kernels here; otherwise the reference serves them."""
    return device != "cpu" or interpreting()


class SpecTests:
    """What a package tells the tools is what it does, and its machine code keeps its budget.

    Attributes:
        spec: The package's spec.
        budget: The package's perf_budget.json.
        unseen: A parameter and a value that no case gives it: a call with it is planned anew.
    """

    spec: ClassVar[KernelSpec]
    budget: ClassVar[Path]
    unseen: ClassVar[tuple[str, CaseValue]]

    @classmethod
    def pytest_generate_tests(cls, metafunc: pytest.Metafunc) -> None:
        """Run a test with an argument `name` on every case, one with an argument `target` on every target.

        One with an argument `run_name` runs kernels: on a CPU, where cases are cut down, on those that then differ.
        """
        names = list(cls.spec.cases)
        different = {frozenset(cls.spec.shrink(cls.spec.cases[name]).params.items()): name for name in reversed(names)}
        to_run = names if kernel_device() == "cuda" else [name for name in names if name in different.values()]
        for argument, values in (("name", names), ("run_name", to_run), ("target", list(COMPILE_TARGETS))):
            if argument in metafunc.fixturenames:
                metafunc.parametrize(argument, values)

    def test_every_case_agrees_with_its_reference_by_the_launches_planned(self, run_name: str, device: str) -> None:
        """As `tk-kernels check` has it; and what is compiled ahead of time, and held to the budget, is what runs."""
        case = self.spec.cases[run_name]
        made: list[KernelLaunch] = []

        def recorded(inputs: Inputs) -> Any:
            # Not what a reference launches.
            with recording() as launches:
                got = self.spec.run(inputs)
            made.extend(launches)
            return got

        (result,) = check_kernel(dataclasses.replace(self.spec, run=recorded), [case], device)
        assert result.passed, result
        if runs_kernels(device):
            case = self.spec.shrink(case) if device == "cpu" else case
            assert made
            assert made == self.spec.launches(case, launch_target(torch.device(device)))

    def test_cost_counts_every_tensor_once(self, name: str) -> None:
        """All that goes in is read, all that comes out is written."""
        case = self.spec.cases[name]
        inputs = self.spec.make_inputs(case, "meta", 0)
        cost = self.spec.cost(case)
        assert cost.bytes_read == bytes_in(inputs)
        assert cost.bytes_written == bytes_in({"results": self.spec.run(inputs)})

    def test_every_kernel_belongs_to_a_stage(self, name: str) -> None:
        """Where the package tells stages apart: on every target, and the cost of each has a roof."""
        stages, case = self.spec.stages, self.spec.cases[name]
        if stages is None:
            return
        costs = stages.cost(case)
        for cost in costs.values():
            assert roof_us(cost, known_device("H200"))[0]
        for target in COMPILE_TARGETS.values():
            kernels = [launch.kernel for launch in self.spec.launches(case, target)]
            assigned = list(stages.assign(kernels))
            assert len(assigned) == len(kernels)
            assert set(assigned) <= set(costs), dict(zip(kernels, assigned, strict=True))

    def test_planning_for_another_card_leaves_real_calls_alone(self, device: str) -> None:
        """A call on real tensors inside the block is planned for the card it runs on, and so are those after it."""
        case = self.spec.shrink(next(iter(self.spec.cases.values())))
        parameter, value = self.unseen
        case = dataclasses.replace(case, params={**case.params, parameter: value})
        inputs = self.spec.make_inputs(case, device, 0)
        with planning(COMPILE_TARGETS["gfx942"]):
            got = self.spec.run(inputs)
        assert_close(got, self.spec.reference(inputs), self.spec.tolerance(case))
        with recording() as made:
            self.spec.run(inputs)
        planned = self.spec.launches(case, launch_target(torch.device(device)))
        assert made == (planned if runs_kernels(device) else [])

    def test_inputs_follow_the_seed(self, run_name: str, device: str) -> None:
        """One seed makes the same inputs twice, another one others; no two tensors hold the same values."""
        case = self.spec.shrink(self.spec.cases[run_name])
        first, same, other = (self.spec.make_inputs(case, device, seed) for seed in (0, 0, 1))
        tensors = {key: value for key, value in first.items() if isinstance(value, torch.Tensor)}
        for key, tensor in tensors.items():
            assert torch.equal(tensor, same[key]), key
            assert not torch.equal(tensor, other[key]), key
            assert [twin for twin, value in tensors.items() if torch.equal(tensor, value)] == [key]

    @pytest.mark.compiler
    def test_machine_code_keeps_its_budget(self, target: str) -> None:
        """As `tk-kernels resources --budget` has it, without a GPU."""
        reports = report_resources(self.spec, [COMPILE_TARGETS[target]])
        check = check_budget(self.spec, reports, load_budget(self.budget))
        assert check.outcome in ("kept", "other-triton"), "\n".join(map(str, check.violations))
