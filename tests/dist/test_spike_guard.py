"""`SpikeGuard`: a run with poisoned batches ends with the bits of a run whose data never had them.

The trusted runs are those of this package on the same ranks without the callback, on data without the poison.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.spike import TrainingSpikeException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ls_strategy import PlanError, SpikeGuard, StateError, ZeROPrecision, ZeROStrategy
from ls_strategy.meta_init.lazy import LazyTensor
from ls_strategy.testing import spawn
from tests.dist.ranks import WIDTH, Net, assert_equal, on_ranks, saved, trainer_of
from tests.models import quiet

WINDOW = 16
NAN = float("nan")


class Noisy(Net):
    """With what a bad batch may spoil: dropout, statistics of BatchNorm, moments, a schedule of every second batch."""

    frequency = 2

    def build(self) -> None:
        super().build()
        self.last = nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return (functional.mse_loss(self(batch[0]), batch[1], reduction="none").mean(-1) * batch[2]).mean()

    def validation_step(self, batch: Any, i: int) -> None:
        self.training_step(batch, i)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": self.frequency}]


def poisoned(rank: int, factors: Sequence[float], *, clean: bool, on: int | None = None, every: int = 1) -> DataLoader:
    """Batches of this rank, one for each factor of the loss; with ``clean`` without the steps that are poisoned.

    Args:
        rank: this rank.
        factors: of the loss, by batch.
        clean: leave out all ``every`` batches of a step in which a factor is not 1.
        on: the only rank that is poisoned.
        every: batches per step.
    """
    generator, found = torch.Generator().manual_seed(7 + rank), []
    steps = [factors[i : i + every] for i in range(0, len(factors), every)]
    for step in steps:
        bad = any(factor != 1 for factor in step)
        if not (bad and clean):
            for factor in step:
                seeded = torch.Generator().manual_seed(10_000 + rank) if bad else generator
                x = torch.randn(4, WIDTH, generator=seeded)
                f = torch.full((4,), factor if on in (None, rank) else 1.0)
                found.append((x, torch.sin(x.roll(1, 1)), f))
    x, y, f = (torch.cat(each) for each in zip(*found, strict=True))
    return DataLoader(TensorDataset(x, y, f), batch_size=4)


def with_poison(good: int, count: int, seed: int, *, every: int = 1, first: int = WINDOW // 2 + 1) -> list[float]:
    """Factors of ``good`` good steps and ``count`` poisoned ones, at random places once the window has values."""
    rng = random.Random(seed)
    steps = [[1.0] * every for _ in range(good)]
    for n in range(count):
        bad = [1.0] * every
        bad[rng.randrange(every)] = (1e4, NAN, -NAN, float("inf"))[n % 4]
        steps.insert(rng.randint(first, len(steps)), bad)
    return [factor for step in steps for factor in step]


def train(strategy: Any, data: DataLoader | None, folder: Path, *callbacks: Any, **options: Any) -> dict[str, Any]:
    """The checkpoint after a fit."""
    module = options.pop("module", None) or Noisy()
    torch.manual_seed(3)
    ckpt = options.pop("ckpt", None)
    validation = options.pop("validation", None)
    options = {"max_epochs": 1, "use_distributed_sampler": False, "save_as": "file", **options}
    trainer = trainer_of(strategy, callbacks=list(callbacks), **options)
    trainer.fit(module, data, validation, ckpt_path=ckpt)
    trainer.save_checkpoint(folder / "end.ckpt")
    trainer.strategy.barrier()
    return saved(folder / "end.ckpt")


def assert_same(found: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    """Everything that training has changed."""
    for key in ("global_step", "state_dict", "optimizer_states", "lr_schedulers", "ZeROPrecision"):
        if key in expected:
            assert_equal(flat(found[key]), flat(expected[key]), f"{what}: {key}")
    assert all(v.isfinite().all() for v in found["state_dict"].values() if v.is_floating_point())


def flat(value: Any, name: str = "") -> Any:
    """Nested dictionaries and lists as one."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        return {name: value.materialize() if isinstance(value, LazyTensor) else value}
    return {k: v for key, each in inner for k, v in flat(each, f"{name}.{key}").items()}


@pytest.mark.parametrize("world", [1, 2])
def test_a_poisoned_run_ends_as_if_the_data_never_had_the_poison(world: int, tmp_path: Path) -> None:
    spawn(bits, world, tmp_path, init_process_group=False, timeout_s=60)


def bits(rank: int, world_size: int, tmp_path: Path) -> None:
    quiet()
    for stage, every, seed in ((0, 1, 1), (1, 2, 2), (2, 1, 3), (3, 2, 4)):
        factors = with_poison(24, 4, seed, every=every)
        options = {"accumulate_grad_batches": every, "gradient_clip_val": 0.5 if stage % 2 else None}
        guard = SpikeGuard(WINDOW)
        found = train(stage, poisoned(rank, factors, clean=False, every=every), tmp_path, guard, **options)
        clean = poisoned(rank, factors, clean=True, every=every)
        expected = train(stage, clean, tmp_path, **options)
        assert_same(found, expected, f"stage {stage}, accumulation {every}")
        assert guard.skipped == 4
        if stage == 2:
            unused = SpikeGuard(WINDOW)
            assert_same(train(stage, clean, tmp_path, unused, **options), expected, "no poison")
            assert unused.skipped == 0
            assert unused.state_dict()["windows"] == guard.state_dict()["windows"]


