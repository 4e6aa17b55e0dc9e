"""Device code: products of tokens with prepared weights of 8 and 4 bits of the experts that they are sent to.

The weight is the left operand of the matrix instruction and comes from registers, x the right one from shared memory.
K is taken in another order than it is stored in, the same for both: block of 32 columns, half of an octet, pair in it,
octet, column of the pair. In that order a thread's words are its part of the left operand. The core's
`arrange_rows_kernel` brings tokens into it, and what lies between the two products is written in it.

Where SwiGLU follows, a tile of 16 rows is 8 of gate, and 8 of up: the same thread has the sums of both. Slots, sorted
rows and tiles of these are those of `_gemm_kernels`, ids and map those of `_kernels`.
"""

import triton
import triton.language as tl

from tk_kernel_core.gemm_kernels import (
    LOADS_IN_BRANCHES,
    STEP,
    add_operand_parts,
    end_chain,
    for_lanes,
    store,
    wait_for_predecessor,
)
from tk_kernel_core.weight_kernels import (
    dequantise_int4,
    dequantise_int8,
    for_words,
    load_groups,
    n_groups,
    row_offsets,
    row_steps,
)
from tk_moe_dispatch._gemm_kernels import add_bias, place, swiglu
from tk_moe_dispatch._kernels import TILE_FIELDS, local_experts


@triton.jit
def _left_operand(words, zeros, scales, dtype: tl.constexpr, BITS: tl.constexpr, PTX: tl.constexpr):
    """(codes - zeros) * scales of a step's words, [WARPS, 1, BITS / 2, 128], as [16 * WARPS, STEP].

    Zeros and scales are as `load_groups` returns them; zeros may be None for 8, or 0 of 8 bits, and scales for 1.
    """
    WARPS: tl.constexpr = words.shape[0]
    if BITS == 8:
        # warp, tile, block, row, octet, half of the tile's rows, half of the octet, column of the pair, pair
        weight = tl.reshape(dequantise_int8(words, dtype, PTX), [WARPS, 1, 4, 8, 4, 2, 2, 2, 2])
        if zeros is not None:
            zeros = tl.reshape(tl.permute(zeros.to(dtype), (2, 3, 4, 1, 0, 5)), [WARPS, 1, 1, 8, 4, 2, 1, 1, 1])
            # Differences of two bytes are exact; the interpreter knows none of bfloat16.
            if PTX:
                weight -= zeros
            else:
                weight = (weight.to(tl.float32) - zeros.to(tl.float32)).to(dtype)
        weight = tl.permute(weight, (1, 0, 5, 3, 2, 6, 8, 4, 7))
    else:
        if zeros is not None:
            zeros = for_words(zeros.to(tl.int32))
        if scales is not None:
            scales = for_words(scales)
        # warp, tile, pair of blocks, row, octet, block, half of the rows, column, pair, half of the octet
        weight = dequantise_int4(words, zeros, scales, dtype, PTX)
        weight = tl.permute(tl.reshape(weight, [WARPS, 1, 2, 8, 4, 2, 2, 2, 2, 2]), (1, 0, 6, 3, 2, 5, 9, 8, 4, 7))
    return tl.reshape(weight, [16 * WARPS, STEP])


@triton.jit
def _load_steps(
    word_ptrs,
    scales_ptr,
    zeros_ptr,
    offsets,
    start,
    last,
    N_STEPS: tl.constexpr,
    STEP_WORDS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    UNROLL: tl.constexpr,
    PTX: tl.constexpr,
):
    """Words, scales and zeros of UNROLL steps from `start` on; there are no scales where they are of whole rows."""
    words, scales, zeros = (), (), ()
    for i in tl.static_range(UNROLL):
        # The last step repeats itself.
        step = tl.minimum(start + i, last - 1)
        words += (
            for_lanes(tl.load(for_lanes(word_ptrs + step * STEP_WORDS, PTX), eviction_policy="evict_first"), PTX),
        )
        if GROUP_SIZE != -1:
            scales += (load_groups(scales_ptr + offsets, step, GROUP_SIZE, N_STEPS, False, PTX),)
        if zeros_ptr is not None:
            zeros += (load_groups(zeros_ptr + offsets, step, GROUP_SIZE, N_STEPS, False, PTX),)
    return words, scales, zeros


