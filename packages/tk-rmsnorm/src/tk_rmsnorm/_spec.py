"""What the tools need to know: the cases, their inputs, their cost, what they are held against."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tk_kernel_core import baselines
from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.quantization import quantize_per_token_torch
from tk_kernel_core.spec import BaselineUnavailable, Case, CaseValue, Cost, Inputs, KernelSpec, Tolerance
from tk_rmsnorm._ops import (
    fused_add_rmsnorm,
    fused_add_rmsnorm_,
    fused_add_rmsnorm_quant_int8,
    rmsnorm,
    rmsnorm_quant_int8,
)
from tk_rmsnorm._plans import rmsnorm_backward
from tk_rmsnorm._reference import fused_add_rmsnorm_torch, rmsnorm_backward_torch, rmsnorm_torch

_LARGEST_INTERPRETED = 32_768


def _case(name: str, rows: int, hidden_size: int, source: str, *tags: str, **params: CaseValue) -> Case:
    defaults: dict[str, CaseValue] = {
        "form": "norm",
        "rows": rows,
        "hidden_size": hidden_size,
        "dtype": "bfloat16",
        "casting": "fp32",
        "weight_offset": 0.0,
        "eps": 1e-6,
        # Columns of the matrix that x is a slice of; 0 for a tensor of its own.
        "row_stride": 0,
    }
    return Case(name, {**defaults, **params}, source, frozenset(tags))


_CASES = (
    _case("llama3-8b-decode", 1, 4096, "Llama-3-8B input_layernorm, one token", "smoke", "decode", "headline"),
    _case("llama3-8b-decode-batch", 32, 4096, "Llama-3-8B input_layernorm, 32 sequences", "decode"),
    _case("llama3-8b-prefill", 2048, 4096, "Llama-3-8B input_layernorm, 2048 tokens", "prefill", "headline"),
    _case("llama3-70b-prefill", 8192, 8192, "Llama-3-70B input_layernorm, 8192 tokens", "prefill", "headline"),
    _case("llama3-405b-prefill", 4096, 16_384, "Llama-3.1-405B input_layernorm, 4096 tokens", "prefill", "headline"),
    _case("qwen3-qk-norm", 65_536, 128, "Qwen3-8B q_norm, 32 heads of 2048 tokens", "prefill", "headline"),
    _case(
        "qwen3-qk-norm-strided",
        65_536,
        128,
        "Qwen3-8B q_norm on the query columns of the fused projection",
        "prefill",
        row_stride=6144,
    ),
    _case("gemma3-27b-prefill", 2048, 5376, "Gemma-3-27B, weight stored as w - 1", "prefill", weight_offset=1.0),
    _case("llama3-8b-casting", 2048, 4096, "Llama-3-8B with transformers' rounding", "prefill", casting="llama"),
    _case("odd-hidden-size", 64, 4097, "no power of two and no 16-byte row", "smoke", dtype="float16"),
    _case("float32-prefill", 2048, 4096, "Llama-3-8B in float32", "prefill", dtype="float32"),
    _case("llama3-8b-add-decode", 1, 4096, "Llama-3-8B post_attention_layernorm", "smoke", "decode", form="add"),
    _case("llama3-8b-add-prefill", 2048, 4096, "the same, 2048 tokens", "prefill", "headline", form="add"),
    _case("llama3-70b-add-prefill", 8192, 8192, "Llama-3-70B, 8192 tokens", "prefill", "headline", form="add"),
    _case("llama3-405b-add-prefill", 4096, 16_384, "Llama-3.1-405B, 4096 tokens", "prefill", "headline", form="add"),
    _case("llama3-8b-add-in-place", 32, 4096, "the serving contract, 32 sequences", "decode", form="add_in_place"),
    _case("llama3-8b-quant-prefill", 2048, 4096, "Llama-3-8B input_layernorm before W8A8", "prefill", form="quant"),
    _case("llama3-8b-add-quant-prefill", 2048, 4096, "Llama-3-8B between W8A8 products", "prefill", form="add_quant"),
    _case("llama3-8b-add-quant-decode", 16, 4096, "the same, 16 sequences", "decode", form="add_quant"),
    _case("llama3-8b-backward", 8192, 4096, "Llama-3-8B training, 8192 tokens", "training", form="backward"),
    _case("qwen3-qk-norm-backward", 65_536, 128, "Qwen3-8B q_norm training", "training", form="backward"),
)


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """Return the arguments of one call; random, and only shapes on the meta device."""
    params: dict[str, Any] = dict(case.params)
    rows, hidden_size, dtype = params["rows"], params["hidden_size"], getattr(torch, params["dtype"])
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    if params["row_stride"]:
        # Heads of one token lie together, tokens a whole projection apart.
        heads = min(rows, 32)
        projection = random(rows // heads, params["row_stride"])
        x = projection[:, : heads * hidden_size].unflatten(1, (heads, hidden_size))
    else:
        x = random(rows, hidden_size)
    inputs: Inputs = {
        "form": params["form"],
        "x": x,
        "weight": random(hidden_size),
        # Made here, so that the host spends its time on the calls, not on their arguments.
        "numbers": {name: params[name] for name in ("eps", "weight_offset", "casting")},
        "is_plain": (params["form"], params["casting"], params["weight_offset"]) == ("norm", "fp32", 0.0),
    }
    if "add" in params["form"]:
        inputs["residual"] = random(rows, hidden_size)
    if params["form"] == "backward":
        inputs["dy"] = random(rows, hidden_size)
    return inputs


def run(inputs: Inputs) -> Any:
    """Call the package's function."""
    x, weight, numbers = inputs["x"], inputs["weight"], inputs["numbers"]
    if inputs["form"] == "norm":
        return rmsnorm(x, weight, **numbers)
    if inputs["form"] == "add":
        return fused_add_rmsnorm(x, inputs["residual"], weight, **numbers)
    if inputs["form"] == "add_in_place":
        return fused_add_rmsnorm_(x, inputs["residual"], weight, **numbers)
    if inputs["form"] == "quant":
        return rmsnorm_quant_int8(x, weight, **numbers)
    if inputs["form"] == "add_quant":
        return fused_add_rmsnorm_quant_int8(x, inputs["residual"], weight, **numbers)
    return rmsnorm_backward(inputs["dy"], None, x, weight, **numbers)


