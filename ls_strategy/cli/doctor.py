"""``ls-strategy doctor``: whether this machine can train, and what to do about what stands in the way."""

from __future__ import annotations

import argparse
import json
import sys

from ls_strategy.checked import above
from ls_strategy.cli import arguments
from ls_strategy.doctor.examine import TOPICS
from ls_strategy.doctor.finding import Finding


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """``doctor``: whether this machine can train."""
    parser = subcommands.add_parser(
        "doctor",
        help="check this machine: versions, kernels, GPUs, drive, SLURM, and two ranks that talk",
        description="Look at everything that training here depends on, and print each fact as ok, note (slower, or "
        "within limits) or problem, with a cure. Kernels are compiled if they are not yet, and two processes really "
        "exchange numbers. The status is 1 if there is a problem.",
    )
    parser.add_argument(
        "--nvme-path", default="", metavar="PATH", help="folder of the NVMe tier. Default: LS_STRATEGY_NVME_PATH"
    )
    names = ", ".join(TOPICS)
    parser.add_argument("--only", nargs="+", default=[], metavar="CHECK", help=f"run these alone: {names}")
    parser.add_argument("--skip", nargs="+", default=[], metavar="CHECK", help="leave these out")
    parser.add_argument(
        "--timeout-s",
        type=arguments.number(above(0, 86400)),
        default=60.0,
        metavar="SECONDS",
        help="for two ranks to answer (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look, and print. The status is 1 if there is a problem."""
    from ls_strategy.doctor.examine import checks, choose, examine

    chosen = choose(checks(nvme_path=args.nvme_path, timeout_s=args.timeout_s), only=args.only, skip=args.skip)
    table = _Table(silent=args.json)
    findings = examine(chosen, table.add, table.progress)
    table.progress("")
    problems = [finding for _, finding in findings if finding.state == "problem"]
    notes = sum(finding.state == "note" for _, finding in findings)
    if args.json:
        listed = [{"topic": topic, **vars(finding)} for topic, finding in findings]
        print(json.dumps({"ok": not problems, "findings": listed}, indent=2))
    else:
        words = f"problems: {len(problems)}" if problems else "This machine can train"
        print(f"\n{words}; notes: {notes}")
    return 1 if problems else 0


class _Table:
    """Prints findings as they come, and what is being done on the terminal's last line."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self._topic = ""
        self._shown = ""

    def add(self, topic: str, finding: Finding) -> None:
        """Print one."""
        if self._silent:
            return
        self._clear()
        if topic != self._topic:
            print(f"{'' if not self._topic else chr(10)}{topic}")
            self._topic = topic
        print(f"  {finding.state:<8} {finding.name}: {finding.value}")
        if finding.cure:
            print(f"  {'':<8} -> {finding.cure}")
        sys.stdout.flush()

    def progress(self, doing: str) -> None:
        """Say what begins; elsewhere than on a terminal once, as a line."""
        if sys.stderr.isatty():
            self._clear()
            print(f"... {doing}"[:79] if doing else "", end="", file=sys.stderr, flush=True)
        elif doing and doing != self._shown:
            print(f"... {doing}", file=sys.stderr, flush=True)
        self._shown = doing

    def _clear(self) -> None:
        if sys.stderr.isatty() and self._shown:
            print(f"\r{'':<79}\r", end="", file=sys.stderr, flush=True)
