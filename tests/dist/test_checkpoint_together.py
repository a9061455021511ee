"""The single file that all ranks write together: the values that rank 0 would gather, and nothing is gathered."""

from __future__ import annotations

import contextlib
import copy
import errno
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fsspec
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy import Muon, ShardedEMA, ZeROStrategy
from ls_strategy.checkpoint import save
from ls_strategy.config import nested
from ls_strategy.errors import CheckpointError
from ls_strategy.lightning.checkpointing import saving
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from tests.dist.ranks import Net, fit, on_ranks
from tests.dist.test_checkpoint_file import Mixed
from tests.marks import slow, wide
from tests.os_calls import replaced

WAYS: dict[str, dict[str, Any]] = {
    "0": {},
    "1, 8 bits": {"precision.moments": "int8"},
    "2": {},
    "2, 16 bits": {"precision.master_weights": False},
    "3": {"sharding.min_unit_numel": 0},
    "3, host": {"sharding.min_unit_numel": 0, "offload.optimizer": "cpu", "offload.parameters": "cpu"},
    "3, nvme": {"sharding.min_unit_numel": 0, "offload.optimizer": "nvme"},
}


def strategy(way: str, folder: Path, kind: type[ZeROStrategy] = ZeROStrategy, **options: Any) -> ZeROStrategy:
    chosen = {**WAYS[way], "checkpoint.format": "file", "offload.nvme_path": str(folder / "nvme"), **options}
    return kind(int(way[0]), **nested(chosen))  # type: ignore[arg-type]


class Orthogonal(Net):
    """Whole matrices are stepped by one rank each."""

    def configure_optimizers(self) -> Any:
        groups = {n: [p for p in self.parameters() if (p.ndim == 2) == n] for n in (True, False)}
        return Muon([{"params": params, "use_muon": n} for n, params in groups.items()], lr=1e-2)


def gathering() -> Any:
    """Let rank 0 gather what it writes."""
    return patch.object(saving, "disks_of", lambda _: "")


def assert_same(a: Any, b: Any, where: str = "checkpoint") -> None:
    """Also in the order of keys, and in what a state dict says of its modules."""
    assert type(a) is type(b), f"{where}: {type(a)}, {type(b)}"
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape, a.stride(), a.device) == (b.dtype, b.shape, b.stride(), b.device), where
        assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8)), where
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        assert getattr(a, "_metadata", None) == getattr(b, "_metadata", None), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for number, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{number}]")
    else:
        assert a == b, where


@pytest.mark.parametrize(
    ("way", "make"),
    [("3", Mixed), wide("0", Mixed), wide("1, 8 bits", Mixed), wide("2", Mixed), wide("2, 16 bits", Mixed),
     wide("3, host", Mixed), wide("3, nvme", Mixed), wide("3", Orthogonal), slow("1, 8 bits", Orthogonal)],
)  # fmt: skip
@on_ranks(2)
def test_it_has_every_bit_of_the_file_that_rank_0_gathers(
    rank: int, world_size: int, way: str, make: type[Net], tmp_path: Path
) -> None:
    precision: Any = "bf16-true" if "16 bits" in way else "32-true"
    trainer = fit(strategy(way, tmp_path), make(), max_epochs=1, callbacks=[ShardedEMA(0.5)], precision=precision)
    alone = patch.object(FlatBuffer, "gather_shards", side_effect=AssertionError("gathered"))
    with alone, patch.object(save, "run_file", side_effect=AssertionError("written by rank 0 alone")):
        trainer.save_checkpoint(tmp_path / "together.ckpt")
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    with gathering():
        trainer.save_checkpoint(tmp_path / "gathered.ckpt")
    found, expected = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("together", "gathered"))
    assert_same(found, expected)
    assert_same(torch.load(tmp_path / "weights.ckpt", weights_only=True)["state_dict"], found["state_dict"])
    assert found["ema_state_dict"]
    if make is Mixed:
        assert found["state_dict"]["last.weight"].data_ptr() == found["state_dict"]["first.weight"].data_ptr()


class Watches(ZeROStrategy):
    """A user's strategy that looks at what is saved."""

    def save_checkpoint(self, checkpoint: Any, filepath: Any, storage_options: Any = None) -> None:
        if self.is_global_zero:
            checkpoint["sum"] = sum(float(value.sum()) for value in checkpoint["state_dict"].values())
        super().save_checkpoint(checkpoint, filepath, storage_options)


class Rounds(Net):
    """An optimizer with a hook that changes what is saved of it."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

        def half(_: Any, state: dict[str, Any]) -> None:
            for entries in state["state"].values():
                entries["momentum_buffer"] = entries["momentum_buffer"].half()

        optimizer.register_state_dict_post_hook(half)
        return optimizer


class Computes(Net):
    """A module that saves what it computes, with a history of autograd."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super().state_dict(*args, **kwargs), "double": self.last.bias * 2}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 4:
            self.trainer.save_checkpoint(self.path)

    path: Path


