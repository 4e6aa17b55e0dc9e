"""What the package tells the tools is what it does."""

from pathlib import Path

import pytest

from tk_kernel_core.launch import planning
from tk_kernel_core.targets import COMPILE_TARGETS
from tk_kernel_core.timing import bytes_in
from tk_moe_dispatch._spec import SPEC
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
