"""Layouts of prepared weights: every code and scale in its place, and back."""

from __future__ import annotations

import pytest
import torch

from tk_kernel_core.packing import by_rows, by_tiles, int4_codes, int4_words, int8_codes, int8_words

Tensor = torch.Tensor


def integers(low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_int8_codes_lie_where_the_layout_says() -> None:
    codes = integers(-128, 128, 128, 256, dtype=torch.int8)
    words = int8_words(codes)
    assert (words.shape, words.dtype) == ((8, 4, 2, 32, 4), torch.int32)
    assert words.is_contiguous()
    for t, s, h, lane, word in ((0, 0, 0, 0, 0), (7, 3, 1, 31, 3), (2, 1, 0, 13, 2), (5, 2, 1, 6, 1)):
        (r, c), (b, a) = divmod(lane, 4), divmod(word, 2)
        row, column = 16 * t + 8 * b + r, 64 * s + 32 * h + 8 * c + 4 * a
        found = words[t, s, h, lane, word].view(1).view(torch.uint8).int() - 128
        assert torch.equal(found, codes[row, column : column + 4].int())


def test_int4_codes_lie_where_the_layout_says() -> None:
    codes = integers(0, 16, 64, 128, dtype=torch.uint8)
    words = int4_words(codes)
    assert (words.shape, words.dtype) == ((4, 2, 32, 4), torch.int32)
    assert words.is_contiguous()
    for t, u, lane, word in ((0, 0, 0, 0), (3, 1, 31, 3), (2, 0, 13, 2), (1, 1, 6, 1)):
        (r, c), (s, b) = divmod(lane, 4), divmod(word, 2)
        bits = int(words[t, u, lane, word]) & 0xFFFFFFFF
        for p in range(4):
            for h in range(2):
                row, column = 16 * t + 8 * b + r, 64 * u + 32 * s + 8 * c + 2 * p + h
                assert (bits >> (4 * p + 16 * h)) & 15 == codes[row, column]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 128), (70, 300)])
def test_what_is_packed_comes_back_and_padding_is_zeros(n: int, k: int) -> None:
    codes = integers(-128, 128, n, k, dtype=torch.int8)
    unpacked = int8_codes(int8_words(codes.t().contiguous().t()))
    assert unpacked.shape == (-(-n // 64) * 64, -(-k // 128) * 128)
    assert torch.equal(unpacked[:n, :k], codes)
    assert not unpacked[n:].any()
    assert not unpacked[:, k:].any()
    nibbles = integers(0, 16, *unpacked.shape, dtype=torch.uint8)
    assert torch.equal(int4_codes(int4_words(nibbles)), nibbles)
    values = integers(0, 100, n, 3, dtype=torch.float32)
    tiles = by_tiles(values, 4, unpacked.shape[0])
    assert tiles.shape == (unpacked.shape[0] // 16, 4, 8, 2)
    row = n // 2
    assert tiles[row // 16, 2, row % 8, row % 16 // 8] == values[row, 2]
    assert torch.equal(by_rows(tiles)[:n, :3], values)
    assert by_rows(tiles).sum() == values.sum()
