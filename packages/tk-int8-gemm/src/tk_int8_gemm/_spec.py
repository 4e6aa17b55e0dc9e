"""What the tools need to know: the cases, their inputs, their cost, what they are held against."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tk_int8_gemm._ops import int8_gemm, int8_linear, quantize_per_token, w8a8_gemm
from tk_int8_gemm._packing import PackedInt8Weight
from tk_int8_gemm._quantize import dequantize
from tk_int8_gemm._reference import int8_gemm_torch, quantize_per_token_torch, w8a8_gemm_torch
from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.spec import BaselineUnavailable, Case, CaseValue, Cost, Inputs, KernelSpec, Tolerance

_LLAMA2, _LLAMA3 = "Llama-2-7B up_proj", "Llama-3-70B up_proj"


def _case(name: str, form: str, m: int, n: int, k: int, source: str, *tags: str, **params: CaseValue) -> Case:
    defaults: dict[str, CaseValue] = {
        "form": form,
        "m": m,
        "n": n,
        "k": k,
        "dtype": "float16",
        "has_zero_point": False,
        "has_bias": False,
    }
    return Case(name, {**defaults, **params}, source, frozenset(tags))


def _weight_only(name: str, m: int, *tags: str) -> tuple[Case, Case]:
    return (
        _case(f"llama2-7b-{name}", "int8_linear", m, 11_008, 4096, f"{_LLAMA2}, {m} tokens", *tags),
        _case(f"llama3-70b-{name}", "int8_linear", m, 28_672, 8192, f"{_LLAMA3}, {m} tokens", *tags),
    )


def _w8a8(name: str, m: int, *tags: str) -> tuple[Case, Case]:
    return (
        _case(f"llama2-7b-w8a8-{name}", "w8a8_gemm", m, 11_008, 4096, f"{_LLAMA2}, {m} tokens", *tags),
        _case(f"llama3-70b-w8a8-{name}", "w8a8_gemm", m, 28_672, 8192, f"{_LLAMA3}, {m} tokens", *tags),
    )


_CASES = (
    *_weight_only("decode", 1, "decode", "headline"),
    *_weight_only("decode-16", 16, "decode", "headline"),
    *_weight_only("decode-64", 64, "decode", "headline"),
    *_weight_only("chunk-256", 256, "headline"),
    *_weight_only("prefill", 2048, "headline"),
    *_w8a8("decode-16", 16, "decode", "headline"),
    *_w8a8("decode-64", 64, "decode", "headline"),
    *_w8a8("chunk-256", 256, "prefill", "headline"),
    *_w8a8("prefill", 2048, "prefill", "headline"),
    _case("llama3-70b-prompt-512", "int8_linear", 512, 28_672, 8192, f"{_LLAMA3}, 512 tokens", "prefill"),
    _case("llama2-7b-down-decode", "int8_linear", 1, 4096, 11_008, "Llama-2-7B down_proj, one token", "decode"),
    _case(
        "qwen2-7b-asymmetric-decode",
        "int8_linear",
        8,
        3584,
        3584,
        "Qwen2-7B q_proj with its bias and zero points, 8 sequences",
        "smoke",
        "decode",
        dtype="bfloat16",
        has_zero_point=True,
        has_bias=True,
    ),
    _case("llama2-7b-plain-decode", "int8_gemm", 16, 11_008, 4096, f"{_LLAMA2} in plain codes, 16 tokens", "decode"),
    _case("llama2-7b-plain-prefill", "int8_gemm", 256, 11_008, 4096, f"{_LLAMA2} in plain codes, 256 tokens"),
    _case(
        "qwen2-7b-w8a8-asymmetric",
        "w8a8_gemm",
        512,
        3584,
        3584,
        "Qwen2-7B q_proj with its bias and zero points, 512 tokens",
        "prefill",
        dtype="bfloat16",
        has_zero_point=True,
        has_bias=True,
    ),
    _case("odd-sizes", "int8_gemm", 5, 129, 127, "no power of two and no 16-byte row", "smoke"),
    _case(
        "quantize-prefill", "quantize", 2048, 0, 4096, "Llama-3-8B, 2048 tokens", "smoke", "prefill", dtype="bfloat16"
    ),
)


# With more rows `int8_linear` may multiply by weights that are rounded to the dtype of x.
_MOST_ROWS_UNROUNDED = 256


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """Return the arguments of one call; random, and only shapes on the meta device."""
    params: dict[str, Any] = dict(case.params)
    m, n, k, dtype = params["m"], params["n"], params["k"], getattr(torch, params["dtype"])
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator, device=device)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    inputs: Inputs = {"form": params["form"], "x": random(m, k).to(dtype)}
    if params["form"] == "quantize":
        return inputs
    weight, scale = codes(n, k), (random(n).abs() + 0.5) / (127 * k**0.5)
    zero_point = codes(n).float() if params["has_zero_point"] else None
    if params["form"] == "int8_linear":
        prepared = PackedInt8Weight.pack(weight, scale, zero_point)
        inputs["weight"] = prepared
        weight, scale, zero_point = prepared.codes, prepared.scale, prepared.zero_point
    return {
        **inputs,
        "codes": weight,
        "scale": scale,
        "zero_point": zero_point,
        "bias": random(n).to(dtype) if params["has_bias"] else None,
    }


def run(inputs: Inputs) -> Any:
    """Call the package's function."""
    x = inputs["x"]
    if inputs["form"] == "int8_linear":
        return int8_linear(x, inputs["weight"], inputs["bias"])
    if inputs["form"] == "quantize":
        return quantize_per_token(x)
    function = int8_gemm if inputs["form"] == "int8_gemm" else w8a8_gemm
    return function(x, inputs["codes"], inputs["scale"], inputs["bias"], zero_point=inputs["zero_point"])


