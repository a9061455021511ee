"""Checkpoints that somebody else has made: opening one runs nothing that it names."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor, nn
from torch.distributed import TCPStore
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from ls_strategy.checkpoint import background, save
from ls_strategy.checkpoint.describe import describe
from ls_strategy.checkpoint.manifest import FileRecord, Manifest
from ls_strategy.checkpoint.source import read_checkpoint, read_weights
from ls_strategy.errors import CheckpointError
from ls_strategy.extras import cli
from ls_strategy.lightning.checkpointing import contents as lightning_checkpoints
from ls_strategy.lightning.checkpointing.loading import load_from_checkpoint
from tests.pickles import Runs
from tests.unit.checkpoint_folders import in_time, small_folder


def text(value: str) -> bytes:
    data = value.encode()
    return b"\x8c" + struct.pack("<B", len(data)) + data


def calls(module: str, name: str, *arguments: bytes) -> bytes:
    """A pickle that calls what it names."""
    return b"\x80\x04" + text(module) + text(name) + b"\x93(" + b"".join(arguments) + b"tR."


def command(marker: Path) -> bytes:
    """``["touch", marker]``."""
    return b"](" + text("touch") + text(str(marker)) + b"e"


ATTACKS: dict[str, Callable[[Path], bytes]] = {
    "dotted name in torch": lambda m: calls("torch", "ctypes.util.subprocess.Popen", command(m)),
    "dotted name in DCP": lambda m: calls("torch.distributed.checkpoint.metadata", "os.system", text(f"touch {m}")),
    "name in DCP": lambda m: calls("torch.distributed.checkpoint.metadata", "cast", text("x"), text("y")),
    "dotted name in torch._utils": lambda m: calls("torch._utils", "sys.modules.keys"),
    "dotted name in torch.serialization": lambda m: calls("torch.serialization", "os.system", text(f"touch {m}")),
    "dotted name in builtins": lambda m: calls("builtins", "str.format", text("{}"), text("x")),
    "dotted name in pathlib": lambda m: calls("pathlib", "PosixPath.touch", text(str(m))),
    "builtins.eval": lambda m: calls("builtins", "eval", text(f"open({str(m)!r}, 'w')")),
    "builtins.getattr": lambda m: calls("builtins", "getattr", text("x"), text("join")),
    "os.system": lambda m: pickle.dumps(Runs(m)),
    "class of torch": lambda m: calls("torch", "Generator"),
    "function of torch": lambda m: calls("torch", "load", text(str(m))),
    "not a pickle": lambda m: b"\x00\x01",
    "an old protocol": lambda m: f"cos\nsystem\n(S'touch {m}'\ntR.".encode(),
    "a class is changed": lambda m: (
        b"\x80\x04" + text("torch.distributed.checkpoint.metadata") + text("MetadataIndex") + b"\x93N}("
        + text("fqn") + text("x") + b"u\x86b."
    ),
}  # fmt: skip


def write(folder: Path, name: str, data: bytes) -> None:
    """Replace a file of a folder, or add one, with its checksum in the manifest."""
    (folder / name).write_bytes(data)
    manifest = Manifest.from_json((folder / "manifest.json").read_text())
    manifest.files[name] = FileRecord(len(data), [(0, len(data), zlib.crc32(data))])
    (folder / "manifest.json").write_text(manifest.to_json())


def forget_index(folder: Path) -> None:
    """As earlier versions wrote a folder."""
    (folder / "index.json").unlink(missing_ok=True)
    manifest = Manifest.from_json((folder / "manifest.json").read_text())
    manifest.files.pop("index.json", None)
    (folder / "manifest.json").write_text(manifest.to_json())


class Toy(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)


OPENERS: dict[str, Callable[[Path], Any]] = {
    "describe": describe,
    "read_weights": read_weights,
    "read_checkpoint": read_checkpoint,
    "load_from_checkpoint": lambda path: load_from_checkpoint(Toy, path, strict=False),
    "load_from_checkpoint of Lightning": lambda path: Toy.load_from_checkpoint(path, strict=False),
    "fit under any strategy": lambda path: TorchCheckpointIO().load_checkpoint(path),
    "fit": lambda path: lightning_checkpoints.read(path, TorchCheckpointIO(), None),
    "fit(weights_only=True)": lambda path: lightning_checkpoints.read(path, TorchCheckpointIO(), True),
}


BY_LIGHTNING = ("load_from_checkpoint of Lightning", "fit under any strategy")


@pytest.mark.sample(6)
@pytest.mark.parametrize("kind", ["ours", "without index.json", "foreign"])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_crafted_metadata_runs_nothing(tmp_path: Path, attack: str, kind: str) -> None:
    """``.metadata`` of ours is not unpickled at all; that of others builds nothing but records."""
    folder, marker = small_folder(tmp_path / "x.ckpt"), tmp_path / "marker"
    before = dict(vars(MetadataIndex))
    write(folder, ".metadata", ATTACKS[attack](marker))
    if kind != "ours":
        forget_index(folder)
    if kind == "foreign":
        (folder / "manifest.json").unlink()
    for name, opens in OPENERS.items():
        if kind == "ours":
            opens(folder)
        else:
            refusal = r"\.metadata cannot be read|not a committed"
            if kind == "foreign" and name in BY_LIGHTNING:  # which knows of folders with a manifest alone
                refusal = "Is a directory"
            with pytest.raises((CheckpointError, IsADirectoryError), match=refusal):
                opens(folder)
        assert not marker.exists(), name
    assert vars(MetadataIndex) == before


def test_the_commands_run_nothing(tmp_path: Path, capsys: Any) -> None:
    folder, marker = small_folder(tmp_path / "x.ckpt"), tmp_path / "marker"
    write(folder, ".metadata", ATTACKS["dotted name in torch"](marker))
    forget_index(folder)
    assert cli.main(["inspect", str(folder)]) == 1
    assert cli.main(["consolidate", str(folder), str(tmp_path / "out"), "--format", "safetensors"]) == 1
    assert "which no checkpoint needs" in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize("weights_only", [None, True])
def test_crafted_objects_and_small_things_run_nothing(tmp_path: Path, weights_only: bool | None) -> None:
    """By default as with weights_only=True, which is torch's own default."""
    marker = tmp_path / "marker"
    in_meta = small_folder(tmp_path / "a.ckpt")
    torch.save({"epoch": 1, "callbacks": Runs(marker)}, tmp_path / "meta.pt")
    write(in_meta, "meta.pt", (tmp_path / "meta.pt").read_bytes())
    for name, opens in {
        "read_checkpoint": lambda path: read_checkpoint(path, weights_only=weights_only),
        "load": lambda path: load_from_checkpoint(Toy, path, weights_only=weights_only),
        "load of Lightning": lambda path: Toy.load_from_checkpoint(path, weights_only=weights_only),
        "fit under any strategy": lambda path: TorchCheckpointIO().load_checkpoint(path, weights_only=weights_only),
        "fit": lambda path: lightning_checkpoints.read(path, TorchCheckpointIO(), weights_only),
    }.items():
        with pytest.raises((CheckpointError, pickle.UnpicklingError)):
            opens(in_meta)
        assert not marker.exists(), name


