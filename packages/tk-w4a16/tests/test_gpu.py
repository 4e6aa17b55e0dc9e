"""What only a GPU can show: every path at full size, streams, devices, graphs, sizes beyond 2^31, the direct launch."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from tk_kernel_core import launch
from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.spec import Tolerance
from tk_testkit.close import assert_close
from tk_w4a16 import PackedInt4Weight, dequantize_int4, explain, w4a16_gemm, w4a16_linear

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
HALF = torch.float16
# Rows that take the kernels for one row, for 8 and for 16, for dozens, and the dequantised weight.
ROWS = (1, 7, 16, 30, 64, 200, 300)
each_number_of_rows = pytest.mark.parametrize("m", ROWS)
# The same in the plain layout: tiles dequantised on the way, and all of the weight before.
each_path = pytest.mark.parametrize(
    ("name", "m"), [*(("linear", m) for m in ROWS), ("act-order", 3), ("act-order", 300), ("gemm", 5), ("gemm", 400)]
)


@pytest.fixture(autouse=True)
def sums_in_fp32() -> Iterator[None]:
    """Keep PyTorch from letting cuBLAS add up parts of a sum in 16 bits."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction
    settings.allow_fp16_reduced_precision_reduction = settings.allow_bf16_reduced_precision_reduction = False
    yield
    settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction = before


def random(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, device="cuda")


@dataclass
class Product:
    """A product with one weight: the function of the activations, and the weight in fp64, [N, K]."""

    call: Callable[[Tensor], Tensor]
    dense: Tensor

    def check(self, x: Tensor, y: Tensor, *, is_weight_rounded: bool = True) -> None:
        check(x, y, self.dense, is_weight_rounded=is_weight_rounded)


def check(x: Tensor, y: Tensor, dense: Tensor, *, is_weight_rounded: bool = True) -> None:
    """Hold a result against fp64: it may err by its own rounding, by fp32 sums and, if so, the weight's rounding."""
    want = x.double() @ dense.T
    terms = float((x.double().abs() @ dense.abs().T).max())
    squares = float((x.double().square() @ dense.square().T).max())
    summed = rounding_tolerance(torch.float32, x.shape[1], magnitude=terms).absolute
    # Errors of half a unit, and independent: their sum is as long as the root of the sum of their squares.
    weight_error = 2 * torch.finfo(x.dtype).eps * math.sqrt(squares) if is_weight_rounded else 0.0
    rounded = rounding_tolerance(x.dtype, 1)
    assert_close(y, want, Tolerance(rounded.absolute + summed + weight_error, rounded.relative))


