"""The tests that all specs must pass: a right spec passes them, a wrong one does not."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from tk_kernel_core.budget import load_budget, make_budget, write_budget
from tk_kernel_core.resources import report_resources
from tk_kernel_core.spec import Case, Cost, Inputs, KernelSpec, Stages
from tk_kernel_core.targets import COMPILE_TARGETS
from tk_testkit.spec import SpecTests

sys.path.append(str(Path(__file__).parent))

from sample_spec import COLUMNS, COST, ROWS, SPEC, make_inputs, run

AGREES = "test_every_case_agrees_with_its_reference_by_the_launches_planned"
STAGES = "test_every_kernel_belongs_to_a_stage"


class TestRightSpec(SpecTests):
    spec = SPEC
    unseen = ("rows", 3)
    # Has a test of its own below.
    test_machine_code_keeps_its_budget = None


@pytest.mark.interpreter
class TestRightSpecInTheInterpreter(TestRightSpec):
    pass


def ask(test: str, spec: KernelSpec, device: str) -> None:
    tests = SpecTests()
    tests.spec, tests.unseen = spec, ("rows", 3)
    method = getattr(tests, test)
    given = {"name": "five", "run_name": "five", "device": device}
    method(**{argument: given[argument] for argument in inspect.signature(method).parameters})


def same_for_every_seed(case: Case, device: str, seed: int) -> Inputs:
    return make_inputs(case, device, 0)


def with_a_twin(case: Case, device: str, seed: int) -> Inputs:
    inputs = make_inputs(case, device, seed)
    return {**inputs, "residual": inputs["x"].clone()}


def planned_on_all_rows_but_run_on_some(inputs: Inputs) -> Any:
    x = inputs["x"]
    return run({"x": x if x.is_meta else x[1:]})


def never_by_a_kernel(inputs: Inputs) -> Any:
    return inputs["x"].sum(0)


@pytest.mark.parametrize(
    ("test", "wrong"),
    [
        (AGREES, {"reference": lambda inputs: inputs["x"].sum(0) + 1}),
        ("test_cost_counts_every_tensor_once", {"cost": lambda case: Cost(0, 4 * ROWS * COLUMNS - 1, 4 * COLUMNS)}),
        ("test_cost_counts_every_tensor_once", {"cost": lambda case: Cost(0, 4 * ROWS * COLUMNS, 4 * COLUMNS + 1)}),
        (STAGES, {"stages": Stages(lambda case: {"sum": COST}, lambda kernels: [None for _ in kernels])}),
        (STAGES, {"stages": Stages(lambda case: {"sum": COST}, lambda kernels: [])}),
        (STAGES, {"stages": Stages(lambda case: {"sum": Cost(0, 0, 0)}, lambda kernels: ["sum" for _ in kernels])}),
        ("test_planning_for_another_card_leaves_real_calls_alone", {"reference": lambda inputs: inputs["x"].sum(1)}),
        ("test_inputs_follow_the_seed", {"make_inputs": same_for_every_seed}),
        ("test_inputs_follow_the_seed", {"make_inputs": with_a_twin}),
        pytest.param(
            AGREES,
            {"run": planned_on_all_rows_but_run_on_some, "reference": lambda inputs: inputs["x"][1:].sum(0)},
            marks=pytest.mark.interpreter,
        ),
        pytest.param(
            AGREES,
            {"run": never_by_a_kernel},
            marks=pytest.mark.interpreter,
        ),
    ],
)
def test_wrong_spec_is_found(test: str, wrong: dict[str, Any], device: str) -> None:
    ask(test, SPEC, device)
    with pytest.raises(AssertionError):
        ask(test, dataclasses.replace(SPEC, **wrong), device)


@pytest.mark.compiler
def test_machine_code_is_held_to_the_budget_on_every_target(tmp_path: Path) -> None:
    tests = SpecTests()
    tests.spec, tests.budget = SPEC, tmp_path / "perf_budget.json"
    write_budget(tests.budget, make_budget(SPEC, report_resources(SPEC)))
    for target in COMPILE_TARGETS:
        tests.test_machine_code_keeps_its_budget(target)
    limits = load_budget(tests.budget).targets["gfx950"]["five"]["sum_rows_kernel"].registers
    text = tests.budget.read_text()
    start = text.index('"gfx950"')
    tightened = text[start:].replace(f'"registers": {limits}', f'"registers": {limits - 1}')
    tests.budget.write_text(text[:start] + tightened)
    tests.test_machine_code_keeps_its_budget("sm_90")
    with pytest.raises(AssertionError, match=f"gfx950, sum_rows_kernel: registers: wanted at most {limits - 1}, found"):
        tests.test_machine_code_keeps_its_budget("gfx950")
