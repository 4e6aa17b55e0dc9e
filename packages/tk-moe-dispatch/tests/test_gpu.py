"""What only a GPU can show: graphs, sizes beyond 2^31, streams."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tk_moe_dispatch import (
    PackedExperts,
    compute_permutation_indices,
    fused_experts,
    fused_experts_torch,
    fused_moe_forward,
    grouped_gemm,
    permute_tokens,
    unpermute_tokens,
)
from tk_moe_dispatch._packed import packed_shapes

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("n_tokens", [1, 7, 64, 600])
def test_a_captured_forward_follows_new_routing(n_tokens: int) -> None:
    n_experts, top_k, width, ffn = 16, 4, 256, 128
    gate, up = (random(n_experts, ffn, width, seed=seed) / 16 for seed in (1, 2))
    down, hidden = random(n_experts, width, ffn, seed=3) / 11, random(n_tokens, width, seed=4)
    router = random(n_experts, width, seed=5)

    def forward() -> tuple[Tensor, Tensor, Tensor]:
        return fused_moe_forward(hidden, router, gate, up, down, n_experts, top_k)

    forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    # Other tokens, another router, and all tokens to the same experts.
    for new_hidden, new_router in (
        (random(n_tokens, width, seed=6), router.clone()),
        (random(n_tokens, width, seed=7), random(n_experts, width, seed=8)),
        (torch.ones_like(hidden), torch.arange(n_experts, device="cuda").to(router.dtype)[:, None].expand_as(router)),
    ):
        hidden.copy_(new_hidden)
        router.copy_(new_router)
        graph.replay()
        for got, want in zip(captured, forward(), strict=True):
            assert torch.equal(got, want)
    assert captured[1].unique().tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize("n_slots", [40, 5000, 200_000])
def test_a_captured_permutation_follows_new_indices(n_slots: int) -> None:
    indices = torch.randint(0, 60, (n_slots // 4, 4), device="cuda")
    compute_permutation_indices(indices, 60)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = compute_permutation_indices(indices, 60)
    for new in (
        torch.randint(0, 60, indices.shape),
        torch.full(indices.shape, 59),
        torch.randint(-1, 2, indices.shape),
    ):
        indices.copy_(new)
        graph.replay()
        flat = indices.flatten()
        n_absent = int((flat < 0).sum())
        order = flat.argsort(stable=True)[n_absent:]
        sorted_idx, offsets, restore_idx = captured
        assert torch.equal(sorted_idx[: len(order)], order)
        assert bool((sorted_idx[len(order) :] == -1).all())
        assert torch.equal(offsets.diff(), flat[flat >= 0].bincount(minlength=60))
        assert torch.equal(restore_idx[order], torch.arange(len(order), device="cuda"))
        assert bool((restore_idx[flat < 0] == -1).all())


@pytest.mark.large_memory(18)
def test_permuted_rows_beyond_two_to_the_31_elements() -> None:
    n_tokens, top_k, width = 56_000, 8, 7168
    hidden = random(n_tokens, width)
    indices = torch.randint(0, 64, (n_tokens, top_k), generator=torch.Generator().manual_seed(0)).cuda()
    permuted, _, sorted_idx, restore_idx = permute_tokens(hidden, indices, 64)
    for rows in (slice(16), slice(2**31 // width - 8, 2**31 // width + 8), slice(-16, None)):
        assert torch.equal(permuted[rows], hidden[sorted_idx[rows] // top_k])
    weights = torch.full((n_tokens, top_k), 1 / top_k, device="cuda")
    # Eight eighths of the same.
    assert torch.equal(unpermute_tokens(permuted, weights, restore_idx, n_tokens, top_k), hidden)


@pytest.mark.large_memory(12)
def test_weights_beyond_two_to_the_31_elements() -> None:
    n_experts, n, k = 520, 1024, 4096
    weights = torch.zeros(n_experts, n, k, dtype=torch.bfloat16, device="cuda")
    weights[-1] = random(n, k)
    tokens = random(40, k, seed=1)
    offsets = torch.zeros(n_experts + 1, dtype=torch.int64, device="cuda")
    offsets[-1] = 40
    alone = grouped_gemm(tokens, weights[-1:], offsets[-2:], 1)
    assert torch.equal(grouped_gemm(tokens, weights, offsets, n_experts), alone)
    ids, ones = torch.full((1, 1), n_experts - 1, device="cuda"), torch.ones(1, 1, device="cuda")
    down = torch.zeros(n_experts, k, n // 2, dtype=torch.bfloat16, device="cuda")
    down[-1] = random(k, n // 2, seed=2)
    got = fused_experts(tokens[:1], weights, down, ones, ids)
    assert torch.equal(got, fused_experts(tokens[:1], weights[-1:], down[-1:], ones, ids * 0))
    assert bool(got.any())


def test_more_tokens_than_a_grid_has_rows() -> None:
    n_tokens = 70_000
    hidden, weights = random(n_tokens, 64), torch.rand(n_tokens, 2, device="cuda")
    w13, w2 = random(4, 128, 64, seed=1) / 8, random(4, 64, 64, seed=2) / 8
    ids = torch.randint(0, 4, (n_tokens, 2), device="cuda")
    got = fused_experts(hidden, w13, w2, weights, ids)
    # Tokens do not depend on one another.
    tail = fused_experts(hidden[-6000:], w13, w2, weights[-6000:], ids[-6000:])
    torch.testing.assert_close(got[-6000:], tail, atol=1e-2, rtol=1e-2)


FORMATS = [(8, -1, False), (8, -1, True), (4, 128, False), (4, 128, True), (4, 32, True), (4, -1, True)]


def packed_layer(
    n_tokens: int, form: tuple[int, int, bool], dtype: torch.dtype, sizes: tuple[int, int] = (512, 320)
) -> tuple[tuple[Any, ...], dict[str, Any], Tensor, Tensor]:
    """Return the arguments of `fused_experts`, with 24 experts and 3 choices, what is to come out, and its terms.

    These are the magnitudes of what a token's experts return, summed up.

    The last expert has no tokens and scales of NaN, one of three choices of the first token is nobody's.
    """
    (bits, group_size, has_zeros), (width, ffn), n_experts = form, sizes, 24
    generator = torch.Generator("cuda").manual_seed(n_tokens)

    def integers(low: int, high: int, *shape: int, kind: torch.dtype) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cuda").to(kind)

    def packed(n: int, k: int, layout: Any) -> PackedExperts:
        if bits == 8:
            codes = integers(-128, 128, n_experts, n, k, kind=torch.int8)
            zeros = integers(-128, 128, n_experts, n, kind=torch.int8) if has_zeros else None
            scales = (random(n_experts, n, dtype=torch.float32, seed=n).abs() + 0.5) / (128 * k**0.5)
            return PackedExperts.from_int8(codes, scales, zeros, layout=layout)
        codes = integers(0, 16, n_experts, n, k, kind=torch.uint8)
        groups = 1 if group_size == -1 else -(-k // group_size)
        zeros = integers(0, 17, n_experts, n, groups, kind=torch.uint8) if has_zeros else None
        scales = (random(n_experts, n, groups, dtype=torch.float32, seed=n).abs() + 0.5) / (8 * k**0.5)
        return PackedExperts.from_int4(codes, scales.to(dtype), zeros, group_size, layout=layout)

    w13, w2 = packed(2 * ffn, width, "concat"), packed(width, ffn, None)
    ids = torch.rand(n_tokens, n_experts - 1, generator=generator, device="cuda").topk(3).indices
    ids[0, 1] = -1
    x, weights = random(n_tokens, width, dtype=dtype), torch.rand(n_tokens, 3, generator=generator, device="cuda")
    biases = {"w13_bias": random(n_experts, 2 * ffn, dtype=dtype), "w2_bias": random(n_experts, width, dtype=dtype)}
    doubles = (x.double(), w13.dequantize(torch.float64), w2.dequantize(torch.float64), weights.double())
    options = {name: bias.double() for name, bias in biases.items()}
    want = fused_experts_torch(*doubles, ids, **options)
    slots = [fused_experts_torch(*doubles[:3], doubles[3][:, [i]], ids[:, [i]], **options) for i in range(3)]
    w13.scales[-1], w2.scales[-1] = float("nan"), float("nan")
    return (x, w13, w2, weights, ids), biases, want, torch.stack(slots).abs().sum(0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(
    ("n_tokens", "sizes"), [(1, (512, 640)), (3, (136, 72)), (40, (512, 320)), (700, (1000, 264)), (1500, (512, 320))]
)
def test_packed_experts_are_right(
    n_tokens: int, sizes: tuple[int, int], form: tuple[int, int, bool], dtype: torch.dtype
) -> None:
    arguments, biases, want, terms = packed_layer(n_tokens, form, dtype, sizes)
    got = fused_experts(*arguments, **biases)
    # Up to six roundings, of half a unit each, of what a token's experts return, which may cancel, and of terms within
    # them that are as large on average.
    size = terms.square().mean(-1, keepdim=True).sqrt()
    excess = (got.double() - want).abs() - 3 * torch.finfo(dtype).eps * (terms + size)
    assert float(excess.max()) <= 0.0
    for _ in range(20):
        assert torch.equal(fused_experts(*arguments, **biases), got)


@pytest.mark.parametrize("form", FORMATS[:4], ids=str)
@pytest.mark.parametrize("n_tokens", [1, 3, 40, 700])
def test_a_captured_call_with_packed_experts_follows_new_routing(n_tokens: int, form: tuple[int, int, bool]) -> None:
    (x, w13, w2, weights, ids), biases, *_ = packed_layer(n_tokens, form, torch.bfloat16)
    fused_experts(x, w13, w2, weights, ids, **biases)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fused_experts(x, w13, w2, weights, ids, **biases)
    # Other experts, all tokens to the same, and nobody.
    for new in (ids.flip(0).roll(1, 1), torch.full_like(ids, 5), torch.full_like(ids, -1)):
        ids.copy_(new)
        graph.replay()
        assert torch.equal(captured, fused_experts(x, w13, w2, weights, ids, **biases))
    assert not captured.any()


@pytest.mark.large_memory(16)
@pytest.mark.parametrize("n_tokens", [1, 40])
def test_packed_weights_beyond_two_to_the_31_words(n_tokens: int) -> None:
    n_experts, width = 260, 4096

    def packed(n: int, layout: Any) -> PackedExperts:
        codes, groups = packed_shapes(n_experts, n, width, 8, -1, gated=layout is not None)
        words = torch.zeros(codes, dtype=torch.int32, device="cuda")
        words[-1] = torch.randint(-(2**31), 2**31, codes[1:], device="cuda", dtype=torch.int32)
        scales = torch.full(groups, 2.0**-13, device="cuda")
        return PackedExperts(words, scales, None, -1, n, width, layout)

    w13, w2 = packed(2 * width, "concat"), packed(width, None)
    assert w13.codes.numel() > 2**31
    x, ids = random(n_tokens, width), torch.full((n_tokens, 1), n_experts - 1, device="cuda")
    weights = torch.ones(n_tokens, 1, device="cuda")
    got = fused_experts(x, w13, w2, weights, ids)
    last = (weight.of(slice(n_experts - 1, None)) for weight in (w13, w2))
    torch.testing.assert_close(got, fused_experts(x, *last, weights, ids * 0), atol=2e-2, rtol=2e-2)
    assert bool(got.any())


def test_results_follow_the_current_stream() -> None:
    stream = torch.cuda.Stream()
    hidden, weights = random(64, 256), torch.ones(64, 2, device="cuda")
    w13, w2 = random(4, 256, 256, seed=1) / 16, random(4, 256, 128, seed=2) / 11
    ids = torch.randint(0, 4, (64, 2), device="cuda")
    want = fused_experts(torch.full_like(hidden, 3.0), w13, w2, weights, ids)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        hidden.fill_(3.0)
        got = fused_experts(hidden, w13, w2, weights, ids)
    stream.synchronize()
    assert torch.equal(got, want)


def test_nothing_waits_for_the_gpu() -> None:
    hidden, router = random(300, 256), random(16, 256, seed=1)
    gate, up, down = random(16, 128, 256, seed=2), random(16, 128, 256, seed=3), random(16, 256, 128, seed=4)
    shared = {"shared_w13": random(128, 256, seed=5), "shared_w2": random(256, 64, seed=6)}
    w13, expert_map = torch.cat([gate, up], 1), torch.arange(16, device="cuda")
    packed = PackedExperts.quantize_int4(w13, layout="concat"), PackedExperts.quantize_int8(down)

    def all_ways() -> None:
        _, indices, weights = fused_moe_forward(hidden, router, gate, up, down, 16, 4)
        options = {"expert_map": expert_map, "capacity_factor": 1.0, **shared}
        fused_experts(hidden, w13, down, weights, indices, **options)
        fused_experts(hidden, *packed, weights, indices, **options)

    all_ways()
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            # It says of itself that it does not see everything.
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        all_ways()
    finally:
        torch.cuda.set_sync_debug_mode(before)
