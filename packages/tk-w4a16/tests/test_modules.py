"""The drop-in module: values, gradients, and the life of its buffers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch

from tk_kernel_core.numerics import rounding_tolerance
from tk_testkit.close import assert_close
from tk_w4a16 import PackedInt4Weight, W4A16Linear, w4a16_linear

IN, OUT = 72, 40
KINDS = ("asymmetric", "symmetric", "one group", "act-order")
each_kind = pytest.mark.parametrize("kind", KINDS)


def linear(device: str, dtype: torch.dtype = torch.float16, bias: bool = True) -> torch.nn.Linear:
    """A layer with a weight that is not symmetric, and so has zero points."""
    layer = torch.nn.Linear(IN, OUT, bias)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(OUT, IN, generator=generator) + 1.0)
        if bias:
            layer.bias.copy_(torch.linspace(-1.0, 1.0, OUT))
    return layer.to(device=device, dtype=dtype)


def module_of(kind: str, device: str, dtype: torch.dtype = torch.float16) -> W4A16Linear:
    theirs = linear(device, dtype)
    if kind != "act-order":
        return W4A16Linear.from_linear(
            theirs, group_size=-1 if kind == "one group" else 32, symmetric=kind == "symmetric"
        )
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31, (IN // 8, OUT), generator=generator).to(device, torch.int32)
    zeros = torch.randint(-(2**31), 2**31, (3, OUT // 8), generator=generator).to(device, torch.int32)
    scales = torch.rand(3, OUT, generator=generator).to(device, dtype) / 32
    index = torch.randint(0, 3, (IN,), generator=generator).to(device)
    return W4A16Linear.from_gptq(words, zeros, scales, index, theirs.bias, group_size=32, desc_act=True)


def activations_like(device: str, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(5, IN, generator=torch.Generator().manual_seed(1)).to(device=device, dtype=dtype)


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        assert (got[name].dtype, got[name].device) == (value.dtype, value.device), name
        assert torch.equal(got[name], value), name


@each_kind
def test_the_equivalent_of_a_linear(kind: str, device: str) -> None:
    module = module_of(kind, device)
    x = activations_like(device).view(1, 5, IN)
    y = module(x)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((1, 5, OUT), torch.float16, True)
    weight = module.packed.dequantize(torch.float64)
    want = x.double() @ weight.T + module.bias.detach().double()
    terms = float((x.double().abs() @ weight.abs().T).max())
    # Sums in fp32; beside them half a unit in the last place of what the reference, or the kernel, rounds.
    assert_close(y.detach(), want.half(), rounding_tolerance(torch.float16, IN, magnitude=terms))
    if kind != "act-order":
        theirs = linear(device)
        step = module.packed.scales.double().max()
        # Half a step of every weight, and of asymmetric ones as much again for the zero point.
        assert float((weight - theirs.weight.detach().double()).abs().max()) <= float(step)
        assert torch.equal(module.bias, theirs.bias)


def test_a_linear_gives_its_bias_mode_and_dtype(device: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        theirs = linear(device, dtype).eval()
        module = W4A16Linear.from_linear(theirs)
        assert module.bias is theirs.bias
        assert module.scales.dtype == dtype
        assert not module.training
    assert W4A16Linear.from_linear(linear(device, bias=False)).bias is None


def test_it_does_what_the_function_does_with_the_tensors_it_was_made_of(device: str) -> None:
    module = module_of("act-order", device)
    other = W4A16Linear.from_packed(module.packed, module.bias)
    assert all(theirs is ours for ours, theirs in zip(module.buffers(), other.buffers(), strict=True))
    x = activations_like(device)
    assert torch.equal(other(x), w4a16_linear(x, module.packed, module.bias))


def test_every_constructor_hands_its_arguments_on() -> None:
    generator = torch.Generator().manual_seed(0)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)

    scales, bias, index = torch.rand(2, 16).half(), torch.randn(16), (torch.arange(64) % 2).int()
    gptq = {"qweight": words(8, 16), "qzeros": words(2, 2), "scales": scales}
    awq = {"qweight": words(64, 2), "qzeros": words(2, 2), "scales": scales}
    tensors = {"weight_packed": words(16, 8), "weight_scale": scales.t(), "weight_shape": (16, 64)}
    for name, arguments in (
        ("from_float", {"weight": torch.randn(16, 64), "group_size": 64, "symmetric": True}),
        ("from_gptq", {**gptq, "group_size": 32, "checkpoint_format": "gptq_v2"}),
        ("from_gptq", {**gptq, "g_idx": index, "group_size": 32, "desc_act": True}),
        ("from_awq", {**awq, "group_size": 32}),
        ("from_compressed_tensors", {**tensors, "group_size": 32, "symmetric": True}),
        ("from_compressed_tensors", {**tensors, "weight_g_idx": index, "group_size": 32, "symmetric": True}),
    ):
        module = getattr(W4A16Linear, name)(**arguments, bias=bias)
        want = getattr(PackedInt4Weight, name)(**arguments)
        assert torch.equal(module.packed.dequantize(), want.dequantize())
        assert isinstance(module.bias, torch.nn.Parameter)
        assert torch.equal(module.bias, bias)
        assert (module.symmetric, module.group_size) == (want.zeros is None, want.group_size)
        assert module.act_order is ("g_idx" in arguments or "weight_g_idx" in arguments)
    with pytest.raises(ValueError, match="g_idx must be given where desc_act is True"):
        W4A16Linear.from_gptq(**gptq, group_size=32, desc_act=True)


@each_kind
def test_gradients_reach_the_input_and_the_bias_and_nothing_else(kind: str, device: str) -> None:
    module = module_of(kind, device, torch.float32)
    before = buffers_of(module)
    x, dy = activations_like(device, torch.float32).requires_grad_(), torch.randn(5, OUT, device=device)
    module(x).backward(dy)
    want = dy.double() @ module.packed.dequantize(torch.float64)
    assert_close(x.grad, want.float(), rounding_tolerance(torch.float32, OUT, magnitude=float(want.abs().max()) * 4))
    assert_close(module.bias.grad, dy.sum(0), rounding_tolerance(torch.float32, 5, magnitude=4.0))
    assert [name for name, _ in module.named_parameters()] == ["bias"]
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert_same(buffers_of(module), before)


def test_without_a_weight_it_cannot_be_used(device: str) -> None:
    module = W4A16Linear(IN, OUT, group_size=32, device=device)
    x = activations_like(device)
    with pytest.raises(RuntimeError, match="this W4A16Linear has no weight yet: call quantize_weights, load a state"):
        module(x)
    # Nor does what it saves pass for a weight.
    with pytest.raises(RuntimeError, match="weight_scale must be finite"):
        W4A16Linear(IN, OUT, group_size=32, device=device).load_state_dict(module.state_dict())
    weight = linear(device).weight
    module.quantize_weights(weight)
    want = W4A16Linear.from_linear(linear(device, bias=False), group_size=32)
    assert_same(buffers_of(module), buffers_of(want))
    with pytest.raises(ValueError, match=rf"weight must have shape \({OUT}, {IN}\), got \({IN}, {OUT}\)"):
        module.quantize_weights(weight.t())
    with pytest.raises(TypeError, match=r"weight must be a torch\.Tensor, got list"):
        module.quantize_weights([1.0])
    bad = weight.detach().clone()
    bad[1, 1] = torch.inf
    with pytest.raises(ValueError, match="weight must be finite"):
        module.quantize_weights(bad)
    # An error leaves it as it was.
    assert_same(buffers_of(module), buffers_of(want))
    with pytest.raises(ValueError, match="act_order must be False for weights that are rounded to nearest"):
        W4A16Linear(IN, OUT, act_order=True).quantize_weights(weight.cpu())


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: W4A16Linear(8.0, 8), TypeError, "in_features must be an int, got float"),
        (lambda: W4A16Linear(8, True), TypeError, "out_features must be an int, got bool"),
        (lambda: W4A16Linear(8, 0), ValueError, "out_features must be at least 1, got 0"),
        (lambda: W4A16Linear(8, 8, group_size=0), ValueError, "group_size must be at least 1, got 0"),
        (lambda: W4A16Linear(8, 8, group_size=-2), ValueError, "group_size must be at least 1, got -2"),
        (
            lambda: W4A16Linear(800, 8, group_size=48),
            ValueError,
            "group_size must be one of 32, 64, 128, 256, -1, got 48",
        ),
        (lambda: W4A16Linear(8, 8, dtype=torch.float64), ValueError, "dtype must be one of torch.float16"),
        (lambda: W4A16Linear.from_linear(torch.nn.Conv1d(2, 2, 1)), TypeError, "linear must be a torch.nn.Linear, got"),
        (lambda: W4A16Linear.from_packed(torch.ones(2)), TypeError, "weight must be a PackedInt4Weight, got Tensor"),
        (
            lambda: W4A16Linear.from_float(torch.randn(8, 8), torch.ones(7)),
            ValueError,
            r"bias must have shape \(8,\), got \(7,\)",
        ),
        (
            lambda: W4A16Linear.from_float(torch.randn(8, 8), torch.ones(8, device="meta")),
            ValueError,
            "bias must be on the device of weight, cpu, got meta",
        ),
        (lambda: W4A16Linear.from_float(torch.randn(8, 8))(torch.randn(2, 7)), ValueError, "x must have shape"),
    ],
)
def test_bad_arguments(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_what_it_says_of_itself() -> None:
    sizes = "in_features=256, out_features=4, bias=False"
    assert repr(W4A16Linear(256, 4)) == f"W4A16Linear({sizes}, group_size=128, symmetric=False, act_order=False)"


@each_kind
@pytest.mark.parametrize(
    "convert",
    [
        lambda module: module.half(),
        lambda module: module.bfloat16().float().half(),
        lambda module: module.to("cpu", torch.float16),
        lambda module: module.type(torch.float16),
        lambda module: torch.nn.Sequential(module).half()[0],
    ],
    ids=["half", "bfloat16", "to", "type", "parent"],
)
def test_conversions_leave_the_weight_alone(kind: str, convert: Callable[..., object]) -> None:
    module = module_of(kind, "cpu", torch.float32)
    before, state = buffers_of(module), module.state_dict()
    assert convert(module) is module
    assert_same(buffers_of(module), before)
    assert (module.bias.dtype, module.scales.dtype) == (torch.float16, torch.float32)
    for name, value in module.state_dict().items():
        assert name == "bias" or torch.equal(value, state[name])


@pytest.mark.gpu
@each_kind
def test_to_another_device_and_back(kind: str) -> None:
    module = module_of(kind, "cpu")
    before = buffers_of(module)
    module.cuda().bfloat16()
    assert all(tensor.is_cuda for tensor in module.state_dict().values())
    module(activations_like("cuda"))
    assert_same(buffers_of(module.cpu()), before)


@each_kind
def test_copies(kind: str, device: str) -> None:
    module = module_of(kind, device)
    before = buffers_of(module)
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_same(buffers_of(twin), before)
        assert repr(twin) == repr(module)
        twin.scales.zero_()
    assert_same(buffers_of(module), before)


def test_the_weight_is_held_once() -> None:
    module = W4A16Linear.from_linear(torch.nn.Linear(256, 128, bias=False, dtype=torch.float16))
    # Half a byte for each weight; 2 bytes for each scale, and one for each zero point.
    assert sum(value.nbytes for value in module.buffers()) == 128 * 256 // 2 + 128 * 2 * 3
    assert not any(isinstance(value, torch.Tensor) for value in vars(module).values())


# It is of no kernel, and the interpreter is slow.
@pytest.mark.compiler
def test_compiles_and_exports_whole(device: str) -> None:
    torch._dynamo.reset()
    module = module_of("act-order", device)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = activations_like(device)[:rows]
        assert torch.equal(compiled(x), module(x))
    compiled(x).sum().backward()
    assert module.bias.grad is not None
    assert torch.equal(torch.export.export(module, (x,)).module()(x), module(x))


def test_called_with_tensors_of_another(device: str) -> None:
    one, other = (module_of("asymmetric", device) for _ in range(2))
    other.scales.mul_(2.0)
    x = activations_like(device)
    tensors = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert torch.equal(torch.func.functional_call(one, tensors, (x,)), other(x))
