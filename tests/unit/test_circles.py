"""No file of the package imports, at any place and for types alone either, what imports it in turn."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ls_strategy

ROOT = Path(ls_strategy.__file__).parents[1]


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


def test_files_are_in_no_circle() -> None:
    known = modules()
    found = list(circles({name: imports(path, known) for name, path in known.items()}))
    assert not found, "\n".join(", ".join(sorted(circle)) for circle in found)


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": set(), "e": {"a"}}
    assert list(circles(graph)) == [{"a", "b", "c"}]
