from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tk_kernel_core import bench, cli, commands, device, resources, selection
from tk_kernel_core.device import known_device
from tk_kernel_core.resources import CaseResources, KernelResources
from tk_kernel_core.results import Report
from tk_kernel_core.spec import BaselineUnavailable, Case, Cost, Inputs, KernelSpec, Tolerance
from tk_kernel_core.timing import Measurement, summarise

if TYPE_CHECKING:
    import torch


def fake_spec(name: str = "tk-fake", **changes: Any) -> KernelSpec:
    def refuse(inputs: Inputs) -> torch.Tensor:
        raise AssertionError("must not run")

    fields: dict[str, Any] = {
        "name": name,
        "summary": "Does nothing.",
        "cases": {
            "llama-decode": Case("llama-decode", {"n": 1}, "llama", frozenset({"decode"})),
            "llama-prefill": Case("llama-prefill", {"n": 2}, "llama", frozenset({"prefill"})),
        },
        "make_inputs": refuse,
        "run": refuse,
        "reference": refuse,
        "cost": lambda case: Cost(1e6, 1 << 20, 1 << 20),
        "tolerance": lambda case: Tolerance(0.0, 0.0),
        "shrink": lambda case: case,
    }
    return KernelSpec(**{**fields, **changes})


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two fake kernels, no GPU."""
    monkeypatch.setattr(commands, "_has_gpu", lambda: False)
    specs = {name: fake_spec(name) for name in ("tk-fake", "tk-other")}
    monkeypatch.setattr(selection, "installed_specs", lambda: specs)


def selected_cases(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[tuple[str, str]]:
    assert cli.main(["list", "--json", *arguments]) == 0
    return [
        (kernel["name"], case["name"]) for kernel in json.loads(capsys.readouterr().out) for case in kernel["cases"]
    ]


@pytest.mark.usefixtures("without_gpu")
def test_selection_by_kernel_case_and_tag(capsys: pytest.CaptureFixture[str]) -> None:
    everything = [(kernel, case) for kernel in ("tk-fake", "tk-other") for case in ("llama-decode", "llama-prefill")]
    assert selected_cases(capsys) == everything
    assert selected_cases(capsys, "tk-other") == everything[2:]
    assert selected_cases(capsys, "tk-other", "tk-other") == everything[2:]
    assert selected_cases(capsys, "--case", "*decode") == everything[::2]
    assert selected_cases(capsys, "--case", "llama-decode", "--case", "llama-pre*") == everything
    assert selected_cases(capsys, "tk-fake", "--tag", "prefill") == everything[1:2]


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        (["list", "tk-missing"], "tk-fake, tk-other"),
        (["check", "tk-missing"], "tk-fake, tk-other"),
        (["list", "--case", "mixtral*"], "llama-decode, llama-prefill"),
        (["bench", "--case", "llama-decode", "--case", "typo"], "llama-decode, llama-prefill"),
        (["list", "--tag", "typo"], "decode, prefill"),
        (["device", "--gpu", "typo"], "H200"),
        (["bench", "--gpu", "typo"], "H200"),
        (["roofline", "--gpu", "typo"], "H200"),
        (["resources", "--target", "sm_61"], "sm_80, sm_90, sm_100, gfx942, gfx950"),
        (["resources", "--write-budget"], "--budget FILE"),
        (["resources", "--budget", "perf_budget.json"], "tk-fake, tk-other"),
    ],
)
def test_unknown_names_are_wrong_usage_and_what_exists_is_listed(
    arguments: list[str], listed: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0" if "resources" in arguments else "1")
    assert cli.main(arguments) == selection.USAGE == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert listed in output.err


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["bench", "--unknown"]])
def test_argparse_s_own_errors_have_the_same_code(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2


@pytest.mark.usefixtures("without_gpu")
def test_an_empty_selection_is_no_data(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["roofline", "--case", "llama-decode", "--tag", "prefill"]) == selection.NO_DATA == 3
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("command", ["list", "check", "bench", "roofline", "resources", "demo"])
def test_nothing_installed_is_no_data(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0" if command == "resources" else "1")
    monkeypatch.setattr(selection, "installed_specs", dict)
    assert cli.main([command]) == selection.NO_DATA
    assert "no kernel package is installed" in capsys.readouterr().err


def test_a_package_that_cannot_be_loaded_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken() -> None:
        raise ImportError("no module named tk_gone")

    monkeypatch.setattr(selection, "installed_specs", broken)
    assert cli.main(["list"]) == selection.CANNOT_RUN == 4
    assert "no module named tk_gone" in capsys.readouterr().err


@pytest.mark.usefixtures("without_gpu")
def test_device_without_a_gpu_is_no_data_and_lists_cards(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["device"]) == selection.NO_DATA
    output = capsys.readouterr()
    assert output.out == ""
    assert "there is no GPU here" in output.err
    assert "H200" in output.err
    assert "MI300X" in output.err


@pytest.mark.usefixtures("without_gpu")
def test_device_shows_a_known_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["device", "--gpu", "H200"]) == selection.OK
    text = capsys.readouterr().out
    assert "not read from this machine" in text
    assert "4.8 TB/s" in text
    assert cli.main(["device", "--gpu", "H200", "--json"]) == selection.OK
    assert type(known_device("H200")).model_validate_json(capsys.readouterr().out) == known_device("H200")


@pytest.mark.usefixtures("without_gpu")
def test_roofline_predicts_for_a_named_card_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    figure = tmp_path / "new" / "roofline.png"
    assert cli.main(["roofline", "tk-fake", "--gpu", "MI300X", "--png", str(figure), "--json"]) == selection.OK
    output = capsys.readouterr()
    report = Report.model_validate_json(output.out)
    assert report.environment.setting == "prediction"
    assert report.environment.device == known_device("MI300X")
    assert [result.case for result in report.results] == ["llama-decode", "llama-prefill"]
    assert all(result.placement.roof_us for result in report.results)
    assert "nothing is run" in output.err
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("without_gpu")
def test_roofline_table_names_the_default_card(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["roofline", "tk-fake"]) == selection.OK
    assert "predicted for H200, nothing was run" in capsys.readouterr().out


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("command", [["roofline", "--png", "roofline.png"], ["demo"]])
def test_a_missing_matplotlib_stops_before_any_work(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = commands.importlib.util.find_spec
    monkeypatch.setattr(commands.importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert cli.main(command) == selection.CANNOT_RUN
    assert "tk-kernel-core[plot]" in capsys.readouterr().err


@pytest.mark.usefixtures("without_gpu")
def test_a_report_that_cannot_be_written_stops_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*_: object, **__: object) -> None:
        raise AssertionError("worked")

    monkeypatch.setattr(commands, "_run", work)
    taken = tmp_path / "file"
    taken.touch()
    assert cli.main(["demo", "tk-fake", "--report", str(taken)]) == selection.CANNOT_RUN
    assert f"cannot make the folder {taken}" in capsys.readouterr().err


def test_a_budget_needs_every_case_and_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["resources", "tk-fake", "--write-budget", "--budget", str(tmp_path / "budget.json")]
    for narrowing in (["--target", "sm_90"], ["--case", "llama*"], ["--tag", "decode"]):
        assert cli.main([*command, *narrowing]) == selection.USAGE
        assert "leave out --target, --case and --tag" in capsys.readouterr().err


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("command", ["check", "bench", "demo", "resources"])
def test_kernels_cannot_run_without_triton(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = commands.importlib.util.find_spec
    monkeypatch.setattr(commands.importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    assert cli.main([command]) == selection.CANNOT_RUN
    assert "triton is not installed" in capsys.readouterr().err


@pytest.mark.usefixtures("without_gpu")
def test_the_interpreter_stays_off_where_it_was_switched_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert cli.main(["check"]) == selection.CANNOT_RUN
    assert "TRITON_INTERPRET" in capsys.readouterr().err
    assert os.environ["TRITON_INTERPRET"] == "0"


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A machine with an H200, on which the kernel takes 10 µs and the baseline the given time."""

    def install(baseline_us: float) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(commands, "_has_gpu", lambda: True)
        monkeypatch.setattr(device, "current_device", lambda: known_device("H200"))
        monkeypatch.setattr(bench, "rotated_inputs", lambda make, device: [{}])

        def run(inputs: Inputs) -> None: ...

        def baseline(inputs: Inputs) -> None:
            if math.isnan(baseline_us):
                raise BaselineUnavailable("no compiler")

        def measure(function: Any, input_sets: Any, *, budget_s: float) -> Measurement:
            function(input_sets[0])
            return summarise([10.0 if function is run else baseline_us], 1, "cuda-graph")

        monkeypatch.setattr(bench, "measure", measure)
        spec = fake_spec(run=run, baselines={"torch": baseline}, bars={"llama-decode": {"torch": 1.0}})
        monkeypatch.setattr(selection, "installed_specs", lambda: {"tk-fake": spec})

    return install