@triton.jit
def _for_sums(scales, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr):
    """Scales of one part, as `load_groups` returns them, for sums [BLOCK_N, BLOCK_M], in fp32."""
    # tile, warp, half of the rows, row; equal in the columns, four lanes of two registers
    scales = tl.reshape(tl.permute(scales, (3, 2, 5, 1, 0, 4)).to(tl.float32), [BLOCK_N, 1, 4, 1])
    return tl.reshape(tl.broadcast_to(scales, [BLOCK_N, BLOCK_M // 8, 4, 2]), [BLOCK_N, BLOCK_M])


@triton.jit
def _gate_and_up(total):
    """Sums of gate and of up, [BLOCK_N / 2, BLOCK_M] each."""
    BLOCK_N: tl.constexpr = total.shape[0]
    BLOCK_M: tl.constexpr = total.shape[1]
    halves = tl.permute(tl.reshape(total, [BLOCK_N // 16, 2, 8, BLOCK_M]), (0, 2, 3, 1))
    gate, up = tl.split(halves)
    return tl.reshape(gate, [BLOCK_N // 2, BLOCK_M]), tl.reshape(up, [BLOCK_N // 2, BLOCK_M])


@triton.jit(do_not_specialize=["n_weight_tiles", "top_k", "n_all", "n_experts"])
def packed_experts_kernel(
    out_ptr,
    x,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    slots_ptr,
    tiles_ptr,
    map_ptr,
    positions_ptr,
    bias_ptr,
    up_bias_ptr,
    partial_ptr,
    counter_ptr,
    n_features,
    width,
    n_weight_tiles,
    top_k,
    n_all,
    n_experts,
    stride_bias,
    step_bias,
    alpha,
    beta,
    limit,
    BITS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    WARPS: tl.constexpr,
    UNROLL: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP_M: tl.constexpr,
    SCALE_WEIGHT: tl.constexpr,
    GATHER: tl.constexpr,
    SPLIT: tl.constexpr,
    PTX: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out = x @ weight.T + bias, expert by expert: up to BLOCK_M rows by WARPS tiles of 16 features a program.

    With tiles_ptr rows are sorted, and slots_ptr says which slot each of them is. Without, every slot is a tile of its
    own, slots_ptr has the slots' experts, and positions_ptr, where given, receives the slots, -1 for those without an
    expert here, of whose rows nothing is written.
    x has whole steps of columns in the order of the operand: rows of tokens if GATHER, else one for each row. It is a
    descriptor of blocks [BLOCK_M, STEP], or a pointer. GATED: out is SwiGLU of n_features of gate and up, in `width`
    columns in the order of the operand, zeros from n_features on. Else `width` is n_features.
    SPLIT programs share the columns of the same results, and a turn of the loop takes UNROLL steps of them. Scales of
    groups multiply the weight, which is then rounded, if SCALE_WEIGHT, else the sums of a step, which must be of one
    group; those of whole rows multiply the sums.
    """
    HAS_ZEROS: tl.constexpr = zeros_ptr is not None
    # Whether there is a step is asked of loads alone.
    tl.static_assert(UNROLL == 1 or not DESCRIPTORS)
    SORTED: tl.constexpr = tiles_ptr is not None
    N_STEPS: tl.constexpr = (IN_FEATURES + STEP - 1) // STEP
    OWN_STEPS: tl.constexpr = (N_STEPS + SPLIT - 1) // SPLIT
    BLOCK_N: tl.constexpr = 16 * WARPS
    OUT_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    STEP_WORDS: tl.constexpr = 64 * BITS
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    n_feature_programs = tl.cdiv(width, OUT_N)
    # Not even the ids may be there: the launch that arranges tokens lets this one begin before it has waited itself.
    wait_for_predecessor(DEPENDENT_LAUNCH)
    if SORTED:
        n_row_tiles = tl.load(tiles_ptr + 3)
        is_used = tl.program_id(0) < n_row_tiles * n_feature_programs
        index = tl.where(is_used, tl.program_id(0), 0)
        row_tile, program_n = place(index, tl.maximum(n_row_tiles, 1), n_feature_programs, GROUP_M)
        expert = tl.load(tiles_ptr + row_tile * TILE_FIELDS, mask=is_used, other=0)
        first_row = tl.load(tiles_ptr + row_tile * TILE_FIELDS + 1, mask=is_used, other=0)
        end_row = tl.load(tiles_ptr + row_tile * TILE_FIELDS + 2, mask=is_used, other=0)
    else:
        first_row, program_n = tl.program_id(0) // n_feature_programs, tl.program_id(0) % n_feature_programs
        end_row = first_row + 1
        expert = local_experts(slots_ptr, map_ptr, first_row, end_row, n_all, n_experts)
        is_used = expert < n_experts
    rows = first_row + tl.arange(0, BLOCK_M)
    if SPLIT == 1:
        first, last = 0, N_STEPS
    else:
        first = tl.program_id(1) * OWN_STEPS
        last = tl.minimum(first + OWN_STEPS, N_STEPS)

    if is_used:
        # [WARPS, 1]; tiles that do not exist repeat the last one.
        tiles = tl.minimum(program_n * WARPS + tl.arange(0, WARPS)[:, None], n_weight_tiles - 1)
        tiles += expert.to(tl.int64) * n_weight_tiles
        words = tl.arange(0, BITS // 2)[None, None, :, None] * 128 + tl.arange(0, 128)[None, None, None, :]
        row_words = row_steps(IN_FEATURES, GROUP_SIZE) * STEP_WORDS
        word_ptrs = codes_ptr + tiles[:, :, None, None] * row_words + words
        offsets = row_offsets(tiles, n_groups(IN_FEATURES, GROUP_SIZE))
        if not DESCRIPTORS:
            row_exists = (rows < end_row)[:, None]
            x_rows = rows
            if GATHER and SORTED:
                x_rows = tl.load(slots_ptr + rows, mask=rows < end_row, other=0)
            if GATHER:
                x_rows = x_rows // top_k
            x_ptrs = x + x_rows.to(tl.int64)[:, None] * (N_STEPS * STEP) + tl.arange(0, STEP)[None, :]
        total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        # The weight is on its way UNROLL steps ahead, in registers: shared memory is left to x.
        next_words, next_scales, next_zeros = _load_steps(
            word_ptrs, scales_ptr, zeros_ptr, offsets, first, last, N_STEPS, STEP_WORDS, GROUP_SIZE, UNROLL, PTX
        )
        for start in tl.range(first, last, UNROLL, num_stages=STAGES):
            these_words, scales, zeros = next_words, next_scales, next_zeros
            ahead = word_ptrs, scales_ptr, zeros_ptr, offsets, start + UNROLL, last
            if PTX and LOADS_IN_BRANCHES:
                if start + UNROLL < last:
                    next_words, next_scales, next_zeros = _load_steps(
                        *ahead, N_STEPS, STEP_WORDS, GROUP_SIZE, UNROLL, PTX
                    )
            else:
                next_words, next_scales, next_zeros = _load_steps(*ahead, N_STEPS, STEP_WORDS, GROUP_SIZE, UNROLL, PTX)
            for i in tl.static_range(UNROLL):
                if DESCRIPTORS:
                    x_tile = x.load([first_row, (start + i) * STEP])
                else:
                    exists = row_exists if UNROLL == 1 else row_exists & (start + i < last)
                    x_tile = tl.load(x_ptrs + (start + i) * STEP, mask=exists, other=0.0)
                its_zeros = zeros[i] if HAS_ZEROS else None
                weight = _left_operand(these_words[i], its_zeros, scales[i] if SCALE_WEIGHT else None, dtype, BITS, PTX)
                if SCALE_WEIGHT or GROUP_SIZE == -1:
                    total = end_chain(tl.dot(weight, x_tile.T, total), PTX)
                else:
                    total += tl.dot(weight, x_tile.T) * _for_sums(scales[i], BLOCK_N, BLOCK_M)
        if GROUP_SIZE == -1:
            scales = load_groups(scales_ptr + offsets, first, GROUP_SIZE, N_STEPS, False, PTX)
            total *= _for_sums(scales, BLOCK_N, BLOCK_M)

        columns = program_n * OUT_N + tl.arange(0, OUT_N)[:, None]
        exists = (rows < end_row)[None, :]
        if GATED:
            gate, up = _gate_and_up(total)
            gate = add_bias(gate, bias_ptr, expert, columns, stride_bias, step_bias, n_features)
            up = add_bias(up, up_bias_ptr, expert, columns, stride_bias, step_bias, n_features)
            h = tl.where(columns < n_features, swiglu(gate, up, alpha, beta, limit), 0.0).to(dtype)
            out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * width + columns
            # block, octet, half of it and pair, column
            h = tl.permute(tl.reshape(h, [OUT_N // 32, 4, 4, 2, BLOCK_M]), (0, 2, 1, 3, 4))
            tl.store(out_ptrs, tl.reshape(h, [OUT_N, BLOCK_M]), mask=exists)
        else:
            column_exists = columns < n_features
            total, is_last = add_operand_parts(total, partial_ptr, counter_ptr, SPLIT)
            if is_last:
                out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * width + columns
                bias_ptrs = None if bias_ptr is None else bias_ptr + expert.to(tl.int64) * stride_bias
                store(out_ptrs, total, exists & column_exists, columns * step_bias, column_exists, bias_ptrs)
    if positions_ptr is not None and program_n == 0:
        tl.store(positions_ptr + first_row, tl.where(is_used, first_row, -1))
