"""``ls-strategy doctor``: check whether this machine can train, and how to fix what prevents it."""

from __future__ import annotations

import argparse
import sys

from ls_strategy.checked import above
from ls_strategy.extras.cli import arguments
from ls_strategy.extras.cli.status_line import show_status
from ls_strategy.extras.doctor.examine import TOPICS
from ls_strategy.extras.doctor.finding import Finding


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``doctor`` subcommand."""
    parser = subcommands.add_parser(
        "doctor",
        help="check this machine: versions, kernels, GPUs, NVMe, SLURM, and communication between two ranks",
        description="Check everything that training depends on, and print each finding as ok, note (slower or limited) "
        "or problem, with a cure. Kernels are compiled if they are not yet, and two processes communicate. The exit "
        "status is 1 if there is a problem.",
    )
    parser.add_argument(
        "--nvme-path", default="", metavar="PATH", help="folder of the NVMe tier (default: LS_STRATEGY_NVME_PATH)"
    )
    names = ", ".join(TOPICS)
    parser.add_argument("--only", nargs="+", default=[], metavar="CHECK", help=f"run only these: {names}")
    parser.add_argument("--skip", nargs="+", default=[], metavar="CHECK", help="omit these")
    parser.add_argument(
        "--timeout-s",
        type=arguments.number(above(0, 86400)),
        default=60.0,
        metavar="SECONDS",
        help="timeout for two ranks to communicate (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the checks, and print the findings. Returns 1 if there is a problem."""
    from ls_strategy.extras.doctor.examine import checks, choose, examine

    chosen = choose(checks(nvme_path=args.nvme_path, timeout_s=args.timeout_s), only=args.only, skip=args.skip)
    table = _Table(silent=args.json)
    findings = examine(chosen, table.add, table.progress)
    table.progress("")
    problems = [finding for _, finding in findings if finding.state == "problem"]
    notes = sum(finding.state == "note" for _, finding in findings)
    if args.json:
        listed = [{"topic": topic, **vars(finding)} for topic, finding in findings]
        arguments.print_json(args, {"ok": not problems, "findings": listed})
    else:
        verdict = f"problems: {len(problems)}" if problems else "This machine can train"
        print(f"\n{verdict}; notes: {notes}")
    return 1 if problems else 0


class _Table:
    """Prints findings as they arrive, and the running check on the terminal's last line."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._topic = ""
        self._shown = ""

    def add(self, topic: str, finding: Finding) -> None:
        if self._silent:
            return
        if self._shown:
            show_status("")
        if topic != self._topic:
            print(f"{'' if not self._topic else chr(10)}{topic}")
            self._topic = topic
        print(f"  {finding.state:<8} {finding.name}: {finding.value}")
        if finding.cure:
            print(f"  {'':<8} -> {finding.cure}")
        sys.stdout.flush()

    def progress(self, doing: str) -> None:
        """Show what starts: on a terminal in the last line, otherwise as a line of its own."""
        if doing != self._shown:
            show_status(f"... {doing}" if doing else "")
        self._shown = doing
