"""The operators `torch.ops.tk_int8_gemm.*`: for torch.compile, export, fake tensors and autograd."""

from __future__ import annotations

from typing import Any

import torch

from tk_int8_gemm import _packed_plans, _plans
from tk_int8_gemm._packing import PackedInt8Weight
from tk_kernel_core.registration import define_operator

_LIBRARY = torch.library.Library("tk_int8_gemm", "DEF")
_WEIGHT = "Tensor weight_int8, Tensor scale, Tensor? bias, Tensor? zero_point"


def _empty(x: torch.Tensor, out_features: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], out_features), dtype=dtype or x.dtype, device=x.device)


def _refuse_frozen(ctx: Any, names: dict[int, str]) -> None:
    for index, name in names.items():
        if ctx.needs_input_grad[index]:
            raise NotImplementedError(f"{name} is frozen: there is no gradient for it, and it requires one")


def _of_x_and_bias(ctx: Any, dy: torch.Tensor, weight: torch.Tensor, bias_index: int) -> tuple[Any, Any]:
    """Return the gradients of `y = x @ weight.T + bias`; the weight comes in codes, zero points and scales."""
    dx = dbias = None
    if ctx.needs_input_grad[0]:
        dx = (dy.to(weight.dtype) @ weight).to(ctx.x_dtype)
    if ctx.needs_input_grad[bias_index]:
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return dx, dbias


def _dequantized(codes: torch.Tensor, scale: torch.Tensor, zero_point: Any, dtype: torch.dtype) -> torch.Tensor:
    weight = codes.float() if zero_point is None else codes.float() - zero_point.float().reshape(-1, 1)
    return (weight * scale.float().reshape(-1, 1)).to(dtype)


def _save(ctx: Any, x: torch.Tensor, bias: Any) -> None:
    ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype


def _fake_int8_gemm(x: Any, weight_int8: Any, scale: Any, bias: Any, zero_point: Any) -> torch.Tensor:
    _plans.check_arguments(x, weight_int8, scale, bias, zero_point)
    return _empty(x, weight_int8.shape[0])


def _save_int8_gemm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight_int8, scale, bias, zero_point = inputs
    _save(ctx, x, bias)
    ctx.save_for_backward(weight_int8, scale, zero_point)


def _backward_int8_gemm(ctx: Any, dy: torch.Tensor) -> Any:
    _refuse_frozen(ctx, {1: "weight_int8", 2: "scale", 4: "zero_point"})
    weight_int8, scale, zero_point = ctx.saved_tensors
    weight = _dequantized(weight_int8, scale, zero_point, ctx.x_dtype)
    dx, dbias = _of_x_and_bias(ctx, dy, weight, 3)
    return dx, None, None, dbias, None


int8_gemm = define_operator(
    _LIBRARY,
    f"int8_gemm(Tensor x, {_WEIGHT}) -> Tensor",
    _plans.int8_gemm,
    _fake_int8_gemm,
    backward=_backward_int8_gemm,
    setup_context=_save_int8_gemm,
)


def _fake_w8a8_gemm(
    x: Any, weight_int8: Any, scale: Any, bias: Any, zero_point: Any, x_scale: Any, out_dtype: Any
) -> torch.Tensor:
    _plans.check_w8a8_arguments(x, weight_int8, scale, bias, zero_point, x_scale, out_dtype)
    return _empty(x, weight_int8.shape[0], out_dtype)


def _save_w8a8_gemm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight_int8, scale, bias, zero_point, _, _ = inputs
    _save(ctx, x, bias)
    ctx.save_for_backward(weight_int8, scale, zero_point)


def _backward_w8a8_gemm(ctx: Any, dy: torch.Tensor) -> Any:
    _refuse_frozen(ctx, {1: "weight_int8", 2: "scale", 4: "zero_point", 5: "x_scale"})
    # Straight through: as if x had not been rounded.
    weight_int8, scale, zero_point = ctx.saved_tensors
    weight = _dequantized(weight_int8, scale, zero_point, dy.dtype)
    dx, dbias = _of_x_and_bias(ctx, dy, weight, 3)
    return dx, None, None, dbias, None, None, None


w8a8_gemm = define_operator(
    _LIBRARY,
    f"w8a8_gemm(Tensor x, {_WEIGHT}, Tensor? x_scale, ScalarType? out_dtype) -> Tensor",
    _plans.w8a8_gemm,
    _fake_w8a8_gemm,
    backward=_backward_w8a8_gemm,
    setup_context=_save_w8a8_gemm,
)


def _fake_int8_linear(
    x: Any, codes: Any, scale: Any, zero_point: Any, bias: Any, out_features: Any, in_features: Any
) -> torch.Tensor:
    _packed_plans.check_arguments(x, codes, scale, zero_point, bias, out_features, in_features)
    return _empty(x, out_features)


def _save_int8_linear(ctx: Any, inputs: Any, output: Any) -> None:
    x, codes, scale, zero_point, bias, ctx.out_features, ctx.in_features = inputs
    _save(ctx, x, bias)
    ctx.save_for_backward(codes, scale, zero_point)


def _backward_int8_linear(ctx: Any, dy: torch.Tensor) -> Any:
    _refuse_frozen(ctx, {1: "weight", 2: "weight.scale", 3: "weight.zero_point"})
    codes, scale, zero_point = ctx.saved_tensors
    plain = PackedInt8Weight(codes, scale, zero_point, ctx.out_features, ctx.in_features).unpack()
    dx, dbias = _of_x_and_bias(ctx, dy, _dequantized(plain, scale, zero_point, ctx.x_dtype), 4)
    return dx, None, None, None, dbias, None, None


int8_linear = define_operator(
    _LIBRARY,
    "int8_linear(Tensor x, Tensor codes, Tensor scale, Tensor? zero_point, Tensor? bias, SymInt out_features, "
    "SymInt in_features) -> Tensor",
    _packed_plans.int8_linear,
    _fake_int8_linear,
    backward=_backward_int8_linear,
    setup_context=_save_int8_linear,
)


def _fake_quantize_per_token(x: Any) -> tuple[torch.Tensor, torch.Tensor]:
    _plans.check_rows(x)
    return (
        torch.empty(x.shape, dtype=torch.int8, device=x.device),
        torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device),
    )


quantize_per_token = define_operator(
    _LIBRARY, "quantize_per_token(Tensor x) -> (Tensor, Tensor)", _plans.quantize_per_token, _fake_quantize_per_token
)
