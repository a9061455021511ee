"""`SpikeGuard(rewind_steps=...)`: a run that goes back ends with the bits of a run whose data never had those batches.

The trusted runs are those of this package on the same ranks without the callback, on data without what was left out.
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
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ls_strategy import Monitor, Muon, PlanError, ShardedEMA, SpikeGuard, StateError, ZeROPrecision, ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import WIDTH, assert_equal, on_ranks
from tests.dist.test_spike_guard import NAN, PARALLEL, Noisy, Plain, SaveAfter, assert_same, flat, train
from tests.models import quiet

WINDOW = 8
BACK = 3
"""Steps from one copy to the next."""


def steps_with_poison(good: int, count: int, seed: int) -> list[float]:
    """Factors of the loss by step, not 1 for ``count`` steps at random places after the first ten."""
    rng = random.Random(seed)
    factors = [1.0] * good
    for n in range(count):
        factors.insert(rng.randint(WINDOW // 2 + 2 * BACK, len(factors)), (1e5, NAN, -NAN, float("inf"))[n % 4])
    return factors


def kept(factors: Sequence[float], back: int = BACK) -> list[int]:
    """The steps that remain if every spike goes back to the last multiple of ``back`` of those before."""
    found: list[int] = []
    for i, factor in enumerate(factors):
        if factor == 1:
            found.append(i)
        else:
            del found[len(found) // back * back :]
    return found


def data(rank: int, factors: Sequence[float], steps: Sequence[int] | None = None, every: int = 1) -> DataLoader:
    """Batches of some steps, ``every`` per step. What a step has depends on its number and the rank alone."""
    x, f = [], []
    for step in range(len(factors)) if steps is None else steps:
        for part in range(every):
            seeded = torch.Generator().manual_seed((step * 10 + part) * 100 + rank)
            x.append(torch.randn(4, WIDTH, generator=seeded))
            f.append(torch.full((4,), factors[step] if part == every - 1 else 1.0))
    xs = torch.cat(x)
    return DataLoader(TensorDataset(xs, torch.sin(xs.roll(1, 1)), torch.cat(f)), batch_size=4)


def compare(
    rank: int, folder: Path, strategies: Sequence[Any], factors: Sequence[float], what: str, **options: Any
) -> SpikeGuard:
    """Train with and without what is left out, and compare everything that training has changed."""
    every, back = options.get("accumulate_grad_batches", 1), BACK
    module = options.pop("module", Noisy)
    callbacks, validation = options.pop("callbacks", lambda: ()), options.pop("validation", None)
    guard, extras = SpikeGuard(WINDOW, rewind_steps=back), (callbacks(), callbacks())
    options = {**options, "validation": validation}
    found = train(
        strategies[0], data(rank, factors, every=every), folder, guard, *extras[0], module=module(), **options
    )
    clean = data(rank, factors, kept(factors, back), every)
    expected = train(strategies[1], clean, folder, *extras[1], module=module(), **options)
    assert found["global_step"] == len(kept(factors, back)), what
    assert_same(found, expected, what)
    if "ema_state_dict" in expected:
        assert_equal(flat(found["ema_state_dict"]), flat(expected["ema_state_dict"]), f"{what}: average")
    assert guard.skipped == sum(factor != 1 for factor in factors)
    assert guard.undone == len(factors) - guard.skipped - len(kept(factors, back))
    return guard


@pytest.mark.parametrize("world", [1, 2])
def test_a_run_that_goes_back_ends_as_if_the_data_never_had_those_batches(world: int, tmp_path: Path) -> None:
    spawn(bits, world, tmp_path, init_process_group=False, timeout_s=60)


def bits(rank: int, world_size: int, tmp_path: Path) -> None:
    quiet()
    for stage, every, seed in ((0, 1, 1), (1, 2, 2), (2, 1, 3), (3, 2, 4)):
        options = {"accumulate_grad_batches": every, "gradient_clip_val": 0.5 if stage % 2 else None}
        factors = steps_with_poison(20, 3, seed)
        assert compare(rank, tmp_path, (stage, stage), factors, f"stage {stage}", **options).undone > 0


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "16-true", "bf16-true", "64-true"])
@pytest.mark.wide
@on_ranks(2)
def test_every_precision_offload_and_average(rank: int, world_size: int, precision: str, tmp_path: Path) -> None:
    def strategy() -> ZeROStrategy:
        return ZeROStrategy(
            3 if precision in ("16-mixed", "64-true") else 1,
            precision={"loss_scale": {"initial_power": 12, "window": 5, "hysteresis": 1}},
            precision_plugin=ZeROPrecision(precision),
            checkpoint="file",
            sharding={"min_unit_numel": 0},
            offload={"optimizer": "cpu"},
        )

    factors = steps_with_poison(24, 3, 6)
    compare(
        rank,
        tmp_path,
        (strategy(), strategy()),
        factors,
        precision,
        callbacks=lambda: [ShardedEMA(0.9, every_n_steps=2)],
    )


class Whole(Noisy):
    """Matrices are stepped by the rank that owns them."""

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.blocks.parameters() if p.ndim == 2]
        others = [p for p in self.parameters() if all(p is not m for m in matrices)]
        return Muon([{"params": matrices}, {"params": others, "use_muon": False}], lr=1e-2, ns_dtype="fp32")


PLACES: dict[str, dict[str, Any]] = {
    "int8": {"stage": 1, "precision": {"moments": "int8"}},
    "bf16": {"stage": 3, "precision": {"moments": "bf16"}, "offload": {"optimizer": "cpu", "parameters": "cpu"}},
    "nvme": {"stage": 3, "offload": {"optimizer": "nvme", "nvme_allow_ram": True}},
    "owners": {"stage": 2},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.wide
@on_ranks(2)
def test_states_go_back_as_they_are_stored(rank: int, world_size: int, place: str, tmp_path: Path) -> None:
    def strategy() -> ZeROStrategy:
        options = {**PLACES[place], "sharding": {"min_unit_numel": 0}, "checkpoint": "file"}
        if place == "nvme":
            options["offload"] = {**options["offload"], "nvme_path": str(tmp_path / "nvme")}
        return ZeROStrategy(**options)

    factors = steps_with_poison(20, 3, 6)
    module = Whole if place == "owners" else Noisy
    compare(rank, tmp_path, (strategy(), strategy()), factors, place, module=module)


def partitioned(rank: int, world_size: int, tmp_path: Path, options: dict[str, Any], clean: bool) -> Any:
    quiet()
    factors, guard = steps_with_poison(20, 3, 12), SpikeGuard(WINDOW, deviations=50.0, rewind_steps=BACK)
    strategy = ZeROStrategy(2, sharding={"min_unit_numel": 0}, checkpoint="sharded", **options)
    loader = data(0, factors, kept(factors) if clean else None)
    return train(strategy, loader, tmp_path, guard, module=Plain()), guard.undone


@pytest.mark.parametrize("parallel", PARALLEL.values(), ids=PARALLEL)
@pytest.mark.wide
def test_partitioned_models_go_back(parallel: dict[str, Any], tmp_path: Path) -> None:
    runs = [
        spawn(partitioned, 2, tmp_path, {"parallel": parallel}, clean, init_process_group=False, timeout_s=60)[0]
        for clean in (False, True)
    ]
    assert_same(runs[0][0], runs[1][0], str(parallel))
    assert runs[0][1] > 0
    assert runs[1][1] == 0


class Virtual(Noisy):
    """Steps of 4 samples for each of 4 virtual ranks, the last of which is poisoned."""

    def __init__(self, factors: Sequence[float], steps: Sequence[int]) -> None:
        super().__init__()
        self.factors, self.steps = factors, steps

    def train_dataloader(self) -> DataLoader:
        x, f = [], []
        for step in self.steps:
            factor = torch.ones(4, 4)
            factor[:, -1] = self.factors[step]
            x.append(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)))
            f.append(factor.flatten())
        xs = torch.cat(x)
        dataset = TensorDataset(xs, torch.sin(xs.roll(1, 1)), torch.cat(f))
        strategy: Any = self.trainer.strategy
        sampler = DistributedSampler(dataset, shuffle=False, **strategy.distributed_sampler_kwargs)
        return DataLoader(dataset, batch_size=4, sampler=sampler)


def virtual(rank: int, world_size: int, tmp_path: Path, stage: int, clean: bool) -> tuple[dict[str, Any], int]:
    quiet()
    factors = steps_with_poison(20, 3, 11)
    guard = SpikeGuard(WINDOW, rewind_steps=BACK)
    strategy = ZeROStrategy(stage, parallel={"virtual_ranks": 4}, checkpoint="file")
    module = Virtual(factors, kept(factors) if clean else range(len(factors)))
    return train(strategy, None, tmp_path, guard, use_distributed_sampler=True, module=module), guard.skipped


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.wide
def test_any_number_of_ranks_goes_back_in_the_same_steps(stage: int, tmp_path: Path) -> None:
    runs = [(1, True), (1, False), (2, False), (4, False)]
    found = [spawn(virtual, w, tmp_path, stage, c, init_process_group=False, timeout_s=60)[0] for w, c in runs]
    for (world, _), (checkpoint, skipped) in zip(runs[1:], found[1:], strict=True):
        assert_same(checkpoint, found[0][0], f"stage {stage}, {world} ranks")
        assert skipped == 3


@on_ranks(2)
def test_training_does_not_go_back_into_the_epoch_before(rank: int, world_size: int, tmp_path: Path) -> None:
    """With Lightning's average of the weights. The first epoch ends after step 10, the last copy in it is of step 9."""
    factors = [NAN, 1.0, NAN] + [1.0] * 10
    guard = SpikeGuard(WINDOW, rewind_steps=BACK)
    averages = EMAWeightAveraging(decay=0.7), EMAWeightAveraging(decay=0.7)
    found = train(1, data(rank, factors), tmp_path, averages[0], guard, max_epochs=2)
    expected = train(1, data(rank, factors, range(3, len(factors))), tmp_path, averages[1], max_epochs=2)
    assert (found["global_step"], guard.undone) == (20, 2)
    assert_same(found, expected, "two epochs")
    assert_equal(flat(found["current_model_state"]), flat(expected["current_model_state"]), "weights")


