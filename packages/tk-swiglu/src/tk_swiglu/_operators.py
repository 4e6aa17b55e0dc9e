"""The operators `torch.ops.tk_swiglu.*`: for torch.compile, export, fake tensors and autograd."""

from __future__ import annotations

from typing import Any

import torch

from tk_kernel_core.registration import define_operator
from tk_swiglu import _plans, _quant_plans
from tk_swiglu._plans import Form
from tk_swiglu._reference import swiglu_backward_torch

_LIBRARY = torch.library.Library("tk_swiglu", "DEF")
_INPUTS = "Tensor gate, Tensor? up, Tensor? bias, Tensor? bias_up"
_FORM = "str layout, bool gate_first, float alpha, float beta, float? limit"


def _forward(gate: Any, up: Any, bias: Any, bias_up: Any, *form: Any) -> torch.Tensor:
    return _plans.forward(gate, up, bias, bias_up, Form(*form))


def _fake_forward(gate: Any, up: Any, bias: Any, bias_up: Any, *form: Any) -> torch.Tensor:
    call = Form(*form)
    _plans.check_arguments(gate, up, bias, bias_up, call)
    return torch.empty(_plans.result_shape(gate, call.layout), dtype=gate.dtype, device=gate.device)


def _gradients(dy: Any, gate: Any, up: Any, bias: Any, bias_up: Any, *form_and_wish: Any) -> _plans.Gradients:
    *form, wants_bias = form_and_wish
    return _plans.swiglu_backward(dy, gate, up, bias, bias_up, Form(*form), wants_bias)


def _fake_backward(dy: Any, gate: Any, up: Any, bias: Any, bias_up: Any, *form_and_wish: Any) -> Any:
    *_, wants_bias = form_and_wish

    def empty(tensor: Any, is_wanted: bool) -> torch.Tensor:
        if tensor is None or not is_wanted:
            return torch.empty(0, dtype=gate.dtype, device=gate.device)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    return empty(gate, True), empty(up, True), empty(bias, wants_bias), empty(bias_up, wants_bias)


swiglu_backward = define_operator(
    _LIBRARY,
    f"swiglu_backward(Tensor dy, {_INPUTS}, {_FORM}, bool wants_bias) -> (Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _fake_backward,
)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    gate, up, bias, bias_up, *ctx.form = inputs
    ctx.save_for_backward(gate, up, bias, bias_up)


def _backward(ctx: Any, dy: Any) -> Any:
    tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[:4]
    if torch.is_grad_enabled():
        # A second derivative is wanted: differentiate a formula that PyTorch can differentiate again.
        gradients = swiglu_backward_torch(dy, *tensors, *ctx.form)
    else:
        gradients = swiglu_backward(dy, *tensors, *ctx.form, wanted[2] or wanted[3])
    answers = [gradient if is_wanted else None for gradient, is_wanted in zip(gradients, wanted, strict=True)]
    return *answers, *[None] * len(ctx.form)


swiglu = define_operator(
    _LIBRARY,
    f"swiglu({_INPUTS}, {_FORM}) -> Tensor",
    _forward,
    _fake_forward,
    backward=_backward,
    setup_context=_save,
)


def _quantised(gate: Any, up: Any, bias: Any, bias_up: Any, *form: Any) -> _quant_plans.CodesAndScale:
    return _quant_plans.quantised(gate, up, bias, bias_up, Form(*form))


def _fake_quantised(gate: Any, up: Any, bias: Any, bias_up: Any, *form: Any) -> _quant_plans.CodesAndScale:
    call = Form(*form)
    _quant_plans.check_arguments(gate, up, bias, bias_up, call)
    shape = _plans.result_shape(gate, call.layout)
    return (
        torch.empty(shape, dtype=torch.int8, device=gate.device),
        torch.empty(shape[:-1], dtype=torch.float32, device=gate.device),
    )


swiglu_quant_int8 = define_operator(
    _LIBRARY, f"swiglu_quant_int8({_INPUTS}, {_FORM}) -> (Tensor, Tensor)", _quantised, _fake_quantised
)
