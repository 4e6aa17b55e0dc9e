"""How a kernel package describes itself to the command line, the tests and the performance harness."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tk_kernel_core.launch import KernelLaunch
    from tk_kernel_core.targets import Target

ENTRY_POINT_GROUP = "tk.kernels"

CaseValue = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class Case:
    """One problem that a kernel is checked, timed and compiled on.

    Attributes:
        name: Unique within the package, for example `llama3-8b-decode`.
        params: Shapes, dtypes and flags, under the names the package's inputs understand.
        source: The model and layer this problem is taken from.
        tags: `smoke` (small enough for the interpreter as it stands), `decode`, `prefill`, `training`,
            `headline` (has a speed bar).
    """

    name: str
    params: Mapping[str, CaseValue]
    source: str = ""
    tags: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Cost:
    """Compulsory work of one call: every tensor counted once.

    Attributes:
        flops: Floating-point operations.
        bytes_read: Bytes read from device memory.
        bytes_written: Bytes written to device memory.
        peak: Which peak the operations are held against: `vector` for ordinary fp32 arithmetic, or the
            operand dtype of the matrix units (`float16`, `bfloat16`, `int8`).
    """

    flops: float
    bytes_read: int
    bytes_written: int
    peak: str = "vector"

    @property
    def bytes_moved(self) -> int:
        """Bytes read plus bytes written."""
        return self.bytes_read + self.bytes_written

    @property
    def intensity(self) -> float:
        """Operations per byte moved; infinite when nothing is moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else float("inf")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest accepted difference: |got - want| <= absolute + relative * |want|, element by element."""

    absolute: float
    relative: float


Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stages:
    """The steps inside one call of a package, each with a place of its own on the roofline.

    Attributes:
        cost: Compulsory work of every stage of a case, by name, in the order they run. What one stage hands to
            another counts as written and as read.
        assign: `(names of the kernels of one call, in the order they run)` to the name of each one's stage; None
            for a kernel of no stage.
    """

    cost: Callable[[Case], Mapping[str, Cost]]
    assign: Callable[[Sequence[str]], Sequence[str | None]]


@dataclass(frozen=True)
class KernelSpec:
    """Everything the tools need to know about a kernel package.

    Attributes:
        name: Name of the distribution, for example `tk-rmsnorm`.
        summary: One line for listings.
        cases: The problems, by name.
        make_inputs: `(case, device, seed)` to the arguments of one call. Must work on the `meta` device,
            where `launches` plans on shapes alone.
        run: Runs the kernel on those inputs and returns one tensor or a tuple of tensors.
        reference: The same result by plain PyTorch in higher precision, never through the kernel.
        cost: Compulsory traffic and operations of a case.
        tolerance: How far `run` may lie from `reference`.
        baselines: Named alternatives on the same inputs. A baseline that cannot run here raises
            `BaselineUnavailable`.
        shrink: A case cut down to what the interpreter can run in about a second.
        bars: Highest accepted ratio of the kernel's time to a baseline's, by case and baseline.
        stages: The steps inside a call, where there are several to tell apart.
    """

    name: str
    summary: str
    cases: Mapping[str, Case]
    make_inputs: Callable[[Case, str, int], Inputs]
    run: Callable[[Inputs], Any]
    reference: Callable[[Inputs], Any]
    cost: Callable[[Case], Cost]
    tolerance: Callable[[Case], Tolerance]
    shrink: Callable[[Case], Case]
    baselines: Mapping[str, Callable[[Inputs], Any]] = field(default_factory=dict)
    bars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    stages: Stages | None = None

    def launches(self, case: Case, target: Target) -> Sequence[KernelLaunch]:
        """Return the kernel launches that `run` would make for a case on a target.

        The package's own host code runs on meta tensors, so the answer cannot differ from what a call
        launches; no GPU is touched.
        """
        from tk_kernel_core.launch import planning

        with planning(target) as launches:
            self.run(self.make_inputs(case, "meta", 0))
        return launches


class BaselineUnavailable(RuntimeError):
    """A baseline cannot run here: its package, its device or its dtype is missing."""


@functools.cache
def installed_specs() -> Mapping[str, KernelSpec]:
    """Return the specs of all installed kernel packages by distribution name, in alphabetical order.

    Raises:
        ImportError: A package cannot be imported, or lacks what its entry point names.
        TypeError: An entry point of the group `tk.kernels` does not name a `KernelSpec`.
        ValueError: An entry point's name differs from its spec's name, or two packages claim one name.
    """
    specs: dict[str, KernelSpec] = {}
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda entry: entry.name):
        try:
            spec = entry.load()
        except Exception as error:
            raise ImportError(f"{entry.name} ({entry.value}): {type(error).__name__}: {error}") from error
        if not isinstance(spec, KernelSpec):
            raise TypeError(f"entry point {entry.value} must name a KernelSpec, got {type(spec).__name__}")
        if spec.name != entry.name:
            raise ValueError(f"entry point {entry.name} names the spec of {spec.name}")
        if specs.get(spec.name, spec) is not spec:
            raise ValueError(f"two installed packages provide the kernel {spec.name}")
        specs[spec.name] = spec
    return specs
