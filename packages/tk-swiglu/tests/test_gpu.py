"""What only a GPU can show: streams, devices, graphs, sizes beyond 2^31, the direct launch."""

import itertools
import subprocess
import sys

import pytest
import torch

from tk_kernel_core import launch
from tk_swiglu import swiglu_fused, swiglu_packed, swiglu_torch, swiglu_with_bias
from tk_swiglu._operators import swiglu_backward

pytestmark = pytest.mark.gpu

PACKINGS = list(itertools.product(("concat", "interleaved"), ("gate_first", "up_first")))
GPT_OSS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def zeros_but_for(rows: int, width: int, marked: list[int]) -> torch.Tensor:
    values = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    values[marked] = random(len(marked), width)
    return values


@pytest.mark.large_memory(24)
def test_more_than_two_to_the_30_rows() -> None:
    # One step of all programs together leads beyond what 32 bits hold.
    rows = 2**30 + 40
    marked = [0, 2**30 - 1, 2**30, rows - 1]
    x = zeros_but_for(rows, 2, marked)
    dy = torch.ones(rows, 1, dtype=torch.bfloat16, device="cuda")
    form = ("concat", True, 1.0, 0.0, None, False)
    dx, *_ = swiglu_backward(dy, x, None, None, None, *form)
    want, *_ = swiglu_backward(dy[marked], x[marked], None, None, None, *form)
    assert torch.equal(dx[marked], want)
    # Where gate and up are 0, so are the gradients.
    assert int(torch.count_nonzero(dx)) == int(torch.count_nonzero(want))


@pytest.mark.large_memory(32)
@pytest.mark.parametrize("contiguous", [True, False], ids=["contiguous", "strided"])
@pytest.mark.parametrize(("rows", "width"), [(524_800, 4096), (2**23 + 16, 256)])
def test_more_than_two_to_the_31_elements(rows: int, width: int, contiguous: bool) -> None:
    boundary = 2**31 // width
    marked = [boundary - 1, boundary, rows - 1]
    padding = 0 if contiguous else 8
    gate = zeros_but_for(rows, width + padding, marked)[:, :width]
    up = zeros_but_for(rows, width + padding, marked)[:, :width]
    y = swiglu_fused(gate, up)
    want = swiglu_fused(gate[marked], up[marked])
    assert torch.equal(y[marked], want)
    assert int(torch.count_nonzero(y)) == int(torch.count_nonzero(want))
    swiglu_fused(gate, up, out=y)
    assert torch.equal(y[marked], want)
    # Its own result serves as the incoming gradient.
    dgate, dup, *_ = swiglu_backward(y, gate, up, None, None, "separate", True, 1.0, 0.0, None, False)
    few = swiglu_backward(want, gate[marked], up[marked], None, None, "separate", True, 1.0, 0.0, None, False)
    del y
    for whole, part in ((dgate, few[0]), (dup, few[1])):
        assert torch.equal(whole[marked], part)
        assert int(torch.count_nonzero(whole)) == int(torch.count_nonzero(part))


@pytest.mark.large_memory(32)
@pytest.mark.parametrize(("layout", "order"), PACKINGS)
def test_more_than_two_to_the_31_packed_elements(layout: str, order: str) -> None:
    rows, width = 524_800, 2048
    boundary = 2**31 // (2 * width)
    marked = [boundary - 1, boundary, rows - 1]
    form = {"layout": layout, "order": order}
    x, bias = zeros_but_for(rows, 2 * width, marked), random(2 * width)
    y = swiglu_packed(x, **form)
    want = swiglu_packed(x[marked], **form)
    assert torch.equal(y[marked], want)
    assert int(torch.count_nonzero(y)) == int(torch.count_nonzero(want))
    y = swiglu_packed(x, bias, **form)
    assert torch.equal(y[marked], swiglu_packed(x[marked], bias, **form))
    assert torch.equal(y[:2], swiglu_packed(x[:2], bias, **form))
    arguments = None, bias, None, layout, order == "gate_first", 1.0, 0.0, None, True
    dy = zeros_but_for(rows, width, marked)
    dx, _, dbias, _ = swiglu_backward(dy, x, *arguments)
    few, _, few_dbias, _ = swiglu_backward(dy[marked], x[marked], *arguments)
    assert torch.equal(dx[marked], few)
    assert int(torch.count_nonzero(dx)) == int(torch.count_nonzero(few))
    torch.testing.assert_close(dbias, few_dbias, rtol=2e-2, atol=1e-2)


