"""The kernels for dozens of rows, launched directly."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_kernel_core.aot import CompiledObject, compile_launch
from tk_kernel_core.gemm import prepare_arrangement
from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.launch import PreparedLaunch, planning
from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.resources import inspect
from tk_kernel_core.targets import COMPILE_TARGETS, Target, target_of
from tk_testkit.close import assert_close
from tk_testkit.plugin import kernel_device
from tk_testkit.strategies import assert_guards_intact, guarded_view
from tk_w4a16 import PackedInt4Weight, _plans
from tk_w4a16._formats import Int4Weight
from tk_w4a16._middle_launch import MOST_TALL_ROWS, MiddleConfig, middle_config, prepare_middle

GROUP_SIZES = (32, 64, 128, 256, -1)
H200 = COMPILE_TARGETS["sm_90"]

runs_kernels = pytest.mark.skipif(
    kernel_device() == "cpu" and not interpreting(), reason="launches kernels: needs a GPU or TRITON_INTERPRET=1"
)


@dataclasses.dataclass
class Problem:
    """A product of random operands, x with NaN around its rows."""

    x: torch.Tensor
    weight: PackedInt4Weight
    bias: torch.Tensor | None
    config: MiddleConfig

    def run(self) -> torch.Tensor:
        weight, n, device = self.weight, self.weight.out_features, self.x.device
        (m, k), target = self.x.shape, target_of(device)
        if weight.permutation is not None:
            k = 64 * weight.codes.shape[1]
        prepared = prepare_middle(m, n, k, weight.group_size, target, self.config)
        arrangement = prepare_arrangement(m, k, self.x.stride(0), prepared.n_counters, target)
        arranged = guarded_view((prepared.padded_rows, -(-k // 128) * 128), dtype=self.x.dtype, device=str(device))
        partial = counter = None
        if prepared.n_counters:
            partial = torch.full((prepared.partial_elements,), float("nan"), device=device)
            counter = torch.full((prepared.n_counters,), -1, dtype=torch.int32, device=device)
        y = guarded_view((m, n), dtype=self.x.dtype, device=str(device))
        PreparedLaunch.of(arrangement, device)(arranged, None, counter, self.x, weight.permutation)
        assert_guards_intact(arranged)
        launch = PreparedLaunch.of(prepared, device)
        launch(y, arranged, weight.codes, weight.scales, weight.zeros, self.bias, partial, counter)
        assert_guards_intact(y)
        return y

    def check(self) -> torch.Tensor:
        x, dtype, got = self.x.double(), self.x.dtype, self.run()
        # Scales that multiply the weight make it one of the activations' dtype.
        weight = self.weight.dequantize(dtype if self.config.scale_weight else torch.float64).double()
        magnitude = float((x.abs() @ weight.abs().T).nan_to_num(0, 0, 0).max())
        want = x @ weight.T + (0 if self.bias is None else self.bias.double())
        assert_close(got, want, rounding_tolerance(dtype, x.shape[1], magnitude=magnitude))
        return got


def problem(
    m: int,
    n: int,
    k: int,
    group_size: int,
    device: str,
    dtype: torch.dtype = torch.float16,
    *,
    more: bool = False,
    group_index: torch.Tensor | None = None,
    scales_dtype: torch.dtype | None = None,
    **changes: int | bool,
) -> Problem:
    """`more` are zero points and a bias; `changes` are made to the launch's choice."""
    generator = torch.Generator().manual_seed(m * 10_000 + n * 100 + k)
    n_groups = 1 if group_size == -1 else -(-k // group_size)
    weight = PackedInt4Weight.pack(
        Int4Weight(
            torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8),
            (torch.rand(n, n_groups, generator=generator) / 8 + 1 / 64).to(scales_dtype or dtype),
            torch.randint(0, 17, (n, n_groups), generator=generator, dtype=torch.uint8) if more else None,
            group_index,
            group_size,
        )
    )
    x = guarded_view((m, k), (k + 8, 1), dtype, device=device, seed=1)
    bias = guarded_view((n,), (1,), dtype, device=device, seed=2) if more else None
    config = middle_config(m, n, k, group_size, target_of(torch.device(device)))
    return Problem(x, weight.to(device), bias, dataclasses.replace(config, **changes))


@runs_kernels
@pytest.mark.parametrize(
    ("group_size", "more"),
    [(32, True), (32, False), (64, True), (128, True), (128, False), (256, False), (-1, True)],
)
def test_every_group_size_is_right(group_size: int, more: bool, device: str) -> None:
    dtype = torch.float16 if more else torch.bfloat16
    problem(17, 20, 300, group_size, device, dtype, more=more).check()


@runs_kernels
@pytest.mark.parametrize(
    ("group_size", "changes"),
    [
        (128, {"descriptors": False, "split": 1, "scale_weight": True}),
        # 3 steps in parts of 2.
        (256, {"descriptors": True, "split": 2, "scale_weight": False}),
        (64, {"descriptors": True, "split": 3, "block_m": 64}),
        # Several programs for the rows, and for the features.
        (-1, {"descriptors": True, "split": 2, "block_m": 16, "num_warps": 1, "stages": 4, "scale_weight": True}),
    ],
)
def test_every_way_to_share_the_work_gives_the_result(group_size: int, changes: dict[str, int], device: str) -> None:
    problem(20, 20, 350, group_size, device, more=True, **changes).check()


