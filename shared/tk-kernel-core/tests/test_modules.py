"""Replacement of modules inside a model, and what a replacement would lose."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tk_kernel_core.modules import check_replaceable, replace_modules


class Old(nn.Module):
    """What is replaced, unless it refuses."""

    def __init__(self, refusal: Exception | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.refusal = refusal


class New(nn.Module):
    """What stands in its place."""

    def __init__(self, old: Old) -> None:
        super().__init__()
        self.weight = old.weight


class Block(nn.Module):
    """A module that does not look like a container."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def is_old(module: nn.Module) -> bool:
    return isinstance(module, Old)


def convert(module: nn.Module) -> nn.Module:
    if module.refusal is not None:
        raise module.refusal
    return New(module)


def replace_old(model: Any) -> list[str]:
    """Stand for a package's public function."""
    return replace_modules(model, is_old, convert)


def test_modules_at_any_depth_are_replaced_and_named() -> None:
    model = Block(
        first=Old(), layers=nn.ModuleList([Block(norm=Old(), other=nn.Linear(2, 2)), nn.Sequential(Old(), nn.ReLU())])
    )
    weights = dict(model.named_parameters())
    others = {name: module for name, module in model.named_modules() if not is_old(module)}
    assert replace_old(model) == ["first", "layers.0.norm", "layers.1.0"]
    assert isinstance(model.first, New)
    assert isinstance(model.layers[0].norm, New)
    assert isinstance(model.layers[1][0], New)
    # The rest is the same, names and order included.
    assert list(dict(model.named_parameters())) == list(weights)
    assert all(parameter is weights[name] for name, parameter in model.named_parameters())
    assert {name: module for name, module in model.named_modules() if not isinstance(module, New)} == others
    assert replace_old(model) == []


def test_a_model_without_candidates_stays_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    children = list(model)
    assert replace_old(model) == []
    assert list(model) == children
    assert replace_old(nn.ReLU()) == []


def test_a_module_at_several_places_is_converted_once() -> None:
    converted: list[nn.Module] = []

    def convert_and_count(module: nn.Module) -> nn.Module:
        converted.append(module)
        return New(module)

    shared, alone = Old(), Old()
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared, alone])})
    assert replace_modules(model, is_old, convert_and_count) == ["a", "b.0", "b.1"]
    assert converted == [shared, alone]
    assert model["a"] is model["b"][0]
    assert model["a"] is not model["b"][1]


def test_a_shared_parent_keeps_one_replacement() -> None:
    block = Block(norm=Old())
    model = nn.Sequential(block, block)
    assert replace_old(model) == ["0.norm", "1.norm"]
    assert model[0] is model[1] is block
    assert isinstance(block.norm, New)


def test_a_candidate_that_refuses_stays_with_a_warning_at_the_caller() -> None:
    refusing = Old(ValueError("it has a reason"))
    model = nn.ModuleDict({"a": nn.ModuleList([refusing, Old()]), "b": refusing})
    caller = compile("replaced = replace_old(model)", "caller.py", "exec")
    names: dict[str, Any] = {"replace_old": replace_old, "model": model}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(caller, names)
    assert names["replaced"] == ["a.1"]
    assert model["a"][0] is model["b"] is refusing
    assert isinstance(model["a"][1], New)
    # Once for the module, not for each of its places.
    (warning,) = caught
    assert warning.category is UserWarning
    assert str(warning.message) == "a.0 was not replaced: it has a reason"
    assert (warning.filename, warning.lineno) == ("caller.py", 1)


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), TypeError("wrong"), KeyboardInterrupt()], ids=repr)
def test_any_other_error_leaves_the_model_whole(error: Exception) -> None:
    model = nn.Sequential(Old(), Old(error), Old())
    children = list(model)
    with pytest.raises(type(error)) as caught:
        replace_old(model)
    assert caught.value is error
    assert list(model) == children


def test_a_warning_that_is_an_error_leaves_the_model_whole() -> None:
    model = nn.Sequential(Old(), Old(ValueError("it has a reason")))
    children = list(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="1 was not replaced: it has a reason"):
            replace_old(model)
    assert list(model) == children


