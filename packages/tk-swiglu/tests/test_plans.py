"""Plans are kept per call: calls that differ in anything a plan depends on must not share one."""

from typing import Any

import pytest
import torch

from tk_kernel_core.numerics import rounding_tolerance
from tk_swiglu import _ops, _plans, swiglu_fused, swiglu_packed, swiglu_torch, swiglu_with_bias
from tk_swiglu._operators import swiglu_backward
from tk_swiglu._reference import swiglu_backward_torch, unpacked
from tk_testkit.close import assert_close

CALL: dict[str, Any] = {
    "rows": 6,
    "layout": "separate",
    "gate_first": True,
    "alpha": 1.0,
    "beta": 0.0,
    "limit": None,
    "gate_dtype": torch.float32,
    "up_dtype": torch.float32,
    "bias_dtype": torch.float32,
    "bias_stride": 1,
    "row_gap": 0,
}
CHANGES: list[dict[str, Any]] = [
    {"rows": 7},
    {"layout": "concat"},
    {"layout": "interleaved"},
    {"layout": "concat", "gate_first": False},
    {"layout": "interleaved", "gate_first": False},
    {"alpha": 1.5},
    {"beta": 0.5},
    {"limit": 0.5},
    {"gate_dtype": torch.bfloat16},
    {"up_dtype": torch.bfloat16},
    {"bias_dtype": torch.bfloat16},
    {"bias_stride": 2},
    {"row_gap": 3},
]


