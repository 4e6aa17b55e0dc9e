"""What a package costs the host before its first call."""

from __future__ import annotations

import statistics
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from . import PACKAGES, series

IMPORTS = 7
IMPORT = """
import time, torch
start = time.perf_counter()
import {module}
print(1e3 * (time.perf_counter() - start))
"""


class Packages:
    """Every package, installed from its wheel."""

    params = (PACKAGES,)
    param_names = ("package",)
    timeout = 300

    def setup(self, package: str) -> None:
        """Leave out what this commit does not have."""
        try:
            files(package)
        except PackageNotFoundError as error:
            raise NotImplementedError(f"this commit has no {package}") from error

    @series("ms")
    def track_import_ms(self, package: str) -> float:
        """Time that importing the package adds to importing torch."""
        command = [sys.executable, "-c", IMPORT.format(module=package.replace("-", "_"))]
        outputs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(IMPORTS)]
        return statistics.median(map(float, outputs))

    @series("KiB")
    def track_size_kib(self, package: str) -> float:
        """Size of what the wheel installs, compiled bytecode left out."""
        installed = [file for file in files(package) or () if file.suffix != ".pyc"]
        return sum(Path(file.locate()).stat().st_size for file in installed) / 1024
