"""Small kernels with known machine code, for the tests of compilation, resources and budgets."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from tk_kernel_core.gemm_kernels import for_lanes
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
def add_blocks_kernel(out_ptr, x, bias_ptr, y, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out = x + bias + y, [BLOCK_M, BLOCK_N] of each; x and y through descriptors."""
    rows, columns = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    total = x.load([0, 0]) + tl.load(bias_ptr + columns) + y.load([0, 0])
    tl.store(out_ptr + rows * BLOCK_N + columns, total)


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


@triton.jit
def _nibbles(words, SHIFT: tl.constexpr):
    # The bits of an integer below 1024 are the last ones of 1024 more, as a half-precision number.
    return (((words >> SHIFT) & 15) | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1032.0


@triton.jit
def computed_operand_kernel(out_ptr, words_ptr, x_ptr, k_size, CHAINED: tl.constexpr, BLOCK_M: tl.constexpr):
    columns = tl.arange(0, 64)
    rows = tl.arange(0, BLOCK_M)
    total = tl.zeros([64, BLOCK_M], tl.float32)
    x_desc = tl.make_tensor_descriptor(x_ptr, [BLOCK_M, k_size], [k_size, 1], [BLOCK_M, 128])
    # [warps, tiles, words of a warp]
    words_offsets = tl.arange(0, 4)[:, None, None] * (k_size * 2) + tl.arange(0, 2)[None, :, None] * 128
    words_offsets += tl.arange(0, 128)[None, None, :]
    for k in tl.range(0, k_size, 128, num_stages=3):
        words = tl.load(words_ptr + k * 2 + words_offsets)
        a = tl.join(
            tl.join(tl.join(_nibbles(words, 0), _nibbles(words, 16)), tl.join(_nibbles(words, 4), _nibbles(words, 20))),
            tl.join(
                tl.join(_nibbles(words, 8), _nibbles(words, 24)), tl.join(_nibbles(words, 12), _nibbles(words, 28))
            ),
        )
        a = tl.permute(tl.reshape(a, [4, 2, 8, 4, 2, 2, 2, 2, 2]), (0, 5, 2, 1, 4, 8, 7, 3, 6))
        total = tl.dot(tl.reshape(a, [64, 128]), x_desc.load([0, k]).T, total)
        if not CHAINED:
            # Opaque to the compiler, which then waits for the product here.
            total = tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(out_ptr + rows[None, :] * 64 + columns[:, None], total)


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


def computed_operand_launch(block_m: int, chained: bool) -> KernelLaunch:
    launch = prepare("computed_operand_kernel", 4096, CHAINED=chained, BLOCK_M=block_m, options={"num_warps": 4})
    return launch.describe(meta(1, torch.float32), meta(1, torch.int32), meta(1, torch.float16))


@triton.jit
def turn_axes_kernel(once_ptr, twice_ptr, N_AXES: tl.constexpr):
    """for_lanes of 0, 1, 2, ... in N_AXES axes of 2, once and twice."""
    places = tl.arange(0, 2**N_AXES)
    once = for_lanes(tl.reshape(places, [2] * N_AXES), True)
    tl.store(once_ptr + places, tl.reshape(once, [2**N_AXES]))
    tl.store(twice_ptr + places, tl.reshape(for_lanes(once, True), [2**N_AXES]))
