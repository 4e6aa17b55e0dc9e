"""The rules that a release is held to, and the facts that they are applied to."""

from __future__ import annotations

import importlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "release"))
check = importlib.import_module("check")

TAGS = ["tk-one-v0.1.0", "tk-one-v0.10.0", "tk-one-v0.9.0", "tk-one-two-v3.0.0", "tk-one-v1.0.0rc1", "v5.0.0"]


@pytest.mark.parametrize("wanted", ["tk-one", "tk-one-v0.2.0"])
def test_a_name_and_its_tag_mean_the_same_distribution(wanted: str) -> None:
    assert check.distribution_of(wanted, {"tk-one-two": "0.2.0", "tk-one": "0.2.0"}) == "tk-one"


@pytest.mark.parametrize("wanted", ["tk-one-v0.3.0", "tk-testkit", "tk-testkit-v0.1.0", "tk-v", "tk-one-v"])
def test_any_other_tag_is_refused_and_the_message_says_what_was_wanted(wanted: str) -> None:
    with pytest.raises(check.Refused, match=rf"one of tk-one-v0\.2\.0, tk-two-v1\.0\.0; got {wanted}$"):
        check.distribution_of(wanted, {"tk-two": "1.0.0", "tk-one": "0.2.0"})


def test_versions_are_compared_as_numbers_and_with_those_of_one_distribution() -> None:
    assert check.check_version("tk-one", "0.11.0", TAGS, []) == "tk-one-v0.10.0"
    assert check.check_version("tk-one-two", "3.0.1", TAGS, []) == "tk-one-two-v3.0.0"
    assert check.check_version("tk-three", "0.1.0", TAGS, []) is None


@pytest.mark.parametrize("version", ["0.10.0", "0.9.9"])
def test_a_version_that_is_not_above_the_last_is_refused(version: str) -> None:
    with pytest.raises(check.Refused, match=rf"wanted a version above 0\.10\.0.*, got {version}"):
        check.check_version("tk-one", version, TAGS, ["tk-one-two-v3.0.0"])


def test_the_tag_of_this_commit_must_be_that_of_the_version_and_is_not_before_it() -> None:
    assert check.check_version("tk-one", "0.10.0", TAGS, ["tk-one-v0.10.0", "tk-one-two-v3.0.0"]) == "tk-one-v0.9.0"
    with pytest.raises(check.Refused, match=r"has version 0\.11\.0, but this commit is tagged tk-one-v0\.10\.0"):
        check.check_version("tk-one", "0.11.0", TAGS, ["tk-one-v0.10.0"])


CHANGELOG = """# Changelog

## [Unreleased]

- Not yet.

## [0.2.0] - 2026-12-01

### Added

- More.

## [0.1.1]

- Undated.

## [0.1.0] - 2026-11-31

- First.

## [0.0.1] - 2026-11-01

## [0.0.0] - 2026-10-01

- Nothing.
"""


def test_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    assert check.release_notes(CHANGELOG, "0.2.0") == "### Added\n\n- More.\n"


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.3.0", "has no heading `## [0.3.0] - YYYY-MM-DD`"),
        ("0.1.1", "has no heading `## [0.1.1] - YYYY-MM-DD`"),
        ("0.1.0", "dates 0.1.0 '2026-11-31', wanted YYYY-MM-DD"),
        ("0.0.1", "says nothing about 0.0.1"),
    ],
)
def test_a_changelog_that_says_nothing_on_a_day_of_the_calendar_is_refused(version: str, message: str) -> None:
    with pytest.raises(check.Refused) as refused:
        check.release_notes(CHANGELOG, version)
    assert str(refused.value) == f"CHANGELOG.md {message}"


@pytest.mark.parametrize(
    ("last", "version", "expected"),
    [
        ("0.1.0", "0.1.1", False),
        ("0.1.9", "0.2.0", True),
        ("0.9.0", "1.0.0", True),
        ("1.0.0", "1.1.0", False),
        ("1.9.0", "2.0.0", True),
    ],
)
def test_major_releases_may_break_and_below_one_minor_ones(last: str, version: str, expected: bool) -> None:
    assert check.may_break(last, version) is expected


