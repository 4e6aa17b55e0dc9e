"""Checks of arguments, of public functions and references alike."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch

from tk_kernel_core.checks import (
    ACTIVATION_DTYPES,
    check_choice,
    check_number,
    check_same_device,
    check_shape,
    check_tensor,
)

FLOATS = (*ACTIVATION_DTYPES, torch.float64)
EXPERT_DTYPES = (torch.float16, torch.bfloat16)
"""Element types of experts' weights, which the matrix units multiply, and of what comes to them."""

INDICES = (torch.int32, torch.int64)

GATINGS = ("softmax", "sigmoid")
LAYOUTS = ("concat", "interleaved")

MOST_SLOTS = 2**30
"""Pairs of a token and an expert: kernels number them, and what a last tile has beyond them, in 32 bits."""


def check_count(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return an integer if it lies between these bounds.

    Raises:
        TypeError: It is no integer.
        ValueError: It lies outside.
    """
    if isinstance(value, bool) or not isinstance(value, (Integral, torch.SymInt)):
        raise TypeError(f"{name} must be an int, got {type(value).__name__}")
    number: int = value  # type: ignore[assignment]  # a symbol stays one
    if number < least or (most is not None and number > most):
        wanted = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be {wanted}, got {number}")
    return number


def check_routing(
    n_experts: int,
    device: torch.device,
    correction_bias: Any,
    top_k: Any,
    gating: Any,
    renormalize: Any,
    n_groups: Any,
    topk_groups: Any,
    routed_scaling_factor: Any,
) -> None:
    """Raise TypeError or ValueError for settings by which experts cannot be chosen."""
    check_count("top_k", top_k, 1, n_experts)
    check_choice("gating", gating, GATINGS)
    if not isinstance(renormalize, bool):
        raise TypeError(f"renormalize must be a bool, got {type(renormalize).__name__}")
    if correction_bias is not None:
        _check_vector("correction_bias", correction_bias, n_experts, device)
    if (n_groups is None) != (topk_groups is None):
        raise ValueError(f"n_groups and topk_groups must be given together, got {n_groups} and {topk_groups}")
    if n_groups is not None:
        check_count("n_groups", n_groups, 1, n_experts)
        check_count("topk_groups", topk_groups, 1, n_groups)
        if n_experts % n_groups:
            raise ValueError(f"n_groups must divide the number of experts, {n_experts}, got {n_groups}")
        if topk_groups * (n_experts // n_groups) < top_k:
            raise ValueError(
                f"topk_groups must leave at least top_k = {top_k} experts, got {topk_groups} groups of "
                f"{n_experts // n_groups}"
            )
    check_number("routed_scaling_factor", routed_scaling_factor)


def check_logits(
    logits: Any, correction_bias: Any, *settings: Any, dtypes: tuple[torch.dtype, ...] = ACTIVATION_DTYPES
) -> None:
    """Raise TypeError or ValueError for arguments that `route_topk` does not take."""
    check_tensor("logits", logits, dtypes)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have shape [..., E] with E from 1, got {tuple(logits.shape)}")
    check_routing(logits.shape[-1], logits.device, correction_bias, *settings)


def check_scoring(
    hidden: Any,
    router_weight: Any,
    router_bias: Any,
    dtypes: tuple[torch.dtype, ...] = ACTIVATION_DTYPES,
    name: str = "hidden",
) -> None:
    """Raise TypeError or ValueError for what makes no logits; `name` is that of the tokens."""
    check_tensor("router_weight", router_weight, dtypes)
    if router_weight.dim() != 2 or router_weight.shape[0] == 0:
        raise ValueError(f"router_weight must have shape [E, H] with E from 1, got {tuple(router_weight.shape)}")
    n_experts, width = router_weight.shape
    check_rows(name, hidden, width, dtypes)
    check_same_device("router_weight", router_weight, hidden.device, name)
    if router_bias is not None:
        _check_vector("router_bias", router_bias, n_experts, hidden.device)


def check_router(hidden: Any, router_weight: Any, router_bias: Any, correction_bias: Any, *settings: Any) -> None:
    """Raise TypeError or ValueError for arguments that `moe_router` does not take."""
    check_scoring(hidden, router_weight, router_bias)
    check_routing(router_weight.shape[0], hidden.device, correction_bias, *settings)


def check_indices(name: str, indices: Any, num_experts: Any) -> None:
    """Raise TypeError or ValueError for what cannot be the experts of tokens."""
    check_tensor(name, indices, INDICES)
    if indices.dim() == 0 or indices.shape[-1] == 0:
        raise ValueError(f"{name} must have shape [..., top_k] with top_k from 1, got {tuple(indices.shape)}")
    check_count("num_experts", num_experts, 1)
    check_count(f"the number of elements of {name}", indices.numel(), 0, MOST_SLOTS)


def check_permutation(
    hidden: Any, indices: Any, num_experts: Any, dtypes: tuple[torch.dtype, ...] = ACTIVATION_DTYPES
) -> None:
    """Raise TypeError or ValueError for arguments that `permute_tokens` does not take."""
    check_indices("indices", indices, num_experts)
    check_tensor("hidden", hidden, dtypes)
    if hidden.dim() == 0 or hidden.shape[:-1] != indices.shape[:-1]:
        wanted = (*indices.shape[:-1], "H")
        raise ValueError(f"hidden must have shape {wanted} beside indices, got {tuple(hidden.shape)}")
    check_same_device("indices", indices, hidden.device, "hidden")


def check_combination(
    expert_outputs: Any,
    weights: Any,
    restore_idx: Any,
    num_tokens: Any,
    top_k: Any,
    dtypes: tuple[torch.dtype, ...] = ACTIVATION_DTYPES,
    names: tuple[str, str] = ("expert_outputs", "restore_idx"),
) -> None:
    """Raise TypeError or ValueError for arguments that `unpermute_tokens` does not take, or another of these names."""
    rows, index = names
    check_count("num_tokens", num_tokens, 0)
    check_count("top_k", top_k, 1)
    n_slots = check_count("num_tokens * top_k", num_tokens * top_k, 0, MOST_SLOTS)
    check_tensor(rows, expert_outputs, dtypes)
    if expert_outputs.dim() != 2 or expert_outputs.shape[0] != n_slots:
        raise ValueError(f"{rows} must have shape ({n_slots}, H), got {tuple(expert_outputs.shape)}")
    check_tensor("weights", weights, FLOATS)
    check_shape("weights", weights, (num_tokens, top_k))
    check_tensor(index, restore_idx, INDICES)
    check_shape(index, restore_idx, (n_slots,))
    for name, value in (("weights", weights), (index, restore_idx)):
        check_same_device(name, value, expert_outputs.device, rows)


def check_grouped_gemm(
    tokens: Any,
    weights: Any,
    expert_offsets: Any,
    num_experts: Any,
    dtypes: tuple[torch.dtype, ...] = EXPERT_DTYPES,
) -> None:
    """Raise TypeError or ValueError for arguments that `grouped_gemm` does not take."""
    check_count("num_experts", num_experts, 1)
    check_tensor("tokens", tokens, dtypes)
    if tokens.dim() != 2:
        raise ValueError(f"tokens must have shape [rows, K], got {tuple(tokens.shape)}")
    _check_weight("weights", weights, (num_experts, None, tokens.shape[1]), "tokens", tokens)
    _check_offsets(expert_offsets, num_experts, "tokens", tokens)


def check_ffn(
    permuted: Any,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    expert_offsets: Any,
    num_experts: Any,
    dtypes: tuple[torch.dtype, ...] = EXPERT_DTYPES,
) -> None:
    """Raise TypeError or ValueError for arguments that `expert_ffn_triton` does not take."""
    check_count("num_experts", num_experts, 1)
    check_tensor("permuted", permuted, dtypes)
    if permuted.dim() != 2:
        raise ValueError(f"permuted must have shape [rows, H], got {tuple(permuted.shape)}")
    _check_projections(w_gate, w_up, w_down, num_experts, "permuted", permuted)
    _check_offsets(expert_offsets, num_experts, "permuted", permuted)


def check_fused_ffn(
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
    dtypes: tuple[torch.dtype, ...] = EXPERT_DTYPES,
) -> None:
    """Raise TypeError or ValueError for arguments that `fused_expert_ffn` does not take."""
    check_ffn(permuted, w_gate, w_up, w_down, expert_offsets, num_experts, dtypes)
    check_combination(permuted, weights, sorted_idx, num_tokens, top_k, dtypes, ("permuted", "sorted_idx"))


def check_layer(
    hidden: Any,
    router_weight: Any,
    w_gate: Any,
    w_up: Any,
    w_down: Any,
    num_experts: Any,
    top_k: Any,
    gating: Any,
    dtypes: tuple[torch.dtype, ...] = EXPERT_DTYPES,
) -> None:
    """Raise TypeError or ValueError for arguments that `fused_moe_forward` does not take."""
    check_scoring(hidden, router_weight, None, (*ACTIVATION_DTYPES, *dtypes), "hidden_states")
    check_tensor("hidden_states", hidden, dtypes)
    check_count("num_experts", num_experts, router_weight.shape[0], router_weight.shape[0])
    check_routing(num_experts, hidden.device, None, top_k, gating, False, None, None, 1.0)
    _check_projections(w_gate, w_up, w_down, num_experts, "hidden_states", hidden)


def check_fused_experts(
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
    dtypes: tuple[torch.dtype, ...] = EXPERT_DTYPES,
) -> None:
    """Raise TypeError or ValueError for arguments that `fused_experts` does not take."""
    check_tensor("x", x, dtypes)
    if x.dim() == 0:
        raise ValueError("x must have shape [..., H], got ()")
    width = x.shape[-1]
    _check_weight("w13", w13, (None, None, width), "x", x)
    n_experts, twice = w13.shape[:2]
    if twice % 2:
        raise ValueError(f"w13 must have shape [E, 2 * F, H], got {tuple(w13.shape)}")
    _check_weight("w2", w2, (n_experts, width, twice // 2), "x", x)
    routed = topk_weights, topk_ids, expert_map, w13_bias, w2_bias, shared_w13, shared_w2
    check_routed(x, n_experts, twice, *routed, layout, alpha, beta, limit, capacity_factor)


def check_routed(
    x: torch.Tensor,
    n_experts: int,
    twice: int,
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
) -> None:
    """Raise errors for what `fused_experts` takes beside tokens and experts, these with 2 * F = `twice`."""
    width = x.shape[-1]
    check_indices("topk_ids", topk_ids, n_experts or 1)
    check_tensor("topk_weights", topk_weights, FLOATS)
    for name, value in (("topk_ids", topk_ids), ("topk_weights", topk_weights)):
        if value.shape != (*x.shape[:-1], topk_ids.shape[-1]):
            wanted = (*x.shape[:-1], "top_k")
            raise ValueError(f"{name} must have shape {wanted} beside x, got {tuple(value.shape)}")
        check_same_device(name, value, x.device, "x")
    if expert_map is not None:
        check_tensor("expert_map", expert_map, INDICES)
        if expert_map.dim() != 1 or expert_map.shape[0] == 0:
            raise ValueError(f"expert_map must have shape [all experts], got {tuple(expert_map.shape)}")
        check_same_device("expert_map", expert_map, x.device, "x")
    for name, value, features in (("w13_bias", w13_bias, twice), ("w2_bias", w2_bias, width)):
        if value is not None:
            check_shape(name, check_tensor(name, value, FLOATS), (n_experts, features))
            check_same_device(name, value, x.device, "x")
    if (shared_w13 is None) != (shared_w2 is None):
        raise ValueError("shared_w13 and shared_w2 must be given together")
    if shared_w13 is not None:
        _check_weight("shared_w13", shared_w13, (None, width), "x", x)
        if shared_w13.shape[0] % 2:
            raise ValueError(f"shared_w13 must have shape [2 * F, H], got {tuple(shared_w13.shape)}")
        _check_weight("shared_w2", shared_w2, (width, shared_w13.shape[0] // 2), "x", x)
    check_choice("layout", layout, LAYOUTS)
    check_number("alpha", alpha)
    check_number("beta", beta)
    for name, value in (("limit", limit), ("capacity_factor", capacity_factor)):
        if value is not None:
            check_number(name, value, minimum=0.0)


def _check_projections(w_gate: Any, w_up: Any, w_down: Any, n_experts: int, owner: str, x: torch.Tensor) -> None:
    width = x.shape[-1]
    _check_weight("w_gate", w_gate, (n_experts, None, width), owner, x)
    features = w_gate.shape[1]
    _check_weight("w_up", w_up, (n_experts, features, width), owner, x)
    _check_weight("w_down", w_down, (n_experts, width, features), owner, x)


def _check_weight(name: str, value: Any, shape: tuple[int | None, ...], owner: str, x: torch.Tensor) -> None:
    """Raise errors unless a weight has a shape, of which None is any size, and the dtype and device of `x`."""
    check_tensor(name, value, FLOATS)
    if value.dtype != x.dtype:
        raise TypeError(f"{name} must have the dtype of {owner}, {x.dtype}, got {value.dtype}")
    if value.dim() != len(shape) or any(
        wanted not in (None, size) for size, wanted in zip(value.shape, shape, strict=True)
    ):
        wanted_shape = tuple("any" if size is None else size for size in shape)
        raise ValueError(f"{name} must have shape {wanted_shape}, got {tuple(value.shape)}")
    check_same_device(name, value, x.device, owner)


def _check_offsets(expert_offsets: Any, num_experts: int, owner: str, x: torch.Tensor) -> None:
    check_tensor("expert_offsets", expert_offsets, INDICES)
    check_shape("expert_offsets", expert_offsets, (num_experts + 1,))
    check_same_device("expert_offsets", expert_offsets, x.device, owner)
    check_count(f"the number of rows of {owner}", x.shape[0], 0, MOST_SLOTS)


def check_rows(name: str, value: Any, width: int, dtypes: tuple[torch.dtype, ...] = ACTIVATION_DTYPES) -> None:
    """Raise TypeError or ValueError for what is not [..., width]."""
    check_tensor(name, value, dtypes)
    if value.dim() == 0 or value.shape[-1] != width:
        raise ValueError(f"{name} must have shape [..., {width}], got {tuple(value.shape)}")


def _check_vector(name: str, value: Any, length: int, device: torch.device) -> None:
    check_tensor(name, value, FLOATS)
    check_shape(name, value, (length,))
    if value.device != device:
        raise ValueError(f"{name} must be on {device}, as the rest is, got {value.device}")
