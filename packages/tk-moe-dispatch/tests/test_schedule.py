"""Slots in the order of their experts: in the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.launch import PlanCache
from tk_moe_dispatch import _plans, compute_permutation_indices
from tk_moe_dispatch._launch import ScheduleConfig, max_tiles

Tensor = torch.Tensor


def spelled_out(
    ids: list[int], n_experts: int, expert_map: list[int] | None, capacity: int | None
) -> tuple[list[int], list[int], list[int]]:
    """Sorted slots, offsets and positions, step by step."""
    queues: list[list[int]] = [[] for _ in range(n_experts)]
    for slot, number in enumerate(ids):
        expert = number
        if expert_map is not None:
            expert = expert_map[number] if 0 <= number < len(expert_map) else -1
        if 0 <= expert < n_experts and (capacity is None or len(queues[expert]) < capacity):
            queues[expert].append(slot)
    rows = [slot for queue in queues for slot in queue]
    offsets = [sum(map(len, queues[:expert])) for expert in range(n_experts + 1)]
    positions = [rows.index(slot) if slot in rows else -1 for slot in range(len(ids))]
    return rows + [-1] * (len(ids) - len(rows)), offsets, positions


def tiles_of(starts: Sequence[int], ends: Sequence[int], block_m: int) -> list[list[int]]:
    """Tiles as high as can be, but for the first one of an expert."""
    tiles: list[list[int]] = []
    for expert, (first, end) in enumerate(zip(starts, ends, strict=True)):
        rows = range(end - -(-(end - first) // block_m) * block_m, end, block_m)
        tiles += [[expert, max(first, row), row + block_m, len(tiles), len(rows)] for row in rows]
    return tiles


def check(
    ids: Tensor, n_experts: int, expert_map: Tensor | None = None, capacity: int | None = None, block_m: int = 16
) -> None:
    schedule = _plans.schedule_plan(ids, expert_map, n_experts, capacity, block_m)
    *got, tiles = schedule(ids, expert_map)
    numbers = None if expert_map is None else expert_map.tolist()
    want = spelled_out(ids.flatten().tolist(), n_experts, numbers, capacity)
    assert tuple(part.tolist() for part in got) == want
    assert all(part.dtype == torch.int32 for part in got)
    if tiles is None:
        # The reference needs none.
        assert not interpreting()
        assert ids.device.type == "cpu"
        return
    _, offsets, positions = want
    check_tiles(tiles, tiles_of(offsets[:-1], offsets[1:], block_m), max_tiles(ids.numel(), n_experts, block_m))

    schedule = _plans.schedule_plan(ids, expert_map, n_experts, capacity, block_m, padded=True)
    sorted_slots, *got, padded_tiles = schedule(ids, expert_map)
    counts = [end - first for first, end in itertools.pairwise(offsets)]
    ends = list(itertools.accumulate(-(-count // block_m) * block_m for count in counts))
    starts = [end - count for end, count in zip(ends, counts, strict=True)]
    # Where the rows of one expert after the other are.
    rows = [row for start, end in zip(starts, ends, strict=True) for row in range(start, end)]
    assert got[0].tolist() == [*starts, ends[-1]]
    assert got[1].tolist() == [-1 if position < 0 else rows[position] for position in positions]
    assert sorted_slots[torch.tensor(rows, dtype=torch.int64, device=ids.device)].tolist() == want[0][: len(rows)]
    assert sorted_slots.numel() == len(tiles) * block_m
    check_tiles(padded_tiles, tiles_of(starts, ends, block_m), len(tiles))


def check_tiles(tiles: Tensor, want: list[list[int]], most: int) -> None:
    n = len(want)
    assert tiles.shape == (most, 8)
    assert tiles[:n, [0, 1, 2, 4, 5]].tolist() == want
    assert tiles[n:, 0].tolist() == [-1] * (most - n)
    assert tiles[:, 3].tolist() == [n] * most


def random_ids(n_tokens: int, top_k: int, n_experts: int, device: str, dtype: torch.dtype = torch.int64) -> Tensor:
    """Some experts of each token; -1 and numbers of no expert among them."""
    generator = torch.Generator().manual_seed(n_tokens)
    return torch.randint(-1, n_experts + 1, (n_tokens, top_k), generator=generator).to(device, dtype)


@pytest.fixture(params=[False, True], ids=["each counts all", "counted before"])
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let few slots be more than one program sorts, in either way of counting them."""
    choose = _plans.schedule_config

    def small(n_slots: int, *rest: object) -> ScheduleConfig:
        config = choose(n_slots, *rest)  # type: ignore[arg-type]  # passed on
        block_all = 0 if request.param else config.block_all
        sizes = {"chunk": 16, "n_chunks": -(-n_slots // 16), "block_all": block_all, "block_c": 2, "block_j": 8}
        return dataclasses.replace(config, **sizes)

    monkeypatch.setattr(_plans, "schedule_config", small)
    monkeypatch.setattr(_plans, "planned", PlanCache[Any]().plan_for)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("n_tokens", "top_k", "n_experts", "dtype"),
    [(1, 1, 1, torch.int64), (1, 8, 256, torch.int32), (33, 6, 60, torch.int64), (3, 2, 1100, torch.int32)],
)
def test_slots_in_the_order_of_experts_and_tokens(
    n_tokens: int, top_k: int, n_experts: int, dtype: torch.dtype, device: str
) -> None:
    check(random_ids(n_tokens, top_k, n_experts, device, dtype), n_experts)


@pytest.mark.usefixtures("poisoned_memory", "small_chunks")
@pytest.mark.parametrize(("n_tokens", "top_k", "n_experts"), [(10, 5, 60), (24, 2, 4)])
def test_many_programs_sort_as_one_does(n_tokens: int, top_k: int, n_experts: int, device: str) -> None:
    ids = random_ids(n_tokens, top_k, n_experts, device)
    expert_map = torch.arange(n_experts - 1, -1, -1, device=device, dtype=torch.int32)
    expert_map[0] = -1
    check(ids, n_experts, block_m=4)
    check(ids, n_experts, expert_map, capacity=3, block_m=1)


def test_all_tokens_to_one_expert_or_to_none(device: str) -> None:
    for expert in (5, -1, 6):
        check(torch.full((50, 2), expert, device=device), 6)
    check(torch.full((9, 1), 2**40, device=device), 6)
    check(torch.full((9, 1), 1, device=device), 6, torch.tensor([0, 6, -7], device=device))


def test_experts_elsewhere_are_absent(device: str) -> None:
    ids = random_ids(20, 3, 8, device)
    here = torch.tensor([0, 1, 2, 3, -1, -1, -1, -1], device=device)
    check(ids, 4, here)
    check(ids, 4, here.flip(0).to(torch.int32))
    check(ids, 4, torch.full((8,), -1, device=device))


@pytest.mark.parametrize("capacity", [4, 100])
def test_the_first_tokens_fill_an_expert(capacity: int, device: str) -> None:
    check(random_ids(30, 2, 5, device), 5, capacity=capacity)
    check(torch.full((30, 2), 1, device=device), 5, capacity=capacity)


def test_nothing_to_sort(device: str) -> None:
    sorted_idx, offsets, restore_idx = compute_permutation_indices(
        torch.empty(0, 2, dtype=torch.int64, device=device), 4
    )
    assert (sorted_idx.tolist(), offsets.tolist(), restore_idx.tolist()) == ([], [0] * 5, [])


@pytest.mark.parametrize("view", ["leading dimensions", "transposed"])
def test_public_indices_are_int64_and_inverse(view: str, device: str) -> None:
    ids = torch.randint(0, 8, (12, 3), generator=torch.Generator().manual_seed(0)).to(device)
    seen = ids.view(3, 4, 3) if view == "leading dimensions" else ids.t().contiguous().t()
    sorted_idx, offsets, restore_idx = compute_permutation_indices(seen, 8)
    assert {sorted_idx.dtype, offsets.dtype, restore_idx.dtype} == {torch.int64}
    assert torch.equal(sorted_idx, ids.flatten().argsort(stable=True))
    assert torch.equal(sorted_idx[restore_idx], torch.arange(36, device=device))
    assert torch.equal(offsets.diff(), ids.flatten().bincount(minlength=8))


@pytest.mark.gpu
def test_the_same_order_in_every_run(device: str) -> None:
    ids = random_ids(100, 4, 8, device)
    first = compute_permutation_indices(ids, 8)
    for _ in range(50):
        assert all(map(torch.equal, compute_permutation_indices(ids, 8), first))
