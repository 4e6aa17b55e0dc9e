"""Launch choices of the products with experts' weights: pure functions of shapes and the target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tk_moe_dispatch._launch import max_tiles

if TYPE_CHECKING:
    from tk_kernel_core.targets import Target

_ELEMENTS_PER_THREAD = 8
"""Of 16 bits, in the 16 bytes of one load."""

_FEATURES = 128
"""Of gate, and as many of up, in a tile of many rows."""

_TALL = 192
"""Rows of the highest tile: 128 and 64, which multiply what is read of the weights once."""

_COST_OF_TALL = 0.94
"""Of one of its rows, in those of tiles of 128: a weight is brought to shared memory for more rows at a time.

Measured on an H200 (driver 580.159.04, torch 2.11.0+cu130, Triton 3.6.0, 2026-11-30): 0.90 to 0.98.
"""

_FEW = 128
"""Rows of an expert on average, below which the highest tile takes only as long as its rows need.

Most experts have one tile then. Where they have several, these should take the same time, and read a weight together.
Measured as above, on 2026-12-01: 0.90 of the time of tiles of 128 rows with 48 rows an expert, 0.95 with 64, 0.99 to
1.01 with 80 to 112; and 0.99 to 1.04 of the time of the highest tile as a whole with 128.
"""

_MANY = 256
"""Rows of an expert on average, from which on they end where a tile does.

