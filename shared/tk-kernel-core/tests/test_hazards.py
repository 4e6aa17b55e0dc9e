"""Machine code that overwrites what a wgmma in flight still reads, made up and really compiled."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tk_kernel_core.aot import compile_launch
from tk_kernel_core.hazards import overwritten_operands
from tk_kernel_core.resources import inspect
from tk_kernel_core.targets import COMPILE_TARGETS

sys.path.append(str(Path(__file__).parent))

from sample_kernels import computed_operand_launch, dot_launch

WGMMA = "HGMMA.64x64x16.F32 R24, R56, gdesc[UR12], R24"


def listing(*instructions: str) -> str:
    """Return instructions as cuobjdump prints them, at the addresses 0x0000, 0x0010 and so on."""
    return "".join(
        f"        /*{16 * index:04x}*/                   {instruction} ;        /* 0x000000000000 */\n"
        for index, instruction in enumerate(instructions)
    )


@pytest.mark.parametrize(
    "writes",
    [
        "MOV R56, R1",
        "HADD2 R59, R20, -1032, -1032",
        "@P0 LOP3.LUT R58, R13, 0xffff, RZ, 0xc0, !PT",
        "LDS.128 R54, [R2+0x400]",
        "LDG.E.64 R55, desc[UR4][R2.64]",
        "IMAD.WIDE.U32 R55, R3, 0x4, R4",
        "LDSM.16.M88.4 R53, [R2]",
        "SHFL.BFLY PT, R57, R4, 0x1, 0x1f",
    ],
)
def test_a_write_to_a_register_in_flight_is_found(writes: str) -> None:
    for issued in ((f"{WGMMA}, gsb0",), (WGMMA,), (f"{WGMMA}, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x1")):
        found = overwritten_operands(listing(*issued, writes, "EXIT"))
        assert found == [writes.removeprefix("@P0 ")]


@pytest.mark.parametrize(
    "harmless",
    [
        "MOV R55, R56",
        "MOV R60, R56",
        "LDS.128 R52, [R56]",
        "STG.E.128 desc[UR4][R56.64], R56",
        "ISETP.NE.AND P0, PT, R56, RZ, PT",
        "UMOV UR56, UR4",
        "R2UR UR4, R56",
        "HGMMA.64x64x16.F32 R24, R60, gdesc[UR12], R24",
    ],
)
def test_other_instructions_are_not(harmless: str) -> None:
    assert overwritten_operands(listing(f"{WGMMA}, gsb0", harmless, "EXIT")) == []


def test_an_operand_in_shared_memory_takes_no_registers() -> None:
    wgmma = "HGMMA.64x64x16.F32 R24, gdesc[UR12], R24, gsb0"
    assert overwritten_operands(listing(wgmma, "MOV R0, R1", "MOV R12, R1", "EXIT")) == []


def test_a_wait_frees_the_registers_of_all_but_the_latest_groups() -> None:
    second = WGMMA.replace("R56", "R60") + ", gsb0"
    issued = (f"{WGMMA}, gsb0", second, "WARPGROUP.DEPBAR.LE gsb0, 0x1")
    assert overwritten_operands(listing(*issued, "MOV R56, R1", "EXIT")) == []
    assert overwritten_operands(listing(*issued, "MOV R60, R1", "EXIT")) == ["MOV R60, R1"]
    assert overwritten_operands(listing(*issued[:2], "WARPGROUP.DEPBAR.LE gsb0, 0x0", "MOV R60, R1", "EXIT")) == []


def test_instructions_of_one_group_are_in_flight_until_the_group_is() -> None:
    second = WGMMA.replace("R56", "R60") + ", gsb0"
    issued = (WGMMA, second, "WARPGROUP.DEPBAR.LE gsb0, 0x1")
    assert overwritten_operands(listing(*issued, "MOV R56, R1", "EXIT")) == ["MOV R56, R1"]


def test_the_next_turn_of_a_loop_counts() -> None:
    body = ("MOV R56, R1", f"{WGMMA}, gsb0", "@!P0 BRA 0x0", "WARPGROUP.DEPBAR.LE gsb0, 0x0", "MOV R57, R1", "EXIT")
    assert overwritten_operands(listing(*body)) == ["MOV R56, R1"]
    waiting = (*body[:2], "WARPGROUP.DEPBAR.LE gsb0, 0x0", "@!P0 BRA 0x0", "EXIT")
    assert overwritten_operands(listing(*waiting)) == []


@pytest.mark.parametrize("branch", ["@P0 BRA 0x40", "@!UP1 BRA 0x40", "BRA.U UP0, 0x40", "BRA.DIV UR4, 0x40"])
def test_both_sides_of_a_branch_are_followed_and_nothing_behind_an_exit(branch: str) -> None:
    code = (branch, f"{WGMMA}, gsb0", "BRA 0x50", "MOV R56, R1", "EXIT", "MOV R57, R1", "EXIT", "MOV R58, R1")
    assert overwritten_operands(listing(*code)) == ["MOV R57, R1"]


@pytest.mark.tested_triton
@pytest.mark.compiler
@pytest.mark.parametrize("block_m", [32, 128])
def test_a_bad_build_is_found_and_a_good_one_is_not(block_m: int) -> None:
    bad = inspect(compile_launch(computed_operand_launch(block_m, chained=True), COMPILE_TARGETS["sm_90"]))
    good = inspect(compile_launch(computed_operand_launch(block_m, chained=False), COMPILE_TARGETS["sm_90"]))
    assert bad.instructions["wgmma"] == good.instructions["wgmma"] == 8
    assert bad.overwritten_operands > 0
    assert good.overwritten_operands == 0


@pytest.mark.compiler
@pytest.mark.parametrize("target", list(COMPILE_TARGETS))
def test_operands_from_memory_are_no_hazard(target: str) -> None:
    import torch

    assert inspect(compile_launch(dot_launch(torch.float16), COMPILE_TARGETS[target])).overwritten_operands == 0
