"""Every bench by one command.

``python -m benchmarks``                                   what there is, and how long it takes
``python -m benchmarks step_time moe --record``            run, write ``benchmarks/records/NAME.json`` and the tables
``python -m benchmarks all --quick``                       whether they run at all, in small
``python -m benchmarks step_time -- --device cuda``        what comes after ``--`` is for the bench itself

Each runs in a process of its own, so that none finds the memory, threads or kernels of another.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.catalogue import Bench, benches
from benchmarks.record import RECORDS, ROOT

_HERE = ""  # ``--record`` without a value


def arguments(bench: Bench, args: argparse.Namespace, more: Sequence[str]) -> list[str]:
    """The bench's command line."""
    given = list(bench.quick) if args.quick else []
    if args.rounds is not None and bench.has_rounds:
        given += ["--rounds", str(args.rounds)]
    if args.record is not None:
        path = RECORDS if args.record == _HERE else Path(args.record)
        given += ["--record", str(path if path.suffix == ".json" else path / f"{bench.record}.json")]
    return [*given, *more]


def listing(known: dict[str, Bench]) -> str:
    """A line per bench."""
    lines = ["python -m benchmarks NAME... [--quick] [--rounds N] [--record [PATH]] [-- more for the bench]", ""]
    lines += [f"{b.name:18}{f'{b.minutes:g} min':>8}  {b.line}" for b in known.values()]
    return "\n".join([*lines, "", "Minutes are those of two cores that have nothing else to do."])


def chosen(parser: argparse.ArgumentParser, args: argparse.Namespace, known: dict[str, Bench]) -> list[Bench]:
    """The benches asked for; ends the program if they cannot be run so."""
    names = list(known) if args.names == ["all"] else args.names
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"no bench {', '.join(unknown)}. There are: {', '.join(known)}; or all.")
    if args.quick and args.record == _HERE:
        parser.error("a quick run measures nothing: give --record a path that is not the place of the real records.")
    if len(names) > 1 and (args.record or "").endswith(".json"):
        parser.error(f"--record {args.record} is one file, for {len(names)} benches: give a folder.")
    return [known[name] for name in names]


def main(argv: Sequence[str] | None = None) -> int:
    """List, or run one after the other; the status is 1 if any failed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    cut = argv.index("--") if "--" in argv else len(argv)
    known = benches()
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__, add_help=True,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("names", nargs="*", help="which ones, or all")
    parser.add_argument("--quick", action="store_true", help="in small, to see that they run; numbers mean nothing")
    parser.add_argument("--rounds", type=int, help="counted rounds, for those that have them")
    parser.add_argument("--record", nargs="?", const=_HERE, metavar="PATH",
                        help=f"write records: into {RECORDS}, another folder, or a .json file")  # fmt: skip
    args = parser.parse_args(argv[:cut])
    if not args.names:
        print(listing(known))
        return 0
    results: list[tuple[str, int, float]] = []
    for bench in chosen(parser, args, known):
        command = ["-m", f"benchmarks.{bench.name}", *arguments(bench, args, argv[cut + 1 :])]
        print(f"\n=== python {' '.join(command)}", flush=True)
        begin = time.monotonic()
        status = subprocess.run([sys.executable, *command], cwd=ROOT, check=False).returncode
        results.append((bench.name, status, time.monotonic() - begin))
    if args.record == _HERE:
        print("\n=== tables, figures and pictures of the documents", flush=True)
        subprocess.run([sys.executable, "-m", "benchmarks.tables"], cwd=ROOT, check=True)
    print()
    for name, status, seconds in results:
        print(f"{name:18}{seconds:>8.0f} s  {'ok' if status == 0 else f'FAILED with status {status}'}")
    return int(any(status for _, status, _ in results))


if __name__ == "__main__":
    sys.exit(main())
