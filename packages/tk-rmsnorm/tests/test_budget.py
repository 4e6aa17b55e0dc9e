"""What the machine code keeps to beyond what every package's does, without a GPU."""

from pathlib import Path

import pytest
import torch

from tk_kernel_core.aot import compile_launch
from tk_kernel_core.budget import load_budget
from tk_kernel_core.launch import planning
from tk_kernel_core.resources import inspect
from tk_kernel_core.targets import COMPILE_TARGETS, Target
from tk_rmsnorm._plans import rmsnorm_backward
from tk_rmsnorm._spec import SPEC

BUDGET = Path(__file__).parents[1] / "perf_budget.json"


def test_few_rows_move_16_bytes_at_once_as_many_do() -> None:
    decode = [name for name, case in SPEC.cases.items() if "decode" in case.tags]
    assert decode
    for cases in load_budget(BUDGET).targets.values():
        for name in decode:
            for limits in cases[name].values():
                assert {"ld.global.v4", "st.global.v4"} <= {*limits.must_have}


@pytest.mark.compiler
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
