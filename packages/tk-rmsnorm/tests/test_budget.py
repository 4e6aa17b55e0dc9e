"""The machine code of every case keeps its budget on every target, without a GPU."""

from pathlib import Path

import pytest

from tk_kernel_core.budget import check_budget, load_budget
from tk_kernel_core.resources import report_resources
from tk_rmsnorm._spec import SPEC

BUDGET = Path(__file__).parents[1] / "perf_budget.json"

pytestmark = pytest.mark.compiler


def test_machine_code_keeps_its_budget() -> None:
    check = check_budget(SPEC, report_resources(SPEC), load_budget(BUDGET))
    assert check.outcome in ("kept", "other-triton"), "\n".join(map(str, check.violations))


def test_no_case_spills_and_aligned_cases_move_16_bytes_at_once() -> None:
    budget = load_budget(BUDGET)
    for cases in budget.targets.values():
        for case, kernels in cases.items():
            for limits in kernels.values():
                assert limits.spill_bytes == 0
                if case != "odd-hidden-size":
                    assert {"ld.global.v4", "st.global.v4"} <= set(limits.must_have)
