"""The references against integers, float64 and each other; they are what the kernels will be held against."""

from typing import Any

import pytest
import torch

from tk_kernel_core.numerics import rounding_tolerance
from tk_testkit.close import assert_close
from tk_w4a16 import (
    PackedInt4Weight,
    dequantize_int4,
    pack_int4,
    quantize_weight_int4_grouped,
    w4a16_linear_torch,
    w4a16_reference,
)

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def plain(k: int, n: int, group_size: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weight = torch.randn(k, n, generator=torch.Generator().manual_seed(k * n)).half().to(device)
    return quantize_weight_int4_grouped(weight, group_size)


def test_every_group_counts_with_its_own_scale(device: str) -> None:
    packed = pack_int4(torch.full((64, 1), 9, device=device))
    scales = torch.tensor([[1.0], [10.0]], device=device)
    for dtype in DTYPES:
        x = torch.ones(1, 64, dtype=dtype, device=device)
        assert w4a16_reference(x, packed, scales, None, 32).tolist() == [[352.0]]
        weight = PackedInt4Weight.from_int4(packed, scales, None, 32)
        assert w4a16_linear_torch(x, weight).tolist() == [[352.0]]


@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 512, -1])
def test_the_identity_brings_the_dequantised_weight_back(group_size: int, device: str) -> None:
    packed, scales, zeros = plain(128, 24, group_size, device)
    eye = torch.eye(128, dtype=torch.float16, device=device)
    want = dequantize_int4(packed, scales, zeros, group_size)
    assert torch.equal(w4a16_reference(eye, packed, scales, zeros, group_size), want)
    if group_size != 16:
        weight = PackedInt4Weight.from_int4(packed, scales, zeros, group_size)
        assert torch.equal(w4a16_linear_torch(eye, weight), want)


@pytest.mark.parametrize("n", [1, 8, 24, 48, 64, 136, 1000])
def test_output_features_need_not_fill_tiles(n: int, device: str) -> None:
    packed, scales, zeros = plain(128, n, 64, device)
    eye = torch.eye(128, dtype=torch.float16, device=device)
    y = w4a16_linear_torch(eye, PackedInt4Weight.from_int4(packed, scales, zeros, 64))
    assert torch.equal(y, dequantize_int4(packed, scales, zeros, 64))


