"""The workflows call what exists, reach every package, and give no right to code that nobody has reviewed."""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import nox
import pytest
import yaml
from nox.project import load_toml

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / ".github" / "workflows").iterdir())
HOSTED = "ubuntu-24.04"
GPU = ["self-hosted", "linux", "gpu"]
NAMES = ["ci.yml", "gpu.yml", "perf.yml", "publish.yml", "release.yml"]


def read(name: str) -> dict[Any, Any]:
    workflow: dict[Any, Any] = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())
    return workflow


def triggers(workflow: Mapping[Any, Any]) -> dict[str, Any]:
    # YAML 1.1 reads the key `on` as true.
    found: dict[str, Any] = workflow[True]
    return found


def all_jobs() -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name in NAMES:
        for job, content in read(name)["jobs"].items():
            yield name, job, content


def all_steps() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for name, job, content in all_jobs():
        for step in content["steps"]:
            yield f"{name}: {job}", content, step


def called_sessions(job: Mapping[str, Any], step: Mapping[str, Any]) -> list[str]:
    """Return what a step gives to `nox -s`, with variables replaced by the values of the matrix."""
    called = []
    for command in re.findall(r"-m nox ([^\n|>]*)", step.get("run", "")):
        words = shlex.split(re.sub(r" -- .*|\d$|\)$", "", command))
        for word in words[words.index("-s") + 1 :]:
            if word.startswith("-"):
                break
            if word.startswith("$"):
                key = re.fullmatch(r"\$\{\{ matrix\.(\w+) \}\}", step["env"][word[1:]])
                assert key is not None
                called += job["strategy"]["matrix"][key[1]]
            else:
                called.append(word)
    return called


def test_these_are_the_workflows() -> None:
    assert [file.name for file in FILES] == NAMES


def test_sessions_that_workflows_call_exist(noxfile: ModuleType) -> None:
    called = {session for _, job, step in all_steps() for session in called_sessions(job, step)}
    assert {"tests($SUITE)", "release_check", "perf", "perf_gate", "perf_publish"} <= called
    known = nox.registry.get()
    assert sorted(session for session in called if session.partition("(")[0] not in known) == []


def test_ci_runs_what_nox_runs_by_default_the_demo_and_the_sites(noxfile: ModuleType) -> None:
    sessions = [
        session
        for job in read("ci.yml")["jobs"].values()
        if "schedule" not in job.get("if", "") or "!= 'schedule'" in job["if"]
        for step in job["steps"]
        for session in called_sessions(job, step)
    ]
    assert {session.partition("(")[0] for session in sessions} == {*nox.options.sessions, "demo", "site"}
    assert len(sessions) == len({*sessions})


def test_the_newest_triton_and_numpy_are_tried_on_a_schedule_and_the_summary_shows_what_breaks(tmp_path: Path) -> None:
    ci = read("ci.yml")
    assert "schedule" in triggers(ci)
    job = ci["jobs"]["compat"]
    assert runs(job, {"event_name": "schedule"})
    assert not runs(job, {"event_name": "pull_request"})
    *_, session, summary = job["steps"]
    assert session["run"].startswith("python -m nox -s compat ")
    log = [
        "using triton 3.9.0",
        "  tk-one, case, sm_90: registers",
        "passed",
        "FAILED a.py::b",
        "nox > * compat: failed",
    ]
    (tmp_path / "compat.log").write_text("\n".join([*log, "nox > pytest"]))
    environment = {**os.environ, "GITHUB_STEP_SUMMARY": str(tmp_path / "summary")}
    command = ["bash", "-eo", "pipefail", "-c", summary["run"]]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    shown = [line for line in log if line != "passed"]
    assert (tmp_path / "summary").read_text() == "".join(f"    {line}\n" for line in shown)


