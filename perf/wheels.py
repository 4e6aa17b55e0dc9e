"""Build, install and remove this repository's wheels of one commit, in an environment of asv.

    python wheels.py build SOURCE FOLDER      # wheels of all distributions under SOURCE
    python wheels.py install FOLDER           # them, and what the benchmarks need beside torch and Triton
    python wheels.py uninstall

The set of distributions differs from commit to commit, which asv's own commands cannot say. Their dependencies
are not followed: versions must not move between commits, and a machine may reach no registry.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
PIP = (sys.executable, "-m", "pip")


def build(source: Path, folder: Path) -> None:
    """Build wheels of the core and of all kernel packages."""
    projects = [source / "shared" / "tk-kernel-core", *sorted(file.parent for file in source.glob("packages/*/*.toml"))]
    require("hatchling")
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), *map(str, projects))


def install(folder: Path) -> None:
    """Install all wheels of a folder."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    if not wheels:
        raise FileNotFoundError(f"{folder} holds no wheels")
    require("asv_runner", "pydantic")
    pip("install", "--no-deps", "--force-reinstall", "--no-index", *wheels)


def uninstall() -> None:
    """Remove this repository's distributions, as far as they are there."""
    names = [name for name in (found.metadata["Name"] for found in distributions()) if name.startswith("tk-")]
    if names:
        pip("uninstall", "--yes", *names)


def require(*names: str) -> None:
    """Install third-party distributions at the tested versions; needs no registry where they are there already."""
    pip("install", *names, "--constraint", str(CONSTRAINTS))


def pip(*arguments: str) -> None:
    """Run pip of this environment."""
    subprocess.run([*PIP, arguments[0], "--quiet", *arguments[1:]], check=True)


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    if command == "build":
        build(*map(Path, paths))
    elif command == "install":
        install(*map(Path, paths))
    else:
        uninstall()
