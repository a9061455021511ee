"""Virtual ranks: the bits of a run do not depend on the number of ranks that compute it, nor on stage and tier.

Trusted run: DDP on as many real ranks as there are virtual ones, up to the order of summation.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torchmetrics import SumMetric

from ls_strategy import PlanError, ShardedEMA, StateError, ZeROStrategy
from ls_strategy.config import nested
from ls_strategy.testing import spawn
from tests.dist.ranks import WIDTH, Net, assert_equal, batches, on_ranks, quiet, samples, saved, trainer_of
from tests.marks import slow

VIRTUAL = 4
EXACT = ("weights", "losses", "norms", "logged", "steps")
CPU = {"stage": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu"}
NVME = {"stage": 3, "offload.optimizer": "nvme", "offload.parameters": "nvme", "offload.nvme_allow_ram": True}
PLAIN: dict[str, Any] = {"gradient_clip_val": 0.5}
HARD: dict[str, Any] = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 3, "precision": "bf16-mixed"}

Result = dict[str, Any]


class Noise(Dataset):
    """Augmented by all three generators of a process."""

    def __init__(self, numel: int = 48) -> None:
        self.x, self.y = samples(numel)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = 0.01 * (torch.randn(WIDTH) + random.random() + float(np.random.rand()))
        return self.x[i] + noise, self.y[i]


class Habits(Net):
    """Dropout, batch norm, augmentation on the device, draws in hooks, and everything that is logged."""

    def build(self) -> None:
        super().build()
        self.drop = nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.counted, self.counted_in_validation = SumMetric(), SumMetric()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = self.drop(block(h))
        return self.last(self.norm(h))

    def on_train_batch_start(self, batch: Any, i: int) -> None:
        self.mix = torch.rand(1).item()

    def on_after_batch_transfer(self, batch: Any, i: int) -> Any:
        return [batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]]

    def training_step(self, batch: Any, i: int) -> Any:
        loss = self.loss(batch) * (1 + 0.1 * self.mix)
        self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
        self.log("largest", loss, sync_dist=True, reduce_fx="max")
        self.log_dict({"first": loss})
        self.counted(len(batch[0]))
        self.log("counted", self.counted, on_step=True, on_epoch=True)
        return {"loss": loss, "more": 1}

    def validation_step(self, batch: Any, i: int) -> None:
        self.log("val", self.loss(batch), sync_dist=True)
        self.counted_in_validation(len(batch[0]))
        self.log("counted_in_validation", self.counted_in_validation)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Matrices(Habits):
    """Stepped as whole tensors, of which one block is frozen in the first epoch."""

    def on_train_epoch_start(self) -> None:
        self.blocks[1].requires_grad_(self.current_epoch > 0)

    def configure_optimizers(self) -> Any:
        self.blocks[1].requires_grad_(False)
        return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2], lr=1e-2)


class Quiet(Habits):
    """Nothing is drawn between two steps, so that DDP's generators are where those of virtual ranks are."""

    def on_train_batch_start(self, batch: Any, i: int) -> None:
        self.mix = 0.0

    def training_step(self, batch: Any, i: int) -> Any:
        output = super().training_step(batch, i)
        value = output["loss"].detach().clone()
        self.log("before", value)
        value.zero_()
        return output


class Loads(Habits):
    """Its samples are loaded in processes: two on one rank, one each on two."""


class LoadsOn(Loads):
    """By processes that stay."""


class Records(Callback):
    def __init__(self, save: tuple[str, int] | None = None) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.save = save

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.norms.append(module.total_norm(optimizer))

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, i: int) -> None:
        assert outputs["more"] == 1
        self.losses.append(outputs["loss"].item())
        if self.save is not None and trainer.global_step == self.save[1] and not Path(self.save[0]).exists():
            trainer.save_checkpoint(self.save[0])


