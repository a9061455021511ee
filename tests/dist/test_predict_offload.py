"""Evaluation with the weights on a tier: the numbers of `zero1`, and nothing allocated that only training needs."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import host_memory
from ls_strategy.autoload import ALIASES
from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import Net, batches, fit, on_ranks, quiet, trainer_of
from tests.marks import slow

pytestmark = pytest.mark.wide

OFFLOADED = ("zero3_offload", "zero3_nvme", "zero3_offload_param", "zero3_nvme_param")
NAMES = ("zero1", *OFFLOADED)
MIB = 1 << 20


class OnMeta(Net):
    """Built by the strategy, without memory where it has that."""

    def build(self) -> None:
        """In `configure_model`."""

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            torch.manual_seed(0)
            super().build()


def strategy(name: str, folder: Path) -> ZeROStrategy:
    options: dict[str, Any] = dict(ALIASES[name])
    return ZeROStrategy(
        **nested(
            {
                **options,
                "sharding.min_unit_numel": 0,
                "offload.nvme_path": str(folder / "drive"),
                "offload.nvme_allow_ram": True,
            }
        )
    )


def evaluations(name: str, folder: Path, module: Any, ckpt: Path | None = None) -> dict[str, Tensor]:
    """What each entry point of a Trainer that trains nothing gives, with a module and a Trainer of its own."""
    data, path = batches(16, seed=2), None if ckpt is None else str(ckpt)
    predicted = torch.cat(trainer_of(strategy(name, folder)).predict(module(), data, ckpt_path=path))  # type: ignore
    trainer = trainer_of(strategy(name, folder))
    tested = trainer.test(module(), data, ckpt_path=path, verbose=False)
    validated = trainer.validate(module(), data, ckpt_path=path, verbose=False)
    numbers = [v for result in (*tested, *validated) for v in result.values()]
    return {"predicted": predicted, "tested and validated": torch.tensor(numbers, dtype=torch.float64)}


def check_equal(folder: Path, module: Any, ckpt: Path | None = None) -> None:
    expected = evaluations("zero1", folder, module, ckpt)
    for name in OFFLOADED:
        for what, found in evaluations(name, folder, module, ckpt).items():
            assert torch.equal(found, expected[what]), f"{what} by {name} of {module.__name__} from {ckpt}"


@on_ranks(1)
def test_evaluation_gives_the_bits_of_zero1_on_one_rank(rank: int, world_size: int, tmp_path: Path) -> None:
    """From the module, built here or by the strategy, and from checkpoints in a file and in a folder."""
    fit("zero1", Net(), max_epochs=1).save_checkpoint(tmp_path / "folder.ckpt")
    trained = fit(ZeROStrategy(1, checkpoint="file"), Net(), max_epochs=1)
    trained.save_checkpoint(tmp_path / "file.ckpt")
    assert (tmp_path / "file.ckpt").is_file()
    check_equal(tmp_path, Net)
    check_equal(tmp_path, Net, tmp_path / "file.ckpt")
    check_equal(tmp_path, OnMeta, tmp_path / "folder.ckpt")


@on_ranks(2, timeout_s=120)
def test_evaluation_gives_the_bits_of_zero1_on_two_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    fit("zero1", Net(), max_epochs=1).save_checkpoint(tmp_path / "folder.ckpt")
    check_equal(tmp_path, OnMeta)
    check_equal(tmp_path, Net, tmp_path / "folder.ckpt")


@pytest.mark.parametrize("precision", ["bf16-true", slow("bf16-mixed")])
@on_ranks(2, timeout_s=120)
def test_evaluation_in_16_bits_gives_the_bits_of_zero1(
    rank: int, world_size: int, precision: str, tmp_path: Path
) -> None:
    expected: Tensor | None = None
    for name in NAMES:
        trainer = trainer_of(strategy(name, tmp_path), precision=precision)
        found = torch.cat(trainer.predict(Net(), batches(16, seed=2)))  # type: ignore[arg-type]
        expected = found if expected is None else expected
        assert torch.equal(found, expected), name


@on_ranks(2)
def test_prediction_holds_weights_and_nothing_else(rank: int, world_size: int, tmp_path: Path) -> None:
    """Neither moments nor gradients, in memory or on the drive; and no fp32 copies of 16-bit weights."""
    for name in OFFLOADED:
        trainer = trainer_of(strategy(name, tmp_path), precision="bf16-true")
        trainer.predict(OnMeta(), batches(16, seed=2))
        engine = trainer.strategy.require_engine()  # type: ignore[attr-defined]
        shards = sum(flat.layout.shard for flat in engine.flats)
        held = engine.memory_bytes()
        assert held["optimizer"] == held["gradients"] == 0, name
        on_tiers = engine.offload.tiers["nvme" if "nvme" in name else "cpu"].sizes
        assert sum(numel * dtype.itemsize for numel, dtype in on_tiers.values()) == 2 * shards, f"{name}: {on_tiers}"
        assert not engine.optimizers


# --- resident memory --------------------------------------------------------------------------------------------------


class Deep(host_memory.Model):
    """Many equal blocks, built on meta."""

    def predict_step(self, batch: list[Tensor], i: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return x

    def configure_optimizers(self) -> Any:
        raise AssertionError("nothing is trained")


def predict(name: str, folder: Path, blocks: int, width: int) -> None:
    data = DataLoader(TensorDataset(torch.randn(4, width)), batch_size=2)
    trainer: pl.Trainer = trainer_of(strategy(name, folder), max_epochs=1)
    module = Deep(blocks, width)
    assert not any(isinstance(m, nn.Linear) for m in module.modules())
    trainer.predict(module, data)


def weigh(rank: int, world_size: int, name: str, folder: str, blocks: int, width: int) -> int:
    """The most that the process has taken, above what it had after a tiny model."""
    quiet()
    torch.set_num_threads(1)
    predict(name, Path(folder), 2, 64)
    gc.collect()
    before = host_memory.status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    predict(name, Path(folder), blocks, width)
    return host_memory.status("VmHWM") - before


@pytest.mark.parametrize("name", OFFLOADED)
def test_resident_memory_of_a_prediction(name: str, tmp_path: Path) -> None:
    """Host memory: the weights, and some units. A drive: its buffers, and some units, whatever the model's size."""
    blocks, width = 96, 512
    unit = 4 * (4 * width**2 + 5 * width)
    taken = spawn(weigh, 1, name, str(tmp_path), blocks, width, init_process_group=False, timeout_s=150)[0]
    if "nvme" in name:
        assert taken < 80 * MIB + 8 * unit + 24 * MIB, f"{taken / MIB:.0f} MiB"
        assert taken < blocks * unit / 2.5
    else:
        assert taken < 1.02 * blocks * unit + 8 * unit + 24 * MIB, f"{taken / MIB:.0f} MiB"
