"""Every case on the GPU of this machine, by the core's timer: its latency, and what the host spends on a call."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from . import CASES, series

# asv's test calls nothing different with fewer than seven samples on each side.
SAMPLES = 8
Found = dict[str, Any]


class Kernels:
    """Every case of every package; lower is better."""

    params = (CASES,)
    param_names = ("case",)
    timeout = 1800

    def setup_cache(self) -> Found:
        """Time everything in one process: figures by case, or why there are none."""
        import torch

        from tk_kernel_core.bench import bench_kernel
        from tk_kernel_core.device import current_device
        from tk_kernel_core.spec import installed_specs

        found: Found = {}
        if not torch.cuda.is_available():
            return found
        card = current_device()
        for package, spec in installed_specs().items():
            for result in bench_kernel(spec, spec.cases.values(), "cuda", card, baselines=()):
                name = f"{package} {result.case}"
                if result.timing is None or result.placement.roof_us is None:
                    found[name] = result.error or f"the roof of {card.name} is not known"
                    continue
                found[name] = {
                    "samples_us": medians([sample for part in result.timing.rounds for sample in part.samples_us]),
                    "gap": result.timing.latency_us / result.placement.roof_us,
                    "host_us": result.timing.host_us,
                }
        return found

    def setup(self, found: Found, case: str) -> None:
        """Leave out what this machine or this commit does not have."""
        if not found:
            raise NotImplementedError("needs a GPU")
        if case not in found:
            raise NotImplementedError(f"this commit has no case {case}")

    @series("us")
    def track_latency_us(self, found: Found, case: str) -> dict[str, Any]:
        """Time of one call on the GPU, in a CUDA graph."""
        return {"samples": _figures(found, case)["samples_us"], "number": 1}

    @series("roof times")
    def track_gap_to_roof(self, found: Found, case: str) -> float:
        """Time of one call over the least time that the card's peaks allow."""
        gap: float = _figures(found, case)["gap"]
        return gap

    @series("us")
    def track_host_us(self, found: Found, case: str) -> float:
        """Time that the host spends on one eager call, without waiting for the kernel."""
        host_us: float = _figures(found, case)["host_us"]
        return host_us


def medians(samples: list[float]) -> list[float]:
    """Return the medians of as many runs of neighbours as are wanted; within a process, neighbours are alike."""
    edges = [len(samples) * index // SAMPLES for index in range(SAMPLES + 1)]
    return [statistics.median(samples[a:b]) for a, b in itertools.pairwise(edges) if a < b]


def _figures(found: Found, case: str) -> dict[str, Any]:
    figures = found[case]
    if isinstance(figures, str):
        raise RuntimeError(figures)
    return dict(figures)
