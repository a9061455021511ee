"""Which benches there are, read off their files: a bench is a module of this folder with these constants.

``MINUTES``  about how long it takes with its defaults, on two cores
``QUICK``    arguments with which it runs through in seconds, measuring nothing
``SPREAD``   what its record says about how much the numbers vary: ``quartiles ...``, ``over seeds ...``, ``none: ...``
             where they cannot, or ``unknown: ...``
``SEEDS``    what random numbers start from
``RECORD``   name of its record, if that is not its own

Its line in the list is the first one of its docstring. Nothing is imported: a list should not take seconds.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Bench:
    name: str
    line: str
    minutes: float
    quick: tuple[str, ...]
    spread: str
    seeds: str
    record: str
    has_rounds: bool  # whether it takes ``--rounds``


def benches(folder: Path = FOLDER) -> dict[str, Bench]:
    """By name, in alphabetical order."""
    found = {path.stem: _read(path) for path in sorted(folder.glob("*.py"))}
    return {name: bench for name, bench in found.items() if bench is not None}


def _read(path: Path) -> Bench | None:
    module = ast.parse(path.read_text())
    constants = {
        target.id: value
        for node in module.body
        if isinstance(node, ast.Assign) and (value := _literal(node.value)) is not None
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    if not {"MINUTES", "QUICK", "SPREAD", "SEEDS"} <= constants.keys():
        return None
    line = (ast.get_docstring(module) or "").split("\n")[0].rstrip(".")
    return Bench(
        path.stem, line, constants["MINUTES"], tuple(constants["QUICK"]), constants["SPREAD"], constants["SEEDS"],
        constants.get("RECORD", path.stem), has_rounds=any(_counts_rounds(node) for node in ast.walk(module)),
    )  # fmt: skip


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _counts_rounds(node: ast.AST) -> bool:
    """Whether it is a call of `record.parser` with rounds."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "parser"
        and any(keyword.arg == "rounds" for keyword in node.keywords)
    )
