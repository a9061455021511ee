"""The table of mutations fits the code: every edit applies, and the tests that it names are there to kill it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from tests.marks import DEFAULT, LEFT_OUT
from tests.mutations import Mutation
from tests.mutations.catalogue import MUTATIONS
from tests.mutations.runner import ROOT, applied

_ID = re.compile(r"(?P<file>[\w/]+\.py)(::(?P<owner>[A-Z]\w*))?(::(?P<function>test_\w+))?(\[.+\])?")


def test_names_are_different_and_none_is_a_part_of_another() -> None:
    """The command chooses by words in names."""
    names = [mutation.name for mutation in MUTATIONS]
    assert len(names) > 50
    assert [(a, b) for a in names for b in names if a is not b and a in b] == []


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_an_edit_applies_and_leaves_a_program(mutation: Mutation) -> None:
    before = (ROOT / mutation.file).read_text()
    assert before.count(mutation.old) == 1
    after = before.replace(mutation.old, mutation.new)
    assert _differ(before, _tree(mutation.file), after, _parsed(after)), "only comments or layout change"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_one_to_three_tests_of_the_default_selection_are_named(mutation: Mutation) -> None:
    """As far as decorators tell, which is all that a run of this file has; ``tests.mutations --check`` runs them."""
    assert 1 <= len(mutation.tests) <= 3
    for test in mutation.tests:
        found = _ID.fullmatch(test)
        assert found is not None, test
        tree = _tree(found["file"])
        assert not any(_is_left_out(mark) for mark in _marks_of_module(tree)), test
        scope: ast.AST = tree
        for name in filter(None, (found["owner"], found["function"])):
            scope = next(node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name)
            assert isinstance(scope, ast.ClassDef | ast.FunctionDef)
            assert not any(_is_left_out(mark) for mark in map(ast.unparse, scope.decorator_list)), test


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> dict[str, bool]:
    """Whether the default selection has cases of it: for all files, classes, functions and cases of this session.

    Empty where the session has parts of files only, so that a case may be missing.
    """
    config = request.config
    if config.getoption("lf", False) or any("::" in str(word) for word in config.args):
        return {}
    found: dict[str, bool] = {}
    for case, is_default in config.stash[DEFAULT].items():
        parts = case.partition("[")[0].split("::")
        for name in {case, *("::".join(parts[:i]) for i in range(1, len(parts) + 1))}:
            found[name] = found.get(name, False) or is_default
    return found


def test_cases_that_are_named_are_in_the_default_selection(selected: dict[str, bool]) -> None:
    """Of those files that this session has: all of them in a run of all tests, and whatever it selects."""
    named = {test: mutation.name for mutation in MUTATIONS for test in mutation.tests}
    here = {test: name for test, name in named.items() if test.partition("::")[0] in selected}
    assert {test: name for test, name in here.items() if test not in selected} == {}, "there is no such test"
    assert {test: name for test, name in here.items() if not selected[test]} == {}, "marked, so it runs nowhere here"


def test_the_default_selection_is_what_pytest_is_told(request: pytest.FixtureRequest) -> None:
    assert f"-m {' and '.join(f'not {mark}' for mark in LEFT_OUT)}" in request.config.getini("addopts")


Y_IS_3 = Mutation("y is 3", "a.py", "y = 2", "y = 3", ())


def test_a_mutation_is_undone_also_after_an_error(tmp_path: Path) -> None:
    path, seen = tmp_path / "a.py", []
    path.write_text("x = 1\ny = 2\n")
    with suppress(KeyError), applied(Y_IS_3, tmp_path):
        seen.append(path.read_text())
        raise KeyError
    assert [*seen, path.read_text()] == ["x = 1\ny = 3\n", "x = 1\ny = 2\n"]


def test_an_edit_that_does_not_apply_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with pytest.raises(ValueError, match="has the text of 'y is 3' 0 times"):
        applied(Y_IS_3, tmp_path).__enter__()


def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def _tree(file: str) -> ast.Module:
    return _parsed((ROOT / file).read_text())


def _differ(before: str, old: ast.Module, after: str, new: ast.Module) -> bool:
    """Whether two texts are different programs. Statements of the same text need no look at their trees."""
    if len(old.body) != len(new.body):
        return True
    pairs = zip(_statements(before, old), _statements(after, new), strict=True)
    return any(x != y and ast.dump(a) != ast.dump(b) for (x, a), (y, b) in pairs)


def _statements(text: str, tree: ast.Module) -> list[tuple[list[str], ast.stmt]]:
    """Statements of a module, with the lines of each."""
    lines = text.splitlines()
    starts = [min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]) for node in tree.body]
    return [(lines[start - 1 : node.end_lineno], node) for start, node in zip(starts, tree.body, strict=True)]


def test_comments_and_layout_are_no_edit() -> None:
    def differ(before: str, after: str) -> bool:
        return _differ(before, _parsed(before), after, _parsed(after))

    text = "x = 1\n@f\ndef g():\n    return 2\n"
    assert not differ(text, "x = 1  # one\n\n@f\ndef g():\n    # two\n    return (2)\n")
    assert differ(text, text.replace("@f", "@h"))
    assert differ(text, text.replace("2", "3"))
    assert differ(text, text + "y = 1\n")


def _marks_of_module(tree: ast.Module) -> Iterator[str]:
    """Yield what is assigned to ``pytestmark``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield ast.unparse(node.value)


def _is_left_out(mark: str) -> bool:
    """Whether a decorator keeps all cases of a test out of the default selection."""
    return "parametrize" not in mark and re.search(rf"\b({'|'.join(LEFT_OUT)})\b", mark) is not None
