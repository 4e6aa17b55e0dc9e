"""What the package tells the tools is what it does."""

from pathlib import Path

import pytest

from tk_kernel_core.device import current_device
from tk_kernel_core.launch import planning
from tk_kernel_core.stages import time_stages
from tk_kernel_core.targets import COMPILE_TARGETS
from tk_kernel_core.timing import bytes_in
from tk_moe_dispatch._spec import SPEC, assign_stages, stage_cost
from tk_testkit.spec import SpecTests


class TestSpec(SpecTests):
    spec = SPEC
    budget = Path(__file__).parents[1] / "perf_budget.json"
    unseen = ("tokens", 3)

    def test_cost_counts_every_tensor_once(self, name: str) -> None:
        """All that goes in is read, but for experts that no token goes to; all that comes out is written."""
        case = self.spec.cases[name]
        inputs = self.spec.make_inputs(case, "meta", 0)
        cost = self.spec.cost(case)
        with planning(COMPILE_TARGETS["sm_90"]):
            assert cost.bytes_written == bytes_in({"result": self.spec.run(inputs)})
        n_experts, top_k, tokens = (case.params[key] for key in ("n_experts", "top_k", "tokens"))
        used = n_experts * (1 - (1 - top_k / n_experts) ** tokens)
        assert min(n_experts, top_k * tokens) >= used >= top_k * (1 - 1e-12)
        experts = bytes_in({"w13": inputs.pop("w13"), "w2": inputs.pop("w2")})
        assert cost.bytes_read - bytes_in(inputs) == pytest.approx(experts * used / n_experts, abs=2)


def test_bars_are_against_the_larger_part_of_the_roof() -> None:
    """At the rates of a copy and of a dense product on an H200."""
    for name, bars in SPEC.bars.items():
        cost = SPEC.cost(SPEC.cases[name])
        by_rate = {"copy": cost.bytes_moved / 4.25e12, "cublas": cost.flops / 695e12}
        assert list(bars) == [max(by_rate, key=by_rate.__getitem__)], name


@pytest.mark.parametrize("name", SPEC.cases)
def test_stages_add_up_to_the_layer(name: str) -> None:
    """All products are some stage's; beside what the layer moves, stages write and read what they hand on."""
    case = SPEC.cases[name]
    whole, stages = SPEC.cost(case), stage_cost(case)
    assert sum(stages[stage].flops for stage in ("router", "GEMM 1", "GEMM 2")) == whole.flops
    tokens, top_k, hidden, ffn, shared = (
        case.params[key] for key in ("tokens", "top_k", "hidden", "ffn", "shared_ffn")
    )
    rows = tokens * (top_k + bool(shared)) * hidden
    # An element of 2 bytes; of each slot an id of 8 bytes, a weight and two positions of 4 bytes; offsets of experts.
    h, slots, offsets = tokens * (top_k * ffn + shared), tokens * top_k, 4 * (case.params["n_experts"] + 1)
    written = 2 * (h + rows) + (8 + 4 + 8) * slots + offsets
    read_again = 2 * (h + rows + tokens * hidden) + (8 + 4 + 4 + 4) * slots
    core = [stage for name, stage in stages.items() if name != "permute"]
    assert sum(stage.bytes_written for stage in core) == whole.bytes_written + written
    assert sum(stage.bytes_read for stage in core) == pytest.approx(whole.bytes_read + read_again, abs=4)
    assert stages["permute"].bytes_written == 2 * slots * hidden
    assert stages["combine"].flops == rows - tokens * hidden


def test_kernels_of_pytorch_are_the_router_s_until_experts_are_chosen_and_no_stage_s_afterwards() -> None:
    """As profiled for many tokens, with a shared expert."""
    shared = ["fill", "zero", "schedule_kernel", "expert_gemm_kernel", "expert_gemm_kernel", "combine_kernel"]
    routed = ["count_kernel", "schedule_kernel", "permute_kernel", "expert_gemm_kernel", "expert_gemm_kernel"]
    kernels = ["cast", "cast", "sgemm", "route_kernel", *shared, *routed, "combine_kernel", "copy"]
    products = ["GEMM 1", "GEMM 2", "combine"]
    assert assign_stages(kernels) == [
        *["router"] * 4, None, None, "schedule", *products, "schedule", "schedule", "permute", *products, None,
    ]  # fmt: skip
    assert assign_stages(["stream_up_kernel", "cast", "stream_down_kernel"]) == ["GEMM 1", None, "GEMM 2"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen2-57b-1", "qwen2-57b-32", "qwen2-57b-512", "odd-sizes"])
def test_stages_are_measured_inside_a_captured_forward(name: str) -> None:
    (result,) = time_stages(SPEC, [SPEC.cases[name]], current_device())
    assert result.error == ""
    assert result.timing is not None
    stages = {stage.name: stage for stage in result.stages}
    streams = "stream_up_kernel" in stages["GEMM 1"].kernels
    ran = ("router", "GEMM 1", "GEMM 2") if streams else ("router", "schedule", "GEMM 1", "GEMM 2", "combine")
    assert all(stages[name].latency_us for name in ran)
    assert ("other" in stages) == bool(result.params["shared_ffn"])
    # The profiler delays kernels but makes none faster.
    whole = sum(stage.latency_us or 0.0 for stage in result.stages)
    assert 0.7 * result.timing.latency_us < whole < 2 * result.timing.latency_us + 30
