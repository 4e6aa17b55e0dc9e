"""The drop-in modules and the replacement of a model's gated MLPs."""

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tk_kernel_core.numerics import rounding_tolerance
from tk_swiglu import SwiGLU, SwiGLUMLP, replace_swiglu, swiglu_torch
from tk_testkit.close import assert_close

WIDTH, HIDDEN = 24, 40


class GatedMLP(torch.nn.Module):
    """A gated MLP with any activation."""

    def __init__(self, activation: Callable = functional.silu) -> None:
        super().__init__()
        self.gate_proj = torch.nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = torch.nn.Linear(WIDTH, HIDDEN)
        self.down_proj = torch.nn.Linear(HIDDEN, WIDTH)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


class PackedMLP(torch.nn.Module):
    """A gated MLP with one projection, in either order."""

    def __init__(self, gate: int = 0) -> None:
        super().__init__()
        # The replacement must have this order too.
        self.down_proj = torch.nn.Linear(HIDDEN, WIDTH, bias=False)
        self.gate_up_proj = torch.nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.gate = gate

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        halves = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(halves[1 - self.gate] * functional.silu(halves[self.gate]))


@pytest.mark.parametrize("numbers", [{}, {"alpha": 1.702, "beta": 1.0, "limit": 7.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_activation_as_a_module(numbers: dict[str, float], dtype: torch.dtype, device: str) -> None:
    module = SwiGLU(**numbers)
    generator = torch.Generator().manual_seed(0)
    gate, up = (2 * torch.randn(2, 2, 3, 50, generator=generator)).to(device=device, dtype=dtype)
    y = module(gate, up)
    # exp turns the rounding of its argument, here below 12, into as many roundings of its result.
    assert_close(y, swiglu_torch(gate.double(), up.double(), **numbers), rounding_tolerance(dtype, 12**2))
    assert list(module.state_dict()) == []
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(gate, up), y)
    assert repr(SwiGLU(limit=7.0)) == "SwiGLU(alpha=1.0, beta=0.0, limit=7.0)"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("numbers", [{}, {"alpha": 1.702, "beta": 1.0, "limit": 0.5}], ids=str)
def test_the_usual_life_of_an_mlp(packed: bool, numbers: dict[str, float], device: str) -> None:
    linears = [torch.nn.Linear(*sizes, device=device) for sizes in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))]
    x = torch.randn(3, 5, WIDTH, device=device)
    if packed:
        both = torch.nn.Linear(WIDTH, 2 * HIDDEN, device=device)
        module = SwiGLUMLP(gate_up_proj=both, down_proj=linears[2], order="up_first", **numbers)
        up, gate = both(x).chunk(2, -1)
        keys = ["gate_up_proj.weight", "gate_up_proj.bias", "down_proj.weight", "down_proj.bias"]
    else:
        module = SwiGLUMLP(*linears, **numbers)
        gate, up = linears[0](x), linears[1](x)
        keys = [f"{name}_proj.{kind}" for name in ("gate", "up", "down") for kind in ("weight", "bias")]
    y = module(x)
    assert_close(y, linears[2](swiglu_torch(gate, up, **numbers)), rounding_tolerance(torch.float32, 1, magnitude=1.0))
    assert list(module.state_dict()) == keys
    assert ("order='up_first'" in repr(module)) is packed
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        assert torch.equal(twin(x), y)
        assert twin.down_proj.weight is not module.down_proj.weight
    assert module.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_bad_arguments() -> None:
    linear = torch.nn.Linear(2, 2)
    for build in (SwiGLU, lambda **numbers: SwiGLUMLP(linear, linear, linear, **numbers)):
        for name in ("alpha", "beta"):
            with pytest.raises(TypeError, match=f"{name} must be a number, got str"):
                build(**{name: "a"})
            with pytest.raises(ValueError, match=f"{name} must be finite, got inf"):
                build(**{name: float("inf")})
        with pytest.raises(ValueError, match="limit must be None or a positive finite number, got 0"):
            build(limit=0)
    wanted = "gate_proj, up_proj and down_proj, or gate_up_proj and down_proj"
    for given in ((), ("gate_proj", "up_proj"), ("gate_up_proj",), ("gate_up_proj", "up_proj", "down_proj")):
        with pytest.raises(TypeError, match=f"^wanted {wanted}, got {', '.join(given) or 'none'}$"):
            SwiGLUMLP(**dict.fromkeys(given, linear))
    with pytest.raises(TypeError, match=r"up_proj must be a torch\.nn\.Module, got function"):
        SwiGLUMLP(linear, functional.silu, linear)
    with pytest.raises(ValueError, match="order must be one of 'gate_first', 'up_first', got 'gate'"):
        SwiGLUMLP(gate_up_proj=linear, down_proj=linear, order="gate")
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got str"):
        SwiGLUMLP.from_module("mlp")
    with pytest.raises(ValueError, match=rf"must have children {wanted}, Linear has \[\]"):
        SwiGLUMLP.from_module(linear)
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got NoneType"):
        replace_swiglu(None)
    with pytest.raises(ValueError, match="got one of them itself: GatedMLP"):
        replace_swiglu(GatedMLP())


