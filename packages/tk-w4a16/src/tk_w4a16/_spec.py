"""What the tools need to know: the cases, their inputs, their cost, what they are held against."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.quantization import quantize_groups
from tk_kernel_core.spec import Case, CaseValue, Cost, Inputs, KernelSpec, Tolerance
from tk_w4a16._formats import Int4Weight
from tk_w4a16._ops import w4a16_gemm, w4a16_linear
from tk_w4a16._packing import PackedInt4Weight
from tk_w4a16._quantize import dequantize_int4, pack_int4
from tk_w4a16._reference import w4a16_linear_torch, w4a16_reference
from tk_w4a16._state import blank_weight

_SHAPES = {
    "llama2-7b": (11_008, 4096, "Llama-2-7B up_proj"),
    "llama3-70b": (28_672, 8192, "Llama-3-70B up_proj"),
    "llama2-7b-down": (4096, 11_008, "Llama-2-7B down_proj"),
}
# Rows, tags, and the highest ratio to cuBLAS for each of the shapes.
_HEADLINES: dict[str, tuple[int, list[str], tuple[float, float, float]]] = {
    "decode": (1, ["decode"], (0.34, 0.29, 0.33)),
    "decode-16": (16, ["decode"], (0.48, 0.40, 0.52)),
    "decode-64": (64, ["decode"], (0.70, 0.56, 0.64)),
    "chunk-256": (256, [], (1.25, 1.00, 1.08)),
    "prefill": (2048, ["prefill"], (1.12, 1.08, 1.10)),
}


def _case(name: str, m: int, n: int, k: int, source: str, *tags: str, **params: CaseValue) -> Case:
    defaults: dict[str, CaseValue] = {
        "form": "w4a16_linear",
        "m": m,
        "n": n,
        "k": k,
        "dtype": "float16",
        "group_size": 128,
        "symmetric": False,
        "act_order": False,
        "has_bias": False,
        # Where scales have 3 significant bits, weights are exact whether a kernel rounds them or not.
        "full_scales": False,
    }
    return Case(name, {**defaults, **params}, source, frozenset(tags))


_UP, _DOWN = _SHAPES["llama2-7b"], _SHAPES["llama2-7b-down"]
_CASES = (
    *(
        _case(f"{model}-{name}", m, n, k, f"{source}, {m} tokens", *tags, "headline", symmetric=True, full_scales=True)
        for model, (n, k, source) in _SHAPES.items()
        for name, (m, tags, _) in _HEADLINES.items()
    ),
    *(
        _case(f"llama2-7b-zeros-{name}", m, *_UP[:2], f"{_UP[2]} with zero points, {m} tokens", *tags, full_scales=True)
        for name, (m, tags, _) in _HEADLINES.items()
    ),
    _case(
        "llama3-70b-prompt-512",
        512,
        *_SHAPES["llama3-70b"][:2],
        f"{_SHAPES['llama3-70b'][2]}, 512 tokens",
        "prefill",
        symmetric=True,
        full_scales=True,
    ),
    _case(
        "qwen2-7b-gptq-decode",
        8,
        3584,
        3584,
        "Qwen2-7B q_proj with its bias, GPTQ with act-order, 8 sequences",
        "smoke",
        "decode",
        dtype="bfloat16",
        act_order=True,
        has_bias=True,
    ),
    _case("llama2-7b-act-order-64", 64, *_UP[:2], f"{_UP[2]}, GPTQ with act-order, 64 tokens", act_order=True),
    _case(
        "llama2-7b-group-32-decode",
        1,
        *_UP[:2],
        f"{_UP[2]} in symmetric groups of 32, one token",
        "smoke",
        "decode",
        dtype="bfloat16",
        group_size=32,
        symmetric=True,
    ),
    _case(
        "llama2-7b-down-group-64",
        64,
        *_DOWN[:2],
        f"{_DOWN[2]} in groups of 64, 64 tokens",
        dtype="bfloat16",
        group_size=64,
    ),
    _case("llama2-7b-channel-16", 16, *_UP[:2], f"{_UP[2]}, a scale for each channel", group_size=-1, symmetric=True),
    _case("odd-sizes", 5, 129, 127, "no whole tile, octet or group", "smoke", group_size=64),
    _case("llama2-7b-plain-decode", 16, *_UP[:2], f"{_UP[2]} in the plain layout, 16 tokens", form="w4a16_gemm"),
    _case(
        "llama2-7b-plain-prefill",
        512,
        *_UP[:2],
        f"{_UP[2]} in the plain layout, 512 tokens",
        "prefill",
        form="w4a16_gemm",
    ),
    _case("plain-group-16", 40, 136, 120, "groups smaller than any step", "smoke", form="w4a16_gemm", group_size=16),
)


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """Return the arguments of one call; random, and only shapes on the meta device."""
    params: dict[str, Any] = dict(case.params)
    m, n, k, dtype = params["m"], params["n"], params["k"], getattr(torch, params["dtype"])
    group_size = -1 if params["group_size"] >= k else params["group_size"]
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    # As large as makes results about 1.
    codes, scales, all_zeros = quantize_groups(random(n, k) / k**0.5, group_size, params["symmetric"])
    zeros = None if params["symmetric"] else all_zeros
    if not params["full_scales"]:
        mantissa, exponent = torch.frexp(scales.float())
        scales = torch.ldexp((mantissa * 8).round() / 8, exponent).to(dtype)
    inputs: Inputs = {"form": params["form"], "x": random(m, k), "bias": random(n) if params["has_bias"] else None}
    if params["form"] == "w4a16_gemm":
        zeros = torch.full_like(scales, 8.0) if zeros is None else zeros.to(dtype)
        tensors = {"packed": pack_int4(codes.t()), "scales": scales.t().contiguous(), "zeros": zeros.t().contiguous()}
        return {**inputs, **tensors, "group_size": group_size}
    index = None
    if params["act_order"]:
        index = torch.randperm(k, generator=generator, device=device) // params["group_size"]
    if device == "meta":
        # The same shapes, without packing nothing piece by piece.
        weight = blank_weight(k, n, group_size, params["symmetric"], params["act_order"], dtype, device)
    else:
        weight = PackedInt4Weight.pack(Int4Weight(codes, scales, zeros, index, group_size))
    tensors = {name: getattr(weight, name) for name in ("codes", "scales", "zeros", "permutation")}
    return {**inputs, **tensors, "weight": weight}


def run(inputs: Inputs) -> Any:
    """Call the package's function."""
    if inputs["form"] == "w4a16_linear":
        return w4a16_linear(inputs["x"], inputs["weight"], inputs["bias"])
    return w4a16_gemm(*(inputs[name] for name in ("x", "packed", "scales", "zeros", "group_size")))