@pytest.mark.large_memory(12)
def test_a_short_tensor_with_a_huge_stride() -> None:
    buffer = torch.zeros(2**31 + 64, dtype=torch.bfloat16, device="cuda")
    gate = buffer.as_strided((3, 64), (2**30, 1))
    gate.copy_(random(3, 64))
    up = random(3, 64)
    want = swiglu_fused(gate.contiguous(), up)
    assert torch.equal(swiglu_fused(gate, up), want)
    assert torch.equal(swiglu_fused(up, gate), swiglu_fused(up, gate.contiguous()))
    for layout, order in PACKINGS:
        form = {"layout": layout, "order": order}
        assert torch.equal(swiglu_packed(gate, **form), swiglu_packed(gate.contiguous(), **form))
    few = swiglu_backward(up, gate.contiguous(), up, None, None, "separate", True, 1.0, 0.0, None, False)
    got = swiglu_backward(up, gate, up, None, None, "separate", True, 1.0, 0.0, None, False)
    assert torch.equal(torch.stack(got[:2]), torch.stack(few[:2]))
    swiglu_fused(gate, up, out=gate)
    assert torch.equal(gate, want)
    assert int(torch.count_nonzero(buffer)) == int(torch.count_nonzero(want))


def test_results_follow_the_current_stream() -> None:
    stream = torch.cuda.Stream()
    gate, up = random(512, 4096), torch.ones(512, 4096, dtype=torch.bfloat16, device="cuda")
    swiglu_fused(gate, up)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        gate.fill_(100.0)
        y = swiglu_fused(gate, up)
    stream.synchronize()
    assert bool((y == 100).all())


def test_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for _ in range(3):
        gate, up, bias = random(8, 256).to("cuda:1"), random(8, 256).to("cuda:1"), random(256).to("cuda:1")
        y = swiglu_with_bias(gate, up, bias, bias, **GPT_OSS)
        assert y.device == torch.device("cuda:1")
        torch.testing.assert_close(y, swiglu_torch(gate, up, bias, bias, **GPT_OSS))
        assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="up must be on the device of gate, cuda:1, got cuda:0"):
        swiglu_fused(gate, random(8, 256))


def test_graph_replays_on_new_contents() -> None:
    gate, up, bias, x = random(33, 4096), random(33, 4096), random(4096), random(33, 8192)
    swiglu_with_bias(gate, up, bias, bias, **GPT_OSS)
    swiglu_packed(x, layout="interleaved", out=torch.empty_like(gate))
    swiglu_packed(x.clone(), out=x.clone()[:, :4096])
    halves = x.clone()
    swiglu_packed(halves, out=halves[:, 4096:])
    graph, given = torch.cuda.CUDAGraph(), torch.empty_like(gate)
    with torch.cuda.graph(graph):
        y = swiglu_with_bias(gate, up, bias, bias, **GPT_OSS)
        swiglu_packed(x, layout="interleaved", out=given)
        swiglu_packed(x, out=x[:, 4096:])
    for _ in range(3):
        new_gate, new_up, new_x = random(33, 4096), random(33, 4096), random(33, 8192)
        gate.copy_(new_gate)
        up.copy_(new_up)
        x.copy_(new_x)
        graph.replay()
        assert torch.equal(y, swiglu_with_bias(new_gate, new_up, bias, bias, **GPT_OSS))
        assert torch.equal(given, swiglu_packed(new_x, layout="interleaved"))
        assert torch.equal(x[:, 4096:], swiglu_packed(new_x))
        assert torch.equal(x[:, :4096], new_x[:, :4096])


