"""Device code that dequantises a whole prepared weight."""

import triton
import triton.language as tl

from tk_kernel_core.gemm_kernels import STEP, wait_for_predecessor
from tk_kernel_core.weight_kernels import (
    STEP_WORDS,
    dequantise_int4,
    for_words,
    load_groups,
    n_groups,
    row_offsets,
    row_steps,
)


@triton.jit(do_not_specialize=["n_rows"])
def dequantize_packed_kernel(
    out_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    n_rows,
    IN_FEATURES: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    STEPS: tl.constexpr,
    PTX: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out = (codes - zeros) * scales, [n_rows, IN_FEATURES], from tiles; a program takes STEPS steps of one."""
    N_STEPS: tl.constexpr = (IN_FEATURES + STEP - 1) // STEP
    first_step = tl.program_id(1) * STEPS
    steps = first_step + tl.arange(0, STEPS)
    tile = tl.program_id(0).to(tl.int64)
    offsets = tile * (n_groups(IN_FEATURES, GROUP_SIZE) * 16) + row_offsets(tl.zeros([1, 1], tl.int32), 1)
    # [STEPS, 1 tile, 2, 128]
    words = tl.arange(0, 2)[None, None, :, None] * 128 + tl.arange(0, 128)[None, None, None, :]
    words += (tile * row_steps(IN_FEATURES, GROUP_SIZE) + steps[:, None, None, None]) * STEP_WORDS
    exists = steps[:, None, None, None] < N_STEPS
    packed = tl.load(codes_ptr + words, mask=exists, other=0, eviction_policy="evict_first")
    group_steps = steps[None, None, :, None, None, None]
    scales = for_words(load_groups(scales_ptr + offsets, group_steps, GROUP_SIZE, N_STEPS, True, PTX))
    zeros = None
    if zeros_ptr is not None:
        zeros = load_groups(zeros_ptr + offsets, group_steps, GROUP_SIZE, N_STEPS, True, PTX)
        zeros = for_words(zeros.to(tl.int32))
    # step, pair of blocks, row, octet, block, half of the rows, column of the pair, pair, half of the octet
    codes = tl.reshape(dequantise_int4(packed, zeros, None, tl.float16, PTX), [STEPS, 2, 8, 4, 2, 2, 2, 2, 2])
    weight = codes.to(tl.float32) * tl.reshape(scales, [STEPS, 2, 8, 4, 2, 2, 1, 1, 1]).to(tl.float32)
    weight = tl.reshape(tl.permute(weight, (5, 2, 0, 1, 4, 3, 8, 7, 6)), [16, STEPS * STEP])
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)[:, None]
    columns = first_step * STEP + tl.arange(0, STEPS * STEP)[None, :]
    wait_for_predecessor(DEPENDENT_LAUNCH)
    out_ptrs = out_ptr + rows.to(tl.int64) * IN_FEATURES + columns
    tl.store(out_ptrs, weight.to(out_ptr.dtype.element_ty), mask=(rows < n_rows) & (columns < IN_FEATURES))
