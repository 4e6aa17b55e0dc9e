"""What the tools need to know: the cases, their inputs, their cost, what they are held against."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from tk_kernel_core import baselines
from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.spec import Case, CaseValue, Cost, Inputs, KernelSpec, Stages, Tolerance
from tk_moe_dispatch._expert_ops import fused_experts
from tk_moe_dispatch._ops import moe_router
from tk_moe_dispatch._packed import PackedExperts, packed_shapes
from tk_moe_dispatch._reference import fused_experts_torch, moe_router_torch

_MIXTRAL: dict[str, CaseValue] = {
    "n_experts": 8,
    "top_k": 2,
    "hidden": 4096,
    "ffn": 14_336,
    "dtype": "bfloat16",
    "gating": "softmax",
    "renormalize": True,
    "n_groups": None,
    "topk_groups": None,
    "scaling": 1.0,
    "shared_ffn": 0,
    "bits": 16,
    "group_size": -1,
    "has_zeros": False,
}
_QWEN2 = {**_MIXTRAL, "n_experts": 64, "top_k": 8, "hidden": 3584, "ffn": 2560, "renormalize": False}
_DEEPSEEK = {
    **_MIXTRAL,
    "n_experts": 256,
    "top_k": 8,
    "hidden": 7168,
    "ffn": 2048,
    "gating": "sigmoid",
    "n_groups": 8,
    "topk_groups": 4,
    "scaling": 2.5,
}
_MODELS = {"mixtral-8x7b": _MIXTRAL, "qwen2-57b": _QWEN2, "deepseek-v3": _DEEPSEEK}
_SOURCES = {"mixtral-8x7b": "Mixtral-8x7B", "qwen2-57b": "Qwen2-57B-A14B", "deepseek-v3": "DeepSeek-V3"}

# The roof of a case is the larger of two times, both measured beside it: that of a copy of as many bytes as experts,
# router, tokens and results have, and that of one dense product of as many operations.
_BARS: dict[tuple[str, int], tuple[str, float]] = {
    ("mixtral-8x7b", 1): ("copy", 1.08),
    ("mixtral-8x7b", 32): ("copy", 1.02),
    ("mixtral-8x7b", 128): ("copy", 1.06),
    ("mixtral-8x7b", 512): ("copy", 1.40),
    ("mixtral-8x7b", 2048): ("cublas", 1.24),
    ("mixtral-8x7b", 4096): ("cublas", 1.14),
    ("qwen2-57b", 1): ("copy", 1.2),
    ("qwen2-57b", 32): ("copy", 1.0),
    ("qwen2-57b", 512): ("copy", 1.18),
    ("qwen2-57b", 4096): ("cublas", 1.27),
    ("deepseek-v3", 1): ("copy", 1.1),
    ("deepseek-v3", 32): ("copy", 1.0),
    ("deepseek-v3", 128): ("copy", 1.0),
    ("deepseek-v3", 512): ("copy", 1.02),
    ("deepseek-v3", 4096): ("copy", 1.5),
}


def _headline(model: str, tokens: int) -> Case:
    kind = "decode" if tokens <= 128 else "prefill"
    source = f"{_SOURCES[model]}, {tokens} tokens"
    return Case(f"{model}-{tokens}", {**_MODELS[model], "tokens": tokens}, source, frozenset({kind, "headline"}))


def _packed(model: str, tokens: int, bits: int, group_size: int) -> Case:
    params = {**_MODELS[model], "tokens": tokens, "bits": bits, "group_size": group_size}
    groups = "rows" if group_size == -1 else f"groups of {group_size}"
    source = f"{_SOURCES[model]}, {tokens} tokens, weights of {bits} bits in symmetric {groups}"
    kind = {"decode"} if tokens <= 128 else set[str]()
    return Case(f"{model}-int{bits}-{tokens}", params, source, frozenset(kind))


_ASYMMETRIC: dict[str, CaseValue] = {"bits": 4, "group_size": 32, "has_zeros": True}
_ODD = {"tokens": 5, "n_experts": 9, "top_k": 3, "hidden": 72, "ffn": 40, "n_groups": 3, "topk_groups": 2}
_CASES = (
    *(_headline(model, tokens) for model, tokens in _BARS),
    _packed("mixtral-8x7b", 1, 4, 128),
    _packed("mixtral-8x7b", 512, 4, 128),
    _packed("deepseek-v3", 128, 8, -1),
    Case(
        "odd-sizes-int4",
        {**_QWEN2, **_ODD, "n_groups": None, "topk_groups": None, "tokens": 2, **_ASYMMETRIC},
        "as Qwen2-57B, with asymmetric groups of 32",
        frozenset({"smoke"}),
    ),
    Case(
        "odd-sizes",
        {**_DEEPSEEK, **_ODD, "shared_ffn": 24, "dtype": "float16"},
        "as DeepSeek-V3, with its shared expert",
        frozenset({"smoke"}),
    ),
)


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    """Return the tensors and settings of one layer; random, and only shapes on the meta device."""
    params: dict[str, Any] = dict(case.params)
    n_experts, hidden, ffn, shared_ffn = params["n_experts"], params["hidden"], params["ffn"], params["shared_ffn"]
    dtype = getattr(torch, params["dtype"])
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)

    def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(scale)

    def eighths(*shape: int) -> torch.Tensor:
        return random(*shape, scale=8.0).round_().div_(8.0)

    # Sums of products of eighths are exact, so that the same experts win everywhere, by however little.
    x, router_weight = eighths(params["tokens"], hidden), eighths(n_experts, hidden)
    inputs: Inputs = {
        "x": x,
        "router_weight": router_weight.mul_(2.0 ** -(hidden.bit_length() // 2)),
        "correction_bias": None,
        "w13": None,
        "w2": None,
        "shared_w13": random(2 * shared_ffn, hidden, scale=hidden**-0.5) if shared_ffn else None,
        "shared_w2": random(hidden, shared_ffn, scale=shared_ffn**-0.5) if shared_ffn else None,
        "bytes_moved": cost(case).bytes_moved,
    }
    if params["bits"] == 16:
        inputs["w13"] = random(n_experts, 2 * ffn, hidden, scale=hidden**-0.5)
        inputs["w2"] = random(n_experts, hidden, ffn, scale=ffn**-0.5)
        inputs["experts"] = None
    else:
        w13, w2 = (_random_experts(params, is_gated, generator, device) for is_gated in (True, False))
        inputs["experts"] = w13, w2
        inputs["w13"], inputs["w2"] = ((part.codes, part.scales, part.zeros) for part in (w13, w2))
    names = "top_k", "gating", "renormalize", "n_groups", "topk_groups"
    inputs["routing"] = {**{name: params[name] for name in names}, "routed_scaling_factor": params["scaling"]}
    if params["n_groups"] is not None:
        # So small that experts stay about equally loaded.
        inputs["correction_bias"] = random(n_experts, scale=2.0**-8).float()
    return inputs


def _random_experts(params: dict[str, Any], gated: bool, generator: Any, device: str) -> PackedExperts:
    """Return w13 or w2, packed. Scales are powers of two: no rounding of the weight to 16 bits changes it."""
    n_experts, hidden, ffn, bits = params["n_experts"], params["hidden"], params["ffn"], params["bits"]
    n, k = (2 * ffn, hidden) if gated else (hidden, ffn)
    shape, groups = packed_shapes(n_experts, n, k, bits, params["group_size"], gated=gated)

    def integers(low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device=device, dtype=dtype)

    # What is padded counts for nothing, whatever it is.
    codes = integers(-(2**31), 2**31, shape, torch.int32)
    scales = 2.0 ** -(integers(0, 3, groups, torch.int32) + bits + math.ceil(math.log2(k) / 2))
    zeros = None
    if params["has_zeros"]:
        zeros = integers(-128, 128, groups, torch.int8) if bits == 8 else integers(0, 17, groups, torch.uint8)
    scales = scales.to(torch.float32 if bits == 8 else getattr(torch, params["dtype"]))
    return PackedExperts(codes, scales, zeros, params["group_size"], n, k, "concat" if gated else None)


def run(inputs: Inputs) -> Any:
    """Route tokens, and apply the experts."""
    return _layer(moe_router, fused_experts, inputs, inputs["experts"] or (inputs["w13"], inputs["w2"]))


def reference(inputs: Inputs) -> Any:
    """Return the same by PyTorch operations in float32."""
    return _layer(moe_router_torch, fused_experts_torch, inputs, _dense(inputs))


def _dense(inputs: Inputs, n_experts: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return w13 and w2 of the first experts, or of all, in the dtype of the tokens."""
    if inputs["experts"] is None:
        return inputs["w13"][:n_experts], inputs["w2"][:n_experts]
    w13, w2 = (part.of(slice(n_experts)).dequantize(inputs["x"].dtype) for part in inputs["experts"])
    return w13, w2


