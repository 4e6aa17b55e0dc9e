"""The operators `torch.ops.tk_moe_dispatch.*`: for torch.compile, export and fake tensors. None has a gradient."""

from __future__ import annotations

from typing import Any

import torch

from tk_kernel_core.registration import define_operator
from tk_moe_dispatch import _expert_plans, _packed_plans, _plans, _routing_plans, _sorted_plans
from tk_moe_dispatch._checks import (
    check_combination,
    check_ffn,
    check_fused_experts,
    check_fused_ffn,
    check_grouped_gemm,
    check_indices,
    check_layer,
    check_logits,
    check_permutation,
    check_router,
)
from tk_moe_dispatch._packed_checks import check_fused_packed_experts

_LIBRARY = torch.library.Library("tk_moe_dispatch", "DEF")
_SETTINGS = "int top_k, str gating, bool renormalize, int? n_groups, int? topk_groups, float routed_scaling_factor"


def _empty(x: torch.Tensor, dtype: torch.dtype, *shape: Any) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=x.device)


def _fake_route_topk(logits: Any, correction_bias: Any, *settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    check_logits(logits, correction_bias, *settings)
    shape = *logits.shape[:-1], settings[0]
    return _empty(logits, torch.int64, *shape), _empty(logits, torch.float32, *shape)


route_topk = define_operator(
    _LIBRARY,
    f"route_topk(Tensor logits, Tensor? correction_bias, {_SETTINGS}) -> (Tensor, Tensor)",
    _routing_plans.route_topk,
    _fake_route_topk,
)


def _fake_moe_router(
    hidden: Any, router_weight: Any, router_bias: Any, correction_bias: Any, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_router(hidden, router_weight, router_bias, correction_bias, *settings)
    shape = *hidden.shape[:-1], settings[0]
    logits = _empty(hidden, torch.float32, *hidden.shape[:-1], router_weight.shape[0])
    return _empty(hidden, torch.int64, *shape), _empty(hidden, torch.float32, *shape), logits


moe_router = define_operator(
    _LIBRARY,
    "moe_router(Tensor hidden, Tensor router_weight, Tensor? router_bias, Tensor? correction_bias, "
    f"{_SETTINGS}) -> (Tensor, Tensor, Tensor)",
    _routing_plans.moe_router,
    _fake_moe_router,
)


def _fake_compute_permutation_indices(
    indices: Any, num_experts: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_indices("indices", indices, num_experts)
    n_slots, dtype = indices.numel(), torch.int64
    offsets = _empty(indices, dtype, num_experts + 1)
    return _empty(indices, dtype, n_slots), offsets, _empty(indices, dtype, n_slots)


compute_permutation_indices = define_operator(
    _LIBRARY,
    "compute_permutation_indices(Tensor indices, int num_experts) -> (Tensor, Tensor, Tensor)",
    _plans.compute_permutation_indices,
    _fake_compute_permutation_indices,
)


def _fake_permute_tokens(
    hidden: Any, indices: Any, num_experts: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    check_permutation(hidden, indices, num_experts)
    permuted = _empty(hidden, hidden.dtype, indices.numel(), hidden.shape[-1])
    sorted_idx, offsets, restore_idx = _fake_compute_permutation_indices(indices, num_experts)
    return permuted, offsets, sorted_idx, restore_idx


permute_tokens = define_operator(
    _LIBRARY,
    "permute_tokens(Tensor hidden, Tensor indices, int num_experts) -> (Tensor, Tensor, Tensor, Tensor)",
    _plans.permute_tokens,
    _fake_permute_tokens,
)


def _fake_unpermute_tokens(
    expert_outputs: Any, weights: Any, restore_idx: Any, num_tokens: Any, top_k: Any
) -> torch.Tensor:
    check_combination(expert_outputs, weights, restore_idx, num_tokens, top_k)
    return _empty(expert_outputs, expert_outputs.dtype, num_tokens, expert_outputs.shape[1])


unpermute_tokens = define_operator(
    _LIBRARY,
    "unpermute_tokens(Tensor expert_outputs, Tensor weights, Tensor restore_idx, SymInt num_tokens, int top_k) "
    "-> Tensor",
    _plans.unpermute_tokens,
    _fake_unpermute_tokens,
)


def _fake_grouped_gemm(tokens: Any, weights: Any, expert_offsets: Any, num_experts: Any) -> torch.Tensor:
    check_grouped_gemm(tokens, weights, expert_offsets, num_experts)
    return _empty(tokens, tokens.dtype, tokens.shape[0], weights.shape[1])


grouped_gemm = define_operator(
    _LIBRARY,
    "grouped_gemm(Tensor tokens, Tensor weights, Tensor expert_offsets, int num_experts) -> Tensor",
    _sorted_plans.grouped_gemm,
    _fake_grouped_gemm,
)


def _fake_expert_ffn(permuted: Any, *rest: Any) -> torch.Tensor:
    check_ffn(permuted, *rest)
    return _empty(permuted, permuted.dtype, *permuted.shape)


_PROJECTIONS = "Tensor w_gate, Tensor w_up, Tensor w_down"

expert_ffn = define_operator(
    _LIBRARY,
    f"expert_ffn(Tensor permuted, {_PROJECTIONS}, Tensor expert_offsets, int num_experts) -> Tensor",
    _sorted_plans.expert_ffn,
    _fake_expert_ffn,
)


def _fake_fused_expert_ffn(permuted: Any, *rest: Any) -> torch.Tensor:
    check_fused_ffn(permuted, *rest)
    return _empty(permuted, permuted.dtype, rest[-2], permuted.shape[1])


fused_expert_ffn = define_operator(
    _LIBRARY,
    f"fused_expert_ffn(Tensor permuted, {_PROJECTIONS}, Tensor expert_offsets, Tensor weights, Tensor sorted_idx, "
    "int num_experts, SymInt num_tokens, int top_k) -> Tensor",
    _sorted_plans.fused_expert_ffn,
    _fake_fused_expert_ffn,
)


def _fake_fused_experts(x: Any, *rest: Any) -> torch.Tensor:
    check_fused_experts(x, *rest)
    return _empty(x, x.dtype, *x.shape)


fused_experts = define_operator(
    _LIBRARY,
    "fused_experts(Tensor x, Tensor w13, Tensor w2, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, "
    "Tensor? w13_bias, Tensor? w2_bias, Tensor? shared_w13, Tensor? shared_w2, str layout, float alpha, float beta, "
    "float? limit, float? capacity_factor) -> Tensor",
    _expert_plans.fused_experts,
    _fake_fused_experts,
)


def _fake_fused_packed_experts(x: Any, *rest: Any) -> torch.Tensor:
    check_fused_packed_experts(x, *rest)
    return _empty(x, x.dtype, *x.shape)


fused_packed_experts = define_operator(
    _LIBRARY,
    "fused_packed_experts(Tensor x, Tensor w13_codes, Tensor w13_scales, Tensor? w13_zeros, Tensor w2_codes, "
    "Tensor w2_scales, Tensor? w2_zeros, Tensor topk_weights, Tensor topk_ids, Tensor? expert_map, Tensor? w13_bias, "
    "Tensor? w2_bias, Tensor? shared_w13, Tensor? shared_w2, int ffn_size, int w13_group_size, int w2_group_size, "
    "str layout, float alpha, float beta, float? limit, float? capacity_factor) -> Tensor",
    _packed_plans.fused_packed_experts,
    _fake_fused_packed_experts,
)


def _fake_fused_moe_forward(hidden: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_layer(hidden, *rest)
    shape = *hidden.shape[:-1], rest[-2]
    ids, weights = _empty(hidden, torch.int64, *shape), _empty(hidden, torch.float32, *shape)
    return _empty(hidden, hidden.dtype, *hidden.shape), ids, weights


fused_moe_forward = define_operator(
    _LIBRARY,
    f"fused_moe_forward(Tensor hidden, Tensor router_weight, {_PROJECTIONS}, int num_experts, int top_k, "
    "str gating) -> (Tensor, Tensor, Tensor)",
    _expert_plans.fused_moe_forward,
    _fake_fused_moe_forward,
)