def reference(inputs: Inputs) -> Any:
    """Return the same results, computed in float64; codes are held against those of the norm that other cases check."""
    x, weight, numbers = inputs["x"], inputs["weight"], inputs["numbers"]
    if "quant" in inputs["form"]:
        # Of two norms a rounding apart, one element in many has another code.
        return _unfused(inputs)
    exact = x.double()
    if inputs["form"] == "norm":
        return rmsnorm_torch(exact, weight, **numbers).to(x.dtype)
    if inputs["form"] == "backward":
        gradients = rmsnorm_backward_torch(inputs["dy"].double(), None, exact, weight.double(), **numbers)
        return tuple(gradient.to(x.dtype) for gradient in gradients if gradient is not None)
    y, total = fused_add_rmsnorm_torch(exact, inputs["residual"], weight, **numbers)
    return y.to(x.dtype), total


def cost(case: Case) -> Cost:
    """Count every tensor once."""
    params: dict[str, Any] = dict(case.params)
    elements = params["rows"] * params["hidden_size"]
    size = getattr(torch, params["dtype"]).itemsize
    reads, writes, flops_per_element, weights_written = {
        "norm": (1, 1, 4, 0),
        "add": (2, 2, 5, 0),
        "add_in_place": (2, 2, 5, 0),
        "quant": (1, 0, 7, 0),
        "add_quant": (2, 1, 8, 0),
        "backward": (2, 1, 11, 1),
    }[params["form"]]
    weight_bytes = params["hidden_size"] * size
    # A byte for each code, and a scale in fp32 for each row.
    code_bytes = elements + 4 * params["rows"] if "quant" in params["form"] else 0
    return Cost(
        flops=flops_per_element * elements,
        bytes_read=reads * elements * size + weight_bytes,
        bytes_written=writes * elements * size + weights_written * weight_bytes + code_bytes,
    )


def tolerance(case: Case) -> Tolerance:
    """Rounding of the result, for gradients the cancellation of the terms they are sums of; codes must be equal."""
    params: dict[str, Any] = dict(case.params)
    dtype = getattr(torch, params["dtype"])
    if "quant" in params["form"]:
        return Tolerance(0.0, 0.0)
    roundings = 2 if params["casting"] == "llama" else 1
    if params["form"] == "backward":
        return rounding_tolerance(dtype, max(params["rows"], params["hidden_size"]), roundings=roundings, magnitude=4.0)
    return rounding_tolerance(dtype, params["hidden_size"], roundings=roundings)


