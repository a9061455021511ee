"""Every command and option of ``ls-strategy`` is given by a test, and documents name no other one."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import yaml

from ls_strategy.extras.cli import make_parser

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
PAGES = [*ROOT.glob("*.md"), ROOT / "llms.txt", *(ROOT / "docs").rglob("*.md"), *ROOT.glob("recipes/*/*.md"), *FORMS]
COMMANDS = make_parser().commands
OPTION = r"(?<![\w-])--?[a-z][a-z-]*"
ROWS = [
    pytest.param(name, action.option_strings, id=f"{name} {action.option_strings[-1]}")
    for name, parser in COMMANDS.items()
    for action in parser._actions
    if action.option_strings and "--help" not in action.option_strings
]


@cache
def words_of_tests() -> dict[str, set[str]]:
    """Options and names of commands in the strings of each file, but for those that take them from the parser."""
    found = {}
    for file in TESTS.rglob("*.py"):
        if file.name in ("test_commands_fuzz.py", Path(__file__).name):
            continue
        strings = (n.value for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Constant))
        text = "\n".join(s for s in strings if isinstance(s, str))
        found[str(file)] = set(re.findall(rf"{OPTION}|[a-z]+(?:-[a-z]+)*", text))
    return found


@pytest.mark.parametrize(("command", "options"), ROWS)
def test_an_option_is_given_by_a_test_of_its_command(command: str, options: list[str]) -> None:
    assert any(command in words and words & set(options) for words in words_of_tests().values())


def named(text: str) -> list[tuple[str, list[str]]]:
    """Each command that a text calls, with its options; what stands behind ``--`` goes to another program."""
    calls = re.findall(r"(?:ls-strategy|-m ls_strategy\.cli) ([a-z][a-z-]*)([^`|\n]*)", text.replace("\\\n", " "))
    return [(command, re.findall(OPTION, re.split(r" -- |[;#&]", rest)[0])) for command, rest in calls]


def test_documents_and_forms_name_commands_and_options_that_exist() -> None:
    found = [(file.name, *call) for file in PAGES for call in named(file.read_text(encoding="utf-8"))]
    assert {command for _, command, _ in found} == set(COMMANDS)
    assert sum(len(options) for *_, options in found) > 30
    wrong = [
        (file, command, option)
        for file, command, options in found
        for option in options
        if option not in COMMANDS[command]._option_string_actions
    ]
    assert wrong == []


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_an_issue_form_is_what_github_accepts(file: Path) -> None:
    form = yaml.safe_load(file.read_text(encoding="utf-8"))
    assert form.keys() == {"name", "description", "labels", "body"}
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert {part["type"] for part in fields} <= {"textarea", "input"}
    assert all(part["attributes"]["label"] for part in fields)
    assert len({part["id"] for part in fields}) == len(fields)
    for part in form["body"]:
        assert part.keys() <= {"type", "id", "attributes", "validations"}
        for document in re.findall(r"[\w/]+\.md", str(part)):
            assert (ROOT / document).is_file(), document


def test_reports_of_bugs_come_with_what_the_doctor_says() -> None:
    asking = [file.stem for file in FORMS if "`ls-strategy doctor --json`" in file.read_text(encoding="utf-8")]
    assert (len(FORMS), asking) == (3, ["bug", "difference"])
