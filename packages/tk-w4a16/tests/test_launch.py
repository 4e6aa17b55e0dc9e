"""Launch choices for the plain layout, and how products go about their weight."""

import pytest

from tk_kernel_core.targets import COMPILE_TARGETS
from tk_w4a16._launch import gemm_way, linear_way, plain_config, plain_dequantize_config


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "linear", "gemm"),
    [
        (1, 28_672, 4096, "float16", "decode", "tiles"),
        (8, 28_672, 4096, "float16", "decode", "tiles"),
        (9, 28_672, 4096, "float16", "middle", "tiles"),
        (16, 28_672, 4096, "float16", "middle", "tiles"),
        (16, 11_008, 4096, "bfloat16", "decode", "tiles"),
        (17, 11_008, 4096, "float16", "middle", "tiles"),
        (256, 11_008, 4096, "float16", "middle", "tiles"),
        (257, 11_008, 4096, "float16", "dequantize", "tiles"),
        (385, 11_008, 4096, "float16", "middle", "dequantize"),
        # Tiles of 128 rows for many features; tall ones where they load every multiprocessor.
        (1024, 11_008, 4096, "float16", "middle", "dequantize"),
        (1280, 4096, 4096, "float16", "dequantize", "dequantize"),
        (2048, 11_008, 4096, "float16", "middle", "dequantize"),
        (2049, 11_008, 4096, "float16", "dequantize", "dequantize"),
        (1024, 4096, 4096, "float16", "middle", "dequantize"),
        (512, 4096, 4096, "float16", "dequantize", "dequantize"),
        # Programs share long columns.
        (512, 4096, 11_008, "float16", "middle", "dequantize"),
        (1, 11_008, 4096, "float32", "dequantize", "dequantize"),
    ],
)
def test_the_way_depends_on_shapes_and_dtype(m: int, n: int, k: int, dtype: str, linear: str, gemm: str) -> None:
    assert (linear_way(m, n, k, dtype, COMPILE_TARGETS["sm_90"])[0], gemm_way(m, dtype)[0]) == (linear, gemm)


def test_where_wgmma_is_missing_decode_steps_go_to_no_other_kernel() -> None:
    for name in ("sm_80", "gfx942", "gfx950"):
        assert linear_way(16, 28_672, 8192, "float16", COMPILE_TARGETS[name])[0] == "decode"
        # Where nothing was measured, large products are cuBLAS's.
        assert linear_way(257, 28_672, 8192, "float16", COMPILE_TARGETS[name])[0] == "dequantize"


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
