"""Launch choices for dozens of rows: pure functions of shapes and the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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

MIDDLE_ROWS, MOST_WIDE_ROWS, MOST_TALL_ROWS = 256, 1024, 2048
"""Most rows of activations that the kernels in `_middle_kernels` are meant for: in general, for weights of many output
features, and in tall tiles; they take any number."""

_TILE, _STEP = 16, 128
# Times the rows of a program: what the one that comes last adds up.
_MOST_PARTS = 512


@dataclass(frozen=True, slots=True)
class MiddleConfig:
    """How a product of dozens of rows is launched.

    Attributes:
        block_m: Rows of x per program.
        num_warps: Warps per program, each with 16 output features of its own.
        stages: Steps of 128 columns of x on their way or in work at a time.
        scale_weight: Whether scales multiply the weight, and not the sums of a step.
        in_halves: Whether half of a step is dequantised while the half before it is multiplied; scales then multiply
            the weight.
        split: Programs that share the columns of the same results.
        descriptors: Whether x is read through a descriptor.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
        most_registers: Of a thread; None leaves them to the compiler.
    """

    block_m: int
    num_warps: int
    stages: int
    scale_weight: bool
    in_halves: bool
    split: int
    descriptors: bool
    dependent_launch: bool
    most_registers: int | None = None

    @property
    def block_n(self) -> int:
        """Output features per program."""
        return _TILE * self.num_warps


def middle_config(m: int, n: int, k: int, group_size: int, target: Target, has_zeros: bool = False) -> MiddleConfig:
    """Choose the launch for dozens of rows.

    Args:
        m: Rows of x.
        n: Output features.
        k: Columns of the weight, as for `prepare_middle`.
        group_size: Columns that share a scale, or -1.
        target: The GPU.
        has_zeros: Whether the weight has zero points.
    """
    tall = tall_split(m, n, k, target)
    if tall:
        return MiddleConfig(
            block_m=TALL_ROWS,
            num_warps=8,
            stages=3,
            scale_weight=True,
            in_halves=True,
            split=tall,
            descriptors=True,
            dependent_launch=True,
            most_registers=register_share(8, 1, target),
        )
    num_warps, stages = 4, 2
    if m <= 16:
        # Zero points take a few registers more.
        block_m, stages, programs_per_unit = 16, 3, 6 if has_zeros else 7
    elif m <= 64:
        block_m, programs_per_unit = 32 if m <= 32 else 64, 4
    else:
        block_m, programs_per_unit = 128, 3
    # Zero points of narrow groups take registers that large programs lack.
    has_many_zeros = has_zeros and group_size in (32, 64)
    n_wide = -(-n // 128) * -(-m // block_m)
    enough = (1.5 if m <= 64 or has_zeros else 1.25) * target.compute_units
    if target.name == "sm_90" and m > 32 and n_wide >= enough and not has_many_zeros:
        # Wide tiles read x half as often, but are few.
        num_warps, stages, programs_per_unit = 8, 3, 2
    if target.backend == "hip":
        # Its local data share holds no more than two steps of narrow tiles.
        block_m, stages, programs_per_unit = min(block_m, 64), 2, 2
    n_programs = -(-n // (_TILE * num_warps)) * -(-m // block_m)
    return MiddleConfig(
        block_m,
        num_warps,
        stages,
        # The sums of a step take as many registers as the result.
        group_size in (32, 64) or block_m >= 128,
        False,
        split_steps(n_programs, -(-k // _STEP), programs_per_unit * target.compute_units, _MOST_PARTS // block_m),
        target.is_hopper_or_later,
        target.is_hopper_or_later,
        register_share(num_warps, programs_per_unit, target),
    )


def prepare_middle(
    m: int,
    n: int,
    k: int,
    group_size: int,
    target: Target,
    config: MiddleConfig | None = None,
    has_zeros: bool = False,
) -> PreparedProduct:
    """Return what a launch takes beside tensors.

    The tensors are those of `prepare_decode`, with what `prepare_arrangement` of the same `k` makes of x in its place.

    Args:
        m: Rows of x.
        n: Output features.
        k: Input features, or all columns of a weight with a permutation.
        group_size: Columns that share a scale, or -1.
        target: The GPU.
        config: How to launch; `middle_config` of the rest by default.
        has_zeros: Whether there are zeros.
    """
    config = config or middle_config(m, n, k, group_size, target, has_zeros)
    n_programs = -(-n // config.block_n) * -(-m // config.block_m)
    is_split = config.split > 1
    return PreparedProduct(
        module="tk_w4a16._middle_kernels",
        kernel="w4a16_middle_kernel",
        grid=(n_programs, config.split, 1),
        scalars=(m, n),
        constexprs={
            "BLOCK_M": config.block_m,
            "WARPS": config.num_warps,
            "STAGES": config.stages,
            "IN_FEATURES": k,
            "GROUP_SIZE": group_size,
            "SCALE_WEIGHT": config.scale_weight,
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
        blocks={"arranged": (config.block_m, _STEP // 2 if config.in_halves else _STEP)} if config.descriptors else {},
        # On an H200 blocks that reached beyond a descriptor's tensor took up to twice as long.
        padded_rows=-(-m // config.block_m) * config.block_m,
    )
