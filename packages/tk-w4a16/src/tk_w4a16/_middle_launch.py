"""Launch choices for dozens of rows: pure functions of shapes and the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tk_kernel_core.gemm import PreparedProduct, backend_options
from tk_kernel_core.interpreter import interpreting

if TYPE_CHECKING:
    from tk_kernel_core.targets import Target

MIDDLE_ROWS = 256
"""Most rows of activations that the kernels in `_middle_kernels` are meant for; they take any number."""

_TILE, _STEP = 16, 128
# More parts would take registers, in adding them up, that another program could run with.
_MOST_SPLITS = 8
_WARPS = 4
# Output features from which on wider tiles still make enough programs.
_WIDE = 12_288


@dataclass(frozen=True, slots=True)
class MiddleConfig:
    """How a product of dozens of rows is launched.

    Attributes:
        block_m: Rows of x per program.
        tiles: Tiles of 16 output features per warp.
        num_warps: Warps per program, each with output features of its own.
        stages: Steps of 128 columns of x on their way or in work at a time.
        scale_weight: Whether scales multiply the weight, and not the sums of a step.
        split: Programs that share the columns of the same results.
        descriptors: Whether x is read through a descriptor.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
        most_registers: Of a thread; None leaves them to the compiler.
    """

    block_m: int
    tiles: int
    num_warps: int
    stages: int
    scale_weight: bool
    split: int
    descriptors: bool
    dependent_launch: bool
    most_registers: int | None = None

    @property
    def block_n(self) -> int:
        """Output features per program."""
        return _TILE * self.tiles * self.num_warps


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
    is_amd, is_sm_90 = target.backend == "hip", target.name == "sm_90"
    tiles, num_warps, stages, most_registers = 1, _WARPS, 2, None
    # Zero points of narrow groups take registers that large programs lack.
    has_many_zeros = has_zeros and group_size in (32, 64)
    n_squares = -(-n // 128) * -(-m // 128)
    if m <= 32:
        block_m, programs_per_unit = 16 if m <= 16 else 32, 4
    elif m > 64 and is_sm_90 and 2 * n_squares >= 3 * target.compute_units and not has_many_zeros:
        # Square tiles read x half as often, but are few. Registers for two programs on a multiprocessor.
        block_m, num_warps, stages, programs_per_unit, most_registers = 128, 8, 3, 2, 128
    elif m > 192 or (m > 64 and n >= _WIDE):
        block_m, stages, programs_per_unit = 128, 3, 2
        if -(-n // 64) * -(-m // 128) > 2 * target.compute_units:
            # Shared memory for two stages, and registers, of three programs.
            stages, programs_per_unit, most_registers = 2, 3, 168 if is_sm_90 else None
    elif m > 64 or n < _WIDE or not is_sm_90:
        block_m, programs_per_unit = 64, 3
    else:
        # So many features that fewer programs, which read x less often, still fill the GPU. Elsewhere registers spill.
        block_m, tiles, stages, programs_per_unit = 64, 2, 3, 2
    if is_amd:
        # Its local data share holds no more than two steps of narrow tiles.
        block_m, stages, programs_per_unit = min(block_m, 64), 2, 2
    n_programs = -(-n // (_TILE * tiles * num_warps)) * -(-m // block_m)
    return MiddleConfig(
        block_m,
        tiles,
        num_warps,
        stages,
        # The sums of a step take as many registers as the result.
        group_size in (32, 64) or block_m >= 128,
        _split(n_programs, -(-k // _STEP), programs_per_unit * target.compute_units),
        target.is_hopper_or_later,
        target.is_hopper_or_later,
        most_registers,
    )


def _split(n_programs: int, n_steps: int, n_slots: int) -> int:
    """Return the number of parts of the columns with which the programs, all at once, are done first."""
    most = max(1, min(n_slots // n_programs, n_steps, _MOST_SPLITS))
    # To add up a part takes about as long as a step.
    split = min(range(1, most + 1), key=lambda split: -(-n_steps // split) + split)
    # Rounding up may have left the last programs nothing.
    return -(-n_steps // -(-n_steps // split))


def prepare_middle(
    m: int,
    n: int,
    k: int,
    group_size: int,
    target: Target,
    config: MiddleConfig | None = None,
    has_zeros: bool = False,
) -> PreparedProduct:
    """Return what a launch for up to `MIDDLE_ROWS` rows takes beside tensors.

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
        options=backend_options(config.num_warps, config.dependent_launch, config.most_registers),
        partial_elements=n_programs * config.split * config.block_n * config.block_m if is_split else 0,
        n_counters=n_programs if is_split else 0,
        blocks={"arranged": (config.block_m, _STEP)} if config.descriptors else {},
        # On an H200 blocks that reached beyond a descriptor's tensor took up to twice as long.
        padded_rows=-(-m // config.block_m) * config.block_m,
    )