def test_a_candidate_itself_cannot_be_replaced_in_place() -> None:
    message = "model must contain the modules to replace, got one of them itself: Old"
    with pytest.raises(ValueError, match=message):
        replace_old(Old())


@pytest.mark.parametrize("model", [None, "model", Old, [Old()]], ids=lambda model: type(model).__name__)
def test_what_is_no_module_is_refused(model: object) -> None:
    with pytest.raises(TypeError, match=rf"^model must be a torch\.nn\.Module, got {type(model).__name__}$"):
        replace_old(model)


OWN_THINGS_LOST = "module must have no forward and no buffers of its own, which would be lost, Old has"


def hook(*_: object) -> None:
    pass


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda module: module.register_forward_hook(hook),
    "forward, with keywords": lambda module: module.register_forward_hook(hook, with_kwargs=True),
    "forward, always called": lambda module: module.register_forward_hook(hook, always_call=True),
    "before forward": lambda module: module.register_forward_pre_hook(hook),
    "backward": lambda module: module.register_full_backward_hook(hook),
    "before backward": lambda module: module.register_full_backward_pre_hook(hook),
    "state_dict": lambda module: module.register_state_dict_post_hook(hook),
    "before state_dict": lambda module: module.register_state_dict_pre_hook(hook),
    "load_state_dict": lambda module: module.register_load_state_dict_post_hook(hook),
    "before load_state_dict": lambda module: module.register_load_state_dict_pre_hook(hook),
}


@pytest.mark.parametrize("kind", list(HOOKS))
def test_hooks_would_be_lost(kind: str) -> None:
    module = Old()
    handle = HOOKS[kind](module)
    with pytest.raises(
        ValueError, match="module must have no hooks, which would be lost; Old has some: add them after"
    ):
        check_replaceable(module)
    handle.remove()
    check_replaceable(module)


def test_a_forward_of_its_own_would_be_lost() -> None:
    module = Old()
    module.forward = lambda x: x
    with pytest.raises(ValueError, match=OWN_THINGS_LOST):
        check_replaceable(module)
    del module.forward
    check_replaceable(module)


@pytest.mark.parametrize("persistent", [True, False])
def test_buffers_of_its_own_would_be_lost(persistent: bool) -> None:
    module = Old()
    module.register_buffer("mean", torch.ones(2), persistent=persistent)
    with pytest.raises(ValueError, match=OWN_THINGS_LOST):
        check_replaceable(module)


@pytest.mark.parametrize("name", ["__call__", "get_extra_state", "_save_to_state_dict", "_load_from_state_dict"])
def test_ways_of_its_own_would_be_lost(name: str) -> None:
    kind = type("Odd", (Old,), {name: lambda self, *arguments, **keywords: None})
    with pytest.raises(ValueError, match=f"module must not override {name}, which would be lost, Odd does"):
        check_replaceable(kind())


def test_compiling_of_its_own_would_be_lost() -> None:
    module = Old()
    module.compile(backend="eager")
    with pytest.raises(ValueError, match="module must not be compiled, which would be lost, Old is"):
        check_replaceable(module)


def test_what_is_compiled_as_a_whole_stays() -> None:
    model = nn.Sequential(torch.compile(Old(), backend="eager"))
    with pytest.warns(UserWarning, match=r"0\._orig_mod was not replaced: it is compiled"):
        assert replace_modules(model, lambda module: isinstance(module, Old), lambda _: New()) == []


def test_what_lies_inside_a_replaced_module_is_gone_with_it() -> None:
    outer = Old()
    outer.inner = nn.Sequential(Old())
    model = nn.Sequential(outer, Old())
    assert replace_modules(model, lambda module: isinstance(module, Old), lambda _: nn.ReLU()) == ["0", "1"]
    assert list(dict(model.named_modules())) == ["", "0", "1"]


def test_parameters_and_what_children_have_are_kept_elsewhere() -> None:
    module = Block(inner=nn.BatchNorm1d(2), linear=nn.Linear(2, 2))
    module.inner.register_forward_hook(hook)
    module.inner.forward = lambda x: x
    module.linear.register_buffer("scale", torch.ones(2))
    check_replaceable(module)
    check_replaceable(nn.Linear(2, 2))