def tensors_of(call: dict[str, Any], device: str) -> list[Any]:
    generator = torch.Generator().manual_seed(0)

    def random(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        values = torch.randn(rows, columns + call["row_gap"], generator=generator)
        return values.to(device=device, dtype=dtype)[:, :columns]

    def bias(columns: int) -> torch.Tensor:
        return random(1, columns * call["bias_stride"], call["bias_dtype"])[0, :: call["bias_stride"]]

    if call["layout"] == "separate":
        gate = random(call["rows"], 40, call["gate_dtype"])
        return [gate, random(call["rows"], 40, call["up_dtype"]), bias(40), bias(40)]
    return [random(call["rows"], 80, call["gate_dtype"]), None, bias(80), None]


def form_of(call: dict[str, Any]) -> _plans.Form:
    return _plans.Form(call["layout"], call["gate_first"], call["alpha"], call["beta"], call["limit"])


def test_forward_calls_are_told_apart(device: str) -> None:
    _plans._PLANS.clear()
    for count, change in enumerate(({}, *CHANGES), start=1):
        call = {**CALL, **change}
        tensors, form = tensors_of(call, device), form_of(call)
        got = _plans.forward(*tensors, form)
        exact = unpacked(*(None if part is None else part.double() for part in tensors), *form[:2])
        want = swiglu_torch(*exact, alpha=form.alpha, beta=form.beta, limit=form.limit)
        assert_close(got, want.to(call["gate_dtype"]), rounding_tolerance(call["gate_dtype"], 16), str(change))
        # A call on copies keeps a plan for the copies too.
        assert len(_plans._PLANS) >= count


def call_publicly(call: dict[str, Any], gate: Any, up: Any, bias: Any, bias_up: Any, out: Any) -> torch.Tensor:
    numbers = {name: call[name] for name in ("alpha", "beta", "limit")}
    if call["layout"] != "separate":
        order = "gate_first" if call["gate_first"] else "up_first"
        return swiglu_packed(gate, bias, layout=call["layout"], order=order, out=out, **numbers)
    if bias is None:
        return swiglu_fused(gate, up, out=out, **numbers)
    return swiglu_with_bias(gate, up, bias, bias_up, out=out, **numbers)


@pytest.mark.parametrize("into", ["a new tensor", "out", "the gate", "up"])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_call_like_a_recent_one_takes_its_plan(
    into: str, has_bias: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown: list[Any] = []
    takes_operator = _ops.takes_operator
    monkeypatch.setattr(_ops, "takes_operator", lambda *tensors: unknown.append(1) or takes_operator(*tensors))
    monkeypatch.setattr(_ops, "_RECENT", type(_ops._RECENT)())
    for change in ({}, *CHANGES):
        call = {**CALL, **change}
        in_place = into in ("the gate", "up")
        if in_place and (call["layout"] != "separate" or {"up_dtype", "gate_dtype", "row_gap"} & set(change)):
            # Not to be had in place, or nothing that a copy would keep.
            continue
        tensors, usual = tensors_of(call, device), tensors_of(CALL, device)
        if not has_bias:
            tensors[2:] = usual[2:] = [None, None]
            if "bias_stride" in change or "bias_dtype" in change:
                continue
        form = form_of(call)
        exact = unpacked(*(None if part is None else part.double() for part in tensors), *form[:2])
        want = swiglu_torch(*exact, alpha=form.alpha, beta=form.beta, limit=form.limit).to(call["gate_dtype"])
        # The usual call is then among the recent ones, of which there are few.
        own = {"a new tensor": None, "out": torch.empty_like(usual[0]), "the gate": usual[0], "up": usual[1]}[into]
        call_publicly(CALL, *usual, own)
        counts = []
        for _ in range(3):
            fresh = [None if part is None else part.clone() for part in tensors[:2]] + tensors[2:]
            if not in_place:
                fresh = tensors
            out = {"a new tensor": None, "out": torch.empty_like(want), "the gate": fresh[0], "up": fresh[1]}[into]
            unknown.clear()
            got = call_publicly(call, *fresh, out)
            counts.append(len(unknown))
            assert out is None or got is out
            assert_close(got, want, rounding_tolerance(call["gate_dtype"], 16), str(change))
        assert counts[0] == (1 if change else 0), f"{change} took the plan of another call"
        assert counts[1:] == [0, 0], f"{change} was not known after a call"


def test_gradients_wanted_after_calls_without_are_not_lost(device: str) -> None:
    gate = torch.nn.Parameter(torch.randn(3, 40, device=device))
    up = torch.randn(3, 40, device=device)
    with torch.no_grad():
        for _ in range(2):
            swiglu_fused(gate, up)
    swiglu_fused(gate, up).sum().backward()
    assert gate.grad is not None
    assert gate.grad.abs().min() > 0


def test_backward_calls_are_told_apart(device: str) -> None:
    _plans._BACKWARD_PLANS.clear()
    for count, change in enumerate(({}, *CHANGES), start=1):
        call = {**CALL, **change}
        tensors, form = tensors_of(call, device), form_of(call)
        dy = torch.randn(call["rows"], 40, generator=torch.Generator().manual_seed(1)).to(device, call["gate_dtype"])
        got = [part for part in swiglu_backward(dy, *tensors, *form, True) if part.numel()]
        exact = (None if part is None else part.double() for part in tensors)
        want = [part for part in swiglu_backward_torch(dy.double(), *exact, *form) if part is not None]
        present = [part for part in tensors if part is not None]
        for one, other, like in zip(got, want, present, strict=True):
            tolerance = rounding_tolerance(like.dtype, 16, magnitude=16.0)
            assert_close(one, other.to(like.dtype), tolerance, str(change))
        assert len(_plans._BACKWARD_PLANS) >= count


def test_strides_of_out_are_told_apart(device: str) -> None:
    gate, up = torch.randn(2, 6, 40, device=device)
    want = swiglu_fused(gate, up)
    wide = torch.full((6, 80), 7.0, device=device)
    for out in (torch.empty(6, 40, device=device), wide[:, :40], torch.empty(40, 6, device=device).t(), gate):
        assert torch.equal(swiglu_fused(gate.clone() if out is not gate else gate, up, out=out), want)
    assert bool((wide[:, 40:] == 7.0).all())


@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_packed_rows_of_one_result_take_gradients_of_any_stride(layout: str, device: str) -> None:
    for dy in (
        torch.ones((), device=device).expand(4, 1),
        torch.randn(1, 4, device=device).t(),
        torch.randn(4, 3, device=device)[:, 1:2],
    ):
        x = torch.randn(4, 2, device=device, requires_grad=True)
        swiglu_packed(x, layout=layout).backward(dy)
        exact = x.detach().double().requires_grad_()
        swiglu_torch(exact[:, :1], exact[:, 1:]).backward(dy.double())
        assert_close(x.grad, exact.grad.float(), rounding_tolerance(torch.float32, 16, magnitude=8.0))


def test_the_sign_of_zero_is_that_of_the_product(device: str) -> None:
    gate = torch.tensor([1.0, -1.0, 1.0, -1.0], device=device)
    up = torch.tensor([0.0, 0.0, -0.0, -0.0], device=device)
    assert torch.equal(swiglu_fused(gate, up).signbit(), torch.tensor([False, True, True, False], device=device))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dy": torch.ones(3, 8)}, ValueError, r"dy must have shape \(4, 8\), got \(3, 8\)"),
        ({"dy": torch.ones(4, 8, dtype=torch.int32)}, TypeError, "dy must have dtype float16, bfloat16, float32"),
        ({"layout": "sideways"}, ValueError, "layout must be one of 'separate', 'concat', 'interleaved'"),
        ({"layout": "concat"}, ValueError, "up and bias_up must be None where x holds both halves"),
        ({"bias": torch.ones(8)}, TypeError, r"bias_up must be a torch\.Tensor, got NoneType"),
    ],
)
def test_operators_check_what_they_are_given(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    call = {"dy": torch.ones(4, 8), "gate": torch.ones(4, 8), "up": torch.ones(4, 8), "bias": None, "bias_up": None}
    form = {"layout": "separate", "gate_first": True, "alpha": 1.0, "beta": 0.0, "limit": None}
    arguments = {**call, **form, **changes}
    with pytest.raises(error, match=message):
        torch.ops.tk_swiglu.swiglu_backward(*arguments.values(), False)
    if "dy" not in changes:
        del arguments["dy"]
        with pytest.raises(error, match=message):
            torch.ops.tk_swiglu.swiglu(*arguments.values())
