"""Weights in fragment order: exact both ways, and laid out as the kernels read them."""

import itertools

import pytest
import torch

from tk_int8_gemm._packing import PackedInt8Weight
from tk_kernel_core.packing import COLUMN_MULTIPLE, ROW_MULTIPLE

SIZES = (1, 15, 16, 17, 64, 127, 128, 129, 300)


def random_codes(n: int, k: int) -> torch.Tensor:
    codes = torch.randint(-128, 128, (n, k), generator=torch.Generator().manual_seed(n * 1000 + k), dtype=torch.int8)
    codes.view(-1)[:2] = torch.tensor([-128, 127], dtype=torch.int8)[: codes.numel()]
    return codes


@pytest.mark.parametrize(("n", "k"), list(itertools.product(SIZES, SIZES)))
def test_unpacking_gives_back_the_codes_exactly(n: int, k: int) -> None:
    codes = random_codes(n, k)
    packed = PackedInt8Weight.pack(codes, torch.ones(n))
    unpacked = packed.unpack()
    assert unpacked.dtype == torch.int8
    assert unpacked.is_contiguous()
    assert torch.equal(unpacked, codes)
    padded_n, padded_k = n + -n % ROW_MULTIPLE, k + -k % COLUMN_MULTIPLE
    assert packed.codes.shape == (padded_n // 16, padded_k // 64, 2, 32, 4)
    assert packed.codes.dtype == torch.int32
    assert packed.codes.is_contiguous()
    assert (packed.out_features, packed.in_features) == (n, k)


def test_every_byte_is_where_the_layout_says() -> None:
    n, k = 19, 150
    codes = random_codes(n, k)
    packed = PackedInt8Weight.pack(codes, torch.ones(())).codes.tolist()
    for row, column in itertools.product(range(64), range(256)):
        tile, b, r = row // 16, row % 16 // 8, row % 8
        block, half, c, a, byte = column // 64, column % 64 // 32, column % 32 // 8, column % 8 // 4, column % 4
        word = packed[tile][block][half][4 * r + c][2 * b + a]
        # Padding holds byte 128, which stands for 0.
        want = int(codes[row, column]) if row < n and column < k else 0
        assert (word >> (8 * byte)) & 255 == want + 128, (row, column)


def test_codes_may_have_any_strides() -> None:
    codes = random_codes(130, 70)
    for view in (codes.t(), codes[:, ::2], codes[::3], codes[:, 5:], codes[:1].expand(40, 70)):
        assert torch.equal(PackedInt8Weight.pack(view, torch.ones(1)).unpack(), view)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (5, 1), (1, 5)])
def test_scales_and_zero_points_of_every_shape_become_one_for_each_row(shape: tuple[int, ...]) -> None:
    values = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape)
    want = values.reshape(-1).float().expand(5)
    for scale_dtype, zero_dtype in (
        (torch.float32, torch.int8),
        (torch.float16, torch.int32),
        (torch.bfloat16, torch.float32),
    ):
        packed = PackedInt8Weight.pack(random_codes(5, 9), values.to(scale_dtype), values.to(zero_dtype))
        for got in (packed.scale, packed.zero_point):
            assert got.dtype == torch.float32
            assert got.shape == (5,)
            assert got.is_contiguous()
            assert torch.equal(got, want)


def test_packed_codes_are_a_copy() -> None:
    codes = random_codes(64, 128)
    packed = PackedInt8Weight.pack(codes, torch.ones(64))
    want = codes.clone()
    codes.zero_()
    assert torch.equal(packed.unpack(), want)


def test_a_weight_moves_to_another_device_as_a_whole() -> None:
    packed = PackedInt8Weight.pack(random_codes(3, 5), torch.ones(3), torch.zeros(3))
    assert packed.to("cpu") is packed
    moved = packed.to("meta")
    assert {tensor.device.type for tensor in (moved.codes, moved.scale, moved.zero_point)} == {"meta"}
    assert (moved.out_features, moved.in_features) == (3, 5)
    assert moved.unpack().shape == (3, 5)
    symmetric = PackedInt8Weight.pack(random_codes(3, 5), torch.ones(3)).to("meta")
    assert symmetric.zero_point is None


def test_a_weight_on_the_meta_device_can_be_packed() -> None:
    codes, scale = torch.empty(17, 130, dtype=torch.int8, device="meta"), torch.empty(17, device="meta")
    assert PackedInt8Weight.pack(codes, scale).codes.shape == (4, 4, 2, 32, 4)


def test_the_repr_tells_size_scheme_and_device() -> None:
    codes, scale = random_codes(3, 5), torch.ones(3)
    assert (
        repr(PackedInt8Weight.pack(codes, scale))
        == "PackedInt8Weight(out_features=3, in_features=5, symmetric, device=cpu)"
    )
    assert "asymmetric" in repr(PackedInt8Weight.pack(codes, scale, scale))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"weight_int8": [[1]]}, TypeError, "weight_int8 must be a torch.Tensor, got list"),
        ({"weight_int8": torch.ones(4, 6)}, TypeError, "weight_int8 must have dtype int8, got float32"),
        (
            {"weight_int8": torch.ones(4, dtype=torch.int8)},
            ValueError,
            r"weight_int8 must have shape \(out_features, in_features\), both at least 1, got \(4,\)",
        ),
        ({"weight_int8": torch.ones(4, 0, dtype=torch.int8)}, ValueError, r"at least 1, got \(4, 0\)"),
        ({"scale": 1.0}, TypeError, "scale must be a torch.Tensor, got float"),
        ({"scale": torch.ones(4, dtype=torch.int32)}, TypeError, "scale must have dtype .*, got int32"),
        ({"scale": torch.ones(6)}, ValueError, r"scale must have shape \(4,\), .* got \(6,\)"),
        ({"scale": torch.ones(2, 2)}, ValueError, r"scale must have shape \(4,\), .* got \(2, 2\)"),
        ({"zero_point": torch.ones(6)}, ValueError, r"zero_point must have shape \(4,\), .* got \(6,\)"),
        ({"zero_point": torch.ones(4, dtype=torch.int64)}, TypeError, "zero_point must have dtype .*, got int64"),
        (
            {"scale": torch.ones(4, device="meta")},
            ValueError,
            "scale must be on the device of weight_int8, cpu, got meta",
        ),
    ],
)
def test_an_error_names_the_argument(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PackedInt8Weight.pack(**{"weight_int8": random_codes(4, 6), "scale": torch.ones(4), **arguments})
