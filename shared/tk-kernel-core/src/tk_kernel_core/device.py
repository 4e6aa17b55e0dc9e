"""Facts about a GPU, each with where it comes from.

A figure that no source confirms is unknown, never a guess: a roofline against a wrong peak looks just like a
roofline against the right one.
"""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

if TYPE_CHECKING:
    from collections.abc import Mapping

Provenance = Literal["driver", "nvml", "amdsmi", "table", "measured", "override", "unknown"]
Vendor = Literal["nvidia", "amd", "unknown"]

PEAKS = ("vector", "float16", "bfloat16", "int8")
"""Keys of `DeviceInfo.peak_flops`: fp32 outside the matrix units, then operand dtypes of the matrix units."""

AGREEMENT = 0.03
"""Largest relative difference at which the driver's and the table's bandwidth count as the same figure."""

# GDDR buses end at 512 bits, one HBM stack begins at 1024.
_NARROWEST_HBM_BITS = 1024

# Vendors round labels, and error correction takes up to an eighth of GDDR.
_LEAST_VISIBLE_MEMORY, _MOST_VISIBLE_MEMORY = 0.85, 1.02

_FROZEN = ConfigDict(frozen=True, extra="forbid")


class Fact(BaseModel):
    """One figure and where it comes from.

    Attributes:
        value: The figure, finite and above zero, in the unit that the field's name states; None if unknown.
        provenance: Kind of source.
        source: The source in words: a data sheet's title, or how the figure was computed.
        date: Year, or year and month, of a table entry's source.
    """

    model_config = _FROZEN

    value: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    provenance: Provenance = "unknown"
    source: str = ""
    date: str = ""


class DeviceInfo(BaseModel):
    """One GPU as a program sees it: of a card with two dies that are two devices, one die.

    Attributes:
        name: Name as the driver reports it, or the table's short name.
        vendor: `nvidia`, `amd` or `unknown`.
        arch: Architecture as its vendor writes it, for example `sm_90` or `gfx942`.
        compute_units: Streaming multiprocessors or compute units.
        l2_bytes: Size of the L2 cache, in bytes.
        memory_bytes: Size of the device memory, in bytes.
        bandwidth_bytes_per_s: Peak bandwidth of the device memory, in bytes/s.
        peak_flops: Dense peaks in operations/s, under the keys `PEAKS`.
        driver_version: Version of the kernel driver, where NVML or amdsmi tells it.
    """

    model_config = _FROZEN

    name: str
    vendor: Vendor
    arch: str
    compute_units: Fact
    l2_bytes: Fact
    memory_bytes: Fact
    bandwidth_bytes_per_s: Fact
    peak_flops: dict[str, Fact]
    driver_version: str | None = None


class NvmlReading(BaseModel):
    """What NVML says of a card: top memory clock in kHz, width of the memory bus in bits, driver version."""

    model_config = _FROZEN

    memory_clock_khz: float
    memory_bus_bits: int
    driver_version: str | None = None


class AmdSmiReading(BaseModel):
    """What amdsmi says of a card: bandwidth at the top memory clock in bytes/s, driver version."""

    model_config = _FROZEN

    bandwidth_bytes_per_s: float | None
    driver_version: str | None = None


class _Card(BaseModel):
    """An entry of `devices.json`. One name may be two products, so memory and compute units decide too."""

    model_config = _FROZEN

    name: str
    vendor: Vendor
    arch: str
    driver_names: tuple[str, ...]
    memory_gib: int
    compute_units: int
    l2_bytes: int | None
    bandwidth_bytes_per_s: float | None
    peak_flops: dict[str, float | None]
    source: str
    date: str

    @property
    def memory_bytes(self) -> int:
        return self.memory_gib * 2**30

    def fact(self, value: float | None) -> Fact:
        return _fact(value, "table", self.source, self.date)

    def is_named(self, name: str) -> bool:
        # Drivers of 2021 and before leave the vendor out.
        return any(name in (known, known.removeprefix("NVIDIA ")) for known in self.driver_names)


def current_device(index: int | None = None, overrides: Mapping[str, float] | None = None) -> DeviceInfo:
    """Describe a GPU of this machine.

    Args:
        index: Device index as PyTorch counts; None for the current device.
        overrides: Figures that replace what is found, by key: `compute_units`, `l2_bytes`, `memory_bytes`,
            `bandwidth_bytes_per_s`, `peak_flops.vector`, `peak_flops.float16`, `peak_flops.bfloat16`,
            `peak_flops.int8`; in units, bytes, bytes/s and operations/s.

    Returns:
        The facts. Those that no source confirms are unknown.

    Raises:
        RuntimeError: PyTorch sees no GPU.
        ValueError: `index` is out of range, or an override has an unknown key or a value that is not finite
            and above zero.
    """
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            f"no GPU is visible to PyTorch {torch.__version__}: torch.cuda.is_available() is False; a card that is "
            f"not present can be described by known_device(name)"
        )
    count = torch.cuda.device_count()
    if index is None:
        index = torch.cuda.current_device()
    if not 0 <= index < count:
        raise ValueError(f"index must be from 0 to {count - 1}, got {index}")
    properties = torch.cuda.get_device_properties(index)
    return describe(properties, nvml=_read_nvml(properties), amdsmi=_read_amdsmi(properties), overrides=overrides)


