"""What the package tells the tools is what it does."""

import dataclasses

import pytest
import torch

from tk_kernel_core.bench import check_kernel
from tk_kernel_core.launch import launch_target, planning, recording
from tk_kernel_core.targets import COMPILE_TARGETS
from tk_swiglu._spec import SPEC
from tk_testkit.close import assert_close

TENSORS = ("dy", "gate", "up", "bias", "bias_up")


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
    assert len(made) == 1 + (inputs["form"] == "backward") * sum(inputs[bias] is not None for bias in TENSORS[3:])


@pytest.mark.parametrize("name", list(SPEC.cases))
def test_cost_counts_the_tensors(name: str) -> None:
    case = SPEC.cases[name]
    inputs = SPEC.make_inputs(case, "meta", 0)
    sizes = {
        tensor: inputs[tensor].numel() * inputs[tensor].element_size()
        for tensor in TENSORS
        if inputs.get(tensor) is not None
    }
    assert SPEC.cost(case).bytes_read == sum(sizes.values())
    results = SPEC.run(inputs)
    written = results if isinstance(results, tuple) else (results,)
    assert SPEC.cost(case).bytes_written == sum(result.numel() * result.element_size() for result in written)


def test_planning_for_another_card_leaves_real_calls_alone(device: str) -> None:
    case = SPEC.shrink(SPEC.cases["llama2-7b-decode"])
    # An alpha of its own, so that the call is prepared inside the block.
    case = dataclasses.replace(case, params={**case.params, "alpha": 1.1})
    inputs = SPEC.make_inputs(case, device, 0)
    with planning(COMPILE_TARGETS["gfx942"]):
        got = SPEC.run(inputs)
    assert_close(got, SPEC.reference(inputs), SPEC.tolerance(case))
    with recording() as launches:
        SPEC.run(inputs)
    assert launches in ([], SPEC.launches(case, launch_target(torch.device(device))))


@pytest.mark.parametrize("name", list(SPEC.cases))
def test_inputs_follow_the_seed(name: str, device: str) -> None:
    case = SPEC.shrink(SPEC.cases[name])
    first, same, other = (SPEC.make_inputs(case, device, seed) for seed in (0, 0, 1))
    for tensor in TENSORS:
        if first.get(tensor) is not None:
            assert torch.equal(first[tensor], same[tensor])
            assert not torch.equal(first[tensor], other[tensor])
    given = [first[tensor] for tensor in TENSORS if first.get(tensor) is not None]
    assert not any(one is not other and torch.equal(one, other) for one in given for other in given)
