"""Products with prepared weights: what a launch takes beside tensors, and the launch that arranges activations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tk_kernel_core.layout import next_power_of_two

if TYPE_CHECKING:
    from tk_kernel_core.targets import Target

WORKSPACE_BYTES = 128 * 2**20
"""Most memory that a dequantised part of a weight takes, unless 64 of its rows are larger."""

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


def backend_options(num_warps: int, dependent_launch: bool, most_registers: int | None = None) -> dict[str, Any]:
    """Return the options of Triton's backend.

    Args:
        num_warps: Warps per program.
        dependent_launch: Whether the kernel may be scheduled while its predecessor in the stream drains.
        most_registers: Of a thread; None leaves them to the compiler, which to save some keeps few loads in flight.
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
    block_k = max(_STEP, min(next_power_of_two(k), 4096))
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
