"""The streaming kernels on prepared weights, launched directly."""

import dataclasses
import re
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_int8_gemm._decode_launch import DECODE_ROWS, DecodeConfig, decode_config, prepare_decode
from tk_int8_gemm._packing import PackedInt8Weight
from tk_kernel_core.aot import CompiledObject, compile_launch
from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.launch import PreparedLaunch
from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.resources import disassemble, inspect
from tk_kernel_core.targets import COMPILE_TARGETS, INTERPRETED_TARGET, Target, target_of
from tk_testkit.close import assert_close
from tk_testkit.plugin import kernel_device
from tk_testkit.strategies import assert_guards_intact, guarded_view

DTYPES = (torch.float16, torch.bfloat16)
H200 = COMPILE_TARGETS["sm_90"]


@dataclasses.dataclass
class Problem:
    """A product, and the workspaces of its launch."""

    x: torch.Tensor
    codes: torch.Tensor
    weight: PackedInt8Weight
    bias: torch.Tensor | None
    config: DecodeConfig | None = None
    counter: torch.Tensor | None = None

    @property
    def is_bfloat16(self) -> bool:
        return self.x.dtype == torch.bfloat16

    def run(self) -> torch.Tensor:
        (m, k), n = self.x.shape, self.weight.out_features
        device = self.x.device
        target = target_of(device)
        prepared = prepare_decode(m, n, k, self.x.stride(0), self.is_bfloat16, target, self.config)
        y = guarded_view((m, n), dtype=self.x.dtype, device=str(device))
        partial = None
        if prepared.n_counters:
            partial = torch.full((prepared.partial_elements,), float("nan"), device=device)
            if self.counter is None:
                self.counter = torch.zeros(prepared.n_counters, dtype=torch.int32, device=device)
        launch = PreparedLaunch.of(prepared, device)
        weight = self.weight
        launch(y, self.x, weight.codes, weight.scale, weight.zero_point, self.bias, partial, self.counter)
        assert_guards_intact(y)
        if prepared.n_counters:
            assert not self.counter.any()
        return y

    def check(self) -> None:
        x, codes = self.x.double(), self.codes.double()
        scale = self.weight.scale.double()
        zero_point = torch.zeros_like(scale) if self.weight.zero_point is None else self.weight.zero_point.double()
        bias = 0 if self.bias is None else self.bias.double()
        want = (x @ codes.T - zero_point * x.sum(-1, keepdim=True)) * scale + bias
        # Terms cancel, and those of the zero points in sums of their own.
        largest = (codes.abs() + zero_point.abs()[:, None]) * scale[:, None]
        magnitude = float((x.abs() @ largest.T).nan_to_num(0, 0, 0).max())
        assert_close(self.run(), want, rounding_tolerance(self.x.dtype, self.x.shape[1], magnitude=magnitude))


def problem(
    m: int,
    n: int,
    k: int,
    device: str,
    dtype: torch.dtype = torch.float16,
    *,
    zero_point: bool = False,
    bias: bool = False,
    gap: int = 0,
    offset: int = 0,
    **changes: Any,
) -> Problem:
    """Random operands; x has NaN before, between and behind its rows. `changes` are made to the launch's choice."""
    generator = torch.Generator().manual_seed(m * 10_000 + n * 100 + k)
    codes = torch.randint(-128, 128, (n, k), generator=generator, dtype=torch.int8)
    scale = torch.rand(n, generator=generator) / 64 + 1 / 128
    zero_points = torch.randint(-128, 128, (n,), generator=generator, dtype=torch.int8) if zero_point else None
    x = guarded_view((m, k), (k + gap, 1), dtype, device=device, seed=1, offset=offset)
    config = None
    if changes:
        config = dataclasses.replace(decode_config(m, n, k, dtype == torch.bfloat16, INTERPRETED_TARGET), **changes)
    return Problem(
        x,
        codes.to(device),
        PackedInt8Weight.pack(codes, scale, zero_points).to(device),
        guarded_view((n,), (1,), dtype, device=device, seed=2) if bias else None,
        config,
    )


runs_kernels = pytest.mark.skipif(
    kernel_device() == "cpu" and not interpreting(), reason="launches kernels: needs a GPU or TRITON_INTERPRET=1"
)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 10), (64, 128), (65, 127), (33, 129), (20, 1100)])
def test_any_size_is_right(m: int, n: int, k: int, dtype: torch.dtype, device: str) -> None:
    problem(m, n, k, device, dtype).check()


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 3, 16])
@pytest.mark.parametrize("bias", [False, True])
def test_zero_points_are_subtracted_from_the_codes_that_exist(
    m: int, bias: bool, dtype: torch.dtype, device: str
) -> None:
    # Padding up to a group of 128 must add nothing, although the zero points are not 0.
    problem(m, 33, 200, device, dtype, zero_point=True, bias=bias).check()


