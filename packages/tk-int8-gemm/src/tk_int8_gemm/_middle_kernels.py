"""Device code for dozens of rows of activations: y = ((x @ codes^T) - zero_point * sum(x)) * scale + bias.

The weight is the left operand of the matrix instruction and comes from registers, x the right one from shared
memory. K is taken in another order than it is stored in, the same for both: block of 32, half of an octet, pair in
it, octet, element of the pair. In that order a thread's words are its part of the left operand.
"""

import triton
import triton.language as tl

from tk_int8_gemm._decode_kernels import (
    BLOCK_WORDS,
    BLOCKS,
    GROUP,
    GROUP_WORDS,
    dequantise,
    finish,
    wait_for_predecessor,
)

TILES = tl.constexpr(4)  # of 16 output features, one for each warp


@triton.jit
def _load_x(ptrs, columns, exists, IN_FEATURES: tl.constexpr, RAGGED: tl.constexpr):
    if RAGGED:
        exists = exists & (columns < IN_FEATURES)
    return tl.load(ptrs, mask=exists, other=0.0)


@triton.jit(do_not_specialize=["n_rows", "stride_x"])
def int8_middle_kernel(
    y_ptr,
    x_ptr,
    codes_ptr,
    scale_ptr,
    zero_point_ptr,
    bias_ptr,
    partial_ptr,
    counter_ptr,
    x_sum_ptr,
    n_rows,
    n_features,
    stride_x,
    ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    SPLIT: tl.constexpr,
    PTX: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """BLOCK_M rows of x by 64 output features, over a SPLIT-th of K.

    The sums of the rows of x, float32, come from x_sum_ptr where there are zero points. Programs of the same
    features follow one another, so that they find the weight in L2.
    """
    N_GROUPS: tl.constexpr = (IN_FEATURES + GROUP - 1) // GROUP
    RAGGED: tl.constexpr = N_GROUPS * GROUP != IN_FEATURES
    OWN_GROUPS: tl.constexpr = (N_GROUPS + SPLIT - 1) // SPLIT
    BLOCK_N: tl.constexpr = 16 * TILES
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    n_row_programs = tl.cdiv(n_rows, BLOCK_M)
    first_row = (tl.program_id(0) % n_row_programs) * BLOCK_M
    program_n = tl.program_id(0) // n_row_programs
    first = tl.program_id(1) * OWN_GROUPS
    last = tl.minimum(first + OWN_GROUPS, N_GROUPS)

    tiles = tl.arange(0, TILES)[:, None, None]
    words = tl.arange(0, BLOCKS)[None, :, None] * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, None, :]
    codes_ptr += program_n.to(tl.int64) * (TILES * N_GROUPS * GROUP_WORDS)
    word_ptrs = codes_ptr + (tiles * N_GROUPS + first) * GROUP_WORDS + words  # [TILES, BLOCKS, BLOCK_WORDS]
    x_rows = first_row + tl.arange(0, BLOCK_M)[:, None]
    columns = first * GROUP + tl.arange(0, GROUP)[None, :]
    # Rows that do not exist repeat the last one.
    x_ptrs = x_ptr + (tl.minimum(x_rows, n_rows - 1).to(tl.int64) * stride_x * ALIGNMENT + columns)
    features = program_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    feature_exists = features < n_features
    scale = tl.load(scale_ptr + features, mask=feature_exists, other=0.0)
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)

    # The next group is on its way while this one is worked on.
    next_words = tl.load(word_ptrs, eviction_policy="evict_first")
    wait_for_predecessor(DEPENDENT_LAUNCH)
    next_x = _load_x(x_ptrs, columns, x_rows >= 0, IN_FEATURES, RAGGED)
    for group in range(first, last):
        this_words, this_x = next_words, next_x
        word_ptrs += GROUP_WORDS
        x_ptrs += GROUP
        columns += GROUP
        exists = group + 1 < last
        next_words = tl.load(word_ptrs, mask=exists & (words >= 0), other=0, eviction_policy="evict_first")
        next_x = _load_x(x_ptrs, columns, exists & (x_rows >= 0), IN_FEATURES, RAGGED)
        # row, block, octet, half and pair, element
        this_x = tl.permute(tl.reshape(this_x, [BLOCK_M, BLOCKS, 4, 4, 2]), (0, 1, 3, 2, 4))
        # tile, block, row, octet, half of the tile's rows, half of the octet, element of the pair, pair
        codes = tl.reshape(dequantise(this_words, dtype, PTX), [TILES, BLOCKS, 8, 4, 2, 2, 2, 2])
        codes = tl.reshape(tl.permute(codes, (0, 4, 2, 1, 5, 7, 3, 6)), [BLOCK_N, GROUP])
        product = tl.dot(codes, tl.reshape(this_x, [BLOCK_M, GROUP]).T)
        # Scaled here, because Triton 3.6 overwrites operands in registers that a chain of such products still reads.
        total += product * scale

    rows = first_row + tl.arange(0, BLOCK_M)[None, :]
    row_exists = rows < n_rows
    if zero_point_ptr is not None:
        x_sum = tl.load(x_sum_ptr + rows, mask=row_exists & (first == 0), other=0.0)
        total -= tl.load(zero_point_ptr + features, mask=feature_exists, other=0.0) * scale * x_sum
    finish(
        y_ptr + rows.to(tl.int64) * n_features + features,
        total,
        tl.arange(0, BLOCK_M)[None, :] * BLOCK_N + tl.arange(0, BLOCK_N)[:, None],
        row_exists & feature_exists,
        features,
        feature_exists,
        bias_ptr,
        partial_ptr,
        counter_ptr,
        SPLIT,
    )
