"""Products with experts' weights against exact formulas: in the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.launch import launch_target
from tk_kernel_core.numerics import rounding_tolerance
from tk_moe_dispatch._expert_plans import join
from tk_moe_dispatch._gemm_launch import GemmConfig, StreamConfig, gemm_config
from tk_moe_dispatch._gemm_plans import (
    PLAIN,
    TURN,
    Activation,
    fit_descriptors,
    gemm_launch,
    stream_down_launch,
    stream_up_launch,
)
from tk_moe_dispatch._sorted_plans import tiles_plan
from tk_testkit import assert_close

Tensor = torch.Tensor
NAN = float("nan")
GPT_OSS: Activation = (1.702, 1.0, 3.0)

runs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() or interpreting()), reason="kernels run on a GPU, or with TRITON_INTERPRET=1"
)


def integers(*shape: int, device: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Random integers from -2 to 2: their products and sums are exact, so that whatever is left out is seen."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-2, 3, shape, generator=generator).to(device, dtype)


def enclosed(values: Tensor) -> Tensor:
    """A copy with NaN right before and right after it, and at an address as good as a tensor's own."""
    guard = torch.full((64,), NAN, device=values.device).to(values.dtype)
    return torch.cat([guard, values.flatten(), guard])[64 : 64 + values.numel()].view(values.shape)