@runs_kernels
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("more", [False, True])
def test_steps_that_are_multiplied_in_halves_give_the_result(group_size: int, more: bool, device: str) -> None:
    # 5 steps, of which the last is not full.
    changes = {"in_halves": True, "scale_weight": True, "descriptors": True, "split": 1}
    dtype = torch.bfloat16 if group_size == 64 else torch.float16
    problem(33, 20, 600, group_size, device, dtype, more=more, **changes).check()


@runs_kernels
@pytest.mark.parametrize("split", [1, 2, 4])
def test_tall_tiles_give_the_result(split: int, device: str) -> None:
    # Two for the rows, two for the features; 7 steps, of which four programs have one at least.
    config = middle_config(256, 28_672, 8192, 128, H200)
    assert (config.block_m, config.block_n, config.in_halves) == (256, 128, True)
    case = problem(260, 132, 850, 128, device, more=True)
    case.config = dataclasses.replace(config, split=split, dependent_launch=case.config.dependent_launch)
    got = case.check()
    assert torch.equal(got, case.run())


@runs_kernels
def test_activations_are_sorted_like_the_columns(device: str) -> None:
    index = torch.arange(200) * 7 % 200 // 32
    case = problem(17, 20, 200, 32, device, more=True, group_index=index)
    assert case.weight.permutation is not None
    case.check()


@runs_kernels
def test_scales_of_another_dtype_multiply_the_weight_in_fp32(device: str) -> None:
    problem(17, 20, 130, 64, device, torch.bfloat16, scales_dtype=torch.float32).check()


@runs_kernels
def test_infinities_and_nan_stay_in_their_rows(device: str) -> None:
    case = problem(18, 16, 130, 128, device, more=True)
    clean = case.run()
    case.x[0, 3], case.x[17, 129] = float("inf"), float("nan")
    spoilt = case.check()
    assert torch.equal(spoilt[1:17], clean[1:17])
    assert spoilt[17].isnan().all()


@runs_kernels
def test_padding_of_a_group_of_a_large_scale_counts_for_nothing(device: str) -> None:
    case = problem(17, 16, 100, 128, device, more=True, scale_weight=True)
    # 8 times the scale is beyond float16.
    codes = torch.zeros(16, 100, dtype=torch.uint8)
    scales, zeros = torch.full((16, 1), 10_000.0).half(), torch.zeros(16, 1, dtype=torch.uint8)
    case.weight = PackedInt4Weight.pack(Int4Weight(codes, scales, zeros, None, 128)).to(device)
    assert torch.equal(case.run(), case.bias.expand(17, 16))


def test_arranged_rows_are_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def allocator(shape: tuple[int, ...], *rest: Any) -> Any:
        shapes.append(shape)
        return _allocator(shape, *rest)

    _allocator = _plans.allocator
    monkeypatch.setattr(_plans, "allocator", allocator)
    with planning(H200):
        _plans._middle(torch.empty(35, 600, dtype=torch.float16, device="meta"), None, 64, 130, 600, False)
    # The kernel reads 64 rows, and whole steps of 128 columns.
    assert (64, 640) in shapes


def machine_code(m: int, n: int, k: int, group_size: int, dtype: torch.dtype, target: Target) -> list[CompiledObject]:
    """Compile what is chosen for a product, with zero points and a permutation."""

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    prepared = prepare_middle(m, n, k, group_size, target, has_zeros=True)
    arrangement = prepare_arrangement(m, k, k, prepared.n_counters, target)
    words, zeros, x = tensor(1, dtype=torch.int32), tensor(1, dtype=torch.uint8), tensor(m, k, dtype=dtype)
    counter, partial = (words, tensor(1)) if prepared.n_counters else (None, None)
    meta = torch.device("meta")
    launches = [
        PreparedLaunch.of(arrangement, meta).describe(x, None, counter, x, words),
        PreparedLaunch.of(prepared, meta).describe(x, x, words, x, zeros, x, partial, counter),
    ]
    return [compile_launch(launch, target) for launch in launches]


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("m", "n", "k", "group_size", "dtype", "n_programs"),
    [
        (16, 28_672, 4096, 128, torch.float16, 4),
        (32, 11_008, 4096, 128, torch.float16, 4),
        (64, 11_008, 4096, 128, torch.bfloat16, 4),
        (64, 11_008, 4096, 32, torch.float16, 4),
        (64, 28_672, 4096, 128, torch.bfloat16, 2),
        (128, 11_008, 4096, 64, torch.bfloat16, 3),
        (128, 28_672, 4096, 128, torch.bfloat16, 2),
        (128, 28_672, 4096, 32, torch.bfloat16, 3),
        *((256, 28_672, 4096, group_size, torch.bfloat16, 1) for group_size in GROUP_SIZES),
        *((2048, 11_008, 4096, group_size, torch.float16, 1) for group_size in GROUP_SIZES),
        # Two programs share a tall tile, or four.
        (256, 8192, 8192, 128, torch.float16, 1),
        (256, 8192, 8192, 32, torch.bfloat16, 1),
        (256, 4096, 11_008, 64, torch.bfloat16, 1),
    ],
)
def test_machine_code_on_an_h200(m: int, n: int, k: int, group_size: int, dtype: torch.dtype, n_programs: int) -> None:
    arrange, multiply = machine_code(m, n, k, group_size, dtype, H200)
    assert inspect(arrange).spill_bytes == 0
    resources = inspect(multiply)
    assert resources.spill_bytes == resources.overwritten_operands == 0
    assert resources.instructions["wgmma"] > 0
    assert resources.instructions["tma"] > 0
    # The weight: 16 bytes at a time, into registers.
    assert resources.instructions["ld.global.v4"] >= 4
    assert not any(name.startswith("cp.async") for name in resources.instructions)
    assert n_programs * resources.registers * resources.num_warps * H200.warp_size <= 65_536
    assert n_programs * (resources.shared_bytes + 1024) <= H200.shared_bytes