@runs_kernels
def test_zero_points_and_codes_at_the_ends_of_their_range_do_not_wrap(device: str) -> None:
    codes = torch.tensor([[10, -3, 0, 7], [127, -128, 1, -1]], dtype=torch.int8)
    scale, zero_point = torch.tensor([0.5, 0.25]), torch.tensor([3, -128], dtype=torch.int8)
    weight = PackedInt8Weight.pack(codes, scale, zero_point).to(device)
    row = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float16, device=device)
    for m in (1, 2, 16):
        assert Problem(row.repeat(m, 1), codes, weight, None).run().tolist() == [[1.0, 287.5]] * m


@runs_kernels
@pytest.mark.parametrize("m", [1, 5, 12])
@pytest.mark.parametrize(("gap", "offset"), [(0, 1), (1, 0), (8, 0), (3, 5)])
def test_rows_of_x_may_start_anywhere(m: int, gap: int, offset: int, device: str) -> None:
    problem(m, 20, 264, device, gap=gap, offset=offset).check()


@runs_kernels
@pytest.mark.parametrize("m", [1, 4, 16])
@pytest.mark.parametrize(
    "changes",
    [
        # Warps and programs without a group of their own, and loops of several turns.
        {"num_warps": 4, "split": 1, "iterations": 1},
        {"num_warps": 2, "split": 3, "iterations": 2},
        {"num_warps": 1, "split": 1, "iterations": 3},
        {"tiles": 2, "num_warps": 1, "split": 2, "iterations": 2},
    ],
)
def test_every_way_to_share_the_work_gives_the_result(m: int, changes: dict[str, int], device: str) -> None:
    k = 1100
    if m > 1:
        shares = changes["num_warps"] * changes["split"] * changes["iterations"]
        changes = {**changes, "steps": max(2, -(-9 // shares)), "ahead": 1}
    elif changes["num_warps"] * changes["split"] * changes["iterations"] < 2:
        pytest.fail("9 groups are two turns")
    problem(m, 37, k, device, zero_point=True, bias=True, **changes).check()


@runs_kernels
@pytest.mark.parametrize("m", [1, 3, 16])
def test_split_sums_are_the_same_in_every_run_and_leave_their_counters_at_zero(m: int, device: str) -> None:
    split = problem(m, 20, 300, device, zero_point=True, bias=True, num_warps=1, iterations=1, split=3)
    assert split.counter is None
    first = split.run()
    counter = split.counter
    again = split.run()
    assert split.counter is counter
    assert torch.equal(first, again)
    split.check()


@runs_kernels
@pytest.mark.parametrize("m", [1, 8, 16])
def test_infinities_and_nan_stay_in_their_rows(m: int, device: str) -> None:
    case = problem(m, 20, 130, device, zero_point=True)
    clean = case.run()
    case.x[0, 3] = float("inf")
    case.x[m - 1, 129] = float("nan")
    case.check()
    spoilt = case.run()
    assert torch.equal(spoilt[1 : m - 1], clean[1 : m - 1])
    assert spoilt[m - 1].isnan().all()


@runs_kernels
def test_a_row_does_not_depend_on_the_others(device: str) -> None:
    case = problem(16, 40, 300, device)
    together = case.run()
    for m in (9, 13):
        assert torch.equal(dataclasses.replace(case, x=case.x[:m]).run(), together[:m])


def machine_code(
    m: int, n: int, k: int, dtype: torch.dtype, target: Target, *, zero_point: bool = False
) -> CompiledObject:
    """Compile what is chosen for a product."""
    prepared = prepare_decode(m, n, k, k, dtype == torch.bfloat16, target)
    launch = PreparedLaunch.of(prepared, torch.device("meta"))

    def tensor(dtype: torch.dtype, is_present: bool = True) -> torch.Tensor | None:
        return torch.empty(1, dtype=dtype, device="meta") if is_present else None

    is_split = prepared.n_counters > 0
    return compile_launch(
        launch.describe(
            tensor(dtype),
            tensor(dtype),
            tensor(torch.int32),
            tensor(torch.float32),
            tensor(torch.float32, zero_point),
            tensor(dtype, zero_point),
            tensor(torch.float32, is_split),
            tensor(torch.int32, is_split),
        ),
        target,
    )


@pytest.mark.tested_triton
@pytest.mark.compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 11_008, 4096), (8, 4096, 11_008), (16, 11_008, 4096)])
def test_no_operand_passes_through_shared_memory_or_another_lane(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    # What the layout is for, and what depends on the insides of the compiler.
    listing = opcodes_of(machine_code(m, n, k, dtype, H200))
    last = max(index for index, opcode in enumerate(listing) if opcode.startswith("HMMA"))
    before = Counter(opcode.split(".")[0] for opcode in listing[:last])
    assert {*before}.isdisjoint({"LDS", "STS", "LDSM", "STSM", "SHFL", "LDL", "STL"})
    # The weight: 16 bytes at a time, first to leave the cache. Moves would be of operands not where they belong.
    weight_loads = [opcode for opcode in listing if opcode.startswith("LDG") and ".EF" in opcode]
    assert weight_loads
    assert {"128"} == {opcode.split(".")[-1] for opcode in weight_loads}
    assert before["MOV"] < 0.1 * before["HMMA"]


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("m", [1, 8, 16])
def test_zero_points_cost_no_exchange_between_lanes_while_the_weight_is_read(m: int, dtype: torch.dtype) -> None:
    listing = opcodes_of(machine_code(m, 11_008, 4096, dtype, H200, zero_point=True))
    last = max(index for index, opcode in enumerate(listing) if opcode.startswith("LDG") and ".EF" in opcode)
    before = {opcode.split(".")[0] for opcode in listing[:last]}
    assert before.isdisjoint({"LDS", "STS", "LDSM", "STSM", "SHFL", "LDL", "STL"})


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("m", "target"), [(1, "sm_80"), (8, "gfx942"), (16, "sm_80"), (16, "sm_90"), (16, "gfx942")])
def test_zero_points_and_biases_spill_nothing(m: int, target: str, dtype: torch.dtype) -> None:
    resources = inspect(machine_code(m, 11_008, 4096, dtype, COMPILE_TARGETS[target], zero_point=True))
    assert resources.spill_bytes == 0
    # Three programs of four warps fit a multiprocessor's registers.
    if target == "sm_90":
        assert resources.registers <= 168
    assert resources.instructions["ld.global.v4"]
    assert resources.instructions["v_mfma" if target == "gfx942" else "mma.sync"]


