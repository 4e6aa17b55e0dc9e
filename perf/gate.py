"""Has a commit changed the time? Judges what `asv continuous` measured of two commits on one machine.

    python perf/gate.py BASE HEAD --results DIR [--floor FILE] [--markdown FILE] [--json FILE]
    python perf/gate.py --floor-from DIR... --floor FILE

The verdict is one of five, each with its exit code: ok 0, improvement 0, regression 10, no data 20, error 30. A
latency has regressed if asv's statistical test calls the samples different, and the medians differ by more than the
noise floor, and by more than 0.5 us. The second form makes the floor's file from A/A runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gate_decision import (
    EXIT_CODES,
    LEAST_CHANGE_US,
    LEAST_FLOOR,
    SPREADS,
    Floor,
    Row,
    Side,
    Verdict,
    alarms,
    judge,
    make_floor,
    overall,
)
from gate_results import MIN_SAMPLES, Comparison, commits_in, read

ROOT = Path(__file__).resolve().parents[1]
CHANGES = ("regression", "improvement", "change")
ORDER = (*CHANGES, "ok", "shown", "skipped")


def resolve(repository: Path, revision: str, kind: str = "commit") -> str:
    """Return the full hash of a revision's commit, or of its tree.

    Raises:
        ValueError: The repository has no such revision.
    """
    command = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{{kind}}}"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"{repository} has no commit {revision!r} {done.stderr.strip()}".strip())
    return done.stdout.strip()


def same_tree(repository: Path, one: str, other: str) -> bool:
    """Whether two commits hold the same files, so that comparing them is an A/A run."""
    return resolve(repository, one, "tree") == resolve(repository, other, "tree")


def gate(repository: Path, base: str, head: str, folder: Path, floor_file: Path | None) -> dict[str, Any]:
    """Compare two commits; returns the report, which is also what `--json` writes."""
    compared, floor = Comparison(), None
    commits, is_aa = {"base": base, "head": head}, False
    try:
        commits = {side: resolve(repository, revision) for side, revision in commits.items()}
        is_aa = same_tree(repository, *commits.values())
        if commits["base"] == commits["head"]:
            compared.refuse(
                f"base and head are both {base}, of which asv keeps one result: make an A/A pair of commits"
            )
        else:
            compared = read(folder, **commits)
        floor = Floor.load(floor_file) if floor_file else None
    except (OSError, ValueError) as error:
        compared.refuse(str(error))
    gpu = compared.environment.get("gpu")
    if floor and gpu and floor.environment.get("gpu") != gpu:
        compared.refuse(f"the noise floor was measured on {floor.environment.get('gpu')}, these times on {gpu}")

    rows = sorted(judge(compared, floor), key=lambda row: (ORDER.index(row.verdict), row.name))
    verdict = overall(compared, rows)
    judged, changed, differing = alarms(rows)
    return {
        "verdict": verdict,
        "exit_code": EXIT_CODES[verdict],
        "base": {"revision": base, "commit": commits["base"]},
        "head": {"revision": head, "commit": commits["head"]},
        "environment": compared.environment,
        "problems": [dataclasses.asdict(problem) for problem in compared.problems],
        "floor": floor.model_dump() if floor else None,
        "rules": {
            "min_samples": MIN_SAMPLES,
            "least_floor": LEAST_FLOOR,
            "spreads": SPREADS,
            "least_change_us": LEAST_CHANGE_US,
        },
        "a_a": {"judged": judged, "alarms": changed, "by_test_alone": differing} if is_aa else None,
        "benchmarks": [dataclasses.asdict(row) for row in rows],
    }


def markdown(report: dict[str, Any]) -> str:
    """Write a report as a comment on a pull request."""
    rows = [_row(entry) for entry in report["benchmarks"]]
    listed = [row for row in rows if row.differs is not None or row.verdict in CHANGES]
    title = f"## Performance gate: {report['verdict']}"
    lines = [title, "", f"`{_commit(**report['base'])}` → `{_commit(**report['head'])}`", ""]
    lines += [f"- **{problem['verdict']}**: {problem['message']}" for problem in report["problems"]]
    if report["problems"]:
        lines.append("")
    if listed:
        lines += ["| benchmark | base | head | ratio | floor | verdict |", "|---|---|---|---|---|---|"]
        lines += [_line(row) for row in listed] + [""]
    unlisted = [row.verdict for row in rows if row not in listed]
    counts = {
        "read off machine code and unchanged": unlisted.count("ok"),
        "not judged": unlisted.count("shown"),
        "skipped on both sides": unlisted.count("skipped"),
    }
    if unlisted:
        lines += ["Not listed: " + ", ".join(f"{count} {what}" for what, count in counts.items() if count) + ".", ""]
    if report["a_a"]:
        lines += [_false_alarms(report["a_a"]), ""]
    lines += [_floor(report), ""]
    if report["environment"]:
        lines += ["Measured with " + ", ".join(f"{key} {value}" for key, value in report["environment"].items()) + "."]
    return "\n".join(lines).rstrip() + "\n"


def _commit(revision: str, commit: str) -> str:
    return commit[:10] if commit.startswith(revision) else f"{commit[:10]} ({revision})"


def _row(entry: dict[str, Any]) -> Row:
    sides = {side: Side(**entry[side]) if entry[side] else None for side in ("base", "head")}
    return Row(**{**entry, **sides})


def _line(row: Row) -> str:
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    floor = "" if row.floor is None else f"{row.floor:.1%}"
    name = row.name.replace("|", "\\|")
    verdict = f"**{row.verdict}**" if row.verdict in CHANGES else row.verdict
    return (
        "| "
        + " | ".join((name, _figure(row.base, row.unit), _figure(row.head, row.unit), ratio, floor, verdict))
        + " |"
    )


def _figure(side: Side | None, unit: str) -> str:
    if side is None:
        return ""
    return f"{side.value:.6g} {unit}" if side.spread is None else f"{side.value:.2f} ± {side.spread:.2f} {unit}"


def _false_alarms(counted: dict[str, int]) -> str:
    judged, changed, alone = counted["judged"], counted["alarms"], counted["by_test_alone"]
    rate = f" ({changed / judged:.1%})" if judged else ""
    return (
        f"A/A run: both commits hold the same files. False alarms: {changed} of {judged} latencies{rate}; "
        f"asv's test alone would have given {alone}."
    )


def _floor(report: dict[str, Any]) -> str:
    rules, floor = report["rules"], report["floor"]
    text = (
        f"A latency counts as changed if asv's test says so (p < 0.002, at least {rules['min_samples']} samples a "
        f"side), and its median moves by more than {rules['least_change_us']} us and by more than the noise floor: "
        f"{rules['spreads']} × the spread between A/A runs, at least {rules['least_floor']:.0%}. "
    )
    if floor is None:
        return text + "No A/A runs were given: the least floor holds for all."
    unknown = [
        entry["name"] for entry in report["benchmarks"] if entry["floor"] and entry["name"] not in floor["spread"]
    ]
    text += f"Spreads from {floor['runs']} A/A runs on {floor['environment'].get('gpu', 'no GPU')}"
    return text + (f"; {len(unknown)} of the benchmarks here are not among them." if unknown else ".")


def floor_from(repository: Path, folders: Sequence[Path]) -> tuple[Floor | None, Comparison]:
    """Make the noise floor from the results of A/A runs; returns it, or what forbids making it."""
    refused, runs = Comparison(), []
    for folder in folders:
        try:
            commits = commits_in(folder)
            if len(commits) != 2 or not same_tree(repository, *commits):
                raise ValueError(f"wanted two commits with the same tree, got {', '.join(commits) or 'none'}")
            run = read(folder, *commits)
        except ValueError as error:
            refused.refuse(f"{folder} is not an A/A run: {error}")
            continue
        for problem in run.problems:
            refused.refuse(f"{folder}: {problem.message}", problem.verdict)
        runs.append(run)
    if refused.problems:
        return None, refused
    try:
        return make_floor(runs), refused
    except ValueError as error:
        refused.refuse(str(error))
        return None, refused


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", nargs="?", metavar="BASE", help="commit compared with")
    parser.add_argument("head", nargs="?", metavar="HEAD", help="commit that is judged")
    parser.add_argument("--results", type=Path, metavar="DIR", help="asv's results of these two commits alone")
    parser.add_argument("--floor", type=Path, metavar="FILE", help="the noise floor; without it, 3 %% for everything")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the report for a pull request here too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    parser.add_argument("--floor-from", type=Path, metavar="DIR", nargs="+", help="results of A/A runs, one DIR each")
    parser.add_argument("--repository", type=Path, metavar="DIR", default=ROOT, help="git repository with the commits")
    options = parser.parse_args(arguments)
    if options.floor_from:
        if options.base or options.results or not options.floor:
            parser.error("--floor-from needs --floor FILE to write, and neither commits nor --results")
    elif not (options.base and options.head and options.results):
        parser.error("wanted BASE HEAD --results DIR")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = parse(arguments)
    if options.floor_from:
        floor, refused = floor_from(options.repository, options.floor_from)
        if floor is None:
            print("\n".join(f"{problem.verdict}: {problem.message}" for problem in refused.problems))
            return EXIT_CODES[overall(refused, ())]
        options.floor.write_text(floor.model_dump_json(indent=2) + "\n")
        rate = f" ({floor.alarms / floor.judged:.1%})" if floor.judged else ""
        print(f"{floor.runs} A/A runs: {floor.alarms} false alarms in {floor.judged} latencies{rate}")
        return 0
    report = gate(options.repository, options.base, options.head, options.results, options.floor)
    text = markdown(report)
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")
    print(text)
    verdict: Verdict = report["verdict"]
    return EXIT_CODES[verdict]


if __name__ == "__main__":
    sys.exit(main())
