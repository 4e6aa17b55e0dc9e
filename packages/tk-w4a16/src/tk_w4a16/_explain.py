"""Which kernels carry out a product, and why those."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from tk_kernel_core.checks import check_choice
from tk_kernel_core.launch import KernelLaunch, planning
from tk_kernel_core.targets import COMPILE_TARGETS, Target, target_of
from tk_w4a16._launch import gemm_way, linear_way
from tk_w4a16._ops import w4a16_gemm, w4a16_linear
from tk_w4a16._state import blank_weight

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
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
        target: GPU architecture to choose for, for example `sm_90` or `gfx942`; that of the current GPU if None.

    Returns:
        A line with the reason, and one for every kernel that is launched: its name, programs, warps and tile. Products
        of dequantised weights are PyTorch's, and launch no further kernel of this package.

    Raises:
        TypeError: A number is no integer.
        ValueError: An argument lies outside its range, or there is no GPU and no `target`.
        ModuleNotFoundError: triton is not installed.
    """
    check_choice("function", function, _FUNCTIONS)
    check_choice("dtype", dtype, _DTYPES)
    for name, size in (("m", m), ("n", n), ("k", k)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise TypeError(f"{name} must be an integer, got {type(size).__name__}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    gpu = _target(target)
    weight = _weight(function, n, k, group_size, symmetric)
    with planning(gpu) as launches:
        _FUNCTIONS[function](torch.empty(m, k, dtype=dtype, device="meta"), *weight)
    name = str(dtype).removeprefix("torch.")
    _, reason = (linear_way if function == "w4a16_linear" else gemm_way)(m, name)
    lines = [(line, len(list(equal))) for line, equal in itertools.groupby(map(_line, launches))]
    times = (f"  {line}" if n_equal == 1 else f"  {n_equal} times {line}" for line, n_equal in lines)
    return "\n".join([f"{function}, {m} x {n} x {k}, {name}, {gpu.name}: {reason}", *times])


def _target(name: str | None) -> Target:
    if name is not None:
        return COMPILE_TARGETS[check_choice("target", name, COMPILE_TARGETS)]
    if not torch.cuda.is_available():
        raise ValueError(f"target must be given where there is no GPU: one of {', '.join(COMPILE_TARGETS)}, got None")
    return target_of(torch.device("cuda", torch.cuda.current_device()))


def _weight(function: str, n: int, k: int, group_size: int, symmetric: bool) -> tuple[Any, ...]:
    if function == "w4a16_linear":
        return (blank_weight(k, n, group_size, symmetric, False, torch.float16, "meta"),)
    if k % 8:
        raise ValueError(f"k must be a multiple of 8 in the plain layout, got {k}")
    packed = torch.empty(k // 8, n, dtype=torch.int32, device="meta")
    scales = torch.empty(-(-k // group_size) if group_size > 0 else 1, n, dtype=torch.float16, device="meta")
    return packed, scales, None if symmetric else torch.empty_like(scales), group_size


def _line(launch: KernelLaunch) -> str:
    names = ("BLOCK", "TILES", "STEPS", "STAGES", "SPLIT", "DESCRIPTORS")
    tile = ", ".join(f"{name}={value}" for name, value in launch.arguments if name.startswith(names))
    programs = " x ".join(str(size) for size in launch.grid if size > 1) or "1"
    return f"{launch.kernel}: {programs} programs of {dict(launch.options)['num_warps']} warps, {tile}"
