"""Device code: the order of tokens by their experts, there and back.

A slot is one of a token's TOP_K choices, number token * TOP_K + choice. A sorted row is a slot's place in the order of
experts. Tensors are contiguous, except for rows that are reached by a stride: it comes in units of ALIGNMENT elements,
which shows the compiler how wide it may load.
"""

import triton
import triton.language as tl

from tk_kernel_core.gemm_kernels import wait_for_predecessor

# What is known of a tile of rows, in int32: `schedule_kernel` says what.
TILE_FIELDS = tl.constexpr(8)


@triton.jit
def local_experts(ids_ptr, map_ptr, slots, n_slots, n_all, n_experts):
    """Return the number here of each slot's expert, n_experts for one that is not here."""
    ids = tl.load(ids_ptr + slots, mask=slots < n_slots, other=-1)
    if map_ptr is not None:
        ids = tl.load(map_ptr + ids, mask=(ids >= 0) & (ids < n_all), other=-1)
    return tl.where((ids >= 0) & (ids < n_experts), ids, n_experts).to(tl.int32)


@triton.jit(do_not_specialize=["n_slots", "n_all", "n_experts"])
def count_kernel(
    counts_ptr,
    ids_ptr,
    map_ptr,
    n_slots,
    n_all,
    n_experts,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """counts[i, e] = slots of expert e among those from i * CHUNK to (i + 1) * CHUNK; rows have BLOCK_E elements."""
    chunk = tl.program_id(0)
    experts = tl.arange(0, BLOCK_E)
    wait_for_predecessor(DEPENDENT_LAUNCH)
    expert = local_experts(ids_ptr, map_ptr, chunk * CHUNK + tl.arange(0, CHUNK), n_slots, n_all, n_experts)
    counts = tl.histogram(expert, BLOCK_E, mask=expert < n_experts)
    tl.store(counts_ptr + chunk.to(tl.int64) * BLOCK_E + experts, counts)


@triton.jit
def _write_tiles(tiles_ptr, starts, ends, n_tiles, block_m, BLOCK_E: tl.constexpr, BLOCK_TILES: tl.constexpr):
    """Cut the rows of each expert into tiles, from their end on; all programs take part."""
    program, n_programs = tl.program_id(0), tl.num_programs(0)
    its_tiles = tl.cdiv(ends - starts, block_m)
    first_tiles = tl.cumsum(its_tiles, axis=0) - its_tiles
    n_real_tiles = tl.minimum(tl.sum(its_tiles, axis=0), n_tiles)
    fields = tl.arange(0, TILE_FIELDS)[None, :]
    experts = tl.arange(0, BLOCK_E)[:, None]
    n_its = tl.minimum(its_tiles, n_tiles - first_tiles)
    its = tl.where(fields == 4, first_tiles[:, None], tl.where(fields == 5, n_its[:, None], 0))
    its = tl.where(fields == 0, experts, tl.where(fields == 3, n_real_tiles, its))
    # One tile of every expert at a time.
    for step in tl.range(program, tl.max(its_tiles, axis=0), n_programs):
        places = (first_tiles + step)[:, None]
        mask = (step < its_tiles)[:, None] & (places < n_tiles)
        tile_ends = ends - (its_tiles - 1 - step) * block_m
        first_rows = tl.maximum(starts, tile_ends - block_m)
        tile = tl.where(fields == 1, first_rows[:, None], tl.where(fields == 2, tile_ends[:, None], its))
        tl.store(tiles_ptr + places * TILE_FIELDS + fields, tile, mask=mask)
    no_tile = tl.where(fields == 0, -1, tl.where(fields == 3, n_real_tiles, 0))
    for first in tl.range(program * BLOCK_TILES, n_tiles, n_programs * BLOCK_TILES):
        places = first + tl.arange(0, BLOCK_TILES)[:, None]
        mask = (places >= n_real_tiles) & (places < n_tiles)
        tl.store(tiles_ptr + places * TILE_FIELDS + fields, no_tile, mask=mask)


@triton.jit(do_not_specialize=["n_slots", "n_tiles", "capacity", "block_m", "n_all", "n_experts"])
def schedule_kernel(
    sorted_ptr,
    offsets_ptr,
    positions_ptr,
    ids_ptr,
    counts_ptr,
    tiles_ptr,
    map_ptr,
    n_slots,
    n_tiles,
    capacity,
    block_m,
    n_all,
    n_experts,
    BLOCK_E: tl.constexpr,
    CHUNK: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Sort slots by expert, those of one expert in their own order; a program places those of one chunk.

    positions is the sorted row of each slot, sorted its inverse, offsets the first row of each expert; -1 is for none.
    tiles [n_tiles, TILE_FIELDS] cut the rows of each expert into blocks of block_m, the first of which may be lower:
    expert, first row, end of the tile's rows, number of tiles, first tile of the expert, number of its tiles, and two
    zeros; those beyond the number of tiles have the expert -1. If PADDED, the rows of an expert end at a multiple of
    block_m, and sorted is not written between experts. An expert serves no more than `capacity` slots. counts are those
    of count_kernel; or None, and each program counts all slots, no more than BLOCK_ALL.
    """
    chunk, n_chunks = tl.program_id(0), tl.num_programs(0)
    experts = tl.arange(0, BLOCK_E)
    local = tl.arange(0, CHUNK)
    wait_for_predecessor(DEPENDENT_LAUNCH)
    expert = local_experts(ids_ptr, map_ptr, chunk * CHUNK + local, n_slots, n_all, n_experts)
    if counts_ptr is None:
        everywhere = tl.arange(0, BLOCK_ALL)
        experts_of_all = local_experts(ids_ptr, map_ptr, everywhere, n_slots, n_all, n_experts)
        is_here = experts_of_all < n_experts
        total = tl.histogram(experts_of_all, BLOCK_E, mask=is_here)
        before = tl.zeros([BLOCK_E], tl.int32)
        if BLOCK_ALL > CHUNK:
            before = tl.histogram(experts_of_all, BLOCK_E, mask=is_here & (everywhere < chunk * CHUNK))
    else:
        sums = tl.zeros([BLOCK_C, BLOCK_E], tl.int32)
        sums_before = tl.zeros([BLOCK_C, BLOCK_E], tl.int32)
        for first in tl.range(0, n_chunks, BLOCK_C):
            chunks = first + tl.arange(0, BLOCK_C)[:, None]
            counts_ptrs = counts_ptr + chunks.to(tl.int64) * BLOCK_E + experts[None, :]
            counts = tl.load(counts_ptrs, mask=chunks < n_chunks, other=0)
            sums += counts
            sums_before += tl.where(chunks < chunk, counts, 0)
        total, before = tl.sum(sums, axis=0), tl.sum(sums_before, axis=0)
    kept = tl.minimum(total, capacity)
    lengths = tl.cdiv(kept, block_m) * block_m if PADDED else kept
    ends = tl.cumsum(lengths, axis=0)
    n_rows = tl.sum(lengths, axis=0)
    if chunk == 0:
        tl.store(offsets_ptr + experts, ends - kept, mask=experts < n_experts)
        tl.store(offsets_ptr + n_experts, n_rows)

    # How many slots before it are of the same expert.
    same = tl.zeros([BLOCK_J, CHUNK], tl.int32)
    for first in tl.range(0, CHUNK, BLOCK_J):
        others = first + tl.arange(0, BLOCK_J)[:, None]
        other = local_experts(ids_ptr, map_ptr, chunk * CHUNK + others, n_slots, n_all, n_experts)
        same += ((other == expert[None, :]) & (others < local[None, :])).to(tl.int32)
    index = tl.minimum(expert, BLOCK_E - 1)
    rank = tl.sum(same, axis=0) + tl.gather(before, index, 0)
    is_kept = (expert < n_experts) & (rank < capacity)
    rows = tl.gather(ends - kept, index, 0) + rank
    slots = chunk * CHUNK + local
    tl.store(positions_ptr + slots, tl.where(is_kept, rows, -1), mask=slots < n_slots)
    tl.store(sorted_ptr + rows, slots, mask=is_kept)
    tl.store(sorted_ptr + slots, -1, mask=(slots >= n_rows) & (slots < n_slots))

    if tiles_ptr is not None:
        _write_tiles(tiles_ptr, ends - kept, ends, n_tiles, block_m, BLOCK_E, BLOCK_TILES)


@triton.jit(do_not_specialize=["n_rows", "n_tiles", "block_m", "n_experts"])
def tiles_kernel(
    tiles_ptr,
    offsets_ptr,
    n_rows,
    n_tiles,
    block_m,
    n_experts,
    BLOCK_E: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """Make the tiles of schedule_kernel from offsets alone, which may be anything: tiles stay within n_rows."""
    experts = tl.arange(0, BLOCK_E)
    mask = experts < n_experts
    wait_for_predecessor(DEPENDENT_LAUNCH)
    starts = tl.load(offsets_ptr + experts, mask=mask, other=0).to(tl.int64)
    ends = tl.load(offsets_ptr + experts + 1, mask=mask, other=0).to(tl.int64)
    starts = tl.minimum(tl.maximum(starts, 0), n_rows).to(tl.int32)
    ends = tl.minimum(tl.maximum(ends, 0), n_rows).to(tl.int32)
    _write_tiles(tiles_ptr, starts, tl.maximum(starts, ends), n_tiles, block_m, BLOCK_E, BLOCK_TILES)


@triton.jit(do_not_specialize=["n_tokens", "stride_x", "stride_out", "n_experts"])
def permute_kernel(
    out_ptr,
    x_ptr,
    positions_ptr,
    offsets_ptr,
    n_tokens,
    stride_x,
    stride_out,
    n_experts,
    ALIGNMENT: tl.constexpr,
    TOP_K: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out[positions[slot]] = x[slot // TOP_K], and zeros from row offsets[n_experts] on; positions below 0 are none.

    A token is read once, and written once for each of its slots. Rows of x are stride_x * ALIGNMENT elements apart,
    those of out, as many as they have, stride_out * ALIGNMENT.
    """
    width = stride_out * ALIGNMENT
    n_tiles_h = tl.cdiv(width, BLOCK_H)
    tokens = tl.program_id(0) // n_tiles_h * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    columns = tl.program_id(0) % n_tiles_h * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    is_token, is_column = tokens < n_tokens, columns < width
    wait_for_predecessor(DEPENDENT_LAUNCH)
    x_ptrs = x_ptr + tokens.to(tl.int64) * stride_x * ALIGNMENT + columns
    x = tl.load(x_ptrs, mask=is_token & is_column, other=0.0)
    n_rows = tl.load(offsets_ptr + n_experts)
    for choice in tl.range(0, TOP_K, loop_unroll_factor=UNROLL):
        slots = tokens * TOP_K + choice
        rows = tl.load(positions_ptr + slots, mask=is_token, other=-1)
        out_ptrs = out_ptr + rows.to(tl.int64) * stride_out * ALIGNMENT + columns
        tl.store(out_ptrs, x, mask=(rows >= 0) & is_column)
        # There are as many rows as slots: a row without a slot is the task of the slot of its number.
        out_ptrs = out_ptr + slots.to(tl.int64) * stride_out * ALIGNMENT + columns
        tl.store(out_ptrs, tl.zeros_like(x), mask=is_token & (slots >= n_rows) & is_column)


@triton.jit(do_not_specialize=["n_tokens", "stride"])
def combine_kernel(
    out_ptr,
    y_ptr,
    positions_ptr,
    weights_ptr,
    shared_ptr,
    n_tokens,
    stride,
    ALIGNMENT: tl.constexpr,
    TOP_K: tl.constexpr,
    SORTED: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out[token] = sum of y over its slots with a position, times weights, in fp32 and in their order; + shared.

    y has the slots' rows in the order of positions if SORTED, else in their own. Without positions, all slots count.
    Rows have stride * ALIGNMENT elements.
    """
    width = stride * ALIGNMENT
    n_tiles_h = tl.cdiv(width, BLOCK_H)
    tokens = tl.program_id(0) // n_tiles_h * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    columns = tl.program_id(0) % n_tiles_h * BLOCK_H + tl.arange(0, BLOCK_H)[None, :]
    is_token, is_column = tokens < n_tokens, columns < width
    out_offsets = tokens.to(tl.int64) * stride * ALIGNMENT + columns
    wait_for_predecessor(DEPENDENT_LAUNCH)
    acc = tl.zeros([BLOCK_T, BLOCK_H], tl.float32)
    for choice in tl.range(0, TOP_K, loop_unroll_factor=UNROLL):
        slots = tokens * TOP_K + choice
        is_here, rows = is_token, slots
        if positions_ptr is not None:
            positions = tl.load(positions_ptr + slots, mask=is_token, other=-1)
            is_here = positions >= 0
            if SORTED:
                is_here &= positions < n_tokens * TOP_K
                rows = positions
        y_ptrs = y_ptr + rows.to(tl.int64) * stride * ALIGNMENT + columns
        y = tl.load(y_ptrs, mask=is_here & is_column, other=0.0).to(tl.float32)
        if weights_ptr is not None:
            y *= tl.load(weights_ptr + slots, mask=is_here, other=0.0).to(tl.float32)
        acc += y
    if shared_ptr is not None:
        acc += tl.load(shared_ptr + out_offsets, mask=is_token & is_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + out_offsets, acc.to(out_ptr.dtype.element_ty), mask=is_token & is_column)