def _layer(route: Any, apply: Any, inputs: Inputs, experts: Any) -> Any:
    x, bias = inputs["x"], inputs["correction_bias"]
    indices, weights, _ = route(x, inputs["router_weight"], correction_bias=bias, **inputs["routing"])
    shared = {name: inputs[name] for name in ("shared_w13", "shared_w2")}
    return apply(x, *experts, weights, indices, **shared)


def cost(case: Case) -> Cost:
    """Count the experts that tokens go to, on average over routings at random, and everything else once."""
    params: dict[str, Any] = dict(case.params)
    tokens, n_experts, top_k, hidden = (params[name] for name in ("tokens", "n_experts", "top_k", "hidden"))
    size = getattr(torch, params["dtype"]).itemsize
    experts = round(_used_experts(params) * sum(_expert_bytes(params)))
    read = size * hidden * (tokens + n_experts + 3 * params["shared_ffn"]) + experts
    read += 4 * n_experts * (params["n_groups"] is not None)
    products = n_experts + 3 * (top_k * params["ffn"] + params["shared_ffn"])
    return Cost(
        2 * tokens * hidden * products, bytes_read=read, bytes_written=size * tokens * hidden, peak=params["dtype"]
    )


def _used_experts(params: dict[str, Any]) -> float:
    # An expert is left out by all tokens with this probability.
    unused = (1 - params["top_k"] / params["n_experts"]) ** params["tokens"]
    return float(params["n_experts"] * (1 - unused))


