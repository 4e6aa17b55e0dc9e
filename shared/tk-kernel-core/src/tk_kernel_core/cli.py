"""The command line `tk-kernels`."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from tk_kernel_core import commands
from tk_kernel_core.commands import DEFAULT_CARD
from tk_kernel_core.selection import Stop

WIDTH = 90

EXIT_CODES = """\
exit codes:
  0  everything asked for was done, and nothing failed
  1  a check failed, a kernel could not be timed or compiled, or a bar or a budget was missed
  2  wrong usage: unknown command, kernel, case, tag, card or target
  3  no data: nothing is installed, nothing was selected, or there is no GPU to describe
  4  cannot run here: a GPU, triton, a compiler or another package is missing
  130  interrupted
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Args:
        arguments: Command line without the program's name; that of the process by default.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except Stop as stop:
        print(f"tk-kernels: {stop}", file=sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        print("tk-kernels: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tk-kernels",
        description=textwrap.fill(
            "Check, time and inspect the installed tk kernel packages (Triton GPU kernels for LLM inference). "
            "Without a GPU the kernels run in Triton's interpreter on the CPU, and the roofline predicts what a GPU "
            "could reach.",
            WIDTH,
        ),
        epilog=f"""\
examples:
  tk-kernels demo --report report
  tk-kernels check tk-rmsnorm
  tk-kernels bench tk-rmsnorm --tag decode

{EXIT_CODES}""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(
        name: str,
        run: Callable[[argparse.Namespace], int],
        summary: str,
        example: str,
        *,
        selects: bool = True,
        gpu: str = "",
    ) -> argparse.ArgumentParser:
        command = subparsers.add_parser(
            name,
            help=summary[0].lower() + summary[1:].partition(".")[0],
            description=textwrap.fill(summary, WIDTH),
            epilog=f"example:\n  {example}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(command=run)
        if selects:
            command.add_argument(
                "kernels", nargs="*", metavar="KERNEL", help="name of an installed kernel package; default: all"
            )
            command.add_argument(
                "--case",
                dest="cases",
                action="append",
                default=[],
                metavar="NAME",
                help="only cases of this name; * and ? match, and the option can be repeated",
            )
            command.add_argument("--tag", help="only cases with this tag, for example smoke, decode or prefill")
        if gpu:
            command.add_argument("--gpu", metavar="NAME", help=gpu)
        command.add_argument("--json", action="store_true", help="print JSON on stdout; everything else goes to stderr")
        return command

    roof_of = f"without a GPU here: the card that the roofline is shown for (default: {DEFAULT_CARD})"
    add("list", commands.run_list, "List the installed kernels and their cases.", "tk-kernels list --tag decode")
    add(
        "device", commands.run_device,
        "Show a GPU's facts and where each comes from. Without a GPU and without --gpu it exits with 3.",
        "tk-kernels device --gpu H200",
        selects=False, gpu="show this known card instead of the GPU of this machine",
    )  # fmt: skip
    add(
        "check", commands.run_check,
        "Compare kernels with their references, on the GPU or in the interpreter.",
        "tk-kernels check tk-rmsnorm --case 'llama*'",
    )  # fmt: skip
    add(
        "bench", commands.run_bench,
        "Time kernels and their baselines in turns, and place them on the roofline.",
        "tk-kernels bench tk-rmsnorm --tag headline --json > bench.json",
        gpu=roof_of,
    )  # fmt: skip
    roofline = add(
        "roofline", commands.run_roofline,
        "Place kernels on the roofline. With a GPU they are timed; without one, or for a card named with --gpu, "
        "the place is predicted and nothing is run.",
        "tk-kernels roofline --gpu MI300X --png roofline.png",
        gpu=f"predict for this known card (default without a GPU: {DEFAULT_CARD})",
    )  # fmt: skip
    roofline.add_argument(
        "--stages", action="store_true", help="also place the stages inside a call, for kernels that have them"
    )
    roofline.add_argument("--png", type=Path, metavar="FILE", help="also draw the figure; needs tk-kernel-core[plot]")
    resources = add(
        "resources", commands.run_resources,
        "Compile kernels ahead of time, no GPU needed, and report registers, spills and shared memory.",
        "tk-kernels resources tk-rmsnorm --target sm_90 --budget perf_budget.json",
    )  # fmt: skip
    resources.add_argument(
        "--target", dest="targets", action="append", default=[], metavar="NAME",
        help="only this architecture, for example sm_90 or gfx942; can be repeated; default: all",
    )  # fmt: skip
    resources.add_argument("--budget", type=Path, metavar="FILE", help="check one kernel against this budget file")
    resources.add_argument("--write-budget", action="store_true", help="write the budget file instead of checking it")
    demo = add(
        "demo", commands.run_demo,
        "Check and time everything, and write a report: JSON, a roofline figure and one HTML page.",
        "tk-kernels demo --report report --gpu H100-SXM",
        gpu=roof_of,
    )  # fmt: skip
    demo.add_argument(
        "--report", type=Path, default=Path("report"), metavar="DIR", help="folder to write (default: report)"
    )
    return parser
