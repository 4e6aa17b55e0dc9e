"""How products go about their weight, and launch choices for the plain layout: pure functions of shapes and dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tk_kernel_core.gemm import tall_split
from tk_w4a16._decode_launch import DECODE_ROWS, fits_at_once
from tk_w4a16._middle_launch import MIDDLE_ROWS, MOST_TALL_ROWS, MOST_WIDE_ROWS

if TYPE_CHECKING:
    from tk_kernel_core.targets import Target

PLAIN_ROWS = 384
"""Most rows of activations for which a weight in the plain layout is dequantised tile by tile, by every program."""

GATHER_BLOCK = 1024
"""Columns of a row of activations that a program gathers."""

# A group longer than any weight.
_ONE_GROUP = 2**30


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """How a kernel on the plain layout is launched.

    Attributes:
        block_m: Rows of x per program.
        block_n: Output features per program.
        block_k: Input features per step.
        group_size: Input features in a group.
        span: Consecutive input features within a step that certainly share a group.
        stages: Steps in flight or in work at a time.
        num_warps: Warps per program.
    """

    block_m: int
    block_n: int
    block_k: int
    group_size: int
    span: int
    stages: int
    num_warps: int


def linear_way(
    m: int, n: int, k: int, dtype: str, target: Target
) -> tuple[Literal["decode", "middle", "dequantize"], str]:
    """Choose how `w4a16_linear` goes about a product, and say why.

    Args:
        m: Rows of x.
        n: Output features.
        k: Columns of the weight.
        dtype: Element type of x: `float16`, `bfloat16` or `float32`.
        target: The GPU.
    """
    if dtype == "float32":
        return "dequantize", "x is fp32, which the matrix units do not multiply"
    # On an H200 tiles that are many enough to load every unit alike are faster than a weight that is written out.
    if tall_split(m, n, k, target):
        most = MOST_TALL_ROWS
    else:
        is_wide = target.name == "sm_90" and -(-m // 128) * -(-n // 128) >= 2.5 * target.compute_units
        most = MOST_WIDE_ROWS if is_wide else MIDDLE_ROWS
    if m > most:
        return "dequantize", f"m = {m} repays dequantising the weight once"
    if m > DECODE_ROWS:
        return "middle", f"m = {m} fills the matrix units, which take the weight from registers"
    if m > 8 and target.is_hopper_or_later and not fits_at_once(n, target):
        # Each program of a decode step reads all of x: so many of them would wait for L2.
        return "middle", f"m = {m} rows are read too often by programs of few of n = {n} features"
    return "decode", f"m = {m} is a decode step, bound by the traffic of the weight"


def gemm_way(m: int, dtype: str) -> tuple[Literal["tiles", "dequantize"], str]:
    """Choose how `w4a16_gemm` goes about a product, and say why; as `linear_way`."""
    if dtype == "float32":
        return "dequantize", "x is fp32, which the matrix units do not multiply"
    if m > PLAIN_ROWS:
        return "dequantize", f"m = {m} repays dequantising the weight once"
    return "tiles", f"m = {m} is multiplied by tiles that are dequantised on the way"


def plain_config(m: int, n: int, n_groups: int, group_size: int, target: Target) -> PlainConfig:
    """Choose the launch of a product with a weight in the plain layout.

    Args:
        m: Rows of x.
        n: Output features.
        n_groups: Groups of input features.
        group_size: Input features in a group; of no meaning if there is one.
        target: The GPU.
    """
    block_m = 16 if m <= 16 else 32 if m <= 32 else 64
    # Narrow tiles where wide ones would leave multiprocessors without work.
    block_n = 64 if -(-n // 64) * -(-m // block_m) >= 2 * target.compute_units else 32
    block_k = 128 if block_m <= 32 else 64
    stages = 2 if target.backend == "hip" else 3
    # Registers of four warps would spill on sm_100.
    num_warps = 8 if block_m == 64 else 4
    return PlainConfig(block_m, block_n, block_k, *_groups(n_groups, group_size, block_k), stages, num_warps)


def plain_dequantize_config(n_groups: int, group_size: int) -> PlainConfig:
    """Choose the launch that dequantises a weight in the plain layout; arguments as for `plain_config`."""
    return PlainConfig(1, 64, 64, *_groups(n_groups, group_size, 64), 1, 4)


def _groups(n_groups: int, group_size: int, block_k: int) -> tuple[int, int]:
    """Return the group size and the span."""
    if n_groups == 1:
        return _ONE_GROUP, block_k
    return group_size, min(block_k, group_size & -group_size)