def train(
    rank: int,
    world_size: int,
    options: dict[str, Any] | str,
    trainer_options: dict[str, Any],
    kind: str = "Habits",
    save: tuple[str, int] | None = None,
    ckpt: str | None = None,
) -> Result:
    quiet()
    seed_everything(3, verbose=False)
    strategy: Any = options if isinstance(options, str) else ZeROStrategy(**nested(options))
    records = Records(save)
    trainer = trainer_of(strategy, **{"max_epochs": 2, "callbacks": [records], **trainer_options})
    module = globals()[kind]()
    workers: dict[str, Any] = {}
    if kind.startswith("Loads"):  # forked: others import everything again
        workers = {"num_workers": 3 - world_size, "multiprocessing_context": "fork"}
        workers["persistent_workers"] = kind == "LoadsOn"
    loader = DataLoader(Noise(), batch_size=4, shuffle=True, **workers)
    trainer.fit(module, loader, batches(24, seed=9), ckpt_path=ckpt)
    weights = trainer.strategy.lightning_module_state_dict()
    return {
        "weights": {name: value.clone() for name, value in weights.items()},
        "losses": records.losses,
        "norms": records.norms,
        "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
    }


def run(world_size: int, options: dict[str, Any] | str, trainer_options: dict[str, Any], *more: Any) -> Result:
    if isinstance(options, dict):
        options = {"parallel.virtual_ranks": VIRTUAL, "sharding.min_unit_numel": 0, **options}
    return spawn(
        train, world_size, options, trainer_options, *more, init_process_group=False, timeout_s=120
    )[0]  # fmt: skip


def check_equal(found: Result, expected: Result) -> None:
    for name, weight in expected["weights"].items():
        assert torch.equal(found["weights"][name], weight), name
    for what in EXACT[1:]:
        assert found[what] == expected[what], what


# --- bits -------------------------------------------------------------------------------------------------------------


def test_three_ranks_give_the_bits_of_one() -> None:
    """Four virtual ranks on three: the last round is that of one rank. With accumulation, clipping, autocast."""
    check_equal(run(3, {"stage": 3}, HARD), run(1, {"stage": 3}, HARD))


@pytest.mark.wide
@pytest.mark.parametrize("trainer_options", [PLAIN, HARD], ids=["plain", "accumulation and bf16"])
def test_ranks_stages_and_tiers_give_the_same_bits(trainer_options: dict[str, Any], tmp_path: Path) -> None:
    nvme = {**NVME, "offload.nvme_path": str(tmp_path)}
    expected = run(1, {"stage": 2}, trainer_options)
    for world_size, options in (
        (2, {"stage": 0}), (3, {"stage": 1}), (4, {"stage": 2}), (2, {"stage": 3}), (4, {"stage": 3}),
        (1, CPU), (2, CPU), (3, CPU), (1, nvme), (2, nvme), (4, nvme), (2, {**CPU, "offload.parameters": None}),
    ):  # fmt: skip
        check_equal(run(world_size, options, trainer_options), expected)


@pytest.mark.wide
@pytest.mark.parametrize("trainer_options", [PLAIN, HARD], ids=["plain", "accumulation and bf16"])
def test_uneven_shares_give_the_same_bits(trainer_options: dict[str, Any], tmp_path: Path) -> None:
    nvme = {**NVME, "offload.nvme_path": str(tmp_path)}
    expected = run(1, {"stage": 2}, trainer_options)
    for shares, options in (
        ([1, 3], {"stage": 2}), ([3, 1], {"stage": 2}), ([1, 3], {"stage": 3}), ([1, 2, 1], {"stage": 3}),
        ([2, 1, 1], {"stage": 1}), ([1, 1, 2], CPU), ([1, 3], nvme),
    ):  # fmt: skip
        check_equal(run(len(shares), {**options, "parallel.virtual_ranks_per_rank": shares}, trainer_options), expected)