@pytest.mark.parametrize(
    ("baseline_us", "code", "said"),
    [
        (11.0, 0, ""),
        (9.0, 1, "1.111 times torch, the bar is 1"),
        (math.nan, 4, "no ratio to torch (no compiler)"),
    ],
)
def test_bars_decide_on_a_gpu(
    with_gpu: Callable[[float], None], baseline_us: float, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpu(baseline_us)
    assert cli.main(["bench", "--json"]) == code
    output = capsys.readouterr()
    report = Report.model_validate_json(output.out)
    assert report.environment.setting == "gpu"
    assert [result.placement.percent_of_roof is not None for result in report.results] == [True, True]
    assert said in output.err


def test_roofline_measures_kernels_alone_on_a_gpu(
    with_gpu: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpu(9.0)
    assert cli.main(["roofline", "--json"]) == selection.OK
    report = Report.model_validate_json(capsys.readouterr().out)
    assert report.environment.setting == "gpu"
    assert all(result.timing and not result.baselines for result in report.results)
    assert cli.main(["roofline", "--json", "--gpu", "L4"]) == selection.OK
    assert Report.model_validate_json(capsys.readouterr().out).environment.setting == "prediction"


def test_device_shows_the_gpu_of_the_machine(
    with_gpu: Callable[[float], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with_gpu(9.0)
    assert cli.main(["device"]) == selection.OK
    assert "The GPU of this machine: H200" in capsys.readouterr().out


@pytest.mark.usefixtures("without_gpu")
def test_the_interpreter_cannot_be_switched_on_too_late(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("triton", reason="needs triton to have been imported")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert cli.main(["check"]) == selection.CANNOT_RUN
    assert "before its interpreter was on" in capsys.readouterr().err
    assert "TRITON_INTERPRET" not in os.environ


@pytest.mark.parametrize("command", ["", "list", "device", "check", "bench", "roofline", "resources", "demo"])
def test_help_has_an_example_and_the_exit_codes_and_imports_little(command: str) -> None:
    script = f"""
import sys
from tk_kernel_core import cli
try:
    cli.main({[command, "--help"] if command else ["--help"]})
except SystemExit as stopped:
    assert stopped.code == 0
loaded = {{"torch", "triton", "matplotlib", "pydantic", "numpy"}} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "example" in done.stdout
    assert f"tk-kernels {command}".strip() in done.stdout
    assert all(f"\n  {code}  " in done.stdout for code in range(5))


@pytest.mark.usefixtures("without_gpu")
def test_nothing_compiles_under_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli.main(["resources"]) == selection.CANNOT_RUN
    assert "unset it" in capsys.readouterr().err


@pytest.fixture
def compiled(without_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kernel is found to need 40 registers, without compiling it."""
    # Imported as the environment has it, because later tests of this process may need the interpreter.
    pytest.importorskip("triton", reason="budgets name the Triton that made them")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    def report_resources(spec: KernelSpec, targets: Any, cases: Any, progress: Any) -> list[CaseResources]:
        return [
            CaseResources(
                package=spec.name,
                case=case.name,
                target=target.name,
                kernels=(
                    KernelResources(
                        kernel="fake_kernel",
                        target=target.name,
                        registers=40,
                        spill_bytes=0,
                        stack_bytes=0,
                        shared_bytes=16,
                        num_warps=4,
                        code_bytes=1024,
                        instructions_total=64,
                        instructions={"ld.global.v4": 2},
                    ),
                ),
            )
            for case in cases
            for target in targets
        ]

    monkeypatch.setattr(resources, "report_resources", report_resources)


@pytest.mark.usefixtures("compiled")
def test_resource_table_shows_every_kernel(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["resources", "tk-fake", "--target", "gfx942", "--tag", "decode"]) == selection.OK
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "fake_kernel" in line]
    assert "gfx942" in row
    assert "2 ld.global.v4" in row


@pytest.mark.usefixtures("compiled")
def test_a_budget_is_written_kept_and_missed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    budget = tmp_path / "perf_budget.json"
    command = ["resources", "tk-fake", "--budget", str(budget)]
    assert cli.main(command) == selection.NO_DATA
    assert cli.main([*command, "--write-budget", "--target", "sm_90"]) == selection.USAGE
    assert not budget.exists()
    assert cli.main([*command, "--write-budget"]) == selection.OK
    capsys.readouterr()
    assert cli.main([*command, "--json"]) == selection.OK
    assert json.loads(capsys.readouterr().out)["budget"]["outcome"] == "kept"

    document = json.loads(budget.read_text())
    document["targets"]["sm_90"]["llama-decode"]["fake_kernel"]["registers"] = 39
    budget.write_text(json.dumps(document))
    assert cli.main(command) == selection.FAILED
    message = capsys.readouterr().err
    assert "tk-fake, llama-decode, sm_90, fake_kernel: registers" in message

    document["triton"] = "0.0.0"
    budget.write_text(json.dumps(document))
    assert cli.main(command) == selection.OK
    assert "does not count" in capsys.readouterr().err

    budget.write_text("{}")
    assert cli.main(command) == selection.USAGE
    assert str(budget) in capsys.readouterr().err
