"""GPU targets: the few numbers that launch choices and compilation need.

A `Target` is cheap to make and to read: it is on the path of every first call of a kernel. The full
description of a card, with where each figure comes from, is `tk_kernel_core.device.DeviceInfo`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU architecture together with the size of one card of it.

    Attributes:
        name: Architecture as its vendor writes it, for example `sm_90` or `gfx942`.
        backend: Triton backend, `cuda` or `hip`.
        arch: Architecture as Triton takes it: 90, or `gfx942`.
        warp_size: Threads per warp (NVIDIA) or wavefront (AMD).
        compute_units: Streaming multiprocessors or compute units on the card.
        shared_bytes: Most shared memory (LDS) one program may use, in bytes.
    """

    name: str
    backend: Literal["cuda", "hip"]
    arch: int | str
    warp_size: int
    compute_units: int
    shared_bytes: int

    @property
    def is_hopper_or_later(self) -> bool:
        """Whether programmatic dependent launch and the tensor memory accelerator exist."""
        return self.backend == "cuda" and isinstance(self.arch, int) and self.arch >= 90

    def warps(self, threads: int) -> int:
        """Return how many whole warps this many threads make: at least one, and no more than 1024 threads."""
        return max(1, min(threads, 1024) // self.warp_size)


COMPILE_TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 108, 166_912),
        Target("sm_90", "cuda", 90, 32, 132, 232_448),
        Target("sm_100", "cuda", 100, 32, 148, 232_448),
        Target("gfx942", "hip", "gfx942", 64, 304, 65_536),
        Target("gfx950", "hip", "gfx950", 64, 256, 163_840),
    )
}
"""The targets every kernel is compiled for ahead of time: A100, H200, B200, MI300X and MI355X."""

INTERPRETED_TARGET = COMPILE_TARGETS["sm_90"]
"""The target whose launch choices the Triton interpreter follows on a CPU."""


def target_of(device: torch.device) -> Target:
    """Return the target of a device: the card's own facts for a GPU, `INTERPRETED_TARGET` otherwise."""
    if device.type != "cuda":
        return INTERPRETED_TARGET
    import torch

    return _gpu_target(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _gpu_target(index: int) -> Target:
    import torch

    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        arch = properties.gcnArchName.split(":")[0]
        known = COMPILE_TARGETS.get(arch)
        shared = known.shared_bytes if known else 65_536
        return Target(arch, "hip", arch, properties.warp_size, properties.multi_processor_count, shared)
    capability = properties.major * 10 + properties.minor
    return Target(
        f"sm_{capability}",
        "cuda",
        capability,
        properties.warp_size,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # missing from torch's stubs
    )
