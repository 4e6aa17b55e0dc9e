"""From a quantised model's folder, config and safetensors, to its logits: written word by word, loaded by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tk_w4a16 import PackedInt4Weight, W4A16Linear

# For the run without the interpreter, whose CPU tensors the reference serves: the kernels have tests of their own.
pytestmark = [
    pytest.mark.compiler,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP = 32
PARTS = ("qweight", "qzeros", "scales", "g_idx")
COMPRESSED_PARTS = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")


def library(name: str) -> Any:
    return pytest.importorskip(name, reason=f"{name.partition('.')[0]} is an optional test dependency")


def words(codes: Any, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> torch.Tensor:
    """Pack the last axis: bits 4 i to 4 i + 3 of a word hold its code `order[i]`."""
    octets = codes.reshape(codes.shape[0], -1, 8).astype(numpy.uint32)
    shifted = [octets[:, :, place] << numpy.uint32(4 * i) for i, place in enumerate(order)]
    return torch.from_numpy(numpy.bitwise_or.reduce(shifted).view(numpy.int32))


def quantise(weight: torch.Tensor, index: Any, symmetric: bool) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """Return codes [N, K], zero points and scales [N, G] of any groups, and what they stand for."""
    values = weight.double().numpy()
    groups = range(int(index.max()) + 1)
    low = numpy.stack([values[:, index == g].min(1).clip(max=0) for g in groups], 1)
    high = numpy.stack([values[:, index == g].max(1).clip(min=0) for g in groups], 1)
    scales = torch.from_numpy(numpy.maximum(-low, high) / 7 if symmetric else (high - low) / 15).half()
    step = scales.double().numpy()
    # GPTQ cannot store 0, nor AWQ 16.
    zeros = numpy.full_like(low, 8) if symmetric else (-low / step).round().clip(1, 15)
    codes = (values / step[:, index] + zeros[:, index]).round().clip(0, 15)
    dense = torch.from_numpy((codes - zeros[:, index]) * step[:, index])
    return codes.astype(int), zeros.astype(int), scales, dense


def tiny_llama() -> torch.nn.Module:
    transformers = library("transformers")
    tokens = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    sizes = {"hidden_size": 64, "intermediate_size": 96, "initializer_range": 0.1, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**tokens, **heads, **sizes, attn_implementation="eager")
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def layers_of(model: torch.nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if name.endswith("_proj")]


def config_of(kind: str) -> dict[str, Any]:
    transformers = library("transformers")
    if kind == "awq":
        return transformers.AwqConfig(group_size=GROUP).to_dict()
    if kind == "compressed-tensors":
        quantization = library("compressed_tensors.quantization")
        scheme = quantization.QuantizationScheme(
            targets=["Linear"], weights=quantization.QuantizationArgs(num_bits=4, symmetric=False, group_size=GROUP)
        )
        groups = {"group_0": scheme}
        return quantization.QuantizationConfig(config_groups=groups, format="pack-quantized").model_dump(mode="json")
    form = "gptq_v2" if "v2" in kind else "gptq"
    sym, desc_act = "sym" in kind, "act-order" in kind
    return transformers.GPTQConfig(4, group_size=GROUP, desc_act=desc_act, sym=sym, format=form).to_dict()


def write(folder: Path, kind: str) -> dict[str, torch.Tensor]:
    """Write a model as its quantiser does; return what the weights of its quantised layers stand for."""
    torch.manual_seed(0)
    model, dense = tiny_llama(), {}
    tensors = {name: value for name, value in model.state_dict().items() if "_proj" not in name}
    for name in layers_of(model):
        weight = model.get_submodule(name).weight.detach()
        index = numpy.arange(weight.shape[1]) // GROUP
        if "act-order" in kind:
            index = numpy.random.default_rng(0).permutation(index)
        codes, zeros, scales, dense[name] = quantise(weight, index, "sym" in kind)
        if kind == "compressed-tensors":
            packer = library("compressed_tensors.compressors.pack_quantized")
            signed = [torch.from_numpy(values - 8).to(torch.int8) for values in (codes, zeros)]
            parts = {
                "weight_packed": packer.pack_to_int32(signed[0], 4),
                "weight_scale": scales,
                "weight_shape": torch.tensor(weight.shape),
                "weight_zero_point": packer.pack_to_int32(signed[1], 4, packed_dim=0),
            }
        elif kind == "awq":
            parts = {"qweight": words(codes.T, AWQ_ORDER), "qzeros": words(zeros.T, AWQ_ORDER), "scales": scales.t()}
        else:
            # The zero points of a symmetric weight are whatever they are, and not to be looked at.
            stored = zeros * 0 + 8 if "sym" in kind else zeros - ("v2" not in kind)
            parts = {"qweight": words(codes).t(), "qzeros": words(stored.T), "scales": scales.t()}
            parts["g_idx"] = torch.from_numpy(index).int()
        tensors |= {f"{name}.{part}": value.contiguous() for part, value in parts.items()}
    library("safetensors.torch").save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config_of(kind)}))
    return dense


def layer_of(config: dict[str, Any], parts: dict[str, torch.Tensor]) -> W4A16Linear:
    """Make a layer of its tensors and the quantisation config."""
    if config["quant_method"] == "compressed-tensors":
        weights = config["config_groups"]["group_0"]["weights"]
        settings = {"group_size": weights["group_size"], "symmetric": weights["symmetric"], "bits": weights["num_bits"]}
        return W4A16Linear.from_compressed_tensors(**parts, **settings)
    settings = {"group_size": config["group_size"], "bits": config["bits"]}
    if config["quant_method"] == "awq":
        return W4A16Linear.from_awq(**parts, version=config["version"], **settings)
    settings |= {"symmetric": config["sym"], "checkpoint_format": config["checkpoint_format"]}
    return W4A16Linear.from_gptq(**parts, desc_act=config["desc_act"], **settings)


def load(folder: Path) -> torch.nn.Module:
    """Load a model by the names of its tensors."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    tensors = library("safetensors.torch").load_file(folder / "model.safetensors")
    model = tiny_llama()
    for name in layers_of(model):
        keys = {part: f"{name}.{part}" for part in (*PARTS, *COMPRESSED_PARTS)}
        parts = {part: tensors.pop(key) for part, key in keys.items() if key in tensors}
        model.set_submodule(name, layer_of(config, parts))
    keys = model.load_state_dict(tensors, strict=False)
    assert not keys.unexpected_keys
    assert all("_proj." in key for key in keys.missing_keys)
    return model


