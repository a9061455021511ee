"""Checkpoint folders as several ranks write them, without ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ls_strategy.checkpoint import commit
from ls_strategy.checkpoint.files import RankFile
from ls_strategy.checkpoint.manifest import Manifest, record_of
from ls_strategy.checkpoint.metadata import write_metadata
from ls_strategy.checkpoint.target import MANIFEST, META
from ls_strategy.layout import flat_range_to_boxes

TensorPath = tuple[str, ...]


def write_folder(
    path: Path,
    tensors: dict[TensorPath, Tensor],
    objects: dict[TensorPath, Any],
    meta: dict[str, Any],
    *,
    aliases: dict[TensorPath, TensorPath] | None = None,
    ranks: int = 3,
    chunk: int = 1 << 24,
    columns: frozenset[TensorPath] = frozenset(),
    left_out: tuple[str, ...] = (),
) -> Path:
    """Every tensor is cut into ``ranks`` flat ranges of uneven length; those in ``columns`` into two column shards."""
    held = commit.begin(path, "test")
    place = commit.staging(path, "test")
    files = [RankFile(place, f"__{rank}_0.distcp") for rank in range(ranks)]
    for name, tensor in tensors.items():
        if name in columns:
            half = tensor.shape[1] // 2
            files[0].add_tensor(name, tensor.shape, (0, 0), tensor[:, :half])
            files[-1].add_tensor(name, tensor.shape, (0, half), tensor[:, half:])
            continue
        if not tensor.numel():
            files[0].add_tensor(name, tensor.shape, (0,) * tensor.dim(), tensor)
            continue
        cuts = [tensor.numel() * r // ranks for r in range(ranks + 1)]
        for file, start, stop in zip(files, cuts[:-1], cuts[1:], strict=True):
            for whole in flat_range_to_boxes(tuple(tensor.shape), start, stop):
                for box in whole.split(chunk):
                    values = tensor.reshape(-1)[box.start : box.stop].view(box.sizes)
                    file.add_tensor(name, tensor.shape, box.offsets, values)
    for name, value in objects.items():
        files[0].add_object(name, value)
    records = {file.name: file.close() for file in files}
    items = [(file.name, item) for file in files for item in file.items]
    records |= write_metadata(place, items, aliases or {})
    torch.save(meta, f"{place}/{META}")
    records[META] = record_of(place, META)
    layout = {"world_size": ranks, "stage": 3, "precision": "bf16-mixed"}
    commit.commit(path, "test", Manifest(step=7, epoch=2, layout=layout, files=records, left_out=list(left_out)))
    held.release()
    return path


def damage(path: Path, name: str) -> None:
    """Flip one bit in the middle of a file."""
    data = bytearray((path / name).read_bytes())
    data[len(data) // 2] ^= 1
    (path / name).write_bytes(data)


def uncommit(path: Path) -> None:
    """As an interrupted save leaves a folder."""
    (path / MANIFEST).unlink()


def small_folder(path: Path, **options: Any) -> Path:
    """A model with a tied weight, a buffer and an object; two optimizers, one with a column-sharded state."""
    return write_folder(
        path,
        small_tensors(),
        small_objects(),
        small_meta(),
        aliases={("model", "head.weight"): ("model", "table.weight")},
        columns=frozenset({("optimizer_1", "state", "blocks.10.bias", "momentum_buffer")}),
        **options,
    )


def small_tensors() -> dict[TensorPath, Tensor]:
    """What `small_folder` holds as tensors."""
    generator = torch.Generator().manual_seed(0)

    def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        ("model", "table.weight"): values(11, 6),
        ("model", "blocks.10.bias"): values(5, 4),
        ("model", "blocks.9.bias"): values(3, dtype=torch.bfloat16),
        ("model", "empty"): values(0, 4),
        ("model", "seen"): torch.tensor(12),
        ("ema_state_dict", "table.weight"): values(11, 6),
        ("optimizer_0", "state", "table.weight", "exp_avg"): values(11, 6),
        ("optimizer_0", "state", "table.weight", "step"): torch.tensor(7.0),
        ("optimizer_1", "state", "blocks.10.bias", "momentum_buffer"): values(5, 4),
    }


def small_objects() -> dict[TensorPath, Any]:
    """What `small_folder` holds as objects."""
    return {
        ("model", "blocks.9._extra_state"): {"scale": 2},
        ("optimizer_0", "param_groups"): [
            {"lr": 0.1, "params": ["blocks.9.bias"]},
            {"lr": 0.2, "params": ["table.weight"]},
        ],
        ("optimizer_1", "param_groups"): [{"lr": 0.3, "params": ["blocks.10.bias"]}],
        ("random_states", "rank_0"): {"torch": torch.arange(3, dtype=torch.uint8)},
    }


def small_meta() -> dict[str, Any]:
    """The rest of the Lightning checkpoint of `small_folder`."""
    return {
        "epoch": 2,
        "global_step": 7,
        "pytorch-lightning_version": "2.6.0",
        "loops": {"fit_loop": {}},
        "callbacks": {"Metric": {"values": torch.arange(4.0).view(2, 2).T}},
        "lr_schedulers": [{"last_epoch": 7}],
        "ls_strategy": {"world_size": 3},
    }


def in_time(action: Callable[[], Any]) -> BaseException | None:
    """Run an action that may wait for ever. Return its error."""
    errors: list[BaseException | None] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)
        else:
            errors.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert errors, "it waits for ever"
    return errors[0]
