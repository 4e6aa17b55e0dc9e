"""Layouts of prepared weights: codes and scales in the order in which the matrix units' operand registers hold them.

A tile is 16 output features ("rows") of 64 input features ("columns"), 32 lanes of 16 consecutive bytes for each
instruction or two. `weight_kernels` has the device code that reads them.
"""

from __future__ import annotations

import torch

ROW_MULTIPLE = 64
"""Rows are padded to a multiple of this: the most that one program of any kernel works on."""

COLUMN_MULTIPLE = 128
"""Columns are padded to a multiple of this: what one step of a kernel works on."""


def int8_words(codes: torch.Tensor) -> torch.Tensor:
    """Lay int8 codes out as words.

    Args:
        codes: int8 [N, K]; what is missing up to whole multiples of rows and columns becomes code 0.

    Returns:
        int32 [N / 16, K / 64, 2, 32, 4] with N and K padded, contiguous. Word `2 * b + a` of lane `4 * r + c` in half h
        of tile [t, s] holds the codes of row `16 * t + 8 * b + r` and columns `64 * s + 32 * h + 8 * c + 4 * a` to 3
        further, lowest byte first, each plus 128.
    """
    n, k = codes.shape
    padding = (0, -k % COLUMN_MULTIPLE, 0, -n % ROW_MULTIPLE)
    # Adding 128 flips the highest bit.
    unsigned = torch.nn.functional.pad(codes, padding).view(torch.uint8) ^ 128
    fragments = _int8_fragments(unsigned).contiguous()
    return fragments.view(torch.int32).view(*fragments.shape[:3], 32, 4)


def int8_codes(words: torch.Tensor) -> torch.Tensor:
    """Undo `int8_words`: int8 [N, K], padding included."""
    n_tiles, n_blocks = words.shape[:2]
    codes = torch.empty(16 * n_tiles, 64 * n_blocks, dtype=torch.uint8, device=words.device)
    fragments = _int8_fragments(codes)
    fragments.copy_(words.view(torch.uint8).view(fragments.shape))
    return codes.bitwise_xor_(128).view(torch.int8)


def int4_words(codes: torch.Tensor) -> torch.Tensor:
    """Lay 4-bit codes out as words.

    Args:
        codes: uint8 [N, K], contiguous, from 0 to 15; N and K are whole multiples of 16 and 64.

    Returns:
        int32 [N / 16, K / 64, 32, 4], contiguous. Bits 4 p + 16 h to 4 p + 16 h + 3 of word `2 * s + b` of lane
        `4 * r + c` in tile [t, u] hold the code of row `16 * t + 8 * b + r` and column
        `64 * u + 32 * s + 8 * c + 2 * p + h`.
    """
    octets = codes.view(torch.int64)
    # Codes 0 and 2 to bits 0 to 7, 1 and 3 to bits 8 to 15, and those of the upper half alike, from bit 32 on.
    pairs = octets | (octets >> 12)
    words = (pairs & 0xFF) | ((pairs >> 24) & 0xFF00) | ((pairs & 0xFF00) << 8) | ((pairs >> 16) & 0xFF000000)
    fragments = _int4_fragments(words.view(torch.int32)[:, ::2].contiguous())
    return fragments.contiguous().view(*fragments.shape[:2], 32, 4)


def int4_codes(words: torch.Tensor) -> torch.Tensor:
    """Undo `int4_words`: uint8 [N, K]."""
    rows = torch.empty(16 * words.shape[0], 8 * words.shape[1], dtype=torch.int32, device=words.device)
    fragments = _int4_fragments(rows)
    fragments.copy_(words.view(fragments.shape))
    wide = rows.to(torch.int64)
    pairs = (wide & 0xFF) | ((wide & 0xFF00) << 24) | ((wide >> 8) & 0xFF00) | ((wide & 0xFF000000) << 16)
    return ((pairs | (pairs << 12)) & 0x0F0F0F0F0F0F0F0F).view(torch.uint8)


def by_tiles(values: torch.Tensor, n_groups: int, n_rows: int) -> torch.Tensor:
    """Bring scales or zeros of rows and groups, [N, G], to [N / 16, G, 8, 2], padded by zeros to these numbers."""
    padded = torch.nn.functional.pad(values, (0, n_groups - values.shape[1], 0, n_rows - values.shape[0]))
    return padded.view(-1, 2, 8, n_groups).permute(0, 3, 2, 1).contiguous()


def by_rows(values: torch.Tensor) -> torch.Tensor:
    """Undo `by_tiles`: [N, G], padding included."""
    return values.permute(0, 3, 2, 1).flatten(0, 2)


def _int8_fragments(codes: torch.Tensor) -> torch.Tensor:
    """View [N, K] bytes as [tile, block, half, row, column octet, row half, column quad, column]."""
    n, k = codes.shape
    return codes.view(n // 16, 2, 8, k // 64, 2, 4, 2, 4).permute(0, 3, 4, 2, 5, 1, 6, 7)


def _int4_fragments(words: torch.Tensor) -> torch.Tensor:
    """View [N, K / 8] words as [row tile, column tile, r, c, s, b]."""
    n, octets = words.shape
    return words.view(n // 16, 2, 8, octets // 8, 2, 4).permute(0, 3, 2, 5, 4, 1)