@pytest.mark.parametrize("form", ["separate", "gate_first", "up_first"])
def test_the_equivalent_of_a_module(form: str, device: str) -> None:
    module = (GatedMLP() if form == "separate" else PackedMLP(gate=int(form == "up_first"))).to(device).eval()
    module.down_proj.train()
    ours = SwiGLUMLP.from_module(module)
    assert (ours.alpha, ours.beta, ours.limit) == (1.0, 0.0, None)
    assert ours.order == ("gate_first" if form == "separate" else form)
    assert list(ours.named_children()) == list(module.named_children())
    assert list(ours.state_dict()) == list(module.state_dict())
    assert not ours.training
    assert ours.down_proj.training
    x = torch.randn(2, 7, WIDTH, device=device)
    assert_close(ours(x), module(x), rounding_tolerance(torch.float32, 1, magnitude=1.0))
    assert SwiGLUMLP.from_module(ours) is ours


SPELLINGS = (torch.nn.SiLU(), lambda gate: functional.silu(gate, inplace=True), lambda gate: gate * gate.sigmoid())


@pytest.mark.parametrize("activation", SPELLINGS)
def test_other_spellings_of_silu(activation: Callable) -> None:
    assert replace_swiglu(torch.nn.Sequential(GatedMLP(activation))) == ["0"]


OTHER_ACTIVATIONS = {
    "gelu": functional.gelu,
    "tanh_gelu": lambda gate: functional.gelu(gate, approximate="tanh"),
    "quick_gelu": lambda gate: gate * torch.sigmoid(1.702 * gate),
    "relu": torch.relu,
    "hardswish": functional.hardswish,
    "clamped": lambda gate: functional.silu(gate.clamp(max=7.0)),
    "clamped_far_out": lambda gate: functional.silu(gate.clamp(max=1e6)),
    "clamped_below": lambda gate: functional.silu(gate.clamp(min=-20.0)),
    "scaled": lambda gate: functional.silu(gate) * (1 + 1e-5),
    "in_bfloat16": lambda gate: functional.silu(gate.bfloat16()).float(),
    "in_another_dtype": lambda gate: functional.silu(gate.double()),
    "of_another_shape": lambda gate: functional.silu(gate)[..., :1],
    "no_tensor": lambda gate: None,
    "on_another_device": lambda gate: torch.empty_like(gate, device="meta"),
}


@pytest.mark.parametrize("name", OTHER_ACTIVATIONS)
def test_another_activation_stays_without_a_warning(name: str) -> None:
    mlp = GatedMLP(OTHER_ACTIVATIONS[name])
    with pytest.raises(ValueError, match=r"module must compute a SwiGLU.* GatedMLP (gives other values|raised)"):
        SwiGLUMLP.from_module(mlp)
    # Warnings are errors here.
    model = torch.nn.Sequential(mlp, GatedMLP())
    assert replace_swiglu(model) == ["1"]
    assert model[0] is mlp


