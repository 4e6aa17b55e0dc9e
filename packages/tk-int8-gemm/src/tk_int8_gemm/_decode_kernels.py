"""Device code for few rows of activations: y = ((x @ codes^T) - zero_point * sum(x)) * scale + bias.

Such a product takes as long as reading its weight, so everything serves that stream. The weight is the left
operand of the matrix instruction, 16 output features by 16 of K, and the rows of x are its 8 columns. A tile is
16 output features; a group is 128 of K. A program works on TILES tiles. Each of its warps takes groups of its own,
and their sums are added up at the end.

Dimensions are in an order that makes the layout the compiler gives to a load (16 bytes a thread along the last
dimension, then lanes and warps along the first, the rest in registers) the operand layout of the matrix
instruction, so that no operand passes through shared memory. K is taken in another order than it is stored in, the
same for both operands: block of 32, pair in a half octet, octet, half of it, element of the pair. Then 8 consecutive
elements of x are in the registers that two instructions take them from.
"""

import triton
import triton.language as tl

from tk_kernel_core.gemm_kernels import (
    NARROW_LANES,
    add_parts,
    keep_loads_above,
    load_words,
    load_x,
    select,
    store,
    wait_for_predecessor,
)
from tk_kernel_core.weight_kernels import dequantise_int8

GROUP = tl.constexpr(128)
BLOCKS = tl.constexpr(4)  # of 32 columns, in a group
BLOCK_WORDS = tl.constexpr(128)  # of a block of a tile
GROUP_WORDS = tl.constexpr(512)


@triton.jit
def _codes(words, dtype: tl.constexpr, PTX: tl.constexpr):
    """The codes of words [WARPS, TILES, BLOCKS, BLOCK_WORDS] as a left operand [WARPS, TILES * 16, GROUP]."""
    WARPS: tl.constexpr = words.shape[0]
    TILES: tl.constexpr = words.shape[1]
    # warp, tile, block, row, octet, half of the tile's rows, half of the octet, element of the pair, pair
    codes = tl.reshape(dequantise_int8(words, dtype, PTX), [WARPS, TILES, BLOCKS, 8, 4, 2, 2, 2, 2])
    if NARROW_LANES and PTX:
        codes = tl.permute(codes, (0, 1, 5, 3, 2, 8, 6, 4, 7))
    else:
        codes = tl.permute(codes, (0, 1, 5, 3, 2, 8, 4, 6, 7))
    return tl.reshape(codes, [WARPS, TILES * 16, GROUP])


@triton.jit
def _ones(WARPS: tl.constexpr, dtype: tl.constexpr):
    # Made like a weight: else the compiler gives it another operand layout, and x would have to be rearranged for it.
    return _codes(tl.full([WARPS, 1, BLOCKS, BLOCK_WORDS], -0x7E7E7E7F, tl.int32), dtype, False)


@triton.jit
def _word_offsets(first_groups, N_GROUPS: tl.constexpr, TILES: tl.constexpr):
    """Offsets of the words of one group of each warp, from the program's first tile, [WARPS, TILES, BLOCKS, WORDS]."""
    tiles = tl.arange(0, TILES)[None, :, None, None]
    words = tl.arange(0, BLOCKS)[None, None, :, None] * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, None, None, :]
    return (tiles * N_GROUPS + first_groups[:, None, None, None]) * GROUP_WORDS + words


@triton.jit
def _scaled(total, x_sum, features, exists, scale_ptr, zero_point_ptr):
    """(total - zero_point * x_sum) * scale, where features and exists broadcast to total."""
    if zero_point_ptr is not None:
        total -= tl.load(zero_point_ptr + features, mask=exists, other=0.0) * x_sum
    return total * tl.load(scale_ptr + features, mask=exists, other=0.0)


