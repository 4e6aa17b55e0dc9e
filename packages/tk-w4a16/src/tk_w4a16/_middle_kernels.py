"""Device code for dozens of rows of activations: y = x @ ((codes - zeros) * scales)^T + bias.

The weight is the left operand of the matrix instruction and comes from registers, x the right one from shared
memory. Columns are taken in another order than they are stored in, the same for both: block of 32, half of an octet,
pair in it, octet, column of the pair. In that order a thread's words are its part of the left operand.
The core's `arrange_rows_kernel` brings x into it, once for all programs that read it.
"""

import triton
import triton.language as tl

from tk_kernel_core.gemm_kernels import (
    STEP,
    add_operand_parts,
    end_chain,
    load_words,
    store,
    wait_for_predecessor,
    words_ahead,
)
from tk_kernel_core.weight_kernels import (
    STEP_WORDS,
    for_words,
    groups_ahead,
    halves,
    load_groups,
    n_groups,
    row_offsets,
    row_steps,
)
from tk_kernel_core.weight_kernels import dequantise_int4 as dequantise


@triton.jit
def _operand(words, zeros, scales, dtype: tl.constexpr, PTX: tl.constexpr):
    """The weight of words [WARPS, ..., 128], of pairs of blocks, as the left operand, [16 * WARPS, 64 * PAIRS]."""
    WARPS: tl.constexpr = words.shape[0]
    PAIRS: tl.constexpr = words.numel // (WARPS * 128)
    weight = dequantise(words, zeros, scales, dtype, PTX)
    # warp, pair of blocks, row, octet, block, half of the rows, column, pair, half of the octet
    weight = tl.reshape(weight, [WARPS, PAIRS, 8, 4, 2, 2, 2, 2, 2])
    return tl.reshape(tl.permute(weight, (0, 5, 2, 1, 4, 8, 7, 3, 6)), [16 * WARPS, 64 * PAIRS])


