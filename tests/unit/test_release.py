"""What goes out with a release says the same everywhere, in today's names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

import ls_strategy
from ls_strategy.checked import inner_kinds
from ls_strategy.config import ZeROConfig

ROOT = Path(__file__).parents[2]
CHANGES = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
SECTIONS = re.split(r"^## ", CHANGES, flags=re.MULTILINE)[1:]
MOST_LINES = 40


def options(kind: type, prefix: str = "") -> Iterator[str]:
    """Dotted names of all options."""
    inner = inner_kinds(kind)
    for field in dataclasses.fields(kind):
        yield prefix + field.name
        if field.name in inner:
            yield from options(inner[field.name], f"{prefix}{field.name}.")


def test_every_place_names_the_same_version() -> None:
    named = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    newest = re.match(r"\[(.*?)\]", SECTIONS[0])
    assert named is not None
    assert newest is not None
    assert named[1] == newest[1] == cited["version"] == ls_strategy.__version__


def test_a_version_has_few_lines_in_the_changelog() -> None:
    assert len(SECTIONS) >= 3
    assert [s.splitlines()[0] for s in SECTIONS if len(s.rstrip().splitlines()) > MOST_LINES] == []


def test_the_changelog_names_options_and_classes_that_exist() -> None:
    known = set(options(ZeROConfig))
    groups = {name for name in known if "." not in name and name != "stage"}
    codes = re.findall(r"`([^`\n]+)`", CHANGES)
    dotted = {code.split("=")[0] for code in codes if code.split(".")[0] in groups and "." in code}
    assert len(dotted) > 10
    assert dotted - known == set()
    classes = {code for code in codes if re.fullmatch(r"[A-Z][a-z]\w*[A-Z]\w*", code)}
    assert len(classes) > 5
    assert classes - set(ls_strategy.__all__) == set()
