"""What the package tells the tools is what it does."""

import dataclasses

import pytest
import torch

from tk_kernel_core.bench import check_kernel
from tk_kernel_core.launch import launch_target, planning, recording
from tk_kernel_core.targets import COMPILE_TARGETS
from tk_rmsnorm._spec import SPEC
from tk_testkit.close import assert_close


@pytest.mark.parametrize("name", list(SPEC.cases))
def test_every_case_agrees_with_its_reference(name: str, device: str) -> None:
    (result,) = check_kernel(SPEC, [SPEC.cases[name]], device)
    assert result.passed, result


@pytest.mark.parametrize("name", list(SPEC.cases))
def test_planned_launches_are_the_launches_made(name: str, device: str) -> None:
    case = SPEC.shrink(SPEC.cases[name])
    planned = SPEC.launches(case, launch_target(torch.device(device)))
    inputs = SPEC.make_inputs(case, device, 0)
    with recording() as made:
        SPEC.run(inputs)
    if device == "cpu" and made == []:
        pytest.skip("needs a GPU or TRITON_INTERPRET=1: the reference launches nothing")
    assert made == planned
    # The weight's gradient is added up by a kernel of its own.
    kernels = ["rmsnorm_backward_kernel", "sum_rows_kernel"] if "backward" in name else ["rmsnorm_forward_kernel"]
    assert [launch.kernel for launch in made] == kernels


@pytest.mark.parametrize("name", list(SPEC.cases))
def test_cost_counts_the_tensors(name: str) -> None:
    case = SPEC.cases[name]
    inputs = SPEC.make_inputs(case, "meta", 0)
    read = sum(value.numel() * value.element_size() for value in inputs.values() if isinstance(value, torch.Tensor))
    assert SPEC.cost(case).bytes_read == read
    assert SPEC.cost(case).bytes_written >= inputs["x"].numel() * inputs["x"].element_size()


def test_planning_for_another_card_leaves_real_calls_alone(device: str) -> None:
    case = SPEC.shrink(SPEC.cases["llama3-8b-decode"])
    # An eps of its own, so that the call is prepared inside the block.
    case = dataclasses.replace(case, params={**case.params, "eps": 1.1e-6})
    inputs = SPEC.make_inputs(case, device, 0)
    with planning(COMPILE_TARGETS["gfx942"]):
        got = SPEC.run(inputs)
    assert_close(got, SPEC.reference(inputs), SPEC.tolerance(case))
    with recording() as launches:
        SPEC.run(inputs)
    assert launches in ([], SPEC.launches(case, launch_target(torch.device(device))))


def test_inputs_follow_the_seed(device: str) -> None:
    case = SPEC.shrink(SPEC.cases["llama3-8b-add-decode"])
    first, same, other = (SPEC.make_inputs(case, device, seed) for seed in (0, 0, 1))
    assert torch.equal(first["x"], same["x"])
    assert not torch.equal(first["x"], other["x"])
    assert not torch.equal(first["x"], first["residual"])
