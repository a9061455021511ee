"""The ``ls-strategy`` command, with one file per subcommand; also ``python -m ls_strategy.cli``.

Torch is imported when a subcommand runs, after it has checked its arguments and that its files exist: ``--help`` and
mistakes are answered at once.

Exit status: 0; 1 after an error that is printed on stderr, or where a subcommand says so; 2 for arguments that the
parser refuses; 130 after Ctrl-C.
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
from ls_strategy.extras.cli.parser import Parser, did_you_mean, print_error

SUBCOMMANDS = (bench_inference, consolidate, doctor, inspect, meet, new, plan, report, submit, tune_io)
"""Modules with ``add(subcommands)``, which adds a parser; its ``run`` takes the arguments and returns the status."""


def make_parser() -> Parser:
    """Return the parser of all subcommands."""
    parser = Parser(prog="ls-strategy", description="Tools around ZeROStrategy.")
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND", parser_class=Parser)
    for module in SUBCOMMANDS:
        module.add(subcommands)
    return parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a subcommand. Ends the program with status 2 if they are wrong."""
    parser = make_parser()
    first = arguments[0] if arguments else "-"
    if not first.startswith("-") and first not in parser.commands:
        known = f" The commands are {', '.join(parser.commands)}."
        parser.error(f"Got {first!r}, which is not a command.{did_you_mean(first, parser.commands) or known}")
    for word in arguments[: arguments.index("--") if "--" in arguments else None]:
        if word.startswith("--") and word.endswith("=--"):
            parser.error(f"argument {word[:-3]}: expected a value")  # argparse would accept "--" unchecked
    args, unknown = parser.parse_known_args(arguments)
    parser.commands[args.subcommand].refuse_unknown(unknown)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns the exit status: 0, or 1 after printing an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may contain invalid text
    args = parse(list(sys.argv[1:] if argv is None else argv))
    args.out, prog = sys.stdout, f"ls-strategy {args.subcommand}"
    only_json = redirect_stdout(sys.stderr) if getattr(args, "json", False) else nullcontext()
    try:
        with only_json:  # what programs and other packages print must not stand before it
            return args.run(args)
    except LSError as error:
        print_error(prog, str(error))
        return 1
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a file that cannot be read, a disk that is full
        print_error(prog, f"{error}. Check the path and its permissions.")
        return 1
    except MemoryError:
        print_error(prog, "out of memory. Give smaller numbers.")
        return 1
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
