"""Device code: how tokens are scored, and which experts they go to. Tensors are contiguous, but for rows of x."""

import triton
import triton.language as tl

from tk_kernel_core.gemm_kernels import wait_for_predecessor

_LARGEST = tl.constexpr(3.4028234663852886e38)
# Below the key of every number.
_NO_KEY = tl.constexpr(-(2**63))


@triton.jit
def _finite(x):
    """Make infinities the largest finite numbers, and NaN the lowest: it is never chosen before others."""
    x = tl.where(x == x, x, -_LARGEST)
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST)


@triton.jit
def _keys(values, index):
    """Return int64 that are ordered as the values, equal ones by descending index, and that are all different."""
    # Zeros of both signs are equal.
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - index).to(tl.int64)


@triton.jit
def _value_of(keys):
    bits = (keys >> 32).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _index_of(keys):
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _in_the_best_groups(keys, N_GROUPS: tl.constexpr, GROUP_SIZE: tl.constexpr, TOPK_GROUPS: tl.constexpr):
    """Drop the keys [.., groups, members] outside the groups whose two largest values sum up to most."""
    best = tl.max(keys, axis=2)
    scores = _value_of(best)
    if GROUP_SIZE > 1:
        second = tl.max(tl.where(keys == tl.expand_dims(best, 2), _NO_KEY, keys), axis=2)
        scores += _value_of(second)
    groups = tl.arange(0, keys.shape[1])[None, :]
    group_keys = tl.where(groups < N_GROUPS, _keys(_finite(scores), groups), _NO_KEY)
    is_kept = group_keys != group_keys
    for _ in tl.static_range(TOPK_GROUPS):
        is_best = group_keys == tl.max(group_keys, axis=1, keep_dims=True)
        is_kept |= is_best
        group_keys = tl.where(is_best, _NO_KEY, group_keys)
    return tl.where(tl.expand_dims(is_kept, 2), keys, _NO_KEY)


