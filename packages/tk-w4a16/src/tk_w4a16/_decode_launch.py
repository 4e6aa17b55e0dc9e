"""Launch choices for up to `DECODE_ROWS` rows: pure functions of shapes and the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tk_kernel_core.gemm import PreparedProduct, backend_options, register_share, unit_of
from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.layout import next_power_of_two

if TYPE_CHECKING:
    from tk_kernel_core.targets import Target

DECODE_ROWS = 16
"""Most rows of activations that the kernels in `_decode_kernels` take."""

_TILE, _STEP = 16, 128
# The program that comes last adds up so many partial results at most.
_MOST_SPLITS = 16
# With more on a multiprocessor there would be too few registers for what each has on its way.
_MOST_PROGRAMS = 3


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How a product of few rows is launched.

    Attributes:
        block_m: Rows of a program: 1, 8 or 16.
        tiles: Tiles of 16 output features per program.
        num_warps: Warps per program, each with columns of its own.
        steps: Steps of 128 columns that a warp works on in one turn of its loop.
        ahead: Steps whose weight a warp has on its way.
        x_ahead: Steps whose rows of x a warp has on their way; 0 for a single row.
        iterations: Turns of the loop.
        split: Programs that share the columns of the same tiles.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
        most_registers: Of a thread; None leaves them to the compiler.
    """

    block_m: int
    tiles: int
    num_warps: int
    steps: int
    ahead: int
    x_ahead: int
    iterations: int
    split: int
    dependent_launch: bool
    most_registers: int | None = None


