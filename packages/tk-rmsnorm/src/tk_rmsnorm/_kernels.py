"""Device code. A row is one vector of HIDDEN_SIZE elements that is normalised; a tile is BLOCK_M rows.

Row i of a tensor starts ((i // n_inner) * stride_outer + (i % n_inner) * stride_inner) * ALIGNMENT elements
into it: strides come in units of ALIGNMENT elements, which shows the compiler how wide it may load.
Arithmetic is fp32 throughout.
"""

import triton
import triton.language as tl

from tk_kernel_core.quantization_kernels import encode, magnitude_bits, scale_and_factor, store_codes


@triton.jit
def _row_offsets(rows, n_inner, stride_outer, stride_inner, ALIGNMENT: tl.constexpr):
    # 64-bit before the product: a tensor may hold more than 2^31 elements.
    outer = (rows // n_inner).to(tl.int64)
    inner = (rows % n_inner).to(tl.int64)
    return ((outer * stride_outer + inner * stride_inner) * ALIGNMENT)[:, None]  # [BLOCK_M, 1]


@triton.jit
def _load(ptr, mask, EVICTION: tl.constexpr):
    return tl.load(ptr, mask=mask, other=0.0, eviction_policy=EVICTION).to(tl.float32)


@triton.jit
def _load_sum(x_ptr, residual_ptr, offsets, mask, EVICTION: tl.constexpr):
    value = _load(x_ptr + offsets, mask, EVICTION)
    if residual_ptr is not None:
        value += _load(residual_ptr + offsets, mask, EVICTION)
    return value


@triton.jit
def _load_scale(weight_ptr, weight_offset, columns, mask, HAS_OFFSET: tl.constexpr):
    if weight_ptr is None:
        return tl.full(columns.shape, 1.0, tl.float32)
    elif HAS_OFFSET:
        return _load(weight_ptr + columns, mask, "evict_last") + weight_offset
    else:
        return _load(weight_ptr + columns, mask, "evict_last")


@triton.jit
def _round_through(value, dtype: tl.constexpr, CAST_FIRST: tl.constexpr):
    if CAST_FIRST:
        value = value.to(dtype).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["n_rows"])
def rmsnorm_forward_kernel(
    y_ptr,
    x_ptr,
    weight_ptr,
    residual_ptr,
    sum_ptr,
    n_rows,
    n_inner,
    stride_y_outer,
    stride_y_inner,
    stride_x_outer,
    stride_x_inner,
    stride_residual_outer,
    stride_residual_inner,
    stride_sum_outer,
    stride_sum_inner,
    eps,
    weight_offset,
    HIDDEN_SIZE: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """sum = x + residual; y = sum * rsqrt(mean(sum^2) + eps) * (weight + weight_offset)."""
    dtype: tl.constexpr = y_ptr.dtype.element_ty

    rows = tl.program_id(0).to(n_rows.dtype) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_mask = (rows < n_rows)[:, None]  # [BLOCK_M, 1]
    columns = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    y_ptr += _row_offsets(rows, n_inner, stride_y_outer, stride_y_inner, ALIGNMENT)
    x_ptr += _row_offsets(rows, n_inner, stride_x_outer, stride_x_inner, ALIGNMENT)
    if residual_ptr is not None:
        residual_ptr += _row_offsets(rows, n_inner, stride_residual_outer, stride_residual_inner, ALIGNMENT)
    if sum_ptr is not None:
        sum_ptr += _row_offsets(rows, n_inner, stride_sum_outer, stride_sum_inner, ALIGNMENT)
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    if HIDDEN_SIZE <= BLOCK_N:
        # The row stays in registers: every element is read once. It leaves L2 last although nobody reads it
        # again: so the results leave first, and are written back while other rows are read.
        mask = row_mask & (columns < HIDDEN_SIZE)
        value = _load_sum(x_ptr, residual_ptr, columns, mask, "evict_last")
        # Before the reduction, so that the two loads wait together.
        scale = _load_scale(weight_ptr, weight_offset, columns, columns < HIDDEN_SIZE, HAS_OFFSET)
        if sum_ptr is not None:
            tl.store(sum_ptr + columns, value.to(sum_ptr.dtype.element_ty), mask=mask)
        mean_square = tl.sum(value * value, axis=1, keep_dims=True) / HIDDEN_SIZE  # [BLOCK_M, 1]
        normed = _round_through(value * tl.rsqrt(mean_square + eps), dtype, CAST_FIRST)
        tl.store(y_ptr + columns, (normed * scale).to(dtype), mask=mask)
    else:
        # Two passes; the second finds the row in L2.
        squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, HIDDEN_SIZE, BLOCK_N):
            offsets = start + columns
            mask = row_mask & (offsets < HIDDEN_SIZE)
            value = _load_sum(x_ptr, residual_ptr, offsets, mask, "evict_last")
            squares += value * value
        mean_square = tl.sum(squares, axis=1, keep_dims=True) / HIDDEN_SIZE  # [BLOCK_M, 1]
        rstd = tl.rsqrt(mean_square + eps)
        for start in tl.range(0, HIDDEN_SIZE, BLOCK_N):
            offsets = start + columns
            mask = row_mask & (offsets < HIDDEN_SIZE)
            value = _load_sum(x_ptr, residual_ptr, offsets, mask, "evict_first")
            if sum_ptr is not None:
                tl.store(sum_ptr + offsets, value.to(sum_ptr.dtype.element_ty), mask=mask)
            scale = _load_scale(weight_ptr, weight_offset, offsets, offsets < HIDDEN_SIZE, HAS_OFFSET)
            normed = _round_through(value * rstd, dtype, CAST_FIRST)
            tl.store(y_ptr + offsets, (normed * scale).to(dtype), mask=mask)


