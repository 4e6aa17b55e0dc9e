"""Public functions."""

from __future__ import annotations

from typing import Any

import torch  # noqa: TC002 - annotations of public functions may be looked up at run time

from tk_kernel_core.recent import RecentPlans
from tk_moe_dispatch import _operators, _plans, _routing_plans
from tk_moe_dispatch._checks import (
    check_combination,
    check_indices,
    check_logits,
    check_permutation,
    check_router,
)
from tk_moe_dispatch._plans import Plan
from tk_moe_dispatch._reference import Gating, Routing

RECENT: RecentPlans[Plan] = RecentPlans()


def moe_router(
    hidden: torch.Tensor,
    router_weight: torch.Tensor,
    top_k: int,
    gating: Gating = "softmax",
    router_bias: torch.Tensor | None = None,
    *,
    renormalize: bool = False,
    correction_bias: torch.Tensor | None = None,
    n_groups: int | None = None,
    topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
) -> Routing:
    """Score tokens against all experts and choose the best ones for each.

    `logits = hidden @ router_weight.T + router_bias`, in fp32 and not rounded, then as `route_topk`. Above 64 tokens
    the logits of fp32 operands are PyTorch's, whose `torch.backends.cuda.matmul` says how sums are formed. A token's
    logits may differ in the last place from one range of numbers of tokens to another, and not within one.

    Models express their conventions so: Mixtral and Qwen3-MoE `renormalize=True`, which is softmax over the chosen
    logits, and for Qwen3-MoE with `norm_topk_prob` off, or Qwen2-MoE, False; DeepSeek-V3 `gating="sigmoid"`,
    `renormalize=True`, its `e_score_correction_bias`, groups and scaling factor; Llama-4 `gating="sigmoid"`, top_k 1,
    and the weights multiplied into the tokens before the experts, which then take weights of 1.

    Args:
        hidden: [..., H], float16, bfloat16 or float32, any strides.
        router_weight: [E, H], float16, bfloat16 or float32, contiguous or copied.
        top_k: As for `route_topk`.
        gating: As for `route_topk`.
        router_bias: [E], floating point, or None.
        renormalize: As for `route_topk`.
        correction_bias: As for `route_topk`.
        n_groups: As for `route_topk`.
        topk_groups: As for `route_topk`.
        routed_scaling_factor: As for `route_topk`.

    Returns:
        `(indices, weights, logits)`: int64 [..., top_k], float32 [..., top_k] and float32 [..., E], new and contiguous.

    Raises:
        TypeError: An argument is of another type, or has an unsupported dtype.
        ValueError: Shapes, devices or settings do not fit.
        NotImplementedError: A gradient is wanted.
    """
    operands = hidden, router_weight, router_bias, correction_bias
    settings = top_k, gating, renormalize, n_groups, topk_groups, routed_scaling_factor
    plan_of, operator = _routing_plans.moe_router_plan, _operators.moe_router
    return Routing(*RECENT.call("moe_router", operands, settings, check_router, plan_of, operator))


