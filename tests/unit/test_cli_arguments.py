"""Types of arguments: right values pass, wrong ones say the rule."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ls_strategy.checked import above
from ls_strategy.errors import ConfigError
from ls_strategy.extras.cli import arguments
from ls_strategy.extras.cli.job_program import require_module


@pytest.mark.parametrize(("text", "expected"), [("1", 1), (" 7 ", 7), ("1048576", 1 << 20)])
def test_integers_in_range_pass(text, expected):
    assert arguments.integer()(text) == expected


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "", "1048577"])
def test_other_integers_say_the_rule(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is given; it must be a whole number from 1 to"):
        arguments.integer()(text)


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-2", "x"])
def test_numbers_are_finite_and_above_0(text):
    with pytest.raises(argparse.ArgumentTypeError, match="it must be a finite number above 0"):
        arguments.number(above(0, 100))(text)


@pytest.mark.parametrize("kind", [arguments.path, arguments.location, arguments.line])
def test_empty_texts_are_refused(kind):
    with pytest.raises(argparse.ArgumentTypeError):
        kind("  ")


def test_a_line_has_no_line_break():
    with pytest.raises(argparse.ArgumentTypeError, match="a text of one line"):
        arguments.line("a\nb")
    assert arguments.line("a b") == "a b"


def test_an_unknown_protocol_is_refused():
    with pytest.raises(argparse.ArgumentTypeError, match="Protocol not known: foo"):
        arguments.location("foo://bar")
    assert arguments.location("memory://bar") == "memory://bar"


@pytest.mark.parametrize("text", ["0GB", "80 bananas", "99999999TB"])
def test_sizes_outside_of_the_range_are_refused(text):
    with pytest.raises(argparse.ArgumentTypeError):
        arguments.size(text)


def test_missing_yaml_files_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").touch()
    assert arguments.yaml_files(["a.yaml"]) == [Path("a.yaml")]
    with pytest.raises(ConfigError, match=r"Got 'b.yaml', which is no file in .* Give the program's YAML files"):
        arguments.yaml_files(["a.yaml", "b.yaml"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: [", "is not valid YAML"),
        (b"- 1", "outermost value must be a mapping"),
        (b"\xff\xfe", "not in UTF-8"),
        (b"trainer: 5", "trainer must be a mapping of options"),
    ],
)
def test_what_is_no_file_of_a_program_says_why(tmp_path, content, message):
    file = tmp_path / "x.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        arguments.read_section(file, "trainer")


@pytest.mark.parametrize("module", ["alone", "package", "package.inner", "folder.inner", "folder.deeper.inner"])
def test_programs_are_found_without_importing_them(tmp_path, monkeypatch, module):
    monkeypatch.chdir(tmp_path)
    for file in ("alone.py", "package/__init__.py", "package/inner.py", "folder/inner.py", "folder/deeper/inner.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("raise SystemExit('imported')")
    require_module(module)
    for wrong in (f"{module}.typo", "typo", "", ".", f".{module}"):
        if wrong != "folder.deeper.inner.typo":  # nobody knows before the folders are imported
            with pytest.raises(ConfigError, match=r"neither in .* nor an installed package"):
                require_module(wrong)


@pytest.mark.parametrize("content", ["", "model: {}", "trainer:"])
def test_a_missing_section_is_empty(tmp_path, content):
    file = tmp_path / "x.yaml"
    file.write_text(content)
    assert arguments.read_section(file, "trainer") == {}
