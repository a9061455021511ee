"""``ls-strategy plan --search``: every kind of parallelism, with the global batch kept."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ls_strategy.errors import ConfigError
from ls_strategy.extras.cli import arguments

_NAMED = 4
"""Combinations without time that are named."""


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--search", action="store_true",
        help="also search tensor, context, expert and pipeline parallelism, with the same global batch, and print "
        "memory against time; needs --tflops and --link",
    )  # fmt: skip
    parser.add_argument(
        "--search-seconds", type=arguments.number(), default=9.0, metavar="S",
        help="begin nothing new in the search after this time (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="with --search: draw memory against time into a file, as front.png"
    )


def check_search(args: argparse.Namespace) -> None:
    """Refuse options that the search needs and does not have.

    Raises:
        ConfigError: with the cure.
    """
    if args.picture is not None and not args.search:
        raise ConfigError("Got --picture without --search, which finds what it shows. Add --search.")
    if args.search and (args.tflops is None or args.link is None):
        raise ConfigError(
            "Got --search without --tflops and --link, but it compares times. Give both, for example --tflops 300 "
            "--link 50; with several nodes also --inter-node 100Gbit."
        )
    if args.picture is not None and not args.picture.parent.is_dir():
        raise ConfigError(f"Got --picture {args.picture}, but {args.picture.parent} is no folder. Create it first.")
    if args.picture is not None:
        from ls_strategy.extras.plots.front import check_picture

        check_picture(args.picture)


def run_search(args: argparse.Namespace, question: Any, hardware: Any) -> Any:
    """Search, and draw the picture if there is one to draw. Returns a `ls_strategy.extras.planner.search.Found`."""
    from ls_strategy.extras.planner.search import search

    found = search(question, hardware, seconds=args.search_seconds)
    if args.picture is not None and found.front:
        from ls_strategy.extras.plots.front import draw_front

        points = [(o.costs.seconds[1], o.peak.device / 1e9) for o in found.front]
        draw_front(points, f"memory against time, {hardware.ranks} ranks", "s per step, at most", "GB", args.picture)
    return found


def found_lines(found: Any, hardware: Any) -> list[str]:
    """Return what the search found, for the terminal."""
    from ls_strategy.extras.planner.front import explanation, front_table
    from ls_strategy.extras.planner.search import NO_TIME

    lines = [front_table(found)] if found.options else []
    lines += explanation(found, hardware)
    late = [what for what, why in found.skipped.items() if why == NO_TIME]
    if late:
        more = "" if len(late) <= _NAMED else f" and {len(late) - _NAMED} more"
        lines.append(f"not tried, no time was left (--search-seconds): {'; '.join(late[:_NAMED])}{more}")
    lines += [f"without {what}: {why}" for what, why in found.skipped.items() if why != NO_TIME]
    return lines


def found_json(found: Any) -> dict[str, Any]:
    """Return what the search found, for JSON."""
    return {
        "global_batch": found.global_batch,
        "seconds": found.seconds,
        "front": [option.to_dict() for option in found.front],
        "traced": found.traced,
        "skipped": found.skipped,
    }
