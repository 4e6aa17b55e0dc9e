"""Registering operators with torch.library, and choosing between them and the direct call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad


def define_operator(
    library: torch.library.Library,
    schema: str,
    implementation: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    backward: Callable[..., Any] | None = None,
    setup_context: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Define an operator for eager mode, torch.compile, export and autograd, and return it.

    Args:
        library: The package's library, `torch.library.Library("tk_name", "DEF")`.
        schema: Name and signature, for example `scale(Tensor x, float factor) -> Tensor`.
        implementation: Runs on CPU, CUDA and HIP tensors.
        fake: Computes shapes, strides, dtypes and devices of the outputs without data.
        backward: The gradient, as torch.library.register_autograd takes it. Functional operators only. Without
            one, arguments that require a gradient are refused.
        setup_context: What to save for the gradient.
    """
    name = schema.partition("(")[0].strip()
    qualified = f"{library.ns}::{name}"
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    # HIP tensors dispatch under the key CUDA.
    for key in ("CPU", "CUDA"):
        library.impl(name, implementation, key)
    torch.library.register_fake(qualified, fake, lib=library)
    operator: Callable[..., Any] = getattr(getattr(torch.ops, library.ns), name).default
    if backward is not None:
        torch.library.register_autograd(qualified, backward, setup_context=setup_context, lib=library)
        return operator

    def refuse_gradients(*arguments: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(argument, torch.Tensor) and argument.requires_grad for argument in arguments
        ):
            raise NotImplementedError(f"{qualified} has no derivative, and an argument requires a gradient")
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)

    library.impl(name, refuse_gradients, "Autograd")
    return operator


_PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_functional_transform = torch._C._functorch.peek_interpreter_stack


def takes_operator(*tensors: torch.Tensor | None) -> bool:
    """Whether a call must go through the registered operator instead of straight to its implementation.

    That is so while compiling or tracing, under a functional transform, when a gradient is wanted, for
    tensor subclasses such as fake tensors, and for views whose sign PyTorch has yet to turn.

    Raises:
        NotImplementedError: A tensor carries a tangent, which the kernels would drop.
    """
    if forward_ad._current_level >= 0:
        _refuse_tangents(tensors)
    if _is_compiling() or _dispatch_modes() or _functional_transform() is not None:
        return True
    wants_gradient = _grad_enabled()
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN_TENSORS:
            return isinstance(tensor, torch.Tensor)
        if (wants_gradient and tensor.requires_grad) or tensor.is_neg():
            return True
    return False


def _refuse_tangents(tensors: tuple[torch.Tensor | None, ...]) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                "forward-mode differentiation is not implemented by Triton kernels: differentiate in reverse mode, or "
                "use the package's PyTorch reference"
            )
