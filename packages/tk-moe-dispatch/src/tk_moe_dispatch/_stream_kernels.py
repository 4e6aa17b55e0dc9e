"""Device code for so few tokens that hardly two of them meet at an expert.

Such a product takes as long as reading the weights. So every slot reads those of its expert by itself, and nothing is
sorted. BLOCK_K is 8 elements for each thread: a program's threads lie side by side along K, for x as for the weights.
Weights, biases and slots are those of `_gemm_kernels`, ids and map those of `_kernels`.
"""

import triton
import triton.language as tl

from tk_kernel_core.gemm_kernels import wait_for_predecessor
from tk_moe_dispatch._gemm_kernels import add_bias, swiglu
from tk_moe_dispatch._kernels import local_experts


@triton.jit
def _load(ptrs, columns, K: tl.constexpr, BLOCK_K: tl.constexpr, policy: tl.constexpr):
    if K % BLOCK_K == 0:
        values = tl.load(ptrs + columns, eviction_policy=policy)
    else:
        values = tl.load(ptrs + columns, mask=columns < K, other=0.0, eviction_policy=policy)
    return values.to(tl.float32)


@triton.jit
def _row_offsets(expert, stride_expert, stride_feature, first_feature, N: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return where the features' rows of a weight begin, [BLOCK_N, 1]; those that do not exist repeat the last one."""
    features = tl.minimum(first_feature + tl.arange(0, BLOCK_N), N - 1)
    return expert.to(tl.int64) * stride_expert + features.to(tl.int64)[:, None] * stride_feature


@triton.jit
def stream_up_kernel(
    out_ptr,
    x_ptr,
    ids_ptr,
    weight_ptr,
    up_weight_ptr,
    map_ptr,
    bias_ptr,
    up_bias_ptr,
    stride_x,
    stride_expert,
    stride_feature,
    stride_bias,
    step_bias,
    alpha,
    beta,
    limit,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    N_ALL: tl.constexpr,
    N_EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out[slot] = SwiGLU of the products of the slot's token with weight and up_weight of its expert.

    A program makes BLOCK_N features of one slot, none for a slot without an expert here.
    """
    N_FEATURE_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    slot = (tl.program_id(0) // N_FEATURE_TILES).to(tl.int64)
    first_feature = tl.program_id(0) % N_FEATURE_TILES * BLOCK_N
    features = first_feature + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)[None, :]
    x_ptr += slot // TOP_K * stride_x
    wait_for_predecessor(DEPENDENT_LAUNCH)
    expert = local_experts(ids_ptr, map_ptr, slot, slot + 1, N_ALL, N_EXPERTS)
    if expert < N_EXPERTS:
        offsets = _row_offsets(expert, stride_expert, stride_feature, first_feature, N, BLOCK_N)
        sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        up_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
        for start in range(0, K, BLOCK_K):
            # Nothing is read twice: the weights make room first.
            w = _load(weight_ptr + offsets, start + columns, K, BLOCK_K, "evict_first")
            up_w = _load(up_weight_ptr + offsets, start + columns, K, BLOCK_K, "evict_first")
            x = _load(x_ptr, start + columns, K, BLOCK_K, "evict_last")
            sums += w * x
            up_sums += up_w * x
        gate = add_bias(tl.sum(sums, 1), bias_ptr, expert, features, stride_bias, step_bias, N)
        up = add_bias(tl.sum(up_sums, 1), up_bias_ptr, expert, features, stride_bias, step_bias, N)
        value = swiglu(gate, up, alpha, beta, limit)
        tl.store(out_ptr + slot * N + features, value.to(out_ptr.dtype.element_ty), mask=features < N)


@triton.jit
def stream_down_kernel(
    out_ptr,
    x_ptr,
    ids_ptr,
    routing_ptr,
    weight_ptr,
    map_ptr,
    bias_ptr,
    shared_ptr,
    stride_expert,
    stride_feature,
    stride_bias,
    step_bias,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    N_ALL: tl.constexpr,
    N_EXPERTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    """out[token] = sum of routing[slot] * (x[slot] @ weight[expert].T + bias[expert]) over its slots; + shared[token].

    A program makes BLOCK_N features of one token. x is its predecessor's work; what else is read before that has ended
    was there before it began.
    """
    N_FEATURE_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    token = (tl.program_id(0) // N_FEATURE_TILES).to(tl.int64)
    first_feature = tl.program_id(0) % N_FEATURE_TILES * BLOCK_N
    features = first_feature + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)[None, :]
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    total = tl.zeros([BLOCK_N], tl.float32)
    for choice in range(TOP_K):
        slot = token * TOP_K + choice
        expert = local_experts(ids_ptr, map_ptr, slot, slot + 1, N_ALL, N_EXPERTS)
        if expert < N_EXPERTS:
            routing = tl.load(routing_ptr + slot).to(tl.float32)
            offsets = _row_offsets(expert, stride_expert, stride_feature, first_feature, N, BLOCK_N)
            for start in range(0, K, BLOCK_K):
                w = _load(weight_ptr + offsets, start + columns, K, BLOCK_K, "evict_first")
                # In a loop only the first call waits.
                wait_for_predecessor(DEPENDENT_LAUNCH)
                sums += w * (_load(x_ptr + slot * K, start + columns, K, BLOCK_K, "evict_last") * routing)
            if bias_ptr is not None:
                bias = add_bias(tl.zeros_like(total), bias_ptr, expert, features, stride_bias, step_bias, N)
                total += bias * routing
    total += tl.sum(sums, 1)
    # A token without an expert here has not waited yet.
    wait_for_predecessor(DEPENDENT_LAUNCH)
    if shared_ptr is not None:
        total += tl.load(shared_ptr + token * N + features, mask=features < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * N + features, total.to(out_ptr.dtype.element_ty), mask=features < N)