@on_ranks(2)
def test_a_checkpoint_of_an_undone_step_is_saved_again(rank: int, world_size: int, tmp_path: Path) -> None:
    factors = [1.0] * 8 + [NAN] + [1.0] * 3  # the checkpoint of step 8 is saved, and the steps from 6 on are undone

    def run(name: str, loader: DataLoader, *callbacks: Any) -> dict[str, Any]:
        saves = ModelCheckpoint(tmp_path / name, "{step}", every_n_train_steps=2, save_last=True)
        train(2, loader, tmp_path, saves, *callbacks, enable_checkpointing=True)
        assert sorted(path.name for path in (tmp_path / name).iterdir()) == ["last.ckpt", "step=8.ckpt"]
        return torch.load(tmp_path / name / "step=8.ckpt", weights_only=False)

    guard = SpikeGuard(WINDOW, deviations=50.0, rewind_steps=BACK)
    with pytest.warns(UserWarning, match=r"undone are kept.*last.ckpt.*step=8.ckpt") if rank == 0 else nullcontext():
        found = run("poisoned", data(rank, factors), guard)
    assert guard.undone == 2
    assert_same(found, run("clean", data(rank, factors, kept(factors))), "step 8")


class Unfreeze(BaseFinetuning):
    """Adds a block to the optimizer in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.blocks[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.blocks[0], optimizer, lr=1e-3)


class Partly(Noisy):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


@on_ranks(2)
def test_callbacks_that_went_back_serve_another_fit(rank: int, world_size: int, tmp_path: Path) -> None:
    """Lightning's callbacks for fine-tuning take ``load_state_dict`` for the begin of a fit that resumes."""
    factors = [1.0] * 8 + [NAN] + [1.0] * 3
    callbacks = [SpikeGuard(WINDOW, deviations=50.0, rewind_steps=BACK), Unfreeze()]

    def run(factors: Sequence[float], *callbacks: Any, steps: Sequence[int] | None = None) -> dict[str, Any]:
        return train(3, data(rank, factors, steps), tmp_path, *callbacks, module=Partly(), max_epochs=2)

    expected = run(factors, Unfreeze(), steps=kept(factors))
    for what in ("first fit", "second fit"):
        assert_same(run(factors, *callbacks), expected, what)


