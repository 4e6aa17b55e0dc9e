"""How tokens go through experts: check, choose the backend and the launches, allocate, launch.

Weights of gate and up are two tensors [experts, F, H] of the same strides, which may be views of one.
"""

from __future__ import annotations

from typing import Any

import torch

from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.launch import PreparedLaunch, allocator, launch_target
from tk_moe_dispatch._checks import check_fused_experts, check_layer
from tk_moe_dispatch._gemm_launch import (
    SortedExperts,
    StreamedExperts,
    experts_config,
)
from tk_moe_dispatch._gemm_plans import (
    PLAIN,
    TURN,
    Activation,
    fit_descriptors,
    gemm_launch,
    stream_down_launch,
    stream_up_launch,
)
from tk_moe_dispatch._launch import max_tiles
from tk_moe_dispatch._plans import (
    Plan,
    combination,
    contiguous,
    ordering,
    planned,
    rows_of,
    schedule_plan,
)
from tk_moe_dispatch._reference import (
    expert_capacity,
    fused_experts_torch,
    fused_moe_forward_torch,
    gate_and_up,
)
from tk_moe_dispatch._routing_plans import moe_router_plan


def fused_experts(*arguments: Any) -> torch.Tensor:
    result: torch.Tensor = fused_experts_plan(*arguments)(*arguments[:10])
    return result


def fused_moe_forward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    output, indices, weights = fused_moe_forward_plan(*arguments)(*arguments[:5])
    return output, indices, weights


def fused_experts_plan(
    x: Any,
    w13: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    expert_map: Any,
    w13_bias: Any,
    w2_bias: Any,
    shared_w13: Any,
    shared_w2: Any,
    layout: Any,
    alpha: Any,
    beta: Any,
    limit: Any,
    capacity_factor: Any,
) -> Plan:
    """Return the function that applies the experts that tokens like these are routed to, and those all share."""
    operands = x, w13, w2, topk_weights, topk_ids, expert_map, w13_bias, w2_bias, shared_w13, shared_w2
    settings = layout, alpha, beta, limit, capacity_factor

    def make() -> Plan:
        check_fused_experts(*operands, *settings)
        if topk_ids.numel() == 0 or w13.numel() == 0 or backend_of("x", x) == "reference":
            names = ("expert_map", "w13_bias", "w2_bias", "shared_w13", "shared_w2")
            keywords = {"layout": layout, "alpha": alpha, "beta": beta, "limit": limit}
            keywords["capacity_factor"] = capacity_factor

            def by_reference(x: Any, w13: Any, w2: Any, weights: Any, ids: Any, *rest: Any) -> Any:
                optional: dict[str, Any] = dict(zip(names, rest, strict=True))
                return fused_experts_torch(x, w13, w2, weights, ids, **optional, **keywords)

            return by_reference
        activation = float(alpha), float(beta), float("inf") if limit is None else float(limit)
        rows, shape = rows_of(x), x.shape
        capacity = expert_capacity(topk_ids.numel(), w13 if expert_map is None else expert_map, capacity_factor)
        gate_bias, up_bias = (None, None) if w13_bias is None else gate_and_up(w13_bias, layout, axis=-1)
        experts = (*gate_and_up(w13, layout), w2, topk_ids, expert_map)
        apply = experts_plan(rows, *experts, gate_bias, up_bias, w2_bias, activation, capacity, joined=True)
        apply_shared = None if shared_w13 is None else shared_plan(rows, shared_w13, shared_w2, layout, activation)

        def apply_all(x: Any, w13: Any, w2: Any, weights: Any, ids: Any, expert_map: Any, *rest: Any) -> Any:
            w13_bias, w2_bias, shared_w13, shared_w2 = rest
            x = rows_of(x)
            shared = None if apply_shared is None else apply_shared(x, shared_w13, shared_w2)
            biases = (None, None) if w13_bias is None else gate_and_up(w13_bias, layout, axis=-1)
            experts = (*gate_and_up(w13, layout), w2)
            return apply(x, *experts, weights, ids, expert_map, *biases, w2_bias, shared).view(shape)

        return apply_all

    return planned(("fused_experts", *settings), operands, make)