@pytest.mark.wide
def test_a_slow_rank_computes_less(tmp_path: Path) -> None:
    """And a run continues inside an epoch with other shares."""
    path = str(tmp_path / "middle.ckpt")
    expected = run(1, {"stage": 2}, PLAIN)
    found = run(2, {"stage": 2, "parallel.virtual_ranks_per_rank": [1, 3]}, PLAIN, "Habits", (path, 4))
    check_equal(found, expected)
    found = run(2, {"stage": 3, "parallel.virtual_ranks_per_rank": [3, 1]}, PLAIN, "Habits", None, path)
    check_continued(found, expected)


@pytest.mark.wide
def test_whole_tensors_and_frozen_blocks() -> None:
    expected = run(1, {"stage": 2}, PLAIN, "Matrices")
    for world_size, options in ((2, {"stage": 3}), (3, {"stage": 2}), (4, CPU)):
        check_equal(run(world_size, options, PLAIN, "Matrices"), expected)


@pytest.mark.slow
@pytest.mark.parametrize("trainer_options", [PLAIN, HARD], ids=["plain", "accumulation and bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_on_every_number_of_ranks(stage: int, trainer_options: dict[str, Any]) -> None:
    expected = run(1, {"stage": 3}, trainer_options)
    for world_size in (1, 2, 3, 4):
        check_equal(run(world_size, {"stage": stage}, trainer_options), expected)


@pytest.mark.wide
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true", "64-true"])
def test_other_precisions(precision: str) -> None:
    options = {**PLAIN, "max_epochs": 1}
    if precision == "16-mixed":
        from ls_strategy.lightning.precision import ZeROPrecision

        options["plugins"] = [ZeROPrecision("16-mixed")]
    else:
        options["precision"] = precision
    expected = run(1, {"stage": 2}, options)
    check_equal(run(2, {"stage": 3}, options), expected)
    check_equal(run(4, CPU, options), expected)


@pytest.mark.wide
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_moments_in_fewer_bits_are_rounded_alike_on_any_number_of_ranks(moments: str) -> None:
    expected = run(1, {"stage": 2, "precision.moments": moments}, HARD)
    for world_size, options in ((2, {"stage": 3}), (3, {"stage": 1, "sharding.rank_weights": [1, 3, 2]}), (2, CPU)):
        check_equal(run(world_size, {**options, "precision.moments": moments}, HARD), expected)


@pytest.mark.wide
def test_in_fp64_one_virtual_rank_per_rank_is_ddp() -> None:
    """Also where gradients of several micro-batches are added up."""
    trainer_options = {**PLAIN, "precision": "64-true", "accumulate_grad_batches": 2}
    found = run(2, {"stage": 2, "parallel.virtual_ranks": 2}, trainer_options, "Quiet")
    expected = run(2, "ddp", trainer_options, "Quiet")
    for what in ("losses", "norms"):
        assert found[what] == pytest.approx(expected[what], rel=1e-12), what
    for name in ("loss_step", "loss_epoch", "largest", "val", "before"):
        assert found["logged"][name] == pytest.approx(expected["logged"][name], rel=1e-12), name
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-12, atol=1e-13)


def test_one_virtual_rank_per_rank_gives_the_numbers_of_ddp() -> None:
    """And its traffic: see `test_bytes_are_those_without_virtual_ranks`."""
    found = run(2, {"stage": 2, "parallel.virtual_ranks": 2}, PLAIN, "Quiet")
    expected = run(2, "ddp", PLAIN, "Quiet")
    for what in ("losses", "norms"):
        assert found[what] == pytest.approx(expected[what], rel=2e-5), what
    for name in ("loss", "largest", "first", "val"):
        assert found["logged"][name] == pytest.approx(expected["logged"][name], rel=2e-5), name
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=1e-5)