targets = st.sampled_from(list(COMPILE_TARGETS.values()))


@given(
    m=st.integers(1, DECODE_ROWS),
    n=st.integers(1, 2**18),
    k=st.integers(1, 2**18),
    is_bfloat16=st.booleans(),
    target=targets,
)
def test_the_launch_covers_the_weight(m: int, n: int, k: int, is_bfloat16: bool, target: Target) -> None:
    config = decode_config(m, n, k, is_bfloat16, target)
    n_groups = -(-k // 128)
    share = config.num_warps * config.steps * config.iterations
    assert share * config.split >= n_groups
    # No program has nothing to do.
    assert share * (config.split - 1) < n_groups
    assert config.block_m == (16 if m > 8 or target.backend == "hip" else 1 if m == 1 else 8)
    assert 1 <= config.ahead <= config.steps
    assert config.tiles in (1, 2)
    assert config.num_warps in (1, 2, 4)
    assert 1 <= config.split <= 16
    assert config.dependent_launch == (target.name in ("sm_90", "sm_100"))
    prepared = prepare_decode(m, n, k, k, is_bfloat16, target)
    n_programs, split, _ = prepared.grid
    assert (n_programs - 1) * 16 * config.tiles < n <= n_programs * 16 * config.tiles
    assert split == config.split
    assert prepared.n_counters == (n_programs if split > 1 else 0)
    assert prepared.partial_elements == prepared.n_counters * split * 16 * config.tiles * config.block_m


@pytest.mark.parametrize(
    ("m", "n", "k", "want"),
    [
        (1, 11_008, 4096, (1, 4, 8, 1, 1)),
        (1, 4096, 11_008, (1, 4, 8, 3, 1)),
        (1, 28_672, 8192, (1, 4, 8, 2, 1)),
        (8, 11_008, 4096, (1, 4, 8, 1, 1)),
        (16, 11_008, 4096, (2, 4, 8, 1, 1)),
        (16, 4096, 11_008, (2, 4, 8, 1, 3)),
        (16, 28_672, 8192, (2, 4, 16, 1, 1)),
    ],
)
def test_choices_on_an_h200(m: int, n: int, k: int, want: tuple[int, ...]) -> None:
    config = decode_config(m, n, k, False, H200)
    assert (config.tiles, config.num_warps, config.steps, config.iterations, config.split) == want


def test_programs_of_two_tiles_share_the_registers_of_a_multiprocessor() -> None:
    def most_registers(m: int, n: int, k: int = 8192) -> int | None:
        return decode_config(m, n, k, False, H200).most_registers

    # 344 programs of 4 warps, on 132 multiprocessors with 65 536 registers each.
    assert most_registers(16, 11_008) == 168
    assert 3 * 168 * 4 * 32 <= 65_536
    # 896: no more than four at a time.
    assert most_registers(16, 28_672) == 128
    assert most_registers(16, 57_344) == 128
    assert most_registers(8, 28_672) is None
    # Two warps have as many each as they like.
    assert most_registers(16, 28_672, 200) is None


def opcodes_of(compiled: CompiledObject) -> list[str]:
    """The opcodes of a cubin, in order."""
    listing = disassemble(compiled.binary)
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", listing, re.MULTILINE)
