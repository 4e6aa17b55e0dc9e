"""Replacing the mixture-of-experts layers of transformers models."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from tk_kernel_core.modules import check_replaceable, replace_modules
from tk_moe_dispatch._checks import EXPERT_DTYPES
from tk_moe_dispatch._modules import FusedMoE, Projections, pack_experts

_MIXTRAL, _QWEN3, _DEEPSEEK = "MixtralSparseMoeBlock", "Qwen3MoeSparseMoeBlock", "DeepseekV3MoE"
_PROJECTIONS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def replace_moe(model: torch.nn.Module, *, skip: Sequence[str] = ()) -> list[str]:
    """Replace the mixture-of-experts layers of Mixtral, Qwen3-MoE and DeepSeek-V3 by `FusedMoE`, in place.

    Experts that transformers holds packed are shared, not copied; those that it holds one by one, and DeepSeek's
    shared experts, are packed, and the old weights let go of at the end. What transformers records of routers,
    `output_router_logits`, it goes on to record. Layers that cannot be replaced without loss stay, with a warning that
    says why. State dicts have other names afterwards: load checkpoints before.

    Logits and weights are not rounded here, as they are to the dtype of the model in transformers' Mixtral and
    Qwen3-MoE: where two experts are nearly level, another one may be chosen.

    Args:
        model: Any model, that is no such layer itself.
        skip: Modules that stay as they are, with all inside them. Each is the end of a dotted name, or a pattern
            of fnmatch for one: `layers.0.mlp` skips `model.layers.0.mlp`. A module with several names stays if one
            of them is skipped.

    Returns:
        Names of the replaced modules.

    Raises:
        TypeError: `model` is no module, or `skip` is a single string.
        ValueError: `model` is itself such a layer.
    """
    if isinstance(skip, str):
        raise TypeError(f"skip must be a sequence of names, got the string {skip!r}")
    skipped: set[torch.nn.Module] = set()
    if isinstance(model, torch.nn.Module):
        for name, module in model.named_modules(remove_duplicate=False):
            if any(fnmatchcase(f".{name}", f"*.{pattern}") for pattern in skip):
                skipped.update(module.modules())

    def is_candidate(module: torch.nn.Module) -> bool:
        return type(module).__name__ in (_MIXTRAL, _QWEN3, _DEEPSEEK) and module not in skipped

    return replace_modules(model, is_candidate, _converted)


def _converted(block: torch.nn.Module) -> FusedMoE:
    """Return the equivalent of a layer.

    Raises:
        ValueError: It has something that would be lost, or weights that do not fit one another.
    """
    gate = _child(block, "gate")
    _check_nothing_is_lost(block, gate)
    try:
        module = _with_weights_of(block, gate)
    except TypeError as error:
        raise ValueError(str(error)) from error
    if module.w13.dtype not in EXPERT_DTYPES:
        raise ValueError(f"experts must be float16 or bfloat16, got {str(module.w13.dtype).removeprefix('torch.')}")
    module.recorder = _recorder(gate)
    return module.train(block.training)


def _with_weights_of(block: torch.nn.Module, gate: torch.nn.Module) -> FusedMoE:
    kind, experts = type(block).__name__, _child(block, "experts")
    settings: dict[str, Any] = {"renormalize": kind == _MIXTRAL or bool(_setting(block, gate, "norm_topk_prob"))}
    if kind == _DEEPSEEK:
        settings |= {
            "gating": "sigmoid",
            "correction_bias": _setting(block, gate, "e_score_correction_bias"),
            "n_groups": _setting(block, gate, "num_group", "n_group"),
            "topk_groups": _setting(block, gate, "topk_group"),
            "routed_scaling_factor": float(_setting(block, gate, "routed_scaling_factor")),
        }
        w13, w2 = pack_experts("shared_experts", [_projections(_child(block, "shared_experts"))], "concat")
        settings |= {"shared_w13": w13[0], "shared_w2": w2[0]}
    # What transformers 4 has there returns the logits too.
    settings["return_router_logits"] = isinstance(gate, torch.nn.Linear)
    top_k, weight = _setting(block, gate, "top_k"), _weight(gate)
    if isinstance(experts, torch.nn.ModuleList):
        return FusedMoE.from_experts(weight, [_projections(expert) for expert in experts], top_k, **settings)
    _check_activation(experts)
    usual = {"is_transposed": False, "is_concatenated": True, "has_gate": True, "has_bias": False}
    if other := [name for name, value in usual.items() if getattr(experts, name, value) != value]:
        raise ValueError(f"experts must be packed as in Mixtral, {type(experts).__name__} is not: {', '.join(other)}")
    packed = _weight(experts, "gate_up_proj"), _weight(experts, "down_proj")
    return FusedMoE.from_weights(weight, *packed, top_k, **settings)


def _check_nothing_is_lost(block: torch.nn.Module, gate: torch.nn.Module) -> None:
    for module in block.modules():
        if module is not gate:
            check_replaceable(module)
    kind = type(gate).__name__
    # Hooks on what it returns go on to be called.
    hooks = [name for name, value in vars(gate).items() if name.endswith("_hooks") and value]
    if "forward" in vars(gate) or any(not name.startswith("_forward_hooks") for name in hooks):
        raise ValueError(f"gate must have no forward of its own, and no hooks but forward ones, {kind} has")
    held = {name for name, value in (*gate._parameters.items(), *gate._buffers.items()) if value is not None}
    if lost := sorted(held - {"weight", "e_score_correction_bias"}):
        raise ValueError(f"gate must have nothing but its weight and correction bias, {kind} has {', '.join(lost)}")
    if getattr(block, "jitter_noise", 0.0):
        raise ValueError(f"router_jitter_noise must be 0, got {block.jitter_noise}")


def _recorder(gate: torch.nn.Module) -> torch.nn.Module:
    """Return a router that returns what it is given: by its class transformers knows whose logits to record."""
    recorder = copy.copy(gate)
    recorder._parameters, recorder._buffers = {}, {}
    recorder.forward = _as_given
    return recorder


def _as_given(routing: Any) -> Any:
    return routing


def _projections(expert: torch.nn.Module) -> Projections:
    """Return the weights of a gated MLP."""
    _check_activation(expert)
    for names in _PROJECTIONS:
        if all(name in expert._modules for name in names):
            gate, up, down = (_weight(_linear(expert, name)) for name in names)
            return gate, up, down
    raise ValueError(f"experts must have gate_proj, up_proj and down_proj, {type(expert).__name__} has not")


def _linear(expert: torch.nn.Module, name: str) -> torch.nn.Module:
    layer = _child(expert, name)
    if type(layer).forward is not torch.nn.Linear.forward or layer._parameters.get("bias") is not None:
        raise ValueError(f"{name} must be a linear layer without bias, {type(layer).__name__} is not")
    return layer


def _check_activation(expert: torch.nn.Module) -> None:
    activation = type(getattr(expert, "act_fn", None)).__name__
    if activation not in ("SiLU", "SiLUActivation"):
        raise ValueError(f"experts must have SiLU as act_fn, {type(expert).__name__} has {activation}")


def _child(module: torch.nn.Module, name: str) -> torch.nn.Module:
    child = module._modules.get(name)
    if child is None:
        raise ValueError(f"{type(module).__name__} must have {name}, it has {', '.join(module._modules)}")
    return child


def _weight(module: torch.nn.Module, name: str = "weight") -> torch.Tensor:
    weight = module._parameters.get(name)
    if weight is None or not weight.is_floating_point():
        raise ValueError(f"{type(module).__name__} must have {name} in floating point, it has not")
    return weight


def _setting(block: torch.nn.Module, gate: torch.nn.Module, *names: str) -> Any:
    """Return an attribute of the router, or of the layer, where releases of transformers before 5 have it."""
    for holder in (gate, block):
        for name in names:
            if hasattr(holder, name):
                return getattr(holder, name)
    raise ValueError(f"{type(block).__name__} must have {' or '.join(names)}, it has not")
