"""Public functions that multiply with experts' weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tk_moe_dispatch import _expert_plans, _operators, _packed_plans, _sorted_plans
from tk_moe_dispatch._checks import (
    check_ffn,
    check_fused_experts,
    check_fused_ffn,
    check_grouped_gemm,
    check_layer,
)
from tk_moe_dispatch._ops import RECENT
from tk_moe_dispatch._packed import PackedExperts
from tk_moe_dispatch._packed_checks import check_fused_packed_experts, packed_operands
from tk_moe_dispatch._reference import GatedLayout, Gating

if TYPE_CHECKING:
    import torch


def fused_experts(
    x: torch.Tensor,
    w13: torch.Tensor | PackedExperts,
    w2: torch.Tensor | PackedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    *,
    expert_map: torch.Tensor | None = None,
    w13_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None,
    shared_w13: torch.Tensor | None = None,
    shared_w2: torch.Tensor | None = None,
    layout: GatedLayout = "concat",
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
    capacity_factor: float | None = None,
) -> torch.Tensor:
    """Apply to each token the experts it was routed to, and add up what they return.

    `y[t] = sum(topk_weights[t, i] * expert[topk_ids[t, i]](x[t])) + shared(x[t])` over i, where an expert is
    `(g * sigmoid(alpha * g) * (u + beta)) @ w2.T + w2_bias` with `g` and `u` the two halves of
    `x @ w13.T + w13_bias`, clamped by `limit`. Products and the sum over experts are formed in fp32 and in a fixed
    order; the inside of an expert, and its output times its weight, or its output where weights are packed, are rounded
    to the dtype of `x`. No host waits for
    the GPU, experts without tokens are not read, and results do not depend on what was in memory before.

    Args:
        x: [..., H], float16 or bfloat16, any strides.
        w13: [E, 2 * F, H] in the dtype of `x`: gate and up. Or `PackedExperts` of this shape and `layout`, of 8 or 4
            bits, for either dtype of `x`.
        w2: [E, H, F] in the dtype of `x`: down. Or `PackedExperts`, if w13 is.
        topk_weights: [..., top_k], floating point.
        topk_ids: int32 or int64 [..., top_k]. An id that is no expert's, such as -1, contributes nothing.
        expert_map: int32 or int64 [all experts], where this device holds only some: the row of `w13` and `w2` for each
            id, and -1 for experts held elsewhere, which contribute nothing. The devices' results sum up to the whole.
        w13_bias: [E, 2 * F], floating point, or None.
        w2_bias: [E, H], floating point, or None.
        shared_w13: [2 * F', H] in the dtype of `x`, of an expert for all tokens, or None.
        shared_w2: [H, F'], with `shared_w13`. It has no bias, and no weight but 1.
        layout: Rows of w13, its bias and shared_w13: `concat`, all of gate and then all of up, or `interleaved`, one
            by one.
        alpha: Factor within the sigmoid.
        beta: Added to up.
        limit: Clamps gate from above, and up on both sides; None for no limit.
        capacity_factor: An expert takes `ceil(capacity_factor * tokens * top_k / all experts)` tokens, the first ones;
            to later ones it contributes nothing. None for no bound.

    Returns:
        A new contiguous tensor with the shape and dtype of `x`.

    Raises:
        TypeError: An argument is of another type, or has an unsupported dtype.
        ValueError: Shapes, devices or settings do not fit.
        NotImplementedError: A gradient is wanted.

    Source:
        alpha, beta and limit: gpt-oss model card, arXiv:2508.10925. Capacity: Switch Transformers, arXiv:2101.03961.
    """
    settings = layout, alpha, beta, limit, capacity_factor
    routed = topk_weights, topk_ids, expert_map, w13_bias, w2_bias, shared_w13, shared_w2
    y: torch.Tensor
    if isinstance(w13, PackedExperts) or isinstance(w2, PackedExperts):
        tensors, sizes = packed_operands(x, w13, w2, layout)
        y = RECENT.call(
            "fused_packed_experts",
            (x, *tensors, *routed),
            (*sizes, *settings),
            check_fused_packed_experts,
            _packed_plans.fused_packed_experts_plan,
            _operators.fused_packed_experts,
        )
        return y
    operands = x, w13, w2, *routed
    plan_of, operator = _expert_plans.fused_experts_plan, _operators.fused_experts
    y = RECENT.call("fused_experts", operands, settings, check_fused_experts, plan_of, operator)
    return y


def fused_moe_forward(
    hidden_states: torch.Tensor,
    router_weight: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    num_experts: int,
    top_k: int,
    gating: Gating = "softmax",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Carry out a mixture-of-experts layer: `moe_router`, and the experts as in `fused_experts`.

    The weights are scores over all experts, not renormalised. Other conventions: `moe_router` and `fused_experts`.

    Args:
        hidden_states: [..., H], float16 or bfloat16, any strides.
        router_weight: [E, H], floating point.
        w_gate: [E, F, H] in the dtype of `hidden_states`.
        w_up: [E, F, H], likewise.
        w_down: [E, H, F], likewise.
        num_experts: E.
        top_k: Experts per token.
        gating: `softmax` or `sigmoid`.

    Returns:
        `(output, indices, weights)`: [..., H] in the dtype of `hidden_states`, int64 and float32 [..., top_k].

    Raises:
        TypeError: An argument is of another type, or has an unsupported dtype.
        ValueError: Shapes, devices or settings do not fit.
        NotImplementedError: A gradient is wanted.
    """
    operands, settings = (hidden_states, router_weight, w_gate, w_up, w_down), (num_experts, top_k, gating)
    plan_of, operator = _expert_plans.fused_moe_forward_plan, _operators.fused_moe_forward
    three: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    three = RECENT.call("fused_moe_forward", operands, settings, check_layer, plan_of, operator)
    return three


def grouped_gemm(
    tokens: torch.Tensor, weights: torch.Tensor, expert_offsets: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Multiply sorted rows by the weights of their experts: `tokens[first:end] @ weights[e].T` for each expert e.

    Sums are formed in fp32 and rounded once. Rows of no expert give zeros.

    Args:
        tokens: [rows, K], float16 or bfloat16.
        weights: [E, N, K] in the dtype of `tokens`.
        expert_offsets: int32 or int64 [E + 1], as `compute_permutation_indices` returns them.
        num_experts: E.

    Returns:
        [rows, N], new and contiguous, in the dtype of `tokens`.

    Raises:
        TypeError: An argument is of another type, or has an unsupported dtype.
        ValueError: Shapes or devices do not fit.
        NotImplementedError: A gradient is wanted.
    """
    operands, plan_of = (tokens, weights, expert_offsets), _sorted_plans.grouped_gemm_plan
    operator = _operators.grouped_gemm
    y: torch.Tensor = RECENT.call("grouped_gemm", operands, (num_experts,), check_grouped_gemm, plan_of, operator)
    return y


def expert_ffn_triton(
    permuted: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    expert_offsets: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """Apply to sorted rows their experts: `(silu(x @ w_gate[e].T) * (x @ w_up[e].T)) @ w_down[e].T`.

    Args:
        permuted: [rows, H], float16 or bfloat16.
        w_gate: [E, F, H] in the dtype of `permuted`.
        w_up: [E, F, H], likewise.
        w_down: [E, H, F], likewise.
        expert_offsets: As for `grouped_gemm`.
        num_experts: E.

    Returns:
        [rows, H], new and contiguous, in the dtype of `permuted`; rows of no expert are zeros.

    Raises:
        TypeError: An argument is of another type, or has an unsupported dtype.
        ValueError: Shapes or devices do not fit.
        NotImplementedError: A gradient is wanted.
    """
    operands, plan_of = (permuted, w_gate, w_up, w_down, expert_offsets), _sorted_plans.expert_ffn_plan
    y: torch.Tensor = RECENT.call("expert_ffn", operands, (num_experts,), check_ffn, plan_of, _operators.expert_ffn)
    return y


def fused_expert_ffn(
    permuted: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    expert_offsets: torch.Tensor,
    num_experts: int,
    weights: torch.Tensor,
    sorted_idx: torch.Tensor,
    num_tokens: int,
    top_k: int,
) -> torch.Tensor:
    """Apply to sorted rows their experts as `expert_ffn_triton`, and combine them as `unpermute_tokens`.

    Args:
        permuted: [T * top_k, H], float16 or bfloat16.
        w_gate: As for `expert_ffn_triton`.
        w_up: As for `expert_ffn_triton`.
        w_down: As for `expert_ffn_triton`.
        expert_offsets: As for `grouped_gemm`.
        num_experts: E.
        weights: [T, top_k], floating point.
        sorted_idx: int32 or int64 [T * top_k], as `compute_permutation_indices` returns it.
        num_tokens: T.
        top_k: Pairs per token.

    Returns:
        [T, H], new and contiguous, in the dtype of `permuted`.

    Raises:
        TypeError: An argument is of another type, or has an unsupported dtype.
        ValueError: Shapes or devices do not fit.
        NotImplementedError: A gradient is wanted.
    """
    operands = permuted, w_gate, w_up, w_down, expert_offsets, weights, sorted_idx
    sizes, plan_of = (num_experts, num_tokens, top_k), _sorted_plans.fused_expert_ffn_plan
    operator = _operators.fused_expert_ffn
    y: torch.Tensor = RECENT.call("fused_expert_ffn", operands, sizes, check_fused_ffn, plan_of, operator)
    return y
