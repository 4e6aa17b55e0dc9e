"""Launch choices for prepared weights and dozens of rows: pure functions of shapes and the target."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tk_int8_gemm._decode_launch import DECODE_ROWS
from tk_kernel_core.gemm import PreparedProduct, backend_options
from tk_kernel_core.interpreter import interpreting

if TYPE_CHECKING:
    from tk_kernel_core.targets import Target

MIDDLE_ROWS = 256
"""Most rows of activations that the kernels in `_middle_kernels` are meant for; they take any number."""

_MODULE = "tk_int8_gemm._middle_kernels"
_TILE, _GROUP = 16, 128
_MOST_SPLITS = 16
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
        stages: Groups of 128 input features of x on their way or in work at a time.
        split: Programs that share the input features of the same results.
        descriptors: Whether x is read through a descriptor.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
        most_registers: Of a thread; None leaves them to the compiler.
    """

    block_m: int
    tiles: int
    num_warps: int
    stages: int
    split: int
    descriptors: bool
    dependent_launch: bool
    most_registers: int | None = None

    @property
    def block_n(self) -> int:
        """Output features per program."""
        return _TILE * self.tiles * self.num_warps


def linear_way(m: int, dtype: str) -> tuple[Literal["decode", "middle", "dequantize"], str]:
    """Choose how `int8_linear` goes about a product, and say why.

    Args:
        m: Rows of x.
        dtype: Element type of x: `float16`, `bfloat16` or `float32`.
    """
    if dtype == "float32":
        return "dequantize", "x is fp32, which the matrix units do not multiply"
    if m > MIDDLE_ROWS:
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
    # AMD's local data share holds no more than two groups of narrow tiles.
    is_amd = target.backend == "hip"
    num_warps, most_registers = _WARPS, None
    if m <= 32:
        block_m, tiles, stages, programs_per_unit = 32, 1, 3, 4
    elif m > 192 or (m > 64 and n >= _WIDE):
        block_m, tiles, stages, programs_per_unit = 128, 1, 3, 2
    elif m > 64 or n < _WIDE or target.name != "sm_90":
        block_m, tiles, stages, programs_per_unit = 64, 1, 3, 3
    else:
        # So many features that fewer programs, which read x less often, still fill the GPU. Elsewhere registers spill.
        block_m, tiles, stages, programs_per_unit = 64, 2, 3, 2
    n_squares = -(-n // 128) * -(-m // 128)
    if m > 64 and target.name == "sm_90" and 2 * n_squares >= 3 * target.compute_units:
        # Square tiles read x half as often, but are few. Registers for two programs on a multiprocessor.
        block_m, tiles, num_warps, stages, programs_per_unit, most_registers = 128, 1, 8, 3, 2, 128
    if is_amd:
        block_m, tiles, stages, programs_per_unit = min(block_m, 64), 1, 2, 2
    n_programs = -(-n // (_TILE * tiles * num_warps)) * -(-m // block_m)
    if block_m == 128 and num_warps == _WARPS and 2 * target.compute_units < n_programs <= 3 * target.compute_units:
        # Shared memory for two stages of three programs: all run at once.
        stages, programs_per_unit = 2, 3
    return MiddleConfig(
        block_m,
        tiles,
        num_warps,
        stages,
        _split(n_programs, -(-k // _GROUP), programs_per_unit * target.compute_units),
        target.is_hopper_or_later,
        target.is_hopper_or_later,
        most_registers,
    )


def _split(n_programs: int, n_groups: int, n_slots: int) -> int:
    """Return the number of parts of K with which the programs, all at once, are done first."""
    most = max(1, min(n_slots // n_programs, n_groups, _MOST_SPLITS))
    # To add up a part takes about as long as a group.
    split = min(range(1, most + 1), key=lambda split: -(-n_groups // split) + split)
    # Rounding up may have left the last programs nothing.
    return -(-n_groups // -(-n_groups // split))


def prepare_middle(m: int, n: int, k: int, target: Target, config: MiddleConfig | None = None) -> PreparedProduct:
    """Return what a launch for 17 to `MIDDLE_ROWS` rows takes beside tensors.

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
            "TILES": config.tiles,
            "WARPS": config.num_warps,
            "STAGES": config.stages,
            "IN_FEATURES": k,
            "SPLIT": config.split,
            # The interpreter knows no machine instructions.
            "PTX": target.backend == "cuda" and not interpreting(),
            "DESCRIPTORS": config.descriptors,
            "DEPENDENT_LAUNCH": config.dependent_launch,
        },
        options=backend_options(config.num_warps, config.dependent_launch, config.most_registers),
        partial_elements=n_programs * config.split * config.block_n * config.block_m if is_split else 0,
        n_counters=n_programs if is_split else 0,
        blocks={"arranged": (config.block_m, _GROUP)} if config.descriptors else {},
        # On an H200 blocks that reached beyond a descriptor's tensor took up to twice as long.
        padded_rows=-(-m // config.block_m) * config.block_m,
    )
