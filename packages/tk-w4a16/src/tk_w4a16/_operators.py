"""The operators `torch.ops.tk_w4a16.*`: for torch.compile, export, fake tensors and autograd."""

from __future__ import annotations

from typing import Any

import torch

from tk_kernel_core.registration import define_operator
from tk_w4a16 import _plans
from tk_w4a16._packing import PackedInt4Weight
from tk_w4a16._quantize import dequantize_int4

_LIBRARY = torch.library.Library("tk_w4a16", "DEF")


def _empty(x: torch.Tensor, out_features: int) -> torch.Tensor:
    return torch.empty((*x.shape[:-1], out_features), dtype=x.dtype, device=x.device)


def _refuse_frozen(ctx: Any, names: dict[int, str]) -> None:
    for index, name in names.items():
        if ctx.needs_input_grad[index]:
            raise NotImplementedError(f"{name} is frozen: there is no gradient for it, and it requires one")


def _fake_linear(
    x: Any, codes: Any, scales: Any, zeros: Any, permutation: Any, bias: Any, group_size: Any, n: Any, k: Any
) -> torch.Tensor:
    _plans.check_linear(x, codes, scales, zeros, permutation, bias, group_size, n, k)
    return _empty(x, n)


def _save_linear(ctx: Any, inputs: Any, output: Any) -> None:
    x, codes, scales, zeros, permutation, bias, *ctx.sizes = inputs
    ctx.x_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
    ctx.save_for_backward(codes, scales, zeros, permutation)


def _backward_linear(ctx: Any, dy: torch.Tensor) -> Any:
    _refuse_frozen(ctx, {2: "weight.scales"})
    dx = dbias = None
    if ctx.needs_input_grad[0]:
        dx = dy @ PackedInt4Weight(*ctx.saved_tensors, *ctx.sizes).dequantize(ctx.x_dtype)
    if ctx.needs_input_grad[5]:
        dbias = dy.reshape(-1, dy.shape[-1]).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return dx, None, None, None, None, dbias, None, None, None


w4a16_linear = define_operator(
    _LIBRARY,
    "w4a16_linear(Tensor x, Tensor codes, Tensor scales, Tensor? zeros, Tensor? permutation, Tensor? bias, "
    "int group_size, SymInt out_features, SymInt in_features) -> Tensor",
    _plans.w4a16_linear,
    _fake_linear,
    backward=_backward_linear,
    setup_context=_save_linear,
)


def _fake_gemm(x: Any, packed: Any, scales: Any, zeros: Any, group_size: Any) -> torch.Tensor:
    _plans.check_gemm(x, packed, scales, zeros, group_size)
    return _empty(x, packed.shape[1])


def _save_gemm(ctx: Any, inputs: Any, output: Any) -> None:
    x, packed, scales, zeros, ctx.group_size = inputs
    ctx.x_dtype = x.dtype
    ctx.save_for_backward(packed, scales, zeros)


def _backward_gemm(ctx: Any, dy: torch.Tensor) -> Any:
    _refuse_frozen(ctx, {2: "scales", 3: "zeros"})
    packed, scales, zeros = ctx.saved_tensors
    # In fp32, so that the weight is rounded once, to the dtype of x.
    weight = dequantize_int4(packed, scales.float(), zeros, ctx.group_size).to(ctx.x_dtype)
    return dy @ weight.t(), None, None, None, None


w4a16_gemm = define_operator(
    _LIBRARY,
    "w4a16_gemm(Tensor x, Tensor packed, Tensor scales, Tensor? zeros, int group_size) -> Tensor",
    _plans.w4a16_gemm,
    _fake_gemm,
    backward=_backward_gemm,
    setup_context=_save_gemm,
)