class Offset(Noisy):
    """The poison adds to the loss, so the gradient norm does not show it."""

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return Net.loss(self, batch) + (batch[2] - 1).mean()


@on_ranks(2)
def test_a_poison_of_one_rank_is_left_out_on_all(rank: int, world_size: int, tmp_path: Path) -> None:
    factors = with_poison(20, 4, 5)
    for kind in (Noisy, Offset):
        guard = SpikeGuard(WINDOW)
        found = train(2, poisoned(rank, factors, clean=False, on=1), tmp_path, guard, module=kind())
        expected = train(2, poisoned(rank, factors, clean=True), tmp_path, module=kind())
        assert_same(found, expected, f"rank 1 poisoned, {kind.__name__}")
        assert guard.skipped == 4


OFFLOAD = {"sharding": {"min_unit_numel": 0}, "offload": {"optimizer": "cpu"}}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed", "16-true", "64-true"])
@on_ranks(2)
def test_every_precision_and_offload(rank: int, world_size: int, precision: str, tmp_path: Path) -> None:
    def strategy() -> ZeROStrategy:
        scale = {"initial_power": 24, "window": 5, "hysteresis": 1}  # the first steps overflow, in both runs
        return ZeROStrategy(
            3 if precision in ("16-mixed", "32-true") else 1,
            precision={"loss_scale": scale},
            precision_plugin=ZeROPrecision(precision),
            checkpoint="file",
            **OFFLOAD,
        )

    factors = with_poison(28, 4, 6, first=WINDOW // 2 + 14)
    factors[2:2] = [NAN]  # among the steps that overflow
    guard = SpikeGuard(WINDOW)
    found = train(strategy(), poisoned(rank, factors, clean=False), tmp_path, guard)
    expected = train(strategy(), poisoned(rank, factors, clean=True), tmp_path)
    assert_same(found, expected, precision)
    assert guard.skipped == 5
    if precision.startswith("16"):
        assert found["ZeROPrecision"]["scale"] < 2**20


class SaveAfter(Callback):
    """Saves at the end of one batch."""

    def __init__(self, batch: int, path: Path) -> None:
        self.batch, self.path = batch, path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == self.batch:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(("stage", "behind"), [(1, 0), (3, -1), (2, 1)])
@on_ranks(2)
def test_a_resumed_run_decides_as_an_undisturbed_one(
    rank: int, world_size: int, stage: int, behind: int, tmp_path: Path
) -> None:
    factors = [*with_poison(12, 1, 8), 1.0, NAN, 1e4, 1.0, *with_poison(8, 2, 9, first=0)]
    data, path = poisoned(rank, factors, clean=False), tmp_path / "middle.ckpt"
    first, resumed = SpikeGuard(WINDOW), SpikeGuard(WINDOW)
    expected = train(stage, data, tmp_path, first, SaveAfter(14 + behind, path))
    found = train(stage, data, tmp_path, resumed, ckpt=path)
    assert_same(found, expected, "resumed")
    assert resumed.state_dict() == first.state_dict()
    loops = [each["loops"]["fit_loop"]["epoch_loop.state_dict"] for each in (found, expected)]
    assert loops[0] == loops[1]


@on_ranks(2)
def test_more_than_max_skips_in_a_row_end_the_run_on_all_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    data = poisoned(rank, [1.0] * 3 + [NAN] * 2 + [1.0] + [NAN] * 3, clean=False, on=1)
    with pytest.raises(StateError, match=r"max_skips=2.*step 4.*on rank 1.*resume from an earlier"):
        train(2, data, tmp_path, SpikeGuard(max_skips=2))


class Virtual(Noisy):
    """Steps of 4 samples for each of 4 virtual ranks, the last of which is poisoned."""

    def __init__(self, factors: Sequence[float], *, clean: bool) -> None:
        super().__init__()
        self.factors, self.clean = factors, clean

    def train_dataloader(self) -> DataLoader:
        good, bad, found = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2), []
        for factor in self.factors:
            if factor == 1 or not self.clean:
                f = torch.ones(4, 4)
                f[:, -1] = factor
                found.append((torch.randn(16, WIDTH, generator=good if factor == 1 else bad), f.flatten()))
        x, f = (torch.cat(each) for each in zip(*found, strict=True))
        dataset = TensorDataset(x, torch.sin(x.roll(1, 1)), f)
        strategy: Any = self.trainer.strategy
        sampler = DistributedSampler(dataset, shuffle=False, **strategy.distributed_sampler_kwargs)
        return DataLoader(dataset, batch_size=4, sampler=sampler)


