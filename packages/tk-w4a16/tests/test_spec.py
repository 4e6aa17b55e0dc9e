"""What the package tells the tools is what it does."""

from pathlib import Path

import pytest

from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.spec import Case
from tk_testkit.spec import SpecTests
from tk_w4a16._spec import SPEC


def cut_down(case: Case) -> frozenset[tuple[str, object]]:
    return frozenset(SPEC.shrink(case).params.items())


FIRST: dict[frozenset[tuple[str, object]], str] = {}
for _case in SPEC.cases.values():
    FIRST.setdefault(cut_down(_case), _case.name)


class TestSpec(SpecTests):
    spec = SPEC
    budget = Path(__file__).parents[1] / "perf_budget.json"
    unseen = ("m", 3)

    @pytest.fixture(autouse=True)
    def each_cut_down_case_once(self, request: pytest.FixtureRequest) -> None:
        name = getattr(request.node, "callspec", None) and request.node.callspec.params.get("name")
        if interpreting() and name and (first := FIRST[cut_down(SPEC.cases[name])]) != name:
            pytest.skip(f"the interpreter is slow, and cut down for it this is {first}")
