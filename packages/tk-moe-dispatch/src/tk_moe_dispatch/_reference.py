"""The same mathematics in PyTorch: the CPU path without Triton, and the ground truth of the tests.

Everything is computed in fp32, or in fp64 where the input is fp64, and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, NamedTuple

import torch

from tk_moe_dispatch._checks import (
    FLOATS,
    check_combination,
    check_ffn,
    check_fused_experts,
    check_fused_ffn,
    check_grouped_gemm,
    check_indices,
    check_layer,
    check_logits,
    check_permutation,
    check_scoring,
)

Gating = Literal["softmax", "sigmoid"]
GatedLayout = Literal["concat", "interleaved"]


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        top_k_indices: int64 [..., top_k], each row's experts, the best one first.
        top_k_weights: float32 [..., top_k], what their outputs are multiplied by.
        router_logits: float32 [..., num_experts].
    """

    top_k_indices: torch.Tensor
    top_k_weights: torch.Tensor
    router_logits: torch.Tensor


class Schedule(NamedTuple):
    """The (token, choice) pairs, called slots and numbered `token * top_k + choice`, in the order of their experts.

    Attributes:
        sorted_slots: [T * top_k], the slot in each sorted row; -1 in the rows beyond those of the last expert.
        offsets: [num_experts + 1], the first sorted row of each expert, and behind the last one's last.
        positions: [T * top_k], the sorted row of each slot; -1 for one that no expert here serves.
    """

    sorted_slots: torch.Tensor
    offsets: torch.Tensor
    positions: torch.Tensor


def route_topk_torch(
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
    """Choose experts by PyTorch operations; arguments and results are those of `route_topk`."""
    settings = top_k, gating, renormalize, n_groups, topk_groups, routed_scaling_factor
    check_logits(logits, correction_bias, *settings, dtypes=FLOATS)
    logits = _finite(logits.to(_compute_dtype(logits)))
    scores = logits.softmax(-1) if gating == "softmax" else logits.sigmoid()
    # Scores rise with the logits, but round more of them to the same number.
    is_limited = n_groups is not None and n_groups > 1
    choice = logits if correction_bias is None and not is_limited else scores
    if correction_bias is not None:
        choice = _finite(choice + correction_bias.to(choice.dtype))
    if n_groups is not None and is_limited:
        size = logits.shape[-1] // n_groups
        group_scores = choice.unflatten(-1, (n_groups, size)).topk(min(2, size)).values.sum(-1)
        groups = _largest_first(_finite(group_scores), topk_groups)
        is_allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter(-1, groups, True)
        choice = choice.masked_fill(~is_allowed.repeat_interleave(size, -1), -math.inf)
    indices = _largest_first(choice, top_k).contiguous()
    if renormalize:
        chosen = logits.gather(-1, indices)
        # What score / sum(scores) is without rounding: no denominator vanishes.
        weights = (chosen if gating == "softmax" else torch.nn.functional.logsigmoid(chosen)).softmax(-1)
    else:
        weights = scores.gather(-1, indices)
    return indices, weights * routed_scaling_factor


def moe_router_torch(
    hidden: torch.Tensor,
    router_weight: torch.Tensor,
    top_k: int,
    gating: Gating = "softmax",
    router_bias: torch.Tensor | None = None,
    **routing: Any,
) -> Routing:
    """Score and choose experts by PyTorch operations; arguments and results are those of `moe_router`."""
    check_scoring(hidden, router_weight, router_bias, dtypes=FLOATS)
    dtype = _compute_dtype(hidden)
    with no_autocast(hidden.device.type):
        logits = _rows(hidden).to(dtype) @ router_weight.to(dtype).T
    logits = logits.reshape(*hidden.shape[:-1], router_weight.shape[0])
    if router_bias is not None:
        logits = logits + router_bias.to(dtype)
    return Routing(*route_topk_torch(logits, top_k, gating, **routing), logits)


def schedule_torch(
    topk_ids: torch.Tensor,
    num_experts: int,
    expert_map: torch.Tensor | None = None,
    capacity: int | None = None,
) -> Schedule:
    """Sort slots by expert, in int64; those of one expert stay in the order of their tokens.

    Args:
        topk_ids: int32 or int64 [T, top_k]. An id that is no expert's counts as absent.
        num_experts: Experts here.
        expert_map: int32 or int64 [all experts], the number here of each expert, and -1 for one that is not; None
            where the ids are those numbers.
        capacity: Slots that each expert serves, the first in token order; None for all.
    """
    flat = local_experts_torch(topk_ids, num_experts, expert_map).reshape(-1)
    # An expert of its own, the last one, for those that are absent.
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add(0, flat, torch.ones_like(flat))
    firsts = counts.cumsum(0) - counts
    order = flat.argsort(stable=True)
    rank = torch.empty_like(flat).scatter(0, order, torch.arange(flat.numel(), device=flat.device)) - firsts[flat]
    kept = counts[:-1] if capacity is None else counts[:-1].clamp(max=capacity)
    offsets = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
    is_served = flat < num_experts
    if capacity is not None:
        is_served &= rank < capacity
    positions = torch.where(is_served, offsets[flat] + rank, -1)
    sorted_slots = torch.full_like(flat, -1)
    served = is_served.nonzero().squeeze(-1)
    sorted_slots[positions[served]] = served
    return Schedule(sorted_slots, offsets, positions)


def local_experts_torch(topk_ids: torch.Tensor, num_experts: int, expert_map: torch.Tensor | None) -> torch.Tensor:
    """Return the number here of each slot's expert, and `num_experts` for those that are absent."""
    ids = topk_ids.long()
    if expert_map is not None:
        is_known = (ids >= 0) & (ids < expert_map.shape[0])
        mapped = torch.nn.functional.pad(expert_map.long(), (0, 1), value=-1)
        ids = mapped[torch.where(is_known, ids, expert_map.shape[0])]
    return torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)