def test_the_floor_is_the_lowest_version_of_the_core_that_is_asked_for() -> None:
    project = {"name": "tk-one", "dependencies": ["torch>=2.11", "tk_kernel_core >=0.3.1, <0.4"]}
    assert check.floor_of(check.core_range(project)) == Version("0.3.1")
    assert check.floor_of(SpecifierSet(">=0.1,<0.2,>=0.1.2")) == Version("0.1.2")


def test_a_range_of_the_core_without_a_floor_and_no_range_are_refused() -> None:
    with pytest.raises(check.Refused, match=r"wanted a lowest version of tk-kernel-core, as in .*, got <0\.4$"):
        check.floor_of(SpecifierSet("<0.4"))
    with pytest.raises(check.Refused, match="tk-one does not depend on tk-kernel-core"):
        check.core_range({"name": "tk-one", "dependencies": ["torch>=2.11"]})


OLD = """
LIMIT = 1
def kept(x, eps=1e-6): ...
def _private(x): ...
def gone(): ...
class Module:
    def forward(self, x, scale=1.0): ...
"""


@pytest.mark.parametrize(
    ("new", "broken"),
    [
        (OLD + "def added(): ...\n", []),
        (OLD.replace("x, eps=1e-6", "x, eps=1e-6, *, offset=0.0"), []),
        (OLD.replace("def _private(x): ...\n", "").replace("LIMIT = 1", "LIMIT = 2"), []),
        (OLD.replace("def gone(): ...\n", ""), ["tk_one.gone: public object was removed"]),
        (OLD.replace("x, scale=1.0", "x"), ["tk_one.Module.forward(scale): parameter was removed"]),
        (OLD.replace("eps=1e-6", "eps=1e-5"), ["tk_one.kept(eps): parameter default was changed"]),
    ],
)
def test_breaking_changes_are_those_that_callers_notice(new: str, broken: list[str], tmp_path: Path) -> None:
    for folder, text in (("old", OLD), ("new", new)):
        (tmp_path / folder / "tk_one").mkdir(parents=True)
        (tmp_path / folder / "tk_one" / "__init__.py").write_text(text)
    assert check.breaking_changes("tk_one", tmp_path / "old", tmp_path / "new") == broken


def test_a_source_distribution_holds_what_git_knows_and_nothing_else() -> None:
    tracked = ["README.md", "tests/test_a.py", "src/tk_one/__init__.py"]
    assert check.differences(tracked, [*tracked, "PKG-INFO", ".gitignore"]) == []
    assert check.differences(tracked, [tracked[0], tracked[2], "notes.txt"]) == [
        "tests/test_a.py is missing",
        "notes.txt is not in the repository",
    ]


