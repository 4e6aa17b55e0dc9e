"""The performance suites: what asv finds in them, and what it runs them with."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tk_kernel_core.spec import installed_specs
from tk_kernel_core.targets import COMPILE_TARGETS

ROOT = Path(__file__).resolve().parents[1]
PERF = ROOT / "perf"
sys.path.insert(0, str(PERF))


def load(name: str, file: Path, *, package: Path | None = None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=None if package is None else [str(package)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def suites() -> dict[str, ModuleType]:
    folder = PERF / "benchmarks"
    load("perf_benchmarks", folder / "__init__.py", package=folder)
    return {
        file.stem: load(f"perf_benchmarks.{file.stem}", file)
        for file in sorted(folder.glob("*.py"))
        if file.stem != "__init__"
    }


def benchmarks(suites: dict[str, ModuleType]) -> dict[str, Any]:
    return {
        f"{file}.{class_name}.{name}": function
        for file, module in suites.items()
        for class_name, suite in inspect.getmembers(module, inspect.isclass)
        if suite.__module__ == module.__name__
        for name, function in inspect.getmembers(suite, inspect.isfunction)
        if name.startswith("track_")
    }


def test_every_case_and_target_has_a_series(suites: dict[str, ModuleType]) -> None:
    cases = [f"{package} {case}" for package, spec in installed_specs().items() for case in spec.cases]
    assert sorted(suites["resources"].Resources.params[0]) == sorted(cases)
    assert suites["resources"].Resources.params[1] == list(COMPILE_TARGETS)
    assert sorted(suites["gpu"].Kernels.params[0]) == sorted(cases)
    assert suites["host"].Packages.params[0] == list(installed_specs())


def test_every_benchmark_has_a_version_and_a_unit(suites: dict[str, ModuleType]) -> None:
    found = benchmarks(suites)
    assert len(found) == 9
    for name, function in found.items():
        assert function.version == "1", name
        assert function.unit, name


def test_a_new_process_for_a_result_imports_no_torch() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from benchmarks import gpu, host, resources; "
    code += "assert not {'torch', 'triton', 'tk_kernel_core'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code, str(PERF)], check=True)


def test_what_a_commit_lacks_is_left_out_and_what_fails_says_why(suites: dict[str, ModuleType]) -> None:
    resources, kernels = suites["resources"].Resources(), suites["gpu"].Kernels()
    found = {("tk-a case", "sm_90"): "ValueError: too wide"}
    with pytest.raises(NotImplementedError, match="no case tk-a case for sm_80"):
        resources.setup(found, "tk-a case", "sm_80")
    resources.setup(found, "tk-a case", "sm_90")
    with pytest.raises(RuntimeError, match="ValueError: too wide"):
        resources.track_registers(found, "tk-a case", "sm_90")
    with pytest.raises(NotImplementedError, match="needs a GPU"):
        kernels.setup({}, "tk-a case")
    with pytest.raises(NotImplementedError, match="no case tk-a case"):
        kernels.setup({"tk-b case": "broken"}, "tk-a case")
    with pytest.raises(RuntimeError, match="broken"):
        kernels.track_latency_us({"tk-b case": "broken"}, "tk-b case")


def test_resources_are_those_of_the_report(suites: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    import tk_kernel_core.resources
    from tk_kernel_core.resources import CaseResources, KernelResources

    def kernel(name: str, **figures: int) -> KernelResources:
        other = {"stack_bytes": 0, "num_warps": 4, "code_bytes": 16, "instructions": {}}
        return KernelResources.model_validate({"kernel": name, "target": "sm_90", **other, **figures})

    def report(spec: Any, cases: list[Any]) -> list[CaseResources]:
        if cases[0].name == "odd-width":
            raise ValueError("too wide")
        kernels = (
            kernel("a", registers=40, spill_bytes=8, shared_bytes=16, instructions_total=100),
            kernel("b", registers=32, spill_bytes=4, shared_bytes=64, instructions_total=10),
        )
        return [CaseResources(package=spec.name, case=cases[0].name, target="sm_90", kernels=kernels)]

    monkeypatch.setattr(tk_kernel_core.resources, "report_resources", report)
    suite = suites["resources"].Resources()
    found = suite.setup_cache()
    place = (found, "tk-swiglu llama2-7b-decode", "sm_90")
    assert suite.track_registers(*place) == 40
    assert suite.track_spill_bytes(*place) == 12
    assert suite.track_shared_bytes(*place) == 64
    assert suite.track_instructions(*place) == 110
    with pytest.raises(RuntimeError, match="ValueError: too wide"):
        suite.track_registers(found, "tk-swiglu odd-width", "sm_80")


def test_latency_has_as_many_samples_as_the_test_of_the_gate_needs(suites: dict[str, ModuleType]) -> None:
    samples = suites["gpu"].medians(list(map(float, range(100))))
    assert len(samples) == suites["gpu"].SAMPLES >= 7
    assert samples == sorted(samples)
    assert suites["gpu"].medians([1.0, 2.0, 3.0, 4.0, 5.0]) == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_imports_and_sizes_are_measured(suites: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    packages = suites["host"].Packages()
    with pytest.raises(NotImplementedError, match="no tk-none"):
        packages.setup("tk-none")
    packages.setup("tk-rmsnorm")
    assert 10 < packages.track_size_kib("tk-rmsnorm") < 1000
    monkeypatch.setattr(suites["host"], "IMPORTS", 1)
    assert 0 < packages.track_import_ms("tk-rmsnorm") < 5000


@pytest.mark.compiler
def test_asv_finds_the_suites_and_runs_them(tmp_path: Path) -> None:
    configuration = json.loads((ROOT / "asv.conf.json").read_text())
    # A copy of the suites compiles one case of each package: other tests compile them all.
    suites, cases = tmp_path / "perf" / "benchmarks", "in spec.cases.values():"
    shutil.copytree(PERF / "benchmarks", suites)
    (tmp_path / "packages").symlink_to(ROOT / "packages")
    text = (suites / "resources.py").read_text()
    assert text.count(cases) == 1
    some = "in [case for name, case in spec.cases.items() if name.endswith(('-decode', '-1'))][:1]:"
    (suites / "resources.py").write_text(text.replace(cases, some))
    configuration |= {"repo": str(ROOT), "benchmark_dir": str(suites)}
    configuration |= {"results_dir": str(tmp_path / "results"), "env_dir": str(tmp_path / "env")}
    (tmp_path / "asv.conf.json").write_text(json.dumps(configuration))
    # asv keeps machines in the home folder, Triton what it has compiled.
    cache = os.environ.get("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    environment = {**os.environ, "HOME": str(tmp_path), "TRITON_CACHE_DIR": cache}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run(str(PERF / "machine.py")).split()[-1] == "aot"
    asv = ("-m", "asv", "--config", str(tmp_path / "asv.conf.json"))
    run(*asv, "check", "--environment", "existing")
    some = r"track_registers\('tk-\S+ \S+-(?:decode|1)', 'sm_90'\)|track_size"
    output = run(*asv, "run", "--environment", "existing", "--machine", "aot", "--quick", "--dry-run", "--bench", some)
    for package in installed_specs():
        assert re.search(rf"^ +{package} \S+-(?:decode|1) +sm_90 +\d+ *$", output, re.MULTILINE), output
        assert re.search(rf"^ +{package} +\d+\.\d+ *$", output, re.MULTILINE), output


def test_machine_without_a_gpu_is_the_same_on_every_host() -> None:
    machine = load("perf_machine", PERF / "machine.py")
    host = {"machine": "box", "os": "Linux", "arch": "x86_64", "cpu": "some", "num_cpu": "2", "ram": "24"}
    name, entries = machine.describe(None, host)
    assert name == "aot"
    assert entries == {"machine": "aot", "os": "any", "arch": "any", "cpu": "any", "num_cpu": "any", "ram": "any"}
    facts = {"name": "NVIDIA H200", "driver_version": "580.1"}
    name, entries = machine.describe(facts, host)
    assert name == "nvidia-h200"
    same = {"arch": "x86_64", "cpu": "some", "num_cpu": "2", "os": "any", "ram": "any"}
    assert entries == {**same, "machine": "nvidia-h200", "gpu": "NVIDIA H200", "driver": "580.1"}


def test_environment_of_the_running_python_sees_its_packages(tmp_path: Path) -> None:
    from asv.config import Config
    from asv.environment import EnvironmentUnavailable

    plugin = load("perf_asv_env", PERF / "asv_env.py")
    configuration = Config.load(str(ROOT / "asv.conf.json"))
    configuration.env_dir = str(tmp_path)
    running = f"{sys.version_info.major}.{sys.version_info.minor}"
    with pytest.raises(EnvironmentUnavailable, match=rf"running Python {running}, got 2\.7"):
        plugin.SystemPackages(configuration, "2.7", {}, {})
    environment = plugin.SystemPackages(configuration, running, {"torch": "0.0"}, {})
    assert environment.name == f"system-py{running}-torch{version('torch')}-triton{version('triton')}"
    environment.create()
    assert environment.check_presence()
    code = "from importlib.util import find_spec as f; print(all(map(f, ('torch', 'pip', 'asv_runner'))))"
    assert environment.run(["-c", code]) == "True\n"


def test_torch_and_triton_of_the_history_are_the_tested_ones() -> None:
    configuration = json.loads((ROOT / "asv.conf.json").read_text())
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert configuration["matrix"]["req"] == {name: [pins[name]] for name in ("torch", "triton")}


def test_thresholds_name_each_suite_once(suites: dict[str, ModuleType]) -> None:
    thresholds = json.loads((ROOT / "asv.conf.json").read_text())["regressions_thresholds"]
    assert sorted(thresholds) == sorted(rf"^{name}\." for name in suites)


def test_wheels_are_built_of_whatever_packages_a_tree_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels = load("perf_wheels", PERF / "wheels.py")
    for folder in ("shared/tk-kernel-core", "packages/tk-b", "packages/tk-a"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "pyproject.toml").touch()
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(wheels, "pip", lambda *arguments: calls.append(arguments))
    wheels.build(tmp_path, tmp_path / "wheels")
    sources = [str(tmp_path / folder) for folder in ("shared/tk-kernel-core", "packages/tk-a", "packages/tk-b")]
    assert calls[-1][-3:] == tuple(sources)
    assert "--no-deps" in calls[-1]
    with pytest.raises(FileNotFoundError, match="holds no wheels"):
        wheels.install(tmp_path / "wheels")
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "tk_a-0.1.0-py3-none-any.whl").touch()
    wheels.install(tmp_path / "wheels")
    assert calls[-1] == (
        "install",
        "--no-deps",
        "--force-reinstall",
        "--no-index",
        str(tmp_path / "wheels" / "tk_a-0.1.0-py3-none-any.whl"),
    )
    wheels.uninstall()
    assert calls[-1][:2] == ("uninstall", "--yes")
    assert {"tk-kernel-core", "tk-rmsnorm"} < {*calls[-1][2:]}
