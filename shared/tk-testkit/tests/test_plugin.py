"""Markers, fixtures and options of the pytest plugin, in pytest runs of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


def run_pytest(folder: Path, test: str, *arguments: str, **environment: str) -> str:
    (folder / "test_sample.py").write_text(test)
    (folder / "pytest.ini").write_text("[pytest]\n")
    variables = {name: value for name, value in os.environ.items() if name not in {"CI", "TRITON_INTERPRET"}}
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "--strict-markers", *arguments]
    result = subprocess.run(
        command, cwd=folder, env=variables | environment, capture_output=True, text=True, check=False
    )
    return result.stdout + result.stderr


NEEDS = """
import pytest

@pytest.mark.{marker}
def test_it(device):
    print("ran on", device)
"""


@pytest.mark.parametrize(
    ("environment", "outcomes"),
    [
        ({}, {"compiler": "PASSED", "interpreter": "SKIPPED (needs TRITON_INTERPRET=1"}),
        (
            {"TRITON_INTERPRET": "1"},
            {"compiler": "SKIPPED (compiles ahead of time", "interpreter": "PASSED", "gpu": "SKIPPED (needs a GPU"},
        ),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"gpu": "SKIPPED (needs a GPU", "large_memory(1)": "SKIPPED (needs a GPU"}),
    ],
)
def test_markers_skip_with_a_reason(tmp_path: Path, environment: dict[str, str], outcomes: dict[str, str]) -> None:
    tests = (NEEDS.format(marker=marker).replace("test_it", f"test_{number}") for number, marker in enumerate(outcomes))
    output = run_pytest(tmp_path, "".join(tests), "-vv", **environment)
    for number, outcome in enumerate(outcomes.values()):
        assert f"::test_{number} {outcome}" in output


@pytest.mark.parametrize(("found", "outcome"), [("3.6.1", "1 failed"), ("3.60.0", "1 xfailed"), (None, "1 failed")])
def test_what_only_the_tested_triton_need_keep_to_is_expected_to_fail_under_others(
    tmp_path: Path, found: str | None, outcome: str
) -> None:
    if found is None:
        change = "def version(name): raise plugin.PackageNotFoundError(name)"
    else:
        change = f"def version(name): return {found!r}"
    (tmp_path / "conftest.py").write_text(f"import tk_testkit.plugin as plugin\n{change}\nplugin.version = version\n")
    test = "import pytest\n\n@pytest.mark.tested_triton\ndef test_it():\n    assert False\n"
    output = run_pytest(tmp_path, test, "-rx")
    assert outcome in output
    assert ("asserts machine code of Triton 3.6, this is 3.60.0" in output) == (found == "3.60.0")


@pytest.mark.gpu
def test_large_memory_asks_for_free_memory(tmp_path: Path) -> None:
    assert "1 passed" in run_pytest(tmp_path, NEEDS.format(marker="large_memory(0.1)"))
    assert "GiB are free" in run_pytest(tmp_path, NEEDS.format(marker="large_memory(100000)"))


PRETEND = """
import torch, tk_testkit.plugin as plugin

plugin.kernel_device = lambda: "cuda"
torch.cuda.get_device_name = lambda: "no GPU"
torch.cuda.empty_cache = lambda: None
torch.cuda.mem_get_info = lambda: (2**40, 2**40)
"""
TAKES_MUCH = """
import time, pytest

@pytest.mark.large_memory(1)
@pytest.mark.parametrize("test", range(2))
def test_it(test):
    with open("turns.txt", "a") as file:
        file.write("in ")
        file.flush()
        time.sleep(0.3)
        file.write("out ")
"""


def test_tests_that_take_much_memory_take_turns_between_processes(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(PRETEND)
    assert "2 passed" in run_pytest(tmp_path, TAKES_MUCH, "-n", "2")
    assert (tmp_path / "turns.txt").read_text() == "in out in out "


def test_header_and_device_tell_what_runs_kernels(tmp_path: Path) -> None:
    test = NEEDS.format(marker="interpreter")
    interpreted = run_pytest(tmp_path, test, "-s", TRITON_INTERPRET="1")
    assert "tk kernels: in the Triton interpreter, on the CPU" in interpreted
    assert "ran on cpu" in interpreted
    assert "the PyTorch reference serves CPU tensors" in run_pytest(tmp_path, test, CUDA_VISIBLE_DEVICES="")


def test_installed_only_refuses_a_package_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "tk_a_stray.py").write_text("")
    test = "import tk_a_stray\n\ndef test_it():\n    pass\n"
    assert "tk_a_stray was imported from" in run_pytest(tmp_path, test, "--installed-only")
    assert "1 passed" in run_pytest(tmp_path, test)


def test_hypothesis_is_derandomized_in_ci_only(tmp_path: Path) -> None:
    test = "from hypothesis import settings\n\ndef test_it():\n    assert settings().derandomize is {}\n"
    assert "1 passed" in run_pytest(tmp_path, test.format(True), CI="true")
    assert "1 passed" in run_pytest(tmp_path, test.format(False))


@pytest.mark.usefixtures("poisoned_memory")
def test_poisoned_memory_reaches_every_allocation(device: str) -> None:
    like = torch.zeros(64, 3, device=device, dtype=torch.bfloat16)
    for unwritten in (
        torch.empty(64, device=device),
        torch.empty_like(like),
        like.new_empty(7),
        torch.empty_strided((4, 4), (1, 4), device=device),
    ):
        assert unwritten.isnan().all()
    assert (torch.empty(64, device=device, dtype=torch.int8) == 127).all()


def test_memory_is_not_poisoned_without_the_fixture() -> None:
    assert not torch.utils.deterministic.fill_uninitialized_memory or not torch.are_deterministic_algorithms_enabled()
