"""Measure what each fault of the first W8A16 product cost, and what each correction bought.

    python packages/tk-int8-gemm/benchmarks/postmortem.py [--quick] [--json FILE] [--page docs/int8-postmortem.md]

Every formulation is checked against its references before it is timed. With `--quick` the shapes are tiny, and with
`TRITON_INTERPRET=1` in the environment besides no GPU is needed: then results are checked and nothing is timed.
"""
# ruff: noqa: ANN001, ANN201, N803 - one kernel is Triton's language, which is not annotated and has constants

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from tk_int8_gemm import (
    PackedInt8Weight,
    dequantize,
    int8_gemm,
    int8_gemm_torch,
    int8_linear,
    quantize_per_token,
    w8a8_gemm,
)
from tk_int8_gemm._spec import SPEC
from tk_kernel_core.bench import compare, environment
from tk_kernel_core.device import current_device, known_device
from tk_kernel_core.interpreter import interpreting, prepare_interpreter
from tk_kernel_core.results import BenchResult, CheckResult, Report, Timing
from tk_kernel_core.roofline import place
from tk_kernel_core.spec import Case, CaseValue, Inputs
from tk_kernel_core.timing import measure, rotated_inputs

BEGIN, END = "<!-- postmortem:begin -->", "<!-- postmortem:end -->"
ROWS, WEIGHT = (1, 16, 256, 2048), (11_008, 4096)
QUICK_ROWS, QUICK_WEIGHT = (1, 17), (120, 128)
ONE_CALL_S = 0.15


class Tile(NamedTuple):
    """Elements of M, N and K that a program works on at a time, and its warps."""

    m: int
    n: int
    k: int
    warps: int


FIXED_TILE = Tile(128, 128, 32, 8)


def tile_for(m: int) -> Tile:
    """Choose a tile that has no more rows than there are, and programs enough for the GPU."""
    if m <= 16:
        return Tile(16, 64, 128, 4)
    return Tile(64, 128, 64, 4) if m <= 256 else Tile(128, 128, 64, 8)


