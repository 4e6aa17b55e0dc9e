"""Device code: products with int8 codes, and what makes codes of numbers and numbers of codes.

Codes are [N, K] with K contiguous. Where a row is reached by a stride, it comes in units of an ALIGNMENT, in
elements, which shows the compiler how wide it may load. Results are contiguous.
"""

import triton
import triton.language as tl

from tk_kernel_core.gemm_kernels import wait_for_predecessor
from tk_kernel_core.quantization_kernels import encode, magnitude_bits, scale_and_factor


@triton.jit
def _tile(index, n_tiles_m, n_tiles_n, GROUP_M: tl.constexpr):
    """Return the tile's row and column: GROUP_M rows of tiles are gone through together, and share their weights."""
    group_size = GROUP_M * n_tiles_n
    first_m = index // group_size * GROUP_M
    height = tl.minimum(n_tiles_m - first_m, GROUP_M)
    within = index % group_size
    return first_m + within % height, within // height


@triton.jit
def _row_offsets(first, n_rows, stride, SIZE: tl.constexpr):
    """Return where SIZE rows start, counted from the first; those beyond the last one repeat it, and are not stored.

    32 bits do within a tile, and halve the registers that addresses take.
    """
    return tl.minimum(tl.arange(0, SIZE), n_rows - 1 - first) * stride


@triton.jit
def _load_step(base, offsets, inner, start, k, EVEN_K: tl.constexpr):
    """Load a tile whose columns are `inner` from `start` on; what lies beyond k counts as 0."""
    if EVEN_K:
        return tl.load(base + start + offsets)
    else:
        return tl.load(base + start + offsets, mask=inner < k - start, other=0)


@triton.jit
def _to_float(codes, dtype: tl.constexpr):
    """Return int8 codes as 16-bit floats, which is exact."""
    if dtype == tl.float16:
        # 0x6400 + byte is the number 1024 + byte: cheaper than a conversion, of which a GPU does few at a time.
        biased = (codes.to(tl.int16) & 0xFF) ^ 0x6480
        return biased.to(tl.float16, bitcast=True) - 1152.0
    else:
        return codes.to(dtype)


@triton.jit
def _store_part(
    acc,
    first_m,
    first_n,
    m,
    n,
    out,
    x_scale_ptr,
    scale_ptr,
    bias_ptr,
    zero_point_ptr,
    x_sum_ptr,
    OUT_DESCRIPTOR: tl.constexpr,
):
    rows = first_m + tl.arange(0, acc.shape[0])
    columns = first_n + tl.arange(0, acc.shape[1])
    row_mask, column_mask = rows < m, columns < n
    if zero_point_ptr is not None:
        zero_point = tl.load(zero_point_ptr + columns, mask=column_mask, other=0)[None, :]
        x_sum = tl.load(x_sum_ptr + rows, mask=row_mask, other=0)[:, None]
        if acc.dtype.is_floating() or zero_point.dtype.is_floating():
            acc = acc.to(tl.float32) - x_sum.to(tl.float32) * zero_point.to(tl.float32)
        else:
            acc -= x_sum * zero_point.to(tl.int32)
    value = acc.to(tl.float32) * tl.load(scale_ptr + columns, mask=column_mask, other=0.0)[None, :]
    if x_scale_ptr is not None:
        value *= tl.load(x_scale_ptr + rows, mask=row_mask, other=0.0)[:, None]
    if bias_ptr is not None:
        value += tl.load(bias_ptr + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
    if OUT_DESCRIPTOR:
        # It leaves out what lies beyond the tensor.
        out.store([first_m, first_n], value.to(out.dtype))
    else:
        out_ptrs = out + (rows.to(tl.int64) * n)[:, None] + columns[None, :]
        tl.store(out_ptrs, value.to(out.dtype.element_ty), mask=row_mask[:, None] & column_mask[None, :])


@triton.jit
def _store(
    acc,
    first_m,
    first_n,
    m,
    n,
    out,
    x_scale_ptr,
    scale_ptr,
    bias_ptr,
    zero_point_ptr,
    x_sum_ptr,
    OUT_DESCRIPTOR: tl.constexpr,
):
    """Store (acc - zero_point * x_sum) * scale * x_scale + bias, as far as it lies within [m, n].

    out is a descriptor of blocks as high as acc and at most 64 wide, or a pointer.
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    N_PARTS: tl.constexpr = 2 if BLOCK_N == 128 else 1
    if N_PARTS == 2:
        # One half after the other: with all factors of a wide tile at hand, registers would spill.
        parts = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N // 2]), (0, 2, 1)))
    else:
        parts = (acc,)
    for part in tl.static_range(N_PARTS):
        _store_part(
            parts[part],
            first_m,
            first_n + part * (BLOCK_N // N_PARTS),
            m,
            n,
            out,
            x_scale_ptr,
            scale_ptr,
            bias_ptr,
            zero_point_ptr,
            x_sum_ptr,
            OUT_DESCRIPTOR,
        )


@triton.jit(do_not_specialize=["m", "n_units", "k_units", "stride_x"])
def int8_gemm_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    zero_point_ptr,
    x_sum_ptr,
    m,
    n_units,
    k_units,
    stride_x,
    N_ALIGNMENT: tl.constexpr,
    K_ALIGNMENT: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out = (x @ weight.T - zero_point * x_sum) * scale + bias; a program makes one tile.

    x is [m, k] in 16-bit floats and starts a row every stride_x * K_ALIGNMENT elements; x_sum holds its row sums in
    fp32. SWAPPED makes the weights the first operand, of which the matrix units take more rows at a time.
    """
    n, k = n_units * N_ALIGNMENT, k_units * K_ALIGNMENT
    tile_m, tile_n = _tile(tl.program_id(0), tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N), GROUP_M)
    first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    inner = tl.arange(0, BLOCK_K)
    x_base = x_ptr + first_m.to(tl.int64) * stride_x * K_ALIGNMENT
    weight_base = weight_ptr + first_n.to(tl.int64) * k
    # [BLOCK_K, BLOCK_M]: in the order of the weights, the compiler would let a thread load as many elements of x as
    # of codes, and so 32 bytes in two halves.
    x_offsets = _row_offsets(first_m, m, stride_x * K_ALIGNMENT, BLOCK_M)[None, :] + inner[:, None]
    weight_offsets = _row_offsets(first_n, n, k, BLOCK_N)[:, None] + inner[None, :]
    # Each copy of the last row would be fetched from L2.
    x_exists = (first_m + tl.arange(0, BLOCK_M) < m)[None, :]
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    if SWAPPED:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
        codes = _load_step(weight_base, weight_offsets, inner[None, :], start, k, EVEN_K)
        x = tl.load(x_base + start + x_offsets, mask=x_exists & (EVEN_K | (inner[:, None] < k - start)), other=0.0)
        weight = _to_float(codes, x.dtype)
        if SWAPPED:
            # Not a sum, of which the compiler would make a dot that goes on with acc: on sm_90 it may overwrite
            # the registers of a first operand that such a dot has not read yet.
            acc = tl.fma(tl.dot(weight, x), 1.0, acc)
        else:
            acc = tl.dot(tl.trans(x), tl.trans(weight), acc)
    if SWAPPED:
        acc = tl.trans(acc)
    _store(
        acc,
        first_m,
        first_n,
        m,
        n,
        out_ptr,
        None,
        scale_ptr,
        bias_ptr,
        zero_point_ptr,
        x_sum_ptr,
        False,
    )


