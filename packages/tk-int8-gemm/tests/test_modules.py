"""The drop-in modules: values, gradients, and the life of their buffers."""

import copy
import itertools
import pickle
from collections.abc import Iterator

import pytest
import torch

from tk_int8_gemm import (
    Int8Linear,
    QuantizedLinear,
    dequantize,
    int8_gemm_torch,
    quantize_weight_per_channel,
    quantize_weight_per_channel_asymmetric,
    w8a8_gemm_torch,
)
from tk_kernel_core.numerics import rounding_tolerance
from tk_testkit.close import assert_close

IN, OUT = 72, 40
SCHEMES, ACTIVATIONS = ("symmetric", "asymmetric"), ("16-bit", "int8")
MODES = pytest.mark.parametrize(("scheme", "activations"), list(itertools.product(SCHEMES, ACTIVATIONS)))


def linear(device: str, dtype: torch.dtype = torch.float32, bias: bool = True) -> torch.nn.Linear:
    """A layer with a weight that is not symmetric, and so has zero points."""
    layer = torch.nn.Linear(IN, OUT, bias, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(OUT, IN, generator=generator) + 1.0)
        if bias:
            layer.bias.copy_(torch.randn(OUT, generator=generator))
    return layer.to(device=device, dtype=dtype)


def activations_like(device: str, dtype: torch.dtype = torch.float32, rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, IN, generator=torch.Generator().manual_seed(1)).to(device=device, dtype=dtype)


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        assert (got[name].dtype, got[name].device) == (value.dtype, value.device), name
        assert torch.equal(got[name], value), name