@pytest.mark.parametrize("place", ["x.ckpt", "x.ckpt/meta.pt", "x.ckpt/manifest.json", "x.ckpt/index.json", "x.ckpt/*"])
def test_pipes_are_not_waited_for(tmp_path: Path, place: str) -> None:
    """Where a file or a part of a folder should be."""
    folder = small_folder(tmp_path / "x.ckpt")
    if place == "x.ckpt":
        shutil.rmtree(folder)
    names = [path.name for path in folder.glob("*.distcp")] if place.endswith("*") else [place.partition("/")[2]]
    for name in names:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    openers = {name: opens for name, opens in OPENERS.items() if name not in BY_LIGHTNING}
    for name, opens in {**openers, "map_file": lambda path: map_file(path)}.items():
        if name == "map_file" and place != "x.ckpt":
            continue
        assert isinstance(in_time(lambda opens=opens: opens(folder)), CheckpointError), name
    command = ["consolidate", str(folder), str(tmp_path / "w"), "--format", "safetensors"]
    found: list[int] = []
    assert in_time(lambda: found.append(cli.main(command))) is None
    assert found == [1]


def map_file(path: Path) -> Any:
    return lightning_checkpoints.map_file(path, TorchCheckpointIO(), None)


@pytest.mark.parametrize("crafted", ["objects", "garbage", "nothing"])
def test_crafted_parts_of_a_foreign_folder_run_nothing_and_are_named(tmp_path: Path, crafted: str) -> None:
    """Without a manifest there are no checksums."""
    folder, marker = tmp_path / "x.ckpt", tmp_path / "marker"
    dcp.save({"model": {"weight": torch.ones(1000)}}, checkpoint_id=folder, no_dist=True)
    torch.save({}, folder / "meta.pt")
    assert read_weights(folder).tensors["weight"].sum() == 1000
    (part,) = folder.glob("*.distcp")
    torch.save(Runs(marker), tmp_path / "evil", _use_new_zipfile_serialization=False)
    data = {"objects": (tmp_path / "evil").read_bytes(), "garbage": b"\x80\x02c" * 9, "nothing": b""}[crafted]
    part.write_bytes(data + part.read_bytes()[len(data) :] if data else b"")
    with pytest.raises(CheckpointError, match=r"is damaged, or has objects|cannot be read"):
        sum(tensor.sum() for tensor in read_weights(folder).tensors.values())
    assert not marker.exists()


