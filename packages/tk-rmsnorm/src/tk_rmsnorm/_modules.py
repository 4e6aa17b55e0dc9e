"""torch.nn drop-ins."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from tk_kernel_core.checks import ACTIVATION_DTYPES, check_choice, check_number, check_tensor
from tk_kernel_core.modules import check_replaceable, replace_modules
from tk_rmsnorm._ops import Casting, rmsnorm
from tk_rmsnorm._reference import rmsnorm_torch


class TritonRMSNorm(torch.nn.Module):
    """RMSNorm as a module: what torch.nn.RMSNorm takes, and the conventions of transformers' models.

    Args:
        normalized_shape: Hidden size, or the shape of the trailing dimensions that are normalised together.
        eps: Added to the mean square; None for what the installed torch.nn.RMSNorm takes by default.
        elementwise_affine: Whether there is a weight.
        device: Where the weight is made.
        dtype: Its dtype.
        hidden_size: Another name of `normalized_shape`, for a single dimension.
        weight_offset: Added to the weight in fp32; 1.0 for Gemma.
        casting: `fp32` or `llama`, as for `rmsnorm`.

    Attributes:
        weight: Parameter of shape `normalized_shape`, or None. It starts so that weight plus offset is one.
    """

    weight: torch.nn.Parameter | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float | None = 1e-6,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        hidden_size: int | None = None,
        weight_offset: float = 0.0,
        casting: Casting = "fp32",
    ) -> None:
        super().__init__()
        if (normalized_shape is None) == (hidden_size is None):
            raise TypeError("exactly one of normalized_shape and hidden_size must be given")
        shape: Any = hidden_size if normalized_shape is None else normalized_shape
        sizes = tuple(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else (shape,)
        if not all(isinstance(size, Integral) and not isinstance(size, bool) for size in sizes):
            raise TypeError(f"normalized_shape must be an int or a sequence of ints, got {shape!r}")
        self.normalized_shape = tuple(map(int, sizes))
        if not self.normalized_shape or any(size < 0 for size in self.normalized_shape):
            raise ValueError(f"normalized_shape must hold at least one size, none below 0, got {self.normalized_shape}")
        if eps is not None:
            check_number("eps", eps, minimum=0.0)
        check_number("weight_offset", weight_offset)
        check_choice("casting", casting, ("fp32", "llama"))
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        self.weight_offset = weight_offset
        self.casting: Casting = casting
        if elementwise_affine:
            self.weight = torch.nn.Parameter(torch.empty(self.normalized_shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the weight so that weight plus offset is one."""
        if self.weight is not None:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the trailing dimensions of `x`.

        Args:
            x: float16, bfloat16 or float32, of a shape that ends in `normalized_shape`.

        Returns:
            A tensor like `x`.

        Raises:
            TypeError: `x` is no tensor or of another dtype.
            ValueError: The trailing dimensions of `x` are not `normalized_shape`.
        """
        check_tensor("x", x)
        if tuple(x.shape[x.dim() - len(self.normalized_shape) :]) != self.normalized_shape:
            raise ValueError(f"x must end in dimensions {self.normalized_shape}, got shape {tuple(x.shape)}")
        eps = _DEFAULT_EPS[x.dtype] if self.eps is None else self.eps
        weight = self.weight
        if len(self.normalized_shape) == 1:
            return rmsnorm(x, weight, eps, weight_offset=self.weight_offset, casting=self.casting)
        flat = rmsnorm(
            x.flatten(-len(self.normalized_shape)),
            None if weight is None else weight.flatten(),
            eps,
            weight_offset=self.weight_offset,
            casting=self.casting,
        )
        return flat.view(x.shape)

    def extra_repr(self) -> str:
        """Return the arguments that differ between norms."""
        return (
            f"{self.normalized_shape}, eps={self.eps}, elementwise_affine={self.elementwise_affine}, "
            f"weight_offset={self.weight_offset}, casting={self.casting!r}"
        )

    @classmethod
    def from_module(cls, module: torch.nn.Module) -> TritonRMSNorm:
        """Make the equivalent of another RMSNorm module; the weight parameter is shared, not copied.

        What the module computes is found out by running a small copy of it on the CPU, not from its class
        name: whether it adds one to its weight, and where it rounds.

        Args:
            module: torch.nn.RMSNorm or any module that computes an RMSNorm of one tensor, such as those of
                transformers' Llama, Qwen3 and Gemma.

        Returns:
            A module with the same results within rounding, in the same training mode.

        Raises:
            TypeError: It is no module.
            ValueError: It does not compute an RMSNorm this class can express, or has hooks, which would be lost.
        """
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        if isinstance(module, cls):
            return module
        kind = type(module).__name__
        check_replaceable(module)
        if next(module.children(), None) is not None:
            raise ValueError(f"module must have no submodules, which would be lost, {kind} has some")
        weight = getattr(module, "weight", None)
        if weight is not None and not (isinstance(weight, torch.nn.Parameter) and weight.dim()):
            raise ValueError(f"the weight of module must be a parameter of at least one dimension, {kind} has another")
        eps, shape = _eps_of(module), _normalized_shape_of(module, weight)
        offset, casting = _conventions_of(module, shape, eps)
        replacement = cls(shape, eps, elementwise_affine=False, weight_offset=offset, casting=casting)
        if weight is not None:
            replacement.elementwise_affine = True
            replacement.weight = weight
        return replacement.train(module.training)


def replace_rmsnorm(model: torch.nn.Module) -> list[str]:
    """Replace every RMSNorm inside a model by `TritonRMSNorm`, in place.

    Modules count as RMSNorm if they are torch.nn.RMSNorm or their class name contains `RMSNorm`. Parameters
    stay the same objects, so optimisers, tied weights and state dicts go on working. A module that computes
    something else, or that has hooks, stays, with a warning.

    Args:
        model: Any model. It must not itself be an RMSNorm: use `TritonRMSNorm.from_module` for that.

    Returns:
        Names of the replaced modules.

    Raises:
        TypeError: `model` is no module.
        ValueError: `model` is itself an RMSNorm.
    """
    return replace_modules(model, _is_rmsnorm, TritonRMSNorm.from_module)


def _default_eps(dtype: torch.dtype) -> float:
    """What torch.nn.RMSNorm(eps=None) adds: the machine epsilon of the input's dtype, in newer releases of fp32."""
    x = torch.full((1,), 2.0**-8, dtype=dtype, device="cpu")
    # The square is far above the one and far below the other.
    kind = torch.float32 if torch.nn.functional.rms_norm(x, (1,)).item() > 0.5 else dtype
    return torch.finfo(kind).eps


