"""What the drop-in modules save and load: state dicts, files, copies, and modules without memory."""

import copy
import io
import itertools
import pickle
from pathlib import Path

import pytest
import torch

from tk_int8_gemm import Int8Linear, quantize_weight_per_channel

IN, OUT = 72, 40
SCHEMES, ACTIVATIONS = ("symmetric", "asymmetric"), ("16-bit", "int8")
MODES = pytest.mark.parametrize(("scheme", "activations"), list(itertools.product(SCHEMES, ACTIVATIONS)))


def linear(device: str) -> torch.nn.Linear:
    """A layer with a weight that is not symmetric, and so has zero points."""
    layer = torch.nn.Linear(IN, OUT, device=device)
    if device != "meta":
        with torch.no_grad():
            layer.weight.copy_(torch.randn(OUT, IN, generator=torch.Generator().manual_seed(0)) + 1.0)
            layer.bias.copy_(torch.linspace(-1.0, 1.0, OUT))
    return layer


def activations_like(device: str) -> torch.Tensor:
    return torch.randn(5, IN, generator=torch.Generator().manual_seed(1)).to(device)


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        assert (got[name].dtype, got[name].device) == (value.dtype, value.device), name
        assert torch.equal(got[name], value), name


@MODES
def test_the_state_dict_is_the_same_whatever_the_activations(scheme: str, activations: str, device: str) -> None:
    theirs = linear(device)
    module = Int8Linear.from_linear(theirs, scheme=scheme, activations=activations)
    state = module.state_dict()
    codes = quantize_weight_per_channel(theirs.weight)[0] if scheme == "symmetric" else module.weight_int8
    assert list(state) == ["weight_int8", "bias", "scale", *(["zero_point"] if scheme == "asymmetric" else [])]
    assert torch.equal(state["weight_int8"], codes)
    assert state["weight_int8"].dtype == torch.int8
    for other_activations in ACTIVATIONS:
        other = Int8Linear(IN, OUT, True, scheme=scheme, activations=other_activations, device=device)
        held = dict(other.named_buffers())
        assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
        # Written into the memory that it has, which captured graphs read.
        assert all(buffer is held[name] for name, buffer in other.named_buffers())
        assert_same(other.state_dict(), state)
        want = Int8Linear.from_linear(theirs, scheme=scheme, activations=other_activations)
        assert torch.equal(other(activations_like(device)), want(activations_like(device)))


@MODES
def test_files(scheme: str, activations: str, device: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is an optional test dependency")
    model = torch.nn.Sequential(Int8Linear.from_linear(linear(device), scheme=scheme, activations=activations))
    x = activations_like(device)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    safetensors.save_model(model, tmp_path / "model.safetensors")
    for name in ("model.pt", "model.safetensors"):
        twin = torch.nn.Sequential(Int8Linear(IN, OUT, True, scheme=scheme, activations=activations, device=device))
        if name == "model.pt":
            twin.load_state_dict(torch.load(tmp_path / name, weights_only=True))
        else:
            assert safetensors.load_model(twin, tmp_path / name) == (set(), [])
        assert_same(twin.state_dict(), model.state_dict())
        assert torch.equal(twin(x), model(x))


@MODES
def test_copies(scheme: str, activations: str, device: str) -> None:
    module = Int8Linear.from_linear(linear(device), scheme=scheme, activations=activations)
    x = activations_like(device)
    y = module(x)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)]
    before = buffers_of(module)
    for twin in copies:
        assert_same(buffers_of(twin), before)
        assert torch.equal(twin(x), y)
        assert (twin.scheme, twin.activations) == (scheme, activations)
        twin.scale.zero_()
        assert torch.equal(twin(x), module.bias.expand(5, OUT))
    assert_same(buffers_of(module), before)


@MODES
def test_modules_without_memory_can_be_filled(scheme: str, activations: str, device: str) -> None:
    whole = Int8Linear.from_linear(linear(device), scheme=scheme, activations=activations)
    # Not the object that state_dict returned, in which torch keeps that it was once assigned.
    state, x = dict(whole.state_dict()), activations_like(device)
    y = whole(x)

    def bare() -> Int8Linear:
        module = Int8Linear(IN, OUT, True, scheme=scheme, activations=activations, device="meta")
        assert all(tensor.is_meta for tensor in module.state_dict().values())
        assert {name: tensor.shape for name, tensor in module.state_dict().items()} == {
            name: tensor.shape for name, tensor in state.items()
        }
        return module

    assigned = bare()
    assigned.load_state_dict(state, assign=True)
    assert assigned.scale.data_ptr() == state["scale"].data_ptr()
    emptied = bare().to_empty(device=device)
    with pytest.raises(RuntimeError, match="has no weight yet"):
        emptied(x)
    emptied.load_state_dict(state)
    # As another process fills them.
    sent = bare().to_empty(device=device)
    for ours, theirs in zip(
        (*sent.parameters(), *sent.buffers()), (*whole.parameters(), *whole.buffers()), strict=True
    ):
        ours.data.copy_(theirs)
    sent.quantized = True
    for module in (assigned, emptied, sent):
        assert_same(buffers_of(module), buffers_of(whole))
        assert torch.equal(module(x), y)
    quantised = bare()
    quantised.quantize_weights(linear(device).weight)
    assert_same(buffers_of(quantised), buffers_of(whole))
    of_meta = Int8Linear.from_linear(linear("meta"), scheme=scheme, activations=activations)
    assert not of_meta.quantized
    of_meta.load_state_dict(state, assign=True)
    assert torch.equal(of_meta(x), y)
    # Loading into nothing does nothing, of which torch warns.
    still_bare = bare()
    with pytest.warns(UserWarning, match="copying from a non-meta parameter"):
        still_bare.load_state_dict(state)
    assert not still_bare.quantized


