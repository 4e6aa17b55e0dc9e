"""What a command line names: kernels, cases, cards and targets; and the exit codes of commands."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tk_kernel_core.spec import Case, KernelSpec, installed_specs

if TYPE_CHECKING:
    from tk_kernel_core.device import DeviceInfo
    from tk_kernel_core.targets import Target

OK, FAILED, USAGE, NO_DATA, CANNOT_RUN = range(5)


class Stop(Exception):
    """Ends the command with an exit code and a message on stderr."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Selection(NamedTuple):
    """A kernel and those of its cases that were asked for."""

    spec: KernelSpec
    cases: list[Case]


def select(options: argparse.Namespace) -> list[Selection]:
    """Return the kernels and cases that the options name, never an empty list.

    Raises:
        Stop: A name is unknown, or nothing is left.
    """
    specs = _installed()
    for name in options.kernels:
        if name not in specs:
            raise Stop(USAGE, f"unknown kernel {name!r}; installed: {', '.join(specs)}")
    chosen = [specs[name] for name in dict.fromkeys(options.kernels)] or list(specs.values())
    known_cases = sorted({name for spec in chosen for name in spec.cases})
    for pattern in options.cases:
        if not fnmatch.filter(known_cases, pattern):
            raise Stop(USAGE, f"no case matches {pattern!r}; cases: {', '.join(known_cases)}")
    known_tags = sorted({tag for spec in chosen for case in spec.cases.values() for tag in case.tags})
    if options.tag is not None and options.tag not in known_tags:
        raise Stop(USAGE, f"no case has the tag {options.tag!r}; tags: {', '.join(known_tags)}")
    selected = [
        Selection(spec, cases)
        for spec in chosen
        if (cases := [case for case in spec.cases.values() if _is_wanted(case, options.cases, options.tag)])
    ]
    if not selected:
        raise Stop(NO_DATA, "no case has both that name and that tag")
    return selected


def _is_wanted(case: Case, patterns: Sequence[str], tag: str | None) -> bool:
    named = not patterns or any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)
    return named and (tag is None or tag in case.tags)


def _installed() -> Mapping[str, KernelSpec]:
    try:
        specs = installed_specs()
    except Exception as reason:
        raise Stop(CANNOT_RUN, f"an installed kernel package cannot be loaded: {reason}") from reason
    if not specs:
        raise Stop(NO_DATA, "no kernel package is installed; for example: python -m pip install tk-rmsnorm")
    return specs


def known_card(name: str) -> DeviceInfo:
    """Return the facts of a known card.

    Raises:
        Stop: There is no such card.
    """
    from tk_kernel_core.device import known_device

    try:
        return known_device(name)
    except ValueError as reason:
        raise Stop(USAGE, str(reason)) from reason


def compile_targets(names: Sequence[str]) -> list[Target]:
    """Return the targets of these names; all of them where none is named.

    Raises:
        Stop: There is no such target.
    """
    from tk_kernel_core.targets import COMPILE_TARGETS

    for name in names:
        if name not in COMPILE_TARGETS:
            raise Stop(USAGE, f"unknown target {name!r}; targets: {', '.join(COMPILE_TARGETS)}")
    return [COMPILE_TARGETS[name] for name in dict.fromkeys(names)] or list(COMPILE_TARGETS.values())
