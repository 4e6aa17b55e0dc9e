"""The rules by which `nox -s tests -- --since REV` chooses test suites."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from nox.command import CommandFailed

ROOT = Path(__file__).resolve().parents[1]
KERNELS = ("tk-one", "tk-two")
EVERYTHING = {"tk-kernel-core", "tk-testkit", "repository", *KERNELS}


@pytest.mark.parametrize(
    ("paths", "suites"),
    [
        ([], {"repository"}),
        (["packages/tk-one/src/tk_one/_ops.py"], {"tk-one", "repository"}),
        (["packages/tk-one/README.md", "packages/tk-two/tests/test_x.py"], {"tk-one", "tk-two", "repository"}),
        (["docs/kernels/one.md", "README.md", "tests/test_conformance.py"], {"repository"}),
        ([".github/workflows/ci.yml", "perf/benchmarks/gpu.py", "release/check.py"], {"repository"}),
        (["shared/tk-testkit/src/tk_testkit/close.py"], EVERYTHING),
        (["shared/tk-kernel-core/README.md"], EVERYTHING),
        (["noxfile.py"], EVERYTHING),
        (["constraints.txt"], EVERYTHING),
        (["pyproject.toml"], EVERYTHING),
        ([".ci/run"], EVERYTHING),
        (["README.md", "packages/tk-two/pyproject.toml", "LICENSE"], EVERYTHING),
    ],
)
def test_known_paths_choose_suites(noxfile: ModuleType, paths: list[str], suites: set[str]) -> None:
    assert noxfile.affected(paths, KERNELS) == (suites, [])


@pytest.mark.parametrize("path", ["packages/tk-gone/src/tk_gone/_ops.py", "packages/notes.txt", "elsewhere/a.md"])
def test_unknown_paths_choose_everything_and_are_named(noxfile: ModuleType, path: str) -> None:
    assert noxfile.affected(["docs/index.md", path], KERNELS) == (EVERYTHING, [path])


class RecordingSession:
    """Answers git commands, and keeps warnings."""

    def __init__(self, posargs: list[str], diff: str = "", files: str = "") -> None:
        self.posargs = posargs
        self.answers = {"diff": diff, "ls-files": files}
        self.commands: list[tuple[str, ...]] = []
        self.warnings: list[str] = []

    def run(self, *command: str, **_: Any) -> str:
        self.commands.append(command)
        return self.answers[command[1]]

    def warn(self, message: str) -> None:
        self.warnings.append(message)

    def error(self, message: str) -> None:
        raise RuntimeError(message)


def test_without_since_every_suite_runs_and_git_is_not_asked(noxfile: ModuleType) -> None:
    session = RecordingSession(["-k", "x"])
    suites, arguments = noxfile.selection(session)
    assert suites == {*noxfile.PROJECTS, "repository"}
    assert arguments == ["-k", "x"]
    assert session.commands == []


def test_since_reads_committed_and_uncommitted_changes_and_leaves_other_arguments(noxfile: ModuleType) -> None:
    session = RecordingSession(["-x", "--since", "main", "-k", "y"], "docs/index.md\n", "noxfile.py\n")
    suites, arguments = noxfile.selection(session)
    assert suites == {*noxfile.PROJECTS, "repository"}
    assert arguments == ["-x", "-k", "y"]
    assert session.posargs == ["-x", "--since", "main", "-k", "y"]


def test_since_sees_what_is_staged_and_both_ends_of_a_move(noxfile: ModuleType, tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
        return subprocess.run(
            ["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        ).stdout

    class GitSession(RecordingSession):
        def run(self, *command: str, **_: object) -> str:
            return git(*command[1:])

    source = tmp_path / "packages" / "tk-rmsnorm" / "module.py"
    source.parent.mkdir(parents=True)
    source.write_text("x = 1\n" * 20)
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    assert noxfile.selection(GitSession(["--since", "HEAD"]))[0] == {"repository"}
    (tmp_path / "docs").mkdir()
    git("mv", str(source), "docs/moved.py")
    assert noxfile.selection(GitSession(["--since", "HEAD"]))[0] == {"repository", "tk-rmsnorm"}
    git("commit", "-q", "-m", "second")
    assert noxfile.selection(GitSession(["--since", "HEAD~1"]))[0] == {"repository", "tk-rmsnorm"}
    assert noxfile.selection(GitSession(["--since", "HEAD"]))[0] == {"repository"}


def test_since_names_files_that_no_rule_knows(noxfile: ModuleType) -> None:
    session = RecordingSession(["--since", "main"], "somewhere/else.py\n")
    noxfile.selection(session)
    assert len(session.warnings) == 1
    assert "somewhere/else.py" in session.warnings[0]


def test_since_without_a_revision_is_an_error(noxfile: ModuleType) -> None:
    with pytest.raises(RuntimeError, match="needs a revision"):
        noxfile.selection(RecordingSession(["--since"]))


def test_tested_triton_is_left_out_by_exactly_one_line(noxfile: ModuleType, tmp_path: Path) -> None:
    session = RecordingSession([])
    session.create_tmp = lambda: str(tmp_path)  # type: ignore[attr-defined]
    kept = noxfile.constraints_without_triton(session).read_text().splitlines()
    everything = (ROOT / "constraints.txt").read_text().splitlines()
    removed = [line for line in everything if line not in kept]
    assert len(removed) == 1
    assert removed[0].startswith("triton==")
    assert any(line.startswith("torch==") for line in kept)


@pytest.mark.parametrize("failing", [(), ("not compiler",), ("compiler",), ("not compiler", "compiler")])
def test_both_runs_of_a_suite_take_place_and_either_may_fail_it(noxfile: ModuleType, failing: tuple[str, ...]) -> None:
    class PytestSession(RecordingSession):
        def run(self, *command: str, **_: Any) -> str:
            if command[0] == "python":
                return "False"
            self.commands.append(command)
            if command[command.index("-m") + 1] in failing:
                raise CommandFailed
            return ""

    session = PytestSession([])
    if failing:
        with pytest.raises(RuntimeError, match="tests of tk-rmsnorm failed"):
            noxfile.run_suite(session, "tk-rmsnorm", Path("tests"))
    else:
        noxfile.run_suite(session, "tk-rmsnorm", Path("tests"))
    assert [command[command.index("-m") + 1] for command in session.commands] == ["not compiler", "compiler"]


def test_site_without_a_browser_fails_and_says_what_to_install(
    noxfile: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noxfile.shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"none of chromium, .*; on Debian, `apt-get install chromium` brings one"):
        noxfile.site(RecordingSession([]))
