"""Device code for prepared weights of 8 and 4 bits: their codes as floats, and scales and zeros of groups.

A tile is 16 output features. A step is 128 columns of the weight, and a part what of it shares a scale: all, a half or
a quarter.
"""

import triton
import triton.language as tl

from tk_kernel_core.gemm_kernels import LOADS_IN_BRANCHES, STEP, for_lanes

BLOCKS = tl.constexpr(4)  # of 32 columns, in a step
STEP_WORDS = tl.constexpr(256)  # of 4 bits, in a step of a tile

# A byte b under a high byte of 0x64 is 1024 + b in fp16, exactly; the code is b - 128.
_INT8_TO_FP16 = tl.constexpr("""
{
.reg .b32 pair, offset;
mov.b32 offset, 0xe480e480;
prmt.b32 pair, $4, 0x64646464, 0x5150; add.f16x2 pair, pair, offset; mov.b32 {$0, $1}, pair;
prmt.b32 pair, $4, 0x64646464, 0x5352; add.f16x2 pair, pair, offset; mov.b32 {$2, $3}, pair;
}""")
# bfloat16 has no 8 bits for that: a byte b below 0x4b0000 is 2^23 + b in fp32, and the code is exact in bfloat16.
_INT8_TO_BF16 = tl.constexpr("""
{
.reg .b32 word, pair;
.reg .f32 low, high;
prmt.b32 word, $4, 0x4b000000, 0x7650; mov.b32 low, word; add.f32 low, low, 0fCB000080;
prmt.b32 word, $4, 0x4b000000, 0x7651; mov.b32 high, word; add.f32 high, high, 0fCB000080;
cvt.rn.bf16x2.f32 pair, high, low; mov.b32 {$0, $1}, pair;
prmt.b32 word, $4, 0x4b000000, 0x7652; mov.b32 low, word; add.f32 low, low, 0fCB000080;
prmt.b32 word, $4, 0x4b000000, 0x7653; mov.b32 high, word; add.f32 high, high, 0fCB000080;
cvt.rn.bf16x2.f32 pair, high, low; mov.b32 {$2, $3}, pair;
}""")
_FOUR_HALVES = tl.constexpr("=h,=h,=h,=h,r")


@triton.jit
def _byte(words, SHIFT: tl.constexpr, dtype: tl.constexpr):
    return (((words >> SHIFT) & 255).to(tl.float32) - 128.0).to(dtype)


@triton.jit
def dequantise_int8(words, dtype: tl.constexpr, PTX: tl.constexpr):
    """The codes of words, [..., 2 elements of a pair, 2 pairs]."""
    if not PTX:
        b0, b1 = _byte(words, 0, dtype), _byte(words, 8, dtype)
        b2, b3 = _byte(words, 16, dtype), _byte(words, 24, dtype)
    elif dtype == tl.bfloat16:
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            _INT8_TO_BF16, _FOUR_HALVES, [words], dtype=(tl.bfloat16,) * 4, is_pure=True, pack=1
        )
    else:
        b0, b1, b2, b3 = tl.inline_asm_elementwise(
            _INT8_TO_FP16, _FOUR_HALVES, [words], dtype=(tl.float16,) * 4, is_pure=True, pack=1
        )
    return tl.join(tl.join(b0, b1), tl.join(b2, b3))


# Under the bits 0x6400 a code is 1024 + code in fp16, and in the upper half of a byte 1024 + 16 * code. $9 and $10 are
# what to add to the one, and to a sixteenth of the other, so that code - zero is left, exactly.
_INT4_TO_FP16 = """
.reg .b32 upper, pair, sixteenth;
mov.b32 sixteenth, 0x2c002c00;
lop3.b32 pair, $8, 0x000f000f, 0x64006400, 0xea; add.f16x2 pair, pair, $9; {0}
lop3.b32 pair, $8, 0x00f000f0, 0x64006400, 0xea; fma.rn.f16x2 pair, pair, sixteenth, $10; {1}
shr.u32 upper, $8, 8;
lop3.b32 pair, upper, 0x000f000f, 0x64006400, 0xea; add.f16x2 pair, pair, $9; {2}
lop3.b32 pair, upper, 0x00f000f0, 0x64006400, 0xea; fma.rn.f16x2 pair, pair, sixteenth, $10; {3}
"""
# Under 0x4300 it is 128 + code in bf16, which has no room for the upper half of a byte. sm_80 cannot but multiply and
# add.
_INT4_TO_BF16 = """
.reg .b32 rest, pair, one;
mov.b32 one, 0x3f803f80;
lop3.b32 pair, $8, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 pair, pair, one, $9; {0}
shr.u32 rest, $8, 4;
lop3.b32 pair, rest, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 pair, pair, one, $9; {1}
shr.u32 rest, $8, 8;
lop3.b32 pair, rest, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 pair, pair, one, $9; {2}
shr.u32 rest, $8, 12;
lop3.b32 pair, rest, 0x000f000f, 0x43004300, 0xea; fma.rn.bf16x2 pair, pair, one, $9; {3}
"""