def reference(inputs: Inputs) -> Any:
    """Return the same results, computed in float64."""
    x = inputs["x"]
    if inputs["form"] == "quantize":
        return quantize_per_token_torch(x)
    codes, scale, zero_point = _plain(inputs), inputs["scale"], inputs["zero_point"]
    bias = None if inputs["bias"] is None else inputs["bias"].double()
    if inputs["form"] == "w8a8_gemm":
        return w8a8_gemm_torch(x, codes, scale, bias, zero_point=zero_point)
    return int8_gemm_torch(x.double(), codes, scale, bias, zero_point=zero_point).to(x.dtype)


def cost(case: Case) -> Cost:
    """Count every tensor once."""
    params: dict[str, Any] = dict(case.params)
    m, n, k, size = params["m"], params["n"], params["k"], getattr(torch, params["dtype"]).itemsize
    if params["form"] == "quantize":
        return Cost(flops=3 * m * k, bytes_read=m * k * size, bytes_written=m * (k + 4))
    vectors = 4 * n * (1 + params["has_zero_point"]) + n * size * params["has_bias"]
    read, peak = m * k * size + n * k + vectors, "int8" if params["form"] == "w8a8_gemm" else params["dtype"]
    return Cost(flops=2 * m * n * k, bytes_read=read, bytes_written=m * n * size, peak=peak)


def tolerance(case: Case) -> Tolerance:
    """Rounding of the result, and cancellation in its sum; codes must be equal."""
    params: dict[str, Any] = dict(case.params)
    if params["form"] == "quantize":
        return Tolerance(0.0, 0.0)
    dtype = getattr(torch, params["dtype"])
    # The terms of the sum are of the size of their largest partial sums.
    summing = rounding_tolerance(dtype, params["k"], magnitude=8.0)
    # Weights that are rounded move results by a fifth of a unit in the last place of their size, which is below 3 even
    # for the largest scales of tens of thousands; 7 times that is beyond what happens to one in a hundred million.
    may_round = params["form"] == "int8_linear" and params["m"] > _MOST_ROWS_UNROUNDED
    rounding = 4 * torch.finfo(dtype).eps if may_round else 0.0
    return Tolerance(summing.absolute + rounding, summing.relative)


def shrink(case: Case) -> Case:
    """Cut to a few tiles in all directions."""
    params: dict[str, Any] = dict(case.params)
    smaller = {"m": min(params["m"], 40), "n": min(params["n"], 192), "k": min(params["k"], 512)}
    return dataclasses.replace(case, params={**params, **smaller})


def _plain(inputs: Inputs) -> torch.Tensor:
    codes: torch.Tensor = inputs["weight"].unpack() if inputs["form"] == "int8_linear" else inputs["codes"]
    return codes


def _by_cublas(inputs: Inputs) -> Any:
    if inputs["form"] == "quantize":
        raise BaselineUnavailable("quantisation multiplies nothing")
    if "dense" not in inputs:
        # Once for each set of inputs, before anything is timed.
        dense = dequantize(_plain(inputs), inputs["scale"], inputs["x"].dtype, zero_point=inputs["zero_point"])
        inputs["dense"] = dense
    return torch.nn.functional.linear(inputs["x"], inputs["dense"], inputs["bias"])


def _by_int_mm(inputs: Inputs) -> Any:
    if inputs["form"] != "w8a8_gemm" or inputs["zero_point"] is not None:
        raise BaselineUnavailable("torch._int_mm multiplies symmetric codes alone")
    x = inputs["x"]
    if x.shape[0] <= 16:
        raise BaselineUnavailable("torch._int_mm takes more than 16 rows")
    x_scale = x.abs().amax(-1, keepdim=True).float() / 127
    codes = (x / x_scale).round().to(torch.int8)
    sums = torch._int_mm(codes, inputs["codes"].t())
    return (sums * x_scale * inputs["scale"]).to(x.dtype)


_BARS = {
    "llama2-7b-decode": 0.52,
    "llama3-70b-decode": 0.51,
    "llama2-7b-decode-16": 0.64,
    "llama3-70b-decode-16": 0.52,
    "llama2-7b-decode-64": 0.84,
    "llama3-70b-decode-64": 0.66,
    "llama2-7b-chunk-256": 1.25,
    "llama3-70b-chunk-256": 1.15,
    "llama2-7b-prefill": 1.15,
    "llama3-70b-prefill": 1.10,
    "llama2-7b-w8a8-decode-16": 0.68,
    "llama3-70b-w8a8-decode-16": 0.52,
    "llama2-7b-w8a8-decode-64": 0.72,
    "llama3-70b-w8a8-decode-64": 0.56,
    "llama2-7b-w8a8-chunk-256": 0.70,
    "llama3-70b-w8a8-chunk-256": 0.52,
    "llama2-7b-w8a8-prefill": 0.58,
    "llama3-70b-w8a8-prefill": 0.50,
}

SPEC = KernelSpec(
    name="tk-int8-gemm",
    summary="Linear layers with int8 weights: weight-only, and with activations quantised per token",
    cases={case.name: case for case in _CASES},
    make_inputs=make_inputs,
    run=run,
    reference=reference,
    cost=cost,
    tolerance=tolerance,
    shrink=shrink,
    baselines={"cublas": _by_cublas, "int_mm": _by_int_mm},
    bars={name: {"cublas": bar} for name, bar in _BARS.items()},
)