@pytest.mark.parametrize("kind", ["gptq", "gptq act-order", "gptq sym", "gptq_v2", "awq", "compressed-tensors"])
def test_a_quantised_llama_has_the_logits_of_its_dequantised_weights(kind: str, tmp_path: Path, device: str) -> None:
    dense = write(tmp_path, kind)
    model = load(tmp_path)
    reference = tiny_llama()
    reference.load_state_dict({**model.state_dict(), **{f"{name}.weight": dense[name] for name in dense}}, strict=False)
    for name, weight in dense.items():
        assert torch.equal(model.get_submodule(name).packed.dequantize(torch.float64), weight)
        assert torch.equal(reference.get_submodule(name).weight.double(), weight)
    tokens = torch.randint(3, 96, (1, 5), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        got, want = (side.to(device)(input_ids=tokens).logits for side in (model, reference))
    # All in fp32, whose sums differ in their order alone.
    assert float((got - want).norm() / want.norm()) < 1e-5


def test_a_config_of_another_kind_is_refused() -> None:
    parts = dict.fromkeys(PARTS[:3], torch.ones(1, 1))
    for kind, name, value, message in (
        ("gptq", "bits", 8, "bits must be one of 4, got 8"),
        ("gptq", "checkpoint_format", "marlin", "checkpoint_format must be one of 'gptq', 'gptq_v2', got 'marlin'"),
        ("gptq act-order", "bits", 4, "g_idx must be given where desc_act is True, got None"),
        ("awq", "bits", 3, "bits must be one of 4, got 3"),
        ("awq", "version", "gemv", "version must be one of 'gemm', 'GEMM', got 'gemv'"),
    ):
        with pytest.raises(ValueError, match=f"^{message}$"):
            layer_of({**config_of(kind), name: value}, parts)


@pytest.mark.parametrize(("n", "k", "group_size"), [(16, 64, 32), (23, 384, 128), (5, 77, -1)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
def test_random_words_are_what_compressed_tensors_makes_of_them(
    n: int, k: int, group_size: int, dtype: torch.dtype, symmetric: bool
) -> None:
    compressor = library("compressed_tensors.compressors.pack_quantized").PackedQuantizationCompressor
    quantization = library("compressed_tensors.quantization")
    shape = {"strategy": "channel"} if group_size == -1 else {"strategy": "group", "group_size": group_size}
    arguments = quantization.QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, **shape)
    generator = torch.Generator().manual_seed(n)
    groups = 1 if group_size == -1 else k // group_size
    sizes = {"weight_packed": (n, -(-k // 8)), "weight_zero_point": (-(-n // 8), groups)}
    state = {
        name: torch.randint(-(2**31), 2**31, size, generator=generator).to(torch.int32) for name, size in sizes.items()
    }
    state |= {
        "weight_scale": torch.randn(n, groups, generator=generator).to(dtype),
        "weight_shape": torch.tensor([n, k]),
    }
    if symmetric:
        del state["weight_zero_point"]
    weight = PackedInt4Weight.from_compressed_tensors(**state, group_size=group_size, symmetric=symmetric)
    want = compressor.decompress(state, quantization.QuantizationScheme(targets=["Linear"], weights=arguments))
    assert torch.equal(weight.dequantize(), want["weight"])
