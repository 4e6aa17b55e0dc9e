"""What compiled kernels need of a GPU: registers, spills, shared memory and instructions. No GPU is involved.

Instructions are counted by family, under one name wherever NVIDIA and AMD have the same thing:

* `ld.global.*`, `st.global.*`: device memory, by bytes per thread: `v8` (32), `v4` (16), `v3` (12), `v2` (8),
  `v1` (4) and `narrow` (fewer). `cp.async.*`: the same, from device memory straight into shared memory.
  `tma`, `st.tma`: whole blocks, read and written by the tensor memory accelerator.
* `ld.shared`, `st.shared`: shared memory (LDS). `ld.local`, `st.local`: a thread's own memory (scratch), where
  registers are spilled to.
* `mma.sync`, `wgmma`, `tcgen05`, `v_mfma`: matrix units on 16-bit floats. With `.int8`, `.fp8` and `.fp32`
  (TF32 included) on operands of those types.
* `ffma`: fp32 multiply-add outside the matrix units. `dp4a`: products of four 8-bit integers outside them.
* `atom`: atomics on device memory. `shfl`: exchange within a warp. `bar`: barriers within a program.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from tk_kernel_core.aot import CompiledObject, compile_launch, specialization_key
from tk_kernel_core.hazards import overwritten_operands
from tk_kernel_core.spec import Case, KernelSpec
from tk_kernel_core.targets import COMPILE_TARGETS, Target

if TYPE_CHECKING:
    from tk_kernel_core.bench import Progress

_WIDTHS = {32: "v8", 16: "v4", 12: "v3", 8: "v2", 4: "v1", 2: "narrow", 1: "narrow"}

MATRIX_FAMILIES = tuple(
    unit + operands
    for unit in ("mma.sync", "wgmma", "tcgen05", "v_mfma")
    for operands in ("", ".int8", ".fp8", ".fp32")
)

INSTRUCTION_FAMILIES = frozenset(
    (
        *(f"{memory}.{width}" for memory in ("ld.global", "st.global", "cp.async") for width in _WIDTHS.values()),
        *("tma", "st.tma", "ld.shared", "st.shared", "ld.local", "st.local"),
        *MATRIX_FAMILIES,
        *("ffma", "dp4a", "atom", "shfl", "bar"),
    )
)
"""Every family that instructions are counted under."""


class KernelResources(BaseModel):
    """What one compiled kernel needs.

    Attributes:
        kernel: Name of the kernel function.
        target: Architecture, for example `sm_90`.
        registers: Registers per thread; on AMD vector registers, accumulation registers included.
        spill_bytes: Bytes per thread that the machine code's instructions store to and load from local memory,
            every instruction counted once. For NVIDIA that equals the spill stores plus spill loads of ptxas.
            AMD's spills into accumulation registers never reach memory and do not count.
        stack_bytes: Local memory (scratch) per thread.
        shared_bytes: Shared memory (LDS) per program that the launch asks for.
        num_warps: Warps or wavefronts per program.
        code_bytes: Size of the machine code.
        instructions_total: Number of instructions, padding excluded.
        instructions: Number of instructions of each family that occurs, in alphabetical order.
        overwritten_operands: Number of instructions that overwrite what a wgmma may still read. Any is a fault of the
            compiler, and the kernel's results are wrong; see `tk_kernel_core.hazards`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kernel: str
    target: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    code_bytes: int
    instructions_total: int
    instructions: dict[str, int]
    overwritten_operands: int = 0


