"""How packages describe themselves and are found."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tk_kernel_core import spec as spec_module
from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.launch import Kernel, PreparedLaunch, is_planning, launch_target, recording
from tk_kernel_core.spec import Case, Cost, Inputs, KernelSpec, Tolerance, installed_specs
from tk_kernel_core.targets import COMPILE_TARGETS

sys.path.append(str(Path(__file__).parent))

CASE = Case("one", {"n": 256})


def double(inputs: Inputs) -> torch.Tensor:
    """Host code as packages write it: the launch depends on the target."""
    x = inputs["x"]
    if backend_of("x", x) == "reference":
        return x * 2
    out = torch.empty_like(x)
    block = 64 if launch_target(x.device).warp_size == 64 else 32
    grid = (x.numel() // block, 1, 1)
    PreparedLaunch(Kernel("sample_kernels", "copy_kernel"), grid, (), {"BLOCK": block}, x.device, num_warps=2)(out, x)
    return out


def make_spec(name: str = "tk-one", **changes: Any) -> KernelSpec:
    fields: dict[str, Any] = {
        "name": name,
        "summary": "Doubles.",
        "cases": {"one": CASE},
        "make_inputs": lambda case, device, seed: {"x": torch.empty(case.params["n"], device=device)},
        "run": double,
        "reference": lambda inputs: inputs["x"] * 2,
        "cost": lambda case: Cost(1.0, 1, 1),
        "tolerance": lambda case: Tolerance(0.0, 0.0),
        "shrink": lambda case: case,
    }
    return KernelSpec(**{**fields, **changes})


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Entry points of the group, by name, in the order in which the environment gives them."""
    points: dict[str, Any] = {}

    def entry_points(*, group: str) -> list[SimpleNamespace]:
        assert group == "tk.kernels"
        pairs = [(name, value) for name, values in points.items() for value in values]
        return [
            SimpleNamespace(name=name, value=f"{name}:SPEC", load=lambda value=value: value) for name, value in pairs
        ]

    monkeypatch.setattr(spec_module, "entry_points", entry_points)
    installed_specs.cache_clear()
    yield points
    installed_specs.cache_clear()


def test_specs_come_in_alphabetical_order(installed: dict[str, Any]) -> None:
    specs = {name: make_spec(name) for name in ("tk-two", "tk-one", "tk-three")}
    installed.update({name: [spec] for name, spec in specs.items()})
    assert list(installed_specs()) == ["tk-one", "tk-three", "tk-two"]
    assert all(installed_specs()[name] is spec for name, spec in specs.items())


def test_nothing_is_installed(installed: dict[str, Any]) -> None:
    assert installed_specs() == {}


def test_one_spec_may_be_found_twice(installed: dict[str, Any]) -> None:
    # As where a source folder and an installed distribution are both on the path.
    spec = make_spec()
    installed["tk-one"] = [spec, spec]
    assert installed_specs() == {"tk-one": spec}


def test_two_packages_cannot_claim_one_name(installed: dict[str, Any]) -> None:
    installed["tk-one"] = [make_spec(), make_spec()]
    with pytest.raises(ValueError, match="two installed packages provide the kernel tk-one"):
        installed_specs()


def test_an_entry_point_has_its_spec_s_name(installed: dict[str, Any]) -> None:
    installed["tk-one"] = [make_spec("tk-two")]
    with pytest.raises(ValueError, match="entry point tk-one names the spec of tk-two"):
        installed_specs()


@pytest.mark.parametrize(
    "value", [None, make_spec, KernelSpec, {"name": "tk-one"}], ids=["none", "function", "class", "mapping"]
)
def test_an_entry_point_names_a_spec(installed: dict[str, Any], value: object) -> None:
    installed["tk-one"] = [value]
    with pytest.raises(TypeError, match=f"entry point tk-one:SPEC must name a KernelSpec, got {type(value).__name__}"):
        installed_specs()


@pytest.mark.parametrize(("name", "block"), [("sm_90", 32), ("sm_100", 32), ("gfx942", 64)])
def test_launches_are_those_of_the_target(name: str, block: int) -> None:
    (launch,) = make_spec().launches(CASE, COMPILE_TARGETS[name])
    assert (launch.module, launch.kernel) == ("sample_kernels", "copy_kernel")
    assert launch.grid == (256 // block, 1, 1)
    assert dict(launch.arguments)["BLOCK"] == block
    assert launch.options == (("num_warps", 2),)


def test_launches_leave_no_state() -> None:
    x = torch.empty(256, device="meta")
    spec = make_spec()
    with recording() as around:
        first = spec.launches(CASE, COMPILE_TARGETS["sm_90"])
        assert spec.launches(CASE, COMPILE_TARGETS["gfx942"]) != first
        assert spec.launches(CASE, COMPILE_TARGETS["sm_90"]) == first
    assert len(first) == 1
    assert around == []
    assert not is_planning()
    assert launch_target(x.device).name == "sm_90"
    assert backend_of("x", x) == "reference"


def test_an_error_in_the_host_code_leaves_no_state() -> None:
    def refuse(inputs: Inputs) -> None:
        assert is_planning()
        raise KeyError("weight")

    with pytest.raises(KeyError, match="weight"):
        make_spec(run=refuse).launches(CASE, COMPILE_TARGETS["gfx942"])
    assert not is_planning()
    assert launch_target(torch.device("meta")).name == "sm_90"


def test_inputs_are_made_on_the_meta_device() -> None:
    devices = []

    def make_inputs(case: Case, device: str, seed: int) -> Inputs:
        devices.append((case, device))
        return {"x": torch.empty(256, device=device)}

    make_spec(make_inputs=make_inputs).launches(CASE, COMPILE_TARGETS["sm_80"])
    assert devices == [(CASE, "meta")]


def test_cost() -> None:
    cost = Cost(flops=100.0, bytes_read=30, bytes_written=20)
    assert cost.bytes_moved == 50
    assert cost.intensity == 2.0
    assert cost.peak == "vector"
    assert Cost(5.0, 0, 0).intensity == math.inf
    assert Cost(0.0, 0, 0).intensity == math.inf
    assert Cost(0.0, 4, 0).intensity == 0.0


def test_descriptions_cannot_be_changed() -> None:
    for description, name in ((CASE, "name"), (Cost(1.0, 1, 1), "flops"), (make_spec(), "run")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(description, name, None)


def test_a_package_that_cannot_be_imported_is_named(installed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AttributeError("module 'tk_one._spec' has no attribute 'SPEC'")

    point = SimpleNamespace(name="tk-one", value="tk_one._spec:SPEC", load=fail)
    monkeypatch.setattr(spec_module, "entry_points", lambda *, group: [point])
    with pytest.raises(ImportError, match=r"tk-one \(tk_one._spec:SPEC\): AttributeError: module"):
        installed_specs()
