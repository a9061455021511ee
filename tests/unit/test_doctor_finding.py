"""Findings, and the commands that checks run."""

from __future__ import annotations

import sys

import pytest

from ls_strategy.extras.doctor.finding import Finding, note_if, one_line, run


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def test_a_problem_needs_a_cure() -> None:
    with pytest.raises(ValueError, match="without a cure"):
        Finding("x", "broken", "note")


def test_a_limit_is_a_note_with_its_cure() -> None:
    assert note_if(True, "x", "1", "raise it") == Finding("x", "1", "note", "raise it")


def test_without_a_limit_there_is_no_cure() -> None:
    assert note_if(False, "x", "1", "raise it") == Finding("x", "1")


def test_the_output_of_a_command() -> None:
    assert run(python("print('seven')"), 30) == ("seven\n", "")


def test_a_command_that_fails_gives_status_and_message() -> None:
    output, error = run(python("import sys; print('seven'); sys.exit('out of luck')"), 30)
    assert (output, error) == ("", "it ended with status 1: out of luck seven")


@pytest.mark.wide
@pytest.mark.parametrize("command", [["/no/such/program"], python("while True: pass")], ids=["missing", "too slow"])
def test_a_command_that_does_not_answer(command: list[str]) -> None:
    output, error = run(command, 0.5)
    assert output == ""
    assert error.startswith("it does not answer: ")


@pytest.mark.parametrize(
    ("text", "limit", "expected"), [(" a \n b ", 9, "a b"), ("abcdef", 6, "abcdef"), ("abcdefg", 6, "abc...")]
)
def test_one_line(text: str, limit: int, expected: str) -> None:
    assert one_line(text, limit) == expected
