"""Launches on a GPU: streams, devices, graph capture, and the direct launch against Triton's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from tk_kernel_core.launch import DIRECT_LAUNCH_TRITON_VERSIONS, Kernel, PreparedLaunch, allocator

sys.path.append(str(Path(__file__).parent))

import sample_kernels

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)
BLOCK = 64

COLD_CAPTURE = """
import sys
import torch
from tk_kernel_core.launch import Kernel, PreparedLaunch

launch = PreparedLaunch(Kernel("sample_kernels", "copy_kernel"), (1, 1, 1), (), {"BLOCK": 64}, torch.device("cuda", 0))
out, x = torch.zeros(64, device="cuda"), torch.randn(64, device="cuda")
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        launch(out, x)
except RuntimeError as error:
    assert "make one call with the same shapes and dtypes before the capture" in str(error), error
else:
    raise SystemExit("captured cold")
launch(out, x)
assert torch.equal(out, x)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    launch(out, x)
x.copy_(torch.randn(64, device="cuda"))
assert not torch.equal(out, x)
graph.replay()
assert torch.equal(out, x)
print("fine")
"""


def prepare(kernel: str, *scalars: float, device: torch.device = CUDA, **options: Any) -> PreparedLaunch:
    return PreparedLaunch(
        Kernel("sample_kernels", kernel), (7, 3, 2), scalars, {"BLOCK": BLOCK}, device, num_warps=2, **options
    )


@pytest.fixture
def refused_triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function after which Triton's own launch is an error."""

    def refuse(*_: object) -> None:
        raise AssertionError("went through Triton's own launch")

    return lambda: monkeypatch.setattr(PreparedLaunch, "_launch_by_triton", refuse)


def test_cold_capture_is_refused_and_the_process_goes_on() -> None:
    path = os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", COLD_CAPTURE],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.parametrize("direct", [False, True])
def test_a_warm_launch_is_captured(direct: bool) -> None:
    launch, (out, x) = prepare("copy_kernel"), torch.randn(2, 42 * BLOCK, device="cuda")
    prepare("copy_kernel")(out, x)
    if direct:
        launch(out, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(out, x)
    for _ in range(2):
        x.normal_()
        graph.replay()
        assert torch.equal(out[: 7 * BLOCK], x[: 7 * BLOCK])


@pytest.mark.skipif(
    not triton.__version__.startswith(DIRECT_LAUNCH_TRITON_VERSIONS),
    reason="the direct launch is not taken with this Triton",
)
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("n_elements", [1, 16, 7 * BLOCK - 1])
def test_direct_is_what_triton_launches(n_elements: int, offset: int, refused_triton: Any) -> None:
    x = torch.randn(7 * BLOCK + offset, device="cuda")[offset:]
    want, first, second = (torch.zeros(7 * BLOCK, device="cuda") for _ in range(3))
    sample_kernels.ragged_copy_kernel[(7, 3, 2)](want, x, n_elements, BLOCK=BLOCK, num_warps=2)
    launch = prepare("ragged_copy_kernel", n_elements)
    launch(first, x)
    refused_triton()
    launch(second, x)
    assert torch.equal(want[:n_elements], x[:n_elements])
    assert int(torch.count_nonzero(want[n_elements:])) == 0
    assert torch.equal(first, want)
    assert torch.equal(second, want)


def test_a_misaligned_tensor_after_an_aligned_one() -> None:
    launch = prepare("copy_kernel")
    buffer = torch.randn(7 * BLOCK + 4, dtype=torch.bfloat16, device="cuda")
    for offset in (0, 1, 0, 3, 1, 2):
        x = buffer[offset : offset + 7 * BLOCK]
        out = torch.zeros_like(x)
        launch(out, x)
        assert torch.equal(out, x)


@pytest.mark.parametrize("warm", [False, True])
def test_the_current_stream_is_used(warm: bool) -> None:
    launch, stream = prepare("copy_kernel"), torch.cuda.Stream()
    x, out = torch.zeros(2, 7 * BLOCK, device="cuda")
    prepare("copy_kernel")(out, x)
    if warm:
        launch(out, x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(3.0)
        launch(out, x)
    stream.synchronize()
    assert bool((out == 3).all())


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    device = torch.device("cuda", 1)
    launch, allocate = prepare("copy_kernel", device=device), allocator((7 * BLOCK,), torch.float32, device)
    for _ in range(3):
        x, out = torch.randn(7 * BLOCK, device=device), allocate()
        assert out.device == device
        launch(out, x)
        assert torch.equal(out, x)
        assert torch.cuda.current_device() == 0
    with torch.cuda.device(1):
        x = torch.randn(7 * BLOCK, device=device)
        launch(out, x)
        assert torch.equal(out, x)