@pytest.mark.parametrize("k", [64, 4096])
def test_minus_one_is_one_group_of_all_input_features(k: int, device: str) -> None:
    packed, scales, zeros = plain(k, 8, -1, device)
    x = torch.randn(3, k, generator=torch.Generator().manual_seed(0)).to(device)
    want = w4a16_reference(x, packed, scales, zeros, -1)
    for group_size in (k, 2 * k):
        assert torch.equal(w4a16_reference(x, packed, scales, zeros, group_size), want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale_dtype", DTYPES[:3], ids=str)
def test_the_result_has_the_dtype_of_x_whatever_that_of_the_scales(
    dtype: torch.dtype, scale_dtype: torch.dtype, device: str
) -> None:
    packed, scales, zeros = plain(96, 10, 32, device)
    generator = torch.Generator().manual_seed(1)
    x, bias = (torch.randn(*shape, generator=generator).to(dtype).to(device) for shape in ((5, 96), (10,)))
    scales = scales.to(scale_dtype)
    weight = PackedInt4Weight.from_int4(packed, scales, zeros, 32)
    exact = x.double() @ dequantize_int4(packed, scales.double(), zeros, 32)
    tolerance = rounding_tolerance(dtype, 96, magnitude=float(exact.abs().max()))
    y = w4a16_reference(x, packed, scales, zeros, 32)
    assert y.dtype == dtype
    assert_close(y, exact, tolerance)
    assert torch.equal(w4a16_linear_torch(x, weight), y)
    y = w4a16_linear_torch(x, weight, bias)
    assert y.dtype == dtype
    assert_close(y, exact + bias.double(), tolerance)


def test_a_difference_of_zero_stays_zero_under_a_large_scale(device: str) -> None:
    packed = pack_int4(torch.full((32, 1), 15, device=device))
    scales = torch.full((1, 1), 5000.0, dtype=torch.float16, device=device)
    x = torch.full((1, 32), 100.0, dtype=torch.float16, device=device)
    assert w4a16_reference(x, packed, scales, torch.full_like(scales, 15.0)).item() == 0.0


def test_fractions_of_a_zero_point_count(device: str) -> None:
    packed = pack_int4(torch.tensor([[1], [2]] + [[0]] * 6, device=device))
    x = torch.tensor([1.0, 2.0] + [0.0] * 6, device=device)
    ones = torch.ones(1, 1, device=device)
    assert w4a16_reference(x, packed, ones, ones * 0.25).tolist() == [4.25]


@pytest.mark.parametrize("shape", [(64,), (0, 64), (2, 3, 5, 64)], ids=str)
def test_leading_dimensions_are_kept_and_strides_do_not_matter(shape: tuple[int, ...], device: str) -> None:
    packed, scales, zeros = plain(64, 12, 32, device)
    x = torch.randn(*shape[:-1], 128, generator=torch.Generator().manual_seed(0)).half().to(device)[..., ::2]
    y = w4a16_reference(x, packed, scales, zeros, 32)
    assert y.shape == (*shape[:-1], 12)
    assert torch.equal(y, w4a16_reference(x.contiguous(), packed, scales, zeros, 32))


def test_infinity_and_nan_stay_in_their_row(device: str) -> None:
    packed, scales, zeros = plain(64, 12, 32, device)
    x = torch.ones(3, 64, dtype=torch.float16, device=device)
    x[0, 3], x[2, 5] = torch.inf, torch.nan
    y = w4a16_reference(x, packed, scales, zeros, 32)
    assert y.isfinite().all(-1).tolist() == [False, True, False]


def test_gradients_of_x_and_bias_are_those_of_the_dequantised_product(device: str) -> None:
    packed, scales, zeros = plain(64, 12, 32, device)
    weight = PackedInt4Weight.from_int4(packed, scales, zeros, 32)
    x = torch.ones(3, 64, dtype=torch.float64, device=device, requires_grad=True)
    bias = torch.zeros(12, dtype=torch.float64, device=device, requires_grad=True)
    w4a16_linear_torch(x, weight, bias).sum().backward()
    assert torch.equal(x.grad, weight.dequantize(torch.float64).sum(0).expand(3, 64))
    assert bias.grad.tolist() == [3.0] * 12


def test_autocast_does_not_round_the_operands(device: str) -> None:
    packed, scales, zeros = plain(64, 12, 32, device)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).to(device)
    want = w4a16_reference(x, packed, scales, zeros, 32)
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(w4a16_reference(x, packed, scales, zeros, 32), want)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": torch.ones(2, 63)}, ValueError, r"x must have shape \[..., 64\], got \(2, 63\)"),
        ({"x": torch.tensor(1.0)}, ValueError, r"x must have shape \[..., 64\], got \(\)"),
        ({"x": torch.ones(2, 64).int()}, TypeError, "x must have dtype .*, got int32"),
        ({"weight": torch.ones(12, 64)}, TypeError, "weight must be a PackedInt4Weight, got Tensor"),
        ({"bias": torch.ones(11)}, ValueError, r"bias must have shape \(12,\), got \(11,\)"),
        ({"bias": [1.0]}, TypeError, "bias must be a torch.Tensor, got list"),
        (
            {"x": torch.ones(2, 64, device="meta")},
            ValueError,
            "x must be on the device of the weight, cpu, got meta",
        ),
        (
            {"bias": torch.ones(12, device="meta")},
            ValueError,
            "bias must be on the device of the weight, cpu, got meta",
        ),
    ],
)
def test_an_error_names_the_argument(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    right = {"x": torch.ones(2, 64), "weight": PackedInt4Weight.from_float(torch.ones(12, 64), 32)}
    with pytest.raises(error, match=message):
        w4a16_linear_torch(**{**right, **arguments})
