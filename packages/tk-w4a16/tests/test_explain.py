"""What `explain` says."""

from typing import Any

import pytest
import torch

from tk_w4a16 import explain


@pytest.mark.parametrize(
    ("arguments", "reason", "kernels"),
    [
        (("w4a16_linear", 1, 11_008, 4096), "decode step", ["w4a16_decode_row_kernel: "]),
        (("w4a16_linear", 64, 11_008, 4096), "matrix units", ["arrange_rows_kernel: 64 ", "w4a16_middle_kernel: "]),
        (
            ("w4a16_linear", 1024, 28_672, 8192),
            "matrix units",
            ["arrange_rows_kernel: 1024 ", "w4a16_middle_kernel: 896 "],
        ),
        (("w4a16_linear", 2049, 28_672, 8192), "repays dequantising", ["16 times dequantize_packed_kernel: "]),
        (
            ("w4a16_linear", 1, 11_008, 4096, torch.float32),
            "fp32",
            ["dequantize_packed_kernel: 352 x 8 ", "dequantize_packed_kernel: 336 x 8 "],
        ),
        (("w4a16_gemm", 16, 11_008, 4096), "on the way", ["w4a16_plain_kernel: 344 programs of 4 warps, BLOCK_M=16"]),
        (
            ("w4a16_gemm", 512, 11_008, 4096),
            "repays dequantising",
            ["dequantize_plain_kernel: 88 x 64 programs", "dequantize_plain_kernel: 84 x 64 programs"],
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


def test_act_order_takes_a_kernel_more_where_no_other_arranges_the_activations() -> None:
    for m, kernels in (
        (1, ["gather_columns_kernel: 4 programs", "w4a16_decode_row_kernel: "]),
        (64, ["arrange_rows_kernel: 64 ", "w4a16_middle_kernel: "]),
        (300, ["gather_columns_kernel: 300 x 4 programs", "dequantize_packed_kernel: 688 x 8 "]),
    ):
        _, *lines = explain("w4a16_linear", m, 11_008, 4096, act_order=True, target="sm_90").split("\n")
        assert all(line.startswith(f"  {kernel}") for line, kernel in zip(lines, kernels, strict=True))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"function": "linear"}, ValueError, "function must be one of 'w4a16_gemm', 'w4a16_linear', got 'linear'"),
        ({"m": 0}, ValueError, "m must be at least 1, got 0"),
        ({"n": 2.0}, TypeError, "n must be an integer, got float"),
        ({"function": "w4a16_gemm", "k": 12}, ValueError, "k must be a multiple of 8 in the plain layout, got 12"),
        ({"function": "w4a16_gemm", "act_order": True}, ValueError, "act_order must be False in the plain layout"),
        ({"k": 400, "group_size": 48}, ValueError, "group_size must be one of 32, 64, 128, 256, -1, got 48"),
        ({"dtype": torch.float64}, ValueError, "dtype must be one of torch.float16, torch.bfloat16, torch.float32"),
        ({"target": "sm_75"}, ValueError, "target must be one of 'sm_80', .* got 'sm_75'"),
    ],
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    arguments: dict[str, Any] = {"function": "w4a16_linear", "m": 1, "n": 16, "k": 16, "target": "sm_90"}
    with pytest.raises(error, match=f"^{message}"):
        explain(**{**arguments, **changes})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_a_target_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"^target must be given where there is no GPU: one of sm_80, .*, got None"):
        explain("w4a16_linear", 1, 16, 16)