class Counts(Quiet):
    """Buffers that hooks and steps of all kinds change, in place or not; what they are is noted."""

    total: Tensor
    mean: Tensor
    hooks: Tensor

    def build(self) -> None:
        super().build()
        self.drop = nn.Dropout(0.0)
        for name in ("total", "mean", "hooks"):
            self.register_buffer(name, torch.zeros(()))
        self.noted: list[float] = []

    def on_after_batch_transfer(self, batch: Any, i: int) -> Any:
        return batch

    def training_step(self, batch: Any, i: int) -> Any:
        self.mean = 0.9 * self.mean + batch[0].mean()
        return super().training_step(batch, i)

    def on_train_batch_end(self, outputs: Any, batch: Any, i: int) -> None:
        self.hooks += 1

    def on_validation_epoch_start(self) -> None:
        self.total.zero_()

    def validation_step(self, batch: Any, i: int) -> None:
        self.total += batch[0].sum()
        self.log("val", self.loss(batch) + self.total + self.mean + self.hooks, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        mean = float(self.trainer.callback_metrics["val"])
        self.noted += [mean, *(float(each) for each in (self.total, self.mean, self.hooks))]


def train_counts(rank: int, world_size: int, options: dict[str, Any] | str) -> tuple[list[float], dict[str, Tensor]]:
    quiet()
    strategy: Any = options if isinstance(options, str) else ZeROStrategy(**nested(options))
    module = Counts()
    trainer = trainer_of(strategy, max_epochs=2, accumulate_grad_batches=2, val_check_interval=3, precision="64-true")
    trainer.fit(module, batches(56), batches(24, seed=9))
    return module.noted, {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (2, {"stage": 2}),
        pytest.param(1, {"stage": 3}, marks=pytest.mark.wide),
        pytest.param(2, {"stage": 3}, marks=pytest.mark.wide),
    ],
)
def test_buffers_are_those_of_a_rank_of_ddp_also_in_validation_between_two_steps(
    world_size: int, options: dict[str, Any]
) -> None:
    options = {"parallel.virtual_ranks": 2, "sharding.min_unit_numel": 0, **options}
    (expected, weights), *_ = spawn(train_counts, 2, "ddp", init_process_group=False, timeout_s=60)
    (found, ours), *_ = spawn(train_counts, world_size, options, init_process_group=False, timeout_s=60)
    assert len(expected) == 5 * 4
    assert found == pytest.approx(expected, rel=1e-6)
    for name, weight in weights.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-9, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_a_run_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    """In the middle of an epoch: next batches, random numbers and bits are those of the unbroken run."""
    path = str(tmp_path / "middle.ckpt")
    expected = run(1, {"stage": 3}, PLAIN, "Habits", (path, 4))
    check_continued(run(2, {"stage": 2}, PLAIN, "Habits", None, path), expected)


def averaged(rank: int, world_size: int, folder: Path, ckpt: Path | None) -> dict[str, Tensor]:
    """The average after three steps of two batches each, and the weights."""
    quiet()
    seed_everything(3, verbose=False)
    strategy = ZeROStrategy(3 - world_size, parallel={"virtual_ranks": VIRTUAL}, sharding={"min_unit_numel": 0})
    saves = ModelCheckpoint(folder, f"{world_size}-{{step}}", every_n_train_steps=1, save_top_k=-1)
    callbacks = [ShardedEMA(0.5), *([saves] if ckpt is None else [])]
    options = {"callbacks": callbacks, "enable_checkpointing": ckpt is None, "accumulate_grad_batches": 2}
    trainer = trainer_of(strategy, max_epochs=1, **options)
    trainer.fit(Habits(), DataLoader(Noise(), batch_size=2, shuffle=True), ckpt_path=ckpt)
    trainer.save_checkpoint(folder / f"{world_size}-end.ckpt")
    trainer.strategy.barrier()
    found = saved(folder / f"{world_size}-end.ckpt")
    assert found["global_step"] == 3
    return {f"{what} {k}": v for what in ("ema_state_dict", "state_dict") for k, v in found[what].items()}


