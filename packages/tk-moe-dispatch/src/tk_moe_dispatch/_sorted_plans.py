"""How rows that are sorted by expert already go through the experts: the steps of an MoE layer one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.gemm import backend_options
from tk_kernel_core.launch import Kernel, PreparedLaunch, allocator, launch_target
from tk_kernel_core.layout import next_power_of_two
from tk_moe_dispatch._checks import check_ffn, check_fused_ffn, check_grouped_gemm
from tk_moe_dispatch._expert_plans import aligned, in_rows, products, take_descriptors
from tk_moe_dispatch._gemm_launch import SortedExperts, gemm_config, rows_per_tile
from tk_moe_dispatch._gemm_plans import PLAIN, gemm_launch
from tk_moe_dispatch._launch import TILE_FIELDS, max_tiles
from tk_moe_dispatch._plans import BLOCK_TILES, Plan, combination, planned
from tk_moe_dispatch._reference import expert_ffn_torch, fused_expert_ffn_torch, grouped_gemm_torch

_TILES = Kernel("tk_moe_dispatch._kernels", "tiles_kernel")


def grouped_gemm(tokens: Any, weights: Any, expert_offsets: Any, num_experts: Any) -> torch.Tensor:
    operands = tokens, weights, expert_offsets
    result: torch.Tensor = grouped_gemm_plan(*operands, num_experts)(*operands)
    return result


def expert_ffn(
    permuted: Any, w_gate: Any, w_up: Any, w_down: Any, expert_offsets: Any, num_experts: Any
) -> torch.Tensor:
    operands = permuted, w_gate, w_up, w_down, expert_offsets
    result: torch.Tensor = expert_ffn_plan(*operands, num_experts)(*operands)
    return result


def fused_expert_ffn(
    permuted: Any,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    expert_offsets: Any,
    weights: Any,
    sorted_idx: Any,
    num_experts: Any,
    num_tokens: Any,
    top_k: Any,
) -> torch.Tensor:
    operands = permuted, w_gate, w_up, w_down, expert_offsets, weights, sorted_idx
    result: torch.Tensor = fused_expert_ffn_plan(*operands, num_experts, num_tokens, top_k)(*operands)
    return result


def grouped_gemm_plan(tokens: Any, weights: Any, expert_offsets: Any, num_experts: Any) -> Plan:
    """Return the function that multiplies sorted rows like these by their experts' weights."""

    def make() -> Plan:
        check_grouped_gemm(tokens, weights, expert_offsets, num_experts)
        if tokens.numel() == 0 or weights.numel() == 0 or backend_of("tokens", tokens) == "reference":
            return lambda tokens, weights, offsets: grouped_gemm_torch(tokens, weights, offsets, num_experts)
        (n_rows, n), target = (tokens.shape[0], weights.shape[1]), launch_target(tokens.device)
        block_m = rows_per_tile(n_rows, num_experts, n, False, target)
        (weight,), rows = in_rows(weights), tokens.contiguous()
        descriptors = take_descriptors(rows, weight)
        config = gemm_config(block_m, n_rows, num_experts, n, False, descriptors, False, False, target)
        multiply_rows = gemm_launch(config, rows, weight)
        tiles_of = tiles_plan(n_rows, num_experts, block_m, expert_offsets)

        def multiply(tokens: Any, weights: Any, offsets: Any) -> Any:
            (weight,), tokens = in_rows(weights), tokens.contiguous()
            if descriptors:
                tokens, weight = aligned(tokens, weight)
            # Rows of no expert are zeros.
            out = torch.zeros((n_rows, n), dtype=tokens.dtype, device=tokens.device)
            tiles = tiles_of(offsets)
            multiply_rows(out, tokens, tokens, tiles, tiles, weight, weight)
            return out

        return multiply

    return planned(("grouped_gemm", num_experts), (tokens, weights, expert_offsets), make)


def expert_ffn_plan(permuted: Any, w_gate: Any, w_up: Any, w_down: Any, expert_offsets: Any, num_experts: Any) -> Plan:
    """Return the function that applies experts to sorted rows like these."""
    operands = permuted, w_gate, w_up, w_down, expert_offsets

    def make() -> Plan:
        check_ffn(*operands, num_experts)
        if permuted.numel() == 0 or w_gate.numel() == 0 or backend_of("permuted", permuted) == "reference":
            reference: Plan = expert_ffn_torch
            return lambda *tensors: reference(*tensors, num_experts)
        apply = _sorted_rows_plan(*operands, num_experts, top_k=1, scatters=False)
        # The slots are not looked at.
        return lambda permuted, gate, up, down, offsets: apply(permuted, gate, up, down, offsets, None, None)

    return planned(("expert_ffn", num_experts), operands, make)


