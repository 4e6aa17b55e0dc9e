"""The kernels for up to 16 rows, launched directly."""

import dataclasses
import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_kernel_core.aot import CompiledObject, compile_launch
from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.launch import PreparedLaunch
from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.resources import disassemble, inspect
from tk_kernel_core.targets import COMPILE_TARGETS, INTERPRETED_TARGET, Target, target_of
from tk_testkit.close import assert_close
from tk_testkit.plugin import kernel_device
from tk_testkit.strategies import assert_guards_intact, guarded_view
from tk_w4a16 import PackedInt4Weight, w4a16_linear_torch
from tk_w4a16._decode_launch import DECODE_ROWS, DecodeConfig, decode_config, prepare_decode, prepare_dequantize
from tk_w4a16._formats import Int4Weight

DTYPES = (torch.float16, torch.bfloat16)
GROUP_SIZES = (32, 64, 128, 256, -1)
H200 = COMPILE_TARGETS["sm_90"]

runs_kernels = pytest.mark.skipif(
    kernel_device() == "cpu" and not interpreting(), reason="launches kernels: needs a GPU or TRITON_INTERPRET=1"
)


def random_weight(
    n: int, k: int, group_size: int, dtype: torch.dtype, zeros: bool, group_index: torch.Tensor | None = None
) -> PackedInt4Weight:
    """Codes and zero points of the whole range, and scales of which no two are the same by chance."""
    generator = torch.Generator().manual_seed(n * 1000 + k)
    n_groups = 1 if group_size == -1 else -(-k // group_size)
    return PackedInt4Weight.pack(
        Int4Weight(
            torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8),
            (torch.rand(n, n_groups, generator=generator) / 8 + 1 / 64).to(dtype),
            torch.randint(0, 17, (n, n_groups), generator=generator, dtype=torch.uint8) if zeros else None,
            group_index,
            group_size,
        )
    )


@dataclasses.dataclass
class Problem:
    """A product, and the workspaces of its launch."""

    x: torch.Tensor
    weight: PackedInt4Weight
    bias: torch.Tensor | None
    config: DecodeConfig | None = None
    counter: torch.Tensor | None = None

    def run(self) -> torch.Tensor:
        x, weight, n, device = self.x, self.weight, self.weight.out_features, self.x.device
        m, k = x.shape
        prepared = prepare_decode(m, n, k, x.stride(0), weight.group_size, target_of(device), self.config)
        y = guarded_view((m, n), dtype=x.dtype, device=str(device))
        partial = None
        if prepared.n_counters:
            partial = torch.full((prepared.partial_elements,), float("nan"), device=device)
            if self.counter is None:
                self.counter = torch.zeros(prepared.n_counters, dtype=torch.int32, device=device)
        launch = PreparedLaunch.of(prepared, device)
        launch(y, x, weight.codes, weight.scales, weight.zeros, self.bias, partial, self.counter)
        assert_guards_intact(y)
        if prepared.n_counters:
            assert not self.counter.any()
        return y

    def check(self) -> torch.Tensor:
        x, got = self.x.double(), self.run()
        want = w4a16_linear_torch(x, self.weight, self.bias)
        largest = self.weight.dequantize(torch.float64).abs()
        magnitude = float((x.abs() @ largest.T).nan_to_num(0, 0, 0).max())
        assert_close(got, want, rounding_tolerance(self.x.dtype, x.shape[1], magnitude=magnitude))
        return got


def problem(
    m: int,
    n: int,
    k: int,
    device: str,
    group_size: int = 128,
    dtype: torch.dtype = torch.float16,
    *,
    zeros: bool = False,
    bias: bool = False,
    gap: int = 0,
    offset: int = 0,
    **changes: Any,
) -> Problem:
    """Random operands; x has NaN before, between and behind its rows. `changes` are made to the launch's choice."""
    x = guarded_view((m, k), (k + gap, 1), dtype, device=device, seed=1, offset=offset)
    config = None
    if changes:
        chosen = decode_config(m, n, k, group_size, INTERPRETED_TARGET)
        config = dataclasses.replace(chosen, **changes)
    weight = random_weight(n, k, group_size, dtype, zeros).to(device)
    return Problem(x, weight, guarded_view((n,), (1,), dtype, device=device, seed=2) if bias else None, config)


