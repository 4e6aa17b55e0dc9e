"""The commands in a process of their own, with a kernel package installed and no GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tk_kernel_core import selection
from tk_kernel_core.interpreter import numpy_is_too_new
from tk_kernel_core.results import Report

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def double_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets) * FACTOR)
"""

SPEC = """
import dataclasses
import sys

import torch
from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.launch import Kernel, PreparedLaunch
from tk_kernel_core.spec import BaselineUnavailable, Case, Cost, KernelSpec, Tolerance

KERNEL = Kernel("tk_sample_kernels", "double_kernel")


def make_inputs(case, device, seed):
    if device == "meta":
        return {"x": torch.empty(case.params["n"], device="meta")}
    return {"x": torch.randn(case.params["n"], generator=torch.Generator(device).manual_seed(seed), device=device)}


def run(inputs):
    x = inputs["x"]
    print("a kernel that prints")
    if backend_of("x", x) == "reference":
        raise AssertionError("the kernel itself must run")
    out = torch.empty_like(x)
    PreparedLaunch(KERNEL, (x.numel() // 64, 1, 1), (), {"BLOCK": 64}, x.device, num_warps=1)(out, x)
    return out


def absent(inputs):
    raise BaselineUnavailable("no such <package>")


SPEC = KernelSpec(
    name="tk-sample",
    summary="Doubles.",
    cases={
        name: Case(name, {"n": 1 << 20}, source="a model", tags=frozenset({name}))
        for name in ("decode", "prefill")
    },
    make_inputs=make_inputs,
    run=run,
    reference=lambda inputs: inputs["x"].double() * 2,
    cost=lambda case: Cost(float(case.params["n"]), 4 * case.params["n"], 4 * case.params["n"]),
    tolerance=lambda case: Tolerance(0.0, 0.0),
    shrink=lambda case: dataclasses.replace(case, params={"n": 128}),
    baselines={"torch": lambda inputs: inputs["x"] * 2, "absent": absent},
)
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


interprets = pytest.mark.skipif(
    numpy_is_too_new(), reason="starts a process with the interpreter, which fails with this NumPy"
)


@pytest.fixture
def installed(tmp_path: Path) -> Run:
    """Install the package tk-sample for a process of its own, on a machine without a GPU."""
    site = tmp_path / "site"
    metadata = site / "tk_sample-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tk-sample\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[tk.kernels]\ntk-sample = tk_sample:SPEC\n")
    (site / "tk_sample.py").write_text(SPEC)

    def run(
        *arguments: str, factor: str = "2", environment: Mapping[str, str] | None = None, cwd: Path = tmp_path
    ) -> subprocess.CompletedProcess[str]:
        (site / "tk_sample_kernels.py").write_text(KERNEL.replace("FACTOR", factor))
        variables = {name: value for name, value in os.environ.items() if name not in {"TRITON_INTERPRET", "COLUMNS"}}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        # Neither vendor's GPUs are visible, whatever this machine has.
        variables |= {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", **(environment or {})}
        return subprocess.run(
            [sys.executable, "-m", "tk_kernel_core", *arguments],
            capture_output=True,
            text=True,
            env=variables,
            cwd=cwd,
            timeout=300,
            check=False,
        )

    return run


@interprets
def test_check_runs_the_kernel_in_the_interpreter(installed: Run) -> None:
    done = installed("check", "tk-sample", "--json")
    assert done.returncode == selection.OK, done.stderr
    report = Report.model_validate_json(done.stdout)
    assert report.environment.setting == "interpreter"
    assert [(check.case, check.passed, check.params) for check in report.checks] == [
        ("decode", True, {"n": 128}),
        ("prefill", True, {"n": 128}),
    ]
    assert "interpreter on the CPU" in done.stderr
    assert "a kernel that prints" in done.stderr


@interprets
def test_check_finds_a_wrong_kernel(installed: Run) -> None:
    done = installed("check", "tk-sample", "--tag", "decode", factor="3")
    assert done.returncode == selection.FAILED == 1
    assert "FAILED" in done.stdout
    assert "times are not GPU times" in done.stdout.splitlines()[0]
    assert "tk-sample decode: the largest error is" in done.stderr


@interprets
def test_an_explicit_choice_of_the_interpreter_is_kept(installed: Run) -> None:
    done = installed("check", "tk-sample", "--case", "decode", environment={"TRITON_INTERPRET": "1"})
    assert done.returncode == selection.OK, done.stderr


@interprets
def test_bench_times_kernel_and_baselines(installed: Run) -> None:
    done = installed("bench", "tk-sample", "--case", "decode", "--gpu", "A100-40GB-SXM", "--json")
    assert done.returncode == selection.OK, done.stderr
    (result,) = Report.model_validate_json(done.stdout).results
    assert result.timing is not None
    assert result.timing.rounds[0].method == "cpu-clock"
    assert result.placement.percent_of_roof is None
    assert result.placement.roof_us == pytest.approx(2**23 / 1.555e12 * 1e6, rel=0.01)
    torch_baseline, absent = result.baselines
    assert torch_baseline.ratio is not None
    assert (absent.timing, absent.unavailable) == (None, "no such <package>")


@interprets
def test_demo_writes_a_report_and_prints_one_table(installed: Run, tmp_path: Path) -> None:
    done = installed("demo", "tk-sample", "--report", str(tmp_path / "out"))
    assert done.returncode == selection.OK, done.stderr
    report = Report.model_validate_json((tmp_path / "out" / "report.json").read_text())
    assert len(report.checks) == len(report.results) == 2
    assert (tmp_path / "out" / "roofline.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "no such &lt;package&gt;" in page
    assert done.stdout.count("╭") == 1
    assert "passed" in done.stdout
    assert "baseline absent could not run: no such <package>" in done.stdout
    assert str(tmp_path / "out" / "report.html") in done.stderr


@interprets
def test_progress_is_shown_on_stderr_when_forced(installed: Run) -> None:
    done = installed("check", "tk-sample", "--json", environment={"FORCE_COLOR": "1"})
    assert done.returncode == selection.OK, done.stderr
    assert "2/2" in done.stderr
    assert json.loads(done.stdout)


def test_resources_are_reported_per_target(installed: Run) -> None:
    done = installed("resources", "tk-sample", "--case", "decode", "--target", "sm_90", "--json")
    assert done.returncode == selection.OK, done.stderr
    document = json.loads(done.stdout)
    assert document["budget"] is None
    (report,) = document["resources"]
    assert (report["package"], report["case"], report["target"]) == ("tk-sample", "decode", "sm_90")
    assert report["kernels"][0]["kernel"] == "double_kernel"
    assert report["kernels"][0]["registers"] > 0


def test_a_kernel_that_does_not_compile_is_a_failure(installed: Run) -> None:
    done = installed("resources", "tk-sample", "--target", "sm_90", factor="missing_name")
    assert done.returncode == selection.FAILED
    assert "double_kernel does not compile for sm_90" in done.stderr