@triton.jit(do_not_specialize=["n_rows"])
def w4a16_middle_kernel(
    y_ptr,
    arranged,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    partial_ptr,
    counter_ptr,
    n_rows,
    n_features,
    BLOCK_M: tl.constexpr,
    WARPS: tl.constexpr,
    STAGES: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SCALE_WEIGHT: tl.constexpr,
    IN_HALVES: tl.constexpr,
    SPLIT: tl.constexpr,
    PTX: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """BLOCK_M rows of x by 16 output features for each of WARPS warps, over a SPLIT-th of the columns.

    Scales multiply the weight, which is then rounded, or the sums of a step, which must be of one group.
    arranged is a descriptor of blocks [BLOCK_M, STEP], or a pointer; it has whole blocks of rows, and what those
    beyond n_rows hold does not matter. Programs of the same features follow one another, so that they find the weight
    in L2.
    """
    N_STEPS: tl.constexpr = (IN_FEATURES + STEP - 1) // STEP
    OWN_STEPS: tl.constexpr = (N_STEPS + SPLIT - 1) // SPLIT
    BLOCK_N: tl.constexpr = 16 * WARPS
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    n_row_programs = tl.cdiv(n_rows, BLOCK_M)
    first_row = (tl.program_id(0) % n_row_programs) * BLOCK_M
    program_n = tl.program_id(0) // n_row_programs
    if SPLIT == 1:
        first, last = 0, N_STEPS
    else:
        first = tl.program_id(1) * OWN_STEPS
        last = tl.minimum(first + OWN_STEPS, N_STEPS)

    # [WARPS, 1]; tiles that do not exist repeat the last one.
    tiles = program_n * WARPS + tl.arange(0, WARPS)[:, None]
    tiles = tl.minimum(tiles, tl.cdiv(n_features, 16) - 1).to(tl.int64)
    words = tl.arange(0, 2)[None, None, :, None] * 128 + tl.arange(0, 128)[None, None, None, :]
    row_words = row_steps(IN_FEATURES, GROUP_SIZE) * STEP_WORDS
    word_ptrs = codes_ptr + tiles[:, :, None, None] * row_words + first * STEP_WORDS + words
    offsets = row_offsets(tiles, n_groups(IN_FEATURES, GROUP_SIZE))
    if not DESCRIPTORS:
        x_rows = (first_row + tl.arange(0, BLOCK_M)).to(tl.int64)
        x_ptrs = arranged + x_rows[:, None] * (N_STEPS * STEP) + first * STEP + tl.arange(0, STEP)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # The weight is on its way a step ahead, in registers: shared memory is left to x. It does not wait, not even for
    # what came before arrange_rows_kernel, which releases this kernel at once: kernels that make weights do not.
    next_words = load_words(word_ptrs, None, N_STEPS, False, PTX)
    next_scales = load_groups(scales_ptr + offsets, first, GROUP_SIZE, N_STEPS, False, PTX)
    if zeros_ptr is not None:
        next_zeros = load_groups(zeros_ptr + offsets, first, GROUP_SIZE, N_STEPS, False, PTX)
    wait_for_predecessor(DEPENDENT_LAUNCH)
    for step in tl.range(first, last, num_stages=STAGES):
        these_words, scales, zeros = next_words, next_scales, None
        # The last step repeats itself.
        next_step = tl.minimum(step + 1, last - 1)
        if WARPS > 4:
            # Pointers that advance take registers that programs of so many warps lack.
            ahead_ptrs = word_ptrs + (next_step - first) * STEP_WORDS
        else:
            word_ptrs += (next_step - step) * STEP_WORDS
            ahead_ptrs = word_ptrs
        goes_on = step + 1 < last
        next_words = words_ahead(ahead_ptrs, next_words, goes_on, N_STEPS, PTX)
        next_scales = groups_ahead(scales_ptr + offsets, next_scales, goes_on, next_step, GROUP_SIZE, N_STEPS, PTX)
        if zeros_ptr is not None:
            zeros = for_words(next_zeros.to(tl.int32))
            next_zeros = groups_ahead(zeros_ptr + offsets, next_zeros, goes_on, next_step, GROUP_SIZE, N_STEPS, PTX)
        if IN_HALVES:
            words_a, words_b = halves(these_words)
            scales_a, scales_b = halves(for_words(scales))
            zeros_a, zeros_b = None, None
            if zeros_ptr is not None:
                zeros_a, zeros_b = halves(zeros)
            x_a = arranged.load([first_row, step * STEP])
            x_b = arranged.load([first_row, step * STEP + STEP // 2])
            # The second product is at work while the next step's first half is dequantised. Behind that is a wait for
            # all products, until which ptxas leaves the registers of their operands alone: tests look at the code.
            total = tl.dot(_operand(words_a, zeros_a, scales_a, dtype, PTX), x_a.T, total)
            total = tl.dot(_operand(words_b, zeros_b, scales_b, dtype, PTX), x_b.T, total)
        else:
            if DESCRIPTORS:
                x = arranged.load([first_row, step * STEP])
            else:
                x = tl.load(x_ptrs)
                x_ptrs += STEP
            weight = _operand(these_words, zeros, for_words(scales) if SCALE_WEIGHT else None, dtype, PTX)
            if SCALE_WEIGHT:
                total = end_chain(tl.dot(weight, x.T, total), PTX)
            else:
                # warp, half of the rows, row; equal in the columns, four lanes of two registers
                scales = tl.reshape(tl.permute(scales, (3, 2, 5, 1, 0, 4)).to(tl.float32), [BLOCK_N, 1, 4, 1])
                scales = tl.reshape(tl.broadcast_to(scales, [BLOCK_N, BLOCK_M // 8, 4, 2]), [BLOCK_N, BLOCK_M])
                total += tl.dot(weight, x.T) * scales

    rows = first_row + tl.arange(0, BLOCK_M)[None, :]
    row_exists = rows < n_rows
    features = program_n * BLOCK_N + tl.arange(0, BLOCK_N)[:, None]
    feature_exists = features < n_features
    total, is_last = add_operand_parts(total, partial_ptr, counter_ptr, SPLIT)
    if is_last:
        y_ptrs = y_ptr + rows.to(tl.int64) * n_features + features
        store(y_ptrs, total, row_exists & feature_exists, features, feature_exists, bias_ptr)
