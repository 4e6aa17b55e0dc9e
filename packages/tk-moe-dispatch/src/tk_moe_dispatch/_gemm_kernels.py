"""Device code: products of many tokens with the weights of the experts that they are sent to.

A slot is one of the top_k choices of a token, number token * top_k + choice. A sorted row is a slot's place in the
order of experts, and `slots` says which slot a row is. `tiles` are those of `schedule_kernel`.

Weights are [experts, N, K] with neighbouring elements along K. Where SwiGLU follows there are two of them, for gate
and up, with the same strides: halves of one tensor, for instance, or its even and odd rows. Else the second is not
read. Biases are [experts, N], two of them with the same strides likewise.
"""

import triton
import triton.language as tl

from tk_kernel_core.gemm_kernels import wait_for_predecessor
from tk_moe_dispatch._kernels import TILE_FIELDS


@triton.jit
def swiglu(gate, up, alpha, beta, limit):
    """Return gate * sigmoid(alpha * gate) * (up + beta) in fp32; gate is clamped from above, up on both sides."""
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    # Where the exponential is infinite, the quotient is the zero that it should be.
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + beta)


@triton.jit
def place(index, n_row_tiles, n_feature_tiles, group_m):
    """Return which tile of rows and which of features an index stands for.

    group_m tiles of rows are gone through together, rows first: those of one expert find its weights in L2.
    """
    first = index // (group_m * n_feature_tiles) * group_m
    height = tl.minimum(n_row_tiles - first, group_m)
    within = index % (group_m * n_feature_tiles)
    return first + within % height, within // height


@triton.jit
def _place_by_expert(index, tiles_ptr, n_feature_tiles, GROUP_M: tl.constexpr):
    """Return the same, one expert after the other: its tiles are gone through in as few groups of GROUP_M as can be."""
    tile_ptr = tiles_ptr + index // n_feature_tiles * TILE_FIELDS
    first, n_row_tiles = tl.load(tile_ptr + 4), tl.load(tile_ptr + 5)
    group_m = tl.cdiv(n_row_tiles, tl.cdiv(n_row_tiles, GROUP_M))
    row_tile, feature_tile = place(index - first * n_feature_tiles, n_row_tiles, n_feature_tiles, group_m)
    return first + row_tile, feature_tile


