"""What the tools need to know: the cases, their inputs, their cost, what they are held against."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tk_kernel_core import baselines
from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.quantization import quantize_per_token_torch
from tk_kernel_core.spec import BaselineUnavailable, Case, CaseValue, Cost, Inputs, KernelSpec, Tolerance
from tk_swiglu._operators import swiglu
from tk_swiglu._plans import Form, forward, swiglu_backward
from tk_swiglu._quant_plans import quantised
from tk_swiglu._reference import swiglu_backward_torch, swiglu_torch, unpacked

_LARGEST_INTERPRETED = 32_768


def _case(name: str, rows: int, width: int, source: str, *tags: str, **params: CaseValue) -> Case:
    defaults: dict[str, CaseValue] = {
        "form": "forward",
        "rows": rows,
        "width": width,
        "dtype": "bfloat16",
        "layout": "separate",
        "gate_first": True,
        "alpha": 1.0,
        "beta": 0.0,
        "limit": None,
        "bias": False,
    }
    return Case(name, {**defaults, **params}, source, frozenset(tags))


_GPT_OSS: dict[str, CaseValue] = {"layout": "interleaved", "alpha": 1.702, "beta": 1.0, "limit": 7.0, "bias": True}
_CASES = (
    _case("llama2-7b-decode", 1, 11_008, "Llama-2-7B MLP, one token", "smoke", "decode", "headline"),
    _case("llama2-7b-decode-batch", 32, 11_008, "Llama-2-7B MLP, 32 sequences", "decode"),
    _case("llama2-7b-prefill", 2048, 11_008, "Llama-2-7B MLP, 2048 tokens", "prefill", "headline"),
    _case("llama3-8b-prefill", 16_384, 14_336, "Llama-3-8B MLP, 16384 tokens", "prefill", "headline"),
    _case("llama3-8b-concat", 2048, 14_336, "Llama-3-8B, gate and up in one projection", "prefill", layout="concat"),
    _case("phi3-mini-concat-decode", 1, 8192, "Phi-3-mini gate_up_proj, one token", "decode", layout="concat"),
    _case("gpt-oss-20b-prefill", 2048, 2880, "gpt-oss-20b, one expert's MLP with its biases", "prefill", **_GPT_OSS),
    _case("interleaved-prefill", 2048, 11_008, "alternating columns", "prefill", layout="interleaved"),
    _case("bias-prefill", 2048, 11_008, "projections with biases of their own", "prefill", bias=True),
    _case("odd-width", 16, 2731, "no power of two and no 16-byte row", "smoke", dtype="float16", layout="concat"),
    _case("float32-prefill", 2048, 11_008, "Llama-2-7B in float32", "prefill", dtype="float32"),
    _case("llama3-8b-quant-prefill", 2048, 14_336, "Llama-3-8B MLP before a W8A8 down_proj", "prefill", form="quant"),
    _case("llama3-8b-quant-decode", 16, 14_336, "the same, 16 sequences", "decode", form="quant"),
    _case("llama3-8b-concat-quant", 2048, 14_336, "one projection", "prefill", form="quant", layout="concat"),
    _case("llama2-7b-backward", 2048, 11_008, "training, 2048 tokens", "training", "headline", form="backward"),
    _case("llama3-8b-backward", 16_384, 14_336, "training, 16384 tokens", "training", "headline", form="backward"),
    _case("concat-backward", 2048, 14_336, "training, one projection", "training", form="backward", layout="concat"),
    _case("gpt-oss-20b-backward", 2048, 2880, "training with biases", "training", form="backward", **_GPT_OSS),
)


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """Return the arguments of one call; random, and only shapes on the meta device."""
    params: dict[str, Any] = dict(case.params)
    rows, width, dtype = params["rows"], params["width"], getattr(torch, params["dtype"])
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    inputs: Inputs = {
        "form": params["form"],
        # Made here, so that the host spends its time on the calls, not on their arguments.
        "options": Form(*(params[name] for name in Form._fields)),
        "up": None,
        "bias": None,
        "bias_up": None,
    }
    # One piece of memory, so that a plain copy of as many bytes can be made of it.
    inputs["memory"] = memory = random(3 if params["form"] == "backward" else 2, rows, width)
    if params["layout"] == "separate":
        inputs["gate"], inputs["up"] = memory[:2]
        biases = ["bias", "bias_up"]
    else:
        inputs["gate"] = memory[:2].view(rows, 2 * width)
        biases = ["bias"]
    if params["bias"]:
        inputs |= {name: random(inputs["gate"].shape[-1]) for name in biases}
    if params["form"] == "backward":
        inputs["dy"] = memory[2]
    return inputs


def _tensors(inputs: Inputs) -> tuple[Any, Any, Any, Any]:
    return inputs["gate"], inputs["up"], inputs["bias"], inputs["bias_up"]


def run(inputs: Inputs) -> Any:
    """Call the package's function."""
    if inputs["form"] == "forward":
        return forward(*_tensors(inputs), inputs["options"])
    if inputs["form"] == "quant":
        return quantised(*_tensors(inputs), inputs["options"])
    gradients = swiglu_backward(inputs["dy"], *_tensors(inputs), inputs["options"], inputs["bias"] is not None)
    return tuple(gradient for gradient in gradients if gradient.numel())