@pytest.mark.compiler
@pytest.mark.tested_triton
@pytest.mark.parametrize(("n", "k"), [(28_672, 8192), (8192, 8192)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_a_step_is_dequantised_while_half_is_multiplied(n: int, k: int, dtype: torch.dtype) -> None:
    _, multiply = machine_code(256, n, k, 128, dtype, H200)
    # The second product is waited for in the loop's next turn, or behind it.
    behind_last_product = multiply.assembly.rpartition("wgmma.commit_group")[2]
    assert "bra" in behind_last_product.partition("wgmma.wait_group")[0].split()


@given(
    m=st.integers(1, MOST_TALL_ROWS),
    n=st.integers(1, 2**18),
    k=st.integers(1, 2**18),
    group_size=st.sampled_from(GROUP_SIZES),
    target=st.sampled_from(list(COMPILE_TARGETS.values())),
)
def test_the_launch_covers_the_product(m: int, n: int, k: int, group_size: int, target: Target) -> None:
    config = middle_config(m, n, k, group_size, target)
    n_steps = -(-k // 128)
    own = -(-n_steps // config.split)
    # No program has nothing to do.
    assert own * (config.split - 1) < n_steps <= own * config.split
    assert 1 <= config.split <= (4 if config.in_halves else 512 // config.block_m)
    # A step of several groups has no scale of its own.
    assert config.scale_weight or group_size not in (32, 64)
    assert config.scale_weight >= config.in_halves
    assert config.descriptors == config.dependent_launch == (target.name in ("sm_90", "sm_100"))
    prepared = prepare_middle(m, n, k, group_size, target)
    n_programs, split, _ = prepared.grid
    n_row_programs = -(-m // config.block_m)
    assert n_programs % n_row_programs == 0
    assert (n_programs // n_row_programs - 1) * config.block_n < n <= n_programs // n_row_programs * config.block_n
    assert split == config.split
    assert prepared.n_counters == (n_programs if split > 1 else 0)
    assert prepared.partial_elements == prepared.n_counters * split * config.block_n * config.block_m
    # Whole blocks of rows, and no more.
    assert prepared.padded_rows == n_row_programs * config.block_m


@pytest.mark.parametrize(
    ("m", "n", "k", "want"),
    [
        (16, 28_672, 8192, (16, 4, 3, 2, 72)),
        # Four programs at a time on a multiprocessor.
        (32, 11_008, 4096, (32, 4, 2, 3, 128)),
        (64, 11_008, 4096, (64, 4, 2, 3, 128)),
        (64, 4096, 11_008, (64, 4, 2, 8, 128)),
        # Two wide ones, where these are enough; they have shared memory for a third stage.
        (64, 28_672, 8192, (64, 8, 3, 1, 128)),
        # Three high ones.
        (128, 11_008, 4096, (128, 4, 2, 2, 168)),
        (256, 4096, 4096, (128, 4, 2, 3, 168)),
        (256, 6144, 4096, (128, 4, 2, 2, 168)),
        # Two square ones.
        (128, 28_672, 8192, (128, 8, 3, 1, 128)),
        (384, 28_672, 8192, (128, 8, 3, 1, 128)),
        # A tall one.
        (256, 11_008, 4096, (256, 8, 3, 1, 255)),
        (192, 28_672, 8192, (256, 8, 3, 1, 255)),
        (2048, 28_672, 8192, (256, 8, 3, 1, 255)),
        (256, 8192, 8192, (256, 8, 3, 2, 255)),
        (256, 4096, 11_008, (256, 8, 3, 4, 255)),
    ],
)
def test_choices_on_an_h200(m: int, n: int, k: int, want: tuple[int | None, ...]) -> None:
    c = middle_config(m, n, k, 128, H200)
    assert (c.block_m, c.num_warps, c.stages, c.split, c.most_registers) == want
