"""Kernels against exact formulas, launched directly: in the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tk_int8_gemm._launch import DequantizeConfig, GemmConfig, int8_gemm_config, quantize_config, w8a8_config
from tk_int8_gemm._plans import gemm_launch
from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.launch import Kernel, PreparedLaunch, launch_target
from tk_kernel_core.numerics import rounding_tolerance
from tk_testkit import assert_close

if not (torch.cuda.is_available() or interpreting()):
    pytest.skip("kernels run on a GPU, or with TRITON_INTERPRET=1", allow_module_level=True)

MODULE = "tk_int8_gemm._kernels"
Tensor = torch.Tensor


def guarded(values: Tensor, pad: int = 5) -> Tensor:
    """A copy of a tensor with NaN (127 for integers) right before it, between its rows and right after it."""
    filler = float("nan") if values.is_floating_point() else 127
    rows, width = values.shape if values.dim() == 2 else (1, values.shape[0])
    memory = torch.full((rows + 2, width + pad), filler, dtype=values.dtype, device=values.device)
    view = memory[1 : rows + 1, :width]
    view.copy_(values)
    return view if values.dim() == 2 else view[0]


def enclosed(values: Tensor) -> Tensor:
    """The same without gaps between the rows."""
    guard = torch.full((64,), float("nan") if values.is_floating_point() else 127).to(values)
    memory = torch.cat([guard, values.flatten(), guard])
    return memory[64 : 64 + values.numel()].view(values.shape)


def alignment_of(*lengths: int) -> int:
    combined = math.gcd(16, *lengths)
    return combined & -combined


def launch(name: str, config: object, n_programs: int, scalars: tuple, constexprs: dict, *tensors: Tensor) -> None:
    prepared = PreparedLaunch(
        Kernel(MODULE, name),
        (n_programs, 1, 1),
        scalars,
        {**constexprs, "DEPENDENT_LAUNCH": config.dependent_launch},
        tensors[0].device,
        num_warps=config.num_warps,
        **({"launch_pdl": True} if config.dependent_launch else {}),
    )
    prepared(*tensors)


def multiply(config: GemmConfig, out_dtype: torch.dtype, x: Tensor, weight: Tensor, *rest: Tensor) -> Tensor:
    """Launch the product; rest is what follows x and the weight, but for the scales of a quantised x."""
    out = enclosed(torch.zeros(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device))
    x_scale, rest = (rest[:1], rest[1:]) if x.dtype == torch.int8 else ((), rest)
    gemm_launch(config, x, weight, out.dtype)(out, x, *x_scale, weight, *rest)
    for beyond in (out.storage_offset() - 1, out.storage_offset() + out.numel()):
        assert out.as_strided((1,), (1,), beyond).isnan().item()
    return out


def run_int8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, zero_point: Tensor | None, **tile: object
) -> Tensor:
    (m, k), n = x.shape, weight.shape[0]
    dtype = str(x.dtype).removeprefix("torch.")
    config = int8_gemm_config(m, n, k, alignment_of(k, x.stride(0)), dtype, launch_target(x.device))
    assert isinstance(config, GemmConfig)
    x_sum = None if zero_point is None else run_row_sums(x)
    return multiply(_tiled(config, m, n, tile), x.dtype, x, weight, scale, bias, zero_point, x_sum)


def run_w8a8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    zero_point: Tensor | None,
    out_dtype: torch.dtype,
    **tile: object,
) -> Tensor:
    (m, k), n = x.shape, weight.shape[0]
    config = w8a8_config(m, n, k, alignment_of(k, x.stride(0)), launch_target(x.device))
    assert isinstance(config, GemmConfig)
    x_sum = None if zero_point is None else x.sum(-1, dtype=torch.int32)
    config = _tiled(config, m, n, tile)
    return multiply(config, out_dtype, x, weight, x_scale, scale, bias, zero_point, x_sum)


def _tiled(config: GemmConfig, m: int, n: int, tile: dict[str, object]) -> GemmConfig:
    config = replace(config, **tile)
    n_tiles = -(-m // config.block_m) * -(-n // config.block_n)
    return config if "n_programs" in tile else replace(config, n_programs=n_tiles)


def run_row_sums(x: Tensor) -> Tensor:
    (n_rows, k), unit = x.shape, alignment_of(x.shape[1], x.stride(0))
    config = quantize_config(k, launch_target(x.device))
    sums = enclosed(torch.zeros(n_rows, device=x.device))
    constexprs = {"WIDTH": k, "ALIGNMENT": unit, "BLOCK_M": config.block_m, "BLOCK_K": config.block_k}
    n_programs = -(-n_rows // config.block_m)
    launch("row_sums_kernel", config, n_programs, (n_rows, x.stride(0) // unit), constexprs, sums, x)
    return sums


def run_quantize(x: Tensor, with_sums: bool = True, block_k: int | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    (n_rows, k), unit = x.shape, alignment_of(x.shape[1], x.stride(0))
    config = quantize_config(k, launch_target(x.device))
    codes = enclosed(torch.full((n_rows, k), 99, dtype=torch.int8, device=x.device))
    scale = enclosed(torch.zeros(n_rows, device=x.device))
    sums = enclosed(torch.zeros(n_rows, dtype=torch.int32, device=x.device)) if with_sums else None
    constexprs = {"WIDTH": k, "ALIGNMENT": unit, "BLOCK_M": config.block_m, "BLOCK_K": block_k or config.block_k}
    n_programs = -(-n_rows // config.block_m)
    scalars = (n_rows, x.stride(0) // unit)
    launch("quantize_per_token_kernel", config, n_programs, scalars, constexprs, codes, scale, x, sums)
    return codes, scale, sums


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """The rule, as it is written: everything in fp32, every operation rounded by itself."""
    x = x.float()
    largest = x.abs().amax(-1)
    finite = largest.isfinite()
    usable = finite & (largest >= 2.0**-110)
    divisor = torch.where(usable, largest, 1.0)
    # On a GPU PyTorch divides by a number by way of its reciprocal.
    top = torch.full_like(divisor, 127.0)
    ratio = top / divisor
    scale = torch.where(usable, divisor / top, torch.where(finite, 1.0, float("nan")))
    codes = torch.round(torch.where(usable[:, None], x, 0.0) * ratio[:, None]).clamp(-127, 127)
    return codes.to(torch.int8), scale


def random_codes(*shape: int, device: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    return codes.to(device)


def random_floats(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def exact_w8a8(x: Tensor, weight: Tensor, x_scale: Tensor, scale: Tensor, bias: Tensor | None, zero: object) -> Tensor:
    sums = x.double() @ (weight.double() - (0 if zero is None else zero.double()[:, None])).T
    return sums * scale.double() * x_scale.double()[:, None] + (0 if bias is None else bias.double())


EXTENTS = {"m": (1, 2, 15, 16, 17, 33), "k": (1, 10, 16, 33, 127), "n": (1, 15, 48, 129)}
# 5 and 4 have no common divisor: 20 in turn are all pairs of K and N.
RAGGED = [(m, EXTENTS["k"][i % 5], EXTENTS["n"][i % 4]) for i, m in enumerate(EXTENTS["m"] * 4)]


def test_the_ragged_shapes_name_every_extent_and_every_pair_of_k_and_n() -> None:
    assert {m for m, _, _ in RAGGED} == set(EXTENTS["m"])
    assert {(k, n) for _, k, n in RAGGED} == {(k, n) for k in EXTENTS["k"] for n in EXTENTS["n"]}


@pytest.mark.parametrize(("m", "k", "n"), RAGGED)
def test_w8a8_sums_are_exact_at_ragged_sizes(m: int, k: int, n: int, device: str) -> None:
    x, weight = random_codes(m, k, device=device, seed=1), random_codes(n, k, device=device, seed=2)
    ones = torch.ones(max(m, n), device=device)
    ones_m, ones_n = enclosed(ones[:m]), enclosed(ones[:n])
    # By pointers, whatever the address.
    got = run_w8a8(guarded(x), enclosed(weight), ones_m, ones_n, None, None, torch.float32, descriptors=False)
    # Below 2^24 fp32 holds every integer.
    assert torch.equal(got.cpu(), (x.cpu().long() @ weight.cpu().long().T).float())


@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize(("m", "n", "k", "gap"), [(1, 15, 16, 0), (33, 48, 144, 16), (70, 130, 272, 32)])
def test_w8a8_through_descriptors_is_exact(m: int, n: int, k: int, gap: int, swapped: bool, device: str) -> None:
    # What lies between the rows of x is no part of them.
    x = torch.full((m, k + gap), 127, dtype=torch.int8, device=device)[:, :k]
    x.copy_(random_codes(m, k, device=device, seed=1))
    weight, zero = random_codes(n, k, device=device, seed=2), random_codes(n, device=device, seed=3)
    ones = torch.ones(max(m, n), device=device)
    tile = {"block_m": 32, "block_n": 64, "block_k": 128, "swapped": swapped, "descriptors": True, "n_programs": 3}
    got = run_w8a8(x, weight, ones[:m], ones[:n], None, zero, torch.float32, **tile)
    assert torch.equal(got.cpu(), (x.cpu().long() @ (weight.cpu().long() - zero.cpu().long()[:, None]).T).float())


@pytest.mark.parametrize(("m", "k", "n"), RAGGED)
def test_weight_only_products_are_right_at_ragged_sizes(m: int, k: int, n: int, device: str) -> None:
    # Integers this small are exact in fp16, and so are all their sums in fp32: any element left out is seen.
    x = random_codes(m, k, device=device, seed=1).half() / 16
    weight, scale = random_codes(n, k, device=device, seed=2), random_floats(n, device=device).abs() / 64 + 0.001
    got = run_int8(guarded(x), enclosed(weight), enclosed(scale), None, None)
    want = x.double() @ weight.double().T * scale.double()
    assert_close(got, want, rounding_tolerance(torch.float16, k))


@pytest.mark.parametrize("zero_dtype", [torch.int8, torch.int32, torch.float32])
@pytest.mark.parametrize("swapped", [True, False])
def test_zero_points_are_subtracted_before_scaling_and_without_wrapping(
    zero_dtype: torch.dtype, swapped: bool, device: str
) -> None:
    x = torch.tensor([[1, 2, 3, 4]], dtype=torch.int8, device=device)
    weight = torch.tensor([[10, -3, 0, 7], [127, -128, 1, -1]], dtype=torch.int8, device=device)
    zero = torch.tensor([3, -128], dtype=zero_dtype, device=device)
    scale, bias = torch.tensor([0.5, 0.25], device=device), torch.tensor([100.0, 1.0], device=device)
    one = torch.ones(1, device=device)
    tile = {"swapped": swapped}
    for addend, want in ((None, [[1.0, 287.5]]), (bias, [[101.0, 288.5]])):
        for dtype in (torch.float16, torch.bfloat16):
            got = run_int8(guarded(x.to(dtype)), enclosed(weight), scale, addend, guarded(zero), **tile)
            assert torch.equal(got, torch.tensor(want, device=device).to(dtype))
        got = run_w8a8(guarded(x), enclosed(weight), one, scale, addend, guarded(zero), torch.float32, **tile)
        assert torch.equal(got, torch.tensor(want, device=device))
    assert run_int8(x.half(), weight, scale, None, None).tolist() == [[16.0, -32.5]]


@pytest.mark.parametrize("zero_dtype", [torch.int8, torch.int32, torch.float32])
@pytest.mark.parametrize("m", [3, 70])
def test_columns_beyond_the_last_add_no_zero_points(zero_dtype: torch.dtype, m: int, device: str) -> None:
    n, k = 130, 48
    x, weight = random_codes(m, k, device=device, seed=3), random_codes(n, k, device=device, seed=4)
    zero = random_codes(n, device=device, seed=5).to(zero_dtype)
    scale, x_scale = (random_floats(size, device=device, seed=size).abs() for size in (n, m))
    bias = random_floats(n, device=device, seed=6).half()
    want = exact_w8a8(x, weight, x_scale, scale, bias, zero)
    arguments = (enclosed(scale), enclosed(bias), enclosed(zero))
    got = run_w8a8(guarded(x, 16), enclosed(weight), enclosed(x_scale), *arguments, torch.float32, descriptors=False)
    magnitude = float(bias.abs().max() + 2 * k * 2**14 * scale.max() * x_scale.max())
    assert_close(got, want, rounding_tolerance(torch.float32, k, magnitude=magnitude))
    want = exact_w8a8(x, weight, torch.ones_like(x_scale), scale, bias, zero)
    got = run_int8(guarded(x.bfloat16(), 16), enclosed(weight), *arguments)
    magnitude = float(bias.abs().max() + 2 * k * 2**14 * scale.max())
    assert_close(got, want, rounding_tolerance(torch.bfloat16, k, magnitude=magnitude))


def test_corrections_by_integer_zero_points_are_exact_where_fp32_would_round(device: str) -> None:
    k = 2048
    x = torch.full((1, k), 127, dtype=torch.int8, device=device)
    weight = torch.full((1, k), -128, dtype=torch.int8, device=device)
    weight[0, :3] = -127
    zero, one = torch.tensor([-128], dtype=torch.int8, device=device), torch.ones(1, device=device)
    # Both terms are beyond 2^24.
    got = run_w8a8(x, weight, one, one, None, zero, torch.float32)
    assert got.item() == 3 * 127


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("swapped", [True, False])
def test_all_codes_are_converted_exactly(dtype: torch.dtype, swapped: bool, device: str) -> None:
    codes = torch.arange(-128, 128, dtype=torch.int16, device=device).to(torch.int8)[:, None].repeat(1, 16)
    x = torch.zeros(1, 16, dtype=dtype, device=device)
    x[0, 7] = 1
    got = run_int8(x, codes, torch.ones(256, device=device), None, None, swapped=swapped)
    assert got[0].tolist() == list(range(-128, 128))


@pytest.mark.parametrize("kernel", ["int8", "w8a8"])
def test_tiles_are_all_made_whatever_their_order_and_the_number_of_programs(kernel: str, device: str) -> None:
    # 5 x 3 tiles in groups of 2 rows, the last of which is not full.
    m, n, k = 70, 40, 32
    x, weight = random_codes(m, k, device=device, seed=7), random_codes(n, k, device=device, seed=8)
    tile = {"block_m": 16, "block_n": 16, "block_k": 32, "group_m": 2, "swapped": False}
    want = (x.cpu().long() @ weight.cpu().long().T).float()
    ones = torch.ones(m, device=device)
    if kernel == "int8":
        got = run_int8((x / 128).half(), weight, 128 * ones[:n], None, None, **tile).float()
        assert torch.equal(got.cpu(), want.half().float())
        return
    for n_programs in (4, 20):
        got = run_w8a8(x, weight, ones, ones[:n], None, None, torch.float32, n_programs=n_programs, **tile)
        assert torch.equal(got.cpu(), want)


def test_a_row_of_nan_or_infinity_stays_in_its_row(device: str) -> None:
    x, weight = random_floats(20, 64, device=device, dtype=torch.float16), random_codes(33, 64, device=device, seed=9)
    scale = torch.ones(33, device=device)
    want = run_int8(x, weight, scale, None, None)
    poisoned = x.clone()
    poisoned[3, 5] = float("nan")
    got = run_int8(poisoned, weight, scale, None, None)
    assert got[3].isnan().all()
    others = [row for row in range(20) if row != 3]
    assert torch.equal(got[others], want[others])
    codes, x_scale, _ = run_quantize(poisoned)
    got = run_w8a8(codes, weight, x_scale, scale, None, None, torch.bfloat16)
    assert got.isnan().all(-1).tolist() == [row == 3 for row in range(20)]


def test_a_result_is_rounded_once_to_its_dtype(device: str) -> None:
    x, weight = random_codes(4, 64, device=device, seed=1), random_codes(24, 64, device=device, seed=2)
    x_scale, scale = random_floats(4, device=device).abs(), random_floats(24, device=device).abs()
    exact = run_w8a8(x, weight, x_scale, scale, None, None, torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        got = run_w8a8(x, weight, x_scale, scale, None, None, dtype)
        assert torch.equal(got, exact.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [1, 10, 127, 4096])
def test_tokens_are_quantised_by_the_rule_bit_for_bit(dtype: torch.dtype, k: int, device: str) -> None:
    x = random_floats(7, k, device=device, dtype=dtype, seed=k) * 3
    x[2] = 0
    want_codes, want_scale = quantized(x)
    for with_sums in (True, False):
        codes, scale, sums = run_quantize(guarded(x), with_sums)
        assert torch.equal(codes, want_codes)
        assert torch.equal(scale, want_scale)
        assert sums is None or torch.equal(sums, want_codes.sum(-1, dtype=torch.int32))
    assert codes[2].eq(0).all()
    assert scale[2] == 1


def test_a_row_too_long_for_registers_has_the_same_codes(device: str) -> None:
    x = random_floats(3, 500, device=device, dtype=torch.float16)
    x[1, 499] = float("inf")
    once, twice = run_quantize(guarded(x)), run_quantize(guarded(x), block_k=64)
    for one, other in zip(once, twice, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
    assert torch.equal(run_quantize(x[:1].repeat(1, 40))[0][:, :500], once[0][:1])


def test_ties_go_to_even_and_nothing_wraps(device: str) -> None:
    # Scale 1: the largest magnitude is 127.
    values = [127.0, 126.5, 125.5, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -126.5, -127.0, 0.0, -0.0]
    codes, scale, _ = run_quantize(torch.tensor([values], device=device))
    assert scale.tolist() == [1.0]
    assert codes[0].tolist() == [127, 126, 126, 0, 2, 2, 0, -2, -2, -126, -127, 0, 0]


def test_products_are_rounded_before_they_are_rounded_to_codes(device: str) -> None:
    # Magnitudes just off a tie, where one operation with a single rounding would give another code.
    generator = torch.Generator().manual_seed(0)
    largest = torch.rand(64, 1, generator=generator) + 1
    ties = (torch.arange(127) + 0.5) * (largest / 127)
    neighbours = [torch.nextafter(ties, torch.full_like(ties, limit)) for limit in (0.0, 1e9)]
    x = torch.cat([largest, ties, *neighbours], 1).to(device)
    codes, scale, _ = run_quantize(x)
    want_codes, want_scale = quantized(x)
    assert torch.equal(codes, want_codes)
    assert torch.equal(scale, want_scale)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_has_codes_0_and_scale_nan(value: float, device: str) -> None:
    x = random_floats(4, 40, device=device)
    x[1, 17] = value
    codes, scale, sums = run_quantize(guarded(x))
    want_codes, want_scale = quantized(x)
    assert torch.equal(codes, want_codes)
    assert scale.isnan().tolist() == [False, True, False, False]
    assert torch.equal(scale.nan_to_num(), want_scale.nan_to_num())
    assert codes[1].eq(0).all()
    assert sums[1] == 0


def test_tiny_and_huge_rows_have_finite_scales(device: str) -> None:
    tops = [0.0, 1e-45, 1e-38, 2.0**-111, 2.0**-110, 2.0**-109, 1e30, 3.4028234e38]
    x = torch.tensor([[top, -top / 2, top / 3, 0.0] for top in tops], device=device)
    codes, scale, _ = run_quantize(x)
    want_codes, want_scale = quantized(x)
    assert torch.equal(codes, want_codes)
    assert torch.equal(scale, want_scale)
    assert scale[:4].tolist() == [1.0] * 4
    assert codes[4:, 0].tolist() == [127] * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [1, 33, 8192 + 8192 + 5])
def test_rows_are_summed_in_fp32(dtype: torch.dtype, k: int, device: str) -> None:
    x = random_floats(3, k, device=device, dtype=dtype)
    got = run_row_sums(guarded(x))
    magnitude = float(x.abs().double().sum(-1).max())
    assert_close(got, x.double().sum(-1), rounding_tolerance(torch.float32, k, magnitude=magnitude))
    assert torch.equal(got, run_row_sums(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (9, 33), (5, 1500)])
@pytest.mark.parametrize("zero_dtype", [None, torch.int8, torch.int32, torch.float32])
def test_dequantised_weights_are_the_formula_rounded_once(
    dtype: torch.dtype, n: int, k: int, zero_dtype: torch.dtype | None, device: str
) -> None:
    codes, scale = random_codes(n, k, device=device, seed=n), random_floats(n, device=device).abs()
    zero = None if zero_dtype is None else enclosed(random_codes(n, device=device, seed=k).to(zero_dtype))
    config = int8_gemm_config(1000, n, k, 1, str(dtype).removeprefix("torch."), launch_target(codes.device))
    assert isinstance(config, DequantizeConfig)
    out = enclosed(torch.zeros(n, k, dtype=dtype, device=device))
    constexprs = {"WIDTH": k, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k}
    n_programs = -(-n // config.block_n) * -(-k // config.block_k)
    tensors = (out, enclosed(codes), enclosed(scale), zero)
    launch("dequantize_kernel", config, n_programs, (n,), constexprs, *tensors)
    shifted = codes.float() - (0 if zero is None else zero.float()[:, None])
    assert torch.equal(out, (shifted * scale[:, None]).to(dtype))