def variant(name: str, forward: Callable, base: type = GatedMLP, **children: object) -> torch.nn.Module:
    """A module of a class with this name and forward, and with further children, parameters or attributes."""
    module = type(name, (base,), {"forward": forward})()
    for child, value in children.items():
        setattr(module, child, value)
    return module


def gated(mlp: GatedMLP, x: torch.Tensor) -> torch.Tensor:
    return functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x)


def plain(mlp: GatedMLP, x: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(gated(mlp, x))


def packed(mlp: PackedMLP, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(functional.silu(gate) * up)


NO_SWIGLU = {
    "Shifted": (lambda self, x: plain(self, x + 1), "hand its input unchanged to gate_proj and up_proj"),
    "Twice": (lambda self, x: plain(self, x) + 0 * self.gate_proj(x).sum(), "hand its input unchanged to gate_proj"),
    "Residual": (lambda self, x: x + plain(self, x), "return what down_proj returns"),
    "Pair": (lambda self, x: (plain(self, x), None), "return what down_proj returns"),
    "Wider": (lambda self, x: plain(self, x).double(), "return what down_proj returns"),
    "Scaled": (lambda self, x: 2 * plain(self, x), "return what down_proj returns"),
    "Casting": (lambda self, x: plain(self, x.to(self.gate_proj.weight.dtype)), "compute .* raised AttributeError"),
    "TwoInputs": (lambda self, x, weight: weight * plain(self, x), "compute .* raised TypeError"),
    "Unpacking": (lambda self, x: packed(self, *self.gate_up_proj(x)), "compute .* raised TypeError"),
    "Interleaved": (lambda self, x: packed(self, *self.gate_up_proj(x).unflatten(-1, (-1, 2)).unbind(-1)), "compute"),
}


@pytest.mark.parametrize("name", NO_SWIGLU)
def test_what_is_no_swiglu_stays_without_a_warning(name: str) -> None:
    forward, message = NO_SWIGLU[name]
    base = PackedMLP if name in ("Unpacking", "Interleaved") else GatedMLP
    mlp = variant(name, forward, base)
    with pytest.raises(ValueError, match=f"^module must {message}"):
        SwiGLUMLP.from_module(mlp)
    assert replace_swiglu(torch.nn.Sequential(mlp)) == []


def test_containers_with_the_names_of_projections_stay() -> None:
    names = ("gate_proj", "up_proj", "down_proj")
    stacked = torch.nn.ParameterDict({name: torch.randn(4, 2, 2) for name in names})
    experts = torch.nn.ModuleDict({name: torch.nn.ModuleList([torch.nn.Linear(2, 2)]) for name in names})
    assert replace_swiglu(torch.nn.Sequential(stacked, experts)) == []


def dropping(rate: float) -> torch.nn.Module:
    after = torch.nn.Sequential(torch.nn.Dropout(rate))
    return variant("Dropping", lambda self, x: self.down_proj(self.after(gated(self, x))), after=after)


def hooked(mlp: torch.nn.Module, part: str) -> torch.nn.Module:
    mlp.get_submodule(part).register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    return mlp


def patched(mlp: torch.nn.Module) -> torch.nn.Module:
    mlp.forward = lambda x: pytest.fail("the module's own forward ran")
    return mlp


def dropping_by_function(mlp: GatedMLP, x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(plain(mlp, x), 0.1, training=mlp.training)


LOSSES = {
    "compute .* when training gives other values": lambda: dropping(0.1),
    "return what down_proj returns, Drops when training does": lambda: variant("Drops", dropping_by_function),
    r"take one tensor, Two takes \['x', 'y'\]": lambda: variant("Two", lambda self, x, y=None: plain(self, x)),
    r"have no parameters .*, A has \['weight', 'bias'\]": lambda: variant("A", plain, spare=torch.nn.Linear(2, 2)),
    "have no .* buffers of its own, .* A has": lambda: variant("A", plain, count=torch.nn.Buffer(torch.ones(1))),
    "have no hooks, .* GatedMLP has some": lambda: hooked(GatedMLP(), ""),
    "have no hooks, .* SiLU has some": lambda: hooked(GatedMLP(torch.nn.SiLU()), "activation"),
    "have no forward .* of its own, .* GatedMLP has": lambda: patched(GatedMLP()),
}


@pytest.mark.parametrize("message", LOSSES)
@pytest.mark.parametrize("training", [True, False])
def test_a_swiglu_with_something_to_lose_stays_with_a_warning(message: str, training: bool) -> None:
    mlp = LOSSES[message]().train(training)
    with pytest.raises(ValueError, match=f"^module must {message}"):
        SwiGLUMLP.from_module(mlp)
    model = torch.nn.Sequential(GatedMLP(), mlp)
    with pytest.warns(UserWarning, match=f"^1 was not replaced: module must {message}"):
        assert replace_swiglu(model) == ["0"]
    assert model[1] is mlp


def test_hooks_of_the_projections_are_kept() -> None:
    model, seen = torch.nn.Sequential(GatedMLP()), []
    for name, child in model[0].named_children():
        child.register_forward_hook(lambda *_, name=name: seen.append(name))
    assert replace_swiglu(model) == ["0"]
    # Looking at the module has run none of them.
    assert seen == []
    model(torch.randn(2, WIDTH))
    assert seen == ["gate_proj", "up_proj", "down_proj"]


def test_projections_are_never_run_and_nothing_is_touched() -> None:
    mlp = dropping(0.0)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(mlp, name).forward = lambda x: pytest.fail("a projection ran")
    mlp.to("meta")
    before = [(id(module), dict(vars(module))) for module in mlp.modules()]
    state = torch.get_rng_state()
    ours = SwiGLUMLP.from_module(mlp)
    assert [(id(module), vars(module)) for module in mlp.modules()] == before
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.is_meta for parameter in ours.parameters())


def test_shared_modules_and_weights_stay_shared() -> None:
    shared, tied = GatedMLP(), GatedMLP()
    tied.up_proj.weight = shared.gate_proj.weight
    model = torch.nn.ModuleDict({"a": shared, "b": torch.nn.ModuleList([shared, tied, PackedMLP()])})
    keys, parameters = list(model.state_dict()), list(model.parameters())
    assert replace_swiglu(model) == ["a", "b.0", "b.1", "b.2"]
    assert model["a"] is model["b"][0]
    assert model["b"][1].up_proj.weight is model["a"].gate_proj.weight
    assert list(model.state_dict()) == keys
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    assert replace_swiglu(model) == []


def test_nothing_is_replaced_when_something_unexpected_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(GatedMLP(), GatedMLP())
    mlps = list(model)
    monkeypatch.setattr(SwiGLUMLP, "from_module", {mlps[0]: SwiGLUMLP.from_module(mlps[0])}.__getitem__)
    with pytest.raises(KeyError):
        replace_swiglu(model)
    assert list(model) == mlps


def test_optimisers_made_before_go_on(device: str) -> None:
    torch.manual_seed(0)
    sides = [torch.nn.Sequential(GatedMLP(), PackedMLP()).to(device)]
    sides.append(copy.deepcopy(sides[0]))
    optimisers = [torch.optim.SGD(side.parameters(), lr=0.1, momentum=0.9) for side in sides]
    assert replace_swiglu(sides[0]) == ["0", "1"]
    for step in range(3):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(device)
        for side, optimiser in zip(sides, optimisers, strict=True):
            optimiser.zero_grad()
            side(x).square().mean().backward()
            optimiser.step()
        if step == 1:
            # The state of one is that of the other: it goes by the order of the parameters.
            optimisers[0].load_state_dict(optimisers[1].state_dict())
    for ours, theirs in zip(sides[0].parameters(), sides[1].parameters(), strict=True):
        # Three steps, each with the errors of the gradients of two layers.
        assert_close(ours, theirs, rounding_tolerance(torch.float32, HIDDEN, magnitude=6.0))


def test_checkpointing_and_hooks_added_afterwards(device: str) -> None:
    model = torch.nn.Sequential(GatedMLP(), PackedMLP()).to(device)
    replace_swiglu(model)
    x = torch.randn(4, WIDTH, device=device)
    gradients = []
    for checkpointed in (False, True):
        model.zero_grad()
        y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False) if checkpointed else model(x)
        y.sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(once, again) for once, again in zip(*gradients, strict=True))
    model[1].register_forward_hook(lambda module, inputs, output: 2 * output)
    assert torch.equal(model(x), 2 * y)


