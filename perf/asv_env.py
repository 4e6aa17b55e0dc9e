"""An environment of asv for machines that bring torch and Triton: `asv run --environment system:3.12`.

It is a virtual environment that sees the packages of the Python that runs asv, so that only this repository's
wheels are installed and no registry is needed. asv's own `existing` environment can take neither ranges of commits
nor two in turns.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from asv import environment

SERIES = ("torch", "triton")
"""Their versions name the environment: another release begins another series of results."""


class SystemPackages(environment.Environment):  # type: ignore[misc]  # asv has no annotations
    """A virtual environment of the running Python that sees its packages."""

    tool_name = "system"

    def __init__(self, conf: Any, python: str, requirements: dict[str, str], tagged_env_vars: Any) -> None:
        if not self.matches(python):
            raise environment.EnvironmentUnavailable(
                f"the environment `system` is that of the running Python {_running()}, got {python}"
            )
        try:
            installed = {name: version(name) for name in SERIES}
        except PackageNotFoundError as error:
            raise environment.EnvironmentUnavailable(
                f"the environment `system` needs torch and Triton in the running Python, which lacks {error.name}"
            ) from error
        # asv asks for the name before it keeps them itself.
        self._python, self._requirements = python, installed
        super().__init__(conf, python, installed, tagged_env_vars)

    @classmethod
    def matches(cls, python: str) -> bool:
        """Whether this is the version of the running Python."""
        return bool(python == _running())

    @property
    def name(self) -> str:
        """Name of the environment and of its series of results."""
        name: str = environment.get_env_name(self.tool_name, self._python, self._requirements, self._tagged_env_vars)
        return name

    def _setup(self) -> None:
        subprocess.run([sys.executable, "-m", "venv", self._path], check=True)
        # --system-site-packages would pass over those of a virtual environment, which the running Python may be.
        seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        packages = Path(self._path) / "lib" / f"python{_running()}" / "site-packages"
        (packages / "running_python.pth").write_text("\n".join(seen) + "\n")

    def run(self, args: list[str], **kwargs: Any) -> str:
        """Run the environment's Python."""
        output: str = self.run_executable("python", args, **kwargs)
        return output


def _running() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
