"""The sessions of noxfile.py that record and judge performance."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
ASV = ("python", "-m", "asv")
# Exit codes of perf/gate.py.
VERDICTS = [0, 10, 20, 30]


def install_asv(session: nox.Session) -> None:
    """Install asv, in sight of the packages of the Python that runs nox: a GPU machine brings its own torch."""
    # --system-site-packages would pass over those of a virtual environment.
    seen = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    for packages in Path(session.virtualenv.location).glob("lib/python*/site-packages"):
        (packages / "running_python.pth").write_text("\n".join(seen) + "\n")
    # The last two are for what asks the core about the GPU.
    session.install("asv", "asv_runner", "virtualenv", "pydantic", "rich", "-c", str(CONSTRAINTS))


@nox.session
def perf(session: nox.Session) -> None:
    """Record the performance of commits in perf/results; `-- RANGE` as asv takes it, the last commit by default."""
    install_asv(session)
    machine = str(session.run("python", "perf/machine.py", silent=True)).split()[-1]
    what = ["--environment", "virtualenv", "--bench", "^resources|track_size"]
    if machine != "aot":
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        what = ["--environment", f"system:{python}", "--bench", "^gpu|^host"]
    folder = ROOT / "perf" / "results" / machine
    before = {file: file.stat().st_mtime_ns for file in folder.glob("*-*.json")}
    session.run(*ASV, "run", "--machine", machine, "--show-stderr", *what, *(session.posargs or ["HEAD^!"]))
    if before == {file: file.stat().st_mtime_ns for file in folder.glob("*-*.json")}:
        session.error("asv recorded nothing")


@nox.session
def perf_gate(session: nox.Session) -> None:
    """Judge a commit's speed: `-- BASE HEAD`, then options of asv; exit codes 0, 10, 20, 30 as perf/gate.py has them.

    With BASE and HEAD the same, the same files are measured as if they were two commits: an A/A run.
    """
    if len(session.posargs) < 2:
        session.error("wanted two commits: nox -s perf_gate -- BASE HEAD")
    install_asv(session)

    def git(*arguments: str, **environment: str) -> str:
        command = ["git", *arguments]
        return str(session.run(*command, env=environment, external=True, silent=True, log=False)).strip()

    revisions, options = session.posargs[:2], session.posargs[2:]
    base, head = (git("rev-parse", "--verify", "--end-of-options", f"{revision}^{{commit}}") for revision in revisions)
    if base == head:
        # asv keeps one result per commit. This second one is on no branch, and the same in every clone.
        fixed = {"NAME": "nobody", "EMAIL": "nobody@example.org", "DATE": "2000-01-01T00:00:00Z"}
        identity = {f"GIT_{role}_{key}": value for role in ("AUTHOR", "COMMITTER") for key, value in fixed.items()}
        head = git("commit-tree", f"{base}^{{tree}}", "-p", base, "-m", "The same files again", **identity)

    machine = str(session.run("python", "perf/machine.py", silent=True)).split()[-1]
    # Figures read off machine code are exact. Times need rounds, each in a process of its own.
    suite, what = "^resources", ["--environment", "virtualenv"]
    if machine != "aot":
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        suite, what = r"^gpu\.", ["--environment", f"system:{python}", "--attribute", "rounds=3"]
    if not any(option.startswith(("-b", "--bench")) for option in options):
        # asv would add a selection to this one.
        what += ["--bench", suite]
    results, report = (ROOT / "report" / name for name in ("perf-gate-results", "perf-gate"))
    shutil.rmtree(results, ignore_errors=True)
    results.parent.mkdir(exist_ok=True)
    # asv takes the folder of its configuration for the repository's root.
    configuration = ROOT / ".asv.gate.conf.json"
    settings = json.loads((ROOT / "asv.conf.json").read_text())
    configuration.write_text(json.dumps({**settings, "results_dir": str(results)}))
    turns = ["--interleave-rounds", "--append-samples", "--show-stderr"]
    command = [*ASV, "--config", str(configuration), "continuous", base, head, "--machine", machine, *turns, *what]
    # asv's own exit codes tell a slower benchmark, a failed one and an empty selection: the gate judges all three.
    session.run(*command, *options, success_codes=[0, 1, 2])

    floor = ROOT / "perf" / "floors" / f"{machine}.json"
    noise = ["--floor", str(floor)] if floor.exists() else []
    # The report: perf-gate.md for a pull request, and the same as JSON.
    files = ["--markdown", f"{report}.md", "--json", f"{report}.json"]
    session.run("python", "perf/gate.py", base, head, "--results", str(results), *noise, *files, success_codes=VERDICTS)
    code = json.loads(report.with_suffix(".json").read_text())["exit_code"]
    if code:
        # nox itself knows only success and failure.
        sys.exit(code)


@nox.session
def perf_publish(session: nox.Session) -> None:
    """Build the site of the performance history in .asv/html; needs npm."""
    install_asv(session)
    session.run(*ASV, "publish")
    modules = Path(session.create_tmp())
    for name in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / "perf" / "site" / name, modules)
    session.run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(modules), external=True)
    session.run("python", "perf/publish.py", ".asv/html", str(modules / "node_modules"))