def test_every_suite_is_tested_on_every_python(noxfile: ModuleType, tmp_path: Path) -> None:
    jobs = read("ci.yml")["jobs"]
    matrix = jobs["tests"]["strategy"]["matrix"]
    assert matrix["suite"] == "${{ fromJSON(needs.suites.outputs.suites) }}"
    assert jobs["suites"]["outputs"] == {"suites": "${{ steps.list.outputs.suites }}"}
    (step,) = (step for step in jobs["suites"]["steps"] if step.get("id") == "list")
    output = tmp_path / "output"
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "GITHUB_OUTPUT": str(output)}
    subprocess.run(["bash", "-eo", "pipefail", "-c", step["run"]], cwd=ROOT, env=environment, check=True)
    key, _, value = output.read_text().partition("=")
    assert key == "suites"
    packages = sorted(file.parent.name for file in ROOT.glob("packages/*/pyproject.toml"))
    assert sorted(json.loads(value)) == sorted(["repository", "tk-kernel-core", "tk-testkit", *packages])

    step = jobs["tests"]["steps"][-1]
    assert step["run"] == 'python -m nox -s "tests($SUITE)"'
    assert step["env"] == {"SUITE": "${{ matrix.suite }}"}
    classifiers = load_toml(ROOT / "shared" / "tk-kernel-core" / "pyproject.toml")["project"]["classifiers"]
    prefix = "Programming Language :: Python :: 3."
    assert matrix["python"] == [f"3.{name.removeprefix(prefix)}" for name in classifiers if name.startswith(prefix)]


def test_one_check_stands_for_all_that_a_change_must_pass() -> None:
    jobs = read("ci.yml")["jobs"]
    needed = {name for name, job in jobs.items() if runs(job, {"event_name": "pull_request"})}
    assert {*jobs["passed"]["needs"]} == needed - {"passed"}
    (step,) = jobs["passed"]["steps"]
    assert f'test "$RESULTS" = "{" ".join(["success"] * len(jobs["passed"]["needs"]))}"' in step["run"]


def test_the_gpu_machine_runs_the_documented_commands() -> None:
    commands = [step["run"] for step in read("gpu.yml")["jobs"]["gpu"]["steps"] if "run" in step]
    assert commands == ["python3 run_from_source.py tests", "python3 run_from_source.py bench --json > bench.json"]
    readme = (ROOT / "README.md").read_text()
    assert "\npython3 run_from_source.py tests\npython3 run_from_source.py bench\n" in readme


def runs(job: Mapping[str, Any], github: Mapping[str, Any], inputs: Mapping[str, Any] | None = None) -> bool:
    """Evaluate a job's condition for an event; what the event lacks is empty, as it is there."""
    contexts = {"github": github, "inputs": inputs or {}}

    def value(path: str) -> Any:
        found: Any = contexts
        for key in path.split("."):
            found = found.get(key, {})
        return found or ""

    text = job.get("if", "True").replace("&&", " and ").replace("||", " or ").replace("always()", "True")
    text = re.sub(r"!(?!=)", " not ", text)
    text = re.sub(r"\b(?:github|inputs)(?:\.\w+)+", lambda match: f"value({match[0]!r})", text)
    return bool(eval(text, {"value": value}))


def pull_request(repository: str, label: str = "") -> dict[str, Any]:
    head = {"repo": {"full_name": repository}}
    event = {"label": {"name": label}, "pull_request": {"head": head}}
    return {
        "event_name": "pull_request",
        "repository": "tk/kernels",
        "ref": "refs/pull/1/merge",
        "event": event,
    }


MAIN = {"repository": "tk/kernels", "ref": "refs/heads/main"}


@pytest.mark.parametrize(
    ("github", "inputs", "expected"),
    [
        (pull_request("stranger/kernels", "gpu"), {}, set()),
        (pull_request("stranger/kernels", "perf"), {}, set()),
        (pull_request("stranger/kernels"), {}, set()),
        (pull_request("tk/kernels"), {}, set()),
        (pull_request("tk/kernels", "bug"), {}, set()),
        (pull_request("tk/kernels", "gpu"), {}, {"gpu"}),
        (pull_request("tk/kernels", "perf"), {}, {"gate"}),
        ({**MAIN, "event_name": "push"}, {}, {"gpu", "history-timed"}),
        ({**MAIN, "event_name": "schedule"}, {}, {"gpu"}),
        ({**MAIN, "event_name": "workflow_dispatch"}, {}, {"gpu", "history-timed"}),
        ({**MAIN, "event_name": "workflow_dispatch"}, {"base": "5fcfc22"}, {"gpu", "gate"}),
        ({**MAIN, "ref": "refs/heads/x", "event_name": "workflow_dispatch"}, {}, {"gpu"}),
    ],
)
def test_events_reach_these_jobs_on_the_gpu_machine(
    github: dict[str, Any], inputs: dict[str, Any], expected: set[str]
) -> None:
    reached = {
        job
        for name, job, content in all_jobs()
        if content["runs-on"] != HOSTED and github["event_name"] in triggers(read(name))
        if runs(content, github, inputs)
    }
    assert reached == expected


