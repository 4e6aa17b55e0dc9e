"""How tokens go through experts of 8 and 4 bits: check, choose the backend and the launches, allocate, launch."""

from __future__ import annotations

from typing import Any

import torch

from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.gemm import backend_options, prepare_arrangement
from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.launch import Kernel, PreparedLaunch, allocator, launch_target
from tk_kernel_core.layout import row_stride
from tk_moe_dispatch._expert_plans import shared_plan
from tk_moe_dispatch._gemm_plans import PLAIN, Activation
from tk_moe_dispatch._packed import PackedExperts, bits_of
from tk_moe_dispatch._packed_checks import check_fused_packed_experts
from tk_moe_dispatch._packed_launch import PackedConfig, packed_layer_config
from tk_moe_dispatch._plans import Plan, combination, contiguous, ordering, planned, rows_of, schedule_plan
from tk_moe_dispatch._reference import expert_capacity, fused_experts_torch, gate_and_up

_KERNEL = Kernel("tk_moe_dispatch._packed_kernels", "packed_experts_kernel")
_STEP = 128


def fused_packed_experts(*arguments: Any) -> torch.Tensor:
    result: torch.Tensor = fused_packed_experts_plan(*arguments)(*arguments[:14])
    return result


def fused_packed_experts_plan(
    x: Any,
    w13_codes: Any,
    w13_scales: Any,
    w13_zeros: Any,
    w2_codes: Any,
    w2_scales: Any,
    w2_zeros: Any,
    topk_weights: Any,
    topk_ids: Any,
    expert_map: Any,
    w13_bias: Any,
    w2_bias: Any,
    shared_w13: Any,
    shared_w2: Any,
    ffn_size: Any,
    w13_group_size: Any,
    w2_group_size: Any,
    layout: Any,
    alpha: Any,
    beta: Any,
    limit: Any,
    capacity_factor: Any,
) -> Plan:
    """Return the function that applies the experts that tokens like these are routed to, and those all share."""
    packed = w13_codes, w13_scales, w13_zeros, w2_codes, w2_scales, w2_zeros
    routed = topk_weights, topk_ids, expert_map, w13_bias, w2_bias, shared_w13, shared_w2
    operands = x, *packed, *routed
    settings = ffn_size, w13_group_size, w2_group_size, layout, alpha, beta, limit, capacity_factor

    def make() -> Plan:
        check_fused_packed_experts(*operands, *settings)
        if topk_ids.numel() == 0 or backend_of("x", x) == "reference":
            reference: Plan = _by_reference
            return lambda *tensors: reference(*tensors, *settings)
        activation = float(alpha), float(beta), float("inf") if limit is None else float(limit)
        rows, shape, target, device = rows_of(x), x.shape, launch_target(x.device), x.device
        (n_tokens, width), top_k, n_experts = rows.shape, topk_ids.shape[-1], w13_codes.shape[0]
        n_slots = n_tokens * top_k
        capacity = expert_capacity(n_slots, w13_codes if expert_map is None else expert_map, capacity_factor)
        bits = bits_of(w13_codes), bits_of(w2_codes)
        group_sizes, has_zeros = (w13_group_size, w2_group_size), (w13_zeros is not None, w2_zeros is not None)
        sizes = n_tokens, top_k, n_experts, width, ffn_size
        config = packed_layer_config(*sizes, bits, group_sizes, has_zeros, capacity is not None, target)
        n_all = n_experts if expert_map is None else expert_map.shape[0]
        counts = top_k, n_all, n_experts
        is_sorted, gathers = not config.streams, config.gathers
        gate_bias = None if w13_bias is None else gate_and_up(w13_bias, layout, axis=-1)[0]
        to_h = _launch(
            config.up, w13_codes, w13_group_size, (ffn_size, width), counts, gate_bias, activation, True, gathers
        )
        to_slots = _launch(config.down, w2_codes, w2_group_size, (width, ffn_size), counts, w2_bias)
        n_counters = config.down.n_programs if config.down.split > 1 else 0
        n_partial = n_counters * config.down.split * config.down.block_n * config.down.block_m
        new_counter, new_partial = (
            allocator((size,), dtype, device) for size, dtype in ((n_counters, torch.int32), (n_partial, torch.float32))
        )
        arrange = PreparedLaunch.of(prepare_arrangement(n_tokens, width, row_stride(rows), n_counters, target), device)
        new_arranged = allocator((n_tokens, -(-width // _STEP) * _STEP), x.dtype, device)
        new_h = allocator((n_slots, -(-ffn_size // _STEP) * _STEP), x.dtype, device)
        new_positions = allocator((n_slots,), torch.int32, device)
        new_rows = allocator((n_slots, width), x.dtype, device)
        schedule = schedule_plan(topk_ids, expert_map, n_experts, capacity, config.up.block_m) if is_sorted else None
        order = ordering(new_arranged(), top_k, n_experts, (n_slots,)) if is_sorted and not gathers else None
        combine = combination(n_tokens, top_k, width, x.dtype, device, is_sorted=is_sorted)
        apply_shared = None if shared_w13 is None else shared_plan(rows, shared_w13, shared_w2, layout, activation)

        def apply(x: Any, *tensors: Any) -> Any:
            w13, w2, (weights, ids, expert_map) = tensors[:3], tensors[3:6], tensors[6:9]
            w13_bias, w2_bias, shared_w13, shared_w2 = tensors[9:]
            x, expert_map, weights = rows_of(x), contiguous(expert_map), weights.contiguous()
            shared = None if apply_shared is None else apply_shared(x, shared_w13, shared_w2)
            if schedule is None:
                slots, tiles, positions = ids.contiguous(), None, new_positions()
                offsets, marks = None, positions
            else:
                slots, offsets, positions, tiles = schedule(ids, expert_map)
                marks = None
            counter = partial = None
            if n_counters:
                counter, partial = new_counter(), new_partial()
            arranged, h, out = new_arranged(), new_h(), new_rows()
            arrange(arranged, None, counter, x)
            if order is not None:
                arranged = order(arranged, positions, offsets)
            biases = (None, None) if w13_bias is None else gate_and_up(w13_bias, layout, axis=-1)
            to_h(h, arranged, *w13, slots, tiles, expert_map, marks, *biases)
            to_slots(out, h, *w2, slots, tiles, expert_map, None, w2_bias, None, partial, counter)
            return combine(out, positions, weights, shared).view(shape)

        return apply

    return planned(("fused_packed_experts", *settings), operands, make)


def _launch(
    config: PackedConfig,
    codes: torch.Tensor,
    group_size: int,
    sizes: tuple[int, int],
    counts: tuple[int, int, int],
    bias: torch.Tensor | None,
    activation: Activation = PLAIN,
    gated: bool = False,
    gathers: bool = False,
) -> PreparedLaunch:
    """Prepare a product with the codes of experts.

    Args:
        config: How to launch it.
        codes: As in `PackedExperts`.
        group_size: Likewise.
        sizes: Features of a row of the result, and of x.
        counts: top_k, ids of experts, and experts here.
        bias: [experts, features] of any strides, or None.
        activation: Of SwiGLU.
        gated: Whether that follows; then what is returned has whole steps of columns.
        gathers: Whether rows of x are tokens.
    """
    (n, k), target = sizes, launch_target(codes.device)
    width = -(-n // _STEP) * _STEP if gated else n
    return PreparedLaunch(
        _KERNEL,
        (config.n_programs, config.split, 1),
        (n, width, codes.shape[1], *counts, *((0, 0) if bias is None else bias.stride()), *activation),
        {
            "BITS": bits_of(codes),
            "GROUP_SIZE": group_size,
            "IN_FEATURES": k,
            "GATED": gated,
            "BLOCK_M": config.block_m,
            "WARPS": config.num_warps,
            "UNROLL": config.unroll,
            "STAGES": config.stages,
            "GROUP_M": config.group_m,
            "SCALE_WEIGHT": config.scale_weight,
            "GATHER": gathers,
            "SPLIT": config.split,
            # The interpreter knows no machine instructions.
            "PTX": target.backend == "cuda" and not interpreting(),
            "DESCRIPTORS": config.descriptors,
            "DEPENDENT_LAUNCH": config.dependent_launch,
        },
        codes.device,
        {"x": (config.block_m, _STEP)} if config.descriptors else {},
        **backend_options(config.num_warps, config.dependent_launch, config.most_registers),
    )


def _by_reference(
    x: Any,
    w13_codes: Any,
    w13_scales: Any,
    w13_zeros: Any,
    w2_codes: Any,
    w2_scales: Any,
    w2_zeros: Any,
    topk_weights: Any,
    topk_ids: Any,
    expert_map: Any,
    w13_bias: Any,
    w2_bias: Any,
    shared_w13: Any,
    shared_w2: Any,
    ffn_size: int,
    w13_group_size: int,
    w2_group_size: int,
    layout: Any,
    alpha: float,
    beta: float,
    limit: float | None,
    capacity_factor: float | None,
) -> torch.Tensor:
    width = x.shape[-1]
    w13 = PackedExperts(w13_codes, w13_scales, w13_zeros, w13_group_size, 2 * ffn_size, width, layout)
    w2 = PackedExperts(w2_codes, w2_scales, w2_zeros, w2_group_size, width, ffn_size, None)
    y = fused_experts_torch(
        x.float(),
        w13.dequantize(),
        w2.dequantize(),
        topk_weights,
        topk_ids,
        expert_map=expert_map,
        w13_bias=w13_bias,
        w2_bias=w2_bias,
        shared_w13=None if shared_w13 is None else shared_w13.float(),
        shared_w2=None if shared_w2 is None else shared_w2.float(),
        layout=layout,
        alpha=alpha,
        beta=beta,
        limit=limit,
        capacity_factor=capacity_factor,
    )
    return y.to(x.dtype)
