"""Norms that are quantised in the kernel, against the norm that is quantised by the core's rule."""

import itertools
from typing import Any

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode

from tk_kernel_core.aot import compile_launch
from tk_kernel_core.launch import planning, recording
from tk_kernel_core.quantization import quantize_per_token_torch
from tk_kernel_core.targets import COMPILE_TARGETS
from tk_rmsnorm import _ops, _plans, fused_add_rmsnorm, fused_add_rmsnorm_quant_int8, rmsnorm, rmsnorm_quant_int8
from tk_testkit.spec import runs_kernels
from tk_testkit.strategies import assert_guards_intact, guarded_view

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NUMBERS = (1e-6, 0.0, "fp32")


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


def assert_same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...], step: float = 0.0) -> None:
    """Equal bit for bit, or but for norms that are a relative step apart."""
    assert [part.dtype for part in got] == [torch.int8, torch.float32, *(part.dtype for part in want[2:])]
    assert all(part.is_contiguous() for part in got)
    (codes, x_scale, *total), (want_codes, want_x_scale, *want_total) = got, want
    torch.testing.assert_close(codes, want_codes, rtol=0, atol=int(step > 0))
    torch.testing.assert_close(x_scale, want_x_scale, rtol=step, atol=0, equal_nan=True)
    torch.testing.assert_close(total, want_total, rtol=0, atol=0, equal_nan=True)


def assert_quantised(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, exact: bool = True, **numbers: Any
) -> None:
    """Both functions give what the unfused pair gives: exactly, or as far as GPUs may add up in another order."""
    step = 0.0 if exact or x.device.type == "cpu" else torch.finfo(x.dtype).eps
    want = quantize_per_token_torch(rmsnorm(x, weight, **numbers))
    assert_same(rmsnorm_quant_int8(x, weight, **numbers), want, step)
    y, total = fused_add_rmsnorm(x, residual, weight, **numbers)
    got = fused_add_rmsnorm_quant_int8(x, residual, weight, **numbers)
    assert_same(got, (*quantize_per_token_torch(y), total), step)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden_size", [1, 3, 128, 2520, 4097, 20_000])
