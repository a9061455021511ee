"""The offload of one engine: which states are on which tier, what is opened, and what the log says."""

from __future__ import annotations

import threading
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel

from ls_strategy import ZeROStrategy
from ls_strategy.config import OffloadConfig, PrecisionConfig
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError
from ls_strategy.zero.step.offload import states_by_tier
from tests.trainers import bare_trainer
from tests.unit.one_rank import ShelfTier, engine_on, network, small, steps


def names_by_tier(engine: Engine) -> dict[str, set[str]]:
    optimizers = [state.sharded.optimizer for state in engine.optimizers]
    found = states_by_tier(engine.plan, optimizers, engine.config)
    return {tier: {name for _, name in sizes} for tier, sizes in found.items() if sizes}


@pytest.mark.parametrize(
    ("offload", "expected"),
    [
        (OffloadConfig(), {}),
        (OffloadConfig(optimizer="cpu"), {"cpu": {"master", "param", "exp_avg", "exp_avg_sq"}}),
        (OffloadConfig(optimizer="cpu", parameters="cpu"), {"cpu": {"master", "exp_avg", "exp_avg_sq"}}),
        (
            OffloadConfig(optimizer="nvme", parameters="cpu"),
            {"nvme": {"master", "grad", "exp_avg", "exp_avg_sq"}, "cpu": {"param"}},
        ),
        (
            OffloadConfig(optimizer="nvme", gradients="cpu", parameters="nvme"),
            {"nvme": {"master", "exp_avg", "exp_avg_sq"}},
        ),
    ],
)
def test_states_are_on_the_tiers_of_the_options(
    offload: OffloadConfig, expected: dict[str, set[str]], shelves: list[ShelfTier]
) -> None:
    """A shard of the parameters on the device is in no tier."""
    _model, engine = small(stage=3, offload=offload)
    found = names_by_tier(engine)
    if expected.get("cpu") == {"master", "param", "exp_avg", "exp_avg_sq"}:
        expected = {"cpu": expected["cpu"] - {"param"}}
    assert found == expected


def test_sizes_of_short_moments() -> None:
    _model, engine = small(stage=1, offload="cpu", precision=PrecisionConfig(moments="int8"))
    sizes = states_by_tier(engine.plan, [engine.optimizers[0].sharded.optimizer], engine.config)["cpu"]
    numel = engine.flats[0].layout.numel
    assert sizes[0, "exp_avg"] == (numel, torch.uint8)
    assert sizes[0, "exp_avg.scales"] == (-(-numel // 256), torch.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": PrecisionConfig(moments="bf16")}, r"Got precision.moments='bf16' with RMSprop, but"),
        ({"offload": "nvme"}, r"Got offload.optimizer='nvme' with RMSprop, but .* or offload to 'cpu'"),
    ],
)
def test_options_that_need_a_fused_update(options: Any, message: str, shelves: list[ShelfTier]) -> None:
    model = network()
    with pytest.raises(PlanError, match=message):
        engine_on(model, [torch.optim.RMSprop(model.parameters())], stage=1, **options)
    assert shelves == [], "nothing is opened before the check"


def test_a_cpu_steps_its_own_states() -> None:
    _model, engine = small(stage=1, offload="cpu")
    assert not engine.offload.streamed
    assert engine.offload.describe(engine.plan) == ""


def test_closing_ends_the_threads_and_frees_the_tiers(shelves: list[ShelfTier]) -> None:
    _model, engine = small(stage=1, offload="nvme")
    steps(engine, 1)
    assert "ls_strategy-update" in {thread.name for thread in threading.enumerate()}
    engine.offload.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ls_strategy")]
    assert shelves[0].closed


def test_the_log_says_how_much_is_written(shelves: list[ShelfTier]) -> None:
    _model, engine = small(stage=1, offload=OffloadConfig(optimizer="nvme", nvme_path="/mnt/nvme"))
    text = engine.offload.describe(engine.plan)
    assert text.startswith(
        "  NVMe (/mnt/nvme): up to 0.000 GB read per step and rank. Each step writes 0.0 GB per rank"
    )


def test_the_thread_of_updates_ends_with_the_fit_where_the_module_is_kept() -> None:
    module = BoringModel()
    kept = [lambda: module]  # a closure, as a test or a notebook has one
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())  # type: ignore[method-assign]
    trainer = bare_trainer(
        ZeROStrategy(stage=2, offload="cpu"),
        max_steps=2,
        limit_val_batches=0,
        callbacks=[OnBatch(lambda: names.append([t.name for t in threading.enumerate()]))],
    )
    names: list[list[str]] = []
    for until in (2, 4):
        trainer.fit_loop.epoch_loop.max_steps = until
        trainer.fit(kept[0]())
        assert not [t.name for t in threading.enumerate() if t.name.startswith("ls_strategy")]
    assert trainer.global_step == 4
    assert all("ls_strategy-update" in each for each in names)
    assert len(names) == 4


class OnBatch(pl.Callback):
    def __init__(self, act: Any) -> None:
        self.act = act

    def on_train_batch_end(self, *_: Any) -> None:
        self.act()