@triton.jit(do_not_specialize=["n_rows"])
def rmsnorm_backward_kernel(
    dx_ptr,
    dweight_ptr,
    dy_ptr,
    dsum_ptr,
    x_ptr,
    weight_ptr,
    n_rows,
    n_inner,
    stride_dy_outer,
    stride_dy_inner,
    stride_dsum_outer,
    stride_dsum_inner,
    stride_x_outer,
    stride_x_inner,
    eps,
    weight_offset,
    HIDDEN_SIZE: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """dx = rstd * (dyw - n * mean(dyw * n)) + dsum with n = x * rstd, dyw = dy * (weight + weight_offset).

    dx is contiguous. dweight is [n_programs, HIDDEN_SIZE] in fp32: each program adds up dy * n over its own
    rows, in order, so that the sum over programs is the same in every run.
    """
    dtype: tl.constexpr = dy_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    if dweight_ptr is not None:
        dweight_ptr += tl.program_id(0).to(tl.int64) * HIDDEN_SIZE
    dweight = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if HIDDEN_SIZE <= BLOCK_N:
        scale = _load_scale(weight_ptr, weight_offset, columns, columns < HIDDEN_SIZE, HAS_OFFSET)

    # In 64 bits, because the step beyond the last row may not fit 32. In stages: the next rows are on their way
    # from memory while these are worked on.
    first_row = tl.program_id(0).to(tl.int64) * BLOCK_M
    for first in tl.range(first_row, n_rows.to(tl.int64), tl.num_programs(0).to(tl.int64) * BLOCK_M, num_stages=STAGES):
        rows = first + tl.arange(0, BLOCK_M)
        row_mask = (rows < n_rows)[:, None]  # [BLOCK_M, 1]
        x_rows = x_ptr + _row_offsets(rows, n_inner, stride_x_outer, stride_x_inner, ALIGNMENT)
        dy_rows = dy_ptr + _row_offsets(rows, n_inner, stride_dy_outer, stride_dy_inner, ALIGNMENT)
        dx_rows = dx_ptr + _row_offsets(rows, 1, HIDDEN_SIZE // ALIGNMENT, 0, ALIGNMENT)
        if dsum_ptr is not None:
            dsum_rows = dsum_ptr + _row_offsets(rows, n_inner, stride_dsum_outer, stride_dsum_inner, ALIGNMENT)

        if HIDDEN_SIZE <= BLOCK_N:
            mask = row_mask & (columns < HIDDEN_SIZE)
            x = _load(x_rows + columns, mask, "evict_last")
            dy = _load(dy_rows + columns, mask, "evict_last")
            rstd = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / HIDDEN_SIZE + eps)  # [BLOCK_M, 1]
            normed = x * rstd
            dyw = dy * scale
            projection = tl.sum(dyw * normed, axis=1, keep_dims=True) / HIDDEN_SIZE  # [BLOCK_M, 1]
            dx = rstd * (dyw - normed * projection)
            if dsum_ptr is not None:
                dx += _load(dsum_rows + columns, mask, "evict_last")
            tl.store(dx_rows + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)
            if dweight_ptr is not None:
                dweight += dy * _round_through(normed, dtype, CAST_FIRST)
        else:
            squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            products = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for start in tl.range(0, HIDDEN_SIZE, BLOCK_N):
                offsets = start + columns
                mask = row_mask & (offsets < HIDDEN_SIZE)
                x = _load(x_rows + offsets, mask, "evict_last")
                dy = _load(dy_rows + offsets, mask, "evict_last")
                squares += x * x
                products += x * dy * _load_scale(weight_ptr, weight_offset, offsets, offsets < HIDDEN_SIZE, HAS_OFFSET)
            rstd = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / HIDDEN_SIZE + eps)
            projection = rstd * tl.sum(products, axis=1, keep_dims=True) / HIDDEN_SIZE
            for start in tl.range(0, HIDDEN_SIZE, BLOCK_N):
                offsets = start + columns
                mask = row_mask & (offsets < HIDDEN_SIZE)
                column_mask = offsets < HIDDEN_SIZE
                normed = _load(x_rows + offsets, mask, "evict_first") * rstd
                dy = _load(dy_rows + offsets, mask, "evict_first")
                dyw = dy * _load_scale(weight_ptr, weight_offset, offsets, column_mask, HAS_OFFSET)
                dx = rstd * (dyw - normed * projection)
                if dsum_ptr is not None:
                    dx += _load(dsum_rows + offsets, mask, "evict_first")
                tl.store(dx_rows + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
                if dweight_ptr is not None:
                    # The program's own line of dweight is its accumulator: a row this long has no room in registers.
                    total = tl.sum(dy * _round_through(normed, dtype, CAST_FIRST), axis=0, keep_dims=True)
                    if first > first_row:
                        total += _load(dweight_ptr + offsets, column_mask, "evict_last")
                    tl.store(dweight_ptr + offsets, total, mask=column_mask)

    if HIDDEN_SIZE <= BLOCK_N:
        if dweight_ptr is not None:
            columns = tl.arange(0, BLOCK_N)
            tl.store(dweight_ptr + columns, tl.sum(dweight, axis=0), mask=columns < HIDDEN_SIZE)


@triton.jit
def _as_rmsnorm_gives_it(value, rstd, scale, dtype: tl.constexpr, CAST_FIRST: tl.constexpr):
    """Return the norm in fp32, as the forward kernel rounds it to its result."""
    normed = _round_through(value * rstd, dtype, CAST_FIRST)
    return (normed * scale).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows"])
def rmsnorm_quant_kernel(
    codes_ptr,
    x_scale_ptr,
    x_ptr,
    weight_ptr,
    residual_ptr,
    sum_ptr,
    n_rows,
    n_inner,
    stride_x_outer,
    stride_x_inner,
    stride_residual_outer,
    stride_residual_inner,
    stride_sum_outer,
    stride_sum_inner,
    eps,
    weight_offset,
    HIDDEN_SIZE: tl.constexpr,
    CAST_FIRST: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """sum = x + residual; codes and x_scale are what y of the forward kernel, in the dtype of x, is quantised to.

    codes are contiguous, and so is x_scale, [n_rows] in fp32. Tiles are those of the forward kernel, and so mean
    squares add up in the same order.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty

    first_row = tl.program_id(0).to(n_rows.dtype) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)
    row_mask = (rows < n_rows)[:, None]  # [BLOCK_M, 1]
    columns = tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    x_ptr += _row_offsets(rows, n_inner, stride_x_outer, stride_x_inner, ALIGNMENT)
    if residual_ptr is not None:
        residual_ptr += _row_offsets(rows, n_inner, stride_residual_outer, stride_residual_inner, ALIGNMENT)
    if sum_ptr is not None:
        sum_ptr += _row_offsets(rows, n_inner, stride_sum_outer, stride_sum_inner, ALIGNMENT)
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    if HIDDEN_SIZE <= BLOCK_N:
        # As in the forward kernel; what is quantised stays in registers too.
        mask = row_mask & (columns < HIDDEN_SIZE)
        value = _load_sum(x_ptr, residual_ptr, columns, mask, "evict_last")
        scale = _load_scale(weight_ptr, weight_offset, columns, columns < HIDDEN_SIZE, HAS_OFFSET)
        if sum_ptr is not None:
            tl.store(sum_ptr + columns, value.to(sum_ptr.dtype.element_ty), mask=mask)
        mean_square = tl.sum(value * value, axis=1, keep_dims=True) / HIDDEN_SIZE  # [BLOCK_M, 1]
        y = _as_rmsnorm_gives_it(value, tl.rsqrt(mean_square + eps), scale, dtype, CAST_FIRST)
        x_scale, factor, is_finite = scale_and_factor(tl.max(magnitude_bits(y), axis=1, keep_dims=True))
        store_codes(codes_ptr, encode(tl.where(is_finite, y, 0.0), factor), first_row, n_rows, 0, HIDDEN_SIZE)
    else:
        # Three passes; the others find the row in L2.
        squares = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, HIDDEN_SIZE, BLOCK_N):
            offsets = start + columns
            mask = row_mask & (offsets < HIDDEN_SIZE)
            value = _load_sum(x_ptr, residual_ptr, offsets, mask, "evict_last")
            squares += value * value
        mean_square = tl.sum(squares, axis=1, keep_dims=True) / HIDDEN_SIZE  # [BLOCK_M, 1]
        rstd = tl.rsqrt(mean_square + eps)
        bits = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for start in tl.range(0, HIDDEN_SIZE, BLOCK_N):
            offsets = start + columns
            mask = row_mask & (offsets < HIDDEN_SIZE)
            value = _load_sum(x_ptr, residual_ptr, offsets, mask, "evict_last")
            scale = _load_scale(weight_ptr, weight_offset, offsets, offsets < HIDDEN_SIZE, HAS_OFFSET)
            bits = tl.maximum(bits, magnitude_bits(_as_rmsnorm_gives_it(value, rstd, scale, dtype, CAST_FIRST)))
        x_scale, factor, is_finite = scale_and_factor(tl.max(bits, axis=1, keep_dims=True))
        for start in tl.range(0, HIDDEN_SIZE, BLOCK_N):
            offsets = start + columns
            mask = row_mask & (offsets < HIDDEN_SIZE)
            value = _load_sum(x_ptr, residual_ptr, offsets, mask, "evict_first")
            if sum_ptr is not None:
                tl.store(sum_ptr + offsets, value.to(sum_ptr.dtype.element_ty), mask=mask)
            scale = _load_scale(weight_ptr, weight_offset, offsets, offsets < HIDDEN_SIZE, HAS_OFFSET)
            y = _as_rmsnorm_gives_it(value, rstd, scale, dtype, CAST_FIRST)
            codes = encode(tl.where(is_finite, y, 0.0), factor)
            store_codes(codes_ptr, codes, first_row, n_rows, start, HIDDEN_SIZE)
    tl.store(x_scale_ptr + rows[:, None], x_scale, mask=row_mask)