@runs_kernels
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(
    ("group_size", "zeros"),
    [(32, True), (32, False), (64, True), (64, False), (128, True), (256, False), (-1, True)],
)
def test_every_group_size_is_right(group_size: int, zeros: bool, m: int, device: str) -> None:
    dtype = torch.float16 if zeros else torch.bfloat16
    problem(m, 15, 300, device, group_size, dtype, zeros=zeros, bias=zeros).check()


@runs_kernels
@pytest.mark.parametrize("m", [1, 2, 9])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 129)])
def test_any_size_is_right(m: int, n: int, k: int, device: str) -> None:
    problem(m, n, k, device, 32, zeros=True).check()


@runs_kernels
@pytest.mark.parametrize(("m", "gap", "offset"), [(1, 0, 1), (12, 0, 1), (12, 1, 0), (12, 3, 5)])
def test_rows_of_x_may_start_anywhere(m: int, gap: int, offset: int, device: str) -> None:
    problem(m, 16, 136, device, gap=gap, offset=offset).check()


@runs_kernels
@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize(
    ("group_size", "changes"),
    [
        # Warps and programs without a step of their own, and loops of several turns.
        (64, {"num_warps": 4, "split": 1, "iterations": 1}),
        (32, {"num_warps": 1, "split": 2, "iterations": 1}),
        (256, {"tiles": 2, "num_warps": 1, "split": 1, "iterations": 2}),
    ],
)
def test_every_way_to_share_the_work_gives_the_result_in_every_run(
    m: int, group_size: int, changes: dict[str, int], device: str
) -> None:
    # Of a single row a warp takes 8 steps at least, so that two turns need more than 1024 columns.
    k = 1100
    if m > 1:
        k, shares = 540, changes["num_warps"] * changes["split"] * changes["iterations"]
        changes = {**changes, "steps": -(-5 // shares), "ahead": 1}
    case = problem(m, 16, k, device, group_size, zeros=True, bias=True, **changes)
    got = case.check()
    if changes["split"] > 1:
        # The counters are those of the first run.
        assert torch.equal(case.run(), got)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_less_every_zero_point_is_exact(dtype: torch.dtype, device: str) -> None:
    # A row for each zero point but 8, which a weight without any has; a column for each code.
    codes = torch.arange(16, dtype=torch.uint8).expand(16, 16)
    zeros = torch.tensor([*range(8), *range(9, 17)], dtype=torch.uint8)[:, None]
    weight = PackedInt4Weight.pack(Int4Weight(codes, torch.ones(16, 1, dtype=dtype), zeros, None, -1)).to(device)
    x = torch.eye(16, dtype=dtype, device=device)
    want = codes.T.to(torch.int16) - zeros.T.to(torch.int16)
    assert torch.equal(Problem(x, weight, None).run().cpu(), want.to(dtype))
    assert torch.equal(Problem(x[5:6], weight, None).run().cpu(), want[5:6].to(dtype))


@runs_kernels
@pytest.mark.parametrize("m", [1, 9])
def test_infinities_and_nan_stay_in_their_rows(m: int, device: str) -> None:
    case = problem(m, 16, 130, device, 32, zeros=True)
    # A single row has no others that it could spoil.
    clean = case.run() if m > 1 else torch.empty(1, 16, dtype=torch.float16, device=device)
    case.x[0, 3] = float("inf")
    case.x[m - 1, 129] = float("nan")
    spoilt = case.check()
    assert torch.equal(spoilt[1 : m - 1], clean[1 : m - 1])
    assert spoilt[m - 1].isnan().all()


@runs_kernels
@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize(("zeros", "dtype"), [(False, torch.bfloat16), (True, torch.float32)])
def test_a_weight_is_dequantised_as_by_pytorch(group_size: int, zeros: bool, dtype: torch.dtype, device: str) -> None:
    weight = random_weight(17, 300, group_size, torch.float16, zeros).to(device)
    prepared = prepare_dequantize(17, 300, group_size, target_of(torch.device(device)))
    launch = PreparedLaunch.of(prepared, torch.device(device))
    values = guarded_view((17, 300), dtype=dtype, device=device)
    launch(values, weight.codes, weight.scales, weight.zeros)
    assert_guards_intact(values)
    assert torch.equal(values, weight.dequantize(dtype))


def machine_code(
    m: int, n: int, k: int, group_size: int, dtype: torch.dtype, target: Target, *, zeros: bool = False
) -> CompiledObject:
    """Compile what is chosen for a product."""
    prepared = prepare_decode(m, n, k, k, group_size, target, has_zeros=zeros)
    launch = PreparedLaunch.of(prepared, torch.device("meta"))

    def tensor(dtype: torch.dtype, is_present: bool = True) -> torch.Tensor | None:
        return torch.empty(1, dtype=dtype, device="meta") if is_present else None

    is_split = prepared.n_counters > 0
    return compile_launch(
        launch.describe(
            tensor(dtype),
            tensor(dtype),
            tensor(torch.int32),
            tensor(dtype),
            tensor(torch.uint8, zeros),
            tensor(dtype, zeros),
            tensor(torch.float32, is_split),
            tensor(torch.int32, is_split),
        ),
        target,
    )


@pytest.mark.tested_triton
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("m", "n", "k", "group_size", "zeros", "dtype"),
    [
        (1, 11_008, 4096, 128, False, torch.float16),
        (1, 4096, 11_008, 32, True, torch.bfloat16),
        (8, 4096, 11_008, -1, False, torch.bfloat16),
        (8, 11_008, 4096, 64, True, torch.float16),
        (16, 11_008, 4096, 128, True, torch.float16),
        (16, 11_008, 4096, 128, True, torch.bfloat16),
        (16, 11_008, 4096, 32, True, torch.float16),
    ],
)
def test_no_operand_passes_through_shared_memory_or_another_lane(
    m: int, n: int, k: int, group_size: int, zeros: bool, dtype: torch.dtype
) -> None:
    # What the layout is for, and what depends on the insides of the compiler.
    compiled = machine_code(m, n, k, group_size, dtype, H200, zeros=zeros)
    listing = opcodes_of(compiled)
    last = max(index for index, opcode in enumerate(listing) if opcode.startswith("HMMA"))
    before = Counter(opcode.split(".")[0] for opcode in listing[:last])
    assert {*before}.isdisjoint({"LDS", "STS", "LDSM", "STSM", "SHFL"})
    # The weight: 16 bytes at a time, first to leave the cache.
    weight_loads = [opcode for opcode in listing if opcode.startswith("LDG") and ".EF" in opcode]
    assert weight_loads
    assert {"128"} == {opcode.split(".")[-1] for opcode in weight_loads}
    # An operand that is not where it belongs would take a move for each instruction, at least.
    assert before["MOV"] < 0.5 * before["HMMA"]
    resources = inspect(compiled)
    assert resources.spill_bytes == 0
    # Three programs of four warps fit a multiprocessor's registers.
    assert resources.registers <= 168


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "target"), [(1, "sm_80"), (8, "gfx942"), (16, "sm_80"), (16, "gfx942")])
def test_other_gpus_spill_nothing(m: int, target: str, dtype: torch.dtype) -> None:
    resources = inspect(machine_code(m, 11_008, 4096, 128, dtype, COMPILE_TARGETS[target], zeros=True))
    assert resources.spill_bytes == 0
    assert resources.instructions["ld.global.v4"]
    assert resources.instructions["v_mfma" if target == "gfx942" else "mma.sync"]


