"""Replacing the linear layers of a model, and which of them stay."""

import copy

import pytest
import torch

from tk_int8_gemm import Int8Linear, QuantizedLinear, replace_linear


def hooked(layer: torch.nn.Linear) -> torch.nn.Linear:
    layer.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    return layer


class OtherLinear(torch.nn.Linear):
    """A layer that computes something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def parametrized(layer: torch.nn.Linear) -> torch.nn.Linear:
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Identity())
    return layer


def without_inputs() -> torch.nn.Linear:
    with pytest.warns(UserWarning, match="zero-element"):
        return torch.nn.Linear(0, 4)


def with_nan(layer: torch.nn.Linear) -> torch.nn.Linear:
    torch.nn.init.constant_(layer.weight, torch.nan)
    return layer


def with_sparse_weight(layer: torch.nn.Linear) -> torch.nn.Linear:
    layer.weight = torch.nn.Parameter(layer.weight.detach().to_sparse())
    return layer


class LowRankLinear(torch.nn.Linear):
    """A layer with a weight of another name."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features)
        self.down = torch.nn.Parameter(torch.randn(1, in_features))


class PlainLinear(torch.nn.Linear):
    """A layer that only has another name."""


REFUSED = {
    "linear must have the forward of torch.nn.Linear, OtherLinear has": lambda: OtherLinear(4, 4),
    "linear must be called, not read by the module around it": lambda: torch.nn.MultiheadAttention(4, 2).out_proj,
    "module must have no hooks, which would be lost; Linear has": lambda: hooked(torch.nn.Linear(4, 4)),
    "module must not override _save_to_state_dict, .* LazyLinear does": lambda: torch.nn.LazyLinear(4),
    "linear must have no parameters but weight and bias, LowRankLinear has": lambda: LowRankLinear(4, 4),
    "linear must have no .*, ParametrizedLinear has": lambda: parametrized(torch.nn.Linear(4, 4)),
    "linear.weight must have dtype": lambda: torch.nn.Linear(4, 4).to(torch.float8_e4m3fn),
    "linear.weight must be a dense .strided. tensor, got layout torch.sparse_coo": lambda: with_sparse_weight(
        torch.nn.Linear(4, 4)
    ),
    "weight must be finite": lambda: with_nan(torch.nn.Linear(4, 4)),
    "in_features must be at least 1, got 0": lambda: without_inputs(),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_would_be_lost_is_refused(message: str) -> None:
    for module in (Int8Linear, QuantizedLinear):
        with pytest.raises(ValueError, match=f"^{message}"):
            module.from_linear(REFUSED[message]())
    model = torch.nn.ModuleList([REFUSED[message](), torch.nn.Linear(4, 4)])
    stays = model[0]
    with pytest.warns(UserWarning, match=f"^0 was not replaced: {message}"):
        assert replace_linear(model) == ["1"]
    assert model[0] is stays


def test_a_layer_with_a_bias_that_no_activation_has_stays() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4).half(), torch.nn.Linear(4, 4).half()])
    model[0].bias = torch.nn.Parameter(model[0].bias.double())
    message = "^0 was not replaced: linear.bias must have dtype float16, bfloat16 or float32, got float64$"
    with pytest.warns(UserWarning, match=message):
        assert replace_linear(model) == ["1"]


def test_names_to_skip_may_come_from_an_iterator() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in ("a", "b", "c")})
    assert replace_linear(model, skip=(name for name in ("a", "c"))) == ["b"]


