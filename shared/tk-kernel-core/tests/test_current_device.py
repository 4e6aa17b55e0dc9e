"""The card of this machine, and what the vendors' management libraries add."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tk_kernel_core.device import DeviceInfo, current_device

FakeProperties = Callable[..., Any]


class TestCurrentDevice:
    @pytest.fixture
    def gpu(self, monkeypatch: pytest.MonkeyPatch, fake_properties: FakeProperties) -> Any:
        """Make PyTorch see two cards, the second of them current; no management library."""
        properties = [fake_properties("L4"), fake_properties("H200")]
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
        # None makes an import fail.
        monkeypatch.setitem(sys.modules, "pynvml", None)
        monkeypatch.setitem(sys.modules, "amdsmi", None)
        return properties

    def test_without_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(RuntimeError, match="no GPU is visible to PyTorch"):
            current_device()

    @pytest.mark.usefixtures("gpu")
    def test_index(self) -> None:
        assert current_device().name == "NVIDIA H200"
        assert current_device(0).name == "NVIDIA L4"
        assert current_device(0, {"l2_bytes": 5.0}).l2_bytes.value == 5.0
        for index in (-1, 2):
            with pytest.raises(ValueError, match=f"index must be from 0 to 1, got {index}"):
                current_device(index)

    def test_nvml_is_asked_about_the_same_card(self, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        del gpu[1].memory_clock_rate
        pynvml, calls = fake_nvml()
        monkeypatch.setitem(sys.modules, "pynvml", pynvml)

        info = current_device()

        assert info.bandwidth_bytes_per_s.provenance == "nvml"
        assert info.driver_version == "580.95.05"
        assert calls == ["init", f"GPU-{gpu[1].uuid}", "shutdown"]

    @pytest.mark.usefixtures("gpu")
    @pytest.mark.parametrize(
        "failing",
        ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryBusWidth", "nvmlSystemGetDriverVersion"],
    )
    def test_failing_nvml_is_done_without(self, failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
        pynvml, calls = fake_nvml()

        def fail(*_arguments: object) -> None:
            raise pynvml.NVMLError

        monkeypatch.setattr(pynvml, failing, fail)
        monkeypatch.setitem(sys.modules, "pynvml", pynvml)

        info = current_device()

        assert info.driver_version is None
        assert info.bandwidth_bytes_per_s.provenance == "driver"
        assert calls.count("init") == calls.count("shutdown")

    @pytest.mark.parametrize(("reported", "provenance"), [(5325, "amdsmi"), ("N/A", "table")])
    def test_amdsmi(
        self,
        reported: object,
        provenance: str,
        gpu: Any,
        monkeypatch: pytest.MonkeyPatch,
        fake_properties: FakeProperties,
    ) -> None:
        gpu[1] = fake_properties("MI300X")
        amdsmi: Any = ModuleType("amdsmi")
        amdsmi.AmdSmiException = type("AmdSmiException", (Exception,), {})
        amdsmi.amdsmi_init = lambda: None
        amdsmi.amdsmi_shut_down = lambda: None
        amdsmi.amdsmi_get_processor_handle_from_bdf = lambda address: address
        amdsmi.amdsmi_get_gpu_vram_info = lambda handle: {"0000:c1:00.0": {"vram_max_bandwidth": reported}}[handle]
        amdsmi.amdsmi_get_gpu_driver_info = lambda _: {"driver_version": "6.12.12"}
        monkeypatch.setitem(sys.modules, "amdsmi", amdsmi)

        info = current_device()

        assert info.vendor == "amd"
        assert info.bandwidth_bytes_per_s.provenance == provenance
        assert info.driver_version == "6.12.12"

        def fail(_: object) -> None:
            raise amdsmi.AmdSmiException

        monkeypatch.setattr(amdsmi, "amdsmi_get_processor_handle_from_bdf", fail)
        assert current_device().driver_version is None
        assert current_device().bandwidth_bytes_per_s.provenance == "table"

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_real_gpu(self) -> None:
        info = current_device()
        assert info.name == torch.cuda.get_device_name()
        assert info.compute_units.provenance == "driver"
        assert DeviceInfo.model_validate_json(info.model_dump_json()) == info


def fake_nvml() -> tuple[Any, list[str]]:
    """A pynvml that knows one H200, and the list of the calls that open, look up and close."""
    calls: list[str] = []

    def handle_of(uuid: str) -> str:
        calls.append(uuid)
        return "handle"

    pynvml: Any = ModuleType("pynvml")
    pynvml.NVMLError = type("NVMLError", (Exception,), {})
    pynvml.NVML_CLOCK_MEM = 2
    pynvml.nvmlInit = lambda: calls.append("init")
    pynvml.nvmlShutdown = lambda: calls.append("shutdown")
    pynvml.nvmlDeviceGetHandleByUUID = handle_of
    pynvml.nvmlDeviceGetMaxClockInfo = lambda handle, clock: {("handle", 2): 3201}[handle, clock]
    pynvml.nvmlDeviceGetMemoryBusWidth = lambda handle: {"handle": 6016}[handle]
    pynvml.nvmlSystemGetDriverVersion = lambda: "580.95.05"
    return pynvml, calls