SCALE_SHAPES = {(): 1, (1,): 1, (OUT,): OUT, (OUT, 1): OUT, (1, OUT): OUT}


@MODES
@pytest.mark.parametrize("shape", SCALE_SHAPES, ids=str)
@pytest.mark.parametrize("assign", [False, True])
def test_scales_of_other_shapes_and_dtypes_load(
    scheme: str, activations: str, shape: tuple[int, ...], assign: bool, device: str
) -> None:
    module = Int8Linear.from_linear(linear(device), scheme=scheme, activations=activations)
    state, count = module.state_dict(), SCALE_SHAPES[shape]
    state["scale"] = state["scale"][:count].bfloat16().view(shape)
    if scheme == "asymmetric":
        state["zero_point"] = state["zero_point"][:count].to(torch.int8).view(shape)
    other = Int8Linear(IN, OUT, True, scheme=scheme, activations=activations, device=device)
    other.load_state_dict(state, assign=assign)
    for name in ("scale", *(["zero_point"] if scheme == "asymmetric" else [])):
        want = state[name].float().flatten().expand(OUT)
        assert torch.equal(getattr(other, name), want)
        assert (getattr(other, name).dtype, getattr(other, name).is_contiguous()) == (torch.float32, True)
    assert bool(other(activations_like(device)).isfinite().all())


@MODES
@pytest.mark.parametrize("assign", [False, True])
def test_codes_load_whatever_their_strides(scheme: str, activations: str, assign: bool, device: str) -> None:
    module = Int8Linear.from_linear(linear(device), scheme=scheme, activations=activations)
    state = module.state_dict()
    state["weight_int8"] = state["weight_int8"].t().contiguous().t()
    other = Int8Linear(IN, OUT, True, scheme=scheme, activations=activations, device=device)
    other.load_state_dict(state, assign=assign)
    assert_same(buffers_of(other), buffers_of(module))
    assert all(buffer.is_contiguous() for buffer in other.buffers())


WRONG = {
    "0.weight_int8 must have shape (40, 72), got (72, 40)": ("weight_int8", lambda codes: codes.t()),
    "0.weight_int8 must have shape (40, 72), got (39, 72)": ("weight_int8", lambda codes: codes[1:]),
    "0.weight_int8 must have dtype int8, got float32": ("weight_int8", lambda codes: codes.float()),
    "0.weight_int8 must be a torch.Tensor, got list": ("weight_int8", lambda codes: codes.tolist()),
    "0.scale must have shape (40,), ": ("scale", lambda scale: scale.new_ones(72)),
    "0.scale must have dtype float16, ": ("scale", lambda scale: scale.int()),
    "0.zero_point must have shape (40,), ": ("zero_point", lambda zero_point: zero_point[:39]),
    "0.zero_point must have dtype int8, int32, ": ("zero_point", lambda zero_point: zero_point.bool()),
    "size mismatch for 0.bias": ("bias", lambda bias: bias[:39]),
    'Missing key(s) in state_dict: "0.weight_int8"': ("weight_int8", None),
    'Missing key(s) in state_dict: "0.scale"': ("scale", None),
    'Missing key(s) in state_dict: "0.zero_point"': ("zero_point", None),
    'Unexpected key(s) in state_dict: "0.codes"': ("codes", lambda codes: torch.ones(1)),
    'Unexpected key(s) in state_dict: "0.weight"': ("weight", lambda weight: torch.ones(OUT, IN)),
}


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_not_loaded(activations: str, message: str) -> None:
    model = torch.nn.Sequential(Int8Linear.from_linear(linear("cpu"), scheme="asymmetric", activations=activations))
    before = buffers_of(model)
    state, (name, change) = model.state_dict(), WRONG[message]
    value = state.pop(f"0.{name}", None)
    if change is not None:
        state[f"0.{name}"] = change(value)
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    assert message in str(caught.value)
    assert_same(buffers_of(model), before)
    if message.startswith(("Missing", "Unexpected")):
        keys = model.load_state_dict(state, strict=False)
        assert [*keys.missing_keys, *keys.unexpected_keys] == [f"0.{name}"]


def test_another_scheme_is_not_loaded() -> None:
    symmetric, asymmetric = (Int8Linear.from_linear(linear("cpu"), scheme=scheme) for scheme in SCHEMES)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "zero_point"'):
        asymmetric.load_state_dict(symmetric.state_dict())
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "zero_point"'):
        symmetric.load_state_dict(asymmetric.state_dict())