class Tied(torch.nn.Module):
    """An embedding, two layers with one weight, one with the weight of the embedding, and two by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.one, self.other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.other.weight = self.one.weight
        self.first = PlainLinear(4, 4)
        self.second = self.first
        self.third = torch.nn.Linear(4, 4)
        self.third.bias = self.first.bias


def test_layers_with_a_weight_of_others_stay() -> None:
    model = Tied()
    before = dict(model.named_modules())
    with pytest.warns(UserWarning, match="was not replaced: its weight is tied to that of another module") as caught:
        assert replace_linear(model) == ["first", "second", "third"]
    assert [str(warning.message).split()[0] for warning in caught] == ["head", "one", "other"]
    for name in ("embedding", "head", "one", "other"):
        assert model.get_submodule(name) is before[name]
    assert model.head.weight is model.embedding.weight
    # One module stays one module, and a bias that is shared stays shared.
    assert isinstance(model.first, Int8Linear)
    assert model.second is model.first
    assert model.third.bias is model.first.bias
    with pytest.warns(UserWarning, match="is tied"):
        assert replace_linear(model) == []


def nested() -> torch.nn.Module:
    def block() -> torch.nn.Module:
        attention = torch.nn.ModuleDict({"q_proj": torch.nn.Linear(4, 4), "o_proj": torch.nn.Linear(4, 4)})
        return torch.nn.ModuleDict({"attention": attention, "mlp": torch.nn.Linear(4, 4)})

    return torch.nn.ModuleDict(
        {
            "model": torch.nn.ModuleDict({"layers": torch.nn.ModuleList([block(), block()])}),
            "lm_head": torch.nn.Linear(4, 10),
            "my_lm_head": torch.nn.Linear(4, 10),
        }
    )


LAYERS = [f"model.layers.{i}.{name}" for i in range(2) for name in ("attention.q_proj", "attention.o_proj", "mlp")]
SKIPS = {
    ("lm_head",): [*LAYERS, "my_lm_head"],
    (): [*LAYERS, "lm_head", "my_lm_head"],
    ("*lm_head",): LAYERS,
    ("layers.0", "*_head"): LAYERS[3:],
    ("attention", "model.lm_head"): [LAYERS[2], LAYERS[5], "lm_head", "my_lm_head"],
    ("attention.[!q]*", "layers.1.*"): [LAYERS[0], LAYERS[2], "lm_head", "my_lm_head"],
    ("LM_HEAD", "head", "lm", "layers.?.ml"): [*LAYERS, "lm_head", "my_lm_head"],
    ("*",): [],
}


@pytest.mark.parametrize("skip", SKIPS, ids=str)
def test_names_to_skip(skip: tuple[str, ...]) -> None:
    model = nested()
    before = dict(model.named_modules())
    replaced = replace_linear(model, skip=skip)
    assert replaced == SKIPS[skip]
    for name, module in model.named_modules():
        assert (module is not before[name]) is (name in replaced)
        assert isinstance(module, Int8Linear) is (name in replaced)


def test_a_module_with_several_names_stays_if_one_is_skipped() -> None:
    shared = torch.nn.Linear(4, 4)
    model = torch.nn.ModuleDict({"a": shared, "b": shared, "c": torch.nn.Linear(4, 4)})
    assert replace_linear(model, skip=["b"]) == ["c"]
    assert model["a"] is shared


def test_the_choices_are_handed_on() -> None:
    for scheme in ("symmetric", "asymmetric"):
        for activations in ("16-bit", "int8"):
            model = torch.nn.Sequential(torch.nn.Linear(4, 4).eval(), torch.nn.ReLU())
            assert replace_linear(model, scheme=scheme, activations=activations) == ["0"]
            assert (model[0].scheme, model[0].activations, model[0].training) == (scheme, activations, False)


def test_bad_arguments() -> None:
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module, got NoneType"):
        replace_linear(None)
    with pytest.raises(ValueError, match="got one of them itself: Linear"):
        replace_linear(torch.nn.Linear(4, 4))
    with pytest.raises(TypeError, match="skip must be a sequence of names, got the string 'lm_head'"):
        replace_linear(nested(), skip="lm_head")
    with pytest.raises(ValueError, match="scheme must be one of 'symmetric', 'asymmetric', got 'x'"):
        replace_linear(torch.nn.Sequential(), scheme="x")
    with pytest.raises(ValueError, match="activations must be one of '16-bit', 'int8', got 8"):
        replace_linear(torch.nn.Sequential(), activations=8)


def test_a_model_without_memory_is_replaced_and_then_filled(device: str) -> None:
    whole = nested().to(device)
    replace_linear(whole)
    bare = nested().to("meta")
    assert len(replace_linear(bare)) == 7
    bare.load_state_dict(whole.state_dict(), assign=True)
    x = torch.randn(3, 4, device=device)
    mlps = [model.get_submodule("model.layers.1.mlp") for model in (whole, bare)]
    assert torch.equal(mlps[0](x), mlps[1](x))


def tiny_llama(tied: bool = False) -> torch.nn.Module:
    transformers = pytest.importorskip("transformers", reason="transformers is an optional test dependency")
    tokens = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    # Weights large enough for predictions to differ from token to token.
    sizes = {"hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1, "max_position_embeddings": 64}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**tokens, **heads, **sizes, tie_word_embeddings=tied, attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_config(config).eval()


PROJECTIONS = [f"self_attn.{name}_proj" for name in "qkvo"] + [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
QUIET = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def bytes_of(model: torch.nn.Module, names: list[str]) -> int:
    modules = [model.get_submodule(name) for name in names]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@QUIET
@pytest.mark.parametrize(
    ("dtype", "scheme", "activations"),
    [
        # Every two of the three together.
        (torch.float32, "symmetric", "16-bit"),
        (torch.float32, "asymmetric", "int8"),
        (torch.bfloat16, "symmetric", "int8"),
        (torch.bfloat16, "asymmetric", "16-bit"),
        (torch.float16, "symmetric", "int8"),
        (torch.float16, "asymmetric", "16-bit"),
    ],
)
def test_a_llama_keeps_its_loss_in_half_the_memory(
    dtype: torch.dtype, scheme: str, activations: str, device: str
) -> None:
    model = tiny_llama().to(device=device, dtype=dtype)
    theirs = copy.deepcopy(model)
    replaced = replace_linear(model, scheme=scheme, activations=activations)
    assert replaced == [f"model.layers.{i}.{name}" for i in range(2) for name in PROJECTIONS]
    tokens = torch.randint(3, 100, (2, 16), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        ours, their = (side(input_ids=tokens, labels=tokens) for side in (model, theirs))
    # Every layer adds about half a per cent of noise, and one more of it where activations are quantised too.
    distance = 0.02 if activations == "16-bit" else 0.04
    assert abs(float(ours.loss - their.loss)) < distance
    assert float((ours.logits - their.logits).float().norm() / their.logits.float().norm()) < 0.02 + distance
    rows = sum(model.get_submodule(name).out_features for name in replaced)
    before, after = bytes_of(theirs, replaced), bytes_of(model, replaced)
    # A byte for each weight, and 4 for each scale and zero point.
    assert after == before // dtype.itemsize + rows * (4 if scheme == "symmetric" else 8)


@QUIET
def test_a_llama_generates(device: str) -> None:
    model = tiny_llama().to(device)
    replace_linear(model)
    prompt = torch.randint(3, 100, (2, 5), generator=torch.Generator().manual_seed(0)).to(device)
    got = model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    # Without the cache, all tokens in one call.
    logits = model(input_ids=got).logits
    logits[..., 2] = -torch.inf
    assert torch.equal(got[:, :5], prompt)
    assert torch.equal(got[:, 5:], logits[:, 4:-1].argmax(-1))


@QUIET
def test_a_llama_with_a_tied_head_keeps_it(device: str) -> None:
    model = tiny_llama(tied=True).to(device)
    head = model.lm_head
    with pytest.warns(UserWarning, match="^lm_head was not replaced: its weight is tied to that of another module"):
        assert len(replace_linear(model, skip=())) == 14
    assert model.lm_head is head
    assert head.weight is model.model.embed_tokens.weight
