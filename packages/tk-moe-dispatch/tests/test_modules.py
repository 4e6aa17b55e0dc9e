"""The layer as a module: conventions of models, and what modules go through."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.spec import Tolerance
from tk_moe_dispatch import FusedMoE, fused_experts, fused_experts_torch, moe_router, moe_router_torch
from tk_moe_dispatch._reference import gate_and_up
from tk_testkit.close import assert_close

Tensor = torch.Tensor
HALF = torch.float16

# Of no kernel: run beside what compiles, in a process that the interpreter does not slow down.
without_interpreter = pytest.mark.compiler
DEEPSEEK = {"gating": "sigmoid", "renormalize": True, "n_groups": 2, "topk_groups": 1, "routed_scaling_factor": 2.5}
GPT_OSS = {"renormalize": True, "layout": "interleaved", "alpha": 1.702, "beta": 1.0, "limit": 1.5}
LLAMA4 = {"gating": "sigmoid", "apply_router_weight_on_input": True}
# How a layer is made, and which tensors and settings it then has beside the usual ones.
CONVENTIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "Mixtral": (2, {"renormalize": True}),
    "Qwen2-MoE": (3, {}),
    "DeepSeek-V3": (2, {**DEEPSEEK, "correction_bias": True, "shared_intermediate_size": 24}),
    "gpt-oss": (2, {**GPT_OSS, "router_bias": True, "expert_bias": True}),
    "Llama-4": (1, {**LLAMA4, "shared_intermediate_size": 24}),
    "Switch": (1, {"capacity_factor": 1.0}),
}
NAMES = ["router_weight", "router_bias", "correction_bias", "w13", "w2", "w13_bias", "w2_bias"]
NAMES += ["shared_w13", "shared_w2"]


def layer(convention: str, device: str = "cpu", dtype: torch.dtype = HALF) -> FusedMoE:
    top_k, options = CONVENTIONS[convention]
    torch.manual_seed(0)
    made = FusedMoE(32, 16, 4, top_k, **options).to(device, dtype)
    for bias in (made.router_bias, made.correction_bias, made.w13_bias, made.w2_bias):
        if bias is not None:
            torch.nn.init.normal_(bias)
    return made


def tokens(device: str, *shape: int) -> Tensor:
    return torch.randn(*shape, 32, generator=torch.Generator().manual_seed(1)).to(device, HALF)


def by_formula(made: FusedMoE, x: Tensor, convention: str) -> Tensor:
    """Return the layer's result in float64."""
    top_k, options = CONVENTIONS[convention]
    held = {name: None if (value := getattr(made, name)) is None else value.double() for name in NAMES}
    routing = {name: options[name] for name in ("gating", "renormalize", *DEEPSEEK) if name in options}
    x = x.double()
    bias = {"router_bias": held["router_bias"], "correction_bias": held["correction_bias"]}
    ids, weights, _ = moe_router_torch(x, held["router_weight"], top_k, **bias, **routing)
    named = ("layout", "alpha", "beta", "limit", "capacity_factor")
    further = {name: options[name] for name in named if name in options}
    further |= {name: held[name] for name in ("w13_bias", "w2_bias")}
    shared = {name: held[name] for name in ("shared_w13", "shared_w2")}
    experts = held["w13"], held["w2"]
    if convention != "Llama-4":
        return fused_experts_torch(x, *experts, weights, ids, **further, **shared)
    routed = fused_experts_torch(x * weights, *experts, torch.ones_like(weights), ids, **further)
    return routed + fused_experts_torch(x, *experts, 0 * weights, ids, **shared)


@pytest.mark.parametrize("convention", ["DeepSeek-V3", "gpt-oss", "Llama-4", "Switch"])
def test_a_layer_computes_what_its_settings_say(convention: str, device: str) -> None:
    made = layer(convention, device)
    x = tokens(device, 1, 3)
    with torch.no_grad():
        got = made(x)
    want = by_formula(made, x, convention)
    # Tokens, the inside of experts, what each returns and the sum are rounded; terms that cancel have their errors.
    relative = rounding_tolerance(HALF, 32, roundings=4).relative
    assert got.shape == x.shape
    assert_close(got, want.to(HALF), Tolerance(relative * float(want.abs().max()), relative))


