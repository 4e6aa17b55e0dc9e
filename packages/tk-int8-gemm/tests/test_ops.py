"""The public functions: values, what they take and refuse, gradients, and one result however they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tk_int8_gemm import (
    PackedInt8Weight,
    _plans,
    int8_gemm,
    int8_gemm_torch,
    int8_linear,
    quantize_per_token,
    quantize_per_token_torch,
    quantize_symmetric,
    w8a8_gemm,
    w8a8_gemm_torch,
)
from tk_kernel_core import gemm
from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.numerics import rounding_tolerance
from tk_kernel_core.spec import Tolerance
from tk_testkit.close import assert_close

Tensor = torch.Tensor


def packed(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, zero_point: Any = None) -> Tensor:
    return int8_linear(x, PackedInt8Weight.pack(weight, scale, zero_point), bias)


PRODUCTS: dict[str, Callable[..., Tensor]] = {"int8_gemm": int8_gemm, "int8_linear": packed, "w8a8_gemm": w8a8_gemm}
each_product = pytest.mark.parametrize("name", PRODUCTS)


def operands(m: int, n: int, k: int, device: str, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(m + n + k)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "x": random(m, k).to(device, dtype),
        "weight_int8": torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator).to(device),
        "scale": (random(n).abs() / 64 + 0.01).to(device),
        "bias": random(n).to(device, dtype),
        "zero_point": torch.randint(-128, 128, (n,), dtype=torch.int8, generator=generator).to(device),
    }


def exact(name: str, x: Tensor, weight_int8: Tensor, scale: Tensor, bias: Any = None, zero_point: Any = None) -> Tensor:
    if name == "w8a8_gemm":
        return w8a8_gemm_torch(x, weight_int8, scale, bias, zero_point=zero_point, out_dtype=torch.float64)
    bias = None if bias is None else bias.double()
    return int8_gemm_torch(x.double(), weight_int8, scale, bias, zero_point=zero_point)


def call(name: str, arguments: dict[str, Any]) -> Tensor:
    zero_point = arguments.get("zero_point")
    rest = [arguments[key] for key in ("x", "weight_int8", "scale")]
    return PRODUCTS[name](*rest, arguments.get("bias"), zero_point=zero_point)


def check(name: str, arguments: dict[str, Any], got: Tensor) -> None:
    want = exact(name, **arguments)
    x, k = arguments["x"], arguments["x"].shape[-1]
    assert got.shape == want.shape == (*x.shape[:-1], arguments["weight_int8"].shape[0])
    assert (got.dtype, got.device, got.is_contiguous()) == (x.dtype, x.device, True)
    # Summed up in fp32, the zero point's share by itself, and rounded once.
    zero_point = arguments["zero_point"]
    codes = arguments["weight_int8"].double().abs() + (0 if zero_point is None else zero_point.double().abs()[:, None])
    terms = x.double().abs().reshape(-1, k) @ codes.T * arguments["scale"].double()
    summed = rounding_tolerance(torch.float32, k, magnitude=float(terms.max()) if x.numel() else 0.0)
    rounded = rounding_tolerance(got.dtype, 1)
    assert_close(got, want.to(got.dtype), Tolerance(rounded.absolute + summed.absolute, rounded.relative))


@each_product
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 16), (1, 48, 130), (2, 15, 10), (17, 70, 128), (33, 1, 1)])
@pytest.mark.parametrize("left_out", [(), ("bias",), ("zero_point",), ("bias", "zero_point")], ids=str)
def test_values(name: str, dtype: torch.dtype, m: int, n: int, k: int, left_out: tuple[str, ...], device: str) -> None:
    arguments = operands(m, n, k, device, dtype)
    for key in left_out:
        arguments[key] = None
    check(name, arguments, call(name, arguments))


@each_product
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[0],
        lambda x: x.view(2, 3, 2, -1),
        lambda x: x.expand(2, *x.shape),
        lambda x: x.flip(0)[::2],
        lambda x: x.T.contiguous().T,
        lambda x: torch.cat([x, x], -1)[:, : x.shape[1]],
        lambda x: torch.stack([x, x], -1)[..., 0],
        lambda x: x.view(3, 4, -1).transpose(0, 1),
    ],
)
def test_activations_of_any_rank_and_strides(name: str, view: Callable[[Tensor], Tensor], device: str) -> None:
    arguments = operands(12, 24, 48, device)
    arguments["x"] = view(arguments["x"])
    check(name, arguments, call(name, arguments))


def test_codes_may_begin_at_any_address(device: str) -> None:
    arguments = operands(5, 24, 48, device)
    codes, x_scale = quantize_per_token(arguments["x"])
    weight, scale = arguments["weight_int8"], arguments["scale"]

    def shifted(tensor: Tensor) -> Tensor:
        view = torch.empty(tensor.numel() + 1, dtype=torch.int8, device=device)[1:].view(tensor.shape)
        return view.copy_(tensor)

    want = w8a8_gemm(codes, weight, scale, x_scale=x_scale, out_dtype=torch.float16)
    for x, other in ((shifted(codes), weight), (codes, shifted(weight)), (shifted(codes), shifted(weight))):
        assert torch.equal(w8a8_gemm(x, other, scale, x_scale=x_scale, out_dtype=torch.float16), want)


def test_codes_may_have_any_strides(device: str) -> None:
    arguments = operands(5, 24, 48, device)
    codes, x_scale = quantize_per_token(arguments["x"])
    weight, scale = arguments["weight_int8"], arguments["scale"]

    def product(x: Tensor, weight: Tensor, x_scale: Tensor) -> Tensor:
        return w8a8_gemm(x, weight, scale[: weight.shape[0]], x_scale=x_scale, out_dtype=torch.float16)

    want = product(codes, weight, x_scale)
    gaps = torch.cat([codes, codes], 1)[:, :48]
    assert torch.equal(product(gaps, weight, x_scale), want)
    assert torch.equal(product(codes[:1].expand(5, 48), weight, x_scale[:1].expand(5)), want[:1].expand(5, 24))
    # A single row has no stride of its own, whatever it says.
    odd = codes.as_strided((1, 48), (5, 1))
    assert torch.equal(product(odd, weight, x_scale[:1]), want[:1])
    assert torch.equal(product(codes, weight.as_strided((1, 48), (7, 1)), x_scale), want[:, :1])


@each_product
def test_weights_with_any_strides_and_scales_of_any_shape(name: str, device: str) -> None:
    arguments = operands(3, 32, 32, device)
    want = call(name, arguments)
    weight = arguments["weight_int8"]
    for view in (weight.t().contiguous().t(), torch.stack([weight, weight], -1)[..., 0]):
        assert torch.equal(call(name, {**arguments, "weight_int8": view}), want)
    for shape in ((32, 1), (1, 32)):
        views = {key: arguments[key].view(shape) for key in ("scale", "zero_point")}
        assert torch.equal(call(name, {**arguments, **views}), want)
    one = {"scale": torch.tensor(0.5, device=device), "zero_point": torch.tensor(-3, dtype=torch.int32, device=device)}
    want = call(name, {**arguments, **{key: value.expand(32) for key, value in one.items()}})
    for shape in ((), (1,)):
        assert torch.equal(call(name, {**arguments, **{key: value.view(shape) for key, value in one.items()}}), want)


@each_product
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be a torch.Tensor, got list"),
        ({"x": torch.ones(2, 16, dtype=torch.int32)}, TypeError, "x must have dtype"),
        ({"x": torch.ones(2, 15)}, ValueError, r"x must have shape \[\.\.\., 16\], got \(2, 15\)"),
        ({"x": torch.tensor(1.0)}, ValueError, "x must have shape"),
        ({"weight_int8": torch.ones(8, 16)}, TypeError, "weight_int8 must have dtype int8, got float32"),
        ({"weight_int8": torch.ones(8, dtype=torch.int8)}, ValueError, "weight_int8 must have shape"),
        ({"scale": torch.ones(16)}, ValueError, r"scale must have shape \(8,\)"),
        ({"scale": torch.ones(8, 2)}, ValueError, r"scale must have shape \(8,\)"),
        ({"scale": None}, TypeError, "scale must be a torch.Tensor, got NoneType"),
        ({"scale": torch.ones(8, dtype=torch.int32)}, TypeError, "scale must have dtype"),
        ({"zero_point": torch.ones(16, dtype=torch.int8)}, ValueError, r"zero_point must have shape \(8,\)"),
        ({"zero_point": torch.ones(8, dtype=torch.int64)}, TypeError, "zero_point must have dtype"),
        ({"bias": torch.ones(16)}, ValueError, r"bias must have shape \(8,\), got \(16,\)"),
        ({"bias": torch.ones(8, dtype=torch.int8)}, TypeError, "bias must have dtype"),
        ({"bias": torch.ones(8, device="meta")}, ValueError, "bias must be on the device of x"),
    ],
)
def test_bad_arguments_are_named(name: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments = {**operands(2, 8, 16, "cpu"), **change}
    with pytest.raises(error, match=message):
        call(name, arguments)


def test_a_weight_that_is_not_prepared_is_refused() -> None:
    arguments = operands(2, 8, 16, "cpu")
    with pytest.raises(TypeError, match="weight must be a PackedInt8Weight, got Tensor: prepare it by its pack"):
        int8_linear(arguments["x"], arguments["weight_int8"])


def test_codes_need_their_scale_and_a_dtype_of_the_result() -> None:
    codes, weight, scale = torch.ones(2, 3, 16, dtype=torch.int8), torch.ones(8, 16, dtype=torch.int8), torch.ones(8)
    x_scale = torch.ones(2, 3)
    with pytest.raises(ValueError, match="x_scale must be given for an int8 x"):
        w8a8_gemm(codes, weight, scale, out_dtype=torch.float16)
    with pytest.raises(ValueError, match="out_dtype must be given for an int8 x"):
        w8a8_gemm(codes, weight, scale, x_scale=x_scale)
    with pytest.raises(ValueError, match=r"x_scale must have shape \(2, 3\), got \(6,\)"):
        w8a8_gemm(codes, weight, scale, x_scale=x_scale.flatten(), out_dtype=torch.float16)
    with pytest.raises(ValueError, match="x_scale must be None unless x is int8"):
        w8a8_gemm(codes.half(), weight, scale, x_scale=x_scale)
    with pytest.raises(ValueError, match="out_dtype must be one of"):
        w8a8_gemm(codes, weight, scale, x_scale=x_scale, out_dtype=torch.int32)
    with pytest.raises(TypeError, match="x must have dtype"):
        int8_gemm(codes, weight, scale)


@pytest.mark.parametrize("has_zero_point", [False, True])
def test_codes_made_beforehand_give_the_same_as_codes_made_within(has_zero_point: bool, device: str) -> None:
    arguments = operands(5, 40, 64, device)
    if not has_zero_point:
        arguments["zero_point"] = None
    codes, x_scale = quantize_per_token(arguments["x"])
    given = {"x_scale": x_scale, "out_dtype": torch.float16, "zero_point": arguments["zero_point"]}
    got = w8a8_gemm(codes, arguments["weight_int8"], arguments["scale"], arguments["bias"], **given)
    assert torch.equal(got, call("w8a8_gemm", arguments))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 16), (2, 3, 130), (0, 8), (3, 2500)], ids=str)
def test_codes_and_scales_are_bit_for_bit_those_of_the_utilities(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype) * 3
    codes, x_scale = quantize_per_token(x)
    assert (codes.dtype, x_scale.dtype, x_scale.shape) == (torch.int8, torch.float32, x.shape[:-1])
    want_codes, want_scale = quantize_per_token_torch(x.cpu())
    assert torch.equal(codes.cpu(), want_codes)
    assert torch.equal(x_scale.cpu(), want_scale)
    if x.dim() == 2 and x.numel():
        assert all(map(torch.equal, (codes.cpu(), x_scale.cpu()), quantize_symmetric(x.cpu(), dim=1)))


@pytest.fixture
def sums_in_fp32() -> Iterator[None]:
    """Keep PyTorch from letting cuBLAS add up parts of a sum in 16 bits."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction
    settings.allow_fp16_reduced_precision_reduction = settings.allow_bf16_reduced_precision_reduction = False
    yield
    settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction = before


