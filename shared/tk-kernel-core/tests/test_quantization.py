"""The rule of int8 quantisation per token."""

import pytest
import torch

from tk_kernel_core.quantization import encode, quantize_per_token_torch, symmetric_steps


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_scales_are_the_largest_magnitudes_over_127_and_halves_go_to_even(dtype: torch.dtype, device: str) -> None:
    x = torch.tensor([[-127.0, 0.5, 1.5, -2.5], [0.25, -0.5, 0.0, 0.125]], dtype=dtype, device=device)
    codes, x_scale = quantize_per_token_torch(x.t().contiguous().t())
    assert (codes.dtype, x_scale.dtype, codes.is_contiguous()) == (torch.int8, torch.float32, True)
    assert codes.tolist() == [[-127, 0, 2, -2], [64, -127, 0, 32]]
    assert torch.equal(x_scale.cpu(), torch.tensor([127.0, 0.5]) / torch.full((2,), 127.0))


def test_both_quotients_are_divisions_and_not_products_with_reciprocals(device: str) -> None:
    largest = torch.rand(4096, 1, generator=torch.Generator().manual_seed(0)).to(device)
    scale, factor = symmetric_steps(torch.zeros_like(largest), largest)
    exact = largest.double().cpu()
    assert torch.equal(scale.cpu(), (exact / 127).float())
    assert torch.equal(factor.cpu(), (127 / exact).float())


def test_rows_without_a_scale_have_codes_0(device: str) -> None:
    x = torch.ones(6, 3, device=device)
    x[0, 1], x[1, 2], x[2, 0], x[3], x[4] = float("nan"), float("inf"), float("-inf"), 0.0, 2.0**-111
    codes, x_scale = quantize_per_token_torch(x)
    assert x_scale.isnan().tolist() == [True, True, True, False, False, False]
    assert x_scale[3:5].tolist() == [1.0, 1.0]
    assert codes.tolist() == [[0, 0, 0]] * 5 + [[127, 127, 127]]


def test_codes_with_a_zero_point_keep_within_their_range() -> None:
    values, one = torch.tensor([-200.0, -1.5, 0.5, 200.0, float("nan")]), torch.tensor(1.0)
    assert encode(values, one, torch.tensor(2.0), -128).tolist() == [-128, 0, 2, 127, 0]
    assert encode(values, one, None, -127).tolist() == [-127, -2, 0, 127, 0]


@pytest.mark.parametrize("shape", [(), (4, 0)])
def test_rows_without_elements_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"x must have shape \[\.\.\., K\] with K from 1"):
        quantize_per_token_torch(torch.ones(shape))
    with pytest.raises(TypeError, match="x must have dtype float16, bfloat16, float32, float64, got int8"):
        quantize_per_token_torch(torch.ones(4, 4, dtype=torch.int8))
