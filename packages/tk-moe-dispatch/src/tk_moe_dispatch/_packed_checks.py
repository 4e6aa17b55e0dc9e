"""Checks of arguments where experts' weights are packed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tk_kernel_core.checks import ACTIVATION_DTYPES, check_choice, check_same_device, check_shape, check_tensor
from tk_moe_dispatch._checks import EXPERT_DTYPES, check_count, check_fused_experts, check_routed
from tk_moe_dispatch._packed import GROUP_SIZES, PackedExperts, bits_of, packed_shapes


def packed_operands(
    x: Any, w13: Any, w2: Any, layout: Any
) -> tuple[tuple[torch.Tensor | None, ...], tuple[int, int, int]]:
    """Return the tensors of w13 and of w2; and F and their group sizes.

    Raises:
        TypeError: One of them is packed and the other is not, or x is no tensor.
        ValueError: They do not fit one another, x or the layout.
    """
    for name, value in (("w13", w13), ("w2", w2)):
        if not isinstance(value, PackedExperts):
            raise TypeError(f"{name} must be PackedExperts, like the other weight, got {type(value).__name__}")
    check_tensor("x", x, EXPERT_DTYPES)
    (n_experts, width, ffn_size), hidden_size = w2.shape, x.shape[-1] if x.dim() else 0
    if width != hidden_size:
        raise ValueError(f"w2 must have {hidden_size} rows for each expert, as x has columns, got {tuple(w2.shape)}")
    check_shape("w13", w13, (n_experts, 2 * ffn_size, width))
    for name, value, wanted in (("w13", w13.layout, layout), ("w2", w2.layout, None)):
        if value != wanted:
            raise ValueError(f"{name} must have been packed with layout={wanted!r}, got {value!r}")
    tensors = w13.codes, w13.scales, w13.zeros, w2.codes, w2.scales, w2.zeros
    return tensors, (ffn_size, w13.group_size, w2.group_size)


def check_experts(x: Any, w13: Any, w2: Any, *rest: Any, dtypes: tuple[torch.dtype, ...] = EXPERT_DTYPES) -> None:
    """Raise TypeError or ValueError for arguments that `fused_experts` does not take, the weights packed or not."""
    check: Callable[..., None] = partial(check_fused_experts, dtypes=dtypes)
    weights: tuple[Any, ...] = w13, w2
    if isinstance(w13, PackedExperts) or isinstance(w2, PackedExperts):
        weights, sizes = packed_operands(x, w13, w2, rest[7])
        check, rest = check_fused_packed_experts, (*rest[:7], *sizes, *rest[7:])
    check(x, *weights, *rest)


def check_fused_packed_experts(
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
) -> None:
    """Raise TypeError or ValueError for arguments that `fused_experts` does not take, with packed weights."""
    check_tensor("x", x, EXPERT_DTYPES)
    if x.dim() == 0:
        raise ValueError("x must have shape [..., H], got ()")
    check_count("the number of rows of w2", ffn_size, 1)
    check_tensor("w13", w13_codes, (torch.int32,))
    n_experts, width = w13_codes.shape[0], x.shape[-1]
    packed = (
        ("w13", w13_codes, w13_scales, w13_zeros, w13_group_size, 2 * ffn_size, width),
        ("w2", w2_codes, w2_scales, w2_zeros, w2_group_size, width, ffn_size),
    )
    for name, codes, scales, zeros, group_size, n, k in packed:
        _check_packed(name, codes, scales, zeros, group_size, (n_experts, n, k), x)
    routed = topk_weights, topk_ids, expert_map, w13_bias, w2_bias, shared_w13, shared_w2
    check_routed(x, n_experts, 2 * ffn_size, *routed, layout, alpha, beta, limit, capacity_factor)


def _check_packed(
    name: str, codes: Any, scales: Any, zeros: Any, group_size: Any, shape: tuple[int, int, int], x: torch.Tensor
) -> None:
    """Raise errors unless codes, scales and zeros are those of `PackedExperts` of this shape, on the device of `x`."""
    is_int8 = check_tensor(f"{name}.codes", codes, (torch.int32,)).dim() == 6
    check_choice(f"{name}.group_size", group_size, (-1,) if is_int8 else (*GROUP_SIZES, -1))
    codes_shape, groups = packed_shapes(*shape, bits_of(codes), group_size, gated=name == "w13")
    check_shape(f"{name}.codes", codes, codes_shape)
    check_tensor(f"{name}.scales", scales, (torch.float32,) if is_int8 else ACTIVATION_DTYPES)
    for part, value in (("codes", codes), ("scales", scales), ("zeros", zeros)):
        if value is None:
            continue
        if part == "zeros":
            check_tensor(f"{name}.zeros", value, (torch.int8 if is_int8 else torch.uint8,))
        if part != "codes":
            check_shape(f"{name}.{part}", value, groups)
        check_same_device(f"{name}.{part}", value, x.device, "x")
        if not value.is_contiguous():
            raise ValueError(f"{name}.{part} must be contiguous, got strides {value.stride()}")
