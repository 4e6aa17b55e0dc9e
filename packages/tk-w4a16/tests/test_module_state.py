"""What the drop-in module saves and loads: state dicts, files, and modules without memory."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch

from tk_w4a16 import PackedInt4Weight, W4A16Linear, pack_int4

IN, OUT = 77, 37
KINDS: dict[str, dict[str, Any]] = {
    "asymmetric": {"group_size": 32},
    "symmetric": {"group_size": 32, "symmetric": True},
    "one group": {"group_size": -1},
    "act-order": {"group_size": 64, "act_order": True},
    "act-order of one group": {"group_size": -1, "act_order": True},
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def index_of(kind: str) -> torch.Tensor | None:
    if not KINDS[kind].get("act_order"):
        return None
    # Groups that are not full, of which the layout makes smaller ones.
    return torch.randint(0, 5, (IN,), generator=torch.Generator().manual_seed(2)) * (KINDS[kind]["group_size"] != -1)


def module_of(kind: str, dtype: torch.dtype = torch.float16) -> W4A16Linear:
    generator = torch.Generator().manual_seed(0)
    symmetric, index = KINDS[kind].get("symmetric", False), index_of(kind)
    groups = 1 if KINDS[kind]["group_size"] == -1 else 3 if index is None else 5
    codes = torch.randint(0, 16, (IN, OUT), generator=generator)
    zeros = pack_int4(torch.randint(0, 16, (OUT, groups), generator=generator))
    scales = torch.rand(OUT, groups, generator=generator).to(dtype) / 32
    return W4A16Linear.from_compressed_tensors(
        pack_int4(codes).t(),
        scales,
        (OUT, IN),
        None if symmetric else zeros,
        index,
        torch.linspace(-1.0, 1.0, OUT).to(dtype),
        group_size=KINDS[kind]["group_size"],
        symmetric=symmetric,
    )


def fresh(kind: str, **options: Any) -> W4A16Linear:
    return W4A16Linear(IN, OUT, **{"bias": True, "dtype": torch.float16, **KINDS[kind], **options})


def buffers_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers()}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(want)
    for name, value in want.items():
        assert (got[name].dtype, got[name].device) == (value.dtype, value.device), name
        assert torch.equal(got[name], value), name


@each_kind
def test_the_state_dict_is_the_weight_in_plain_order(kind: str) -> None:
    module = module_of(kind)
    state = module.state_dict()
    names = ["weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "bias"]
    for name, is_absent in (("weight_zero_point", module.symmetric), ("weight_g_idx", not module.act_order)):
        if is_absent:
            names.remove(name)
    assert list(state) == names
    assert all(value.is_contiguous() for value in state.values())
    codes = module.packed.unpack()
    assert torch.equal(state["weight_packed"].t(), pack_int4(codes.t()))
    # By the definition in the docstring, in float64.
    index = state.get("weight_g_idx", torch.arange(IN) // (IN if module.group_size == -1 else module.group_size)).long()
    zeros = state.get("weight_zero_point", torch.full_like(state["weight_scale"], 8))
    weight = (codes.double() - zeros.double()[:, index]) * state["weight_scale"].double()[:, index]
    assert torch.equal(weight, module.packed.dequantize(torch.float64))


@each_kind
@pytest.mark.parametrize("assign", [False, True])
def test_it_loads_to_the_same_bits(kind: str, assign: bool) -> None:
    module = module_of(kind)
    state = dict(module.state_dict())
    other = fresh(kind)
    assert str(other.load_state_dict(state, assign=assign)) == "<All keys matched successfully>"
    assert_same(buffers_of(other), buffers_of(module))
    assert_same(other.state_dict(), state)
    assert repr(other) == repr(module)
    # Once more, into the memory that it has, which captured graphs read.
    held = dict(other.named_buffers())
    other.scales.zero_()
    other.load_state_dict(state)
    assert all(buffer is held[name] for name, buffer in other.named_buffers())
    assert_same(buffers_of(other), buffers_of(module))


def test_what_is_loaded_keeps_its_dtype() -> None:
    module = module_of("asymmetric", torch.bfloat16)
    other = fresh("asymmetric")
    other.load_state_dict(module.state_dict())
    assert_same(buffers_of(other), buffers_of(module))


@each_kind
def test_files(kind: str, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is an optional test dependency")
    model = torch.nn.Sequential(module_of(kind))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    safetensors.save_model(model, tmp_path / "model.safetensors")
    for name in ("model.pt", "model.safetensors"):
        twin = torch.nn.Sequential(fresh(kind))
        if name == "model.pt":
            twin.load_state_dict(torch.load(tmp_path / name, weights_only=True))
        else:
            assert safetensors.load_model(twin, tmp_path / name) == (set(), [])
        assert_same(buffers_of(twin), buffers_of(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert_same(buffers_of(torch.load(buffer, weights_only=False)), buffers_of(model))


@each_kind
def test_modules_without_memory_can_be_filled(kind: str, device: str) -> None:
    whole = module_of(kind).to(device)
    # Not the object that state_dict returned, in which torch keeps that it was once assigned.
    state = dict(whole.state_dict())

    def bare() -> W4A16Linear:
        module = fresh(kind, device="meta")
        assert all(tensor.is_meta for tensor in (*module.state_dict().values(), *module.buffers()))
        return module

    assigned = bare()
    assigned.load_state_dict(state, assign=True)
    emptied = bare().to_empty(device=device)
    with pytest.raises(RuntimeError, match="has no weight yet"):
        emptied(torch.ones(1, IN, device=device))
    emptied.load_state_dict(state)
    for module in (assigned, emptied):
        assert module.quantized
        assert_same(buffers_of(module), buffers_of(whole))
    if not whole.act_order:
        # As another process fills them; of uneven groups the layout depends on their index.
        sent = bare().to_empty(device=device)
        for ours, theirs in zip(sent.buffers(), whole.buffers(), strict=True):
            ours.copy_(theirs)
        sent.quantized = True
        sent.bias = whole.bias
        assert_same(sent.state_dict(), state)
    # Loading into nothing does nothing, of which torch warns.
    still_bare = bare()
    with pytest.warns(UserWarning, match="copying from a non-meta parameter"):
        still_bare.load_state_dict(state)
    assert not still_bare.quantized


def test_a_linear_without_memory_becomes_a_module_without_memory() -> None:
    module = W4A16Linear.from_linear(torch.nn.Linear(IN, OUT, device="meta", dtype=torch.float16), group_size=32)
    assert not module.quantized
    assert all(buffer.is_meta for buffer in module.buffers())
    module.load_state_dict(dict(module_of("asymmetric").state_dict()), assign=True)
    assert_same(buffers_of(module), buffers_of(module_of("asymmetric")))


WRONG = {
    "0.weight_packed must have shape (37, 10), got (10, 37)": ("weight_packed", lambda value: value.t()),
    "0.weight_packed must have shape (37, 10), got (36, 10)": ("weight_packed", lambda value: value[1:]),
    "0.weight_packed must have dtype int32, got float32": ("weight_packed", lambda value: value.float()),
    "0.weight_packed must be a torch.Tensor, got list": ("weight_packed", lambda value: value.tolist()),
    "0.weight_scale must have shape (37, 5) for 37 output": ("weight_scale", lambda value: value[1:]),
    "0.weight_scale must have dtype float16, ": ("weight_scale", lambda value: value.int()),
    "0.weight_scale must be finite, got ": ("weight_scale", lambda value: value * torch.inf),
    "0.weight_zero_point must have shape (37, ": ("weight_zero_point", lambda value: value[:, 1:]),
    "0.weight_zero_point must have dtype uint8, got int32": ("weight_zero_point", lambda value: value.int()),
    "0.weight_zero_point must be within [0, 16], got up to 17": ("weight_zero_point", lambda value: value * 0 + 17),
    "0.weight_g_idx must have shape (77,), got (76,)": ("weight_g_idx", lambda value: value[1:]),
    "0.weight_g_idx must be within [0, ": ("weight_g_idx", lambda value: value + 99),
    "0.weight_g_idx must have dtype int32, int64, got float32": ("weight_g_idx", lambda value: value.float()),
    "size mismatch for 0.bias": ("bias", lambda value: value[1:]),
    'Missing key(s) in state_dict: "0.weight_packed"': ("weight_packed", None),
    'Missing key(s) in state_dict: "0.weight_scale"': ("weight_scale", None),
    'Missing key(s) in state_dict: "0.weight_zero_point"': ("weight_zero_point", None),
    'Missing key(s) in state_dict: "0.weight_g_idx"': ("weight_g_idx", None),
    'Unexpected key(s) in state_dict: "0.codes"': ("codes", lambda value: torch.ones(1)),
    'Unexpected key(s) in state_dict: "0.weight"': ("weight", lambda value: torch.ones(OUT, IN)),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_is_not_loaded(message: str) -> None:
    model = torch.nn.Sequential(module_of("act-order"))
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
        assert_same(buffers_of(model), before)


def test_a_weight_of_another_kind_is_not_loaded() -> None:
    for name, kind, other in (
        ("weight_zero_point", "symmetric", "asymmetric"),
        ("weight_g_idx", "one group", "act-order of one group"),
    ):
        with pytest.raises(RuntimeError, match=rf'Missing key\(s\) in state_dict: "{name}"'):
            fresh(other).load_state_dict(module_of(kind).state_dict())
        with pytest.raises(RuntimeError, match=rf'Unexpected key\(s\) in state_dict: "{name}"'):
            fresh(kind).load_state_dict(module_of(other).state_dict())


def test_a_prepared_weight_with_a_permutation_is_saved_with_its_index() -> None:
    packed = module_of("act-order").packed
    for asked in (False, True):
        module = W4A16Linear.from_packed(packed, act_order=asked)
        assert module.act_order
        other = fresh("act-order", bias=False)
        other.load_state_dict(module.state_dict())
        assert torch.equal(other.packed.dequantize(), packed.dequantize())
    in_order = module_of("asymmetric").packed
    assert [W4A16Linear.from_packed(in_order, act_order=asked).act_order for asked in (False, True)] == [False, True]


def test_a_weight_saved_from_any_group_index_is_packed_to_the_same_layout() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        k, groups, size = (
            8 * int(torch.randint(8, 80, (), generator=generator)),
            1 + seed % 7,
            (32, 64, 128, 256)[seed % 4],
        )
        index = torch.randint(0, groups, (k,), generator=generator)
        words = torch.randint(-(2**31), 2**31, (k // 8, 16), generator=generator).to(torch.int32)
        scales = torch.rand(groups, 16, generator=generator)
        module = W4A16Linear.from_gptq(words, None, scales, index, group_size=size, symmetric=True)
        other = W4A16Linear(k, 16, group_size=size, symmetric=True, act_order=True)
        other.load_state_dict(module.state_dict())
        assert_same(buffers_of(other), buffers_of(module))
        assert isinstance(other.packed, PackedInt4Weight)
        assert torch.equal(other.packed.dequantize(), module.packed.dequantize())