# Asked at import, because a compiled or traced forward pass cannot ask.
_DEFAULT_EPS = {dtype: _default_eps(dtype) for dtype in ACTIVATION_DTYPES}


def _is_rmsnorm(module: torch.nn.Module) -> bool:
    named = isinstance(module, torch.nn.RMSNorm) or "rmsnorm" in type(module).__name__.lower()
    return named and not isinstance(module, TritonRMSNorm)


def _eps_of(module: torch.nn.Module) -> float | None:
    for name in ("eps", "variance_epsilon"):
        if hasattr(module, name):
            eps: float | None = getattr(module, name)
            return eps
    raise ValueError(f"module must have an attribute eps or variance_epsilon, {type(module).__name__} has neither")


def _normalized_shape_of(module: torch.nn.Module, weight: torch.Tensor | None) -> tuple[int, ...]:
    if weight is not None:
        return tuple(weight.shape)
    shape = getattr(module, "normalized_shape", None)
    if not isinstance(shape, Sequence):
        raise ValueError(f"module must have a weight or normalized_shape, {type(module).__name__} has neither")
    return tuple(shape)


def _conventions_of(module: torch.nn.Module, shape: tuple[int, ...], eps: float | None) -> tuple[float, Casting]:
    """Find the weight offset and the casting that give what the module gives."""
    kind = type(module).__name__
    parameters = dict(module.named_parameters())
    if set(parameters) - {"weight"}:
        raise ValueError(f"module must have no parameter but weight, {kind} has {sorted(parameters)}")
    if len(_positional_parameters(module)) != 1:
        raise ValueError(f"module must take one tensor, forward of {kind} takes {inspect.signature(module.forward)}")
    generator = torch.Generator("cpu").manual_seed(0)
    # Enough elements to tell where the module rounds. Every other row is small, to tell what it does with eps.
    rows = 2 * max(2, 4096 // math.prod(shape))
    scales = torch.tensor([1.0, 1e-3], device="cpu").repeat(rows // 2).view(rows, *([1] * len(shape)))
    x = (torch.randn(rows, *shape, generator=generator, device="cpu") * scales).to(torch.bfloat16)
    weight = torch.randn(shape, generator=generator, device="cpu").to(torch.bfloat16)
    with torch.no_grad():
        probe = _cpu_copy(module, weight)
        try:
            got = probe(x)
        except Exception as error:
            raise ValueError(
                f"module must normalise a bfloat16 tensor {tuple(x.shape)}, {kind} raised {error!r}"
            ) from error
        for casting in ("fp32", "llama"):
            for offset in (0.0, 1.0):
                want = rmsnorm_torch(
                    x.flatten(1),
                    weight.flatten() if parameters else None,
                    _DEFAULT_EPS[x.dtype] if eps is None else eps,
                    weight_offset=offset,
                    casting=casting,
                ).view(x.shape)
                if isinstance(got, torch.Tensor) and got.shape == want.shape and _agree(got, want):
                    return offset, casting
    raise ValueError(f"module must compute an RMSNorm, {kind} gives other values")


def _agree(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether all but a few elements are the same to the last bit, and those within one unit of it."""
    differing = got.to(want.dtype) != want
    close = torch.isclose(got.float(), want.float(), rtol=2 * torch.finfo(want.dtype).eps, atol=0.0)
    return bool(close.all()) and float(differing.float().mean()) < 0.02


def _positional_parameters(module: torch.nn.Module) -> list[str]:
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return [parameter.name for parameter in parameters if parameter.kind in positional]


def _cpu_copy(module: torch.nn.Module, weight: torch.Tensor) -> Any:
    """A copy of the module on the CPU that holds this weight, made without touching the module's own."""
    copy = object.__new__(type(module))
    copy.__dict__ = {**module.__dict__, "_parameters": dict(module._parameters)}
    if copy._parameters.get("weight") is not None:
        copy._parameters["weight"] = torch.nn.Parameter(weight, requires_grad=False)
    return copy
