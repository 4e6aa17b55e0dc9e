"""Launch choices for prepared weights and up to `DECODE_ROWS` rows: pure functions of shapes, dtypes and the target."""

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

_TILE, _GROUP = 16, 128
# The program that comes last adds up so many partial results at most.
_MOST_SPLITS = 16
# Of two tiles each, on a multiprocessor at a time.
_MOST_PROGRAMS = 4


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How a product of few rows is launched.

    Attributes:
        block_m: Rows of a program: 1, 8 or 16.
        tiles: Tiles of 16 output features per program.
        num_warps: Warps per program, each with input features of its own.
        steps: Groups of 128 input features that a warp works on in one turn of its loop.
        ahead: Groups whose weight a warp has on its way.
        x_ahead: Groups whose rows of x a warp has on their way; 0 for a single row.
        iterations: Turns of the loop.
        split: Programs that share the input features of the same tiles.
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


def decode_config(
    m: int, n: int, k: int, is_bfloat16: bool, target: Target, has_zero_point: bool = False
) -> DecodeConfig:
    """Choose the launch for a few rows.

    Args:
        m: Rows of x, 1 to `DECODE_ROWS`.
        n: Output features.
        k: Input features.
        is_bfloat16: Whether x is bfloat16: then a weight takes two instructions, in float16 one.
        target: The GPU.
        has_zero_point: Whether the weight has zero points: then the matrix units also add up x.
    """
    n_groups = -(-k // _GROUP)
    # AMD's matrix instructions have 16 columns at least.
    is_amd = target.backend == "hip"
    # Two tiles halve how often x is read, one fills more of the GPU.
    tiles = 2 if m > 8 or is_amd else 1
    n_programs = -(-n // (tiles * _TILE))
    most_registers = None
    is_wide = 2 * n_programs >= 3 * target.compute_units
    if m == 1 and not is_amd:
        # The 8 columns of the matrix instruction are groups of one step each.
        block_m, steps, x_ahead = 1, 8, 0
        n_turns = -(-n_groups // steps)
        num_warps = min(4, next_power_of_two(n_turns)) if is_wide else 1
        split = 1 if is_wide else min(n_turns, _MOST_SPLITS)
        iterations = -(-n_turns // (num_warps * split))
        ahead = 2 if iterations == 1 else 4
    else:
        block_m = 8 * tiles
        num_warps = min(4, next_power_of_two(n_groups))
        # A warp that is left less than two groups does little but add up.
        useful = -(-n_groups // (2 * num_warps))
        split = 1 if is_wide else min(-(-2 * target.compute_units // n_programs), useful, _MOST_SPLITS)
        n_own = -(-n_groups // (num_warps * split))
        # Unrolled as far as the instruction cache reaches. AMD's compiler would move all loads to the top.
        iterations = -(-n_own // (1 if is_amd else 8 if is_bfloat16 else 16))
        steps = -(-n_own // iterations)
        ahead, x_ahead = 1, 0 if is_amd else 1
        if tiles == 2 and num_warps == 4:
            # With a fifth program there would be too few registers for what each has on its way.
            per_unit = min(_MOST_PROGRAMS, -(-n_programs * split // target.compute_units))
            most_registers = register_share(num_warps, per_unit, target)
    # Rounding up may have left the last programs nothing.
    split = -(-n_groups // (num_warps * steps * iterations))
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


def prepare_decode(
    m: int,
    n: int,
    k: int,
    row_stride: int,
    is_bfloat16: bool,
    target: Target,
    config: DecodeConfig | None = None,
    has_zero_point: bool = False,
) -> PreparedProduct:
    """Return what a launch for a few rows takes beside tensors.

    The tensors are y ([m, n], contiguous), x, codes, scale, zero_point or None, bias or None, partial and counter, in
    this order.

    Args:
        m: Rows of x, 1 to `DECODE_ROWS`.
        n: Output features.
        k: Input features.
        row_stride: Elements from one row of x to the next.
        is_bfloat16: Whether x is bfloat16 and not float16.
        target: The GPU.
        config: How to launch; `decode_config` of the rest by default.
        has_zero_point: Whether the weight has zero points.
    """
    config = config or decode_config(m, n, k, is_bfloat16, target, has_zero_point)
    constexprs: dict[str, Any] = {
        "IN_FEATURES": k,
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
        kernel = "int8_decode_row_kernel"
    else:
        kernel = "int8_decode_kernel"
        unit = unit_of(row_stride)
        scalars = (m, n, row_stride // unit)
        constexprs = {"ALIGNMENT": unit, "BLOCK_M": config.block_m, "STEPS": config.steps, **constexprs}
    options = backend_options(config.num_warps, config.dependent_launch, config.most_registers)
    block_n = config.tiles * _TILE
    n_programs = -(-n // block_n)
    is_split = config.split > 1
    return PreparedProduct(
        module="tk_int8_gemm._decode_kernels",
        kernel=kernel,
        grid=(n_programs, config.split, 1),
        scalars=scalars,
        constexprs=constexprs,
        options={"num_stages": 1, **options},
        partial_elements=n_programs * config.split * block_n * config.block_m if is_split else 0,
        n_counters=n_programs if is_split else 0,
    )
