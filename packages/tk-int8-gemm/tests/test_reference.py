"""The references against integers, float64 and each other; they are what the kernels are held against."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from tk_int8_gemm._quantize import quantize_symmetric, quantize_weight_per_channel_asymmetric
from tk_int8_gemm._reference import int8_gemm_torch, quantize_per_token_torch, w8a8_gemm_torch
from tk_kernel_core.numerics import rounding_tolerance
from tk_testkit.close import assert_close
from tk_testkit.strategies import assert_guards_intact, guarded_view, shapes, strides_for

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INF, NAN = math.inf, math.nan
REFERENCES = (int8_gemm_torch, w8a8_gemm_torch)
Reference = Callable[..., torch.Tensor]


def operands(
    rows: int, columns: int, channels: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rows + columns + channels)
    x = torch.randn(rows, columns, generator=generator).to(dtype)
    weight = torch.randn(channels, columns, generator=generator) + 0.5
    codes, scale, zero_point = quantize_weight_per_channel_asymmetric(weight)
    bias = torch.randn(channels, generator=generator).to(dtype)
    rest = {"scale": scale, "bias": bias, "zero_point": zero_point}
    return x.to(device), codes.to(device), {name: value.to(device) for name, value in rest.items()}


def test_the_zero_point_example_by_hand(device: str) -> None:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float16, device=device)
    codes = torch.tensor([[10, -3, 0, 7], [127, -128, 1, -1]], dtype=torch.int8, device=device)
    scale, bias = torch.tensor([0.5, 0.25], device=device), torch.tensor([10.0, -0.5], device=device)
    for dtype in (torch.int8, torch.int32, torch.float16, torch.float32):
        zero_point = torch.tensor([3, -128], device=device).to(dtype)
        assert int8_gemm_torch(x, codes, scale, zero_point=zero_point).tolist() == [1.0, 287.5]
        assert int8_gemm_torch(x, codes, scale, bias, zero_point=zero_point).tolist() == [11.0, 287.0]
        arguments: dict[str, Any] = {"x_scale": torch.tensor(2.0, device=device), "out_dtype": torch.float16}
        y = w8a8_gemm_torch(x.to(torch.int8), codes, scale, bias, zero_point=zero_point, **arguments)
        assert (y.dtype, y.tolist()) == (torch.float16, [12.0, 574.5])
    assert int8_gemm_torch(x, codes, scale).tolist() == [16.0, -32.5]


def test_fractions_of_a_zero_point_count(device: str) -> None:
    x = torch.tensor([[1.0, 2.0]], device=device)
    codes = torch.tensor([[1, 2]], dtype=torch.int8, device=device)
    scale, zero_point = torch.ones(1, device=device), torch.tensor([0.25], device=device)
    assert int8_gemm_torch(x, codes, scale, zero_point=zero_point).tolist() == [[4.25]]


@pytest.mark.parametrize("rows", [0, 1, 2, 15, 16, 17, 33])
@pytest.mark.parametrize("columns", [1, 10, 16, 33, 127])
def test_every_small_size_is_integer_exact(rows: int, columns: int, device: str) -> None:
    for channels in (1, 15, 48, 129):
        x = guarded_view((rows, columns), dtype=torch.int8, device=device, seed=1)
        codes = guarded_view((channels, columns), dtype=torch.int8, device=device, seed=2)
        zero_point = torch.arange(channels, dtype=torch.int32, device=device) - 20
        ones = torch.ones(rows, device=device)
        y = w8a8_gemm_torch(x, codes, ones[:0].sum() + 1, x_scale=ones, out_dtype=torch.float64)
        want = (x.long().unsqueeze(1) * codes.long()).sum(-1)
        assert (y.shape, torch.equal(y, want.double())) == ((rows, channels), True)
        y = w8a8_gemm_torch(
            x, codes, torch.ones(1, device=device), zero_point=zero_point, x_scale=ones, out_dtype=torch.float64
        )
        want = (x.long().unsqueeze(1) * (codes.long() - zero_point.long().unsqueeze(1))).sum(-1)
        assert torch.equal(y, want.double())
        y = int8_gemm_torch(x.double(), codes, torch.ones(1, device=device), zero_point=zero_point)
        assert torch.equal(y, want.double())
        assert_guards_intact(codes)


def test_long_sums_of_codes_are_exact_beyond_fp32_and_int32(device: str) -> None:
    x = torch.full((1, 2**18), 127, dtype=torch.int8, device=device)
    codes = x.clone()
    codes[0, 7] = 126
    arguments: dict[str, Any] = {"x_scale": torch.ones(1, device=device), "out_dtype": torch.float64}
    y = w8a8_gemm_torch(x, codes, torch.ones(1, device=device), **arguments)
    assert y.item() == 127 * 127 * 2**18 - 127


@pytest.mark.parametrize("zero", [False, True], ids=["symmetric", "zero_point"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 33, 15), (17, 127, 48), (2, 1000, 5)], ids=str)
def test_int8_gemm_is_the_product_with_the_dequantised_weight(
    sizes: tuple[int, int, int], dtype: torch.dtype, zero: bool, device: str
) -> None:
    x, codes, rest = operands(*sizes, dtype, device)
    zero_point = rest.pop("zero_point")
    weight = codes.double()
    if zero:
        weight = weight - zero_point.double().unsqueeze(1)
        rest["zero_point"] = zero_point
    weight = weight * rest["scale"].double().unsqueeze(1)
    want = x.double() @ weight.T + rest["bias"].double()
    y = int8_gemm_torch(x, codes, **rest)
    assert y.dtype == dtype
    magnitude = float((x.double().abs() @ weight.abs().T).max() + rest["bias"].double().abs().max())
    assert_close(y, want.to(dtype), rounding_tolerance(dtype, sizes[1], magnitude=magnitude))
    # For float64 the reference is the formula itself.
    exact = int8_gemm_torch(x.double(), codes, **rest)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(exact, want, rtol=1e-13, atol=1e-13 * magnitude)


@pytest.mark.parametrize("zero", [False, True], ids=["symmetric", "zero_point"])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_w8a8_is_the_exact_product_of_both_quantised_operands(dtype: torch.dtype, zero: bool, device: str) -> None:
    x, codes, rest = operands(5, 96, 12, dtype, device)
    zero_point = rest.pop("zero_point")
    if zero:
        rest["zero_point"] = zero_point
    x_codes, x_scale = quantize_per_token_torch(x)
    shifted = codes.long() - (zero_point.long().unsqueeze(1) if zero else 0)
    sums = (x_codes.long().unsqueeze(1) * shifted).sum(-1).double()
    want = sums * x_scale.double().unsqueeze(1) * rest["scale"].double() + rest["bias"].double()
    y = w8a8_gemm_torch(x, codes, **rest)
    # Rounded once, and so bitwise the exact value.
    assert (y.dtype, torch.equal(y, want.to(dtype))) == (dtype, True)
    for out_dtype in DTYPES:
        y = w8a8_gemm_torch(x, codes, **rest, out_dtype=out_dtype)
        assert (y.dtype, torch.equal(y, want.to(out_dtype))) == (out_dtype, True)
        y = w8a8_gemm_torch(x_codes, codes, **rest, x_scale=x_scale, out_dtype=out_dtype)
        assert torch.equal(y, want.to(out_dtype))


@pytest.mark.parametrize("reference", REFERENCES)
def test_zero_and_tiny_rows_give_the_bias_and_leave_the_others_alone(reference: Reference, device: str) -> None:
    for dtype in DTYPES:
        x, codes, rest = operands(4, 64, 7, dtype, device)
        x[2] = 0
        y = reference(x, codes, **rest)
        assert torch.equal(y[2], rest["bias"])
        x[2] = torch.tensor(2.0**-120).to(dtype)
        assert torch.equal(reference(x, codes, **rest), y)
        del rest["bias"]
        x[2] = 0
        assert not reference(x, codes, **rest)[2].any()


@pytest.mark.parametrize("zero", [False, True], ids=["symmetric", "zero_point"])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype, bad: float, zero: bool, device: str) -> None:
    x, codes, rest = operands(4, 64, 7, dtype, device)
    if not zero:
        del rest["zero_point"]
    spoilt = x.clone()
    spoilt[1, 5] = bad
    others = [0, 2, 3]
    for reference in REFERENCES:
        y = reference(spoilt, codes, **rest)
        assert torch.equal(y[others], reference(x, codes, **rest)[others])
        assert not y[1].isfinite().any()
        assert bool(y[1].isnan().all()) or reference is int8_gemm_torch
        assert bool(y[1].isnan().all()) or not math.isnan(bad)


def test_a_row_of_1e_minus_30_is_quantised_like_any_other(device: str) -> None:
    x, codes, rest = operands(2, 64, 7, torch.float32, device)
    del rest["bias"]
    small = w8a8_gemm_torch(x * 2.0**-100, codes, **rest)
    # Powers of two change nothing but the exponent.
    assert torch.equal(small, w8a8_gemm_torch(x, codes, **rest) * 2.0**-100)
    assert bool(w8a8_gemm_torch(torch.full_like(x, 1e-30), codes, **rest).all())


@pytest.mark.parametrize("reference", REFERENCES)
def test_scales_and_zero_points_of_every_shape(reference: Reference, device: str) -> None:
    x, codes, rest = operands(3, 20, 6, torch.float16, device)
    want = reference(x, codes, **rest)
    scale, zero_point = rest.pop("scale"), rest.pop("zero_point")
    for shape in ((6,), (6, 1), (1, 6)):
        y = reference(x, codes, scale.view(shape), zero_point=zero_point.view(shape), **rest)
        assert torch.equal(y, want)
    want = reference(x, codes, scale[2].expand(6), zero_point=zero_point[2].expand(6), **rest)
    for shape in ((), (1,)):
        y = reference(x, codes, scale[2].view(shape), zero_point=zero_point[2].view(shape), **rest)
        assert torch.equal(y, want)


@pytest.mark.parametrize("reference", REFERENCES)
def test_any_number_of_dimensions(reference: Reference, device: str) -> None:
    x, codes, rest = operands(30, 20, 6, torch.bfloat16, device)
    want = reference(x, codes, **rest)
    assert torch.equal(reference(x.view(2, 3, 5, 20), codes, **rest), want.view(2, 3, 5, 6))
    assert torch.equal(reference(x[:1].view(20), codes, **rest), reference(x[:1], codes, **rest)[0])
    for shape in ((0, 20), (3, 0, 20)):
        y = reference(x[:0].view(shape), codes, **rest)
        assert (tuple(y.shape), y.dtype) == ((*shape[:-1], 6), torch.bfloat16)


@pytest.mark.parametrize("reference", [*REFERENCES, quantize_per_token_torch])
@given(data=st.data())
def test_strides_make_no_difference(reference: Callable[..., Any], data: st.DataObject) -> None:
    shape = data.draw(shapes(max_side=12, max_elements=400))
    x = guarded_view(shape, data.draw(strides_for(shape)))
    weight = (guarded_view((5, shape[-1]), data.draw(strides_for((5, shape[-1]))), torch.int8),)
    rest = () if reference is quantize_per_token_torch else (*weight, torch.full((5,), 0.01))
    got = reference(x, *rest)
    want = reference(x.contiguous(), *(value.contiguous() for value in rest))
    if reference is quantize_per_token_torch:
        assert got[0].is_contiguous()
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    else:
        assert got.is_contiguous()
        assert_close(got, want, rounding_tolerance(torch.float32, shape[-1], magnitude=4 * 1.28 * shape[-1]))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_per_token_codes_are_the_symmetric_ones_of_every_row(dtype: torch.dtype, device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 3, 5, 33, generator=generator) * torch.logspace(-3, 3, 5).view(5, 1)).to(dtype).to(device)
    x[1, 1, 1] = 0
    codes, scale = quantize_per_token_torch(x)
    want, want_scale = quantize_symmetric(x, dim=-1)
    assert (codes.dtype, scale.dtype, codes.is_contiguous()) == (torch.int8, torch.float32, True)
    assert torch.equal(codes, want)
    assert torch.equal(scale, want_scale)
    assert scale[1, 1, 1] == 1
    one, one_scale = quantize_per_token_torch(x[0, 0, 0])
    assert torch.equal(one, codes[0, 0, 0])
    assert (one_scale.shape, bool(one_scale == scale[0, 0, 0])) == ((), True)
    none, none_scale = quantize_per_token_torch(x[:0])
    assert (tuple(none.shape), tuple(none_scale.shape)) == ((0, 3, 5, 33), (0, 3, 5))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_rows_that_are_not_finite_have_scale_nan_and_codes_zero(dtype: torch.dtype, bad: float, device: str) -> None:
    x = torch.randn(3, 9, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    want, want_scale = quantize_per_token_torch(x)
    x[1, 4] = bad
    codes, scale = quantize_per_token_torch(x)
    assert not codes[1].any()
    assert scale.isnan().tolist() == [False, True, False]
    assert torch.equal(codes[[0, 2]], want[[0, 2]])
    assert torch.equal(scale[[0, 2]], want_scale[[0, 2]])


def test_gradients_of_int8_gemm_are_those_of_the_formula(device: str) -> None:
    x, codes, rest = operands(3, 5, 4, torch.float64, device)
    scale, bias, zero_point = rest["scale"], rest["bias"].requires_grad_(), rest["zero_point"]
    x.requires_grad_()

    def call(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return int8_gemm_torch(x, codes, scale, bias, zero_point=zero_point)

    assert torch.autograd.gradcheck(call, (x, bias))
    assert torch.autograd.gradgradcheck(call, (x, bias))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_w8a8_are_as_if_x_had_not_been_quantised(dtype: torch.dtype, device: str) -> None:
    x, codes, rest = operands(4, 24, 6, dtype, device)
    x[1] = 0
    dy = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).to(dtype).to(device)
    bias = rest.pop("bias").requires_grad_()
    x.requires_grad_()
    y = w8a8_gemm_torch(x, codes, bias=bias, **rest)
    dx, dbias = torch.autograd.grad(y, (x, bias), dy)
    assert (dx.dtype, dbias.dtype) == (dtype, dtype)
    weight = (codes.double() - rest["zero_point"].double().unsqueeze(1)) * rest["scale"].double().unsqueeze(1)
    tolerance = rounding_tolerance(dtype, 6, magnitude=float((dy.double().abs() @ weight.abs()).max()))
    assert_close(dx, (dy.double() @ weight).to(dtype), tolerance)
    assert_close(dbias, dy.double().sum(0).to(dtype), rounding_tolerance(dtype, 4, magnitude=8.0))
    # The value is the same without a gradient.
    with torch.no_grad():
        assert torch.equal(w8a8_gemm_torch(x, codes, bias=bias, **rest), y)
    assert not any(result.requires_grad for result in quantize_per_token_torch(x))


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_meta_and_fake_tensors_give_shapes_and_dtypes(kind: str) -> None:
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        x = torch.empty(2, 3, 8, dtype=torch.bfloat16)
        codes, scale = torch.empty(5, 8, dtype=torch.int8), torch.empty(5)
        for reference in REFERENCES:
            y = reference(x, codes, scale, scale, zero_point=scale)
            assert (tuple(y.shape), y.dtype, y.is_contiguous()) == ((2, 3, 5), torch.bfloat16, True)
        x_codes, x_scale = quantize_per_token_torch(x)
        assert (tuple(x_codes.shape), x_codes.dtype) == ((2, 3, 8), torch.int8)
        assert (tuple(x_scale.shape), x_scale.dtype) == ((2, 3), torch.float32)
        y = w8a8_gemm_torch(x_codes, codes, scale, x_scale=x_scale, out_dtype=torch.float16)
        assert (tuple(y.shape), y.dtype, y.is_meta) == ((2, 3, 5), torch.float16, kind == "meta")


@pytest.mark.parametrize("reference", REFERENCES)
def test_compiled_in_one_graph_for_every_number_of_rows(reference: Reference, device: str) -> None:
    compiled = torch.compile(reference, backend="eager", fullgraph=True, dynamic=True)
    for rows in (7, 3, 12):
        x, codes, rest = operands(rows, 16, 6, torch.float16, device)
        assert torch.equal(compiled(x, codes, **rest), reference(x, codes, **rest))


def test_autocast_does_not_round_the_operands(device: str) -> None:
    x, codes, rest = operands(3, 33, 6, torch.float32, device)
    want = int8_gemm_torch(x, codes, **rest)
    with torch.autocast(device, torch.bfloat16):
        assert torch.equal(int8_gemm_torch(x, codes, **rest), want)


X, C, S = torch.ones(2, 4), torch.ones(3, 4, dtype=torch.int8), torch.ones(3)


@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": X[:, :3]}, ValueError, "x must have shape [..., 4], got (2, 3)"),
        ({"x": X[0, 0]}, ValueError, "x must have shape [..., 4], got ()"),
        ({"x": X.int()}, TypeError, "x must have dtype float16, bfloat16, float32, float64"),
        ({"weight_int8": C[0]}, ValueError, "weight_int8 must have shape [N, K], got (4,)"),
        ({"weight_int8": C.float()}, TypeError, "weight_int8 must have dtype int8, got float32"),
        (
            {"scale": torch.ones(4)},
            ValueError,
            "scale must have shape (3,), or (), (1,), (3, 1) or (1, 3), got (4,)",
        ),
        ({"scale": C[:, 0]}, TypeError, "scale must have dtype float16, bfloat16, float32, float64, got int8"),
        ({"scale": 1.0}, TypeError, "scale must be a torch.Tensor, got float"),
        (
            {"zero_point": torch.ones(2)},
            ValueError,
            "zero_point must have shape (3,), or (), (1,), (3, 1) or (1, 3), got (2,)",
        ),
        ({"zero_point": S.bool()}, TypeError, "zero_point must have dtype int8, int32, float16"),
        ({"bias": torch.ones(1)}, ValueError, "bias must have shape (3,), got (1,)"),
        ({"bias": C[:, 0]}, TypeError, "bias must have dtype float16, bfloat16, float32, float64, got int8"),
    ],
)
def test_references_name_what_they_refuse(
    reference: Reference, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        reference(**{"x": X, "weight_int8": C, "scale": S, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": X.to(torch.int8)}, ValueError, "x_scale must be given for an int8 x, got None"),
        ({"x": X.to(torch.int8), "x_scale": S[:2]}, ValueError, "out_dtype must be given for an int8 x, got None"),
        (
            {"x": X.to(torch.int8), "x_scale": S, "out_dtype": torch.float16},
            ValueError,
            "x_scale must have shape (2,), got (3,)",
        ),
        (
            {"x": X.to(torch.int8), "x_scale": S[:2].half(), "out_dtype": torch.float16},
            TypeError,
            "x_scale must have dtype float32, got float16",
        ),
        ({"x_scale": S[:2]}, ValueError, "x_scale must be None unless x is int8, got (2,) with torch.float32"),
        ({"out_dtype": torch.int8}, ValueError, "out_dtype must be one of torch.float16"),
    ],
)
def test_w8a8_names_what_it_refuses_besides(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}"):
        w8a8_gemm_torch(**{"x": X, "weight_int8": C, "scale": S, **arguments})


@pytest.mark.parametrize("x", [torch.tensor(1.0), torch.ones(2, 0)])
def test_per_token_names_what_it_refuses(x: torch.Tensor) -> None:
    wanted = f"x must have shape [..., K] with K from 1, got {tuple(x.shape)}"
    with pytest.raises(ValueError, match=f"^{re.escape(wanted)}$"):
        quantize_per_token_torch(x)
    with pytest.raises(TypeError, match=r"^x must have dtype float16, bfloat16, float32, float64, got int8$"):
        quantize_per_token_torch(torch.ones(2, 2, dtype=torch.int8))
