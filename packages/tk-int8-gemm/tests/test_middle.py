"""The kernels for dozens of rows and prepared weights."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_int8_gemm import PackedInt8Weight, _packed_plans, explain, int8_linear
from tk_int8_gemm._middle_launch import MOST_TALL_ROWS, MiddleConfig, middle_config, prepare_middle
from tk_int8_gemm._packed_plans import middle
from tk_kernel_core.aot import CompiledObject, compile_launch
from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.launch import planning
from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.resources import inspect
from tk_kernel_core.targets import COMPILE_TARGETS, Target, target_of
from tk_testkit.close import assert_close
from tk_testkit.plugin import kernel_device
from tk_testkit.strategies import assert_guards_intact, guarded_view

H200 = COMPILE_TARGETS["sm_90"]

runs_kernels = pytest.mark.skipif(
    kernel_device() == "cpu" and not interpreting(), reason="launches kernels: needs a GPU or TRITON_INTERPRET=1"
)


def operands(
    m: int, n: int, k: int, dtype: torch.dtype, device: str, with_more: bool
) -> tuple[torch.Tensor, torch.Tensor, PackedInt8Weight, torch.Tensor | None]:
    """x with NaN around its rows, codes, the prepared weight, and a bias if there are zero points."""
    generator = torch.Generator().manual_seed(m * 10_000 + n * 100 + k)
    codes = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    scale = torch.rand(n, generator=generator) / 64 + 1 / 128
    zero_point = torch.randint(-128, 128, (n,), generator=generator, dtype=torch.int8) if with_more else None
    x = guarded_view((m, k), (k + 8, 1), dtype, device=device, seed=1)
    bias = guarded_view((n,), (1,), dtype, device=device, seed=2) if with_more else None
    return x, codes.to(device), PackedInt8Weight.pack(codes, scale, zero_point).to(device), bias


def run(
    x: torch.Tensor, weight: PackedInt8Weight, bias: torch.Tensor | None, config: MiddleConfig | None = None
) -> torch.Tensor:
    y = guarded_view((x.shape[0], weight.out_features), dtype=x.dtype, device=str(x.device))
    multiply = middle(x, weight.out_features, weight.in_features, weight.zero_point is not None, config)
    multiply(y, x, weight.codes, weight.scale, weight.zero_point, bias)
    assert_guards_intact(y)
    return y


def check(got: torch.Tensor, x: torch.Tensor, codes: torch.Tensor, weight: PackedInt8Weight, bias: object) -> None:
    values, integers, scale = x.double(), codes.double(), weight.scale.double()
    zero_point = torch.zeros_like(scale) if weight.zero_point is None else weight.zero_point.double()
    sums = values @ integers.T - zero_point * values.sum(-1, keepdim=True)
    # Terms cancel, and those of the zero points in sums of their own.
    largest = (integers.abs() + zero_point.abs()[:, None]) * scale[:, None]
    magnitude = float((values.abs() @ largest.T).nan_to_num(0, 0, 0).max())
    want = sums * scale + (0 if bias is None else bias.double())
    assert_close(got, want, rounding_tolerance(x.dtype, x.shape[1], magnitude=magnitude))


@runs_kernels
@pytest.mark.parametrize(
    ("m", "n", "k", "dtype"),
    [
        (17, 1, 1, torch.float16),
        (33, 65, 129, torch.bfloat16),
        (40, 130, 600, torch.float16),
        (65, 20, 140, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("with_more", [False, True])
@pytest.mark.usefixtures("poisoned_memory")
def test_dozens_of_rows_are_right(m: int, n: int, k: int, dtype: torch.dtype, with_more: bool, device: str) -> None:
    x, codes, weight, bias = operands(m, n, k, dtype, device, with_more)
    got = run(x, weight, bias)
    check(got, x, codes, weight, bias)
    assert torch.equal(got, run(x, weight, bias))
    assert torch.equal(got, int8_linear(x, weight, bias))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("poisoned_memory")
def test_prompts_go_through_wide_layers_in_one_launch(dtype: torch.dtype) -> None:
    x, codes, weight, bias = operands(700, 17_000, 1160, dtype, "cuda", True)
    assert "int8_middle_kernel" in explain("int8_linear", 700, 17_000, 1160, dtype)
    got = int8_linear(x, weight, bias)
    check(got, x, codes, weight, bias)
    assert torch.equal(got, int8_linear(x, weight, bias))


@runs_kernels
@pytest.mark.parametrize(
    "changes",
    [
        {"descriptors": False, "split": 1},
        {"descriptors": True, "split": 3},
        # 9 groups in parts of 2.
        {"descriptors": True, "split": 5, "block_m": 64},
        {"descriptors": False, "split": 2, "block_m": 16, "num_warps": 8, "stages": 4},
        {"descriptors": True, "split": 1, "in_halves": True},
        {"descriptors": True, "split": 3, "in_halves": True, "block_m": 64},
    ],
)
@pytest.mark.usefixtures("poisoned_memory")
def test_every_way_to_share_the_work_gives_the_result(changes: dict[str, int | bool], device: str) -> None:
    x, codes, weight, bias = operands(35, 150, 1060, torch.float16, device, True)
    chosen = middle_config(35, 150, 1060, target_of(x.device))
    check(run(x, weight, bias, dataclasses.replace(chosen, **changes)), x, codes, weight, bias)


@runs_kernels
@pytest.mark.parametrize("split", [1, 2, 4])
@pytest.mark.usefixtures("poisoned_memory")
def test_tall_tiles_give_the_result(split: int, device: str) -> None:
    # Two for the rows, two for the features; 7 groups, of which four programs have one at least.
    x, codes, weight, bias = operands(260, 132, 850, torch.float16, device, True)
    config = middle_config(256, 28_672, 8192, H200)
    assert (config.block_m, config.block_n, config.in_halves) == (256, 128, True)
    config = dataclasses.replace(config, split=split, dependent_launch=target_of(x.device).is_hopper_or_later)
    got = run(x, weight, bias, config)
    check(got, x, codes, weight, bias)
    assert torch.equal(got, run(x, weight, bias, config))


@runs_kernels
def test_infinities_and_nan_stay_in_their_rows(device: str) -> None:
    x, codes, weight, bias = operands(40, 20, 130, torch.float16, device, True)
    clean = run(x, weight, bias)
    x[0, 3], x[39, 129] = float("inf"), float("nan")
    spoilt = run(x, weight, bias)
    check(spoilt, x, codes, weight, bias)
    assert torch.equal(spoilt[1:39], clean[1:39])
    assert spoilt[39].isnan().all()


def test_arranged_rows_are_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []

    def allocator(shape: tuple[int, ...], *rest: Any) -> Any:
        shapes.append(shape)
        return _allocator(shape, *rest)

    _allocator = _packed_plans.allocator
    monkeypatch.setattr(_packed_plans, "allocator", allocator)
    with planning(H200):
        middle(torch.empty(35, 600, dtype=torch.float16, device="meta"), 130, 600, False)
    # The kernel reads 64 rows, and whole steps of 128 columns.
    assert (64, 640) in shapes


def machine_code(m: int, n: int, k: int, dtype: torch.dtype, target: Target, with_more: bool) -> list[CompiledObject]:
    """Compile what is chosen for a product."""

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, codes = tensor(m, k, dtype=dtype), tensor(-(-n // 64) * 4, -(-k // 128) * 2, 2, 32, 4, dtype=torch.int32)
    weight = PackedInt8Weight(codes, tensor(n), tensor(n) if with_more else None, n, k)
    with planning(target) as launches:
        int8_linear(x, weight, tensor(n, dtype=dtype) if with_more else None)
    return [compile_launch(launch, target) for launch in launches]


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("m", "n", "k", "n_programs"),
    [
        (32, 11_008, 4096, 4),
        (64, 11_008, 4096, 4),
        (128, 11_008, 4096, 3),
        # A tall tile, alone or shared.
        (256, 11_008, 4096, 1),
        (256, 8192, 8192, 1),
        (256, 4096, 14_336, 1),
    ],
)
def test_machine_code_on_an_h200(m: int, n: int, k: int, n_programs: int, dtype: torch.dtype) -> None:
    arrange, multiply = machine_code(m, n, k, dtype, H200, True)
    resources = inspect(arrange)
    assert resources.spill_bytes == 0
    assert resources.instructions["st.global.v4"] > 0
    assert resources.instructions["ld.global.v4"] > 0
    resources = inspect(multiply)
    assert resources.spill_bytes == resources.overwritten_operands == 0
    assert resources.instructions["wgmma"] > 0
    assert resources.instructions["tma"] > 0
    # Shared memory and registers hold as many programs as the choice counts on.
    assert n_programs * resources.registers * resources.num_warps * H200.warp_size <= 65_536
    assert n_programs * (resources.shared_bytes + 1024) <= H200.shared_bytes


@pytest.mark.compiler
@pytest.mark.tested_triton
@pytest.mark.parametrize(("n", "k"), [(28_672, 8192), (8192, 8192)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_a_group_is_dequantised_while_half_is_multiplied(n: int, k: int, dtype: torch.dtype) -> None:
    _, multiply = machine_code(256, n, k, dtype, H200, True)
    # The second product is waited for in the loop's next turn, or behind it.
    behind_last_product = multiply.assembly.rpartition("wgmma.commit_group")[2]
    assert "bra" in behind_last_product.partition("wgmma.wait_group")[0].split()


@given(
    m=st.integers(17, MOST_TALL_ROWS),
    n=st.integers(1, 2**18),
    k=st.integers(1, 2**18),
    target=st.sampled_from(list(COMPILE_TARGETS.values())),
)
def test_the_launch_covers_the_product(m: int, n: int, k: int, target: Target) -> None:
    config = middle_config(m, n, k, target)
    n_groups = -(-k // 128)
    own = -(-n_groups // config.split)
    # No program has nothing to do.
    assert own * (config.split - 1) < n_groups <= own * config.split
    assert 1 <= config.split <= (4 if config.in_halves else 512 // config.block_m)
    assert config.descriptors == config.dependent_launch == (target.name in ("sm_90", "sm_100"))
    prepared = prepare_middle(m, n, k, target)
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
        (24, 4096, 4096, (32, 4, 3, 4, 128)),
        (32, 11_008, 4096, (32, 4, 3, 3, 128)),
        # Four programs at a time on a multiprocessor.
        (64, 11_008, 4096, (64, 4, 2, 3, 128)),
        (64, 4096, 14_336, (64, 4, 2, 8, 128)),
        # Two wide ones, where these are enough.
        (64, 28_672, 8192, (64, 8, 3, 1, 128)),
        # Three high ones.
        (96, 11_008, 4096, (128, 4, 2, 2, 168)),
        (128, 14_336, 4096, (128, 4, 2, 1, 168)),
        (256, 4096, 4096, (128, 4, 2, 3, 168)),
        # Two square ones.
        (128, 28_672, 8192, (128, 8, 3, 1, 128)),
        (384, 28_672, 8192, (128, 8, 3, 1, 128)),
        # A tall one.
        (256, 11_008, 4096, (256, 8, 3, 1, 255)),
        (256, 28_672, 8192, (256, 8, 3, 1, 255)),
        (2048, 4096, 14_336, (256, 8, 3, 1, 255)),
        (256, 4096, 14_336, (256, 8, 3, 4, 255)),
    ],
)
def test_choices_on_an_h200(m: int, n: int, k: int, want: tuple[int, ...]) -> None:
    c = middle_config(m, n, k, H200)
    assert (c.block_m, c.num_warps, c.stages, c.split, c.most_registers) == want
