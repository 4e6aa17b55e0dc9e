"""Axes of loads, as newer releases of Triton give them to lanes and warps."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import triton.language as tl

from tk_kernel_core import gemm_kernels

sys.path.append(str(Path(__file__).parent))

import sample_kernels


@pytest.mark.interpreter
@pytest.mark.parametrize("n_axes", [3, 4, 5, 6, 7])
@pytest.mark.parametrize("turns", [False, True])
def test_all_axes_but_the_last_are_turned_round_and_back(
    turns: bool, n_axes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemm_kernels, "_LAST_AXES_FIRST", tl.constexpr(turns))
    once, twice = (torch.empty(2**n_axes, dtype=torch.int32) for _ in range(2))
    sample_kernels.turn_axes_kernel[(1,)](once, twice, n_axes)
    values = np.arange(2**n_axes).reshape([2] * n_axes)
    want = values.transpose(*range(n_axes - 2, -1, -1), n_axes - 1) if turns else values
    assert once.tolist() == want.ravel().tolist()
    assert twice.tolist() == values.ravel().tolist()
