"""What people and continuous integration run in this repository: `nox --list` shows the sessions.

Kernel packages are found under packages/: a new one needs no edit here.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import nox
from nox.command import CommandFailed
from nox.project import dependency_groups, load_toml

sys.path.append(str(Path(__file__).resolve().parent / "perf"))
from sessions import perf, perf_gate, perf_publish

__all__ = ["perf", "perf_gate", "perf_publish"]

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests", "resources", "build", "docs"]

ROOT = Path(__file__).resolve().parent
CONSTRAINTS = ROOT / "constraints.txt"
DIST = ROOT / "dist"
# What a kernel package is tried with on a core that is not its own: every case against its reference.
QUICK_TESTS = "test_spec.py"
CORE, TESTKIT, REPOSITORY = "tk-kernel-core", "tk-testkit", "repository"
KERNELS = {file.parent.name: file.parent for file in sorted(ROOT.glob("packages/tk-*/pyproject.toml"))}
PROJECTS = {CORE: ROOT / "shared" / CORE, TESTKIT: ROOT / "shared" / TESTKIT, **KERNELS}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
KERNEL_PACKAGES = [name.replace("-", "_") for name in KERNELS]

each_kernel = nox.parametrize("package", [nox.param(name, id=name) for name in KERNELS])
each_published = nox.parametrize("package", [nox.param(name, id=name) for name in (CORE, *KERNELS)])
each_suite = nox.parametrize("package", [nox.param(name, id=name) for name in (*PROJECTS, REPOSITORY)])


def affected(paths: Iterable[str], kernels: Sequence[str] = tuple(KERNELS)) -> tuple[set[str], list[str]]:
    """Return the test suites that changed files concern, and the files that no rule knows.

    Kernel packages depend on the core and the test kit, never on one another. A file that no rule knows
    concerns everything.

    Args:
        paths: Changed files, relative to the repository's root.
        kernels: Names of the kernel packages.
    """
    suites, unknown = {REPOSITORY}, []
    everything = {CORE, TESTKIT, REPOSITORY, *kernels}
    for path in paths:
        folder, _, rest = path.partition("/")
        package = rest.partition("/")[0]
        if folder == "packages" and package in kernels:
            suites.add(package)
        elif folder in {"docs", "tests", "perf", "release", ".github"} or (not rest and path.endswith(".md")):
            continue
        else:
            suites |= everything
            if rest and folder not in {"shared", ".ci"}:
                unknown.append(path)
    return suites, unknown


def selection(session: nox.Session) -> tuple[set[str], list[str]]:
    """Read `-- --since REV`: returns the test suites that changes since then concern, and the other arguments."""
    if "--since" not in session.posargs:
        return {*PROJECTS, REPOSITORY}, list(session.posargs)
    position = session.posargs.index("--since")
    before, after = session.posargs[:position], session.posargs[position + 1 :]
    if not after:
        session.error("--since needs a revision")
    changed: set[str] = set()
    for command in (
        ["git", "diff", "--name-only", "--no-renames", "--merge-base", after[0]],
        ["git", "ls-files", "--others", "--exclude-standard"],
    ):
        changed.update(str(session.run(*command, external=True, silent=True, log=False)).splitlines())
    suites, unknown = affected(sorted(changed))
    for path in unknown:
        session.warn(f"{path} belongs to no known part: everything is tested")
    return suites, before + after[1:]


def constraints_without_triton(session: nox.Session) -> Path:
    """Write constraints.txt without the triton line into the session's own folder."""
    lines = CONSTRAINTS.read_text().splitlines(keepends=True)
    file = Path(session.create_tmp()) / "constraints-without-triton.txt"
    file.write_text("".join(line for line in lines if not line.startswith("triton==")))
    return file


def install(session: nox.Session, *requirements: str, wheels: Iterable[Path] = (), triton: bool = True) -> None:
    """Install at the tested versions: torch first, then Triton, then everything else.

    A CUDA or ROCm build of torch brings a Triton of its own, which wins over the tested one.

    Args:
        session: The session whose environment is filled.
        requirements: Requirements; a wheel with extras is written `PATH[EXTRA]`.
        wheels: This repository's wheels, installed even where the same version is there already.
        triton: Install Triton where torch brings none.
    """
    loose = constraints_without_triton(session)
    # pip would compile all of torch, of which a session needs little. Python compiles that when it is imported.
    session.env["PYTHONDONTWRITEBYTECODE"] = None
    install_shared(session, "torch", loose)
    constraints = loose
    if triton:
        version = session.run("python", "-c", FIND_TRITON, silent=True, log=False)
        if not str(version).strip():
            install_shared(session, "triton", CONSTRAINTS)
            constraints = CONSTRAINTS
        elif f"triton=={str(version).strip()}\n" in CONSTRAINTS.read_text():
            constraints = CONSTRAINTS
        session.run("python", "-c", SAY_VERSIONS, log=False)
    files = [str(wheel) for wheel in wheels]
    if files:
        session.install("--no-deps", "--force-reinstall", *files)
    if files or requirements:
        session.install("--no-compile", *files, *requirements, "-c", str(constraints))


