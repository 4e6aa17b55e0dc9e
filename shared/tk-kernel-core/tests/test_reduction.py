"""Sums of partial results, against float64 and PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tk_kernel_core import reduction
from tk_kernel_core.aot import compile_launch
from tk_kernel_core.launch import KernelLaunch, TensorArgument, planning, recording
from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.reduction import sum_rows
from tk_kernel_core.targets import COMPILE_TARGETS, Target, target_of
from tk_testkit import assert_close, guarded_view

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
TARGETS = list(COMPILE_TARGETS.values())
HOPPER_OR_LATER = ("sm_90", "sm_100")


@pytest.fixture(
    scope="session",
    params=[pytest.param("cpu", marks=pytest.mark.interpreter), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def device(request: pytest.FixtureRequest) -> str:
    """Where the kernel runs: the sum has no reference that could serve a CPU without the interpreter."""
    return request.param


def fractions(n_rows: int, width: int, device: str, seed: int = 0) -> torch.Tensor:
    """Values whose sums fp32 holds exactly, in a view that NaNs surround."""
    partial = guarded_view((n_rows, width), dtype=torch.float32, device=device, seed=seed)
    return partial.copy_((partial * 64).round() / 64)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 2, 31, 32, 33, 128, 4097])
@pytest.mark.parametrize("n_rows", [1, 2, 127, 128, 129, 300])
def test_the_exact_sum_is_rounded_once(n_rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    partial = fractions(n_rows, width, device)
    before = partial.clone()
    total = sum_rows(partial, dtype)
    assert (total.shape, total.dtype, total.device) == ((width,), dtype, partial.device)
    assert torch.equal(total, partial.double().sum(0).to(dtype))
    assert torch.equal(partial, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n_rows", "width"), [(1, 5), (264, 96), (1500, 40)])
def test_sums_that_are_not_exact(n_rows: int, width: int, dtype: torch.dtype, device: str) -> None:
    partial = torch.randn(n_rows, width, generator=torch.Generator().manual_seed(1)).to(device)
    assert_close(sum_rows(partial, dtype), partial.double().sum(0), rounding_tolerance(dtype, n_rows, magnitude=4.0))


@settings(max_examples=30)
@given(n_rows=st.integers(1, 400), width=st.integers(1, 200), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 9))
def test_any_shape(n_rows: int, width: int, dtype: torch.dtype, seed: int, device: str) -> None:
    partial = fractions(n_rows, width, device, seed)
    assert torch.equal(sum_rows(partial, dtype), partial.double().sum(0).to(dtype))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_sum_of_no_rows_is_zero(dtype: torch.dtype, device: str) -> None:
    assert torch.equal(sum_rows(torch.empty(0, 33, device=device), dtype), torch.zeros(33, dtype=dtype, device=device))


@pytest.mark.parametrize("n_rows", [0, 1, 300])
def test_no_columns_need_no_launch(n_rows: int, device: str) -> None:
    with recording() as launches:
        total = sum_rows(torch.empty(n_rows, 0, device=device), torch.float16)
    assert (total.shape, total.dtype) == ((0,), torch.float16)
    assert launches == []


def test_what_is_not_finite_stays_in_its_column(device: str) -> None:
    partial = torch.ones(130, 6, device=device)
    infinity = float("inf")
    partial[129, 0], partial[5, 1], partial[0, 2] = infinity, -infinity, float("nan")
    partial[2, 3], partial[128, 3] = infinity, -infinity
    want = torch.tensor([infinity, -infinity, float("nan"), float("nan"), 130.0, 130.0], device=device)
    torch.testing.assert_close(sum_rows(partial, torch.float32), want, atol=0, rtol=0, equal_nan=True)


def test_sums_beyond_float16_become_infinite(device: str) -> None:
    assert sum_rows(torch.full((2, 1), 40_000.0, device=device), torch.float16).item() == float("inf")


@pytest.mark.parametrize(("n_rows", "width"), [(264, 130), (700, 31)])
def test_sums_repeat_bit_for_bit(n_rows: int, width: int, device: str) -> None:
    partial = torch.randn(n_rows, width, device=device)
    first = sum_rows(partial, torch.float32)
    for _ in range(3):
        assert torch.equal(sum_rows(partial, torch.float32), first)
    # Where the rows lie does not matter either.
    buffer = torch.empty(partial.numel() + 1, device=device)
    moved = buffer[1:].view(n_rows, width).copy_(partial)
    assert torch.equal(sum_rows(moved, torch.float32), first)


def test_one_shape_with_one_dtype_after_the_other(device: str) -> None:
    partial = fractions(40, 48, device)
    want = partial.double().sum(0)
    for dtype in (*DTYPES, *DTYPES):
        total = sum_rows(partial, dtype)
        assert total.dtype == dtype
        assert torch.equal(total, want.to(dtype))


def test_launches_are_prepared_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = fractions(7, 35, device)
    sum_rows(partial, torch.float32)

    def refuse(*_: object) -> None:
        raise AssertionError("was prepared again")

    monkeypatch.setattr(reduction, "_prepare", refuse)
    assert torch.equal(sum_rows(partial + 1, torch.float32), (partial + 1).double().sum(0).float())
    with pytest.raises(AssertionError, match="was prepared again"):
        sum_rows(partial[:6], torch.float32)


def planned(target: Target, n_rows: int = 300, width: int = 4097, dtype: torch.dtype = torch.bfloat16) -> KernelLaunch:
    with planning(target) as launches:
        total = sum_rows(torch.empty(n_rows, width, device="meta"), dtype)
    assert (total.shape, total.dtype, total.is_meta) == ((width,), dtype, True)
    (launch,) = launches
    return launch


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_the_planned_launch(target: Target) -> None:
    launch = planned(target)
    arguments = dict(launch.arguments)
    assert (launch.module, launch.kernel) == ("tk_kernel_core._kernels", "sum_rows_kernel")
    assert arguments["total_ptr"] == TensorArgument("bfloat16", aligned=True)
    assert arguments["partial_ptr"] == TensorArgument("float32", aligned=True)
    assert (arguments["n_rows"], arguments["width"]) == (300, 4097)
    assert launch.grid[0] * arguments["BLOCK_N"] >= 4097 > (launch.grid[0] - 1) * arguments["BLOCK_N"]
    assert launch.grid[1:] == (1, 1)
    dependent = target.name in HOPPER_OR_LATER
    assert arguments["DEPENDENT_LAUNCH"] is dependent
    assert dict(launch.options) == {"num_warps": 4, **({"launch_pdl": True} if dependent else {})}


def test_plans_for_one_target_are_not_taken_for_another() -> None:
    kept = dict(reduction._LAUNCHES)
    for target in (*TARGETS, *reversed(TARGETS)):
        assert dict(planned(target).arguments)["DEPENDENT_LAUNCH"] is (target.name in HOPPER_OR_LATER)
    assert kept == reduction._LAUNCHES


def test_planning_for_another_card_leaves_real_calls_alone(device: str) -> None:
    partial = fractions(3, 37, device)
    want = partial.double().sum(0).float()
    own = target_of(partial.device).is_hopper_or_later
    # Neither target may decide: the call is prepared for the device it runs on.
    for rows, target in ((2, COMPILE_TARGETS["gfx942"]), (3, COMPILE_TARGETS["sm_100"])):
        with planning(target) as launches:
            total = sum_rows(partial[:rows], torch.float32)
        assert [dict(launch.arguments)["DEPENDENT_LAUNCH"] for launch in launches] == [own]
    assert torch.equal(total, want)


@pytest.mark.compiler
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_one_compiled_kernel_serves_every_number_of_rows(target: Target) -> None:
    def assembly(**sizes: Any) -> str:
        return compile_launch(planned(target, **sizes), target).assembly

    first = assembly(n_rows=2)
    assert assembly(n_rows=1) == assembly(n_rows=256) == first
    assert ("griddepcontrol.wait" in first) == (target.name in HOPPER_OR_LATER)


@pytest.mark.large_memory(12)
def test_more_than_two_to_the_31_elements() -> None:
    width = 2**11
    partial = torch.zeros(2**20 + 1, width, device="cuda")
    partial[[0, 2**20 - 1, 2**20]] = torch.arange(width, device="cuda", dtype=torch.float32)
    assert torch.equal(sum_rows(partial, torch.float32), 3.0 * torch.arange(width, device="cuda"))