@triton.jit(do_not_specialize=["n_tokens", "n_parts", "stride_x", "stride_weight"])
def router_logits_kernel(
    parts_ptr,
    x_ptr,
    weight_ptr,
    n_tokens,
    n_parts,
    stride_x,
    stride_weight,
    N_EXPERTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """parts[i] = x @ weight.T over every n_parts-th block of columns, in fp32: their sum are the logits.

    parts is [n_parts, n_tokens, N_EXPERTS]. Rows of x are stride_x * ALIGNMENT elements apart; those of the weight, as
    many as they have, stride_weight * ALIGNMENT: a multiple of BLOCK_H if WHOLE_STEPS.
    """
    width = stride_weight * ALIGNMENT
    n_tiles_e: tl.constexpr = (N_EXPERTS + BLOCK_E - 1) // BLOCK_E
    tile, part = tl.program_id(0) // n_parts, tl.program_id(0) % n_parts
    tokens = tile // n_tiles_e * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    experts = tile % n_tiles_e * BLOCK_E + tl.arange(0, BLOCK_E)[None, :]  # [1, BLOCK_E]
    columns = tl.arange(0, BLOCK_H)
    # Rows beyond the last one repeat it, and are not stored.
    x_ptrs = x_ptr + tl.minimum(tokens, n_tokens - 1).to(tl.int64) * stride_x * ALIGNMENT + columns[None, :]
    weight_ptrs = weight_ptr + tl.minimum(experts, N_EXPERTS - 1).to(tl.int64) * stride_weight * ALIGNMENT
    weight_ptrs += columns[:, None]
    wait_for_predecessor(DEPENDENT_LAUNCH)
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for start in tl.range(part * BLOCK_H, width, n_parts * BLOCK_H, num_stages=STAGES):
        if WHOLE_STEPS:
            x, weight = tl.load(x_ptrs + start), tl.load(weight_ptrs + start)
        else:
            is_column = columns < width - start
            x = tl.load(x_ptrs + start, mask=is_column[None, :], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=is_column[:, None], other=0.0)
        if x.dtype != weight.dtype:
            x, weight = x.to(tl.float32), weight.to(tl.float32)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    offsets = (part * n_tokens.to(tl.int64) + tokens) * N_EXPERTS + experts
    tl.store(parts_ptr + offsets, acc, mask=(tokens < n_tokens) & (experts < N_EXPERTS))


@triton.jit(do_not_specialize=["n_tokens"])
def route_kernel(
    ids_ptr,
    weights_ptr,
    parts_ptr,
    logits_ptr,
    router_bias_ptr,
    correction_bias_ptr,
    n_tokens,
    scale,
    N_EXPERTS: tl.constexpr,
    N_PARTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    N_GROUPS: tl.constexpr,
    TOPK_GROUPS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """ids and weights [n_tokens, TOP_K]: the experts with the largest logits = sum of parts + router_bias.

    With a correction bias or groups, those with the largest scores + bias within the best TOPK_GROUPS groups. A row is
    laid out as [BLOCK_G, BLOCK_S], groups and their members.
    """
    GROUP_SIZE: tl.constexpr = N_EXPERTS // N_GROUPS
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]  # [BLOCK_T, 1]
    places = tl.arange(0, BLOCK_G * BLOCK_S)[None, :]
    is_expert = (places // BLOCK_S < N_GROUPS) & (places % BLOCK_S < GROUP_SIZE)
    experts = places // BLOCK_S * GROUP_SIZE + places % BLOCK_S
    is_token = tokens < n_tokens
    mask = is_token & is_expert
    offsets = tokens.to(tl.int64) * N_EXPERTS + experts
    wait_for_predecessor(DEPENDENT_LAUNCH)

    logits = tl.load(parts_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    for _ in tl.static_range(1, N_PARTS):
        parts_ptr += n_tokens.to(tl.int64) * N_EXPERTS
        logits += tl.load(parts_ptr + offsets, mask=mask, other=0.0)
    if router_bias_ptr is not None:
        logits += tl.load(router_bias_ptr + experts, mask=is_expert, other=0.0).to(tl.float32)
    if logits_ptr is not None:
        tl.store(logits_ptr + offsets, logits, mask=mask)
    logits = _finite(logits)

    if not SIGMOID:
        largest = tl.max(tl.where(is_expert, logits, -_LARGEST), axis=1, keep_dims=True)
        exponentials = tl.where(is_expert, tl.exp(logits - largest), 0.0)
        total = tl.sum(exponentials, axis=1, keep_dims=True)
    choice = logits
    if correction_bias_ptr is not None or N_GROUPS > 1:
        choice = 1.0 / (1.0 + tl.exp(-logits)) if SIGMOID else exponentials / total
        if correction_bias_ptr is not None:
            bias = tl.load(correction_bias_ptr + experts, mask=is_expert, other=0.0).to(tl.float32)
            choice = _finite(choice + bias)
    keys = tl.where(is_expert, _keys(choice, experts), _NO_KEY)
    if N_GROUPS > 1:
        grouped = tl.reshape(keys, [BLOCK_T, BLOCK_G, BLOCK_S])
        keys = tl.reshape(_in_the_best_groups(grouped, N_GROUPS, GROUP_SIZE, TOPK_GROUPS), keys.shape)

    columns = tl.arange(0, BLOCK_K)[None, :]
    ids = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    chosen = tl.zeros([BLOCK_T, BLOCK_K], tl.float32)
    for column in tl.range(0, TOP_K):
        best = tl.max(keys, axis=1, keep_dims=True)
        is_best = keys == best
        ids = tl.where(columns == column, _index_of(best), ids)
        chosen = tl.where(columns == column, tl.sum(tl.where(is_best, logits, 0.0), axis=1, keep_dims=True), chosen)
        keys = tl.where(is_best, _NO_KEY, keys)

    if RENORMALIZE:
        # What score / sum(scores) is without rounding: no denominator vanishes.
        logs = tl.minimum(chosen, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(chosen))) if SIGMOID else chosen
        logs = tl.where(columns < TOP_K, logs, -float("inf"))
        shares = tl.exp(logs - tl.max(logs, axis=1, keep_dims=True))
        weights = shares / tl.sum(shares, axis=1, keep_dims=True)
    elif SIGMOID:
        weights = 1.0 / (1.0 + tl.exp(-chosen))
    else:
        weights = tl.exp(chosen - largest) / total
    out_offsets = tokens.to(tl.int64) * TOP_K + columns
    out_mask = is_token & (columns < TOP_K)
    tl.store(ids_ptr + out_offsets, ids, mask=out_mask)
    tl.store(weights_ptr + out_offsets, weights * scale, mask=out_mask)