def test_the_gate_refuses_a_commit_that_is_on_no_branch_of_the_repository(tmp_path: Path) -> None:
    def run(*command: str) -> int:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode

    (script,) = (step["run"] for step in read("perf.yml")["jobs"]["gate"]["steps"] if "fork" in step.get("name", ""))
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    assert run("git", "init", "-q") == 0
    assert run("git", *identity, "commit", "-q", "--allow-empty", "-m", "a stranger's") == 0
    assert run("bash", "-eo", "pipefail", "-c", script) == 1
    assert run("git", "update-ref", "refs/remotes/origin/main", "HEAD") == 0
    assert run("bash", "-eo", "pipefail", "-c", script) == 0


def test_history_is_recorded_of_main_alone_with_and_without_a_gpu() -> None:
    jobs = read("perf.yml")["jobs"]
    assert jobs["history-compiled"]["if"] == jobs["history-timed"]["if"]
    assert [jobs["validate"]["needs"], jobs["record"]["needs"]] == [["history-compiled", "history-timed"], "validate"]


def test_jobs_run_on_hosted_machines_or_in_the_gpu_environment() -> None:
    for name, job, content in all_jobs():
        if content["runs-on"] != HOSTED:
            assert content["runs-on"] == GPU, f"{name}: {job}"
            assert content["environment"] == "gpu", f"{name}: {job}"
            assert content["permissions"] == {"contents": "read"}, f"{name}: {job}"
            assert triggers(read(name))["pull_request"] == {"types": ["labeled"]}
    labels = yaml.safe_load((ROOT / ".github" / "actionlint.yaml").read_text())["self-hosted-runner"]["labels"]
    assert labels == GPU[2:]


@pytest.mark.parametrize("name", NAMES)
def test_workflow_starts_without_rights_in_a_concurrency_group_and_not_by_a_privileged_event(name: str) -> None:
    workflow = read(name)
    assert workflow["permissions"] == {}
    assert workflow["concurrency"]["group"]
    assert workflow["defaults"] == {"run": {"shell": "bash"}}
    assert not {"pull_request_target", "workflow_run", "issue_comment"} & triggers(workflow).keys()
    assert "secrets." not in (ROOT / ".github" / "workflows" / name).read_text()


def test_jobs_have_a_time_limit_and_only_these_may_write() -> None:
    writers = {}
    for name, job, content in all_jobs():
        assert 0 < content["timeout-minutes"] <= 120, f"{name}: {job}"
        rights = {right for right, level in content["permissions"].items() if level != "read"}
        if rights:
            writers[name, job] = rights
    assert writers == {
        ("perf.yml", "comment"): {"pull-requests"},
        ("perf.yml", "record"): {"contents", "pull-requests"},
        ("publish.yml", "deploy"): {"pages", "id-token"},
        ("release.yml", "publish"): {"id-token"},
        ("release.yml", "announce"): {"contents"},
    }
    for name, job in writers:
        steps = read(name)["jobs"][job]["steps"]
        programs = {line.split()[0] for step in steps for line in step.get("run", "").splitlines()}
        assert programs <= {"git", "gh"}, f"{name}: {job}"


def test_actions_are_pinned_to_one_commit_each_with_its_version() -> None:
    pins: dict[str, set[str]] = {}
    for file in FILES:
        for line in file.read_text().splitlines():
            if "uses:" in line:
                found = re.fullmatch(r"\s+(?:- )?uses: ([\w.-]+/[\w.-]+)@([0-9a-f]{40} # v\d+\.\d+\.\d+)", line)
                assert found is not None, f"{file.name}: {line}"
                pins.setdefault(found[1], set()).add(found[2])
    assert [action for action, pinned in pins.items() if len(pinned) != 1] == []


def test_no_checkout_leaves_its_token_behind() -> None:
    checkouts = [
        (where, step) for where, _, step in all_steps() if step.get("uses", "").startswith("actions/checkout@")
    ]
    assert checkouts
    assert [where for where, step in checkouts if step.get("with", {}).get("persist-credentials") is not False] == []


def test_expressions_reach_scripts_only_as_variables_and_every_variable_is_used() -> None:
    for where, _, step in all_steps():
        assert "${{" not in step.get("run", ""), where
        used = step.get("run", "")
        unused = [name for name in step.get("env", {}) if not (f"${name}" in used or f"${{{name}" in used)]
        assert {*unused} <= {"GH_TOKEN", "GH_REPO"}, where


