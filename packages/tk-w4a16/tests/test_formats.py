"""Checkpoint formats, written here bit by bit from their definitions, and what a reader refuses."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tk_w4a16 import PackedInt4Weight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
FORMATS = ("gptq", "gptq_v2", "awq", "compressed-tensors")
GROUP_SIZES = (32, 64, 128, 256, -1)


def words(codes: Any, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> torch.Tensor:
    """Pack the last axis: bits 4 i to 4 i + 3 of a word hold its code `order[i]`."""
    rows, columns = codes.shape
    packed = numpy.zeros((rows, -(-columns // 8)), dtype=numpy.uint32)
    for word in range(packed.shape[1]):
        for i in range(8):
            if 8 * word + order[i] < columns:
                packed[:, word] |= codes[:, 8 * word + order[i]].astype(numpy.uint32) << numpy.uint32(4 * i)
    return torch.from_numpy(packed.view(numpy.int32))


def checkpoint(kind: str, codes: Any, zeros: Any, scales: torch.Tensor) -> dict[str, Any]:
    """Write codes [N, K], zero points [N, G] and scales [N, G], all of them as they are meant."""
    n, k = codes.shape
    if kind == "awq":
        return {"qweight": words(codes.T, AWQ_ORDER), "qzeros": words(zeros.T, AWQ_ORDER), "scales": scales.t()}
    if kind == "compressed-tensors":
        return {
            "weight_packed": words(codes),
            "weight_scale": scales,
            "weight_shape": torch.tensor([n, k]),
            "weight_zero_point": words(zeros.T).t().contiguous(),
        }
    stored = zeros - 1 if kind == "gptq" else zeros
    arguments = {"qweight": words(codes).t().contiguous(), "qzeros": words(stored.T), "scales": scales.t()}
    return {**arguments, "checkpoint_format": kind}


def load(kind: str, arguments: dict[str, Any]) -> PackedInt4Weight:
    loaders: dict[str, Callable[..., PackedInt4Weight]] = {
        "awq": PackedInt4Weight.from_awq,
        "compressed-tensors": PackedInt4Weight.from_compressed_tensors,
    }
    return loaders.get(kind, PackedInt4Weight.from_gptq)(**arguments)


def random_weight(
    kind: str, n: int, k: int, groups: int, dtype: torch.dtype, seed: int
) -> tuple[Any, Any, torch.Tensor]:
    generator = numpy.random.default_rng(seed)
    codes = generator.integers(0, 16, (n, k), dtype=numpy.uint8)
    first = 1 if kind == "gptq" else 0
    zeros = generator.integers(first, first + 16, (n, groups), dtype=numpy.uint8)
    scales = torch.from_numpy(generator.standard_normal((n, groups))).to(dtype)
    return codes, zeros, scales


def by_definition(codes: Any, zeros: Any, scales: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`(q - z) * s` in the dtype of the scales: differences of such integers are exact in all of them."""
    shifted = codes.astype(numpy.int64) - zeros.astype(numpy.int64)[:, index.numpy()]
    return torch.from_numpy(shifted).to(scales.dtype) * scales[:, index]


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Of zeros too, which have the sign of the scale."""
    assert got.dtype == want.dtype
    integers = torch.int32 if got.dtype == torch.float32 else torch.int16
    assert torch.equal(got.view(integers), want.contiguous().view(integers))


@settings(max_examples=60)
@given(
    kind=st.sampled_from(FORMATS),
    octets=st.tuples(st.integers(1, 10), st.integers(1, 50)),
    ragged=st.tuples(st.integers(0, 7), st.integers(0, 7)),
    group_size=st.sampled_from(GROUP_SIZES),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_random_words_of_every_format_become_what_the_format_defines(
    kind: str,
    octets: tuple[int, int],
    ragged: tuple[int, int],
    group_size: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    n, k = 8 * octets[0], 8 * octets[1]
    if kind != "awq":
        n -= ragged[0]
    if kind == "compressed-tensors":
        k -= ragged[1]
    size = k if group_size == -1 else group_size
    codes, zeros, scales = random_weight(kind, n, k, -(-k // size), dtype, seed)
    weight = load(kind, {**checkpoint(kind, codes, zeros, scales), "group_size": group_size})
    assert torch.equal(weight.unpack(), torch.from_numpy(codes))
    assert_same_bits(weight.dequantize(), by_definition(codes, zeros, scales, torch.arange(k) // size))


@pytest.mark.parametrize("kind", ["gptq", "gptq_v2", "compressed-tensors"])
@pytest.mark.parametrize(("k", "groups"), [(256, 8), (256, 5), (200, 7), (64, 2), (64, 1)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_any_group_index_is_followed(kind: str, k: int, groups: int, dtype: torch.dtype) -> None:
    codes, zeros, scales = random_weight(kind, 24, k, groups, torch.float16, k + groups)
    name = "weight_g_idx" if kind == "compressed-tensors" else "g_idx"
    generator = torch.Generator().manual_seed(k)
    full = (torch.arange(k) * groups // k)[torch.randperm(k, generator=generator)]
    uneven = torch.randint(0, groups, (k,), generator=generator)
    for index in (full, uneven, torch.arange(k) % groups, torch.zeros(k, dtype=torch.int64), uneven.sort()[0]):
        arguments = {**checkpoint(kind, codes, zeros, scales), name: index.to(dtype), "group_size": 32}
        weight = load(kind, arguments)
        assert torch.equal(weight.unpack(), torch.from_numpy(codes))
        assert_same_bits(weight.dequantize(), by_definition(codes, zeros, scales, index))


@pytest.mark.parametrize("k", [64, 256, 296])
def test_a_group_index_in_order_changes_nothing(k: int) -> None:
    codes, zeros, scales = random_weight("gptq", 8, k, -(-k // 32), torch.float16, 0)
    arguments = {**checkpoint("gptq", codes, zeros, scales), "group_size": 32}
    one, other = load("gptq", arguments), load("gptq", {**arguments, "g_idx": torch.arange(k) // 32, "desc_act": True})
    assert other.permutation is None
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scales, other.scales)
    assert torch.equal(one.zeros, other.zeros)


def test_the_example_words_of_both_nibble_orders() -> None:
    # Position i of an AWQ word holds column 0, 2, 4, 6, 1, 3, 5, 7.
    for awq_word, gptq_word, codes in (
        (0x75316420, 0x76543210, [0, 1, 2, 3, 4, 5, 6, 7]),
        (-1, -1, [15] * 8),
        (-(2**31), -(2**31), [0, 0, 0, 0, 0, 0, 0, 8]),
    ):
        awq, gptq = (torch.tensor([[word]], dtype=torch.int32) for word in (awq_word, gptq_word))
        ones = torch.ones(1, 8, dtype=torch.float16)
        along_n = PackedInt4Weight.from_awq(awq, awq, ones, group_size=-1)
        assert along_n.unpack().t().tolist() == [codes]
        assert along_n.dequantize().tolist() == [[0.0]] * 8
        along_k = PackedInt4Weight.from_gptq(gptq.expand(1, 8), gptq, ones, group_size=-1, checkpoint_format="gptq_v2")
        assert along_k.unpack().tolist() == [codes] * 8
        assert along_k.dequantize().tolist() == [[code - zero for code in codes] for zero in codes]
        other = PackedInt4Weight.from_compressed_tensors(gptq.expand(8, 1), ones.t(), (8, 8), gptq, group_size=-1)
        assert torch.equal(other.dequantize(), along_k.dequantize())


def test_zero_points_of_gptq_are_stored_minus_one_and_those_of_v2_as_they_are() -> None:
    scales = torch.full((1, 8), 0.5, dtype=torch.float16)
    eights = torch.full((1, 8), -0x77777778, dtype=torch.int32)
    for stored, checkpoint_format, value in (
        (0x77777777, "gptq", 0.0),
        (-0x77777778, "gptq_v2", 0.0),
        (0x77777777, "gptq_v2", 0.5),
        (-0x77777778, "gptq", -0.5),
    ):
        qzeros = torch.tensor([[stored]], dtype=torch.int32)
        weight = PackedInt4Weight.from_gptq(eights, qzeros, scales, checkpoint_format=checkpoint_format)
        assert weight.dequantize().unique().tolist() == [value]


def test_a_stored_zero_point_of_fifteen_is_sixteen_in_gptq() -> None:
    codes = torch.tensor([[0, -1] * 4], dtype=torch.int32)
    weight = PackedInt4Weight.from_gptq(codes, torch.tensor([[-1]], dtype=torch.int32), torch.ones(1, 8))
    assert weight.dequantize().tolist() == [[-16.0] * 8, [-1.0] * 8] * 4


def test_zero_points_that_were_subtracted_from_whole_words_are_those_of_v2_after_an_addition() -> None:
    # As GPTQModel does: a zero point of 0 becomes 15, and the next one loses 1 more.
    codes, zeros, scales = random_weight("gptq_v2", 24, 64, 2, torch.float16, 0)
    zeros[:, 0] = numpy.arange(24) % 3
    right = load("gptq_v2", {**checkpoint("gptq_v2", codes, zeros, scales), "group_size": 32})
    stored = words(zeros.T) - 0x11111111
    assert int((stored & 15).max()) == 15
    arguments = {**checkpoint("gptq_v2", codes, zeros, scales), "qzeros": stored + 0x11111111, "group_size": 32}
    assert_same_bits(load("gptq_v2", arguments).dequantize(), right.dequantize())


def test_a_compressed_tensors_index_of_minus_ones_is_none() -> None:
    codes, zeros, scales = random_weight("compressed-tensors", 8, 64, 2, torch.float16, 0)
    arguments = {**checkpoint("compressed-tensors", codes, zeros, scales), "group_size": 32}
    weight = load("compressed-tensors", {**arguments, "weight_g_idx": torch.full((64,), -1, dtype=torch.int32)})
    assert_same_bits(weight.dequantize(), load("compressed-tensors", arguments).dequantize())


@pytest.mark.parametrize(
    "shape", [torch.tensor([8, 64]), torch.tensor([[8], [64]]), torch.Size((8, 64)), [8, 64]], ids=str
)
def test_a_weight_shape_may_be_a_tensor_or_a_sequence(shape: Any) -> None:
    words_of_ones = torch.full((8, 8), 0x11111111, dtype=torch.int32)
    weight = PackedInt4Weight.from_compressed_tensors(words_of_ones, torch.ones(8, 1), shape, symmetric=True)
    assert (weight.out_features, weight.in_features) == (8, 64)
    assert weight.dequantize().unique().tolist() == [-7.0]


@pytest.mark.parametrize("qzeros", [None, torch.empty(0, dtype=torch.int32), torch.tensor([[12345]])], ids=str)
def test_a_symmetric_weight_has_zero_point_eight_whatever_the_checkpoint_holds(qzeros: torch.Tensor | None) -> None:
    codes = torch.tensor([[0x76543210], [-0x1234568]], dtype=torch.int32)
    for dtype in DTYPES:
        want = torch.arange(-8, 8, dtype=dtype).expand(8, 16)
        ones = torch.ones(1, 8, dtype=dtype)
        weight = PackedInt4Weight.from_gptq(codes.expand(2, 8), qzeros, ones, symmetric=True)
        assert weight.zeros is None
        assert torch.equal(weight.dequantize(), want)
        weight = PackedInt4Weight.from_compressed_tensors(
            codes.t().expand(8, 2), ones.t(), (8, 16), qzeros, symmetric=True
        )
        assert torch.equal(weight.dequantize(), want)


def test_zero_denormal_and_negative_scales_are_exact() -> None:
    codes = torch.full((1, 8), 0x76543210, dtype=torch.int32)
    for dtype in DTYPES:
        tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        scales = torch.tensor([[0.0, tiny, -tiny, 3 * tiny, -1.5, 1e-3, -0.0, 1.0]], dtype=dtype)
        weight = PackedInt4Weight.from_gptq(codes, None, scales, symmetric=True)
        assert torch.equal(weight.dequantize(), torch.arange(-8, 0, dtype=dtype) * scales.t())


def test_every_difference_times_a_large_scale_stays_exact() -> None:
    # 15 * 5000 is beyond fp16, the difference 0 is not.
    ones = torch.full((1, 8), -1, dtype=torch.int32)
    scales = torch.full((1, 8), 5000.0, dtype=torch.float16)
    weight = PackedInt4Weight.from_gptq(ones, ones[:, :1], scales, checkpoint_format="gptq_v2")
    assert weight.dequantize().abs().max().item() == 0.0


def gptq_arguments(**changes: Any) -> dict[str, Any]:
    arguments = {
        "qweight": torch.zeros(32, 16, dtype=torch.int32),
        "qzeros": torch.zeros(2, 2, dtype=torch.int32),
        "scales": torch.ones(2, 16, dtype=torch.float16),
    }
    return {**arguments, **changes}


def index(**changes: int) -> torch.Tensor:
    values = torch.arange(256, dtype=torch.int32) // 128
    for place, value in changes.items():
        values[int(place[1:])] = value
    return values


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"qweight": None}, TypeError, "qweight must be a torch.Tensor, got NoneType"),
        ({"qweight": torch.zeros(32, 16, dtype=torch.int64)}, TypeError, "qweight must have dtype int32, got int64"),
        (
            {"qweight": torch.zeros(16, dtype=torch.int32)},
            ValueError,
            r"qweight must have shape \[K / 8, N\], got \(16,\)",
        ),
        ({"qweight": torch.zeros(0, 16, dtype=torch.int32)}, ValueError, "qweight must hold at least one code"),
        (
            {"qweight": torch.zeros(64, 16, dtype=torch.int32)},
            ValueError,
            r"scales must have shape \(4, 16\) for 16 output features and 512 input features in groups of 128, got",
        ),
        ({"group_size": 64}, ValueError, r"scales must have shape \(4, 16\) .* in groups of 64, got \(2, 16\)"),
        ({"group_size": -1}, ValueError, r"scales must have shape \(1, 16\) .* in groups of -1, got \(2, 16\)"),
        ({"scales": torch.ones(16, 2)}, ValueError, r"scales must have shape \(2, 16\) .*, got \(16, 2\)"),
        ({"scales": torch.ones(2)}, ValueError, r"scales must have shape \[G, N\], got \(2,\)"),
        ({"scales": torch.ones(2, 16).double()}, TypeError, "scales must have dtype .*, got float64"),
        ({"scales": torch.full((2, 16), torch.nan)}, ValueError, "scales must be finite, got 32 infinities and NaN"),
        ({"scales": torch.ones(2, 16).half() * -1e5}, ValueError, "scales must be finite, got 32 infinities and NaN"),
        ({"qzeros": None}, ValueError, "qzeros must be given unless the weight is symmetric, got None"),
        (
            {"qzeros": torch.empty(0)},
            ValueError,
            r"unless the weight is symmetric, got an empty tensor of shape \(0,\)",
        ),
        ({"qzeros": torch.zeros(2, 16)}, TypeError, "qzeros must have dtype int32, got float32"),
        (
            {"qzeros": torch.zeros(2, 4, dtype=torch.int32)},
            ValueError,
            r"qzeros must have shape \(2, 2\), got \(2, 4\)",
        ),
        ({"bits": 8}, ValueError, "bits must be one of 4, got 8"),
        (
            {"checkpoint_format": "marlin"},
            ValueError,
            "checkpoint_format must be one of 'gptq', 'gptq_v2', got 'marlin'",
        ),
        ({"desc_act": True}, ValueError, "g_idx must be given where desc_act is True, got None"),
        ({"g_idx": index(_7=99)}, ValueError, r"g_idx must be within \[0, 1\], the groups of scales, got 0 to 99"),
        ({"g_idx": index(_7=-1)}, ValueError, r"g_idx must be within \[0, 1\], the groups of scales, got -1 to 1"),
        ({"g_idx": index()[:255]}, ValueError, r"g_idx must have shape \(256,\), got \(255,\)"),
        ({"g_idx": index().float()}, TypeError, "g_idx must have dtype int32, int64, got float32"),
        ({"group_size": None}, TypeError, "group_size must be an int, got NoneType"),
        ({"group_size": 0}, ValueError, "group_size must be positive, or -1 for one group, got 0"),
        ({"group_size": -2}, ValueError, "group_size must be positive, or -1 for one group, got -2"),
        (
            {"group_size": 200},
            ValueError,
            "group_size must be one of 32, 64, 128, 256, -1, got 200",
        ),
        (
            {"scales": torch.ones(2, 16, device="meta")},
            ValueError,
            "scales must be on the device of qweight, cpu, got meta",
        ),
    ],
)
def test_a_gptq_weight_that_is_not_right_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        PackedInt4Weight.from_gptq(**gptq_arguments(**arguments))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"qweight": torch.zeros(256, 2, dtype=torch.uint8)}, TypeError, "qweight must have dtype int32, got uint8"),
        # A weight of GPTQ.
        (
            {"qweight": torch.zeros(32, 16, dtype=torch.int32)},
            ValueError,
            r"scales must have shape \(1, 128\) for 128 output features and 32 input features .*, got \(2, 16\)",
        ),
        (
            {"qzeros": torch.zeros(2, 3, dtype=torch.int32)},
            ValueError,
            r"qzeros must have shape \(2, 2\), got \(2, 3\)",
        ),
        ({"version": "gemv"}, ValueError, "version must be one of 'gemm', 'GEMM', got 'gemv'"),
        ({"scales": torch.ones(2, 20)}, ValueError, r"scales must have shape \(2, 16\) .*, got \(2, 20\)"),
        ({"qzeros": None}, ValueError, "qzeros must be given unless the weight is symmetric, got None"),
        ({"bits": 3}, ValueError, "bits must be one of 4, got 3"),
    ],
)
def test_an_awq_weight_that_is_not_right_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    right = gptq_arguments(qweight=torch.zeros(256, 2, dtype=torch.int32))
    assert PackedInt4Weight.from_awq(**right).in_features == 256
    with pytest.raises(error, match=message):
        PackedInt4Weight.from_awq(**{**right, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"weight_shape": (16, 257)}, ValueError, r"weight_shape must be .* = \(16, 32\), got \(16, 257\)"),
        ({"weight_shape": (256, 16)}, ValueError, r"got \(256, 16\)"),
        ({"weight_shape": (16,)}, ValueError, r"got \(16,\)"),
        ({"weight_shape": (16, 248)}, ValueError, r"got \(16, 248\)"),
        ({"weight_shape": (16, 255.5)}, ValueError, r"got \(16, 255.5\)"),
        ({"weight_shape": "16"}, ValueError, r"got \('1', '6'\)"),
        ({"weight_shape": torch.tensor(16)}, ValueError, r"got \(16,\)"),
        ({"weight_shape": None}, TypeError, "weight_shape must be a sequence, or a tensor .*, got NoneType"),
        ({"weight_shape": torch.empty(2, device="meta")}, TypeError, "a tensor whose values can be read, got Tensor"),
        ({"weight_scale": torch.ones(16, 4)}, ValueError, r"weight_scale must have shape \(16, 2\) .*, got \(16, 4\)"),
        (
            {"weight_zero_point": torch.zeros(16, 2, dtype=torch.int32)},
            ValueError,
            r"weight_zero_point must have shape \(2, 2\), got \(16, 2\)",
        ),
        ({"weight_zero_point": None}, ValueError, "weight_zero_point must be given unless the weight is symmetric"),
        (
            {"weight_zero_point": torch.zeros(16, 2, dtype=torch.int8)},
            TypeError,
            "weight_zero_point must have dtype int32, got int8",
        ),
        (
            {"weight_g_idx": index(_0=2)},
            ValueError,
            r"weight_g_idx must be within \[0, 1\], the groups of weight_scale",
        ),
        ({"bits": 8}, ValueError, "bits must be one of 4, got 8"),
    ],
)
def test_a_compressed_tensors_weight_that_is_not_right_is_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    right: dict[str, Any] = {
        "weight_packed": torch.zeros(16, 32, dtype=torch.int32),
        "weight_scale": torch.ones(16, 2),
        "weight_shape": torch.tensor([16, 256]),
        "weight_zero_point": torch.zeros(2, 2, dtype=torch.int32),
    }
    assert PackedInt4Weight.from_compressed_tensors(**right).in_features == 256
    with pytest.raises(error, match=message):
        PackedInt4Weight.from_compressed_tensors(**{**right, **arguments})