class CaseResources(BaseModel):
    """The kernels that one case launches on one target.

    Attributes:
        package: Distribution that provides the kernels.
        case: Name of the case.
        target: Architecture, for example `sm_90`.
        kernels: The distinct kernels in the order of their first launch. One that is launched in two
            specialisations occurs twice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    package: str
    case: str
    target: str
    kernels: tuple[KernelResources, ...]


def report_resources(
    spec: KernelSpec,
    targets: Iterable[Target] = tuple(COMPILE_TARGETS.values()),
    cases: Iterable[Case] | None = None,
    progress: Progress | None = None,
) -> list[CaseResources]:
    """Compile what cases of a package launch, and report what the kernels need.

    Args:
        spec: The kernel package.
        targets: What to compile for.
        cases: Cases of the spec; all by default.
        progress: Is told about every case before it is compiled.

    Returns:
        One report per case and target, in the order of the cases, then of the targets.

    Raises:
        TypeError, ValueError, RuntimeError: As `compile_launch` and `inspect`.
    """
    targets = tuple(targets)
    inspected: dict[Hashable, Future[KernelResources]] = {}
    launched: list[tuple[Case, Target, list[Hashable]]] = []
    # Compiling stays on this thread, see `aot`; the disassembler is a process of its own and runs meanwhile.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for case in spec.cases.values() if cases is None else cases:
            if progress is not None:
                progress(f"{spec.name} {case.name}")
            for target in targets:
                keys = []
                for launch in spec.launches(case, target):
                    key = specialization_key(launch, target)
                    if key not in inspected:
                        inspected[key] = pool.submit(inspect, compile_launch(launch, target))
                    keys.append(key)
                launched.append((case, target, keys))
    return [
        CaseResources(
            package=spec.name,
            case=case.name,
            target=target.name,
            kernels=tuple(inspected[key].result() for key in dict.fromkeys(keys)),
        )
        for case, target, keys in launched
    ]


def inspect(compiled: CompiledObject) -> KernelResources:
    """Read what a compiled kernel needs from its machine code.

    Args:
        compiled: A kernel from `compile_launch`.

    Raises:
        RuntimeError: The CUDA tools that Triton brings along are missing, or their output is not understood.
    """
    facts = _inspect_nvidia(compiled) if compiled.target.backend == "cuda" else _inspect_amd(compiled)
    return KernelResources(
        kernel=compiled.kernel,
        target=compiled.target.name,
        shared_bytes=compiled.shared_bytes,
        num_warps=compiled.num_warps,
        **facts,
    )


def _inspect_nvidia(compiled: CompiledObject) -> dict[str, Any]:
    listing = disassemble(compiled.binary)
    usage = re.findall(r"REG:(\d+) STACK:(\d+)", listing)
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", listing, re.MULTILINE)
    if not usage or not opcodes:
        raise RuntimeError(f"the output of cuobjdump for the kernel {compiled.kernel} is not understood")
    counts, spill_bytes = _count(map(_classify_sass, opcodes))
    # The machine code for tcgen05 does not name its operands' type, which the PTX does.
    kinds = {"f16": "tcgen05", "i8": "tcgen05.int8", "f8f6f4": "tcgen05.fp8", "tf32": "tcgen05.fp32"}
    counts.update(
        kinds[kind] for kind in re.findall(r"tcgen05\.mma\.\S*kind::(\w+)", compiled.assembly) if kind in kinds
    )
    return {
        "registers": max(int(registers) for registers, _ in usage),
        "spill_bytes": spill_bytes,
        "stack_bytes": max(int(stack) for _, stack in usage),
        # Every instruction since sm_70 takes 16 bytes.
        "code_bytes": 16 * len(opcodes),
        "instructions_total": len(opcodes) - opcodes.count("NOP"),
        "instructions": dict(sorted(counts.items())),
        "overwritten_operands": len(overwritten_operands(listing)),
    }


def _inspect_amd(compiled: CompiledObject) -> dict[str, Any]:
    lines = re.findall(r"^\t([a-z]\w*)(.*)$", compiled.assembly, re.MULTILINE)
    code_bytes = sum(map(int, re.findall(r"; codeLenInByte = (\d+)", compiled.assembly)))

    def largest(name: str) -> int:
        return max(map(int, re.findall(rf"^[ -]+\.{name}:\s+(\d+)$", compiled.assembly, re.MULTILINE)), default=-1)

    registers, stack_bytes = largest("vgpr_count"), largest("private_segment_fixed_size")
    if not lines or not code_bytes or registers < 0 or stack_bytes < 0:
        raise RuntimeError(f"the assembly of the kernel {compiled.kernel} for {compiled.target.name} is not understood")
    counts, spill_bytes = _count(
        _classify_gcn(opcode, re.search(r"\blds\b", operands) is not None) for opcode, operands in lines
    )
    return {
        "registers": registers,
        "spill_bytes": spill_bytes,
        "stack_bytes": stack_bytes,
        "code_bytes": code_bytes,
        "instructions_total": len(lines),
        "instructions": dict(sorted(counts.items())),
    }


def _count(classified: Iterator[tuple[str | None, int]]) -> tuple[Counter[str], int]:
    """Count instructions by family, and add up the bytes that go to and from local memory."""
    counts: Counter[str] = Counter()
    spill_bytes = 0
    for family, width in classified:
        if family is not None:
            counts[family] += 1
        if family in {"ld.local", "st.local"}:
            spill_bytes += width
    return counts, spill_bytes


def disassemble(binary: bytes) -> str:
    """Return cuobjdump's resource usage and machine code of a cubin."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"cuobjdump failed with code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


