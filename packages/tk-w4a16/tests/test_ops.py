"""The public functions: values, what they take and refuse, gradients, and one result however they are called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tk_kernel_core import gemm, recent
from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.spec import Tolerance
from tk_testkit.close import assert_close
from tk_w4a16 import (
    PackedInt4Weight,
    _ops,
    dequantize_int4,
    pack_int4,
    quantize_weight_int4_grouped,
    w4a16_gemm,
    w4a16_linear,
)

Tensor = torch.Tensor
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
each_product = pytest.mark.parametrize("name", ["w4a16_linear", "w4a16_gemm"])
# Of no kernel: run beside what compiles, in a process that the interpreter does not slow down.
without_interpreter = pytest.mark.compiler


def operands(
    m: int, n: int, k: int, device: str, dtype: torch.dtype = torch.float16, group_size: int = 32
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(m + n + k)
    weight = torch.randn(k, n, generator=generator).to(device, dtype)
    packed, scales, zeros = quantize_weight_int4_grouped(weight, group_size)
    x = torch.randn(m, k, generator=generator).to(device, dtype)
    return {"x": x, "packed": packed, "scales": scales, "zeros": zeros, "group_size": group_size}


def call(name: str, arguments: dict[str, Any]) -> Tensor:
    if name == "w4a16_gemm":
        return w4a16_gemm(**arguments)
    weight = {key: value for key, value in arguments.items() if key != "x"}
    return w4a16_linear(arguments["x"], PackedInt4Weight.from_int4(**weight))


def check(arguments: dict[str, Any], got: Tensor, bias: Tensor | None = None) -> None:
    """Hold a result against float64; kernels may round the dequantised weight to the dtype of x."""
    x, scales = arguments["x"], arguments["scales"].double()
    weight = dequantize_int4(arguments["packed"], scales, arguments["zeros"], arguments["group_size"])[: x.shape[-1]]
    want = x.double() @ weight + (0.0 if bias is None else bias.double())
    assert got.shape == want.shape
    assert (got.dtype, got.device, got.is_contiguous()) == (x.dtype, x.device, True)
    terms = float((x.double().abs() @ weight.abs()).max()) if x.numel() else 0.0
    summed = rounding_tolerance(torch.float32, weight.shape[0], magnitude=terms).absolute
    rounded = rounding_tolerance(got.dtype, 1)
    # Errors of half a unit, and independent: their sum is as long as the root of the sum of their squares.
    exact = x.dtype == torch.float32 or (x.device.type == "cpu" and not interpreting())
    squares = float((x.double().square() @ weight.square()).max()) if x.numel() else 0.0
    weight_error = 0.0 if exact else 2 * torch.finfo(x.dtype).eps * squares**0.5
    assert_close(got, want.to(got.dtype), Tolerance(rounded.absolute + summed + weight_error, rounded.relative))


@pytest.mark.parametrize(
    ("m", "n", "k", "group_size", "dtype"),
    [
        (1, 40, 136, 64, torch.float16),
        (3, 70, 72, -1, torch.bfloat16),
        (17, 33, 48, 24, torch.float16),
        (2, 9, 40, 3, torch.float32),
    ],
)
def test_values_of_the_plain_layout(m: int, n: int, k: int, group_size: int, dtype: torch.dtype, device: str) -> None:
    arguments = operands(m, n, k, device, dtype, group_size)
    check(arguments, w4a16_gemm(**arguments))
    # Without zero points they are 8; with fractions they are what they are.
    no_zeros = {**arguments, "zeros": None}
    check(no_zeros, w4a16_gemm(**no_zeros))
    fractions = {**arguments, "zeros": arguments["zeros"] + 0.25}
    check(fractions, w4a16_gemm(**fractions))


@pytest.mark.parametrize(
    ("m", "n", "k", "group_size", "dtype"),
    [
        (0, 5, 16, 32, torch.float16),
        # Two programs share the columns.
        (1, 15, 1088, 64, torch.bfloat16),
        (3, 70, 264, 256, torch.float16),
        (18, 33, 128, -1, torch.bfloat16),
        (3, 33, 72, 32, torch.float32),
    ],
)
def test_values_of_prepared_weights(m: int, n: int, k: int, group_size: int, dtype: torch.dtype, device: str) -> None:
    arguments = operands(m, n, k, device, dtype, group_size)
    weight = {key: value for key, value in arguments.items() if key != "x"}
    # Expanded, as a module that shares one bias may have it.
    bias = torch.full((1,), 0.5, dtype=dtype, device=device).expand(n)
    check(arguments, w4a16_linear(arguments["x"], PackedInt4Weight.from_int4(**weight), bias), bias)


@pytest.mark.parametrize(
    ("m", "dtype"), [(1, torch.float16), (3, torch.float16), (17, torch.float16), (3, torch.float32)]
)
def test_act_order_is_followed_by_every_kernel(m: int, dtype: torch.dtype, device: str) -> None:
    # In uneven groups, which leave padding between columns.
    features = 200
    generator = torch.Generator().manual_seed(m)
    index = torch.randint(0, 4, (features,), generator=generator)
    weight = PackedInt4Weight.from_gptq(
        torch.randint(-(2**31), 2**31, (features // 8, 16), generator=generator).to(device, torch.int32),
        torch.randint(-(2**31), 2**31, (4, 2), generator=generator).to(device, torch.int32),
        torch.rand(4, 16, generator=generator).to(device, torch.float16) / 32,
        index.to(device),
        group_size=64,
    )
    assert weight.permutation is not None
    x = torch.randn(m, features, generator=generator).to(device, dtype)
    dense = weight.dequantize(dtype)
    want = x.double() @ dense.double().T
    terms = float((x.double().abs() @ dense.double().abs().T).max())
    tolerance = rounding_tolerance(dtype, features, magnitude=terms)
    rounding = 2 * torch.finfo(dtype).eps * terms / features**0.5
    assert_close(w4a16_linear(x, weight), want.to(dtype), Tolerance(tolerance.absolute + rounding, tolerance.relative))


@each_product
def test_every_group_counts_with_its_own_scale(name: str, device: str) -> None:
    packed = pack_int4(torch.full((64, 1), 9, device=device))
    scales = torch.tensor([[1.0], [10.0]], device=device)
    for dtype in DTYPES:
        x = torch.ones(2, 64, dtype=dtype, device=device)
        arguments = {"x": x, "packed": packed, "scales": scales, "zeros": None, "group_size": 32}
        assert call(name, arguments).tolist() == [[352.0]] * 2


@each_product
def test_minus_one_is_one_group_of_all_input_features(name: str, device: str) -> None:
    arguments = operands(3, 8, 64, device, group_size=-1)
    want = call(name, arguments)
    for group_size in (64, 256):
        assert torch.equal(call(name, {**arguments, "group_size": group_size}), want)


@each_product
def test_a_large_scale_does_not_meet_a_zero_point_alone(name: str, device: str) -> None:
    # 15 * 5000 is beyond fp16, and 15 - 15 is not.
    arguments = {
        "x": torch.ones(2, 32, dtype=torch.float16, device=device),
        "packed": torch.full((4, 8), -1, dtype=torch.int32, device=device),
        "scales": torch.full((1, 8), 5000.0, dtype=torch.float16, device=device),
        "zeros": torch.full((1, 8), 15.0, dtype=torch.float16, device=device),
        "group_size": 32,
    }
    assert call(name, arguments).tolist() == [[0.0] * 8] * 2


@each_product
@pytest.mark.parametrize(
    ("x_dtype", "scale_dtype"),
    [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float16, torch.float32)],
    ids=str,
)
def test_scales_may_have_another_dtype(name: str, x_dtype: torch.dtype, scale_dtype: torch.dtype, device: str) -> None:
    arguments = operands(2, 16, 32, device, scale_dtype)
    arguments["x"] = arguments["x"].to(x_dtype)
    check(arguments, call(name, arguments))


@each_product
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(2, 3, 2, -1),
        lambda x: x.T.contiguous().T,
        lambda x: torch.cat([x, x], -1)[:, : x.shape[1]],
        lambda x: x.view(3, 4, -1).transpose(0, 1),
    ],
)
def test_activations_of_any_rank_and_strides(name: str, view: Callable[[Tensor], Tensor], device: str) -> None:
    arguments = operands(12, 16, 48, device)
    arguments["x"] = view(arguments["x"])
    check(arguments, call(name, arguments))


def test_a_plain_weight_with_any_strides(device: str) -> None:
    for m in (3, 401):
        arguments = operands(m, 32, 64, device)
        want = w4a16_gemm(**arguments)
        views = {key: arguments[key].t().contiguous().t() for key in ("packed", "scales", "zeros")}
        assert torch.equal(w4a16_gemm(**{**arguments, **views}), want)


def test_rows_of_what_is_not_finite_keep_to_themselves(device: str) -> None:
    for name in ("w4a16_linear", "w4a16_gemm"):
        arguments = operands(6, 24, 48, device)
        clean = call(name, arguments)
        arguments["x"][2, 7], arguments["x"][4, 0] = float("inf"), float("nan")
        got = call(name, arguments)
        assert not got[[2, 4]].isfinite().any()
        assert torch.equal(got[[0, 1, 3, 5]], clean[[0, 1, 3, 5]])


@each_product
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_many_rows_by_weights_dequantised_in_parts(
    name: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "WORKSPACE_BYTES", 64 * 72 * dtype.itemsize)
    arguments = operands(401, 70, 72, device, dtype)
    check(arguments, call(name, arguments))


@each_product
@pytest.mark.parametrize(("m", "dtype"), [(3, torch.bfloat16), (3, torch.float32), (401, torch.bfloat16)])
def test_autocast_changes_nothing(name: str, m: int, dtype: torch.dtype, device: str) -> None:
    arguments = operands(m, 16, 48, device, dtype)
    want = call(name, arguments)
    with torch.autocast(device, torch.bfloat16):
        got = call(name, arguments)
    assert got.dtype == dtype
    assert torch.equal(got, want)


def test_nothing_in_gives_nothing_or_zeros(device: str) -> None:
    nothing = operands(0, 24, 48, device)
    assert call("w4a16_gemm", nothing).shape == call("w4a16_linear", nothing).shape == (0, 24)
    for m, n in ((3, 24), (0, 24), (3, 0)):
        packed, scales = torch.empty(0, n, dtype=torch.int32, device=device), torch.empty(0, n, device=device)
        assert torch.equal(
            w4a16_gemm(torch.empty(m, 0, device=device), packed, scales, None), torch.zeros(m, n, device=device)
        )


BAD_X = [
    ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
    ({"x": torch.ones(2, 64, dtype=torch.int32)}, TypeError, "x must have dtype"),
    ({"x": torch.ones(2, 64).double()}, TypeError, "x must have dtype float16, bfloat16, float32, got float64"),
    ({"x": torch.ones(2, 63)}, ValueError, r"x must have shape \[\.\.\., 64\], got \(2, 63\)"),
    ({"x": torch.tensor(1.0)}, ValueError, "x must have shape"),
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        *BAD_X,
        ({"packed": torch.ones(8, 16)}, TypeError, "packed must have dtype int32, got float32"),
        ({"packed": torch.ones(8, dtype=torch.int32)}, ValueError, r"packed must have shape \[K / 8, N\], got \(8,\)"),
        ({"packed": torch.ones(8, 16, dtype=torch.int32, device="meta")}, ValueError, "packed must be on the device"),
        ({"scales": torch.ones(2, 15)}, ValueError, r"scales must have shape \(2, 16\), got \(2, 15\)"),
        ({"scales": torch.ones(16, 2)}, ValueError, r"scales must have shape \(2, 16\), got \(16, 2\)"),
        ({"scales": None}, TypeError, "scales must be a torch.Tensor, got NoneType"),
        ({"scales": torch.ones(2, 16, dtype=torch.int32)}, TypeError, "scales must have dtype"),
        ({"zeros": torch.ones(1, 16)}, ValueError, r"zeros must have shape \(2, 16\), got \(1, 16\)"),
        ({"zeros": torch.ones(2, 16, dtype=torch.int32)}, TypeError, "zeros must have dtype"),
        ({"group_size": 0}, ValueError, "group_size must be positive, or -1 for one group, got 0"),
        ({"group_size": -2}, ValueError, "group_size must be positive, or -1 for one group, got -2"),
        ({"group_size": None}, TypeError, "group_size must be an int, got NoneType"),
        ({"group_size": 64}, ValueError, r"scales must have shape \(1, 16\), got \(2, 16\)"),
    ],
)
def test_bad_arguments_of_the_plain_layout_are_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        w4a16_gemm(**{**operands(2, 16, 64, "cpu"), **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        *BAD_X,
        ({"bias": torch.ones(15)}, ValueError, r"bias must have shape \(16,\), got \(15,\)"),
        ({"bias": torch.ones(16, dtype=torch.int8)}, TypeError, "bias must have dtype"),
        ({"bias": torch.ones(16, device="meta")}, ValueError, "bias must be on the device of x"),
        ({"weight": torch.ones(16, 64)}, TypeError, "weight must be a PackedInt4Weight, got Tensor: prepare it by one"),
    ],
)
def test_bad_arguments_of_prepared_weights_are_named(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    weight = PackedInt4Weight.from_float(torch.randn(16, 64), 32)
    with pytest.raises(error, match=message):
        w4a16_linear(**{"x": torch.ones(2, 64), "weight": weight, **change})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (
            {"codes": torch.zeros(4, 1, 32, 4, dtype=torch.int32)},
            ValueError,
            r"weight.codes must have shape \(4, 2, 32",
        ),
        ({"codes": torch.zeros(4, 2, 4, 32, dtype=torch.int32).mT}, ValueError, "weight.codes must be contiguous"),
        ({"codes": torch.zeros(4, 2, 32, 4)}, TypeError, "weight.codes must have dtype int32"),
        ({"scales": torch.zeros(4, 1, 8, 2)}, ValueError, r"weight.scales must have shape \(4, 4, 8, 2\)"),
        ({"zeros": torch.zeros(4, 4, 8, 2)}, TypeError, "weight.zeros must have dtype uint8"),
        ({"zeros": torch.zeros(4, 4, 8, 1, dtype=torch.uint8)}, ValueError, "weight.zeros must have shape"),
        ({"permutation": torch.zeros(64, dtype=torch.int32)}, ValueError, r"permutation must have shape \(128,\)"),
        ({"permutation": torch.zeros(128)}, TypeError, "weight.permutation must have dtype int32"),
        ({"group_size": 48}, ValueError, "weight.group_size must be one of 32, 64, 128, 256, -1, got 48"),
        ({"in_features": 200}, ValueError, r"weight.codes must have shape \(4, 4, 32, 4\), got \(4, 2, 32, 4\)"),
        ({"out_features": 100}, ValueError, r"weight.codes must have shape \(8, 2, 32, 4\), got \(4, 2, 32, 4\)"),
    ],
)
def test_a_weight_put_together_wrongly_is_refused(change: dict[str, Any], error: type[Exception], message: str) -> None:
    weight = replace(PackedInt4Weight.from_float(torch.randn(16, 64), 32), **change)
    with pytest.raises(error, match=message):
        w4a16_linear(torch.ones(2, weight.in_features), weight)


@each_product
def test_gradients_of_activations(name: str, device: str) -> None:
    arguments = operands(4, 12, 40, device, torch.float32)
    x = arguments["x"].requires_grad_()
    dy = torch.randn(4, 12, generator=torch.Generator().manual_seed(1)).to(device)
    call(name, arguments).backward(dy)
    scales = arguments["scales"].double()
    weight = dequantize_int4(arguments["packed"], scales, arguments["zeros"], arguments["group_size"])
    want = dy.double() @ weight.T
    assert_close(x.grad, want.float(), rounding_tolerance(torch.float32, 12, magnitude=float(want.abs().max())))


def test_gradients_of_the_bias_and_none_of_the_weight(device: str) -> None:
    x = torch.randn(4, 40, dtype=torch.float16, device=device)
    weight = PackedInt4Weight.from_float(torch.randn(12, 40, device=device), 32)
    bias = torch.zeros(12, device=device, requires_grad=True)
    w4a16_linear(x, weight, bias).sum().backward()
    assert bias.grad.tolist() == [4.0] * 12
    weight.scales.requires_grad_()
    with pytest.raises(NotImplementedError, match=r"weight\.scales is frozen"):
        w4a16_linear(x, weight).sum().backward()
    arguments = operands(4, 12, 40, device)
    for name in ("scales", "zeros"):
        values = arguments[name].clone().requires_grad_()
        with pytest.raises(NotImplementedError, match=f"{name} is frozen"):
            w4a16_gemm(**{**arguments, name: values}).sum().backward()


@without_interpreter
@each_product
def test_compiled_without_graph_breaks(name: str, device: str) -> None:
    torch._dynamo.reset()
    arguments = operands(4, 12, 40, device)
    weight = PackedInt4Weight.from_int4(**{key: value for key, value in arguments.items() if key != "x"})

    def layer(x: Tensor) -> Tensor:
        return (w4a16_linear(x, weight) if name == "w4a16_linear" else w4a16_gemm(**{**arguments, "x": x})) + 1

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (4, 7, 0):
        x = torch.randn(m, 40, device=device).half()
        assert torch.equal(compiled(x), layer(x))


@without_interpreter
def test_opcheck(device: str) -> None:
    arguments = operands(4, 12, 40, device, torch.float32)
    x, bias = arguments["x"].requires_grad_(), torch.randn(12, device=device, requires_grad=True)
    index = (torch.randperm(40, generator=torch.Generator().manual_seed(0)) // 20).to(device)
    weight = PackedInt4Weight.from_gptq(
        arguments["packed"], None, arguments["scales"], index, group_size=32, symmetric=True
    )
    operators = torch.ops.tk_w4a16
    torch.library.opcheck(operators.w4a16_gemm.default, tuple(arguments.values()))
    rest = weight.codes, weight.scales, weight.zeros, weight.permutation, bias, weight.group_size, 12, 40
    torch.library.opcheck(operators.w4a16_linear.default, (x, *rest))


@without_interpreter
@each_product
def test_calls_are_told_apart_and_known_again(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown: list[Any] = []
    takes_operator = recent.takes_operator
    monkeypatch.setattr(recent, "takes_operator", lambda *tensors: unknown.append(1) or takes_operator(*tensors))
    monkeypatch.setattr(_ops, "_RECENT", type(_ops._RECENT)())
    base: dict[str, Any] = {"m": 2, "n": 8, "k": 64, "dtype": torch.float16, "group_size": 32}
    changes = [{}, {"m": 3}, {"n": 9}, {"k": 96}, {"dtype": torch.bfloat16}, {"group_size": 64}, {"zeros": None}]
    for change in changes:
        counts = []
        for _ in range(2):
            unknown.clear()
            arguments = operands(**{**base, "device": device, **{k: v for k, v in change.items() if k != "zeros"}})
            arguments.update({k: v for k, v in change.items() if k == "zeros"})
            check(arguments, call(name, arguments))
            counts.append(len(unknown))
        assert counts == [1, 0], change
