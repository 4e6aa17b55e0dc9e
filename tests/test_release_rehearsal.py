"""A rehearsal of releases: pip resolves what was built from this tree against a local folder of wheels.

All packages are released once; then the core moves by a patch, tk-rmsnorm by a minor version that needs this patch,
and later the core by a minor version that no kernel package knows of.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

import pytest
from nox.project import load_toml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "release"))
check = importlib.import_module("check")

CORE = "tk-kernel-core"
FOLDERS = {folder.name: folder for folder in (ROOT / "shared" / CORE, *sorted(ROOT.glob("packages/tk-*")))}
RANGE = check.core_range(load_toml(FOLDERS["tk-rmsnorm"] / "pyproject.toml")["project"])
FLOOR = check.floor_of(RANGE)
FIRST = str(FLOOR) if FLOOR.micro else f"{FLOOR.major}.{FLOOR.minor}.0"
PATCH = f"{FLOOR.major}.{FLOOR.minor}.{FLOOR.micro + 1}"
NEXT = f"{FLOOR.major}.{FLOOR.minor + 1}.0"
OLD, NEW = "90.1.0", "90.2.0"
"""Versions of kernel packages, which have nothing to do with that of the core."""

BUILD = (sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
# Neither an index nor the machine's own configuration takes part.
ENVIRONMENT |= {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def build(name: str, version: str, folder: Path, scratch: Path, needs: str = "") -> None:
    """Build a wheel of a distribution as it is in the tree, but of another version and, if given, range of the core."""
    copy = scratch / f"{name}-{version}"
    shutil.copytree(FOLDERS[name], copy, ignore=shutil.ignore_patterns("tests", "benchmarks", "__pycache__"))
    project = copy / "pyproject.toml"
    text, replaced = re.subn(r'^version = ".*"$', f'version = "{version}"', project.read_text(), flags=re.MULTILINE)
    assert replaced == 1
    if needs:
        text, replaced = re.subn(rf'"{CORE}[^"\[]*",', f'"{CORE}{needs}",', text)
        assert replaced == 1
    project.write_text(text)
    subprocess.run([*BUILD, str(folder)], cwd=copy, check=True, capture_output=True)


def write_stub(requirement: Requirement, folder: Path) -> None:
    """Write an empty wheel that meets a requirement, so that nothing has to be downloaded."""
    name = requirement.name.replace("-", "_")
    version = next(specifier.version for specifier in requirement.specifier if specifier.operator == ">=")
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of wheels: `first`, and what comes after it: `rmsnorm`, `patch` and `next` of the core."""
    scratch = tmp_path_factory.mktemp("sources")
    folders = {name: tmp_path_factory.mktemp(name) for name in ("first", "rmsnorm", "patch", "next")}
    for file in (folder / "pyproject.toml" for folder in FOLDERS.values()):
        for requirement in map(Requirement, load_toml(file)["project"]["dependencies"]):
            if requirement.name != CORE:
                write_stub(requirement, folders["first"])
    for name in FOLDERS:
        build(name, FIRST if name == CORE else OLD, folders["first"], scratch)
    build("tk-rmsnorm", NEW, folders["rmsnorm"], scratch, needs=f">={PATCH},<{NEXT}")
    build(CORE, PATCH, folders["patch"], scratch)
    build(CORE, NEXT, folders["next"], scratch)
    return folders


