"""Device code for few rows of activations: y = x @ ((codes - zeros) * scales)^T + bias.

Such a product takes as long as reading its weight, so everything serves that stream. The weight is the left
operand of the matrix instruction, 16 output features by 16 columns, and the rows of x are its 8 columns. A tile is
16 output features. A step is 128 columns of the weight, and a part what of it shares a scale: all, a half or a
quarter. A program works on TILES tiles. Each of its warps takes steps of its own, and their sums are added up at the
end.

Dimensions are in an order that makes the layout the compiler gives to a load (16 bytes a thread along the last
dimension, then lanes and warps along the first, the rest in registers) the operand layout of the matrix instruction,
so that no operand passes through shared memory. Columns are taken in another order than they are stored in, the same
for both operands: block of 32, pair in a half octet, octet, half of it, column of the pair. Then 8 consecutive elements
of x are in the registers that two instructions take them from. For the sake of the zero points, bytes behind an
operand, the compiler gives a lane twice as many consecutive columns: pair, octet, block and half then, or the stored
order in a part of one block. Parts and warps make one dimension of independent products, whose results the scales
multiply.
"""

import triton
import triton.language as tl

from tk_kernel_core.gemm_kernels import (
    NARROW_LANES,
    STEP,
    add_parts,
    for_lanes,
    keep_loads_above,
    load_words,
    load_x,
    select,
    store,
    wait_for_predecessor,
)
from tk_kernel_core.weight_kernels import (
    BLOCKS,
    STEP_WORDS,
    dequantise_int4,
    for_words,
    group_of,
    load_groups,
    n_groups,
    n_parts,
    row_offsets,
    row_steps,
)


