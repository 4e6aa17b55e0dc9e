"""Replacing the layers of transformers models, and which of them stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tk_kernel_core.numerics import rounding_tolerance
from tk_moe_dispatch import FusedMoE, replace_moe

transformers = pytest.importorskip("transformers", reason="transformers is an optional test dependency")

# Of no kernel: run beside what compiles, in a process that the interpreter does not slow down.
pytestmark = pytest.mark.compiler

Tensor = torch.Tensor
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GROUPS = {
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
}
RANKS = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
RANKS |= {"head_dim": 8}
# The configuration, and which layers have experts.
KINDS: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "mixtral": ("MixtralConfig", {"num_experts_per_tok": 2, "num_local_experts": 4}, [0, 1]),
    "qwen3": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [0]}, [1]),
    "qwen3-plain": ("Qwen3MoeConfig", {**EXPERTS, "num_experts": 4, "norm_topk_prob": False}, [0, 1]),
    "deepseek": ("DeepseekV3Config", {**EXPERTS, "n_routed_experts": 4, **GROUPS, **RANKS}, [1]),
}


def tiny_model(kind: str) -> torch.nn.Module:
    tokens = {"vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    # Weights large enough for the experts to matter.
    sizes = {"hidden_size": 32, "intermediate_size": 32, "initializer_range": 0.2, "max_position_embeddings": 32}
    name, further, _ = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**tokens, **heads, **sizes, **further}, attn_implementation="eager")
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer)
    return model


def names_of(kind: str) -> list[str]:
    return [f"model.layers.{index}.mlp" for index in KINDS[kind][2]]


class GatedMLP(torch.nn.Module):
    """An expert as transformers 4 has it."""

    def __init__(self, names: tuple[str, str, str], gate: Tensor, up: Tensor, down: Tensor) -> None:
        super().__init__()
        self.act_fn = torch.nn.SiLU()
        for name, weight in zip(names, (gate, up, down), strict=True):
            layer = torch.nn.Linear(*reversed(weight.shape), bias=False, device="meta")
            layer.weight = torch.nn.Parameter(weight.detach().clone())
            self.add_module(name, layer)


def unpack(model: torch.nn.Module, kind: str) -> None:
    """Bring the layers of a model into the form of transformers 4: experts one by one, a linear layer as router."""
    for name in names_of(kind):
        block = model.get_submodule(name)
        packed = block.experts
        names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
        pairs = zip(packed.gate_up_proj, packed.down_proj, strict=True)
        block.experts = torch.nn.ModuleList(GatedMLP(names, *w13.chunk(2), w2) for w13, w2 in pairs)
        if kind == "deepseek":
            continue
        gate = block.gate
        block.gate = torch.nn.Linear(gate.hidden_dim, gate.num_experts, bias=False, device="meta")
        block.gate.weight, block.top_k = gate.weight, gate.top_k
        block.norm_topk_prob = getattr(gate, "norm_topk_prob", True)


TOKENS = torch.randint(3, 50, (1, 3), generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["mixtral", "qwen3", "deepseek"])
def test_a_model_keeps_its_logits(kind: str, device: str) -> None:
    dtype = torch.float16 if kind == "qwen3" else torch.bfloat16
    model = tiny_model(kind).to(device, dtype)
    theirs = copy.deepcopy(model)
    assert replace_moe(model) == names_of(kind)
    tokens, recorded = TOKENS.to(device), {} if kind == "deepseek" else {"output_router_logits": True}
    with torch.no_grad():
        got, want = (side(input_ids=tokens, **recorded) for side in (model, theirs))
    for name in names_of(kind):
        ours, block = model.get_submodule(name), theirs.get_submodule(name)
        assert isinstance(ours, FusedMoE)
        assert not ours.training
        assert torch.equal(ours.w13, block.experts.gate_up_proj)
    # In each layer of theirs the router's logits and weights, gate, up, their product and each expert's output are
    # rounded, in ours the last two.
    allowed = len(names_of(kind)) * rounding_tolerance(dtype, 1, roundings=2).relative
    assert float((got.logits - want.logits).float().norm() / want.logits.float().norm()) <= allowed
    if recorded:
        assert len(got.router_logits) == len(want.router_logits) == len(names_of(kind))
        for mine, other in zip(got.router_logits, want.router_logits, strict=True):
            assert mine.shape == other.shape == (3, 4)
            assert float((mine - other).float().norm()) <= allowed * float(other.float().norm())


@pytest.mark.parametrize("kind", KINDS)
def test_experts_held_one_by_one_are_packed_as_transformers_packs_them(kind: str) -> None:
    model = tiny_model(kind).bfloat16()
    before = model.get_submodule(names_of(kind)[-1])
    weights = before.experts.gate_up_proj, before.experts.down_proj
    separate = copy.deepcopy(model)
    unpack(separate, kind)
    replace_moe(model)
    assert replace_moe(separate) == names_of(kind)
    packed, other = (side.get_submodule(names_of(kind)[-1]) for side in (model, separate))
    # Shared, and not copied.
    assert (packed.w13, packed.w2) == weights
    assert packed.w13 is weights[0]
    assert packed.state_dict().keys() == other.state_dict().keys()
    for name, tensor in packed.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name
    assert other.w13.requires_grad
    for name in ("top_k", "gating", "renormalize", "n_groups", "topk_groups", "routed_scaling_factor"):
        assert getattr(other, name) == getattr(packed, name), name
    assert packed.renormalize is (kind != "qwen3-plain")
    # As their layers did.
    assert (packed.return_router_logits, other.return_router_logits) == (False, kind != "deepseek")


def test_layers_of_skipped_names_stay() -> None:
    model = tiny_model("mixtral").half()
    assert replace_moe(model, skip=["layers.0"]) == ["model.layers.1.mlp"]
    assert type(model.model.layers[0].mlp).__name__ == "MixtralSparseMoeBlock"
    assert replace_moe(model, skip=["*.mlp"]) == []
    assert replace_moe(model) == ["model.layers.0.mlp"]


def test_a_replaced_model_is_copied() -> None:
    model = tiny_model("mixtral").half()
    replace_moe(model)
    again = copy.deepcopy(model)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert type(again.model.layers[0].mlp.recorder).__name__ == "MixtralTopKRouter"
    assert list(again.model.layers[0].mlp.state_dict()) == ["router_weight", "w13", "w2"]


def with_gate_bias(block: Any) -> None:
    block.gate.bias = torch.nn.Parameter(torch.zeros(4))


def with_float_shared_expert(block: Any) -> None:
    block.shared_experts.float()


def with_other_linear(block: Any) -> None:
    block.shared_experts.up_proj = torch.nn.Identity()


REFUSED = {
    "module must have no hooks": lambda block: block.experts.register_forward_hook(print),
    "gate must have no forward of its own, and no hooks": lambda block: block.gate.register_forward_pre_hook(print),
    "gate must have nothing but its weight and correction bias": with_gate_bias,
    "router_jitter_noise must be 0, got 0.1": lambda block: setattr(block, "jitter_noise", 0.1),
    "experts must have SiLU as act_fn, .* has GELU": lambda block: setattr(block.experts, "act_fn", torch.nn.GELU()),
    "experts must be packed as in Mixtral, .* has_bias": lambda block: setattr(block.experts, "has_bias", True),
    "experts must be float16 or bfloat16, got float32": lambda block: block.float(),
    "shared_w13 must have the dtype of x": with_float_shared_expert,
    "up_proj must be a linear layer without bias, Identity is not": with_other_linear,
    "DeepseekV3MoE must have shared_experts": lambda block: delattr(block, "shared_experts"),
    "DeepseekV3MoE must have num_group or n_group": lambda block: delattr(block.gate, "num_group"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_lost_stays(message: str) -> None:
    model = tiny_model("deepseek").half()
    block = model.model.layers[1].mlp
    REFUSED[message](block)
    with pytest.warns(UserWarning, match=rf"^model\.layers\.1\.mlp was not replaced: {message}"):
        assert replace_moe(model) == []
    assert model.model.layers[1].mlp is block


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match="skip must be a sequence of names, got the string 'mlp'"):
        replace_moe(torch.nn.Sequential(), skip="mlp")
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got NoneType"):
        replace_moe(None)
    with pytest.raises(ValueError, match="got one of them itself: MixtralSparseMoeBlock"):
        replace_moe(tiny_model("mixtral").model.layers[0].mlp)
