"""A call like a recent one takes its plan; one that differs in anything a plan depends on must not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tk_int8_gemm import PackedInt8Weight, _ops, int8_gemm, int8_gemm_torch, int8_linear, w8a8_gemm, w8a8_gemm_torch
from tk_kernel_core import recent
from tk_kernel_core.numerics import rounding_tolerance
from tk_testkit.close import assert_close

CALL: dict[str, Any] = {
    "m": 3,
    "n": 24,
    "k": 48,
    "dtype": torch.float16,
    "row_gap": 0,
    "has_bias": True,
    "bias_dtype": torch.float16,
    "zero_dtype": torch.int8,
    "scale_shape": (24,),
    "out_dtype": None,
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"m": 4},
    {"n": 25, "scale_shape": (25,)},
    {"k": 50},
    {"dtype": torch.bfloat16},
    {"row_gap": 3},
    {"has_bias": False},
    {"bias_dtype": torch.float32},
    {"zero_dtype": torch.int32},
    {"zero_dtype": None},
    {"zero_dtype": None, "has_bias": False},
    {"scale_shape": (24, 1)},
    {"scale_shape": ()},
    {"out_dtype": torch.float32},
]
# As many tensors, and of the same properties: one has the bias that the other has for a zero point.
NO_BIAS = {"has_bias": False, "zero_dtype": torch.float32}
NO_ZERO_POINT = {"bias_dtype": torch.float32, "zero_dtype": None}


def arguments_of(call: dict[str, Any], device: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    m, n, k, gap = call["m"], call["n"], call["k"], call["row_gap"]
    x = torch.randn(m, k + gap, generator=generator).to(device, call["dtype"])[:, :k]
    weight = torch.randint(-128, 128, (n, k), dtype=torch.int8, generator=generator).to(device)
    scale = torch.rand(call["scale_shape"], generator=generator).to(device) / 64
    bias = torch.randn(n, generator=generator).to(device, call["bias_dtype"]) if call["has_bias"] else None
    zeros = torch.randint(-128, 128, (n,), generator=generator)
    zero_point = None if call["zero_dtype"] is None else zeros.to(device, call["zero_dtype"])
    return {"x": x, "weight_int8": weight, "scale": scale, "bias": bias, "zero_point": zero_point}


def called(name: str, call: dict[str, Any], device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result of a call and the exact one."""
    arguments = arguments_of(call, device)
    x, bias = arguments["x"], arguments["bias"]
    exact = {**arguments, "bias": None if bias is None else bias.double()}
    if name == "w8a8_gemm":
        got = w8a8_gemm(**arguments, out_dtype=call["out_dtype"])
        return got, w8a8_gemm_torch(**exact, out_dtype=torch.float64).to(call["out_dtype"] or x.dtype)
    if name == "int8_gemm":
        got = int8_gemm(**arguments)
    else:
        prepared = PackedInt8Weight.pack(*(arguments[key] for key in ("weight_int8", "scale", "zero_point")))
        got = int8_linear(x, prepared, bias)
    return got, int8_gemm_torch(**{**exact, "x": x.double()}).to(x.dtype)


@pytest.mark.parametrize("name", ["int8_gemm", "int8_linear", "w8a8_gemm"])
def test_calls_are_told_apart_and_known_again(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unknown: list[Any] = []
    takes_operator = recent.takes_operator
    monkeypatch.setattr(recent, "takes_operator", lambda *tensors: unknown.append(1) or takes_operator(*tensors))
    monkeypatch.setattr(_ops, "_RECENT", type(_ops._RECENT)())
    for before, change in (*(({}, change) for change in CHANGES), (NO_BIAS, NO_ZERO_POINT)):
        if "out_dtype" in change and name != "w8a8_gemm":
            continue
        if name == "int8_linear" and {"zero_dtype", "scale_shape"} & set(change) and len(change) == 1:
            # All of them are prepared to the same.
            continue
        # It is then among the recent calls, of which there are few.
        called(name, {**CALL, **before}, device)
        counts = []
        for _ in range(3):
            unknown.clear()
            got, want = called(name, {**CALL, **change}, device)
            counts.append(len(unknown))
            # Terms of the sum and of its correction are as large as this.
            magnitude = 255 * CALL["k"] ** 0.5 * 4 / 64
            assert_close(got, want, rounding_tolerance(got.dtype, CALL["k"], magnitude=magnitude), str(change))
        assert counts == [1 if change else 0, 0, 0], f"{change}: {counts}"


def test_a_gradient_wanted_after_calls_without_is_not_lost(device: str) -> None:
    arguments = arguments_of(CALL, device)
    x = torch.nn.Parameter(arguments.pop("x"))
    with torch.no_grad():
        for _ in range(2):
            int8_gemm(x, **arguments)
    int8_gemm(x, **arguments).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().max() > 0
