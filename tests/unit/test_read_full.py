"""A checkpoint folder as programs get it that know nothing of folders: through Lightning's own reader and writer."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.demos.boring_classes import BoringModel

import ls_strategy.autoload
from ls_strategy import ZeROStrategy, load_from_checkpoint
from ls_strategy.checkpoint.consolidate import consolidate
from ls_strategy.checkpoint.source import read_full, read_weights
from ls_strategy.errors import CheckpointError
from ls_strategy.meta_init.lazy import LazyTensor
from tests.marks import wide
from tests.trainers import bare_trainer
from tests.unit.checkpoint_folders import damage, small_folder, small_meta, small_objects, small_tensors, write_folder

ls_strategy.autoload.install()
IO = TorchCheckpointIO()


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in leaves(inner, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for i, inner in enumerate(value) for k, v in leaves(inner, f"{path}.{i}").items()}
    return {path: value}


def test_it_is_what_one_file_holds(tmp_path: Path) -> None:
    folder, file = small_folder(tmp_path / "x.ckpt"), tmp_path / "one.ckpt"
    consolidate(folder, file)
    found, expected = leaves(IO.load_checkpoint(folder)), leaves(torch.load(file, weights_only=True))
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert type(found[path]) is torch.Tensor
            assert not isinstance(found[path], LazyTensor)
            assert found[path].dtype == value.dtype, path
            assert torch.equal(found[path], value), path
        else:
            assert found[path] == value, path
    state = IO.load_checkpoint(folder)["state_dict"]
    assert state["head.weight"] is state["table.weight"]


def test_it_is_where_map_location_says(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "x.ckpt")
    for where in ("meta", torch.device("meta"), {"cpu": "meta"}):
        found = leaves(IO.load_checkpoint(folder, map_location=where))  # type: ignore[arg-type]
        assert {v.device.type for v in found.values() if isinstance(v, torch.Tensor)} == {"meta"}
    for where in (None, "cpu", lambda storage, _: storage, {"cuda:0": "cpu"}):
        found = leaves(read_full(folder, map_location=where))
        assert {v.device.type for v in found.values() if isinstance(v, torch.Tensor)} == {"cpu"}


def test_the_loss_scale_is_there_for_lightnings_own_plugin(tmp_path: Path) -> None:
    scale = {"ZeROPrecision": {"scale": 512.0, "hysteresis_left": 2, "good_steps": 7}}
    folder = write_folder(tmp_path / "x.ckpt", small_tensors(), small_objects(), small_meta() | scale)
    for found in (IO.load_checkpoint(folder), read_full(folder)):
        scaler = torch.amp.GradScaler("cpu")
        scaler.load_state_dict(found["MixedPrecision"])
        assert scaler.state_dict()["scale"] == 512.0
        assert scaler.state_dict()["_growth_tracker"] == 7
    assert "MixedPrecision" not in IO.load_checkpoint(small_folder(tmp_path / "fp32.ckpt"))


def test_frozen_parameters_that_were_left_out_are_named(tmp_path: Path) -> None:
    folder = small_folder(tmp_path / "x.ckpt", left_out=("base.weight", "base.bias"))
    with pytest.warns(UserWarning, match=r"2 frozen parameters.*base\.weight.*strict=False"):
        IO.load_checkpoint(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        IO.load_checkpoint(small_folder(tmp_path / "y.ckpt"))


def test_harmed_folders_are_refused(tmp_path: Path) -> None:
    for name in ("__1_0.distcp", "meta.pt", "index.json", "manifest.json"):
        folder = small_folder(tmp_path / f"{name}.ckpt")
        damage(folder, name)
        with pytest.raises(CheckpointError, match=r"damaged|cannot be read"):
            IO.load_checkpoint(folder)
        (folder / name).unlink()
        with pytest.raises((CheckpointError, IsADirectoryError)):
            IO.load_checkpoint(folder)


GARBAGE = {
    "bytes": bytes(range(256)) * 20, "empty": b"", "text": b"hello", "archive": b"PK\x03\x04" + bytes(300),
    "pickle": pickle.dumps({"epoch": 1}), "page": b"<!doctype html>",
}  # fmt: skip


# With False, archives and pickles are read in another way; the rest is refused before it matters.
@pytest.mark.parametrize(
    ("name", "weights_only"),
    [
        *((name, None) for name in GARBAGE),
        *((name, False) if name in ("archive", "pickle") else wide(name, False) for name in GARBAGE),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path, name: str, weights_only: bool | None) -> None:
    """By every reader of this package."""
    path = tmp_path / "x.ckpt"
    path.write_bytes(GARBAGE[name])
    trainer = bare_trainer(ZeROStrategy(2), max_steps=1)
    readers = (
        lambda: trainer.fit(BoringModel(), ckpt_path=path, weights_only=weights_only),
        lambda: trainer.test(BoringModel(), ckpt_path=path, weights_only=weights_only, verbose=False),
        lambda: load_from_checkpoint(BoringModel, path, weights_only=weights_only),
        lambda: read_full(path, weights_only=weights_only),
        lambda: read_weights(path),
    )
    for read in readers:
        with pytest.raises(CheckpointError, match=r"Got .*x\.ckpt, but it is not a file that torch\.save wrote"):
            read()
    torch.save([1], path)
    for read in (readers[0], readers[3]):
        with pytest.raises(CheckpointError, match=r"holds a list, (and|but) a Lightning checkpoint is a dictionary"):
            read()


def test_a_file_replaces_a_folder_in_full_or_not_at_all(tmp_path: Path) -> None:
    """Lightning's own writer would leave it, under another name, in the folder."""
    folder = small_folder(tmp_path / "x.ckpt")
    IO.save_checkpoint({"a": torch.ones(2)}, folder)
    assert folder.is_file()
    assert IO.load_checkpoint(folder)["a"].tolist() == [1, 1]
    folder = small_folder(tmp_path / "y.ckpt")
    with pytest.raises(Exception, match="pickle"):
        IO.save_checkpoint({"a": lambda: None}, folder)
    assert "state_dict" in IO.load_checkpoint(folder)
    (folder / "mine.txt").write_text("a note")
    with pytest.raises(CheckpointError, match=r"holds something other than a checkpoint: mine\.txt"):
        IO.save_checkpoint({"a": 1}, folder)
    assert (folder / "mine.txt").is_file()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".") and p.name.endswith(".partial")]
