"""The machine code of every case keeps its budget on every target, without a GPU."""

from pathlib import Path

import pytest
import torch

from tk_kernel_core.aot import compile_launch
from tk_kernel_core.budget import check_budget, load_budget
from tk_kernel_core.launch import planning
from tk_kernel_core.resources import inspect, report_resources
from tk_kernel_core.targets import COMPILE_TARGETS, Target
from tk_rmsnorm._plans import rmsnorm_backward
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
            for kernel, limits in kernels.items():
                assert limits.spill_bytes == 0
                if case != "odd-hidden-size":
                    # The sum of partial gradients writes one row, which is no traffic to speak of.
                    wide = {"ld.global.v4"} if kernel == "sum_rows_kernel" else {"ld.global.v4", "st.global.v4"}
                    assert wide <= set(limits.must_have)


@pytest.mark.parametrize("target", COMPILE_TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("hidden_size", [128, 4096, 8192, 16_384])
def test_the_backward_of_wide_dtypes_fits_shared_memory(hidden_size: int, target: Target) -> None:
    # A sum and its gradient in float32 around a norm in bfloat16: ten bytes for each element, two widths of it.
    dy, dsum, x = (
        torch.empty(4096, hidden_size, dtype=dtype, device="meta")
        for dtype in (torch.bfloat16, torch.float32, torch.float32)
    )
    weight = torch.empty(hidden_size, device="meta")
    with planning(target) as launches:
        rmsnorm_backward(dy, dsum, x, weight, eps=1e-6, weight_offset=0.0, casting="fp32")
    # Compilation refuses what does not fit.
    resources = [inspect(compile_launch(launch, target)) for launch in launches]
    assert [resource.spill_bytes for resource in resources] == [0, 0]