def test_a_layer_is_its_router_and_its_experts_bit_for_bit(device: str) -> None:
    made, x = layer("Mixtral", device), tokens(device, 1, 2)
    seen = []
    made.recorder = torch.nn.Identity()
    made.recorder.register_forward_hook(lambda _module, _arguments, result: seen.append(result))
    made.return_router_logits = True
    y, logits = made(x)
    routing = made.route(x)
    for got, want in zip(moe_router(x, made.router_weight, 2, renormalize=True), routing, strict=True):
        assert torch.equal(got, want)
    assert torch.equal(y, fused_experts(x, made.w13, made.w2, routing.top_k_weights, routing.top_k_indices))
    assert torch.equal(logits, routing.router_logits.flatten(0, 1))
    # What hooks see: one row for each token.
    ((seen_logits, weights, indices),) = seen
    assert torch.equal(seen_logits, logits)
    assert torch.equal(weights, routing.top_k_weights.flatten(0, 1))
    assert torch.equal(indices, routing.top_k_indices.flatten(0, 1))
    assert made(x[:0])[0].shape == (0, 2, 32)


SETTINGS = ["num_experts", "hidden_size", "intermediate_size", "top_k", "gating", "renormalize", *DEEPSEEK, "limit"]


def assert_same(got: FusedMoE, want: FusedMoE) -> None:
    assert got.state_dict().keys() == want.state_dict().keys()
    for name, tensor in want.state_dict().items():
        assert torch.equal(got.state_dict()[name], tensor), name
        assert got.state_dict()[name].dtype == tensor.dtype
    assert [getattr(got, name) for name in SETTINGS] == [getattr(want, name) for name in SETTINGS]


@without_interpreter
def test_the_state_dict_has_the_names_of_the_arguments() -> None:
    made = layer("DeepSeek-V3")
    assert list(made.state_dict()) == ["router_weight", "w13", "w2", "shared_w13", "shared_w2", "correction_bias"]
    assert list(layer("gpt-oss").state_dict()) == ["router_weight", "router_bias", "w13", "w2", "w13_bias", "w2_bias"]
    assert list(layer("Qwen2-MoE").state_dict()) == ["router_weight", "w13", "w2"]
    assert not any(parameter.requires_grad for parameter in made.parameters())


@without_interpreter
def test_copies_loading_and_conversions_keep_the_layer(device: str) -> None:
    made = layer("DeepSeek-V3", device)
    made.recorder = torch.nn.Identity()
    for copied in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert_same(copied, made)
        assert copied.w13.data_ptr() != made.w13.data_ptr()
    options = CONVENTIONS["DeepSeek-V3"][1]
    loaded = FusedMoE(32, 16, 4, 2, **options, device=device, dtype=HALF)
    bare, filled = (FusedMoE(32, 16, 4, 2, **options, device="meta", dtype=HALF) for _ in range(2))
    loaded.load_state_dict(made.state_dict())
    bare.load_state_dict(made.state_dict(), assign=True)
    filled.to_empty(device=device).load_state_dict(made.state_dict())
    for other in (loaded, bare, filled, made.to(torch.float64).to(HALF)):
        assert_same(other, made)


@without_interpreter
def test_a_correction_bias_is_never_rounded() -> None:
    made = layer("DeepSeek-V3")
    exact = made.correction_bias.clone()
    made.bfloat16()
    assert (made.router_weight.dtype, made.w13.dtype) == (torch.bfloat16, torch.bfloat16)
    assert torch.equal(made.correction_bias, exact)
    assert made.to("meta", HALF).correction_bias.dtype == torch.float32


