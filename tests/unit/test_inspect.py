"""``ls-strategy inspect``: contents of a checkpoint folder, and whether it is unharmed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy import cli
from ls_strategy.checkpoint.describe import describe, verify_all
from ls_strategy.errors import CheckpointError
from tests.unit.checkpoint_folders import damage, small_folder, uncommit


def run(*arguments: object) -> int:
    return cli.main(["inspect", *map(str, arguments)])


def test_numbers_and_bytes_of_each_kind(tmp_path: Path) -> None:
    found = describe(small_folder(tmp_path / "x.ckpt", left_out=("frozen.weight",)))
    assert (found.step, found.epoch, found.layout["world_size"], found.left_out) == (7, 2, 3, ["frozen.weight"])
    entries = {e.name: e for e in found.entries}
    names = [e.name for e in found.entries if e.kind == "weights"]
    assert names.index("model.blocks.9.bias") < names.index("model.blocks.10.bias")
    tied = entries["model.head.weight"]
    assert (tied.shape, tied.dtype, tied.bytes, tied.same_as) == ((11, 6), "float32", 264, "model.table.weight")
    assert entries["model.table.weight"].chunks > 3
    assert entries["model.empty"].bytes == 0
    count, nbytes = found.count("weights")
    assert count == 6  # five tensors and an object; the tied one is one of them
    assert nbytes == 264 + 80 + 6 + 0 + 8 + entries["model.blocks.9._extra_state"].bytes
    assert found.count("optimizer states")[0] == 5
    assert found.count("others")[0] == 2  # the average, and rank 0's random states
    for name, size in found.files.items():
        assert (tmp_path / "x.ckpt" / name).stat().st_size == size


def test_the_command_prints_them(tmp_path: Path, capsys: Any) -> None:
    folder = small_folder(tmp_path / "x.ckpt", left_out=("frozen.weight",))
    assert run(folder) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["step"] == "7"
    assert lines["saved"] == "from        world_size 3, stage 3, precision bf16-mixed"
    assert lines["left"] == "out          1 frozen parameters: frozen.weight"
    assert lines["integrity"] == "committed, sizes are right; --verify compares checksums"
    assert run(folder, "--tensors", "--verify") == 0
    out, err = capsys.readouterr()
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(("model.", "optim"))}
    assert rows["model.blocks.10.bias"][:5] == ["[5,", "4]", "float32", "80", "B"]
    assert rows["model.head.weight"][3:5] == ["=", "model.table.weight"]
    assert rows["optimizer_0.param_groups"][0] == "object"
    assert "every checksum is right" in out
    assert "reading __2_0.distcp" in err


def test_json(tmp_path: Path, capsys: Any) -> None:
    assert run(small_folder(tmp_path / "x.ckpt"), "--json", "--verify") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 7
    assert found["verified"] is True
    assert found["totals"]["weights"]["count"] == 6
    assert {"name", "kind", "shape", "dtype", "bytes", "chunks", "same_as"} == set(found["entries"][0])


@pytest.mark.parametrize("name", ["__1_0.distcp", "meta.pt", ".metadata", "index.json"])
def test_verify_names_every_damaged_file(tmp_path: Path, capsys: Any, name: str) -> None:
    folder = small_folder(tmp_path / "x.ckpt")
    damage(folder, name)
    damage(folder, "__2_0.distcp")
    assert len(verify_all(folder)) == 2
    assert run(folder, "--verify") == 1
    out, err = capsys.readouterr()
    assert out == ""
    errors = [line for line in err.splitlines() if "error:" in line]
    assert len(errors) == 2
    assert all(any(f"/{n} is damaged: bytes [" in e for e in errors) for n in (name, "__2_0.distcp"))


def test_files_that_are_missing_or_cut(tmp_path: Path, capsys: Any) -> None:
    folder = small_folder(tmp_path / "x.ckpt")
    part = folder / "__1_0.distcp"
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    assert run(folder) == 1
    assert f"{part} has {len(whole) - 1} bytes, but the manifest says {len(whole)}" in capsys.readouterr().err
    part.unlink()
    assert run(folder, "--verify") == 1
    assert f"{part} is missing" in capsys.readouterr().err


def test_folders_that_are_no_checkpoint(tmp_path: Path, capsys: Any) -> None:
    folder = small_folder(tmp_path / "x.ckpt")
    uncommit(folder)
    assert run(folder) == 1
    assert "is not a committed checkpoint: it has no manifest.json" in capsys.readouterr().err
    assert run(tmp_path / "typo") == 1
    assert "does not exist" in capsys.readouterr().err
    torch.save({}, tmp_path / "one.ckpt")
    with pytest.raises(CheckpointError, match="is a single file, which has no checksums"):
        describe(tmp_path / "one.ckpt")


@pytest.mark.wide
def test_the_command_does_not_load_lightning(tmp_path: Path) -> None:
    code = (
        "import sys; from ls_strategy import cli\n"
        f"assert cli.main(['inspect', {str(small_folder(tmp_path / 'x.ckpt'))!r}]) == 0\n"
        "print('lightning' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "False"