def known_devices() -> tuple[str, ...]:
    """Return the short names of the cards in the table, for example `H200` or `A100-40GB-SXM`."""
    return tuple(card.name for card in _cards())


def known_device(name: str) -> DeviceInfo:
    """Describe a card from the table.

    Args:
        name: One of `known_devices()`, in any case.

    Raises:
        ValueError: The table has no such card.
    """
    for card in _cards():
        if card.name.casefold() == name.casefold():
            return DeviceInfo(
                name=card.name,
                vendor=card.vendor,
                arch=card.arch,
                compute_units=card.fact(card.compute_units),
                l2_bytes=card.fact(card.l2_bytes),
                memory_bytes=card.fact(card.memory_bytes),
                bandwidth_bytes_per_s=card.fact(card.bandwidth_bytes_per_s),
                peak_flops={key: card.fact(card.peak_flops[key]) for key in PEAKS},
            )
    raise ValueError(f"name must be one of {', '.join(known_devices())}, got {name!r}")


def describe(
    properties: Any,
    *,
    nvml: NvmlReading | None = None,
    amdsmi: AmdSmiReading | None = None,
    overrides: Mapping[str, float] | None = None,
) -> DeviceInfo:
    """Describe the GPU that a set of device properties belongs to.

    Args:
        properties: What `torch.cuda.get_device_properties` returns, or anything with such attributes. Missing
            attributes make facts unknown.
        nvml: NVML's reading of the card, for a PyTorch that does not report memory clock and bus width.
        amdsmi: amdsmi's reading of the card.
        overrides: As in `current_device`.

    Returns:
        The facts, each from the first source that has it: the override, the driver, the table.

    Raises:
        ValueError: An override has an unknown key or a value that is not finite and above zero.
    """
    name = str(getattr(properties, "name", "unknown"))
    vendor, arch = _architecture(properties)
    compute_units = _driver_fact(properties, "multi_processor_count")
    memory = _driver_fact(properties, "total_memory")
    l2 = _driver_fact(properties, "L2_cache_size")
    card = _match(name, memory.value, compute_units.value)
    if vendor == "amd":
        # ROCm reports the L2 of one compute die, whatever their number.
        l2 = card.fact(card.l2_bytes) if card else l2.model_copy(update={"source": "one compute die's share"})
    facts = {
        "compute_units": compute_units,
        "l2_bytes": l2,
        "memory_bytes": memory,
        "bandwidth_bytes_per_s": _bandwidth(name, vendor, card, properties, nvml, amdsmi),
        **{f"peak_flops.{key}": card.fact(card.peak_flops[key]) if card else Fact() for key in PEAKS},
    }
    facts |= _checked_overrides(overrides or {}, facts)
    reading = nvml or amdsmi
    return DeviceInfo(
        name=name,
        vendor=vendor,
        arch=arch,
        compute_units=facts["compute_units"],
        l2_bytes=facts["l2_bytes"],
        memory_bytes=facts["memory_bytes"],
        bandwidth_bytes_per_s=facts["bandwidth_bytes_per_s"],
        peak_flops={key: facts[f"peak_flops.{key}"] for key in PEAKS},
        driver_version=reading.driver_version if reading else None,
    )


@functools.cache
def _cards() -> tuple[_Card, ...]:
    entries = json.loads(Path(__file__).with_name("devices.json").read_text(encoding="utf-8"))
    return tuple(_Card.model_validate(entry) for entry in entries)


def _match(name: str, memory_bytes: float | None, compute_units: float | None) -> _Card | None:
    """Return the one card that these figures fit; a slice of a card fits none."""
    if memory_bytes is None or compute_units is None:
        return None
    fitting = [
        card
        for card in _cards()
        if card.is_named(name)
        and card.compute_units == compute_units
        and _LEAST_VISIBLE_MEMORY <= memory_bytes / card.memory_bytes <= _MOST_VISIBLE_MEMORY
    ]
    return fitting[0] if len(fitting) == 1 else None


def _architecture(properties: Any) -> tuple[Vendor, str]:
    # A CUDA build of PyTorch repeats the card's name in `gcnArchName`.
    gcn = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    if gcn.startswith("gfx"):
        return "amd", gcn
    major, minor = getattr(properties, "major", None), getattr(properties, "minor", None)
    if major is None or minor is None:
        return "unknown", "unknown"
    return "nvidia", f"sm_{major}{minor}"


