"""Device code of the product that is quantised row by row. Arithmetic and layouts are those of `_kernels`."""

import triton
import triton.language as tl

from tk_kernel_core.quantization_kernels import encode, magnitude_bits, scale_and_factor, store_codes
from tk_swiglu._kernels import _clamp, _load_halves, _plus, _row_offsets, _sigmoid_roots, _up_pointers


@triton.jit
def _as_swiglu_gives_it(
    gate_ptr,
    up_ptr,
    bias_ptr,
    bias_up_ptr,
    start,
    row_mask,
    alpha,
    beta,
    limit,
    WIDTH: tl.constexpr,
    LAYOUT: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return BLOCK_N columns of the product, from `start` on, in fp32, as the forward kernel rounds it to its result.

    gate_ptr and up_ptr point to the first elements of the rows, [BLOCK_M, 1].
    """
    PARTS: tl.constexpr = 2 if LAYOUT == "interleaved" else 1
    columns = PARTS * start + tl.arange(0, PARTS * BLOCK_N)[None, :]  # [1, PARTS * BLOCK_N]
    column_mask = columns < PARTS * WIDTH
    gate_ptrs = gate_ptr + columns
    up_ptrs = _up_pointers(gate_ptrs, up_ptr, columns, WIDTH, LAYOUT)
    gate, up = _load_halves(gate_ptrs, up_ptrs, row_mask & column_mask, LAYOUT, GATE_FIRST)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + columns
        bias_up_ptrs = _up_pointers(bias_ptrs, bias_up_ptr, columns, WIDTH, LAYOUT)
        bias_gate, bias_up = _load_halves(bias_ptrs, bias_up_ptrs, column_mask, LAYOUT, GATE_FIRST)
        gate += bias_gate
        up += bias_up
    gate, up = _clamp(gate, up, limit, HAS_LIMIT)
    root, _ = _sigmoid_roots(gate, alpha)
    out = gate * root * root * _plus(up, beta, HAS_BETA)
    return out.to(gate_ptr.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["n_rows"])
def swiglu_quant_kernel(
    codes_ptr,
    x_scale_ptr,
    gate_ptr,
    up_ptr,
    bias_ptr,
    bias_up_ptr,
    n_rows,
    n_inner,
    stride_gate_outer,
    stride_gate_inner,
    stride_up_outer,
    stride_up_inner,
    alpha,
    beta,
    limit,
    WIDTH: tl.constexpr,
    LAYOUT: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """codes and x_scale are what the result of the forward kernel, in the dtype of gate, is quantised to row by row.

    codes are contiguous, [n_rows, WIDTH], and so is x_scale, [n_rows] in fp32. A program makes BLOCK_M rows.
    """
    first_row = tl.program_id(0).to(n_rows.dtype) * BLOCK_M
    rows = first_row + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
    row_mask = rows < n_rows
    gate_ptr += _row_offsets(rows, n_inner, stride_gate_outer, stride_gate_inner, ALIGNMENT)
    if LAYOUT == "separate":
        up_ptr += _row_offsets(rows, n_inner, stride_up_outer, stride_up_inner, ALIGNMENT)
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    if WIDTH <= BLOCK_N:
        # The row stays in registers: every element is read once.
        y = _as_swiglu_gives_it(
            gate_ptr,
            up_ptr,
            bias_ptr,
            bias_up_ptr,
            0,
            row_mask,
            alpha,
            beta,
            limit,
            WIDTH,
            LAYOUT,
            GATE_FIRST,
            HAS_BETA,
            HAS_LIMIT,
            BLOCK_N,
        )
        x_scale, factor, is_finite = scale_and_factor(tl.max(magnitude_bits(y), axis=1, keep_dims=True))
        store_codes(codes_ptr, encode(tl.where(is_finite, y, 0.0), factor), first_row, n_rows, 0, WIDTH)
    else:
        # Two passes; the second finds the row in L2.
        bits = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
        for start in tl.range(0, WIDTH, BLOCK_N):
            y = _as_swiglu_gives_it(
                gate_ptr,
                up_ptr,
                bias_ptr,
                bias_up_ptr,
                start,
                row_mask,
                alpha,
                beta,
                limit,
                WIDTH,
                LAYOUT,
                GATE_FIRST,
                HAS_BETA,
                HAS_LIMIT,
                BLOCK_N,
            )
            bits = tl.maximum(bits, magnitude_bits(y))
        x_scale, factor, is_finite = scale_and_factor(tl.max(bits, axis=1, keep_dims=True))
        for start in tl.range(0, WIDTH, BLOCK_N):
            y = _as_swiglu_gives_it(
                gate_ptr,
                up_ptr,
                bias_ptr,
                bias_up_ptr,
                start,
                row_mask,
                alpha,
                beta,
                limit,
                WIDTH,
                LAYOUT,
                GATE_FIRST,
                HAS_BETA,
                HAS_LIMIT,
                BLOCK_N,
            )
            store_codes(codes_ptr, encode(tl.where(is_finite, y, 0.0), factor), first_row, n_rows, start, WIDTH)
    tl.store(x_scale_ptr + rows, x_scale, mask=row_mask)
