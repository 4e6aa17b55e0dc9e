from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget

from tk_kernel_core.aot import compile_launch, specialization_key
from tk_kernel_core.launch import KernelLaunch, TensorArgument
from tk_kernel_core.targets import COMPILE_TARGETS, Target

sys.path.append(str(Path(__file__).parent))

import sample_kernels
from sample_kernels import copy_launch, meta, prepare

TARGETS = list(COMPILE_TARGETS.values())
SM_80, SM_90, GFX942 = (COMPILE_TARGETS[name] for name in ("sm_80", "sm_90", "gfx942"))
ELF = b"\x7fELF"


def ragged_launch(n_elements: int, aligned: bool = True, **options: Any) -> KernelLaunch:
    x, out = meta(4096, torch.bfloat16, aligned), meta(4096, torch.bfloat16)
    return prepare("ragged_copy_kernel", n_elements, BLOCK=2048, options=options).describe(out, x)


@pytest.fixture
def pretended_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make Triton believe in a GPU, which is all that compiling for an ordinary launch needs."""

    def pretend(target: Target) -> None:
        gpu = GPUTarget(target.backend, target.arch, target.warp_size)
        driver = SimpleNamespace(
            get_current_target=lambda: gpu, get_current_device=lambda: target.name, get_current_stream=lambda device: 0
        )
        monkeypatch.setattr(triton.runtime.driver, "_active", driver)

    return pretend


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize(("n_elements", "aligned"), [(4096, True), (4095, True), (1, True), (4096, False)])
def test_compiles_what_an_ordinary_launch_compiles(
    pretended_gpu: Any, target: Target, n_elements: int, aligned: bool
) -> None:
    ours = compile_launch(ragged_launch(n_elements, aligned, num_warps=2), target)

    pretended_gpu(target)
    x = torch.empty(4097, dtype=torch.bfloat16)[0 if aligned else 1 :]
    out = torch.empty(4096, dtype=torch.bfloat16)
    triton_s = sample_kernels.ragged_copy_kernel.warmup(out, x, n_elements, BLOCK=2048, num_warps=2, grid=(1,))

    assert ours.binary == triton_s.kernel
    assert ours.assembly in triton_s.asm.values()
    assert ours.num_warps == 2


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_compiled_object_describes_itself(target: Target) -> None:
    launch = prepare("normalize_kernel", BLOCK=1024, options={"num_warps": 8}).describe(
        meta(1024, torch.float32), meta(1024, torch.float32)
    )
    compiled = compile_launch(launch, target)
    assert compiled.binary.startswith(ELF)
    arch = target.name + ("a" if target.backend == "cuda" and target.is_hopper_or_later else "")
    assert arch in compiled.assembly
    assert "normalize_kernel" in compiled.assembly
    # One partial sum of each of the eight warps.
    assert compiled.shared_bytes == 32
    assert (compiled.target, compiled.kernel, compiled.num_warps) == (target, "normalize_kernel", 8)
    assert compiled.launch == launch


def test_a_missing_tensor_is_left_out_of_the_machine_code() -> None:
    launch = prepare("add_bias_kernel", BLOCK=256)
    x, out = meta(256, torch.float32), meta(256, torch.float32)
    with_bias = compile_launch(launch.describe(out, x, meta(256, torch.float32)), SM_90)
    without = compile_launch(launch.describe(out, x, None), SM_90)
    assert with_bias.assembly.count("ld.global") == 2 * without.assembly.count("ld.global") > 0


def test_launches_that_share_machine_code_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = ragged_launch(3000)
    first = compile_launch(launch, SM_90)
    other = dataclasses.replace(ragged_launch(3001), grid=(7, 1, 1))
    monkeypatch.setattr(triton, "compile", lambda *_, **__: pytest.fail("compiled again"))
    second = compile_launch(other, SM_90)
    assert second.binary is first.binary
    assert (first.launch, second.launch) == (launch, other)


@pytest.mark.parametrize(
    "changes",
    [{"n_elements": 3008}, {"n_elements": 1}, {"n_elements": 2**40 + 8}, {"aligned": False}, {"num_warps": 8}],
    ids=["divisible by 16", "one", "64-bit", "unaligned", "options"],
)
def test_key_tells_specialisations_apart(changes: dict[str, Any]) -> None:
    changed = ragged_launch(**{"n_elements": 3000, **changes})
    assert specialization_key(changed, SM_90) != specialization_key(ragged_launch(3000), SM_90)


def test_key_tells_kernels_constexprs_dtypes_and_targets_apart() -> None:
    x = TensorArgument("float32", aligned=True)
    launch = KernelLaunch(
        "sample_kernels", "copy_kernel", (1, 1, 1), (("out_ptr", x), ("x_ptr", x), ("BLOCK", 1024)), ()
    )
    half = TensorArgument("float16", aligned=True)
    others = [
        dataclasses.replace(launch, kernel="normalize_kernel"),
        dataclasses.replace(launch, arguments=(*launch.arguments[:2], ("BLOCK", 2048))),
        dataclasses.replace(launch, arguments=(("out_ptr", half), *launch.arguments[1:])),
    ]
    keys = {specialization_key(other, SM_90) for other in (launch, *others)} | {specialization_key(launch, SM_80)}
    assert len(keys) == 5


def test_option_that_the_backend_lacks() -> None:
    assert compile_launch(copy_launch(launch_pdl=True), SM_90).binary.startswith(ELF)
    with pytest.raises(ValueError, match=r"copy_kernel is launched for gfx942 with launch_pdl, but Triton's hip"):
        compile_launch(copy_launch(launch_pdl=True), GFX942)


def test_only_jit_functions() -> None:
    launch = dataclasses.replace(copy_launch(), kernel="not_a_kernel")
    with pytest.raises(TypeError, match=r"sample_kernels.not_a_kernel must be a triton.jit function, got function"):
        compile_launch(launch, SM_90)


def test_not_under_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = copy_launch()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match=r"copy_kernel cannot be compiled ahead of time while TRITON_INTERPRET"):
        compile_launch(launch, SM_90)


def test_kernel_that_does_not_compile() -> None:
    launch = prepare("mistyped_kernel", BLOCK=64).describe(meta(64, torch.float32))
    with pytest.raises(RuntimeError, match=r"mistyped_kernel does not compile for sm_90: "):
        compile_launch(launch, SM_90)


def test_more_shared_memory_than_the_target_has() -> None:
    small = dataclasses.replace(SM_90, shared_bytes=16)
    launch = prepare("normalize_kernel", BLOCK=1024, options={"num_warps": 8}).describe(
        meta(1024, torch.float32), meta(1024, torch.float32)
    )
    with pytest.raises(RuntimeError, match=r"normalize_kernel needs 32 bytes of shared memory, but sm_90 has 16"):
        compile_launch(launch, small)
