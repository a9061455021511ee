"""Wrong words for every argument of every command: an exit status and a line that says what is wrong, or it works.

Commands and arguments come from the parser, so that a new one is covered without a change here.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy.checkpoint.manifest import _crc_of
from ls_strategy.extras.cli import main, make_parser
from tests.unit.checkpoint_folders import small_folder
from tests.unit.test_options_fuzz import TooLongError, limit

ROOT = Path(__file__).resolve().parents[2]

WRONG = [
    "x", "", " ", "-1", "0", "1", "2.5", "nan", "inf", "-inf", "1e400", "1e18", "9" * 30, "0x10", "1_0", "True",
    "a\nb", "\udcff", "foo://bar", "s3://bar", "memory://none", "/dev/null", "/proc/1/mem", "/", "not there", ".", "--",
    "=", "a=b", "*", "~", "80GB", "-1GB", "nanGB", "1e300GB", "cuda", "cuda:7", "meta", "é", "utf8.txt", "bad.yaml",
    "five.yaml", "list.yaml", "deep.yaml", "bytes.bin", "empty", "garbage.ckpt", "cut.ckpt", "n" * 245, "n" * 256,
    "bytes.safetensors", *(f"{number}.ckpt" for number in range(14)),
]  # fmt: skip


def parsers() -> dict[str, argparse.ArgumentParser]:
    (commands,) = (a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return commands.choices


BASE = {
    "bench-inference": ["not there"],
    "consolidate": ["not there", "out"],
    "doctor": ["--only", "software"],
    "inspect": ["not there"],
    "meet": ["--islands", "2", "--port", "29400", "--secret", "not there"],
    "new": ["some_project"],
    "plan": ["not there.yaml"],
    "report": ["not there"],
    "submit": ["good.yaml", "--module", "some.program", "--dry-run"],
    "tune-io": [".", "--gib", "0.001", "--seconds", "0", "--block-mib", "1", "--parallelism", "1", "--allow-ram"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "ls_strategy.extras.islands.server.HubServer.serve", lambda _: None
    )  # else it runs until an interrupt
    (tmp_path / "good.yaml").write_text("trainer:\n  devices: 2\n")
    (tmp_path / "bad.yaml").write_bytes(b"trainer: \xff\xfe")
    (tmp_path / "five.yaml").write_text("trainer: 5\n")
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "deep.yaml").write_text("[" * 600)
    (tmp_path / "bytes.bin").write_bytes(bytes(range(256)))
    (tmp_path / "utf8.txt").write_text("some text")
    (tmp_path / "empty").write_text("")
    return tmp_path


MANIFESTS: list[Any] = [
    5,
    [],
    "x",
    None,
    {},
    {"files": {}},
    {"files": []},
    {"files": {"a": 5}},
    {"step": "x"},
    {"saved_at": 1e300},
    {"saved_at": None},
    {"layout": []},
    {"format": "x"},
    {"left_out": 5, "other": 1},
]
"""What stands in place of a manifest, or of some of its entries; its checksum is right."""


def write_checkpoints(folder: Path) -> None:
    """Files that are no checkpoint, and folders whose manifest is not what a save writes."""
    (folder / "garbage.ckpt").write_bytes(random.Random(0).randbytes(5000))
    (folder / "bytes.safetensors").write_bytes(random.Random(0).randbytes(5000))
    torch.save({"state_dict": {}}, folder / "whole.ckpt")
    (folder / "cut.ckpt").write_bytes((folder / "whole.ckpt").read_bytes()[:-100])
    small_folder(folder / "good")
    fields = json.loads((folder / "good/manifest.json").read_text())
    fields.pop("crc32")
    for number, wrong in enumerate(MANIFESTS):
        made = {**fields, **wrong} if isinstance(wrong, dict) and wrong else wrong
        text = {**made, "crc32": _crc_of(made)} if isinstance(made, dict) else made
        shutil.copytree(folder / "good", folder / f"{number}.ckpt")
        (folder / f"{number}.ckpt/manifest.json").write_text(json.dumps(text))


def complaint(argv: list[str], capsys: pytest.CaptureFixture[str], seconds: int = 20) -> str | None:
    """What is wrong with how a command ends; None if nothing."""
    capsys.readouterr()
    try:
        with limit(seconds):
            status = main(argv)
    except SystemExit as error:
        status = error.code
    except TooLongError:
        return f"{argv} did not return"
    except BaseException as error:
        return f"{argv} -> {type(error).__name__}: {str(error)[:200]}"
    told = capsys.readouterr().err
    if status not in (0, 1, 2):
        return f"{argv} ended with {status!r}"
    lines = [line for line in told.splitlines() if "error: " in line]
    if (status == 2 and len(lines) != 1) or (status == 1 and not lines) or "Traceback" in told:
        return f"{argv} ended with {status} and {told!r}"
    return None


def cases(command: str, parser: argparse.ArgumentParser) -> Iterator[list[str]]:
    for action in parser._actions:
        if action.nargs == 0 or isinstance(action, argparse._HelpAction):
            continue
        for word in WRONG:
            if {"--gib", "--seconds"} & {*action.option_strings} and word in ("1", "2.5", "1_0"):
                continue  # that much is really written, that long
            if action.option_strings:
                yield [command, *BASE[command], f"{action.option_strings[0]}={word}"]
            else:
                place = [a for a in parser._actions if not a.option_strings].index(action)
                words = BASE[command].copy()
                words[place : place + 1] = [word]
                yield [command, *words]


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("command", parsers())
def test_a_wrong_word_ends_with_a_line(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoints(folder)
    found = [complaint(argv, capsys) for argv in cases(command, parsers()[command])]
    assert len(found) > len(WRONG) - 1
    assert not [each for each in found if each is not None]


def test_every_command_has_a_base() -> None:
    assert BASE.keys() == parsers().keys()


@pytest.mark.parametrize("command", ["plan", "submit"])
@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("bad.yaml", "not in UTF-8"),
        ("five.yaml", "Got trainer: 5 in five.yaml, but trainer must be a mapping"),
        ("list.yaml", "outermost value must be a mapping"),
        ("deep.yaml", "is not valid YAML"),
        ("bytes.bin", "not in UTF-8"),
    ],
)
def test_wrong_files(command: str, file: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, file, "--module", "some.program"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert line.startswith(f"ls-strategy {command}: error: ")
    assert words in line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["tune-io", ".", "--parallelism", "1000000"],
            "argument --parallelism: 1000000 is given; it must be",
        ),
        (["tune-io", ".", "--gib", "nan"], "it must be a finite number above 0"),
        (["plan", "good.yaml", "--gpus", "-1"], "argument --gpus"),
        (["plan", "good.yaml", "--tflops", "inf"], "argument --tflops"),
        (["inspect", "foo://bar"], "Protocol not known: foo"),
        (["doctor", "--timeout-s", "0"], "argument --timeout-s"),
        (["submit", "good.yaml", "--nodes", "0"], "it must be a whole number from 1 to"),
    ],
)
def test_messages_name_argument_and_rule(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
