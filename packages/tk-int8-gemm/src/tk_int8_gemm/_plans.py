"""How a product is carried out: check, choose the backend, choose the launch, allocate, launch.

All of that but the allocation and the launches depends on shapes, strides, dtypes and devices only. It is decided once
for each such combination and kept as a plan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from tk_int8_gemm._launch import (
    LONGEST_ROW,
    DequantizeConfig,
    GemmConfig,
    int8_gemm_config,
    quantize_config,
    w8a8_config,
)
from tk_int8_gemm._quantize import FLOATS, ZERO_POINTS, check_channels
from tk_int8_gemm._reference import int8_gemm_torch, no_autocast, quantize_per_token_torch, w8a8_gemm_torch
from tk_kernel_core import layout
from tk_kernel_core.checks import ACTIVATION_DTYPES, check_choice, check_same_device, check_shape, check_tensor
from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.gemm import backend_options
from tk_kernel_core.launch import Kernel, PlanCache, PreparedLaunch, allocator, launch_target
from tk_kernel_core.layout import row_stride

_INT8_GEMM = Kernel("tk_int8_gemm._kernels", "int8_gemm_kernel")
_W8A8_GEMM = Kernel("tk_int8_gemm._kernels", "w8a8_gemm_kernel")
_QUANTIZE = Kernel("tk_int8_gemm._kernels", "quantize_per_token_kernel")
_ROW_SUMS = Kernel("tk_int8_gemm._kernels", "row_sums_kernel")
_DEQUANTIZE = Kernel("tk_int8_gemm._kernels", "dequantize_kernel")

Plan = Callable[..., Any]
planned = PlanCache[Plan]().plan_for
rows_of = functools.partial(layout.rows_of, longest_row=LONGEST_ROW)


def check_arguments(
    x: Any,
    weight_int8: Any,
    scale: Any,
    bias: Any,
    zero_point: Any,
    dtypes: tuple[torch.dtype, ...] = ACTIVATION_DTYPES,
) -> None:
    """Raise TypeError or ValueError for arguments that no product takes."""
    check_tensor("weight_int8", weight_int8, (torch.int8,))
    if weight_int8.dim() != 2:
        raise ValueError(f"weight_int8 must have shape [N, K], got {tuple(weight_int8.shape)}")
    n, k = weight_int8.shape
    check_operands(x, n, k, bias, dtypes)
    check_same_device("weight_int8", weight_int8, x.device, "x")
    for name, value, allowed in (("scale", scale, FLOATS), ("zero_point", zero_point, ZERO_POINTS)):
        if value is not None or name == "scale":
            check_channels(name, value, n, allowed)
            check_same_device(name, value, x.device, "x")


def check_operands(x: Any, n: int, k: int, bias: Any, dtypes: tuple[torch.dtype, ...] = ACTIVATION_DTYPES) -> None:
    """Raise TypeError or ValueError for activations or a bias that no weight [n, k] takes."""
    check_tensor("x", x, dtypes)
    if x.dim() == 0 or x.shape[-1] != k:
        raise ValueError(f"x must have shape [..., {k}], got {tuple(x.shape)}")
    if bias is not None:
        check_tensor("bias", bias)
        check_shape("bias", bias, (n,))
        check_same_device("bias", bias, x.device, "x")


def check_w8a8_arguments(
    x: Any, weight_int8: Any, scale: Any, bias: Any, zero_point: Any, x_scale: Any, out_dtype: Any
) -> None:
    """Raise TypeError or ValueError for arguments that `w8a8_gemm` does not take."""
    check_arguments(x, weight_int8, scale, bias, zero_point, (*ACTIVATION_DTYPES, torch.int8))
    if x.dtype == torch.int8:
        for name, value in (("x_scale", x_scale), ("out_dtype", out_dtype)):
            if value is None:
                raise ValueError(f"{name} must be given for an int8 x, got None")
        check_tensor("x_scale", x_scale, (torch.float32,))
        check_shape("x_scale", x_scale, x.shape[:-1])
        check_same_device("x_scale", x_scale, x.device, "x")
    elif x_scale is not None:
        raise ValueError(f"x_scale must be None unless x is int8, got one with x of {x.dtype}")
    if out_dtype is not None:
        check_choice("out_dtype", out_dtype, ACTIVATION_DTYPES)


def check_rows(x: Any) -> None:
    """Raise TypeError or ValueError for a tensor whose rows cannot be quantised."""
    check_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must have shape [..., K] with K from 1, got {tuple(x.shape)}")


def int8_gemm(x: Any, weight_int8: Any, scale: Any, bias: Any, zero_point: Any) -> torch.Tensor:
    result: torch.Tensor = int8_gemm_plan(x, weight_int8, scale, bias, zero_point)(
        x, weight_int8, scale, bias, zero_point
    )
    return result


def w8a8_gemm(
    x: Any, weight_int8: Any, scale: Any, bias: Any, zero_point: Any, x_scale: Any, out_dtype: Any
) -> torch.Tensor:
    plan = w8a8_gemm_plan(x, weight_int8, scale, bias, zero_point, x_scale, out_dtype)
    result: torch.Tensor = plan(x, weight_int8, scale, bias, zero_point, x_scale)
    return result


def quantize_per_token(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    codes, x_scale, _ = quantize_plan(x, with_sums=False)(x)
    return codes, x_scale


def int8_gemm_plan(x: Any, weight_int8: Any, scale: Any, bias: Any, zero_point: Any) -> Plan:
    """Return the function that carries out a weight-only product of tensors like these."""

    def make() -> Plan:
        check_arguments(x, weight_int8, scale, bias, zero_point)
        if _by_reference(x, weight_int8):
            return lambda x, weight, scale, bias, zero_point: int8_gemm_torch(
                x, weight, scale, bias, zero_point=zero_point
            ).contiguous()
        rows = rows_of(x)
        n, k = weight_int8.shape
        unit = _unit(k, row_stride(rows))
        dtype = str(x.dtype).removeprefix("torch.")
        config = int8_gemm_config(rows.shape[0], n, k, unit, dtype, launch_target(x.device))
        if isinstance(config, DequantizeConfig):
            return _dequantizing(config, x.dtype, weight_int8)
        launch = gemm_launch(config, rows, weight_int8, x.dtype)
        sum_up = None if zero_point is None else row_sums(rows)
        new_y = allocator((*x.shape[:-1], n), x.dtype, x.device)

        def multiply(x: Any, weight: Any, scale: Any, bias: Any, zero_point: Any) -> Any:
            y, x = new_y(), rows_of(x)
            x_sum = None if sum_up is None else sum_up(x)
            scale, zero_point = _vector(scale, n, torch.float32), _vector(zero_point, n)
            launch(y, x, weight.contiguous(), scale, _vector(bias, n), zero_point, x_sum)
            return y

        return multiply

    return planned(("int8_gemm",), (x, weight_int8, scale, bias, zero_point), make)


def w8a8_gemm_plan(
    x: Any, weight_int8: Any, scale: Any, bias: Any, zero_point: Any, x_scale: Any, out_dtype: Any
) -> Plan:
    """Return the function that carries out a product of quantised activations like these."""

    def make() -> Plan:
        check_w8a8_arguments(x, weight_int8, scale, bias, zero_point, x_scale, out_dtype)
        dtype = x.dtype if out_dtype is None else out_dtype
        if _by_reference(x, weight_int8):
            return lambda x, weight, scale, bias, zero_point, x_scale: w8a8_gemm_torch(
                x, weight, scale, bias, zero_point=zero_point, x_scale=x_scale, out_dtype=dtype
            ).contiguous()
        n, k = weight_int8.shape
        rows = rows_of(x)
        if x.dtype != torch.int8:
            quantize = quantize_plan(x, with_sums=zero_point is not None)
            rows = torch.empty(rows.shape, dtype=torch.int8, device="meta")
        config = w8a8_config(rows.shape[0], n, k, _unit(k, row_stride(rows)), launch_target(x.device))
        if isinstance(config, DequantizeConfig):
            product = _dequantizing(config, torch.float32, weight_int8)

            def multiply_floats(x: Any, weight: Any, scale: Any, bias: Any, zero_point: Any, x_scale: Any) -> Any:
                codes, x_scale = (x, x_scale) if x.dtype == torch.int8 else quantize_per_token(x)
                values = codes.float() * x_scale.unsqueeze(-1)
                return product(values, weight, scale, bias, zero_point).to(dtype)

            return multiply_floats
        launch = gemm_launch(config, rows, weight_int8, dtype)
        new_y = allocator((*x.shape[:-1], n), dtype, x.device)

        def multiply(x: Any, weight: Any, scale: Any, bias: Any, zero_point: Any, x_scale: Any) -> Any:
            y, x_sum = new_y(), None
            if x.dtype == torch.int8:
                x = rows_of(x)
                if zero_point is not None:
                    x_sum = x.sum(-1, dtype=torch.int32)
            else:
                x, x_scale, x_sum = quantize(x)
                x = rows_of(x)
            # Corrections by int8 zero points are exact in int32; others might not fit it.
            its_dtype = None if zero_point is None or zero_point.dtype == torch.int8 else torch.float32
            scale, zero_point = _vector(scale, n, torch.float32), _vector(zero_point, n, its_dtype)
            weight = weight.contiguous()
            if config.descriptors:
                x, weight = _reached(x), _reached(weight)
            launch(y, x, x_scale.contiguous(), weight, scale, _vector(bias, n), zero_point, x_sum)
            return y

        return multiply

    return planned(("w8a8_gemm", out_dtype), (x, weight_int8, scale, bias, zero_point, x_scale), make)


def quantize_plan(x: Any, with_sums: bool) -> Plan:
    """Return the function that quantises rows like these to codes, scales and, if wanted, sums of codes."""

    def make() -> Plan:
        check_rows(x)
        if x.numel() == 0 or backend_of("x", x) == "reference":

            def by_reference(x: Any) -> Any:
                codes, scale = quantize_per_token_torch(x)
                return codes, scale, codes.sum(-1, dtype=torch.int32) if with_sums else None

            return by_reference
        rows = rows_of(x)
        launch = _rows_launch(_QUANTIZE, rows)
        new_codes = allocator(x.shape, torch.int8, x.device)
        new_scale = allocator(x.shape[:-1], torch.float32, x.device)
        new_sums = allocator(x.shape[:-1], torch.int32, x.device)

        def quantize(x: Any) -> Any:
            codes, scale, sums = new_codes(), new_scale(), new_sums() if with_sums else None
            launch(codes, scale, rows_of(x), sums)
            return codes, scale, sums

        return quantize

    return planned(("quantize", with_sums), (x,), make)


def _by_reference(x: torch.Tensor, weight_int8: torch.Tensor) -> bool:
    return x.numel() == 0 or weight_int8.numel() == 0 or backend_of("x", x) == "reference"


def _vector(value: Any, n: int, dtype: torch.dtype | None = None) -> Any:
    """Bring scales, zero points and biases to [n], contiguous, and to a dtype if one is given."""
    if value is None or (
        value.dim() == 1 and value.shape[0] == n and value.is_contiguous() and dtype in (None, value.dtype)
    ):
        return value
    return value.reshape(-1).to(dtype or value.dtype).expand(n).contiguous()


def _unit(*lengths: int) -> int:
    """Return the largest power of two up to 16 that divides all of the lengths."""
    return math.gcd(16, *lengths)


def _reached(tensor: Any) -> Any:
    """Bring [M, K] to where descriptors reach: rows that do not overlap, from a multiple of 16 bytes on."""
    if row_stride(tensor) < tensor.shape[1]:
        return tensor.contiguous()
    if tensor.data_ptr() % 16:
        # With its strides, which the launch has been prepared for.
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
            tensor
        )
    return tensor


def gemm_launch(config: GemmConfig, rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> PreparedLaunch:
    """Prepare the product, of a dtype, of [M, K], floats or codes, and codes [N, K]."""
    (m, k), n, stride = rows.shape, weight.shape[0], row_stride(rows)
    unit, unit_n = _unit(k, stride), _unit(n)
    blocks = {"x": (config.block_m, config.block_k), "weight": (config.block_n, config.block_k)}
    # A descriptor's rows start at multiples of 16 bytes. Tiles of 4 bytes an element would leave no room for a second
    # program.
    by_descriptor = config.out_descriptor and n % 8 == 0 and dtype.itemsize == 2
    if by_descriptor:
        blocks["out"] = (config.block_m, min(64, config.block_n))
    is_quantised = rows.dtype == torch.int8
    return PreparedLaunch(
        _W8A8_GEMM if is_quantised else _INT8_GEMM,
        (config.n_programs, 1, 1),
        (m, n // unit_n, k // unit, stride // unit),
        {
            "N_ALIGNMENT": unit_n,
            "K_ALIGNMENT": unit,
            "EVEN_K": k % config.block_k == 0,
            "SWAPPED": config.swapped,
            "BLOCK_M": config.block_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
            "STAGES": config.stages,
            "DEPENDENT_LAUNCH": config.dependent_launch,
            **({"DESCRIPTORS": config.descriptors, "OUT_DESCRIPTOR": by_descriptor} if is_quantised else {}),
        },
        weight.device,
        blocks if config.descriptors else None,
        **backend_options(config.num_warps, config.dependent_launch),
    )


def _rows_launch(kernel: Kernel, rows: torch.Tensor) -> PreparedLaunch:
    (n_rows, k), stride = rows.shape, row_stride(rows)
    unit = _unit(k, stride)
    config = quantize_config(k, launch_target(rows.device))
    return PreparedLaunch(
        kernel,
        (-(-n_rows // config.block_m), 1, 1),
        (n_rows, stride // unit),
        {
            "WIDTH": k,
            "ALIGNMENT": unit,
            "BLOCK_M": config.block_m,
            "BLOCK_K": config.block_k,
            "DEPENDENT_LAUNCH": config.dependent_launch,
        },
        rows.device,
        **backend_options(config.num_warps, config.dependent_launch),
    )


def row_sums(rows: torch.Tensor) -> Callable[[Any], torch.Tensor]:
    launch = _rows_launch(_ROW_SUMS, rows)
    new_sums = allocator(rows.shape[:1], torch.float32, rows.device)

    def sum_up(rows: Any) -> torch.Tensor:
        sums = new_sums()
        launch(sums, rows)
        return sums

    return sum_up


def _dequantizing(config: DequantizeConfig, dtype: torch.dtype, weight: torch.Tensor) -> Plan:
    k = weight.shape[1]
    constexprs = {
        "WIDTH": k,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "DEPENDENT_LAUNCH": config.dependent_launch,
    }

    def launch_for(height: int) -> PreparedLaunch:
        grid = (-(-height // config.block_n) * -(-k // config.block_k), 1, 1)
        options = backend_options(config.num_warps, config.dependent_launch)
        return PreparedLaunch(_DEQUANTIZE, grid, (height,), constexprs, weight.device, **options)

    return by_parts(weight.shape[0], k, config.rows, dtype, launch_for, lambda weight, rows: weight[rows])


def by_parts(
    n: int,
    k: int,
    height: int,
    dtype: torch.dtype,
    launch_for: Callable[[int], PreparedLaunch],
    part_of: Callable[[Any, slice], Any],
) -> Plan:
    """Return the product with weights that are dequantised part by part, in a workspace of bounded size.

    Args:
        n: Rows of the weights.
        k: Columns.
        height: Rows that are dequantised at a time.
        dtype: What they are dequantised to.
        launch_for: Makes the launch that dequantises some number of rows.
        part_of: Takes these rows out of the codes.
    """
    parts = [slice(first, min(first + height, n)) for first in range(0, n, height)]
    launches = {size: launch_for(size) for size in {rows.stop - rows.start for rows in parts}}

    def multiply(x: Any, codes: Any, scale: Any, bias: Any, zero_point: Any) -> Any:
        scale, zero_point, codes = _vector(scale, n, torch.float32), _vector(zero_point, n), codes.contiguous()
        bias = None if bias is None else bias.to(dtype)
        x, shape = x.reshape(-1, k), (*x.shape[:-1], n)
        y = torch.empty((x.shape[0], n), dtype=dtype, device=x.device)
        workspace = torch.empty((height, k), dtype=dtype, device=x.device)
        for rows in parts:
            size = rows.stop - rows.start
            floats, its_zeros = workspace[:size], None if zero_point is None else zero_point[rows]
            launches[size](floats, part_of(codes, rows), scale[rows], its_zeros)
            with no_autocast(x.device.type):
                if bias is None:
                    torch.mm(x, floats.T, out=y[:, rows])
                else:
                    torch.addmm(bias[rows], x, floats.T, out=y[:, rows])
        return y.view(shape)

    return multiply