@triton.jit(do_not_specialize=["m", "n_units", "k_units", "stride_x"])
def w8a8_gemm_kernel(
    out,
    x,
    x_scale_ptr,
    weight,
    scale_ptr,
    bias_ptr,
    zero_point_ptr,
    x_sum_ptr,
    m,
    n_units,
    k_units,
    stride_x,
    N_ALIGNMENT: tl.constexpr,
    K_ALIGNMENT: tl.constexpr,
    EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    OUT_DESCRIPTOR: tl.constexpr,
):
    """out = (x @ weight.T - zero_point * x_sum) * scale * x_scale + bias; a program goes through tiles.

    x is [m, k] in codes and starts a row every stride_x * K_ALIGNMENT elements; x_scale is fp32 [m], x_sum holds
    the row sums in int32. Sums of products are exact in int32, and so is the correction by integer zero points.
    SWAPPED makes the weights the first operand, of which the matrix units take more rows at a time. x and weight
    are DESCRIPTORS of blocks [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K], or pointers; out is an OUT_DESCRIPTOR of blocks
    as high and at most 64 wide, or a pointer.
    """
    n, k = n_units * N_ALIGNMENT, k_units * K_ALIGNMENT
    n_tiles_m, n_tiles_n = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)[None, :]
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    for index in tl.range(tl.program_id(0), n_tiles_m * n_tiles_n, tl.num_programs(0)):
        tile_m, tile_n = _tile(index, n_tiles_m, n_tiles_n, GROUP_M)
        first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
        if not DESCRIPTORS:
            x_base = x + first_m.to(tl.int64) * stride_x * K_ALIGNMENT
            weight_base = weight + first_n.to(tl.int64) * k
            x_offsets = _row_offsets(first_m, m, stride_x * K_ALIGNMENT, BLOCK_M)[:, None] + inner
            weight_offsets = _row_offsets(first_n, n, k, BLOCK_N)[:, None] + inner
        if SWAPPED:
            acc = tl.zeros([BLOCK_N, BLOCK_M], tl.int32)
        else:
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for start in tl.range(0, k, BLOCK_K, num_stages=STAGES):
            if DESCRIPTORS:
                # What lies beyond the tensors is 0.
                weight_codes, x_codes = weight.load([first_n, start]), x.load([first_m, start])
            else:
                weight_codes = _load_step(weight_base, weight_offsets, inner, start, k, EVEN_K)
                x_codes = _load_step(x_base, x_offsets, inner, start, k, EVEN_K)
            if SWAPPED:
                acc = tl.dot(weight_codes, tl.trans(x_codes), acc, out_dtype=tl.int32)
            else:
                acc = tl.dot(x_codes, tl.trans(weight_codes), acc, out_dtype=tl.int32)
        if SWAPPED:
            acc = tl.trans(acc)
        _store(
            acc,
            first_m,
            first_n,
            m,
            n,
            out,
            x_scale_ptr,
            scale_ptr,
            bias_ptr,
            zero_point_ptr,
            x_sum_ptr,
            OUT_DESCRIPTOR,
        )


