"""Sphinx as it runs after ``pip install -e ".[docs]"`` alone: ``python -m tests.docs.only_docs ARGUMENTS``.

Nothing of any other distribution can be imported, or found by its metadata, in this process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def required(name: str, extras: Sequence[str]) -> set[str]:
    """Return the distributions that ``name[extras]`` brings here, and itself."""
    found: set[tuple[str, tuple[str, ...]]] = set()
    asked = [(canonicalize_name(name), tuple(extras))]
    while asked:
        each = asked.pop()
        if each in found:
            continue
        found.add(each)
        try:
            lines = metadata.requires(each[0]) or []
        except metadata.PackageNotFoundError:
            continue
        needs = [
            need
            for need in map(Requirement, lines)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in each[1] or ("",))
        ]
        asked += [(canonicalize_name(need.name), tuple(sorted(need.extras))) for need in needs]
    return {name for name, _ in found}


class Only:
    """A finder of modules that does not find those of other distributions."""

    def __init__(self, inner: Any, hidden: frozenset[str]) -> None:
        self._inner, self._hidden = inner, hidden

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's specification, or None if it is hidden."""
        return None if name.split(".")[0] in self._hidden else self._inner.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def hide_all_but(kept: set[str]) -> frozenset[str]:
    """Hide the modules and the metadata of all distributions but ``kept``; return the modules."""
    owners = metadata.packages_distributions()
    hidden = frozenset(m for m, names in owners.items() if not kept & {canonicalize_name(name) for name in names})
    sys.meta_path[:] = [Only(finder, hidden) for finder in sys.meta_path]
    from_name = metadata.Distribution.from_name

    def known(name: str) -> metadata.Distribution:
        if canonicalize_name(name) not in kept:
            raise metadata.PackageNotFoundError(name)
        return from_name(name)

    metadata.Distribution.from_name = known  # type: ignore[method-assign]
    return hidden


if __name__ == "__main__":
    hide_all_but(required("ls_strategy", ["docs"]))
    from sphinx.cmd.build import main

    sys.exit(main(sys.argv[1:]))