def _ptx(conversion, before="", scaling=""):
    """Complete a conversion by what is done with its four pairs of columns."""
    ends = [f"{scaling} mov.b32 {{${2 * pair}, ${2 * pair + 1}}}, pair;" for pair in range(4)]
    return tl.constexpr("{" + before + conversion.format(*ends) + "}")


_FP16_CODES = _ptx(_INT4_TO_FP16)
_BF16_CODES = _ptx(_INT4_TO_BF16)
_FP16_WEIGHT = _ptx(_INT4_TO_FP16, ".reg .b32 scale; mov.b32 scale, {$11, $11};", "mul.rn.f16x2 pair, pair, scale;")
_BF16_WEIGHT = _ptx(
    _INT4_TO_BF16,
    ".reg .b32 scale, zero; mov.b32 scale, {$10, $10}; mov.b32 zero, 0x80008000;",
    "fma.rn.bf16x2 pair, pair, scale, zero;",
)
_TWO_REGISTERS = tl.constexpr("=h," * 8 + "r,r")
_TWO_AND_SCALE = tl.constexpr("=h," * 8 + "r,r,h")
_THREE_REGISTERS = tl.constexpr("=h," * 8 + "r,r,r")
_THREE_AND_SCALE = tl.constexpr("=h," * 8 + "r,r,r,h")


@triton.constexpr_function
def n_parts(GROUP_SIZE):
    """Groups in a step, or 1."""
    return STEP.value // GROUP_SIZE if GROUP_SIZE in (32, 64) else 1


@triton.constexpr_function
def row_steps(IN_FEATURES, GROUP_SIZE):
    """Steps in a row of the weight, padding included."""
    columns = 256 if GROUP_SIZE == 256 else STEP.value
    return (IN_FEATURES + columns - 1) // columns * (columns // STEP.value)


@triton.constexpr_function
def n_groups(IN_FEATURES, GROUP_SIZE):
    """Groups in a row of the weight, padding included."""
    return 1 if GROUP_SIZE == -1 else row_steps(IN_FEATURES, GROUP_SIZE) * STEP.value // GROUP_SIZE


@triton.jit
def group_of(steps, parts, GROUP_SIZE: tl.constexpr):
    """Groups that parts of steps belong to."""
    if GROUP_SIZE == -1:
        return steps * 0 + parts
    elif GROUP_SIZE < STEP:
        return steps * (STEP // GROUP_SIZE) + parts
    else:
        return steps // (GROUP_SIZE // STEP) + parts


@triton.jit
def _difference(words, SHIFT: tl.constexpr, zeros, scales, dtype: tl.constexpr):
    difference = (((words >> SHIFT) & 15) - zeros).to(tl.float32)
    if scales is not None:
        difference *= scales.to(tl.float32)
    return difference.to(dtype)


@triton.jit
def dequantise_int4(words, zeros, scales, dtype: tl.constexpr, PTX: tl.constexpr):
    """(codes - zeros) * scales, [..., 2 columns of a pair, 2 pairs of a half, 2 halves of an octet].

    Zeros are int32 and shaped like the words, or None for 8; scales are shaped like the words, or None for 1.
    """
    if zeros is None:
        zeros = tl.full(words.shape, 8, tl.int32)
    if not PTX or (scales is not None and scales.dtype != dtype):
        c0, c1 = _difference(words, 0, zeros, scales, dtype), _difference(words, 16, zeros, scales, dtype)
        c2, c3 = _difference(words, 4, zeros, scales, dtype), _difference(words, 20, zeros, scales, dtype)
        c4, c5 = _difference(words, 8, zeros, scales, dtype), _difference(words, 24, zeros, scales, dtype)
        c6, c7 = _difference(words, 12, zeros, scales, dtype), _difference(words, 28, zeros, scales, dtype)
    elif dtype == tl.bfloat16:
        offset = zeros * 0x10001 - 0x3CFF3D00
        if scales is None:
            c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
                _BF16_CODES, _TWO_REGISTERS, [words, offset], (tl.bfloat16,) * 8, is_pure=True, pack=1
            )
        else:
            c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
                _BF16_WEIGHT, _TWO_AND_SCALE, [words, offset, scales], (tl.bfloat16,) * 8, is_pure=True, pack=1
            )
    else:
        offset, upper = zeros * 0x10001 - 0x1BFF1C00, zeros * 0x100010 - 0x2BFF2C00
        if scales is None:
            c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
                _FP16_CODES, _THREE_REGISTERS, [words, offset, upper], (tl.float16,) * 8, is_pure=True, pack=1
            )
        else:
            c0, c1, c2, c3, c4, c5, c6, c7 = tl.inline_asm_elementwise(
                _FP16_WEIGHT, _THREE_AND_SCALE, [words, offset, upper, scales], (tl.float16,) * 8, is_pure=True, pack=1
            )
    return tl.join(tl.join(tl.join(c0, c1), tl.join(c2, c3)), tl.join(tl.join(c4, c5), tl.join(c6, c7)))


