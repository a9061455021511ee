"""Mistakes on the command line: answered before torch is imported, in lines that name what was meant."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ls_strategy.extras.cli import main
from ls_strategy.extras.cli.parser import error_lines
from tests.processes import output_of

MISTAKES: list[tuple[list[str], int, str]] = [
    (["doctr"], 2, "Got 'doctr', which is not a command. Did you mean doctor?"),
    (["plan", "good.yaml", "--gpu-memry", "80GB"], 2, "Got --gpu-memry, but ls-strategy plan has no such option."),
    (["inspect", "x.ckpt", "--verfy"], 2, "Did you mean --verify?"),
    (["plan", "good.yaml", "--gpu-memory", "80XB"], 2, "'80XB', which is not a size"),
    (["plan", "good.yaml", "--inter-node", "fast"], 2, "'fast', which is not a bandwidth"),
    (["plan"], 1, "Got no YAML file."),
    (["plan", "typo.yaml"], 1, "Got 'typo.yaml', which is no file in"),
    (["plan", "good.yaml", "--module", "no.such.program"], 1, "Got --module no.such.program"),
    (["plan", "good.yaml", "--module", "program.typo"], 1, "Got --module program.typo"),
    (["plan", "list.yaml", "--module", "program"], 1, "outermost value must be a mapping"),
    (["plan", "good.yaml", "zero9.yaml", "--module", "program"], 1, "Got strategy='zero9'"),
    (["plan", "good.yaml", "--module", "program", "--search"], 1, "Got --search without --tflops and --link"),
    (["plan", "good.yaml", "--module", "program", "--longest"], 1, "Got --longest without a limit of memory"),
    (["inspect", "typo.ckpt"], 1, "typo.ckpt does not exist. Give a checkpoint"),
    (["consolidate", "typo.ckpt", "out.ckpt"], 1, "typo.ckpt does not exist. Give a checkpoint"),
    (["consolidate", "good.yaml", "list.yaml"], 1, "list.yaml exists. Give another name, or --force"),
    (["consolidate", "good.yaml", "no/out"], 1, "no is not a folder. Create it first: mkdir -p no"),
    (["consolidate", "good.yaml", "out", "--dtype", "bf16"], 1, "need --format safetensors"),
    (["doctor", "--only", "gpu"], 1, "Got the unknown check gpu."),
    (["report", "typo"], 1, "Got 'typo', but a run is the folder of a logger"),
    (["submit", "typo.yaml"], 1, "Got 'typo.yaml', which is no file in"),
    (["tune-io", "typo"], 1, "Got 'typo', which does not exist."),
    (["bench-inference", "typo"], 1, "Got MODEL 'typo', but it does not exist"),
    (["new", "program"], 1, "Got NAME='program', which exists."),
]

ANSWER_ALL = """
import contextlib, io, json, os, sys
from ls_strategy.cli import main

os.chdir(sys.argv[2])  # only now: this checkout's package was imported

answers = []
for argv in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as told:
        try:
            status = main(argv)
        except SystemExit as error:
            status = error.code
    answers.append((status, told.getvalue(), [name for name in ("torch", "lightning") if name in sys.modules]))
print(json.dumps(answers))
"""


def test_mistakes_are_answered_without_torch(tmp_path: Path) -> None:
    """In one process for all of them, so that whatever imports torch is seen."""
    (tmp_path / "program").mkdir()
    (tmp_path / "program" / "__main__.py").write_text("raise SystemExit('the program runs')")
    (tmp_path / "good.yaml").write_text("trainer: {devices: 2}\n")
    (tmp_path / "zero9.yaml").write_text("trainer: {strategy: zero9}\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    words = json.dumps([argv for argv, _, _ in MISTAKES])
    printed = output_of([sys.executable, "-c", ANSWER_ALL, words, str(tmp_path)], timeout=60)
    for (argv, status, message), (ended, told, imported) in zip(MISTAKES, json.loads(printed), strict=True):
        assert (ended, imported) == (status, []), (argv, told)
        assert message in told.replace("\n ", ""), argv
        assert "recipes" not in told, argv


def test_a_long_error_has_a_line_for_each_sentence() -> None:
    assert error_lines("a short one. It stays.") == ["a short one. It stays."]
    long = "plan: error: Got 'x.y', which is " + "very " * 20 + "wrong. Set `a`. Or B."
    assert error_lines(long) == [long[: long.index(" Set")], "  Set `a`.", "  Or B."]


def test_a_terminal_gets_full_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    text = "plan: error: " + "some words " * 12 + "/a/path/that/" + "is-long/" * 10 + "end. Then this."
    lines = error_lines(text)
    assert " ".join(line.strip() for line in lines) == text
    assert all(len(line) <= 60 or "/a/path" in line for line in lines)
    assert len(lines) > 3


@pytest.mark.parametrize("words", [["inspect", "a", "b"], ["report", "typo", "--outptu=x"]])
def test_what_a_command_does_not_take_ends_with_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert f"`ls-strategy {words[0]} --help`" in capsys.readouterr().err