def compute_permutation_indices_torch(
    indices: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sort slots by PyTorch operations; arguments and results are those of `compute_permutation_indices`."""
    check_indices("indices", indices, num_experts)
    sorted_idx, offsets, restore_idx = schedule_torch(indices, num_experts)
    return sorted_idx, offsets, restore_idx


def permute_tokens_torch(
    hidden: torch.Tensor, indices: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gather tokens by PyTorch operations; arguments and results are those of `permute_tokens`."""
    check_permutation(hidden, indices, num_experts, dtypes=FLOATS)
    sorted_idx, offsets, restore_idx = schedule_torch(indices, num_experts)
    return gather_rows_torch(hidden, sorted_idx, indices.shape[-1]), offsets, sorted_idx, restore_idx


def gather_rows_torch(hidden: torch.Tensor, sorted_slots: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the token of each sorted row, zeros where there is none."""
    rows = _rows(hidden)
    return _rows_or_zeros(rows, torch.where(sorted_slots < 0, -1, sorted_slots // top_k))


def unpermute_tokens_torch(
    expert_outputs: torch.Tensor, weights: torch.Tensor, restore_idx: torch.Tensor, num_tokens: int, top_k: int
) -> torch.Tensor:
    """Combine outputs by PyTorch operations; arguments and result are those of `unpermute_tokens`."""
    check_combination(expert_outputs, weights, restore_idx, num_tokens, top_k, dtypes=FLOATS)
    dtype = _compute_dtype(expert_outputs)
    rows = _rows_or_zeros(expert_outputs, restore_idx.reshape(-1)).to(dtype)
    weights = torch.where(restore_idx.reshape(-1) < 0, 0.0, weights.reshape(-1).to(dtype))
    weighted = rows * weights.unsqueeze(-1)
    return weighted.reshape(num_tokens, top_k, rows.shape[-1]).sum(1).to(expert_outputs.dtype)


def grouped_gemm_torch(
    tokens: torch.Tensor, weights: torch.Tensor, expert_offsets: torch.Tensor, num_experts: int
) -> torch.Tensor:
    """Multiply by PyTorch operations, expert by expert; arguments and result are those of `grouped_gemm`."""
    check_grouped_gemm(tokens, weights, expert_offsets, num_experts, dtypes=FLOATS)
    dtype = _compute_dtype(tokens)
    products = tokens.new_zeros(tokens.shape[0], weights.shape[1])
    for expert, rows in _served(expert_offsets, num_experts):
        with no_autocast(tokens.device.type):
            products[rows] = (tokens[rows].to(dtype) @ weights[expert].to(dtype).T).to(tokens.dtype)
    return products


def expert_ffn_torch(
    permuted: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    expert_offsets: torch.Tensor,
    num_experts: int,
) -> torch.Tensor:
    """Apply the experts by PyTorch operations; arguments and result are those of `expert_ffn_triton`."""
    check_ffn(permuted, w_gate, w_up, w_down, expert_offsets, num_experts, dtypes=FLOATS)
    dtype = _compute_dtype(permuted)
    outputs = permuted.new_zeros(permuted.shape[0], w_down.shape[1])
    for expert, rows in _served(expert_offsets, num_experts):
        gate_up = (w_gate[expert].to(dtype), w_up[expert].to(dtype))
        outputs[rows] = _ffn(permuted[rows].to(dtype), *gate_up, w_down[expert].to(dtype)).to(permuted.dtype)
    return outputs


def fused_expert_ffn_torch(
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
    """Apply the experts and combine by PyTorch operations; arguments and result are those of `fused_expert_ffn`."""
    projections, sizes = (w_gate, w_up, w_down), (num_experts, num_tokens, top_k)
    check_fused_ffn(permuted, *projections, expert_offsets, weights, sorted_idx, *sizes, dtypes=FLOATS)
    dtype = _compute_dtype(permuted)
    gate, up, down = (weight.to(dtype) for weight in projections)
    outputs = expert_ffn_torch(permuted.to(dtype), gate, up, down, expert_offsets, num_experts)
    # Rows from the last expert's end on are nobody's.
    is_served = torch.arange(sorted_idx.numel(), device=sorted_idx.device) < expert_offsets[-1]
    restore_idx = torch.full_like(sorted_idx, -1)
    restore_idx[sorted_idx[is_served]] = is_served.nonzero().squeeze(-1).to(sorted_idx.dtype)
    return unpermute_tokens_torch(outputs, weights, restore_idx, num_tokens, top_k).to(permuted.dtype)


def fused_experts_torch(
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
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
    """Apply the experts that tokens are routed to, as `fused_experts` does those that are not packed."""
    operands = x, w13, w2, topk_weights, topk_ids, expert_map, w13_bias, w2_bias, shared_w13, shared_w2
    check_fused_experts(*operands, layout, alpha, beta, limit, capacity_factor, dtypes=FLOATS)
    dtype, top_k = _compute_dtype(x), topk_ids.shape[-1]
    rows, activation = _rows(x).to(dtype), (alpha, beta, limit)
    capacity = expert_capacity(topk_ids.numel(), w13 if expert_map is None else expert_map, capacity_factor)
    sorted_slots, offsets, positions = schedule_torch(topk_ids, w13.shape[0], expert_map, capacity)
    outputs = rows.new_zeros(topk_ids.numel(), w2.shape[1])
    for expert, its_rows in _served(offsets, w13.shape[0]):
        gate, up = gate_and_up(w13[expert].to(dtype), layout)
        biases = (None, None) if w13_bias is None else gate_and_up(w13_bias[expert].to(dtype), layout, axis=0)
        down_bias = None if w2_bias is None else w2_bias[expert].to(dtype)
        tokens = rows[sorted_slots[its_rows] // top_k]
        outputs[its_rows] = _ffn(tokens, gate, up, w2[expert].to(dtype), (*biases, down_bias), activation)
    weights = topk_weights.reshape(rows.shape[0], top_k)
    y = unpermute_tokens_torch(outputs, weights, positions, rows.shape[0], top_k)
    if shared_w13 is not None and shared_w2 is not None:
        gate, up = gate_and_up(shared_w13.to(dtype), layout)
        y = y + _ffn(rows, gate, up, shared_w2.to(dtype), activation=activation)
    return y.to(x.dtype).reshape(x.shape)


def fused_moe_forward_torch(
    hidden_states: torch.Tensor,
    router_weight: torch.Tensor,
    w_gate: torch.Tensor,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    num_experts: int,
    top_k: int,
    gating: Gating = "softmax",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Carry out an MoE layer by PyTorch operations; arguments and results are those of `fused_moe_forward`."""
    check_layer(hidden_states, router_weight, w_gate, w_up, w_down, num_experts, top_k, gating, dtypes=FLOATS)
    indices, weights, _ = moe_router_torch(hidden_states, router_weight, top_k, gating)
    tokens = _rows(hidden_states)
    slots = indices.reshape(tokens.shape[0], top_k)
    permuted, offsets, sorted_idx, _ = permute_tokens_torch(tokens, slots, num_experts)
    experts = (w_gate, w_up, w_down, offsets, num_experts)
    combined = (weights.reshape(slots.shape), sorted_idx, tokens.shape[0], top_k)
    return fused_expert_ffn_torch(permuted, *experts, *combined).reshape(hidden_states.shape), indices, weights


class MoEReference(torch.nn.Module):
    """A mixture-of-experts layer in PyTorch operations, one expert after the other.

    Args:
        hidden_dim: Features of a token.
        ffn_dim: Features inside an expert.
        num_experts: Experts.
        top_k: Experts that a token goes to.
        gating: `softmax` or `sigmoid`, over all experts.
    """

    def __init__(self, hidden_dim: int, ffn_dim: int, num_experts: int, top_k: int, gating: Gating = "softmax") -> None:
        super().__init__()
        self.num_experts, self.top_k, self.gating = num_experts, top_k, gating

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1]))

        self.router_weight = weight(num_experts, hidden_dim)
        self.w_gate = weight(num_experts, ffn_dim, hidden_dim)
        self.w_up = weight(num_experts, ffn_dim, hidden_dim)
        self.w_down = weight(num_experts, hidden_dim, ffn_dim)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        """Return the layer's output and where the tokens went.

        Args:
            x: [..., hidden_dim].
        """
        weights = (self.w_gate, self.w_up, self.w_down)
        output, _, _ = fused_moe_forward_torch(
            x, self.router_weight, *weights, self.num_experts, self.top_k, self.gating
        )
        return output, moe_router_torch(x, self.router_weight, self.top_k, self.gating)


