"""Launch choices: pure functions of shapes, element sizes and the target."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tk_kernel_core.layout import RowLayout
    from tk_kernel_core.targets import Target


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """How the forward kernel is launched.

    Attributes:
        block_m: Rows per program.
        block_n: Columns per tile; at least the hidden size where a row is kept in registers.
        num_warps: Warps per program.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
    """

    block_m: int
    block_n: int
    num_warps: int
    dependent_launch: bool


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """How the backward kernel is launched.

    Attributes:
        block_m: Rows per step of a program.
        block_n: Columns per tile.
        num_warps: Warps per program.
        n_programs: Number of programs, each with its own partial weight gradient.
    """

    block_m: int
    block_n: int
    num_warps: int
    n_programs: int


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least `n`; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def row_strides(hidden_size: int, layout: RowLayout) -> tuple[int, list[int]]:
    """Return the largest power of two up to 16 that divides every row's start, and the strides in that unit."""
    strides = [stride for pair in layout.strides for stride in pair]
    combined = functools.reduce(operator.or_, strides, hidden_size | 16)
    unit = combined & -combined
    return unit, [stride // unit for stride in strides]


def forward_config(hidden_size: int, has_residual: bool, target: Target) -> ForwardConfig:
    """Choose the forward launch.

    The choice does not depend on the number of rows, and so neither does a row's result.

    Args:
        hidden_size: Elements in a row.
        has_residual: Whether two tensors are read.
        target: The GPU.
    """
    block_n = next_power_of_two(hidden_size)
    # Reading a longer row twice, the second time from L2, costs less than registers that keep other programs
    # out. With a residual twice as much would be read again, and the row stays for longer.
    if block_n <= (16_384 if has_residual else 8192):
        elements_per_thread = 16 if block_n <= 4096 else 32
    else:
        block_n, elements_per_thread = 8192, 16
    block_m = max(1, 2048 // block_n)
    num_warps = _warps(block_m * block_n // elements_per_thread, target)
    return ForwardConfig(block_m, block_n, num_warps, target.is_hopper_or_later)


def backward_config(n_rows: int, hidden_size: int, target: Target) -> BackwardConfig:
    """Choose the backward launch."""
    block_n = next_power_of_two(hidden_size)
    if block_n > 8192:
        block_n = 4096
    block_m = max(1, min(4096 // block_n, 32))
    num_warps = _warps(block_m * block_n // 16, target)
    n_programs = min(-(-n_rows // block_m), 2 * target.compute_units)
    return BackwardConfig(block_m, block_n, num_warps, n_programs)


def _warps(threads: int, target: Target) -> int:
    return max(1, min(threads, 1024) // target.warp_size)