def _expert_bytes(params: dict[str, Any]) -> tuple[float, float]:
    """Return the bytes of an expert's w13 and of its w2, with scales and zero points."""
    if params["bits"] == 16:
        n_bytes = getattr(torch, params["dtype"]).itemsize * params["ffn"] * params["hidden"]
        return 2 * n_bytes, n_bytes
    w13, w2 = (_random_experts(params, is_gated, None, "meta") for is_gated in (True, False))
    parts = [[part.codes, part.scales, part.zeros] for part in (w13, w2)]
    up, down = (sum(tensor.nbytes for tensor in tensors if tensor is not None) for tensors in parts)
    return up / params["n_experts"], down / params["n_experts"]


def stage_cost(case: Case) -> dict[str, Cost]:
    """Count the stages of the path through sorted slots; others do the work of several in one kernel."""
    params: dict[str, Any] = dict(case.params)
    tokens, n_experts, top_k, hidden = (params[name] for name in ("tokens", "n_experts", "top_k", "hidden"))
    ffn, shared_ffn, dtype = params["ffn"], params["shared_ffn"], params["dtype"]
    size, slots = getattr(torch, dtype).itemsize, tokens * top_k
    up, down = (round(_used_experts(params) * n_bytes) for n_bytes in _expert_bytes(params))
    shared = size * shared_ffn * hidden
    # Rows per token that the experts return, that of the shared expert included.
    rows = top_k + bool(shared_ffn)
    x, h = tokens * hidden, tokens * (top_k * ffn + shared_ffn)
    # Ids are of 8 bytes; routing weights, and what sorting hands on of each slot, of 4.
    router = size * (x + n_experts * hidden) + 4 * n_experts * (params["n_groups"] is not None)
    return {
        "router": Cost(2 * x * n_experts, router, 12 * slots, dtype),
        "schedule": Cost(0, 8 * slots, 8 * slots + 4 * (n_experts + 1)),
        "permute": Cost(0, size * x + 4 * slots, size * slots * hidden),
        "GEMM 1": Cost(4 * h * hidden, size * x + up + 2 * shared + 4 * slots, size * h, dtype),
        "GEMM 2": Cost(2 * h * hidden, size * h + down + shared + 4 * slots, size * rows * x, dtype),
        "combine": Cost((rows - 1) * x, size * rows * x + 4 * slots, size * x),
    }