def expert_capacity(n_slots: int, all_experts: torch.Tensor, capacity_factor: float | None) -> int | None:
    """Return how many slots an expert serves at most: its share of all, times the factor, rounded up; None for all."""
    return None if capacity_factor is None else math.ceil(capacity_factor * n_slots / all_experts.shape[0])


def gate_and_up(w13: torch.Tensor, layout: GatedLayout, axis: int = -2) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the gate's and the up projection's rows, or of their biases, which lie along an axis."""
    if layout == "interleaved":
        size = w13.shape[axis] // 2
        gate, up = w13.unflatten(axis, (size, 2)).unbind(axis if axis < 0 else axis + 1)
    else:
        gate, up = w13.chunk(2, axis)
    return gate, up


def no_autocast(device_type: str) -> AbstractContextManager[object]:
    """Keep autocast from rounding the operands of a product to 16 bits."""
    # Which devices have autocast at all torch.compile cannot ask, of PyTorch 2.11.
    return nullcontext() if device_type == "meta" else torch.autocast(device_type, enabled=False)


def _ffn(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
    activation: tuple[float, float, float | None] = (1.0, 0.0, None),
) -> torch.Tensor:
    """Return `(g * sigmoid(alpha * g) * (u + beta)) @ down.T`; `limit` clamps g from above, and u on both sides."""
    (gate_bias, up_bias, down_bias), (alpha, beta, limit) = biases, activation
    with no_autocast(x.device.type):
        g = torch.nn.functional.linear(x, gate, gate_bias)
        u = torch.nn.functional.linear(x, up, up_bias)
        if limit is not None:
            g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return torch.nn.functional.linear(g * torch.sigmoid(alpha * g) * (u + beta), down, down_bias)


def _served(expert_offsets: torch.Tensor, num_experts: int) -> Iterator[tuple[int, slice]]:
    """Yield experts that have rows, with these rows: the weights of others are not touched."""
    bounds = expert_offsets.tolist()
    for expert in range(num_experts):
        if bounds[expert] < bounds[expert + 1]:
            yield expert, slice(bounds[expert], bounds[expert + 1])


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _rows_or_zeros(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if rows.shape[0] == 0:
        return rows.new_zeros(index.numel(), rows.shape[-1])
    return torch.where(index.unsqueeze(-1) < 0, 0.0, rows[index.clamp(min=0)])


def _largest_first(values: torch.Tensor, count: int | None) -> torch.Tensor:
    """Return where the largest values are; of equal ones the first comes first, which torch.topk does not promise."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _finite(values: torch.Tensor) -> torch.Tensor:
    """Make NaN and the infinities the finite numbers closest to what they mean: NaN is never chosen before others."""
    most = torch.finfo(values.dtype).max
    return values.nan_to_num(nan=-most, posinf=most, neginf=-most)


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
