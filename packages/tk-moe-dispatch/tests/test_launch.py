"""Launch choices: pure functions, no GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk_kernel_core.layout import next_power_of_two
from tk_kernel_core.targets import COMPILE_TARGETS, Target
from tk_moe_dispatch._gemm_launch import SortedExperts, StreamedExperts, experts_config, rows_per_tile
from tk_moe_dispatch._launch import logits_config, max_tiles, route_config, row_config, schedule_config

H200 = COMPILE_TARGETS["sm_90"]
# Experts, experts per token, features of a token and inside an expert.
MODELS = {"mixtral": (8, 2, 4096, 14_336), "qwen2-57b": (64, 8, 3584, 2560), "deepseek-v3": (256, 8, 7168, 2048)}

targets = st.sampled_from(list(COMPILE_TARGETS.values()))
token_counts = st.one_of(st.integers(1, 300), st.integers(1, 2**20))


def is_power_of_two(*values: int) -> bool:
    return all(value >= 1 and value & (value - 1) == 0 for value in values)


@given(
    counts=st.lists(st.one_of(st.just(0), st.integers(0, 300)), min_size=1, max_size=40),
    block_m=st.sampled_from([1, 16, 64, 128]),
)
def test_tiles_of_any_routing_fit(counts: list[int], block_m: int) -> None:
    n_tiles = sum(-(-count // block_m) for count in counts)
    assert n_tiles <= max_tiles(sum(counts), len(counts), block_m) <= sum(counts)


@pytest.mark.parametrize(
    ("rows", "experts", "block_m"), [(8, 256, 16), (100, 8, 16), (64, 4, 1), (33, 1, 32), (7, 3, 4)]
)
def test_some_routing_needs_all_tiles(rows: int, experts: int, block_m: int) -> None:
    # One row for each expert but one, and what is left for that; or one row more for some of them.
    used = min(rows, experts)
    counts = [1] * used
    for expert in range(used):
        more = (rows - sum(counts)) // block_m * block_m if expert == 0 else 0
        counts[expert] += more
    counts[-1] += rows - sum(counts)
    assert sum(counts) == rows
    assert sum(-(-count // block_m) for count in counts) == max_tiles(rows, experts, block_m)


@given(
    n_tokens=token_counts,
    n_experts=st.integers(1, 1500),
    width=st.integers(1, 2**15),
    bytes_per_element=st.sampled_from([2, 4]),
    target=targets,
)
def test_scoring_is_what_the_hardware_takes(
    n_tokens: int, n_experts: int, width: int, bytes_per_element: int, target: Target
) -> None:
    config = logits_config(n_tokens, n_experts, width, bytes_per_element, target)
    assert is_power_of_two(config.block_t, config.block_e, config.block_h, config.num_warps)
    # What triton.language.dot takes at least.
    assert min(config.block_t, config.block_e, config.block_h) >= 16
    assert config.num_warps * target.warp_size <= 1024
    assert config.dependent_launch == (target.name in ("sm_90", "sm_100"))
    tiles = -(-n_tokens // config.block_t) * -(-n_experts // config.block_e)
    assert config.n_programs == tiles * config.n_parts
    # Parts are for filling the GPU, which does not need many more programs than it has multiprocessors.
    assert config.n_parts in (1, 4, 16)
    assert config.n_parts <= 4 * -(-width // config.block_h)
    assert config.n_parts == 1 or config.n_programs <= 4 * target.compute_units
    # AMD keeps one stage in registers.
    n_buffers = config.stages - (target.backend == "hip")
    step = (config.block_t + config.block_e) * config.block_h * bytes_per_element
    assert n_buffers * step <= target.shared_bytes


@given(n_tokens=token_counts, n_places=st.integers(0, 14).map(lambda n: 2**n), target=targets)
def test_choosing_is_what_the_hardware_takes(n_tokens: int, n_places: int, target: Target) -> None:
    config = route_config(n_tokens, n_places, target)
    assert is_power_of_two(config.block_t, config.num_warps)
    assert config.num_warps * target.warp_size <= 1024
    # A thread holds a logit and its 64-bit key, for all of its places.
    assert config.block_t * n_places <= 64 * config.num_warps * target.warp_size


@given(n_slots=st.integers(1, 2**30), n_experts=st.integers(1, 1500), target=targets)
def test_sorting_is_what_the_hardware_takes(n_slots: int, n_experts: int, target: Target) -> None:
    config = schedule_config(n_slots, n_experts, target)
    assert is_power_of_two(config.chunk, config.block_e, config.block_c, config.block_j, config.num_warps)
    assert config.block_e >= n_experts
    assert config.n_chunks == -(-n_slots // config.chunk)
    assert config.chunk % config.block_j == 0
    threads = config.num_warps * target.warp_size
    assert threads <= 1024
    assert config.chunk * config.block_j <= 32 * threads
    # Each program counts all slots for itself, unless that is too much.
    assert (config.block_all == 0) == (n_slots > 8192)
    assert config.block_all in (0, max(config.chunk, next_power_of_two(n_slots)))
    assert config.block_all <= 32 * threads
    # Sums over chunks, of all and of those before.
    assert config.block_c * config.block_e <= max(32 * threads, config.block_e)
    # What a program reads of the counts stays in proportion to what it sorts, up to some millions of slots.
    if 8192 < n_slots <= 2**19:
        assert config.n_chunks <= 512


@given(
    n_tokens=st.integers(1, 2**30),
    width=st.integers(1, 2**15),
    bytes_per_element=st.sampled_from([2, 4]),
    target=targets,
)
def test_rows_are_moved_16_bytes_at_a_time(n_tokens: int, width: int, bytes_per_element: int, target: Target) -> None:
    config = row_config(n_tokens, width, bytes_per_element, target)
    assert is_power_of_two(config.block_t, config.block_h, config.num_warps)
    threads = config.num_warps * target.warp_size
    assert config.block_t * config.block_h * bytes_per_element == 16 * threads
    assert config.n_programs == -(-n_tokens // config.block_t) * -(-width // config.block_h)


@pytest.mark.parametrize("model", MODELS)
def test_tiles_grow_with_the_rows_of_an_expert(model: str) -> None:
    n_experts, top_k, hidden, ffn = MODELS[model]
    sizes = []
    for n_tokens in (1, 2, 4, 8, 32, 128, 512, 2048, 4096):
        config = experts_config(n_tokens, top_k, n_experts, hidden, ffn, True, True, False, H200)
        sizes.append(config.up.block_m if isinstance(config, SortedExperts) else 1)
    # Of the two highest, the one that multiplies fewer rows in vain.
    assert [min(size, 128) for size in sizes] == sorted(min(size, 128) for size in sizes)
    assert sizes[0] == 1
    assert sizes[-1] >= 128


def test_one_tile_of_rows_serves_an_expert_with_half_as_many_again_as_the_average() -> None:
    average = 1, 10, 11, 21, 22, 42, 43, 96, 200
    sizes = [rows_per_tile(8 * rows, 8, 14_336, False, H200) for rows in average]
    assert sizes == [16, 16, 32, 32, 64, 64, 128, 128, 128]


def test_tiles_are_lower_where_one_and_a_half_would_be_taken_of_a_few_wide_experts() -> None:
    assert rows_per_tile(8 * 128, 8, 14_336, False, H200) == 64
    # Of many experts, programs go through so many tiles that those of one expert are no longer read together.
    assert rows_per_tile(256 * 128, 256, 2048, False, H200) == 128


def test_the_highest_tile_is_taken_where_it_multiplies_few_rows_in_vain() -> None:
    # Of 128 rows, an expert with 129 needs two tiles of 128; 512 are three of 192, and four or five of 128.
    average = 42, 64, 127, 128, 160, 192, 256, 512, 640, 1024, 4096
    sizes = [rows_per_tile(256 * rows, 256, 2048, True, H200) for rows in average]
    assert sizes == [64, 192, 192, 192, 192, 128, 128, 192, 128, 192, 192]
    others = [target for target in COMPILE_TARGETS.values() if target.arch != 90]
    assert max(rows_per_tile(256 * rows, 256, 2048, True, target) for rows in average for target in others) == 128


def test_high_tiles_of_few_rows_take_what_they_need_and_many_rows_end_where_a_tile_does() -> None:
    for rows, by_need, padded in (
        (64, True, False),
        (127, True, False),
        (128, False, False),
        (255, False, False),
        (256, False, True),
    ):
        config = experts_config(32 * rows, 8, 256, 7168, 2048, True, True, False, H200)
        assert isinstance(config, SortedExperts)
        assert (config.up.by_need, config.down.by_need, config.padded) == (by_need, by_need, padded)
        apart = experts_config(32 * rows, 8, 256, 7168, 2048, True, False, False, H200)
        assert isinstance(apart, SortedExperts)
        assert (apart.up.by_need, apart.down.by_need, apart.padded) == (False, False, False)


@given(
    n_tokens=st.one_of(st.integers(1, 600), st.integers(1, 2**27)),
    top_k=st.integers(1, 10),
    n_experts=st.integers(1, 1100),
    sizes=st.tuples(st.integers(1, 2**15), st.integers(1, 2**15)),
    descriptors=st.booleans(),
    joined=st.booleans(),
    biased=st.booleans(),
    target=targets,
)
def test_choices_are_what_the_hardware_takes(
    n_tokens: int,
    top_k: int,
    n_experts: int,
    sizes: tuple[int, int],
    descriptors: bool,
    joined: bool,
    biased: bool,
    target: Target,
) -> None:
    config = experts_config(n_tokens, top_k, n_experts, *sizes, descriptors, joined, biased, target)
    if isinstance(config, StreamedExperts):
        for one in (config.up, config.down):
            assert one.block_k == 8 * one.num_warps * target.warp_size
        return
    assert n_tokens > 1
    assert config.up.block_m == config.down.block_m
    assert config.gathers or config.up.descriptors
    for gated, one, n in ((True, config.up, sizes[1]), (False, config.down, sizes[0])):
        width = one.block_n * (1 + gated)
        # Rows of x are the first operand of a joined product.
        assert not one.joined or (joined and gated and one.descriptors and not one.swapped)
        assert one.descriptors == (descriptors and target.name in ("sm_90", "sm_100"))
        # Sums take at most half of a thread's registers, which on AMD are 512; of the highest tile, three quarters.
        per_thread = 256 if target.backend == "hip" else 192 if one.block_m == 192 else 128
        assert one.block_m * width <= per_thread * one.num_warps * target.warp_size
        n_buffers = one.stages - (target.backend == "hip")
        assert n_buffers * (one.block_m + width) * one.block_k * 2 < target.shared_bytes
        # However many rows there are.
        assert one.n_programs <= 4 * target.compute_units
        assert 1 <= one.n_programs <= max_tiles(n_tokens * top_k, n_experts, one.block_m) * -(-n // one.block_n)
