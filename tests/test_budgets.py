"""What the budget of every package must say; its own suite and `nox -s resources` hold the machine code to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tk_kernel_core.budget import KernelBudget, check_budget, load_budget
from tk_kernel_core.spec import installed_specs
from tk_kernel_core.targets import COMPILE_TARGETS
from tk_testkit.plugin import TESTED_TRITON

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda folder: folder.name)


def limits_of(package: Path) -> Iterator[tuple[str, str, str, KernelBudget]]:
    """Yield target, case, kernel and limits."""
    for target, cases in load_budget(package / "perf_budget.json").targets.items():
        for case, kernels in cases.items():
            for kernel, limits in kernels.items():
                yield target, case, kernel, limits


@each_package
def test_budget_has_exactly_the_cases_targets_and_kernels_there_are(package: Path) -> None:
    spec = installed_specs()[package.name]
    # Without compiled kernels the check is about the entries alone.
    assert check_budget(spec, [], load_budget(package / "perf_budget.json")).violations == ()
    launched = {
        (target.name, case.name, launch.kernel)
        for target in COMPILE_TARGETS.values()
        for case in spec.cases.values()
        for launch in spec.launches(case, target)
    }
    assert {(target, case, kernel) for target, case, kernel, _ in limits_of(package)} == launched


@each_package
def test_budgets_and_tests_of_machine_code_are_about_the_triton_in_constraints(package: Path) -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (tested,) = (line.removeprefix("triton==") for line in lines if line.startswith("triton=="))
    assert load_budget(package / "perf_budget.json").triton == tested
    assert tested.startswith(f"{TESTED_TRITON}.")


# Bytes that may be spilled, where that was measured to be faster than what avoids it.
SPILLS_THAT_PAY = {
    # One register, outside the loop; with no more than 128, two programs of 8 warps run on a multiprocessor: 0.96 to
    # 1.02 times the time of cuBLAS on an H200 where it was 1.24. More rows are more tiles of the same kernel.
    ("tk-int8-gemm", "sm_90", "llama3-70b-chunk-256", "int8_middle_kernel"): 8,
    ("tk-int8-gemm", "sm_90", "llama3-70b-prompt-512", "int8_middle_kernel"): 8,
}


@each_package
def test_nothing_spills_but_where_it_pays(package: Path) -> None:
    for *place, limits in limits_of(package):
        paid = SPILLS_THAT_PAY.get((package.name, *place), 0)
        assert limits.spill_bytes <= paid, place
        assert paid or "st.local" in limits.must_not_have, place


# A few bytes for each token, beside the experts' weights; one row, beside a gradient of many.
SMALL_LOADS = {"route_kernel", "count_kernel", "schedule_kernel"}
SMALL_STORES = {*SMALL_LOADS, "sum_rows_kernel"}


@each_package
def test_where_bandwidth_counts_16_bytes_or_blocks_are_moved_at_once(package: Path) -> None:
    # A decode step is too short for that to matter, and may rather spread over all multiprocessors.
    cases = {
        name for name, case in installed_specs()[package.name].cases.items() if case.tags & {"prefill", "training"}
    }
    assert cases
    for target, case, kernel, limits in limits_of(package):
        if case in cases:
            loads = {"ld.global.v4", "cp.async.v4", "tma"} & {*limits.must_have}
            assert kernel in SMALL_LOADS or loads, (target, case, kernel)
            stores = {"st.global.v4", "st.tma"} & {*limits.must_have}
            assert kernel in SMALL_STORES or stores, (target, case, kernel)


@each_package
def test_the_packages_own_suite_holds_its_machine_code_to_the_budget(package: Path) -> None:
    assert any("(SpecTests)" in file.read_text() for file in package.glob("tests/test_*.py"))
