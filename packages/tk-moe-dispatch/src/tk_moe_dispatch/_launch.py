"""Launch choices of routing, sorting, permutation and combination: pure functions of shapes and the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tk_kernel_core.layout import next_power_of_two

if TYPE_CHECKING:
    from tk_kernel_core.targets import Target

LONGEST_ROW = 2**31 - 1
"""Elements between the starts of two tokens that kernels reach: the distance is handed over in 32 bits."""

TILE_FIELDS = 8
"""Numbers that `schedule_kernel` writes of a tile of rows, in int32."""


@dataclass(frozen=True, slots=True)
class LogitsConfig:
    """How `router_logits_kernel` is launched.

    Attributes:
        n_parts: Parts into which the hidden size is split, each summed up by another program.
        block_t: Tokens per tile.
        block_e: Experts per tile.
        block_h: Columns per step.
        stages: Steps in flight or in work at a time.
        num_warps: Warps per program.
        n_programs: Programs in the grid.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
    """

    n_parts: int
    block_t: int
    block_e: int
    block_h: int
    stages: int
    num_warps: int
    n_programs: int
    dependent_launch: bool


@dataclass(frozen=True, slots=True)
class RouteConfig:
    """How `route_kernel` is launched.

    Attributes:
        block_t: Tokens per program.
        num_warps: Warps per program.
        dependent_launch: As in `LogitsConfig`.
    """

    block_t: int
    num_warps: int
    dependent_launch: bool


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """How `count_kernel` and `schedule_kernel` are launched.

    Attributes:
        chunk: Slots per program.
        n_chunks: Programs.
        block_e: Experts, rounded up to a power of two.
        block_all: Slots, rounded up to a power of two, where each program counts all of them; else 0.
        block_c: Chunks whose counts are added up at a time.
        block_j: Slots that those of a chunk are compared with at a time.
        num_warps: Warps per program.
        dependent_launch: As in `LogitsConfig`.
    """

    chunk: int
    n_chunks: int
    block_e: int
    block_all: int
    block_c: int
    block_j: int
    num_warps: int
    dependent_launch: bool


@dataclass(frozen=True, slots=True)
class RowConfig:
    """How `permute_kernel` or `combine_kernel` is launched.

    Attributes:
        block_t: Tokens per tile.
        block_h: Columns per tile.
        num_warps: Warps per program.
        n_programs: Programs in the grid, one a tile.
        dependent_launch: As in `LogitsConfig`.
    """

    block_t: int
    block_h: int
    num_warps: int
    n_programs: int
    dependent_launch: bool


def max_tiles(rows: int, experts: int, block_m: int) -> int:
    """Return the most tiles of `block_m` rows that `rows` sorted rows of `experts` experts can need.

    An expert with rows needs at most `block_m - 1` more to fill its tiles, and no more experts than rows have any.
    """
    return (rows + min(rows, experts) * (block_m - 1)) // block_m


def logits_config(n_tokens: int, n_experts: int, width: int, bytes_per_element: int, target: Target) -> LogitsConfig:
    """Choose how tokens are scored.

    Args:
        n_tokens: Rows of activations.
        n_experts: Rows of the router's weight.
        width: Columns of both.
        bytes_per_element: Of the wider one of both.
        target: The GPU.
    """
    stages = 4 if target.backend == "cuda" else 2
    if bytes_per_element > 2:
        block_t, block_e, block_h = 16, 16, 64
    elif n_tokens <= 64:
        # The weight's traffic and the wait for it bound the time: few bytes per program.
        block_t, block_e, block_h = 16, 16, 256
    else:
        # Loads are narrow where rows begin anywhere: a small tile keeps their addresses in registers.
        widest = 128 if width % 16 == 0 else 32
        block_t, block_e, block_h = 64, max(16, min(widest, next_power_of_two(n_experts))), 64
    n_tiles = -(-n_tokens // block_t) * -(-n_experts // block_e)
    # Parts fill the GPU. For each number another kernel adds up, and more than 16 cost more than they save.
    useful = min(target.compute_units // n_tiles, -(-width // block_h))
    n_parts = 16 if useful >= 4 else 4 if useful >= 2 else 1
    return LogitsConfig(n_parts, block_t, block_e, block_h, stages, 4, n_tiles * n_parts, target.is_hopper_or_later)


def route_config(n_tokens: int, n_places: int, target: Target) -> RouteConfig:
    """Choose how experts are picked.

    Args:
        n_tokens: Rows of logits.
        n_places: Elements of a row, as it is laid out.
        target: The GPU.
    """
    # A row within one warp needs no barriers. Several rows per program, as soon as there are many programs.
    warps_per_row = max(1, min(16, n_places // 1024))
    block_t = max(1, min(4, 4096 // n_places)) if n_tokens >= 16 * target.compute_units else 1
    return RouteConfig(block_t, min(16, warps_per_row * block_t), target.is_hopper_or_later)


def schedule_config(n_slots: int, n_experts: int, target: Target) -> ScheduleConfig:
    """Choose how slots are sorted.

    Args:
        n_slots: Tokens times top-k.
        n_experts: Experts here.
        target: The GPU.
    """
    block_e = max(16, next_power_of_two(n_experts))
    if n_slots <= 8192:
        # To count all slots takes a program less time than another kernel before it.
        chunk = 32 if n_slots <= 4096 else 64
        block_all = max(chunk, next_power_of_two(n_slots))
        num_warps = target.warps(128 if n_slots <= 1024 else 256)
    else:
        # The comparisons within a chunk grow with its square; what all programs read of the counts grows with that of
        # the number of chunks.
        chunk, block_all, num_warps = 256 if n_slots <= 2**17 else 1024, 0, target.warps(512)
    block_c = max(1, min(32, 2048 // block_e))
    block_j = min(chunk, 64) if chunk <= 256 else 16
    n_chunks = -(-n_slots // chunk)
    return ScheduleConfig(chunk, n_chunks, block_e, block_all, block_c, block_j, num_warps, target.is_hopper_or_later)


def row_config(n_tokens: int, width: int, bytes_per_element: int, target: Target) -> RowConfig:
    """Choose how tokens are brought into order, or combined.

    Args:
        n_tokens: Tokens.
        width: Elements of one.
        bytes_per_element: Of what is written.
        target: The GPU.
    """
    # 16 bytes a thread, of a token's choices at a time.
    elements = 16 // bytes_per_element
    threads = 128
    block_h = min(next_power_of_two(width), elements * threads)
    block_t = max(1, elements * threads // block_h)
    n_programs = -(-n_tokens // block_t) * -(-width // block_h)
    return RowConfig(block_t, block_h, target.warps(threads), n_programs, target.is_hopper_or_later)
