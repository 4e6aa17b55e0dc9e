"""What a module saves of a weight and loads again: tensors that do not depend on the order of the prepared layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from tk_kernel_core.checks import check_choice, check_same_device, check_shape, check_tensor
from tk_kernel_core.packing import COLUMN_MULTIPLE, ROW_MULTIPLE, by_rows
from tk_kernel_core.quantization import readable
from tk_w4a16._formats import LARGEST_ZERO, read_compressed_tensors
from tk_w4a16._packing import GROUP_SIZES, PackedInt4Weight
from tk_w4a16._quantize import pack_int4

STATE_NAMES = ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx")


def blank_weight(
    in_features: int,
    out_features: int,
    group_size: int,
    symmetric: bool,
    act_order: bool,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> PackedInt4Weight:
    """Return a weight of these sizes that is none yet: its scales are NaN, so that what is saved of it is refused."""
    # A group index may have any number of groups, however few input features there are.
    is_one_group = group_size >= in_features and not act_order
    group_size = -1 if is_one_group else check_choice("group_size", group_size, (*GROUP_SIZES, -1))
    width = max(COLUMN_MULTIPLE, group_size)
    columns, tiles = -(-in_features // width) * width, -(-out_features // ROW_MULTIPLE) * (ROW_MULTIPLE // 16)
    groups = 1 if group_size == -1 else columns // group_size

    def filled(value: float, kind: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=kind, device=device)

    return PackedInt4Weight(
        filled(0, torch.int32, tiles, columns // 64, 32, 4),
        filled(torch.nan, dtype, tiles, groups, 8, 2),
        None if symmetric else filled(0, torch.uint8, tiles, groups, 8, 2),
        filled(-1, torch.int32, columns) if act_order and group_size != -1 else None,
        group_size,
        out_features,
        in_features,
    )


def save_weight(weight: PackedInt4Weight, act_order: bool) -> dict[str, torch.Tensor]:
    """Return what `load_weight` takes; `W4A16Linear` describes it."""
    n, k, size = weight.out_features, weight.in_features, weight.group_size
    features = torch.arange(k, device=weight.codes.device)
    if weight.permutation is None:
        index = features * 0 if size == -1 else features // size
    else:
        # Padding, -1, comes first.
        index = weight.permutation.argsort()[-k:] // size
    groups = int(index.max()) + 1 if readable(index) else 1 if size == -1 else -(-k // size)

    def used(values: torch.Tensor) -> torch.Tensor:
        # Not a view, even where it could be one: safetensors refuses parts of memory.
        return by_rows(values)[:n, :groups].clone(memory_format=torch.contiguous_format)

    packed = pack_int4(weight.unpack().t()).t().contiguous()
    state = {"weight_packed": packed, "weight_scale": used(weight.scales)}
    if weight.zeros is not None:
        state["weight_zero_point"] = used(weight.zeros)
    if act_order:
        state["weight_g_idx"] = index.to(torch.int32)
    return state


def load_weight(
    state: Mapping[str, torch.Tensor],
    in_features: int,
    out_features: int,
    group_size: int,
    device: torch.device | None,
) -> PackedInt4Weight:
    """Prepare a weight that was saved.

    Args:
        state: Tensors by their names in `STATE_NAMES`; zero points and group index may be left out.
        in_features: Of the module.
        out_features: Of the module.
        group_size: Of the module.
        device: Where to; None for that of the tensors.

    Raises:
        TypeError: A tensor has another dtype.
        ValueError: A tensor has another shape or device than the others, scales are not finite, or zero points or
            indices out of range.
    """
    packed = check_tensor("weight_packed", state["weight_packed"], (torch.int32,))
    check_shape("weight_packed", packed, (out_features, -(-in_features // 8)))
    device = packed.device if device is None else device
    tensors = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    neutral = read_compressed_tensors(
        tensors["weight_packed"],
        tensors["weight_scale"],
        (out_features, in_features),
        None,
        tensors.get("weight_g_idx"),
        group_size=group_size,
        symmetric=True,
        bits=4,
    )
    if (zeros := tensors.get("weight_zero_point")) is not None:
        check_shape("weight_zero_point", check_tensor("weight_zero_point", zeros, (torch.uint8,)), neutral.scales.shape)
        check_same_device("weight_zero_point", zeros, device, "weight_packed")
        if readable(zeros) and bool((zeros > LARGEST_ZERO).any()):
            raise ValueError(f"weight_zero_point must be within [0, {LARGEST_ZERO}], got up to {int(zeros.max())}")
        neutral = replace(neutral, zeros=zeros)
    return PackedInt4Weight.pack(neutral)