def test_metadata_of_earlier_versions_is_read_as_it_was(tmp_path: Path) -> None:
    """And gives what ``index.json`` gives."""
    folder = small_folder(tmp_path / "x.ckpt")
    ours = read_weights(folder)
    described = describe(folder)
    forget_index(folder)
    before = read_weights(folder)
    assert list(before.tensors) == list(ours.tensors)
    assert before.aliases == ours.aliases
    for name, tensor in ours.tensors.items():
        assert isinstance(tensor, Tensor)
        assert torch.equal(torch.as_tensor(before.tensors[name] + 0), torch.as_tensor(tensor + 0)), name
    assert describe(folder).entries == described.entries


def test_metadata_that_torch_writes_holds_the_same(tmp_path: Path) -> None:
    """What DCP itself would build from ``.metadata`` is what is built from ``index.json``."""
    from ls_strategy.checkpoint.metadata import from_json, from_pickle, to_json

    folder = small_folder(tmp_path / "x.ckpt")
    data = (folder / ".metadata").read_bytes()
    found: Metadata = pickle.loads(data)
    assert found == from_pickle(data) == from_json((folder / "index.json").read_bytes())
    assert to_json(from_pickle(data)).encode() == (folder / "index.json").read_bytes()


def test_metadata_of_early_pythons_is_read(tmp_path: Path) -> None:
    """Python 3.11.0 to 3.11.3 pickles members of enumerations by ``getattr``; torch's memory formats are some."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    from ls_strategy.checkpoint.metadata import from_json, from_pickle

    def by_name(member: Any, _: int) -> Any:
        return getattr, (type(member), member.name)

    with mock.patch.object(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name):
        folder = small_folder(tmp_path / "x.ckpt")
        data = (folder / ".metadata").read_bytes()
    assert b"getattr" in data
    assert from_pickle(data) == from_json((folder / "index.json").read_bytes())


def edited(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    raw = json.loads((folder / "index.json").read_text())
    edit(raw)
    write(folder, "index.json", json.dumps(raw).encode())


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "another file": lambda raw: raw["files"].__setitem__(0, "../../secret"),
    "an absolute file": lambda raw: raw["files"].__setitem__(0, "/etc/passwd"),
    "no file": lambda raw: raw["files"].clear(),
    "a number that is none": lambda raw: raw["entries"][0]["chunks"][0].__setitem__(1, "0"),
    "a negative number": lambda raw: raw["entries"][0]["chunks"][0].__setitem__(0, -1),
    "a name that is no dtype": lambda raw: raw["entries"][0].__setitem__("dtype", "load"),
    "a dotted dtype": lambda raw: raw["entries"][0].__setitem__("dtype", "os.system"),
    "a box outside": lambda raw: raw["entries"][0].__setitem__("shape", [1, 1]),
    "another format": lambda raw: raw.__setitem__("format", 2),
    "a list": lambda raw: raw.__setitem__("entries", 3),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_index_that_was_tampered_with_is_refused(tmp_path: Path, edit: str) -> None:
    folder = small_folder(tmp_path / "x.ckpt")
    edited(folder, EDITS[edit])
    for opens in OPENERS.values():
        with pytest.raises(CheckpointError, match=r"index\.json cannot be read"):
            opens(folder)


def test_places_that_the_manifest_does_not_have_are_refused(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "x.ckpt")
    edited(folder, lambda raw: raw["entries"][0]["chunks"][0].__setitem__(1, 3))
    with pytest.raises(CheckpointError, match="which the manifest does not have"):
        sum(tensor.sum() for tensor in read_weights(folder).tensors.values())


@pytest.mark.parametrize("latest", [False, True])
def test_files_of_deepspeed_in_a_folder_of_ours_are_not_read(tmp_path: Path, capsys: Any, latest: bool) -> None:
    """They are named by `inspect`."""
    folder, marker = small_folder(tmp_path / "x.ckpt"), tmp_path / "marker"
    planted = ["mp_rank_00_model_states.pt"]
    if latest:
        (tmp_path / "evil").mkdir()
        torch.save({"module": Runs(marker)}, tmp_path / "evil" / planted[0])
        planted = ["latest"]
        (folder / "latest").write_text("../evil")
    else:
        torch.save({"module": Runs(marker)}, folder / planted[0])
    for name, opens in OPENERS.items():
        opens(folder)
        assert not marker.exists(), name
    assert cli.main(["inspect", str(folder)]) == 0
    assert f"not part of it    '{planted[0]}'" in capsys.readouterr().out
    assert describe(folder).unknown == planted
    assert cli.main(["consolidate", str(folder), str(tmp_path / "w"), "--format", "safetensors"]) == 0
    assert not marker.exists()


def test_a_tag_that_leads_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    from ls_strategy.extras.deepspeed.folder import is_deepspeed

    golden = Path(__file__).parents[1] / "golden" / "deepspeed" / "stage1"
    shutil.copytree(golden, tmp_path / "theirs")
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "latest").write_text("../theirs")
    assert is_deepspeed(tmp_path / "theirs")
    assert not is_deepspeed(tmp_path / "x")


# --- the store --------------------------------------------------------------------------------------------------------


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("words", ["pickle", "not a report", "not JSON"])
def test_a_background_save_unpickles_nothing_from_the_store(tmp_path: Path, store: TCPStore, words: str) -> None:
    """Whoever reaches the rendezvous port can write what another rank is to say."""
    marker = tmp_path / "marker"
    said = {"pickle": pickle.dumps(Runs(marker)), "not a report": b'{"error": 1}', "not JSON": b"\xff"}[words]
    stranger = TCPStore("127.0.0.1", store.port, is_master=False)
    stranger.set("p/0/1", said)
    exchange = background.StoreExchange(store, "p", 0, 2, threading.Event())
    job = save.Save(str(tmp_path / "x.ckpt"), [], {}, Manifest(0, 0, {}, {}), lambda path: None)
    with pytest.raises(CheckpointError, match="cannot be read"):
        save.run(job, 0, exchange)
    assert not marker.exists()


def test_reports_come_back_from_the_store_as_they_were(tmp_path: Path, store: TCPStore) -> None:
    """Two ranks save together through the store alone, and the folder is what one rank would have written."""
    results: list[Any] = [None, None]

    def rank(number: int) -> None:
        entries = [save.CheckpointEntry(("model", "a.b"), torch.arange(6.0).view(2, 3), None)] if number == 0 else []
        exchange = background.StoreExchange(store.clone(), "q", number, 2, threading.Event())
        job = save.Save(
            str(tmp_path / "é\udcff.ckpt"), entries, {"n": number}, Manifest(3, 1, {}, {}), lambda p: torch.save({}, p)
        )
        results[number] = save.run(job, number, exchange)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(results)
    found = read_checkpoint(tmp_path / "é\udcff.ckpt")
    assert torch.equal(found["state_dict"]["a.b"] + 0, torch.arange(6.0).view(2, 3))
