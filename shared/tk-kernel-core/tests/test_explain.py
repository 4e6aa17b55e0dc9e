"""How a package says by which kernels a product is carried out."""

from __future__ import annotations

import pytest
import torch

from tk_kernel_core.explain import check_product, explain_launches, target_named
from tk_kernel_core.launch import KernelLaunch
from tk_kernel_core.targets import COMPILE_TARGETS


def launch(kernel: str, *grid: int) -> KernelLaunch:
    arguments = (("x_ptr", None), ("n", 3), ("BLOCK_M", 16), ("GROUP_SIZE", 32), ("SPLIT", 2))
    return KernelLaunch("module", kernel, (*grid, 1, 1)[:3], arguments, (("num_warps", 4),))


def test_equal_launches_are_counted_and_tiles_are_named() -> None:
    launches = [launch("first", 7), launch("second", 1), launch("second", 1), launch("first", 7, 2)]
    text = explain_launches("gemm", 1, 2, 3, torch.bfloat16, COMPILE_TARGETS["sm_90"], "it is small", launches)
    assert text.split("\n") == [
        "gemm, 1 x 2 x 3, bfloat16, sm_90: it is small",
        "  first: 7 programs of 4 warps, BLOCK_M=16, SPLIT=2",
        "  2 times second: 1 programs of 4 warps, BLOCK_M=16, SPLIT=2",
        "  first: 7 x 2 programs of 4 warps, BLOCK_M=16, SPLIT=2",
    ]


def test_products_that_do_not_exist_are_refused() -> None:
    check_product(("gemm",), "gemm", 1, 1, 1, torch.float16)
    for arguments, error, message in (
        (("linear", 1, 1, 1, torch.float16), ValueError, "function must be one of 'gemm', got 'linear'"),
        (("gemm", 1, 1, 1, torch.int8), ValueError, "dtype must be one of torch.float16"),
        (("gemm", 1, True, 1, torch.float16), TypeError, "n must be an integer, got bool"),
        (("gemm", 1, 1, 0, torch.float16), ValueError, "k must be at least 1, got 0"),
    ):
        with pytest.raises(error, match=f"^{message}"):
            check_product(("gemm",), *arguments)


def test_a_target_is_named_or_that_of_the_gpu() -> None:
    assert target_named("gfx942") is COMPILE_TARGETS["gfx942"]
    with pytest.raises(ValueError, match=r"target must be one of 'sm_80', .* got 'sm_75'"):
        target_named("sm_75")
    if torch.cuda.is_available():
        assert target_named(None).backend == ("cuda" if torch.version.hip is None else "hip")
    else:
        with pytest.raises(ValueError, match=r"target must be given where there is no GPU: one of sm_80, .*, got None"):
            target_named(None)