def reference(inputs: Inputs) -> Any:
    """Return the same result, computed in float64."""
    x = inputs["x"]
    if inputs["form"] == "w4a16_linear":
        bias = None if inputs["bias"] is None else inputs["bias"].double()
        return w4a16_linear_torch(x.double(), inputs["weight"], bias).to(x.dtype)
    tensors = (inputs[name] for name in ("packed", "scales", "zeros", "group_size"))
    return w4a16_reference(x.double(), *tensors).to(x.dtype)


def cost(case: Case) -> Cost:
    """Count every tensor once, padding included."""
    params: dict[str, Any] = dict(case.params)
    m, n, k, dtype = params["m"], params["n"], params["k"], getattr(torch, params["dtype"])
    group_size, size = params["group_size"], dtype.itemsize
    if params["form"] == "w4a16_linear":
        blank = blank_weight(k, n, group_size, params["symmetric"], params["act_order"], dtype, "meta")
        tensors = [blank.codes, blank.scales, blank.zeros, blank.permutation]
        weight = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    else:
        weight = n * k // 2 + 2 * n * size * (1 if group_size == -1 else -(-k // group_size))
    read = m * k * size + weight + n * size * params["has_bias"]
    return Cost(flops=2 * m * n * k, bytes_read=read, bytes_written=m * n * size, peak=params["dtype"])


def tolerance(case: Case) -> Tolerance:
    """Rounding of the result, and cancellation in its sum."""
    params: dict[str, Any] = dict(case.params)
    dtype = getattr(torch, params["dtype"])
    # The terms of the sum are of the size of their largest partial sums.
    summing = rounding_tolerance(dtype, params["k"], magnitude=8.0)
    # Weights that a kernel rounds move results, which are about 1, by 0.3 units in the last place; 7 times that is
    # beyond what happens to one in a hundred million.
    rounding = 2 * torch.finfo(dtype).eps if params["full_scales"] else 0.0
    return Tolerance(summing.absolute + rounding, summing.relative)


def shrink(case: Case) -> Case:
    """Cut to a few tiles in all directions, none of them whole; K stays whole octets, as the plain layout has it."""
    params: dict[str, Any] = dict(case.params)
    smaller = {"m": min(params["m"], 20), "n": min(params["n"], 40), "k": min(params["k"], 296)}
    return dataclasses.replace(case, params={**params, **smaller})


def _by_cublas(inputs: Inputs) -> Any:
    if "dense" not in inputs:
        # Once for each set of inputs, before anything is timed.
        if inputs["form"] == "w4a16_linear":
            inputs["dense"] = inputs["weight"].dequantize()
        else:
            tensors = (inputs[name] for name in ("packed", "scales", "zeros", "group_size"))
            inputs["dense"] = dequantize_int4(*tensors).t().contiguous()
    return torch.nn.functional.linear(inputs["x"], inputs["dense"], inputs["bias"])


SPEC = KernelSpec(
    name="tk-w4a16",
    summary="Linear layers with 4-bit weights of GPTQ, AWQ and compressed-tensors checkpoints",
    cases={case.name: case for case in _CASES},
    make_inputs=make_inputs,
    run=run,
    reference=reference,
    cost=cost,
    tolerance=tolerance,
    shrink=shrink,
    baselines={"cublas": _by_cublas},
    bars={
        f"{model}-{name}": {"cublas": bar}
        for name, (*_, bars) in _HEADLINES.items()
        for model, bar in zip(_SHAPES, bars, strict=True)
    },
)
