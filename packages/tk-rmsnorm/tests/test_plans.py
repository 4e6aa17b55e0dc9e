"""A call like a recent one takes its plan; a call that differs in anything a plan depends on must not."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tk_kernel_core.numerics import rounding_tolerance
from tk_rmsnorm import (
    _ops,
    fused_add_rmsnorm,
    fused_add_rmsnorm_,
    rmsnorm,
    rmsnorm_residual_fused,
)
from tk_rmsnorm._reference import fused_add_rmsnorm_torch
from tk_testkit.close import assert_close

FORMS: dict[str, Callable[..., Any]] = {
    "norm": lambda x, residual, weight, **numbers: (rmsnorm(x, weight, **numbers),),
    "norm_of_sum": lambda x, residual, weight, **numbers: (rmsnorm_residual_fused(x, residual, weight, **numbers),),
    "norm_and_sum": fused_add_rmsnorm,
    "in_place": fused_add_rmsnorm_,
}
CALL: dict[str, Any] = {
    "rows": 6,
    "x_dtype": torch.float32,
    "residual_dtype": torch.float32,
    "weight_dtype": torch.float32,
    "row_gap": 0,
    "weight_stride": 1,
    "numbers": {},
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"rows": 7},
    {"x_dtype": torch.bfloat16},
    {"residual_dtype": torch.bfloat16},
    {"weight_dtype": torch.bfloat16},
    {"row_gap": 3},
    {"weight_stride": 2},
    {"weight_stride": 0},
    {"numbers": {"eps": 0.5}},
    {"numbers": {"weight_offset": 1.0}},
    {"numbers": {"casting": "llama"}},
]


def tensors_of(call: dict[str, Any], device: str) -> list[Any]:
    """x, residual and weight; a weight with the stride 0 is left out."""
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.randn(rows, columns + call["row_gap"], generator=generator)
        return values.to(device=device, dtype=dtype)[:, :columns]

    x, residual = (random(call["rows"], 40, call[dtype]) for dtype in ("x_dtype", "residual_dtype"))
    if not call["weight_stride"]:
        return [x, residual, None]
    return [x, residual, random(1, 40 * call["weight_stride"], call["weight_dtype"])[0, :: call["weight_stride"]]]


@pytest.mark.parametrize("form", FORMS)
def test_calls_are_told_apart(form: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown: list[Any] = []
    takes_operator = _ops.takes_operator
    monkeypatch.setattr(_ops, "takes_operator", lambda *tensors: unknown.append(1) or takes_operator(*tensors))
    monkeypatch.setattr(_ops, "_RECENT", type(_ops._RECENT)())
    for change in CHANGES:
        if form == "norm" and "residual_dtype" in change:
            continue
        # The usual call is then among the recent ones, of which there are few.
        x, residual, weight = tensors_of(CALL, device)
        FORMS[form](x, residual, weight)
        call = {**CALL, **change}
        x, residual, weight = tensors_of(call, device)
        summand = torch.zeros_like(x) if form == "norm" else residual
        exact = (None if part is None else part.double() for part in (x, summand, weight))
        want = fused_add_rmsnorm_torch(*exact, **call["numbers"])
        counts = []
        for _ in range(3):
            unknown.clear()
            # New ones each time: one form writes into them, and copies would have other strides.
            got = FORMS[form](*tensors_of(call, device), **call["numbers"])
            counts.append(len(unknown))
            for one, other in zip(got, want, strict=False):
                roundings = 2 if call["numbers"].get("casting") else 1
                tolerance = rounding_tolerance(one.dtype, 40, roundings=roundings)
                assert_close(one, other.to(one.dtype), tolerance, str(change))
        assert counts[0] == (1 if change else 0), f"{change} took the plan of another call"
        assert counts[1:] == [0, 0], f"{change} was not known after a call"


@pytest.mark.parametrize("form", FORMS)
def test_gradients_wanted_after_calls_without_are_not_lost(form: str, device: str) -> None:
    x, residual = torch.randn(2, 3, 40, device=device)
    weight = torch.nn.Parameter(torch.randn(40, device=device))
    with torch.no_grad():
        for _ in range(2):
            FORMS[form](x.clone(), residual.clone(), weight)
    FORMS[form](x.clone(), residual.clone(), weight)[0].sum().backward()
    assert weight.grad is not None
    assert weight.grad.abs().min() > 0


def test_memory_shared_in_a_known_call_is_refused(device: str) -> None:
    memory = torch.randn(20, 40, device=device)
    for _ in range(2):
        fused_add_rmsnorm_(memory[:3], memory[3:6])
    before = memory.clone()
    for residual in (memory[2:5], memory[:3]):
        with pytest.raises(ValueError, match="must not share memory"):
            fused_add_rmsnorm_(memory[:3], residual)
    assert torch.equal(memory, before)


def test_the_same_tensor_as_x_and_residual(device: str) -> None:
    x, other, weight = torch.randn(3, 40, device=device), torch.randn(3, 40, device=device), torch.randn(40).to(device)
    for _ in range(2):
        rmsnorm_residual_fused(x, other, weight)
    for _ in range(2):
        want, _ = fused_add_rmsnorm_torch(x.double(), x.double(), weight.double())
        assert_close(rmsnorm_residual_fused(x, x, weight), want.float(), rounding_tolerance(torch.float32, 40))


def test_an_argument_that_is_wrong_is_named_after_calls_that_were_right(device: str) -> None:
    x, weight = torch.randn(3, 40, device=device), torch.randn(40, device=device)
    for _ in range(2):
        rmsnorm(x, weight)
    with pytest.raises(TypeError, match="eps"):
        rmsnorm(x, weight, eps=[1e-6])
    with pytest.raises(TypeError, match="weight must be"):
        rmsnorm(x, [1.0])
    with pytest.raises(ValueError, match="weight must have shape"):
        rmsnorm(x, weight[1:])
    with pytest.raises(TypeError, match="x must have dtype"):
        rmsnorm(x.int(), weight)
