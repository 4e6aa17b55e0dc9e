"""The interpreter gives what a GPU gives: compared with PyTorch's own conversions and products."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_kernel_core.interpreter import prepare_interpreter
from tk_kernel_core.launch import Kernel, PreparedLaunch

sys.path.append(str(Path(__file__).parent))

pytestmark = pytest.mark.interpreter

BLOCK = 64


def launch(kernel: str, *tensors: torch.Tensor, scalars: tuple[int, ...] = (), **constexprs: Any) -> None:
    PreparedLaunch(Kernel("sample_kernels", kernel), (1, 1, 1), scalars, constexprs, torch.device("cpu"))(*tensors)


def convert(values: torch.Tensor, dtype: torch.dtype, rounding: str | None = None) -> torch.Tensor:
    out = torch.empty(values.shape, dtype=dtype)
    launch("convert_kernel", out, values, scalars=(values.numel(),), ROUNDING=rounding, BLOCK=BLOCK)
    return out


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Compare bit patterns, except that any NaN is as good as another."""
    assert got.dtype == want.dtype
    assert torch.equal(got.isnan(), want.isnan())
    kind = {2: torch.int16, 4: torch.int32}[got.element_size()]
    zero = torch.zeros((), dtype=kind)
    assert torch.equal(torch.where(got.isnan(), zero, got.view(kind)), torch.where(want.isnan(), zero, want.view(kind)))


def fp32(*bits: int) -> torch.Tensor:
    return torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    ("bits", "want"),
    [
        (0x3F80_8000, 0x3F80),  # a tie, down to even
        (0x3F81_8000, 0x3F82),  # a tie, up to even
        (0x3F80_8001, 0x3F81),  # just above a tie
        (0x3F81_7FFF, 0x3F81),  # just below a tie
        (0xBF81_8000, 0xBF82),  # a negative tie
        (0x3FFF_FFFF, 0x4000),  # carries into the exponent
        (0x7F7F_7FFF, 0x7F7F),  # the largest that stays finite
        (0x7F7F_8000, 0x7F80),  # the smallest that becomes infinite
        (0x7F80_0000, 0x7F80),  # infinity
        (0xFF80_0000, 0xFF80),
        (0x0000_0001, 0x0000),  # the smallest subnormal
        (0x0001_8000, 0x0002),  # a tie of subnormals
        (0x807F_FFFF, 0x8080),  # from a subnormal to a normal number
        (0x8000_0000, 0x8000),  # negative zero
    ],
)
def test_fp32_is_rounded_to_the_nearest_bfloat16(bits: int, want: int) -> None:
    got = convert(fp32(bits), torch.bfloat16)
    assert int(got.view(torch.int16)) & 0xFFFF == want


# The last bits alone would vanish and leave an infinity.
@pytest.mark.parametrize("bits", [0x7F80_0001, 0x7FC0_0000, 0xFFFF_FFFF, 0xFF80_0001])
def test_nan_stays_nan(bits: int) -> None:
    assert bool(convert(fp32(bits), torch.bfloat16).isnan())


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=BLOCK))
def test_any_fp32_becomes_the_bfloat16_that_pytorch_gives(bits: list[int]) -> None:
    values = fp32(*bits)
    assert_same_bits(convert(values, torch.bfloat16), values.to(torch.bfloat16))


@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=BLOCK), st.sampled_from([torch.float32, torch.float16]))
def test_any_bfloat16_becomes_what_pytorch_gives(bits: list[int], dtype: torch.dtype) -> None:
    values = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert_same_bits(convert(values, dtype), values.to(dtype))


@given(st.lists(st.integers(-(2**24), 2**24), min_size=1, max_size=BLOCK))
def test_integers_become_bfloat16_and_come_back(integers: list[int]) -> None:
    values = torch.tensor(integers, dtype=torch.int32)
    rounded = values.to(torch.bfloat16)
    assert_same_bits(convert(values, torch.bfloat16), rounded)
    assert torch.equal(convert(rounded, torch.int32), rounded.to(torch.int32))


def test_float16_becomes_bfloat16() -> None:
    values = torch.tensor([1.0, -0.333, 65504.0, 6e-8, float("inf"), float("nan")], dtype=torch.float16)
    assert_same_bits(convert(values, torch.bfloat16), values.to(torch.bfloat16))


