"""The machine code of every case keeps its budget on every target, without a GPU."""

from pathlib import Path

import pytest

from tk_kernel_core.budget import check_budget, load_budget
from tk_kernel_core.resources import report_resources
from tk_swiglu._spec import SPEC

BUDGET = Path(__file__).parents[1] / "perf_budget.json"

pytestmark = pytest.mark.compiler


def test_machine_code_keeps_its_budget() -> None:
    check = check_budget(SPEC, report_resources(SPEC), load_budget(BUDGET))
    assert check.outcome in ("kept", "other-triton"), "\n".join(map(str, check.violations))


def test_no_case_spills_and_aligned_cases_move_16_bytes_at_once() -> None:
    budget = load_budget(BUDGET)
    for cases in budget.targets.values():
        for case, kernels in cases.items():
            for kernel, limits in kernels.items():
                assert limits.spill_bytes == 0
                # A few rows are spread over many threads, 8 bytes to each.
                if "odd" not in case and "decode" not in case:
                    assert {"ld.global.v4", "cp.async.v4"} & set(limits.must_have)
                    # The sum of partial gradients writes one row, which is no traffic to speak of.
                    assert kernel == "sum_rows_kernel" or "st.global.v4" in limits.must_have
