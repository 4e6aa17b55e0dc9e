"""Launch choices for dozens of rows: pure functions of shapes and the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tk_kernel_core.gemm import PreparedProduct
from tk_kernel_core.interpreter import interpreting
from tk_w4a16._decode_launch import launch_options

if TYPE_CHECKING:
    from tk_kernel_core.targets import Target

MIDDLE_ROWS = 256
"""Most rows of activations that the kernels in `_middle_kernels` are meant for; they take any number."""

_TILE, _STEP = 16, 128
_MOST_SPLITS = 16
# What a program does beside its steps takes as long as about so many of them.
_STEPS_BESIDE = 4


@dataclass(frozen=True, slots=True)
class MiddleConfig:
    """How a product of dozens of rows is launched.

    Attributes:
        block_m: Rows of x per program.
        tiles: Tiles of 16 output features per warp.
        num_warps: Warps per program, each with output features of its own.
        stages: Steps of 128 columns on their way or in work at a time.
        scale_weight: Whether scales multiply the weight, and not the sums of a step.
        split: Programs that share the columns of the same results.
        descriptors: Whether x is read through a descriptor.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
    """

    block_m: int
    tiles: int
    num_warps: int
    stages: int
    scale_weight: bool
    split: int
    descriptors: bool
    dependent_launch: bool

    @property
    def block_n(self) -> int:
        """Output features per program."""
        return _TILE * self.tiles * self.num_warps


def middle_config(m: int, n: int, k: int, group_size: int, target: Target) -> MiddleConfig:
    """Choose the launch for dozens of rows.

    Args:
        m: Rows of x.
        n: Output features.
        k: Columns of the weight, as for `prepare_middle`.
        group_size: Columns that share a scale, or -1.
        target: The GPU.
    """
    # AMD's local data share holds no more than two steps of narrow tiles.
    is_amd = target.backend == "hip"
    block_m = 32 if m <= 32 else 64 if m <= 64 or is_amd else 128
    # Every program reads all of its rows: wide ones read x less often.
    num_warps = 4 if block_m == 32 or is_amd else 8
    # Registers of as many programs fit a multiprocessor, and shared memory for 3 stages of each.
    n_slots = (1 if block_m == 128 else 2) * target.compute_units
    block_n = _TILE * num_warps
    n_programs = -(-n // block_n) * -(-m // block_m)
    return MiddleConfig(
        block_m,
        1,
        num_warps,
        2 if is_amd else 3,
        # The fewer rows there are, the fewer are the sums.
        group_size in (32, 64) or block_m == 128,
        _split(n_programs, -(-k // _STEP), n_slots),
        target.is_hopper_or_later,
        target.is_hopper_or_later,
    )


def _split(n_programs: int, n_steps: int, n_slots: int) -> int:
    """Return the number of parts of the columns with which the programs, so many at a time, are done first."""

    def duration(split: int) -> int:
        return -(-n_programs * split // n_slots) * (-(-n_steps // split) + _STEPS_BESIDE)

    split = min(range(1, min(_MOST_SPLITS, n_steps) + 1), key=duration)
    # Rounding up may have left the last programs nothing.
    return -(-n_steps // -(-n_steps // split))


def prepare_middle(
    m: int, n: int, k: int, group_size: int, target: Target, config: MiddleConfig | None = None
) -> PreparedProduct:
    """Return what a launch for 17 to `MIDDLE_ROWS` rows takes beside tensors.

    The tensors are those of `prepare_decode`, with what `prepare_arrangement` of the same `k` makes of x in its place.

    Args:
        m: Rows of x.
        n: Output features.
        k: Input features, or all columns of a weight with a permutation.
        group_size: Columns that share a scale, or -1.
        target: The GPU.
        config: How to launch; `middle_config` of the rest by default.
    """
    config = config or middle_config(m, n, k, group_size, target)
    n_programs = -(-n // config.block_n) * -(-m // config.block_m)
    is_split = config.split > 1
    return PreparedProduct(
        module="tk_w4a16._middle_kernels",
        kernel="w4a16_middle_kernel",
        grid=(n_programs, config.split, 1),
        scalars=(m, n),
        constexprs={
            "BLOCK_M": config.block_m,
            "TILES": config.tiles,
            "WARPS": config.num_warps,
            "STAGES": config.stages,
            "IN_FEATURES": k,
            "GROUP_SIZE": group_size,
            "SCALE_WEIGHT": config.scale_weight,
            "SPLIT": config.split,
            # The interpreter knows no machine instructions.
            "PTX": target.backend == "cuda" and not interpreting(),
            "DESCRIPTORS": config.descriptors,
            "DEPENDENT_LAUNCH": config.dependent_launch,
        },
        options={"num_warps": config.num_warps, **launch_options(config.dependent_launch)},
        partial_elements=n_programs * config.split * config.block_n * config.block_m if is_split else 0,
        n_counters=n_programs if is_split else 0,
        blocks={"arranged": (config.block_m, _STEP)} if config.descriptors else {},
        padded_rows=-(-m // config.block_m) * config.block_m,
    )