_STAGES = {
    "route_kernel": "router",
    "count_kernel": "schedule",
    "schedule_kernel": "schedule",
    "permute_kernel": "permute",
    "arrange_rows_kernel": "permute",
    "stream_up_kernel": "GEMM 1",
    "stream_down_kernel": "GEMM 2",
    "combine_kernel": "combine",
}


# Each serves both.
_PRODUCTS = "expert_gemm_kernel", "packed_experts_kernel"


def assign_stages(kernels: Sequence[str]) -> list[str | None]:
    """Tell a layer's kernels apart, by name, and where one serves two stages, by turns."""
    turns = itertools.cycle(("GEMM 1", "GEMM 2"))
    stages = [next(turns) if name in _PRODUCTS else _STAGES.get(name) for name in kernels]
    # PyTorch multiplies many tokens by the router, with kernels of its own choice.
    scoring = stages.index("router") if "router" in stages else 0
    return ["router"] * scoring + stages[scoring:]


def tolerance(case: Case) -> Tolerance:
    """Roundings inside experts, of what each returns, and of the sum."""
    params: dict[str, Any] = dict(case.params)
    relative = rounding_tolerance(getattr(torch, params["dtype"]), params["ffn"], roundings=3).relative
    # Terms are of size 1 where they cancel, times what the weights of a token sum up to.
    return Tolerance(absolute=relative * max(1.0, params["scaling"]), relative=relative)


def shrink(case: Case) -> Case:
    """Cut to a few tiles in all directions; experts stay more than a token goes to."""
    most = {"tokens": 4, "n_experts": 16, "top_k": 3, "hidden": 40, "ffn": 24}
    smaller = {name: min(int(case.params[name] or 0), largest) for name, largest in most.items()}
    return dataclasses.replace(case, params={**case.params, **smaller})


def _copy(inputs: Inputs) -> Any:
    """Copy as many bytes as the layer moves: half of them are read, half are written."""
    weights = (inputs["w13"] if inputs["experts"] is None else inputs["w13"][0]).view(-1)
    # Whole pages: an odd number of elements would be copied one by one.
    n_elements = inputs["bytes_moved"] // 2 // weights.element_size() // 4096 * 4096
    return baselines.copy(weights[:n_elements])


def _by_cublas(inputs: Inputs) -> Any:
    """Multiply all (token, expert) pairs by one expert's three weights, as if there were no others."""
    if "pairs" not in inputs:
        # Once for each set of inputs, before anything is timed.
        inputs["pairs"] = inputs["x"].repeat(inputs["routing"]["top_k"], 1)
        w13, w2 = _dense(inputs, 1)
        inputs["dense"] = torch.cat([w13[0], w2[0].t()])
    return torch.nn.functional.linear(inputs["pairs"], inputs["dense"])


SPEC = KernelSpec(
    name="tk-moe-dispatch",
    summary="Mixture-of-experts layers, from the router to the combined output",
    cases={case.name: case for case in _CASES},
    make_inputs=make_inputs,
    run=run,
    reference=reference,
    cost=cost,
    tolerance=tolerance,
    shrink=shrink,
    baselines={"copy": _copy, "cublas": _by_cublas},
    bars={f"{model}-{tokens}": dict([bar]) for (model, tokens), bar in _BARS.items()},
    stages=Stages(stage_cost, assign_stages),
)