@triton.jit
def _left_operand(words, zeros, PARTS: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """codes - zeros of words [WARPS, TILES, 2, 128], [PARTS * WARPS, TILES * 16, STEP / PARTS]."""
    WARPS: tl.constexpr = words.shape[0]
    TILES: tl.constexpr = words.shape[1]
    PAIRS: tl.constexpr = 2 if PARTS > 1 else 1
    SINGLE: tl.constexpr = PARTS // PAIRS
    if zeros is not None:
        zeros = for_words(zeros.to(tl.int32))
    # warp, tile, pair of blocks: part and rest, row, octet, block: part and rest, half of the rows, column, pair, half
    codes = tl.reshape(
        dequantise_int4(words, zeros, None, dtype, PTX),
        [WARPS, TILES, PAIRS, 2 // PAIRS, 8, 4, SINGLE, 2 // SINGLE, 2, 2, 2, 2],
    )
    if zeros is None and NARROW_LANES and PTX:
        codes = tl.permute(codes, (2, 6, 0, 1, 8, 4, 3, 7, 10, 11, 5, 9))
    elif zeros is None:
        codes = tl.permute(codes, (2, 6, 0, 1, 8, 4, 3, 7, 10, 5, 11, 9))
    elif PARTS < BLOCKS:
        codes = tl.permute(codes, (2, 6, 0, 1, 8, 4, 3, 10, 5, 7, 11, 9))
    else:
        codes = tl.permute(codes, (2, 6, 0, 1, 8, 4, 3, 7, 5, 11, 10, 9))
    return tl.reshape(codes, [PARTS * WARPS, TILES * 16, STEP // PARTS])


@triton.jit
def _right_operand(x, PARTS: tl.constexpr, HAS_ZEROS: tl.constexpr, PTX: tl.constexpr):
    """x [8, WARPS, BLOCKS, ROW_TILES, 32] as [PARTS * WARPS, STEP / PARTS, ROW_TILES * 8]."""
    WARPS: tl.constexpr = x.shape[1]
    ROW_TILES: tl.constexpr = x.shape[3]
    ADJACENT: tl.constexpr = 1 if PARTS == BLOCKS else 2
    # row, warp, part, pair of blocks, block, row tile, octet, half, pair, column
    x = tl.reshape(x, [8, WARPS, PARTS, BLOCKS // PARTS // ADJACENT, ADJACENT, ROW_TILES, 4, 2, 2, 2])
    if not HAS_ZEROS and NARROW_LANES and PTX:
        x = tl.permute(x, (2, 1, 3, 4, 8, 7, 6, 9, 5, 0))
    elif not HAS_ZEROS:
        x = tl.permute(x, (2, 1, 3, 4, 8, 6, 7, 9, 5, 0))
    elif PARTS < BLOCKS:
        x = tl.permute(x, (2, 1, 3, 8, 6, 4, 7, 9, 5, 0))
    else:
        x = tl.permute(x, (2, 1, 3, 4, 6, 7, 8, 9, 5, 0))
    return tl.reshape(x, [PARTS * WARPS, STEP // PARTS, ROW_TILES * 8])


@triton.jit
def _word_offsets(first_steps, ROW_STEPS: tl.constexpr, TILES: tl.constexpr):
    """Offsets of the words of one step of each warp, from the program's first tile, [WARPS, TILES, 2, 128]."""
    tiles = tl.arange(0, TILES)[None, :, None, None]
    words = tl.arange(0, 2)[None, None, :, None] * 128 + tl.arange(0, 128)[None, None, None, :]
    return (tiles * ROW_STEPS + first_steps[:, None, None, None]) * STEP_WORDS + words


@triton.jit
def w4a16_decode_row_kernel(
    y_ptr,
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    partial_ptr,
    counter_ptr,
    n_features,
    IN_FEATURES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TILES: tl.constexpr,
    WARPS: tl.constexpr,
    AHEAD: tl.constexpr,
    ITERATIONS: tl.constexpr,
    SPLIT: tl.constexpr,
    PTX: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """One row of x. The 8 columns of the matrix instruction are 8 steps, x being block-diagonal in them.

    So x is loaded once and by all lanes, where eight rows of which seven are missing would idle most of them.
    A warp takes 8 * ITERATIONS steps, AHEAD of which are on their way at a time.
    """
    N_STEPS: tl.constexpr = (IN_FEATURES + STEP - 1) // STEP
    ROW_STEPS: tl.constexpr = row_steps(IN_FEATURES, GROUP_SIZE)
    N_GROUPS: tl.constexpr = n_groups(IN_FEATURES, GROUP_SIZE)
    PARTS: tl.constexpr = n_parts(GROUP_SIZE)
    COVERED: tl.constexpr = SPLIT * WARPS * ITERATIONS * 8
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first_steps = (tl.program_id(1) * WARPS + tl.arange(0, WARPS)) * (8 * ITERATIONS)  # [WARPS]
    first_tile = tl.program_id(0).to(tl.int64) * TILES
    word_ptrs = codes_ptr + first_tile * (ROW_STEPS * STEP_WORDS) + _word_offsets(first_steps, ROW_STEPS, TILES)
    offsets = first_tile * (N_GROUPS * 16) + row_offsets(tl.arange(0, TILES)[None, :], N_GROUPS)
    zero_ptrs = None if zeros_ptr is None else zeros_ptr + offsets
    group_steps = first_steps[None, None, :, None, None, None]
    # [8 steps, WARPS, BLOCKS, 1, 32]
    x_columns = tl.arange(0, BLOCKS)[None, None, :, None, None] * 32 + tl.arange(0, 32)[None, None, None, None, :]
    x_steps = tl.arange(0, 8)[:, None, None, None, None] + first_steps[None, :, None, None, None]
    x_columns += x_steps * STEP
    # [4 pairs of steps, 8 rows, WARPS, TILES, PARTS, 2 steps, 2 halves of the rows]
    scale_ptrs = tl.expand_dims(scales_ptr + offsets, 5)
    scale_parts = tl.arange(0, PARTS)[None, None, None, None, :, None, None]
    pair_steps = tl.arange(0, 2)[None, None, None, None, None, :, None]
    pair_steps += tl.arange(0, 4)[:, None, None, None, None, None, None] * 2
    pair_steps += first_steps[None, None, :, None, None, None, None]
    own_step = tl.arange(0, 8)[None, None, :]
    total = tl.zeros([PARTS * WARPS, TILES * 16, 8], tl.float32)

    for iteration in range(ITERATIONS):
        sums = tl.zeros([PARTS * WARPS, TILES * 16, 8], tl.float32)
        for first in tl.static_range(0, 8, AHEAD):
            words = ()
            zeros = ()
            for ahead in tl.static_range(AHEAD):
                step = iteration * 8 + first + ahead
                loaded = load_words(word_ptrs + step * STEP_WORDS, first_steps + step, N_STEPS, COVERED != N_STEPS, PTX)
                words += (loaded,)
                if zeros_ptr is not None:
                    zeros += (load_groups(zero_ptrs, group_steps + step, GROUP_SIZE, N_STEPS, COVERED != N_STEPS, PTX),)
            if first == 0:
                steps = pair_steps + iteration * 8
                group_ptrs = scale_ptrs + group_of(steps, scale_parts, GROUP_SIZE) * 16
                if COVERED != N_STEPS:
                    exists = for_lanes(steps < N_STEPS, PTX)
                    scales = for_lanes(tl.load(for_lanes(group_ptrs, PTX), mask=exists, other=0.0), PTX)
                else:
                    scales = for_lanes(tl.load(for_lanes(group_ptrs, PTX)), PTX)
            keep_loads_above(PTX)
            wait_for_predecessor(DEPENDENT_LAUNCH)
            if first == 0:
                columns = x_columns + iteration * (8 * STEP)
                x = load_x(x_ptr + columns, columns, IN_FEATURES, COVERED * STEP != IN_FEATURES, PTX)
                x = _right_operand(x, PARTS, zeros_ptr is not None, PTX)
            for ahead in tl.static_range(AHEAD):
                diagonal = select(x, own_step == first + ahead, PTX)
                codes = _left_operand(words[ahead], None if zeros_ptr is None else zeros[ahead], PARTS, dtype, PTX)
                sums = tl.dot(codes, diagonal, sums)
        # part, warp, tile, half of the rows, row, pair of steps, step
        scales = tl.reshape(tl.permute(scales, (4, 2, 3, 6, 1, 0, 5)), sums.shape)
        total += sums * scales.to(tl.float32)

    total = tl.sum(tl.sum(total, 2), 0)  # [TILES * 16]
    places = tl.arange(0, TILES * 16)
    features = tl.program_id(0) * (TILES * 16) + places
    exists = features < n_features
    total, is_last = add_parts(total, places, partial_ptr, counter_ptr, SPLIT)
    if is_last:
        store(y_ptr + features, total, exists, features, exists, bias_ptr)


@triton.jit(do_not_specialize=["n_rows", "stride_x"])
def w4a16_decode_kernel(
    y_ptr,
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
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
    GROUP_SIZE: tl.constexpr,
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

    A warp takes STEPS * ITERATIONS steps, of which STEPS are unrolled. The weight of AHEAD and the rows of X_AHEAD of
    them are on their way while one is multiplied.
    Row i of x starts i * stride_x * ALIGNMENT elements into it, which shows the compiler how wide it may load.
    """
    N_STEPS: tl.constexpr = (IN_FEATURES + STEP - 1) // STEP
    ROW_STEPS: tl.constexpr = row_steps(IN_FEATURES, GROUP_SIZE)
    N_GROUPS: tl.constexpr = n_groups(IN_FEATURES, GROUP_SIZE)
    PARTS: tl.constexpr = n_parts(GROUP_SIZE)
    COVERED: tl.constexpr = SPLIT * WARPS * ITERATIONS * STEPS
    RAGGED: tl.constexpr = COVERED * STEP != IN_FEATURES
    ROW_TILES: tl.constexpr = BLOCK_M // 8
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    first_steps = (tl.program_id(1) * WARPS + tl.arange(0, WARPS)) * (STEPS * ITERATIONS)  # [WARPS]
    first_tile = tl.program_id(0).to(tl.int64) * TILES
    word_ptrs = codes_ptr + first_tile * (ROW_STEPS * STEP_WORDS) + _word_offsets(first_steps, ROW_STEPS, TILES)
    offsets = first_tile * (N_GROUPS * 16) + row_offsets(tl.arange(0, TILES)[None, :], N_GROUPS)
    scale_ptrs = scales_ptr + offsets
    zero_ptrs = None if zeros_ptr is None else zeros_ptr + offsets
    group_steps = first_steps[None, None, :, None, None, None]
    # [8 rows, WARPS, BLOCKS, ROW_TILES, 32]
    x_rows = tl.arange(0, ROW_TILES)[None, None, None, :, None] * 8 + tl.arange(0, 8)[:, None, None, None, None]
    x_columns = tl.arange(0, BLOCKS)[None, None, :, None, None] * 32 + tl.arange(0, 32)[None, None, None, None, :]
    x_columns += first_steps[None, :, None, None, None] * STEP
    # Rows that do not exist repeat the last one: a mask would cost an instruction for every element of x.
    x_rows = tl.minimum(x_rows, n_rows - 1).to(tl.int64)
    x_ptrs = x_ptr + (x_rows * stride_x * ALIGNMENT + x_columns)
    sums = tl.zeros([PARTS * WARPS, TILES * 16, BLOCK_M], tl.float32)

    for iteration in range(ITERATIONS):
        words = ()
        scales = ()
        zeros = ()
        rows = ()
        # One of the weight, then one of x, that are due so far ahead of their use.
        for this in tl.static_range(-AHEAD, STEPS):
            if this + AHEAD < STEPS:
                step = iteration * STEPS + this + AHEAD
                loaded = load_words(word_ptrs + step * STEP_WORDS, first_steps + step, N_STEPS, COVERED != N_STEPS, PTX)
                words += (loaded,)
                scales += (load_groups(scale_ptrs, group_steps + step, GROUP_SIZE, N_STEPS, COVERED != N_STEPS, PTX),)
                if zeros_ptr is not None:
                    zeros += (load_groups(zero_ptrs, group_steps + step, GROUP_SIZE, N_STEPS, COVERED != N_STEPS, PTX),)
            if this == -1:
                keep_loads_above(PTX)
                wait_for_predecessor(DEPENDENT_LAUNCH)
                for ahead in tl.static_range(X_AHEAD):
                    begin = (iteration * STEPS + ahead) * STEP
                    rows += (load_x(x_ptrs + begin, x_columns + begin, IN_FEATURES, RAGGED, PTX),)
            if this >= 0:
                if this + X_AHEAD < STEPS:
                    begin = (iteration * STEPS + this + X_AHEAD) * STEP
                    rows += (load_x(x_ptrs + begin, x_columns + begin, IN_FEATURES, RAGGED, PTX),)
                keep_loads_above(PTX)
                codes = _left_operand(words[this], None if zeros_ptr is None else zeros[this], PARTS, dtype, PTX)
                product = tl.dot(codes, _right_operand(rows[this], PARTS, zeros_ptr is not None, PTX))
                # part, warp, tile, half of the rows, row; equal in the columns, four lanes of two registers
                scale = tl.permute(scales[this], (4, 2, 3, 5, 1, 0)).to(tl.float32)
                scale = tl.reshape(scale, [PARTS * WARPS, TILES * 16, 1, 4, 1])
                scale = tl.broadcast_to(scale, [PARTS * WARPS, TILES * 16, ROW_TILES, 4, 2])
                sums += product * tl.reshape(scale, product.shape)

    total = tl.sum(sums, 0)  # [TILES * 16, BLOCK_M]
    local_features = tl.arange(0, TILES * 16)[:, None]
    rows = tl.arange(0, BLOCK_M)[None, :]
    features = tl.program_id(0) * (TILES * 16) + local_features
    feature_exists = features < n_features
    total, is_last = add_parts(total, rows * (TILES * 16) + local_features, partial_ptr, counter_ptr, SPLIT)
    if is_last:
        y_ptrs = y_ptr + rows.to(tl.int64) * n_features + features
        store(y_ptrs, total, (rows < n_rows) & feature_exists, features, feature_exists, bias_ptr)