def test_compiles_whole(device: str) -> None:
    torch._dynamo.reset()
    model = torch.nn.Sequential(GatedMLP(), PackedMLP()).to(device)
    replace_swiglu(model)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 5):
        x = torch.randn(rows, WIDTH, device=device)
        assert torch.equal(compiled(x), model(x))
    compiled(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    activation, gate = SwiGLU(alpha=1.702, beta=1.0, limit=7.0), torch.randn(3, 8, device=device)
    assert torch.equal(torch.compile(activation, fullgraph=True, backend="eager")(gate, gate), activation(gate, gate))


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 48}
# The configuration, and which MLPs are replaced.
KINDS = {
    "llama": ("LlamaConfig", {}, ["0.mlp", "1.mlp"]),
    "qwen3": ("Qwen3Config", {}, ["0.mlp", "1.mlp"]),
    "mistral": ("MistralConfig", {}, ["0.mlp", "1.mlp"]),
    "phi3": ("Phi3Config", {}, ["0.mlp", "1.mlp"]),
    "gemma3": ("Gemma3TextConfig", {}, []),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}, []),
    "qwen3_moe": ("Qwen3MoeConfig", {**EXPERTS, "mlp_only_layers": [0]}, ["0.mlp"]),
    "qwen2_moe": ("Qwen2MoeConfig", SHARED, ["0.mlp.shared_expert", "1.mlp.shared_expert"]),
}