def test_the_gate_writes_its_report_where_the_workflow_looks_for_it() -> None:
    gate = (ROOT / ".github" / "workflows" / "perf.yml").read_text()
    assert {*re.findall(r"report/[\w.*-]+", gate)} == {"report/perf-gate.md", "report/perf-gate.*"}
    assert "perf-gate.md" in (ROOT / "perf" / "sessions.py").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_artifacts_are_read_by_the_names_they_were_written_under(name: str) -> None:
    steps = [step for job in read(name)["jobs"].values() for step in job["steps"]]
    written = [step["with"]["name"] for step in steps if "/upload-artifact@" in step.get("uses", "")]
    downloads = [step["with"] for step in steps if "/download-artifact@" in step.get("uses", "")]
    found = [fnmatch.filter(written, options.get("name") or options["pattern"]) for options in downloads]
    assert all(found)
    unread = {*written}.difference(*found)
    assert unread == {"ci.yml": {"demo-report"}, "gpu.yml": {"bench"}}.get(name, set())


def test_the_published_site_is_what_sphinx_and_asv_build() -> None:
    (script,) = (
        step["run"] for step in read("publish.yml")["jobs"]["build"]["steps"] if "cp -r" in step.get("run", "")
    )
    html = json.loads((ROOT / "asv.conf.json").read_text())["html_dir"]
    assert script.splitlines() == ["cp -r docs/_build/html site", f"cp -r {html} site/perf"]
    assert '"docs/_build/html"' in (ROOT / "noxfile.py").read_text()


def published() -> dict[str, str]:
    """Return the versions of the distributions that are published."""
    folders = [ROOT / "shared" / "tk-kernel-core", *(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))]
    return {folder.name: load_toml(folder / "pyproject.toml")["project"]["version"] for folder in folders}


def test_a_pushed_tag_is_checked_and_names_its_distribution(tmp_path: Path) -> None:
    steps = read("release.yml")["jobs"]["build"]["steps"]
    assert triggers(read("release.yml")) == {"push": {"tags": ["tk-*-v*"]}}
    position = [step.get("run") for step in steps].index('python -m nox -s release_check -- "$GITHUB_REF_NAME"')
    assert steps[position + 1]["id"] == "tag"
    for distribution, version in published().items():
        output = tmp_path / distribution
        environment = {**os.environ, "GITHUB_REF_NAME": f"{distribution}-v{version}", "GITHUB_OUTPUT": str(output)}
        subprocess.run(["bash", "-eo", "pipefail", "-c", steps[position + 1]["run"]], env=environment, check=True)
        assert output.read_text() == f"distribution={distribution}\n"


def test_what_is_published_is_what_the_check_leaves() -> None:
    jobs = read("release.yml")["jobs"]
    (upload,) = (step["with"] for step in jobs["build"]["steps"] if "/upload-artifact@" in step.get("uses", ""))
    # The artifact begins where these two part.
    assert upload["path"].split() == ["report/release/dist/", "report/release/notes.md"]
    assert 'ROOT / "report" / "release"' in (ROOT / "noxfile.py").read_text()
    assert jobs["publish"]["steps"][-1]["with"]["packages-dir"] == "release/dist/"
    assert "release/dist/* " in jobs["announce"]["steps"][-1]["run"]
    assert "--notes-file release/notes.md" in jobs["announce"]["steps"][-1]["run"]


def test_each_distribution_is_published_in_an_environment_of_its_own_and_announced_last() -> None:
    jobs = read("release.yml")["jobs"]
    assert jobs["build"]["outputs"] == {"distribution": "${{ steps.tag.outputs.distribution }}"}
    assert jobs["publish"]["environment"] == "release-${{ needs.build.outputs.distribution }}"
    assert [jobs[name].get("needs") for name in ("build", "publish", "announce")] == [None, "build", "publish"]


@pytest.mark.parametrize("form", ["bug.yml", "perf-regression.yml"])
def test_reports_come_with_the_versions_and_the_card(form: str) -> None:
    fields = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / form).read_text())["body"]
    (asked,) = (field for field in fields if "pip list" in field["attributes"].get("description", ""))
    assert asked["validations"] == {"required": True}
    assert "`tk-kernels device`" in asked["attributes"]["description"]
    shown = "torch 2.13.0\ntk-rmsnorm 0.1.0\ntriton 3.6.0\nnumpy 2.3.5\ntqdm 4.70.1\n"
    command = re.search(r"grep [^`]*", asked["attributes"]["description"])
    assert command is not None
    found = subprocess.run(["bash", "-c", command[0]], input=shown, capture_output=True, text=True, check=True).stdout
    assert found == shown.removesuffix("tqdm 4.70.1\n")