_SASS_MEMORY = {"LDG": "ld.global", "STG": "st.global", "LDGSTS": "cp.async", "LDL": "ld.local", "STL": "st.local"}
_SASS_FAMILIES = {
    **dict.fromkeys(("UTMALDG", "UBLKCP"), "tma"),
    **dict.fromkeys(("UTMASTG", "UTMAREDG", "UBLKRED"), "st.tma"),
    **dict.fromkeys(("LDS", "LDSM"), "ld.shared"),
    **dict.fromkeys(("STS", "STSM"), "st.shared"),
    **dict.fromkeys(("ATOM", "ATOMG", "RED", "REDG"), "atom"),
    **dict.fromkeys(("FFMA", "FFMA2"), "ffma"),
    "IDP": "dp4a",
    "SHFL": "shfl",
    "BAR": "bar",
    "HMMA": "mma.sync",
    "IMMA": "mma.sync.int8",
    "QMMA": "mma.sync.fp8",
    "HGMMA": "wgmma",
    "IGMMA": "wgmma.int8",
    "QGMMA": "wgmma.fp8",
}
_SASS_WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}


@functools.cache
def _classify_sass(opcode: str) -> tuple[str | None, int]:
    """Return the family of a SASS opcode and the bytes that it moves per thread, 0 where that is not asked for."""
    name, *modifiers = opcode.split(".")
    if memory := _SASS_MEMORY.get(name):
        width = next((_SASS_WIDTHS[modifier] for modifier in modifiers if modifier in _SASS_WIDTHS), 4)
        return (memory if memory.endswith("local") else f"{memory}.{_WIDTHS[width]}"), width
    family = _SASS_FAMILIES.get(name)
    if family in {"mma.sync", "wgmma"} and "TF32" in modifiers:
        family += ".fp32"
    return family, 0


_GCN_FAMILIES = (
    (r".*_dpp$|ds_b?permute_|ds_swizzle_|v_permlane", "shfl"),
    (r"ds_(read|load)", "ld.shared"),
    (r"ds_(write|store)", "st.shared"),
    (r"(global|buffer|flat)_atomic_", "atom"),
    (r"v_s?mfmac?_.*i8$", "v_mfma.int8"),
    (r"v_s?mfmac?_.*(fp8|bf8|f8f6f4)", "v_mfma.fp8"),
    (r"v_s?mfmac?_.*_x?f32$", "v_mfma.fp32"),
    (r"v_s?mfmac?_.*f16(_1k)?$", "v_mfma"),
    (r"v_(pk_)?(fma|fmac|mad|mac)_f32", "ffma"),
    (r"v_dot4c?_", "dp4a"),
    (r"s_barrier", "bar"),
)
_GCN_WIDTHS = (
    (r"dwordx4|b128", 16),
    (r"dwordx3|b96", 12),
    (r"dwordx2|b64", 8),
    (r"dword|b32", 4),
    (r"[us]?byte|[uib]8", 1),
    (r"[us]?short|[uib]16|d16", 2),
)


@functools.cache
def _classify_gcn(opcode: str, into_lds: bool) -> tuple[str | None, int]:
    """Return the family of an AMD instruction and the bytes that it moves per thread, 0 where that is not asked for."""
    access = re.match(r"(global|buffer|flat|scratch)_(load|store)_(lds_)?(\w+)", opcode)
    if access:
        space, direction, lds, size = access.groups()
        width = next(width for pattern, width in _GCN_WIDTHS if re.match(pattern, size))
        prefix = "ld" if direction == "load" else "st"
        if space == "scratch":
            return f"{prefix}.local", width
        memory = "cp.async" if lds or into_lds else f"{prefix}.global"
        return f"{memory}.{_WIDTHS[width]}", width
    return next((family for pattern, family in _GCN_FAMILIES if re.match(pattern, opcode)), None), 0
