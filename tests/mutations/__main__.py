"""``python -m tests.mutations``: show that the default selection of tests kills every mutation."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from tests.mutations import Mutation
from tests.mutations.catalogue import MUTATIONS
from tests.mutations.runner import Result, make_copy, run_mutated, run_unchanged


def main(arguments: Sequence[str] | None = None) -> int:
    """Run mutations, print what became of them, and return 0 if all were killed."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("names", nargs="*", help="words in the names of mutations; none: all mutations")
    parser.add_argument("--list", action="store_true", help="print names and tests, and run nothing")
    parser.add_argument("--check", action="store_true", help="run the tests without the mutations: they must pass")
    parser.add_argument("--show", action="store_true", help="print the end of what pytest says of each")
    parser.add_argument("-n", "--workers", type=int, default=1, help="runs at a time (default: 1)")
    options = parser.parse_args(arguments)
    chosen = [m for m in MUTATIONS if not options.names or any(word in m.name for word in options.names)]
    if not chosen:
        parser.error(f"no mutation has any of {options.names} in its name; --list shows all")
    if options.list:
        for mutation in chosen:
            print(f"{mutation.name}\n    {mutation.file}\n    " + "\n    ".join(mutation.tests))
        return 0
    results = check(chosen) if options.check else run(chosen, options.workers, show=options.show)
    print()
    width = max(len(result.verdict) for result in results)
    for result in results:
        print(f"{result.verdict:{width}}  {result.seconds:6.1f} s  {result.name}")
    good = sum(result.is_good for result in results)
    print(f"{good} of {len(results)} {'pass' if options.check else 'killed'}")
    return 0 if good == len(results) else 1


def check(mutations: Sequence[Mutation]) -> list[Result]:
    """Run the tests of the mutations on the package as it is."""
    with tempfile.TemporaryDirectory(prefix="ls_mutations_") as folder:
        results, output = run_unchanged(mutations, make_copy(Path(folder) / "0"))
    print(output[-3000:])
    return results


def run(mutations: Sequence[Mutation], workers: int, *, show: bool) -> list[Result]:
    """Run the tests of every mutation with it, in ``workers`` copies of the repository at a time."""
    with tempfile.TemporaryDirectory(prefix="ls_mutations_") as folder:
        free: SimpleQueue[Path] = SimpleQueue()
        for number in range(min(workers, len(mutations))):
            free.put(make_copy(Path(folder) / str(number)))

        def one(mutation: Mutation) -> Result:
            copy = free.get()
            try:
                result = run_mutated(mutation, copy)
            finally:
                free.put(copy)
            print(f"{result.verdict}: {mutation.name} ({result.seconds:.0f} s)", flush=True)
            if show or not result.is_good:
                print(result.output[-3000:], flush=True)
            return result

        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(one, mutations))


if __name__ == "__main__":
    sys.exit(main())
