"""``ls-strategy inspect DIR``: print what a checkpoint folder contains, and check its integrity."""

from __future__ import annotations

import argparse
import json
import sys

from ls_strategy.cli import arguments


def add(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``inspect`` subcommand."""
    parser = subcommands.add_parser(
        "inspect",
        help="print what a checkpoint folder contains, and check its integrity",
        description="Print step, epoch, time, the layout it was saved from, and sizes. The exit status is 1 if the "
        "folder is not a committed checkpoint, or a file is missing or has another size. No tensor is read and "
        "nothing is unpickled.",
    )
    parser.add_argument("path", metavar="DIR", type=arguments.location, help="checkpoint folder")
    parser.add_argument("--tensors", action="store_true", help="list every tensor with shape, dtype and size")
    parser.add_argument("--verify", action="store_true", help="read every file and compare its checksums")
    parser.add_argument("--json", action="store_true", help="print JSON, with every tensor")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Verify and print."""
    from ls_strategy.checkpoint.describe import describe, verify_all

    # Before anything is parsed, so that the error names the damaged file.
    broken = verify_all(args.path, lambda name: print(f"reading {name}", file=sys.stderr)) if args.verify else []
    for message in broken:
        print(f"ls-strategy inspect: error: {message}", file=sys.stderr)
    if broken:
        return 1
    description = describe(args.path)
    if args.json:
        print(json.dumps({**description.to_dict(), "verified": args.verify}, indent=2))
    else:
        print(description.to_text(tensors=args.tensors))
        state = "every checksum is right" if args.verify else "sizes are right; --verify compares checksums"
        print(f"{'integrity':<18}committed, {state}")
    return 0