@on_ranks(2)
def test_monitor_reports_the_steps_that_remain(rank: int, world_size: int, tmp_path: Path) -> None:
    """It records the spike's own step in full, from which training goes back behind the begin of the recording."""
    logger = CSVLogger(tmp_path, name="", version=f"{rank}")
    factors = [1.0] * 10 + [NAN] + [1.0] * 12
    guard = SpikeGuard(WINDOW, deviations=50.0, rewind_steps=BACK)
    train(2, data(rank, factors), tmp_path, guard, Monitor(), logger=logger, log_every_n_steps=4)
    assert guard.undone == 1
    if rank == 0:
        logger.save()
        with (tmp_path / "0" / "metrics.csv").open() as file:
            rows = [{name: float(v) for name, v in row.items() if v} for row in csv.DictReader(file)]
        times = [row for row in rows if "zero_time/communication_ms" in row]
        assert len(times) >= 4
        assert all(value >= 0 for row in times for value in row.values())


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_a_run_that_resumes_at_a_copy_goes_back_as_an_undisturbed_one(
    rank: int, world_size: int, stage: int, tmp_path: Path
) -> None:
    factors = [*[1.0] * 7, NAN, *[1.0] * 4, NAN, *[1.0] * 8]
    loader, path = data(rank, factors), tmp_path / "middle.ckpt"
    first, resumed = SpikeGuard(WINDOW, rewind_steps=BACK), SpikeGuard(WINDOW, rewind_steps=BACK)
    expected = train(stage, loader, tmp_path, first, SaveAfter(10, path))  # of step 9, where a copy is
    found = train(stage, loader, tmp_path, resumed, ckpt=path)
    assert_same(found, expected, "resumed")
    assert resumed.state_dict() == first.state_dict()
    assert first.undone == 2
    loops = [each["loops"]["fit_loop"]["epoch_loop.state_dict"] for each in (found, expected)]
    assert loops[0] == loops[1]