@triton.jit
def for_words(values):
    """Repeat what belongs to rows and parts, [4, 8 rows, WARPS, TILES, PARTS, 2 halves of the rows], for every word."""
    WARPS: tl.constexpr = values.shape[2]
    TILES: tl.constexpr = values.shape[3]
    PARTS: tl.constexpr = values.shape[4]
    PAIRS: tl.constexpr = 2 if PARTS > 1 else 1
    # warp, tile, pair of blocks, row, octet, block, half
    values = tl.permute(tl.reshape(values, [4, 8, WARPS, TILES, PAIRS, PARTS // PAIRS, 2]), (2, 3, 4, 1, 0, 5, 6))
    return tl.reshape(tl.broadcast_to(values, [WARPS, TILES, 2, 8, 4, 2, 2]), [WARPS, TILES, 2, 128])


@triton.jit
def halves(values):
    """The two halves of [..., columns of a step, words], along the axis before the last."""
    ROWS: tl.constexpr = values.numel // (values.shape[-2] * values.shape[-1])
    HALF: tl.constexpr = values.shape[-2] // 2
    split = tl.reshape(values, [ROWS, 2, HALF, values.shape[-1]])
    return tl.split(tl.permute(split, (0, 2, 3, 1)))


@triton.jit
def row_offsets(tiles, N_GROUPS: tl.constexpr):
    """Offsets of the first scale or zero of rows, [4 times the same, 8 rows, WARPS, TILES, 1, 2 halves of the rows].

    tiles are [WARPS or 1, TILES].
    """
    lanes = tl.arange(0, 4)[:, None, None, None, None, None]
    rows = tl.arange(0, 8)[None, :, None, None, None, None]
    halves = tl.arange(0, 2)[None, None, None, None, None, :]
    return lanes * 0 + tiles[None, None, :, :, None, None] * (N_GROUPS * 16) + rows * 2 + halves


@triton.jit
def load_groups(ptrs, steps, GROUP_SIZE: tl.constexpr, N_STEPS: tl.constexpr, SPARE: tl.constexpr, PTX: tl.constexpr):
    """Scales or zeros of steps, [4 times the same, 8 rows, WARPS, TILES, PARTS, 2 halves of the rows].

    ptrs are those of group 0; steps broadcast to them. Where SPARE, steps from N_STEPS on do not exist.
    """
    parts = tl.arange(0, n_parts(GROUP_SIZE))[None, None, None, None, :, None]
    ptrs += group_of(steps, parts, GROUP_SIZE) * 16
    if SPARE:
        exists = for_lanes(steps < N_STEPS, PTX)
        return for_lanes(tl.load(for_lanes(ptrs, PTX), mask=exists, other=0), PTX)
    else:
        return for_lanes(tl.load(for_lanes(ptrs, PTX)), PTX)


@triton.jit
def groups_ahead(ptrs, groups, goes_on, steps, GROUP_SIZE: tl.constexpr, N_STEPS: tl.constexpr, PTX: tl.constexpr):
    """Scales or zeros of a loop's next step; where the loop does not go on, groups or whatever else there is."""
    if PTX and LOADS_IN_BRANCHES:
        if goes_on:
            groups = load_groups(ptrs, steps, GROUP_SIZE, N_STEPS, False, PTX)
        return groups
    else:
        return load_groups(ptrs, steps, GROUP_SIZE, N_STEPS, False, PTX)
