"""How scoring and routing are carried out: check, choose the backend and the launch, allocate, launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.gemm import backend_options
from tk_kernel_core.launch import Kernel, PreparedLaunch, allocator, launch_target
from tk_kernel_core.layout import next_power_of_two, row_stride
from tk_moe_dispatch._checks import check_logits, check_router
from tk_moe_dispatch._launch import logits_config, route_config
from tk_moe_dispatch._plans import Plan, contiguous, planned, rows_of
from tk_moe_dispatch._reference import moe_router_torch, no_autocast, route_topk_torch

_LOGITS = Kernel("tk_moe_dispatch._routing_kernels", "router_logits_kernel")
_ROUTE = Kernel("tk_moe_dispatch._routing_kernels", "route_kernel")

# The kernel multiplies fp32 outside the matrix units, which is for few tokens.
_MOST_TOKENS_IN_FP32 = 64


def route_topk(logits: Any, correction_bias: Any, *settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ids, weights = route_topk_plan(logits, correction_bias, *settings)(logits, correction_bias)
    return ids, weights


def moe_router(
    hidden: Any, router_weight: Any, router_bias: Any, correction_bias: Any, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    operands = hidden, router_weight, router_bias, correction_bias
    ids, weights, logits = moe_router_plan(*operands, *settings)(*operands)
    return ids, weights, logits


def route_topk_plan(logits: Any, correction_bias: Any, *settings: Any) -> Plan:
    """Return the function that chooses experts by logits like these."""

    def make() -> Plan:
        check_logits(logits, correction_bias, *settings)
        if logits.numel() == 0 or backend_of("logits", logits) == "reference":
            keywords = _keywords(settings)
            return lambda logits, bias: route_topk_torch(logits, correction_bias=bias, **keywords)
        shape, (n_tokens, n_experts) = logits.shape[:-1], logits.reshape(-1, logits.shape[-1]).shape
        choose = _choice(n_tokens, n_experts, 1, settings, logits.device)

        def route(logits: Any, correction_bias: Any) -> Any:
            ids, weights = choose(logits.contiguous(), None, None, contiguous(correction_bias))
            return ids.view(*shape, -1), weights.view(*shape, -1)

        return route

    return planned(("route_topk", *settings), (logits, correction_bias), make)


def moe_router_plan(
    hidden: Any,
    router_weight: Any,
    router_bias: Any,
    correction_bias: Any,
    *settings: Any,
    wants_logits: bool = True,
) -> Plan:
    """Return the function that scores and routes tokens like these.

    It returns indices, weights, and logits, or None in their place where they are not wanted.
    """

    def make() -> Plan:
        check_router(hidden, router_weight, router_bias, correction_bias, *settings)
        if hidden.numel() == 0 or backend_of("hidden", hidden) == "reference":
            keywords = _keywords(settings)
            return lambda hidden, weight, bias, correction_bias: tuple(
                moe_router_torch(hidden, weight, router_bias=bias, correction_bias=correction_bias, **keywords)
            )
        rows, shape, n_experts = rows_of(hidden), hidden.shape[:-1], router_weight.shape[0]
        n_tokens = rows.shape[0]
        n_parts, score = _scoring(rows, router_weight)
        choose = _choice(n_tokens, n_experts, n_parts, settings, hidden.device)
        new_logits = allocator((n_tokens, n_experts), torch.float32, hidden.device)
        is_complete = n_parts == 1 and router_bias is None

        def route(hidden: Any, weight: Any, router_bias: Any, correction_bias: Any) -> Any:
            parts = score(rows_of(hidden), weight.contiguous())
            logits: Any = new_logits() if wants_logits and not is_complete else None
            ids, weights = choose(parts, logits, contiguous(router_bias), contiguous(correction_bias))
            if is_complete:
                logits = parts
            if wants_logits:
                logits = logits.view(*shape, n_experts)
            return ids.view(*shape, -1), weights.view(*shape, -1), logits

        return route

    tensors = hidden, router_weight, router_bias, correction_bias
    return planned(("moe_router", wants_logits, *settings), tensors, make)


def _scoring(rows: torch.Tensor, router_weight: torch.Tensor) -> tuple[int, Callable[[Any, Any], torch.Tensor]]:
    """Return the number of parts that logits are summed up in, and the function from rows and weight to these."""
    (n_tokens, width), n_experts, device = rows.shape, router_weight.shape[0], rows.device
    size = max(rows.element_size(), router_weight.element_size())
    if size > 2 and n_tokens > _MOST_TOKENS_IN_FP32:

        def score_by_torch(rows: Any, weight: Any) -> Any:
            with no_autocast(device.type):
                return torch.nn.functional.linear(rows.float(), weight.float())

        return 1, score_by_torch
    config = logits_config(n_tokens, n_experts, width, size, launch_target(device))
    stride = row_stride(rows)
    unit = math.gcd(16, width, stride)
    launch = PreparedLaunch(
        _LOGITS,
        (config.n_programs, 1, 1),
        (n_tokens, config.n_parts, stride // unit, width // unit),
        {
            "N_EXPERTS": n_experts,
            "ALIGNMENT": unit,
            "WHOLE_STEPS": width % config.block_h == 0,
            "BLOCK_T": config.block_t,
            "BLOCK_E": config.block_e,
            "BLOCK_H": config.block_h,
            "STAGES": config.stages,
            "DEPENDENT_LAUNCH": config.dependent_launch,
        },
        device,
        **backend_options(config.num_warps, config.dependent_launch),
    )
    new_parts = allocator((config.n_parts, n_tokens, n_experts), torch.float32, device)

    def score(rows: Any, weight: Any) -> Any:
        parts = new_parts()
        launch(parts, rows, weight)
        return parts

    return config.n_parts, score


def _choice(n_tokens: int, n_experts: int, n_parts: int, settings: Any, device: torch.device) -> Plan:
    """Return the function from parts of the logits, where to put their sum, and both biases to ids and weights."""
    top_k, gating, renormalize, n_groups, topk_groups, scale = settings
    n_groups, topk_groups = n_groups or 1, topk_groups or 1
    block_g, block_s = next_power_of_two(n_groups), next_power_of_two(n_experts // n_groups)
    config = route_config(n_tokens, block_g * block_s, launch_target(device))
    launch = PreparedLaunch(
        _ROUTE,
        (-(-n_tokens // config.block_t), 1, 1),
        (n_tokens, float(scale)),
        {
            "N_EXPERTS": n_experts,
            "N_PARTS": n_parts,
            "TOP_K": top_k,
            "SIGMOID": gating == "sigmoid",
            "RENORMALIZE": renormalize,
            "N_GROUPS": n_groups,
            "TOPK_GROUPS": topk_groups,
            "BLOCK_T": config.block_t,
            "BLOCK_G": block_g,
            "BLOCK_S": block_s,
            "BLOCK_K": next_power_of_two(top_k),
            "DEPENDENT_LAUNCH": config.dependent_launch,
        },
        device,
        **backend_options(config.num_warps, config.dependent_launch),
    )
    new_ids = allocator((n_tokens, top_k), torch.int64, device)
    new_weights = allocator((n_tokens, top_k), torch.float32, device)

    def choose(parts: Any, logits: Any, router_bias: Any, correction_bias: Any) -> Any:
        ids, weights = new_ids(), new_weights()
        launch(ids, weights, parts, logits, router_bias, correction_bias)
        return ids, weights

    return choose


def _keywords(settings: Any) -> dict[str, Any]:
    names = ("top_k", "gating", "renormalize", "n_groups", "topk_groups", "routed_scaling_factor")
    return dict(zip(names, settings, strict=True))
