"""``ls-strategy inspect``: contents of a checkpoint folder or file, and whether it is unharmed."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from ls_strategy.checkpoint.describe import describe, verify_all
from ls_strategy.checkpoint.safetensors import export_safetensors
from ls_strategy.extras import cli
from ls_strategy.extras.deepspeed.checkpoint import is_deepspeed
from tests.processes import output_of
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
    small_folder(tmp_path / "whole.ckpt")
    assert run(tmp_path) == 1
    assert "folder of checkpoints.\n  Give one of the 2 in it: whole.ckpt, x.ckpt.\n" in capsys.readouterr().err


def lightnings() -> dict[str, Any]:
    """A dictionary of a Trainer, with tied weights, moments, and an object of a class that this file has."""
    weight = torch.randn(4, 3)
    moments = {"exp_avg": torch.zeros(4, 3), "step": torch.tensor(5.0)}
    return {
        "epoch": 1,
        "global_step": 5,
        "state_dict": {"a.weight": weight, "b.weight": weight, "c": nn.Parameter(torch.ones(2, dtype=torch.bfloat16))},
        "optimizer_states": [{"state": {0: moments}, "param_groups": [{"lr": 0.1, "params": [0]}]}],
        "callbacks": {"Own": Opens("opened")},
    }


class Opens:
    """Creates a file when it is unpickled, as code in a checkpoint could."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.name),)


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "before 1.6"])
def test_a_file_is_described_without_building_its_objects(
    tmp_path: Path, archive: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({**lightnings(), "ls_strategy": {"world_size": 3}}, "one.ckpt", _use_new_zipfile_serialization=archive)
    found = describe("one.ckpt")
    entries = {e.name: e for e in found.entries}
    assert (found.step, found.epoch, found.format) == (5, 1, "file of torch.save")
    assert found.layout == {"world_size": 3}
    assert found.count("weights") == (2, 4 * 3 * 4 + 2 * 2)
    assert found.count("optimizer states") == (2, 4 * 3 * 4 + 4)
    assert entries["state_dict.b.weight"].same_as == "state_dict.a.weight"
    assert (entries["state_dict.c"].dtype, entries["state_dict.c"].shape) == ("bfloat16", (2,))
    assert run("one.ckpt", "--tensors", "--verify") == 0
    out = capsys.readouterr().out
    assert "optimizer_states.0.state.0.exp_avg" in out
    assert ("every checksum is right" in out) is archive
    assert ("has no checksums" in out) is not archive
    assert not Path("opened").exists()


def test_a_damaged_file_is_found(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "one.ckpt"
    torch.save({"state_dict": {"a": torch.arange(1000.0)}}, file)
    whole = file.read_bytes()
    at = whole.index(torch.arange(1000.0).numpy().tobytes()) + 2000
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    assert run(file) == 0
    assert run(file, "--verify") == 1
    assert "is damaged: its record one/data/0 does not match its checksum" in capsys.readouterr().err
    for cut in (0, 1, 5, 40, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:cut])
        for verify in ([], ["--verify"]):
            assert run(file, *verify) == 1
            (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
            assert "is not a file that torch.save wrote, or it is damaged" in line


def test_odd_values_in_a_file(tmp_path: Path) -> None:
    rows: list[Any] = []
    rows.append(rows)  # holds itself
    odd = {
        "state_dict": OrderedDict(
            sparse=torch.eye(3).to_sparse(), none=None, bits=torch.ones(2, dtype=torch.float8_e4m3fn),
            unsigned=torch.ones(2, dtype=torch.uint16), away=torch.empty(5, device="meta"), empty=torch.empty(0, 4),
        ),
        "epoch": "two", "global_step": True, "rows": rows, "named": argparse.Namespace(a=torch.ones(1)),
        "set": {1, 2}, "counted": Counter("aab"), "when": datetime.timedelta(1), "slots": Slots(), "of": Dict(a=1),
    }  # fmt: skip
    torch.save(odd, tmp_path / "odd.ckpt")
    found = describe(tmp_path / "odd.ckpt")
    assert (found.step, found.epoch) == (None, None)
    shapes = {e.name: (e.shape, e.dtype) for e in found.entries}
    assert shapes == {
        "state_dict.sparse": ((3, 3), "float32"), "state_dict.bits": ((2,), "float8_e4m3fn"),
        "state_dict.unsigned": ((2,), "uint16"), "state_dict.away": ((5,), "float32"),
        "state_dict.empty": ((0, 4), "float32"),
    }  # fmt: skip
    torch.save([1, 2], tmp_path / "list.ckpt")
    assert run(tmp_path / "list.ckpt") == 0


class Slots:
    __slots__ = ("a",)

    def __init__(self) -> None:
        self.a = 1


class Dict(dict[str, int]):
    pass


def test_a_folder_of_another_strategy(tmp_path: Path, capsys: Any) -> None:
    """As Lightning's FSDPStrategy and ModelParallelStrategy write it."""
    state = {"model": {"w": torch.ones(4, 2)}, "optimizer_0": {"state": {"w": {"exp_avg": torch.ones(4, 2)}}}}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "x.ckpt"), no_dist=True)
    torch.save({"epoch": 3, "global_step": 9, "callbacks": {"Own": Opens("opened")}}, tmp_path / "x.ckpt/meta.pt")
    assert run(tmp_path / "x.ckpt", "--verify") == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (lines["format"], lines["step"], lines["epoch"]) == ("folder of torch.distributed.checkpoint", "9", "3")
    assert lines["weights"] == "1 (32 B)"
    assert "no checksums" in lines["integrity"]
    (part,) = (tmp_path / "x.ckpt").glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-1])
    assert run(tmp_path / "x.ckpt") == 1
    assert f"{part} has" in capsys.readouterr().err
    part.unlink()
    assert run(tmp_path / "x.ckpt") == 1
    assert f"{part} is missing" in capsys.readouterr().err


def test_safetensors(tmp_path: Path, capsys: Any) -> None:
    for limit in (1 << 30, 100):
        out = tmp_path / f"limit{limit}"
        export_safetensors(small_folder(tmp_path / f"{limit}.ckpt"), out, max_shard_bytes=limit)
        assert run(out, "--verify", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["format"] == "safetensors"
        assert found["totals"]["weights"] == {"count": 5, "bytes": 264 + 80 + 6 + 0 + 8}
        assert not found["verified"]
    assert run(tmp_path / f"limit{1 << 30}" / "model.safetensors") == 0


def test_a_folder_of_deepspeed(tmp_path: Path, capsys: Any) -> None:
    deepspeed_golden = Path(__file__).parents[1] / "golden" / "deepspeed"
    found = [path for path in sorted(deepspeed_golden.iterdir()) if is_deepspeed(path)]
    assert found
    for path in found:
        assert run(path) == 0
        lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
        assert lines["format"] == "folder of DeepSpeed"
        assert not lines["weights"].startswith("0 ")


@pytest.mark.wide
def test_the_command_does_not_load_lightning(tmp_path: Path) -> None:
    code = (
        "import sys; from ls_strategy.extras import cli\n"
        f"assert cli.main(['inspect', {str(small_folder(tmp_path / 'x.ckpt'))!r}]) == 0\n"
        "print('lightning' in sys.modules)"
    )
    printed = output_of([sys.executable, "-c", code], timeout=60)
    assert printed.splitlines()[-1] == "False"
