"""How a package says by which kernels a product is carried out, and why."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch

from tk_kernel_core.checks import ACTIVATION_DTYPES, check_choice
from tk_kernel_core.launch import KernelLaunch
from tk_kernel_core.targets import COMPILE_TARGETS, Target, target_of

_TILE = ("BLOCK", "TILES", "GROUPS", "STEPS", "STAGES", "SPLIT", "SWAPPED", "DESCRIPTORS")


def check_product(functions: Collection[str], function: Any, m: Any, n: Any, k: Any, dtype: Any) -> None:
    """Raise TypeError or ValueError for a product that no function of the package carries out."""
    check_choice("function", function, functions)
    check_choice("dtype", dtype, ACTIVATION_DTYPES)
    for name, size in (("m", m), ("n", n), ("k", k)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an integer, got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")


def target_named(target: str | None) -> Target:
    """Return a compile target by its name, or that of the current GPU for None.

    Raises:
        ValueError: There is no such target, or there is no GPU and no name.
    """
    if target is not None:
        return COMPILE_TARGETS[check_choice("target", target, COMPILE_TARGETS)]
    if not torch.cuda.is_available():
        raise ValueError(f"target must be given where there is no GPU: one of {', '.join(COMPILE_TARGETS)}, got None")
    return target_of(torch.device("cuda", torch.cuda.current_device()))


def explain_launches(
    function: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    target: Target,
    reason: str,
    launches: Sequence[KernelLaunch],
) -> str:
    """Return a line with the reason, and one for every kernel that is launched: its name, programs, warps and tile."""
    name = str(dtype).removeprefix("torch.")
    lines = [(line, len(list(equal))) for line, equal in itertools.groupby(map(_line, launches))]
    times = (f"  {line}" if n_equal == 1 else f"  {n_equal} times {line}" for line, n_equal in lines)
    return "\n".join([f"{function}, {m} x {n} x {k}, {name}, {target.name}: {reason}", *times])


def _line(launch: KernelLaunch) -> str:
    tile = ", ".join(f"{name}={value}" for name, value in launch.arguments if name.startswith(_TILE))
    programs = " x ".join(str(size) for size in launch.grid if size > 1) or "1"
    return f"{launch.kernel}: {programs} programs of {dict(launch.options)['num_warps']} warps, {tile}"
