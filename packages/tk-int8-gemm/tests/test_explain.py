"""What `explain` says."""

from typing import Any

import pytest
import torch

from tk_int8_gemm import explain


@pytest.mark.parametrize(
    ("arguments", "reason", "kernels"),
    [
        (
            ("int8_linear", 1, 11_008, 4096),
            "decode step",
            ["int8_decode_row_kernel: 688 programs of 4 warps, TILES=1, SPLIT=1"],
        ),
        (
            ("int8_linear", 64, 11_008, 4096),
            "matrix units",
            ["arrange_rows_kernel: 64 programs", "int8_middle_kernel: 172 x 3 programs"],
        ),
        (
            ("int8_linear", 768, 28_672, 8192),
            "matrix units",
            ["arrange_rows_kernel: 768 programs", "int8_middle_kernel: 672 programs"],
        ),
        (("int8_linear", 257, 11_008, 4096), "repays dequantising", ["dequantize_packed_kernel: 688 x 8 "]),
        (("int8_linear", 2049, 28_672, 8192), "repays dequantising", ["16 times dequantize_packed_kernel: 112 x 16 "]),
        (
            ("int8_linear", 1, 11_008, 4096, torch.float32),
            "fp32",
            ["dequantize_packed_kernel: 352 x 8 ", "dequantize_packed_kernel: 336 x 8 "],
        ),
        (("int8_gemm", 16, 11_008, 4096), "decode step", ["int8_gemm_kernel: 344 programs"]),
        (("int8_gemm", 16, 11_008, 4095), "aligned to 1 ", ["int8_gemm_kernel"]),
        (
            ("w8a8_gemm", 2048, 28_672, 8192, torch.bfloat16),
            "tiles of 128 rows",
            ["quantize_per_token_kernel: 2048", "w8a8_gemm_kernel: 264"],
        ),
    ],
)
def test_kernels_and_reason(arguments: Any, reason: str, kernels: list[str]) -> None:
    first, *lines = explain(*arguments, target="sm_90").split("\n")
    function, m, n, k = arguments[:4]
    assert first.startswith(f"{function}, {m} x {n} x {k}, ")
    assert ", sm_90: " in first
    assert reason in first
    for line, kernel in zip(lines, kernels, strict=True):
        assert line.startswith(f"  {kernel}")


def test_the_target_matters() -> None:
    assert explain("w8a8_gemm", 16, 4096, 4096, target="gfx942") != explain("w8a8_gemm", 16, 4096, 4096, target="sm_90")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"function": "linear"},
            ValueError,
            "function must be one of 'int8_gemm', 'int8_linear', 'w8a8_gemm', got 'linear'",
        ),
        ({"m": 0}, ValueError, "m must be at least 1, got 0"),
        ({"n": 2.0}, TypeError, "n must be an integer, got float"),
        (
            {"dtype": torch.float64},
            ValueError,
            "dtype must be one of torch.float16, torch.bfloat16, torch.float32, got",
        ),
        ({"target": "sm_75"}, ValueError, "target must be one of 'sm_80', .* got 'sm_75'"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"function": "int8_linear", "m": 1, "n": 16, "k": 16, "target": "sm_90"}
    with pytest.raises(error, match=f"^{message}"):
        explain(**{**arguments, **changes})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_target_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"^target must be given where there is no GPU: one of sm_80, .*, got None"):
        explain("int8_linear", 1, 16, 16)
