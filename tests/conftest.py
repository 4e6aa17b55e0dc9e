"""What several tests of the repository need."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def noxfile() -> ModuleType:
    """The module noxfile.py, loaded once: nox refuses a session that is defined again."""
    spec = importlib.util.spec_from_file_location("noxfile", Path(__file__).resolve().parents[1] / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
