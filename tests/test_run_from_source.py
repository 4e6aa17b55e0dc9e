"""run_from_source.py makes the tree look installed, and refuses clearly where it cannot run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "run_from_source.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_from_source", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def entry_points_of(distribution: Distribution) -> set[tuple[str, str, str]]:
    return {(entry.group, entry.name, entry.value) for entry in distribution.entry_points}


def test_metadata_is_that_of_the_installed_wheels(script: ModuleType, tmp_path: Path) -> None:
    projects = script.source_projects()
    assert {"tk-kernel-core", "tk-testkit", "tk-rmsnorm"} <= projects.keys()
    for folder in projects.values():
        script.write_metadata(script.load_toml(folder / "pyproject.toml")["project"], tmp_path)
    written = {distribution.name: distribution for distribution in distributions(path=[str(tmp_path)])}
    assert written.keys() == projects.keys()
    for name, distribution in written.items():
        installed = Distribution.from_name(name)
        assert distribution.version == installed.version
        assert entry_points_of(distribution) == entry_points_of(installed)
        assert distribution.metadata["Requires-Python"] == installed.metadata["Requires-Python"]
        assert len(distribution.requires or ()) == len(installed.requires or ())


def test_tests_command_names_folders_and_passes_the_rest_on(script: ModuleType) -> None:
    projects = script.source_projects()
    command = script.child_command(["tests", "tk-testkit", "--", "-k", "close"], projects)
    assert str(ROOT / "shared" / "tk-testkit" / "tests") in command
    assert not any("tk-rmsnorm" in part for part in command)
    assert command[-2:] == ["-k", "close"]
    everything = script.child_command(["tests"], projects)
    assert all(str(folder / "tests") in everything for folder in projects.values())


def test_unknown_package_is_named(script: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"no package tk-nothing in this tree; there are .*tk-rmsnorm"):
        script.child_command(["tests", "tk-nothing"], script.source_projects())


def test_missing_modules_are_found(script: ModuleType) -> None:
    assert script.missing_modules(("os", "a_module_that_nobody_has")) == ["a_module_that_nobody_has"]


def test_refuses_without_a_gpu() -> None:
    result = run_script("list", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 2
    assert "no GPU" in result.stderr
    assert "--allow-cpu" in result.stderr


def test_runs_commands_from_the_tree(tmp_path: Path) -> None:
    result = run_script("--allow-cpu", "list", "--json", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0, result.stderr
    assert '"tk-rmsnorm"' in result.stdout


def test_without_arguments_it_explains_itself() -> None:
    result = run_script()
    assert result.returncode == 2
    assert "run_from_source.py tests" in result.stdout
