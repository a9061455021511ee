"""``.ci/oldest``: no private name of torch and Lightning that the package uses is beyond the reach of its files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "oldest"
PRIVATE = (
    "ls_strategy._torch",
    "ls_strategy.lightning._private",
    "ls_strategy.lightning._private_uneven",
    "ls_strategy.extras._lightning",
)
FITTED = (
    "ls_strategy/lightning/",
    "ls_strategy/zero/",
    "ls_strategy/distributed/",
    "ls_strategy/extras/deepspeed/strategy.py",
    "ls_strategy/extras/planner/fit.py",
)
"""What takes part in fits, the last two in those with ``deepspeed_config`` and of ``zero_auto``. Files and cases with
fits reach it without importing it; they were chosen by noting which functions of these they call."""


def listed(name: str) -> list[str]:
    """Words of one of the script's arrays."""
    (lines,) = re.findall(rf"^{name}=\((.*?)^\)", SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    return [word for line in lines.splitlines() for word in line.split("#")[0].split()]


def chosen() -> list[Path]:
    """Files all or some of whose tests the script runs."""
    patterns = [*listed("tests"), *(case.split("::")[0] for case in listed("cases"))]
    return [file for pattern in patterns for file in sorted(ROOT.glob(pattern))]


def file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def imported(file: Path) -> frozenset[tuple[str, str]]:
    """Module and name of each ``from module import name``, at the top of a file or in its functions."""
    found = statements(ast.parse(file.read_text()))
    return frozenset((n.module, a.name) for n in found if isinstance(n, ast.ImportFrom) and n.module for a in n.names)


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """All statements and what holds some; in expressions, most of a tree, there are none."""
    ahead: list[ast.AST] = [tree]
    while ahead:
        node = ahead.pop()
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            ahead += getattr(node, part, ())


@cache
def public() -> dict[str, str]:
    """Modules of the names that ``ls_strategy`` itself has, which it imports on first use."""
    return {name: module for module, name in imported(ROOT / "ls_strategy" / "__init__.py")}


def private_names(file: Path) -> set[str]:
    """Names of torch and Lightning without a promise that a file takes from where they are kept."""
    own = {f"{module}.py" for module in (name.rsplit(".", 1)[-1] for name in PRIVATE)}
    if file.name in own or not any(f"from {module} import" in file.read_text() for module in PRIVATE):
        return set()
    return {name for module, name in imported(file) if module in PRIVATE}


def modules_of(file: Path) -> set[Path]:
    """Files of the package and of the tests that a file imports."""
    found = set()
    for module, name in imported(file):
        if module == "ls_strategy" and name in public():
            found.add(file_of(public()[name]))
        elif module.split(".")[0] in ("ls_strategy", "tests"):
            found.add(file_of(f"{module}.{name}") or file_of(module))
    return {file for file in found if file is not None}


def reached(files: list[Path]) -> set[str]:
    """Private names that the tests use, or the modules of the package that they, or parts of the tests, import."""
    seen, ahead, names = set[Path](), list(files), set[str]()
    while ahead:
        file = ahead.pop()
        if file not in seen:
            seen.add(file)
            names |= private_names(file)
            if ROOT / "tests" in file.parents or file.parent.name == "callbacks":  # those of one are in several files
                ahead += modules_of(file)
    return names


def test_what_is_listed_is_there_once() -> None:
    patterns, cases = listed("tests"), listed("cases")
    found = {pattern: [str(file.relative_to(ROOT)) for file in ROOT.glob(pattern)] for pattern in patterns}
    assert [pattern for pattern, files in found.items() if not files] == []
    files = [*chain.from_iterable(found.values())]
    assert len(files) == len(set(files)) > 20
    assert len(cases) == len(set(cases)) > 10
    for case in cases:
        file, function = case.split("::")
        assert f"\ndef {function}(" in (ROOT / file).read_text(), case


def test_every_private_name_is_reached_on_the_oldest_versions() -> None:
    """A new private name needs a user that takes part in a fit, or that one of these files imports."""
    users = {str(file.relative_to(ROOT)): private_names(file) for file in (ROOT / "ls_strategy").rglob("*.py")}
    every = set().union(*users.values())
    assert len(every) > 100
    of_a_fit = set().union(*(names for file, names in users.items() if file.startswith(FITTED)))
    missing = every - of_a_fit - reached(chosen())
    assert {name: [file for file, names in users.items() if name in names] for name in missing} == {}


def test_some_names_would_be_missed() -> None:
    """The test above can fail."""
    assert "intercept_cli" not in reached([ROOT / "tests" / "unit" / "test_layout.py"])
    assert "intercept_cli" in reached([ROOT / "tests" / "unit" / "test_planner_cli.py"])
    assert "before_iterators" in reached([ROOT / "tests" / "dist" / "test_islands_resume.py"])
