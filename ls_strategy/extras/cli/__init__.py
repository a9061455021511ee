"""The ``ls-strategy`` command, with one file per subcommand; also ``python -m ls_strategy.cli``.

Torch is imported when a subcommand runs, after it has checked its arguments and that its files exist: ``--help`` and
mistakes are answered at once.

Exit status: 0; 1 after an error that is printed on stderr, or where a subcommand says so; 2 for arguments that the
parser refuses; 130 after Ctrl-C. With ``--json``, standard output is one JSON object and nothing else, also after an
error with status 1: ``{"error": "..."}``. ``schemas/`` describes them.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout

from ls_strategy.errors import LSError
from ls_strategy.extras.cli import (
    arguments,
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

_STDOUT, _STDERR = 1, 2  # file descriptors


def make_parser() -> Parser:
    """Return the parser of all subcommands."""
    parser = Parser(
        prog="ls-strategy",
        description="Tools around ZeROStrategy.",
        epilog="Exit status: 0; 1 after an error, or where a command says so; 2 if the command line is wrong; 130 "
        "after Ctrl-C.",
    )
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="COMMAND", parser_class=Parser)
    for module in SUBCOMMANDS:
        module.add(subcommands)
    return parser


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of a subcommand. Ends the program with status 2 if they are wrong."""
    parser = make_parser()
    first = words[0] if words else "-"
    if not first.startswith("-") and first not in parser.commands:
        known = f" The commands are {', '.join(parser.commands)}."
        parser.error(f"Got {first!r}, which is not a command.{did_you_mean(first, parser.commands) or known}")
    for word in words[: words.index("--") if "--" in words else None]:
        if word.startswith("--") and word.endswith("=--"):
            parser.error(f"argument {word[:-3]}: expected a value")  # argparse would accept "--" unchecked
    args, unknown = parser.parse_known_args(words)
    parser.commands[args.subcommand].refuse_unknown(unknown)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Returns the exit status: 0, or 1 after printing an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may contain invalid text
    args = parse(list(sys.argv[1:] if argv is None else argv))
    args.out = sys.stdout
    try:
        with only_json(args) if getattr(args, "json", False) else nullcontext():
            return _run(args)
    except BrokenPipeError:  # the reader of the pipe has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run(args: argparse.Namespace) -> int:
    prog = f"ls-strategy {args.subcommand}"
    try:
        return args.run(args)
    except BrokenPipeError:
        raise
    except LSError as error:
        message = str(error)
    except OSError as error:  # a file that cannot be read, a disk that is full
        message = f"{error}. Check the path and its permissions."
    except MemoryError:
        message = "out of memory. Give smaller numbers."
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130
    print_error(prog, message)
    if getattr(args, "json", False) and os.environ.get("RANK", "0") == "0":  # one object, also under torchrun
        arguments.print_json(args, {"error": message})
    return 1


@contextmanager
def only_json(args: argparse.Namespace) -> Generator[None, None, None]:
    """Send to stderr what programs and packages print, also outside of Python; ``args.out`` stays for the JSON."""
    try:
        is_real = (sys.stdout.fileno(), sys.stderr.fileno()) == (_STDOUT, _STDERR)
    except (OSError, ValueError, AttributeError):  # a stand-in without a file, as in tests
        is_real = False
    with ExitStack() as stack:
        if is_real:
            sys.stdout.flush()
            kept = os.dup(_STDOUT)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, _STDOUT)
            os.dup2(_STDERR, _STDOUT)
            args.out = stack.enter_context(open(kept, "w", encoding="utf-8", closefd=False))
        stack.enter_context(redirect_stdout(sys.stderr))
        yield
