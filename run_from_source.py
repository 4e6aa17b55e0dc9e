"""Run the tests or any `tk-kernels` command straight from this source tree, with nothing installed.

For GPU machines that bring torch and Triton and reach no package registry:

    python3 run_from_source.py tests [PACKAGE ...] [-- PYTEST_ARGUMENT ...]
    python3 run_from_source.py bench [ARGUMENT ...]     # or any other tk-kernels command

Kernels run compiled on the GPU, never in the interpreter. Without a GPU the command refuses, unless
`--allow-cpu` is given as the first argument; then TRITON_INTERPRET is left as it is.
"""

from __future__ import annotations

import configparser
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
COMMAND_LINE = "import sys; from tk_kernel_core.cli import main; sys.argv[0] = 'tk-kernels'; sys.exit(main())"
NEEDED_BY_COMMANDS = ("torch", "triton", "numpy", "pydantic", "rich")
NEEDED_BY_TESTS = (*NEEDED_BY_COMMANDS, "pytest", "hypothesis")


def source_projects(root: Path = ROOT) -> dict[str, Path]:
    """Return the folders of all distributions in the tree by name."""
    files = sorted((*root.glob("shared/*/pyproject.toml"), *root.glob("packages/*/pyproject.toml")))
    return {file.parent.name: file.parent for file in files}


def load_toml(path: Path) -> dict[str, Any]:
    """Read a TOML file."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        # pip carries the parser that Python 3.10 lacks.
        from pip._vendor import tomli as tomllib
    with path.open("rb") as file:
        loaded: dict[str, Any] = tomllib.load(file)
    return loaded


def write_metadata(project: Mapping[str, Any], folder: Path) -> None:
    """Write what importlib.metadata needs of an installed distribution: name, version, dependencies, entry points.

    Args:
        project: The `project` table of a pyproject.toml.
        folder: Where the `.dist-info` folder goes; on the module search path, it counts as installed.
    """
    name, version = project["name"], project["version"]
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", f"Summary: {project['description']}"]
    lines += [f"Requires-Python: {project['requires-python']}"]
    lines += [f"Requires-Dist: {dependency}" for dependency in project["dependencies"]]
    for extra, dependencies in project.get("optional-dependencies", {}).items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {dependency}; extra == '{extra}'" for dependency in dependencies]
    (info / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")

    groups = dict(project.get("entry-points", {}))
    if "scripts" in project:
        groups["console_scripts"] = project["scripts"]
    entries = configparser.ConfigParser(delimiters=("=",), interpolation=None)
    entries.read_dict(groups)
    with (info / "entry_points.txt").open("w", encoding="utf-8") as file:
        entries.write(file)


def missing_modules(names: Iterable[str]) -> list[str]:
    """Return those of the modules that cannot be found."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def child_command(arguments: Sequence[str], projects: Mapping[str, Path]) -> list[str]:
    """Return the command that the arguments ask for.

    Raises:
        ValueError: A package is named that the tree does not hold.
    """
    if arguments[0] != "tests":
        return [sys.executable, "-c", COMMAND_LINE, *arguments]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    names, options = arguments[1:split], arguments[split + 1 :]
    for name in names:
        if name not in projects:
            raise ValueError(f"no package {name} in this tree; there are {', '.join(projects)}")
    folders = [str(projects[name] / "tests") for name in names or projects]
    configuration = [f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}"]
    return [sys.executable, "-m", "pytest", *configuration, *folders, *options]


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code; 2 when it could not be started."""
    allow_cpu = arguments[:1] == ["--allow-cpu"]
    arguments = arguments[allow_cpu:]
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(__doc__)
        return 0 if arguments else 2
    projects = source_projects()
    missing = missing_modules(NEEDED_BY_TESTS if arguments[0] == "tests" else NEEDED_BY_COMMANDS)
    if missing:
        return refuse(
            f"missing Python modules: {', '.join(missing)}. Without a registry: on a machine that has one, run "
            "`python3 -m pip download -c constraints.txt` for them with this machine's Python version, unpack the "
            "wheels (they are zip files) into one folder, and name that folder in PYTHONPATH."
        )
    import torch

    has_gpu = torch.cuda.is_available()
    if not has_gpu and not allow_cpu:
        return refuse("torch sees no GPU on this machine. To run on the CPU all the same, put --allow-cpu first.")
    try:
        command = child_command(arguments, projects)
    except ValueError as error:
        return refuse(str(error))

    environment = dict(os.environ)
    if has_gpu:
        environment.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory(prefix="tk-from-source-") as metadata:
        for folder in projects.values():
            write_metadata(load_toml(folder / "pyproject.toml")["project"], Path(metadata))
        sources = [str(folder / "src") for folder in projects.values()]
        paths = [metadata, *sources, environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return subprocess.run(command, env=environment, check=False).returncode


def refuse(message: str) -> int:
    """Print why nothing was run."""
    print(f"run_from_source.py: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
