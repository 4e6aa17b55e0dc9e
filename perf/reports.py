"""Keep reports of measurements, and write the table of README.md from what is kept.

    python3 perf/reports.py report.json... [--commit REV]   # keep reports of a GPU, then write the table
    python3 perf/reports.py                                 # write the table

A report of `tk-kernels bench --json` is kept as perf/reports/MACHINE/PACKAGE.json, whole but for the samples behind
each median, which are most of it; one of `tk-kernels roofline --stages --json` as stages-PACKAGE.json beside it, and
one of docs/examples/llama_decode.py as llama_decode.json, or llama_decode-compiled.json if steps were compiled, too.
The documentation's pages on performance are made from the same files. Needs nothing installed.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "perf" / "reports"
README = ROOT / "README.md"
WHOLE_MODEL, ORIGINAL = "llama_decode", "as it was"
STAGES = "stages-"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"

Report = dict[str, Any]


def machine_name(device: str) -> str:
    """Return the name that the results of a GPU go under."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def kept(pattern: str = "tk-*") -> dict[str, dict[str, Path]]:
    """Return the files of kept reports by machine and name, those of packages by default, in alphabetical order."""
    machines = sorted(path for path in REPORTS.glob("*") if path.is_dir())
    return {machine.name: {file.stem: file for file in sorted(machine.glob(f"{pattern}.json"))} for machine in machines}


def to_keep(report: Report, commit: str | None) -> tuple[str, dict[str, Report]]:
    """Return the name of the machine that made a report, and what is kept of it by name.

    Args:
        report: What `tk-kernels bench --json`, `tk-kernels roofline --stages --json` or llama_decode.py wrote on a GPU.
        commit: The commit that was measured, where the report names none.

    Raises:
        ValueError: The report was not made on a GPU, is empty, or nothing says which commit was measured.
    """
    if "settings" not in report:
        return machine_name(report["environment"]["device"]["name"]), split(report, commit)
    made_by = report["provenance"]
    if not made_by["driver"] or not report["rows"]:
        raise ValueError("wanted a report with rows, made on a GPU")
    made_by = {**made_by, "commit": _commit(made_by, commit)}
    name = f"{WHOLE_MODEL}-compiled" if compiles_steps(report) else WHOLE_MODEL
    return machine_name(made_by["hardware"]), {name: {**report, "provenance": made_by}}


def compiles_steps(report: Report) -> bool:
    """Whether a report of llama_decode.py has models under torch.compile other than the original."""
    return any(row["how"] != "eager" and row["step"] != ORIGINAL for row in report["rows"])


def split(report: Report, commit: str | None) -> dict[str, Report]:
    """Return the report of each package, to be kept, by the name it goes under.

    Args:
        report: What `tk-kernels bench --json`, or `tk-kernels roofline --stages --json`, wrote on a GPU.
        commit: The commit that was measured, where the report names none.

    Raises:
        ValueError: The report was not made on a GPU, is empty, or nothing says which commit was measured.
    """
    made_in = report["environment"]
    if made_in["setting"] != "gpu":
        raise ValueError(f"wanted a report made on a GPU, got one of the setting {made_in['setting']!r}")
    if not report["results"]:
        raise ValueError("wanted a report of `tk-kernels bench`, got one without results")
    commit = _commit(made_in, commit)
    packages = sorted({result["package"] for result in report["results"]})
    prefix = STAGES if any(result["stages"] for result in report["results"]) else ""
    return {
        prefix + package: {
            "environment": {**made_in, "commit": commit},
            **{
                kind: [_without_samples(one) for one in report[kind] if one["package"] == package]
                for kind in ("checks", "results")
            },
        }
        for package in packages
    }


def made_in_words(environment: Mapping[str, Any]) -> str:
    """Say with what and when a report was made."""
    device = environment.get("device") or {"name": environment["hardware"], "driver_version": environment["driver"]}
    parts = [
        f"{device['name']} (driver {device['driver_version'] or 'unknown'})",
        f"torch {environment['torch']}",
        f"Triton {environment['triton']}",
        environment["made_at"][:10],
        f"commit {_short(environment['commit'])}" if environment.get("commit") else "commit not recorded",
    ]
    return ", ".join(parts)


def table(reports: Mapping[str, Report]) -> str:
    """Return a Markdown table of what packages are held against, and below it where that was measured.

    Args:
        reports: One machine's, by package.
    """
    lines = [
        "| package | time over that of | cases | lowest ratio | highest ratio | bars met |",
        "|---|---|---:|---|---|---:|",
    ]
    sources: dict[str, list[str]] = {}
    for package, report in reports.items():
        sources.setdefault(made_in_words(report["environment"]), []).append(package)
        for name, barred in _barred(report).items():
            ratios = sorted((float(one["ratio"]), case) for case, one in barred if one["ratio"] is not None)
            ends = [f"{ratio:.2f} `{case}`" for ratio, case in (ratios[:1] + ratios[-1:])] or ["–", "–"]
            met = sum(one["bar_met"] is True for _, one in barred)
            row = [f"`{package}`", name, str(len(barred)), *ends, f"{met} of {len(barred)}"]
            lines.append(f"| {' | '.join(row)} |")
    lines.append("")
    for source, packages in sources.items():
        lines.append(f"- {', '.join(f'`{package}`' for package in packages)}: {source}")
    return "\n".join(lines) + "\n"


def measured() -> str:
    """Return the tables of all machines."""
    machines = [
        {package: json.loads(file.read_text(encoding="utf-8")) for package, file in files.items()}
        for files in kept().values()
    ]
    return "\n".join(table(reports) for reports in machines if reports)


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
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", metavar="report.json", help="reports to keep")
    parser.add_argument("--commit", metavar="REV", help="the commit that was measured, where a report names none")
    options = parser.parse_args(arguments)
    commit = options.commit and _resolve(options.commit)
    if options.commit and not commit:
        parser.error(f"--commit wants a commit of this repository, got {options.commit!r}")
    for file in options.files:
        try:
            machine, named = to_keep(json.loads(file.read_text(encoding="utf-8")), commit)
        except ValueError as reason:
            parser.error(f"{file}: {reason}")
        for name, report in named.items():
            target = REPORTS / machine / f"{name}.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
            print(f"kept {target.relative_to(ROOT)}")
    README.write_text(with_section(README.read_text(encoding="utf-8"), measured()), encoding="utf-8")
    return 0


def _barred(report: Report) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return `(case, comparison)` of every comparison with a bar, by baseline."""
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for result in report["results"]:
        for baseline in result["baselines"]:
            if baseline["bar"] is not None:
                found.setdefault(baseline["name"], []).append((result["case"], baseline))
    return found


def _without_samples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: [] if key == "samples_us" else _without_samples(one) for key, one in value.items()}
    return [_without_samples(one) for one in value] if isinstance(value, list) else value


def _commit(made_in: Mapping[str, Any], given: str | None) -> str:
    commit: str | None = made_in.get("commit") or given
    if not commit:
        raise ValueError("the report names no commit, give it with --commit")
    return commit


def _short(commit: str) -> str:
    return re.sub(r"^([0-9a-f]{12})[0-9a-f]+", r"\1", commit)


def _resolve(revision: str) -> str:
    """Return a revision's full hash; empty where there is none."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
