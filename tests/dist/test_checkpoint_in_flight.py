"""What happens between the call of a background save and its end: nothing of it is in the checkpoint, or lost."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ls_strategy import SpikeGuard, ZeROStrategy
from ls_strategy.checkpoint.describe import verify_all
from ls_strategy.checkpoint.place import CheckpointPath
from ls_strategy.errors import RankFailedError
from ls_strategy.testing import spawn
from tests.dist.ranks import Net, assert_equal, fit, on_ranks, saved, weights
from tests.dist.test_checkpoint_async import same, slow_writes
from tests.dist.test_offload import NORM
from tests.dist.test_rewind import BACK, WINDOW, data, kept, steps_with_poison
from tests.dist.test_spike_guard import Noisy, assert_same, train
from tests.marks import wide
from tests.models import Case, PrivateNet, loader, quiet, trainer_of

STEPS = 5
OFFLOAD = {"offload.optimizer": "cpu"}
SETTINGS: dict[str, Case] = {
    "stage 0": Case(stage=0, accumulate=2, **NORM),
    "stage 1": Case(stage=1, optimizer="sgd"),
    "stage 2": Case(stage=2, traits=("private", "tied", "frozen", "buffers")),
    "stage 3": Case(stage=3, accumulate=2, **NORM),
    "stage 0, fp16": Case(stage=0, precision="16-mixed"),
    "stage 2, fp16": Case(stage=2, precision="16-true", accumulate=2, **NORM),
    "stage 3, fp16": Case(stage=3, precision="16-mixed", traits=("private",)),
    "stage 2, two optimizers": Case(stage=2, optimizer="two", accumulate=2, **NORM),
    "stage 1, states in host memory": Case(stage=1, traits=("private",), options=(*OFFLOAD.items(),)),
    "stage 3, states in host memory, fp16": Case(stage=3, precision="16-mixed", options=(*OFFLOAD.items(),)),
    "stage 2, stepped on the device": Case(stage=2, options=(*OFFLOAD.items(), ("offload.step_on", "device"))),
    "stage 3, stepped on the device": Case(
        stage=3, traits=("private",), accumulate=2, options=(*OFFLOAD.items(), ("offload.step_on", "device"))
    ),
    "stage 3, states on NVMe": Case(stage=3, traits=("private",), options=(("offload.optimizer", "nvme"),)),
}
FP16 = ("precision.loss_scale.initial_power", 22), ("precision.loss_scale.hysteresis", 1)
"""The first steps overflow."""


def case_of(setting: str, folder: Path, **options: Any) -> Case:
    given = SETTINGS[setting]
    more = {"offload.nvme_path": str(folder / "nvme"), "checkpoint.format": "sharded", "checkpoint.background": True}
    scale = FP16 if given.precision.startswith("16") else ()
    return replace(given, fused=None, steps=STEPS, options=(*given.options, *more.items(), *scale, *options.items()))


def run(case: Case, world_size: int, *callbacks: Any, ckpt: Path | None = None) -> tuple[PrivateNet, dict[str, Any]]:
    """The module, and its weights, after a fit."""
    module = PrivateNet(case)
    trainer = trainer_of(case, world_size, callbacks=[*callbacks], enable_checkpointing=bool(callbacks))
    trainer.fit(module, loader(case, world_size), ckpt_path=ckpt)
    return module, {k: v.clone() for k, v in trainer.strategy.lightning_module_state_dict().items()}


def values(folder: Path) -> dict[str, Any]:
    """What training has changed."""
    checkpoint = saved(folder)
    keys = ("state_dict", "optimizer_states", "loops", "global_step", "ZeROPrecision")
    return {k: checkpoint[k] for k in keys if k in checkpoint}


class SavesBatches(pl.Callback):
    """Saves after every batch, also where a step takes several."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.save_checkpoint(self.folder / f"{batch_idx}.ckpt")


