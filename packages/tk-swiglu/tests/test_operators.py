"""The registered operators: schemas, fake tensors, torch.compile, functional transforms."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tk_swiglu import swiglu_fused, swiglu_packed, swiglu_with_bias

PACKINGS = list(itertools.product(("concat", "interleaved"), ("gate_first", "up_first")))
PLAIN = (1.0, 0.0, None)
GPT_OSS = (1.702, 1.0, 7.0)
NAMED = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}


def samples(device: str) -> dict[str, tuple[object, ...]]:
    """Arguments of the forward operator, by layout, with and without biases."""
    gate, up = torch.randn(2, 3, 64, device=device)
    x, biases = torch.randn(3, 128, device=device), torch.randn(4, 64, device=device)
    bias, bias_up = biases[0].clone(), biases[1].clone()
    separate = {
        "separate": (gate, up, None, None, "separate", True, *PLAIN),
        "separate with biases": (gate, up, bias, bias_up, "separate", True, *GPT_OSS),
        "separate halves": (*x.chunk(2, -1), bias, bias_up, "separate", True, *GPT_OSS),
        "separate with dtypes": (gate.half(), up.bfloat16(), bias, bias_up.half(), "separate", True, *GPT_OSS),
    }
    packed = {
        f"{layout} {order}{' with bias' * has_bias}": (
            x,
            None,
            biases[2:].flatten() if has_bias else None,
            None,
            layout,
            order == "gate_first",
            *(GPT_OSS if has_bias else PLAIN),
        )
        for (layout, order), has_bias in itertools.product(PACKINGS, (False, True))
    }
    return separate | packed


@pytest.mark.parametrize("name", list(samples("cpu")))
def test_opcheck(name: str, device: str) -> None:
    arguments = [
        value.detach().requires_grad_() if isinstance(value, torch.Tensor) else value for value in samples(device)[name]
    ]
    torch.library.opcheck(torch.ops.tk_swiglu.swiglu.default, tuple(arguments))


@pytest.mark.parametrize("wants_bias", [False, True])
@pytest.mark.parametrize("name", list(samples("cpu")))
def test_opcheck_of_the_backward(name: str, wants_bias: bool, device: str) -> None:
    arguments = samples(device)[name]
    dy = torch.randn(3, 64, device=device).to(arguments[0].dtype)
    torch.library.opcheck(torch.ops.tk_swiglu.swiglu_backward.default, (dy, *arguments, wants_bias))


@pytest.mark.parametrize("name", list(samples("cpu")))
def test_the_operator_is_the_function(name: str, device: str) -> None:
    gate, up, bias, bias_up, layout, gate_first, alpha, beta, limit = samples(device)[name]
    got = torch.ops.tk_swiglu.swiglu(gate, up, bias, bias_up, layout, gate_first, alpha, beta, limit)
    numbers = {"alpha": alpha, "beta": beta, "limit": limit}
    if layout != "separate":
        order = "gate_first" if gate_first else "up_first"
        want = swiglu_packed(gate, bias, layout=layout, order=order, **numbers)
    elif bias is None:
        want = swiglu_fused(gate, up, **numbers)
    else:
        want = swiglu_with_bias(gate, up, bias, bias_up, **numbers)
    assert torch.equal(got, want)


def forms(gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
    """Every form of the activation, of tensors whose last dimension is even."""
    return [
        swiglu_fused(gate, up),
        swiglu_with_bias(gate, up, bias, bias, **NAMED),
        *(
            swiglu_packed(gate, bias if number % 2 else None, layout=layout, order=order, **NAMED)
            for number, (layout, order) in enumerate(PACKINGS)
        ),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.transpose(0, 1), lambda x: x[:, ::2]])
def test_fake_tensors_match_real_ones(make: object, dtype: torch.dtype, device: str) -> None:
    real = make(torch.randn(4, 6, 64, dtype=dtype, device=device))
    bias = torch.randn(64, device=device)
    with FakeTensorMode() as mode:
        fake, fake_bias = mode.from_tensor(real), mode.from_tensor(bias)
        fakes = forms(fake, fake, fake_bias)
    for got, want in zip(fakes, forms(real, real, bias), strict=True):
        assert (got.shape, got.dtype, got.stride(), got.device) == (want.shape, want.dtype, want.stride(), want.device)


def test_fake_tensors_take_out(device: str) -> None:
    with FakeTensorMode():
        gate, out = torch.empty(4, 64, device=device), torch.empty(64, 4, device=device).t()
        assert swiglu_fused(gate, gate, out=out) is out
        assert swiglu_packed(torch.empty(4, 128, device=device), out=out) is out


def test_meta_tensors_give_meta_tensors() -> None:
    gate, bias = torch.empty(4, 64, device="meta"), torch.empty(64, device="meta")
    shapes = [(y.device.type, tuple(y.shape)) for y in forms(gate, gate, bias)]
    assert shapes == [("meta", (4, 64))] * 2 + [("meta", (4, 32))] * 4


def test_compile_without_graph_breaks_for_any_number_of_rows(device: str) -> None:
    torch._dynamo.reset()
    compilations = 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal compilations
        compilations += 1
        return graph.forward

    compiled = torch.compile(forms, fullgraph=True, dynamic=True, backend=count)
    bias = torch.randn(64, device=device)
    for tokens in (7, 65, 1, 0, 33):
        gate, up = torch.randn(2, tokens, 64, device=device)
        for got, want in zip(compiled(gate, up, bias), forms(gate, up, bias), strict=True):
            assert torch.equal(got, want)
    assert compilations <= 3


def test_compiled_gradients(device: str) -> None:
    torch._dynamo.reset()

    def loss(gate: torch.Tensor, up: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return sum(y.square().sum() for y in forms(gate, up, bias))

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 8):
        gate, up = torch.randn(2, tokens, 64, device=device)
        bias = torch.randn(64, device=device)
        gradients = []
        for function in (compiled, loss):
            leaves = [tensor.clone().requires_grad_() for tensor in (gate, up, bias)]
            gradients.append(torch.autograd.grad(function(*leaves), leaves))
        for got, want in zip(*gradients, strict=True):
            # The order in which autograd adds the forms' gradients may differ.
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


def test_compiled_gradients_of_one_form_are_the_same_bits(device: str) -> None:
    torch._dynamo.reset()

    def loss(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return swiglu_packed(x, bias, layout="interleaved", **NAMED).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    x, bias = torch.randn(5, 128, device=device), torch.randn(128, device=device)
    gradients = []
    for function in (compiled, loss):
        leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
        gradients.append(torch.autograd.grad(function(*leaves), leaves))
    assert all(torch.equal(got, want) for got, want in zip(*gradients, strict=True))


def test_compile_reports_bad_arguments() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(swiglu_fused, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"up must have shape \(2, 64\), got \(2, 63\)"):
        compiled(torch.randn(2, 64), torch.randn(2, 63))


def test_a_mode_sees_the_operator(device: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    gate, bias = torch.ones(2, 8, device=device), torch.ones(8, device=device)
    with Recorder() as recorder:
        forms(gate, gate, bias)
    assert recorder.names.count("tk_swiglu.swiglu.default") == 6


def test_tangents_are_refused_not_dropped(device: str) -> None:
    x, bias = torch.randn(2, 8, device=device), torch.randn(8, device=device)
    for activation in (lambda x: swiglu_fused(x, x), swiglu_packed):
        with pytest.raises(NotImplementedError, match="forward-mode differentiation is not implemented"):
            torch.func.jvp(activation, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        dual_bias = torch.autograd.forward_ad.make_dual(bias, bias)
        for activation in (
            lambda: swiglu_fused(dual, x),
            lambda: swiglu_fused(x, dual),
            lambda: swiglu_with_bias(x, x, dual_bias, bias),
            lambda: swiglu_with_bias(x, x, bias, dual_bias),
            lambda: swiglu_packed(x, dual_bias),
            lambda: swiglu_fused(x, x, out=dual),
        ):
            with pytest.raises(NotImplementedError, match="forward-mode differentiation is not implemented"):
                activation()
        # Other tensors are served as ever.
        assert torch.equal(swiglu_fused(x, x), swiglu_fused(x.clone(), x.clone()))
