"""Device code for the plain layout, of `pack_int4`, and for activations in the order of a prepared weight.

In the plain layout a word holds eight consecutive input features of one output feature, the lowest bits first; words,
scales and zero points of neighbouring output features follow one another.
"""

import triton
import triton.language as tl


@triton.jit
def _weights(
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    columns,
    start,
    n,
    k,
    stride_n,
    dtype: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Return (code - zero) * scale, rounded to dtype: [BLOCK_K, BLOCK_N] from `start` on, and 0 beyond k.

    Words, scales and zero points of consecutive input features lie stride_n apart. SPAN input features have one scale;
    SPAN divides BLOCK_K and GROUP_SIZE.
    """
    # A mask, and not the last column once more, lets a thread load several columns at once.
    column_exists = (columns < n)[None, :]
    octets = start // 8 + tl.arange(0, BLOCK_K // 8)
    words = tl.load(
        packed_ptr + (octets.to(tl.int64) * stride_n)[:, None] + columns[None, :],
        mask=(octets * 8 < k)[:, None] & column_exists,
        other=0,
    )
    codes = (words[:, None, :] >> (tl.arange(0, 8) * 4)[None, :, None]) & 15
    values = tl.reshape(codes, [BLOCK_K // SPAN, SPAN, BLOCK_N]).to(tl.float32)
    spans = start + tl.arange(0, BLOCK_K // SPAN) * SPAN
    group_offsets = ((spans // GROUP_SIZE).to(tl.int64) * stride_n)[:, None] + columns[None, :]
    span_exists = (spans < k)[:, None] & column_exists
    if zeros_ptr is not None:
        values -= tl.load(zeros_ptr + group_offsets, mask=span_exists, other=0.0).to(tl.float32)[:, None, :]
    else:
        values -= 8.0
    values *= tl.load(scales_ptr + group_offsets, mask=span_exists, other=0.0).to(tl.float32)[:, None, :]
    values = tl.reshape(values, [BLOCK_K, BLOCK_N])
    # A scale may be infinite, whose product with a row of zeros would be NaN.
    return tl.where((start + tl.arange(0, BLOCK_K) < k)[:, None], values, 0.0).to(dtype)


@triton.jit(do_not_specialize=["m", "stride_x"])
def w4a16_plain_kernel(
    y_ptr,
    x_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    m,
    n,
    k,
    stride_x,
    ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y = x @ weight, [m, n]; a program makes one tile, those of the same weight follow one another.

    x is [m, k] and starts a row every stride_x * ALIGNMENT elements.
    """
    n_tiles_m = tl.cdiv(m, BLOCK_M)
    rows = (tl.program_id(0) % n_tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) // n_tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    # Rows that do not exist repeat the last one, and are not stored.
    x_rows = tl.minimum(rows, m - 1).to(tl.int64) * stride_x * ALIGNMENT
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        x = tl.load(x_ptr + x_rows[:, None] + (start + inner)[None, :], mask=(start + inner < k)[None, :], other=0.0)
        weight = _weights(
            packed_ptr, scales_ptr, zeros_ptr, columns, start, n, k, n, x.dtype, BLOCK_N, BLOCK_K, GROUP_SIZE, SPAN
        )
        acc = tl.dot(x, weight, acc)
    y_ptrs = y_ptr + (rows.to(tl.int64) * n)[:, None] + columns[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(rows < m)[:, None] & (columns < n)[None, :])


@triton.jit
def dequantize_plain_kernel(
    out_ptr,
    packed_ptr,
    scales_ptr,
    zeros_ptr,
    n,
    k,
    stride_n,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SPAN: tl.constexpr,
):
    """out = (code - zero) * scale, [k, n]; stride_n words, or scales, lie between two rows of what is read."""
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(1) * BLOCK_K
    inner = start + tl.arange(0, BLOCK_K)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    weight = _weights(
        packed_ptr, scales_ptr, zeros_ptr, columns, start, n, k, stride_n, dtype, BLOCK_N, BLOCK_K, GROUP_SIZE, SPAN
    )
    out_ptrs = out_ptr + (inner.to(tl.int64) * n)[:, None] + columns[None, :]
    tl.store(out_ptrs, weight, mask=(inner < k)[:, None] & (columns < n)[None, :])


@triton.jit(do_not_specialize=["stride_x"])
def gather_columns_kernel(
    out_ptr,
    x_ptr,
    permutation_ptr,
    n_columns,
    stride_x,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out[i, j] = x[i, permutation[j]], or 0 where that is -1: [n_rows, n_columns]; a program takes a part of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sources = tl.load(permutation_ptr + columns, mask=columns < n_columns, other=-1)
    x = tl.load(x_ptr + row * stride_x + sources, mask=sources >= 0, other=0.0)
    tl.store(out_ptr + row * n_columns + columns, x, mask=columns < n_columns)
