"""Plain layout and quantiser: words by hand, the rule by NumPy, edges, and what they refuse."""

from typing import Any

import numpy
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tk_testkit.strategies import assert_guards_intact, guarded_view
from tk_w4a16 import dequantize_int4, pack_int4, quantize_weight_int4_grouped, unpack_int4

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
GROUP_SIZES = (16, 32, 128, 1000, -1)


def weights(k: int, n: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(k + n)
    # Columns whose sizes and centres differ, some of one sign.
    values = torch.randn(k, n, generator=generator) * torch.logspace(-3, 2, n) + torch.linspace(-3, 3, n)
    return values.to(dtype).to(device)


def by_numpy(group: Any, symmetric: bool, dtype: torch.dtype) -> tuple[Any, float, int]:
    """Quantise one group of fp32 values."""
    low, high = group.min(), group.max()
    if symmetric:
        extent = max(-low, high) / numpy.float32(7)
    else:
        low, high = min(low, numpy.float32(0)), max(high, numpy.float32(0))
        extent = (high - low) / numpy.float32(15)
    scale = torch.tensor(extent).to(dtype)
    step = scale.float().numpy()
    zero = 8 if symmetric else int(numpy.clip(numpy.rint(-low / step), 0, 15))
    return numpy.clip(numpy.rint(group / step) + zero, 0, 15), scale.item(), zero


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_codes_scales_and_zero_points_are_the_rule_bit_for_bit(
    group_size: int, dtype: torch.dtype, symmetric: bool, device: str
) -> None:
    k, n = 150, 6
    weight = weights(k, n, dtype, device)
    packed, scales, zeros = quantize_weight_int4_grouped(weight, group_size, symmetric)
    size = k if group_size == -1 else group_size
    groups = -(-k // size)
    assert (packed.shape, packed.dtype) == ((19, n), torch.int32)
    assert (scales.shape, scales.dtype, zeros.shape, zeros.dtype) == ((groups, n), dtype, (groups, n), dtype)
    codes, values = unpack_int4(packed, k).cpu().numpy(), weight.float().cpu().numpy()
    for group in range(groups):
        rows = slice(group * size, (group + 1) * size)
        for column in range(n):
            want, scale, zero = by_numpy(values[rows, column], symmetric, dtype)
            assert (codes[rows, column] == want).all()
            assert (scales[group, column].item(), zeros[group, column].item()) == (scale, zero)


def test_small_examples_by_hand(device: str) -> None:
    weight = torch.tensor([[-7.0, 30.0, -1.0], [3.4, 0.5, -15.0], [0.5, 1.0, -2.5]], device=device)
    packed, scales, zeros = quantize_weight_int4_grouped(weight, symmetric=True)
    assert unpack_int4(packed, 3).tolist() == [[1, 15, 8], [11, 8, 1], [8, 8, 7]]
    assert torch.equal(scales.cpu(), torch.tensor([[7.0, 30.0, 15.0]]) / torch.full((3,), 7.0))
    assert zeros.tolist() == [[8.0] * 3]
    packed, scales, zeros = quantize_weight_int4_grouped(weight)
    assert unpack_int4(packed, 3).tolist() == [[0, 15, 14], [15, 0, 0], [11, 0, 13]]
    assert scales[0, 1:].tolist() == [2.0, 1.0]
    assert zeros.tolist() == [[10.0, 0.0, 15.0]]


@pytest.mark.parametrize("symmetric", [False, True])
def test_no_value_is_further_than_half_a_step_from_its_code(symmetric: bool, device: str) -> None:
    weight = weights(256, 12, torch.float32, device)
    packed, scales, zeros = quantize_weight_int4_grouped(weight, 32, symmetric)
    error = (weight - dequantize_int4(packed, scales, zeros, 32)).abs()
    assert bool((error <= scales.repeat_interleave(32, 0) * (0.5 + 1e-5)).all())


def test_a_zero_point_gains_six_decibels_on_skewed_weights(device: str) -> None:
    weight = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0)).abs().to(device)

    def noise(symmetric: bool) -> float:
        error = weight - dequantize_int4(*quantize_weight_int4_grouped(weight, 128, symmetric), 128)
        return 10 * float(error.square().mean().log10())

    assert noise(True) - noise(False) > 6.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_of_zeros_and_of_less_than_a_scale_can_hold_become_zeros(dtype: torch.dtype, device: str) -> None:
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps if dtype != torch.float64 else 1e-50
    weight = torch.zeros(16, 2, dtype=dtype, device=device)
    weight[:, 1] = tiny
    for symmetric, zero in ((True, 8.0), (False, 0.0)):
        packed, scales, zeros = quantize_weight_int4_grouped(weight, -1, symmetric)
        assert (scales.tolist(), zeros.tolist()) == ([[1.0, 1.0]], [[zero, zero]])
        assert dequantize_int4(packed, scales, zeros, -1).abs().max().item() == 0.0


