"""Launch choices for prepared weights and dozens of rows: pure functions of shapes and the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tk_int8_gemm._decode_launch import DECODE_ROWS
from tk_kernel_core.gemm import (
    TALL_ROWS,
    PreparedProduct,
    backend_options,
    register_share,
    split_steps,
    tall_split,
)
from tk_kernel_core.interpreter import interpreting

if TYPE_CHECKING:
    from tk_kernel_core.targets import Target

MIDDLE_ROWS, MOST_WIDE_ROWS, MOST_TALL_ROWS = 256, 768, 2048
"""Most rows of activations that the kernels in `_middle_kernels` are meant for: in general, for weights of many output
features, and in tall tiles; they take any number."""

_MODULE = "tk_int8_gemm._middle_kernels"
_TILE, _GROUP = 16, 128
# Times the rows of a program: what the one that comes last adds up.
_MOST_PARTS = 512


@dataclass(frozen=True, slots=True)
class MiddleConfig:
    """How a product of dozens of rows is launched.

    Attributes:
        block_m: Rows of x per program.
        num_warps: Warps per program, each with 16 output features of its own.
        stages: Groups of 128 input features of x on their way or in work at a time.
        in_halves: Whether half of a group is dequantised while the half before it is multiplied.
        split: Programs that share the input features of the same results.
        descriptors: Whether x is read through a descriptor.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
        most_registers: Of a thread; None leaves them to the compiler.
    """

    block_m: int
    num_warps: int
    stages: int
    in_halves: bool
    split: int
    descriptors: bool
    dependent_launch: bool
    most_registers: int | None = None

    @property
    def block_n(self) -> int:
        """Output features per program."""
        return _TILE * self.num_warps


def linear_way(
    m: int, n: int, k: int, dtype: str, target: Target
) -> tuple[Literal["decode", "middle", "dequantize"], str]:
    """Choose how `int8_linear` goes about a product, and say why.

    Args:
        m: Rows of x.
        n: Output features.
        k: Input features.
        dtype: Element type of x: `float16`, `bfloat16` or `float32`.
        target: The GPU.
    """
    if dtype == "float32":
        return "dequantize", "x is fp32, which the matrix units do not multiply"
    # On an H200 tiles that are many enough to load every unit alike are faster than a weight that is written out.
    if tall_split(m, n, k, target):
        most = MOST_TALL_ROWS
    else:
        is_wide = target.name == "sm_90" and -(-m // 128) * -(-n // 128) >= 3 * target.compute_units
        most = MOST_WIDE_ROWS if is_wide else MIDDLE_ROWS
    if m > most:
        return "dequantize", f"m = {m} repays dequantising the weights once"
    if m > DECODE_ROWS:
        return "middle", f"m = {m} fills the matrix units, which take the weights from registers"
    return "decode", f"m = {m} is a decode step, bound by the traffic of the weights"


def middle_config(m: int, n: int, k: int, target: Target) -> MiddleConfig:
    """Choose the launch for dozens of rows.

    Args:
        m: Rows of x.
        n: Output features.
        k: Input features.
        target: The GPU.
    """
    tall = tall_split(m, n, k, target)
    if tall:
        return MiddleConfig(
            block_m=TALL_ROWS,
            num_warps=8,
            stages=3,
            in_halves=True,
            split=tall,
            descriptors=True,
            dependent_launch=True,
            most_registers=register_share(8, 1, target),
        )
    num_warps, stages = 4, 2
    if m <= 32:
        block_m, stages, programs_per_unit = 32, 3, 4
    elif m <= 64:
        block_m, programs_per_unit = 64, 4
    else:
        block_m, programs_per_unit = 128, 3
    if target.name == "sm_90" and m > 32 and 2 * -(-n // 128) * -(-m // block_m) >= 3 * target.compute_units:
        # Wide tiles read x half as often, but are few.
        num_warps, stages, programs_per_unit = 8, 3, 2
    if target.backend == "hip":
        # Its local data share holds no more than two groups of narrow tiles.
        block_m, stages, programs_per_unit = min(block_m, 64), 2, 2
    n_programs = -(-n // (_TILE * num_warps)) * -(-m // block_m)
    return MiddleConfig(
        block_m,
        num_warps,
        stages,
        False,
        split_steps(n_programs, -(-k // _GROUP), programs_per_unit * target.compute_units, _MOST_PARTS // block_m),
        target.is_hopper_or_later,
        target.is_hopper_or_later,
        register_share(num_warps, programs_per_unit, target),
    )


def prepare_middle(m: int, n: int, k: int, target: Target, config: MiddleConfig | None = None) -> PreparedProduct:
    """Return what a launch for 17 rows or more takes beside tensors.

    In the place of x it takes what `prepare_arrangement` makes of it; and last x_sum: the sums of the rows of x,
    float32, [m], or None where there are no zero points.

    Args:
        m: Rows of x.
        n: Output features.
        k: Input features.
        target: The GPU.
        config: How to launch; `middle_config` of the rest by default.
    """
    config = config or middle_config(m, n, k, target)
    n_programs = -(-n // config.block_n) * -(-m // config.block_m)
    is_split = config.split > 1
    return PreparedProduct(
        module=_MODULE,
        kernel="int8_middle_kernel",
        grid=(n_programs, config.split, 1),
        scalars=(m, n),
        constexprs={
            "BLOCK_M": config.block_m,
            "WARPS": config.num_warps,
            "STAGES": config.stages,
            "IN_FEATURES": k,
            "IN_HALVES": config.in_halves,
            "SPLIT": config.split,
            # The interpreter knows no machine instructions.
            "PTX": target.backend == "cuda" and not interpreting(),
            "DESCRIPTORS": config.descriptors,
            "DEPENDENT_LAUNCH": config.dependent_launch,
        },
        options=backend_options(config.num_warps, config.dependent_launch, config.most_registers),
        partial_elements=n_programs * config.split * config.block_n * config.block_m if is_split else 0,
        n_counters=n_programs if is_split else 0,
        blocks={"arranged": (config.block_m, _GROUP // 2 if config.in_halves else _GROUP)}
        if config.descriptors
        else {},
        # On an H200 blocks that reached beyond a descriptor's tensor took up to twice as long.
        padded_rows=-(-m // config.block_m) * config.block_m,
    )