def test_a_rounding_mode_that_is_asked_for_is_kept() -> None:
    values = fp32(0x3F80_FFFF, 0xBF80_FFFF, 0x3F80_8000)
    got = convert(values, torch.bfloat16, rounding="rtz")
    assert [bits & 0xFFFF for bits in got.view(torch.int16).tolist()] == [0x3F80, 0xBF80, 0x3F80]


def test_float8_becomes_bfloat16_and_comes_back() -> None:
    values = [1.0, 1.5, -2.0, 0.0, 448.0, -0.125]
    narrow = torch.tensor(values).to(torch.float8_e4m3fn)
    assert convert(narrow, torch.bfloat16).tolist() == values
    assert convert(torch.tensor(values, dtype=torch.bfloat16), torch.float8_e4m3fn).float().tolist() == values


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dot(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, shape, generator=generator) for shape in ((16, 64), (64, 32)))
    if dtype != torch.int8:
        # Fractions whose products and sums fp32 holds exactly, so that the order of summation is of no account.
        a, b = a / 16, b / 16
    a, b = a.to(dtype), b.to(dtype)
    total = torch.int32 if dtype == torch.int8 else torch.float32
    out = torch.empty(16, 32, dtype=total)
    launch("dot_kernel", out, a, b, scalars=(64,), IN_FP32=False, BLOCK_M=16, BLOCK_N=32, BLOCK_K=32)
    assert torch.equal(out, (a.double() @ b.double()).to(total))


def test_subnormal_numbers_are_zero_to_exp2_and_roots() -> None:
    smallest = torch.finfo(torch.float32).smallest_normal
    x = torch.tensor([-126.0, -126.5, -149.0, 4.0, 0.0, smallest, smallest / 2, torch.nan])
    results = [torch.empty_like(x) for _ in range(3)]
    launch("math_kernel", *results, x, BLOCK=x.numel())
    exp2, sqrt, rsqrt = ([round(value, 4) if 1e-3 < value < 1e3 else value for value in y.tolist()] for y in results)
    assert exp2[:7] == [smallest, 0.0, 0.0, 16.0, 1.0, 1.0, 1.0]
    assert sqrt[3:7] == [2.0, 0.0, 2.0**-63, 0.0]
    assert rsqrt[3:7] == [0.5, torch.inf, 2.0**63, torch.inf]
    assert all(y[7].isnan() for y in results)


def test_dependent_launch_instructions_are_passed_over() -> None:
    x = torch.randn(BLOCK)
    out = torch.empty(BLOCK)
    launch("dependent_copy_kernel", out, x, BLOCK=BLOCK)
    assert torch.equal(out, x)


@pytest.mark.parametrize(
    ("numpy", "triton", "refused"),
    [("2.4.0", "3.6.0", True), ("2.10.1", "3.7.2", True), ("2.4.0", "3.9.0", False), ("2.3.5", "3.6.0", False)],
)
def test_a_numpy_too_new_for_this_triton_is_refused(numpy: str, triton: str, refused: bool) -> None:
    script = f"""
import numpy, triton
from tk_kernel_core.interpreter import prepare_interpreter
numpy.__version__, triton.__version__ = {numpy!r}, {triton!r}
try:
    prepare_interpreter()
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    said = f"the interpreter of Triton {triton} needs numpy below 2.4, got {numpy}"
    assert (said in done.stdout) == refused
    assert done.stdout == "" or refused


def test_corrections_are_made_once() -> None:
    from triton.runtime.interpreter import InterpreterBuilder

    prepare_interpreter()
    corrected = InterpreterBuilder.cast_impl
    prepare_interpreter()
    assert InterpreterBuilder.cast_impl is corrected


def test_the_language_is_replaced_once_for_each_function(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    x = torch.randn(BLOCK)
    first, second = torch.empty(BLOCK), torch.empty(BLOCK)
    launch("dependent_copy_kernel", first, x, BLOCK=BLOCK)
    monkeypatch.delattr(interpreter, "_patch_builtin")
    launch("dependent_copy_kernel", second, x, BLOCK=BLOCK)
    assert torch.equal(second, first)