def schedule(counts: Sequence[int], block_m: int, device: str, padded: bool = False) -> Tensor:
    """Tiles of experts with so many rows, and some more that are none."""
    tiles: list[tuple[int, ...]] = []
    end = 0
    for expert, count in enumerate(counts):
        height = -(-count // block_m) * block_m
        start = end + (height - count if padded else 0)
        end = start + count
        rows = range(end - height, end, block_m)
        tiles += [(expert, max(start, row), row + block_m, len(tiles), len(rows)) for row in rows]
    n = len(tiles)
    rows_of_tiles = [(*tile[:3], n, *tile[3:], 0, 0) for tile in tiles] + [(-1, 0, 0, n, 0, 0, 0, 0)] * 2
    return torch.tensor(rows_of_tiles, dtype=torch.int32, device=device)


def tiled(n: int, gated: bool, descriptors: bool, device: str, **tile: object) -> GemmConfig:
    config = gemm_config(16, 64, 4, n, gated, descriptors, False, False, launch_target(torch.device(device)))
    return replace(config, block_n=32, block_k=64, n_programs=3, group_m=2, **tile)


def exact_swiglu(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    alpha, beta, limit = activation
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


FORMS = [
    (False, False, False, 16, torch.float16),
    (True, False, False, 16, torch.bfloat16),
    (True, True, False, 16, torch.bfloat16),
    (True, True, True, 16, torch.float16),
    (True, False, False, 48, torch.float16),
    (True, True, True, 48, torch.bfloat16),
]


@runs_kernels
@pytest.mark.parametrize(("descriptors", "swapped", "flatten", "block_m", "dtype"), FORMS)
def test_rows_meet_the_weights_of_their_expert_and_no_others_are_read(
    descriptors: bool, swapped: bool, flatten: bool, block_m: int, dtype: torch.dtype, device: str
) -> None:
    # 72 columns are more than one step and less than two, 40 features more than one tile and less than two.
    counts, n, k = (0, 5, 1, 37, 0, 32, 67), 40, 72
    x = enclosed(integers(sum(counts), k, device=device, dtype=dtype, seed=1))
    weight = enclosed(integers(len(counts), n, k, device=device, dtype=dtype, seed=2))
    want = torch.cat([rows.double() @ w.double().T for rows, w in zip(x.split(counts), weight, strict=True)])
    weight[[0, 4]] = NAN
    out = enclosed(torch.full((sum(counts), n), NAN, device=device, dtype=dtype))
    config = tiled(n, False, descriptors, device, swapped=swapped, flatten=flatten, block_m=block_m)
    gemm_launch(config, x, weight)(out, x, x, schedule(counts, block_m, device), out, weight, weight)
    assert torch.equal(out, want.to(dtype))
    for beyond in (out.storage_offset() - 1, out.storage_offset() + out.numel()):
        assert out.as_strided((1,), (1,), beyond).isnan().item()


@runs_kernels
def test_an_odd_number_of_columns_is_read_by_pointers(device: str) -> None:
    counts, n, k = (3, 0, 18), 17, 33
    x = enclosed(integers(sum(counts), k, device=device, dtype=torch.float16, seed=1))
    weight = enclosed(integers(len(counts), n, k, device=device, dtype=torch.float16, seed=2))
    assert not fit_descriptors(x)
    out = enclosed(torch.full((sum(counts), n), NAN, device=device, dtype=torch.float16))
    config = tiled(n, False, False, device)
    gemm_launch(config, x, weight)(out, x, x, schedule(counts, 16, device), out, weight, weight)
    want = torch.cat([rows.double() @ w.double().T for rows, w in zip(x.split(counts), weight, strict=True)])
    assert torch.equal(out, want.half())


@runs_kernels
@pytest.mark.parametrize(
    ("descriptors", "joined", "swapped", "layout", "activation", "has_bias", "dtype"),
    [
        (False, False, False, "interleaved", GPT_OSS, True, torch.bfloat16),
        (True, False, False, "concat", PLAIN, False, torch.float16),
        (True, False, True, "interleaved", GPT_OSS, True, torch.float16),
        (True, False, True, "separate", PLAIN, False, torch.bfloat16),
        (True, True, False, "concat", PLAIN, True, torch.bfloat16),
        (True, True, False, "interleaved", GPT_OSS, False, torch.float16),
    ],
)
def test_tokens_are_gathered_and_gate_and_up_joined_by_swiglu(
    descriptors: bool,
    joined: bool,
    swapped: bool,
    layout: str,
    activation: Activation,
    has_bias: bool,
    dtype: torch.dtype,
    device: str,
) -> None:
    counts, n_tokens, top_k, n, k = (11, 0, 19), 10, 3, 3 * TURN if joined else 40, 72
    slots = torch.randperm(n_tokens * top_k, generator=torch.Generator().manual_seed(3)).to(device, torch.int32)
    # A gap between the tokens is no part of them.
    x = torch.full((n_tokens, k + 8), NAN, device=device, dtype=dtype)[:, :k]
    x.copy_(integers(n_tokens, k, device=device, dtype=dtype, seed=1) / 16)
    packed = enclosed(integers(len(counts), 2 * n, k, device=device, dtype=dtype, seed=2))
    biases = enclosed(integers(len(counts), 2 * n, device=device, dtype=dtype, seed=4))
    if layout == "interleaved":
        (gate, up), (bias, up_bias) = packed.unflatten(1, (n, 2)).unbind(2), biases.unflatten(1, (n, 2)).unbind(2)
    else:
        (gate, up), (bias, up_bias) = packed.chunk(2, 1), biases.chunk(2, 1)
    if layout == "separate":
        gate, up = gate.clone(), up.clone()
    vectors = (None, bias, up_bias) if has_bias else ()
    out = enclosed(torch.full((sum(counts), n), NAN, device=device, dtype=dtype))
    config = tiled(n, True, descriptors, device, swapped=swapped, joined=joined)
    if joined:
        config = replace(config, block_n=2 * TURN)
    # What is not read is not there.
    weights = (join(gate, up), torch.full_like(up, NAN)) if joined else (gate, up)
    launch = gemm_launch(
        config, x, weights[0], bias if has_bias else None, gated=True, gathers=True, top_k=top_k, activation=activation
    )
    launch(out, x, x, schedule(counts, 16, device), slots, *weights, *vectors)
    wanted = []
    for expert, rows in enumerate(x.double()[slots.long() // top_k].split(counts)):
        halves = [rows @ w[expert].double().T for w in (gate, up)]
        if has_bias:
            halves = [half + b[expert].double() for half, b in zip(halves, (bias, up_bias), strict=True)]
        wanted.append(exact_swiglu(*halves, activation))
    assert_close(out, torch.cat(wanted), rounding_tolerance(dtype, k))


@runs_kernels
@pytest.mark.parametrize(("descriptors", "swapped"), [(False, False), (True, False), (True, True)])
def test_results_go_to_their_slots_weighted_and_other_slots_are_left_alone(
    descriptors: bool, swapped: bool, device: str
) -> None:
    counts, n_slots, n, k = (5, 17), 30, 40, 64
    slots = torch.randperm(n_slots, generator=torch.Generator().manual_seed(3)).to(device, torch.int32)
    slots[sum(counts) :] = -1
    x = integers(n_slots, k, device=device, dtype=torch.float16, seed=1)
    weight = integers(len(counts), n, k, device=device, dtype=torch.float16, seed=2)
    bias = integers(len(counts), n, device=device, dtype=torch.float32, seed=4)
    routing = integers(n_slots, device=device, dtype=torch.float32, seed=5) / 4
    out = torch.full((n_slots, n), NAN, device=device, dtype=torch.float16)
    config = tiled(n, False, descriptors, device, swapped=swapped)
    launch = gemm_launch(config, x, weight, bias, scatters=True)
    launch(out, x, x, schedule(counts, 16, device), slots, weight, weight, routing, bias)
    want = torch.full_like(out, NAN)
    for expert, (rows, its_slots) in enumerate(
        zip(x.split((*counts, 8)), slots.long().split((*counts, 8)), strict=True)
    ):
        if expert < len(counts):
            product = rows.double() @ weight[expert].double().T + bias[expert].double()
            want[its_slots] = (product * routing[its_slots].double()[:, None]).half()
    assert torch.equal(out.nan_to_num(9e4), want.nan_to_num(9e4))


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("by_need", "padded"), [(False, False), (True, False), (False, True)])
def test_both_parts_of_a_tile_are_finished_alike(by_need: bool, padded: bool, dtype: torch.dtype, device: str) -> None:
    # Tiles of 32 and 16 rows: some have rows in one part, some in both, some fill a part, and one expert has two.
    counts, n_slots, block_m, n, hidden = (37, 0, 70, 5, 16, 32), 160, 48, 2 * TURN, 72
    tiles = schedule(counts, block_m, device, padded)
    sorted_shape = (tiles[0, 3], block_m) if padded else (n_slots,)

    def new(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return enclosed(torch.full(shape, NAN, device=device, dtype=kind))

    rows = torch.cat([torch.arange(*tile) for tile in tiles[:, 1:3].tolist()]).to(device)
    slots = torch.zeros(sorted_shape, dtype=torch.int32, device=device).flatten()
    slots[rows] = torch.randperm(n_slots, generator=torch.Generator().manual_seed(3)).to(device, torch.int32)
    x, h, out = new(*sorted_shape, hidden), new(*sorted_shape, n), new(n_slots, hidden)
    x.view(-1, hidden)[rows] = integers(n_slots, hidden, device=device, dtype=dtype, seed=1) / 16
    gate, up = enclosed(integers(len(counts), 2 * n, hidden, device=device, dtype=dtype, seed=2)).chunk(2, 1)
    down = enclosed(integers(len(counts), hidden, n, device=device, dtype=dtype, seed=3))
    routing = integers(n_slots, device=device, dtype=torch.float32, seed=5) / 4
    config, both = tiled(n, True, True, device, swapped=False, joined=True, block_m=block_m), join(gate, up)
    config = replace(config, by_need=by_need)
    gemm_launch(replace(config, block_n=n), x, both, gated=True)(h, x, x, tiles, slots, both, both)
    gemm_launch(replace(config, joined=False), h, down, scatters=True)(out, h, h, tiles, slots, down, down, routing)
    want = out.double()
    for expert, its in enumerate(rows.split(counts)):
        its_x, its_h, its_slots = x.view(-1, hidden)[its], h.view(-1, n)[its], slots[its].long()
        want_h = exact_swiglu(*(its_x.double() @ w[expert].double().T for w in (gate, up)), PLAIN)
        assert_close(its_h, want_h, rounding_tolerance(dtype, hidden))
        want[its_slots] = its_h.double() @ down[expert].double().T * routing[its_slots].double()[:, None]
    largest = float(2 * h.double().nan_to_num().abs().sum(-1).max())
    assert_close(out, want, rounding_tolerance(dtype, n, magnitude=largest))
    # Rows between experts are left as they are.
    assert h.isfinite().all(-1).sum() == n_slots


@runs_kernels
@pytest.mark.parametrize("n_programs", [1, 7])
def test_tiles_are_all_made_whatever_the_number_of_programs(n_programs: int, device: str) -> None:
    counts, n, k = (40, 3, 0, 20), 72, 16
    x = integers(sum(counts), k, device=device, dtype=torch.float16, seed=1)
    weight = integers(len(counts), n, k, device=device, dtype=torch.float16, seed=2)
    config = replace(tiled(n, False, False, device), n_programs=n_programs, block_k=16)
    out = torch.full((sum(counts), n), NAN, device=device, dtype=torch.float16)
    launch = gemm_launch(config, x, weight)
    # No rows, no tiles: nothing happens.
    launch(out, x, x, schedule((0, 0, 0, 0), 16, device), out, weight, weight)
    assert out.isnan().all()
    launch(out, x, x, schedule(counts, 16, device), out, weight, weight)
    want = torch.cat([rows.double() @ w.double().T for rows, w in zip(x.split(counts), weight, strict=True)])
    assert torch.equal(out, want.half())


@runs_kernels
@pytest.mark.parametrize("offsets", [(0, 40, 0, 40, 0, 40), (40, 0, 3, -5, 99, 40)])
def test_tiles_of_any_offsets_are_some_of_those_that_there_are(offsets: tuple[int, ...], device: str) -> None:
    its = torch.tensor(offsets, dtype=torch.int32, device=device)
    tiles = tiles_plan(40, 5, 16, its)(its)
    n = int(tiles[0, 3])
    assert 0 < n <= len(tiles)
    real = tiles[:n].cpu()
    assert bool((real[:, 0] >= 0).all())
    assert bool(((real[:, 1] >= 0) & (real[:, 1] < real[:, 2]) & (real[:, 2] <= 40)).all())
    # A product looks for an expert's tiles from its first one on.
    assert bool(((real[:, 4] <= torch.arange(n)) & (torch.arange(n) < real[:, 4] + real[:, 5])).all())
    assert bool((real[:, 4] + real[:, 5] <= n).all())


@runs_kernels
@pytest.mark.parametrize("descriptors", [False, True])
def test_experts_beyond_two_to_the_31_elements_are_reached(descriptors: bool, device: str) -> None:
    n, k, stride = 16, 64, 2**31
    # Memory that is never touched costs nothing.
    memory = torch.empty(stride + n * k, dtype=torch.float16, device=device)
    weight = memory.as_strided((2, n, k), (stride, k, 1))
    weight.copy_(integers(2, n, k, device=device, dtype=torch.float16, seed=2))
    x = integers(3, k, device=device, dtype=torch.float16, seed=1)
    out = torch.full((3, n), NAN, device=device, dtype=torch.float16)
    gemm_launch(tiled(n, False, descriptors, device), x, weight)(
        out, x, x, schedule((1, 2), 16, device), out, weight, weight
    )
    want = torch.cat([x[:1].double() @ weight[0].double().T, x[1:].double() @ weight[1].double().T])
    assert torch.equal(out, want.half())
    config, routing = StreamConfig(16, 64, 1, launch_target(x.device).is_hopper_or_later), torch.ones(3, device=device)
    ids = torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
    out.fill_(NAN)
    stream_down_launch(config, 3, 1, 2, weight)(out, x, ids, routing, weight)
    assert torch.equal(out, want.half())


@runs_kernels
@pytest.mark.parametrize(
    ("dtype", "is_mapped", "has_bias", "activation"),
    [(torch.float16, False, False, PLAIN), (torch.bfloat16, True, True, GPT_OSS)],
)
def test_slots_are_streamed_through_experts_and_summed_by_token(
    dtype: torch.dtype, is_mapped: bool, has_bias: bool, activation: Activation, device: str
) -> None:
    n_tokens, top_k, n_experts, hidden, ffn = 3, 3, 3, 72, 37
    x = torch.full((n_tokens, hidden + 8), NAN, device=device, dtype=dtype)[:, :hidden]
    x.copy_(integers(n_tokens, hidden, device=device, dtype=dtype, seed=1) / 16)
    w13 = enclosed(integers(n_experts, 2 * ffn, hidden, device=device, dtype=dtype, seed=2))
    w2 = enclosed(integers(n_experts, hidden, ffn, device=device, dtype=dtype, seed=3))
    routing = integers(n_tokens, top_k, device=device, dtype=torch.float32, seed=5) / 4
    # The last token has no expert here. Nobody goes to expert 1.
    ids = torch.tensor([[2, 0, -1], [0, 9, 2], [-1, 9, -1]], dtype=torch.int32, device=device)
    local = ids.long().where(ids < n_experts, -1)
    expert_map = torch.tensor([2, -1, 0], dtype=torch.int32, device=device) if is_mapped else None
    if expert_map is not None:
        local = torch.where(local >= 0, expert_map.long()[local], -1)
    gate, up = w13.chunk(2, 1)
    bias13 = integers(n_experts, 2 * ffn, device=device, dtype=dtype, seed=6)
    bias, up_bias = bias13.chunk(2, 1) if has_bias else (None, None)
    bias2 = integers(n_experts, hidden, device=device, dtype=dtype, seed=7) if has_bias else None
    shared = integers(n_tokens, hidden, device=device, dtype=dtype, seed=8) if has_bias else None
    want_h = torch.full((n_tokens * top_k, ffn), NAN, device=device, dtype=torch.float64)
    for slot, expert in enumerate(local.flatten().tolist()):
        if expert >= 0:
            halves = [x[slot // top_k].double() @ w[expert].double().T for w in (gate, up)]
            if bias is not None:
                halves = [half + b[expert].double() for half, b in zip(halves, (bias, up_bias), strict=True)]
            want_h[slot] = exact_swiglu(*halves, activation)
    w13[1], w2[1] = NAN, NAN

    h = enclosed(torch.full((n_tokens * top_k, ffn), NAN, device=device, dtype=dtype))
    is_hopper = launch_target(x.device).is_hopper_or_later
    config = StreamConfig(16, 64, 1, is_hopper)
    launch = stream_up_launch(config, x, top_k, 3, gate, bias, activation)
    launch(h, x, ids, gate, up, expert_map, bias, up_bias)
    assert_close(h, want_h, rounding_tolerance(dtype, hidden))
    out = enclosed(torch.full((n_tokens, hidden), NAN, device=device, dtype=dtype))
    launch = stream_down_launch(replace(config, block_n=32), n_tokens, top_k, 3, w2, bias2)
    launch(out, h, ids, routing, w2, expert_map, bias2, shared)
    want = torch.zeros(n_tokens, hidden, device=device, dtype=torch.float64) if shared is None else shared.double()
    magnitude = 0.0
    for slot, expert in enumerate(local.flatten().tolist()):
        if expert >= 0:
            addend = h[slot].double() @ w2[expert].double().T + (0 if bias2 is None else bias2[expert].double())
            want[slot // top_k] += addend * routing.flatten()[slot].double()
            magnitude += float(h[slot].double().abs().sum() * 2)
    assert_close(out, want, rounding_tolerance(dtype, ffn * top_k, magnitude=magnitude))
    assert torch.equal(out[2], torch.zeros_like(out[2]) if shared is None else shared[2])


@pytest.mark.parametrize(
    ("view", "want"),
    [
        (lambda m: m, True),
        (lambda m: m[:, 1:].chunk(2, 1)[1], True),
        (lambda m: m.unflatten(1, (8, 2)).unbind(2)[1], True),
        (lambda m: m[..., :20], False),
        (lambda m: m[..., 4:20], False),
        (lambda m: m.transpose(1, 2), False),
        (lambda m: m.flatten()[: 3 * 16 * 28].view(3, 16, 28), False),
    ],
)
def test_descriptors_need_rows_of_whole_16_bytes(view: object, want: bool) -> None:
    assert fit_descriptors(view(torch.zeros(3, 16, 32, dtype=torch.float16))) is want  # type: ignore[operator]
