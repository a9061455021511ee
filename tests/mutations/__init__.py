"""Mutations of the package, each of which tests of the default selection must kill.

A mutation is an edit that changes behaviour: a wait that is left out, a sum in another order, a factor of 2. If no test
fails with it, nothing guards the line. Whoever thins out the tests, or moves one to ``wide``, runs them::

    python -m tests.mutations --list            # what there is
    python -m tests.mutations                   # all of them: every one must be killed
    python -m tests.mutations "loss scale"      # those with these words in their names
    python -m tests.mutations --check           # that the named tests pass without a mutation

A mutation names one to three tests, the cheapest that kill it; the whole selection may have more. Whoever moves a
mechanism moves its mutations along: `tests.unit.test_mutations` fails if an edit no longer applies or a named test is
gone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One edit of the package, and tests that fail with it."""

    name: str
    """What the mutated package does, in words."""

    file: str
    """The file it changes, from the root of the repository."""

    old: str
    """The text it replaces. It occurs exactly once in the file."""

    new: str
    """The text it puts there."""

    tests: tuple[str, ...]
    """Ids of tests in the default selection of pytest. At least one of them fails with the mutation."""