@triton.jit
def _load_row(ptrs, mask):
    return tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows", "stride_x"])
def quantize_per_token_kernel(
    codes_ptr,
    x_scale_ptr,
    x_ptr,
    x_sum_ptr,
    n_rows,
    stride_x,
    WIDTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """x_scale = absmax / 127 and codes = round(x * (127 / absmax)), row by row; x_sum are row sums of the codes.

    Rows of x are stride_x * ALIGNMENT elements apart. A row below 2^-110 has codes 0 and scale 1, one with an
    infinity or a NaN codes 0 and scale NaN.
    """
    rows = tl.program_id(0).to(n_rows.dtype) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
    row_mask = rows < n_rows
    columns = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64) * stride_x * ALIGNMENT + columns
    codes_ptrs = codes_ptr + rows.to(tl.int64) * WIDTH + columns
    wait_for_predecessor(DEPENDENT_LAUNCH)

    if WIDTH <= BLOCK_K:
        mask = row_mask & (columns < WIDTH)
        x = _load_row(x_ptrs, mask)
        scale, factor, is_finite = scale_and_factor(tl.max(magnitude_bits(x), axis=1, keep_dims=True))
        codes = encode(tl.where(is_finite, x, 0.0), factor)
        tl.store(codes_ptrs, codes, mask=mask)
        x_sum = tl.sum(codes.to(tl.int32), axis=1, keep_dims=True)
    else:
        # Two passes; the second finds the row in L2.
        bits = tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
        for start in tl.range(0, WIDTH, BLOCK_K):
            x = _load_row(x_ptrs + start, row_mask & (start + columns < WIDTH))
            bits = tl.maximum(bits, magnitude_bits(x))
        scale, factor, is_finite = scale_and_factor(tl.max(bits, axis=1, keep_dims=True))
        sums = tl.zeros([BLOCK_M, BLOCK_K], tl.int32)
        for start in tl.range(0, WIDTH, BLOCK_K):
            mask = row_mask & (start + columns < WIDTH)
            codes = encode(tl.where(is_finite, _load_row(x_ptrs + start, mask), 0.0), factor)
            tl.store(codes_ptrs + start, codes, mask=mask)
            sums += codes.to(tl.int32)
        x_sum = tl.sum(sums, axis=1, keep_dims=True)
    tl.store(x_scale_ptr + rows, scale, mask=row_mask)
    if x_sum_ptr is not None:
        tl.store(x_sum_ptr + rows, x_sum, mask=row_mask)


@triton.jit(do_not_specialize=["n_rows", "stride_x"])
def row_sums_kernel(
    x_sum_ptr,
    x_ptr,
    n_rows,
    stride_x,
    WIDTH: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """x_sum = x.sum(-1) in fp32; rows of x are stride_x * ALIGNMENT elements apart."""
    rows = tl.program_id(0).to(n_rows.dtype) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
    row_mask = rows < n_rows
    columns = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = x_ptr + rows.to(tl.int64) * stride_x * ALIGNMENT + columns
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    sums = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K):
        sums += _load_row(x_ptrs + start, row_mask & (start + columns < WIDTH))
    tl.store(x_sum_ptr + rows, tl.sum(sums, axis=1, keep_dims=True), mask=row_mask)


@triton.jit(do_not_specialize=["n_rows"])
def dequantize_kernel(
    out_ptr,
    codes_ptr,
    scale_ptr,
    zero_point_ptr,
    n_rows,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out = (codes - zero_point) * scale, all [n_rows, WIDTH] but scale and zero_point, which are [n_rows]."""
    n_tiles_k: tl.constexpr = (WIDTH + BLOCK_K - 1) // BLOCK_K
    rows = tl.program_id(0) // n_tiles_k * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]  # [BLOCK_N, 1]
    columns = tl.program_id(0) % n_tiles_k * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    row_mask = rows < n_rows
    mask = row_mask & (columns < WIDTH)
    offsets = rows.to(tl.int64) * WIDTH + columns
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    value = tl.load(codes_ptr + offsets, mask=mask, other=0).to(tl.float32)
    if zero_point_ptr is not None:
        value -= tl.load(zero_point_ptr + rows, mask=row_mask, other=0).to(tl.float32)
    value *= tl.load(scale_ptr + rows, mask=row_mask, other=0.0)
    tl.store(out_ptr + offsets, value.to(out_ptr.dtype.element_ty), mask=mask)