def tiny_model(kind: str) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is an optional test dependency")
    tokens = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    # Weights large enough for the MLPs to matter.
    sizes = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.1, "max_position_embeddings": 64}
    name, further, _ = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**tokens, **heads, **sizes, **further, attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformers_models(kind: str, dtype: torch.dtype, device: str) -> None:
    model = tiny_model(kind).to(device=device, dtype=dtype)
    theirs = copy.deepcopy(model)
    keys, parameters = list(model.state_dict()), list(model.parameters())
    replaced = replace_swiglu(model)
    assert replaced == [f"model.layers.{name}" for name in KINDS[kind][2]]
    assert list(model.state_dict()) == keys
    assert list(map(id, model.parameters())) == list(map(id, parameters))
    model.load_state_dict(theirs.state_dict())
    tokens = torch.randint(0, 100, (2, 12), device=device)
    results = []
    for side in (model, theirs):
        logits = side(input_ids=tokens).logits
        logits.float().square().mean().backward()
        results.append((logits.detach(), {name: parameter.grad for name, parameter in side.named_parameters()}))
    (got, got_grads), (want, want_grads) = results
    # Theirs rounds twice where ours rounds once, in the forward and in the backward pass of every MLP.
    allowed = 2 * len(replaced) * rounding_tolerance(dtype, 1, roundings=2).relative
    assert float((got - want).norm() / want.norm()) <= allowed
    for name, want_grad in want_grads.items():
        if want_grad is None:
            assert got_grads[name] is None, name
        else:
            assert float((got_grads[name] - want_grad).norm()) <= allowed * float(want_grad.norm()), name
