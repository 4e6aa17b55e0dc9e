"""Every kernel package has the same shape, and says the same things about itself."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from importlib.metadata import distribution, files
from pathlib import Path
from typing import Any

import pytest
from nox.project import load_toml
from packaging.requirements import Requirement
from packaging.version import Version

from tk_kernel_core.spec import KernelSpec, installed_specs

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
PUBLISHED = [ROOT / "shared" / "tk-kernel-core", *PACKAGES]
PROJECTS = [*PUBLISHED, ROOT / "shared" / "tk-testkit"]

FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", "perf_budget.json")
MODULES = ("__init__.py", "_kernels.py", "_launch.py", "_modules.py", "_ops.py", "_reference.py", "_spec.py")
README_HEADINGS = ("Install", "Use", "Limits")
MAX_LINES = 420

each_package = pytest.mark.parametrize("package", PACKAGES, ids=lambda folder: folder.name)
each_published = pytest.mark.parametrize("package", PUBLISHED, ids=lambda folder: folder.name)
each_project = pytest.mark.parametrize("package", PROJECTS, ids=lambda folder: folder.name)


def module_name(package: Path) -> str:
    return package.name.replace("-", "_")


def project_table(package: Path) -> dict[str, Any]:
    table: dict[str, Any] = load_toml(package / "pyproject.toml")["project"]
    return table


@each_package
def test_tree(package: Path) -> None:
    missing = [name for name in FILES if not (package / name).is_file()]
    source = package / "src" / module_name(package)
    missing += [f"{source.name}/{name}" for name in (*MODULES, "py.typed") if not (source / name).is_file()]
    assert not missing
    assert list((package / "tests").glob("test_*.py"))
    assert list((package / "benchmarks").glob("bench_*.py"))
    assert (ROOT / "docs" / "kernels" / f"{package.name.removeprefix('tk-')}.md").is_file()


@each_package
def test_readme_says_how_to_install_and_use_and_what_the_limits_are(package: Path) -> None:
    text = (package / "README.md").read_text()
    assert text.startswith(f"# {package.name}\n")
    assert f"pip install {package.name}" in text
    assert f"import {module_name(package)}" in text or f"from {module_name(package)} import" in text
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert [wanted for wanted in README_HEADINGS if not any(wanted in heading for heading in headings)] == []


@each_project
def test_metadata(package: Path) -> None:
    project = project_table(package)
    assert project["name"] == package.name
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"])
    assert project["requires-python"] == ">=3.10"
    assert project["license"] == "MIT"
    assert project["license-files"] == ["LICENSE"]
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)} < {*project["classifiers"]}
    assert "Typing :: Typed" in project["classifiers"]
    assert "torch>=2.11" in project["dependencies"]
    assert not [requirement for requirement in project["dependencies"] if requirement.startswith("triton")]
    assert distribution(package.name).version == project["version"]


@each_package
def test_kernel_metadata(package: Path) -> None:
    project = project_table(package)
    core, torch = map(Requirement, sorted(project["dependencies"]))
    assert (core.name, str(torch)) == ("tk-kernel-core", "torch>=2.11")
    # From a release whose tag can be tested to the next that may break.
    version = Version(project_table(ROOT / "shared" / "tk-kernel-core")["version"])
    floor, end = sorted(core.specifier, key=lambda specifier: Version(specifier.version))
    assert (floor.operator, str(end)) == (">=", f"<{version.major}.{version.minor + 1}")
    assert core.specifier.contains(version)
    triton = [Requirement(text) for text in project["optional-dependencies"]["triton"]]
    assert [one.specifier for one in triton if one.name == core.name] == [core.specifier]
    assert project["entry-points"] == {"tk.kernels": {package.name: f"{module_name(package)}._spec:SPEC"}}


def test_testkit_cannot_be_uploaded() -> None:
    assert "Private :: Do Not Upload" in project_table(ROOT / "shared" / "tk-testkit")["classifiers"]
    for package in PUBLISHED:
        assert not [name for name in project_table(package)["classifiers"] if name.startswith("Private")]


@each_project
def test_wheel_is_typed_and_licensed(package: Path) -> None:
    installed = {str(file) for file in files(package.name) or ()}
    assert f"{module_name(package)}/py.typed" in installed
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in installed)
    assert (package / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@each_project
def test_changelog_has_the_current_version_with_its_date(package: Path) -> None:
    version = re.escape(project_table(package)["version"])
    text = (package / "CHANGELOG.md").read_text()
    assert re.search(rf"^## \[{version}\] - \d{{4}}-\d{{2}}-\d{{2}}$", text, re.MULTILINE)


@each_package
def test_spec_is_complete(package: Path) -> None:
    spec = installed_specs()[package.name]
    assert isinstance(spec, KernelSpec)
    assert spec.summary
    assert all(name == case.name for name, case in spec.cases.items())
    tags = {tag for case in spec.cases.values() for tag in case.tags}
    assert {"smoke", "headline"} <= tags
    assert all(case.source for case in spec.cases.values() if "smoke" not in case.tags)
    for case, bars in spec.bars.items():
        assert case in spec.cases
        assert bars.keys() <= spec.baselines.keys()
        assert all(ratio > 0 for ratio in bars.values())
    assert {name for name, case in spec.cases.items() if "headline" in case.tags} == spec.bars.keys()


IMPORT_PROBE = """
import sys, torch
import {module}
print(*sorted({{name.partition(".")[0] for name in sys.modules}} & {{"triton", "pydantic", "matplotlib", "rich"}}))
assert not torch.cuda.is_initialized()
"""


@functools.cache
def imported_with(module: str) -> set[str]:
    command = [sys.executable, "-c", IMPORT_PROBE.format(module=module)]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


@each_published
def test_import_is_light_and_touches_no_gpu(package: Path) -> None:
    # torch itself may import some of these; the package must not add to them.
    assert imported_with(module_name(package)) - imported_with("torch") == set()


@each_package
def test_public_names_are_described(package: Path) -> None:
    module = importlib.import_module(module_name(package))
    assert module.__doc__
    assert module.__version__ == project_table(package)["version"]
    names = [name for name in module.__all__ if not name.startswith("__")]
    assert names
    assert [name for name in names if not inspect.getdoc(getattr(module, name))] == []


def source_files() -> list[Path]:
    found = [*ROOT.glob("*.py"), *ROOT.glob("docs/*.py"), *ROOT.glob("tests/*.py"), *ROOT.glob("perf/**/*.py")]
    for project in PROJECTS:
        found += [*project.glob("src/**/*.py"), *project.glob("tests/**/*.py"), *project.glob("benchmarks/*.py")]
    return sorted(found)


@pytest.mark.parametrize("file", source_files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_file_is_short_enough_to_read_and_parses_on_the_oldest_python(file: Path) -> None:
    text = file.read_text()
    assert text.count("\n") <= MAX_LINES
    ast.parse(text, feature_version=(3, 10))


def test_readme_is_short_lists_every_package_and_names_sessions_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") <= 120
    for package in PACKAGES:
        assert f"(packages/{package.name}/README.md)" in text
    listing = subprocess.run(
        [sys.executable, "-m", "nox", "--list"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    sessions = set(re.findall(r"^[*-] (\w+)", listing.stdout, re.MULTILINE))
    for document in ("README.md", "CONTRIBUTING.md", "docs/releasing.md"):
        commands = re.findall(r"nox -s \"?([a-z_ ]+)", (ROOT / document).read_text())
        assert commands
        named = {name for command in commands for name in command.split()}
        assert named <= sessions, document
