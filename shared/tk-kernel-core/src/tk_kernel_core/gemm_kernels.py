"""Device code of products with prepared weights, of which what is special is how a kernel makes numbers of codes.

A step is 128 columns of the weight. A program works on whole tiles of 16 output features, and SPLIT programs of axis 1
may share the columns of the same results.
"""

import triton
import triton.language as tl

STEP = tl.constexpr(128)

_RELEASE = tuple(map(int, triton.__version__.split(".")[:2]))
_LAST_AXES_FIRST = tl.constexpr(_RELEASE >= (3, 7))
NARROW_LANES = tl.constexpr(_RELEASE >= (3, 8))
"""Whether a lane holds two neighbouring columns of an operand that comes of bytes, as instructions have it, or four."""
LOADS_IN_BRANCHES = tl.constexpr(_RELEASE >= (3, 7))
"""Whether loads of a loop's next turn go to registers only if they stand in a branch, and else by shared memory."""


@triton.jit
def for_lanes(tensor, PTX: tl.constexpr):
    """Turn round all axes but the last, if this Triton gives those at the end to lanes and warps first, and back again.

    Goes around loads whose lanes and warps are to hold what the matrix instruction wants there: neighbours along the
    last axis in a thread, and lanes and warps along the first ones.
    """
    N_AXES: tl.constexpr = len(tensor.shape)
    if not (PTX and _LAST_AXES_FIRST):
        return tensor
    elif N_AXES == 3:
        return tl.permute(tensor, (1, 0, 2))
    elif N_AXES == 4:
        return tl.permute(tensor, (2, 1, 0, 3))
    elif N_AXES == 5:
        return tl.permute(tensor, (3, 2, 1, 0, 4))
    elif N_AXES == 6:
        return tl.permute(tensor, (4, 3, 2, 1, 0, 5))
    else:
        tl.static_assert(N_AXES == 7)
        return tl.permute(tensor, (5, 4, 3, 2, 1, 0, 6))


@triton.jit
def wait_for_predecessor(DEPENDENT_LAUNCH: tl.constexpr):
    """Wait for the kernels before in the stream, and let those behind begin; in a loop only the first call waits."""
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def release_and_wait(DEPENDENT_LAUNCH: tl.constexpr):
    """As `wait_for_predecessor`, but the kernel behind, which waits itself, may begin before the wait is over.

    For short kernels that make activations ready for a product: it begins with its weight, which no predecessor makes
    that releases others early. All else, even what came before this kernel, it must not touch before it has waited.
    """
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def load_words(ptrs, steps, N_STEPS: tl.constexpr, SPARE: tl.constexpr, PTX: tl.constexpr):
    """The words of one step of each warp, [WARPS, ...]. Where SPARE, steps [WARPS] from N_STEPS on do not exist."""
    # Nothing is read twice: the weight makes room first.
    if SPARE:
        exists = for_lanes(steps[:, None, None, None] < N_STEPS, PTX)
        return for_lanes(tl.load(for_lanes(ptrs, PTX), mask=exists, other=0, eviction_policy="evict_first"), PTX)
    else:
        return for_lanes(tl.load(for_lanes(ptrs, PTX), eviction_policy="evict_first"), PTX)


@triton.jit
def words_ahead(ptrs, words, goes_on, N_STEPS: tl.constexpr, PTX: tl.constexpr):
    """The words of a loop's next step; where the loop does not go on, words or whatever else there is."""
    if PTX and LOADS_IN_BRANCHES:
        if goes_on:
            words = load_words(ptrs, None, N_STEPS, False, PTX)
        return words
    else:
        return load_words(ptrs, None, N_STEPS, False, PTX)


@triton.jit
def load_x(ptrs, columns, IN_FEATURES: tl.constexpr, RAGGED: tl.constexpr, PTX: tl.constexpr):
    """Activations; where RAGGED, columns from IN_FEATURES on do not exist."""
    if RAGGED:
        exists = for_lanes(columns < IN_FEATURES, PTX)
        return for_lanes(tl.load(for_lanes(ptrs, PTX), mask=exists, other=0.0), PTX)
    else:
        return for_lanes(tl.load(for_lanes(ptrs, PTX)), PTX)


@triton.jit
def keep_loads_above(PTX: tl.constexpr):
    """Keep ptxas from moving loads down to their first use, which would leave few of them in flight."""
    if PTX:
        tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def select(x, chosen, PTX: tl.constexpr):
    """16-bit x where chosen, which broadcasts to it, and 0 elsewhere."""
    if PTX:
        # One instruction for two elements, where a selection takes two for each.
        keep = tl.where(chosen, -1, 0).to(tl.int16)
        return tl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;",
            "=r,r,r",
            [x, tl.broadcast_to(keep, x.shape)],
            dtype=x.dtype,
            is_pure=True,
            pack=2,
        )
    else:
        return tl.where(chosen, x, 0.0).to(x.dtype)


@triton.jit
def end_chain(total, PTX: tl.constexpr):
    """The same total, between one product that adds to it and the next."""
    # Triton 3.6 overwrites operands in registers that a chain of products still reads.
    if PTX:
        return tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return total


