"""How sorting, permutation and combination are carried out: check, choose the backend and the launch, allocate, launch.

All of that but the allocation and the launches depends on shapes, strides, dtypes and devices only. It is decided once
for each such combination and kept as a plan. Nothing waits for the GPU: grids are upper bounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from tk_kernel_core import layout
from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.gemm import backend_options
from tk_kernel_core.launch import Kernel, PlanCache, PreparedLaunch, allocator, launch_target
from tk_kernel_core.layout import row_stride
from tk_moe_dispatch._checks import (
    check_combination,
    check_indices,
    check_permutation,
)
from tk_moe_dispatch._launch import (
    LONGEST_ROW,
    TILE_FIELDS,
    RowConfig,
    max_tiles,
    row_config,
    schedule_config,
)
from tk_moe_dispatch._reference import (
    permute_tokens_torch,
    schedule_torch,
    unpermute_tokens_torch,
)

_COUNT = Kernel("tk_moe_dispatch._kernels", "count_kernel")
_SCHEDULE = Kernel("tk_moe_dispatch._kernels", "schedule_kernel")
_PERMUTE = Kernel("tk_moe_dispatch._kernels", "permute_kernel")
_COMBINE = Kernel("tk_moe_dispatch._kernels", "combine_kernel")

BLOCK_TILES = 128
"""Tiles of no expert that a program writes at a time."""

Plan = Callable[..., Any]
planned = PlanCache[Plan]().plan_for
rows_of = functools.partial(layout.rows_of, longest_row=LONGEST_ROW)


def compute_permutation_indices(indices: Any, num_experts: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sorted_idx, offsets, restore_idx = permutation_plan(indices, num_experts)(indices)
    return sorted_idx, offsets, restore_idx


def permute_tokens(
    hidden: Any, indices: Any, num_experts: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    permuted, offsets, sorted_idx, restore_idx = permute_plan(hidden, indices, num_experts)(hidden, indices)
    return permuted, offsets, sorted_idx, restore_idx


def unpermute_tokens(expert_outputs: Any, weights: Any, restore_idx: Any, num_tokens: Any, top_k: Any) -> torch.Tensor:
    operands = expert_outputs, weights, restore_idx
    result: torch.Tensor = unpermute_plan(*operands, num_tokens, top_k)(*operands)
    return result


def schedule_plan(
    topk_ids: Any,
    expert_map: Any,
    num_experts: int,
    capacity: int | None = None,
    block_m: int | None = None,
    dtype: torch.dtype = torch.int32,
    *,
    padded: bool = False,
) -> Plan:
    """Return the function that sorts slots by expert.

    Args:
        topk_ids: int32 or int64 [..., top_k]. An id that is no expert's counts as absent.
        expert_map: int32 or int64 [all experts], the number here of each expert and -1 for none; or None.
        num_experts: Experts here.
        capacity: Slots that each expert serves, the first in token order; None for all.
        block_m: Rows of the tiles into which the rows of each expert are cut, or None for no tiles.
        dtype: int32 or int64, of what is returned but the tiles.
        padded: Whether the rows of an expert end at a multiple of `block_m`, as kernels want them. `sorted_slots` are
            [max_tiles * block_m] then, and anything where no slot is.

    Returns:
        A function of `topk_ids` and `expert_map`. It returns `sorted_slots`, `offsets` and `positions` as
        `schedule_torch` does, and int32 tiles [max_tiles, TILE_FIELDS], which `schedule_kernel` describes. Where the
        reference serves the call, or no tiles are wanted, there are none.
    """

    def make() -> Plan:
        check_indices("topk_ids", topk_ids, num_experts)
        n_slots, device = topk_ids.numel(), topk_ids.device
        if n_slots == 0 or backend_of("topk_ids", topk_ids) == "reference":

            def by_reference(ids: Any, expert_map: Any) -> Any:
                schedule = schedule_torch(ids, num_experts, expert_map, capacity)
                return (*(tensor.to(dtype) for tensor in schedule), None)

            return by_reference
        config = schedule_config(n_slots, num_experts, launch_target(device))
        n_tiles = 0 if block_m is None else max_tiles(n_slots, num_experts, block_m)
        options = backend_options(config.num_warps, config.dependent_launch)
        grid = (config.n_chunks, 1, 1)
        sizes = (num_experts if expert_map is None else expert_map.shape[0], num_experts)
        n_rows = n_tiles * block_m if padded and block_m is not None else n_slots
        shared = {"BLOCK_E": config.block_e, "CHUNK": config.chunk}
        dependent = {"DEPENDENT_LAUNCH": config.dependent_launch}
        count = PreparedLaunch(_COUNT, grid, (n_slots, *sizes), {**shared, **dependent}, device, **options)
        blocks = {
            "PADDED": padded,
            "BLOCK_ALL": config.block_all,
            "BLOCK_C": config.block_c,
            "BLOCK_J": config.block_j,
            "BLOCK_TILES": BLOCK_TILES,
        }
        scalars = (n_slots, n_tiles, n_slots if capacity is None else min(capacity, n_slots), block_m or 1, *sizes)
        sort = PreparedLaunch(_SCHEDULE, grid, scalars, {**shared, **blocks, **dependent}, device, **options)
        sizes_of_results = n_rows, num_experts + 1, n_slots
        new_sorted, new_offsets, new_positions = (allocator((size,), dtype, device) for size in sizes_of_results)
        new_counts = allocator((config.n_chunks, config.block_e), torch.int32, device)
        new_tiles = allocator((n_tiles, TILE_FIELDS), torch.int32, device)

        def schedule(ids: Any, expert_map: Any) -> Any:
            ids, expert_map = ids.contiguous(), contiguous(expert_map)
            counts = tiles = None
            if not config.block_all:
                counts = new_counts()
                count(counts, ids, expert_map)
            if block_m is not None:
                tiles = new_tiles()
            sorted_slots, offsets, positions = new_sorted(), new_offsets(), new_positions()
            sort(sorted_slots, offsets, positions, ids, counts, tiles, expert_map)
            return sorted_slots, offsets, positions, tiles

        return schedule

    return planned(("schedule", num_experts, capacity, block_m, dtype, padded), (topk_ids, expert_map), make)


def permutation_plan(indices: Any, num_experts: Any) -> Plan:
    """Return the function that sorts slots like these, in int64."""

    def make() -> Plan:
        check_indices("indices", indices, num_experts)
        schedule = schedule_plan(indices, None, num_experts, dtype=torch.int64)
        return lambda indices: schedule(indices, None)[:3]

    return planned(("permutation", num_experts), (indices,), make)


def permute_plan(hidden: Any, indices: Any, num_experts: Any) -> Plan:
    """Return the function that brings tokens like these into the order of their experts."""

    def make() -> Plan:
        check_permutation(hidden, indices, num_experts)
        if hidden.numel() == 0 or indices.numel() == 0 or backend_of("hidden", hidden) == "reference":
            return lambda hidden, indices: permute_tokens_torch(hidden, indices, num_experts)
        schedule = permutation_plan(indices, num_experts)
        order = ordering(rows_of(hidden), indices.shape[-1], num_experts, (indices.numel(),))

        def permute(hidden: Any, indices: Any) -> Any:
            sorted_idx, offsets, restore_idx = schedule(indices)
            return order(rows_of(hidden), restore_idx, offsets), offsets, sorted_idx, restore_idx

        return permute

    return planned(("permute", num_experts), (hidden, indices), make)


def ordering(rows: torch.Tensor, top_k: int, num_experts: int, sorted_shape: tuple[int, ...]) -> Plan:
    """Return the function that brings tokens into the order of their experts.

    Args:
        rows: Tokens [T, H] with neighbouring elements in a row.
        top_k: Slots per token.
        num_experts: Experts here.
        sorted_shape: Of the sorted rows, but for H. Of more rows than T * top_k, those between experts are anything.

    Returns:
        A function of tokens, and of positions and offsets as `schedule_plan` gives them. It returns
        [*sorted_shape, H]: the token of every sorted row, zeros in the rows up to T * top_k behind the last expert.
    """
    (n_tokens, width), stride = rows.shape, row_stride(rows)
    unit = math.gcd(16, width, stride)
    config = row_config(n_tokens, width, rows.element_size(), launch_target(rows.device))
    launch = PreparedLaunch(
        _PERMUTE,
        (config.n_programs, 1, 1),
        (n_tokens, stride // unit, width // unit, num_experts),
        {
            "ALIGNMENT": unit,
            "TOP_K": top_k,
            **_tile(config, top_k),
        },
        rows.device,
        **backend_options(config.num_warps, config.dependent_launch),
    )
    new_rows = allocator((*sorted_shape, width), rows.dtype, rows.device)

    def order(rows: Any, positions: Any, offsets: Any) -> Any:
        out = new_rows()
        launch(out, rows, positions, offsets)
        return out

    return order


def _tile(config: RowConfig, top_k: int) -> dict[str, Any]:
    return {
        # What is on its way at a time.
        "UNROLL": min(top_k, 8),
        "BLOCK_T": config.block_t,
        "BLOCK_H": config.block_h,
        "DEPENDENT_LAUNCH": config.dependent_launch,
    }


def unpermute_plan(expert_outputs: Any, weights: Any, restore_idx: Any, num_tokens: Any, top_k: Any) -> Plan:
    """Return the function that combines outputs like these."""

    def make() -> Plan:
        check_combination(expert_outputs, weights, restore_idx, num_tokens, top_k)
        if expert_outputs.numel() == 0 or backend_of("expert_outputs", expert_outputs) == "reference":
            reference: Plan = unpermute_tokens_torch
            return lambda *tensors: reference(*tensors, num_tokens, top_k)
        width, dtype, device = expert_outputs.shape[1], expert_outputs.dtype, expert_outputs.device
        combine = combination(num_tokens, top_k, width, dtype, device, is_sorted=True)
        return lambda expert_outputs, weights, restore_idx: combine(
            expert_outputs.contiguous(), restore_idx.contiguous(), weights.contiguous()
        )

    return planned(("unpermute", num_tokens, top_k), (expert_outputs, weights, restore_idx), make)


def combination(
    n_tokens: int, top_k: int, width: int, dtype: torch.dtype, device: torch.device, *, is_sorted: bool
) -> Plan:
    """Return the function that adds up the outputs of every token's slots, in their order, in fp32.

    Args:
        n_tokens: Rows of the result.
        top_k: Slots per token.
        width: Elements in a row.
        dtype: Element type of the outputs and the result.
        device: Where kernels run.
        is_sorted: Whether the outputs lie in sorted order, rather than in that of slots.

    Returns:
        A function of contiguous tensors: outputs [n_tokens * top_k, width]; positions, int32 or int64
        [n_tokens * top_k], the sorted row of each slot, one below 0 counting as zeros; weights [n_tokens, top_k] in
        floating point; and what is to be added, [n_tokens, width]. All but the first may be None, as long as
        `is_sorted` does not need positions, and are so in every call or in none.
    """
    unit = math.gcd(16, width)
    config = row_config(n_tokens, width, dtype.itemsize, launch_target(device))
    launch = PreparedLaunch(
        _COMBINE,
        (config.n_programs, 1, 1),
        (n_tokens, width // unit),
        {
            "ALIGNMENT": unit,
            "TOP_K": top_k,
            "SORTED": is_sorted,
            **_tile(config, top_k),
        },
        device,
        **backend_options(config.num_warps, config.dependent_launch),
    )
    new_y = allocator((n_tokens, width), dtype, device)

    def combine(outputs: Any, *rest: Any) -> Any:
        y = new_y()
        launch(y, outputs, *rest)
        return y

    return combine


def contiguous(tensor: Any) -> Any:
    """Bring an optional tensor to contiguous memory."""
    return None if tensor is None else tensor.contiguous()