def resumes(rank: int, world_size: int, folder: Path, settings: list[str]) -> list[str]:
    """What a run that continues from one of the saves has that the uninterrupted one had not."""
    quiet()
    problems: list[str] = []
    for setting in settings:
        case, root = case_of(setting, folder), folder / setting
        every = ModelCheckpoint(root, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        with slow_writes(0.002):
            trusted, expected = run(case, world_size, every)
        undisturbed, _ = run(case, world_size)
        if trusted.result.losses != undisturbed.result.losses:
            problems.append(f"{setting}: losses of the run that saves")
        per_step = case.accumulate
        taken = sorted(int(path.stem.partition("=")[2]) for path in root.iterdir())
        assert len(taken) > 1
        for number, step in enumerate(taken[:-1], 1):
            resumed, actual = run(case, world_size, ckpt=root / f"step={step}.ckpt")
            if resumed.result.losses != trusted.result.losses[number * per_step :]:
                problems.append(f"{setting}, from step {step}: losses")
            if rank == 0 and not same(actual, expected):
                problems.append(f"{setting}, from step {step}: weights")
    return problems


@pytest.mark.parametrize("settings", [["stage 3, fp16"], wide([*SETTINGS])], ids=["few", "all"])
def test_a_run_resumes_from_each_save_with_the_bits_of_the_uninterrupted_one(
    settings: list[str], tmp_path: Path
) -> None:
    for problems in spawn(resumes, 2, tmp_path, settings, init_process_group=False, timeout_s=170):
        assert problems == []


def saves_batches(rank: int, world_size: int, folder: Path, settings: list[str]) -> list[str]:
    """What differs between saves that training waits for and those that it overtakes, after every batch."""
    quiet()
    problems: list[str] = []
    for setting in settings:
        kinds = {background: folder / f"{setting}-{background}" for background in (False, True)}
        for background, root in kinds.items():
            case = case_of(setting, folder, **{"checkpoint.background": background})
            with slow_writes(0.001):
                run(case, world_size, SavesBatches(root))
        for path in sorted(kinds[False].iterdir()) if rank == 0 else ():
            a, b = values(path), values(kinds[True] / path.name)
            problems += [f"{setting}, {path.name}: {key}" for key in a if not same(a[key], b[key])]
    return problems


@pytest.mark.wide
def test_saves_after_every_batch_are_those_that_training_waits_for(tmp_path: Path) -> None:
    """Also within a step of several batches, whose gradients are not in a checkpoint."""
    chosen = [name for name, case in SETTINGS.items() if case.accumulate > 1]
    for problems in spawn(saves_batches, 2, tmp_path, chosen, init_process_group=False, timeout_s=170):
        assert problems == []


@pytest.mark.wide
@on_ranks(2)
def test_a_run_that_goes_back_while_states_on_nvme_are_saved(rank: int, world_size: int, tmp_path: Path) -> None:
    """The saves of the steps that remain, and the run, are those of a run whose data never had the spikes."""
    factors = steps_with_poison(20, 3, 6)

    def one(name: str, factors: Any, steps: Any, *guards: Any) -> dict[str, Any]:
        strategy = ZeROStrategy(
            3,
            sharding={"min_unit_numel": 0},
            offload={"optimizer": "nvme", "nvme_path": str(tmp_path / name / "nvme"), "nvme_allow_ram": True},
            checkpoint={"format": "sharded", "background": True},
        )
        every = ModelCheckpoint(tmp_path / name / "saved", "{step}", every_n_train_steps=1, save_top_k=-1)
        with slow_writes(0.002):
            loader = data(rank, factors, steps)
            return train(strategy, loader, tmp_path, every, *guards, enable_checkpointing=True, module=Noisy())

    guard = SpikeGuard(WINDOW, rewind_steps=BACK)
    found = one("spikes", factors, None, guard)
    expected = one("clean", factors, kept(factors))
    assert guard.undone > 0
    assert_same(found, expected, "at the end")
    for step in range(1, len(kept(factors)) + 1):
        plain, clean = (last_of(tmp_path / name / "saved", step) for name in ("spikes", "clean"))
        assert_same(saved(plain), saved(clean), f"step {step}")


def last_of(folder: Path, step: int) -> Path:
    """The newest of a step: that of a step which was undone keeps its name, and the next one gets another."""
    return max(folder.glob(f"step={step}[.-]*ckpt"), key=lambda path: (len(path.name), path.name))


class Raises(Net):
    """Raises in the step after a save, on all ranks or on one."""

    def __init__(self, ranks: set[int], path: Path) -> None:
        super().__init__()
        self.ranks, self.path = ranks, path

    def training_step(self, batch: Any, i: int) -> Any:
        if i == 2:
            self.trainer.save_checkpoint(self.path)
            if self.global_rank in self.ranks:
                raise ValueError("after the save")
        return super().training_step(batch, i)


@pytest.mark.parametrize("ranks", [{0, 1}, {0}, {1}], ids=["all", "first", "other"])
@pytest.mark.parametrize("format", ["sharded", "file"])
@pytest.mark.wide
@on_ranks(2)
def test_an_error_in_the_next_step_leaves_a_whole_checkpoint_or_none(
    rank: int, world_size: int, format: str, ranks: set[int], tmp_path: Path
) -> None:
    path = tmp_path / "x.ckpt"
    strategy = ZeROStrategy(
        3, sharding={"min_unit_numel": 0}, checkpoint={"format": format, "background": True}, explain_waits_after=None
    )
    with slow_writes(0.02), pytest.raises(ValueError if rank in ranks else RankFailedError, match="after the save"):
        fit(strategy, Raises(ranks, path), default_root_dir=tmp_path)
    if CheckpointPath(path).taken:
        assert verify_all(path) == []
        assert saved(path)["global_step"] == 2
    else:
        assert ranks != {0, 1}, "all ranks have ended together, and could have completed it"


class HasLock(pl.Callback):
    """Its state on rank 0 can neither be copied nor saved."""

    def state_dict(self) -> dict[str, Any]:
        return {"lock": threading.Lock()} if self.on_this_rank else {}

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.on_this_rank = trainer.is_global_zero


@pytest.mark.parametrize("format", ["sharded", "file"])
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.wide
@on_ranks(2)
def test_what_cannot_be_saved_is_an_error_of_the_save_on_all_ranks(
    rank: int, world_size: int, background: bool, format: str, tmp_path: Path
) -> None:
    strategy = ZeROStrategy(2, checkpoint={"format": format, "background": background, "on_error": "continue"})
    every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1)
    module = Net()
    with pytest.warns(UserWarning, match="lock") if rank == 0 else nullcontext():
        fit(strategy, module, callbacks=[HasLock(), every], enable_checkpointing=True)
    assert len(module.losses) == 8
    assert not list(tmp_path.iterdir())


