"""pytest plugin: markers for what a test needs, the device kernels run on, and poisoned memory."""

from __future__ import annotations

import fcntl
import os
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
from hypothesis import HealthCheck, settings

from tk_kernel_core.interpreter import interpreting

MARKERS = (
    "gpu: needs a GPU",
    "large_memory(gib): needs a GPU with this much free memory",
    "compiler: compiles kernels ahead of time, which a process with TRITON_INTERPRET=1 cannot",
    "interpreter: needs a process with TRITON_INTERPRET=1",
    "tested_triton: asserts machine code in more detail than another Triton than the tested one need keep to",
)

TESTED_TRITON = "3.6"
"""Release series of the Triton that budgets and the tests so marked hold for: the one in constraints.txt."""

_TURN = pytest.StashKey[TextIO]()

# Of an installed plugin pytest rewrites all assertions, but not where this one runs from the source tree.
pytest.register_assert_rewrite("tk_testkit.spec")

# The interpreter is slow from one example to the next, and not evenly so.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, database=None)


def kernel_device() -> str:
    """Return where kernels run in this process: `cuda`, or `cpu` for the interpreter and the reference."""
    return "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--installed-only`."""
    parser.addoption(
        "--installed-only",
        action="store_true",
        help="fail when a tk package is imported from anywhere but the environment's site-packages",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers and choose the Hypothesis profile."""
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    settings.load_profile("ci" if os.environ.get("CI") else "local")


def _what_runs_kernels() -> str:
    if kernel_device() == "cuda":
        return f"compiled, on {torch.cuda.get_device_name()}"
    if interpreting():
        return "in the Triton interpreter, on the CPU"
    return "not run, the PyTorch reference serves CPU tensors (no GPU, TRITON_INTERPRET is not set)"


def pytest_report_header() -> str:
    """Say what the kernels of this run are executed by."""
    return f"tk kernels: {_what_runs_kernels()}"


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(machine_info: dict[str, Any]) -> None:
    """Let pytest-benchmark store the same, and warn when it compares runs of which it differs."""
    machine_info["kernels"] = _what_runs_kernels()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Hold `--installed-only` against everything that the test modules have imported."""
    if not session.config.getoption("--installed-only"):
        return
    environment = Path(sysconfig.get_path("purelib")).resolve()
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.startswith("tk_") and "." not in name and file and environment not in Path(file).resolve().parents:
            raise pytest.UsageError(f"{name} was imported from {file}, not from {environment}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Expect tests marked `tested_triton` to fail under another Triton: they count no more than a budget does."""
    try:
        found = version("triton")
    except PackageNotFoundError:
        return
    if found.startswith(f"{TESTED_TRITON}."):
        return
    reason = f"asserts machine code of Triton {TESTED_TRITON}, this is {found}"
    for item in items:
        if item.get_closest_marker("tested_triton"):
            item.add_marker(pytest.mark.xfail(reason=reason, strict=False))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose needs this process cannot meet."""
    if item.get_closest_marker("compiler") and interpreting():
        pytest.skip("compiles ahead of time, which TRITON_INTERPRET=1 rules out")
    if item.get_closest_marker("interpreter") and not interpreting():
        pytest.skip("needs TRITON_INTERPRET=1")
    memory = item.get_closest_marker("large_memory")
    if memory is None and item.get_closest_marker("gpu") is None:
        return
    if kernel_device() != "cuda":
        pytest.skip("needs a GPU, and TRITON_INTERPRET not to be set")
    if memory is not None:
        # Whatever processes they run in, such tests take turns: memory that is free now is promised to one.
        item.stash[_TURN] = (Path(tempfile.gettempdir()) / f"tk-testkit-large-memory-{os.getuid()}.lock").open("w")
        fcntl.flock(item.stash[_TURN], fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        free_gib = torch.cuda.mem_get_info()[0] / 2**30
        if free_gib < memory.args[0]:
            pytest.skip(f"needs {memory.args[0]} GiB of free GPU memory, {free_gib:.0f} GiB are free")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give up the memory of a test that took much, and its turn."""
    if _TURN in item.stash:
        torch.cuda.empty_cache()
        item.stash[_TURN].close()


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run: `cuda` with a GPU and without the interpreter, `cpu` otherwise."""
    return kernel_device()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Fill memory that torch allocates without a value with NaN (largest value for integers).

    An output element that a kernel does not write can then not be right by chance.
    """
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # The setting is a property of the module object, which torch's type annotations do not show.
    filling: Any = torch.utils.deterministic
    was_filling = filling.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    filling.fill_uninitialized_memory = True
    yield
    filling.fill_uninitialized_memory = was_filling
    torch.use_deterministic_algorithms(was_enabled, warn_only=was_warn_only)