@pytest.mark.wide
@on_ranks(2)
def test_a_module_saves_what_it_computes(rank: int, world_size: int, tmp_path: Path) -> None:
    module = Computes()
    module.path = tmp_path / "x.ckpt"
    options: dict[str, Any] = {"checkpoint.background": True}
    fit(strategy("2", tmp_path, **options), module, max_epochs=1)
    found = torch.load(module.path, weights_only=True)["state_dict"]
    assert torch.equal(found["double"], found["last.bias"] * 2)
    assert not found["double"].requires_grad


class Copies(pl.Callback):
    """A callback whose state has the weights."""

    strategy: ZeROStrategy

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        self.strategy = trainer.strategy

    def state_dict(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.strategy.lightning_module_state_dict().items()}


@pytest.mark.wide
@on_ranks(2)
def test_code_of_the_users_gets_full_values(rank: int, world_size: int, tmp_path: Path) -> None:
    fit(strategy("3", tmp_path, Watches), Net(), max_epochs=1).save_checkpoint(tmp_path / "watched.ckpt")
    fit(strategy("3", tmp_path), Rounds(), max_epochs=1).save_checkpoint(tmp_path / "rounded.ckpt")
    fit(strategy("3", tmp_path), Net(), max_epochs=1, callbacks=[Copies()]).save_checkpoint(tmp_path / "copied.ckpt")
    dist.barrier()
    found = torch.load(tmp_path / "copied.ckpt", weights_only=True)
    assert_same(found["callbacks"]["Copies"], dict(found["state_dict"]))
    found = torch.load(tmp_path / "watched.ckpt", weights_only=True)
    assert found["sum"] == sum(float(value.sum()) for value in found["state_dict"].values())
    [optimizer] = torch.load(tmp_path / "rounded.ckpt", weights_only=True)["optimizer_states"]
    assert {entries["momentum_buffer"].dtype for entries in optimizer["state"].values()} == {torch.float16}


@on_ranks(2)
def test_what_a_trainer_dumps_is_refused_by_torch_save_if_it_lacks_the_values(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """It would be a file without weights, on meta: here ranks hold shards, under DDP rank 0 holds everything."""
    trainer = fit(strategy("3", tmp_path), Net(), max_epochs=1)
    dumped = trainer._checkpoint_connector.dump_checkpoint(False)
    for value in (dumped, copy.deepcopy(dumped["state_dict"])):
        with pytest.raises(CheckpointError, match=r"trainer\.strategy\.save_checkpoint\(checkpoint, path\)"):
            torch.save(value, tmp_path / f"dumped{rank}.pt")
    trainer.strategy.save_checkpoint(dumped, tmp_path / "saved.ckpt")
    trainer.save_checkpoint(tmp_path / "again.ckpt")
    saved, again = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("saved", "again"))
    assert_same({**saved, "callbacks": {}}, {**again, "callbacks": {}})


class Noting(pl.Trainer):
    """A user's Trainer that adds to what is saved, and leaves out the schedules."""

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = None, storage_options: Any = None) -> None:
        checkpoint = self._checkpoint_connector.dump_checkpoint(weights_only)
        del checkpoint["lr_schedulers"]
        self.strategy.save_checkpoint({**checkpoint, "notes": "mine"}, filepath, storage_options)


@pytest.mark.wide
@pytest.mark.parametrize("where", ["", "memory://"], ids=["disk", "remote"])
@on_ranks(2)
def test_a_trainer_of_the_users_may_change_which_keys_are_saved(
    rank: int, world_size: int, where: str, tmp_path: Path
) -> None:
    path = f"{where}{tmp_path}/x.ckpt"
    with patch.object(pl, "Trainer", Noting):
        fit(strategy("3", tmp_path), Net(), max_epochs=1).save_checkpoint(path)
    if rank == 0:
        opened: Any = fsspec.open(path)
        with opened as file:
            found = torch.load(file, weights_only=True)
        assert found["notes"] == "mine"
        assert "lr_schedulers" not in found
        assert not any(value.is_meta for value in found["state_dict"].values())


def refusing(error: int) -> Any:
    """Let writing of staged files that others have created fail."""

    def refuses(*_: Any) -> int:
        raise OSError(error, os.strerror(error))

    def opens(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        return (
            refuses() if str(path).endswith(".partial") and flags & os.O_WRONLY else plain(path, flags, *args, **kwargs)
        )

    plain = os.open
    return replaced({"pwrite": refuses} if error == errno.EOPNOTSUPP else {"open": opens})


@pytest.mark.parametrize("error", [errno.ENOENT, wide(errno.EOPNOTSUPP)], ids=["another disk", "no random writes"])
@on_ranks(2)
def test_rank_0_gathers_where_the_ranks_cannot_write_one_file(
    rank: int, world_size: int, error: int, tmp_path: Path
) -> None:
    """Two machines that say the same of themselves; a mount of an object store."""
    trainer = fit(strategy("3", tmp_path), Net(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "together.ckpt")
    with refusing(error) if rank or error == errno.EOPNOTSUPP else contextlib.nullcontext():
        trainer.save_checkpoint(tmp_path / "runs" / "gathered.ckpt")
    found, expected = (
        torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("runs/gathered", "together")
    )
    assert_same(found, expected)
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["gathered.ckpt"]
