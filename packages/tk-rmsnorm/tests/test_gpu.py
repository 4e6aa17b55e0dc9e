"""What only a GPU can show: streams, devices, graphs, sizes beyond 2^31, the direct launch."""

import subprocess
import sys

import pytest
import torch

from tk_kernel_core import launch
from tk_rmsnorm import fused_add_rmsnorm, fused_add_rmsnorm_, rmsnorm, rmsnorm_torch
from tk_rmsnorm._plans import rmsnorm_backward

pytestmark = pytest.mark.gpu


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


@pytest.mark.large_memory(24)
@pytest.mark.parametrize(("rows", "hidden_size"), [(2**23 + 16, 256), (2**19 + 8, 4096)])
def test_more_than_two_to_the_31_elements(rows: int, hidden_size: int) -> None:
    x = torch.zeros(rows, hidden_size, dtype=torch.bfloat16, device="cuda")
    boundary = 2**31 // hidden_size
    marked = [boundary - 1, boundary, rows - 1]
    x[marked] = 1
    weight = torch.ones(hidden_size, dtype=torch.bfloat16, device="cuda")
    y = rmsnorm(x, weight)
    assert bool((y[marked] == 1).all())
    assert float(y.float().sum()) == len(marked) * hidden_size
    del y
    y, total = fused_add_rmsnorm(x, x, weight)
    assert bool((y[marked] == 1).all())
    assert bool((total[marked] == 2).all())
    assert int(torch.count_nonzero(total)) == len(marked) * hidden_size
    del y, total
    dx, dweight = rmsnorm_backward(x, x, x, weight, eps=1e-6, weight_offset=0.0, casting="fp32")
    # dy is along x, so only the further gradient x is left.
    torch.testing.assert_close(dx[marked], x[marked], atol=1e-2, rtol=0)
    assert bool((dweight.float() == len(marked)).all())


@pytest.mark.large_memory(8)
def test_a_short_tensor_with_a_huge_stride() -> None:
    buffer = torch.zeros(2**31 + 64, dtype=torch.bfloat16, device="cuda")
    x = buffer.as_strided((3, 64), (2**30, 1))
    x.copy_(random(3, 64))
    assert torch.equal(rmsnorm(x), rmsnorm(x.contiguous()))
    want = fused_add_rmsnorm(x.contiguous(), x.contiguous())
    residual = x.contiguous()
    fused_add_rmsnorm_(x, residual)
    assert torch.equal(x, want[0])


def test_results_follow_the_current_stream() -> None:
    stream = torch.cuda.Stream()
    x = random(512, 4096)
    rmsnorm(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(3.0)
        y = rmsnorm(x)
    stream.synchronize()
    assert bool((y == 1).all())


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for _ in range(3):
        x, weight = random(8, 256).to("cuda:1"), random(256).to("cuda:1")
        y, total = fused_add_rmsnorm(x, x, weight)
        assert y.device == total.device == torch.device("cuda:1")
        torch.testing.assert_close(y, rmsnorm_torch(x + x, weight), atol=5e-2, rtol=2e-2)
        assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="weight must be on the device of x, cuda:1, got cuda:0"):
        rmsnorm(x, random(256))


def test_graph_replays_on_new_contents() -> None:
    x, residual, weight = random(33, 4096), random(33, 4096), random(4096)
    fused_add_rmsnorm_(x.clone(), residual.clone(), weight)
    rmsnorm(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused_add_rmsnorm_(x, residual, weight)
        y = rmsnorm(x, weight)
    for _ in range(3):
        new_x, new_residual = random(33, 4096), random(33, 4096)
        x.copy_(new_x)
        residual.copy_(new_residual)
        graph.replay()
        want = fused_add_rmsnorm(new_x, new_residual, weight)
        assert torch.equal(x, want[0])
        assert torch.equal(residual, want[1])
        assert torch.equal(y, rmsnorm(want[0], weight))


def test_a_chain_of_dependent_launches_sees_every_write() -> None:
    x, weight = random(64, 4096), torch.ones(4096, dtype=torch.bfloat16, device="cuda")
    want = x
    for _ in range(50):
        want = rmsnorm_torch(want, weight)
    got = x
    for _ in range(50):
        got = rmsnorm(got, weight)
    torch.testing.assert_close(got, want, atol=4e-2, rtol=2e-2)
    # The same through buffers that are written again and again, against launches one at a time.
    base, residual = x.clone(), torch.zeros_like(x)
    slow_base, slow_residual = x.clone(), torch.zeros_like(x)
    for _ in range(50):
        fused_add_rmsnorm_(base, residual, weight)
    for _ in range(50):
        fused_add_rmsnorm_(slow_base, slow_residual, weight)
        torch.cuda.synchronize()
    assert torch.equal(base, slow_base)
    assert torch.equal(residual, slow_residual)


COLD_CAPTURE = """
import torch
from tk_rmsnorm import rmsnorm
x = torch.randn(4, 4096, device="cuda")
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        rmsnorm(x)
except RuntimeError as error:
    assert "make one call with the same shapes and dtypes before the capture" in str(error), error
else:
    raise SystemExit("captured cold")
want = torch.nn.functional.rms_norm(x, (4096,), None, 1e-6)
torch.testing.assert_close(rmsnorm(x), want)
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    rmsnorm(x[:2])
print("fine")
"""

FIRST_CALL = """
import torch
from tk_rmsnorm import fused_add_rmsnorm, fused_add_rmsnorm_
torch.manual_seed(0)
x, residual, weight = (torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(3))
weight = weight[0]
first = x.clone(), residual.clone()
fused_add_rmsnorm_(*first, weight)
second = x.clone(), residual.clone()
fused_add_rmsnorm_(*second, weight)
functional = fused_add_rmsnorm(x, residual, weight)
for a, b, c in zip(first, second, functional):
    assert torch.equal(a, b) and torch.equal(a, c)
print("fine")
"""

FORK = """
import os, torch, tk_rmsnorm
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    y = tk_rmsnorm.rmsnorm(torch.ones(2, 64, device="cuda"))
    os._exit(0 if bool((y > 0.99).all()) else 1)
assert os.waitpid(child, 0)[1] == 0
print("fine")
"""


@pytest.mark.parametrize("script", [COLD_CAPTURE, FIRST_CALL, FORK], ids=["cold capture", "first call", "fork"])
def test_in_a_fresh_process(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr


def test_the_direct_launch_is_taken_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(5, 4096), random(4096)
    want = rmsnorm(x, weight)

    def refuse(*_: object) -> None:
        raise AssertionError("went through Triton's own launch")

    monkeypatch.setattr(launch.PreparedLaunch, "_launch_by_triton", refuse)
    assert torch.equal(rmsnorm(x, weight), want)
    # Another address, the same alignment.
    assert torch.equal(rmsnorm(x.clone(), weight.clone()), want)


def test_a_profiler_hook_sees_every_launch() -> None:
    from triton import knobs

    x = random(5, 4096)
    rmsnorm(x)
    seen: list[str] = []

    def hook(metadata: object) -> None:
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        rmsnorm(x)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    rmsnorm(x)
    assert seen == ["rmsnorm_forward_kernel"]


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()

    def layer(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, total = fused_add_rmsnorm(x, residual, weight)
        return (y * 2).relu() + total

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    weight = random(4096)
    for tokens in (1, 7, 512, 0):
        x, residual = random(tokens, 4096), random(tokens, 4096)
        torch.testing.assert_close(compiled(x, residual, weight), layer(x, residual, weight), atol=2e-2, rtol=2e-2)
