"""No file of the package imports, at any place, what imports it in turn; the circles that are left only get smaller."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ls_strategy

ROOT = Path(ls_strategy.__file__).parents[1]

LEFT = [
    {f"ls_strategy.lightning.{name}" for name in (
        "checkpointing.resume", "checkpointing.saving", "engine_setup", "readings", "steps", "strategy", "uneven",
        "virtual.ranks",
    )},
]  # fmt: skip
"""Classes that name each other in annotations."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "ls_strategy").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports: at its top, in functions, and for types only."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name for name in found & known.keys() if known[name].name != "__init__.py"}


def circles(graph: dict[str, set[str]]) -> Iterator[set[str]]:
    """Sets of modules in which each one reaches all others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = [start]
        while left:
            for name in graph[left.pop()] - seen:
                seen.add(name)
                left.append(name)
        return seen

    reach = {name: reached(name) for name in graph}
    rest = {name for name in graph if name in reach[name]}
    while rest:
        name = min(rest)
        circle = {other for other in reach[name] if name in reach[other]}
        rest -= circle
        yield circle


def test_files_are_in_no_circle_but_those_that_are_left() -> None:
    known = modules()
    found = list(circles({name: imports(path, known) for name, path in known.items()}))
    new = [circle for circle in found if not any(circle <= left for left in LEFT)]
    assert not new, "\n".join(", ".join(sorted(circle)) for circle in new)
    assert len(found) == len(LEFT), "one is gone: remove it here"


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"a"}}
    assert list(circles(graph)) == [{"a", "b", "c"}]
