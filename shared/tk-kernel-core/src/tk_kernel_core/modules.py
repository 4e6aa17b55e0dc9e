"""Replacing modules inside a model by equivalents that run kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch


def replace_modules(
    model: torch.nn.Module,
    is_candidate: Callable[[torch.nn.Module], bool],
    convert: Callable[[torch.nn.Module], torch.nn.Module],
) -> list[str]:
    """Replace modules inside a model, in place.

    A module that stands at several places is converted once. Nothing is replaced if `convert` raises anything
    but ValueError.

    Args:
        model: Any model that is no candidate itself.
        is_candidate: Whether a module should be replaced.
        convert: Returns the replacement. Where it raises ValueError the module stays, with a warning that says
            why.

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
            # The caller of the public function that called this one.
            warnings.warn(f"{name} was not replaced: {error}", stacklevel=3)
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
