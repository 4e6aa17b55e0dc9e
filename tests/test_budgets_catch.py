"""Budgets catch what makes kernels slow: each proof spoils a copy of a real package and sees its budget broken."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import pytest
import triton

from tk_kernel_core.budget import Budget, Violation, check_budget, load_budget
from tk_kernel_core.resources import report_resources
from tk_kernel_core.spec import KernelSpec
from tk_kernel_core.targets import COMPILE_TARGETS

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.compiler

Edits = Mapping[str, Mapping[str, str]]
"""What to put instead of which text, by the name of the file."""

CopyOf = Callable[[str, str, Edits], KernelSpec]


@pytest.fixture
def copy_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CopyOf:
    """Return the spec of a copy of a package under another module name, with some text replaced."""

    def copy(package: str, name: str, edits: Edits) -> KernelSpec:
        module = package.replace("-", "_")
        source, target = ROOT / "packages" / package / "src" / module, tmp_path / f"{module}_{name}"
        assert edits.keys() <= {file.name for file in source.glob("*.py")}
        target.mkdir()
        for file in source.glob("*.py"):
            text = file.read_text()
            for old, new in edits.get(file.name, {}).items():
                assert text.count(old) == 1, f"{file} must have this text once, has it {text.count(old)} times: {old}"
                text = text.replace(old, new)
            (target / file.name).write_text(text.replace(module, target.name))
        monkeypatch.syspath_prepend(tmp_path)
        spec = importlib.import_module(f"{target.name}._spec").SPEC
        assert isinstance(spec, KernelSpec)
        return spec

    return copy


def budget_of(package: str) -> Budget:
    budget = load_budget(ROOT / "packages" / package / "perf_budget.json")
    # Under another Triton the figures are others, and what a spoilt kernel is found to break with them.
    if budget.triton != triton.__version__:
        pytest.skip(f"the budget of {package} is of Triton {budget.triton}, this is {triton.__version__}")
    return budget


def violations_of(spec: KernelSpec, case: str, targets: Iterable[str]) -> list[Violation]:
    reports = report_resources(spec, [COMPILE_TARGETS[target] for target in targets], [spec.cases[case]])
    assert all(report.kernels for report in reports)
    check = check_budget(spec, reports, budget_of(spec.name))
    assert check.outcome == ("violated" if check.violations else "kept")
    return list(check.violations)


def test_lost_alignment_hint_is_caught_as_lost_16_byte_accesses(copy_of: CopyOf) -> None:
    case, targets = "llama2-7b-prefill", ("sm_90", "gfx942")
    assert violations_of(copy_of("tk-swiglu", "unchanged", {}), case, targets) == []

    # The number of results is no longer counted in eights: right, but the compiler does not see what divides it.
    hintless = copy_of(
        "tk-swiglu",
        "hintless",
        {
            "_kernels.py": {"n_elements = n_units.to(tl.int64) * ALIGNMENT": "n_elements = n_units.to(tl.int64)"},
            "_plans.py": {"(n_elements // rows.unit, rows.n_inner,": "(n_elements, rows.n_inner,"},
        },
    )
    wrong = [str(violation) for violation in violations_of(hintless, case, targets)]
    for target in targets:
        place = f"tk-swiglu, {case}, {target}, swiglu_forward_kernel"
        assert f"{place}: ld.global.v4 instructions: wanted at least 1, found 0" in wrong
        assert f"{place}: st.global.v4 instructions: wanted at least 1, found 0" in wrong


def test_operands_cast_to_fp32_are_caught_as_lost_matrix_units(copy_of: CopyOf) -> None:
    case, targets = "llama2-7b-plain-decode", ("sm_80", "sm_90", "gfx942")
    assert violations_of(copy_of("tk-int8-gemm", "unchanged", {}), case, targets) == []

    # By default the units multiply fp32 as TF32, which is another instruction; exactly, they do not multiply it at all.
    for precision in ("tf32", "ieee"):
        spoilt = f"tl.dot(weight.to(tl.float32), x.to(tl.float32), input_precision='{precision}')"
        cast = copy_of("tk-int8-gemm", precision, {"_kernels.py": {"tl.dot(weight, x)": spoilt}})
        wrong = [str(violation) for violation in violations_of(cast, case, targets)]
        for target, unit in zip(targets, ("mma.sync", "mma.sync", "v_mfma"), strict=True):
            place = f"tk-int8-gemm, {case}, {target}, int8_gemm_kernel"
            assert f"{place}: {unit} instructions: wanted at least 1, found 0" in wrong


def test_tile_too_large_for_its_warps_is_caught_as_spilling(copy_of: CopyOf) -> None:
    # Not on AMD, where registers are first spilled into registers.
    case, targets, kernel = "llama3-8b-backward", ("sm_80", "sm_90"), "rmsnorm_backward_kernel"
    assert violations_of(copy_of("tk-rmsnorm", "unchanged", {}), case, targets) == []

    # Half the warps: a thread holds more values than it has registers.
    crowded = copy_of("tk-rmsnorm", "crowded", {"_launch.py": {"// (32 if is_staged": "// (64 if is_staged"}})
    wrong = violations_of(crowded, case, targets)
    limits = budget_of("tk-rmsnorm").targets
    assert [(violation.target, violation.kernel, violation.what, violation.wanted) for violation in wrong] == [
        (target, kernel, what, wanted)
        for target in targets
        for what, wanted in (
            ("registers", f"at most {limits[target][case][kernel].registers}"),
            ("spill_bytes", "at most 0"),
            ("st.local instructions", "0"),
        )
    ]


def test_copy_whose_text_has_gone_is_refused(copy_of: CopyOf) -> None:
    with pytest.raises(AssertionError, match=r"_launch.py must have this text once, has it 0 times: no such text"):
        copy_of("tk-rmsnorm", "stale", {"_launch.py": {"no such text": "anything"}})
