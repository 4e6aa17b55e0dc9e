"""The table of known cards."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tk_kernel_core import device as device_module
from tk_kernel_core.device import (
    PEAKS,
    DeviceInfo,
    Fact,
    describe,
    known_device,
    known_devices,
)

FakeProperties = Callable[..., Any]

TABLE = {
    entry["name"]: entry
    for entry in json.loads(Path(device_module.__file__).with_name("devices.json").read_text(encoding="utf-8"))
}

# Operations per clock and compute unit: float16 on the matrix units over float32 outside them, without sparsity.
# GeForce cards multiply float16 at half rate when they accumulate in float32.
MATRIX_TO_VECTOR = {"sm_80": 16, "sm_86": 4, "sm_89": 4, "sm_90": 16, "sm_100": 32, "sm_120": 4}
MATRIX_TO_VECTOR |= {"gfx90a": 8, "gfx942": 8, "gfx950": 16}


def facts_of(info: DeviceInfo) -> dict[str, Fact]:
    named = ("compute_units", "l2_bytes", "memory_bytes", "bandwidth_bytes_per_s")
    return {name: getattr(info, name) for name in named} | info.peak_flops


@pytest.mark.parametrize("card", TABLE)
def test_each_driver_name_fits_one_entry(card: str, fake_properties: FakeProperties) -> None:
    for name in TABLE[card]["driver_names"]:
        for spelling in {name, name.removeprefix("NVIDIA ")}:
            info = describe(fake_properties(card, name=spelling))
            assert info.peak_flops == known_device(card).peak_flops
            assert info.vendor == TABLE[card]["vendor"]


@pytest.mark.parametrize("card", [card for card, entry in TABLE.items() if entry["vendor"] == "nvidia"])
def test_driver_and_table_agree_on_bandwidth(card: str, fake_properties: FakeProperties) -> None:
    fact = describe(fake_properties(card)).bandwidth_bytes_per_s

    assert fact.provenance == "driver"
    assert fact.value == pytest.approx(known_device(card).bandwidth_bytes_per_s.value, rel=0.021)


@pytest.mark.parametrize("card", TABLE)
def test_table_entry_is_complete(card: str) -> None:
    entry = TABLE[card]
    info = known_device(card)

    assert (info.name, info.arch, info.vendor) == (card, entry["arch"], entry["vendor"])
    assert entry["driver_names"]
    assert re.fullmatch(r"20\d\d(-\d\d)?", entry["date"])
    assert entry["source"].startswith("NVIDIA " if entry["vendor"] == "nvidia" else "AMD ")
    assert set(entry["peak_flops"]) == set(PEAKS)
    assert info.bandwidth_bytes_per_s.value is not None
    assert info.peak_flops["vector"].value is not None
    for name, fact in facts_of(info).items():
        if fact.value is None:
            assert fact == Fact(), name
        else:
            assert fact.value > 0, name
            assert (fact.provenance, fact.source, fact.date) == ("table", entry["source"], entry["date"]), name


@pytest.mark.parametrize("card", TABLE)
def test_peaks_are_dense(card: str) -> None:
    peaks = TABLE[card]["peak_flops"]
    if peaks["float16"] is None:
        assert peaks["bfloat16"] is None
        return
    ratio = MATRIX_TO_VECTOR[TABLE[card]["arch"]] / (2 if card.startswith("RTX") else 1)

    assert peaks["bfloat16"] == peaks["float16"]
    # The matrix units may run at a lower clock; a figure with sparsity would be twice as large.
    assert 0.85 * ratio < peaks["float16"] / peaks["vector"] < 1.02 * ratio
    int8_ratio = 4 if card.startswith("RTX") else 1 if TABLE[card]["arch"] == "gfx90a" else 2
    # The L40S's data sheet rounds its float16 figure down by more than one percent.
    assert peaks["int8"] / peaks["float16"] == pytest.approx(int8_ratio, rel=0.03)


def test_cards_are_found_in_any_case() -> None:
    assert known_device("h100-sxm") == known_device("H100-SXM")
    assert known_devices() == tuple(TABLE)
    assert len(set(map(str.casefold, TABLE))) == len(TABLE)


def test_unlisted_card_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"must be one of A100-40GB-PCIe, .*H200, .*MI355X, got 'H100'"):
        known_device("H100")


@given(
    card=st.sampled_from(sorted(TABLE)),
    clock_mhz=st.one_of(st.just(0.0), st.floats(-1e4, 1e5)),
    bus_bits=st.integers(-1024, 16_384),
)
def test_whatever_the_driver_says_the_bandwidth_is_sane_or_unknown(
    card: str, clock_mhz: float, bus_bits: int, fake_properties: FakeProperties
) -> None:
    fact = describe(fake_properties(card, clock_mhz=clock_mhz, bus_bits=bus_bits)).bandwidth_bytes_per_s
    if fact.provenance == "driver":
        assert fact.value == pytest.approx(clock_mhz * 1e6 * 2 * bus_bits / 8)
    else:
        assert fact.value in (None, TABLE[card]["bandwidth_bytes_per_s"])
    assert fact.value is None or (math.isfinite(fact.value) and fact.value > 0)


@given(card=st.sampled_from(sorted(TABLE)), share=st.floats(0.01, 3.0))
def test_another_memory_size_is_another_card_or_an_unknown_one(
    card: str, share: float, fake_properties: FakeProperties
) -> None:
    entry = TABLE[card]
    memory_bytes = int(share * entry["memory_gib"] * 2**30)
    info = describe(fake_properties(card, memory_bytes=memory_bytes))
    matching = [
        other
        for other in TABLE.values()
        if set(other["driver_names"]) & set(entry["driver_names"])
        and other["compute_units"] == entry["compute_units"]
        and 0.85 <= memory_bytes / (other["memory_gib"] * 2**30) <= 1.02
    ]
    peaks = {kind: fact.value for kind, fact in info.peak_flops.items()}
    if len(matching) == 1:
        assert peaks == {kind: known_device(matching[0]["name"]).peak_flops[kind].value for kind in PEAKS}
    else:
        assert set(peaks.values()) == {None}


@given(name=st.text(max_size=40))
def test_a_name_that_the_table_lacks_is_an_unknown_card(name: str, fake_properties: FakeProperties) -> None:
    known = {driver_name for entry in TABLE.values() for driver_name in entry["driver_names"]}
    assume(name.removeprefix("NVIDIA ") not in {driver_name.removeprefix("NVIDIA ") for driver_name in known})
    info = describe(fake_properties("H200", name=name or " "))
    assert {fact.value for fact in info.peak_flops.values()} == {None}