What lies between experts is less memory then than they are themselves. Measured as above, on 2026-12-01: 0.97 to 1.00
of the time without.
"""

_Tile = tuple[int, int, bool, int, int, int]
"""block_n, block_k, swapped, stages, warps, and programs that share a multiprocessor."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How `expert_gemm_kernel` is launched.

    Attributes:
        block_m: Sorted rows per tile: a power of two, or the sum of two.
        block_n: Features per tile; as many again of up where there are gate and up.
        block_k: Columns per step.
        swapped: Whether the weights are the first operand of the matrix units.
        group_m: Tiles of rows of an expert that are gone through together, at most.
        stages: Steps in flight or in work at a time.
        num_warps: Warps per program.
        by_need: Whether a tile of two sizes takes less time if its rows fit into one of them.
        flatten: Whether the loads for a program's next tile begin while it finishes one.
        descriptors: Whether the weights, and x in sorted rows, are read through descriptors.
        joined: Whether gate and up are read through one descriptor, and multiplied together.
        n_programs: Programs in the grid.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
    """

    block_m: int
    block_n: int
    block_k: int
    swapped: bool
    group_m: int
    stages: int
    num_warps: int
    by_need: bool
    flatten: bool
    descriptors: bool
    joined: bool
    n_programs: int
    dependent_launch: bool


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """How `stream_up_kernel` or `stream_down_kernel` is launched.

    Attributes:
        block_n: Features per program.
        block_k: Columns per step.
        num_warps: Warps per program.
        dependent_launch: As in `GemmConfig`.
    """

    block_n: int
    block_k: int
    num_warps: int
    dependent_launch: bool


@dataclass(frozen=True, slots=True)
class SortedExperts:
    """How tokens go through experts in the order of these.

    Attributes:
        gathers: Whether the first product finds the rows' tokens itself, or takes a sorted copy of them.
        padded: Whether the rows of an expert end where a tile does, in the copy and between the products.
        up: The products with gate and up.
        down: The product with the down projection. Its tiles have the same rows.
    """

    gathers: bool
    padded: bool
    up: GemmConfig
    down: GemmConfig


@dataclass(frozen=True, slots=True)
class StreamedExperts:
    """How tokens go through experts one slot at a time, with nothing sorted or combined.

    Attributes:
        up: The products with gate and up.
        down: The product with the down projection, and the sum over a token's slots.
    """

    up: StreamConfig
    down: StreamConfig


def experts_config(
    n_tokens: int,
    top_k: int,
    n_experts: int,
    hidden_size: int,
    ffn_size: int,
    descriptors: bool,
    joined: bool,
    biased: bool,
    target: Target,
) -> SortedExperts | StreamedExperts:
    """Choose how tokens go through their experts.

    Args:
        n_tokens: Tokens, from 1.
        top_k: Slots of a token.
        n_experts: Experts that have weights here.
        hidden_size: Features of a token.
        ffn_size: Features inside an expert.
        descriptors: Whether all weights lie as descriptors can read them.
        joined: Whether gate and up are parts of one tensor.
        biased: Whether they have biases.
        target: The GPU.
    """
    n_slots = n_tokens * top_k
    # Slots that meet at an expert read it twice.
    if n_tokens == 1 or 8 * n_slots <= n_experts:
        return StreamedExperts(stream_config(hidden_size, True, target), stream_config(ffn_size, False, target))
    # Separate gate and up have no room for the highest tile, and biases no registers.
    block_m = rows_per_tile(n_slots, n_experts, ffn_size, descriptors and joined and not biased, target)
    up = gemm_config(block_m, n_slots, n_experts, ffn_size, True, descriptors, joined, biased, target)
    down = gemm_config(block_m, n_slots, n_experts, hidden_size, False, descriptors, False, False, target)
    # Else tiles are filled up with rows of other experts, and to multiply these takes power.
    padded = up.joined and n_slots >= _MANY * n_experts
    return SortedExperts(block_m <= 32 or not up.descriptors, padded, up, down)


def rows_per_tile(n_rows: int, n_experts: int, n: int, tall: bool, target: Target) -> int:
    """Choose the sorted rows per tile.

    A tile that is not full multiplies in vain, and a second one for an expert reads its weights again.

    Args:
        n_rows: Sorted rows.
        n_experts: Experts.
        n: Features of the first product.
        tall: Whether the highest tile may be taken.
        target: The GPU.
    """
    average = n_rows / n_experts
    if target.backend == "hip":
        largest = 64
    elif (
        tall
        and target.arch == 90
        and (average < _FEW or _multiplied(average, _TALL) * _COST_OF_TALL < _multiplied(average, 128))
    ):
        largest = _TALL
    elif not tall and 96 < average <= 192 and n_rows / 48 * (n / _FEATURES) < 24 * target.compute_units:
        # Two tiles and a half for an expert instead of one and a half twice as high: fewer rows in vain. Those of an
        # expert find its weights in L2 as long as programs keep step, which they do for some tiles, and not for many.
        largest = 64
    else:
        largest = 128
    # Experts have more rows than the average, and fewer: half as many again are enough for most.
    return next((size for size in (16, 32, 64) if 1.5 * average <= size), largest)


def _multiplied(average: float, size: int) -> float:
    """Return how many rows are multiplied for an expert in tiles of a size, if tokens choose experts at random."""
    spread = math.sqrt(2 * average)
    certain = max(0, math.floor((average - 4 * spread) / size))
    possible = range(certain, math.ceil((average + 4 * spread) / size))
    return size * (certain + sum(math.erfc((tile * size - average) / spread) / 2 for tile in possible))


def gemm_config(
    block_m: int,
    n_rows: int,
    n_experts: int,
    n: int,
    gated: bool,
    descriptors: bool,
    joined: bool,
    biased: bool,
    target: Target,
) -> GemmConfig:
    """Choose how sorted rows are multiplied.

    Args:
        block_m: Rows per tile, of `rows_per_tile`.
        n_rows: Sorted rows, from 1.
        n_experts: Experts.
        n: Features of the result.
        gated: Whether it comes of gate and up.
        descriptors: Whether the operands lie as descriptors can read them.
        joined: Whether gate and up are parts of one tensor.
        biased: Whether they have biases.
        target: The GPU.
    """
    # Elsewhere Triton makes loads of them, and slower ones than it makes of pointers.
    descriptors &= target.is_hopper_or_later
    # Of fewer rows, what is read twice is small.
    joined &= descriptors and block_m >= 64
    tile: _Tile
    if target.backend == "hip":
        # Without copies that bypass registers, further stages only take registers and LDS. Swapped, and with 8 results
        # for each thread, stores are of 16 bytes.
        tile = (128 if block_m == 16 else 64, 64, True, 2, 4, 2)
    elif not target.is_hopper_or_later:
        tile = (64, 64, False, 3, 8 if block_m == 128 else 4, 2)
    elif not descriptors:
        # Loads are narrow and their addresses many: a small tile keeps them in registers.
        tile = (32, 32, False, 2, 8 if block_m >= 64 else 4, 4)
    elif block_m == 16:
        tile = (64 if gated else 128, 128, True, 5, 4, 1)
    elif block_m == 32:
        tile = (128, 128, True, 3 if gated else 5, 8, 1)
    elif gated and block_m == 64:
        # With biases, Triton takes the sums through shared memory.
        tile = (_FEATURES, 64, False, 4 if biased else 5, 4, 1) if joined else (_FEATURES, 64, True, 5, 8, 1)
    elif gated:
        tile = (_FEATURES, 64, False, 3 if joined else 4, 8, 1)
    else:
        tile = (2 * _FEATURES, 64, False, 5 if block_m == 64 else 3, 8, 1)
    block_n, block_k, swapped, stages, num_warps, programs_per_unit = tile
    if target.arch != 90:
        # Beyond Hopper, more of them spill a few bytes.
        stages = min(stages, 3 if block_m == 32 else 4)
    n_tiles = max_tiles(n_rows, n_experts, block_m) * -(-n // block_n)
    return GemmConfig(
        block_m,
        block_n,
        block_k,
        swapped,
        32 if block_m <= 32 else 8,
        stages,
        num_warps,
        block_m == _TALL and n_rows < _FEW * n_experts,
        # The highest tile leaves no registers for it.
        descriptors and (joined or not gated) and target.arch == 90 and block_m < _TALL,
        descriptors,
        joined,
        min(n_tiles, programs_per_unit * target.compute_units),
        target.is_hopper_or_later,
    )


def stream_config(k: int, gated: bool, target: Target) -> StreamConfig:
    """Choose how the weights of single slots are read.

    Args:
        k: Columns of the weights.
        gated: Whether there are gate and up.
        target: The GPU.
    """
    # A thread holds sums for 32 of its products, over gate and up together.
    num_warps = target.warps(128)
    return StreamConfig(
        2 if gated else 4,
        _ELEMENTS_PER_THREAD * num_warps * target.warp_size,
        num_warps,
        target.is_hopper_or_later,
    )