def _formula(inputs: Inputs, tensors: tuple[Any, Any, Any, Any]) -> Any:
    layout, gate_first, alpha, beta, limit = inputs["options"]
    if inputs["form"] in ("forward", "quant"):
        gate, up, bias_gate, bias_up = unpacked(*tensors, layout, gate_first)
        y = swiglu_torch(gate, up, bias_gate, bias_up, alpha=alpha, beta=beta, limit=limit)
        return quantize_per_token_torch(y) if inputs["form"] == "quant" else y
    gradients = swiglu_backward_torch(inputs["dy"], *tensors, layout, gate_first, alpha, beta, limit)
    return tuple(gradient for gradient in gradients if gradient is not None)


def _unfused(inputs: Inputs) -> Any:
    return quantize_per_token_torch(swiglu(*_tensors(inputs), *inputs["options"]))


def reference(inputs: Inputs) -> Any:
    """Return the same results, computed in float64; codes are held against those of the product that others check."""
    if inputs["form"] == "quant":
        # Of two products a rounding apart, one element in many has another code.
        return _unfused(inputs)
    gate, up, bias, bias_up = (None if tensor is None else tensor.double() for tensor in _tensors(inputs))
    results = _formula(inputs, (gate, up, bias, bias_up))
    dtype = inputs["gate"].dtype
    return results.to(dtype) if inputs["form"] == "forward" else tuple(result.to(dtype) for result in results)


def cost(case: Case) -> Cost:
    """Count every tensor once."""
    params: dict[str, Any] = dict(case.params)
    elements = params["rows"] * params["width"]
    size = getattr(torch, params["dtype"]).itemsize
    bias_bytes = 2 * params["width"] * size if params["bias"] else 0
    forms = {"forward": (2, 1, 6), "quant": (2, 0, 9), "backward": (3, 2, 14)}
    reads, writes, flops_per_element = forms[params["form"]]
    # A byte for each code, and a scale in fp32 for each row.
    further_bytes = {"quant": elements + 4 * params["rows"], "backward": bias_bytes}
    return Cost(
        flops=flops_per_element * elements,
        bytes_read=reads * elements * size + bias_bytes,
        bytes_written=writes * elements * size + further_bytes.get(params["form"], 0),
    )


def tolerance(case: Case) -> Tolerance:
    """Rounding of the result, for gradients the cancellation of the terms they are sums of; codes must be equal."""
    params: dict[str, Any] = dict(case.params)
    dtype = getattr(torch, params["dtype"])
    if params["form"] == "quant":
        return Tolerance(0.0, 0.0)
    if params["form"] == "forward":
        return rounding_tolerance(dtype, 16)
    return rounding_tolerance(dtype, params["rows"] if params["bias"] else 16, magnitude=8.0)


def shrink(case: Case) -> Case:
    """Keep the width, cut the rows."""
    rows = min(int(case.params["rows"] or 0), max(1, _LARGEST_INTERPRETED // int(case.params["width"] or 1)))
    return dataclasses.replace(case, params={**case.params, "rows": rows})


def _is_plain(inputs: Inputs) -> bool:
    return inputs["form"] == "forward" and inputs["options"][2:] == (1.0, 0.0, None) and inputs["bias"] is None


def _by_torch(inputs: Inputs) -> Any:
    if _is_plain(inputs):
        gate, up, *_ = unpacked(*_tensors(inputs), *inputs["options"][:2])
        return torch.nn.functional.silu(gate) * up
    return _by_formula(inputs)


def _by_formula(inputs: Inputs) -> Any:
    return _formula(inputs, _tensors(inputs))


def _by_copy(inputs: Inputs) -> Any:
    memory = inputs["memory"].flatten()
    # Forward reads 2 and writes 1 of the pieces, or half of one as codes; backward reads 3 and writes 2: a copy of half
    # the sum moves as much.
    quarters = {"forward": 6, "quant": 5, "backward": 10}[inputs["form"]]
    return baselines.copy(memory[: memory.numel() // len(inputs["memory"]) * quarters // 4])[0]


_COMPILED_UNFUSED = baselines.compiled(_unfused)


def _by_unfused(inputs: Inputs) -> Any:
    if inputs["form"] != "quant":
        raise BaselineUnavailable("this case is one of the parts")
    return _COMPILED_UNFUSED(inputs)


def _by_liger(inputs: Inputs) -> Any:
    try:
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction
    except ImportError as error:
        raise BaselineUnavailable(f"liger-kernel is not installed ({error})") from error
    gate, up = inputs["gate"], inputs["up"]
    if up is None or not _is_plain(inputs) or not gate.is_cuda:
        raise BaselineUnavailable(
            "Liger multiplies two GPU tensors, without biases; its backward cannot be called alone"
        )
    return LigerSiLUMulFunction.apply(gate, up)


SPEC = KernelSpec(
    name="tk-swiglu",
    summary="SwiGLU with clamps and biases, packed or separate, forward and backward, and quantised to int8",
    cases={case.name: case for case in _CASES},
    make_inputs=make_inputs,
    run=run,
    reference=reference,
    cost=cost,
    tolerance=tolerance,
    shrink=shrink,
    baselines={
        "torch": _by_torch,
        "torch.compile": baselines.compiled(_by_formula),
        "copy": _by_copy,
        "liger": _by_liger,
        "unfused": _by_unfused,
    },
    bars={
        "llama3-8b-prefill": {"torch.compile": 1.00},
        "llama2-7b-prefill": {"torch.compile": 1.00},
        "llama2-7b-decode": {"torch.compile": 0.98},
        "llama2-7b-backward": {"copy": 1.05},
        "llama3-8b-backward": {"copy": 1.05},
    },
)