def shared_plan(rows: Any, w13: Any, w2: Any, layout: Any, activation: Activation) -> Plan:
    """Return the function of rows, w13 and w2 that applies an expert for all tokens, of 16 bits."""
    n_tokens, device = rows.shape[0], rows.device
    new_ids = allocator((n_tokens, 1), torch.int64, device)
    new_weights = allocator((n_tokens, 1), torch.float32, device)
    # One more expert, to which every token goes.
    gate, up = gate_and_up(w13.unsqueeze(0), layout)
    apply = experts_plan(
        rows, gate, up, w2.unsqueeze(0), new_ids(), None, None, None, None, activation, None, joined=True
    )

    def apply_shared(x: Any, w13: Any, w2: Any) -> Any:
        expert = (*gate_and_up(w13.unsqueeze(0), layout), w2.unsqueeze(0))
        return apply(x, *expert, new_weights().fill_(1.0), new_ids().zero_(), None, None, None, None, None)

    return apply_shared


def fused_moe_forward_plan(
    hidden: Any,
    router_weight: Any,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    num_experts: Any,
    top_k: Any,
    gating: Any,
) -> Plan:
    """Return the function that routes tokens like these and takes them through their experts."""
    operands, settings = (hidden, router_weight, w_gate, w_up, w_down), (num_experts, top_k, gating)

    def make() -> Plan:
        check_layer(*operands, *settings)
        if hidden.numel() == 0 or w_gate.numel() == 0 or backend_of("hidden", hidden) == "reference":
            reference: Plan = fused_moe_forward_torch
            return lambda *tensors: reference(*tensors, *settings)
        routing = top_k, gating, False, None, None, 1.0
        route = moe_router_plan(hidden, router_weight, None, None, *routing, wants_logits=False)
        shape = hidden.shape
        ids = torch.empty((*shape[:-1], top_k), dtype=torch.int64, device=hidden.device)
        activation = PLAIN
        experts = (w_gate, w_up, w_down)
        apply = experts_plan(rows_of(hidden), *experts, ids, None, None, None, None, activation, None)

        def forward(hidden: Any, router_weight: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
            ids, weights, _ = route(hidden, router_weight, None, None)
            experts = (w_gate, w_up, w_down)
            y = apply(rows_of(hidden), *experts, weights, ids, None, None, None, None, None)
            return y.view(shape), ids, weights

        return forward

    return planned(("fused_moe_forward", *settings), operands, make)


def experts_plan(
    x: Any,
    gate: Any,
    up: Any,
    down: Any,
    topk_ids: Any,
    expert_map: Any,
    gate_bias: Any,
    up_bias: Any,
    down_bias: Any,
    activation: Activation,
    capacity: int | None,
    *,
    joined: bool = False,
) -> Plan:
    """Return the function that applies to every token its experts, and adds up what they return.

    Args:
        x: [T, H] with neighbouring elements in a row.
        gate: [experts, F, H].
        up: [experts, F, H].
        down: [experts, H, F].
        topk_ids: int32 or int64 [..., top_k].
        expert_map: As for `schedule_plan`.
        gate_bias: [experts, F], or None.
        up_bias: [experts, F] with the strides of `gate_bias`, or None.
        down_bias: [experts, H], or None.
        activation: Of SwiGLU.
        capacity: As for `schedule_plan`.
        joined: Whether gate and up are always parts of one tensor.

    Returns:
        A function of `x`, `gate`, `up`, `down`, routing weights, `topk_ids`, `expert_map`, the three biases, and what
        is to be added, [T, H] or None.
    """
    top_k, n_slots, n_tokens, device = topk_ids.shape[-1], topk_ids.numel(), x.shape[0], x.device
    n_experts, ffn_size, width = gate.shape
    # Else both are copied; and the way from gate to up is a stride, too.
    joined = joined and gate.stride(-1) == 1 and ffn_size % TURN == 0 and take_descriptors(join(gate, up))
    gate, up = in_rows(gate, up)
    (down,) = in_rows(down)
    descriptors = take_descriptors(gate, up, down)
    sizes, biased = (n_tokens, top_k, n_experts, width, ffn_size), gate_bias is not None
    config = experts_config(*sizes, descriptors, joined, biased, launch_target(device))
    if isinstance(config, StreamedExperts):
        new_h = allocator((n_slots, ffn_size), x.dtype, device)
        n_all = n_experts if expert_map is None else expert_map.shape[0]
        to_h = stream_up_launch(config.up, x, top_k, n_all, gate, gate_bias, activation)
        to_y = stream_down_launch(config.down, n_tokens, top_k, n_all, down, down_bias)
        new_y = allocator((n_tokens, width), x.dtype, device)
        is_bounded = capacity is not None and n_tokens > 1
        bound = schedule_plan(topk_ids, expert_map, n_experts, capacity) if is_bounded else None

        def stream(x: Any, gate: Any, up: Any, down: Any, weights: Any, ids: Any, expert_map: Any, *rest: Any) -> Any:
            gate_bias, up_bias, down_bias, shared = rest
            (gate, up), (down,) = in_rows(gate, up), in_rows(down)
            ids, weights, expert_map = ids.contiguous(), weights.contiguous(), contiguous(expert_map)
            if bound is not None:
                positions = bound(ids, expert_map)[2]
                ids = torch.where(positions.view_as(ids) < 0, -1, ids)
            h, y = new_h(), new_y()
            to_h(h, x, ids, gate, up, expert_map, gate_bias, up_bias)
            to_y(y, h, ids, weights, down, expert_map, down_bias, shared)
            return y

        return stream
    block_m = config.up.block_m
    schedule = schedule_plan(topk_ids, expert_map, n_experts, capacity, block_m, padded=config.padded)
    sorted_shape = (max_tiles(n_slots, n_experts, block_m), block_m) if config.padded else (n_slots,)
    order = None if config.gathers else ordering(x, top_k, n_experts, sorted_shape)
    to_h, to_slots = products(
        config, x, sorted_shape, top_k, gate, up, down, gate_bias, down_bias, activation, scatters=True
    )
    new_h = allocator((*sorted_shape, ffn_size), x.dtype, device)
    new_rows = allocator((n_slots, width), x.dtype, device)
    combine = combination(n_tokens, top_k, width, x.dtype, device, is_sorted=False)

    def sort(x: Any, gate: Any, up: Any, down: Any, weights: Any, ids: Any, expert_map: Any, *rest: Any) -> Any:
        gate_bias, up_bias, down_bias, shared = rest
        (gate, up), (down,) = in_rows(gate, up), in_rows(down)
        if config.up.joined:
            gate, down = aligned(join(gate, up), down)
            up = gate
        elif descriptors:
            gate, up, down = aligned(gate, up, down)
        sorted_slots, offsets, positions, tiles = schedule(ids, expert_map)
        if order is not None:
            x = order(x, positions, offsets)
        h, rows = new_h(), new_rows()
        to_h(h, x, x, tiles, sorted_slots, gate, up, None, gate_bias, up_bias)
        to_slots(rows, h, h, tiles, sorted_slots, down, down, weights.contiguous(), down_bias)
        return combine(rows, positions) if shared is None else combine(rows, positions, None, shared)

    return sort


def products(
    config: SortedExperts,
    x: torch.Tensor,
    sorted_shape: tuple[int, ...],
    top_k: int,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    gate_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: Activation,
    *,
    scatters: bool,
) -> tuple[PreparedLaunch, PreparedLaunch]:
    """Return the launches of the products with gate and up, and with the down projection."""
    ffn_size, width = gate.shape[1:]
    rows = x if config.gathers else torch.empty((*sorted_shape, width), dtype=x.dtype, device=x.device)
    h = torch.empty((*sorted_shape, ffn_size), dtype=x.dtype, device=x.device)
    to_h = gemm_launch(
        config.up,
        rows,
        join(gate, up) if config.up.joined else gate,
        gate_bias,
        gated=True,
        gathers=config.gathers,
        top_k=top_k,
        activation=activation,
    )
    return to_h, gemm_launch(config.down, h, down, down_bias, scatters=scatters)


def in_rows(*weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Bring weights to neighbouring elements in each row, and all to the same strides."""
    if len({weight.stride() for weight in weights}) > 1 or weights[0].stride(-1) != 1:
        return tuple(weight.contiguous() for weight in weights)
    return weights


def join(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return gate and up [experts, N, K], parts of one tensor, as a view of it: [experts, N / TURN, 2, TURN, K]."""
    distance = up.storage_offset() - gate.storage_offset()
    (n_experts, n, k), (stride, stride_n, stride_k) = gate.shape, gate.stride()
    strides = stride, TURN * stride_n, distance, stride_n, stride_k
    return gate.as_strided((n_experts, n // TURN, 2, TURN, k), strides)


def take_descriptors(*tensors: torch.Tensor) -> bool:
    """Whether descriptors reach tensors, if only they begin at a multiple of 16 bytes."""
    like = (torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device="meta") for part in tensors)
    return launch_target(tensors[0].device).is_hopper_or_later and fit_descriptors(*like)


def aligned(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Bring tensors to multiples of 16 bytes, with their strides, which launches have been prepared for."""
    if any(tensor.data_ptr() % 16 for tensor in tensors):
        return tuple(
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
            for tensor in tensors
        )
    return tensors
