"""How a product with a prepared weight is carried out; the same as `_plans` for plain codes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tk_int8_gemm._decode_launch import prepare_decode
from tk_int8_gemm._launch import dequantize_config
from tk_int8_gemm._middle_launch import MiddleConfig, linear_way, prepare_middle
from tk_int8_gemm._packing import PackedInt8Weight
from tk_int8_gemm._plans import Plan, by_parts, check_operands, planned, rows_of
from tk_int8_gemm._reference import int8_gemm_torch
from tk_kernel_core.checks import check_same_device, check_shape, check_tensor
from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.gemm import backend_options, prepare_arrangement
from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.launch import Kernel, PreparedLaunch, allocator, launch_target
from tk_kernel_core.layout import next_power_of_two, row_stride
from tk_kernel_core.packing import COLUMN_MULTIPLE, ROW_MULTIPLE

_DEQUANTIZE = Kernel("tk_int8_gemm._decode_kernels", "dequantize_packed_kernel")


def check_arguments(x: Any, codes: Any, scale: Any, zero_point: Any, bias: Any, n: int, k: int) -> None:
    """Raise TypeError or ValueError for arguments that `int8_linear` does not take."""
    check_tensor("weight.codes", codes, (torch.int32,))
    padded = (
        -(-n // ROW_MULTIPLE) * (ROW_MULTIPLE // 16),
        -(-k // COLUMN_MULTIPLE) * (COLUMN_MULTIPLE // 64),
        2,
        32,
        4,
    )
    check_shape("weight.codes", codes, padded)
    if not codes.is_contiguous():
        raise ValueError(f"weight.codes must be contiguous, got strides {codes.stride()}")
    check_operands(x, n, k, bias)
    check_same_device("weight", codes, x.device, "x")
    for name, value in (("weight.scale", scale), ("weight.zero_point", zero_point)):
        if value is not None or value is scale:
            check_tensor(name, value, (torch.float32,))
            check_shape(name, value, (n,))
            check_same_device(name, value, x.device, "x")


def int8_linear(x: Any, codes: Any, scale: Any, zero_point: Any, bias: Any, n: int, k: int) -> torch.Tensor:
    plan = int8_linear_plan(x, codes, scale, zero_point, bias, n, k)
    result: torch.Tensor = plan(x, codes, scale, zero_point, bias)
    return result


def int8_linear_plan(x: Any, codes: Any, scale: Any, zero_point: Any, bias: Any, n: int, k: int) -> Plan:
    """Return the function that carries out a product with a prepared weight like this."""

    def plain(codes: Any, scale: Any, zero_point: Any) -> torch.Tensor:
        return PackedInt8Weight(codes, scale, zero_point, n, k).unpack()

    def make() -> Plan:
        check_arguments(x, codes, scale, zero_point, bias, n, k)
        if x.numel() == 0 or backend_of("x", x) == "reference":
            return lambda x, codes, scale, zero_point, bias: int8_gemm_torch(
                x, plain(codes, scale, zero_point), scale, bias, zero_point=zero_point
            ).contiguous()
        rows = rows_of(x)
        way, reason = linear_way(rows.shape[0], n, k, str(x.dtype).removeprefix("torch."), launch_target(x.device))
        if way == "dequantize":
            product = _dequantizing(rows.shape[0], n, k, x.dtype, codes.device, reason)
            return lambda x, codes, scale, zero_point, bias: product(x, codes, scale, bias, zero_point)
        new_y = allocator((*x.shape[:-1], n), x.dtype, x.device)
        if way == "decode":
            multiply_rows = _decode(rows, n, k, zero_point is not None)
        else:
            multiply_rows = middle(rows, n, k, zero_point is not None)

        def multiply(x: Any, codes: Any, scale: Any, zero_point: Any, bias: Any) -> Any:
            y = new_y()
            multiply_rows(y, rows_of(x), codes, scale, zero_point, bias)
            return y

        return multiply

    return planned(("int8_linear", n, k), (x, codes, scale, zero_point, bias), make)


def _decode(rows: torch.Tensor, n: int, k: int, has_zero_point: bool) -> Callable[..., None]:
    """Return the function that multiplies a few rows."""
    (m, _), device, target = rows.shape, rows.device, launch_target(rows.device)
    is_bfloat16 = rows.dtype == torch.bfloat16
    prepared = prepare_decode(m, n, k, row_stride(rows), is_bfloat16, target, has_zero_point=has_zero_point)
    launch = PreparedLaunch.of(prepared, device)
    if not prepared.n_counters:
        return launch
    new_partial = allocator((prepared.partial_elements,), torch.float32, device)

    def multiply(*tensors: Any) -> None:
        # New in every call: launches on two streams, or in two graphs, may run at the same time.
        counter = torch.zeros(prepared.n_counters, dtype=torch.int32, device=device)
        launch(*tensors, new_partial(), counter)

    return multiply


def middle(
    rows: torch.Tensor, n: int, k: int, has_zero_point: bool, config: MiddleConfig | None = None
) -> Callable[..., None]:
    """Return the function that multiplies dozens of rows: as chosen for them, or as said."""
    (m, _), device, target = rows.shape, rows.device, launch_target(rows.device)
    prepared = prepare_middle(m, n, k, target, config)
    n_counters = prepared.n_counters
    arrange = PreparedLaunch.of(prepare_arrangement(m, k, row_stride(rows), n_counters, target), device)
    launch = PreparedLaunch.of(prepared, device)
    # Whole blocks of rows, all of which the kernel reads.
    new_arranged = allocator((prepared.padded_rows, -(-k // COLUMN_MULTIPLE) * COLUMN_MULTIPLE), rows.dtype, device)
    new_x_sum = allocator((m,), torch.float32, device)
    new_partial = allocator((prepared.partial_elements,), torch.float32, device)
    new_counter = allocator((n_counters,), torch.int32, device)

    def multiply(y: Any, x: Any, codes: Any, scale: Any, zero_point: Any, bias: Any) -> None:
        arranged, x_sum = new_arranged(), new_x_sum() if has_zero_point else None
        partial, counter = (new_partial(), new_counter()) if n_counters else (None, None)
        arrange(arranged, x_sum, counter, x)
        launch(y, arranged, codes, scale, zero_point, bias, partial, counter, x_sum)

    return multiply


def _dequantizing(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device, reason: str) -> Plan:
    target = launch_target(device)
    config = dequantize_config(m, n, k, dtype.itemsize, target, reason)
    n_groups = -(-k // COLUMN_MULTIPLE)
    n_own = min(4, next_power_of_two(n_groups))
    constexprs = {
        "IN_FEATURES": k,
        "GROUPS": n_own,
        "PTX": target.backend == "cuda" and not interpreting(),
        "DEPENDENT_LAUNCH": target.is_hopper_or_later,
    }
    options = backend_options(4, target.is_hopper_or_later)

    def launch_for(height: int) -> PreparedLaunch:
        grid = (-(-height // 16), -(-n_groups // n_own), 1)
        return PreparedLaunch(_DEQUANTIZE, grid, (height,), constexprs, device, **options)

    # Whole tiles of 16 rows.
    height = -(-config.rows // 16) * 16
    return by_parts(n, k, height, dtype, launch_for, lambda codes, rows: codes[rows.start // 16 :])
