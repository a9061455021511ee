"""Pages that programs read: a row of docs/features.md names a test, a rule of docs/choosing.md makes a strategy."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from ls_strategy import ZeROStrategy
from tests.docs.blocks import PAGES, ROOT

TEST = re.compile(r"`((?:dist|unit|docs)/test_\w+\.py)::(test_\w+)`")


def rows(page: str, head: str) -> list[list[str]]:
    """Cells of the tables of a page whose last column is ``head``; and no other tables are there."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", (ROOT / "docs" / page).read_text(), re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in table.splitlines()]
        assert lines[0][-1] == head, table
        found += lines[2:]
    return found


@cache
def functions(file: str) -> set[str]:
    body = ast.parse((ROOT / "tests" / file).read_text()).body
    return {node.name for node in body if isinstance(node, ast.FunctionDef)}


FEATURES = rows("features.md", "test")
RULES = rows("choosing.md", "costs")


def test_there_are_rows() -> None:
    assert len(FEATURES) > 60
    assert len(RULES) > 25
    assert len({row[0] for row in FEATURES}) == len(FEATURES), "a feature has one row"


@pytest.mark.parametrize("row", FEATURES, ids=lambda row: row[0])
def test_a_feature_names_a_test_that_is_there_and_says_how_where_it_is_not_plain(row: list[str]) -> None:
    feature, works, how, test = row
    assert works in ("yes", "how", "no"), feature
    assert how or works == "yes", feature
    named = TEST.fullmatch(test)
    assert named, test
    assert named[2] in functions(named[1]), test


@pytest.mark.parametrize("row", RULES, ids=lambda row: row[0])
def test_a_rule_sets_options_that_are_there_and_says_whether_numbers_change(row: list[str]) -> None:
    _, options, numbers, costs = row
    assert eval(f"ZeROStrategy({options.strip('`')})", {"ZeROStrategy": ZeROStrategy})
    assert numbers in ("same", "other")
    assert costs


def test_llms_txt_lists_every_page_once_and_no_other_file() -> None:
    text = (ROOT / "llms.txt").read_text()
    listed = re.findall(r"^- \[.+\]\((\S+)\): \S", text, re.MULTILINE)
    assert text.startswith("# ls_strategy\n\n> ")
    assert sorted(listed) == sorted([str(page.relative_to(ROOT)) for page in PAGES] + ["AGENTS.md"])
    assert "(llms.txt)" in (ROOT / "AGENTS.md").read_text()
