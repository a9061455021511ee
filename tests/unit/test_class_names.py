"""A class name of the core stands in one module, so that a name alone says which class it is."""

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

CORE = Path(__file__).parents[2] / "ls_strategy"


def names_in_two(modules: Iterable[Path]) -> dict[str, list[str]]:
    """Return the class names, also of nested classes, that stand in several modules, with these modules."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in modules:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(str(path))
    return {name: sorted(where) for name, where in found.items() if len(where) > 1}


def test_no_class_name_of_the_core_stands_in_two_modules() -> None:
    modules = [path for path in CORE.rglob("*.py") if path.relative_to(CORE).parts[0] != "extras"]
    assert len(modules) > 100, "the core was not found"
    repeated = names_in_two(modules)
    assert not repeated, "rename all but one: " + "; ".join(f"{n} in {', '.join(w)}" for n, w in repeated.items())


def test_a_name_in_two_modules_is_found_with_both(tmp_path: Path) -> None:
    one, other, third = (tmp_path / f"{name}.py" for name in ("one", "other", "third"))
    one.write_text("class _Entry: ...\nclass Item: ...\n")
    other.write_text("def f():\n    class _Entry: ...\n")
    third.write_text("class Item2: ...\nclass Twice: ...\nclass Twice: ...\n")
    assert names_in_two([other, third, one]) == {"_Entry": [str(one), str(other)]}
