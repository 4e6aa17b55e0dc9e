"""How a product is carried out: check, choose the backend, choose the launch, allocate, launch.

All of that but the allocation and the launches depends on shapes, strides, dtypes and devices only. It is decided once
for each such combination and kept as a plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tk_kernel_core.checks import check_choice, check_same_device, check_shape, check_tensor
from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.gemm import backend_options, parts_of, prepare_arrangement, unit_of
from tk_kernel_core.launch import Kernel, PlanCache, PreparedLaunch, allocator, launch_target
from tk_kernel_core.layout import row_stride, rows_of
from tk_kernel_core.packing import COLUMN_MULTIPLE, ROW_MULTIPLE
from tk_kernel_core.quantization import count_groups
from tk_w4a16._decode_launch import prepare_decode, prepare_dequantize
from tk_w4a16._launch import (
    GATHER_BLOCK,
    gemm_way,
    linear_way,
    plain_config,
    plain_dequantize_config,
)
from tk_w4a16._middle_launch import prepare_middle
from tk_w4a16._packing import GROUP_SIZES, PackedInt4Weight
from tk_w4a16._quantize import FLOATS
from tk_w4a16._reference import no_autocast, w4a16_linear_torch, w4a16_reference

_PLAIN = Kernel("tk_w4a16._kernels", "w4a16_plain_kernel")
_DEQUANTIZE_PLAIN = Kernel("tk_w4a16._kernels", "dequantize_plain_kernel")
_GATHER = Kernel("tk_w4a16._kernels", "gather_columns_kernel")

Plan = Callable[..., Any]
_planned = PlanCache[Plan]().plan_for


def check_linear(
    x: Any, codes: Any, scales: Any, zeros: Any, permutation: Any, bias: Any, group_size: int, n: int, k: int
) -> None:
    """Raise TypeError or ValueError for arguments that `w4a16_linear` does not take."""
    check_tensor("weight.codes", codes, (torch.int32,))
    check_tensor("weight.scales", scales)
    check_choice("weight.group_size", group_size, (*GROUP_SIZES, -1))
    width = max(COLUMN_MULTIPLE, group_size)
    # Act-order may need more columns than there are input features: how many, only its permutation tells.
    columns = -(-k // width) * width if permutation is None or codes.dim() != 4 else 64 * codes.shape[1]
    tiles, groups = -(-n // ROW_MULTIPLE) * (ROW_MULTIPLE // 16), 1 if group_size == -1 else columns // group_size
    parts: list[tuple[str, Any, tuple[int, ...]]] = [
        ("codes", codes, (tiles, columns // 64, 32, 4)),
        ("scales", scales, (tiles, groups, 8, 2)),
    ]
    if zeros is not None:
        check_tensor("weight.zeros", zeros, (torch.uint8,))
        parts.append(("zeros", zeros, (tiles, groups, 8, 2)))
    if permutation is not None:
        check_tensor("weight.permutation", permutation, (torch.int32,))
        parts.append(("permutation", permutation, (columns,)))
    _check_x(x, k)
    for name, part, shape in parts:
        check_shape(f"weight.{name}", part, shape)
        if not part.is_contiguous():
            raise ValueError(f"weight.{name} must be contiguous, got strides {part.stride()}")
        check_same_device(f"weight.{name}", part, x.device, "x")
    if bias is not None:
        check_tensor("bias", bias)
        check_shape("bias", bias, (n,))
        check_same_device("bias", bias, x.device, "x")


def check_gemm(x: Any, packed: Any, scales: Any, zeros: Any, group_size: Any) -> None:
    """Raise TypeError or ValueError for arguments that `w4a16_gemm` does not take."""
    check_tensor("packed", packed, (torch.int32,))
    if packed.dim() != 2:
        raise ValueError(f"packed must have shape [K / 8, N], got {tuple(packed.shape)}")
    k, n = 8 * packed.shape[0], packed.shape[1]
    _check_x(x, k)
    check_same_device("packed", packed, x.device, "x")
    groups = count_groups(k, group_size)
    for name, value in (("scales", scales), ("zeros", zeros)):
        if value is not None or name == "scales":
            check_tensor(name, value, FLOATS)
            check_shape(name, value, (groups, n))
            check_same_device(name, value, x.device, "x")


def _check_x(x: Any, k: int) -> None:
    check_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"x must have shape [..., {k}], got {tuple(x.shape)}")


def w4a16_linear(*arguments: Any) -> torch.Tensor:
    result: torch.Tensor = linear_plan(*arguments)(*arguments[:6])
    return result


def w4a16_gemm(*arguments: Any) -> torch.Tensor:
    result: torch.Tensor = gemm_plan(*arguments)(*arguments[:4])
    return result


def linear_plan(
    x: Any, codes: Any, scales: Any, zeros: Any, permutation: Any, bias: Any, group_size: int, n: int, k: int
) -> Plan:
    """Return the function that carries out a product with a prepared weight like this."""

    def make() -> Plan:
        check_linear(x, codes, scales, zeros, permutation, bias, group_size, n, k)
        if x.numel() == 0:
            return lambda x, *_: x.new_empty((*x.shape[:-1], n))
        if backend_of("x", x) == "reference":
            return lambda x, codes, scales, zeros, permutation, bias: w4a16_linear_torch(
                x, PackedInt4Weight(codes, scales, zeros, permutation, group_size, n, k), bias
            ).contiguous()
        rows = rows_of(x)
        # A permutation has an entry for every column; without one the last columns are known to be padding.
        width = k if permutation is None else permutation.shape[0]
        way, _ = linear_way(rows.shape[0], n, width, str(x.dtype).removeprefix("torch."), launch_target(x.device))
        if way == "dequantize":
            return _dequantizing(x, permutation, group_size, n, width)
        if way == "decode":
            multiply_rows = _decode(rows, permutation, group_size, n, width, zeros is not None)
        else:
            multiply_rows = _middle(rows, permutation, group_size, n, width, zeros is not None)
        new_y = allocator((*x.shape[:-1], n), x.dtype, x.device)

        def multiply(x: Any, codes: Any, scales: Any, zeros: Any, permutation: Any, bias: Any) -> Any:
            y = new_y()
            multiply_rows(y, rows_of(x), codes, scales, zeros, permutation, _vector(bias))
            return y

        return multiply

    form = "w4a16_linear", group_size, n, k
    return _planned(form, (x, codes, scales, zeros, permutation, bias), make)


def _decode(
    rows: torch.Tensor, permutation: Any, group_size: int, n: int, width: int, has_zeros: bool
) -> Callable[..., None]:
    """Return the function that multiplies a few rows."""
    m, device, target = rows.shape[0], rows.device, launch_target(rows.device)
    gather = _gathering(rows, permutation)
    stride = row_stride(rows) if permutation is None else width
    prepared = prepare_decode(m, n, width, stride, group_size, target, None, has_zeros)
    launch = PreparedLaunch.of(prepared, device)
    new_partial = allocator((prepared.partial_elements,), torch.float32, device)

    def multiply(y: Any, x: Any, codes: Any, scales: Any, zeros: Any, permutation: Any, bias: Any) -> None:
        workspaces: tuple[torch.Tensor, ...] = ()
        if prepared.n_counters:
            # New in every call: launches on two streams, or in two graphs, may run at the same time.
            counter = torch.zeros(prepared.n_counters, dtype=torch.int32, device=device)
            workspaces = new_partial(), counter
        launch(y, gather(x, permutation), codes, scales, zeros, bias, *workspaces)

    return multiply


def _gathering(rows: torch.Tensor, permutation: Any) -> Callable[[Any, Any], Any]:
    """Return the function that brings the columns of activations into the order of those of a weight."""
    if permutation is None:
        return lambda x, permutation: x
    (m, _), width, dependent_launch = rows.shape, permutation.shape[0], launch_target(rows.device).is_hopper_or_later
    launch = PreparedLaunch(
        _GATHER,
        (m, -(-width // GATHER_BLOCK), 1),
        (width, row_stride(rows)),
        {"BLOCK_K": GATHER_BLOCK, "DEPENDENT_LAUNCH": dependent_launch},
        rows.device,
        **backend_options(4, dependent_launch),
    )
    new_gathered = allocator((m, width), rows.dtype, rows.device)

    def gather(x: Any, permutation: Any) -> Any:
        gathered = new_gathered()
        launch(gathered, x, permutation)
        return gathered

    return gather


def _middle(
    rows: torch.Tensor, permutation: Any, group_size: int, n: int, width: int, has_zeros: bool
) -> Callable[..., None]:
    """Return the function that multiplies dozens of rows."""
    (m, _), device, target = rows.shape, rows.device, launch_target(rows.device)
    prepared = prepare_middle(m, n, width, group_size, target, None, has_zeros)
    n_counters = prepared.n_counters
    arrange = PreparedLaunch.of(prepare_arrangement(m, width, row_stride(rows), n_counters, target), device)
    launch = PreparedLaunch.of(prepared, device)
    # Whole blocks of rows, all of which the kernel reads.
    arranged_shape = (prepared.padded_rows, -(-width // COLUMN_MULTIPLE) * COLUMN_MULTIPLE)
    new_arranged = allocator(arranged_shape, rows.dtype, device)
    new_partial = allocator((prepared.partial_elements,), torch.float32, device)
    new_counter = allocator((n_counters,), torch.int32, device)

    def multiply(y: Any, x: Any, codes: Any, scales: Any, zeros: Any, permutation: Any, bias: Any) -> None:
        arranged = new_arranged()
        partial, counter = (new_partial(), new_counter()) if n_counters else (None, None)
        arrange(arranged, None, counter, x, permutation)
        launch(y, arranged, codes, scales, zeros, bias, partial, counter)

    return multiply


def _dequantizing(x: Any, permutation: Any, group_size: int, n: int, width: int) -> Plan:
    """Return the product with weights that are dequantised part by part, in a workspace of bounded size."""
    target, dtype = launch_target(x.device), x.dtype
    gather = _gathering(rows_of(x), permutation)
    parts = parts_of(math.prod(x.shape[:-1]), n, width, dtype.itemsize, target)
    launches = {
        height: PreparedLaunch.of(prepare_dequantize(height, width, group_size, target), x.device)
        for height in {part.stop - part.start for part in parts}
    }
    new_y = allocator((*x.shape[:-1], n), dtype, x.device)
    new_workspace = allocator((parts[0].stop, width), dtype, x.device)

    def multiply(x: Any, codes: Any, scales: Any, zeros: Any, permutation: Any, bias: Any) -> Any:
        y, workspace, rows = new_y(), new_workspace(), gather(rows_of(x), permutation)
        bias = None if bias is None else bias.to(dtype)
        results = y.view(-1, n)
        for part in parts:
            floats, tiles = workspace[: part.stop - part.start], slice(part.start // 16, None)
            its_zeros = None if zeros is None else zeros[tiles]
            launches[len(floats)](floats, codes[tiles], scales[tiles], its_zeros)
            with no_autocast(x.device.type):
                if bias is None:
                    torch.mm(rows, floats.T, out=results[:, part])
                else:
                    torch.addmm(bias[part], rows, floats.T, out=results[:, part])
        return y

    return multiply


def gemm_plan(x: Any, packed: Any, scales: Any, zeros: Any, group_size: Any) -> Plan:
    """Return the function that carries out a product with a weight in the plain layout like this."""

    def make() -> Plan:
        check_gemm(x, packed, scales, zeros, group_size)
        if x.numel() == 0 or packed.numel() == 0:
            return lambda x, packed, *_: x.new_zeros((*x.shape[:-1], packed.shape[1]))
        if backend_of("x", x) == "reference":
            return lambda x, packed, scales, zeros: w4a16_reference(x, packed, scales, zeros, group_size).contiguous()
        way, _ = gemm_way(math.prod(x.shape[:-1]), str(x.dtype).removeprefix("torch."))
        return (_tiled if way == "tiles" else _dequantizing_plain)(x, packed.shape[1], scales.shape[0], group_size)

    return _planned(("w4a16_gemm", group_size), (x, packed, scales, zeros), make)


def _tiled(x: Any, n: int, n_groups: int, group_size: int) -> Plan:
    """Return the product with tiles that are dequantised on the way."""
    rows = rows_of(x)
    (m, k), stride = rows.shape, row_stride(rows)
    config = plain_config(m, n, n_groups, group_size, launch_target(x.device))
    unit = unit_of(stride)
    launch = PreparedLaunch(
        _PLAIN,
        (-(-m // config.block_m) * -(-n // config.block_n), 1, 1),
        (m, n, k, stride // unit),
        {
            "ALIGNMENT": unit,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_SIZE": config.group_size,
            "SPAN": config.span,
            "STAGES": config.stages,
        },
        x.device,
        num_warps=config.num_warps,
    )
    new_y = allocator((*x.shape[:-1], n), x.dtype, x.device)

    def multiply(x: Any, packed: Any, scales: Any, zeros: Any) -> Any:
        y = new_y()
        launch(y, rows_of(x), packed.contiguous(), _narrow(scales).contiguous(), _contiguous(zeros))
        return y

    return multiply


def _dequantizing_plain(x: Any, n: int, n_groups: int, group_size: int) -> Plan:
    """Return the product with weights that are dequantised part by part, in a workspace of bounded size."""
    dtype, k = x.dtype, x.shape[-1]
    config = plain_dequantize_config(n_groups, group_size)
    parts = parts_of(math.prod(x.shape[:-1]), n, k, dtype.itemsize, launch_target(x.device))
    constexprs = {
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_SIZE": config.group_size,
        "SPAN": config.span,
    }
    launches = {
        height: PreparedLaunch(
            _DEQUANTIZE_PLAIN,
            (-(-height // config.block_n), -(-k // config.block_k), 1),
            (height, k, n),
            constexprs,
            x.device,
            num_warps=config.num_warps,
        )
        for height in {part.stop - part.start for part in parts}
    }
    new_y = allocator((*x.shape[:-1], n), dtype, x.device)
    new_workspace = allocator((k * parts[0].stop,), dtype, x.device)

    def multiply(x: Any, packed: Any, scales: Any, zeros: Any) -> Any:
        y, workspace, rows = new_y(), new_workspace(), x.reshape(-1, k)
        packed, scales, zeros = packed.contiguous(), _narrow(scales).contiguous(), _contiguous(zeros)
        results = y.view(-1, n)
        for part in parts:
            height = part.stop - part.start
            floats = workspace[: k * height].view(k, height)
            its_zeros = None if zeros is None else zeros[:, part]
            launches[height](floats, packed[:, part], scales[:, part], its_zeros)
            with no_autocast(x.device.type):
                torch.mm(rows, floats, out=results[:, part])
        return y

    return multiply


def _narrow(values: Any) -> Any:
    return values.float() if values.dtype == torch.float64 else values


def _contiguous(values: Any) -> Any:
    return None if values is None else _narrow(values).contiguous()


def _vector(bias: Any) -> Any:
    return bias if bias is None or bias.is_contiguous() else bias.contiguous()