class Trains(Net):
    """Trains another model, which is saved in the background too, while its own save is in flight."""

    def __init__(self, folder: Path, *, other: bool) -> None:
        super().__init__()
        self.folder, self.other = folder, other

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.global_step == 3:
            self.trainer.save_checkpoint(self.folder / "outer.ckpt")
            if self.other:
                inner = Trains(self.folder / "inner", other=False)
                strategy = ZeROStrategy(2, checkpoint={"format": "sharded", "background": True})
                fit(strategy, inner, default_root_dir=self.folder)


@pytest.mark.wide
@pytest.mark.parametrize("world", [1, 2])
def test_another_fit_in_the_same_process_disturbs_no_save(world: int, tmp_path: Path) -> None:
    spawn(nested_fits, world, tmp_path, init_process_group=False, timeout_s=60)


def nested_fits(rank: int, world_size: int, tmp_path: Path) -> None:
    quiet()
    found = []
    for name in (False, True):
        module = Trains(tmp_path / str(name), other=name)
        strategy = ZeROStrategy(3, sharding={"min_unit_numel": 0}, checkpoint={"format": "sharded", "background": True})
        with slow_writes(0.01):
            fit(strategy, module, default_root_dir=tmp_path)
        found.append((module.losses, weights(module), saved(tmp_path / str(name) / "outer.ckpt")["state_dict"]))
    for what, plain, nested in zip(("losses", "weights", "saved"), *found, strict=True):
        assert_equal(nested, plain, what)
    assert verify_all(tmp_path / "True" / "inner" / "outer.ckpt") == []


def test_states_are_those_of_the_call_whatever_is_loaded_then(tmp_path: Path) -> None:
    spawn(loads_after_saves, 2, tmp_path, init_process_group=False, timeout_s=60)


class Loads(pl.Callback):
    """After a save: loads other weights and states, trains them with an optimizer of its own, and clears gradients."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            pl_module.load_state_dict({k: v * 0.5 for k, v in pl_module.state_dict().items()})
        elif batch_idx == 2:
            optimizer = trainer.strategy.optimizers[0]
            state = trainer.strategy.broadcast(trainer.strategy.optimizer_state(optimizer))
            for each in state["state"].values():
                each["exp_avg"].mul_(2)
            optimizer.load_state_dict(state)
        elif batch_idx == 3:
            for p in pl_module.parameters():
                p.grad = torch.ones_like(p)
            torch.optim.SGD(pl_module.parameters(), lr=0.1).step()
        elif batch_idx == 4:
            trainer.optimizers[0].zero_grad(set_to_none=False)
            for group in trainer.optimizers[0].param_groups:
                group["lr"] = 0.5


def loads_after_saves(rank: int, world_size: int, tmp_path: Path) -> None:
    quiet()
    for setting in ("stage 2", "stage 1, states in host memory"):
        roots = {background: tmp_path / f"{setting}-{background}" for background in (False, True)}
        for background, root in roots.items():
            case = case_of(setting, tmp_path, **{"checkpoint.background": background})
            with slow_writes(0.002):
                run(case, world_size, SavesBatches(root), Loads())
        for number in range(STEPS) if rank == 0 else ():
            plain, behind = (values(root / f"{number}.ckpt") for root in roots.values())
            for key in plain:
                assert same(plain[key], behind[key]), f"{setting}, batch {number}: {key}"
