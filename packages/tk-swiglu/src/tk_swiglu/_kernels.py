"""Device code. Arithmetic is fp32 throughout.

LAYOUT says where gate and up are: in two tensors (`separate`), or in one whose rows hold one after the other
(`concat`) or alternate (`interleaved`). GATE_FIRST says which of them comes first there.

Row i of a tensor starts ((i // n_inner) * stride_outer + (i % n_inner) * stride_inner) * ALIGNMENT elements
into it: strides and widths come in units of ALIGNMENT elements, which shows the compiler how wide it may load.
"""

import triton
import triton.language as tl


@triton.jit
def _row_offsets(rows, n_inner, stride_outer, stride_inner, ALIGNMENT: tl.constexpr):
    # 64-bit before the product: a tensor may hold more than 2^31 elements.
    outer = (rows // n_inner).to(tl.int64)
    inner = (rows % n_inner).to(tl.int64)
    return (outer * stride_outer + inner * stride_inner) * ALIGNMENT


@triton.jit
def _load(ptrs, mask):
    # Inputs leave the cache last, so that results leave first and are written back while other inputs are read.
    return tl.load(ptrs, mask=mask, other=0.0, eviction_policy="evict_last")


@triton.jit
def _load_halves(gate_ptrs, up_ptrs, mask, LAYOUT: tl.constexpr, GATE_FIRST: tl.constexpr):
    """Gate and up in fp32, [M, N] each; interleaved, gate_ptrs and the mask are those of the pairs, [M, 2 * N]."""
    if LAYOUT == "interleaved":
        pairs = _load(gate_ptrs, mask)
        first, second = tl.split(pairs.reshape(pairs.shape[0], pairs.shape[1] // 2, 2))
    else:
        first = _load(gate_ptrs, mask)
        second = _load(up_ptrs, mask)
    if GATE_FIRST:
        return first.to(tl.float32), second.to(tl.float32)
    else:
        return second.to(tl.float32), first.to(tl.float32)


@triton.jit
def _store_halves(gate_ptrs, up_ptrs, gate, up, mask, LAYOUT: tl.constexpr, GATE_FIRST: tl.constexpr):
    """Store what belongs to gate and up where `_load_halves` loads them."""
    if GATE_FIRST:
        first, second = gate, up
    else:
        first, second = up, gate
    if LAYOUT == "interleaved":
        pairs = tl.join(first, second).reshape(gate.shape[0], 2 * gate.shape[1])
        tl.store(gate_ptrs, pairs.to(gate_ptrs.dtype.element_ty), mask=mask)
    else:
        tl.store(gate_ptrs, first.to(gate_ptrs.dtype.element_ty), mask=mask)
        tl.store(up_ptrs, second.to(up_ptrs.dtype.element_ty), mask=mask)


@triton.jit
def _up_pointers(gate_ptrs, up_ptr, offsets, width, LAYOUT: tl.constexpr):
    if LAYOUT == "separate":
        return up_ptr + offsets
    else:
        return gate_ptrs + width


@triton.jit
def _clamp(gate, up, limit, HAS_LIMIT: tl.constexpr):
    if HAS_LIMIT:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return gate, up


@triton.jit
def _sigmoid_roots(gate, alpha):
    """Return the square roots of sigmoid(alpha * gate) and of sigmoid(-alpha * gate).

    They are 1 / sqrt(1 + h^2) and h / sqrt(1 + h^2) with h = exp(-|alpha * gate| / 2), the greater one for the argument
    above 0. Nothing overflows. GPUs flush a subnormal exponential to 0, but multiplied by its root twice, a gate
    keeps its precision for as long as the product has it. And the reciprocal of a root is one instruction, where a
    division is many.
    """
    exponent = gate * (alpha * (0.5 * 1.4426950408889634))
    h = tl.exp2(-tl.abs(exponent))
    greater = tl.rsqrt(1.0 + h * h)
    less = h * greater
    return tl.where(exponent >= 0, greater, less), tl.where(exponent >= 0, less, greater)


@triton.jit
def _plus(value, beta, HAS_BETA: tl.constexpr):
    # Adding 0 would turn -0 into 0.
    if HAS_BETA:
        value += beta
    return value


@triton.jit
def _places(first, n_elements, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Rows and columns of SIZE elements from `first` on, [1, SIZE], counted row by row, and which of them exist.

    A WIDTH of 0 stands for a single row.
    """
    offsets = tl.arange(0, SIZE)[None, :]
    mask = first + offsets < n_elements
    if WIDTH == 0:
        return tl.zeros([1, SIZE], tl.int64), first + offsets, mask
    else:
        row = first // WIDTH
        start = first - row * WIDTH
        # From the start of the tile's first row on, 32 bits mostly do: division is slow.
        if WIDTH + SIZE < 2**31:
            start = start.to(tl.int32)
        offsets += start
        return row + offsets // WIDTH, offsets % WIDTH, mask


@triton.jit(do_not_specialize=["n_units"])
def swiglu_forward_kernel(
    out_ptr,
    gate_ptr,
    up_ptr,
    bias_ptr,
    bias_up_ptr,
    n_units,
    n_inner,
    stride_out_outer,
    stride_out_inner,
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
    BLOCK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out = gate * sigmoid(alpha * gate) * (up + beta), of gate and up with their biases, clamped.

    A program makes BLOCK consecutive results, from as many rows of WIDTH as it takes.
    """
    PARTS: tl.constexpr = 2 if LAYOUT == "interleaved" else 1
    n_elements = n_units.to(tl.int64) * ALIGNMENT
    first = tl.program_id(0).to(tl.int64) * BLOCK
    rows, columns, mask = _places(PARTS * first, PARTS * n_elements, PARTS * WIDTH, PARTS * BLOCK)
    gate_ptrs = gate_ptr + _row_offsets(rows, n_inner, stride_gate_outer, stride_gate_inner, ALIGNMENT) + columns
    up_offsets = _row_offsets(rows, n_inner, stride_up_outer, stride_up_inner, ALIGNMENT) + columns
    up_ptrs = _up_pointers(gate_ptrs, up_ptr, up_offsets, WIDTH, LAYOUT)
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    gate, up = _load_halves(gate_ptrs, up_ptrs, mask, LAYOUT, GATE_FIRST)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + columns
        bias_up_ptrs = _up_pointers(bias_ptrs, bias_up_ptr, columns, WIDTH, LAYOUT)
        bias_gate, bias_up = _load_halves(bias_ptrs, bias_up_ptrs, mask, LAYOUT, GATE_FIRST)
        gate += bias_gate
        up += bias_up
    gate, up = _clamp(gate, up, limit, HAS_LIMIT)
    root, _ = _sigmoid_roots(gate, alpha)
    out = gate * root * root * _plus(up, beta, HAS_BETA)
    rows, columns, mask = _places(first, n_elements, WIDTH, BLOCK)
    out_ptrs = out_ptr + _row_offsets(rows, n_inner, stride_out_outer, stride_out_inner, ALIGNMENT) + columns
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "n_units", "n_row_programs"])
def swiglu_backward_kernel(
    dgate_ptr,
    dup_ptr,
    dbias_ptr,
    dbias_up_ptr,
    dy_ptr,
    gate_ptr,
    up_ptr,
    bias_ptr,
    bias_up_ptr,
    n_rows,
    n_units,
    n_row_programs,
    n_inner,
    stride_dgate,
    stride_dy_outer,
    stride_dy_inner,
    stride_gate_outer,
    stride_gate_inner,
    stride_up_outer,
    stride_up_inner,
    alpha,
    beta,
    limit,
    LAYOUT: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_LIMIT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """dgate = dy * (up + beta) * s * (1 + alpha * gate * (1 - s)), dup = dy * gate * s, zero where a clamp bit.

    s is sigmoid(alpha * gate), and gate and up are those of the forward kernel. A program works on BLOCK_N
    columns, of rows of n_units * ALIGNMENT, and goes down the rows, BLOCK_M at a time, beside n_row_programs - 1
    others. dgate and dup are contiguous, in the layout of gate and up. dbias and dbias_up are laid out like the
    biases, in fp32, one line for each of the n_row_programs, which adds up its own rows in order: the sum over
    lines is the same in every run.
    """
    PARTS: tl.constexpr = 2 if LAYOUT == "interleaved" else 1
    width = n_units.to(tl.int64) * ALIGNMENT
    n_tiles = tl.cdiv(width, BLOCK_N).to(tl.int32)
    row_program = tl.program_id(0) // n_tiles
    start = (tl.program_id(0) % n_tiles).to(tl.int64) * BLOCK_N
    dy_columns = start + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    dy_column_mask = dy_columns < width
    columns = PARTS * start + tl.arange(0, PARTS * BLOCK_N)[None, :]  # [1, PARTS * BLOCK_N]
    column_mask = columns < PARTS * width
    sum_gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    sum_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + columns
        bias_up_ptrs = _up_pointers(bias_ptrs, bias_up_ptr, columns, width, LAYOUT)
        bias_gate, bias_up = _load_halves(bias_ptrs, bias_up_ptrs, column_mask, LAYOUT, GATE_FIRST)

    # In 64 bits, because the step beyond the last row may not fit 32. In stages: the next rows are on their way
    # from memory while these are worked on.
    first_row = row_program.to(tl.int64) * BLOCK_M
    for first in tl.range(first_row, n_rows.to(tl.int64), n_row_programs.to(tl.int64) * BLOCK_M, num_stages=STAGES):
        rows = first + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
        row_mask = rows < n_rows
        gate_ptrs = gate_ptr + _row_offsets(rows, n_inner, stride_gate_outer, stride_gate_inner, ALIGNMENT) + columns
        up_offsets = _row_offsets(rows, n_inner, stride_up_outer, stride_up_inner, ALIGNMENT) + columns
        up_ptrs = _up_pointers(gate_ptrs, up_ptr, up_offsets, width, LAYOUT)
        dy_ptrs = dy_ptr + _row_offsets(rows, n_inner, stride_dy_outer, stride_dy_inner, ALIGNMENT) + dy_columns
        dy = _load(dy_ptrs, row_mask & dy_column_mask).to(tl.float32)
        gate, up = _load_halves(gate_ptrs, up_ptrs, row_mask & column_mask, LAYOUT, GATE_FIRST)
        if bias_ptr is not None:
            gate += bias_gate
            up += bias_up
        clamped_gate, clamped_up = _clamp(gate, up, limit, HAS_LIMIT)
        root, complement_root = _sigmoid_roots(clamped_gate, alpha)
        # Further out 1 - s is 0 or 1. Infinity times 0 is NaN: right for a gate that is infinite, but not for one
        # whose product with alpha is.
        x = alpha * clamped_gate
        x = tl.where(tl.abs(clamped_gate) < float("inf"), tl.minimum(tl.maximum(x, -200.0), 200.0), x)
        slope = 1.0 + x * (complement_root * complement_root)
        dgate = dy * _plus(clamped_up, beta, HAS_BETA) * (slope * root * root)
        dup = dy * (clamped_gate * root * root)
        if HAS_LIMIT:
            dgate = tl.where(gate <= limit, dgate, 0.0)
            dup = tl.where((up <= limit) & (up >= -limit), dup, 0.0)
        offsets = _row_offsets(rows, 1, stride_dgate, 0, ALIGNMENT) + columns
        dgate_ptrs = dgate_ptr + offsets
        dup_ptrs = _up_pointers(dgate_ptrs, dup_ptr, offsets, width, LAYOUT)
        _store_halves(dgate_ptrs, dup_ptrs, dgate, dup, row_mask & column_mask, LAYOUT, GATE_FIRST)
        if dbias_ptr is not None:
            sum_gate += dgate
            sum_up += dup

    if dbias_ptr is not None:
        lines = row_program.to(tl.int64) * width * (1 if LAYOUT == "separate" else 2)
        dbias_ptrs = dbias_ptr + lines + columns
        dbias_up_ptrs = _up_pointers(dbias_ptrs, dbias_up_ptr, lines + columns, width, LAYOUT)
        total_gate, total_up = tl.sum(sum_gate, axis=0, keep_dims=True), tl.sum(sum_up, axis=0, keep_dims=True)
        _store_halves(dbias_ptrs, dbias_up_ptrs, total_gate, total_up, column_mask, LAYOUT, GATE_FIRST)
