"""Budgets: what the kernels of a package may need of each target, checked without a GPU.

A package keeps its budget in `perf_budget.json`, one line per kernel::

    {
      "triton": "3.6.0",
      "targets": {
        "sm_90": {
          "llama3-8b-decode": {
            "rmsnorm_kernel": {"registers": 40, "spill_bytes": 0, "shared_bytes": 16, "must_have": ["ld.global.v4"]}
          }
        }
      }
    }

Integers are upper limits. `must_have` and `must_not_have` name instruction families, see
`tk_kernel_core.resources`, and may be left out. Every case of the package needs an entry for every compile
target, an empty one where it launches nothing there; every kernel that is launched needs its limits, which hold
for all of its specialisations in that case. Entries of cases, targets and kernels that no longer exist count as
violations as well.

The figures belong to the Triton release that made them. Under another one a check still lists the violations,
but does not fail. What `tk_kernel_core.hazards` finds is a violation, and a failure, under any of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from tk_kernel_core.resources import INSTRUCTION_FAMILIES, MATRIX_FAMILIES, CaseResources, KernelResources
from tk_kernel_core.spec import KernelSpec
from tk_kernel_core.targets import COMPILE_TARGETS

_EXPECTED_FAMILIES = (*MATRIX_FAMILIES, "ld.global.v4", "st.global.v4", "cp.async.v4", "tma", "st.tma")
_SPILL_FAMILY = "st.local"
_HAZARD = "instructions that overwrite what wgmma reads"


def _known_family(family: str) -> str:
    if family not in INSTRUCTION_FAMILIES:
        raise ValueError(f"no such instruction family; families: {', '.join(sorted(INSTRUCTION_FAMILIES))}")
    return family


Limit = Annotated[int, Field(strict=True, ge=0)]
Families = tuple[Annotated[str, AfterValidator(_known_family)], ...]


class KernelBudget(BaseModel):
    """What one kernel may need.

    Attributes:
        registers: Most registers per thread.
        spill_bytes: Most bytes per thread spilled and reloaded.
        shared_bytes: Most shared memory per program.
        must_have: Instruction families that must occur.
        must_not_have: Instruction families that must not occur.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    registers: Limit
    spill_bytes: Limit
    shared_bytes: Limit
    must_have: Families = ()
    must_not_have: Families = ()


class Budget(BaseModel):
    """What the kernels of one package may need.

    Attributes:
        triton: Triton release that the figures were made with.
        targets: Limits by target, case and kernel.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    triton: str
    targets: dict[str, dict[str, dict[str, KernelBudget]]]


class Violation(BaseModel):
    """One way in which a package and its budget disagree.

    Attributes:
        package: Distribution that provides the kernel.
        target: Architecture.
        case: Name of the case; empty where a whole target is concerned.
        kernel: Name of the kernel function; empty where a whole case or target is concerned.
        what: `registers`, `spill_bytes`, `shared_bytes`, `wgmma instructions` and the like, or `budget entries`
            where the budget lacks an entry or has one too many.
        wanted: What is accepted, for example `at most 40`.
        found: How much there is.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str
    target: str
    case: str = ""
    kernel: str = ""
    what: str
    wanted: str
    found: int

    def __str__(self) -> str:
        place = ", ".join(filter(None, (self.package, self.case, self.target, self.kernel)))
        return f"{place}: {self.what}: wanted {self.wanted}, found {self.found}"


