"""Run habits that people have under any Lightning strategy, and print which of them come out right.

``python -m ls_strategy.conformance --strategy ddp zero3 my_package.MyStrategy``
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ls_strategy.extras.conformance.habit import Habit
from ls_strategy.extras.conformance.habits import all_habits
from ls_strategy.extras.conformance.ranks import preload
from ls_strategy.extras.conformance.specification import Specification, SpecificationError, parse
from ls_strategy.extras.conformance.suite import Suite, SuiteError, Verdicts, is_serious, terminal
from ls_strategy.extras.conformance.verdict import TOLERANCE, Verdict

_EPILOG = """
a strategy is
  ddp                           an alias of Lightning's registry
  package.Strategy(option=1)    a class with keyword arguments: literals, or devices, the number of ranks
  name=package.Strategy         with the name that the table gives it
  package.Strategy @ package.f  f(module) is called in configure_model, as the strategy's documentation asks for

exit status: 0 if nothing is silently other, hangs or has lost data; 1 otherwise; 2 if the suite itself failed
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, and return its exit status."""
    given, chosen, strategies = check(arguments)
    if given.list:
        print("\n".join(f"{each.name}\n    {each.does}\n    right: {each.right}" for each in chosen))
        return 0
    if given.keep is not None:
        return _run(given, chosen, strategies, given.keep)
    with tempfile.TemporaryDirectory(prefix="conformance_", ignore_cleanup_errors=True) as folder:
        return _run(given, chosen, strategies, Path(folder))


def check(arguments: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[Habit], list[Specification]]:
    """Return the arguments with the habits and strategies that they name, or end with exit status 2."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if not given.list and not given.strategy:
        parser.error("Give one strategy or more with --strategy, for example: --strategy ddp zero2.")
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"Got --json {given.json}, whose folder does not exist. Make it first.")
    if given.keep is not None and given.keep.exists() and (given.keep.is_file() or any(given.keep.iterdir())):
        parser.error(f"Got --keep {given.keep}, which is not empty. Give a new folder.")
    return given, _chosen(parser, given.only), _strategies(parser, given.strategy)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m ls_strategy.conformance",
        description=(__doc__ or "").split("\n")[0],
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--strategy", nargs="+", default=[], metavar="STRATEGY", help="what is tested; see below")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these habits alone; see --list")
    parser.add_argument("--list", action="store_true", help="list the habits, and end")
    parser.add_argument("--devices", type=_ranks, default=2, metavar="N", help="ranks; default: 2")
    parser.add_argument("--accelerator", default="cpu", help="as of a Trainer; default: cpu, over gloo")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS",
                        help="of each phase of a habit, on a machine that is not busy; default: 60")  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts to a file as well")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the logs and files of all runs there")
    return parser


def _ranks(text: str) -> int:
    count = int(text)
    if count < 2:
        raise argparse.ArgumentTypeError(f"got {count}, but habits of ranks need two or more")
    return count


def _chosen(parser: argparse.ArgumentParser, only: list[str] | None) -> list[Habit]:
    known = all_habits()
    unknown = [name for name in only or () if name not in known]
    if unknown:
        parser.error(f"Got --only {' '.join(unknown)}, which is no habit. Choose from: {' '.join(known)}.")
    return [each for each in known.values() if only is None or each.name in only]


def _strategies(parser: argparse.ArgumentParser, texts: list[str]) -> list[Specification]:
    try:
        found = [parse(text) for text in texts]
        for each in found:
            each.check()
    except SpecificationError as error:
        parser.error(str(error))
    labels = [each.label for each in found]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        parser.error(f"Got two strategies called {', '.join(twice)}. Name them apart, as in mine={twice[0]}.")
    return found


def _run(given: argparse.Namespace, chosen: list[Habit], strategies: list[Specification], folder: Path) -> int:
    preload([module for each in strategies if (module := each.module()) is not None])
    suite = Suite(
        folder.absolute(),
        devices=given.devices,
        accelerator=given.accelerator,
        limit_s=given.limit,
        keep=given.keep is not None,
    )
    verdicts: dict[str, dict[str, Verdict]] = {}
    labels = [each.label for each in strategies]
    total = len(chosen) * len(strategies)
    done = 0
    status = None
    try:
        for habit, strategy, verdict in suite.run(chosen, strategies):
            verdicts.setdefault(habit.name, {})[strategy.label] = verdict
            done += 1
            print(f"[{done}/{total}] {habit.name}  {strategy.label}  {verdict.outcome}  {verdict.seconds:g} s",
                  file=sys.stderr, flush=True)  # fmt: skip
    except SuiteError as error:
        status = 2
        print(error, file=sys.stderr)
    except KeyboardInterrupt:
        status = 130
        print("Interrupted; this is what there is so far.", file=sys.stderr)
    print(terminal(verdicts, labels))
    if given.json is not None:
        given.json.write_text(json.dumps(_document(given, strategies, chosen, verdicts), indent=1) + "\n")
    return int(is_serious(verdicts)) if status is None else status


def _document(
    given: argparse.Namespace, strategies: list[Specification], chosen: list[Habit], verdicts: Verdicts
) -> dict[str, Any]:
    packages = ("torch", "lightning", "pytorch-lightning", "ls_strategy")
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "versions": {"python": platform.python_version(), **versions},
        "devices": given.devices,
        "accelerator": given.accelerator,
        "limit_s": given.limit,
        "tolerance": TOLERANCE,
        "strategies": {each.label: text for each, text in zip(strategies, given.strategy, strict=True)},
        "habits": {each.name: {"does": each.does, "right": each.right} for each in chosen},
        "verdicts": {
            habit: {label: dataclasses.asdict(verdict) for label, verdict in by.items()}
            for habit, by in verdicts.items()
        },
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ranks are ended, and what there is is printed
    sys.exit(main())
