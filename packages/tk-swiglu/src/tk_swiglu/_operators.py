"""The operators `torch.ops.tk_swiglu.*`: for torch.compile, export, fake tensors and autograd."""

from __future__ import annotations

from typing import Any

import torch

from tk_kernel_core.registration import define_operator
from tk_swiglu import _plans
from tk_swiglu._reference import swiglu_backward_torch

_LIBRARY = torch.library.Library("tk_swiglu", "DEF")
_INPUTS = "Tensor gate, Tensor? up, Tensor? bias, Tensor? bias_up"
_NUMBERS = "str layout, bool gate_first, float alpha, float beta, float? limit"


def _fake(
    gate: Any, up: Any, bias: Any, bias_up: Any, layout: str, gate_first: bool, alpha: float, beta: float, limit: Any
) -> torch.Tensor:
    _plans.check_arguments(gate, up, bias, bias_up, layout, alpha, beta, limit)
    return torch.empty(_plans.result_shape(gate, layout), dtype=gate.dtype, device=gate.device)


def _fake_backward(dy: Any, gate: Any, up: Any, bias: Any, bias_up: Any, *numbers: Any) -> Any:
    *_, wants_bias = numbers

    def empty(tensor: Any, is_wanted: bool) -> torch.Tensor:
        if tensor is None or not is_wanted:
            return torch.empty(0, dtype=gate.dtype, device=gate.device)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    return empty(gate, True), empty(up, True), empty(bias, wants_bias), empty(bias_up, wants_bias)


swiglu_backward = define_operator(
    _LIBRARY,
    f"swiglu_backward(Tensor dy, {_INPUTS}, {_NUMBERS}, bool wants_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    _plans.swiglu_backward,
    _fake_backward,
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    gate, up, bias, bias_up, *ctx.numbers = inputs
    ctx.save_for_backward(gate, up, bias, bias_up)


def _backward(ctx: Any, dy: Any) -> Any:
    tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[:4]
    if torch.is_grad_enabled():
        # A second derivative is wanted: differentiate a formula that PyTorch can differentiate again.
        gradients = swiglu_backward_torch(dy, *tensors, *ctx.numbers)
    else:
        gradients = swiglu_backward(dy, *tensors, *ctx.numbers, wanted[2] or wanted[3])
    answers = [gradient if is_wanted else None for gradient, is_wanted in zip(gradients, wanted, strict=True)]
    return *answers, *[None] * len(ctx.numbers)


swiglu = define_operator(
    _LIBRARY,
    f"swiglu({_INPUTS}, {_NUMBERS}) -> Tensor",
    _plans.forward,
    _fake,
    backward=_backward,
    setup_context=_save,
)
