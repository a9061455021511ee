"""The ``ls-strategy`` command. One file per subcommand; also ``python -m ls_strategy.cli``.

Torch is imported when a subcommand runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ls_strategy.cli import bench_inference, consolidate, doctor, inspect, plan, submit, tune_io
from ls_strategy.errors import LSError

SUBCOMMANDS = (bench_inference, consolidate, doctor, inspect, plan, submit, tune_io)
"""Modules with ``add(subcommands)``, which adds a parser whose ``run`` takes the arguments and returns the status."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status: 0, or 1 after an error, which is printed."""
    parser = argparse.ArgumentParser(prog="ls-strategy", description="Tools around ZeROStrategy.")
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for module in SUBCOMMANDS:
        module.add(subcommands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except LSError as error:
        print(f"ls-strategy {args.subcommand}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"ls-strategy {args.subcommand}: interrupted", file=sys.stderr)
        return 130
