"""Launch choices: pure functions, no GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk_int8_gemm._launch import (
    LONGEST_INT32_SUM,
    LONGEST_ROW,
    DequantizeConfig,
    GemmConfig,
    int8_gemm_config,
    quantize_config,
    w8a8_config,
)
from tk_kernel_core.gemm import WORKSPACE_BYTES
from tk_kernel_core.targets import COMPILE_TARGETS, Target

targets = st.sampled_from(list(COMPILE_TARGETS.values()))
each_target = pytest.mark.parametrize("target", COMPILE_TARGETS.values(), ids=lambda target: target.name)
alignments = st.sampled_from([1, 2, 4, 8, 16])
row_counts = st.one_of(st.integers(1, 600), st.integers(1, 2**31))
columns = st.one_of(st.integers(1, 2**15), st.integers(1, 2**31))
H200 = COMPILE_TARGETS["sm_90"]


def assert_the_hardware_takes_it(config: GemmConfig, bytes_per_element: int, m: int, n: int, target: Target) -> None:
    for value in (config.block_m, config.block_n, config.block_k, config.num_warps, config.group_m):
        assert value >= 1
        assert value & (value - 1) == 0
    assert config.num_warps * target.warp_size <= 1024
    is_square = config.out_descriptor and config.block_m == 128
    assert config.dependent_launch == (target.name in ("sm_90", "sm_100") and not is_square)
    assert not config.out_descriptor or (config.descriptors and config.block_n == 128)
    # What triton.language.dot takes at least.
    assert config.block_m >= 16
    assert config.block_n >= 16
    assert config.block_k >= 32
    # Sums take at most half of a thread's registers, which on AMD are 512.
    per_thread = 128 if target.backend == "cuda" else 256
    assert config.block_m * config.block_n <= per_thread * config.num_warps * target.warp_size
    # AMD keeps one stage in registers. Converted weights take a tile of their own.
    n_buffers = config.stages - (target.backend == "hip")
    x_bytes, code_bytes = config.block_m * config.block_k * bytes_per_element, config.block_n * config.block_k
    converted_bytes = 2 * code_bytes if bytes_per_element == 2 else 0
    assert n_buffers * (x_bytes + code_bytes) + converted_bytes <= target.shared_bytes
    # Offsets within a tile are counted in 32 bits.
    assert max(config.block_m, config.block_n) * (LONGEST_ROW + 1) <= 2**31
    n_tiles = -(-m // config.block_m) * -(-n // config.block_n)
    assert 1 <= config.n_programs <= n_tiles
    assert config.reason


def assert_the_workspace_is_bounded(config: DequantizeConfig, bytes_per_element: int, n: int, k: int) -> None:
    assert 1 <= config.rows <= n
    assert config.rows * k * bytes_per_element <= WORKSPACE_BYTES or config.rows <= 64
    # No part is much smaller than the others: a GEMM of few rows would be slow.
    n_parts = -(-n // config.rows)
    assert config.rows <= -(-n // n_parts) + 255
    for value in (config.block_n, config.block_k):
        assert value & (value - 1) == 0
    assert config.reason


@given(
    m=row_counts,
    n=st.integers(1, 2**18),
    k=columns,
    alignment=alignments,
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    target=targets,
)
def test_weight_only_choices_are_what_the_hardware_takes(
    m: int, n: int, k: int, alignment: int, dtype: str, target: Target
) -> None:
    config = int8_gemm_config(m, n, k, alignment, dtype, target)
    if isinstance(config, DequantizeConfig):
        assert_the_workspace_is_bounded(config, 4 if dtype == "float32" else 2, n, k)
    else:
        assert dtype != "float32"
        assert k <= LONGEST_ROW
        assert_the_hardware_takes_it(config, 2, m, n, target)
        # Every program makes one tile.
        assert config.n_programs == -(-m // config.block_m) * -(-n // config.block_n)


@given(m=row_counts, n=st.integers(1, 2**18), k=columns, alignment=alignments, target=targets)
def test_w8a8_choices_are_what_the_hardware_takes(m: int, n: int, k: int, alignment: int, target: Target) -> None:
    config = w8a8_config(m, n, k, alignment, target)
    if isinstance(config, DequantizeConfig):
        # The sum of products of -128 and -128 would not fit.
        assert k * 2**14 >= 2**31
        assert_the_workspace_is_bounded(config, 4, n, k)
    else:
        assert k <= LONGEST_INT32_SUM
        assert k * 2**14 < 2**31
        assert_the_hardware_takes_it(config, 1, m, n, target)


@each_target
def test_every_number_of_tokens_up_to_5000_has_a_choice_for_every_width(target: Target) -> None:
    for n in (1, 129, 4096, 28_672):
        tiles = []
        for m in range(1, 5001):
            config = int8_gemm_config(m, n, 4096, 16, "bfloat16", target)
            assert_the_hardware_takes_it(w8a8_config(m, n, 4096, 16, target), 1, m, n, target)
            if isinstance(config, GemmConfig):
                assert_the_hardware_takes_it(config, 2, m, n, target)
                tiles.append(config.block_m)
        # A larger batch never has the smaller tile, and once dequantising pays it pays for all that are larger.
        assert tiles == sorted(tiles)
        assert isinstance(int8_gemm_config(len(tiles) + 1, n, 4096, 16, "bfloat16", target), DequantizeConfig)
        assert 256 <= len(tiles) < 2048


@each_target
def test_the_workspace_is_bounded_for_every_number_of_tokens(target: Target) -> None:
    for n, k in ((1, 1), (11_008, 4096), (28_672, 8192), (152_064, 8192), (5, 2**27)):
        for m in (385, 2048, 2**20):
            config = int8_gemm_config(m, n, k, 16, "float16", target)
            assert isinstance(config, DequantizeConfig)
            assert_the_workspace_is_bounded(config, 2, n, k)


def test_programs_that_go_through_tiles_fill_the_gpu_and_no_more() -> None:
    assert w8a8_config(2048, 11_008, 4096, 16, H200).n_programs == 2 * 132
    assert w8a8_config(1, 4096, 4096, 16, H200).n_programs == 4096 // 64
    assert w8a8_config(1, 1, 1, 1, H200).n_programs == 1


@pytest.mark.parametrize(
    ("m", "n", "want"),
    [
        (1, 11_008, (16, 32, 256, True, 4, 2)),
        (16, 11_008, (16, 32, 256, True, 4, 2)),
        (17, 11_008, (64, 64, 128, False, 4, 4)),
        (64, 11_008, (64, 64, 128, False, 4, 4)),
        (64, 65_536, (64, 128, 64, False, 4, 4)),
        (65, 11_008, (128, 128, 64, False, 4, 8)),
        (384, 11_008, (128, 128, 64, False, 4, 8)),
    ],
)
def test_weight_only_choices_on_an_h200(m: int, n: int, want: tuple[object, ...]) -> None:
    c = int8_gemm_config(m, n, 4096, 16, "float16", H200)
    assert (c.block_m, c.block_n, c.block_k, c.swapped, c.stages, c.num_warps) == want


@pytest.mark.parametrize(
    ("m", "n", "want"),
    [
        (16, 11_008, (16, 64, 256, True, 4, 4)),
        (32, 11_008, (32, 64, 256, True, 4, 4)),
        (64, 11_008, (64, 64, 256, True, 3, 4)),
        (64, 28_672, (64, 64, 128, True, 3, 4)),
        (192, 11_008, (64, 128, 128, True, 4, 4)),
        (256, 11_008, (128, 64, 128, True, 3, 4)),
        (256, 28_672, (128, 128, 128, True, 3, 4)),
        (513, 11_008, (128, 128, 128, True, 3, 4)),
    ],
)
def test_w8a8_choices_on_an_h200(m: int, n: int, want: tuple[object, ...]) -> None:
    c = w8a8_config(m, n, 4096, 16, H200)
    assert (c.block_m, c.block_n, c.block_k, c.swapped, c.stages, c.num_warps) == want


def test_the_reason_names_what_decided() -> None:
    assert "fp32" in int8_gemm_config(1, 64, 64, 16, "float32", H200).reason
    assert "m = 385" in int8_gemm_config(385, 64, 64, 16, "float16", H200).reason
    assert "aligned to 1 " in int8_gemm_config(4, 64, 33, 1, "float16", H200).reason
    assert "int32" in w8a8_config(4, 64, 2**17, 16, H200).reason
    assert str(LONGEST_ROW) in int8_gemm_config(4, 64, 2**24, 16, "float16", H200).reason


@given(k=columns, target=targets)
def test_rows_are_kept_in_registers_where_they_fit_them(k: int, target: Target) -> None:
    config = quantize_config(k, target)
    for value in (config.block_m, config.block_k, config.num_warps):
        assert value & (value - 1) == 0
    assert 1 <= config.num_warps * target.warp_size <= 1024
    assert (config.block_k >= k) == (k <= 16_384)
    assert config.block_m * config.block_k <= 16 * config.num_warps * target.warp_size or config.num_warps == 1
    assert config.dependent_launch == (target.name in ("sm_90", "sm_100"))
