"""The drop-in module and the replacement of a model's norms."""

import copy
import io

import pytest
import torch

from tk_kernel_core.numerics import rounding_tolerance
from tk_rmsnorm import TritonRMSNorm, replace_rmsnorm
from tk_testkit.close import assert_close


@pytest.mark.parametrize("eps", [None, 1e-6, 1e-3])
@pytest.mark.parametrize("shape", [64, (64,), [4, 16], torch.Size([2, 32])], ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_takes_what_torch_takes(shape: object, eps: float | None, affine: bool, device: str) -> None:
    for dtype in (torch.float16, torch.float32):
        theirs = torch.nn.RMSNorm(shape, eps, affine, device=device, dtype=dtype)
        ours = TritonRMSNorm(shape, eps, affine, device=device, dtype=dtype)
        assert ours.normalized_shape == tuple(theirs.normalized_shape)
        if affine:
            torch.nn.init.normal_(theirs.weight)
            ours.load_state_dict(theirs.state_dict())
        x = 1e-2 * torch.randn(3, *theirs.normalized_shape, device=device).to(dtype)
        assert_close(ours(x), theirs(x), rounding_tolerance(dtype, 64))


def test_the_hidden_size_by_name() -> None:
    assert TritonRMSNorm(hidden_size=8, eps=1e-5).normalized_shape == (8,)


def test_the_usual_life_of_a_module(device: str) -> None:
    module = TritonRMSNorm(32, weight_offset=1.0, casting="llama", device=device)
    torch.nn.init.normal_(module.weight)
    x = torch.randn(4, 32, device=device)
    y = module(x)
    assert torch.equal(copy.deepcopy(module)(x), y)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), y)
    assert list(module.state_dict()) == ["weight"]
    assert module.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
    assert "weight_offset=1.0" in repr(module)
    assert "casting='llama'" in repr(module)
    assert TritonRMSNorm(32, device="meta").weight.is_meta


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_fresh_module_scales_by_one(offset: float, device: str) -> None:
    x = torch.randn(4, 32, device=device)
    fresh = TritonRMSNorm(32, weight_offset=offset, device=device)(x)
    assert torch.equal(fresh, TritonRMSNorm(32, elementwise_affine=False)(x))


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="normalized_shape must hold at least one size"):
        TritonRMSNorm(())
    for arguments in ({}, {"normalized_shape": 8, "hidden_size": 8}):
        with pytest.raises(TypeError, match="exactly one of normalized_shape and hidden_size must be given"):
            TritonRMSNorm(**arguments)
    with pytest.raises(ValueError, match="casting must be one of 'fp32', 'llama', got 'x'"):
        TritonRMSNorm(8, casting="x")
    for shape in ("8", True, [8, 2.0]):
        with pytest.raises(TypeError, match="normalized_shape must be an int or a sequence of ints"):
            TritonRMSNorm(shape)
    with pytest.raises(ValueError, match="none below 0"):
        TritonRMSNorm(-1)
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor, got list"):
        TritonRMSNorm(8)([1.0])
    with pytest.raises(TypeError, match="eps must be a number, got str"):
        TritonRMSNorm(8, eps="a")
    with pytest.raises(ValueError, match=r"x must end in dimensions \(32,\), got shape \(4, 31\)"):
        TritonRMSNorm(32)(torch.randn(4, 31))
    with pytest.raises(ValueError, match=r"x must end in dimensions \(4, 8\), got shape \(8,\)"):
        TritonRMSNorm((4, 8))(torch.randn(8))
    with pytest.raises(TypeError, match=r"module must be a torch.nn.Module, got str"):
        TritonRMSNorm.from_module("norm")
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got NoneType"):
        replace_rmsnorm(None)
    with pytest.raises(ValueError, match="model must contain the modules to replace, got one of them itself: RMSNorm"):
        replace_rmsnorm(torch.nn.RMSNorm(8))


class PlainRMSNorm(torch.nn.Module):
    """A norm of one of the conventions."""

    def __init__(self, offset: float, llama: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(48))
        self.eps, self.offset, self.llama = 1e-5, offset, llama

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        value = hidden_states.float()
        value = value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.llama:
            return (self.weight + self.offset) * value.to(hidden_states.dtype)
        return (value * (self.weight.float() + self.offset)).to(hidden_states.dtype)


@pytest.mark.parametrize(("offset", "llama"), [(0.0, False), (0.0, True), (1.0, False)])
def test_conventions_are_found_by_trying(offset: float, llama: bool) -> None:
    module = PlainRMSNorm(offset, llama).eval()
    ours = TritonRMSNorm.from_module(module)
    assert (ours.weight_offset, ours.casting) == (offset, "llama" if llama else "fp32")
    assert ours.weight is module.weight
    assert ours.eps == 1e-5
    assert not ours.training


class BiasedRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__(0.0, False)
        self.bias = torch.nn.Parameter(torch.ones(48))


class ClampedRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__(0.0, False)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states).clamp(-1, 1)


class GatedRMSNorm(PlainRMSNorm):
    def __init__(self) -> None:
        super().__init__(0.0, False)

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(hidden_states)