@dataclass(frozen=True)
class User:
    """An environment, and what of the wheels its user's pip sees.

    Attributes:
        folder: A virtual environment.
        wheels: Folders of wheels.
    """

    folder: Path
    wheels: dict[str, Path]

    @property
    def packages(self) -> Path:
        """Where pip installs."""
        (packages,) = self.folder.glob("lib/python*/site-packages")
        return packages

    def install(self, *requirements: str, sees: tuple[str, ...]) -> str:
        """Run `pip install --upgrade`; returns what it says where it refuses, nothing where it does not."""
        links = [f"--find-links={self.wheels[name]}" for name in ("first", *sees)]
        pip = [sys.executable, "-m", "pip", "--python", str(self.folder / "bin" / "python")]
        command = [*pip, "install", "--quiet", "--no-compile", "--upgrade", *links, *requirements]
        done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
        return done.stderr if done.returncode else ""

    def installed(self) -> dict[str, str]:
        """Return the versions of this project's distributions."""
        found = distributions(path=[str(self.packages)])
        return {one.metadata["Name"]: one.version for one in found if one.metadata["Name"].startswith("tk-")}

    def run(self, *command: str) -> str:
        """Run Python with this environment in front of that which runs the tests, which has the real torch."""
        environment = {**ENVIRONMENT, "PYTHONPATH": str(self.packages)}
        return subprocess.run(
            [sys.executable, *command], env=environment, cwd=self.folder, check=True, capture_output=True, text=True
        ).stdout


@pytest.fixture
def user(tmp_path: Path, wheels: dict[str, Path]) -> User:
    venv.create(tmp_path / "user", symlinks=True)
    return User(tmp_path / "user", wheels)


def test_a_new_release_stands_beside_an_old_one_on_the_patched_core(user: User) -> None:
    assert user.install(f"tk-swiglu=={OLD}", "tk-rmsnorm", sees=("rmsnorm", "patch")) == ""
    assert user.installed() == {CORE: PATCH, "tk-rmsnorm": NEW, "tk-swiglu": OLD}
    probe = "import tk_rmsnorm, tk_swiglu; print(tk_rmsnorm.__version__, tk_swiglu.__version__, tk_rmsnorm.__file__)"
    assert user.run("-c", probe).split() == [NEW, OLD, str(user.packages / "tk_rmsnorm" / "__init__.py")]
    assert {"tk-rmsnorm", "tk-swiglu"} <= {*user.run("-m", "tk_kernel_core", "list").split()}


def test_an_upgrade_moves_the_core_only_as_far_as_it_must_and_no_other_kernel(user: User) -> None:
    assert user.install("tk-swiglu", "tk-rmsnorm", sees=()) == ""
    assert user.installed() == {CORE: FIRST, "tk-rmsnorm": OLD, "tk-swiglu": OLD}
    assert user.install("tk-swiglu", sees=("patch", "next")) == ""
    assert user.installed() == {CORE: FIRST, "tk-rmsnorm": OLD, "tk-swiglu": OLD}
    assert user.install("tk-rmsnorm", sees=("rmsnorm", "patch", "next")) == ""
    assert user.installed() == {CORE: PATCH, "tk-rmsnorm": NEW, "tk-swiglu": OLD}


def test_a_kernel_that_needs_a_core_which_is_not_released_is_refused(user: User) -> None:
    assert user.install("tk-swiglu", sees=()) == ""
    refused = user.install(f"tk-rmsnorm=={NEW}", sees=("rmsnorm", "next"))
    assert f"No matching distribution found for {CORE}<{NEXT},>={PATCH}" in refused
    assert user.installed() == {CORE: FIRST, "tk-swiglu": OLD}
    # Who does not insist on the new release is served with the old one.
    assert user.install("tk-rmsnorm", sees=("rmsnorm", "next")) == ""
    assert user.installed() == {CORE: FIRST, "tk-rmsnorm": OLD, "tk-swiglu": OLD}


def test_a_core_of_the_next_minor_release_is_refused_where_a_kernel_does_not_know_it(user: User) -> None:
    refused = user.install("tk-swiglu", f"{CORE}=={NEXT}", sees=("patch", "next"))
    assert "conflicting dependencies" in refused
    assert user.installed() == {}
    assert user.install("tk-swiglu", sees=("patch", "next")) == ""
    assert user.installed() == {CORE: PATCH, "tk-swiglu": OLD}
