"""Launch choices for the plain layout, and how products go about their weight."""

import pytest

from tk_kernel_core.targets import COMPILE_TARGETS
from tk_w4a16._launch import WORKSPACE_BYTES, gemm_way, linear_way, parts_of, plain_config, plain_dequantize_config


@pytest.mark.parametrize(
    ("m", "dtype", "linear", "gemm"),
    [
        (1, "float16", "decode", "tiles"),
        (16, "bfloat16", "decode", "tiles"),
        (17, "float16", "middle", "tiles"),
        (256, "float16", "middle", "tiles"),
        (257, "float16", "dequantize", "tiles"),
        (385, "float16", "dequantize", "dequantize"),
        (1, "float32", "dequantize", "dequantize"),
    ],
)
def test_the_way_depends_on_rows_and_dtype(m: int, dtype: str, linear: str, gemm: str) -> None:
    assert (linear_way(m, dtype)[0], gemm_way(m, dtype)[0]) == (linear, gemm)


@pytest.mark.parametrize(
    ("n_groups", "group_size", "span"), [(2, 128, 64), (2, 32, 32), (9, 24, 8), (9, 3, 1), (1, 3, 64), (1, -1, 64)]
)
def test_a_span_divides_step_and_group(n_groups: int, group_size: int, span: int) -> None:
    for target in COMPILE_TARGETS.values():
        for config in (
            plain_dequantize_config(n_groups, group_size),
            plain_config(64, 64, n_groups, group_size, target),
        ):
            assert config.span == span
            assert config.block_k % config.span == config.group_size % config.span == 0


def test_programs_fill_the_gpu_before_they_are_wide() -> None:
    target = COMPILE_TARGETS["sm_90"]
    assert plain_config(1, 4096, 32, 128, target).block_n == 32
    assert plain_config(1, 28_672, 64, 128, target).block_n == 64
    assert [plain_config(m, 4096, 32, 128, target).block_m for m in (1, 16, 17, 33, 384)] == [16, 16, 32, 64, 64]


@pytest.mark.parametrize(("n", "k"), [(1, 1), (64, 100), (28_672, 8192), (11_008, 4096), (100, 2**26)])
def test_parts_cover_everything_once_within_the_workspace(n: int, k: int) -> None:
    parts = parts_of(n, k, 2)
    assert [row for part in parts for row in (part.start, part.stop)][1:-1:2] == [part.start for part in parts[1:]]
    assert (parts[0].start, parts[-1].stop) == (0, n)
    assert all(part.start % 64 == 0 for part in parts)
    # A part has 64 output features at least.
    assert all((part.stop - part.start) * k * 2 <= max(WORKSPACE_BYTES, 64 * k * 2) for part in parts)
    assert len({part.stop - part.start for part in parts}) <= 2


def test_parts_stay_in_an_l2_cache_and_are_whole_tiles() -> None:
    assert [part.stop - part.start for part in parts_of(28_672, 8192, 2)] == [2048] * 14
    assert [part.stop - part.start for part in parts_of(11_008, 4096, 2)] == [3840, 3840, 3328]
    assert [part.stop - part.start for part in parts_of(4096, 11_008, 2)] == [1024] * 4