@pytest.mark.wide
def test_an_average_goes_on_at_a_batch_that_ends_without_a_step(tmp_path: Path) -> None:
    """On as many ranks, and on others."""
    expected = spawn(averaged, 2, tmp_path, None, init_process_group=False)[0]
    for world_size, step in ((2, 2), (1, 1)):
        path = tmp_path / f"2-step={step}.ckpt"
        [found, *_] = spawn(averaged, world_size, tmp_path, path, init_process_group=False)
        assert_equal(found, expected, f"{world_size} ranks, step {step}")


def check_continued(found: Result, expected: Result) -> None:
    for what in ("losses", "norms"):
        assert found[what] == expected[what][-len(found[what]) :], what
    for result in (found, expected):  # Lightning does not save what it has logged of an epoch so far
        result["logged"] = {
            k: v for k, v in result["logged"].items() if k not in ("loss", "loss_epoch", "counted", "counted_epoch")
        }
    check_equal({**found, "losses": expected["losses"], "norms": expected["norms"]}, expected)


@pytest.mark.wide
@pytest.mark.parametrize(("kind", "step"), [("Loads", 2), ("LoadsOn", 4), slow("Loads", 4), slow("LoadsOn", 2)])
def test_workers_draw_the_same_after_a_resume(kind: str, step: int, tmp_path: Path) -> None:
    """In the middle of the first or of the second epoch, with another number of workers."""
    path = str(tmp_path / "middle.ckpt")
    expected = run(1, {"stage": 2}, PLAIN, kind, (path, step))
    check_continued(run(2, {"stage": 2}, PLAIN, kind, None, path), expected)


@pytest.mark.wide
@pytest.mark.parametrize("save_as", ["sharded", "file"])
def test_many_ranks_to_few_and_back(save_as: str, tmp_path: Path) -> None:
    first, second = str(tmp_path / "first.ckpt"), str(tmp_path / "second.ckpt")
    options, trainer_options = {"stage": 1, "checkpoint.format": save_as}, {**HARD, "accumulate_grad_batches": 1}
    expected = run(1, options, trainer_options)
    run(4, options, trainer_options, "Habits", (first, 1))
    run(1, options, trainer_options, "Habits", (second, 4), first)
    check_continued(run(2, options, trainer_options, "Habits", None, second), expected)


