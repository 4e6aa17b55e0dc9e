"""What products with prepared weights have in common."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_kernel_core.aot import compile_launch
from tk_kernel_core.gemm import (
    WORKSPACE_BYTES,
    backend_options,
    parts_of,
    prepare_arrangement,
    register_share,
    split_steps,
    tall_split,
    unit_of,
)
from tk_kernel_core.launch import PreparedLaunch
from tk_kernel_core.resources import inspect
from tk_kernel_core.targets import COMPILE_TARGETS, target_of
from tk_testkit import guarded_view
from tk_testkit.strategies import assert_guards_intact

H200 = COMPILE_TARGETS["sm_90"]


@pytest.fixture(
    scope="session",
    params=[pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> str:
    """Where the kernel runs: the arrangement has no reference that could serve a CPU without the interpreter."""
    return request.param


@pytest.mark.parametrize(("row_stride", "unit"), [(4096, 16), (4104, 8), (4100, 4), (4101, 1), (48, 16), (0, 16)])
def test_strides_come_in_the_largest_unit_up_to_16_elements(row_stride: int, unit: int) -> None:
    assert unit_of(row_stride) == unit
    prepared = prepare_arrangement(3, 40, row_stride, 7, COMPILE_TARGETS["sm_90"])
    assert prepared.constexprs["ALIGNMENT"] == unit
    assert prepared.scalars == (row_stride // unit, 7)


@pytest.mark.parametrize("m", [1, 2048, 2**20])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 100), (28_672, 8192), (11_008, 4096), (100, 2**26)])
def test_parts_cover_everything_once_within_the_workspace(m: int, n: int, k: int) -> None:
    parts = parts_of(m, n, k, 2, H200)
    assert [row for part in parts for row in (part.start, part.stop)][1:-1:2] == [part.start for part in parts[1:]]
    assert (parts[0].start, parts[-1].stop) == (0, n)
    assert all(part.start % 64 == 0 for part in parts)
    # A part has 64 output features at least.
    assert all((part.stop - part.start) * k * 2 <= max(WORKSPACE_BYTES, 64 * k * 2) for part in parts)
    assert len({part.stop - part.start for part in parts}) <= 2


@pytest.mark.parametrize(
    ("m", "n", "k", "heights"),
    [
        # A tile of 128 by 256 for each of 132 multiprocessors.
        (2048, 28_672, 8192, [2048] * 14),
        (2048, 11_008, 4096, [2048] * 5 + [768]),
        (2048, 4096, 11_008, [2048] * 2),
        (512, 11_008, 4096, [5632, 5376]),
        (8192, 4096, 4096, [512] * 8),
        # 2048 of them would not fit the workspace.
        (2048, 8192, 2**17, [512] * 16),
    ],
)
def test_a_part_occupies_an_h200_once(m: int, n: int, k: int, heights: list[int]) -> None:
    assert [part.stop - part.start for part in parts_of(m, n, k, 2, H200)] == heights


@pytest.mark.parametrize(
    ("num_warps", "n_programs", "want"), [(4, 4, 128), (8, 2, 128), (4, 3, 168), (4, 7, 72), (16, 1, 128), (4, 1, 255)]
)
def test_programs_that_run_at_a_time_share_the_registers(num_warps: int, n_programs: int, want: int) -> None:
    assert register_share(num_warps, n_programs, H200) == want
    assert want * num_warps * 32 * n_programs <= 65_536
    assert register_share(num_warps, n_programs, COMPILE_TARGETS["gfx942"]) is None


@given(
    n_programs=st.integers(1, 5000), n_steps=st.integers(1, 2000), n_slots=st.integers(1, 1000), most=st.integers(1, 32)
)
def test_no_more_programs_share_steps_than_run_at_once(n_programs: int, n_steps: int, n_slots: int, most: int) -> None:
    split = split_steps(n_programs, n_steps, n_slots, most)
    own = -(-n_steps // split)
    # Nobody has nothing to do.
    assert own * (split - 1) < n_steps
    assert 1 <= split <= most
    assert split == 1 or n_programs * split <= n_slots


@pytest.mark.parametrize(
    ("m", "n", "k", "want"),
    [
        # Two square tiles on a multiprocessor, or one tall: as many rounds of the one as of the other.
        (256, 28_672, 8192, 1),
        (129, 28_672, 8192, 1),
        (128, 28_672, 8192, 0),
        (2048, 28_672, 8192, 1),
        # Half of every other tall tile would be empty.
        (384, 28_672, 8192, 0),
        (384, 8192, 8192, 1),
        # One round, in which a third of the multiprocessors rests with either.
        (256, 11_008, 4096, 1),
        # Two, of which the second has few.
        (512, 11_008, 4096, 0),
        # Few tiles: two programs share one, or four, unless that leaves multiprocessors without.
        (256, 8192, 8192, 2),
        (256, 4096, 11_008, 4),
        (256, 6144, 8192, 0),
        # Nor if their parts are short.
        (256, 4096, 4096, 0),
    ],
)
def test_tall_tiles_are_chosen_where_they_load_an_h200(m: int, n: int, k: int, want: int) -> None:
    assert tall_split(m, n, k, H200) == want
    # Elsewhere nothing was measured.
    assert all(tall_split(m, n, k, COMPILE_TARGETS[name]) == 0 for name in ("sm_80", "sm_100", "gfx942"))


def test_options_are_named_only_where_they_say_something() -> None:
    assert backend_options(4, False) == {"num_warps": 4}
    assert backend_options(8, True, 168) == {"num_warps": 8, "launch_pdl": True, "maxnreg": 168}


# A row in one piece, and one in two of which the second is not full.
@pytest.mark.parametrize("k", [5, 16_512])
@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_are_arranged_and_their_sums_and_the_counters_made(
    k: int, permuted: bool, dtype: torch.dtype, device: str
) -> None:
    m, padded = 2, -(-k // 128) * 128
    x = guarded_view((m, k), (k + 3, 1), dtype, device=device, seed=1)
    x.copy_((x * 8).round())
    permutation = None
    if permuted:
        permutation = torch.randperm(k, generator=torch.Generator().manual_seed(2)).to(device, torch.int32)
        permutation[3] = -1
    arranged = guarded_view((m, padded), dtype=dtype, device=device)
    x_sum = None if permuted else guarded_view((m,), dtype=torch.float32, device=device)
    counter = torch.full((k + 1,), -1, dtype=torch.int32, device=device)
    prepared = prepare_arrangement(m, k, x.stride(0), k, target_of(torch.device(device)))
    PreparedLaunch.of(prepared, torch.device(device))(arranged, x_sum, counter, x, permutation)

    columns = x.new_zeros(m, padded)
    columns[:, :k] = x if permutation is None else x[:, permutation.long()] * (permutation >= 0)
    # block, octet, half of it, pair, column
    want = columns.view(m, padded // 32, 4, 2, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(m, padded)
    assert torch.equal(arranged, want)
    assert_guards_intact(arranged)
    assert counter.tolist() == [0] * k + [-1]
    if x_sum is not None:
        assert torch.equal(x_sum, x.float().sum(1))
        assert_guards_intact(x_sum)


@pytest.mark.compiler
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_16_bytes_are_moved_at_once(target: str) -> None:
    x = torch.empty(64, 4096, dtype=torch.float16, device="meta")
    prepared = prepare_arrangement(64, 4096, 4096, 0, COMPILE_TARGETS[target])
    launch = PreparedLaunch.of(prepared, x.device).describe(x, None, None, x)
    resources = inspect(compile_launch(launch, COMPILE_TARGETS[target]))
    assert resources.spill_bytes == 0
    assert resources.instructions["ld.global.v4"] == resources.instructions["st.global.v4"] == 1