@pytest.mark.usefixtures("poisoned_memory")
def test_codes_are_those_of_the_norm_bit_for_bit(
    hidden_size: int, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[torch.Tensor] = []

    def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        def allocate() -> torch.Tensor:
            results.append(guarded_view(shape, None, dtype, device=str(device)))
            return results[-1]

        return allocate

    x, residual = (
        guarded_view((3, hidden_size), (hidden_size + 16, 1), dtype, device=device, seed=seed) for seed in (0, 1)
    )
    weight = guarded_view((hidden_size,), (1,), dtype, device=device, seed=2)
    want = quantize_per_token_torch(rmsnorm(x, weight))
    y, total = fused_add_rmsnorm(x, residual, weight)
    for name in ("_PLANS", "_RECENT"):
        owner = _plans if name == "_PLANS" else _ops
        monkeypatch.setattr(owner, name, type(getattr(owner, name))())
    monkeypatch.setattr(_plans, "allocator", guarded)
    assert_same(rmsnorm_quant_int8(x, weight), want)
    assert_same(fused_add_rmsnorm_quant_int8(x, residual, weight), (*quantize_per_token_torch(y), total))
    assert len(results) == (5 if runs_kernels(device) else 0)
    for tensor in (x, residual, weight, *results):
        assert_guards_intact(tensor)


@pytest.mark.parametrize("casting", ["fp32", "llama"])
def test_every_pair_of_dtypes_and_every_number(casting: str, device: str) -> None:
    # A third of all trios, in which every pair occurs.
    for i, j in itertools.product(range(3), range(4)):
        dtype, weight_dtype, residual_dtype = DTYPES[i], (*DTYPES, None)[j], DTYPES[(i + j) % 3]
        x = random(5, 96, dtype=dtype, device=device)
        residual = random(5, 96, dtype=residual_dtype, device=device, seed=1)
        weight = None if weight_dtype is None else random(96, dtype=weight_dtype, device=device, seed=2)
        assert_quantised(x, residual, weight, exact=False, eps=0.1, weight_offset=1.0, casting=casting)


def strided_inputs(device: str) -> dict[str, torch.Tensor]:
    base = random(12, 1000, dtype=torch.float16, device=device)
    return {
        "one row": base[0],
        "transposed": base.t()[:8],
        "inner columns": base[:, 16:-16],
        "odd columns": base[:, 3:100],
        "expanded row": base[:1].expand(8, 1000),
        "query heads of a projection": base[:, :512].unflatten(1, (4, 128)),
        "three strides": random(4, 6, 8, 16, dtype=torch.float16, device=device)[::2, ::3, ::4],
        "odd start": base.flatten()[1 : 1 + 5 * 1000].view(5, 1000),
    }


@pytest.mark.parametrize("name", list(strided_inputs("cpu")))
def test_strides_change_nothing(name: str, device: str) -> None:
    x = strided_inputs(device)[name]
    weight = random(2 * x.shape[-1], dtype=torch.float16, device=device, seed=1)[::2]
    assert_quantised(x, x, weight, exact=False)


@pytest.mark.parametrize("hidden_size", [40, 20_000])
def test_rows_that_are_not_finite_or_tiny_stay_their_own(hidden_size: int, device: str) -> None:
    x = random(6, hidden_size, dtype=torch.float32, device=device)
    x[1, 3], x[2, 7], x[3], x[4] = float("nan"), float("inf"), 0.0, 2.0**-60
    weight = torch.ones(hidden_size, device=device)
    # The norm of the fifth row is about 2^-120.
    codes, x_scale = rmsnorm_quant_int8(x, weight * 2.0**-60, eps=1.0)
    assert x_scale.isnan().tolist() == [False, True, True, False, False, False]
    assert x_scale[3:5].tolist() == [1.0, 1.0]
    assert not codes[1:5].any()
    assert codes[[0, 5]].abs().amax(-1).tolist() == [127, 127]
    assert_quantised(x, torch.zeros_like(x), weight * 2.0**-60, eps=1.0)
    # 0 / 0.
    assert rmsnorm_quant_int8(x[3:4], weight, eps=0.0)[1].isnan().all()
    # Finite, but not once it is rounded to float16.
    halves = random(2, hidden_size, dtype=torch.float16, device=device)
    assert rmsnorm_quant_int8(halves, weight * 2.0**16)[1].isnan().all()


def test_one_kernel_whatever_dtypes_and_places(device: str) -> None:
    if not runs_kernels(device):
        pytest.skip("needs a GPU or TRITON_INTERPRET=1: the reference launches nothing")
    x = random(3, 96, dtype=torch.float16, device=device)
    wide = random(3, 97, dtype=torch.float16, device=device)[:, :96]
    shifted = random(300, dtype=torch.float16, device=device)[1:289].view(3, 96)
    for arguments in ((x, x, x[0].float()), (x, x.float()), (wide, wide), (shifted, x)):
        with recording() as launches:
            fused_add_rmsnorm_quant_int8(*arguments)
        assert [launch.kernel for launch in launches] == ["rmsnorm_quant_kernel"]


@pytest.mark.compiler
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("hidden_size", "dtypes"),
    [
        (127, (torch.bfloat16, torch.bfloat16, torch.bfloat16)),
        (4096, (torch.bfloat16, None, torch.float32)),
        (4097, (torch.float32, torch.float32, None)),
        (8192, (torch.float16, None, torch.float16)),
        (20_000, (torch.bfloat16, torch.bfloat16, torch.bfloat16)),
    ],
)
def test_squares_are_spread_over_threads_as_in_the_forward_kernel(
    hidden_size: int, dtypes: tuple[torch.dtype | None, ...], target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    compile_by_triton = triton.compile
    monkeypatch.setattr(triton, "compile", lambda *a, **k: compiled.append(compile_by_triton(*a, **k)) or compiled[-1])
    monkeypatch.setattr("tk_kernel_core.aot._compiled", {})

    def meta(dtype: torch.dtype | None, *shape: int) -> torch.Tensor | None:
        return None if dtype is None else torch.empty(shape, dtype=dtype, device="meta")

    x, residual = meta(dtypes[0], 64, hidden_size), meta(dtypes[1], 64, hidden_size)
    weight = meta(dtypes[2], hidden_size)
    forms: list[Any] = ["norm", "codes"] if residual is None else ["norm_and_sum", "codes_and_sum"]
    sums = []
    for form in forms:
        with planning(COMPILE_TARGETS[target]) as launches:
            _plans.forward(x, residual, weight, *NUMBERS, form)
        (launch,) = launches
        compile_launch(launch, COMPILE_TARGETS[target])
        sums.append(layouts_of_sums(compiled[-1].asm["ttgir"]))
    assert len(sums[0]) == 1
    assert sums[0] == sums[1]


def layouts_of_sums(code: str) -> list[str]:
    """Return how the operands of reductions by floating-point addition are spread over threads."""
    layouts = dict(line[1:].split(" = ", 1) for line in code.splitlines() if line.startswith("#blocked"))
    found, adds = [], False
    for line in code.splitlines():
        adds = (adds or "arith.addf" in line) and '"tt.reduce"' not in line
        if line.lstrip().startswith("}) : (tensor<") and adds:
            kind, layout = line.split("tensor<")[1].split(">")[0].split(", #")
            found.append(f"{kind} {layouts[layout]}")
    return found


def test_empty_inputs(device: str) -> None:
    x = torch.empty(3, 0, 64, dtype=torch.bfloat16, device=device)
    codes, x_scale, total = fused_add_rmsnorm_quant_int8(x, x.float())
    assert (codes.shape, codes.dtype, x_scale.shape, x_scale.dtype) == (x.shape, torch.int8, (3, 0), torch.float32)
    assert (total.shape, total.dtype) == (x.shape, torch.float32)
    for function in (rmsnorm_quant_int8, lambda x: fused_add_rmsnorm_quant_int8(x, x)):
        with pytest.raises(ValueError, match=r"x must have shape \[\.\.\., K\] with K from 1, got \(4, 0\)"):
            function(torch.empty(4, 0, device=device))


def test_wrong_arguments_are_named(device: str) -> None:
    x, weight = torch.ones(3, 8, device=device), torch.ones(8, device=device)
    with pytest.raises(TypeError, match="x must have dtype float16, bfloat16, float32, got int32"):
        rmsnorm_quant_int8(x.int())
    with pytest.raises(ValueError, match=r"weight must have shape \(8,\), got \(7,\)"):
        rmsnorm_quant_int8(x, weight[1:])
    with pytest.raises(TypeError, match=r"residual must be a torch\.Tensor, got NoneType"):
        fused_add_rmsnorm_quant_int8(x, None)
    with pytest.raises(ValueError, match=r"residual must have shape \(3, 8\), got \(2, 8\)"):
        fused_add_rmsnorm_quant_int8(x, x[1:], weight)
    with pytest.raises(ValueError, match="casting must be one of 'fp32', 'llama', got 'int8'"):
        rmsnorm_quant_int8(x, casting="int8")


def test_gradients_are_refused(device: str) -> None:
    x, weight = torch.randn(3, 8, device=device), torch.nn.Parameter(torch.ones(8, device=device))
    with pytest.raises(NotImplementedError, match="tk_rmsnorm::rmsnorm_quant_int8 has no derivative"):
        rmsnorm_quant_int8(x, weight)
    with pytest.raises(NotImplementedError, match="fused_add_rmsnorm_quant_int8 has no derivative"):
        fused_add_rmsnorm_quant_int8(x, x, weight)
    with torch.no_grad():
        assert_quantised(x, x, weight)


def test_operators_and_fake_tensors(device: str) -> None:
    x, residual, weight = (random(3, 64, dtype=torch.float32, device=device, seed=seed) for seed in range(3))
    operators = torch.ops.tk_rmsnorm
    torch.library.opcheck(operators.rmsnorm_quant_int8.default, (x, weight[0], *NUMBERS))
    torch.library.opcheck(operators.fused_add_rmsnorm_quant_int8.default, (x, residual, weight[0], *NUMBERS))
    with FakeTensorMode() as mode:
        fakes = fused_add_rmsnorm_quant_int8(mode.from_tensor(x).t(), mode.from_tensor(residual).bfloat16().t())
    for got, want in zip(fakes, fused_add_rmsnorm_quant_int8(x.t(), residual.bfloat16().t()), strict=True):
        assert (got.shape, got.dtype, got.stride(), got.device) == (want.shape, want.dtype, want.stride(), want.device)


def test_compiles_without_graph_breaks_for_any_number_of_rows(device: str) -> None:
    torch._dynamo.reset()

    def layer(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *fused_add_rmsnorm_quant_int8(x, residual, weight), *rmsnorm_quant_int8(x, casting="llama")

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="eager")
    weight = torch.randn(64, device=device)
    for tokens in (7, 1, 0):
        x, residual = torch.randn(2, tokens, 64, device=device)
        assert all(map(torch.equal, compiled(x, residual, weight), layer(x, residual, weight)))


def test_calls_like_a_recent_one_are_known(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown: list[int] = []
    takes_operator = _ops.takes_operator
    monkeypatch.setattr(_ops, "takes_operator", lambda *tensors: unknown.append(1) or takes_operator(*tensors))
    monkeypatch.setattr(_ops, "_RECENT", type(_ops._RECENT)())
    counts = []
    for dtype in (torch.float16, torch.float32):
        for _ in range(2):
            x, residual = random(2, 3, 40, dtype=dtype, device=device)
            unknown.clear()
            assert_quantised(x, residual, None)
            counts.append(len(unknown))
    # The two norms and their quantised forms, each unknown once.
    assert counts == [4, 0, 4, 0]


@pytest.mark.gpu
def test_a_graph_quantises_new_contents() -> None:
    x, residual, weight = (random(2048, 4096, dtype=torch.bfloat16, device="cuda", seed=seed) for seed in range(3))
    weight = weight[0].contiguous()
    fused_add_rmsnorm_quant_int8(x, residual, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fused_add_rmsnorm_quant_int8(x, residual, weight)
    x.copy_(random(2048, 4096, dtype=torch.bfloat16, device="cuda", seed=3))
    graph.replay()
    y, total = fused_add_rmsnorm(x, residual, weight)
    assert_same(got, (*quantize_per_token_torch(y), total))


@pytest.mark.gpu
@pytest.mark.parametrize("hidden_size", [128, 1000, 4096, 4097, 5376, 8192, 16_384, 20_000])
def test_codes_are_those_of_the_norm_on_many_rows(hidden_size: int) -> None:
    for dtype, residual_dtype, weight_dtype in itertools.product(DTYPES, DTYPES, DTYPES):
        x = random(512, hidden_size + 1, dtype=dtype, device="cuda")
        residual = random(512, hidden_size, dtype=residual_dtype, device="cuda", seed=1)
        weight = random(hidden_size, dtype=weight_dtype, device="cuda", seed=2)
        for values in (x[:, 1:].contiguous(), x[:, 1:]):
            widths = x.element_size() == residual.element_size() <= weight.element_size()
            assert_quantised(values, residual, weight, exact=widths and values.is_contiguous())