def install_shared(session: nox.Session, name: str, constraints: Path) -> None:
    """Install what takes long once for all sessions, in a folder that the session's environment sees from then on."""
    folder, environment = ROOT / ".nox" / "shared" / name, Path(session.virtualenv.location)
    for packages in environment.glob("lib/python*/site-packages"):
        (packages / f"{name}.pth").write_text(f"{folder / packages.relative_to(environment)}\n")
    folder.mkdir(parents=True, exist_ok=True)
    # Sessions may run side by side.
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        session.install("--no-compile", "--prefix", str(folder), name, "-c", str(constraints))


FIND_TRITON = """
from importlib.metadata import distributions
print(next((d.version for d in distributions(name="triton")), ""))
"""
SAY_VERSIONS = """
from importlib.metadata import distributions
found = {d.name: d.version for d in reversed([*distributions()])}
print("using", ", ".join(f"{name} {found[name]}" for name in ("torch", "triton", "numpy") if name in found))
"""


def build_wheels(session: nox.Session, *names: str, tree: Path = ROOT) -> dict[str, Path]:
    """Build wheels of distributions in this tree or another of the same layout; returns the files by name."""
    folder = Path(session.create_tmp()) / "wheels" / tree.name
    shutil.rmtree(folder, ignore_errors=True)
    session.install("hatchling", "-c", str(CONSTRAINTS))
    sources = [str(tree / PROJECTS[name].relative_to(ROOT)) for name in names]
    session.run("python", "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), *sources)
    return {name: next(folder.glob(f"{name.replace('-', '_')}-*.whl")) for name in names}


def install_kernels(session: nox.Session, *requirements: str, core_extras: str = "") -> None:
    """Install the core and all kernel packages from wheels, as a user would have them."""
    wheels = build_wheels(session, CORE, *KERNELS)
    install(session, f"{wheels[CORE]}{core_extras}", *requirements, wheels=wheels.values())


def sees_gpu(session: nox.Session) -> bool:
    """Whether torch in the session's environment sees a GPU."""
    command = "import torch; print(torch.cuda.is_available())"
    return str(session.run("python", "-c", command, silent=True, log=False)).strip() == "True"


@nox.session
def demo(session: nox.Session) -> None:
    """Check, time and place every kernel on the roofline; `-- --gpu NAME` predicts for another card."""
    install_kernels(session, core_extras="[plot,nvml,triton]")
    session.run("tk-kernels", "demo", *session.posargs)


@nox.session
@each_suite
def tests(session: nox.Session, package: str) -> None:
    """Test a distribution's wheel; `-- --since REV` tests what changed, other arguments go to pytest."""
    suites, arguments = selection(session)
    if package not in suites:
        session.skip("nothing that concerns it has changed")
    if package == REPOSITORY:
        wheels = build_wheels(session, *PROJECTS)
        tools = ["nox", "pytest-xdist", "pyyaml", "asv", "asv_runner", "griffelib", "transformers"]
        install(session, *tools, wheels=wheels.values())
        folder = ROOT / "tests"
    else:
        folder = PROJECTS[package] / "tests"
        install_suite(session, package, folder, build_wheels(session, *dict.fromkeys((CORE, TESTKIT, package))))
    run_suite(session, package, folder, *arguments)


def install_suite(session: nox.Session, package: str, folder: Path, wheels: Mapping[str, Path]) -> None:
    """Install a distribution's wheels and what its tests, in this folder, need beside them."""
    groups = load_toml(folder.parent / "pyproject.toml").get("dependency-groups", {})
    needed = dependency_groups({"dependency-groups": groups}, "test") if "test" in groups else ()
    extras = [f"{wheels[CORE]}[plot,nvml]"] if package == CORE else []
    install(session, "pytest-xdist", *extras, *needed, wheels=wheels.values())


def run_suite(session: nox.Session, package: str, tests: Path, *arguments: str) -> None:
    """Run the tests in a folder or a file against what is installed, all of them even where some fail."""
    # Triton chooses between its interpreter and its compiler once per process, so there are two runs.
    if package in KERNELS and not sees_gpu(session):
        runs = [("1", "not compiler"), (None, "compiler")]
    else:
        runs = [(None, "not interpreter"), ("1", "interpreter")]
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--installed-only"]
    failed = False
    for number, (interpret, marker) in enumerate(runs):
        # Exit code 5: no test was selected, which only the run over all tests may not say.
        codes = [0, 5] if number or arguments else [0]
        environment = {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
        command = ["pytest", *options, "-n", "2", "-m", marker, str(tests), *arguments]
        try:
            session.run(*command, env=environment, success_codes=codes)
        except CommandFailed:
            failed = True
    if failed:
        session.error(f"tests of {package} failed")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, import contracts, metadata, declared dependencies, spelling, workflows."""
    tools = ["ruff", "import-linter", "validate-pyproject", "deptry", "codespell", "check-jsonschema", "zizmor"]
    session.install(*tools, "-c", str(CONSTRAINTS))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("codespell")
    files = [ROOT / "pyproject.toml", *(folder / "pyproject.toml" for folder in PROJECTS.values())]
    session.run("validate-pyproject", *map(str, files))
    for folder in PROJECTS.values():
        with session.chdir(folder):
            session.run("deptry", "src")

    github = ROOT / ".github"
    forms = [str(github / "ISSUE_TEMPLATE" / name) for name in ("bug.yml", "perf-regression.yml")]
    for schema, checked in (
        ("github-workflows", sorted(map(str, github.glob("workflows/*.yml")))),
        ("dependabot", [str(github / "dependabot.yml")]),
        ("github-issue-forms", forms),
        ("github-issue-config", [str(github / "ISSUE_TEMPLATE" / "config.yml")]),
        ("citation-file-format", [str(ROOT / "CITATION.cff")]),
    ):
        session.run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *checked)
    session.run("check-jsonschema", "--schemafile", "perf/schema/asv.conf.schema.json", "asv.conf.json")
    session.run("zizmor", "--quiet", "--offline", "--no-online-audits", "--strict-collection", str(github))

    contracts = (ROOT / ".importlinter").read_text()
    generated = Path(session.create_tmp()) / "importlinter.ini"
    generated.write_text(contracts.replace("KERNEL_PACKAGES", "\n    ".join(KERNEL_PACKAGES)))
    sources = os.pathsep.join(str(folder / "src") for folder in PROJECTS.values())
    session.run("lint-imports", "--no-cache", "--config", str(generated), env={"PYTHONPATH": sources})


@nox.session
def types(session: nox.Session) -> None:
    """Check types strictly."""
    typed = ["pydantic", "rich", "matplotlib", "nvidia-ml-py", "pytest", "hypothesis", "nox", "griffelib"]
    install(session, "mypy", *typed)
    session.run("mypy", *session.posargs)


@nox.session
def resources(session: nox.Session) -> None:
    """Compile every kernel for every target, without a GPU, and hold it against its budget."""
    install_kernels(session)
    # Budgets count under the Triton that made them.
    session.install("--no-deps", "triton", "-c", str(CONSTRAINTS))
    for name, folder in KERNELS.items():
        budget = str(folder / "perf_budget.json")
        session.run("tk-kernels", "resources", name, "--budget", budget, *session.posargs)


@nox.session
@each_published
def compat(session: nox.Session, package: str) -> None:
    """Test a distribution on the newest Triton and NumPy that pip offers, and show its budget beside theirs."""
    tests = PROJECTS[package] / "tests"
    install_suite(session, package, tests, build_wheels(session, *dict.fromkeys((CORE, TESTKIT, package))))
    # Both are newer than what the test kit and some builds of torch ask for.
    session.install("--no-deps", "--upgrade", "triton", "numpy")
    session.run("python", "-c", SAY_VERSIONS)
    if package in KERNELS:
        # Under a Triton that did not make the budget, differences are shown and do not count.
        session.run("tk-kernels", "resources", package, "--budget", str(PROJECTS[package] / "perf_budget.json"))
    # A new warning is shown, and is no failure.
    run_suite(session, package, tests, "-W", "default", *session.posargs)


@nox.session
def build(session: nox.Session) -> None:
    """Build wheels and source distributions into dist/, check them, and install each kernel package alone."""
    build_distributions(session, CORE, *KERNELS)


def build_distributions(session: nox.Session, *names: str) -> None:
    """Build distributions into dist/, check them, and have the kernel packages among them installed alone."""
    session.install("build", "hatchling", "twine", "check-wheel-contents", "-c", str(CONSTRAINTS))
    shutil.rmtree(DIST, ignore_errors=True)
    for name in names:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(DIST), str(PROJECTS[name]), silent=True)
    session.run("twine", "check", "--strict", *map(str, sorted(DIST.iterdir())))
    session.run("check-wheel-contents", *map(str, sorted(DIST.glob("*.whl"))))
    for name in names:
        if name in KERNELS:
            session.notify(f"alone({name})")


@nox.session(reuse_venv=False)
def release_check(session: nox.Session) -> None:
    """Check all that a release needs: `-- tk-rmsnorm`, or its tag; leaves what is to be published in report/release."""
    if len(session.posargs) != 1:
        session.error("wanted one distribution or tag: nox -s release_check -- tk-rmsnorm")
    session.install("griffelib", "nox", "-c", str(CONSTRAINTS))
    folder = ROOT / "report" / "release"
    shutil.rmtree(folder, ignore_errors=True)
    check = ("python", str(ROOT / "release" / "check.py"))
    session.run(*check, "plan", session.posargs[0], str(folder))
    plan, sources = json.loads((folder / "plan.json").read_text()), folder / "sources"
    package, module = plan["distribution"], plan["distribution"].replace("-", "_")

    build_distributions(session, CORE, *(KERNELS if package == CORE else (package,)))
    session.run(*check, "contents", package, str(DIST))
    with tarfile.open(next(DIST.glob(f"{module}-*.tar.gz"))) as archive:
        archive.extractall(sources, filter="data")
    tests = sources / f"{module}-{plan['version']}" / "tests"
    wheels = {name: next(DIST.glob(f"{name.replace('-', '_')}-*.whl")) for name in {CORE, package}}
    testkit = build_wheels(session, TESTKIT)
    install_suite(session, package, tests, {**wheels, **testkit})
    run_suite(session, package, tests)

    if plan["floor"]:
        oldest = build_wheels(session, CORE, tree=sources / plan["floor"])
        install_suite(session, package, tests, {**wheels, **testkit, **oldest})
        run_suite(session, package, tests / QUICK_TESTS)
    for kernel, tag in plan["kernels"].items():
        # The tests of then come with the test kit of then.
        released = build_wheels(session, kernel, TESTKIT, tree=sources / tag)
        tests = sources / tag / KERNELS[kernel].relative_to(ROOT) / "tests"
        install_suite(session, kernel, tests, {CORE: wheels[CORE], **released})
        run_suite(session, kernel, tests / QUICK_TESTS)

    (folder / "dist").mkdir()
    for file in DIST.glob(f"{module}-*"):
        shutil.copy(file, folder / "dist")


@nox.session(reuse_venv=False)
@each_kernel
def alone(session: nox.Session, package: str) -> None:
    """Install one kernel package from dist/ as its users do, and nothing else of this repository."""
    module = package.replace("-", "_")
    wheels = [next(DIST.glob(f"{name}-*.whl"), None) for name in ("tk_kernel_core", module)]
    if None in wheels:
        session.error("dist/ lacks the wheels: run `nox -s build` first")
    install(session, wheels=[wheel for wheel in wheels if wheel], triton=False)
    session.run("pip", "check")
    with session.chdir(session.create_tmp()):
        session.run("python", "-c", CHECK_ALONE, package, module)
        listed = session.run("tk-kernels", "list", silent=True)
    if package not in str(listed):
        session.error(f"`tk-kernels list` does not show {package}")


CHECK_ALONE = """
import importlib, sys
from importlib.metadata import distributions
package, module = sys.argv[1:]
assert importlib.import_module(module).__file__.startswith(sys.prefix)
installed = {d.name for d in distributions() if d.name.startswith("tk-")}
assert installed == {"tk-kernel-core", package}, installed
"""


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build/html; a warning is an error."""
    install_kernels(session, "sphinx", "furo", "myst-parser", core_extras="[plot]")
    session.run("sphinx-build", "-W", "--keep-going", "-q", "docs", "docs/_build/html", *session.posargs)


@nox.session(requires=["docs"])
def site(session: nox.Session) -> None:
    """Open the documentation that `docs` has built, and the site of the performance history, in a browser."""
    chromium = next(filter(None, map(shutil.which, BROWSERS)), None)
    if chromium is None:
        session.error(f"found none of {', '.join(BROWSERS)}; on Debian, `apt-get install chromium` brings one")
    session.install("pytest", "playwright", "asv", "asv_runner", "virtualenv", "-c", str(CONSTRAINTS))
    files = ("tests/test_docs_site.py", "tests/test_perf_site.py")
    session.run("pytest", *files, *session.posargs, env={"TK_BROWSER": chromium})


@nox.session
def bench(session: nox.Session) -> None:
    """Time host overhead, compilation and kernels with pytest-benchmark."""
    folders = [str(folder / "benchmarks") for folder in KERNELS.values()]
    wheels = build_wheels(session, CORE, TESTKIT, *KERNELS)
    install(session, "pytest-benchmark", wheels=wheels.values())
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "--installed-only"]
    options += ["-o", "python_files=bench_*.py", "--benchmark-only", "--benchmark-autosave"]
    session.run("pytest", *options, *folders, *session.posargs, env={"TRITON_INTERPRET": None})