@on_ranks(2)
def test_returns_to_one_copy_are_bounded_and_logged(rank: int, world_size: int, tmp_path: Path) -> None:
    factors = [1.0] * 5 + [NAN, 1.0, NAN, 1.0, NAN] + [1.0] * 3  # never as far as step 6
    logger = CSVLogger(tmp_path, name="", version=f"{rank}")
    guard = SpikeGuard(WINDOW, max_skips=2, rewind_steps=BACK)
    with (
        pytest.warns(UserWarning, match="go back to step 3") if rank == 0 else nullcontext(),
        pytest.raises(StateError, match=r"max_skips=2.*go back to step 3 once more.*resume from an earlier"),
    ):
        train(2, data(rank, factors), tmp_path, guard, logger=logger)
    if rank == 0:
        logger.save()
        with (tmp_path / "0" / "metrics.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["zero_spikes/undone_steps"]]
        assert [(row["step"], row["zero_spikes/undone_steps"]) for row in rows] == [("5", "2.0"), ("4", "3.0")]


@on_ranks(1)
def test_what_a_copy_would_not_hold_is_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    late = ZeROStrategy(2, offload={"optimizer": "cpu", "delay_after": 2})
    with pytest.raises(PlanError, match=r"rewind_steps=3.*delay_after=2.*Leave one of"):
        train(late, data(0, [1.0] * 3), tmp_path, SpikeGuard(WINDOW, rewind_steps=3))
