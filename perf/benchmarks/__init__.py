"""Suites of asv. Nothing here imports torch before a benchmark runs.

asv forks a process for every result from one that has imported these modules: a GPU in use would not survive that.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Benchmark = TypeVar("Benchmark", bound=Callable[..., Any])

_ROOT = Path(__file__).resolve().parents[2]
_BUDGETS = {
    file.parent.name: json.loads(file.read_text()) for file in sorted(_ROOT.glob("packages/*/perf_budget.json"))
}

PACKAGES = list(_BUDGETS)
TARGETS = list(dict.fromkeys(target for budget in _BUDGETS.values() for target in budget["targets"]))
# Budgets name every case, and are read without torch.
CASES = list(
    dict.fromkeys(
        f"{package} {case}"
        for package, budget in _BUDGETS.items()
        for cases in budget["targets"].values()
        for case in cases
    )
)


def series(unit: str, version: str = "1") -> Callable[[Benchmark], Benchmark]:
    """Say what a benchmark's figures are.

    Args:
        unit: Of the figures.
        version: Another one begins a new history. Without one, asv takes the source text, and an edited comment would
            end the history.
    """

    def mark(benchmark: Benchmark) -> Benchmark:
        vars(benchmark).update(unit=unit, version=version)
        return benchmark

    return mark
