"""What the package tells the tools is what it does."""

from pathlib import Path

from tk_int8_gemm._spec import SPEC
from tk_testkit.spec import SpecTests


class TestSpec(SpecTests):
    spec = SPEC
    budget = Path(__file__).parents[1] / "perf_budget.json"
    unseen = ("m", 3)
