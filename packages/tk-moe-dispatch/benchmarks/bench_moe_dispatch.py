"""What the headline cases cost to plan, to compile, to call and to run."""

from tk_moe_dispatch._spec import SPEC
from tk_testkit.benchmarks import SpecBenchmarks


class TestHeadlines(SpecBenchmarks):
    """The benchmarks that every package has."""

    spec = SPEC
