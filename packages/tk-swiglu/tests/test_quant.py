"""Products that are quantised in the kernel, against the product that is quantised by the core's rule."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tk_kernel_core.launch import recording
from tk_kernel_core.layout import next_power_of_two
from tk_kernel_core.quantization import quantize_per_token_torch
from tk_kernel_core.targets import COMPILE_TARGETS
from tk_swiglu import (
    _ops,
    _quant_plans,
    swiglu_fused,
    swiglu_packed,
    swiglu_packed_quant_int8,
    swiglu_quant_int8,
    swiglu_with_bias,
)
from tk_swiglu._launch import QuantConfig, quant_config
from tk_testkit.spec import runs_kernels
from tk_testkit.strategies import assert_guards_intact, guarded_view

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
PACKINGS = list(itertools.product(("concat", "interleaved"), ("gate_first", "up_first")))
GPT_OSS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def assert_same(got: tuple[torch.Tensor, ...], product: torch.Tensor) -> None:
    assert [part.dtype for part in got] == [torch.int8, torch.float32]
    assert all(part.is_contiguous() for part in got)
    torch.testing.assert_close(got, quantize_per_token_torch(product), rtol=0, atol=0, equal_nan=True)


def assert_quantised(gate: torch.Tensor, up: torch.Tensor, *biases: torch.Tensor, **numbers: Any) -> None:
    want = swiglu_with_bias(gate, up, *biases, **numbers) if biases else swiglu_fused(gate, up, **numbers)
    assert_same(swiglu_quant_int8(gate, up, *biases, **numbers), want)


def assert_packed_quantised(x: torch.Tensor, bias: torch.Tensor | None = None, **form: Any) -> None:
    assert_same(swiglu_packed_quant_int8(x, bias, **form), swiglu_packed(x, bias, **form))


@pytest.fixture(params=["one pass", "two passes"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Rows in registers; or, a quarter or less at a time, read twice. With guards around all results."""
    monkeypatch.setattr(_quant_plans, "_PLANS", type(_quant_plans._PLANS)())
    monkeypatch.setattr(_ops, "_RECENT_QUANT", type(_ops._RECENT_QUANT)())
    if request.param == "two passes":

        def in_tiles(width: int, *_: Any) -> QuantConfig:
            return QuantConfig(1, max(16, next_power_of_two(width) // 4), 1, False)

        monkeypatch.setattr(_quant_plans, "quant_config", in_tiles)
    results: list[torch.Tensor] = []

    def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        def allocate() -> torch.Tensor:
            results.append(guarded_view(shape, None, dtype, device=str(device)))
            return results[-1]

        return allocate

    monkeypatch.setattr(_quant_plans, "allocator", guarded)
    yield request.param
    for tensor in results:
        assert_guards_intact(tensor)


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(1, torch.float32), (7, torch.float16), (352, torch.bfloat16), (2731, torch.float16), (2731, torch.float32)],
)
@pytest.mark.usefixtures("passes")
def test_codes_are_those_of_the_product_bit_for_bit(width: int, dtype: torch.dtype, device: str) -> None:
    gate, up = (guarded_view((3, width), (width + 16, 1), dtype, device=device, seed=seed) for seed in (0, 1))
    biases = [guarded_view((width,), (1,), dtype, device=device, seed=seed) for seed in (2, 3)]
    assert_quantised(gate, up)
    assert_quantised(gate, up, *biases, **GPT_OSS)
    for view in (gate, up, *biases):
        assert_guards_intact(view)


@pytest.mark.parametrize(("layout", "order"), PACKINGS)
@pytest.mark.usefixtures("passes")
def test_packed_codes_are_those_of_the_product_bit_for_bit(layout: str, order: str, device: str) -> None:
    form = {"layout": layout, "order": order}
    for width, dtype in ((1, torch.float32), (97, torch.bfloat16)):
        x = guarded_view((2, 3, 2 * width), None, dtype, device=device, offset=1)
        bias = guarded_view((2 * width,), (1,), torch.float32, device=device, seed=1)
        assert_packed_quantised(x, **form)
        assert_packed_quantised(x, bias, **form, **GPT_OSS)
        assert_guards_intact(x)
        assert_guards_intact(bias)


def test_every_pair_of_dtypes(device: str) -> None:
    for dtype, up_dtype in itertools.product(DTYPES, DTYPES):
        gate = random(5, 96, dtype=dtype, device=device)
        up = random(5, 96, dtype=up_dtype, device=device, seed=1)
        assert_quantised(gate, up)
        assert_quantised(gate, up, up[0].half(), gate[0].bfloat16(), **GPT_OSS)