@triton.jit
def _load_step(row_ptrs, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K columns from `start` on; what lies beyond K counts as 0."""
    columns = start + tl.arange(0, BLOCK_K)[None, :]
    if K % BLOCK_K == 0:
        return tl.load(row_ptrs + columns)
    else:
        return tl.load(row_ptrs + columns, mask=columns < K, other=0.0)


@triton.jit
def _load_weight(weight, offsets, expert, first_feature, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load [BLOCK_N, BLOCK_K] of an expert's weight, a descriptor where offsets is None."""
    if offsets is None:
        # What lies beyond the tensor is 0.
        w = weight.load([expert, first_feature, start])
        return tl.reshape(w, [w.shape[1], w.shape[2]])
    else:
        return _load_step(weight + offsets, start, K, BLOCK_K)


@triton.jit
def _load_rows(x, row, tile, start, HEIGHT: tl.constexpr):
    """Load a block of rows from `row` on; where tiles have a HEIGHT, zeros for what is not in the tile."""
    if HEIGHT:
        rows = x.load([tile, row - tile * HEIGHT, start])
        return tl.reshape(rows, [rows.shape[1], rows.shape[2]])
    else:
        return x.load([row, start])


@triton.jit
def _zeros(BLOCK_M: tl.constexpr, WIDTH: tl.constexpr, SWAPPED: tl.constexpr):
    if SWAPPED:
        return tl.zeros([WIDTH, BLOCK_M], tl.float32)
    else:
        return tl.zeros([BLOCK_M, WIDTH], tl.float32)


@triton.jit
def _accumulate(total, x, w, SWAPPED: tl.constexpr):
    if SWAPPED:
        return tl.dot(w, x.T, total)
    else:
        return tl.dot(x, w.T, total)


@triton.jit
def add_bias(values, bias_ptr, expert, features, stride_bias, step_bias, n):
    """Add an expert's bias, if there is one, to what belongs to the features."""
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + expert.to(tl.int64) * stride_bias + features * step_bias
        values += tl.load(bias_ptrs, mask=features < n, other=0.0).to(tl.float32)
    return values


@triton.jit
def _finish(
    total,
    up_total,
    first_row,
    out_ptr,
    slots_ptr,
    routing_ptr,
    bias_ptr,
    up_bias_ptr,
    expert,
    end_row,
    first_feature,
    stride_bias,
    step_bias,
    alpha,
    beta,
    limit,
    N: tl.constexpr,
    SCATTER: tl.constexpr,
    GATED: tl.constexpr,
    TURN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Store what products of BLOCK_M rows from first_row on make, as `expert_gemm_kernel` says."""
    features = first_feature + tl.arange(0, BLOCK_N)[None, :]
    if TURN:
        total, up_total = tl.split(tl.permute(tl.reshape(total, [BLOCK_M, BLOCK_N // TURN, 2, TURN]), (0, 1, 3, 2)))
        total, up_total = tl.reshape(total, [BLOCK_M, BLOCK_N]), tl.reshape(up_total, [BLOCK_M, BLOCK_N])
    total = add_bias(total, bias_ptr, expert, features, stride_bias, step_bias, N)
    if GATED:
        up_total = add_bias(up_total, up_bias_ptr, expert, features, stride_bias, step_bias, N)
        total = swiglu(total, up_total, alpha, beta, limit)
    rows = first_row + tl.arange(0, BLOCK_M)[:, None]
    row_exists = rows < end_row
    if SCATTER:
        rows = tl.load(slots_ptr + rows, mask=row_exists, other=0)
    if routing_ptr is not None:
        total *= tl.load(routing_ptr + rows, mask=row_exists, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + rows.to(tl.int64) * N + features
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=row_exists & (features < N))


@triton.jit
def _make_tile(
    x,
    x_rest,
    slots_ptr,
    weight,
    up_weight,
    expert,
    first_row,
    end_row,
    first_feature,
    stride_x,
    stride_expert,
    stride_feature,
    top_k,
    store_to,
    finish_by,
    N: tl.constexpr,
    K: tl.constexpr,
    GATHER: tl.constexpr,
    HEIGHT: tl.constexpr,
    SCATTER: tl.constexpr,
    GATED: tl.constexpr,
    TURN: tl.constexpr,
    SWAPPED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    REST_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply BLOCK_M rows of x with weight[expert].T, and the REST_M rows behind them, in fp32; `_finish` them.

    If GATED and not joined in TURNs, multiply them with up_weight[expert].T, too: no other rows follow then.
    """
    X_BY_POINTER: tl.constexpr = GATHER or not DESCRIPTORS
    if X_BY_POINTER:
        # Rows and features that do not exist repeat the last one.
        rows = tl.minimum(first_row + tl.arange(0, BLOCK_M), end_row - 1)
        if GATHER:
            rows = tl.load(slots_ptr + rows) // top_k
        x_ptrs = x + rows.to(tl.int64)[:, None] * stride_x
    offsets = None
    if not DESCRIPTORS:
        features = tl.minimum(first_feature + tl.arange(0, BLOCK_N), N - 1)
        offsets = expert.to(tl.int64) * stride_expert + features.to(tl.int64)[:, None] * stride_feature
    rest = first_row + BLOCK_M
    # Rows of another tile are not worth reading: those beyond x are zeros that cost nothing.
    rest_read = tl.where(rest < end_row, rest, 2**31 - REST_M - 1)
    tile = first_row // HEIGHT if HEIGHT else None
    WIDTH: tl.constexpr = 2 * BLOCK_N if TURN else BLOCK_N
    total = _zeros(BLOCK_M, WIDTH, SWAPPED)
    second = _zeros(REST_M if REST_M else BLOCK_M, WIDTH, SWAPPED)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if X_BY_POINTER:
            x_tile = _load_step(x_ptrs, start, K, BLOCK_K)
        else:
            x_tile = _load_rows(x, first_row, tile, start, HEIGHT)
        if TURN:
            # One wide product reads x once, where two would read it twice.
            w = tl.reshape(weight.load([expert, first_feature // TURN, 0, 0, start]), [WIDTH, BLOCK_K])
        else:
            w = _load_weight(weight, offsets, expert, first_feature, start, K, BLOCK_K)
        total = _accumulate(total, x_tile, w, SWAPPED)
        if REST_M:
            second = _accumulate(second, _load_rows(x_rest, rest_read, tile, start, HEIGHT), w, SWAPPED)
        elif GATED and not TURN:
            w = _load_weight(up_weight, offsets, expert, first_feature, start, K, BLOCK_K)
            second = _accumulate(second, x_tile, w, SWAPPED)
    if SWAPPED:
        total, second = total.T, second.T
    if REST_M:
        _finish(second, second, rest, *store_to, *finish_by, N, SCATTER, GATED, TURN, REST_M, BLOCK_N)
    _finish(total, second, first_row, *store_to, *finish_by, N, SCATTER, GATED, TURN, BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=["top_k"])
def expert_gemm_kernel(
    out_ptr,
    x,
    x_rest,
    tiles_ptr,
    slots_ptr,
    weight,
    up_weight,
    routing_ptr,
    bias_ptr,
    up_bias_ptr,
    stride_x,
    stride_expert,
    stride_feature,
    stride_bias,
    step_bias,
    top_k,
    alpha,
    beta,
    limit,
    N: tl.constexpr,
    K: tl.constexpr,
    GATHER: tl.constexpr,
    PADDED: tl.constexpr,
    SCATTER: tl.constexpr,
    GATED: tl.constexpr,
    TURN: tl.constexpr,
    SWAPPED: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    REST_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    STAGES: tl.constexpr,
    BY_NEED: tl.constexpr,
    FLATTEN: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out = x @ weight.T + bias, expert by expert; a program goes through tiles.

    GATHER: rows of x are tokens, stride_x apart, else sorted rows. GATED: out is SwiGLU of the products with weight and
    up_weight. SCATTER: rows of out are slots, else sorted rows; each is multiplied by its element of routing, if that
    is given. SWAPPED makes the weights the first operand, of which the matrix units take more rows at a time.
    Weights are DESCRIPTORS of blocks [1, BLOCK_N, BLOCK_K], and x, unless gathered, of blocks [BLOCK_M, BLOCK_K]; or
    all are pointers. With TURN, weight is both, [experts, N / TURN, 2, TURN, K], of blocks that have BLOCK_N of each. A
    tile has BLOCK_M + REST_M rows: where REST_M is not 0, x_rest is x again, of blocks [REST_M, BLOCK_K]. out is
    contiguous.
    PADDED: the rows of an expert end where a tile does. x is [tiles, rows of a tile, K] then, and the blocks [1, ..]. A
    tile's block is read from its first row on, and counts as zeros behind the tile: these take hardly any power to
    multiply, which the rows of other experts would. BY_NEED: a tile takes no more time than the first of REST_M,
    BLOCK_M and both that holds its rows; else all take the same, and programs that read the same weights keep step.
    """
    n_feature_tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    wait_for_predecessor(DEPENDENT_LAUNCH)
    n_row_tiles = tl.load(tiles_ptr + 3)
    for index in tl.range(tl.program_id(0), n_row_tiles * n_feature_tiles, tl.num_programs(0), flatten=FLATTEN):
        row_tile, feature_tile = _place_by_expert(index, tiles_ptr, n_feature_tiles, GROUP_M)
        expert = tl.load(tiles_ptr + row_tile * TILE_FIELDS)
        first_row = tl.load(tiles_ptr + row_tile * TILE_FIELDS + 1)
        end_row = tl.load(tiles_ptr + row_tile * TILE_FIELDS + 2)
        first_feature = feature_tile * BLOCK_N
        store_to = out_ptr, slots_ptr, routing_ptr, bias_ptr, up_bias_ptr, expert, end_row, first_feature
        finish_by = stride_bias, step_bias, alpha, beta, limit
        # A tile has no more than REST_M rows, or no more than BLOCK_M, or needs both. One of the three is its own.
        for size in tl.static_range(0 if BY_NEED else 2, 3):
            is_its_size = True
            if BY_NEED:
                n_rows = end_row - first_row
                is_its_size = (n_rows > (0, REST_M, BLOCK_M)[size]) & (
                    n_rows <= (REST_M, BLOCK_M, BLOCK_M + REST_M)[size]
                )
            if is_its_size:
                _make_tile(
                    x_rest if size == 0 else x,
                    x_rest,
                    slots_ptr,
                    weight,
                    up_weight,
                    expert,
                    first_row,
                    end_row,
                    first_feature,
                    stride_x,
                    stride_expert,
                    stride_feature,
                    top_k,
                    store_to,
                    finish_by,
                    N,
                    K,
                    GATHER,
                    BLOCK_M + REST_M if PADDED else 0,
                    SCATTER,
                    GATED,
                    TURN,
                    SWAPPED,
                    DESCRIPTORS,
                    REST_M if size == 0 else BLOCK_M,
                    REST_M if size == 2 else 0,
                    BLOCK_N,
                    BLOCK_K,
                    STAGES,
                )
