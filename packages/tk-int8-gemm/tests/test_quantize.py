"""Quantisers: values, edges, layouts and what they refuse."""

import math
import re
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tk_int8_gemm import _quantize
from tk_int8_gemm._quantize import (
    QuantScheme,
    dequantize,
    encode,
    quantize,
    quantize_asymmetric,
    quantize_symmetric,
    quantize_weight_per_channel,
    quantize_weight_per_channel_asymmetric,
)
from tk_testkit.strategies import assert_guards_intact, guarded_view

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INF, NAN = math.inf, math.nan
LARGEST = torch.finfo(torch.float32).max
QUANTISERS = (quantize_symmetric, quantize_asymmetric)
PER_CHANNEL = (quantize_weight_per_channel, quantize_weight_per_channel_asymmetric)


def weights(rows: int, columns: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    # Rows whose sizes and centres differ.
    values = torch.randn(rows, columns, generator=generator) * torch.logspace(-3, 2, rows).unsqueeze(1)
    return (values + torch.linspace(-2, 2, rows).unsqueeze(1)).to(dtype).to(device)


def symmetric_by_numpy(row: Any) -> tuple[Any, Any]:
    row = row.astype(numpy.float32)
    largest, levels = numpy.abs(row).max(), numpy.float32(127)
    codes = numpy.clip(numpy.rint(row * (levels / largest)), -127, 127)
    return codes.astype(numpy.int8), largest / levels


def asymmetric_by_numpy(row: Any) -> tuple[Any, Any, Any]:
    row = row.astype(numpy.float32)
    low, high, levels = min(row.min(), numpy.float32(0)), max(row.max(), numpy.float32(0)), numpy.float32(255)
    factor = levels / (high - low)
    zero_point = numpy.clip(numpy.rint(numpy.float32(-128) - low * factor), -128, 127)
    codes = numpy.clip(numpy.rint(row * factor + zero_point), -128, 127)
    return codes.astype(numpy.int8), (high - low) / levels, zero_point.astype(numpy.int8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("by_numpy", [symmetric_by_numpy, asymmetric_by_numpy], ids=["symmetric", "asymmetric"])
def test_codes_scales_and_zero_points_are_the_rule_bit_for_bit(
    by_numpy: Callable[..., tuple[Any, ...]], dtype: torch.dtype, device: str
) -> None:
    weight = weights(64, 97, dtype, device)
    quantiser = (
        quantize_weight_per_channel if by_numpy is symmetric_by_numpy else quantize_weight_per_channel_asymmetric
    )
    got = quantiser(weight)
    rows = weight.float().cpu().numpy()
    want = [numpy.stack(parts) for parts in zip(*(by_numpy(row) for row in rows), strict=True)]
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one.cpu(), torch.from_numpy(other))
    assert got[1].dtype == torch.float32


def test_both_quotients_are_divisions_and_not_products_with_reciprocals(device: str) -> None:
    largest = torch.rand(4096, 1, generator=torch.Generator().manual_seed(0)).to(device)
    scale, factor = _quantize.symmetric_steps(torch.zeros_like(largest), largest)
    exact = largest.double().cpu()
    assert torch.equal(scale.cpu(), (exact / 127).float())
    assert torch.equal(factor.cpu(), (127 / exact).float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", QuantScheme)
def test_sixteen_bit_weights_give_what_their_fp32_values_give(
    scheme: QuantScheme, dtype: torch.dtype, device: str
) -> None:
    weight = weights(16, 50, dtype, device)
    for one, other in zip(quantize(weight, scheme, dim=1), quantize(weight.float(), scheme, dim=1), strict=True):
        assert one is other is None or torch.equal(one, other)


def test_fp64_weights_are_rounded_to_fp32_first(device: str) -> None:
    # In fp64 the first two would be rounded to the odd neighbours.
    weight = torch.tensor([[126.5 + 1e-9, 0.5 + 1e-12, 127 + 1e-9]], dtype=torch.float64, device=device)
    codes, scale = quantize_weight_per_channel(weight)
    assert (codes.tolist(), scale.tolist()) == ([[126, 0, 127]], [1.0])


def test_symmetric_scale_is_the_largest_magnitude_over_127(device: str) -> None:
    tensor = torch.tensor([[-254.0, 1.0, 2.9], [0.5, 63.5, -3.0]], device=device)
    codes, scale = quantize_symmetric(tensor)
    assert (codes.tolist(), scale.item(), scale.shape) == ([[-127, 0, 1], [0, 32, -2]], 2.0, ())
    codes, scale = quantize_symmetric(tensor, dim=1)
    assert (codes.tolist(), scale.tolist()) == ([[-127, 0, 1], [1, 127, -6]], [2.0, 0.5])
    codes, scale = quantize_symmetric(tensor, dim=0)
    want = (torch.tensor([254.0, 63.5, 3.0]) / torch.full((3,), 127.0)).tolist()
    assert (codes.tolist(), scale.tolist()) == ([[-127, 2, 123], [0, 127, -127]], want)


def test_asymmetric_range_includes_zero(device: str) -> None:
    tensor = torch.tensor([[-1.0, 0.0, 3.0], [1.0, 2.0, 255.0], [-255.0, -2.0, -1.0]], device=device)
    codes, scale, zero_point = quantize_asymmetric(tensor, dim=1)
    assert codes.tolist() == [[-128, -64, 127], [-127, -126, 127], [-128, 125, 126]]
    assert torch.equal(scale.cpu(), torch.tensor([4.0, 255.0, 255.0]) / torch.full((3,), 255.0))
    assert (zero_point.tolist(), zero_point.dtype) == ([-64, -128, 127], torch.int8)
    codes, scale, zero_point = quantize_asymmetric(tensor / 2)
    assert (scale.item(), zero_point.item(), scale.shape, zero_point.shape) == (1.0, 0, (), ())
    # The ends of the range, -127.5 and 127.5, go to the even neighbours, which are clamped.
    assert codes.tolist() == [[0, 0, 2], [0, 1, 127], [-128, -1, 0]]


@pytest.mark.parametrize("quantiser", QUANTISERS)
def test_one_scale_for_every_index_outside_dim(quantiser: Callable[..., tuple[torch.Tensor, ...]], device: str) -> None:
    tensor = weights(6, 20, torch.float32, device).view(2, 3, 4, 5)
    for dim in range(-4, 4):
        results = quantiser(tensor, dim=dim)
        outside = [side for index, side in enumerate(tensor.shape) if index != dim % 4]
        assert [tuple(result.shape) for result in results] == [tuple(tensor.shape)] + [tuple(outside)] * (
            len(results) - 1
        )
        lines = tensor.movedim(dim, -1).reshape(-1, tensor.shape[dim])
        for index, line in enumerate(lines):
            codes, *numbers = quantiser(line)
            assert torch.equal(results[0].movedim(dim, -1).reshape(lines.shape)[index], codes)
            assert [result.flatten()[index] for result in results[1:]] == numbers


def test_quantize_chooses_the_scheme(device: str) -> None:
    tensor = weights(3, 7, torch.float32, device)
    codes, scale, zero_point = quantize(tensor)
    assert zero_point is None
    assert torch.equal(codes, quantize_symmetric(tensor)[0])
    assert torch.equal(scale, quantize_symmetric(tensor)[1])
    for scheme in ("asymmetric", QuantScheme.ASYMMETRIC):
        for one, other in zip(quantize(tensor, scheme, dim=1), quantize_asymmetric(tensor, dim=1), strict=True):
            assert one is not None
            assert torch.equal(one, other)
    assert [scheme.value for scheme in QuantScheme] == ["symmetric", "asymmetric"]
    assert isinstance(QuantScheme.SYMMETRIC, str)


def test_per_channel_is_one_scale_per_output_channel(device: str) -> None:
    weight = weights(5, 12, torch.float16, device)
    for quantiser, general in zip(PER_CHANNEL, QUANTISERS, strict=True):
        results = quantiser(weight)
        assert [tuple(result.shape) for result in results] == [(5, 12)] + [(5,)] * (len(results) - 1)
        for one, other in zip(results, general(weight, dim=1), strict=True):
            assert torch.equal(one, other)


EDGES = (126.5, 127.4, 127.6, 128.0, 200.0, -127.4, -127.6, -128.0, -128.5, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_edges_are_rounded_half_to_even_and_clamped_not_wrapped(dtype: torch.dtype, device: str) -> None:
    values = torch.tensor(EDGES, dtype=dtype, device=device)
    one = torch.ones(1, device=device)
    halves = [0, 2, 2, 0, -2, -2]
    assert encode(values, one, None, -127).tolist() == [126, 127, 127, 127, 127, -127, -127, -127, -127, *halves]
    assert encode(values, one, None, -128).tolist() == [126, 127, 127, 127, 127, -127, -128, -128, -128, *halves]


def test_halves_go_to_even_codes_in_both_schemes(device: str) -> None:
    halves = torch.arange(-127, 127, device=device) + 0.5
    # A factor of exactly 1 in both.
    codes, scale = quantize_symmetric(torch.cat((halves, halves.new_tensor([127.0]))))
    assert scale == 1
    assert codes.tolist() == [*(round(value) for value in halves.tolist()), 127]
    codes, scale, zero_point = quantize_asymmetric(torch.cat((halves, halves.new_tensor([-128.0, 127.0]))))
    assert (scale.item(), zero_point.item()) == (1.0, 0)
    assert codes.tolist() == [*(round(value) for value in halves.tolist()), -128, 127]


def test_the_largest_magnitude_gets_127_and_minus_128_never_occurs(device: str) -> None:
    values = (127.6, 0.1, 1 / 3, 3e38, 1e-30, 65504.0)
    tensor = torch.tensor([[value, -value] for value in values], device=device)
    codes, _ = quantize_symmetric(tensor, dim=1)
    assert codes.tolist() == [[127, -127]] * len(values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_zero_row_has_scale_one_and_codes_zero(dtype: torch.dtype, device: str) -> None:
    weight = weights(4, 9, dtype, device)
    weight[1] = 0.0
    weight[2] = -0.0
    others = [0, 3]
    for quantiser in PER_CHANNEL:
        codes, scale, *zero_point = quantiser(weight)
        assert scale[1:3].tolist() == [1.0, 1.0]
        assert not codes[1:3].any()
        assert not any(part[1:3].any() for part in zero_point)
        for one, other in zip((codes, scale, *zero_point), quantiser(weight[others]), strict=True):
            assert torch.equal(one[others], other)
    codes, scale = quantize_symmetric(torch.zeros(2, 3, dtype=dtype, device=device))
    assert (codes.tolist(), scale.item()) == ([[0] * 3] * 2, 1.0)


def test_ranges_below_2_to_the_minus_110_count_as_zero(device: str) -> None:
    least = 2.0**-110
    tensor = torch.tensor([[least], [-least], [least / 2], [-least / 2], [2.0**-149]], device=device)
    codes, scale = quantize_symmetric(tensor, dim=1)
    assert codes.flatten().tolist() == [127, -127, 0, 0, 0]
    assert torch.equal(scale.cpu(), torch.tensor([least / 127, least / 127, 1.0, 1.0, 1.0]))
    codes, scale, zero_point = quantize_asymmetric(tensor, dim=1)
    assert (codes.flatten().tolist(), zero_point.tolist()) == ([127, -128, 0, 0, 0], [-128, 127, 0, 0, 0])
    assert scale[2:].tolist() == [1.0, 1.0, 1.0]
    assert bool((scale[:2] > 0).all())


@pytest.mark.parametrize("constant", [1.0, -1.0, 3.3e-5, -12345.0, 1e-30, 3e38])
def test_a_constant_channel_comes_back_within_one_step(constant: float, device: str) -> None:
    weight = torch.full((1, 8), constant, device=device)
    codes, scale, zero_point = quantize_weight_per_channel_asymmetric(weight)
    assert abs(int(codes[0, 0]) - int(zero_point)) == 255
    assert bool(((dequantize(codes, scale, torch.float64, 0, zero_point) - weight).abs() <= scale).all())
    codes, scale = quantize_weight_per_channel(weight)
    assert bool((dequantize(codes, scale, torch.float64) - weight).abs().max() <= scale)


def test_the_largest_fp32_numbers_are_quantised(device: str) -> None:
    tensor = torch.tensor([[LARGEST, -LARGEST, LARGEST / 2]], device=device)
    codes, scale = quantize_weight_per_channel(tensor)
    assert (codes.tolist(), bool(scale.isfinite())) == ([[127, -127, 64]], True)
    codes, _, zero_point = quantize_weight_per_channel_asymmetric(tensor.abs())
    assert (codes.tolist(), zero_point.item()) == ([[127, 127, 0]], -128)
    with pytest.raises(ValueError, match="weight must be finite in float32, and so must be the width of its range"):
        quantize_weight_per_channel_asymmetric(tensor)


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_are_not_finite_are_refused_by_name(dtype: torch.dtype, bad: float, device: str) -> None:
    weight = weights(4, 6, dtype, device)
    weight[2, 5] = bad
    for general in (*QUANTISERS, quantize):
        with pytest.raises(ValueError, match=r"^tensor must be finite .* in 1 of 4 channels$"):
            general(weight, dim=1)
        with pytest.raises(ValueError, match=r"^tensor must be finite .* in 1 of 1 channels$"):
            general(weight)
    for quantiser in PER_CHANNEL:
        with pytest.raises(ValueError, match=r"^weight must be finite .* in 1 of 4 channels$"):
            quantiser(weight)


def test_fp64_weights_beyond_fp32_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match="weight must be finite in float32"):
        quantize_weight_per_channel(torch.tensor([[1e39, 1.0]], dtype=torch.float64, device=device))


@pytest.mark.parametrize("quantiser", PER_CHANNEL)
def test_meta_and_fake_weights_give_shapes_and_dtypes_without_looking_at_values(
    quantiser: Callable[..., tuple[torch.Tensor, ...]],
) -> None:
    want = [(tuple(one.shape), one.dtype) for one in quantiser(torch.ones(5, 3))]
    results = quantiser(torch.empty(5, 3, dtype=torch.float16, device="meta"))
    assert [(tuple(one.shape), one.dtype) for one in results] == want
    assert all(one.is_meta for one in results)
    with FakeTensorMode():
        results = quantiser(torch.empty(5, 3, dtype=torch.float16))
    assert [(tuple(one.shape), one.dtype) for one in results] == want


def test_compiled_code_gives_the_same_and_turns_what_is_not_finite_into_nan(device: str) -> None:
    compiled = torch.compile(quantize_weight_per_channel, backend="eager", fullgraph=True)
    weight = weights(4, 6, torch.float32, device)
    for one, other in zip(compiled(weight), quantize_weight_per_channel(weight), strict=True):
        assert torch.equal(one, other)
    want = quantize_weight_per_channel(weight)[0]
    weight[2, 5] = INF
    codes, scale = compiled(weight)
    assert scale.isnan().tolist() == [False, False, True, False]
    want[2] = 0
    assert torch.equal(codes, want)


def test_results_have_no_gradient(device: str) -> None:
    weight = torch.nn.Parameter(weights(3, 5, torch.float32, device))
    for quantiser in PER_CHANNEL:
        assert not any(result.requires_grad for result in quantiser(weight))


@pytest.mark.parametrize("quantiser", QUANTISERS)
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_strides_make_no_difference(
    quantiser: Callable[..., tuple[torch.Tensor, ...]], dim: int | None, device: str
) -> None:
    for strides in ((9, 1), (1, 6), (40, 3), (0, 1), (1, 0)):
        view = guarded_view((6, 7), strides if 0 not in strides else (9, 1), device=device)
        tensor = view if 0 not in strides else view.as_strided((6, 7), strides, view.storage_offset())
        for one, other in zip(quantiser(tensor, dim=dim), quantiser(tensor.contiguous(), dim=dim), strict=True):
            assert torch.equal(one, other)
            assert one.is_contiguous()
        assert_guards_intact(view)


@pytest.mark.parametrize("scheme", QuantScheme)
@pytest.mark.parametrize("dim", [None, 0, 1])
def test_only_a_chunk_is_in_fp32_at_a_time(
    scheme: QuantScheme, dim: int | None, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = weights(13, 10, torch.bfloat16, device)
    want = quantize(weight, scheme, dim=dim)
    sizes = []

    def recorded(values: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(values.numel())
        return encode(values, *rest)

    monkeypatch.setattr(_quantize, "_CHUNK", 35)
    monkeypatch.setattr(_quantize, "encode", recorded)
    for one, other in zip(quantize(weight, scheme, dim=dim), want, strict=True):
        assert one is other is None or torch.equal(one, other)
    assert sizes == [30, 30, 30, 30, 10]


def test_no_rows_give_no_codes(device: str) -> None:
    for quantiser in PER_CHANNEL:
        results = quantiser(torch.empty(0, 4, device=device))
        assert [tuple(one.shape) for one in results] == [(0, 4)] + [(0,)] * (len(results) - 1)


def test_a_number_is_quantised_to_the_end_of_the_range(device: str) -> None:
    codes, scale = quantize_symmetric(torch.tensor(-254.0, device=device))
    assert (codes.shape, codes.item(), scale.item()) == ((), -127, 2.0)
    assert dequantize(codes, scale).item() == -254.0


T = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: quantize(T, bits=4), ValueError, "bits must be one of 8, got 4"),
        (lambda: quantize_symmetric(T, bits=16), ValueError, "bits must be one of 8, got 16"),
        (lambda: quantize_asymmetric(T, 4), ValueError, "bits must be one of 8, got 4"),
        (lambda: quantize(T, dim=2), ValueError, "dim must be one of None, -2, -1, 0, 1, got 2"),
        (lambda: quantize_symmetric(T, dim=-3), ValueError, "dim must be one of None, -2, -1, 0, 1, got -3"),
        (lambda: quantize_asymmetric(T, dim=2), ValueError, "dim must be one of None, -2, -1, 0, 1, got 2"),
        (lambda: quantize(T, "int8"), ValueError, "scheme must be one of 'symmetric', 'asymmetric', got 'int8'"),
        (lambda: quantize(T.int()), TypeError, "tensor must have dtype float16, bfloat16, float32, float64, got int32"),
        (lambda: quantize([1.0]), TypeError, "tensor must be a torch.Tensor, got list"),
        (lambda: quantize(T[:0]), ValueError, "tensor must have at least one element, got shape (0, 3)"),
        (
            lambda: quantize(T[:, :0], dim=1),
            ValueError,
            "tensor must have at least one element along dim 1, got shape (2, 0)",
        ),
        (
            lambda: quantize_weight_per_channel(T[0]),
            ValueError,
            "weight must have shape [out_features, in_features], got (3,)",
        ),
        (
            lambda: quantize_weight_per_channel_asymmetric(T[None]),
            ValueError,
            "weight must have shape [out_features, in_features], got (1, 2, 3)",
        ),
        (
            lambda: quantize_weight_per_channel(T.bool()),
            TypeError,
            "weight must have dtype float16, bfloat16, float32, float64, got bool",
        ),
    ],
)
def test_quantisers_name_what_they_refuse(call: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        call()
