"""Describe this machine to asv, and print the name that its results go under.

With a GPU, that is the GPU's name; GPU, driver and processor are recorded, and asv's site offers them as selectors: a
changed driver begins a new line instead of a step. Without one the name is `aot`: ahead-of-time compilation gives
the same figures on any host, so all of them share one series.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from asv.machine import Machine, MachineCollection

from reports import machine_name

ROOT = Path(__file__).resolve().parents[1]
AOT = "aot"


def gpu_facts() -> dict[str, Any] | None:
    """Return what the core knows of the GPU here; None without a GPU."""
    try:
        import torch
    except ModuleNotFoundError:
        return None
    if not torch.cuda.is_available():
        return None
    # A machine with a GPU must never pass for one without: what fails from here on is an error.
    command = [sys.executable, str(ROOT / "run_from_source.py"), "device", "--json"]
    facts: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return facts


def describe(facts: dict[str, Any] | None, host: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Return the machine's name and its entries.

    Args:
        facts: The GPU's, from `gpu_facts`.
        host: asv's own reading of the host: `os`, `arch`, `cpu`, `num_cpu`, `ram`.
    """
    if facts is None:
        return AOT, {**dict.fromkeys(host, "any"), "machine": AOT}
    name = machine_name(facts["name"])
    # No time here depends on the host's kernel or memory, and a virtual machine has others every day.
    host = {**host, "os": "any", "ram": "any"}
    return name, {**host, "machine": name, "gpu": facts["name"], "driver": facts["driver_version"] or "unknown"}


if __name__ == "__main__":
    name, entries = describe(gpu_facts(), Machine.get_defaults())
    MachineCollection.save(name, entries)
    print(name)
