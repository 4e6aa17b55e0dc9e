"""Operators registered with torch.library, on a small library of their own, and when calls must go through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from tk_kernel_core.registration import define_operator, takes_operator

Operator = Callable[..., Any]


def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    assert not isinstance(x, FakeTensor), "an implementation must see real tensors only"
    # NumPy is opaque to everything that would look inside.
    return torch.from_numpy(x.detach().numpy() * factor)


def fake_scale(x: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def save_factor(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.factor = inputs


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library("tk_registration_test", "DEF")
    yield library
    library._destroy()


@pytest.fixture
def scaled(library: torch.library.Library) -> Operator:
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return torch.ops.tk_registration_test.scale(gradient, ctx.factor), None

    return define_operator(
        library,
        "scale(Tensor x, float factor) -> Tensor",
        scale,
        fake_scale,
        backward=backward,
        setup_context=save_factor,
    )


@pytest.fixture
def scaled_in_place(library: torch.library.Library) -> Operator:
    def scale_(x: torch.Tensor, factor: float) -> None:
        x.numpy()[...] *= factor

    return define_operator(library, "scale_(Tensor(a!) x, float factor) -> ()", scale_, lambda x, factor: None)


def test_the_operator_is_returned(scaled: Operator) -> None:
    assert scaled is torch.ops.tk_registration_test.scale.default
    assert torch.Tag.pt2_compliant_tag in scaled.tags
    x = torch.randn(3, 4)
    assert torch.equal(scaled(x, 2.5), x * 2.5)


def test_cpu_cuda_and_meta_are_served_and_nothing_else(scaled: Operator) -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    name = "tk_registration_test::scale"
    assert all(has_kernel(name, key) for key in ("CPU", "CUDA", "Meta"))
    assert not any(has_kernel(name, key) for key in ("XPU", "MPS", "CompositeImplicitAutograd"))


def test_opcheck(scaled: Operator, scaled_in_place: Operator) -> None:
    torch.library.opcheck(scaled, (torch.randn(3, 4, requires_grad=True), 2.5))
    torch.library.opcheck(scaled_in_place, (torch.randn(3, 4), 2.5))


def test_opcheck_finds_a_wrong_fake(library: torch.library.Library) -> None:
    wrong = define_operator(
        library, "halves(Tensor x, float factor) -> Tensor", scale, lambda x, factor: x.new_empty(len(x) // 2)
    )
    with pytest.raises(Exception, match="test_faketensor"):
        torch.library.opcheck(wrong, (torch.randn(4), 2.0))


def test_gradients(scaled: Operator) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: scaled(x, 2.5), x)
    assert torch.autograd.gradgradcheck(lambda x: scaled(x, 2.5), x)


def test_fake_and_meta_tensors(scaled: Operator) -> None:
    with FakeTensorMode():
        fake = scaled(torch.empty(3, 4, dtype=torch.bfloat16), 2.0)
    assert isinstance(fake, FakeTensor)
    meta = scaled(torch.empty(3, 4, dtype=torch.bfloat16, device="meta"), 2.0)
    for y in (fake, meta):
        assert (tuple(y.shape), y.dtype) == ((3, 4), torch.bfloat16)


def test_compiled_without_graph_breaks(scaled: Operator, scaled_in_place: Operator) -> None:
    torch._dynamo.reset()

    def layer(x: torch.Tensor) -> torch.Tensor:
        y = scaled(x, 2.0) + 1
        scaled_in_place(y, 3.0)
        return y

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 4)
    assert torch.equal(compiled(x), (x * 2 + 1) * 3)


def test_plain_tensors_take_the_short_way() -> None:
    x, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2), requires_grad=False)
    assert not takes_operator()
    assert not takes_operator(x)
    assert not takes_operator(x, None, parameter, x)
    assert not takes_operator(torch.ones(2, dtype=torch.int8), x[1:], x.expand(3, 2))


@pytest.mark.parametrize("position", range(3))
def test_a_wanted_gradient_takes_the_operator(position: int) -> None:
    for wanted in (torch.ones(2, requires_grad=True), torch.nn.Parameter(torch.ones(2))):
        tensors: list[Any] = [torch.ones(2), None, torch.ones(2)]
        tensors[position] = wanted
        assert takes_operator(*tensors)
        assert takes_operator(wanted * 2)
        assert not takes_operator(*(tensor if tensor is None else tensor.detach() for tensor in tensors))
        with torch.no_grad():
            assert not takes_operator(*tensors)
            with torch.enable_grad():
                assert takes_operator(*tensors)
        with torch.inference_mode():
            assert not takes_operator(*tensors)


class Subclass(torch.Tensor):
    pass


class SubclassedParameter(torch.nn.Parameter):
    pass


@pytest.mark.parametrize("kind", [Subclass, SubclassedParameter, FakeTensor])
def test_a_subclass_takes_the_operator(kind: type) -> None:
    if kind is FakeTensor:
        special = FakeTensorMode().from_tensor(torch.ones(2))
    else:
        special = torch.ones(2).as_subclass(kind)
    assert type(special) is kind
    with torch.no_grad():
        assert takes_operator(special)
        assert takes_operator(torch.ones(2), None, special)


@pytest.mark.parametrize("value", ["x", 1.0, [torch.ones(1)]])
def test_what_is_no_tensor_is_left_to_the_checks(value: Any) -> None:
    assert not takes_operator(value)
    assert not takes_operator(torch.ones(1), value)


def test_modes_take_the_operator() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    for mode in (Mode(), FakeTensorMode()):
        with mode:
            assert takes_operator(x)
        assert not takes_operator(x)


@pytest.mark.parametrize(
    "transform",
    [
        torch.func.vmap,
        lambda function: torch.func.grad(lambda x: function(x).sum()),
        torch.func.functionalize,
        make_fx,
        lambda function: lambda x: make_fx(function, tracing_mode="fake")(x),
    ],
    ids=["vmap", "grad", "functionalize", "make_fx", "make_fx on fake tensors"],
)
def test_transforms_and_tracing_take_the_operator(transform: Callable[..., Any]) -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        # Also of a tensor that the transform does not touch.
        seen.append((takes_operator(x), takes_operator(torch.ones(2))))
        return x * 2

    with torch.no_grad():
        transform(function)(torch.ones(3))
    assert seen
    assert set(seen) == {(True, True)}
    assert not takes_operator(torch.ones(2))


def test_compiling_takes_the_operator() -> None:
    torch._dynamo.reset()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * (2 if takes_operator(x) else 3)

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert compiled(torch.ones(1)).item() == 2
        assert function(torch.ones(1)).item() == 3
    assert torch.export.export(AsModule(function), (torch.ones(1),)).module()(torch.ones(1)).item() == 2


class AsModule(torch.nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x)


# torch.func.jvp compiles decompositions of its own.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_tangent_is_refused() -> None:
    x = torch.ones(3)

    def function(x: torch.Tensor) -> torch.Tensor:
        takes_operator(None, x)
        return x

    with pytest.raises(NotImplementedError, match="forward-mode differentiation is not implemented"):
        torch.func.jvp(function, (x,), (x,))
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match="forward-mode differentiation is not implemented"):
            function(forward_ad.make_dual(x, x))
        assert not takes_operator(x, None)
