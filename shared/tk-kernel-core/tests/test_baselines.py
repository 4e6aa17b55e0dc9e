"""Baselines that packages share."""

from __future__ import annotations

import pytest
import torch

from tk_kernel_core import baselines
from tk_kernel_core.launch import PreparedLaunch
from tk_kernel_core.spec import BaselineUnavailable


def test_a_cpu_has_none() -> None:
    x = torch.ones(4)
    with pytest.raises(BaselineUnavailable, match="on a GPU only"):
        baselines.copy(x)
    with pytest.raises(BaselineUnavailable, match="on a GPU only"):
        baselines.compiled(lambda inputs: inputs["x"] * 2)({"x": x})


def test_a_prepared_copy_serves_one_combination_of_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    served: dict[int, set[tuple[object, ...]]] = {}

    def note(launch: PreparedLaunch, *tensors: torch.Tensor | None) -> None:
        dtypes = tuple(None if tensor is None else tensor.dtype for tensor in tensors)
        served.setdefault(id(launch), set()).add(dtypes)

    monkeypatch.setattr(PreparedLaunch, "__call__", note)
    monkeypatch.setattr(baselines, "_require_gpu", lambda *_: None)
    baselines._prepared_copy.cache_clear()
    a, b = torch.ones(4), torch.ones(4, dtype=torch.bfloat16)
    for _ in range(2):
        for pair in ((a, None), (b, None), (a, a), (a, b), (b, a)):
            baselines.copy(*pair)
    baselines._prepared_copy.cache_clear()
    assert [len(dtypes) for dtypes in served.values()] == [1] * 5


@pytest.mark.gpu
def test_copies_whatever_was_copied_before() -> None:
    n = 3 * 2048 + 5
    for a_dtype in (torch.bfloat16, torch.float32, torch.int8):
        for b_dtype in (None, torch.bfloat16, torch.float32):
            for _ in range(2):
                a = torch.randn(n, device="cuda").mul(20).to(a_dtype)
                b = None if b_dtype is None else torch.randn(n, device="cuda").to(b_dtype)
                out_a, out_b = baselines.copy(a, b)
                assert torch.equal(out_a, a)
                assert out_b is None if b is None else torch.equal(out_b, b)


@pytest.mark.gpu
def test_compiled_for_every_shape() -> None:
    run = baselines.compiled(lambda inputs: inputs["x"] * inputs["factor"])
    for n in (64, 128, 64):
        x = torch.randn(n, device="cuda")
        assert torch.equal(run({"x": x, "factor": 2.0}), x * 2)
