"""Calls like a recent one, and every way in which a call is not like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from tk_kernel_core import recent
from tk_kernel_core.recent import RecentPlans
from tk_kernel_core.registration import takes_operator

Plans = RecentPlans[str]


@pytest.fixture
def x() -> torch.Tensor:
    return torch.ones(2, 3)


@pytest.fixture
def plans(x: torch.Tensor) -> Plans:
    plans: Plans = RecentPlans()
    assert plans.remember("form", (x,), "the plan") == "the plan"
    return plans


def test_tensors_with_the_same_properties_are_alike(plans: Plans, x: torch.Tensor) -> None:
    assert plans.find("form", (x,)) == "the plan"
    assert plans.find("form", (torch.zeros(2, 3),)) == "the plan"
    assert plans.find("form", (torch.zeros(100)[7:13].view(2, 3),)) == "the plan"


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "change",
    [
        lambda x: torch.ones(3, 3),
        lambda x: torch.ones(2, 4),
        lambda x: torch.ones(6),
        lambda x: torch.ones(1, 2, 3),
        lambda x: torch.ones(3, 2).T,
        lambda x: torch.ones(2, 4)[:, :3],
        lambda x: torch.ones(1, 3).expand(2, 3),
        lambda x: x.half(),
        lambda x: x.int(),
        lambda x: x.to("meta"),
        lambda x: x.requires_grad_(),
        lambda x: torch.nn.Parameter(x),
        lambda x: torch.nn.Parameter(x, requires_grad=False),
        lambda x: x.as_subclass(Subclass),
        lambda x: torch._neg_view(x),
        lambda x: x.to_sparse(),
        lambda x: x.tolist(),
        lambda x: None,
        lambda x: "text",
    ],
)
def test_another_property_is_not_alike(plans: Plans, x: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> None:
    assert plans.find("form", (change(x),)) is None


def test_fake_tensors_are_not_alike(plans: Plans) -> None:
    with FakeTensorMode():
        fake = torch.ones(2, 3)
        assert plans.find("form", (fake,)) is None
    assert plans.find("form", (fake,)) is None


def test_another_form_or_number_of_tensors_is_not_alike(plans: Plans, x: torch.Tensor) -> None:
    assert plans.find("other", (x,)) is None
    assert plans.find("form", (x, x)) is None
    assert plans.find("form", ()) is None
    y = torch.ones(2, 3)
    plans.remember("two", (x, y), "two")
    assert plans.find("two", (x, y)) == plans.find("two", (y, x)) == "two"
    assert plans.find("two", (x,)) is None
    assert plans.find("two", (x, None)) is None
    assert plans.find("two", (None, x)) is None


def test_the_same_tensor_twice_is_not_remembered_and_displaces_nothing(plans: Plans, x: torch.Tensor) -> None:
    plans.remember("two", (x, torch.ones(2, 3)), "two")
    for _ in range(plans.KEPT):
        assert plans.remember("two", (x, x), "twice") == "twice"
        assert plans.find("two", (x, x)) is None
    assert plans.find("two", (x, torch.ones(2, 3))) == "two"


def test_a_form_without_a_hash_is_left_to_those_who_check(plans: Plans, x: torch.Tensor) -> None:
    assert plans.find([1], (x,)) is None
    assert plans.find(("form", {}), (x,)) is None


def test_a_gradient_that_is_wanted_later_is_not_lost() -> None:
    plans: Plans = RecentPlans()
    parameter = torch.nn.Parameter(torch.ones(3))
    with torch.no_grad():
        plans.remember("form", (parameter,), "without gradients")
        assert plans.find("form", (parameter,)) == "without gradients"
    assert plans.find("form", (parameter,)) is None
    assert takes_operator(parameter)
    with torch.no_grad():
        assert plans.find("form", (parameter,)) == "without gradients"
        with torch.enable_grad():
            assert plans.find("form", (parameter,)) is None


def test_inference_mode_is_a_matter_of_its_own(plans: Plans, x: torch.Tensor) -> None:
    with torch.inference_mode():
        assert plans.find("form", (x,)) is None
        inside = torch.ones(2, 3)
        plans.remember("form", (inside,), "inside")
        assert plans.find("form", (inside,)) == "inside"
    assert plans.find("form", (inside,)) is None
    assert plans.find("form", (x,)) == "the plan"


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        return function(*arguments, **(keywords or {}))


def test_modes_transforms_and_tracing_are_not_alike(plans: Plans, x: torch.Tensor) -> None:
    found: list[str | None] = []

    def look(inner: torch.Tensor) -> torch.Tensor:
        found.extend((plans.find("form", (inner,)), plans.find("form", (x,))))
        return inner * 1.0

    with Mode():
        look(x)
    torch.func.vmap(look)(torch.ones(4, 2, 3))
    torch.func.grad(lambda inner: look(inner).sum())(x)
    torch.func.functionalize(look)(x)
    make_fx(look)(x)
    with forward_ad.dual_level():
        look(forward_ad.make_dual(x, x))
        look(x)
    assert len(found) >= 14
    assert set(found) == {None}
    look(x)
    assert found[-2:] == ["the plan"] * 2


def test_compiled_calls_do_not_look(plans: Plans, x: torch.Tensor) -> None:
    torch._dynamo.reset()

    def layer(inner: torch.Tensor) -> torch.Tensor:
        return inner * (2.0 if plans.find("form", (inner,)) is None else 3.0)

    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), x * 2)
    assert torch.equal(layer(x), x * 3)


@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (2, 3, 4, 5, 6, 7)], ids=str)
def test_tensors_of_any_rank(shape: tuple[int, ...]) -> None:
    plans: Plans = RecentPlans()
    plans.remember("form", (torch.empty(shape),), "the plan")
    assert plans.find("form", (torch.empty(shape),)) == "the plan"
    assert plans.find("form", (torch.empty(*shape, 1),)) is None


def test_the_last_few_shapes_are_known(x: torch.Tensor) -> None:
    plans: RecentPlans[int] = RecentPlans()
    for size in range(10):
        plans.remember("form", (torch.ones(size),), size)
    found = [plans.find("form", (torch.ones(size),)) for size in range(10)]
    assert found == [None] * (10 - plans.KEPT) + list(range(10 - plans.KEPT, 10))


def test_the_number_of_forms_is_bounded(x: torch.Tensor) -> None:
    plans: RecentPlans[int] = RecentPlans()
    for form in range(3 * plans.FORMS + 5):
        plans.remember(form, (x,), form)
        assert plans.find(form, (x,)) == form
        assert len(plans._plans) <= plans.FORMS


def test_meta_tensors_are_not_remembered() -> None:
    plans: Plans = RecentPlans()
    meta, x = torch.ones(2, device="meta"), torch.ones(2)
    assert plans.remember("form", (x, meta), "planned") == "planned"
    assert plans.find("form", (x, meta)) is None


def test_untested_releases_of_torch_do_without(monkeypatch: pytest.MonkeyPatch, x: torch.Tensor) -> None:
    plans: Plans = RecentPlans()
    monkeypatch.setattr(torch, "__version__", "9.0.0")
    monkeypatch.setattr(recent, "_guards_for", None)
    assert plans.remember("form", (x,), "the plan") == "the plan"
    assert plans.find("form", (x,)) is None


def test_this_release_is_tested() -> None:
    assert torch.__version__.startswith(recent.GUARDS_TORCH_VERSIONS), (
        f"add torch {torch.__version__} to GUARDS_TORCH_VERSIONS once these tests pass with it"
    )


def test_tensors_are_not_kept(x: torch.Tensor) -> None:
    import weakref

    plans: Plans = RecentPlans()
    kept = torch.ones(5)
    gone = weakref.ref(kept)
    plans.remember("form", (kept,), "the plan")
    del kept
    assert gone() is None


def test_a_call_checks_first_where_the_operator_takes_it_and_plans_once_where_not(x: torch.Tensor) -> None:
    plans: RecentPlans[Callable[..., Any]] = RecentPlans()
    log: list[str] = []

    def call(operand: torch.Tensor) -> Any:
        def plan_of(*arguments: Any) -> Callable[..., Any]:
            log.append("plan")
            return lambda a, b: a + arguments[2]

        return plans.call(
            "add",
            (operand, None),
            (2,),
            lambda *_: log.append("check"),
            plan_of,
            lambda *arguments: log.append("operator") or arguments[0] + arguments[2],
        )

    assert torch.equal(call(x), x + 2)
    assert torch.equal(call(x.clone()), x + 2)
    assert log == ["plan"]
    log.clear()
    wants_gradient = torch.ones(3, requires_grad=True)
    assert torch.equal(call(wants_gradient), torch.full((3,), 3.0))
    assert log == ["check", "operator"]
    log.clear()
    # Only a shape is wanted.
    assert call(x.to("meta")).shape == x.shape
    assert log == ["check", "operator"]