def shrink(case: Case) -> Case:
    """Keep the hidden size, cut the rows."""
    rows = min(int(case.params["rows"] or 0), max(1, _LARGEST_INTERPRETED // int(case.params["hidden_size"] or 1)))
    return dataclasses.replace(case, params={**case.params, "rows": rows})


def _by_torch(inputs: Inputs) -> Any:
    if inputs["is_plain"]:
        x = inputs["x"]
        return torch.nn.functional.rms_norm(x, x.shape[-1:], inputs["weight"], inputs["numbers"]["eps"])
    return _formula(inputs)


def _formula(inputs: Inputs) -> Any:
    x, weight, numbers = inputs["x"], inputs["weight"], inputs["numbers"]
    if inputs["form"] == "norm":
        return rmsnorm_torch(x, weight, **numbers)
    if inputs["form"] == "backward":
        return rmsnorm_backward_torch(inputs["dy"], None, x, weight, **numbers)
    if inputs["form"] == "quant":
        return quantize_per_token_torch(rmsnorm_torch(x, weight, **numbers))
    y, total = fused_add_rmsnorm_torch(x, inputs["residual"], weight, **numbers)
    return (*quantize_per_token_torch(y), total) if inputs["form"] == "add_quant" else (y, total)


def _unfused(inputs: Inputs) -> Any:
    x, weight, numbers = inputs["x"], inputs["weight"], inputs["numbers"]
    if inputs["form"] == "quant":
        return quantize_per_token_torch(rmsnorm(x, weight, **numbers))
    y, total = fused_add_rmsnorm(x, inputs["residual"], weight, **numbers)
    return *quantize_per_token_torch(y), total


_COMPILED_UNFUSED = baselines.compiled(_unfused)


def _by_unfused(inputs: Inputs) -> Any:
    if "quant" not in inputs["form"]:
        raise BaselineUnavailable("this case is one of the parts")
    return _COMPILED_UNFUSED(inputs)


def _by_copy(inputs: Inputs) -> Any:
    if inputs["form"] == "backward" or not inputs["x"].is_contiguous():
        raise BaselineUnavailable("a plain copy moves other bytes than this case")
    if "quant" in inputs["form"]:
        # Codes have half the bytes of 16-bit elements: of 2 + 1, or of 4 + 3, a copy has half to read.
        x, residual = inputs["x"].flatten(), inputs.get("residual")
        n = x.numel() * 3 // 4 if residual is None else x.numel() * 7 // 8
        return baselines.copy(x[:n], None if residual is None else residual.flatten()[:n])
    return baselines.copy(inputs["x"], inputs.get("residual"))


def _by_liger(inputs: Inputs) -> Any:
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    except ImportError as error:
        raise BaselineUnavailable(f"liger-kernel is not installed ({error})") from error
    if not inputs["x"].is_cuda or not inputs["x"].is_contiguous():
        raise BaselineUnavailable("Liger takes contiguous GPU tensors only")
    numbers = inputs["numbers"]
    casting = "llama" if numbers["casting"] == "llama" else "gemma"
    rest = (inputs["weight"], numbers["eps"], numbers["weight_offset"], casting, False)
    if inputs["form"] == "norm":
        return LigerRMSNormFunction.apply(inputs["x"], *rest)
    if inputs["form"] == "add":
        return LigerFusedAddRMSNormFunction.apply(inputs["x"], inputs["residual"], *rest)
    raise BaselineUnavailable(f"Liger has no form {inputs['form']!r} to call alone")


SPEC = KernelSpec(
    name="tk-rmsnorm",
    summary="RMSNorm and residual add + RMSNorm, forward and backward, and quantised to int8",
    cases={case.name: case for case in _CASES},
    make_inputs=make_inputs,
    run=run,
    reference=reference,
    cost=cost,
    tolerance=tolerance,
    shrink=shrink,
    baselines={
        "torch": _by_torch,
        "torch.compile": baselines.compiled(_formula),
        "copy": _by_copy,
        "liger": _by_liger,
        "unfused": _by_unfused,
    },
    bars={
        "llama3-70b-prefill": {"torch.compile": 0.99},
        "llama3-405b-prefill": {"torch.compile": 0.97},
        "llama3-8b-prefill": {"torch.compile": 0.92},
        "qwen3-qk-norm": {"torch.compile": 0.98},
        "llama3-8b-decode": {"torch.compile": 0.85},
        "llama3-70b-add-prefill": {"copy": 1.02},
        "llama3-405b-add-prefill": {"copy": 1.03},
        "llama3-8b-add-prefill": {"torch.compile": 0.95},
    },
)