@triton.jit(do_not_specialize=["m"])
def w8a16_kernel(
    out_ptr,
    x_ptr,
    weight_ptr,
    scale_ptr,
    m,
    n,
    k,
    stride_n,
    stride_k,
    OPERANDS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = (x @ weight.T) * scale, of contiguous x [m, k] and out [m, n], and a weight [n, k] of any strides.

    k is a multiple of BLOCK_K. OPERANDS is the dtype that both operands are converted to.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    row_mask, column_mask = (rows < m)[:, None], (columns < n)[None, :]
    x_ptrs = x_ptr + rows[:, None] * k + inner[None, :]
    weight_ptrs = weight_ptr + inner[:, None] * stride_k + columns[None, :] * stride_n
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, k, BLOCK_K):
        x = tl.load(x_ptrs, mask=row_mask, other=0.0).to(OPERANDS)
        codes = tl.load(weight_ptrs, mask=column_mask, other=0).to(OPERANDS)
        acc = tl.dot(x, codes, acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K
        weight_ptrs += BLOCK_K * stride_k
    acc *= tl.load(scale_ptr + columns, mask=columns < n, other=0.0)[None, :]
    tl.store(out_ptr + rows[:, None] * n + columns[None, :], acc.to(out_ptr.dtype.element_ty), row_mask & column_mask)


def w8a16(inputs: Inputs, *, operands: tl.dtype, precision: str, fixed_tile: bool, copies: bool) -> torch.Tensor:
    """Multiply by an int8 weight with or without each of the three faults.

    Args:
        inputs: `x` fp16 [M, K], `codes` int8 [N, K] and `scale` fp32 [N].
        operands: What both operands of the product are converted to: with the first fault `tl.float32`.
        precision: `tf32` or `ieee`, which counts for fp32 operands alone.
        fixed_tile: The second fault: one tile for every number of rows.
        copies: The third fault: the weight is transposed, by a copy, in the call.

    Returns:
        fp16 [M, N].
    """
    x, codes = inputs["x"], inputs["codes"]
    (m, k), n = x.shape, codes.shape[0]
    weight = codes.t().contiguous().t() if copies else codes
    tile = FIXED_TILE if fixed_tile else tile_for(m)
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    w8a16_kernel[(triton.cdiv(m, tile.m), triton.cdiv(n, tile.n))](
        out,
        x,
        weight,
        inputs["scale"],
        m,
        n,
        k,
        *weight.stride(),
        OPERANDS=operands,
        PRECISION=precision,
        BLOCK_M=tile.m,
        BLOCK_N=tile.n,
        BLOCK_K=tile.k,
        num_warps=tile.warps,
    )
    return out


def prepared(inputs: Inputs, name: str, make: Callable[[], Any]) -> Any:
    """Return what a formulation makes of the weight once: for each set of inputs, before anything is timed."""
    if name not in inputs:
        inputs[name] = make()
    return inputs[name]


def cublas(inputs: Inputs) -> torch.Tensor:
    """Multiply by the weight in fp16."""
    x, codes, scale = inputs["x"], inputs["codes"], inputs["scale"]
    weight: torch.Tensor = prepared(inputs, "fp16_weight", lambda: dequantize(codes, scale, x.dtype))
    return torch.nn.functional.linear(x, weight)


def int_mm(inputs: Inputs, *, row_major: bool) -> torch.Tensor:
    """Multiply codes by codes, [M, K] by [K, N], and scale nothing."""
    x_codes = prepared(inputs, "x_codes", lambda: quantize_per_token(inputs["x"])[0])
    weight = inputs["codes"].t()
    if row_major:
        weight = prepared(inputs, "row_major", weight.contiguous)
    result: torch.Tensor = torch._int_mm(x_codes, weight)
    return result


def by_int8_linear(inputs: Inputs) -> torch.Tensor:
    """Multiply by a prepared weight."""
    packed = prepared(inputs, "packed", lambda: PackedInt8Weight.pack(inputs["codes"], inputs["scale"]))
    return int8_linear(inputs["x"], packed)


def weight_only_reference(inputs: Inputs) -> torch.Tensor:
    """Multiply 16-bit activations by the weight, which is not rounded, in fp64."""
    x = inputs["x"]
    return int8_gemm_torch(x.double(), inputs["codes"], inputs["scale"]).to(x.dtype)


def fp16_weight_reference(inputs: Inputs) -> torch.Tensor:
    """Round the weight to fp16, and multiply in fp64."""
    x = inputs["x"]
    return (x.double() @ dequantize(inputs["codes"], inputs["scale"], x.dtype).double().T).to(x.dtype)


def w8a8_reference(inputs: Inputs) -> torch.Tensor:
    """Quantise activations, and multiply in fp64."""
    result: torch.Tensor = SPEC.reference({**inputs, "form": "w8a8_gemm"})
    return result


def codes_reference(inputs: Inputs) -> torch.Tensor:
    """Multiply the codes in fp64, which is exact."""
    return quantize_per_token(inputs["x"])[0].double() @ inputs["codes"].double().T


class Formulation(NamedTuple):
    """One line of the table.

    Attributes:
        run: Computes the product of a set of inputs.
        references: What the result must be one of; whole numbers must be equal.
        fewest_rows: What it refuses fewer rows of x than, on a GPU.
    """

    run: Callable[[Inputs], torch.Tensor]
    references: tuple[Callable[[Inputs], torch.Tensor], ...] = (weight_only_reference,)
    fewest_rows: int = 1


def faulty(
    operands: tl.dtype = tl.float32, precision: str = "tf32", *, fixed_tile: bool = True, copies: bool = True
) -> Formulation:
    """Return the product with the faults named, all three by default."""
    choices = {"operands": operands, "precision": precision, "fixed_tile": fixed_tile, "copies": copies}
    return Formulation(functools.partial(w8a16, **choices))


# For many rows the package rounds the weight to fp16 as well.
EITHER_WEIGHT = (weight_only_reference, fp16_weight_reference)
FORMULATIONS: Mapping[str, Formulation] = {
    "cuBLAS, weight in fp16": Formulation(cublas, (fp16_weight_reference,)),
    "all three faults, and fp32 products not in TF32": faulty(precision="ieee"),
    "all three faults": faulty(),
    "without fault 1: operands in fp16": faulty(tl.float16),
    "without 1 and 2: a tile for each M": faulty(tl.float16, fixed_tile=False),
    "without 1, 2 and 3: the weight read where it lies": faulty(tl.float16, fixed_tile=False, copies=False),
    "`torch._int_mm`, weight row-major": Formulation(functools.partial(int_mm, row_major=True), (codes_reference,), 17),
    "`torch._int_mm`, weight column-major": Formulation(
        functools.partial(int_mm, row_major=False), (codes_reference,), 17
    ),
    "`int8_gemm`": Formulation(lambda inputs: int8_gemm(inputs["x"], inputs["codes"], inputs["scale"]), EITHER_WEIGHT),
    "`int8_linear`": Formulation(by_int8_linear, EITHER_WEIGHT),
    "`w8a8_gemm`": Formulation(
        lambda inputs: w8a8_gemm(inputs["x"], inputs["codes"], inputs["scale"]), (w8a8_reference,)
    ),
}


def case_of(m: int, n: int, k: int) -> Case:
    """Return the case of the package's spec that makes plain codes, without zero points and bias."""
    params: dict[str, CaseValue] = {
        "form": "int8_gemm",
        "m": m,
        "n": n,
        "k": k,
        "dtype": "float16",
        "has_zero_point": False,
    }
    return Case(f"M = {m}", {**params, "has_bias": False}, "Llama-2-7B up_proj")


def check(name: str, case: Case, inputs: Inputs) -> CheckResult:
    """Hold one formulation's result against its references."""
    formulation, label = FORMULATIONS[name], f"{name}, {case.name}"
    try:
        got, tolerance = formulation.run(inputs), SPEC.tolerance(case)
        comparisons = [compare(got, reference(inputs), tolerance) for reference in formulation.references]
        error, multiple = min(comparisons, key=lambda comparison: comparison[1])
    except Exception as problem:  # noqa: BLE001 - one that fails must not cost the others their times
        message = f"{type(problem).__name__}: {problem}"
        return CheckResult(package=SPEC.name, case=label, params=case.params, passed=False, message=message)
    message = "" if multiple <= 1.0 else f"the largest error is {error:.3g}, {multiple:.3g} times what is accepted"
    return CheckResult(
        package=SPEC.name,
        case=label,
        params=case.params,
        passed=not message,
        largest_error=error,
        error_over_tolerance=multiple,
        message=message,
    )


def run_all(rows: Iterable[int], weight: tuple[int, int], device: str) -> Report:
    """Check every formulation that takes so many rows, and on a GPU time those that are right.

    Args:
        rows: Numbers of rows of the activations.
        weight: (N, K).
        device: `cuda`, or `cpu` for the interpreter.
    """
    checks, results = [], []
    card = current_device() if device == "cuda" else known_device("H200")
    for m in rows:
        case = case_of(m, *weight)
        cost = SPEC.cost(case)
        # Enough for the codes alone to exceed the caches; what is prepared from them comes on top.
        sets = rotated_inputs(functools.partial(SPEC.make_inputs, case, device), device)
        for name, formulation in FORMULATIONS.items():
            if device == "cuda" and m < formulation.fewest_rows:
                continue
            print(f"{name}, {case.name}", file=sys.stderr)
            checks.append(check(name, case, sets[0]))
            if device == "cpu" or not checks[-1].passed:
                continue
            measured = measure(formulation.run, sets, budget_s=ONE_CALL_S)
            timing = Timing(**measured.model_dump(include={"latency_us", "spread_us", "host_us"}), rounds=(measured,))
            results.append(
                BenchResult(
                    package=SPEC.name,
                    case=checks[-1].case,
                    source=case.source,
                    params=case.params,
                    cost=cost,
                    placement=place(cost, card, measured.latency_us),
                    timing=timing,
                )
            )
    made_in = environment("gpu" if device == "cuda" else "interpreter", card)
    return Report(environment=made_in, checks=tuple(checks), results=tuple(results))


def table(report: Report | None) -> str:
    """Return the Markdown table of microseconds, and in brackets multiples of cuBLAS.

    Args:
        report: The times; None for a table without any.
    """
    results = report.results if report else ()
    times_us = {result.case: result.timing.latency_us for result in results if result.timing}
    rows = list(dict.fromkeys(result.params["m"] for result in results)) or ROWS
    unit = next(iter(FORMULATIONS))

    def cell(name: str, m: CaseValue) -> str:
        if not report:
            return "not measured yet"
        time_us, unit_us = times_us.get(f"{name}, M = {m}"), times_us.get(f"{unit}, M = {m}")
        if time_us is None:
            return "–"
        return f"{time_us:.1f} ({time_us / unit_us:.2f})" if unit_us else f"{time_us:.1f}"

    lines = [["formulation", *(f"M = {m}" for m in rows)], ["---", *("---:" for _ in rows)]]
    lines += [[name, *(cell(name, m) for m in rows)] for name in FORMULATIONS]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def section(report: Report) -> str:
    """Return the table below the sentence that says where and when it was measured."""
    made_in = report.environment
    card = f"{made_in.device.name} (driver {made_in.device.driver_version or 'unknown'})"
    versions = f"torch {made_in.torch}, Triton {made_in.triton}, {made_in.made_at:%Y-%m-%d}"
    commit = f", commit {made_in.commit}" if made_in.commit else ""
    return f"One {card}, {versions}{commit}.\n\n{table(report)}"


def with_section(page: str, text: str) -> str:
    """Return a page with another text between its markers.

    Raises:
        ValueError: The page has not each marker once.
    """
    for marker in (BEGIN, END):
        if page.count(marker) != 1:
            raise ValueError(f"the page must have {marker} once, has it {page.count(marker)} times")
    before, after = page[: page.index(BEGIN)], page[page.index(END) :]
    return f"{before}{BEGIN}\n\n{text}\n{after}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; 1 where a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write checks, times and the environment there")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the table between this page's markers")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() and not interpreting() else "cpu"
    if device == "cpu" and not (interpreting() and options.quick):
        parser.error("there is no GPU here: set TRITON_INTERPRET=1 and give --quick to check results without one")
    if options.page and options.quick:
        parser.error("--page takes times of the full shapes: leave out --quick")
    if options.page:
        # A page without markers is refused before the work is done that would be lost.
        with_section(options.page.read_text(encoding="utf-8"), "")
    if interpreting():
        prepare_interpreter()

    rows, weight = (QUICK_ROWS, QUICK_WEIGHT) if options.quick else (ROWS, WEIGHT)
    report = run_all(rows, weight, device)
    if options.json:
        options.json.write_text(report.to_json(), encoding="utf-8")
    if device == "cuda":
        print(section(report), end="")
    else:
        print(f"{len(report.checks) - len(report.failures)} results are right; without a GPU nothing is timed")
    if report.failures:
        print("\n  ".join([f"{len(report.failures)} failed:", *report.failures]), file=sys.stderr)
        return 1
    if options.page:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(with_section(page, section(report)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
