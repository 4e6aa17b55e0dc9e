"""What compiled kernels need of each target: exact figures that take no GPU."""

from __future__ import annotations

from typing import Any

from . import CASES, TARGETS, series

Found = dict[tuple[str, str], Any]


class Resources:
    """Every case of every package, compiled ahead of time for every target."""

    params = (CASES, TARGETS)
    param_names = ("case", "target")
    timeout = 1800

    def setup_cache(self) -> Found:
        """Compile everything once: figures by case and target, or why there are none."""
        from tk_kernel_core.resources import report_resources
        from tk_kernel_core.spec import installed_specs

        found: Found = {}
        for package, spec in installed_specs().items():
            for case in spec.cases.values():
                try:
                    reports = report_resources(spec, cases=[case])
                except Exception as error:  # noqa: BLE001 - one case that does not compile must not hide the others
                    found |= {
                        (f"{package} {case.name}", target): f"{type(error).__name__}: {error}" for target in TARGETS
                    }
                    continue
                for report in reports:
                    kernels = report.kernels
                    found[f"{package} {case.name}", report.target] = {
                        "registers": max(kernel.registers for kernel in kernels),
                        "spill_bytes": sum(kernel.spill_bytes for kernel in kernels),
                        "shared_bytes": max(kernel.shared_bytes for kernel in kernels),
                        "instructions": sum(kernel.instructions_total for kernel in kernels),
                    }
        return found

    def setup(self, found: Found, case: str, target: str) -> None:
        """Leave out what this commit does not have."""
        if (case, target) not in found:
            raise NotImplementedError(f"this commit has no case {case} for {target}")

    @series("registers")
    def track_registers(self, found: Found, case: str, target: str) -> int:
        """Most registers per thread of the case's kernels."""
        return self._read(found, case, target, "registers")

    @series("bytes")
    def track_spill_bytes(self, found: Found, case: str, target: str) -> int:
        """Bytes per thread spilled and reloaded, over the case's kernels."""
        return self._read(found, case, target, "spill_bytes")

    @series("bytes")
    def track_shared_bytes(self, found: Found, case: str, target: str) -> int:
        """Most shared memory per program of the case's kernels."""
        return self._read(found, case, target, "shared_bytes")

    @series("instructions")
    def track_instructions(self, found: Found, case: str, target: str) -> int:
        """Instructions of the case's kernels."""
        return self._read(found, case, target, "instructions")

    def _read(self, found: Found, case: str, target: str, what: str) -> int:
        figures = found[case, target]
        if isinstance(figures, str):
            raise RuntimeError(figures)
        return int(figures[what])
