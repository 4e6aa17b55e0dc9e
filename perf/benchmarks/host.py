"""What a package costs the host before its first call."""

from __future__ import annotations

import statistics
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from . import PACKAGES, series

IMPORTS = 7
# Forked after torch is imported, which takes a hundred times as long.
IMPORT = """
import os, time, torch
for _ in range({imports}):
    if os.fork() == 0:
        start = time.perf_counter()
        import {module}
        print(1e3 * (time.perf_counter() - start), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
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
        code = IMPORT.format(imports=IMPORTS, module=package.replace("-", "_"))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return statistics.median(map(float, done.stdout.split()))

    @series("KiB")
    def track_size_kib(self, package: str) -> float:
        """Size of what the wheel installs, compiled bytecode left out."""
        installed = [file for file in files(package) or () if file.suffix != ".pyc"]
        return sum(Path(file.locate()).stat().st_size for file in installed) / 1024
