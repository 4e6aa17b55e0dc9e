"""Tensors that kernels read through descriptors."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tk_kernel_core.aot import compile_launch
from tk_kernel_core.launch import DescriptorArgument, Kernel, PreparedLaunch, planning
from tk_kernel_core.targets import COMPILE_TARGETS

sys.path.append(str(Path(__file__).parent))

BLOCK = (16, 32)


def prepare(device: str, y_block: tuple[int, int] = BLOCK) -> PreparedLaunch:
    constexprs = {"BLOCK_M": BLOCK[0], "BLOCK_N": BLOCK[1]}
    blocks = {"x": BLOCK, "y": y_block}
    kernel = Kernel("sample_kernels", "add_blocks_kernel")
    return PreparedLaunch(kernel, (1, 1, 1), (), constexprs, torch.device(device), blocks, num_warps=4)


def check(device: str) -> None:
    out = torch.empty(BLOCK, device=device)
    launch = prepare(device)
    bias = torch.randn(BLOCK[1], device=device)
    # Another x at every call; both smaller than a block, one with gaps between its rows.
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(9, 64, generator=generator).to(device)[:, :20]
        y = torch.randn(3, 40, generator=generator).to(device)
        launch(out, x, bias, y)
        want = bias.repeat(BLOCK[0], 1)
        want[:9, :20] += x
        want[:3] += y[:, :32]
        assert torch.equal(out, want)


@pytest.mark.interpreter
def test_what_lies_beyond_a_tensor_is_zero() -> None:
    check("cpu")


@pytest.mark.interpreter
def test_a_single_row_or_column_may_have_any_stride() -> None:
    out, bias = torch.empty(BLOCK), torch.zeros(BLOCK[1])
    x, y = torch.randn(64).as_strided((1, 20), (3, 1)), torch.randn(64).as_strided((9, 1), (4, 7))
    prepare("cpu")(out, x, bias, y)
    want = torch.zeros(BLOCK)
    want[:1, :20] += x
    want[:9, :1] += y
    assert torch.equal(out, want)


@pytest.mark.gpu
def test_what_lies_beyond_a_tensor_is_zero_on_a_gpu() -> None:
    check("cuda:0")


@pytest.mark.compiler
@pytest.mark.parametrize("name", sorted(COMPILE_TARGETS))
def test_a_launch_is_described_and_compiled_without_a_gpu(name: str) -> None:
    target = COMPILE_TARGETS[name]
    out, x, y = (torch.empty(BLOCK, device="meta") for _ in range(3))
    bias = torch.empty(BLOCK[1], device="meta")
    with planning(target) as launches:
        prepare("meta")(out, x, bias, y)
    (launch,) = launches
    arguments = dict(launch.arguments)
    assert arguments["x"] == arguments["y"] == DescriptorArgument("float32", BLOCK)
    assembly = compile_launch(launch, target).assembly
    assert ("cp.async.bulk.tensor.2d" in assembly) == target.is_hopper_or_later


@pytest.mark.compiler
def test_another_block_is_another_specialisation() -> None:
    out, x, y = (torch.empty(BLOCK, device="meta") for _ in range(3))
    tensors = out, x, torch.empty(BLOCK[1], device="meta"), y
    with planning(COMPILE_TARGETS["sm_90"]) as launches:
        prepare("meta")(*tensors)
        prepare("meta", (BLOCK[0], 2 * BLOCK[1]))(*tensors)
    one, other = launches
    assert one != other
    compile_launch(one, COMPILE_TARGETS["sm_90"])
    with pytest.raises(RuntimeError, match="does not compile"):
        compile_launch(other, COMPILE_TARGETS["sm_90"])
