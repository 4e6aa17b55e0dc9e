"""What importing the parts that kernel packages use brings along."""

from __future__ import annotations

import subprocess
import sys

import pytest

USED_BY_PACKAGES = (
    "spec",
    "targets",
    "launch",
    "dispatch",
    "interpreter",
    "checks",
    "registration",
    "layout",
    "explain",
    "gemm",
    "reduction",
    "modules",
    "numerics",
)
HEAVY = {"triton", "pydantic", "matplotlib", "rich", "jinja2", "pynvml", "amdsmi", "pytest", "pandas", "scipy"}
BLOCK = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_package_itself_imports_nothing_else() -> None:
    script = "import sys, tk_kernel_core; print(tk_kernel_core.__version__, *sorted(sys.modules))"
    version, *modules = run(script).split()
    assert version[0].isdigit()
    assert [name for name in modules if name.startswith("tk_")] == ["tk_kernel_core"]
    assert not (HEAVY | {"torch", "numpy"}) & set(modules)


@pytest.mark.parametrize("module", ["spec", "targets", "layout"])
def test_descriptions_need_no_torch(module: str) -> None:
    modules = set(run(f"import sys, tk_kernel_core.{module}; print(*sys.modules)").split())
    assert not (HEAVY | {"torch", "numpy"}) & modules


def test_what_packages_use_imports_little_and_touches_no_gpu() -> None:
    imports = "\n".join(f"import tk_kernel_core.{module}" for module in USED_BY_PACKAGES)
    script = f"""
import sys
import torch
before = set(sys.modules)
{imports}
print(torch.cuda.is_initialized(), *{{name.partition(".")[0] for name in set(sys.modules) - before}})
"""
    initialized, *modules = run(script).split()
    assert initialized == "False"
    assert not HEAVY & set(modules)


def test_works_without_what_only_tools_need() -> None:
    modules = ", ".join(f"tk_kernel_core.{module}" for module in USED_BY_PACKAGES)
    script = f"""
BLOCKED = {HEAVY!r}
{BLOCK}
import torch
import {modules}
from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.registration import define_operator
assert backend_of("x", torch.ones(1)) == "reference"
library = torch.library.Library("tk_import_test", "DEF")
double = define_operator(library, "double(Tensor x) -> Tensor", lambda x: x * 2, torch.empty_like)
print(double(torch.ones(1)).item())
"""
    assert run(f"import os\nos.environ.pop('TRITON_INTERPRET', None)\n{script}") == "2.0"