def test_codes_and_zero_points_stay_in_range_where_the_dtype_rounds_the_scale_down_a_lot(device: str) -> None:
    least = 2.0**-24
    weight = torch.tensor([[-21.0, 21.0], [0.0, 0.0]], device=device) * least
    packed, scales, zeros = quantize_weight_int4_grouped(weight.half(), -1)
    assert (scales.tolist(), zeros.tolist()) == ([[least, least]], [[15.0, 0.0]])
    assert unpack_int4(packed, 2).tolist() == [[0, 15], [15, 0]]


def test_a_constant_group_is_kept(device: str) -> None:
    weight = torch.tensor([[30.0, -30.0]], device=device).expand(40, 2)
    assert torch.equal(dequantize_int4(*quantize_weight_int4_grouped(weight, -1), -1), weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_refused(value: float, dtype: torch.dtype, device: str) -> None:
    weight = weights(40, 3, dtype, device)
    weight[17, 1] = value
    for symmetric in (False, True):
        with pytest.raises(ValueError, match=r"weight must be finite in float32, .* in 1 groups or more"):
            quantize_weight_int4_grouped(weight, 32, symmetric)


def test_strides_of_a_weight_do_not_matter(device: str) -> None:
    plain = weights(64, 8, torch.float32, device)
    want = quantize_weight_int4_grouped(plain, 32)
    view = guarded_view((64, 8), (1, 70), device=device)
    view.copy_(plain)
    parameter = torch.nn.Parameter(plain.t().contiguous()).t()
    for weight in (view, parameter):
        got = quantize_weight_int4_grouped(weight, 32)
        assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
        assert not any(result.requires_grad for result in got)
    assert_guards_intact(view)


def test_meta_and_fake_weights_have_shapes() -> None:
    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            packed, scales, zeros = quantize_weight_int4_grouped(torch.empty(40, 8), 32)
            assert (packed.shape, scales.shape, zeros.shape) == ((5, 8), (2, 8), (2, 8))
            assert dequantize_int4(packed, scales, zeros, 32).shape == (40, 8)


def test_the_words_of_the_plain_layout_by_hand(device: str) -> None:
    codes = torch.tensor([[0, 15, 0, 1], [1, 15, 0, 2], [2, 15, 0, 3]] + [[j, 15, 0, 0] for j in range(3, 7)])
    codes = torch.cat((codes, torch.tensor([[7, 15, 8, 0], [9, 0, 0, 0]]))).to(device)
    packed = pack_int4(codes)
    assert packed.tolist() == [[0x76543210, -1, -(2**31), 0x321], [9, 0, 0, 0]]
    assert packed.is_contiguous()
    assert torch.equal(unpack_int4(packed, 9), codes.to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(("k", "n"), [(0, 3), (1, 1), (7, 5), (8, 1), (64, 0), (65, 33)])
def test_packing_is_undone_exactly(k: int, n: int, dtype: torch.dtype, device: str) -> None:
    codes = torch.randint(0, 16, (k, n), generator=torch.Generator().manual_seed(0), dtype=dtype).to(device)
    for given in (codes, codes.t().contiguous().t()):
        packed = pack_int4(given)
        assert (packed.shape, packed.dtype) == ((-(-k // 8), n), torch.int32)
        assert torch.equal(unpack_int4(packed, k), codes.to(torch.uint8))
    words = torch.randint(-(2**31), 2**31, (4, 5), dtype=torch.int64).to(torch.int32).to(device)
    assert torch.equal(pack_int4(unpack_int4(words, 32)), words)


def test_dequantising_takes_fractions_of_zero_points_and_rounds_once(device: str) -> None:
    packed = pack_int4(torch.full((8, 2), 15, device=device))
    scales = torch.tensor([[5000.0, 0.1]], dtype=torch.float16, device=device)
    zeros = torch.tensor([[15.0, 0.25]], device=device)
    want = torch.tensor([0.0, 14.75 * scales[0, 1].double().item()]).to(torch.float16)
    got = dequantize_int4(packed, scales, zeros)
    assert got.dtype == torch.float16
    assert torch.equal(got.cpu(), want.expand(8, 2))
    assert dequantize_int4(packed, scales.double(), None)[:, 0].tolist() == [35000.0] * 8


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"packed": torch.zeros(4, 2)}, TypeError, "packed must have dtype int32, got float32"),
        (
            {"packed": torch.zeros(4, dtype=torch.int32)},
            ValueError,
            r"packed must have two dimensions, got shape \(4,\)",
        ),
        ({"scales": torch.ones(2, 1)}, ValueError, r"scales must have shape \(1, 2\), got \(2, 1\)"),
        ({"scales": None}, TypeError, "scales must be a torch.Tensor, got NoneType"),
        ({"zeros": torch.ones(2, 2)}, ValueError, r"zeros must have shape \(1, 2\), got \(2, 2\)"),
        ({"zeros": torch.ones(1, 2).int()}, TypeError, "zeros must have dtype .*, got int32"),
        (
            {"zeros": torch.ones(1, 2, device="meta")},
            ValueError,
            "zeros must be on the device of packed, cpu, got meta",
        ),
        ({"group_size": 16}, ValueError, r"scales must have shape \(2, 2\), got \(1, 2\)"),
        ({"group_size": 0}, ValueError, "group_size must be positive, or -1 for one group, got 0"),
        ({"group_size": -2}, ValueError, "group_size must be positive, or -1 for one group, got -2"),
        ({"group_size": None}, TypeError, "group_size must be an int, got NoneType"),
    ],
)
def test_a_plain_weight_that_is_not_right_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    right = {"packed": torch.zeros(4, 2, dtype=torch.int32), "scales": torch.ones(1, 2), "zeros": torch.ones(1, 2)}
    with pytest.raises(error, match=message):
        dequantize_int4(**{**right, **arguments})


def test_codes_that_are_no_nibbles_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=r"q must hold codes within \[0, 15\], got 0 to 16"):
        pack_int4(torch.tensor([[0, 16]], device=device))
    with pytest.raises(ValueError, match="got -1 to 3"):
        pack_int4(torch.tensor([[-1, 3]], device=device))
    with pytest.raises(TypeError, match=r"q must have dtype .*, got float32"):
        pack_int4(torch.ones(8, 2, device=device))
    with pytest.raises(ValueError, match=r"q must have two dimensions, got shape \(8,\)"):
        pack_int4(torch.ones(8, dtype=torch.int8, device=device))
    with pytest.raises(ValueError, match=r"packed must have shape \(2, N\) for k = 9, got \(1, 4\)"):
        unpack_int4(torch.zeros(1, 4, dtype=torch.int32, device=device), 9)
