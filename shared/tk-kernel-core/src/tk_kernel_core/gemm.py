"""Products with prepared weights: what a launch takes beside tensors, and the launch that arranges activations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tk_kernel_core.layout import next_power_of_two

if TYPE_CHECKING:
    from tk_kernel_core.targets import Target

WORKSPACE_BYTES = 128 * 2**20
"""Most memory that a dequantised part of a weight takes, unless 64 of its rows are larger."""

TALL_ROWS = 256
"""Rows of a tall tile, which has 128 output features."""

_STEP = 128
# A tile of cuBLAS's, of activations and of output features.
_TILE_ROWS, _TILE_FEATURES = 128, 256


@dataclass(frozen=True, slots=True)
class PreparedProduct:
    """What a launch takes beside tensors. `PreparedLaunch.of` makes the launch.

    Attributes:
        module: Import path of the kernel's module.
        kernel: Its name.
        grid: Number of programs along each axis.
        scalars: The scalar arguments, in order.
        constexprs: The compile-time arguments, by name, in order.
        options: Options of Triton's backend.
        partial_elements: Size of the workspace `partial`: float32, of any content.
        n_counters: Size of the workspace `counter`: int32, zeros, and left so. Launches that may run at the same
            time must not share it, nor the other. Where it is 0, both are None.
        blocks: The tensors that are read through descriptors, and the shape of the blocks.
        padded_rows: Rows that x must have once it is arranged; 0 where it is taken as it is.
    """

    module: str
    kernel: str
    grid: tuple[int, int, int]
    scalars: tuple[int, ...]
    constexprs: dict[str, Any]
    options: dict[str, Any]
    partial_elements: int = 0
    n_counters: int = 0
    blocks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    padded_rows: int = 0


def unit_of(row_stride: int) -> int:
    """Return the largest power of two up to 16 that divides a stride."""
    return (row_stride | 16) & -(row_stride | 16)


def register_share(num_warps: int, programs_per_unit: int, target: Target) -> int | None:
    """Return how many registers a thread may have where so many programs run on a multiprocessor, as ptxas counts.

    Left to itself, it saves registers that nobody else takes, and for that has loads wait for each other.

    Args:
        num_warps: Warps per program.
        programs_per_unit: Programs that run on a multiprocessor at a time.
        target: The GPU; None is returned where nothing is known of its registers.
    """
    if target.name != "sm_90":
        return None
    return min(255, 65_536 // (target.warp_size * num_warps * programs_per_unit) // 8 * 8)


def split_steps(n_programs: int, n_steps: int, n_slots: int, most: int) -> int:
    """Return the number of programs that share a result's steps so that all of them are done first.

    Args:
        n_programs: Programs if none share.
        n_steps: Steps of a result.
        n_slots: Programs that run at a time.
        most: Largest number to return.
    """
    most = max(1, min(n_slots // n_programs, n_steps, most))
    # To add up a part takes about as long as a step.
    split = min(range(1, most + 1), key=lambda split: -(-n_steps // split) + split)
    # Rounding up may have left the last programs nothing.
    return -(-n_steps // -(-n_steps // split))


def tall_split(m: int, n: int, k: int, target: Target) -> int:
    """Return how many programs share the steps of a tall tile, or 0 where two square ones are faster than it.

    A tall tile makes numbers of the weight's codes once for 256 rows, and while the ones before are multiplied; but
    it has a multiprocessor to itself, so that they are few. Where to draw the line was measured on an H200, which is
    the only GPU that gets them.

    Args:
        m: Rows of activations.
        n: Output features.
        k: Columns of the weight.
        target: The GPU.
    """
    units, n_square = target.compute_units, -(-n // 128) * -(-m // 128)
    n_tall = -(-n // 128) * -(-m // TALL_ROWS)
    if target.name != "sm_90" or m <= 128:
        return 0
    if 2 * n_tall <= units:
        # Parts of a result are 128 KB each: they must be long, and leave few multiprocessors without one.
        split = min(4, units // n_tall)
        return split if split * n_tall >= 0.9 * units and k >= 20 * _STEP * split else 0
    rounds = -(-n_tall // units)
    return int(rounds == 1 or n_square >= 1.4 * rounds * units)


def backend_options(num_warps: int, dependent_launch: bool, most_registers: int | None = None) -> dict[str, Any]:
    """Return the options of Triton's backend.

    Args:
        num_warps: Warps per program.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
        most_registers: Of a thread; None leaves them to the compiler.
    """
    options: dict[str, Any] = {"num_warps": num_warps}
    if dependent_launch:
        options["launch_pdl"] = True
    if most_registers is not None:
        options["maxnreg"] = most_registers
    return options


def parts_of(m: int, n: int, k: int, bytes_per_element: int, target: Target) -> list[slice]:
    """Split a weight's rows into parts that are dequantised at a time: equal but for the last, and whole tiles.

    A part's product has a tile for each compute unit, but no second one: so the part is multiplied while it is in L2.

    Args:
        m: Rows of activations.
        n: Output features.
        k: Input features.
        bytes_per_element: Of what the weight is dequantised to.
        target: The GPU.
    """
    row_bytes = bytes_per_element * max(k, 1)
    unit = _TILE_FEATURES if _TILE_FEATURES * row_bytes <= WORKSPACE_BYTES else 64
    fitting = max(unit, WORKSPACE_BYTES // row_bytes // unit * unit)
    busy = _TILE_FEATURES * max(1, target.compute_units // -(-m // _TILE_ROWS))
    n_parts = -(-n // min(fitting, busy))
    height = -(-n // (n_parts * unit)) * unit
    return [slice(first, min(first + height, n)) for first in range(0, n, height)]


def prepare_arrangement(m: int, k: int, row_stride: int, n_counters: int, target: Target) -> PreparedProduct:
    """Return what the launch that arranges activations takes beside tensors.

    The tensors are arranged ([m or more rows, k padded to a multiple of 128], contiguous, of the dtype of x), x_sum or
    None, counter or None, x, and permutation or None.

    Args:
        m: Rows of x.
        k: Columns of the weight: input features, or all columns where it has a permutation.
        row_stride: Elements from one row of x to the next.
        n_counters: Size of `counter`, which receives zeros.
        target: The GPU.
    """
    unit = unit_of(row_stride)
    block_k = max(_STEP, min(next_power_of_two(k), 16_384))
    return PreparedProduct(
        module="tk_kernel_core.gemm_kernels",
        kernel="arrange_rows_kernel",
        grid=(m, 1, 1),
        scalars=(row_stride // unit, n_counters),
        constexprs={
            "ALIGNMENT": unit,
            "IN_FEATURES": k,
            "BLOCK_K": block_k,
            "DEPENDENT_LAUNCH": target.is_hopper_or_later,
        },
        options=backend_options(target.warps(block_k // 8), target.is_hopper_or_later),
    )
