"""The benchmarks that all packages have: what pytest-benchmark stores of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark, which these benchmarks are for")

UNSET = {"PYTEST_XDIST_WORKER", "TRITON_INTERPRET"}

BENCHMARKS = """
import pytest
from sample_spec import SPEC
from tk_kernel_core.timing import summarise
from tk_testkit.benchmarks import SpecBenchmarks

class TestHeadlines(SpecBenchmarks):
    spec = SPEC
"""

AS_IF_MEASURED = """
    @pytest.fixture(scope="class")
    def measurement(self, name):
        return summarise([12.0, 10.0, 11.0], 64, "cuda-graph", host_us=5.0)
"""

AS_IF_ON_A_GPU = """
def pytest_collection_modifyitems(items):
    for item in items:
        item.own_markers = [marker for marker in item.own_markers if marker.name != "gpu"]
"""


def stored(folder: Path, benchmarks: str, *arguments: str) -> tuple[str, dict[str, Any], dict[str, dict[str, Any]]]:
    """Run benchmarks; returns the output, what is stored of the machine, and what is stored by benchmark."""
    (folder / "bench_sample.py").write_text(benchmarks)
    (folder / "pytest.ini").write_text("[pytest]\npython_files = bench_*.py\n")
    path = os.pathsep.join((str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")))
    # pytest-benchmark measures nothing where pytest-xdist spreads the tests, which this run does not.
    inherited = {name: value for name, value in os.environ.items() if name not in UNSET}
    environment = {**inherited, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    options = ["-rs", "-p", "no:cacheprovider", "--benchmark-only", "--benchmark-json=stored.json", *arguments]
    command = [sys.executable, "-m", "pytest", *options]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads((folder / "stored.json").read_text())
    return result.stdout, found["machine_info"], {benchmark["name"]: benchmark for benchmark in found["benchmarks"]}


@pytest.mark.compiler
def test_without_a_gpu_planning_and_cold_compilation_are_timed_and_the_rest_says_why_not(tmp_path: Path) -> None:
    output, machine, found = stored(tmp_path, BENCHMARKS)
    assert machine["kernels"].startswith("not run, the PyTorch reference serves CPU tensors")
    targets = ("sm_80", "sm_90", "sm_100", "gfx942", "gfx950")
    compiled = {f"test_compile_time_of_all_headlines[{target}]" for target in targets}
    assert found.keys() == {"test_host_time_of_planning_a_first_call[five]", *compiled}
    assert "SKIPPED [2]" in output
    assert "needs a GPU" in output
    for name in compiled:
        assert found[name]["group"] == "tk-sample compile_time_of_all_headlines"
        assert found[name]["extra_info"] == {"kernels": 1}
        assert found[name]["stats"]["rounds"] == 3
        # What comes from a cache is there in less.
        assert found[name]["stats"]["min"] > 0.02


def test_of_a_gpu_the_core_timers_samples_are_stored(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(AS_IF_ON_A_GPU)
    _, _, found = stored(tmp_path, BENCHMARKS + AS_IF_MEASURED, "-k", "latency or later")
    latency = found["test_kernel_latency[five]"]
    assert latency["group"] == "tk-sample kernel_latency"
    assert latency["stats"]["data"] == pytest.approx([12e-6, 10e-6, 11e-6])
    assert latency["stats"]["median"] == pytest.approx(11e-6)
    assert latency["options"]["timer"] == "tk_kernel_core_timing"
    assert latency["extra_info"] == {"method": "cuda-graph", "note": ""}
    assert found["test_host_time_of_a_later_call[five]"]["stats"]["data"] == pytest.approx([5e-6])
