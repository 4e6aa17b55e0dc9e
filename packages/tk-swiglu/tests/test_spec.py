"""What the package tells the tools is what it does."""

from pathlib import Path

import pytest

from tk_kernel_core.targets import INTERPRETED_TARGET
from tk_swiglu._spec import SPEC
from tk_testkit.spec import SpecTests


class TestSpec(SpecTests):
    spec = SPEC
    budget = Path(__file__).parents[1] / "perf_budget.json"
    unseen = ("alpha", 1.1)


@pytest.mark.parametrize("name", list(SPEC.cases))
def test_the_gradient_of_each_bias_is_added_up_by_a_kernel_of_its_own(name: str) -> None:
    inputs = SPEC.make_inputs(SPEC.cases[name], "meta", 0)
    kernels = [f"swiglu_{inputs['form']}_kernel"]
    if inputs["form"] == "backward":
        kernels += ["sum_rows_kernel" for bias in ("bias", "bias_up") if inputs[bias] is not None]
    assert [launch.kernel for launch in SPEC.launches(SPEC.cases[name], INTERPRETED_TARGET)] == kernels
