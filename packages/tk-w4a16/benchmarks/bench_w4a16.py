"""What the headline cases cost to plan, to compile, to call and to run."""

from tk_testkit.benchmarks import SpecBenchmarks
from tk_w4a16._spec import SPEC


class TestHeadlines(SpecBenchmarks):
    """The benchmarks that every package has."""

    spec = SPEC
