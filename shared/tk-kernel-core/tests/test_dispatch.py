"""Which implementation serves a tensor."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.launch import planning, recording
from tk_kernel_core.targets import COMPILE_TARGETS

OFF = (None, "", "0", "false", "no", "off", "2")
ON = ("1", "true", "TRUE", "yes", "on", "Y")


def set_interpreter(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    else:
        monkeypatch.setenv("TRITON_INTERPRET", value)


def tensor_on(device: str) -> Any:
    """Something that is on a device which this machine may lack."""
    return SimpleNamespace(device=torch.device(device))


@pytest.mark.parametrize("value", [*OFF, *ON], ids=str)
def test_the_interpreter_is_on_when_triton_says_so(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton.knobs", reason="compares with Triton's reading of the variable")
    set_interpreter(monkeypatch, value)
    assert interpreting() == (value in ON)
    assert interpreting() == knobs.runtime.interpret


@pytest.mark.parametrize("value", [None, "0", "1"])
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_gpu_tensors_are_served_by_triton(device: str, value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    set_interpreter(monkeypatch, value)
    assert backend_of("x", tensor_on(device)) == "triton"


@pytest.mark.parametrize(("value", "want"), [(None, "reference"), ("0", "reference"), ("1", "triton")])
def test_cpu_tensors_are_served_by_triton_in_the_interpreter_only(
    value: str | None, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_interpreter(monkeypatch, value)
    assert backend_of("x", torch.empty(1)) == want
    # Planning is for meta tensors.
    with planning(COMPILE_TARGETS["sm_80"]):
        assert backend_of("x", torch.empty(1)) == want


@pytest.mark.parametrize("value", [None, "1"])
def test_meta_tensors_are_served_by_triton_while_planning_only(
    value: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_interpreter(monkeypatch, value)
    x = torch.empty(1, device="meta")
    assert backend_of("x", x) == "reference"
    with recording():
        assert backend_of("x", x) == "reference"
    with planning(COMPILE_TARGETS["gfx950"]):
        assert backend_of("x", x) == "triton"
    assert backend_of("x", x) == "reference"


@pytest.mark.parametrize("device", ["mps:0", "xpu:1"])
def test_other_devices_are_refused(device: str) -> None:
    with pytest.raises(ValueError, match=rf"residual must be on a CUDA, HIP or CPU device, got {device}"):
        backend_of("residual", tensor_on(device))