def route_topk(
    logits: torch.Tensor,
    top_k: int,
    gating: Gating = "softmax",
    *,
    renormalize: bool = False,
    correction_bias: torch.Tensor | None = None,
    n_groups: int | None = None,
    topk_groups: int | None = None,
    routed_scaling_factor: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the best experts for each token.

    `scores = softmax(logits)` or `sigmoid(logits)`, all in fp32. Chosen are the largest logits; with a correction bias
    or groups, the largest `scores + correction_bias`, which has no part in the weights. Of equal ones the lowest index
    comes first. `weights = scores[chosen] * routed_scaling_factor`; if `renormalize`, the scores are divided by their
    sum over those chosen, as it is without rounding: scores that vanish in fp32 still weigh in relation to one another.

    The indices of a row are different and those of experts, whatever its logits are: an infinity counts as the largest
    finite number, NaN as the lowest. So weights are finite too, and rows do not depend on one another.

    Args:
        logits: [..., E], float16, bfloat16 or float32, any strides.
        top_k: Experts per token, from 1 to E.
        gating: `softmax` over all experts, or `sigmoid` of each.
        renormalize: Whether the weights of a token sum up to `routed_scaling_factor`.
        correction_bias: [E], floating point, added to the scores for the choice alone; or None.
        n_groups: Equal groups of neighbouring experts; with `topk_groups`, or None.
        topk_groups: Groups to choose from: those whose two best biased scores have the largest sum.
        routed_scaling_factor: What all weights are multiplied by.

    Returns:
        `(indices, weights)`: int64 and float32 [..., top_k], the best expert first, new and contiguous.

    Raises:
        TypeError: An argument is of another type, or has an unsupported dtype.
        ValueError: Shapes, devices or settings do not fit.
        NotImplementedError: A gradient is wanted.

    Source:
        Groups and correction bias: DeepSeek-V3 technical report, arXiv:2412.19437, section 2.1.2.
    """
    settings = top_k, gating, renormalize, n_groups, topk_groups, routed_scaling_factor
    plan_of, operator = _routing_plans.route_topk_plan, _operators.route_topk
    pair: tuple[torch.Tensor, torch.Tensor]
    pair = RECENT.call("route_topk", (logits, correction_bias), settings, check_logits, plan_of, operator)
    return pair


def compute_permutation_indices(
    indices: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort (token, choice) pairs by expert, those of one expert in the order of tokens; on the GPU, with no atomics.

    Pairs are numbered `token * top_k + choice`. An index that is no expert's, such as -1, counts as absent.

    Args:
        indices: int32 or int64 [..., top_k], the experts of each token.
        num_experts: Experts.

    Returns:
        `(sorted_idx, expert_offsets, restore_idx)`, int64: [T * top_k], the pair in each sorted row, -1 in the rows
        that absent ones leave at the end; [num_experts + 1], where the rows of each expert begin, and the last ones
        end; [T * top_k], the sorted row of each pair, -1 for an absent one.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: There is no choice or expert, or there are more than 2^30 pairs.
    """
    check, plan_of = _check_indices, _plans.permutation_plan
    operator = _operators.compute_permutation_indices
    triple: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    triple = RECENT.call("compute_permutation_indices", (indices,), (num_experts,), check, plan_of, operator)
    return triple


def permute_tokens(
    hidden: torch.Tensor, indices: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gather tokens in the order of their experts: `permuted[row] = hidden[sorted_idx[row] // top_k]`.

    Args:
        hidden: [..., H], float16, bfloat16 or float32, any strides.
        indices: int32 or int64 [..., top_k], as for `compute_permutation_indices`.
        num_experts: Experts.

    Returns:
        `(permuted, expert_offsets, sorted_idx, restore_idx)`: [T * top_k, H] in the dtype of `hidden`, rows without a
        pair zero; the rest as `compute_permutation_indices`.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: Shapes or devices do not fit.
        NotImplementedError: A gradient is wanted.
    """
    operands, plan_of, operator = (hidden, indices), _plans.permute_plan, _operators.permute_tokens
    four: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
    four = RECENT.call("permute_tokens", operands, (num_experts,), check_permutation, plan_of, operator)
    return four


def unpermute_tokens(
    expert_outputs: torch.Tensor,
    weights: torch.Tensor,
    restore_idx: torch.Tensor,
    num_tokens: int,
    top_k: int,
) -> torch.Tensor:
    """Combine each token's outputs: `y[t] = sum(weights[t, i] * expert_outputs[restore_idx[t * top_k + i]])` over i.

    The sum is formed in fp32, in the order of i, and rounded once. A pair with index -1 counts as zeros.

    Args:
        expert_outputs: [T * top_k, H], float16, bfloat16 or float32.
        weights: [T, top_k], floating point.
        restore_idx: int32 or int64 [T * top_k], the row of each pair.
        num_tokens: T.
        top_k: Pairs per token.

    Returns:
        [T, H], new and contiguous, in the dtype of `expert_outputs`.

    Raises:
        TypeError: An argument is of another type or dtype.
        ValueError: Shapes or devices do not fit.
        NotImplementedError: A gradient is wanted.
    """
    operands, sizes = (expert_outputs, weights, restore_idx), (num_tokens, top_k)
    plan_of, operator = _plans.unpermute_plan, _operators.unpermute_tokens
    y: torch.Tensor = RECENT.call("unpermute_tokens", operands, sizes, check_combination, plan_of, operator)
    return y


def _check_indices(indices: Any, num_experts: Any) -> None:
    check_indices("indices", indices, num_experts)