def test_strides_change_nothing(device: str) -> None:
    base = random(12, 400, dtype=torch.float16, device=device)
    for gate, up in (
        (base[0], base[1]),
        (base.t()[:8], base.t()[8:16]),
        (base[:, 3:100], base[:, 200:297]),
        (base[:1].expand(4, 400), base[1:5]),
        (base[:, :96].unflatten(1, (3, 32)), base[:, 96:192].unflatten(1, (3, 32))),
        (base.view(2, 3, 2, 400)[:, ::2, :, :40], base.view(2, 3, 2, 400)[:, ::2, :, 40:80]),
    ):
        assert_quantised(gate, up)
    bias = random(2, 80, dtype=torch.float16, device=device, seed=1)
    for layout in ("concat", "interleaved"):
        assert_packed_quantised(base[::2, 5:45], bias[0, ::2], layout=layout)
        assert_packed_quantised(base[:, :80].unflatten(1, (2, 40)).transpose(0, 1), bias[0, :40], layout=layout)


@pytest.mark.usefixtures("passes")
def test_rows_that_are_not_finite_or_tiny_stay_their_own(device: str) -> None:
    gate, up = random(2, 7, 40, dtype=torch.float32, device=device)
    gate[1, 3], up[2, 39], gate[3], up[4], gate[5, 0] = float("nan"), float("inf"), 0.0, 2.0**-120, float("-inf")
    codes, x_scale = swiglu_quant_int8(gate, up)
    assert x_scale.isnan().tolist() == [False, True, True, False, False, True, False]
    assert x_scale[3:5].tolist() == [1.0, 1.0]
    assert not codes[1:6].any()
    assert codes[[0, 6]].abs().amax(-1).tolist() == [127, 127]
    assert_quantised(gate, up)
    # Finite, but not once it is rounded to float16.
    assert swiglu_quant_int8(gate[:1].half() + 100, up[:1] + 1000)[1].isnan().all()


def test_one_kernel_without_copies_of_rows_that_two_strides_reach(device: str) -> None:
    if not runs_kernels(device):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1: the reference launches nothing")
    base = random(12, 200, dtype=torch.float16, device=device)
    with recording() as launches:
        swiglu_quant_int8(base[:, :96].unflatten(1, (3, 32)), base[:, 101:197].unflatten(1, (3, 32)))
        swiglu_packed_quant_int8(base)
    assert [launch.kernel for launch in launches] == ["swiglu_quant_kernel", "swiglu_quant_kernel"]
    arguments = dict(launches[0].arguments)
    strides = [arguments[f"stride_{name}"] for name in ("gate_outer", "gate_inner", "up_outer", "up_inner")]
    assert [stride * arguments["ALIGNMENT"] for stride in strides] == [200, 32, 200, 32]


