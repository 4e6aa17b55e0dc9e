"""Tokens through their experts, by all functions that lead there: in the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tk_moe_dispatch import (
    MoEReference,
    expert_ffn_triton,
    fused_expert_ffn,
    fused_experts,
    fused_experts_torch,
    fused_moe_forward,
    grouped_gemm,
    moe_router,
    permute_tokens,
)

Tensor = torch.Tensor
NAN = float("nan")


class Layer:
    """Random experts with biases, and tokens routed to them."""

    def __init__(self, n_tokens: int, n_experts: int, top_k: int, device: str, width: int = 24, ffn: int = 16) -> None:
        generator = torch.Generator().manual_seed(n_tokens + n_experts)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.x = random(n_tokens, width).half()
        self.w13 = (random(n_experts, 2 * ffn, width) / width**0.5).half()
        self.w2 = (random(n_experts, width, ffn) / ffn**0.5).half()
        self.ids = torch.stack([torch.randperm(n_experts, generator=generator)[:top_k] for _ in range(n_tokens)])
        self.ids = self.ids.to(device)
        self.weights = torch.rand(n_tokens, top_k, generator=generator).to(device) + 0.5
        self.biases = {"w13_bias": random(n_experts, 2 * ffn), "w2_bias": random(n_experts, width)}

    def __call__(self, ids: Tensor | None = None, **options: Any) -> Tensor:
        return fused_experts(self.x, self.w13, self.w2, self.weights, self.ids if ids is None else ids, **options)

    def check(self, got: Tensor, ids: Tensor | None = None, **options: Any) -> None:
        """Compare with the formula in float64, up to what the roundings inside and of the result can make."""
        ids = self.ids if ids is None else ids
        doubles = {key: self.as_double(value) for key, value in options.items()}
        tensors = self.x.double(), self.w13.double(), self.w2.double(), self.weights
        want = fused_experts_torch(*tensors, ids, **doubles)
        # Roundings do not cancel where their terms do: those of absolute values.
        magnitudes = {key: value.abs() if isinstance(value, Tensor) else value for key, value in doubles.items()}
        magnitudes |= {key: doubles[key] for key in ("expert_map",) if key in doubles}
        magnitudes.pop("limit", None)
        terms = fused_experts_torch(*(tensor.abs() for tensor in tensors), ids, **magnitudes)
        assert got.shape == want.shape
        assert got.dtype == self.x.dtype
        excess = (got.double() - want).abs() - 2 * torch.finfo(got.dtype).eps * terms
        assert float(excess.max()) <= 0.0

    @staticmethod
    def as_double(value: Any) -> Any:
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


# One token; so few that experts are read for each alone; some; many for a few experts.
SIZES = [(1, 4, 2), (2, 32, 1), (9, 3, 2), (50, 3, 1)]
GPT_OSS = {"alpha": 1.702, "beta": 1.0, "limit": 1.5}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("n_tokens", "n_experts", "top_k"), SIZES)
def test_experts_are_applied_and_summed_up(n_tokens: int, n_experts: int, top_k: int, device: str) -> None:
    layer = Layer(n_tokens, n_experts, top_k, device)
    # A streamed and a sorted one each.
    options = {**layer.biases, **GPT_OSS, "layout": "interleaved"} if top_k > 1 else {}
    layer.check(layer(**options), **options)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("n_tokens", [30, 150, 200, 400])
def test_tiles_of_all_heights_serve_even_and_uneven_routing(n_tokens: int, device: str) -> None:
    # 20 rows an expert are gathered; 100 take what they need of a high tile, 133 all of it; 267 end where one does.
    layer = Layer(n_tokens, 3, 2, device, width=72, ffn=128)
    layer.check(layer())
    ids = layer.ids.where(layer.ids != 1, -1)
    ids[5:] = ids[5:].where(ids[5:] != 0, 2)
    layer.check(layer(ids), ids)
    layer.check(layer(capacity_factor=0.8), capacity_factor=0.8)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("n_tokens", "n_experts", "top_k"), [SIZES[0], SIZES[2]])
def test_an_expert_for_all_tokens_is_added(n_tokens: int, n_experts: int, top_k: int, device: str) -> None:
    layer = Layer(n_tokens, n_experts, top_k, device)
    generator = torch.Generator().manual_seed(7)
    shared_w13 = (torch.randn(16, 24, generator=generator) / 6).to(device).half()
    options = {"shared_w13": shared_w13, "shared_w2": (torch.randn(24, 8, generator=generator) / 3).to(device).half()}
    layer.check(layer(**options), **options)
    # Also where nothing else is.
    nobody = torch.full_like(layer.ids, -1)
    layer.check(layer(nobody, **options), nobody, **options)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("n_tokens", "n_experts", "top_k"), SIZES[1:3])
def test_experts_on_two_devices_make_up_the_whole(n_tokens: int, n_experts: int, top_k: int, device: str) -> None:
    layer = Layer(n_tokens, n_experts, top_k, device)
    half = n_experts // 2
    here = torch.cat([torch.arange(half), torch.full((n_experts - half,), -1)]).to(device)
    there = torch.cat([torch.full((half,), -1), torch.arange(n_experts - half)]).to(device, torch.int32)
    w13, w2, total = layer.w13, layer.w2, torch.zeros_like(layer.x, dtype=torch.float32)
    for rows, expert_map in ((slice(half), here), (slice(half, None), there)):
        layer.w13, layer.w2 = w13[rows], w2[rows]
        part = layer(expert_map=expert_map)
        layer.check(part, expert_map=expert_map)
        total += part
    absent = torch.full_like(layer.ids, -1)
    assert torch.equal(layer(absent, expert_map=there), torch.zeros_like(layer.x))
    layer.w13, layer.w2 = w13, w2
    layer.check(total.half())


@pytest.mark.parametrize(("n_tokens", "n_experts", "top_k"), [SIZES[0], SIZES[2]])
def test_experts_without_tokens_are_not_read(n_tokens: int, n_experts: int, top_k: int, device: str) -> None:
    layer = Layer(n_tokens, n_experts, top_k, device)
    ids = layer.ids.masked_fill(layer.ids == 0, n_experts - 1)
    ids = torch.where(ids == 1, -1, ids)
    want = layer(ids)
    layer.w13[:2], layer.w2[:2] = NAN, NAN
    assert torch.equal(layer(ids), want)


def test_no_tokens(device: str) -> None:
    layer = Layer(1, 4, 2, device)
    layer.x, layer.weights = layer.x[:0], layer.weights[:0]
    assert layer(layer.ids[:0]).shape == (0, 24)
    router = torch.randn(4, 24, device=device).half()
    gate, up = layer.w13.chunk(2, 1)
    output, indices, weights = fused_moe_forward(layer.x, router, gate, up, layer.w2, 4, 2)
    assert (output.shape, indices.shape, weights.shape) == ((0, 24), (0, 2), (0, 2))
    none = torch.zeros(5, dtype=torch.int64, device=device)
    assert grouped_gemm(layer.x, layer.w13, none, 4).shape == (0, 32)
    # Rows, and no expert that has any.
    assert not grouped_gemm(torch.full((3, 24), NAN, device=device).half(), layer.w13, none, 4).any()


@pytest.mark.parametrize(("n_tokens", "n_experts", "top_k"), [(2, 32, 1), (12, 3, 1)])
def test_later_tokens_find_an_expert_full(n_tokens: int, n_experts: int, top_k: int, device: str) -> None:
    layer = Layer(n_tokens, n_experts, top_k, device)
    ids = layer.ids.clone()
    ids[:, 0] = 2
    capacity_factor = 1.25
    got = layer(ids, capacity_factor=capacity_factor)
    layer.check(got, ids, capacity_factor=capacity_factor)
    capacity = -(-int(100 * capacity_factor) * n_tokens * top_k // (100 * n_experts))
    assert capacity < n_tokens
    ids[capacity:, 0] = -1
    assert torch.equal(got, layer(ids))


def test_the_same_expert_many_times_is_one_dense_layer(device: str) -> None:
    dtype = torch.bfloat16
    layer = Layer(3, 8, 8, device)
    x, w13, w2 = layer.x.to(dtype), layer.w13[:1].expand(8, -1, -1).to(dtype), layer.w2[:1].expand(8, -1, -1).to(dtype)
    weights = torch.full((3, 8), 1 / 8, device=device)
    got = fused_experts(x, w13, w2, weights, layer.ids)
    dense = fused_experts(x, w13, w2, torch.ones(3, 1, device=device), layer.ids[:, :1])
    # Powers of two: the outputs of all slots are the same, and their sum is exact.
    assert torch.equal(got, dense)


@pytest.mark.parametrize("stride", ["transposed", "misaligned", "apart"])
def test_weights_of_any_strides_and_address(stride: str, device: str) -> None:
    layer = Layer(9, 3, 2, device)
    want = layer()
    for name in ("w13", "w2", "x"):
        value = getattr(layer, name)
        if stride == "transposed":
            changed = value.transpose(-1, -2).contiguous().transpose(-1, -2)
        elif stride == "misaligned":
            memory = torch.empty(value.numel() + 1, dtype=value.dtype, device=device)
            changed = memory[1:].view(value.shape).copy_(value)
        else:
            changed = torch.cat([value, value], -1)[..., : value.shape[-1]]
        setattr(layer, name, changed)
    assert torch.equal(layer(), want)


def test_a_whole_layer_is_its_steps(device: str) -> None:
    n_tokens = 4
    layer = Layer(n_tokens, 3, 2, device)
    router = torch.randn(3, 24, generator=torch.Generator().manual_seed(3)).to(device).half()
    gate, up = (part.contiguous() for part in layer.w13.chunk(2, 1))
    output, indices, weights = fused_moe_forward(layer.x, router, gate, up, layer.w2, 3, 2, "sigmoid")
    want_indices, want_weights, _ = moe_router(layer.x, router, 2, "sigmoid")
    assert torch.equal(indices, want_indices)
    assert torch.equal(weights, want_weights)
    layer.ids, layer.weights = indices, weights
    layer.check(output)
    assert torch.equal(layer(), output)

    permuted, offsets, sorted_idx, _ = permute_tokens(layer.x, indices, 3)
    experts = (gate, up, layer.w2, offsets, 3)
    layer.check(fused_expert_ffn(permuted, *experts, weights, sorted_idx, n_tokens, 2))
    rows = expert_ffn_triton(permuted, *experts)
    layer.ids, layer.weights = indices.flatten()[sorted_idx][:, None], torch.ones(2 * n_tokens, 1, device=device)
    layer.x = permuted
    layer.check(rows)
    products = grouped_gemm(permuted, gate, offsets, 3)
    for row, expert in enumerate(layer.ids.flatten().tolist()):
        exact = gate[expert].double() @ permuted[row].double()
        assert float((products[row].double() - exact).abs().max()) < 0.01


def test_rows_of_no_expert_are_zeros(device: str) -> None:
    layer = Layer(5, 4, 2, device)
    gate, up = layer.w13.chunk(2, 1)
    ids = torch.where(layer.ids == 3, -1, layer.ids)
    permuted, offsets, sorted_idx, _ = permute_tokens(layer.x, ids, 4)
    permuted[int(offsets[-1]) :] = NAN
    rows = expert_ffn_triton(permuted, gate, up, layer.w2, offsets, 4)
    assert not rows[int(offsets[-1]) :].any()
    got = fused_expert_ffn(permuted, gate, up, layer.w2, offsets, 4, layer.weights, sorted_idx, 5, 2)
    layer.check(got, ids)


def test_the_reference_module_is_the_layer(device: str) -> None:
    torch.manual_seed(0)
    reference = MoEReference(32, 24, 6, 3).to(device).double()
    x = torch.randn(2, 5, 32, dtype=torch.float64, device=device)
    output, routing = reference(x)
    assert output.shape == x.shape
    assert routing.router_logits.shape == (2, 5, 6)
    tensors = (x, torch.cat([reference.w_gate, reference.w_up], 1), reference.w_down)
    want = fused_experts_torch(*tensors, routing.top_k_weights, routing.top_k_indices)
    torch.testing.assert_close(output, want)
    assert output.requires_grad


@pytest.mark.gpu
def test_the_same_bits_in_every_run(device: str) -> None:
    for n_tokens, n_experts, top_k in (SIZES[0], SIZES[2]):
        layer = Layer(n_tokens, n_experts, top_k, device)
        first = layer(**layer.biases)
        for _ in range(50):
            assert torch.equal(layer(**layer.biases), first)
