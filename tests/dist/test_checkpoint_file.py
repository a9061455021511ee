"""The single-file checkpoint: every strategy, stage and world size reads what any other wrote."""

from __future__ import annotations

import copy
import functools
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from ls_strategy import ZeROStrategy
from ls_strategy.checkpoint import commit
from ls_strategy.config import LossScaleConfig
from ls_strategy.errors import StateError
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.testing import spawn
from tests.dist.ranks import (
    STAGES,
    WIDTH,
    Block,
    Net,
    assert_close,
    assert_equal,
    batches,
    global_batches,
    mean_over_ranks,
    on_ranks,
    quiet,
    samples,
    trainer_of,
    weights,
)
from tests.dist.ranks import fit as fit_
from tests.marks import few_or_all, slow, wide
from tests.models import fp16_plugin

fit = functools.partial(fit_, save_as="file")

TEN_STEPS = 80  # samples: ten batches of four on each of two ranks


class Mixed(Net):
    """Frozen, tied and decayed parameters, a buffer, two groups in an order of their own, a schedule."""

    def build(self) -> None:
        super().build()
        self.blocks[1].wide.requires_grad_(False)
        self.last.weight = self.first.weight
        self.register_buffer("steps_seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def training_step(self, batch: Any, i: int) -> Tensor:
        self.steps_seen += 1
        return super().training_step(batch, i)

    def configure_optimizers(self) -> Any:
        bias = [p for p in self.parameters() if p.ndim == 1 and p.requires_grad]
        rest = [p for p in self.parameters() if p.ndim > 1 and p.requires_grad]
        groups = [{"params": bias, "weight_decay": 0.0}, {"params": rest[::-1], "lr": 5e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class WithHistory(Mixed):
    """And a buffer that steps change."""

    history: Tensor

    def build(self) -> None:
        super().build()
        self.register_buffer("history", torch.zeros(3))

    def training_step(self, batch: Any, i: int) -> Tensor:
        self.history.lerp_(torch.full_like(self.history, float(self.global_step)), 0.3)
        return super().training_step(batch, i)


class Momentum(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=5e-2, momentum=0.9, weight_decay=0.01)


@pytest.mark.parametrize(("make", "stages"), [(Mixed, (3,)), wide(Mixed, STAGES), slow(Momentum, STAGES)])
@on_ranks(2)
def test_plain_lightning_and_every_stage_read_each_others_checkpoints(
    rank: int, world_size: int, stages: tuple[int, ...], make: type[Net], tmp_path: Path
) -> None:
    whole, half = make(), make()
    fit("ddp", whole)
    trainer = fit("ddp", half, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "ddp.ckpt")
    after_half = weights(half)
    expected = torch.load(tmp_path / "ddp.ckpt", weights_only=True)
    for stage in stages:
        path = tmp_path / f"{stage}.ckpt"
        module = make()
        fit(stage, module, max_epochs=1).save_checkpoint(path)
        saved = torch.load(path, weights_only=True)
        assert_close(saved["state_dict"], expected["state_dict"], f"stage {stage}, file")
        same_optimizer_state(saved["optimizer_states"][0], expected["optimizer_states"][0], f"stage {stage}")
        assert saved["lr_schedulers"] == expected["lr_schedulers"]
        assert saved["loops"].keys() == expected["loops"].keys()
        assert_close(weights(make.load_from_checkpoint(path)), after_half, f"stage {stage}, load_from_checkpoint")
        plain = make()
        plain.load_state_dict(saved["state_dict"])
        optimizers = plain.configure_optimizers()
        optimizer = optimizers[0][0] if isinstance(optimizers, tuple) else optimizers
        optimizer.load_state_dict(saved["optimizer_states"][0])
        for reader, source in (("ddp", path), (stage, tmp_path / "ddp.ckpt")):
            resumed = make()
            fit(reader, resumed, ckpt=source)
            assert_close(resumed.losses, whole.losses[4:], f"{source.name} resumed under {reader}")
            assert_close(weights(resumed), weights(whole), f"{source.name} resumed under {reader}")


def same_optimizer_state(actual: dict[str, Any], expected: dict[str, Any], what: str) -> None:
    assert actual["param_groups"] == expected["param_groups"], f"{what}: {actual['param_groups']}"
    assert actual["state"].keys() == expected["state"].keys(), what
    for number, state in expected["state"].items():
        assert actual["state"][number].keys() == state.keys(), f"{what}: state {number}"
        for key, value in state.items():
            assert_close(actual["state"][number][key], value, f"{what}: state {number}, {key}", 1e-5)


@pytest.mark.parametrize(
    ("precision", "stages"),
    [("32-true", (1,)), wide("32-true", STAGES), slow("bf16-true", STAGES), slow("bf16-mixed", STAGES)],
)
@on_ranks(2)
def test_ten_steps_and_ten_more_are_twenty_bit_for_bit(
    rank: int, world_size: int, stages: tuple[int, ...], precision: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"precision": precision, "gradient_clip_val": 0.5}
    for stage in stages:
        whole, half, rest = Mixed(), Mixed(), Mixed()
        fit(stage, whole, batches(TEN_STEPS), **options)
        trainer = fit(stage, half, batches(TEN_STEPS), max_epochs=1, **options)
        trainer.save_checkpoint(tmp_path / f"{stage}.ckpt")
        saved = torch.load(tmp_path / f"{stage}.ckpt", weights_only=True)
        trained = {n: v for n, v in saved["state_dict"].items() if v.is_floating_point() and "blocks.1.wide" not in n}
        assert {v.dtype for v in trained.values()} == {torch.float32}, f"stage {stage}: not in master precision"
        fit(stage, rest, batches(TEN_STEPS), tmp_path / f"{stage}.ckpt", **options)
        assert_equal(half.losses + rest.losses, whole.losses, f"stage {stage}, {precision}")
        assert_equal(weights(rest), weights(whole), f"stage {stage}, {precision}")


@on_ranks(2)
def test_sixteen_bit_checkpoint_fits_a_plain_module(rank: int, world_size: int, tmp_path: Path) -> None:
    module = Mixed()
    fit(2, module, precision="bf16-true", max_epochs=1).save_checkpoint(tmp_path / "bf16.ckpt")
    plain = Mixed.load_from_checkpoint(tmp_path / "bf16.ckpt")
    assert {p.dtype for p in plain.parameters()} == {torch.float32}
    assert_equal({n: v.to(module.state_dict()[n].dtype) for n, v in weights(plain).items()}, weights(module), "rounded")


# --- stages and world sizes -------------------------------------------------------------------------------------------

CHAIN_STEPS = 4


def leg(
    rank: int, world_size: int, stages: tuple[int | str, ...], epochs: int, source: str | None, target: str
) -> dict[Any, tuple[list[float], dict[str, Tensor]]]:
    """One epoch under each of ``stages``, from ``source`` files to ``target`` files."""
    quiet()
    results = {}
    for chain, stage in enumerate(stages):
        module = Mixed()
        data = global_batches(rank, world_size, CHAIN_STEPS)
        ckpt = source.format(chain) if source else None
        trainer = fit(stage, module, data, ckpt, max_epochs=epochs, use_distributed_sampler=False)
        trainer.save_checkpoint(target.format(chain))
        results[chain] = (mean_over_ranks(module.losses), weights(module))
    return results


@pytest.mark.parametrize("chains", few_or_all(1, 3))
def test_resume_across_stages_and_world_sizes(chains: int, tmp_path: Path) -> None:
    """Two ranks, one, three: three chains that change the stage at each change of the world size; or one, to two ranks.

    A third rank process is worth its start only with all of them.
    """
    first, second, third, whole = (str(tmp_path / f"{name}{{}}.ckpt") for name in ("first", "second", "third", "whole"))
    trusted = spawn(leg, 1, ("auto",), 3, None, whole, init_process_group=False)[0][0]
    legs = [
        spawn(leg, 2, (1, 2, 3)[:chains], 1, None, first, init_process_group=False)[0],
        spawn(leg, 1, (2, 3, "auto")[:chains], 2, first, second, init_process_group=False)[0],
        spawn(leg, 3 if chains > 1 else 2, (3, 1, 2)[:chains], 3, second, third, init_process_group=False)[0],
    ]
    for chain in range(chains):
        losses = [loss for done in legs for loss in done[chain][0]]
        assert_close(losses, trusted[0], f"chain {chain}, losses")
        assert_close(legs[-1][chain][1], trusted[1], f"chain {chain}, weights", 3e-6)


# --- what does not fit ------------------------------------------------------------------------------------------------


class OtherShape(Net):
    def build(self) -> None:
        super().build()
        self.blocks[1] = Block(WIDTH)
        self.blocks[1].wide = nn.Linear(WIDTH, 5)
        self.blocks[1].narrow = nn.Linear(5, WIDTH)


class OneMore(Net):
    def build(self) -> None:
        super().build()
        self.extra = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra(x)


class OneMoreNotStrict(OneMore):
    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(
            [p for n, p in self.named_parameters() if "extra" not in n], lr=1e-2, eps=1e-4, fused=True
        )


@pytest.mark.parametrize("stages", few_or_all((3,), (1, 2, 3)))
@on_ranks(2)
def test_a_checkpoint_of_another_model_is_refused_by_name(
    rank: int, world_size: int, stages: tuple[int, ...], tmp_path: Path
) -> None:
    fit(1, Net(), max_epochs=1).save_checkpoint(tmp_path / "net.ckpt")
    for stage in stages:
        with pytest.raises(RuntimeError, match=r"blocks\.1\.wide\.weight"):
            fit(stage, OtherShape(), ckpt=tmp_path / "net.ckpt")
        with pytest.raises(RuntimeError, match=r"extra\.weight"):
            fit(stage, OneMore(), ckpt=tmp_path / "net.ckpt")


@pytest.mark.parametrize("stages", few_or_all((3,), STAGES))
@on_ranks(2)
def test_loading_into_a_running_model_checks_everything_first(
    rank: int, world_size: int, stages: tuple[int, ...]
) -> None:
    for stage in stages:
        module = Net()
        trainer = fit(stage, module, max_epochs=1)
        before = weights(module)
        wrong = dict(before)
        wrong["first.weight"] = torch.zeros_like(wrong["first.weight"])
        wrong["last.bias"] = torch.zeros(WIDTH + 1)
        wrong["surplus"] = wrong.pop("first.bias")
        with pytest.raises(StateError, match=r"first\.bias.*surplus.*last\.bias.*\(9,\).*\(8,\).*strict_loading=False"):
            trainer.strategy.load_model_state_dict({"state_dict": wrong})
        assert_equal(weights(module), before, f"stage {stage}: nothing may change")
        with pytest.raises(StateError, match=r"last\.bias"):
            trainer.strategy.load_model_state_dict({"state_dict": wrong}, strict=False)
        del wrong["last.bias"]
        trainer.strategy.load_model_state_dict({"state_dict": wrong}, strict=False)
        after = weights(module)
        assert not after["first.weight"].any()
        assert_equal(after["last.bias"], before["last.bias"], f"stage {stage}")


@pytest.mark.parametrize("stages", few_or_all((3,), STAGES))
@on_ranks(2)
def test_strict_loading_off_keeps_what_the_file_lacks(
    rank: int, world_size: int, stages: tuple[int, ...], tmp_path: Path
) -> None:
    fit(1, Net(), max_epochs=1).save_checkpoint(tmp_path / "net.ckpt")
    expected = None
    for strategy in ("ddp_find_unused_parameters_true", *stages):
        module = OneMoreNotStrict()
        fit(strategy, module, ckpt=tmp_path / "net.ckpt")
        result = weights(module)
        expected = expected or result
        assert_close(result, expected, f"stage {strategy}")
        assert_equal(result["extra.weight"], weights(OneMoreNotStrict())["extra.weight"], f"stage {strategy}")


class TwoGroups(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([{"params": self.first.parameters()}, {"params": self.blocks.parameters()}], lr=1e-2)


@on_ranks(2)
def test_optimizer_state_of_other_groups_is_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    fit("ddp", Net(), max_epochs=1).save_checkpoint(tmp_path / "net.ckpt")
    for stage in (1, 3):
        with pytest.raises(StateError, match=r"parameter groups.*configure_optimizers"):
            fit(stage, TwoGroups(), ckpt=tmp_path / "net.ckpt")


# --- loss scale -------------------------------------------------------------------------------------------------------


def half_precision(stage: int) -> ZeROStrategy:
    scale = LossScaleConfig(initial_power=6, window=3)
    return ZeROStrategy(
        stage,
        sharding={"min_unit_numel": 0},
        precision={"loss_scale": scale},
        checkpoint="file",
        precision_plugin=ZeROPrecision("16-mixed"),
    )  # type: ignore[arg-type]


class Overflows(Net):
    """The loss is infinite once."""

    def training_step(self, batch: Any, i: int) -> Tensor:
        loss = super().training_step(batch, i)
        return loss * float("inf") if self.global_step == 0 and i == 1 and len(self.losses) == 2 else loss


@pytest.mark.parametrize("stages", few_or_all((3,), (1, 3)))
@on_ranks(2)
def test_loss_scale_is_saved_and_restored(rank: int, world_size: int, stages: tuple[int, ...], tmp_path: Path) -> None:
    for stage in stages:
        whole, half, rest = Net(), Net(), Net()
        long = fit(half_precision(stage), whole)
        short = fit(half_precision(stage), half, max_epochs=1)
        assert short.strategy.loss_scale == 128.0  # doubled once, after three of four steps
        short.save_checkpoint(tmp_path / "fp16.ckpt")
        trainer = fit(half_precision(stage), rest, ckpt=tmp_path / "fp16.ckpt")
        assert trainer.strategy.loss_scale == long.strategy.loss_scale == 256.0
        assert_equal(half.losses + rest.losses, whole.losses, f"stage {stage}")
        assert_equal(weights(rest), weights(whole), f"stage {stage}")


class SeesScale(Net):
    def on_train_start(self) -> None:
        self.scale_at_start = self.trainer.strategy.loss_scale


@pytest.mark.wide
@pytest.mark.parametrize("stages", few_or_all((1,), (1, 3)))
@on_ranks(2)
def test_loss_scale_of_a_ddp_run_is_taken_over(
    rank: int, world_size: int, stages: tuple[int, ...], tmp_path: Path
) -> None:
    fit(half_precision(1), Net(), max_epochs=1).save_checkpoint(tmp_path / "ours.ckpt")
    checkpoint = torch.load(tmp_path / "ours.ckpt", weights_only=True)
    assert checkpoint.pop("ZeROPrecision") == {"scale": 128.0, "hysteresis_left": 2, "good_steps": 4}
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=3)
    scaler.scale(torch.ones(1))
    for key in ("MixedPrecision", "native_amp_scaling_state"):
        theirs = {**copy.deepcopy(checkpoint), key: {**scaler.state_dict(), "_growth_tracker": 1}}
        path = tmp_path / f"{key}{rank}.ckpt"
        torch.save(theirs, path)
        for stage in stages:
            module = SeesScale()
            trainer = trainer_of(half_precision(stage))
            trainer.fit(module, batches(), ckpt_path=path)
            assert module.scale_at_start == 512.0, f"{key}, stage {stage}"
            assert trainer.strategy.loss_scale == 1024.0  # one good step there, four here, window 3


class ReadsScaler(Net):
    def on_train_start(self) -> None:
        self.scale_at_start = self.trainer.precision_plugin.scaler.get_scale()  # type: ignore[attr-defined]


@on_ranks(2)
def test_the_loss_scale_is_read_as_under_ddp_and_taken_over_by_it(rank: int, world_size: int, tmp_path: Path) -> None:
    ours = ReadsScaler()
    trainer = fit(half_precision(2), ours, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "ours.ckpt")
    assert ours.scale_at_start == 64.0
    with pytest.raises(StateError, match=r"Call self\.manual_backward"):
        trainer.precision_plugin.scaler.unscale_(trainer.optimizers[0])
    plugin = fp16_plugin("16-mixed")
    theirs = ReadsScaler()
    fit("ddp", theirs, ckpt=tmp_path / "ours.ckpt", plugins=[plugin])
    assert theirs.scale_at_start == 128.0
    assert plugin.scaler.get_scale() == 256.0  # type: ignore[attr-defined]  (one good step there, four here, window 3)


@pytest.mark.wide
@on_ranks(2)
def test_hooks_may_add_to_a_checkpoint(rank: int, world_size: int, tmp_path: Path) -> None:
    """``on_save_checkpoint`` sees the dict before it is written, and ``on_load_checkpoint`` after it is read."""
    x, _ = samples(4)
    for stage in (1, 3):
        module = Hooked()
        fit(stage, module, max_epochs=1).save_checkpoint(tmp_path / f"{stage}.ckpt")
        resumed = Hooked()
        fit(stage, resumed, ckpt=tmp_path / f"{stage}.ckpt")
        assert torch.equal(resumed.mine, x)


class Hooked(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = samples(4)[0]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.mine = checkpoint["mine"]


class SeesCheckpoints(Net):
    """Holds on to what its hooks are handed."""

    def __init__(self) -> None:
        super().__init__()
        self.saw: list[dict[str, Any]] = []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = 1
        self.saw.append(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.saw.append(checkpoint)


@pytest.mark.parametrize("names", few_or_all(("ddp", "sharded"), ("ddp", "sharded", "file")))
@on_ranks(2)
def test_hooks_are_handed_the_keys_that_they_are_under_ddp(
    rank: int, world_size: int, names: tuple[str, ...], tmp_path: Any
) -> None:
    expected = None
    for name in names:
        saving, loading = SeesCheckpoints(), SeesCheckpoints()
        make = functools.partial(fit, "ddp") if name == "ddp" else functools.partial(fit, 3, save_as=name)
        make(saving, max_epochs=1).save_checkpoint(tmp_path / name)
        make(loading, ckpt=tmp_path / name)
        keys = [sorted(checkpoint) for checkpoint in saving.saw + loading.saw]
        expected = expected or keys
        assert keys == expected, name


@pytest.mark.wide
@on_ranks(2)
def test_files_are_final_on_every_rank_when_fit_returns(rank: int, world_size: int, tmp_path: Any) -> None:
    """Rank 0 removes what a new checkpoint replaces, here slowly."""

    def slowly(path: Any) -> None:
        time.sleep(0.5)
        commit.remove(path)

    with patch("ls_strategy.lightning.checkpointing.saving.remove_checkpoint", slowly):
        callback = ModelCheckpoint(tmp_path, filename="{epoch}")
        fit(3, Net(), callbacks=[callback], enable_checkpointing=True)
    assert [path.name for path in tmp_path.iterdir()] == ["epoch=1.ckpt"]
