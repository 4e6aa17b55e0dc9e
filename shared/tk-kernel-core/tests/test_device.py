from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from tk_kernel_core import device as device_module
from tk_kernel_core.device import (
    PEAKS,
    AmdSmiReading,
    DeviceInfo,
    Fact,
    NvmlReading,
    describe,
    known_device,
    known_devices,
)

FakeProperties = Callable[..., Any]


def facts_of(info: DeviceInfo) -> dict[str, Fact]:
    named = ("compute_units", "l2_bytes", "memory_bytes", "bandwidth_bytes_per_s")
    return {name: getattr(info, name) for name in named} | info.peak_flops


# The vendors' figures, written down a second time: bytes/s and dense bfloat16 operations/s.
@pytest.mark.parametrize(
    ("card", "bandwidth", "bfloat16"),
    [
        ("A100-40GB-SXM", 1.555e12, 312e12),
        ("A100-80GB-PCIe", 1.935e12, 312e12),
        ("A100-80GB-SXM", 2.039e12, 312e12),
        ("RTX-2060", 336e9, None),
        ("H100-PCIe", 2.0e12, 756e12),
        ("H100-SXM", 3.35e12, 989.5e12),
        ("H100-NVL", 3.9e12, 835e12),
        ("H200", 4.8e12, 989.5e12),
        ("GH200-96GB", 4.0e12, 989.5e12),
        ("GH200-144GB", 4.9e12, 989.5e12),
        ("B200", 7.7e12, 2250e12),
        # One die of two, which is one device to a program.
        ("MI250X", 1.6384e12, 191.5e12),
        ("MI300X", 5.3e12, 1307.4e12),
        ("MI355X", 8.0e12, 2500e12),
    ],
)
def test_present_card_has_its_data_sheets_figures(
    card: str, bandwidth: float, bfloat16: float | None, fake_properties: FakeProperties
) -> None:
    info = describe(fake_properties(card))

    # The H100 PCIe's data sheet rounds 2.04 TB/s to 2.0.
    assert info.bandwidth_bytes_per_s.value == pytest.approx(bandwidth, rel=0.021)
    assert info.arch == known_device(card).arch
    assert info.peak_flops["bfloat16"].value == (pytest.approx(bfloat16, rel=0.001) if bfloat16 else None)
    assert info.peak_flops["bfloat16"].provenance == ("table" if bfloat16 else "unknown")


def test_h200_as_its_driver_reports_it() -> None:
    properties = SimpleNamespace(
        name="NVIDIA H200",
        major=9,
        minor=0,
        gcnArchName="NVIDIA H200",
        total_memory=150_109_880_320,
        multi_processor_count=132,
        L2_cache_size=62_914_560,
        memory_clock_rate=3_201_000,
        memory_bus_width=6016,
    )

    info = describe(properties)

    assert info.vendor == "nvidia"
    assert info.arch == "sm_90"
    assert info.compute_units == Fact(value=132, provenance="driver")
    assert info.l2_bytes == Fact(value=62_914_560, provenance="driver")
    assert info.memory_bytes == Fact(value=150_109_880_320, provenance="driver")
    assert info.bandwidth_bytes_per_s.value == 3_201_000e3 * 2 * 6016 / 8
    assert round(info.bandwidth_bytes_per_s.value / 1e12, 2) == 4.81
    assert info.bandwidth_bytes_per_s.source == "3201 MHz * 2 * 6016 bit / 8"
    assert info.driver_version is None


def test_gddr_clock_that_contradicts_the_table_loses(fake_properties: FakeProperties) -> None:
    fact = describe(fake_properties("RTX-2060", clock_mhz=5501, bus_bits=192)).bandwidth_bytes_per_s

    assert fact.value == 336e9
    assert fact.provenance == "table"
    assert "264.0 GB/s by driver" in fact.source


def test_hbm_clock_that_contradicts_the_table_wins_and_says_so(fake_properties: FakeProperties) -> None:
    fact = describe(fake_properties("B200", bus_bits=8192)).bandwidth_bytes_per_s

    assert fact.value == 3996e6 * 2 * 8192 / 8
    assert fact.provenance == "driver"
    assert "the table has 7700.0 GB/s" in fact.source