def bytes_of(tensors: Iterator[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@MODES
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_equivalent_of_a_linear(scheme: str, activations: str, bias: bool, dtype: torch.dtype, device: str) -> None:
    theirs = linear(device, dtype, bias).eval()
    module = Int8Linear.from_linear(theirs, scheme=scheme, activations=activations)
    if scheme == "symmetric":
        codes, scale = quantize_weight_per_channel(theirs.weight)
        zero_point = None
        assert module.zero_point is None
    else:
        codes, scale, zero_point = quantize_weight_per_channel_asymmetric(theirs.weight)
        assert torch.equal(module.zero_point, zero_point.float())
    assert torch.equal(module.weight_int8, codes)
    assert torch.equal(module.scale, scale)
    assert module.bias is theirs.bias
    assert not module.training
    x = activations_like(device, dtype, rows=6)[::2].view(1, 3, IN)
    y = module(x)
    assert (y.shape, y.dtype, y.is_contiguous()) == ((1, 3, OUT), dtype, True)
    if activations == "int8":
        want = w8a8_gemm_torch(x, codes, scale, module.bias, zero_point=zero_point, out_dtype=torch.float64)
    else:
        want = int8_gemm_torch(x.double(), codes, scale, module.bias, zero_point=zero_point)
    # A zero point doubles what codes can be, and both parts of that cancel.
    size = float(x.abs().amax() * 255 * scale.amax())
    assert_close(y, want, rounding_tolerance(dtype, IN, magnitude=size))
    # What quantisation itself costs: half a step of every weight, and for int8 activations of every activation.
    error = scale.double() * x.double().abs().sum(-1, keepdim=True) / 2
    if activations == "int8":
        error = error + x.double().abs().amax(-1, keepdim=True) / 254 * (theirs.weight.double().abs().sum(-1) + IN)
    exact = torch.nn.functional.linear(x.double(), *[part.double() for part in theirs.parameters()])
    assert bool(((y.double() - exact).abs() <= 1.05 * error + 4 * torch.finfo(dtype).eps * exact.abs()).all())


@MODES
def test_a_weight_without_a_range_gives_the_bias(scheme: str, activations: str, device: str) -> None:
    theirs = linear(device)
    with torch.no_grad():
        theirs.weight[3] = 0.0
    module = Int8Linear.from_linear(theirs, scheme=scheme, activations=activations)
    y = module(activations_like(device))
    assert torch.equal(y[:, 3], theirs.bias[3].expand(5))
    assert bool(y.isfinite().all())


@MODES
@pytest.mark.parametrize("side", [64, 1])
def test_a_square_weight_is_not_transposed(scheme: str, activations: str, side: int, device: str) -> None:
    weight = torch.arange(side * side, device=device).view(side, side).remainder(251) / 16 - 3.0
    module = Int8Linear(side, side, scheme=scheme, activations=activations, device=device)
    # A view whose memory is that of the transpose.
    module.quantize_weights(weight.t().contiguous().t())
    # One activation at a time is quantised without an error.
    y = module(torch.eye(side, device=device))
    want = dequantize(module.weight_int8, module.scale, torch.float64, zero_point=module.zero_point).t()
    assert_close(y, want, rounding_tolerance(torch.float32, 1, magnitude=16.0))


@MODES
def test_gradients_reach_the_input_and_the_bias_and_nothing_else(scheme: str, activations: str, device: str) -> None:
    before = torch.nn.Linear(8, IN, device=device)
    module = Int8Linear.from_linear(linear(device), scheme=scheme, activations=activations)
    codes = module.weight_int8.clone()
    x = before(torch.randn(5, 8, device=device))
    x.retain_grad()
    dy = torch.randn(5, OUT, device=device)
    module(x).backward(dy)
    weight = dequantize(codes, module.scale, torch.float64, zero_point=module.zero_point)
    size = float(dy.abs().amax() * 255 * module.scale.amax())
    assert_close(x.grad, dy.double() @ weight, rounding_tolerance(torch.float32, OUT, magnitude=size))
    assert_close(module.bias.grad, dy.double().sum(0), rounding_tolerance(torch.float32, 5, magnitude=4.0))
    assert all(parameter.grad is not None for parameter in before.parameters())
    assert [name for name, _ in module.named_parameters()] == ["bias"]
    assert not any(buffer.requires_grad for buffer in module.buffers())
    torch.optim.SGD([*before.parameters(), *module.parameters()], lr=0.1).step()
    assert torch.equal(module.weight_int8, codes)


@MODES
def test_without_a_weight_it_cannot_be_used(scheme: str, activations: str, device: str) -> None:
    module = Int8Linear(IN, OUT, scheme=scheme, activations=activations, device=device)
    x = activations_like(device)
    with pytest.raises(RuntimeError, match="this Int8Linear has no weight yet: call quantize_weights, load a state"):
        module(x)
    # Nor does what it saves pass for a weight.
    other = Int8Linear(IN, OUT, scheme=scheme, activations=activations, device=device)
    other.load_state_dict(module.state_dict())
    assert bool(other(x).isnan().all())
    weight = linear(device).weight
    module.quantize_weights(weight)
    want = Int8Linear.from_linear(linear(device, bias=False), scheme=scheme, activations=activations)
    assert torch.equal(module(x), want(x))
    with pytest.raises(ValueError, match=rf"weight must have shape \({OUT}, {IN}\), got \({IN}, {OUT}\)"):
        module.quantize_weights(weight.t())
    with pytest.raises(TypeError, match=r"weight must be a torch\.Tensor, got list"):
        module.quantize_weights([1.0])
    with pytest.raises(TypeError, match=r"weight must have dtype .*, got int8"):
        module.quantize_weights(weight.to(torch.int8))
    bad = weight.detach().clone()
    bad[1, 1] = torch.inf
    with pytest.raises(ValueError, match="weight must be finite"):
        module.quantize_weights(bad)
    # An error leaves it as it was.
    assert torch.equal(module(x), want(x))


def test_bad_arguments() -> None:
    for module in (Int8Linear, QuantizedLinear):
        with pytest.raises(TypeError, match="in_features must be an int, got float"):
            module(8.0, 8)
        with pytest.raises(TypeError, match="out_features must be an int, got bool"):
            module(8, True)
        with pytest.raises(ValueError, match="out_features must be at least 1, got 0"):
            module(8, 0)
        with pytest.raises(ValueError, match="scheme must be one of 'symmetric', 'asymmetric', got 'x'"):
            module(8, 8, scheme="x")
        with pytest.raises(TypeError, match=r"linear must be a torch\.nn\.Linear, got Conv1d"):
            module.from_linear(torch.nn.Conv1d(2, 2, 1))
    with pytest.raises(ValueError, match="activations must be one of '16-bit', 'int8', got 'int4'"):
        Int8Linear(8, 8, activations="int4")
    module = Int8Linear.from_linear(torch.nn.Linear(8, 4))
    with pytest.raises(ValueError, match="x must"):
        module(torch.randn(2, 7))
    with pytest.raises(TypeError, match="x must"):
        module([1.0])


def test_what_it_says_of_itself() -> None:
    sizes = "in_features=8, out_features=4, bias=False"
    assert repr(Int8Linear(8, 4)) == f"Int8Linear({sizes}, scheme='symmetric', activations='16-bit')"
    assert repr(QuantizedLinear(8, 4, False, "asymmetric")) == f"QuantizedLinear({sizes}, scheme='asymmetric')"


@MODES
@pytest.mark.parametrize(
    "convert",
    [
        lambda module: module.half(),
        lambda module: module.bfloat16().float().half(),
        lambda module: module.to(torch.float16),
        lambda module: module.to("cpu", torch.float16),
        lambda module: module.type(torch.float16),
        lambda module: torch.nn.Sequential(module).half()[0],
    ],
    ids=["half", "bfloat16", "to", "to_device", "type", "parent"],
)
def test_conversions_leave_codes_scales_and_zero_points_alone(scheme: str, activations: str, convert: object) -> None:
    module = Int8Linear.from_linear(linear("cpu"), scheme=scheme, activations=activations)
    before, state = buffers_of(module), module.state_dict()
    converted = convert(module)
    assert converted is module
    assert_same(buffers_of(module), before)
    assert module.bias.dtype == torch.float16
    x = activations_like("cpu", torch.float16)
    assert module(x).dtype == torch.float16
    state.pop("bias")
    assert_same({name: value for name, value in module.state_dict().items() if name != "bias"}, state)


@pytest.mark.gpu
@MODES
def test_to_another_device_and_back(scheme: str, activations: str) -> None:
    module = Int8Linear.from_linear(linear("cpu"), scheme=scheme, activations=activations)
    before = buffers_of(module)
    module.cuda().half()
    assert all(tensor.is_cuda for tensor in module.state_dict().values())
    module(activations_like("cuda", torch.float16))
    # A weight comes to the module.
    module.quantize_weights(linear("cpu").weight)
    assert all(buffer.is_cuda for buffer in module.buffers())
    assert_same(buffers_of(module.cpu()), before)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_the_weight_is_held_once(scheme: str, activations: str) -> None:
    theirs = torch.nn.Linear(256, 128, bias=False, dtype=torch.float16)
    module = Int8Linear.from_linear(theirs, scheme=scheme, activations=activations)
    per_row = 4 if scheme == "symmetric" else 8
    assert bytes_of(module.parameters()) + bytes_of(module.buffers()) == 128 * 256 + 128 * per_row
    held = {value.untyped_storage().data_ptr() for value in module.buffers()}
    assert len(held) == (2 if scheme == "symmetric" else 3)
    assert not any(isinstance(value, torch.Tensor) for value in vars(module).values())


@MODES
def test_compiles_and_exports_whole(scheme: str, activations: str, device: str) -> None:
    torch._dynamo.reset()
    module = Int8Linear.from_linear(linear(device), scheme=scheme, activations=activations)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = activations_like(device, rows=rows)
        assert torch.equal(compiled(x), module(x))
    compiled(x).sum().backward()
    assert module.bias.grad is not None
    exported = torch.export.export(module, (x,)).module()
    assert torch.equal(exported(x), module(x))


@MODES
def test_called_with_tensors_of_another(scheme: str, activations: str, device: str) -> None:
    one, other = (Int8Linear.from_linear(linear(device), scheme=scheme, activations=activations) for _ in range(2))
    with torch.no_grad():
        other.bias.add_(1.0)
    other.scale.mul_(2.0)
    x = activations_like(device)
    tensors = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert torch.equal(torch.func.functional_call(one, tensors, (x,)), other(x))
    # As data-parallel training sends them at every step.
    for ours, theirs in zip(one.buffers(), other.buffers(), strict=True):
        ours.copy_(theirs)
    one.load_state_dict({"bias": other.bias}, strict=False)
    assert torch.equal(one(x), other(x))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_reference_module(scheme: str, dtype: torch.dtype, device: str) -> None:
    theirs = linear(device, dtype)
    module, ours = QuantizedLinear.from_linear(theirs, scheme=scheme), Int8Linear.from_linear(theirs, scheme=scheme)
    names = ["weight_int8", "weight_scale", *(["weight_zero_point"] if scheme == "asymmetric" else [])]
    assert [name for name, _ in module.named_buffers()] == names
    for theirs_now, ours_now in zip(module.buffers(), (ours.weight_int8, ours.scale, ours.zero_point), strict=False):
        assert torch.equal(theirs_now, ours_now)
    x = activations_like(device, dtype)
    y = module(x)
    weight = dequantize(module.weight_int8, module.weight_scale, dtype, zero_point=module.weight_zero_point)
    assert torch.equal(y, torch.nn.functional.linear(x, weight, theirs.bias))
    fresh = QuantizedLinear(IN, OUT, True, scheme, device=device, dtype=dtype)
    with pytest.raises(RuntimeError, match="this QuantizedLinear has no weight yet"):
        fresh(x)
    state = module.state_dict()
    assert sorted(state) == sorted([*names, "bias"])
    fresh.load_state_dict({**state, "weight_scale": state["weight_scale"].view(1, OUT)})
    twins = (fresh, copy.deepcopy(module), pickle.loads(pickle.dumps(module)))
    for twin in twins:
        assert torch.equal(twin(x), y)
    before = buffers_of(module)
    assert_same(buffers_of(module.half()), before)
    assert module(x.half()).dtype == torch.float16
