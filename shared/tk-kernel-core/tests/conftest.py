"""What several test modules of the core share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tk_kernel_core import device as device_module

TABLE = {
    entry["name"]: entry
    for entry in json.loads(Path(device_module.__file__).with_name("devices.json").read_text(encoding="utf-8"))
}

# Memory clock in MHz and bus width in bits, as the drivers of these cards report them.
MEMORY_BUS = {
    "A100-40GB-PCIe": (1215, 5120),
    "A100-40GB-SXM": (1215, 5120),
    "A100-80GB-PCIe": (1512, 5120),
    "A100-80GB-SXM": (1593, 5120),
    "A10": (6251, 384),
    "L4": (6251, 192),
    "L40S": (9001, 384),
    "RTX-2060": (7001, 192),
    "RTX-3090": (9751, 384),
    "RTX-4090": (10501, 384),
    "RTX-5090": (14001, 512),
    "H100-PCIe": (1593, 5120),
    "H100-SXM": (2619, 5120),
    "H100-NVL": (2619, 6016),
    "H200": (3201, 6016),
    "H200-NVL": (3201, 6016),
    "GH200-96GB": (2619, 6144),
    "GH200-144GB": (3201, 6144),
    "B200": (3996, 7680),
}


@pytest.fixture(scope="session")
def fake_properties() -> Callable[..., Any]:
    """Make device properties as PyTorch gives them for a card of the table; the keywords replace some."""

    def make(
        card: str,
        *,
        name: str | None = None,
        memory_bytes: int | None = None,
        compute_units: int | None = None,
        clock_mhz: float | None = None,
        bus_bits: int | None = None,
    ) -> Any:
        entry = TABLE[card]
        name = name or entry["driver_names"][0]
        known_clock, known_bits = MEMORY_BUS.get(card, (1300, 8192))
        properties = {
            "name": name,
            # A little is always kept back.
            "total_memory": memory_bytes or int(entry["memory_gib"] * 2**30 * 0.98),
            "multi_processor_count": compute_units or entry["compute_units"],
            "L2_cache_size": 4 * 2**20,
            "memory_clock_rate": (known_clock if clock_mhz is None else clock_mhz) * 1000,
            "memory_bus_width": known_bits if bus_bits is None else bus_bits,
            "uuid": "0f9d3a30-0000-0000-0000-000000000000",
            "pci_domain_id": 0,
            "pci_bus_id": 0xC1,
            "pci_device_id": 0,
            "major": 9,
            "minor": 4,
            "gcnArchName": f"{entry['arch']}:sramecc+:xnack-",
        }
        if entry["vendor"] == "nvidia":
            capability = entry["arch"].removeprefix("sm_")
            properties |= {"major": int(capability[:-1]), "minor": int(capability[-1]), "gcnArchName": name}
        return SimpleNamespace(**properties)

    return make
