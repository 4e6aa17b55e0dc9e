"""torch.nn drop-ins."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch

from tk_kernel_core.checks import check_choice
from tk_kernel_core.modules import check_replaceable, replace_modules
from tk_swiglu._ops import Order, swiglu_fused, swiglu_packed
from tk_swiglu._plans import check_numbers

_SEPARATE = ("gate_proj", "up_proj", "down_proj")
_PACKED = ("gate_up_proj", "down_proj")
_WANTED = "gate_proj, up_proj and down_proj, or gate_up_proj and down_proj"


class SwiGLU(torch.nn.Module):
    """The gated activation as a module without parameters: `swiglu_fused` with fixed numbers.

    Args:
        alpha: Factor of the gate inside the sigmoid.
        beta: Added to up; 1.0 for gpt-oss.
        limit: Where gate is clamped from above and up on both sides, or None.
    """

    def __init__(self, *, alpha: float = 1.0, beta: float = 0.0, limit: float | None = None) -> None:
        super().__init__()
        check_numbers(alpha, beta, limit)
        self.alpha, self.beta, self.limit = alpha, beta, limit

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """Return `swiglu_fused(gate, up)` with these numbers: a new tensor like `gate`, and the same errors."""
        return swiglu_fused(gate, up, alpha=self.alpha, beta=self.beta, limit=self.limit)

    def extra_repr(self) -> str:
        """Return the numbers."""
        return f"alpha={self.alpha}, beta={self.beta}, limit={self.limit}"


class SwiGLUMLP(torch.nn.Module):
    """A gated MLP, named as in transformers: `down_proj(swiglu(gate_proj(x), up_proj(x)))`, or with `gate_up_proj`.

    Args:
        gate_proj: Projection to the gate; like the others, any module.
        up_proj: Projection to what is gated.
        down_proj: Projection of the result.
        gate_up_proj: In place of `gate_proj` and `up_proj`: one projection to both, one after the other.
        order: Which of the two halves of `gate_up_proj` is first: `gate_first` or `up_first`.
        alpha: Factor of the gate inside the sigmoid.
        beta: Added to up.
        limit: Where gate is clamped from above and up on both sides, or None.
    """

    gate_proj: torch.nn.Module
    up_proj: torch.nn.Module
    gate_up_proj: torch.nn.Module
    down_proj: torch.nn.Module

    def __init__(
        self,
        gate_proj: torch.nn.Module | None = None,
        up_proj: torch.nn.Module | None = None,
        down_proj: torch.nn.Module | None = None,
        *,
        gate_up_proj: torch.nn.Module | None = None,
        order: Order = "gate_first",
        alpha: float = 1.0,
        beta: float = 0.0,
        limit: float | None = None,
    ) -> None:
        super().__init__()
        check_choice("order", order, ("gate_first", "up_first"))
        check_numbers(alpha, beta, limit)
        self.order: Order = order
        self.alpha, self.beta, self.limit = alpha, beta, limit
        slots = {"gate_up_proj": gate_up_proj, "gate_proj": gate_proj, "up_proj": up_proj, "down_proj": down_proj}
        for name, projection in slots.items():
            if isinstance(projection, torch.nn.Module):
                self.add_module(name, projection)
            elif projection is not None:
                raise TypeError(f"{name} must be a torch.nn.Module, got {type(projection).__name__}")
        if tuple(self._modules) not in (_SEPARATE, _PACKED):
            raise TypeError(f"wanted {_WANTED}, got {', '.join(self._modules) or 'none'}")
        self.packed = gate_up_proj is not None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the MLP to whatever its projections take; they must return what `swiglu_fused` takes."""
        numbers: Any = {"alpha": self.alpha, "beta": self.beta, "limit": self.limit}
        if self.packed:
            hidden = swiglu_packed(self.gate_up_proj(x), order=self.order, **numbers)
        else:
            hidden = swiglu_fused(self.gate_proj(x), self.up_proj(x), **numbers)
        result: torch.Tensor = self.down_proj(hidden)
        return result

    def extra_repr(self) -> str:
        """Return the order of a packed projection, and the numbers."""
        order = f"order={self.order!r}, " if self.packed else ""
        return f"{order}alpha={self.alpha}, beta={self.beta}, limit={self.limit}"

    @classmethod
    def from_module(cls, module: torch.nn.Module) -> SwiGLUMLP:
        """Make the equivalent of another gated MLP; its projections are shared, not copied.

        What the module computes is found out by running a copy of it between stubs of its projections, on a few
        numbers on the CPU, not from its class name.

        Args:
            module: A module with children `gate_proj`, `up_proj` and `down_proj`, such as the MLPs of
                transformers' Llama, Qwen3 and Mistral, or `gate_up_proj` and `down_proj`, as those of Phi3 and GLM.

        Returns:
            A module with the same results within rounding, the same projections and the same training mode.

        Raises:
            TypeError: It is no module.
            ValueError: It does not compute a SwiGLU of one tensor, or has something that would be lost: hooks,
                parameters or buffers beside its projections, dropout.
        """
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        if isinstance(module, cls):
            return module
        kind, names = type(module).__name__, _projections_of(module)
        for name, part in module.named_modules():
            if name.partition(".")[0] not in names:
                check_replaceable(part)
                if lost := [name for name, value in part._parameters.items() if value is not None]:
                    raise ValueError(f"module must have no parameters but those of its projections, {kind} has {lost}")
        order = _order_of(module, training=False)
        _order_of(module, training=True)
        _, *takes = inspect.signature(type(module).forward).parameters
        if len(takes) != 1:
            raise ValueError(f"module must take one tensor, {kind} takes {takes}")
        children: dict[str, Any] = {name: child for name, child in module._modules.items() if name in names}
        replacement = cls(**children, order=order)
        # In the order of the module, by which the state of an optimiser finds its parameters.
        replacement._modules = children
        # Not by train(), which would set the mode of the projections too.
        replacement.training = module.training
        return replacement


