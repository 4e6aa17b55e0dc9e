"""The sum of partial results: how gradients of weights and biases leave a backward kernel without atomics."""

from __future__ import annotations

import torch

from tk_kernel_core.launch import Kernel, PlanCache, PreparedLaunch, launch_target

_SUM_ROWS = Kernel("tk_kernel_core._kernels", "sum_rows_kernel")
_BLOCK_M, _BLOCK_N = 128, 32
_LAUNCHES: PlanCache[PreparedLaunch] = PlanCache()


def sum_rows(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Add up the rows of a matrix in one kernel, in the same order in every run.

    Args:
        partial: [n_rows, width], float32, contiguous, on a device that runs Triton kernels.
        dtype: Element type of the result; rounded once.

    Returns:
        [width].
    """
    n_rows, width = partial.shape
    total = torch.empty(width, dtype=dtype, device=partial.device)
    # The dtype is part of the key because a prepared launch serves one combination of dtypes.
    key = (n_rows, width, dtype, partial.device)
    launch = _LAUNCHES.get(key) or _LAUNCHES.remember(key, _prepare(n_rows, width, partial.device), partial.device)
    if width:
        launch(total, partial)
    return total


def _prepare(n_rows: int, width: int, device: torch.device) -> PreparedLaunch:
    dependent_launch = launch_target(device).is_hopper_or_later
    return PreparedLaunch(
        _SUM_ROWS,
        (-(-width // _BLOCK_N), 1, 1),
        (n_rows, width),
        {"BLOCK_M": _BLOCK_M, "BLOCK_N": _BLOCK_N, "DEPENDENT_LAUNCH": dependent_launch},
        device,
        num_warps=4,
        **({"launch_pdl": True} if dependent_launch else {}),
    )
