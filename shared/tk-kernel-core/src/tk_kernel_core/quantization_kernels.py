"""Device code of int8 quantisation per token, for kernels whose results are codes: the rule of `quantization`.

Rows are [BLOCK_M, BLOCK_N] in fp32, and what belongs to a row is [BLOCK_M, 1].
"""

import triton
import triton.language as tl

# Added to an fp32 number below 2^22 in magnitude, it leaves the number, rounded half to even, in the low bits.
_ROUNDER = tl.constexpr(12582912.0)


@triton.jit
def magnitude_bits(x):
    """Return the magnitudes as integers: the largest of a row's is what `scale_and_factor` takes."""
    # They compare as the magnitudes do as numbers, with infinity above them and NaN above infinity.
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_and_factor(bits):
    """Return the scale of rows whose largest magnitude has these bits, and what brings their elements to codes.

    The third result is whether a row is finite: elements of one that is not must be replaced by 0 for `encode`.
    """
    is_finite = bits < 0x7F800000
    is_zero = bits < 0x08800000  # 2^-110
    largest = tl.where(is_finite & ~is_zero, bits, 0x3F800000).to(tl.float32, bitcast=True)
    scale = tl.where(is_zero, 1.0, tl.div_rn(largest, 127.0))
    factor = tl.where(is_zero, 0.0, tl.div_rn(127.0, largest))
    return tl.where(is_finite, scale, float("nan")), factor, is_finite


@triton.jit
def encode(x, factor):
    """Return the int8 codes of finite rows."""
    # The clamp stands between product and sum, which could otherwise become one operation with one rounding.
    scaled = tl.minimum(tl.maximum(x * factor, -127.0), 127.0)
    return (scaled + _ROUNDER).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def store_codes(codes_ptr, codes, first_row, n_rows, first_column, WIDTH: tl.constexpr):
    """Store a tile of codes into a contiguous [n_rows, WIDTH], from a row and a column on, 16 bytes at a time.

    Transposed: the compiler would let a thread load as many neighbours of any tensor of the tile's shape as it
    stores of the codes, wider ones in two halves, and would add up rows in another order.
    """
    rows = first_row + tl.arange(0, codes.shape[0])[None, :]
    columns = first_column + tl.arange(0, codes.shape[1])[:, None]
    ptrs = codes_ptr + rows.to(tl.int64) * WIDTH + columns
    tl.store(ptrs, tl.trans(codes), mask=(rows < n_rows) & (columns < WIDTH))