def virtual(rank: int, world_size: int, tmp_path: Path, clean: bool) -> tuple[dict[str, Any], int]:
    quiet()
    guard = SpikeGuard(WINDOW)
    strategy = ZeROStrategy(2, parallel={"virtual_ranks": 4}, checkpoint="file")
    module = Virtual(with_poison(16, 4, 11), clean=clean)
    return train(strategy, None, tmp_path, guard, use_distributed_sampler=True, module=module), guard.skipped


@on_ranks(2)
def test_every_event_is_logged(rank: int, world_size: int, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version=f"{rank}")
    with pytest.warns(UserWarning, match="SpikeGuard") if rank == 0 else nullcontext() as noted:
        train(
            2, poisoned(rank, [1.0] * 3 + [NAN] + [1.0] * 2, clean=False, on=1), tmp_path, SpikeGuard(), logger=logger
        )
    if rank:
        return
    lines = [str(each.message) for each in noted if "SpikeGuard" in str(each.message)]
    assert len(lines) == 1
    assert "after step 3" in lines[0]
    assert "nan on rank 1" in lines[0]
    with (tmp_path / "0" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["zero_spikes/skipped_steps"]]
    assert [(row["step"], row["zero_spikes/skipped_steps"], row["zero_spikes/loss"]) for row in rows] == [
        ("3", "1.0", "nan")
    ]


@on_ranks(1)
def test_a_noisy_loss_raises_no_alarm_in_300_steps(rank: int, world_size: int, tmp_path: Path) -> None:
    rng = random.Random(0)
    factors = [rng.lognormvariate(0, 0.5) for _ in range(300)]
    guard, validation = SpikeGuard(), poisoned(0, [NAN], clean=False)  # validation is not watched
    train(2, poisoned(0, factors, clean=False), tmp_path, guard, validation=validation, val_check_interval=50)
    assert guard.skipped == 0
    assert len(guard.state_dict()["windows"]["loss"]) == 128


class Manual(Noisy):
    manual = True


@on_ranks(1)
def test_what_cannot_be_guarded_is_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    islands = ZeROStrategy(2)
    islands.islands = (0, 2)
    for cure, strategy, module in (
        ("Set automatic_optimization=True", 2, Manual()),
        (r"uneven='join'.*Leave one of", ZeROStrategy(2, uneven="join"), Noisy()),
        (r"DiLoCo.*Leave one of", islands, Noisy()),
        ('Use strategy="zero0"', "auto", Noisy()),
    ):
        with pytest.raises(PlanError, match=cure):
            train(strategy, poisoned(0, [1.0] * 3, clean=False), tmp_path, SpikeGuard(), module=module)


@on_ranks(2)
def test_lightnings_own_detection_ends_all_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    data = poisoned(rank, [1.0] * 6 + [1e4] + [1.0] * 3, clean=False, on=1)
    with pytest.raises(TrainingSpikeException, match="batch 6"):
        train(3, data, tmp_path, SpikeDetection(warmup=3, exclude_batches_path=tmp_path / "batches"))


@pytest.mark.wide
def test_virtual_ranks_leave_out_the_same_steps_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Also ranks that compute no poisoned virtual rank."""
    runs = [(1, True), (1, False), (2, False), (3, False)]
    found = [spawn(virtual, w, tmp_path, clean, init_process_group=False, timeout_s=60)[0] for w, clean in runs]
    for (world, _), (checkpoint, skipped) in zip(runs[1:], found[1:], strict=True):
        assert_same(checkpoint, found[0][0], f"{world} ranks")
        assert skipped == 4


def partitioned(rank: int, world_size: int, tmp_path: Path, options: dict[str, Any], clean: bool) -> Any:
    quiet()
    factors, guard = with_poison(16, 4, 12), SpikeGuard(WINDOW)
    strategy = ZeROStrategy(2, sharding={"min_unit_numel": 0}, checkpoint="sharded", **options)
    data = poisoned(0, factors, clean=clean)
    return train(strategy, data, tmp_path, guard, module=Plain()), guard.skipped


class Plain(Noisy):
    """Without what a pipeline computes per micro-batch; of even widths."""

    def build(self) -> None:
        Net.build(self)
        for block in self.blocks:
            block.wide, block.narrow = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)


PARALLEL: dict[str, Any] = {
    "pipeline": {"pipeline": 2},
    "tensor": {"tensor": {"size": 2, "plan": {"blocks.*.wide": "column", "blocks.*.narrow": "row"}}},
}


@pytest.mark.wide
@pytest.mark.parametrize("parallel", PARALLEL.values(), ids=PARALLEL)
def test_partitioned_models(parallel: dict[str, Any], tmp_path: Path) -> None:
    runs = [
        spawn(partitioned, 2, tmp_path, {"parallel": parallel}, clean, init_process_group=False, timeout_s=60)[0]
        for clean in (False, True)
    ]
    assert_same(runs[0][0], runs[1][0], str(parallel))
    assert (runs[0][1], runs[1][1]) == (4, 0)
