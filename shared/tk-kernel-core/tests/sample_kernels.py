"""Small kernels with known machine code, for the tests of compilation, resources and budgets."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tk_kernel_core.launch import Kernel, KernelLaunch, PreparedLaunch


@triton.jit
def copy_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))


@triton.jit
def ragged_copy_kernel(out_ptr, x_ptr, n_elements, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=mask, other=0.0), mask=mask)


@triton.jit
def add_bias_kernel(out_ptr, x_ptr, bias_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x_ptr + offsets)
    if bias_ptr is not None:
        values += tl.load(bias_ptr + offsets)
    tl.store(out_ptr + offsets, values)


@triton.jit
def dot_kernel(
    out_ptr,
    a_ptr,
    b_ptr,
    k_size,
    IN_FP32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    integers: tl.constexpr = a_ptr.dtype.element_ty == tl.int8 and not IN_FP32
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.int32 if integers else tl.float32)
    for start in range(0, k_size, BLOCK_K):
        # [BLOCK_M, BLOCK_K] and [BLOCK_K, BLOCK_N]
        a = tl.load(a_ptr + rows[:, None] * k_size + start + depth[None, :])
        b = tl.load(b_ptr + (start + depth[:, None]) * BLOCK_N + columns[None, :])
        if IN_FP32:
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(a, b, total, out_dtype=total.dtype)
    tl.store(out_ptr + rows[:, None] * BLOCK_N + columns[None, :], total)


@triton.jit
def normalize_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    values = tl.load(x_ptr + offsets)
    # Every element is needed again after the reduction: a large block does not fit into the registers.
    tl.store(out_ptr + offsets, values / tl.sum(values, axis=0))


@triton.jit
def atomic_sum_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    tl.atomic_add(out_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, BLOCK)), axis=0))


@triton.jit
def mistyped_kernel(out_ptr, BLOCK: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, BLOCK), tl.zeros((2 * BLOCK,), tl.float32))


@triton.jit
def convert_kernel(out_ptr, x_ptr, n_elements, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n_elements
    values = tl.load(x_ptr + offsets, mask=mask)
    tl.store(out_ptr + offsets, values.to(out_ptr.dtype.element_ty, fp_downcast_rounding=ROUNDING), mask=mask)


@triton.jit
def math_kernel(exp2_ptr, sqrt_ptr, rsqrt_ptr, x_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    tl.store(exp2_ptr + offsets, tl.exp2(x))
    tl.store(sqrt_ptr + offsets, tl.sqrt(x))
    tl.store(rsqrt_ptr + offsets, tl.rsqrt(x))


@triton.jit
def dependent_copy_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets))


def not_a_kernel() -> None:
    pass


def prepare(
    kernel: str,
    *scalars: float,
    options: dict[str, Any] | None = None,
    grid: tuple[int, int, int] = (1, 1, 1),
    **constexprs: Any,
) -> PreparedLaunch:
    """Prepare a launch of a kernel of this module on meta tensors."""
    kernel_ = Kernel(__name__, kernel)
    return PreparedLaunch(kernel_, grid, scalars, constexprs, torch.device("meta"), **(options or {}))


def meta(n_elements: int, dtype: torch.dtype, aligned: bool = True) -> torch.Tensor:
    """Return a meta tensor whose address is a multiple of 16 bytes or not."""
    return torch.empty(n_elements + 1, dtype=dtype, device="meta")[0 if aligned else 1 :]


def copy_launch(aligned: bool = True, dtype: torch.dtype = torch.float16, **options: Any) -> KernelLaunch:
    return prepare("copy_kernel", BLOCK=4096, options=options).describe(
        meta(4096, dtype, aligned), meta(4096, dtype, aligned)
    )


def dot_launch(dtype: torch.dtype, in_fp32: bool = False) -> KernelLaunch:
    total = torch.int32 if dtype == torch.int8 and not in_fp32 else torch.float32
    launch = prepare("dot_kernel", 4096, IN_FP32=in_fp32, BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, options={"num_warps": 4})
    return launch.describe(meta(1, total), meta(1, dtype), meta(1, dtype))


def spilling_launch(**options: Any) -> KernelLaunch:
    launch = prepare("normalize_kernel", BLOCK=8192, options={"num_warps": 1, **options})
    return launch.describe(meta(1, torch.float32), meta(1, torch.float32))