def test_amd_memory_clock_is_not_used(fake_properties: FakeProperties) -> None:
    # 1300 MHz * 2 * 8192 bit / 8 is half of the card's bandwidth.
    assert describe(fake_properties("MI300X")).bandwidth_bytes_per_s == known_device("MI300X").bandwidth_bytes_per_s


def test_amd_l2_counts_all_dies(fake_properties: FakeProperties) -> None:
    properties = fake_properties("MI300X")
    assert properties.L2_cache_size == 4 * 2**20
    assert describe(properties).l2_bytes.value == 32 * 2**20

    unlisted = describe(fake_properties("MI300X", name="AMD Instinct MI300A")).l2_bytes
    assert (unlisted.value, unlisted.source) == (4 * 2**20, "one compute die's share")


def test_amdsmi_counts_where_the_table_confirms_it(fake_properties: FakeProperties) -> None:
    reading = AmdSmiReading(bandwidth_bytes_per_s=5325e9, driver_version="6.12.12")

    confirmed = describe(fake_properties("MI300X"), amdsmi=reading)
    assert confirmed.bandwidth_bytes_per_s.value == 5325e9
    assert confirmed.bandwidth_bytes_per_s.provenance == "amdsmi"
    assert confirmed.driver_version == "6.12.12"

    # One of eight partitions has an eighth of the units; amdsmi speaks of the whole card.
    part = describe(fake_properties("MI300X", compute_units=38), amdsmi=reading)
    assert part.bandwidth_bytes_per_s.value is None
    assert "5325.0 GB/s by amdsmi" in part.bandwidth_bytes_per_s.source

    contradicted = describe(
        fake_properties("MI325X"), amdsmi=AmdSmiReading(bandwidth_bytes_per_s=3000e9)
    ).bandwidth_bytes_per_s
    assert (contradicted.value, contradicted.provenance) == (6000e9, "table")


@pytest.mark.parametrize("clock_mhz", [0, -1, float("inf"), float("nan")])
@pytest.mark.parametrize("card", ["RTX-2060", "H200", "B200"])
def test_impossible_clock_falls_back_to_the_table(card: str, clock_mhz: float, fake_properties: FakeProperties) -> None:
    assert (
        describe(fake_properties(card, clock_mhz=clock_mhz)).bandwidth_bytes_per_s
        == known_device(card).bandwidth_bytes_per_s
    )


def test_impossible_clock_of_an_unknown_card_gives_no_bandwidth(fake_properties: FakeProperties) -> None:
    properties = fake_properties("H200", name="NVIDIA X1", clock_mhz=0)
    assert describe(properties).bandwidth_bytes_per_s == Fact()


def test_nvml_stands_in_for_a_driver_figure_that_pytorch_lacks(fake_properties: FakeProperties) -> None:
    properties = fake_properties("H200")
    del properties.memory_clock_rate, properties.memory_bus_width
    reading = NvmlReading(memory_clock_khz=3_201_000, memory_bus_bits=6016, driver_version="580.95.05")

    info = describe(properties, nvml=reading)

    assert info.bandwidth_bytes_per_s.provenance == "nvml"
    assert info.bandwidth_bytes_per_s.value == 3_201_000e3 * 2 * 6016 / 8
    assert info.driver_version == "580.95.05"


def test_unknown_card_has_unknown_peaks(fake_properties: FakeProperties) -> None:
    info = describe(fake_properties("A10", name="NVIDIA GeForce RTX 9999"))

    assert set(info.peak_flops) == set(PEAKS)
    assert all(fact == Fact(value=None, provenance="unknown") for fact in info.peak_flops.values())
    assert info.bandwidth_bytes_per_s.value is None
    assert info.bandwidth_bytes_per_s.provenance == "unknown"
    assert "not confirmed: 600.1 GB/s by driver" in info.bandwidth_bytes_per_s.source
    assert info.compute_units.value == known_device("A10").compute_units.value


def test_unknown_card_with_hbm_has_the_drivers_bandwidth(fake_properties: FakeProperties) -> None:
    info = describe(fake_properties("H200", name="NVIDIA H20"))
    assert info.bandwidth_bytes_per_s.provenance == "driver"
    assert info.peak_flops["bfloat16"] == Fact()