class NoEpsRMSNorm(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (BiasedRMSNorm(), r"no parameter but weight, BiasedRMSNorm has \['bias'"),
        (ClampedRMSNorm(), "must compute an RMSNorm, ClampedRMSNorm gives other values"),
        (GatedRMSNorm(), "must take one tensor, forward of GatedRMSNorm takes"),
        (NoEpsRMSNorm(), "must have an attribute eps or variance_epsilon"),
        (torch.nn.LayerNorm(48), "no parameter but weight"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_modules_are_refused_and_left_in_place(module: torch.nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TritonRMSNorm.from_module(module)
    if "RMSNorm" in type(module).__name__:
        model = torch.nn.Sequential(module, torch.nn.RMSNorm(48))
        with pytest.warns(UserWarning, match="0 was not replaced: module must"):
            assert replace_rmsnorm(model) == ["1"]
        assert model[0] is module


def test_a_default_device_does_not_matter() -> None:
    model = torch.nn.Sequential(torch.nn.RMSNorm(8), PlainRMSNorm(0.0, True))
    with torch.device("meta"):
        assert replace_rmsnorm(model) == ["0", "1"]
    assert model[1].casting == "llama"


def test_the_default_eps_is_known_to_the_compiler() -> None:
    torch._dynamo.reset()
    module = TritonRMSNorm(8, eps=None)
    x = torch.randn(2, 8)
    assert torch.equal(torch.compile(module, fullgraph=True, backend="eager")(x), module(x))


class BufferRMSNorm(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6
        self.register_buffer("weight", torch.ones(48))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (48,), self.weight, self.eps)


def test_what_would_be_lost_is_refused() -> None:
    with pytest.raises(ValueError, match="no forward and no buffers of its own"):
        TritonRMSNorm.from_module(BufferRMSNorm())
    patched = torch.nn.RMSNorm(48)
    patched.forward = lambda x: x
    with pytest.raises(ValueError, match="no forward and no buffers of its own"):
        TritonRMSNorm.from_module(patched)
    plain = BufferRMSNorm()
    del plain.weight
    plain.weight = torch.ones(48)
    with pytest.raises(ValueError, match="weight of module must be a parameter"):
        TritonRMSNorm.from_module(plain)
    model = torch.nn.Sequential(torch.nn.RMSNorm(48), plain)
    with pytest.warns(UserWarning, match="1 was not replaced"):
        assert replace_rmsnorm(model) == ["0"]


def test_hooks_are_not_lost() -> None:
    module = torch.nn.RMSNorm(8)
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="must have no hooks"):
        TritonRMSNorm.from_module(module)


def test_shared_modules_and_weights_stay_shared() -> None:
    norm = torch.nn.RMSNorm(8)
    model = torch.nn.ModuleDict({"a": norm, "b": torch.nn.ModuleList([norm, torch.nn.RMSNorm(8)])})
    keys, parameters = list(model.state_dict()), list(model.parameters())
    assert replace_rmsnorm(model) == ["a", "b.0", "b.1"]
    assert model["a"] is model["b"][0]
    assert model["a"] is not model["b"][1]
    assert list(model.state_dict()) == keys
    assert all(ours is theirs for ours, theirs in zip(model.parameters(), parameters, strict=True))
    assert replace_rmsnorm(model) == []


def tiny_config(kind: str) -> object:
    transformers = pytest.importorskip("transformers", reason="transformers is an optional test dependency")
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    name = {"llama": "LlamaConfig", "qwen3": "Qwen3Config", "gemma3": "Gemma3TextConfig"}[kind]
    return getattr(transformers, name)(**sizes, attn_implementation="eager")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    ("kind", "norms", "offset", "casting"),
    [("llama", 5, 0.0, "llama"), ("qwen3", 9, 0.0, "llama"), ("gemma3", 13, 1.0, "fp32")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformers_models(
    kind: str, norms: int, offset: float, casting: str, dtype: torch.dtype, device: str
) -> None:
    config = tiny_config(kind)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(device=device, dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    theirs = copy.deepcopy(model)
    replaced = replace_rmsnorm(model)
    assert len(replaced) == norms
    ours = model.get_submodule(replaced[0])
    assert (ours.weight_offset, ours.casting) == (offset, casting)

    tokens = torch.randint(0, 100, (2, 12), device=device)
    results = []
    for side in (model, theirs):
        logits = side(input_ids=tokens).logits
        logits.float().square().mean().backward()
        results.append((logits.detach(), {name: parameter.grad for name, parameter in side.named_parameters()}))
    (got, got_grads), (want, want_grads) = results
    # Every layer may round differently once in the forward and once in the backward pass.
    allowed = 4 * norms * torch.finfo(dtype).eps
    assert float((got - want).norm() / want.norm()) < allowed
    for name, want_grad in want_grads.items():
        if want_grad is None:
            assert got_grads[name] is None, name
            continue
        difference = (got_grads[name] - want_grad).float().norm()
        assert float(difference) <= allowed * float(want_grad.float().norm()) + 1e-7, name
