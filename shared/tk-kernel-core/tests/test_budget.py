from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from tk_kernel_core.budget import Budget, check_budget, load_budget, make_budget, write_budget
from tk_kernel_core.resources import CaseResources, KernelResources, report_resources
from tk_kernel_core.spec import Case, Cost, KernelSpec, Tolerance
from tk_kernel_core.targets import COMPILE_TARGETS

sys.path.append(str(Path(__file__).parent))

from sample_kernels import meta, prepare


def spec_of(run: Callable[[dict[str, Any]], Any], *cases: str) -> KernelSpec:
    return KernelSpec(
        name="tk-sample",
        summary="Sample.",
        cases={name: Case(name, {}) for name in cases},
        make_inputs=lambda case, device, seed: {"case": case.name},
        run=run,
        reference=lambda inputs: None,
        cost=lambda case: Cost(0, 0, 0),
        tolerance=lambda case: Tolerance(0, 0),
        shrink=lambda case: case,
    )


SPEC = spec_of(lambda inputs: None, "decode", "prefill")


def kernel(target: str, name: str = "norm_kernel", **changes: Any) -> KernelResources:
    facts: dict[str, Any] = {
        "kernel": name,
        "target": target,
        "registers": 40,
        "spill_bytes": 0,
        "stack_bytes": 0,
        "shared_bytes": 16,
        "num_warps": 4,
        "code_bytes": 640,
        "instructions_total": 40,
        "instructions": {"ld.global.v4": 2, "shfl": 5, "st.global.v4": 2, "v_mfma": 8},
    }
    return KernelResources(**{**facts, **changes})


def reports_of(*kernels: KernelResources, case: str = "decode", target: str = "sm_90") -> list[CaseResources]:
    """Return reports of every case on every target, with these kernels in one place and the usual one elsewhere."""
    return [
        CaseResources(
            package="tk-sample",
            case=name,
            target=arch,
            kernels=kernels if (name, arch) == (case, target) else (kernel(arch),),
        )
        for name in SPEC.cases
        for arch in COMPILE_TARGETS
    ]


def found_wrong(reports: list[CaseResources], budget: Budget, spec: KernelSpec = SPEC) -> list[str]:
    check = check_budget(spec, reports, budget)
    assert check.outcome == ("violated" if check.violations else "kept")
    return [str(violation) for violation in check.violations]


@pytest.fixture
def budget() -> Budget:
    return make_budget(SPEC, reports_of(kernel("sm_90")))


def test_made_budget_is_just_kept(budget: Budget) -> None:
    assert budget.triton == triton.__version__
    assert list(budget.targets) == list(COMPILE_TARGETS)
    assert list(budget.targets["sm_80"]) == ["decode", "prefill"]
    limits = budget.targets["sm_80"]["decode"]["norm_kernel"]
    assert (limits.registers, limits.spill_bytes, limits.shared_bytes) == (40, 0, 16)
    assert limits.must_have == ("v_mfma", "ld.global.v4", "st.global.v4")
    assert limits.must_not_have == ("st.local",)
    assert found_wrong(reports_of(kernel("sm_90")), budget) == []


def test_fewer_resources_keep_the_budget(budget: Budget) -> None:
    assert found_wrong(reports_of(kernel("sm_90", registers=24, shared_bytes=0)), budget) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"registers": 41}, "registers: wanted at most 40, found 41"),
        ({"spill_bytes": 8}, "spill_bytes: wanted at most 0, found 8"),
        ({"shared_bytes": 17}, "shared_bytes: wanted at most 16, found 17"),
        (
            {"instructions": {"st.global.v4": 2, "v_mfma": 8, "ld.global.v2": 4}},
            "ld.global.v4 instructions: wanted at least 1, found 0",
        ),
        (
            {"instructions": {"ld.global.v4": 2, "st.global.v4": 2, "v_mfma": 8, "st.local": 3}},
            "st.local instructions: wanted 0, found 3",
        ),
    ],
)
def test_each_limit(budget: Budget, changes: dict[str, Any], sentence: str) -> None:
    reports = reports_of(kernel("sm_90", **changes))
    assert found_wrong(reports, budget) == [f"tk-sample, decode, sm_90, norm_kernel: {sentence}"]


def test_violations_name_their_place(budget: Budget) -> None:
    (violation,) = check_budget(SPEC, reports_of(kernel("sm_90", registers=64)), budget).violations
    assert violation.model_dump() == {
        "package": "tk-sample",
        "target": "sm_90",
        "case": "decode",
        "kernel": "norm_kernel",
        "what": "registers",
        "wanted": "at most 40",
        "found": 64,
    }


