"""What products with prepared weights have in common."""

from __future__ import annotations

import pytest
import torch

from tk_kernel_core.aot import compile_launch
from tk_kernel_core.gemm import prepare_arrangement, unit_of
from tk_kernel_core.launch import PreparedLaunch
from tk_kernel_core.resources import inspect
from tk_kernel_core.targets import COMPILE_TARGETS, target_of
from tk_testkit import guarded_view
from tk_testkit.strategies import assert_guards_intact


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


# A row in one piece, and one in two of which the second is not full.
@pytest.mark.parametrize("k", [5, 4224])
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
