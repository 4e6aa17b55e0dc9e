"""Device code for dozens of rows of activations: y = ((x @ codes^T) - zero_point * sum(x)) * scale + bias.

The weight is the left operand of the matrix instruction and comes from registers, x the right one from shared
memory. K is taken in another order than it is stored in, the same for both: block of 32, half of an octet, pair in
it, octet, element of the pair. In that order a thread's words are its part of the left operand. The core's
`arrange_rows_kernel` brings x into it, once for all programs that read it.
"""

import triton
import triton.language as tl

from tk_int8_gemm._decode_kernels import BLOCK_WORDS, BLOCKS, GROUP, GROUP_WORDS
from tk_kernel_core.gemm_kernels import (
    add_operand_parts,
    end_chain,
    load_words,
    store,
    wait_for_predecessor,
    words_ahead,
)
from tk_kernel_core.weight_kernels import dequantise_int8 as dequantise
from tk_kernel_core.weight_kernels import halves


@triton.jit
def _operand(words, dtype: tl.constexpr, PTX: tl.constexpr):
    """The codes of words [WARPS, N_BLOCKS, BLOCK_WORDS], as the left operand, [16 * WARPS, 32 * N_BLOCKS]."""
    WARPS: tl.constexpr = words.shape[0]
    N_BLOCKS: tl.constexpr = words.shape[1]
    # warp, block, row, octet, half of the tile's rows, half of the octet, element of the pair, pair
    codes = tl.reshape(dequantise(words, dtype, PTX), [WARPS, N_BLOCKS, 8, 4, 2, 2, 2, 2])
    return tl.reshape(tl.permute(codes, (0, 4, 2, 1, 5, 7, 3, 6)), [16 * WARPS, 32 * N_BLOCKS])


@triton.jit(do_not_specialize=["n_rows"])
def int8_middle_kernel(
    y_ptr,
    arranged,
    codes_ptr,
    scale_ptr,
    zero_point_ptr,
    bias_ptr,
    partial_ptr,
    counter_ptr,
    x_sum_ptr,
    n_rows,
    n_features,
    BLOCK_M: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    IN_HALVES: tl.constexpr,
    SPLIT: tl.constexpr,
    PTX: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """BLOCK_M rows of x by 16 output features for each of WARPS warps, over a SPLIT-th of K.

    arranged is a descriptor of blocks [BLOCK_M, GROUP], or a pointer; it has whole blocks of rows, and what those
    beyond n_rows hold does not matter. The sums of the rows of x come from x_sum_ptr where there are zero points.
    Programs of the same features follow one another, so that they find the weight in L2.
    """
    N_GROUPS: tl.constexpr = (IN_FEATURES + GROUP - 1) // GROUP
    OWN_GROUPS: tl.constexpr = (N_GROUPS + SPLIT - 1) // SPLIT
    BLOCK_N: tl.constexpr = 16 * WARPS
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    n_row_programs = tl.cdiv(n_rows, BLOCK_M)
    first_row = (tl.program_id(0) % n_row_programs) * BLOCK_M
    program_n = tl.program_id(0) // n_row_programs
    if SPLIT == 1:
        first, last = 0, N_GROUPS
    else:
        first = tl.program_id(1) * OWN_GROUPS
        last = tl.minimum(first + OWN_GROUPS, N_GROUPS)

    # [WARPS, BLOCKS, BLOCK_WORDS]; tiles that do not exist repeat the last one.
    tiles = program_n * WARPS + tl.arange(0, WARPS)[:, None, None]
    tiles = tl.minimum(tiles, tl.cdiv(n_features, 16) - 1).to(tl.int64)
    words = tl.arange(0, BLOCKS)[None, :, None] * BLOCK_WORDS + tl.arange(0, BLOCK_WORDS)[None, None, :]
    word_ptrs = codes_ptr + (tiles * N_GROUPS + first) * GROUP_WORDS + words
    if not DESCRIPTORS:
        x_rows = (first_row + tl.arange(0, BLOCK_M)).to(tl.int64)
        x_ptrs = arranged + x_rows[:, None] * (N_GROUPS * GROUP) + first * GROUP + tl.arange(0, GROUP)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # The weight is on its way a group ahead, in registers: shared memory is left to x. It does not wait, not even for
    # what came before arrange_rows_kernel, which releases this kernel at once: kernels that make weights do not.
    next_words = load_words(word_ptrs, None, N_GROUPS, False, PTX)
    wait_for_predecessor(DEPENDENT_LAUNCH)
    for group in tl.range(first, last, num_stages=STAGES):
        these_words = next_words
        # The last group repeats itself.
        if WARPS > 4:
            # With pointers that advance, more registers spill than the one that does.
            ahead_ptrs = word_ptrs + (tl.minimum(group + 1, last - 1) - first) * GROUP_WORDS
        else:
            word_ptrs += tl.where(group + 1 < last, GROUP_WORDS, 0)
            ahead_ptrs = word_ptrs
        next_words = words_ahead(ahead_ptrs, next_words, group + 1 < last, N_GROUPS, PTX)
        if IN_HALVES:
            words_a, words_b = halves(these_words)
            x_a = arranged.load([first_row, group * GROUP])
            x_b = arranged.load([first_row, group * GROUP + GROUP // 2])
            # The second product is at work while the next group's first half is dequantised. Behind that is a wait for
            # all products, until which ptxas leaves the registers of their operands alone: tests look at the code.
            total = tl.dot(_operand(words_a, dtype, PTX), x_a.T, total)
            total = tl.dot(_operand(words_b, dtype, PTX), x_b.T, total)
        else:
            if DESCRIPTORS:
                x = arranged.load([first_row, group * GROUP])
            else:
                x = tl.load(x_ptrs)
                x_ptrs += GROUP
            total = end_chain(tl.dot(_operand(these_words, dtype, PTX), x.T, total), PTX)

    rows = first_row + tl.arange(0, BLOCK_M)[None, :]
    row_exists = rows < n_rows
    features = program_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    feature_exists = features < n_features
    if zero_point_ptr is not None:
        x_sum = tl.load(x_sum_ptr + rows, mask=row_exists & (tl.zeros_like(rows) + first == 0), other=0.0)
        total -= tl.load(zero_point_ptr + features, mask=feature_exists, other=0.0) * x_sum
    total *= tl.load(scale_ptr + features, mask=feature_exists, other=0.0)
    total, is_last = add_operand_parts(total, partial_ptr, counter_ptr, SPLIT)
    if is_last:
        y_ptrs = y_ptr + rows.to(tl.int64) * n_features + features
        store(y_ptrs, total, row_exists & feature_exists, features, feature_exists, bias_ptr)