def _bandwidth(
    name: str,
    vendor: Vendor,
    card: _Card | None,
    properties: Any,
    nvml: NvmlReading | None,
    amdsmi: AmdSmiReading | None,
) -> Fact:
    """Choose between what the driver or a management library says and what the table says.

    "Memory clock" means another thing for each kind of memory and on each vendor's cards. Twice the clock is the
    transfer rate of HBM on NVIDIA's cards; any other reading counts only if the table confirms it.
    """
    table = card.fact(card.bandwidth_bytes_per_s) if card else Fact()
    reading, bus_bits = Fact(), 0
    if vendor == "amd" and amdsmi:
        reading = _fact(amdsmi.bandwidth_bytes_per_s, "amdsmi", "at the top memory clock")
    elif vendor == "nvidia":
        clock_khz = getattr(properties, "memory_clock_rate", None) or 0
        bus_bits = getattr(properties, "memory_bus_width", None) or 0
        reading = _clock_product(clock_khz, bus_bits, "driver")
        if reading.value is None and nvml:
            bus_bits = nvml.memory_bus_bits
            reading = _clock_product(nvml.memory_clock_khz, bus_bits, "nvml")
    if reading.value is None:
        return table

    # A slice of a card (MIG) shows the whole card's bus.
    trusted = bus_bits >= _NARROWEST_HBM_BITS and " MIG " not in name
    in_words = f"{reading.value / 1e9:.1f} GB/s by {reading.provenance} ({reading.source})"
    if table.value is None:
        return reading if trusted else Fact(source=f"not confirmed: {in_words}")
    if abs(reading.value / table.value - 1) <= AGREEMENT:
        return reading
    if trusted:
        return reading.model_copy(
            update={"source": f"{reading.source}; the table has {table.value / 1e9:.1f} GB/s ({table.source})"}
        )
    return table.model_copy(update={"source": f"{table.source}; differs from {in_words}"})


def _clock_product(clock_khz: float, bits: int, provenance: Provenance) -> Fact:
    return _fact(clock_khz * 1e3 * 2 * bits / 8, provenance, f"{clock_khz / 1e3:g} MHz * 2 * {bits} bit / 8")


def _driver_fact(properties: Any, attribute: str) -> Fact:
    return _fact(getattr(properties, attribute, None), "driver", "")


def _fact(value: float | None, provenance: Provenance, source: str, date: str = "") -> Fact:
    """Build a fact; zero, negative and endless figures are how drivers say that they do not know."""
    if value is None or not math.isfinite(value) or value <= 0:
        return Fact()
    return Fact(value=value, provenance=provenance, source=source, date=date)


def _checked_overrides(overrides: Mapping[str, float], facts: Mapping[str, Fact]) -> dict[str, Fact]:
    checked = {}
    for key, value in overrides.items():
        if key not in facts:
            raise ValueError(f"overrides must have keys out of {', '.join(facts)}, got {key!r}")
        if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
            raise ValueError(f"override {key} must be a finite number above zero, got {value!r}")
        checked[key] = Fact(value=value, provenance="override")
    return checked


def _read_nvml(properties: Any) -> NvmlReading | None:
    """Ask NVML about the card; None without NVML, and for a card that it does not list."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        try:
            # By UUID: NVML counts all cards, PyTorch those in CUDA_VISIBLE_DEVICES.
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")
            return NvmlReading(
                memory_clock_khz=pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM) * 1e3,
                memory_bus_bits=pynvml.nvmlDeviceGetMemoryBusWidth(handle),
                driver_version=pynvml.nvmlSystemGetDriverVersion(),
            )
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, AttributeError):
        return None


def _read_amdsmi(properties: Any) -> AmdSmiReading | None:
    """Ask amdsmi about the card; None without amdsmi, and for a card that it does not list."""
    try:
        import amdsmi
    # Besides a missing package, its import fails in these ways where ROCm's libraries are missing.
    except (ImportError, OSError, KeyError):
        return None
    try:
        address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        amdsmi.amdsmi_init()
        try:
            handle = amdsmi.amdsmi_get_processor_handle_from_bdf(address)
            gigabytes_per_s = amdsmi.amdsmi_get_gpu_vram_info(handle).get("vram_max_bandwidth")
            driver = amdsmi.amdsmi_get_gpu_driver_info(handle)
        finally:
            amdsmi.amdsmi_shut_down()
    except (amdsmi.AmdSmiException, AttributeError):
        return None
    return AmdSmiReading(
        # A driver too old to know gives the string "N/A".
        bandwidth_bytes_per_s=gigabytes_per_s * 1e9 if isinstance(gigabytes_per_s, int | float) else None,
        driver_version=driver.get("driver_version"),
    )