class Counting(DataLoader):
    """Keeps its position itself, and makes its iterator when it is asked for the first batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.given = self.start = 0

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        self.given = start
        for i, batch in enumerate(super().__iter__()):
            if i < start:
                continue
            self.given += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        rank = self.sampler.rank if isinstance(self.sampler, DistributedSampler) else -1
        return {"given": self.given, "rank": rank}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["rank"] == self.sampler.rank, "every virtual rank has a state of its own"  # type: ignore
        self.start = state["given"]


def train_counting(rank: int, world_size: int, save: tuple[str, int] | None, ckpt: str | None) -> Result:
    quiet()
    seed_everything(3, verbose=False)
    strategy = ZeROStrategy(2, sharding={"min_unit_numel": 0}, parallel={"virtual_ranks": VIRTUAL})
    records = Records(save)
    trainer = trainer_of(strategy, max_epochs=2, callbacks=[records])
    data = TensorDataset(*samples(48))
    trainer.fit(Habits(), Counting(data, batch_size=4, shuffle=True), ckpt_path=ckpt)
    weights = trainer.strategy.lightning_module_state_dict()
    return {"weights": {name: value.clone() for name, value in weights.items()}, "losses": records.losses}


@pytest.mark.parametrize("step", [1, slow(4)])
def test_loaders_with_a_state_go_on(step: int, tmp_path: Path) -> None:
    """After one batch of the first epoch of three; after one of the second."""
    path = str(tmp_path / "middle.ckpt")
    expected = spawn(train_counting, 1, (path, step), None, init_process_group=False, timeout_s=60)[0]
    found = spawn(train_counting, 2, None, path, init_process_group=False, timeout_s=60)[0]
    assert found["losses"] == expected["losses"][step:]
    for name, weight in expected["weights"].items():
        assert torch.equal(found["weights"][name], weight), name


# --- loaders ----------------------------------------------------------------------------------------------------------


class Several(Habits):
    """Two training loaders at once, two validation loaders one after the other."""

    def training_step(self, batch: Any, i: int) -> Any:
        return {"loss": self.loss(batch["a"]) + 0.5 * self.loss(batch["b"]), "more": 1}

    def on_after_batch_transfer(self, batch: Any, i: int) -> Any:
        return batch

    def validation_step(self, batch: Any, i: int, dataloader_idx: int = 0) -> None:
        self.log("val", self.loss(batch), sync_dist=True)

    def train_dataloader(self) -> Any:
        return {"a": DataLoader(Noise(), batch_size=4, shuffle=True), "b": batches(48, seed=4)}

    def val_dataloader(self) -> Any:
        return [batches(24, seed=9), batches(16, seed=8)]


def train_several(rank: int, world_size: int, workers: int) -> Result:
    quiet()
    seed_everything(3, verbose=False, workers=True)
    strategy = ZeROStrategy(3, sharding={"min_unit_numel": 0}, parallel={"virtual_ranks": VIRTUAL})
    trainer = trainer_of(strategy, max_epochs=2, limit_train_batches=2, callbacks=[Records()])
    module: Any = Several() if not workers else Habits()
    if workers:
        trainer.fit(module, DataLoader(Noise(), batch_size=4, shuffle=True, num_workers=workers))
    else:
        trainer.fit(module)
    validated = trainer.validate(module, batches(24, seed=9), verbose=False) if workers else []
    predicted = trainer.predict(Net(), batches(24, seed=9))
    assert sum(map(len, predicted)) == 24 // world_size, "predictions are those of the real ranks"  # type: ignore
    weights = trainer.strategy.lightning_module_state_dict()
    return {
        "weights": {name: value.clone() for name, value in weights.items()},
        "losses": validated,
        "norms": [],
        "logged": {name: value.item() for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
    }


@pytest.mark.wide
@pytest.mark.parametrize("workers", [0, slow(1)], ids=["several loaders", "workers"])
def test_several_loaders_and_workers(workers: int) -> None:
    expected, found = (
        spawn(train_several, ranks, workers, init_process_group=False, timeout_s=120)[0] for ranks in (1, 2)
    )
    found["logged"].pop("predicted", None)
    check_equal(found, expected)


class OwnBatches(BatchSampler):
    """A class of a user: Lightning makes one around its sampler, which draws another order in every epoch."""


def train_with(rank: int, world_size: int, strategy: Any, kind: str) -> dict[str, Tensor]:
    quiet()
    seed_everything(3, verbose=False)
    data = TensorDataset(*samples(48))
    options: dict[str, Any] = {"batch_size": 4}
    if kind == "generator of a sampler":
        own = torch.Generator().manual_seed(1)
        options["sampler"] = WeightedRandomSampler(torch.rand(48).tolist(), 48, generator=own)
    elif kind == "generator of a loader":
        options |= {"shuffle": True, "generator": torch.Generator().manual_seed(1)}
    else:
        kind_of = OwnBatches if kind == "own batch sampler" else BatchSampler
        options = {"batch_sampler": kind_of(RandomSampler(data), 4, drop_last=False)}
    trainer = trainer_of(strategy, max_epochs=2)
    trainer.fit(Sums(), DataLoader(data, **options))
    weights = trainer.strategy.lightning_module_state_dict()
    return {name: value.clone() for name, value in weights.items()}


class Sums(Net):
    """Without anything random, so that DDP's weights are near."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "kind", ["generator of a sampler", "generator of a loader", "batch sampler", "own batch sampler"]
)
def test_samplers_draw_for_one_virtual_rank(kind: str) -> None:
    """One process has the samplers of several virtual ranks, which must not share generators or orders."""
    strategy = ZeROStrategy(2, parallel={"virtual_ranks": 2})
    ddp, one, two = (
        spawn(train_with, ranks, which, kind, init_process_group=False, timeout_s=60)[0]
        for ranks, which in ((2, "ddp"), (1, strategy), (2, strategy))
    )
    for name, weight in two.items():
        assert torch.equal(one[name], weight), name
        torch.testing.assert_close(weight, ddp[name], rtol=1e-4, atol=1e-5)