def product(
    name: str,
    n: int = 1000,
    k: int = 2120,
    group_size: int = 128,
    dtype: torch.dtype = HALF,
    symmetric: bool = False,
) -> Product:
    """A product whose results are about as large as the activations; by default with ragged tiles and groups."""
    groups = 1 if group_size == -1 else -(-k // group_size)
    packed = words(k // 8, n)
    scales = ((torch.rand(groups, n, device="cuda") + 0.5) / (5 * math.sqrt(k))).to(dtype)
    if name == "act-order":
        index = torch.randperm(k, device="cuda") // max(1, -(-k // groups))
        weight = PackedInt4Weight.from_gptq(
            packed,
            words(groups, -(-n // 8)),
            scales,
            index,
            group_size=group_size,
            checkpoint_format="gptq_v2",
            symmetric=symmetric,
        )
        return Product(lambda x: w4a16_linear(x, weight), weight.dequantize(torch.float64))
    zeros = None if symmetric else torch.randint(0, 16, (groups, n), device="cuda").to(dtype)
    dense = dequantize_int4(packed, scales.double(), zeros, group_size).T
    if name == "gemm":
        return Product(lambda x: w4a16_gemm(x, packed, scales, zeros, group_size), dense)
    prepared = PackedInt4Weight.from_int4(packed, scales, zeros, group_size)
    return Product(lambda x: w4a16_linear(x, prepared), dense)


@each_number_of_rows
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_path_errs_by_its_roundings_alone(m: int, group_size: int, dtype: torch.dtype) -> None:
    x = random(m, 2120, dtype=dtype)
    for name, symmetric in (("linear", False), ("linear" if group_size == -1 else "act-order", True)):
        one = product(name, group_size=group_size, dtype=dtype, symmetric=symmetric)
        one.check(x, one.call(x), is_weight_rounded=m > 16)


@each_number_of_rows
@pytest.mark.parametrize(("n", "k"), [(11_008, 4096), (4096, 11_008)])
def test_layers_of_a_model_are_right(n: int, k: int, m: int) -> None:
    for symmetric in (False, True):
        one = product("linear", n, k, symmetric=symmetric)
        x = random(m, k)
        one.check(x, one.call(x), is_weight_rounded=m > 16)


@pytest.mark.parametrize("group_size", [32, 128, -1])
def test_prompts_go_through_wide_layers_in_one_launch(group_size: int) -> None:
    one, x = product("linear", 17_000, 1160, group_size), random(700, 1160)
    assert "w4a16_middle_kernel" in explain("w4a16_linear", 700, 17_000, 1160, group_size=group_size)
    y = one.call(x)
    one.check(x, y)
    assert torch.equal(one.call(x), y)


@each_path
def test_activations_and_codes_at_any_address(name: str, m: int) -> None:
    k = 1024
    one = product(name, 512, k)
    aligned, buffer = random(m, k), random(m * k + 1)
    one.check(aligned, one.call(aligned))
    odd = buffer[1:].view(m, k)
    one.check(odd, one.call(odd))
    if name != "linear":
        return
    weight = PackedInt4Weight.from_int4(words(k // 8, 512), random(8, 512).abs(), None, 128)
    moved = torch.empty(weight.codes.numel() + 1, dtype=torch.int32, device="cuda")[1:].view(weight.codes.shape)
    moved.copy_(weight.codes)
    other = PackedInt4Weight(moved, weight.scales, None, None, 128, 512, k)
    assert torch.equal(w4a16_linear(aligned, other), w4a16_linear(aligned, weight))


@each_path
def test_fifty_runs_give_the_same_bits(name: str, m: int) -> None:
    # Few output features, which several programs share the columns of; and so many that programs take turns, and 200
    # tokens are a round of tall tiles.
    for n, k in ((256, 4096), (9216, 4096)):
        one = product(name, n, k)
        x = random(m, k)
        results = [one.call(x) for _ in range(50)]
        assert all(torch.equal(result, results[0]) for result in results)
        one.check(x, results[0])


@each_path
def test_graph_replays_on_new_contents(name: str, m: int) -> None:
    k = 4096
    first, second = product(name, k, k), product(name, 256, k)
    x = random(m, k)
    second.call(first.call(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        between = first.call(x)
        # Of few output features, whose counters every replay needs as the first did.
        results = [second.call(between) for _ in range(3)]
    for _ in range(3):
        x.copy_(random(m, k))
        graph.replay()
        first.check(x, between)
        second.check(between, results[0])
        assert all(torch.equal(result, results[0]) for result in results)


@each_path
def test_graphs_may_run_at_the_same_time(name: str, m: int) -> None:
    one, k = product(name, 256, 4096), 4096
    inputs = [random(m, k) for _ in range(2)]
    one.call(inputs[0])
    graphs, results, streams = [torch.cuda.CUDAGraph() for _ in inputs], [], [torch.cuda.Stream() for _ in inputs]
    for graph, stream, x in zip(graphs, streams, inputs, strict=True):
        # PyTorch gives cuBLAS, which multiplies many rows, one workspace for all graphs captured on a stream.
        with torch.cuda.graph(graph, stream=stream):
            results.append([one.call(x) for _ in range(8)])
    torch.cuda.synchronize()
    for _ in range(20):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for x, mine in zip(inputs, results, strict=True):
        one.check(x, mine[0])
        assert all(torch.equal(result, mine[0]) for result in mine)


@each_path
def test_a_chain_of_dependent_launches_sees_every_write(name: str, m: int) -> None:
    one = product(name, 2048, 2048)
    quick = slow = random(m, 2048)
    for _ in range(15):
        # Into memory that the launch before may still read.
        quick = one.call(quick)
    for _ in range(15):
        slow = one.call(slow)
        torch.cuda.synchronize()
    assert bool(quick.isfinite().all())
    assert torch.equal(quick, slow)


@each_path
def test_results_follow_the_current_stream(name: str, m: int) -> None:
    k, n = 2048, 512
    packed = torch.full((k // 8, n), 0x55555555, dtype=torch.int32, device="cuda")
    scales = torch.full((k // 128, n), -1.0, dtype=HALF, device="cuda")
    index = torch.arange(k, device="cuda").flip(0) // 128
    weight = PackedInt4Weight.from_gptq(
        packed, None, scales, index if name == "act-order" else None, group_size=128, symmetric=True
    )

    def call(x: Tensor) -> Tensor:
        return w4a16_gemm(x, packed, scales, None) if name == "gemm" else w4a16_linear(x, weight)

    stream, x = torch.cuda.Stream(), random(m, k)
    call(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(0.5)
        y = call(x)
    stream.synchronize()
    # -(5 - 8) * 0.5, 2048 times.
    assert bool((y == 3072).all())


@each_path
def test_another_device_than_the_current_one(name: str, m: int) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with torch.cuda.device(1):
        one, x = product(name, 256, 1024), random(m, 1024)
    for _ in range(3):
        y = one.call(x)
        assert y.device == torch.device("cuda:1")
        one.check(x, y)
        assert torch.cuda.current_device() == 0


@pytest.mark.large_memory(24)
@pytest.mark.parametrize(
    ("n", "k", "rows"),
    # 2^31 words of codes, offsets into which need more than 32 bits; 2^31 weights, and with 256 rows as many results.
    [(2**21 + 64, 8192, (1, 16, 64, 300)), (2**23 + 64, 256, (1, 8, 256))],
)
def test_more_than_two_to_the_31_weights_and_results(n: int, k: int, rows: tuple[int, ...]) -> None:
    codes, groups = words(n // 16, k // 64, 32, 4), k // 128
    scales = (torch.rand(n // 16, groups, 8, 2, device="cuda") + 0.5).to(HALF) / 512
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8, device="cuda")
    weight = PackedInt4Weight(codes, scales, zeros, None, 128, n, k)
    for m in rows:
        x = random(m, k)
        y = w4a16_linear(x, weight)
        for first in (0, n // 2, n - 128, n - 64):
            part = slice(first // 16, first // 16 + 4)
            few = PackedInt4Weight(codes[part], scales[part], zeros[part], None, 128, 64, k)
            check(x, y[:, first : first + 64], few.dequantize(torch.float64), is_weight_rounded=m > 16)
        del y


@pytest.mark.large_memory(24)
def test_more_than_two_to_the_31_words_in_the_plain_layout() -> None:
    n, k = 2**21 + 64, 8192
    packed, scales = words(k // 8, n), (torch.rand(k // 128, n, device="cuda") + 0.5).to(HALF) / 512
    for m in (3, 400):
        x = random(m, k)
        y = w4a16_gemm(x, packed, scales, None)
        for columns in (slice(0, 64), slice(n - 64, n)):
            check(x, y[:, columns], dequantize_int4(packed[:, columns], scales[:, columns].double(), None).T)
        del y


@pytest.mark.large_memory(8)
@each_number_of_rows
def test_rows_with_a_huge_stride(m: int) -> None:
    one = product("linear", 128, 256)
    buffer = torch.zeros(2**31 + 256, dtype=HALF, device="cuda")
    # As far apart as the kernels reach, and further, where a copy is made.
    for stride in (2**24 - 16, 2**31 // max(1, m - 1)):
        if (m - 1) * stride <= 2**31:
            x = buffer.as_strided((m, 256), (stride, 1))
            x.copy_(random(m, 256))
            one.check(x, one.call(x))


SETUP = """
import os, torch
from tk_w4a16 import PackedInt4Weight, w4a16_linear
torch.manual_seed(0)
"""

WEIGHT = """
weight = PackedInt4Weight.from_float(torch.randn(256, 4096, device="cuda", dtype=torch.float16) / 64)
"""

COLD_CAPTURE = """
for m in (1, 8, 64, 300):
    x = torch.randn(m, 4096, device="cuda", dtype=torch.float16)
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            w4a16_linear(x, weight)
    except RuntimeError as error:
        assert "make one call with the same shapes and dtypes before the capture" in str(error), error
    else:
        raise SystemExit("captured cold")
    want = x.float() @ weight.dequantize(torch.float32).T
    torch.testing.assert_close(w4a16_linear(x, weight).float(), want, atol=1e-2, rtol=1e-2)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        w4a16_linear(x, weight)
print("fine")
"""

FIRST_CALL = """
for m in (1, 8, 64, 300):
    x = torch.randn(m, 4096, device="cuda", dtype=torch.float16)
    first, second = w4a16_linear(x, weight), w4a16_linear(x, weight)
    assert torch.equal(first, second), m
print("fine")
"""

FORK = """
assert not torch.cuda.is_initialized()
child = os.fork()
if child == 0:
    weight = PackedInt4Weight.from_float(torch.ones(32, 64, device="cuda"), symmetric=True)
    y = w4a16_linear(torch.ones(2, 64, device="cuda").half(), weight)
    os._exit(0 if bool(((y - 64).abs() < 0.1).all()) else 1)
assert os.waitpid(child, 0)[1] == 0
print("fine")
"""


@pytest.mark.parametrize(
    "script", [SETUP + WEIGHT + COLD_CAPTURE, SETUP + WEIGHT + FIRST_CALL, SETUP + FORK], ids=["cold", "first", "fork"]
)
def test_in_a_fresh_process(script: str) -> None:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "fine", done.stderr


@each_path
def test_the_direct_launch_is_taken_and_right(name: str, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one, x = product(name, 256, 4096), random(m, 4096)
    want = one.call(x)

    def refuse(*_: object) -> None:
        raise AssertionError("went through Triton's own launch")

    monkeypatch.setattr(launch.PreparedLaunch, "_launch_by_triton", refuse)
    assert torch.equal(one.call(x), want)
    # Another address, the same alignment.
    assert torch.equal(one.call(x.clone()), want)


def test_compiled_by_inductor() -> None:
    torch._dynamo.reset()
    weight = PackedInt4Weight.from_float(random(512, 1024) / 32)
    bias = random(512)

    def layer(x: Tensor) -> Tensor:
        return (w4a16_linear(x * 2, weight, bias) + 1).relu()

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for m in (1, 7, 64, 300, 0):
        x = random(m, 1024)
        assert_close(compiled(x), layer(x), rounding_tolerance(HALF, 1))
