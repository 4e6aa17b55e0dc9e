"""Replacing modules inside a model by equivalents that run kernels."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from tk_kernel_core.checks import check_tensor


def replace_modules(
    model: torch.nn.Module,
    is_candidate: Callable[[torch.nn.Module], bool],
    convert: Callable[[torch.nn.Module], torch.nn.Module],
    *,
    stacklevel: int = 3,
) -> list[str]:
    """Replace modules inside a model, in place.

    A module that stands at several places is converted once. Nothing is replaced if `convert` raises anything
    but ValueError.

    Args:
        model: Any model that is no candidate itself.
        is_candidate: Whether a module should be replaced.
        convert: Returns the replacement. Where it raises ValueError the module stays, with a warning that says
            why.
        stacklevel: Of that warning; by default the caller of the function that called this one.

    Returns:
        Names of the replaced modules, one for each place.

    Raises:
        TypeError: `model` is no module.
        ValueError: `model` is a candidate itself, which cannot be replaced in place.
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if is_candidate(model):
        raise ValueError(f"model must contain the modules to replace, got one of them itself: {type(model).__name__}")
    replacements: dict[torch.nn.Module, torch.nn.Module | None] = {}
    places = [(name, module) for name, module in model.named_modules(remove_duplicate=False) if is_candidate(module)]
    for name, module in places:
        if module in replacements:
            continue
        try:
            if name.rpartition(".")[2] == "_orig_mod":
                raise ValueError(
                    "it is compiled, and what was compiled would go on running: replace before torch.compile"
                )
            replacements[module] = convert(module)
        except ValueError as error:
            replacements[module] = None
            warnings.warn(f"{name} was not replaced: {error}", stacklevel=stacklevel)
    # Only now, so that an error above leaves the model whole.
    replaced: list[str] = []
    for name, module in places:
        replacement = replacements[module]
        # What lay inside a replaced module is no longer part of the model.
        if replacement is not None and not (replaced and name.startswith(f"{replaced[-1]}.")):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)
            replaced.append(name)
    return replaced


_WAYS_OF_ITS_OWN = ("__call__", "get_extra_state", "_save_to_state_dict", "_load_from_state_dict")


def check_replaceable(module: torch.nn.Module) -> None:
    """Raise ValueError for a module that carries something its replacement would lose.

    That is hooks, buffers, a forward or compilation of the module's own, and other ways of being called or saved.
    """
    kind = type(module).__name__
    for name in _WAYS_OF_ITS_OWN:
        if getattr(type(module), name) is not getattr(torch.nn.Module, name):
            raise ValueError(f"module must not override {name}, which would be lost, {kind} does")
    if any(value for name, value in vars(module).items() if name.endswith(("_hooks", "_hooks_always_called"))):
        raise ValueError(f"module must have no hooks, which would be lost; {kind} has some: add them afterwards")
    if getattr(module, "_compiled_call_impl", None) is not None:
        raise ValueError(f"module must not be compiled, which would be lost, {kind} is: compile it afterwards")
    if "forward" in vars(module) or any(buffer is not None for buffer in module._buffers.values()):
        raise ValueError(f"module must have no forward and no buffers of its own, which would be lost, {kind} has")


def replace_linears(
    model: torch.nn.Module, skip: Iterable[str], convert: Callable[[Any], torch.nn.Module]
) -> list[str]:
    """Replace the linear layers inside a model, in place, as `replace_modules` does.

    A layer whose weight another module has too stays, with a warning.

    Args:
        model: Any model that is no linear layer itself.
        skip: Modules that stay, with all inside them: each the end of a dotted name, or a pattern of fnmatch for one.
        convert: As for `replace_modules`.

    Returns:
        Names of the replaced modules.

    Raises:
        TypeError: `model` is no module, or `skip` is a single string.
        ValueError: `model` is itself a linear layer.
    """
    if isinstance(skip, str):
        raise TypeError(f"skip must be a sequence of names, got the string {skip!r}")
    patterns = tuple(skip)
    skipped: set[torch.nn.Module] = set()
    owners: Counter[torch.Tensor] = Counter()
    if isinstance(model, torch.nn.Module):
        for name, module in model.named_modules(remove_duplicate=False):
            if any(fnmatchcase(f".{name}", f"*.{pattern}") for pattern in patterns):
                skipped.update(module.modules())
        owners.update(
            weight for module in model.modules() for weight in module._parameters.values() if weight is not None
        )

    def convert_untied(linear: torch.nn.Module) -> torch.nn.Module:
        weight = linear._parameters.get("weight")
        if weight is not None and owners[weight] > 1:
            raise ValueError("its weight is tied to that of another module, and would be held twice")
        return convert(linear)

    def is_candidate(module: torch.nn.Module) -> bool:
        return isinstance(module, torch.nn.Linear) and module not in skipped

    return replace_modules(model, is_candidate, convert_untied, stacklevel=4)


def check_linear(linear: object, dtypes: Iterable[torch.dtype]) -> None:
    """Check that a module is a linear layer that another with its weight and bias can stand for.

    Raises:
        TypeError: It is no torch.nn.Linear.
        ValueError: It has something that would be lost, or a parameter that is not dense or of another dtype.
    """
    if not isinstance(linear, torch.nn.Linear):
        raise TypeError(f"linear must be a torch.nn.Linear, got {type(linear).__name__}")
    kind = type(linear).__name__
    if type(linear).forward is not torch.nn.Linear.forward:
        raise ValueError(f"linear must have the forward of torch.nn.Linear, {kind} has one of its own")
    if isinstance(linear, NonDynamicallyQuantizableLinear):
        raise ValueError(f"linear must be called, not read by the module around it, as {kind} is")
    check_replaceable(linear)
    if lost := [name for name, _ in linear.named_parameters() if name not in ("weight", "bias")]:
        raise ValueError(f"linear must have no parameters but weight and bias, {kind} has {lost}")
    try:
        for name, value in linear.named_parameters():
            check_tensor(f"linear.{name}", value, dtypes)
    except TypeError as error:
        raise ValueError(error) from None
