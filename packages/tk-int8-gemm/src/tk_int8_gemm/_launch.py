"""Launch choices: pure functions of shapes, element types and the target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tk_kernel_core.gemm import parts_of
from tk_kernel_core.layout import next_power_of_two

if TYPE_CHECKING:
    from tk_kernel_core.targets import Target

LONGEST_ROW = 2**24 - 1
"""Elements between the starts of two rows of `x` or of the weights that the GEMM kernels reach: a tile's are counted
in 32 bits."""

LONGEST_INT32_SUM = 2**17 - 1
"""Products of two codes, of at most 2^14 each, whose sum int32 certainly holds."""

_GROUP_M = 8


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """How `int8_gemm_kernel` or `w8a8_gemm_kernel` is launched.

    Attributes:
        block_m: Rows of `x` per tile.
        block_n: Rows of the weights per tile.
        block_k: Columns of both per step.
        swapped: Whether the weights are the first operand of the matrix units.
        group_m: Rows of tiles that are gone through together.
        stages: Steps in flight or in work at a time.
        num_warps: Warps per program.
        descriptors: Whether `x` and the weights are read through descriptors.
        out_descriptor: Whether the result, too, is written through one where its rows are aligned to 16 bytes.
        n_programs: Programs in the grid; as many as there are tiles, except where a program goes through several.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
        reason: Why this was chosen, in a sentence.
    """

    block_m: int
    block_n: int
    block_k: int
    swapped: bool
    group_m: int
    stages: int
    num_warps: int
    descriptors: bool
    out_descriptor: bool
    n_programs: int
    dependent_launch: bool
    reason: str


@dataclass(frozen=True, slots=True)
class DequantizeConfig:
    """How weights are dequantised, for a product with what they stand for.

    Attributes:
        rows: Rows of the weights that are dequantised and multiplied at a time.
        block_n: Rows of the weights per program of `dequantize_kernel`.
        block_k: Columns per program.
        num_warps: Warps per program.
        dependent_launch: As in `GemmConfig`.
        reason: Why this was chosen, in a sentence.
    """

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    dependent_launch: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RowConfig:
    """How `quantize_per_token_kernel` or `row_sums_kernel` is launched.

    Attributes:
        block_m: Rows per program.
        block_k: Columns per tile; at least the row's length where a row is kept in registers.
        num_warps: Warps per program.
        dependent_launch: As in `GemmConfig`.
    """

    block_m: int
    block_k: int
    num_warps: int
    dependent_launch: bool


def int8_gemm_config(
    m: int, n: int, k: int, alignment: int, dtype: str, target: Target
) -> GemmConfig | DequantizeConfig:
    """Choose how `x` in floats is multiplied by int8 weights.

    Args:
        m: Rows of `x`.
        n: Rows of the weights.
        k: Columns of both.
        alignment: Largest power of two up to 16 that divides `k` and the distance of two rows of `x`.
        dtype: Element type of `x`: `float16`, `bfloat16` or `float32`.
        target: The GPU.
    """
    if dtype == "float32":
        # The matrix units have no fp32; split into three TF32 products, it would cost more than the weights save.
        return dequantize_config(m, n, k, 4, target, "x is fp32, which the matrix units do not multiply")
    if k > LONGEST_ROW:
        return dequantize_config(m, n, k, 2, target, f"rows longer than {LONGEST_ROW} are beyond the kernel's offsets")
    # To dequantise costs 3 bytes of traffic a weight, whatever m is. Below this the kernel costs less than that
    # beyond cuBLAS, which multiplies without converting anything.
    if m > 384:
        return dequantize_config(m, n, k, 2, target, f"m = {m} repays dequantising the weights once")
    if alignment < 16:
        return _unaligned(m, n, alignment, target)
    if m <= 16:
        # The weights' traffic bounds it: many small programs, whose 16 rows take part in full. Two warps, because
        # four would convert the same codes twice.
        tile = (16, 32, 256, True, 4, 2) if target.backend == "cuda" else (16, 64, 128, True, 2, 4)
        return _one_tile_each(m, n, tile, target, f"m = {m} is a decode step, bound by the traffic of the weights")
    if m <= 64:
        # Not swapped: on sm_90 codes that go from registers into wgmma are loaded 8 bytes at a time. Wide tiles read
        # x less often, and narrow ones are enough for every multiprocessor.
        tile = (64, 128, 64, False, 4, 4) if n >= 256 * target.compute_units else (64, 64, 128, False, 4, 4)
        return _one_tile_each(m, n, tile, target, f"m = {m} fits a tile of 64 rows")
    return _one_tile_each(
        m, n, (128, 128, 64, False, 4, 8), target, f"m = {m} fills tiles of 128 rows but not a dequantised weight"
    )


def w8a8_config(m: int, n: int, k: int, alignment: int, target: Target) -> GemmConfig | DequantizeConfig:
    """Choose how `x` in codes is multiplied by int8 weights.

    Args:
        m: Rows of `x`.
        n: Rows of the weights.
        k: Columns of both.
        alignment: Largest power of two up to 16 that divides `k` and the distance of two rows of `x`.
        target: The GPU.
    """
    if k > LONGEST_INT32_SUM:
        return dequantize_config(
            m, n, k, 4, target, f"sums of more than {LONGEST_INT32_SUM} products may not fit int32"
        )
    if alignment < 16:
        return _unaligned(m, n, alignment, target)
    units, is_amd = target.compute_units, target.backend == "hip"
    if m <= 16:
        tile = (16, 64, 256, True, 4, 4)
        return _persistent(m, n, tile, 3, target, f"m = {m} is a decode step, bound by the traffic of the weights")
    if m <= 32:
        return _persistent(m, n, (32, 64, 256, True, 4, 4), 2, target, f"m = {m} fits a tile of 32 rows")
    if m <= 64:
        # With few tiles, each must have much on its way.
        is_narrow = n <= 2 * units * 64 and not is_amd
        tile, per_unit = ((64, 64, 256, True, 3, 4), 2) if is_narrow else ((64, 64, 128, True, 3, 4), 4)
        return _persistent(m, n, tile, per_unit, target, f"m = {m} fits a tile of 64 rows")
    if m <= 192:
        return _persistent(m, n, (64, 128, 128, True, 4, 4), 2, target, f"m = {m} fills few tiles of 64 rows")
    if -(-m // 128) * -(-n // 128) <= 3 * units:
        tile, reason = (128, 64, 128, True, 3, 4), f"m = {m} fills too few square tiles to load every unit alike"
        return _persistent(m, n, tile, 3, target, reason)
    warps = 4 if target.name == "sm_90" else 8
    tile = (128, 128, 128, not is_amd, 3, warps)
    config = _persistent(m, n, tile, 2, target, f"m = {m} fills tiles of 128 rows")
    # A long launch gains nothing by beginning early, and on an H200 took 2 to 5 % longer.
    return replace(config, dependent_launch=False)


def quantize_config(k: int, target: Target) -> RowConfig:
    """Choose how rows are quantised per token or summed up.

    The choice does not depend on the number of rows, and so neither does a row's result.

    Args:
        k: Elements in a row.
        target: The GPU.
    """
    # 16 codes make the 16 bytes of one access; a longer row is read twice, the second time from L2.
    block_k = next_power_of_two(k) if k <= 16_384 else 8192
    block_m = max(1, 2048 // block_k)
    return RowConfig(block_m, block_k, target.warps(block_m * block_k // 16), target.is_hopper_or_later)


_Tile = tuple[int, int, int, bool, int, int]
"""block_m, block_n, block_k, swapped, stages and warps."""


def _unaligned(m: int, n: int, alignment: int, target: Target) -> GemmConfig:
    # Loads are narrow and their addresses many: a small tile keeps them in registers.
    if m <= 16:
        tile = (16, 32, 64, True, 2, 2)
    else:
        tile = (64, 64, 64, False, 2, 4)
    return _one_tile_each(m, n, tile, target, f"rows aligned to {alignment} elements allow no 16-byte loads")


def _one_tile_each(m: int, n: int, tile: _Tile, target: Target, reason: str) -> GemmConfig:
    block_m, block_n, block_k, swapped, stages, num_warps = tile
    if target.backend == "hip":
        # Without copies that bypass registers, further stages only take registers and LDS.
        stages = 2
    n_tiles = -(-m // block_m) * -(-n // block_n)
    return GemmConfig(
        block_m,
        block_n,
        block_k,
        swapped,
        _GROUP_M,
        stages,
        num_warps,
        False,
        False,
        n_tiles,
        target.is_hopper_or_later,
        reason,
    )


def _persistent(m: int, n: int, tile: _Tile, programs_per_unit: int, target: Target, reason: str) -> GemmConfig:
    """No more programs than run at a time, each going through several tiles."""
    config = _one_tile_each(m, n, tile, target, reason)
    block_n = tile[1]
    n_programs = min(config.n_programs, programs_per_unit * target.compute_units)
    # Elsewhere Triton makes loads of them, and slower ones than it makes of pointers.
    return replace(
        config,
        n_programs=n_programs,
        descriptors=target.is_hopper_or_later,
        out_descriptor=target.is_hopper_or_later and block_n == 128,
    )


def dequantize_config(m: int, n: int, k: int, bytes_per_element: int, target: Target, reason: str) -> DequantizeConfig:
    """Choose how weights are dequantised.

    Args:
        m: Rows of `x`.
        n: Rows of the weights.
        k: Columns.
        bytes_per_element: Of what they are dequantised to.
        target: The GPU.
        reason: Why they are.
    """
    rows = parts_of(m, n, k, bytes_per_element, target)[0].stop
    block_k = min(next_power_of_two(k), 1024)
    block_n = 4096 // block_k
    return DequantizeConfig(rows, block_n, block_k, target.warps(256), target.is_hopper_or_later, reason)
