from __future__ import annotations

import dataclasses
import functools
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from triton import knobs

from tk_kernel_core import aot, resources
from tk_kernel_core.aot import compile_launch
from tk_kernel_core.resources import INSTRUCTION_FAMILIES, MATRIX_FAMILIES, KernelResources, inspect, report_resources
from tk_kernel_core.spec import Case, Cost, KernelSpec, Tolerance
from tk_kernel_core.targets import COMPILE_TARGETS

sys.path.append(str(Path(__file__).parent))

from sample_kernels import copy_launch, dot_launch, meta, prepare, spilling_launch

if TYPE_CHECKING:
    from tk_kernel_core.launch import KernelLaunch

NVIDIA, AMD = ["sm_80", "sm_90", "sm_100"], ["gfx942", "gfx950"]
ALL = NVIDIA + AMD


@functools.cache
def inspected(launch: KernelLaunch, target: str) -> KernelResources:
    return inspect(compile_launch(launch, COMPILE_TARGETS[target]))


def matrix_families(found: KernelResources) -> set[str]:
    return set(found.instructions) & set(MATRIX_FAMILIES)


@pytest.mark.parametrize("target", ALL)
def test_aligned_copy_moves_16_bytes_at_a_time(target: str) -> None:
    found = inspected(copy_launch(), target)
    # 4096 half-precision values by four warps.
    per_thread = 4096 * 2 // (4 * COMPILE_TARGETS[target].warp_size)
    assert found.instructions == {"ld.global.v4": per_thread // 16, "st.global.v4": per_thread // 16}
    assert (found.kernel, found.target, found.num_warps) == ("copy_kernel", target, 4)
    assert (found.spill_bytes, found.stack_bytes, found.shared_bytes) == (0, 0, 0)
    assert 8 <= found.registers <= 64
    assert found.instructions_total > 2 * per_thread // 16
    assert found.code_bytes > 4 * found.instructions_total


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize(
    ("dtype", "width"), [(torch.float16, "narrow"), (torch.int8, "narrow"), (torch.float32, "v1"), (torch.int64, "v2")]
)
def test_unaligned_copy_moves_one_element_at_a_time(target: str, dtype: torch.dtype, width: str) -> None:
    found = inspected(copy_launch(aligned=False, dtype=dtype), target)
    count = 4096 // (4 * COMPILE_TARGETS[target].warp_size)
    assert found.instructions == {f"ld.global.{width}": count, f"st.global.{width}": count}


@pytest.mark.parametrize("target", ALL)
def test_ragged_copy_is_wide_only_where_whole_vectors_are_in_or_out(target: str) -> None:
    def launch(n_elements: int) -> KernelLaunch:
        tensors = meta(n_elements, torch.bfloat16), meta(n_elements, torch.bfloat16)
        return prepare("ragged_copy_kernel", n_elements, BLOCK=4096).describe(*tensors)

    assert {"ld.global.v4", "st.global.v4"} <= set(inspected(launch(4000), target).instructions)
    ragged = inspected(launch(4001), target).instructions
    assert {"ld.global.narrow", "st.global.narrow"} <= set(ragged)
    assert not {"ld.global.v4", "st.global.v4"} & set(ragged)


@pytest.mark.tested_triton
@pytest.mark.parametrize(
    ("target", "unit"),
    [("sm_80", "mma.sync"), ("sm_90", "wgmma"), ("sm_100", "tcgen05"), ("gfx942", "v_mfma"), ("gfx950", "v_mfma")],
)
def test_matrix_units_by_operand_type(target: str, unit: str) -> None:
    assert matrix_families(inspected(dot_launch(torch.float16), target)) == {unit}
    assert matrix_families(inspected(dot_launch(torch.bfloat16), target)) == {unit}
    integer = matrix_families(inspected(dot_launch(torch.int8), target))
    # This Triton multiplies integers on sm_100 by the older instruction.
    assert integer == {"mma.sync.int8" if target == "sm_100" else f"{unit}.int8"}


@pytest.mark.tested_triton
@pytest.mark.parametrize("dtype", [torch.float16, torch.int8])
@pytest.mark.parametrize(
    ("target", "left"),
    [("sm_80", set()), ("sm_90", set()), ("sm_100", {"tcgen05.fp32"}), ("gfx942", {"v_mfma.fp32"})],
)
def test_operands_cast_to_fp32_lose_the_matrix_units(target: str, left: set[str], dtype: torch.dtype) -> None:
    found = inspected(dot_launch(dtype, in_fp32=True), target)
    assert matrix_families(found) == left
    assert left or found.instructions["ffma"] > 100


def test_pipelined_loads_go_straight_to_shared_memory() -> None:
    found = inspected(dot_launch(torch.float16), "sm_80")
    assert found.instructions["cp.async.v4"] > 0
    assert found.instructions["ld.shared"] > 0
    # Two or more stages of a 64 × 64 tile of each operand.
    assert found.shared_bytes >= 2 * 2 * 64 * 64 * 2


@pytest.mark.parametrize("target", NVIDIA)
def test_spills_are_those_that_ptxas_reports(
    target: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(aot, "_compiled", {})
    monkeypatch.setattr(knobs.compilation, "always_compile", True)
    monkeypatch.setattr(knobs.nvidia, "dump_ptxas_log", True)
    capfd.readouterr()
    found = inspect(compile_launch(spilling_launch(), COMPILE_TARGETS[target]))
    log = capfd.readouterr().out
    stack, stores, loads = map(
        int, re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()
    )
    assert found.spill_bytes == stores + loads > 0
    assert found.stack_bytes == stack > 0
    assert f"Used {found.registers} registers" in log
    assert found.instructions["st.local"] > 0
    assert found.instructions["ld.local"] > 0


@pytest.mark.parametrize("target", AMD)
def test_spills_to_scratch_on_amd(target: str) -> None:
    # Eight wavefronts per SIMD leave 64 registers to each thread.
    compiled = compile_launch(spilling_launch(waves_per_eu=8), COMPILE_TARGETS[target])
    found = inspect(compiled)
    words = sum(
        {"": 1, "x2": 2, "x3": 3, "x4": 4}[width]
        for width in re.findall(r"^\tscratch_(?:load|store)_dword(x[234])? ", compiled.assembly, re.MULTILINE)
    )
    assert found.spill_bytes == 4 * words > 0
    assert found.stack_bytes > 0
    assert found.registers == 64
    assert found.instructions["st.local"] > 0


@pytest.mark.parametrize("target", AMD)
def test_registers_on_amd_include_accumulation_registers(target: str) -> None:
    compiled = compile_launch(dot_launch(torch.float16), COMPILE_TARGETS[target])
    accumulation = int(re.search(r"\.agpr_count:\s+(\d+)", compiled.assembly)[1])
    if accumulation == 0:
        pytest.skip("this Triton compiles the kernel without accumulation registers")
    assert inspect(compiled).registers > accumulation


@pytest.mark.parametrize("target", ALL)
def test_reductions_and_atomics(target: str) -> None:
    launch = prepare("atomic_sum_kernel", BLOCK=1024).describe(meta(1, torch.float32), meta(1024, torch.float32))
    found = inspected(launch, target)
    assert {"atom", "shfl", "bar", "ld.shared", "st.shared"} <= set(found.instructions)
    assert found.instructions["atom"] == 1
    assert found.shared_bytes == 16


@pytest.mark.parametrize("target", ALL)
def test_every_counted_family_is_a_known_one(target: str) -> None:
    for launch in (copy_launch(), dot_launch(torch.float16), dot_launch(torch.int8)):
        found = inspected(launch, target)
        assert set(found.instructions) <= INSTRUCTION_FAMILIES
        assert list(found.instructions) == sorted(found.instructions)


@pytest.mark.parametrize(
    ("opcode", "family", "width"),
    [
        ("LDG.E.ENL2.256.CONSTANT", "ld.global.v8", 32),
        ("LDG.E.128.CONSTANT", "ld.global.v4", 16),
        ("LDG.E.U16", "ld.global.narrow", 2),
        ("STG.E.64", "st.global.v2", 8),
        ("LDL.LU.64", "ld.local", 8),
        ("STL", "st.local", 4),
        ("HMMA.16816.F32.BF16", "mma.sync", 0),
        ("HMMA.1688.F32.TF32", "mma.sync.fp32", 0),
        ("HGMMA.64x128x8.F32.TF32", "wgmma.fp32", 0),
        ("QGMMA.64x128x32.F32.E4M3.E4M3", "wgmma.fp8", 0),
        ("HFMA2.MMA", None, 0),
        ("REDUX", None, 0),
        ("RED.E.ADD.F32.FTZ.RN.STRONG.GPU", "atom", 0),
        ("UTMALDG.2D", "tma", 0),
        ("UTMASTG.2D", "st.tma", 0),
    ],
)
def test_sass_families(opcode: str, family: str | None, width: int) -> None:
    assert resources._classify_sass(opcode) == (family, width)


@pytest.mark.parametrize(
    ("opcode", "family", "width"),
    [
        ("buffer_load_dwordx4", "ld.global.v4", 16),
        ("global_load_dwordx3", "ld.global.v3", 12),
        ("flat_load_dwordx2", "ld.global.v2", 8),
        ("global_store_short_d16_hi", "st.global.narrow", 2),
        ("buffer_load_ubyte", "ld.global.narrow", 1),
        ("global_load_lds_dwordx4", "cp.async.v4", 16),
        ("scratch_store_dwordx4", "st.local", 16),
        ("buffer_atomic_pk_add_bf16", "atom", 0),
        ("v_mfma_f32_32x32x8_f16", "v_mfma", 0),
        ("v_mfma_f32_32x32x16_bf16", "v_mfma", 0),
        ("v_mfma_f32_16x16x8_xf32", "v_mfma.fp32", 0),
        ("v_mfma_f32_16x16x32_fp8_bf8", "v_mfma.fp8", 0),
        ("v_mfma_scale_f32_32x32x64_f8f6f4", "v_mfma.fp8", 0),
        ("v_smfmac_i32_16x16x64_i8", "v_mfma.int8", 0),
        ("v_mfma_f64_16x16x4_f64", None, 0),
        ("v_add_f32_dpp", "shfl", 0),
        ("s_load_dwordx4", None, 0),
    ],
)
def test_gcn_families(opcode: str, family: str | None, width: int) -> None:
    assert resources._classify_gcn(opcode, False) == (family, width)


def test_amd_load_into_shared_memory() -> None:
    assert resources._classify_gcn("buffer_load_dwordx4", True) == ("cp.async.v4", 16)


def test_output_that_is_not_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = compile_launch(copy_launch(), COMPILE_TARGETS["sm_90"])
    with pytest.raises(RuntimeError, match="cuobjdump failed with code"):
        inspect(dataclasses.replace(cuda, binary=b"not a cubin"))
    monkeypatch.setattr(resources, "disassemble", lambda binary: "another format")
    with pytest.raises(RuntimeError, match="output of cuobjdump for the kernel copy_kernel is not understood"):
        inspect(cuda)
    hip = compile_launch(copy_launch(), COMPILE_TARGETS["gfx942"])
    with pytest.raises(RuntimeError, match="assembly of the kernel copy_kernel for gfx942 is not understood"):
        inspect(dataclasses.replace(hip, assembly=hip.assembly.replace(".vgpr_count", ".vector_registers")))


def make_inputs(case: Case, device: str, seed: int) -> dict[str, Any]:
    n = int(case.params["n"])  # type: ignore[arg-type]
    return {"x": torch.empty(n, device=device, dtype=torch.float16), "out": torch.empty(n, device=device).half()}


def run(inputs: dict[str, Any]) -> torch.Tensor:
    n = inputs["x"].numel()
    prepare("ragged_copy_kernel", n, BLOCK=1024, grid=(-(-n // 1024), 1, 1))(inputs["out"], inputs["x"])
    if n > 4096:
        # The same machine code once more, and another specialisation of the same kernel.
        prepare("ragged_copy_kernel", n, BLOCK=1024)(inputs["out"], inputs["x"])
        prepare("ragged_copy_kernel", n, BLOCK=2048)(inputs["out"], inputs["x"])
    return inputs["out"]


SPEC = KernelSpec(
    name="tk-sample",
    summary="Copies.",
    cases={name: Case(name, {"n": n}) for name, n in {"short": 1000, "medium": 2008, "long": 8008}.items()},
    make_inputs=make_inputs,
    run=run,
    reference=lambda inputs: inputs["x"],
    cost=lambda case: Cost(0, 0, 0),
    tolerance=lambda case: Tolerance(0, 0),
    shrink=lambda case: case,
)


def test_report_of_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    inspections = []
    monkeypatch.setattr(resources, "inspect", lambda compiled: inspections.append(compiled) or inspect(compiled))
    announced: list[str] = []
    targets = [COMPILE_TARGETS["gfx942"], COMPILE_TARGETS["sm_80"]]
    reports = report_resources(SPEC, targets, progress=announced.append)

    assert [(report.case, report.target) for report in reports] == [
        (case, target) for case in ("short", "medium", "long") for target in ("gfx942", "sm_80")
    ]
    assert announced == ["tk-sample short", "tk-sample medium", "tk-sample long"]
    assert {report.package for report in reports} == {"tk-sample"}
    assert [len(report.kernels) for report in reports] == [1, 1, 1, 1, 2, 2]
    assert all(kernel.target == report.target for report in reports for kernel in report.kernels)
    # All three cases share one specialisation; the last has another besides.
    assert reports[0].kernels[0] == reports[2].kernels[0] == reports[4].kernels[0] != reports[4].kernels[1]
    assert len(inspections) == 2 * len(targets)


def test_report_of_some_cases_on_all_targets() -> None:
    reports = report_resources(SPEC, cases=[SPEC.cases["short"]])
    assert [report.target for report in reports] == list(COMPILE_TARGETS)