def test_gradients_in_a_graph_replay_on_new_contents() -> None:
    x, bias, dy = random(700, 512), random(512), random(700, 256)
    arguments = None, bias, None, "interleaved", True, *GPT_OSS.values(), True
    swiglu_backward(dy, x, *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dx, _, dbias, _ = swiglu_backward(dy, x, *arguments)
    for _ in range(3):
        new_x, new_dy = random(700, 512), random(700, 256)
        x.copy_(new_x)
        dy.copy_(new_dy)
        graph.replay()
        want = swiglu_backward(new_dy, new_x, *arguments)
        assert torch.equal(dx, want[0])
        assert torch.equal(dbias, want[2])


def test_a_chain_of_dependent_launches_sees_every_write() -> None:
    up = 1.5 + random(64, 4096).abs()
    want = gate = random(64, 4096).abs()
    steps = []
    for _ in range(50):
        want = swiglu_fused(want, up, limit=4.0)
        torch.cuda.synchronize()
        steps.append(want)
    got = gate
    for _ in range(50):
        got = swiglu_fused(got, up, limit=4.0)
    assert torch.equal(got, want)
    # The same through memory that is written again and again.
    base, half = gate.clone(), torch.cat((gate, up), -1)
    for _ in range(50):
        swiglu_fused(base, up, limit=4.0, out=base)
        swiglu_packed(half, limit=4.0, out=half[:, :4096])
    assert torch.equal(base, want)
    assert torch.equal(half[:, :4096], want)
    torch.testing.assert_close(steps[1], swiglu_torch(steps[0], up, limit=4.0))


COLD_CAPTURE = """
import torch
from tk_swiglu import swiglu_fused
gate, up = torch.randn(2, 4, 4096, device="cuda")
graph = torch.cuda.CUDAGraph()
try:
    with torch.cuda.graph(graph):
        swiglu_fused(gate, up)
except RuntimeError as error:
    assert "make one call with the same shapes and dtypes before the capture" in str(error), error
else:
    raise SystemExit("captured cold")
torch.testing.assert_close(swiglu_fused(gate, up), torch.nn.functional.silu(gate) * up)
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    swiglu_fused(gate, up)
print("fine")
"""

FIRST_CALL = """
import torch
from tk_swiglu import swiglu_fused, swiglu_packed
torch.manual_seed(0)
x = torch.randn(64, 8192, device="cuda", dtype=torch.bfloat16)
first, second = x.clone(), x.clone()
swiglu_packed(first, out=first[:, :4096])
swiglu_packed(second, out=second[:, :4096])
assert torch.equal(first, second)
assert torch.equal(first[:, :4096], swiglu_packed(x))
assert torch.equal(first[:, :4096], swiglu_fused(*x.chunk(2, -1)))
print("fine")
"""

FORK = """
import os, torch, tk_swiglu
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    gate = torch.full((2, 64), 50.0, device="cuda")
    os._exit(0 if bool((tk_swiglu.swiglu_fused(gate, gate) == 2500).all()) else 1)
assert os.waitpid(child, 0)[1] == 0
print("fine")
"""


@pytest.mark.parametrize("script", [COLD_CAPTURE, FIRST_CALL, FORK], ids=["cold capture", "first call", "fork"])
def test_in_a_fresh_process(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr


def test_the_direct_launch_is_taken_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, up, bias, x = random(5, 4096), random(5, 4096), random(4096), random(5, 8192)
    out = torch.empty_like(gate)

    def results(*tensors: torch.Tensor) -> list[torch.Tensor]:
        gate, up, bias, x = tensors
        swiglu_fused(gate, up, out=out)
        return [out.clone(), swiglu_fused(gate, up), swiglu_with_bias(gate, up, bias, bias), swiglu_packed(x)]

    want = results(gate, up, bias, x)

    def refuse(*_: object) -> None:
        raise AssertionError("went through Triton's own launch")

    monkeypatch.setattr(launch.PreparedLaunch, "_launch_by_triton", refuse)
    assert torch.equal(torch.stack(results(gate, up, bias, x)), torch.stack(want))
    # Another address, the same alignment.
    copies = [tensor.clone() for tensor in (gate, up, bias, x)]
    assert torch.equal(torch.stack(results(*copies)), torch.stack(want))


def test_a_profiler_hook_sees_every_launch() -> None:
    from triton import knobs

    gate, up = random(5, 4096), random(5, 4096)
    swiglu_fused(gate, up)
    seen: list[str] = []

    def hook(metadata: object) -> None:
        seen.append(metadata.get()["name"])

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        swiglu_fused(gate, up)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    swiglu_fused(gate, up)
    assert seen == ["swiglu_forward_kernel"]


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()

    def layer(gate: torch.Tensor, up: torch.Tensor, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        y = swiglu_with_bias(gate, up, bias, bias, **GPT_OSS)
        return (y * 2).relu() + swiglu_packed(x + 1, layout="interleaved")

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    bias = random(4096)
    for tokens in (1, 7, 512, 0):
        tensors = random(tokens, 4096), random(tokens, 4096), random(tokens, 8192), bias
        torch.testing.assert_close(compiled(*tensors), layer(*tensors), atol=2e-2, rtol=2e-2)


def test_compiled_by_inductor_in_place() -> None:
    torch._dynamo.reset()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return swiglu_packed(x, out=x[:, :512]) * 2

    compiled = torch.compile(layer, fullgraph=True)
    x = random(7, 1024)
    eager_x = x.clone()
    torch.testing.assert_close(compiled(x), layer(eager_x))
    assert torch.equal(x, eager_x)