def test_nothing_is_known_of_empty_properties() -> None:
    info = describe(SimpleNamespace())
    assert info.vendor == "unknown"
    assert all(fact == Fact() for fact in facts_of(info).values())


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_bytes": 64 * 2**30},
        {"compute_units": 114},
        {"name": "NVIDIA A100-SXM4-80GB MIG 1g.10gb"},
        {"name": "NVIDIA A100-SXM4"},
        {"name": "A100"},
    ],
    ids=str,
)
def test_card_that_fits_only_in_part_is_unknown(changes: dict[str, Any], fake_properties: FakeProperties) -> None:
    assert describe(fake_properties("A100-80GB-SXM", **changes)).peak_flops["bfloat16"] == Fact()


def test_slice_of_a_card_does_not_claim_the_cards_bandwidth(fake_properties: FakeProperties) -> None:
    name = "NVIDIA H200 MIG 1g.18gb"
    info = describe(fake_properties("H200", name=name, compute_units=16, memory_bytes=18 * 2**30))
    assert info.bandwidth_bytes_per_s.value is None


def test_one_name_for_two_products_is_told_apart_by_compute_units(fake_properties: FakeProperties) -> None:
    shared_name = "AMD Instinct MI250X / MI250"
    assert describe(fake_properties("MI250X", name=shared_name)).peak_flops == known_device("MI250X").peak_flops
    assert describe(fake_properties("MI250", name=shared_name)).peak_flops == known_device("MI250").peak_flops


def test_name_that_fits_two_entries_is_unknown(
    monkeypatch: pytest.MonkeyPatch, fake_properties: FakeProperties
) -> None:
    cards = device_module._cards()
    monkeypatch.setattr(device_module, "_cards", lambda: (*cards, cards[0]))
    assert describe(fake_properties(cards[0].name)).peak_flops["bfloat16"] == Fact()


OVERRIDES = {
    "compute_units": 99,
    "l2_bytes": 1 << 20,
    "memory_bytes": 1 << 30,
    "bandwidth_bytes_per_s": 1e12,
    "peak_flops.vector": 1e13,
    "peak_flops.float16": 2e13,
    "peak_flops.bfloat16": 3e13,
    "peak_flops.int8": 4e13,
}


@pytest.mark.parametrize(("key", "value"), OVERRIDES.items())
@pytest.mark.parametrize("card", ["H200", "MI300X"])
def test_override_replaces_one_figure(card: str, key: str, value: float, fake_properties: FakeProperties) -> None:
    before = facts_of(describe(fake_properties(card)))
    after = facts_of(describe(fake_properties(card), overrides={key: value}))

    changed = key.removeprefix("peak_flops.")
    assert after.pop(changed) == Fact(value=value, provenance="override")
    before.pop(changed)
    assert after == before


@pytest.mark.parametrize("key", ["bandwidth", "peak_flops", "peak_flops.float8", "name", ""])
def test_override_of_no_figure_is_refused(key: str, fake_properties: FakeProperties) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {key!r}")):
        describe(fake_properties("H200"), overrides={key: 1.0})


@pytest.mark.parametrize("value", [0, -1e12, float("inf"), float("nan"), "4.8e12", None])
def test_override_by_no_figure_is_refused(value: Any, fake_properties: FakeProperties) -> None:
    with pytest.raises(ValueError, match=r"bandwidth_bytes_per_s must be a finite number above zero"):
        describe(fake_properties("H200"), overrides={"bandwidth_bytes_per_s": value})


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_fact_refuses_a_value_that_cannot_be(value: float) -> None:
    with pytest.raises(ValidationError):
        Fact(value=value, provenance="driver")


@pytest.mark.parametrize("card", known_devices())
def test_json_round_trip(card: str, fake_properties: FakeProperties) -> None:
    unlisted = describe(fake_properties(card, name="unlisted"))
    for info in (known_device(card), describe(fake_properties(card), overrides={"l2_bytes": 1 / 3}), unlisted):
        assert DeviceInfo.model_validate_json(info.model_dump_json()) == info


def test_import_touches_no_gpu_library() -> None:
    code = "import sys, tk_kernel_core.device, tk_kernel_core.roofline; print({'torch', 'pynvml'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "set()"