@pytest.mark.parametrize("target", COMPILE_TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("has_bias", [False, True])
def test_tiles_are_what_the_hardware_takes(has_bias: bool, target: Any) -> None:
    for width in (1, 40, 2048, 2049, 11_008, 14_336, 16_385, 28_672, 32_769, 10**6):
        config = quant_config(width, has_bias, target)
        threads = config.num_warps * target.warp_size
        assert threads <= 1024
        assert config.block_m * config.block_n <= 32 * threads
        assert config.block_n >= width or (config.block_n, config.block_m) == (8192, 1)
        # What the feed-forward blocks of Llama-3-8B and 70B have is read once.
        assert config.block_n >= width or width > (16_384 if has_bias else 32_768)


def test_empty_inputs(device: str) -> None:
    gate = torch.empty(3, 0, 64, dtype=torch.bfloat16, device=device)
    codes, x_scale = swiglu_quant_int8(gate, gate)
    assert (codes.shape, codes.dtype, x_scale.shape, x_scale.dtype) == (gate.shape, torch.int8, (3, 0), torch.float32)
    assert [part.shape for part in swiglu_packed_quant_int8(gate)] == [(3, 0, 32), (3, 0)]
    nothing = torch.empty(4, 0, device=device)
    for function in (lambda: swiglu_quant_int8(nothing, nothing), lambda: swiglu_packed_quant_int8(nothing)):
        with pytest.raises(ValueError, match=r"must have shape \[\.\.\., K\] with K from 1, got \(4, 0\)"):
            function()


def test_wrong_arguments_are_named(device: str) -> None:
    x, bias = torch.ones(3, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(TypeError, match="gate must have dtype float16, bfloat16, float32, got int32"):
        swiglu_quant_int8(x.int(), x)
    with pytest.raises(TypeError, match=r"up must be a torch\.Tensor, got NoneType"):
        swiglu_quant_int8(x, None)
    with pytest.raises(TypeError, match=r"bias_up must be a torch\.Tensor, got NoneType"):
        swiglu_quant_int8(x, x, bias)
    swiglu_quant_int8(x, x)
    with pytest.raises(TypeError, match=r"bias_gate must be a torch\.Tensor, got NoneType"):
        swiglu_quant_int8(x, x, None, bias)
    with pytest.raises(ValueError, match="x must have an even last dimension"):
        swiglu_packed_quant_int8(x[:, 1:])
    with pytest.raises(ValueError, match="layout must be one of 'concat', 'interleaved', got 'separate'"):
        swiglu_packed_quant_int8(x, layout="separate")
    with pytest.raises(ValueError, match="order must be one of"):
        swiglu_packed_quant_int8(x, order="gate_last")
    with pytest.raises(ValueError, match="limit must be None or a positive finite number, got 0"):
        swiglu_quant_int8(x, x, limit=0)


def test_gradients_are_refused(device: str) -> None:
    gate = torch.randn(3, 8, device=device, requires_grad=True)
    for function in (lambda: swiglu_quant_int8(gate, gate.detach()), lambda: swiglu_packed_quant_int8(gate)):
        with pytest.raises(NotImplementedError, match="tk_swiglu::swiglu_quant_int8 has no derivative"):
            function()
    with torch.no_grad():
        assert_quantised(gate, gate)


def test_operator_and_fake_tensors(device: str) -> None:
    gate, up = random(2, 3, 64, dtype=torch.float32, device=device)
    operator = torch.ops.tk_swiglu.swiglu_quant_int8.default
    torch.library.opcheck(operator, (gate, up, None, None, "separate", True, 1.0, 0.0, None))
    torch.library.opcheck(operator, (gate, None, up[0].clone(), None, "concat", False, 1.702, 1.0, 7.0))
    with FakeTensorMode() as mode:
        fakes = swiglu_packed_quant_int8(mode.from_tensor(gate).transpose(0, 1).unsqueeze(-1).expand(-1, -1, 2))
    reals = swiglu_packed_quant_int8(gate.transpose(0, 1).unsqueeze(-1).expand(-1, -1, 2))
    for got, want in zip(fakes, reals, strict=True):
        assert (got.shape, got.dtype, got.stride(), got.device) == (want.shape, want.dtype, want.stride(), want.device)


def test_compiles_without_graph_breaks_for_any_number_of_rows(device: str) -> None:
    torch._dynamo.reset()

    def layer(gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *swiglu_quant_int8(gate, up, limit=7.0), *swiglu_packed_quant_int8(gate, layout="interleaved")

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    for tokens in (7, 1, 0):
        gate, up = torch.randn(2, tokens, 64, device=device)
        assert all(map(torch.equal, compiled(gate, up), layer(gate, up)))


def test_calls_like_a_recent_one_are_known(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown: list[int] = []
    takes_operator = _ops.takes_operator
    monkeypatch.setattr(_ops, "takes_operator", lambda *tensors: unknown.append(1) or takes_operator(*tensors))
    monkeypatch.setattr(_ops, "_RECENT_QUANT", type(_ops._RECENT_QUANT)())
    counts = []
    for dtype, alpha in itertools.product((torch.float16, torch.float32), (1.0, 1.5)):
        for _ in range(2):
            gate, up = random(2, 3, 40, dtype=dtype, device=device)
            want = quantize_per_token_torch(swiglu_fused(gate, up, alpha=alpha))
            unknown.clear()
            assert all(map(torch.equal, swiglu_quant_int8(gate, up, alpha=alpha), want))
            counts.append(len(unknown))
    assert counts == [1, 0] * 4


@pytest.mark.gpu
def test_a_graph_quantises_new_contents() -> None:
    gate, up = random(2, 512, 14_336, dtype=torch.bfloat16, device="cuda")
    swiglu_quant_int8(gate, up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = swiglu_quant_int8(gate, up)
    gate.copy_(random(512, 14_336, dtype=torch.bfloat16, device="cuda", seed=1))
    graph.replay()
    assert_same(got, swiglu_fused(gate, up))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [40, 2731, 14_336, 28_672, 33_000])
def test_codes_are_those_of_the_product_on_many_rows(width: int) -> None:
    for dtype in DTYPES:
        x = random(300, 2 * width, dtype=dtype, device="cuda")
        bias = random(2 * width, dtype=dtype, device="cuda", seed=1)
        assert_quantised(*x.chunk(2, -1))
        assert_quantised(*x.chunk(2, -1), *bias.chunk(2, -1), **GPT_OSS)
        for layout, order in PACKINGS:
            assert_packed_quantised(x, layout=layout, order=order)
            assert_packed_quantised(x, bias, layout=layout, order=order, **GPT_OSS)
