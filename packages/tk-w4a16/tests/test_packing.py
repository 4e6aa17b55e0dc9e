"""The prepared layout: exact both ways, and as its description says, which kernels are written from."""

import itertools
from typing import Any

import pytest
import torch

from tk_kernel_core import quantization as quantize_module
from tk_kernel_core.packing import COLUMN_MULTIPLE, ROW_MULTIPLE
from tk_w4a16 import PackedInt4Weight, dequantize_int4, quantize_weight_int4_grouped
from tk_w4a16._formats import Int4Weight
from tk_w4a16._packing import GROUP_SIZES

SIZES = ((1, 1), (15, 127), (16, 128), (17, 129), (64, 64), (65, 300), (130, 520))


def neutral(
    n: int, k: int, group_size: int, *, symmetric: bool = False, g_idx: Any = None, groups: int = 0
) -> Int4Weight:
    generator = torch.Generator().manual_seed(n * 1000 + k)
    count = groups or (1 if group_size == -1 else -(-k // group_size))
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales = torch.randn(n, count, generator=generator).half()
    zeros = torch.randint(0, 17, (n, count), generator=generator, dtype=torch.uint8)
    return Int4Weight(codes, scales, None if symmetric else zeros, g_idx, group_size)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [*GROUP_SIZES, -1])
@pytest.mark.parametrize(("n", "k"), SIZES)
def test_every_size_and_group_comes_back_exactly(n: int, k: int, group_size: int, symmetric: bool) -> None:
    weight = neutral(n, k, group_size, symmetric=symmetric)
    packed = PackedInt4Weight.pack(weight)
    width = max(COLUMN_MULTIPLE, group_size)
    height, columns = n + -n % ROW_MULTIPLE, k + -k % width
    groups = 1 if group_size == -1 else columns // group_size
    assert (packed.codes.shape, packed.codes.dtype) == ((height // 16, columns // 64, 32, 4), torch.int32)
    assert packed.scales.shape == (height // 16, groups, 8, 2)
    assert packed.permutation is None
    assert (packed.out_features, packed.in_features, packed.group_size) == (n, k, group_size)
    for part in (packed.codes, packed.scales, *([] if packed.zeros is None else [packed.zeros])):
        assert part.is_contiguous()
    unpacked = packed.unpack()
    assert unpacked.is_contiguous()
    assert torch.equal(unpacked, weight.codes)
    zeros = torch.full_like(weight.scales, 8) if weight.zeros is None else weight.zeros.half()
    index = torch.zeros(k, dtype=torch.int64) if group_size == -1 else torch.arange(k) // group_size
    want = (weight.codes.half() - zeros[:, index]) * weight.scales[:, index]
    assert torch.equal(packed.dequantize(), want)


@pytest.mark.parametrize("group_size", [32, 256, -1])
def test_every_code_scale_and_zero_point_is_where_the_layout_says(group_size: int) -> None:
    n, k = 19, 150
    weight = neutral(n, k, group_size)
    packed = PackedInt4Weight.pack(weight)
    codes, scales, zeros = packed.codes.tolist(), packed.scales.tolist(), packed.zeros.tolist()
    columns = 64 * packed.codes.shape[1]
    for row, column in itertools.product(range(64), range(columns)):
        t, b, r = row // 16, row % 16 // 8, row % 8
        u, s, c, p, h = column // 64, column % 64 // 32, column % 32 // 8, column % 8 // 2, column % 2
        word = codes[t][u][4 * r + c][2 * s + b]
        # Padding stands for 0, or as little as there is.
        padding = min(zeros[t][0 if group_size == -1 else column // group_size][r][b], 15)
        want = int(weight.codes[row, column]) if row < n and column < k else padding
        assert (word >> (4 * p + 16 * h)) & 15 == want, (row, column)
    for row, group in itertools.product(range(64), range(packed.scales.shape[1])):
        t, b, r = row // 16, row % 16 // 8, row % 8
        there = row < n and group < weight.scales.shape[1]
        assert scales[t][group][r][b] == (weight.scales[row, group].item() if there else 0.0)
        if there:
            assert zeros[t][group][r][b] == weight.zeros[row, group]


@pytest.mark.parametrize("order", ["in order", "uneven", "symmetric"])
def test_padding_of_a_group_is_finite_in_float16_however_large_the_scale(order: str) -> None:
    n, k, groups = 34, 100, 4
    g_idx = torch.arange(k) % 7 // 2 if order == "uneven" else None
    weight = neutral(n, k, 32, g_idx=g_idx, groups=groups, symmetric=order == "symmetric")
    weight.scales.fill_(60_000.0)
    if weight.zeros is not None:
        # Every zero point but 17, which is none.
        weight.zeros.copy_((torch.arange(n)[:, None] % 17).expand(n, groups))
    packed = PackedInt4Weight.pack(weight)
    columns = 64 * packed.codes.shape[1]
    # As if padding were input features.
    every = PackedInt4Weight(packed.codes, packed.scales, packed.zeros, None, packed.group_size, n, columns)
    if packed.permutation is None:
        is_padding = torch.arange(columns) >= k
    else:
        is_padding = packed.permutation < 0
    assert is_padding.any()
    values = every.dequantize()[:, is_padding]
    is_16 = torch.zeros(n, dtype=torch.bool) if weight.zeros is None else weight.zeros[:, 0] == 16
    assert not values[~is_16].any()
    assert set(values[is_16].unique().tolist()) <= {-60_000.0, 0.0}


def test_two_16_bit_floats_come_of_a_word_by_one_or_and_one_addition() -> None:
    weight = neutral(64, 128, 128)
    packed = PackedInt4Weight.pack(weight)
    zeros = packed.zeros.permute(0, 3, 2, 1).reshape(64, 1).to(torch.int16)
    for dtype, exponent in ((torch.float16, 0x6400), (torch.bfloat16, 0x4300)):
        for p in range(4):
            # Row 8 b + r of tile t, columns 64 u + 32 s + 8 c + 2 p and the next.
            pair = ((packed.codes >> (4 * p)) & 0x000F000F) | exponent * 0x10001
            floats = pair.view(dtype).view(4, 2, 8, 4, 2, 2, 2).permute(0, 5, 2, 1, 4, 3, 6).reshape(64, -1, 2)
            constant = (zeros + (exponent - 0x8000)).view(dtype).unsqueeze(-1)
            want = weight.codes.view(64, -1, 4, 2)[:, :, p].to(dtype) - weight.zeros.to(dtype).unsqueeze(-1)
            assert torch.equal(floats + constant, want)


def multiply_as_kernels_do(x: torch.Tensor, weight: PackedInt4Weight) -> torch.Tensor:
    """Gather activations into columns, 0 for padding, and multiply tile by tile as the layout lies in memory."""
    columns = 64 * weight.codes.shape[1]
    given = torch.arange(columns) if weight.permutation is None else weight.permutation.long()
    inside = (given >= 0) & (given < weight.in_features)
    arranged = torch.where(inside, x[:, torch.where(inside, given, 0)], 0.0)
    groups = torch.arange(columns) // (columns if weight.group_size == -1 else weight.group_size)
    y = torch.zeros(x.shape[0], 16 * weight.codes.shape[0], dtype=torch.float64)
    for row, column in itertools.product(range(y.shape[1]), range(0, columns, 8)):
        t, b, r = row // 16, row % 16 // 8, row % 8
        word = int(weight.codes[t, column // 64, 4 * r + column % 32 // 8, 2 * (column % 64 // 32) + b])
        codes = torch.tensor([(word >> (4 * (i // 2) + 16 * (i % 2))) & 15 for i in range(8)], dtype=torch.float64)
        group = groups[column]
        zero = 8 if weight.zeros is None else int(weight.zeros[t, group, r, b])
        scale = weight.scales[t, group, r, b].double()
        y[:, row] += arranged[:, column : column + 8] @ ((codes - zero) * scale)
    return y[:, : weight.out_features]


@pytest.mark.parametrize("order", ["in order", "act-order", "uneven"])
def test_a_product_column_by_column_is_that_with_the_dequantised_weight(order: str) -> None:
    n, k, groups = 9, 100, 4
    generator = torch.Generator().manual_seed(0)
    g_idx = {
        "in order": None,
        "act-order": (torch.arange(k) // 32)[torch.randperm(k, generator=generator)],
        "uneven": torch.randint(0, groups, (k,), generator=generator),
    }[order]
    weight = PackedInt4Weight.pack(neutral(n, k, 32, g_idx=g_idx, groups=groups))
    assert (weight.permutation is None) == (order == "in order")
    x = torch.randint(-9, 9, (2, k), generator=generator).double()
    assert torch.equal(multiply_as_kernels_do(x, weight), x @ weight.dequantize(torch.float64).t())


def test_act_order_with_full_groups_keeps_the_group_size_and_adds_no_columns() -> None:
    g_idx = (torch.arange(512) // 128)[torch.randperm(512, generator=torch.Generator().manual_seed(1))]
    packed = PackedInt4Weight.pack(neutral(16, 512, 128, g_idx=g_idx))
    assert packed.group_size == 128
    assert packed.permutation.dtype == torch.int32
    # Sorted by group, and within one in the old order.
    assert packed.permutation.tolist() == sorted(range(512), key=lambda feature: (int(g_idx[feature]), feature))


def test_a_slice_of_an_act_order_weight_takes_the_group_size_of_the_least_memory() -> None:
    g_idx = (torch.arange(1024) // 128)[torch.randperm(1024, generator=torch.Generator().manual_seed(1))][:256]
    weight = neutral(16, 256, 128, g_idx=g_idx, groups=8)
    packed = PackedInt4Weight.pack(weight)
    # 8 groups of about 32 each: 1024 columns in groups of 128.
    assert (packed.group_size, packed.codes.shape[1] * 64 <= 512) == (32, True)
    assert torch.equal(packed.unpack(), weight.codes)
    index = packed.permutation
    assert sorted(index[index >= 0].tolist()) == list(range(256))


def test_a_slice_of_whole_groups_needs_no_permutation() -> None:
    weight = neutral(16, 64, 32, g_idx=torch.arange(64) // 32 + 3, groups=8)
    packed = PackedInt4Weight.pack(weight)
    assert packed.permutation is None
    want = (weight.codes.half() - weight.zeros.half()[:, weight.group_index]) * weight.scales[:, weight.group_index]
    assert torch.equal(packed.dequantize(), want)


@pytest.mark.parametrize("k", [64, 96, 256])
def test_one_group_is_the_same_under_every_name(k: int) -> None:
    weight = torch.randn(10, k, generator=torch.Generator().manual_seed(0))
    one = PackedInt4Weight.from_float(weight, -1)
    for group_size in (k, 256, 1000):
        other = PackedInt4Weight.from_float(weight, group_size)
        assert other.group_size == -1
        for name in ("codes", "scales", "zeros"):
            assert torch.equal(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [32, -1])
def test_float_and_plain_weights_meet_in_the_same_layout(group_size: int, symmetric: bool) -> None:
    weight = torch.randn(136, 24, generator=torch.Generator().manual_seed(0)).half()
    packed, scales, zeros = quantize_weight_int4_grouped(weight, group_size, symmetric)
    plain = PackedInt4Weight.from_int4(packed, scales, None if symmetric else zeros, group_size)
    floats = PackedInt4Weight.from_float(weight.t(), group_size, symmetric=symmetric)
    assert torch.equal(plain.codes, floats.codes)
    assert torch.equal(plain.scales, floats.scales)
    assert (plain.zeros is None) == (floats.zeros is None) == symmetric
    assert symmetric or torch.equal(plain.zeros, floats.zeros)
    assert torch.equal(plain.dequantize().t(), dequantize_int4(packed, scales, zeros, group_size))


def test_weights_are_packed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    g_idx = (torch.arange(300) // 32)[torch.randperm(300, generator=torch.Generator().manual_seed(1))]
    weight, floats = neutral(70, 300, 32, g_idx=g_idx), torch.randn(70, 300)
    want, want_floats = PackedInt4Weight.pack(weight), PackedInt4Weight.from_float(floats)
    values = want.dequantize()
    monkeypatch.setattr(quantize_module, "_CHUNK", 1)
    got = PackedInt4Weight.pack(weight)
    assert torch.equal(got.codes, want.codes)
    assert torch.equal(got.unpack(), weight.codes)
    assert torch.equal(got.dequantize(), values)
    assert torch.equal(PackedInt4Weight.from_float(floats).codes, want_floats.codes)


def test_dequantising_rounds_once_to_the_dtype_asked_for() -> None:
    packed = PackedInt4Weight.pack(neutral(16, 128, 32))
    exact = packed.dequantize(torch.float64)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert torch.equal(packed.dequantize(dtype), exact.to(dtype))
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got torch.int8"):
        packed.dequantize(torch.int8)


def test_a_weight_moves_to_another_device_as_a_whole() -> None:
    g_idx = torch.arange(70) % 3
    packed = PackedInt4Weight.pack(neutral(3, 70, 32, g_idx=g_idx))
    assert packed.to("cpu") is packed
    moved = packed.to("meta")
    parts = (moved.codes, moved.scales, moved.zeros, moved.permutation)
    assert {part.device.type for part in parts} == {"meta"}
    assert (moved.unpack().shape, moved.dequantize().shape) == ((3, 70), (3, 70))
    symmetric = PackedInt4Weight.pack(neutral(3, 70, 32, symmetric=True)).to("meta")
    assert (symmetric.zeros, symmetric.permutation) == (None, None)
    # As a module's would: codes are no numbers of a dtype.
    for dtype in (torch.float16, None):
        with pytest.raises(TypeError, match=r"device must be a torch\.device, str or int, got (dtype|NoneType)"):
            packed.to(dtype)


def test_weights_on_the_meta_device_can_be_prepared() -> None:
    with torch.device("meta"):
        qweight, qzeros = torch.empty(32, 16, dtype=torch.int32), torch.empty(2, 2, dtype=torch.int32)
        scales, g_idx = torch.empty(2, 16), torch.empty(256, dtype=torch.int32)
        packed = PackedInt4Weight.from_gptq(qweight, qzeros, scales, g_idx)
        assert packed.codes.shape == (4, 4, 32, 4)
        assert packed.permutation.shape == (256,)
        awq = PackedInt4Weight.from_awq(torch.empty(256, 2, dtype=torch.int32), qzeros, scales)
        floats = PackedInt4Weight.from_float(torch.empty(16, 256))
        packed_t = PackedInt4Weight.from_compressed_tensors(qweight.t(), scales.t(), (16, 256), qzeros)
        for other in (awq, floats, packed_t):
            assert (other.codes.shape, other.scales.shape, other.permutation) == ((4, 4, 32, 4), (4, 2, 8, 2), None)


def test_the_repr_tells_size_groups_scheme_and_device() -> None:
    assert repr(PackedInt4Weight.pack(neutral(3, 70, 32))) == (
        "PackedInt4Weight(out_features=3, in_features=70, group_size=32, asymmetric, dtype=torch.float16, device=cpu)"
    )
    other = PackedInt4Weight.pack(neutral(3, 70, 32, symmetric=True, g_idx=torch.arange(70) % 3))
    assert "symmetric, act-order" in repr(other)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"weight": [[1.0]]}, TypeError, "weight must be a torch.Tensor, got list"),
        ({"weight": torch.ones(4, 6).double()}, TypeError, "weight must have dtype .*, got float64"),
        ({"weight": torch.ones(4)}, ValueError, r"weight must have two dimensions, got shape \(4,\)"),
        ({"weight": torch.ones(4, 0)}, ValueError, r"weight must have at least one element, got shape \(4, 0\)"),
        ({"weight": torch.full((4, 6), torch.nan)}, ValueError, "weight must be finite in float32"),
        ({"weight": torch.tensor([[1.0, torch.inf]])}, ValueError, "weight must be finite in float32"),
        ({"group_size": 16}, ValueError, "group_size must be one of 32, 64, 128, 256, -1, got 16"),
        ({"group_size": 32.0}, TypeError, "group_size must be an int, got float"),
        ({"group_size": True}, TypeError, "group_size must be an int, got bool"),
    ],
)
def test_a_float_weight_that_is_not_right_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PackedInt4Weight.from_float(**{"weight": torch.ones(4, 60), **arguments})


@pytest.mark.parametrize("zero", [0.5, -1.0, 17.0, torch.nan])
def test_zero_points_that_are_no_small_integers_do_not_fit_a_prepared_weight(zero: float) -> None:
    packed, scales, zeros = quantize_weight_int4_grouped(torch.randn(64, 8))
    zeros[0, 3] = zero
    with pytest.raises(ValueError, match=r"zeros must be integers within \[0, 16\] in a prepared weight, got "):
        PackedInt4Weight.from_int4(packed, scales, zeros)