@triton.jit
def int8_decode_row_kernel(
    y_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_point_ptr,
    bias_ptr,
    partial_ptr,
    counter_ptr,
    n_features,
    IN_FEATURES: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SPLIT: tl.constexpr,
    PTX: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """One row of x. The 8 columns of the matrix instruction are 8 groups of K, x being block-diagonal in them.

    So x is loaded once and by all lanes, where eight rows of which seven are missing would idle most of them.
    A warp takes 8 * ITERATIONS groups, AHEAD of which are on their way at a time.
    """
    N_GROUPS: tl.constexpr = (IN_FEATURES + GROUP - 1) // GROUP
    COVERED: tl.constexpr = SPLIT * WARPS * ITERATIONS * 8
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first_groups = (tl.program_id(1) * WARPS + tl.arange(0, WARPS)) * (8 * ITERATIONS)  # [WARPS]
    codes_ptr += tl.program_id(0).to(tl.int64) * (TILES * N_GROUPS * GROUP_WORDS)
    word_ptrs = codes_ptr + _word_offsets(first_groups, N_GROUPS, TILES)
    # [8 groups, WARPS, BLOCKS, 32]
    x_groups = tl.arange(0, 8)[:, None, None, None] + first_groups[None, :, None, None]
    x_columns = tl.arange(0, BLOCKS)[None, None, :, None] * 32 + tl.arange(0, 32)[None, None, None, :]
    x_columns += x_groups * GROUP
    own_group = tl.arange(0, 8)[None, None, :]
    sums = tl.zeros([WARPS, TILES * 16, 8], tl.float32)
    x_sums = tl.zeros([WARPS, 16, 8], tl.float32)

    for iteration in range(ITERATIONS):
        for first in tl.static_range(0, 8, AHEAD):
            words = ()
            for ahead in tl.static_range(AHEAD):
                step = iteration * 8 + first + ahead
                loaded = load_words(
                    word_ptrs + step * GROUP_WORDS, first_groups + step, N_GROUPS, COVERED != N_GROUPS, PTX
                )
                words += (loaded,)
            keep_loads_above(PTX)
            wait_for_predecessor(DEPENDENT_LAUNCH)
            if first == 0:
                columns = x_columns + iteration * (8 * GROUP)
                x = load_x(x_ptr + columns, columns, IN_FEATURES, COVERED * GROUP != IN_FEATURES, PTX)
                # group, warp, block, octet, half, pair, element
                x = tl.reshape(x, [8, WARPS, BLOCKS, 4, 2, 2, 2])
                x = tl.permute(x, (1, 2, 5, 4, 3, 6, 0) if NARROW_LANES and PTX else (1, 2, 5, 3, 4, 6, 0))
                x = tl.reshape(x, [WARPS, GROUP, 8])
                if zero_point_ptr is not None:
                    x_sums = tl.dot(_ones(WARPS, dtype), x, x_sums)
            for ahead in tl.static_range(AHEAD):
                diagonal = select(x, own_group == first + ahead, PTX)
                sums = tl.dot(_codes(words[ahead], dtype, PTX), diagonal, sums)

    total = tl.sum(tl.sum(sums, 2), 0)  # [TILES * 16]
    x_sum = tl.sum(tl.sum(tl.sum(x_sums, 2), 0), 0) * 0.0625  # of 16 equal ones: exact
    places = tl.arange(0, TILES * 16)
    features = tl.program_id(0) * (TILES * 16) + places
    exists = features < n_features
    total = _scaled(total, x_sum, features, exists, scale_ptr, zero_point_ptr)
    total, is_last = add_parts(total, places, partial_ptr, counter_ptr, SPLIT)
    if is_last:
        store(y_ptr + features, total, exists, features, exists, bias_ptr)


@triton.jit(do_not_specialize=["n_rows", "stride_x"])
def int8_decode_kernel(
    y_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_point_ptr,
    bias_ptr,
    partial_ptr,
    counter_ptr,
    n_rows,
    n_features,
    stride_x,
    ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STEPS: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    X_AHEAD: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SPLIT: tl.constexpr,
    PTX: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Up to BLOCK_M rows of x, which is 8 or 16.

    A warp takes STEPS * ITERATIONS groups, of which STEPS are unrolled. The weight of AHEAD and the rows of X_AHEAD of
    them are on their way while one is multiplied.
    Row i of x starts i * stride_x * ALIGNMENT elements into it, which shows the compiler how wide it may load.
    """
    N_GROUPS: tl.constexpr = (IN_FEATURES + GROUP - 1) // GROUP
    COVERED: tl.constexpr = SPLIT * WARPS * ITERATIONS * STEPS
    ROW_TILES: tl.constexpr = BLOCK_M // 8
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first_groups = (tl.program_id(1) * WARPS + tl.arange(0, WARPS)) * (STEPS * ITERATIONS)  # [WARPS]
    codes_ptr += tl.program_id(0).to(tl.int64) * (TILES * N_GROUPS * GROUP_WORDS)
    word_ptrs = codes_ptr + _word_offsets(first_groups, N_GROUPS, TILES)
    # [8 rows, WARPS, BLOCKS, ROW_TILES, 32]
    x_rows = tl.arange(0, ROW_TILES)[None, None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None, None]
    x_columns = tl.arange(0, BLOCKS)[None, None, :, None, None] * 32 + tl.arange(0, 32)[None, None, None, None, :]
    x_columns += first_groups[None, :, None, None, None] * GROUP
    # Rows that do not exist repeat the last one: a mask would cost an instruction for every element of x.
    x_rows = tl.minimum(x_rows, n_rows - 1).to(tl.int64)
    x_ptrs = x_ptr + (x_rows * stride_x * ALIGNMENT + x_columns)
    sums = tl.zeros([WARPS, TILES * 16, BLOCK_M], tl.float32)
    x_sums = tl.zeros([WARPS, 16, BLOCK_M], tl.float32)

    for iteration in range(ITERATIONS):
        words = ()
        for ahead in tl.static_range(AHEAD):
            step = iteration * STEPS + ahead
            loaded = load_words(word_ptrs + step * GROUP_WORDS, first_groups + step, N_GROUPS, COVERED != N_GROUPS, PTX)
            words += (loaded,)
        keep_loads_above(PTX)
        wait_for_predecessor(DEPENDENT_LAUNCH)
        rows = ()
        for ahead in tl.static_range(X_AHEAD):
            begin = (iteration * STEPS + ahead) * GROUP
            rows += (load_x(x_ptrs + begin, x_columns + begin, IN_FEATURES, COVERED * GROUP != IN_FEATURES, PTX),)
        for this in tl.static_range(STEPS):
            step = iteration * STEPS + this
            if this + AHEAD < STEPS:
                loaded = load_words(
                    word_ptrs + (step + AHEAD) * GROUP_WORDS,
                    first_groups + step + AHEAD,
                    N_GROUPS,
                    COVERED != N_GROUPS,
                    PTX,
                )
                words += (loaded,)
            if this + X_AHEAD < STEPS:
                begin = (step + X_AHEAD) * GROUP
                rows += (load_x(x_ptrs + begin, x_columns + begin, IN_FEATURES, COVERED * GROUP != IN_FEATURES, PTX),)
            keep_loads_above(PTX)
            # row, warp, block, row tile, octet, half, pair, element
            x = tl.reshape(rows[this], [8, WARPS, BLOCKS, ROW_TILES, 4, 2, 2, 2])
            x = tl.permute(x, (1, 2, 6, 5, 4, 7, 3, 0) if NARROW_LANES and PTX else (1, 2, 6, 4, 5, 7, 3, 0))
            x = tl.reshape(x, [WARPS, GROUP, BLOCK_M])
            if zero_point_ptr is not None:
                # The matrix unit adds up x, too: elsewhere it would take an instruction or two for every element.
                x_sums = tl.dot(_ones(WARPS, dtype), x, x_sums)
            sums = tl.dot(_codes(words[this], dtype, PTX), x, sums)

    total = tl.sum(sums, 0)  # [TILES * 16, BLOCK_M]
    x_sum = tl.sum(tl.sum(x_sums, 0), 0, keep_dims=True) * 0.0625  # of 16 equal ones: exact
    local_features = tl.arange(0, TILES * 16)[:, None]
    rows = tl.arange(0, BLOCK_M)[None, :]
    features = tl.program_id(0) * (TILES * 16) + local_features
    feature_exists = features < n_features
    total = _scaled(total, x_sum, features, feature_exists, scale_ptr, zero_point_ptr)
    total, is_last = add_parts(total, rows * (TILES * 16) + local_features, partial_ptr, counter_ptr, SPLIT)
    if is_last:
        y_ptrs = y_ptr + rows.to(tl.int64) * n_features + features
        store(y_ptrs, total, (rows < n_rows) & feature_exists, features, feature_exists, bias_ptr)


@triton.jit(do_not_specialize=["n_rows"])
def dequantize_packed_kernel(
    out_ptr,
    codes_ptr,
    scale_ptr,
    zero_point_ptr,
    n_rows,
    IN_FEATURES: tl.constexpr,
    GROUPS: tl.constexpr,
    PTX: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out = (codes - zero_point) * scale, [n_rows, IN_FEATURES], from tiles; a program takes GROUPS groups of one."""
    N_GROUPS: tl.constexpr = (IN_FEATURES + GROUP - 1) // GROUP
    first_group = tl.program_id(1) * GROUPS
    groups = tl.arange(0, GROUPS)[:, None, None]
    words = tl.arange(0, BLOCKS)[None, :, None] * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, None, :]
    first_word = (tl.program_id(0).to(tl.int64) * N_GROUPS + first_group) * GROUP_WORDS
    word_ptrs = codes_ptr + first_word + groups * GROUP_WORDS + words
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None]
    columns = first_group * GROUP + tl.arange(0, GROUPS * GROUP)[None, :]
    row_mask = rows < n_rows
    packed = tl.load(word_ptrs, mask=first_group + groups < N_GROUPS, other=0, eviction_policy="evict_first")
    scale = tl.load(scale_ptr + rows, mask=row_mask, other=0.0)
    # group, block, row, octet, half of the tile's rows, half of the octet, element of the pair, pair
    codes = tl.reshape(dequantise_int8(packed, tl.float16, PTX), [GROUPS, BLOCKS, 8, 4, 2, 2, 2, 2])
    codes = tl.reshape(tl.permute(codes, (4, 2, 0, 1, 3, 5, 7, 6)), [16, GROUPS * GROUP]).to(tl.float32)
    if zero_point_ptr is not None:
        codes -= tl.load(zero_point_ptr + rows, mask=row_mask, other=0.0)
    wait_for_predecessor(DEPENDENT_LAUNCH)
    out_ptrs = out_ptr + rows.to(tl.int64) * IN_FEATURES + columns
    tl.store(out_ptrs, (codes * scale).to(out_ptr.dtype.element_ty), mask=row_mask & (columns < IN_FEATURES))
