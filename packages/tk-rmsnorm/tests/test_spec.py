"""What the package tells the tools is what it does."""

from pathlib import Path

import pytest

from tk_kernel_core.targets import INTERPRETED_TARGET
from tk_rmsnorm._spec import SPEC
from tk_testkit.spec import SpecTests


class TestSpec(SpecTests):
    spec = SPEC
    budget = Path(__file__).parents[1] / "perf_budget.json"
    unseen = ("eps", 1.1e-6)


@pytest.mark.parametrize("name", list(SPEC.cases))
def test_the_gradient_of_the_weight_is_added_up_by_a_kernel_of_its_own(name: str) -> None:
    launches = SPEC.launches(SPEC.cases[name], INTERPRETED_TARGET)
    kernels = ["rmsnorm_quant_kernel"] if "quant" in name else ["rmsnorm_forward_kernel"]
    if "backward" in name:
        kernels = ["rmsnorm_backward_kernel", "sum_rows_kernel"]
    assert [launch.kernel for launch in launches] == kernels