@pytest.mark.usefixtures("sums_in_fp32")
@pytest.mark.parametrize("name", ["int8_gemm", "int8_linear"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("k", [136, 700])
def test_many_rows_by_weights_dequantised_in_parts(
    name: str, dtype: torch.dtype, k: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm, "WORKSPACE_BYTES", 64 * k * dtype.itemsize)
    for n in (1, 16, 81):
        arguments = operands(401, n, k, device, dtype)
        if name == "int8_gemm":
            arguments["zero_point"] = None
        got = call(name, arguments)
        # The weight is rounded to the dtype, as it is here.
        zeros = 0 if arguments["zero_point"] is None else arguments["zero_point"].float()[:, None]
        weight = ((arguments["weight_int8"].float() - zeros) * arguments["scale"][:, None]).to(dtype)
        want = arguments["x"].double() @ weight.double().T + arguments["bias"].double()
        magnitude = float((arguments["x"].double().abs() @ weight.double().abs().T).max())
        if device == "cpu" and not interpreting():
            check(name, arguments, got)
        else:
            assert_close(got, want.to(dtype), rounding_tolerance(dtype, k, magnitude=magnitude))


@each_product
@pytest.mark.parametrize("m", [3, 401])
def test_autocast_changes_nothing(name: str, m: int, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        arguments = operands(m, 24, 48, device, dtype)
        want = call(name, arguments)
        with torch.autocast(device, torch.bfloat16):
            got = call(name, arguments)
        assert got.dtype == dtype
        assert torch.equal(got, want)


def test_zero_points_beyond_int8_do_not_wrap(device: str) -> None:
    # 2^17 - 1 codes of 127 times this zero point are far beyond int32.
    k, zero_point = 2**17 - 1, torch.tensor([70_000], dtype=torch.int32, device=device)
    x, weight = torch.ones(1, k, device=device), torch.full((1, k), -128, dtype=torch.int8, device=device)
    one = torch.ones(1, device=device)
    got = w8a8_gemm(x, weight, one, zero_point=zero_point, out_dtype=torch.float32)
    assert_close(got, torch.full((1, 1), -70_128.0 * k, device=device), rounding_tolerance(torch.float32, k))


def test_rows_further_apart_than_the_kernels_reach(device: str) -> None:
    arguments = operands(2, 8, 16, device)
    memory = torch.zeros(2**24 + 32, dtype=torch.float16, device=device)
    far = memory.as_strided((2, 16), (2**24, 1))
    far.copy_(arguments["x"])
    assert _plans.rows_of(far).stride(0) == 16
    for name in PRODUCTS:
        assert torch.equal(call(name, {**arguments, "x": far}), call(name, arguments))


def test_rows_of_zeros_and_of_what_is_not_finite_keep_to_themselves(device: str) -> None:
    arguments = operands(6, 24, 48, device)
    clean = call("w8a8_gemm", arguments)
    x = arguments["x"].clone()
    x[1], x[2, 7], x[4, 0] = 0.0, float("inf"), float("nan")
    got = call("w8a8_gemm", {**arguments, "x": x})
    assert torch.equal(got[1], arguments["bias"])
    assert got[[2, 4]].isnan().all()
    assert torch.equal(got[[0, 3, 5]], clean[[0, 3, 5]])
    for name in ("int8_gemm", "int8_linear"):
        clean, got = call(name, arguments), call(name, {**arguments, "x": x})
        assert not got[[2, 4]].isfinite().any()
        assert torch.equal(got[[0, 3, 5]], clean[[0, 3, 5]])
        assert torch.equal(got[1], arguments["bias"])


@each_product
def test_gradients_of_activations_and_bias(name: str, device: str) -> None:
    arguments = operands(4, 12, 20, device, torch.float32)
    x, bias = arguments["x"].requires_grad_(), arguments["bias"].requires_grad_()
    dy = torch.randn(4, 12, generator=torch.Generator().manual_seed(1)).to(device)
    call(name, arguments).backward(dy)
    weight = arguments["weight_int8"].double() - arguments["zero_point"].double()[:, None]
    want = dy.double() @ (weight * arguments["scale"].double()[:, None])
    assert_close(x.grad, want.float(), rounding_tolerance(torch.float32, 12, magnitude=float(want.abs().max())))
    assert_close(bias.grad, dy.sum(0), rounding_tolerance(torch.float32, 4))


@each_product
def test_a_gradient_of_the_frozen_weight_is_refused(name: str, device: str) -> None:
    arguments = operands(4, 12, 20, device)
    arguments["scale"].requires_grad_()
    with pytest.raises(NotImplementedError, match="scale is frozen"):
        call(name, arguments).sum().backward()


@each_product
def test_compiled_without_graph_breaks(name: str, device: str) -> None:
    torch._dynamo.reset()
    arguments = operands(4, 12, 20, device)
    weight = PackedInt8Weight.pack(arguments["weight_int8"], arguments["scale"], arguments["zero_point"])

    def layer(x: Tensor) -> Tensor:
        if name == "int8_linear":
            return int8_linear(x, weight, arguments["bias"]) + 1
        return call(name, {**arguments, "x": x}) + 1

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for m in (4, 4, 7):
        x = operands(m, 12, 20, device)["x"]
        assert torch.equal(compiled(x), layer(x))


def test_opcheck(device: str) -> None:
    arguments = operands(4, 12, 20, device, torch.float32)
    x, bias = arguments["x"].requires_grad_(), arguments["bias"].requires_grad_()
    weight, scale, zero_point = (arguments[key] for key in ("weight_int8", "scale", "zero_point"))
    packed_weight = PackedInt8Weight.pack(weight, scale, zero_point)
    operators = torch.ops.tk_int8_gemm
    torch.library.opcheck(operators.int8_gemm.default, (x, weight, scale, bias, zero_point))
    torch.library.opcheck(operators.w8a8_gemm.default, (x, weight, scale, bias, zero_point, None, None))
    rest = (packed_weight.codes, packed_weight.scale, packed_weight.zero_point, bias, 12, 20)
    torch.library.opcheck(operators.int8_linear.default, (x, *rest))
    torch.library.opcheck(operators.quantize_per_token.default, (x.detach(),))


def test_switches_of_the_earlier_interface_are_ignored_with_a_warning(device: str) -> None:
    arguments = operands(2, 8, 16, device)
    rest = [arguments[key] for key in ("x", "weight_int8", "scale", "bias")]
    want = int8_gemm(*rest)
    for name in ("weight_transposed", "scale_fp16", "use_cublas"):
        with pytest.warns(DeprecationWarning, match=f"{name} is ignored"):
            assert torch.equal(int8_gemm(*rest, **{name: True}), want)


@each_product
def test_the_same_bits_in_every_run(name: str, device: str) -> None:
    sizes = [(1, 64, 256), (8, 64, 256), (16, 64, 256), (40, 64, 256)]
    if device == "cuda":
        # A round of tall tiles, and tiles that programs go through in turns.
        sizes += [(200, 9216, 4096), (300, 28_672, 512)]
    for m, n, k in sizes:
        arguments = operands(m, n, k, device)
        first = call(name, arguments)
        for _ in range(50 if device == "cuda" else 2):
            assert torch.equal(call(name, arguments), first)