# --- traffic and memory -----------------------------------------------------------------------------------------------


def sent(rank: int, world_size: int, counts: list[int | None]) -> list[dict[str, int]]:
    quiet()
    found = []
    for virtual in counts:
        parallel = {} if virtual is None else {"virtual_ranks": virtual}
        strategy = ZeROStrategy(2, sharding={"min_unit_numel": 0}, parallel=parallel)
        trainer_of(strategy, max_epochs=1).fit(Wide(), batches(16))
        found.append(dict(strategy.traffic.bytes))
    return found


class Wide(Net):
    """Multiples of the alignment, so that padding is the same with virtual ranks."""

    def build(self) -> None:
        self.first = nn.Linear(WIDTH, 64, bias=False)
        self.blocks = nn.ModuleList([nn.Linear(64, 64, bias=False) for _ in range(2)])
        self.last = nn.Linear(64, WIDTH, bias=False)


def test_bytes_are_those_without_virtual_ranks() -> None:
    plain, virtual, twice = spawn(sent, 2, [None, 2, 4], init_process_group=False, timeout_s=60)[0]
    assert virtual["reduce_scatter"] == plain["reduce_scatter"]
    assert virtual["all_gather"] == plain["all_gather"]
    assert twice["reduce_scatter"] == plain["reduce_scatter"], "half as many steps, with two rounds each"


# --- refusals ---------------------------------------------------------------------------------------------------------


class Endless(IterableDataset):
    def __iter__(self) -> Any:
        yield from zip(*samples(8), strict=True)


class Manual(Net):
    manual = True


class Names(Net):
    """Logs other names on one virtual rank."""

    def training_step(self, batch: Any, i: int) -> Any:
        loss = self.loss(batch)
        self.log(f"loss_{int(batch[0].sum() * 1e6) % 7919}", loss, sync_dist=True)
        return loss


class Batches:
    """A loader that knows its rank from elsewhere."""

    def __iter__(self) -> Any:
        yield tuple(samples(4))

    def __len__(self) -> int:
        return 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("few", "every rank needs a virtual rank"),
        ("shares", "one number per rank"),
        ("manual", "automatic_optimization"),
        ("iterable", "IterableDataset"),
        ("iterator", "Return a DataLoader"),
        ("own class", "Return a DataLoader"),
        ("names", "different names"),
    ],
)
@on_ranks(2)
def test_what_cannot_work_is_an_error_on_every_rank(rank: int, world_size: int, what: str, says: str) -> None:
    parallel: dict[str, Any] = {"virtual_ranks": 1 if what == "few" else 2}
    if what == "shares":
        parallel = {"virtual_ranks": 3, "virtual_ranks_per_rank": [1, 1, 1]}
    strategy = ZeROStrategy(2, parallel=parallel)  # type: ignore[arg-type]
    data: Any = batches(16)
    if what == "iterable":
        data = DataLoader(Endless(), batch_size=2)
    elif what == "iterator":
        data = iter([tuple(samples(4))])
    elif what == "own class":
        data = Batches()
    module: Any = {"manual": Manual, "names": Names}.get(what, Net)()
    with pytest.raises(StateError if what == "names" else PlanError, match=says):
        trainer_of(strategy, max_epochs=1).fit(module, data)