def test_limits_hold_for_every_specialisation_of_a_kernel() -> None:
    wide = kernel("sm_90")
    narrow = kernel("sm_90", registers=60, instructions={"st.global.v4": 1, "st.local": 1})
    budget = make_budget(SPEC, reports_of(wide, narrow))
    limits = budget.targets["sm_90"]["decode"]["norm_kernel"]
    assert limits.registers == 60
    assert limits.must_have == ("st.global.v4",)
    assert limits.must_not_have == ()
    assert found_wrong(reports_of(wide, narrow), budget) == []
    worse = narrow.model_copy(update={"registers": 61})
    assert found_wrong(reports_of(wide, worse), budget) == [
        "tk-sample, decode, sm_90, norm_kernel: registers: wanted at most 60, found 61"
    ]


def test_missing_entries(budget: Budget) -> None:
    targets = budget.model_dump()["targets"]
    del targets["sm_100"]
    del targets["gfx942"]["prefill"]
    del targets["gfx950"]["decode"]["norm_kernel"]
    pruned = Budget(triton=budget.triton, targets=targets)
    assert found_wrong(reports_of(kernel("sm_90")), pruned) == [
        "tk-sample, sm_100: budget entries: wanted 1, found 0",
        "tk-sample, prefill, gfx942: budget entries: wanted 1, found 0",
        "tk-sample, decode, gfx950, norm_kernel: budget entries: wanted 1, found 0",
    ]


def test_entries_of_what_no_longer_exists(budget: Budget) -> None:
    targets = budget.model_dump()["targets"]
    targets["sm_75"] = targets["sm_80"]
    targets["gfx942"]["training"] = targets["gfx942"]["decode"]
    targets["gfx950"]["decode"]["old_kernel"] = targets["gfx950"]["decode"]["norm_kernel"]
    stale = Budget(triton=budget.triton, targets=targets)
    assert found_wrong(reports_of(kernel("sm_90")), stale) == [
        "tk-sample, training, gfx942: budget entries: wanted 0, as there is no such case, found 1",
        "tk-sample, decode, gfx950, old_kernel: budget entries: wanted 0, as there is no such kernel, found 1",
        "tk-sample, sm_75: budget entries: wanted 0, as there is no such target, found 1",
    ]


def test_renamed_kernel_is_missing_and_left_over(budget: Budget) -> None:
    assert found_wrong(reports_of(kernel("sm_90", name="new_kernel")), budget) == [
        "tk-sample, decode, sm_90, new_kernel: budget entries: wanted 1, found 0",
        "tk-sample, decode, sm_90, norm_kernel: budget entries: wanted 0, as there is no such kernel, found 1",
    ]


def test_partial_report_is_checked_for_what_it_holds(budget: Budget) -> None:
    partial = [report for report in reports_of(kernel("sm_90", registers=50)) if report.target == "sm_90"]
    assert found_wrong(partial, budget) == [
        "tk-sample, decode, sm_90, norm_kernel: registers: wanted at most 40, found 50"
    ]
    assert found_wrong([], budget) == []


def test_a_case_may_launch_nothing() -> None:
    budget = make_budget(SPEC, reports_of())
    assert budget.targets["sm_90"]["decode"] == {}
    assert found_wrong(reports_of(), budget) == []
    assert len(found_wrong(reports_of(kernel("sm_90")), budget)) == 1


def test_another_triton_reports_without_failing(budget: Budget) -> None:
    older = budget.model_copy(update={"triton": "3.5.1"})
    check = check_budget(SPEC, reports_of(kernel("sm_90", registers=50)), older)
    assert check.outcome == "other-triton"
    assert (check.budget_triton, check.used_triton) == ("3.5.1", triton.__version__)
    assert len(check.violations) == 1
    assert check_budget(SPEC, reports_of(kernel("sm_90")), older).outcome == "kept"


def test_budget_needs_all_cases_on_all_targets() -> None:
    reports = [report for report in reports_of(kernel("sm_90")) if (report.case, report.target) != ("prefill", "sm_80")]
    with pytest.raises(ValueError, match=r"tk-sample needs all cases on all targets, but .*'prefill on sm_80'"):
        make_budget(SPEC, reports)


def test_file_round_trip_has_one_line_per_kernel(budget: Budget, tmp_path: Path) -> None:
    path = tmp_path / "perf_budget.json"
    write_budget(path, budget)
    assert load_budget(path) == budget
    text = path.read_text()
    assert text.endswith("}\n")
    assert text.count('"norm_kernel": {"registers": 40, "spill_bytes": 0, "shared_bytes": 16, "must_have": [') == 10
    assert text.splitlines()[:5] == ["{", f'  "triton": "{triton.__version__}",', '  "targets": {', '    "sm_80": {',
                                     '      "decode": {']  # fmt: skip
    write_budget(path, make_budget(SPEC, reports_of()))
    assert '"decode": {},\n' in path.read_text()


