"""Mixture-of-experts layers as modules."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tk_kernel_core.checks import check_choice, check_shape, check_tensor
from tk_moe_dispatch._checks import (
    FLOATS,
    LAYOUTS,
    check_count,
    check_routing,
    check_scoring,
)
from tk_moe_dispatch._expert_ops import fused_experts
from tk_moe_dispatch._ops import moe_router
from tk_moe_dispatch._packed import PackedExperts
from tk_moe_dispatch._packed_checks import check_experts
from tk_moe_dispatch._reference import GatedLayout, Gating, Routing

Projections = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Weights of gate [F, H], up [F, H] and down [H, F]."""


class FusedMoE(torch.nn.Module):
    """A mixture-of-experts layer: `moe_router`, and `fused_experts` with what it chose.

    Nothing here has a gradient: in training mode or not, a forward pass for which one is wanted raises.

    Args:
        hidden_size: Features of a token, H.
        intermediate_size: Features inside an expert, F.
        num_experts: E.
        top_k: Experts that a token goes to.
        gating: As for `moe_router`, like the next four.
        renormalize: Whether the weights of a token sum up to `routed_scaling_factor`.
        n_groups: Groups of neighbouring experts, with `topk_groups`.
        topk_groups: Groups to choose from.
        routed_scaling_factor: What all weights are multiplied by.
        apply_router_weight_on_input: Whether tokens are multiplied by their weight before their expert, whose output
            then is not; `top_k` must be 1. Llama-4 does so. The product is rounded to the dtype of the tokens.
        layout: As for `fused_experts`, like the next four.
        alpha: Factor within the sigmoid.
        beta: Added to up.
        limit: Clamps gate from above, and up on both sides.
        capacity_factor: Bounds the tokens of an expert.
        router_bias: Whether logits have a bias.
        correction_bias: Whether there is one for the choice alone.
        expert_bias: Whether experts have biases.
        shared_intermediate_size: Features inside an expert for all tokens, F'; 0 for none. Several of them are one.
        return_router_logits: Whether `forward` returns `(y, logits)`.
        device: Where tensors are made.
        dtype: Dtype of the parameters. float16 or bfloat16 is what experts multiply.

    Attributes:
        router_weight: Parameter [E, H].
        router_bias: Parameter [E], or None.
        correction_bias: Buffer [E] float32, or None. Converting the module does not change its dtype.
        w13: Parameter [E, 2 * F, H], gate and up; or `PackedExperts`, a module inside this one.
        w2: Parameter [E, H, F], down; or `PackedExperts`, if w13 is.
        w13_bias: Parameter [E, 2 * F], or None.
        w2_bias: Parameter [E, H], or None.
        shared_w13: Parameter [2 * F', H], or None.
        shared_w2: Parameter [H, F'], or None.
        recorder: A module that is called with `(logits, weights, indices)` of [tokens, ...] in every forward pass and
            whose result is not used, for hooks; or None.

    Raises:
        TypeError: An argument is of another type.
        ValueError: Sizes or settings do not fit.
    """

    router_weight: torch.nn.Parameter
    router_bias: torch.nn.Parameter | None
    correction_bias: torch.Tensor | None
    w13: torch.nn.Parameter | PackedExperts
    w2: torch.nn.Parameter | PackedExperts
    w13_bias: torch.nn.Parameter | None
    w2_bias: torch.nn.Parameter | None
    shared_w13: torch.nn.Parameter | None
    shared_w2: torch.nn.Parameter | None
    recorder: torch.nn.Module | None

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int,
        *,
        gating: Gating = "softmax",
        renormalize: bool = False,
        n_groups: int | None = None,
        topk_groups: int | None = None,
        routed_scaling_factor: float = 1.0,
        apply_router_weight_on_input: bool = False,
        layout: GatedLayout = "concat",
        alpha: float = 1.0,
        beta: float = 0.0,
        limit: float | None = None,
        capacity_factor: float | None = None,
        router_bias: bool = False,
        correction_bias: bool = False,
        expert_bias: bool = False,
        shared_intermediate_size: int = 0,
        return_router_logits: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_experts": num_experts}
        for name, size in sizes.items():
            check_count(name, size, 1)
        check_count("shared_intermediate_size", shared_intermediate_size, 0)
        self.hidden_size, self.intermediate_size, self.num_experts, self.top_k = *sizes.values(), top_k
        self.gating, self.renormalize = gating, renormalize
        self.n_groups, self.topk_groups, self.routed_scaling_factor = n_groups, topk_groups, routed_scaling_factor
        self.apply_router_weight_on_input = apply_router_weight_on_input
        self.return_router_logits = return_router_logits
        self.layout, self.alpha, self.beta, self.limit = layout, alpha, beta, limit
        self.capacity_factor = capacity_factor

        def parameter(name: str, *shape: int, wanted: bool = True) -> None:
            made = torch.nn.Parameter(torch.zeros(shape, device=device, dtype=dtype), requires_grad=False)
            self.register_parameter(name, made if wanted else None)

        is_shared = shared_intermediate_size > 0
        parameter("router_weight", num_experts, hidden_size)
        parameter("router_bias", num_experts, wanted=router_bias)
        parameter("w13", num_experts, 2 * intermediate_size, hidden_size)
        parameter("w2", num_experts, hidden_size, intermediate_size)
        parameter("w13_bias", num_experts, 2 * intermediate_size, wanted=expert_bias)
        parameter("w2_bias", num_experts, hidden_size, wanted=expert_bias)
        parameter("shared_w13", 2 * shared_intermediate_size, hidden_size, wanted=is_shared)
        parameter("shared_w2", hidden_size, shared_intermediate_size, wanted=is_shared)
        zeros = torch.zeros(num_experts, device=device) if correction_bias else None
        self.register_buffer("correction_bias", zeros)
        self.recorder = None
        self._check()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill weights at random, so that tokens keep their size, and biases with zeros."""
        for parameter in self._parameters.values():
            # Of tensors without memory PyTorch would ask torch.compile, which takes seconds to import.
            if parameter is not None and parameter.dim() > 1 and not parameter.is_meta:
                torch.nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[-1]))
        for name in ("router_bias", "w13_bias", "w2_bias", "correction_bias"):
            if (bias := getattr(self, name)) is not None:
                torch.nn.init.zeros_(bias)

    @classmethod
    def from_weights(
        cls,
        router_weight: torch.Tensor,
        w13: torch.Tensor | PackedExperts,
        w2: torch.Tensor | PackedExperts,
        top_k: int,
        *,
        router_bias: torch.Tensor | None = None,
        correction_bias: torch.Tensor | None = None,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        shared_w13: torch.Tensor | None = None,
        shared_w2: torch.Tensor | None = None,
        **settings: Any,
    ) -> FusedMoE:
        """Make a layer of packed weights, which it holds and does not copy; only a correction bias becomes float32.

        Args:
            router_weight: [E, H].
            w13: [E, 2 * F, H]; or `PackedExperts` of this shape, of 8 or 4 bits.
            w2: [E, H, F]; or `PackedExperts`, if w13 is.
            top_k: Experts that a token goes to.
            router_bias: [E], or None.
            correction_bias: [E], or None.
            w13_bias: [E, 2 * F], or None.
            w2_bias: [E, H], or None.
            shared_w13: [2 * F', H], or None.
            shared_w2: [H, F'], or None.
            **settings: Those of the class: `gating`, `renormalize`, `limit` and so on.

        Returns:
            A module on the device of the weights. What is a parameter stays the same one.

        Raises:
            TypeError: An argument is of another type or dtype.
            ValueError: Shapes, devices or settings do not fit.
        """
        held: dict[str, torch.Tensor | PackedExperts | None] = {
            "router_weight": router_weight,
            "router_bias": router_bias,
            "w13": w13,
            "w2": w2,
            "w13_bias": w13_bias,
            "w2_bias": w2_bias,
            "shared_w13": shared_w13,
            "shared_w2": shared_w2,
        }
        # With sizes of no weight: all tensors are replaced, and then checked.
        module = cls(1, 1, 1, 1, device="meta")
        for name, value in settings.items():
            if name not in _SETTINGS:
                raise TypeError(f"settings of a layer are {', '.join(_SETTINGS)}, got {name}")
            setattr(module, name, value)
        module.top_k = top_k
        for name, tensor in held.items():
            if isinstance(tensor, PackedExperts):
                delattr(module, name)
                module.add_module(name, tensor)
                continue
            if tensor is not None and not isinstance(tensor, torch.nn.Parameter):
                check_tensor(name, tensor, FLOATS)
                tensor = torch.nn.Parameter(tensor, requires_grad=tensor.requires_grad)
            module.register_parameter(name, tensor)
        if correction_bias is not None:
            correction_bias = check_tensor("correction_bias", correction_bias, FLOATS).detach().float()
        module.correction_bias = correction_bias
        module._check()
        (module.num_experts, module.hidden_size), module.intermediate_size = router_weight.shape, w2.shape[-1]
        return module

    @classmethod
    def from_experts(
        cls,
        router_weight: torch.Tensor,
        experts: Sequence[Projections],
        top_k: int,
        *,
        shared: Projections | None = None,
        layout: GatedLayout = "concat",
        **further: Any,
    ) -> FusedMoE:
        """Make a layer of experts that are held one by one; their weights are copied into packed ones.

        Args:
            router_weight: [E, H].
            experts: For each expert the weights of gate [F, H], up [F, H] and down [H, F], without biases.
            top_k: Experts that a token goes to.
            shared: The same of an expert for all tokens, or None. It is copied too.
            layout: How gate and up are packed.
            **further: What else `from_weights` takes.

        Returns:
            A module on the device of the weights.

        Raises:
            TypeError: An argument is of another type or dtype.
            ValueError: There is no expert, or shapes, devices or settings do not fit.
        """
        if not experts:
            raise ValueError("experts must hold at least one, got none")
        w13, w2 = pack_experts("experts", experts, layout)
        if shared is not None:
            shared_w13, shared_w2 = pack_experts("shared", [shared], layout)
            further |= {"shared_w13": shared_w13[0], "shared_w2": shared_w2[0]}
        return cls.from_weights(router_weight, w13, w2, top_k, layout=layout, **further)

    def _check(self) -> None:
        """Raise TypeError or ValueError unless tensors and settings fit one another."""
        w13, w2, router_weight = self.w13, self.w2, self.router_weight
        # Tokens such as forward will see, but none of them.
        kind = w13 if isinstance(w13, torch.Tensor) else self.shared_w13
        dtype = torch.float16 if kind is None else kind.dtype
        x = torch.empty(0, router_weight.shape[-1] if router_weight.dim() else 0, dtype=dtype, device=w13.device)
        check_scoring(x, router_weight, self.router_bias, FLOATS, "w13")
        n_experts = router_weight.shape[0]
        grouping = self.n_groups, self.topk_groups, self.routed_scaling_factor
        check_routing(n_experts, x.device, self.correction_bias, self.top_k, self.gating, self.renormalize, *grouping)
        routing = x.new_empty(0, self.top_k), x.new_empty(0, self.top_k, dtype=torch.int64)
        optional = None, self.w13_bias, self.w2_bias, self.shared_w13, self.shared_w2
        activation = self.layout, self.alpha, self.beta, self.limit, self.capacity_factor
        check_experts(x, w13, w2, *routing, *optional, *activation, dtypes=FLOATS)
        if w13.shape[0] != n_experts:
            raise ValueError(f"w13 must have the {n_experts} experts of router_weight, got {w13.shape[0]}")
        for name in ("apply_router_weight_on_input", "return_router_logits"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be a bool, got {type(getattr(self, name)).__name__}")
        if self.apply_router_weight_on_input and self.top_k != 1:
            raise ValueError(f"apply_router_weight_on_input must come with a top_k of 1, got {self.top_k}")

    def route(self, x: torch.Tensor) -> Routing:
        """Choose experts for [..., hidden_size] as `moe_router`, with its errors."""
        return moe_router(
            x,
            self.router_weight,
            self.top_k,
            self.gating,
            self.router_bias,
            renormalize=self.renormalize,
            correction_bias=self.correction_bias,
            n_groups=self.n_groups,
            topk_groups=self.topk_groups,
            routed_scaling_factor=self.routed_scaling_factor,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Apply the layer.

        Args:
            x: [..., hidden_size], float16 or bfloat16 like the experts, any strides.

        Returns:
            A new contiguous tensor with the shape and dtype of `x`; with `return_router_logits` beside the logits,
            float32 [tokens, num_experts].

        Raises:
            TypeError: As for `moe_router` and `fused_experts`.
            ValueError: Likewise.
            NotImplementedError: A gradient is wanted.
        """
        indices, weights, logits = self.route(x)
        if self.recorder is not None:
            self.recorder((logits.flatten(0, -2), weights.flatten(0, -2), indices.flatten(0, -2)))
        y = self._apply_experts(x, weights, indices)
        return (y, logits.flatten(0, -2)) if self.return_router_logits else y

    def _apply_experts(self, x: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        activation: dict[str, Any]
        activation = {"layout": self.layout, "alpha": self.alpha, "beta": self.beta, "limit": self.limit}
        further: dict[str, Any] = {"w13_bias": self.w13_bias, "w2_bias": self.w2_bias, **activation}
        shared_w13, shared_w2, capacity = self.shared_w13, self.shared_w2, self.capacity_factor
        if not self.apply_router_weight_on_input:
            further |= {"shared_w13": shared_w13, "shared_w2": shared_w2, "capacity_factor": capacity}
            return fused_experts(x, self.w13, self.w2, weights, indices, **further)
        ones, scaled = torch.ones_like(weights), (x * weights).to(x.dtype)
        y = fused_experts(scaled, self.w13, self.w2, ones, indices, **further, capacity_factor=capacity)
        if shared_w13 is not None and shared_w2 is not None:
            # The shared expert takes tokens as they are.
            zeros = torch.zeros_like(indices)
            y = y + fused_experts(x, shared_w13[None], shared_w2[None], ones, zeros, **activation)
        return y

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FusedMoE:
        before = self.correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.correction_bias
        # In 16 bits it would choose other experts; what is moved to another device has lost nothing.
        if before is not None and after is not None and after.dtype != before.dtype:
            self.correction_bias = before.to(after.device)
        return self

    def extra_repr(self) -> str:
        """Return the sizes and the settings that are not the default."""
        sizes = ("hidden_size", "intermediate_size", "num_experts", "top_k")
        names = [*sizes, *(name for name, default in _SETTINGS.items() if getattr(self, name) != default)]
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


_SETTINGS = {
    "gating": "softmax",
    "renormalize": False,
    "n_groups": None,
    "topk_groups": None,
    "routed_scaling_factor": 1.0,
    "apply_router_weight_on_input": False,
    "layout": "concat",
    "alpha": 1.0,
    "beta": 0.0,
    "limit": None,
    "capacity_factor": None,
    "return_router_logits": False,
}


def pack_experts(name: str, experts: Sequence[Projections], layout: GatedLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Return w13 [E, 2 * F, H] and w2 [E, H, F] of experts; they require a gradient if one of their weights does.

    Args:
        name: Of the experts, for errors.
        experts: At least one.
        layout: As for `fused_experts`.
    """
    check_choice("layout", layout, LAYOUTS)
    first_gate = check_tensor(f"{name}[0][0]", experts[0][0], FLOATS)
    if first_gate.dim() != 2:
        raise ValueError(f"{name}[0][0] must have shape [F, H], got {tuple(first_gate.shape)}")
    features, width = first_gate.shape
    # Written in place, so that no weight is held three times.
    shape = (features, 2) if layout == "interleaved" else (2, features)
    w13 = first_gate.new_empty(len(experts), *shape, width)
    gate_up = w13 if layout == "concat" else w13.transpose(1, 2)
    w2 = first_gate.new_empty(len(experts), width, features)
    for i, expert in enumerate(experts):
        targets = gate_up[i, 0], gate_up[i, 1], w2[i]
        if len(expert) != len(targets):
            raise ValueError(f"{name}[{i}] must be the weights of gate, up and down, got {len(expert)}")
        for j, (weight, target) in enumerate(zip(expert, targets, strict=True)):
            check_shape(f"{name}[{i}][{j}]", check_tensor(f"{name}[{i}][{j}]", weight, (w2.dtype,)), target.shape)
            target.copy_(weight.detach())
    wants_gradient = any(weight.requires_grad for expert in experts for weight in expert)
    packed = w13.view(len(experts), 2 * features, width), w2
    return packed[0].requires_grad_(wants_gradient), packed[1].requires_grad_(wants_gradient)
