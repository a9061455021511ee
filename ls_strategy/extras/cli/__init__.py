"""The ``ls-strategy`` command, with one file per subcommand; also ``python -m ls_strategy.cli``.

Torch is imported when a subcommand runs, so that ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout

from ls_strategy.errors import LSError
from ls_strategy.extras.cli import (
    bench_inference,
    consolidate,
    doctor,
    inspect,
    meet,
    new,
    plan,
    report,
    submit,
    tune_io,
)

SUBCOMMANDS = (bench_inference, consolidate, doctor, inspect, meet, new, plan, report, submit, tune_io)
"""Modules with ``add(subcommands)``, which adds a parser; its ``run`` takes the arguments and returns the status."""


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands."""
    parser = argparse.ArgumentParser(prog="ls-strategy", description="Tools around ZeROStrategy.")
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for module in SUBCOMMANDS:
        module.add(subcommands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns the exit status: 0, or 1 after printing an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may contain invalid text
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    for word in arguments[: arguments.index("--") if "--" in arguments else None]:
        if word.startswith("--") and word.endswith("=--"):
            parser.error(f"argument {word[:-3]}: expected a value")  # argparse would accept "--" unchecked
    args = parser.parse_args(arguments)
    args.out = sys.stdout
    only_json = redirect_stdout(sys.stderr) if getattr(args, "json", False) else nullcontext()
    try:
        with only_json:  # what programs and other packages print must not stand before it
            return args.run(args)
    except LSError as error:
        print(f"ls-strategy {args.subcommand}: error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a file that cannot be read, a disk that is full
        print(f"ls-strategy {args.subcommand}: error: {error}. Check the path and its permissions.", file=sys.stderr)
        return 1
    except MemoryError:
        print(f"ls-strategy {args.subcommand}: error: out of memory. Give smaller numbers.", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"ls-strategy {args.subcommand}: interrupted", file=sys.stderr)
        return 130