class BudgetCheck(BaseModel):
    """Outcome of a check.

    Attributes:
        package: Distribution that was checked.
        budget_triton: Triton release that the budget was made with.
        used_triton: Triton release that compiled what was checked.
        violations: Every disagreement: first about entries of the budget, then about kernels.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str
    budget_triton: str
    used_triton: str
    violations: tuple[Violation, ...]

    @property
    def outcome(self) -> Literal["kept", "violated", "other-triton"]:
        """`kept` without violations; with some, `violated`, or `other-triton` where that does not count."""
        if not self.violations:
            return "kept"
        counts = self.budget_triton == self.used_triton or any(one.what == _HAZARD for one in self.violations)
        return "violated" if counts else "other-triton"


def make_budget(spec: KernelSpec, reports: Iterable[CaseResources]) -> Budget:
    """Return the budget that the present kernels just keep.

    Limits are the measured figures. Matrix instructions and 16-byte accesses must stay where they are; spills
    must not come where there are none.

    Args:
        spec: The kernel package.
        reports: Its resources on all cases and all compile targets.

    Raises:
        ValueError: A case or a target is missing from the reports.
    """
    import triton

    by_place = {(report.target, report.case): report for report in reports}
    missing = [f"{case} on {target}" for target, case in _places(spec) if (target, case) not in by_place]
    if missing:
        raise ValueError(f"a budget for {spec.name} needs all cases on all targets, but these lack: {missing}")
    targets: dict[str, dict[str, dict[str, KernelBudget]]] = {}
    for target, case in _places(spec):
        targets.setdefault(target, {})[case] = {
            kernel: _just_enough(found) for kernel, found in _by_kernel(by_place[target, case]).items()
        }
    return Budget(triton=triton.__version__, targets=targets)


def check_budget(spec: KernelSpec, reports: Iterable[CaseResources], budget: Budget) -> BudgetCheck:
    """Hold a package against its budget.

    Args:
        spec: The kernel package.
        reports: Its resources. Figures are checked for the cases and targets in here; that the budget has an
            entry for every case and every compile target is checked in any case.
        budget: The package's budget.
    """
    import triton

    reports = list(reports)
    violations = [*_unmatched(spec, reports, budget), *_exceeded(spec, reports, budget)]
    return BudgetCheck(
        package=spec.name,
        budget_triton=budget.triton,
        used_triton=triton.__version__,
        violations=tuple(violations),
    )


def load_budget(path: Path) -> Budget:
    """Read a budget file.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is not a budget; the message says where and why.
    """
    try:
        text = path.read_text(encoding="utf-8")
        return Budget.model_validate(json.loads(text, object_pairs_hook=_without_duplicates))
    except ValidationError as error:
        reasons = "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
        raise ValueError(f"{path} is not a valid budget: {reasons}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid budget: {error}") from error


def write_budget(path: Path, budget: Budget) -> None:
    """Write a budget file: one line per kernel, so that a change of one kernel is a change of one line."""
    targets = {
        target: {
            case: {kernel: limits.model_dump(exclude_defaults=True) for kernel, limits in kernels.items()}
            for case, kernels in cases.items()
        }
        for target, cases in budget.targets.items()
    }
    text = _layout({"triton": budget.triton, "targets": targets}, levels=4)
    path.write_text(text + "\n", encoding="utf-8")


def _layout(value: Any, levels: int, indent: str = "") -> str:
    """Return JSON with the outer levels of objects on lines of their own, and the inner ones on one line."""
    if levels == 0 or not isinstance(value, dict) or not value:
        return json.dumps(value)
    inner = indent + "  "
    members = (f"{inner}{json.dumps(key)}: {_layout(item, levels - 1, inner)}" for key, item in value.items())
    return "{\n" + ",\n".join(members) + f"\n{indent}}}"


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{sorted({name for name in names if names.count(name) > 1})} occur twice in one object")
    return members


def _places(spec: KernelSpec) -> Iterator[tuple[str, str]]:
    return ((target, case) for target in COMPILE_TARGETS for case in spec.cases)


def _by_kernel(report: CaseResources) -> dict[str, list[KernelResources]]:
    kernels: dict[str, list[KernelResources]] = {}
    for found in report.kernels:
        kernels.setdefault(found.kernel, []).append(found)
    return kernels


def _just_enough(kernels: list[KernelResources]) -> KernelBudget:
    return KernelBudget(
        registers=max(kernel.registers for kernel in kernels),
        spill_bytes=max(kernel.spill_bytes for kernel in kernels),
        shared_bytes=max(kernel.shared_bytes for kernel in kernels),
        must_have=tuple(
            family for family in _EXPECTED_FAMILIES if all(family in kernel.instructions for kernel in kernels)
        ),
        must_not_have=() if any(_SPILL_FAMILY in kernel.instructions for kernel in kernels) else (_SPILL_FAMILY,),
    )


def _unmatched(spec: KernelSpec, reports: list[CaseResources], budget: Budget) -> Iterator[Violation]:
    """Yield the targets, cases and kernels that the budget lacks or has too many; not what lies below such a one."""
    reported = {(report.target, report.case) for report in reports}
    needed: list[tuple[str, ...]] = [
        (),
        *((target,) for target in COMPILE_TARGETS),
        *_places(spec),
        *((report.target, report.case, found.kernel) for report in reports for found in report.kernels),
    ]
    budgeted: list[tuple[str, ...]] = [()]
    for target, cases in budget.targets.items():
        budgeted.append((target,))
        for case, kernels in cases.items():
            budgeted.append((target, case))
            if (target, case) in reported:
                budgeted += [(target, case, kernel) for kernel in kernels]
    for path in dict.fromkeys((*needed, *budgeted)):
        if path not in budgeted and path[:-1] in budgeted:
            wanted, found = "1", 0
        elif path not in needed and path[:-1] in needed:
            wanted, found = f"0, as there is no such {('target', 'case', 'kernel')[len(path) - 1]}", 1
        else:
            continue
        place = dict(zip(("target", "case", "kernel"), path, strict=False))
        yield Violation.model_validate(
            {"package": spec.name, **place, "what": "budget entries", "wanted": wanted, "found": found}
        )


def _exceeded(spec: KernelSpec, reports: list[CaseResources], budget: Budget) -> Iterator[Violation]:
    """Yield the limits and instruction rules that a kernel breaks."""
    for report in reports:
        kernels = budget.targets.get(report.target, {}).get(report.case, {})
        for found in report.kernels:
            if found.kernel not in kernels:
                continue
            for what, wanted, amount in _broken(kernels[found.kernel], found):
                yield Violation(
                    package=spec.name,
                    target=report.target,
                    case=report.case,
                    kernel=found.kernel,
                    what=what,
                    wanted=wanted,
                    found=amount,
                )


def _broken(limits: KernelBudget, found: KernelResources) -> Iterator[tuple[str, str, int]]:
    for name in ("registers", "spill_bytes", "shared_bytes"):
        limit, amount = getattr(limits, name), getattr(found, name)
        if amount > limit:
            yield name, f"at most {limit}", amount
    if found.overwritten_operands:
        yield _HAZARD, "0", found.overwritten_operands
    for family in limits.must_have:
        if family not in found.instructions:
            yield f"{family} instructions", "at least 1", 0
    for family in limits.must_not_have:
        if family in found.instructions:
            yield f"{family} instructions", "0", found.instructions[family]