def replace_swiglu(model: torch.nn.Module) -> list[str]:
    """Replace every gated MLP with SiLU inside a model by `SwiGLUMLP`, in place.

    MLPs count by what they compute between their projections; see `SwiGLUMLP.from_module`. Parameters stay the
    same objects under the same names, so optimisers, tied weights and state dicts go on working. An MLP with
    something that would be lost, such as hooks or dropout, stays, with a warning. One that computes something
    else, such as Gemma's with GELU or one that clamps, stays without.

    Args:
        model: Any model. It must not itself be such an MLP: use `SwiGLUMLP.from_module` for that.

    Returns:
        Names of the replaced modules.

    Raises:
        TypeError: `model` is no module.
        ValueError: `model` is itself a gated MLP with SiLU.
    """
    return replace_modules(model, _is_swiglu_mlp, SwiGLUMLP.from_module)


def _is_swiglu_mlp(module: torch.nn.Module) -> bool:
    with contextlib.suppress(ValueError):
        return not isinstance(module, SwiGLUMLP) and bool(_order_of(module, training=False))
    return False


def _projections_of(module: torch.nn.Module) -> tuple[str, ...]:
    """Names of the projections of a gated MLP."""
    children = [name for name, child in module._modules.items() if child is not None]
    for names in (_SEPARATE, _PACKED):
        if set(names) <= set(children):
            return names
    raise ValueError(f"module must have children {_WANTED}, {type(module).__name__} has {children}")


class _Stub:
    """Stands for a projection: notes what it is given, and returns a known tensor."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result, self.received = result, list[torch.Tensor]()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.received.append(x.clone())
        return self.result


def _order_of(module: torch.nn.Module, *, training: bool) -> Order:
    """Run a module between stubs; return the order in which it takes gate and up, if it computes a SwiGLU."""
    names, kind = _projections_of(module), type(module).__name__ + (" when training" if training else "")
    # The first dimension is not 2, so that a module that unpacks a pair fails.
    kind_of_numbers: Any = {"dtype": torch.float32, "device": "cpu"}
    generator = torch.Generator("cpu").manual_seed(0)
    x, y, first, second = torch.randn(4, 3, 16, 32, generator=generator, **kind_of_numbers)
    # Small values tell activations apart, large ones show clamps. Each size of one meets each of the other.
    sizes = torch.tensor([0.5, 4.0, 20.0, 1e12], **kind_of_numbers)
    first, second = first * sizes.repeat(4).view(16, 1), second * sizes.repeat_interleave(4).view(16, 1)
    results = (torch.cat((first, second), -1), y) if names == _PACKED else (first, second, y)
    # Clones, because the module may work in place.
    stubs = {name: _Stub(result.clone()) for name, result in zip(names, results, strict=True)}
    try:
        with torch.set_grad_enabled(training), torch.random.fork_rng(devices=[]):
            result: Any = type(module).forward(_bare_copy(module, training, stubs), x.clone())
    except Exception as error:
        raise ValueError(f"module must compute a SwiGLU between its projections, {kind} raised {error!r}") from error
    *inputs, hidden = [stub.received for stub in stubs.values()]
    if not all(len(received) == 1 and _agree(received[0], x) for received in inputs):
        raise ValueError(f"module must hand its input unchanged to {' and '.join(names[:-1])}, {kind} does not")
    if len(hidden) != 1 or not _agree(result, y):
        raise ValueError(f"module must return what down_proj returns, {kind} does not")
    if _is_swiglu(hidden[0], first, second):
        return "gate_first"
    if names == _PACKED and _is_swiglu(hidden[0], second, first):
        return "up_first"
    raise ValueError(f"module must compute a SwiGLU, silu(gate) * up, {kind} gives other values")


def _is_swiglu(got: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> bool:
    want = torch.nn.functional.silu(gate.double()) * up.double()
    # A few roundings; fp32 loses silu where its exponential overflows.
    return _agree(got, want.float(), 16 * torch.finfo(torch.float32).eps * want.abs() + 1e-36 * up.double().abs())


def _agree(got: Any, want: torch.Tensor, allowed: torch.Tensor | float = 0.0) -> bool:
    """Whether it is a tensor like `want` whose elements differ by no more than what is allowed."""
    if not isinstance(got, torch.Tensor) or (got.shape, got.dtype, got.device) != (want.shape, want.dtype, want.device):
        return False
    return bool(((got.double() - want.double()).abs() <= allowed).all())


def _bare_copy(module: torch.nn.Module, training: bool, children: dict[str, Any]) -> Any:
    """A copy without tensors, hooks and a forward of its own, with these children and such copies of the others."""
    copy = object.__new__(type(module))
    copy.__dict__ = {
        name: {} if name.endswith(("_hooks", "_hooks_always_called")) else value
        for name, value in vars(module).items()
        if name not in ("forward", "_compiled_call_impl")
    }
    absent = {name: None for name, value in module._parameters.items() if value is None}
    copy.__dict__.update(training=training, _parameters=absent, _buffers={}, _modules=dict(children))
    for name, child in module._modules.items():
        if name not in children:
            copy._modules[name] = None if child is None else _bare_copy(child, training, {})
    return copy
