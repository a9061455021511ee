"""Parameters that join an optimizer in the middle of a fit, with what else a fit has: drives, saves, precisions, ranks.

Trusted run: a plain Trainer on one process, as in `tests.dist.test_parameter_groups`.
"""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from ls_strategy.config import nested
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import (
    Net,
    assert_close,
    assert_equal,
    fit,
    global_batches,
    mean_over_ranks,
    on_ranks,
    quiet,
    trainer_of,
    weights,
)
from tests.dist.test_parameter_groups import (
    EPOCHS,
    OPTIONS,
    STEPS,
    AnotherOptimizer,
    AtEpochs,
    BothStep,
    ByCallback,
    Joins,
    Outcome,
    assert_equal_outcomes,
    outcome,
    trusted,
)
from tests.dist.trusted import once

pytestmark = pytest.mark.wide


def drive(rank: int, world_size: int, expected: Outcome, path: str) -> None:
    quiet()
    for stage in (1, 3):
        options: dict[str, Any] = {
            "offload.optimizer": "nvme",
            "offload.nvme_path": path,
            "offload.nvme_allow_ram": True,
        }
        if stage == 3:
            options["offload.parameters"] = "nvme"
        strategy = ZeROStrategy(stage, **nested({"sharding.min_unit_numel": 0, **options}))  # type: ignore[arg-type]
        assert_equal_outcomes(outcome(rank, world_size, ByCallback(), strategy), expected, f"stage {stage}")
        if stage == 1:
            gc.collect()
            engines = [each for each in gc.get_objects() if isinstance(each, Engine)]
            assert engines == [strategy.engine], "an engine that was followed is still there"


def test_with_states_on_a_drive_and_nothing_is_left_of_the_engine_before(tmp_path: Path) -> None:
    expected = once(trusted, 1, [ByCallback], {})[0]["ByCallback"]
    spawn(drive, 2, expected, str(tmp_path), timeout_s=90)


def activations(rank: int, world_size: int, expected: Outcome) -> None:
    quiet()
    for stage in (1, 3):
        for options in ({"activations.checkpointing": "full"}, {"activations.offload": "cpu"}):
            strategy = ZeROStrategy(stage, **nested({"sharding.min_unit_numel": 0, **options}))  # type: ignore[arg-type]
            assert_equal_outcomes(outcome(rank, world_size, AtEpochs(), strategy), expected, f"{stage}, {options}")


def test_with_activations_that_are_recomputed_or_offloaded() -> None:
    expected = once(trusted, 1, [AtEpochs], {})[0]["AtEpochs"]
    spawn(activations, 2, expected, timeout_s=90)


class Saves(AtEpochs):
    """Between the change and the step that follows it, and in the background at the end of epochs."""

    path = ""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        if self.path and self.current_epoch == 2:
            self.trainer.save_checkpoint(self.path)


class Continues(Joins):
    """Has the first blocks from the start."""

    def __init__(self, blocks: int) -> None:
        self.known = blocks
        super().__init__()

    def configure_optimizers(self) -> Any:
        groups: list[dict[str, Any]] = [{"params": [p for p in self.parameters() if p.requires_grad]}]
        for number, block in enumerate(self.blocks[: self.known]):
            block.requires_grad_(True)
            groups.append({"params": list(block.parameters()), "lr": 0.01 * (number + 1)})
        return torch.optim.AdamW(groups, lr=self.lr, eps=1e-3, weight_decay=0.1, fused=True)

    def on_train_epoch_start(self) -> None:
        if self.known < self.current_epoch <= 3:
            self.unfreeze(self.blocks[self.current_epoch - 1], 0.01 * self.current_epoch)


def around(rank: int, world_size: int, strategies: list[Any], path: str) -> list[Outcome]:
    """Train and save; then go on from each of the checkpoints."""
    data = global_batches(rank, world_size, STEPS)
    options: dict[str, Any] = {"use_distributed_sampler": False, "max_epochs": EPOCHS}
    module = Saves()
    module.path = f"{path}/between.ckpt"
    each = ModelCheckpoint(path, every_n_epochs=1, save_top_k=-1)
    fit(strategies[0], module, data, callbacks=[each], enable_checkpointing=True, **options)
    results: list[Outcome] = []
    for checkpoint, strategy in zip((module.path, f"{path}/epoch=1-step=6.ckpt"), strategies[1:], strict=True):
        rest = Continues(2 if checkpoint == module.path else 1)
        fit(strategy, rest, data, checkpoint, **options)
        results.append((mean_over_ranks(rest.losses), rest.seen, weights(rest)))
    return results


def trusted_around(rank: int, world_size: int, path: str) -> list[Outcome]:
    quiet()
    return around(0, 1, ["auto", "auto", "auto"], path)


def saves(rank: int, world_size: int, expected: list[Outcome], path: str) -> None:
    quiet()
    for name in ("zero1", "zero3, small units", "zero3_offload"):
        strategies = [
            ZeROStrategy(**nested({"checkpoint.background": True, **OPTIONS[name]})),
            *(ZeROStrategy(2) for _ in range(2)),
        ]
        for number, actual in enumerate(around(rank, world_size, strategies, f"{path}/{name}")):
            assert_equal_outcomes(actual, expected[number], f"{name}, checkpoint {number}")


def test_saves_around_the_change(tmp_path: Path) -> None:
    """Between the change of groups and the step after it, and in the background at the ends of epochs."""
    expected = spawn(trusted_around, 1, str(tmp_path / "trusted"), init_process_group=False)[0]
    spawn(saves, 2, expected, str(tmp_path), timeout_s=100)