class Repository:
    """A repository of a core and one kernel package, in which releases are made."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.git("init", "-q")
        self.folders = {"tk-kernel-core": root / "shared/tk-kernel-core", "tk-one": root / "packages/tk-one"}

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=self.root, check=True, capture_output=True)

    def commit(self, name: str, version: str, code: str, tag: bool = True, wants: str = ">=0.1,<0.2") -> None:
        """Commit a version of a distribution, as a release if it is tagged."""
        folder = self.folders[name]
        source = folder / "src" / name.replace("-", "_")
        source.mkdir(parents=True, exist_ok=True)
        (source / "__init__.py").write_text(code)
        depends = f'dependencies = ["tk-kernel-core{wants}"]' if name != "tk-kernel-core" else ""
        (folder / "pyproject.toml").write_text(f'[project]\nname = "{name}"\nversion = "{version}"\n{depends}\n')
        (folder / "CHANGELOG.md").write_text(f"## [{version}] - 2026-12-01\n\n- {version}.\n")
        self.git("add", ".")
        self.git("commit", "-q", "--allow-empty", "-m", version)
        if tag:
            self.git("tag", f"{name}-v{version}")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.setattr(check, "ROOT", tmp_path)
    return Repository(tmp_path)


def test_a_first_release_is_checked_without_an_interface_and_without_a_floor(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.commit("tk-kernel-core", "0.1.0", "def f(): ...\n", tag=False)
    repository.commit("tk-one", "0.1.0", "def g(): ...\n", tag=False)
    folder = repository.root / "out"
    plan = check.check("tk-one", folder)
    assert (plan.floor, plan.kernels) == (None, {})
    assert json.loads((folder / "plan.json").read_text())["distribution"] == "tk-one"
    assert (folder / "notes.md").read_text() == "- 0.1.0.\n"
    said = capsys.readouterr().out
    assert "the last release is none" in said
    assert "tk-kernel-core 0.1 or newer: no such tag, not tested" in said
    assert check.check("tk-kernel-core", folder).kernels == {}
    assert "tk-one: never released" in capsys.readouterr().out


def test_a_kernel_is_to_be_tested_with_the_core_of_its_floors_tag(repository: Repository) -> None:
    repository.commit("tk-kernel-core", "0.1.0", "OLD = 1\n")
    repository.commit("tk-one", "0.1.0", "def g(): ...\n")
    repository.commit("tk-kernel-core", "0.1.1", "NEW = 1\n")
    repository.commit("tk-one", "0.1.1", "def g(): ...\n", tag=False)
    folder = repository.root / "out"
    assert check.check("tk-one-v0.1.1", folder).floor == "tk-kernel-core-v0.1.0"
    core = "shared/tk-kernel-core/src/tk_kernel_core/__init__.py"
    assert (folder / "sources" / "tk-kernel-core-v0.1.0" / core).read_text() == "OLD = 1\n"


def test_released_kernels_are_to_be_tested_with_a_new_core_inside_their_range(repository: Repository) -> None:
    repository.commit("tk-kernel-core", "0.1.0", "def f(): ...\n")
    repository.commit("tk-one", "0.1.0", "def g(): ...\n")
    repository.commit("tk-one", "0.1.1", "def g(): ...\n")
    repository.commit("tk-kernel-core", "0.1.1", "def f(): ...\n", tag=False)
    folder = repository.root / "out"
    assert check.check("tk-kernel-core", folder).kernels == {"tk-one": "tk-one-v0.1.1"}
    assert (folder / "sources" / "tk-one-v0.1.1" / "packages" / "tk-one" / "pyproject.toml").is_file()
    repository.commit("tk-kernel-core", "0.2.0", "def f(): ...\n", tag=False)
    assert check.check("tk-kernel-core", folder).kernels == {}


def test_a_breaking_change_takes_a_minor_release_below_one(
    repository: Repository, capsys: pytest.CaptureFixture[str]
) -> None:
    repository.commit("tk-kernel-core", "0.1.0", "def f(): ...\n")
    repository.commit("tk-kernel-core", "0.1.1", "", tag=False)
    with pytest.raises(check.Refused, match=r"0\.1\.1 breaks code written for tk-kernel-core-v0\.1\.0"):
        check.check("tk-kernel-core", repository.root / "out")
    repository.commit("tk-kernel-core", "0.2.0", "", tag=False)
    check.check("tk-kernel-core", repository.root / "out")
    assert capsys.readouterr().out.count("breaks: tk_kernel_core.f: public object was removed") == 2


def test_contents_of_the_built_source_distribution_are_held_against_git(repository: Repository) -> None:
    repository.commit("tk-one", "0.1.0", "", tag=False)
    dist = repository.root / "dist"
    dist.mkdir()

    def pack(*names: str) -> None:
        with tarfile.open(dist / "tk_one-0.1.0.tar.gz", "w:gz") as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(f"tk_one-0.1.0/{name}"), io.BytesIO())

    files = ["CHANGELOG.md", "pyproject.toml", "src/tk_one/__init__.py"]
    pack(*files, "PKG-INFO")
    check.check_contents("tk-one", dist)
    pack(*files[1:])
    with pytest.raises(check.Refused, match=r"^tk_one-0\.1\.0\.tar\.gz: CHANGELOG\.md is missing$"):
        check.check_contents("tk-one", dist)


def test_what_is_refused_ends_the_command_with_a_reason() -> None:
    command = [sys.executable, str(ROOT / "release" / "check.py"), "plan", "tk-gone", "unused"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("not to be released: wanted a distribution or its tag")


def test_quick_tests_exist_in_every_kernel_package(noxfile: Any) -> None:
    assert [
        name for name, folder in noxfile.KERNELS.items() if not (folder / "tests" / noxfile.QUICK_TESTS).exists()
    ] == []
