"""A spec as kernel packages have them, around the core's own kernel."""

from __future__ import annotations

import torch

from tk_kernel_core.dispatch import backend_of
from tk_kernel_core.reduction import sum_rows
from tk_kernel_core.spec import Case, Cost, Inputs, KernelSpec, Stages, Tolerance

ROWS, COLUMNS = 5, 64
COST = Cost(0, bytes_read=4 * ROWS * COLUMNS, bytes_written=4 * COLUMNS)


def make_inputs(case: Case, device: str, seed: int) -> Inputs:
    generator = None if device == "meta" else torch.Generator(device).manual_seed(seed)
    shape = case.params["rows"], COLUMNS
    return {"x": torch.randn(shape, generator=generator, device=device), "scale": 1.0}


def run(inputs: Inputs) -> torch.Tensor:
    x = inputs["x"]
    return sum_rows(x, x.dtype) if backend_of("x", x) == "triton" else x.sum(0)


SPEC = KernelSpec(
    name="tk-sample",
    summary="The sum of rows.",
    cases={"five": Case("five", {"rows": ROWS}, tags=frozenset({"headline"}))},
    make_inputs=make_inputs,
    run=run,
    reference=lambda inputs: inputs["x"].sum(0),
    cost=lambda case: COST,
    tolerance=lambda case: Tolerance(1e-5, 1e-5),
    shrink=lambda case: case,
    stages=Stages(lambda case: {"sum": COST}, lambda kernels: ["sum" for _ in kernels]),
)