@triton.jit
def add_parts(total, places, partial_ptr, counter_ptr, SPLIT: tl.constexpr):
    """Return the sum of what the SPLIT programs of axis 1 found, and whether this is the program to go on with it.

    total is what this program found, and places, of its shape, say where that goes in a partial result.
    """
    if SPLIT == 1:
        return total, True
    else:
        SIZE: tl.constexpr = total.numel
        program = tl.program_id(0).to(tl.int64)
        partial_ptrs = partial_ptr + program * (SPLIT * SIZE) + places
        tl.store(partial_ptrs + tl.program_id(1) * SIZE, total)
        # Every thread has stored before one of them counts the program as done.
        tl.debug_barrier()
        is_last = tl.atomic_add(counter_ptr + program, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            # Whoever comes last adds up in one order, and leaves the counter as it found it.
            total = tl.zeros_like(total)
            # A few at a time: more on their way would take registers that spill. Of parts that fill them, one, and the
            # number is one that the compiler does not know: of a loop that it does, it makes straight code.
            MOST_EACH: tl.constexpr = 1 if SIZE >= 32_768 else 4
            N_TURNS: tl.constexpr = (SPLIT + MOST_EACH - 1) // MOST_EACH
            N_EACH: tl.constexpr = (SPLIT + N_TURNS - 1) // N_TURNS
            for turn in tl.range(tl.num_programs(1) if MOST_EACH == 1 else N_TURNS):
                for each in tl.static_range(N_EACH):
                    split = turn * N_EACH + each
                    # The mask is a block, as Triton 3.9's interpreter wants it.
                    exists = tl.zeros_like(places) + split < SPLIT
                    # Not from L1, which other programs' stores do not reach.
                    total += tl.load(partial_ptrs + split * SIZE, mask=exists, other=0, cache_modifier=".cg")
            tl.store(counter_ptr + program, 0)
        return total, is_last


@triton.jit
def add_operand_parts(total, partial_ptr, counter_ptr, SPLIT: tl.constexpr):
    """As `add_parts`, for a total that matrix units leave in registers: 16 rows for each warp, and any columns."""
    if SPLIT == 1:
        return total, True
    else:
        WARPS: tl.constexpr = total.shape[0] // 16
        BLOCKS: tl.constexpr = total.shape[1] // 8
        # Four results of a thread make one access: pair of columns, row, warp, block, half of the rows and column.
        spread = tl.permute(tl.reshape(total, [WARPS, 2, 8, BLOCKS, 4, 2]), (4, 2, 0, 3, 1, 5))
        spread = tl.reshape(spread, [4, 8, WARPS, BLOCKS, 4])
        places = tl.arange(0, 4)[:, None, None, None, None] * 4 + tl.arange(0, 8)[None, :, None, None, None] * 16
        places += tl.arange(0, WARPS)[None, None, :, None, None] * (BLOCKS * 128)
        places += tl.arange(0, BLOCKS)[None, None, None, :, None] * 128
        places += tl.arange(0, 4)[None, None, None, None, :]
        spread, is_last = add_parts(spread, places, partial_ptr, counter_ptr, SPLIT)
        spread = tl.permute(tl.reshape(spread, [4, 8, WARPS, BLOCKS, 2, 2]), (2, 4, 1, 3, 0, 5))
        return tl.reshape(spread, total.shape), is_last


@triton.jit
def store(y_ptrs, total, exists, features, feature_exists, bias_ptr):
    """Store total, plus the bias of its features; features and feature_exists broadcast to it."""
    if bias_ptr is not None:
        total += tl.load(bias_ptr + features, mask=feature_exists, other=0.0).to(tl.float32)
    tl.store(y_ptrs, total.to(y_ptrs.dtype.element_ty), mask=exists)


@triton.jit
def arrange_rows_kernel(
    arranged_ptr,
    x_sum_ptr,
    counter_ptr,
    x_ptr,
    permutation_ptr,
    stride_x,
    n_counters,
    ALIGNMENT: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """arranged = x in the order of a prepared weight's operand, [n_rows, K] with K padded to whole steps by zeros.

    The order is: block of 32 columns, half of an octet, pair in it, octet, column of the pair. A program takes a row.
    Column j of the weight is column permutation[j] of x, and 0 where that is -1; without a permutation it is column j.
    x_sum receives the rows' sums, float32, and counter n_counters zeros. Row i of x starts i * stride_x * ALIGNMENT
    elements into it.
    """
    N_COLUMNS: tl.constexpr = (IN_FEATURES + STEP - 1) // STEP * STEP
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_x * ALIGNMENT
    arranged_ptr += row * N_COLUMNS
    columns = tl.arange(0, BLOCK_K)
    release_and_wait(DEPENDENT_LAUNCH)
    sums = tl.zeros([BLOCK_K], tl.float32)
    for start in tl.range(0, N_COLUMNS, BLOCK_K):
        exists = start + columns < IN_FEATURES
        if permutation_ptr is None:
            x = tl.load(x_ptr + start + columns, mask=exists, other=0.0)
        else:
            sources = tl.load(permutation_ptr + start + columns, mask=exists, other=-1)
            x = tl.load(x_ptr + sources, mask=sources >= 0, other=0.0)
        sums += x.to(tl.float32)
        # block, octet, half and pair, column
        arranged = tl.permute(tl.reshape(x, [BLOCK_K // 32, 4, 4, 2]), (0, 2, 1, 3))
        tl.store(arranged_ptr + start + columns, tl.reshape(arranged, [BLOCK_K]), mask=start + columns < N_COLUMNS)
    if x_sum_ptr is not None:
        tl.store(x_sum_ptr + row, tl.sum(sums, 0))
    if counter_ptr is not None:
        for start in tl.range(tl.program_id(0) * BLOCK_K, n_counters, tl.num_programs(0) * BLOCK_K):
            tl.store(counter_ptr + start + columns, tl.zeros([BLOCK_K], tl.int32), mask=start + columns < n_counters)
