"""``--json``: one object on standard output, as the committed schemas describe it, whatever else prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from ls_strategy.checkpoint.safetensors import export_safetensors
from ls_strategy.extras import cli
from tests.unit.checkpoint_folders import damage, small_folder

DOCUMENT = Path(__file__).parents[2] / "docs" / "commands.md"
SCHEMAS = Path(cli.__file__).parent / "schemas"
NAMES = ["bench-inference", "doctor", "inspect", "plan"]


def check(command: str, text: str) -> Any:
    """Return the only object of ``text``, after a comparison with the schema of the command."""
    found = json.loads(text)
    schema = json.loads((SCHEMAS / f"{command}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema).validate(found)
    return found


def objects(schema: Any) -> list[dict[str, Any]]:
    """All parts of a schema that describe objects with known keys."""
    here = [schema] if isinstance(schema, dict) and "properties" in schema else []
    inner = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    return here + [found for each in inner for found in objects(each)]


def test_every_command_with_json_has_a_schema_and_stands_in_the_document() -> None:
    commands = cli.make_parser().commands
    assert [name for name in commands if "--json" in commands[name]._option_string_actions] == NAMES
    line = next(line for line in DOCUMENT.read_text().splitlines() if " take `--json`" in line)
    assert re.findall(r"`([a-z-]+)`", line.split(" take ")[0]) == NAMES


def test_the_schemas_list_all_keys() -> None:
    assert sorted(path.name for path in SCHEMAS.iterdir()) == [f"{name}.schema.json" for name in NAMES]
    for name in NAMES:
        schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))
        jsonschema.Draft202012Validator.check_schema(schema)
        found = objects(schema["$defs"])
        assert found
        for each in found:
            assert each["additionalProperties"] is False
            assert sorted(each["required"]) == sorted(each["properties"])


PROGRAM = """
import os, subprocess, sys
from types import SimpleNamespace
from ls_strategy.extras import cli
from ls_strategy.errors import ConfigError

def add(subcommands):
    parser = subcommands.add_parser("talk")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fail", action="store_true")
    parser.set_defaults(run=run)

def run(args):
    print("python prints")
    os.write(1, b"a library prints\\n")
    subprocess.run(["echo", "a program prints"], check=True)
    if args.fail:
        raise ConfigError("Got it.")
    cli.arguments.print_json(args, {"a": float("nan"), "b": [1, (2.5, float("inf"))]})
    print("python prints again")
    return 0

cli.SUBCOMMANDS = (SimpleNamespace(add=add),)
status = cli.main(sys.argv[1:])
print("after it")
sys.exit(status)
"""


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [(["--json"], 0, {"a": None, "b": [1, [2.5, None]]}), (["--json", "--fail"], 1, {"error": "Got it."})],
)
def test_nothing_else_is_on_standard_output(words: list[str], status: int, expected: Any) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, "talk", *words], capture_output=True, text=True, check=False)
    found, end = json.JSONDecoder().raw_decode(done.stdout)
    assert (done.returncode, found) == (status, expected)
    assert done.stdout[end:] == "\nafter it\n"  # standard output is what it was
    for who in ("python", "a library", "a program"):
        assert f"{who} prints\n" in done.stderr


def test_a_folder_a_file_and_safetensors_are_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small_folder(tmp_path / "x.ckpt", left_out=("frozen.weight",))
    torch.save({"state_dict": {"a": torch.ones(2)}}, tmp_path / "one.ckpt")
    export_safetensors(folder, tmp_path / "weights")
    for path in (folder, tmp_path / "one.ckpt", tmp_path / "weights"):
        assert cli.main(["inspect", str(path), "--json"]) == 0
        assert check("inspect", capsys.readouterr().out)["path"] == str(path)


def test_errors_are_objects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small_folder(tmp_path / "x.ckpt")
    damage(folder, "__2_0.distcp")
    for words in (["inspect", str(folder), "--verify"], ["inspect", "nowhere"], ["plan"], ["doctor", "--only", "x"]):
        assert cli.main([*words, "--json"]) == 1
        out, err = capsys.readouterr()
        assert check(words[0], out).keys() == {"error"}
        assert "error: " in err


def test_the_doctor_reports_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    status = cli.main(["doctor", "--json", "--only", "software", "slurm", "launcher"])
    found = check("doctor", capsys.readouterr().out)
    assert status == (0 if found["ok"] else 1)
    assert {each["topic"] for each in found["findings"]} == {"software", "slurm", "launcher"}
