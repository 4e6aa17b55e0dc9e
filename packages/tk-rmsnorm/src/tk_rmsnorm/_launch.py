"""Launch choices: pure functions of shapes, element sizes and the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tk_kernel_core.layout import next_power_of_two

if TYPE_CHECKING:
    from tk_kernel_core.targets import Target


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """How the forward kernel is launched.

    Attributes:
        block_m: Rows per program.
        block_n: Columns per tile; at least the hidden size where a row is kept in registers.
        num_warps: Warps per program.
        max_registers: Most registers a thread may take, on NVIDIA GPUs; None leaves it to the compiler.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
    """

    block_m: int
    block_n: int
    num_warps: int
    max_registers: int | None
    dependent_launch: bool


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """How the backward kernel is launched.

    Attributes:
        block_m: Rows per step of a program.
        block_n: Columns per tile.
        num_warps: Warps per program.
        stages: Steps whose rows are in flight or in work at a time.
        n_programs: Number of programs, each with its own partial weight gradient.
        dependent_launch: As in `ForwardConfig`.
    """

    block_m: int
    block_n: int
    num_warps: int
    stages: int
    n_programs: int
    dependent_launch: bool


def forward_config(hidden_size: int, has_residual: bool, is_light: bool, target: Target) -> ForwardConfig:
    """Choose the forward launch.

    The choice does not depend on the number of rows, and so neither does a row's result.

    Args:
        hidden_size: Elements in a row.
        has_residual: Whether two tensors are read beside the weight.
        is_light: Whether all elements have 16 bits and are loaded eight at a time.
        target: The GPU.
    """
    block_n, elements_per_thread, max_registers = next_power_of_two(hidden_size), 16, None
    # Reading a longer row twice, the second time from L2, costs less than registers that keep other programs
    # out. With a residual twice as much would be read again, and the row stays for longer.
    if block_n > (16_384 if has_residual else 8192):
        block_n = 8192
    elif hidden_size == 8192 and is_light and not has_residual and target.backend == "cuda":
        # Four such rows at a time keep every thread of a multiprocessor at work. Shorter ones would leave some
        # of their threads idle, and wider elements would not fit these registers.
        max_registers = 32
    elif block_n > 4096:
        elements_per_thread = 32
    block_m = max(1, 2048 // block_n)
    num_warps = target.warps(block_m * block_n // elements_per_thread)
    return ForwardConfig(block_m, block_n, num_warps, max_registers, target.is_hopper_or_later)


def backward_config(n_rows: int, hidden_size: int, bytes_per_element: int, target: Target) -> BackwardConfig:
    """Choose the backward launch.

    Args:
        n_rows: Rows of the matrix.
        hidden_size: Elements in a row.
        bytes_per_element: Bytes that are read for one element of `dx`, over all tensors.
        target: The GPU.
    """
    block_n = next_power_of_two(hidden_size)
    if block_n > 8192:
        # A row this long is read twice, and its weight gradient added to in memory, once for the rows of a step.
        # Wide elements, and those that are loaded one by one, take more registers: their tiles are smaller.
        is_light = bytes_per_element <= 6 and hidden_size % 8 == 0
        block_n, programs_per_unit = (4096, 1) if is_light else (2048, 2)
        n_programs = min(-(-n_rows // 2), programs_per_unit * target.compute_units)
        return BackwardConfig(2, block_n, target.warps(block_n // 8), 1, n_programs, target.is_hopper_or_later)
    block_m = max(1, min(4096 // block_n, 32))
    tile = block_m * block_n
    # Of three stages one is in registers, two are in shared memory, beside what reductions and stores need.
    is_staged = target.backend == "cuda" and tile * (2 * bytes_per_element + 4) <= target.shared_bytes
    num_warps = target.warps(tile // (32 if is_staged and block_n >= 2048 else 16))
    n_programs = min(-(-n_rows // block_m), target.compute_units * (2 if tile <= 4096 else 1))
    stages = 3 if is_staged else 1
    return BackwardConfig(block_m, block_n, num_warps, stages, n_programs, target.is_hopper_or_later)