LIMITS = {"registers": 1, "spill_bytes": 0, "shared_bytes": 0}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("{", "Expecting property name"),
        ("[]", "should be a valid dictionary"),
        ({"targets": {}}, "triton: Field required"),
        ({"triton": "3.6.0"}, "targets: Field required"),
        ({"triton": "3.6.0", "targets": {}, "target": {}}, "target: Extra inputs are not permitted"),
        ({**LIMITS, "register": 1}, r"targets.sm_90.decode.norm_kernel.register: Extra inputs"),
        ({"registers": 1, "spill_bytes": 0}, r"targets.sm_90.decode.norm_kernel.shared_bytes: Field required"),
        ({**LIMITS, "registers": -1}, r"registers: Input should be greater than or equal to 0"),
        ({**LIMITS, "registers": "40"}, r"registers: Input should be a valid integer"),
        ({**LIMITS, "registers": True}, r"registers: Input should be a valid integer"),
        ({**LIMITS, "must_have": ["ld.global.v5"]}, r"must_have.0: .*no such instruction family; families: atom, bar"),
        ({**LIMITS, "must_not_have": "st.local"}, r"must_not_have: Input should be a valid"),
        ('{"triton": "3.6.0", "targets": {"sm_90": {}, "sm_90": {}}}', r"\['sm_90'\] occur twice"),
    ],
)
def test_malformed_file(tmp_path: Path, content: Any, reason: str) -> None:
    path = tmp_path / "perf_budget.json"
    if isinstance(content, dict) and "registers" in content:
        content = {"triton": "3.6.0", "targets": {"sm_90": {"decode": {"norm_kernel": content}}}}
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=reason) as caught:
        load_budget(path)
    assert str(caught.value).startswith(f"{path} is not a valid budget: ")


def test_missing_file_is_said_plainly(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"perf_budget.json"):
        load_budget(tmp_path / "perf_budget.json")


def launches(*, in_fp32: bool = False, aligned: bool = True, block: int = 1024) -> KernelSpec:
    def run(inputs: dict[str, Any]) -> None:
        half, single = meta(8192, torch.float16, aligned), meta(8192, torch.float32)
        if inputs["case"] == "dot":
            blocks = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64}
            prepare("dot_kernel", 4096, IN_FP32=in_fp32, **blocks)(single, half, half)
        else:
            prepare("copy_kernel", BLOCK=4096)(half, half)
            prepare("normalize_kernel", BLOCK=block, options={"num_warps": 1})(single, single)

    return spec_of(run, "dot", "rows")


def test_budget_catches_what_changes_in_real_kernels() -> None:
    good = launches()
    dot, rows = good.cases.values()
    reports = report_resources(good)
    budget = make_budget(good, reports)
    assert found_wrong(reports, budget, good) == []

    slow_dot = found_wrong(report_resources(launches(in_fp32=True), cases=[dot]), budget, good)
    for target, unit in [
        ("sm_80", "mma.sync"),
        ("sm_90", "wgmma"),
        ("sm_100", "tcgen05"),
        ("gfx942", "v_mfma"),
        ("gfx950", "v_mfma"),
    ]:
        assert f"tk-sample, dot, {target}, dot_kernel: {unit} instructions: wanted at least 1, found 0" in slow_dot

    narrow = found_wrong(report_resources(launches(aligned=False), cases=[rows]), budget, good)
    for target in COMPILE_TARGETS:
        for family in ("ld.global.v4", "st.global.v4"):
            place = f"tk-sample, rows, {target}, copy_kernel"
            assert f"{place}: {family} instructions: wanted at least 1, found 0" in narrow

    large = report_resources(launches(block=8192), [COMPILE_TARGETS["sm_90"]], cases=[rows])
    spilling = found_wrong(large, budget, good)
    place = "tk-sample, rows, sm_90, normalize_kernel"
    for what in ("registers: wanted at most", "spill_bytes: wanted at most 0", "st.local instructions: wanted 0"):
        assert any(sentence.startswith(f"{place}: {what}") for sentence in spilling)


@pytest.mark.parametrize("made_with", ["3.5.1", triton.__version__])
def test_overwritten_operands_break_any_budget(budget: Budget, made_with: str) -> None:
    made = budget.model_copy(update={"triton": made_with})
    check = check_budget(SPEC, reports_of(kernel("sm_90", overwritten_operands=28)), made)
    assert check.outcome == "violated"
    assert [str(violation) for violation in check.violations] == [
        "tk-sample, decode, sm_90, norm_kernel: instructions that overwrite what wgmma reads: wanted 0, found 28"
    ]
