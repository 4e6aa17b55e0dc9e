"""Launch choices of the products with experts' weights of 8 and 4 bits: pure functions of shapes and the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tk_kernel_core.gemm import split_steps
from tk_moe_dispatch._gemm_launch import rows_per_tile
from tk_moe_dispatch._launch import max_tiles

if TYPE_CHECKING:
    from tk_kernel_core.targets import Target

_TILE, _STEP = 16, 128
# Times the rows of a program: what the one that comes last adds up.
_MOST_PARTS = 512


@dataclass(frozen=True, slots=True)
class PackedConfig:
    """How `packed_experts_kernel` is launched.

    Attributes:
        block_m: Rows of x per program.
        num_warps: Warps per program, each with output features of its own.
        unroll: Steps of the weight in a turn of the loop, which are on their way in the one before; 1 with descriptors.
        stages: Turns of the loop whose columns of x are on their way or in work at a time.
        group_m: Tiles of rows that are gone through together.
        scale_weight: Whether groups' scales multiply the weight, and not the sums of a step.
        split: Programs that share the columns of the same results.
        descriptors: Whether x is read through a descriptor.
        n_programs: Programs of axis 0 of the grid.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
        most_registers: Of a thread; None leaves them to the compiler.
    """

    block_m: int
    num_warps: int
    unroll: int
    stages: int
    group_m: int
    scale_weight: bool
    split: int
    descriptors: bool
    n_programs: int
    dependent_launch: bool
    most_registers: int | None = None

    @property
    def block_n(self) -> int:
        """Rows of the weight per program."""
        return _TILE * self.num_warps


@dataclass(frozen=True, slots=True)
class PackedLayerConfig:
    """How tokens go through experts of 8 and 4 bits.

    Attributes:
        streams: Whether every slot is a tile of its own, and nothing is sorted.
        gathers: Whether the first product finds the rows' tokens itself, or takes a sorted copy of them.
        up: The product with gate and up.
        down: The product with the down projection.
    """

    streams: bool
    gathers: bool
    up: PackedConfig
    down: PackedConfig


def packed_layer_config(
    n_tokens: int,
    top_k: int,
    n_experts: int,
    hidden_size: int,
    ffn_size: int,
    bits: tuple[int, int],
    group_sizes: tuple[int, int],
    has_zeros: tuple[bool, bool],
    is_bounded: bool,
    target: Target,
) -> PackedLayerConfig:
    """Choose how tokens go through experts of 8 and 4 bits.

    Args:
        n_tokens: Tokens, from 1.
        top_k: Slots of a token.
        n_experts: Experts that have weights here.
        hidden_size: Features of a token.
        ffn_size: Features inside an expert.
        bits: Of a code of w13 and of w2, 8 or 4.
        group_sizes: Columns that share a scale, of w13 and of w2; -1 for all.
        has_zeros: Whether they have zero points.
        is_bounded: Whether experts serve a bounded number of tokens.
        target: The GPU.
    """
    n_slots = n_tokens * top_k
    # Slots that meet at an expert read it twice.
    streams = n_tokens == 1 or (8 * n_slots <= n_experts and not is_bounded)
    block_m = 16 if streams else rows_per_tile(n_slots, n_experts, ffn_size, False, target)
    if target.name != "sm_90":
        # Elsewhere the sums of more rows spill.
        block_m = min(block_m, 64)
    n_row_tiles = n_slots if streams else max_tiles(n_slots, n_experts, block_m)

    def config(i: int, n: int, k: int) -> PackedConfig:
        return _packed_config(block_m, n_row_tiles, n, k, i == 0, bits[i], group_sizes[i], has_zeros[i], target)

    # Gate and up; the result has whole steps of columns.
    up, down = config(0, 2 * -(-ffn_size // _STEP) * _STEP, hidden_size), config(1, hidden_size, ffn_size)
    return PackedLayerConfig(streams, not up.descriptors, up, down)


def _packed_config(
    block_m: int,
    n_row_tiles: int,
    n: int,
    k: int,
    gated: bool,
    bits: int,
    group_size: int,
    has_zeros: bool,
    target: Target,
) -> PackedConfig:
    """Choose how tiles of rows are multiplied by n rows of a weight with k columns."""
    num_warps, stages, most_registers = 4, 3, None
    if block_m == 128 and bits == 4 and not (has_zeros and group_size != -1):
        # Square tiles read x half as often. Registers for two programs on a multiprocessor, which codes of 8 bits and
        # zero points of groups take more of.
        num_warps, most_registers = 8, 128
    elif block_m == 128:
        # Registers and shared memory for three programs.
        stages, most_registers = 2, 168
    if target.backend == "hip":
        # Its local data share holds no more than two steps of narrow tiles.
        stages = 2
    n_programs = n_row_tiles * -(-n // (_TILE * num_warps))
    return PackedConfig(
        block_m,
        num_warps,
        # Few rows take as long as the weight does; a step of 4 bits has half as many bytes on their way.
        2 if bits == 4 and block_m == 16 else 1,
        stages,
        32 if block_m < 128 else 8,
        # The sums of a step take as many registers as the result.
        group_size in (32, 64) or (group_size != -1 and block_m >= 128),
        # What follows the product with gate and up needs their whole sums.
        1 if gated else split_steps(n_programs, -(-k // _STEP), 4 * target.compute_units, _MOST_PARTS // block_m),
        # So few rows are mostly none: loads leave them out, where a descriptor would read them.
        target.is_hopper_or_later and block_m > 16,
        n_programs,
        target.is_hopper_or_later,
        most_registers,
    )