class AtValidation(Joins):
    """Before the checkpoint that follows the validation."""

    def on_validation_epoch_end(self) -> None:
        if self.current_epoch == 1 and not self.trainer.sanity_checking:
            self.unfreeze(self.blocks, 0.02)


def validates(rank: int, world_size: int, strategies: dict[str, Any], path: str) -> list[Outcome]:
    results: list[Outcome] = []
    for name, strategy in strategies.items():
        module = AtValidation()
        data, each = global_batches(rank, world_size, STEPS), ModelCheckpoint(f"{path}/{name}", save_top_k=-1)
        options: dict[str, Any] = {"use_distributed_sampler": False, "max_epochs": EPOCHS}
        trainer = trainer_of(strategy, callbacks=[each], enable_checkpointing=True, **options)
        trainer.fit(module, data, data)
        results.append((mean_over_ranks(module.losses), module.seen, weights(module)))
    return results


def trusted_validation(rank: int, world_size: int, path: str) -> list[Outcome]:
    quiet()
    return validates(0, 1, {"trusted": "auto"}, path)


def validation(rank: int, world_size: int, expected: list[Outcome], path: str) -> None:
    quiet()
    strategies = {
        name: ZeROStrategy(**nested(OPTIONS[name])) for name in ("zero1", "zero3, small units", "zero3_offload")
    }
    for name, actual in zip(strategies, validates(rank, world_size, strategies, path), strict=True):
        assert_equal_outcomes(actual, expected[0], name)


def test_a_change_between_validation_and_checkpoint(tmp_path: Path) -> None:
    expected = spawn(trusted_validation, 1, str(tmp_path), init_process_group=False)[0]
    spawn(validation, 2, expected, str(tmp_path), timeout_s=90)


def precisions(rank: int, world_size: int, precision: str, kind: type[Any]) -> None:
    quiet()
    results: dict[int, tuple[list[float], dict[str, Any]]] = {}
    for stage in (1, 2, 3):
        module = kind()
        data = global_batches(rank, world_size, STEPS)
        strategy = ZeROStrategy(stage, sharding={"min_unit_numel": 0}, precision_plugin=ZeROPrecision(precision))  # type: ignore[arg-type]
        fit(strategy, module, data, use_distributed_sampler=False, max_epochs=EPOCHS)
        results[stage] = mean_over_ranks(module.losses), weights(module)
        assert all(map(math.isfinite, results[stage][0]))
    for stage in (2, 3):
        assert results[stage][0] == results[1][0]
        assert_equal(results[stage][1], results[1][1], f"stage {stage}")


@pytest.mark.parametrize("kind", [AtEpochs, BothStep])
@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true"])
def test_stages_agree_in_16_bit(precision: str, kind: type[Any]) -> None:
    """To the last bit, with the loss scale going on."""
    spawn(precisions, 2, precision, kind, timeout_s=90)


class Keeps(Net):
    """The same optimizer in every fit."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3, fused=True)

    def configure_optimizers(self) -> Any:
        return self.kept


@on_ranks(2, timeout_s=90, init_process_group=True)
def test_an_optimizer_that_is_kept_for_a_second_fit_keeps_its_states(rank: int, world_size: int) -> None:
    data = global_batches(rank, world_size, STEPS)
    results: dict[Any, Any] = {}
    for first, second in (("ddp", "ddp"), (1, 1), (3, 3), (2, 3), (3, 1)):
        module = Keeps()
        for strategy in (first, second):
            fit(strategy, module, data, use_distributed_sampler=False)
        results[first, second] = mean_over_ranks(module.losses), weights(module)
    expected = results.pop(("ddp", "ddp"))
    for name, (losses, found) in results.items():
        assert_close(losses, expected[0], f"{name}: losses", 1e-6)
        assert_close(found, expected[1], f"{name}: weights", 1e-6)


class AtEven(AtEpochs):
    def on_train_batch_end(self, *_: Any) -> None:
        """Parts of weights have no sum."""


@on_ranks(2, init_process_group=True)
def test_parts_of_models_are_refused(rank: int, world_size: int) -> None:
    cure = "parallelism.*configure_optimizers.*requires_grad_"
    for kind in ("tensor", "pipeline"):
        with pytest.raises(PlanError, match=f"BackboneFinetuning.*{kind} {cure}"):
            fit(ZeROStrategy(1, parallel={kind: 2}), ByCallback())  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=f"AdamW changed while training runs.*pipeline {cure}"):
        fit(ZeROStrategy(1, parallel={"pipeline": 2}), AtEven())


class Late(AnotherOptimizer):
    """Inside the step, where it comes too late."""

    def on_train_epoch_start(self) -> None:
        """Nothing yet."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 2:
            self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.05)]


def late(rank: int, world_size: int) -> None:
    quiet()
    module = Late()
    module.automatic_optimization = False

    def training_step(batch: Any, batch_idx: int) -> None:
        optimizer: Any = module.optimizers()
        optimizer.zero_grad()
        module.manual_backward(module.loss(batch))
        module.optimizers().step()  # type: ignore[union-attr]

    module.training_step = training_step  # type: ignore[method-assign,assignment]
    with pytest.raises(PlanError, match="SGD is to step, but joined the strategy in the middle"):
        outcome(rank, world_size, module, ZeROStrategy(1))


def test_an_optimizer_that_joins_in_the_middle_of_a_step_is_refused() -> None:
    spawn(late, 2, timeout_s=60)
