"""What the package tells the tools is what it does."""

from pathlib import Path

from tk_testkit.spec import SpecTests
from tk_w4a16._spec import SPEC


class TestSpec(SpecTests):
    spec = SPEC
    budget = Path(__file__).parents[1] / "perf_budget.json"
    unseen = ("m", 3)
