"""Which kernels carry out a product, and why those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tk_int8_gemm._launch import int8_gemm_config, w8a8_config
from tk_int8_gemm._middle_launch import linear_way
from tk_int8_gemm._ops import int8_gemm, int8_linear, w8a8_gemm
from tk_int8_gemm._packing import PackedInt8Weight
from tk_kernel_core.explain import check_product, explain_launches, target_named
from tk_kernel_core.launch import planning
from tk_kernel_core.targets import Target

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    function.__name__: function for function in (int8_gemm, int8_linear, w8a8_gemm)
}


def explain(
    function: str, m: int, n: int, k: int, dtype: torch.dtype = torch.float16, *, target: str | None = None
) -> str:
    """Say by which kernels a product is carried out, and why. Nothing is computed.

    Args:
        function: `int8_gemm`, `int8_linear` or `w8a8_gemm`.
        m: Rows of activations.
        n: Output features.
        k: Input features.
        dtype: Of the activations: float16, bfloat16 or float32.
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
    with planning(gpu) as launches:
        _FUNCTIONS[function](torch.empty(m, k, dtype=dtype, device="meta"), *_weight(function, n, k))
    return explain_launches(function, m, n, k, dtype, gpu, _reason(function, m, n, k, dtype, gpu), launches)


def _weight(function: str, n: int, k: int) -> tuple[Any, ...]:
    codes, scale = torch.empty(n, k, dtype=torch.int8, device="meta"), torch.empty(n, device="meta")
    return (PackedInt8Weight.pack(codes, scale),) if function == "int8_linear" else (codes, scale)


def _reason(function: str, m: int, n: int, k: int, dtype: torch.dtype, target: Target) -> str:
    name = str(dtype).removeprefix("torch.")
    if function == "int8_linear":
        return linear_way(m, n, k, name, target)[1]
    alignment = 16 if k % 16 == 0 else k & -k
    if function == "int8_gemm":
        return int8_gemm_config(m, n, k, alignment, name, target).reason
    return w8a8_config(m, n, k, alignment, target).reason