def fits_at_once(n: int, target: Target) -> bool:
    """Return whether programs of two tiles each, for 9 to 16 rows, run all at once.

    Args:
        n: Output features.
        target: The GPU.
    """
    return -(-n // (2 * _TILE)) <= _MOST_PROGRAMS * target.compute_units


def decode_config(m: int, n: int, k: int, group_size: int, target: Target, has_zeros: bool = False) -> DecodeConfig:
    """Choose the launch for a few rows.

    Args:
        m: Rows of x, 1 to `DECODE_ROWS`.
        n: Output features.
        k: Columns of the weight, as for `prepare_decode`.
        group_size: Columns that share a scale, or -1.
        target: The GPU.
        has_zeros: Whether the weight has zero points: then it takes more registers.
    """
    n_steps = -(-k // _STEP)
    units = target.compute_units
    # AMD's matrix instructions have 16 columns at least.
    is_amd = target.backend == "hip"
    n_tiles = -(-n // _TILE)
    # About one program for each multiprocessor: warps are a better way to share columns than programs, which have to
    # add up through memory.
    is_wide = 10 * n_tiles >= 9 * units
    is_few = n_tiles < 2 * units
    # Each part of a step has sums of its own, which take registers.
    has_parts = group_size in (32, 64)
    most_registers = None
    if m == 1 and not is_amd:
        # The 8 columns of the matrix instruction are a step each.
        block_m, tiles, steps, ahead, x_ahead = 1, 1, 8, 4, 0
        n_turns = -(-n_steps // steps)
        num_warps = _warps(n_turns, 1, is_few) if is_wide else 1
        split = 1 if is_wide else min(n_turns, _MOST_SPLITS)
        if is_wide and is_few and 8 < n_turns <= 16 and not has_parts:
            # One program of as many warps as there are turns, on each multiprocessor.
            tiles, num_warps, ahead = 2, 16, 2
        iterations = -(-n_turns // (num_warps * split))
        most_warps = 24 if iterations == 1 and not has_parts else 0
    else:
        block_m = 16 if m > 8 or is_amd else 8
        # Two tiles halve how often x is read, one fills more of the GPU.
        tiles = 2 if is_amd or (n_tiles > _MOST_PROGRAMS * units and not has_parts) else 1
        n_programs = -(-n // (tiles * _TILE))
        is_wide = 10 * n_programs >= 9 * units
        # Unrolled as far as the instruction cache reaches. AMD's compiler would move all loads to the top.
        unrolled = 1 if is_amd else 16 if block_m == 8 and not has_parts else 12
        if tiles == 2 and target.name == "sm_90":
            # Less leaves registers for what is on its way, and for zero points.
            unrolled = 8 if block_m == 8 and n_steps <= 32 else 2 if has_zeros else 4
        if is_wide and tiles == 1 and (block_m == 8 or has_parts):
            num_warps = _warps(n_steps, unrolled, is_few)
        else:
            num_warps = min(4, next_power_of_two(n_steps))
        # A warp that is left less than two steps does little but add up.
        useful = -(-n_steps // (2 * num_warps))
        split = 1 if is_wide else min(-(-2 * units // n_programs), useful, _MOST_SPLITS)
        n_own = -(-n_steps // (num_warps * split))
        iterations = -(-n_own // unrolled)
        steps = -(-n_own // iterations)
        ahead = min(steps, 2)
        x_ahead = 0 if is_amd else 1
        most_warps = 0 if has_parts else 16
    # There may be more than run at once.
    per_unit = min(-(-n_tiles * split // (tiles * units)), max(1, most_warps // num_warps))
    if per_unit * num_warps <= most_warps:
        most_registers = register_share(num_warps, per_unit, target)
    # Rounding up may have left the last programs nothing.
    split = -(-n_steps // (num_warps * steps * iterations))
    return DecodeConfig(
        block_m,
        tiles,
        num_warps,
        steps,
        ahead,
        x_ahead,
        iterations,
        split,
        target.is_hopper_or_later,
        most_registers,
    )


def _warps(n_turns: int, unrolled: int, is_few: bool) -> int:
    """Return the number of warps that share all columns.

    Args:
        n_turns: What there is to share.
        unrolled: How much of it a warp takes in one turn of its loop.
        is_few: Whether two programs on each multiprocessor are all that there are.
    """
    if n_turns <= 4 * min(unrolled, 8) and not (is_few and n_turns >= 16):
        return min(4, next_power_of_two(n_turns))
    # A loop takes registers, and then only smaller programs leave a multiprocessor several.
    return 8 if is_few or n_turns <= 8 * unrolled else 4


def prepare_decode(
    m: int,
    n: int,
    k: int,
    row_stride: int,
    group_size: int,
    target: Target,
    config: DecodeConfig | None = None,
    has_zeros: bool = False,
) -> PreparedProduct:
    """Return what a launch for a few rows takes beside tensors.

    The tensors are y ([m, n], contiguous), x, codes, scales, zeros or None, bias or None, partial and counter, in this
    order. For a weight with a permutation the columns of x have been gathered in the order of the weight's, and `k` are
    all of them.

    Args:
        m: Rows of x, 1 to `DECODE_ROWS`.
        n: Output features.
        k: Columns of x: input features, or all columns of the weight.
        row_stride: Elements from one row of x to the next.
        group_size: Columns that share a scale, or -1.
        target: The GPU.
        config: How to launch; `decode_config` of the rest by default.
        has_zeros: Whether there are zeros.
    """
    config = config or decode_config(m, n, k, group_size, target, has_zeros)
    constexprs: dict[str, Any] = {
        "IN_FEATURES": k,
        "GROUP_SIZE": group_size,
        "TILES": config.tiles,
        "WARPS": config.num_warps,
        "AHEAD": config.ahead,
        **({"X_AHEAD": config.x_ahead} if config.block_m > 1 else {}),
        "ITERATIONS": config.iterations,
        "SPLIT": config.split,
        # The interpreter knows no machine instructions.
        "PTX": target.backend == "cuda" and not interpreting(),
        "DEPENDENT_LAUNCH": config.dependent_launch,
    }
    scalars: tuple[int, ...] = (n,)
    if config.block_m == 1:
        kernel = "w4a16_decode_row_kernel"
    else:
        kernel = "w4a16_decode_kernel"
        unit = unit_of(row_stride)
        scalars = (m, n, row_stride // unit)
        constexprs = {"ALIGNMENT": unit, "BLOCK_M": config.block_m, "STEPS": config.steps, **constexprs}
    options = backend_options(config.num_warps, config.dependent_launch, config.most_registers)
    block_n = config.tiles * _TILE
    n_programs = -(-n // block_n)
    is_split = config.split > 1
    return PreparedProduct(
        module="tk_w4a16._decode_kernels",
        kernel=kernel,
        grid=(n_programs, config.split, 1),
        scalars=scalars,
        constexprs=constexprs,
        options={"num_stages": 1, **options},
        partial_elements=n_programs * config.split * block_n * config.block_m if is_split else 0,
        n_counters=n_programs if is_split else 0,
    )


def prepare_dequantize(rows: int, k: int, group_size: int, target: Target) -> PreparedProduct:
    """Return what the launch that dequantises a weight takes beside tensors.

    The tensors are the result ([rows, k], contiguous, of any floating point), codes, scales, and zeros or None.

    Args:
        rows: Output features.
        k: Columns of the result: input features, or all columns of a weight with a permutation, in its order.
        group_size: Columns that share a scale, or -1.
        target: The GPU.
        has_zeros: Whether the weight has zero points: then it takes more registers.
    """
    n_steps = -(-k // _STEP)
    n_own = min(4, next_power_of_two(n_steps))
    return PreparedProduct(
        module="tk_w4a16._weight_kernels",
        kernel="dequantize_packed_kernel",
        grid=(-(-rows // _TILE), -(-n_steps // n_own), 1),
        scalars=(rows,),
        constexprs={
            "IN_FEATURES": k,
            "GROUP_SIZE": group_size,
            "STEPS": n_own,
            "PTX": target.backend == "cuda" and not interpreting(),
            "DEPENDENT_LAUNCH": target.is_hopper_or_later,
        },
        options=backend_options(4, target.is_hopper_or_later),
    )