def fused_expert_ffn_plan(
    permuted: Any,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    expert_offsets: Any,
    weights: Any,
    sorted_idx: Any,
    num_experts: Any,
    num_tokens: Any,
    top_k: Any,
) -> Plan:
    """Return the function that applies experts to sorted rows like these, and combines what they return."""
    experts = permuted, w_gate, w_up, w_down, expert_offsets

    def make() -> Plan:
        check_fused_ffn(*experts, weights, sorted_idx, num_experts, num_tokens, top_k)
        if permuted.numel() == 0 or w_gate.numel() == 0 or backend_of("permuted", permuted) == "reference":
            reference: Plan = fused_expert_ffn_torch
            return lambda *tensors: reference(*tensors[:5], num_experts, *tensors[5:], num_tokens, top_k)
        apply = _sorted_rows_plan(*experts, num_experts, top_k=top_k, scatters=True)
        combine = combination(num_tokens, top_k, permuted.shape[1], permuted.dtype, permuted.device, is_sorted=False)

        def apply_and_combine(*tensors: Any) -> Any:
            *experts, weights, sorted_idx = tensors
            return combine(apply(*experts, weights.contiguous(), sorted_idx.to(torch.int32)))

        return apply_and_combine

    form = "fused_expert_ffn", num_experts, num_tokens, top_k
    return planned(form, (*experts, weights, sorted_idx), make)


def _sorted_rows_plan(
    permuted: Any,
    gate: Any,
    up: Any,
    down: Any,
    offsets: Any,
    num_experts: int,
    *,
    top_k: int,
    scatters: bool,
) -> Plan:
    """Return the function from sorted rows, weights, offsets, routing and slots to rows, sorted or in order of slots.

    Rows of no expert are zeros.
    """
    n_rows, width = permuted.shape
    target, ffn_size = launch_target(permuted.device), gate.shape[1]
    gate, up = in_rows(gate, up)
    (down,) = in_rows(down)
    descriptors = take_descriptors(permuted.contiguous(), gate, up, down)
    block_m = rows_per_tile(n_rows, num_experts, ffn_size, False, target)
    config = SortedExperts(
        False,
        False,
        gemm_config(block_m, n_rows, num_experts, ffn_size, True, descriptors, False, False, target),
        gemm_config(block_m, n_rows, num_experts, width, False, descriptors, False, False, target),
    )
    activation = PLAIN
    to_h, to_rows = products(
        config, permuted, (n_rows,), top_k, gate, up, down, None, None, activation, scatters=scatters
    )
    tiles_of = tiles_plan(n_rows, num_experts, block_m, offsets)
    new_h = allocator((n_rows, ffn_size), permuted.dtype, permuted.device)

    def apply(x: Any, gate: Any, up: Any, down: Any, offsets: Any, routing: Any, slots: Any) -> Any:
        (gate, up), (down,), x = in_rows(gate, up), in_rows(down), x.contiguous()
        if descriptors:
            x, gate, up, down = aligned(x, gate, up, down)
        tiles, h = tiles_of(offsets), new_h()
        slots = tiles if slots is None else slots
        out = torch.zeros((n_rows, width), dtype=x.dtype, device=x.device)
        to_h(h, x, x, tiles, slots, gate, up)
        to_rows(out, h, h, tiles, slots, down, down, routing)
        return out

    return apply


def tiles_plan(n_rows: int, num_experts: int, block_m: int, offsets: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    """Return the function from offsets to tiles."""
    target, device = launch_target(offsets.device), offsets.device
    n_tiles = max_tiles(n_rows, num_experts, block_m)
    block_e = max(16, next_power_of_two(num_experts))
    launch = PreparedLaunch(
        _TILES,
        (max(1, min(16, n_tiles // BLOCK_TILES)), 1, 1),
        (n_rows, n_tiles, block_m, num_experts),
        {
            "BLOCK_E": block_e,
            "BLOCK_TILES": BLOCK_TILES,
            "DEPENDENT_LAUNCH": target.is_hopper_or_later,
        },
        device,
        **backend_options(target.warps(min(512, max(128, block_e))), target.is_hopper_or_later),
    )
    new_tiles = allocator((n_tiles, TILE_FIELDS), torch.int32, device)

    def tiles_of(offsets: Any) -> Any:
        tiles = new_tiles()
        launch(tiles, offsets.contiguous())
        return tiles

    return tiles_of
