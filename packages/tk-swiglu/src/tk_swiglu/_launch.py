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
        block: Results per program.
        num_warps: Warps per program.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
    """

    block: int
    num_warps: int
    dependent_launch: bool


@dataclass(frozen=True, slots=True)
class QuantConfig:
    """How the quantising kernel is launched.

    Attributes:
        block_m: Rows per program.
        block_n: Columns per tile; at least the width where a row is kept in registers.
        num_warps: Warps per program.
        dependent_launch: As in `ForwardConfig`.
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
        block_n: Columns per program.
        num_warps: Warps per program.
        n_row_programs: Programs that share the rows of the same columns, each with its own part of the bias
            gradients.
        stages: Steps whose rows are in flight or in work at a time.
        dependent_launch: As in `ForwardConfig`.
    """

    block_m: int
    block_n: int
    num_warps: int
    n_row_programs: int
    stages: int
    dependent_launch: bool


def forward_config(n_elements: int, layout: str, target: Target) -> ForwardConfig:
    """Choose the forward launch.

    Args:
        n_elements: Elements of the result.
        layout: `separate`, `concat` or `interleaved`.
        target: The GPU.
    """
    elements_per_unit = n_elements // target.compute_units
    if elements_per_unit <= 4096:
        block, elements_per_thread = 512, 4
    elif elements_per_unit <= 65_536 or layout == "interleaved":
        block, elements_per_thread = 1024, 8
    else:
        block, elements_per_thread = 2048, 16
    return ForwardConfig(block, target.warps(block // elements_per_thread), target.is_hopper_or_later)


def quant_config(width: int, has_bias: bool, target: Target) -> QuantConfig:
    """Choose the quantising launch.

    Args:
        width: Columns of the result.
        has_bias: Whether there are biases, which take registers.
        target: The GPU.
    """
    # A row that registers do not hold is read twice, the second time from L2.
    block_n = next_power_of_two(width)
    if block_n > (16_384 if has_bias else 32_768):
        block_n = 8192
    block_m = max(1, 2048 // block_n)
    num_warps = target.warps(block_m * block_n // (16 if block_n <= 8192 else 32))
    return QuantConfig(block_m, block_n, num_warps, target.is_hopper_or_later)


def backward_config(n_rows: int, width: int, has_bias: bool, target: Target) -> BackwardConfig:
    """Choose the backward launch.

    Args:
        n_rows: Rows of the result.
        width: Its columns.
        has_bias: Whether there are biases: then a program goes down many rows, to load them once and to sum
            their gradients.
        target: The GPU.
    """
    if has_bias:
        block_n, tile, elements_per_thread = 128, 1024, 8
    elif n_rows * width // target.compute_units <= 524_288:
        block_n, tile, elements_per_thread = 1024, 1024, 8
    else:
        block_n, tile, elements_per_thread = 2048, 2048, 16
    block_n = min(next_power_of_two(width), block_n)
    block_m = min(next_power_of_two(n_rows), tile // block_n)
    n_row_programs, stages = -(-n_rows // block_m), 1
    if has_bias:
        n_row_programs = min(n_row_programs, max(1, 8 * target.compute_units * block_n // width))
        stages = 3 if target.backend == "cuda" else 1
    num_warps = target.warps(tile // elements_per_thread)
    return BackwardConfig(block_m, block_n, num_warps, n_row_programs, stages, target.is_hopper_or_later)
