"""What the package tells the tools is what it does."""

from pathlib import Path

from tk_int8_gemm._spec import SPEC
from tk_testkit.spec import SpecTests


class TestSpec(SpecTests):
    spec = SPEC
    budget = Path(__file__).parents[1] / "perf_budget.json"
    unseen = ("m", 3)

    def test_products_are_held_against_the_matrix_units(self) -> None:
        peaks = {(case.params["form"], case.params["dtype"], SPEC.cost(case).peak) for case in SPEC.cases.values()}
        assert peaks == {
            ("int8_linear", "float16", "float16"),
            ("int8_linear", "bfloat16", "bfloat16"),
            ("int8_gemm", "float16", "float16"),
            ("w8a8_gemm", "float16", "int8"),
            ("w8a8_gemm", "bfloat16", "int8"),
            ("quantize", "bfloat16", "vector"),
        }