def separate(made: FusedMoE) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the weights of the experts of a layer with layout concat, one by one."""
    return [(*w13.chunk(2), w2) for w13, w2 in zip(made.w13.detach(), made.w2.detach(), strict=True)]


@without_interpreter
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_experts_held_one_by_one_are_packed(layout: str) -> None:
    made = layer("DeepSeek-V3")
    shared = (*made.shared_w13.detach().chunk(2), made.shared_w2.detach())
    further = {"correction_bias": made.correction_bias.double(), "layout": layout, **DEEPSEEK}
    packed = FusedMoE.from_experts(made.router_weight, separate(made), 2, shared=shared, **further)
    for name in ("w13", "shared_w13"):
        got, want = gate_and_up(getattr(packed, name), layout), getattr(made, name).chunk(2, -2)
        assert all(map(torch.equal, got, want)), name
        setattr(packed, name, getattr(made, name))
    assert packed.layout == layout
    assert_same(packed, made)
    assert packed.router_weight is made.router_weight
    assert "hidden_size=32, intermediate_size=16, num_experts=4, top_k=2, gating='sigmoid'" in str(packed)


@without_interpreter
def test_packed_weights_are_held_and_not_copied() -> None:
    made = layer("gpt-oss")
    held = {name: getattr(made, name) for name in ("router_bias", "w13_bias", "w2_bias")}
    w13, w2 = made.w13.detach(), torch.nn.Parameter(made.w2.detach())
    again = FusedMoE.from_weights(made.router_weight, w13, w2, 2, **held, **GPT_OSS)
    assert_same(again, made)
    assert again.w13.data_ptr() == w13.data_ptr()
    assert again.w2 is w2
    assert again.w13_bias is made.w13_bias
    # A weight that is to be trained stays one, and does not silently stay as it is.
    with pytest.raises(NotImplementedError, match="requires a gradient"):
        again(tokens("cpu", 1))


ZEROS = torch.zeros(4, 32, dtype=HALF)
W13, W2 = torch.zeros(4, 32, 32, dtype=HALF), torch.zeros(4, 32, 16, dtype=HALF)
BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: FusedMoE(0, 16, 4, 2), ValueError, "hidden_size must be at least 1, got 0"),
    (lambda: FusedMoE(32, 16, 4.0, 2), TypeError, "num_experts must be an int, got float"),
    (lambda: FusedMoE(32, 16, 4, 5), ValueError, "top_k must be from 1 to 4, got 5"),
    (lambda: FusedMoE(32, 16, 4, 2, gating="relu"), ValueError, "gating must be one of"),
    (lambda: FusedMoE(32, 16, 4, 2, limit=-1.0), ValueError, "limit must be finite and at least 0, got -1"),
    (lambda: FusedMoE(32, 16, 4, 2, layout="up_first"), ValueError, "layout must be one of"),
    (lambda: FusedMoE(32, 16, 4, 2, **LLAMA4), ValueError, "must come with a top_k of 1, got 2"),
    (lambda: FusedMoE(32, 16, 4, 2, return_router_logits=1), TypeError, "return_router_logits must be a bool, got int"),
    (lambda: FusedMoE.from_weights(ZEROS, W13, W2, 2, norm=True), TypeError, "settings of a layer are .*, got norm"),
    (lambda: FusedMoE.from_weights(ZEROS[:3], W13, W2, 2), ValueError, "w13 must have the 3 experts of router_weight"),
    (lambda: FusedMoE.from_weights(ZEROS, W13, W2.float(), 2), TypeError, "w2 must have the dtype of x"),
    (lambda: FusedMoE.from_weights(ZEROS, W13, None, 2), TypeError, "w2 must be a torch.Tensor, got NoneType"),
    (lambda: FusedMoE.from_experts(ZEROS, [], 2), ValueError, "experts must hold at least one, got none"),
    (lambda: FusedMoE.from_experts(ZEROS, [(W13[0], W13[0])], 2), ValueError, r"experts\[0\] must be the weights of"),
    (
        lambda: FusedMoE.from_experts(ZEROS, [(W13[0], W13[0], W2[0])], 2),
        ValueError,
        r"experts\[0\]\[2\] must have shape \(32, 32\), got \(32, 16\)",
    ),
]


@without_interpreter
@pytest.mark.parametrize("make", BAD, ids=lambda bad: bad[2][:30])
def test_bad_arguments(make: tuple[Any, type[Exception], str]) -> None:
    call, error, message = make
    with pytest.raises(error, match=message):
        call()


@without_interpreter
def test_tokens_of_another_dtype_are_refused() -> None:
    with pytest.raises(TypeError, match="x must have dtype float16, bfloat16, got float32"):
        layer("Mixtral")(torch.zeros(2, 32))
