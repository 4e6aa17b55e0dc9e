"""Device code of the core: the plain copy that memory-bound kernels are held against, and sums of partial results."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(out_a_ptr, out_b_ptr, a_ptr, b_ptr, n_elements, BLOCK: tl.constexpr):
    """Copy a to out_a and, where given, b of the same size to out_b."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    tl.store(out_a_ptr + offsets, tl.load(a_ptr + offsets, mask=mask), mask=mask)
    if b_ptr is not None:
        tl.store(out_b_ptr + offsets, tl.load(b_ptr + offsets, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def sum_rows_kernel(
    total_ptr,
    partial_ptr,
    n_rows,
    width,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """total[j] = sum over i of partial[i, j]."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    column_mask = columns < width
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for first in tl.range(0, n_rows, BLOCK_M):
        rows = first + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
        offsets = rows.to(tl.int64) * width + columns
        sums += tl.load(partial_ptr + offsets, mask=(rows < n_rows) & column_mask, other=0.0)
    total = tl.sum(sums, axis=0, keep_dims=True).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + columns, total, mask=column_mask)
