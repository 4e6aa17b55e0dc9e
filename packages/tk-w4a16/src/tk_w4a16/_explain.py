"""Which kernels carry out a product, and why those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tk_kernel_core.explain import check_product, explain_launches, target_named
from tk_kernel_core.launch import planning
from tk_w4a16._launch import gemm_way, linear_way
from tk_w4a16._ops import w4a16_gemm, w4a16_linear
from tk_w4a16._state import blank_weight

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    function.__name__: function for function in (w4a16_gemm, w4a16_linear)
}


def explain(
    function: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.float16,
    *,
    group_size: int = 128,
    symmetric: bool = False,
    act_order: bool = False,
    target: str | None = None,
) -> str:
    """Say by which kernels a product is carried out, and why. Nothing is computed.

    Args:
        function: `w4a16_gemm` or `w4a16_linear`.
        m: Rows of activations.
        n: Output features.
        k: Input features; a multiple of 8 for `w4a16_gemm`.
        dtype: Of the activations: float16, bfloat16 or float32.
        group_size: Input features in a group.
        symmetric: Whether every zero point is 8.
        act_order: Whether groups are those of an index, in any order; only for `w4a16_linear`.
        target: GPU architecture to choose for, for example `sm_90` or `gfx942`; that of the current GPU if None.

    Returns:
        A line with the reason, and one for every kernel that is launched: its name, programs, warps and tile. Products
        of dequantised weights are PyTorch's, and launch no further kernel of this package.

    Raises:
        TypeError: A number is no integer.
        ValueError: An argument lies outside its range, or there is no GPU and no `target`.
        ModuleNotFoundError: triton is not installed.
    """
    check_product(_FUNCTIONS, function, m, n, k, dtype)
    gpu = target_named(target)
    weight = _weight(function, n, k, group_size, symmetric, act_order)
    with planning(gpu) as launches:
        _FUNCTIONS[function](torch.empty(m, k, dtype=dtype, device="meta"), *weight)
    name = str(dtype).removeprefix("torch.")
    _, reason = linear_way(m, n, k, name, gpu) if function == "w4a16_linear" else gemm_way(m, name)
    return explain_launches(function, m, n, k, dtype, gpu, reason, launches)


def _weight(function: str, n: int, k: int, group_size: int, symmetric: bool, act_order: bool) -> tuple[Any, ...]:
    if function == "w4a16_linear":
        return (blank_weight(k, n, group_size, symmetric, act_order, torch.float16, "meta"),)
    if act_order:
        raise ValueError("act_order must be False in the plain layout, got True")
    if k % 8:
        raise ValueError(f"k must be a multiple of 8 in the plain layout, got {k}")
    packed = torch.empty(k // 8, n, dtype=torch.int32, device="meta")
    scales = torch.empty(-(-k // group_size) if group_size > 0 else 1, n, dtype=torch.float16, device="meta")
    return packed, scales, None if symmetric else torch.empty_like(scales), group_size