@given(
    m=st.integers(1, DECODE_ROWS),
    n=st.integers(1, 2**18),
    k=st.integers(1, 2**18),
    group_size=st.sampled_from(GROUP_SIZES),
    target=st.sampled_from(list(COMPILE_TARGETS.values())),
    has_zeros=st.booleans(),
)
def test_the_launch_covers_the_weight(m: int, n: int, k: int, group_size: int, target: Target, has_zeros: bool) -> None:
    config = decode_config(m, n, k, group_size, target, has_zeros)
    n_steps = -(-k // 128)
    share = config.num_warps * config.steps * config.iterations
    assert share * config.split >= n_steps
    # No program has nothing to do.
    assert share * (config.split - 1) < n_steps
    assert config.block_m == (16 if m > 8 or target.backend == "hip" else 1 if m == 1 else 8)
    assert 1 <= config.ahead <= config.steps
    assert config.tiles in (1, 2)
    assert config.num_warps in (1, 2, 4, 8, 16)
    assert 1 <= config.split <= 16
    assert config.dependent_launch == (target.name in ("sm_90", "sm_100"))
    prepared = prepare_decode(m, n, k, k, group_size, target, has_zeros=has_zeros)
    n_programs, split, _ = prepared.grid
    assert (n_programs - 1) * 16 * config.tiles < n <= n_programs * 16 * config.tiles
    assert split == config.split
    assert prepared.n_counters == (n_programs if split > 1 else 0)
    assert prepared.partial_elements == prepared.n_counters * split * 16 * config.tiles * config.block_m


@pytest.mark.parametrize(
    ("m", "n", "k", "group_size", "want"),
    [
        # Registers for 24 warps on a multiprocessor.
        (1, 11_008, 4096, 128, (1, 4, 8, 4, 1, 1, 80)),
        (1, 28_672, 8192, 128, (1, 8, 8, 4, 1, 1, 80)),
        (1, 28_672, 14_336, 128, (1, 4, 8, 4, 4, 1, None)),
        (1, 11_008, 4096, 32, (1, 4, 8, 4, 1, 1, None)),
        (1, 4096, 4096, 128, (1, 4, 8, 4, 1, 1, 255)),
        # A program of 16 warps on each multiprocessor.
        (1, 4096, 11_008, 128, (2, 16, 8, 2, 1, 1, 128)),
        (1, 1024, 4096, 128, (1, 1, 8, 4, 1, 4, 255)),
        # All at once, and then they share the registers.
        (8, 11_008, 4096, 128, (2, 4, 8, 2, 1, 1, 168)),
        (8, 14_336, 4096, 128, (2, 4, 8, 2, 1, 1, 128)),
        (8, 4096, 11_008, 128, (1, 8, 11, 2, 1, 1, 128)),
        (8, 28_672, 8192, 128, (2, 4, 4, 2, 4, 1, 128)),
        (8, 11_008, 4096, 64, (1, 4, 8, 2, 1, 1, None)),
        (16, 11_008, 4096, 128, (2, 4, 4, 2, 2, 1, 168)),
        (16, 6144, 4096, 128, (1, 4, 8, 2, 1, 1, 168)),
        (16, 4096, 4096, 128, (1, 4, 8, 2, 1, 1, 255)),
        (16, 4096, 11_008, 128, (1, 4, 11, 2, 2, 1, 255)),
        (16, 1024, 4096, 128, (1, 4, 2, 2, 1, 4, 255)),
        (16, 11_008, 4096, 32, (1, 4, 8, 2, 1, 1, None)),
        (16, 28_672, 8192, 128, (2, 4, 4, 2, 4, 1, 128)),
    ],
)
def test_choices_on_an_h200(m: int, n: int, k: int, group_size: int, want: tuple[int | None, ...]) -> None:
    c = decode_config(m, n, k, group_size, H200)
    assert (c.tiles, c.num_warps, c.steps, c.ahead, c.iterations, c.split, c.most_registers) == want


@pytest.mark.parametrize(("m", "n", "k", "want"), [(16, 11_008, 4096, (2, 4)), (8, 28_672, 8192, (2, 8))])
def test_zero_points_take_the_registers_of_longer_turns(m: int, n: int, k: int, want: tuple[int, int]) -> None:
    c = decode_config(m, n, k, 128, H200, has_zeros=True)
    assert (c.steps, c.iterations) == want


def opcodes_of(compiled: CompiledObject) -> list[str]:
    """The opcodes of a cubin, in order."""
    listing = disassemble(compiled.binary)
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", listing, re.MULTILINE)
