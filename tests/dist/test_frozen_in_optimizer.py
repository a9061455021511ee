"""Frozen parameters that are in an optimizer (``AdamW(self.parameters())``) cost nothing until they are unfrozen.

Trusted runs: for bytes, the same module with an optimizer of what trains alone; for numbers, a plain Trainer on one
process that sees the same global batches. DDP averages no gradients of parameters that it has wrapped frozen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.config import nested
from ls_strategy.extras.callbacks import ShardedEMA
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import (
    OPTIONS,
    Net,
    assert_close,
    differences,
    fit,
    global_batches,
    mean_over_ranks,
    quiet,
    saved,
    weights,
)
from tests.dist.trusted import once
from tests.marks import in_turn, slow

EVERYWHERE: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    **OPTIONS,
    "zero1_nvme": {"stage": 1, "offload.optimizer": "nvme"},
    "zero3_nvme": {"stage": 3, "sharding.min_unit_numel": 0, "offload.optimizer": "nvme", "offload.parameters": "nvme"},
    "int8": {"stage": 2, "precision.moments": "int8", "offload.optimizer": "cpu"},
}


def strategy_of(name: str, folder: str = "", **more: Any) -> ZeROStrategy:
    options = {**EVERYWHERE[name], **more}
    if "nvme" in options.values():
        options |= {"offload.nvme_path": folder, "offload.nvme_allow_ram": True}
    return ZeROStrategy(**nested(options))


class Adapted(Net):
    """Blocks with frozen matrices, as with adapters; all is in the optimizer."""

    filtered = False
    momentum = False
    decay = 0.1

    def build(self) -> None:
        super().build()
        for name, p in self.blocks.named_parameters():
            p.requires_grad_(not name.endswith(("wide.weight", "narrow.weight")))

    def configure_optimizers(self) -> Any:
        params = [p for p in self.parameters() if p.requires_grad or not self.filtered]
        if self.momentum:
            return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=self.decay)
        return torch.optim.AdamW(params, lr=self.lr, eps=1e-2, weight_decay=self.decay, fused=True)

    @property
    def matrices(self) -> list[nn.Parameter]:
        return [p for name, p in self.blocks.named_parameters() if name.endswith(("wide.weight", "narrow.weight"))]

    def freeze_matrices(self, frozen: bool = True) -> None:
        for p in self.matrices:
            p.requires_grad_(not frozen)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        strategy: Any = self.trainer.strategy
        if hasattr(strategy, "memory_bytes"):
            self.bytes = strategy.memory_bytes()


class AdaptedOnly(Adapted):
    filtered = True


class Tuned(Adapted):
    """Momentum, without a fused update."""

    momentum = True


class TunedOnly(Tuned):
    filtered = True


# --- bytes ------------------------------------------------------------------------------------------------------------


def cost(kind: type[Adapted], name: str, folder: str, precision: str) -> tuple[Any, dict[str, Any]]:
    module = kind()
    trainer = fit(strategy_of(name, folder), module, precision=precision)
    strategy: Any = trainer.strategy
    engine = strategy.engine
    counted = {"memory": module.bytes, "sent": dict(strategy.traffic.bytes), "plan": engine.plan.bytes_by_tier()}
    for tier, at in engine.offload.tiers.items():
        counted[tier] = sum(numel * dtype.itemsize for numel, dtype in at.sizes.values())
    del counted["sent"]["control"]  # a few bytes per parameter
    return (mean_over_ranks(module.losses), weights(module)), counted


def costs(rank: int, world_size: int, names: list[str], folder: str, precision: str, kinds: list[Any]) -> list[str]:
    quiet()
    found: list[str] = []
    for name in names:
        (losses, ours), all_of_it = cost(kinds[0], name, folder, precision)
        (expected, theirs), trained_only = cost(kinds[1], name, folder, precision)
        if losses != expected or any(not torch.equal(ours[key], theirs[key]) for key in theirs):
            found.append(f"{name}: the numbers differ")
        found += [
            f"{name}, {what}: {all_of_it[what]} and not {trained_only[what]}"
            for what in trained_only
            if all_of_it[what] != trained_only[what]
        ]
    return found


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("precision", "names"),
    [
        ("bf16-true", ["zero3, small units", "zero1_offload"]),
        ("bf16-true", ["zero1", "zero3_nvme"]),
        slow("32-true", list(EVERYWHERE)),
        slow("bf16-true", list(EVERYWHERE)),
    ],
)
def test_cost_what_parameters_without_an_optimizer_cost(precision: str, names: list[str], tmp_path: Path) -> None:
    kinds = [Adapted, AdaptedOnly]
    found = spawn(costs, 2, names, str(tmp_path), precision, kinds, init_process_group=False, timeout_s=100)
    assert found == [[], []], "\n".join(found[0])


@pytest.mark.slow
def test_cost_nothing_where_the_own_step_runs(tmp_path: Path) -> None:
    names = [name for name in EVERYWHERE if "nvme" not in name and name != "int8"]
    found = spawn(
        costs, 2, names, str(tmp_path), "32-true", [Tuned, TunedOnly], init_process_group=False, timeout_s=100
    )
    assert found == [[], []], "\n".join(found[0])


# --- numbers ----------------------------------------------------------------------------------------------------------


class AtAnEpoch(Adapted):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.freeze_matrices(False)


class WithMomentum(AtAnEpoch):
    momentum = True


class OneOfThem(Adapted):
    """The others in the same buffer get no gradient, and no decay."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.blocks[1].wide.weight.requires_grad_(True)


class InTheStep(Adapted):
    """After the step has begun."""

    def training_step(self, batch: Any, i: int) -> Any:
        if self.global_step == 4:
            self.freeze_matrices(False)
        return super().training_step(batch, i)


class AfterTheForward(Adapted):
    """Too late for this step, as in plain torch."""

    def on_before_backward(self, loss: Tensor) -> None:
        if self.global_step == 4:
            self.freeze_matrices(False)


class OnAndOff(Adapted):
    """Adam goes on with the moments of before; what is frozen does not decay."""

    def on_train_epoch_start(self) -> None:
        self.freeze_matrices(self.current_epoch % 2 == 0)


class FrozenLater(Adapted):
    def build(self) -> None:
        super().build()
        self.freeze_matrices(False)

    def on_train_epoch_start(self) -> None:
        self.freeze_matrices(self.current_epoch >= 2)


class WithinAnAccumulation(Adapted):
    """Two of three micro-batches have gradients of them."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch == 1 and batch_idx == 1:
            self.freeze_matrices(False)


class PlainBackward(Adapted):
    """Manual optimization that goes past ``manual_backward``, over two micro-batches."""

    manual = True

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        if self.global_step == 2:
            self.freeze_matrices(False)
        for part in (0, 1):
            self.noted_loss([t[part::2] for t in batch]).backward()
        optimizer.step()
        optimizer.zero_grad()


class Given(Adapted):
    """A gradient that user code sets is stepped, whether the parameter is frozen or not."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step in (2, 3):
            for p in self.matrices:
                p.grad = torch.full_like(p, 0.25)


class Read(AtAnEpoch):
    """A callback that reads all gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [0.0 if p.grad is None else p.grad.norm().item() for p in self.parameters()]
        self.seen += norms


class Players(Net):
    """One optimizer each; the critic is frozen at first, and each is frozen while the other has its turn."""

    manual = True

    def build(self) -> None:
        super().build()
        self.critic = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 1)).requires_grad_(False)

    def training_step(self, batch: Any, i: int) -> None:
        if self.current_epoch == 1 and i == 1:
            self.critic.requires_grad_(True)
        opt_g, opt_c = self.optimizers()  # type: ignore[misc]
        self.turn(opt_g, batch, 1.0)
        self.turn(opt_c, batch, -1.0)

    def turn(self, optimizer: Any, batch: Any, sign: float) -> None:
        self.toggle_optimizer(optimizer)
        loss = sign * self.critic(self(batch[0])).tanh().mean() + self.loss(batch)
        optimizer.zero_grad()
        if loss.requires_grad:
            self.manual_backward(self.noted(loss))
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        critic = set(self.critic.parameters())
        return [
            torch.optim.AdamW(params, lr=5e-3, eps=1e-2, weight_decay=0.1, fused=True)
            for params in ([p for p in self.parameters() if p not in critic], list(critic))
        ]


Outcome = tuple[list[float], list[float], dict[str, Tensor]]
NUMBERS = [
    AtAnEpoch, WithMomentum, OneOfThem, InTheStep, AfterTheForward, OnAndOff, FrozenLater, PlainBackward, Given, Read,
    Players,
]  # fmt: skip


def outcome(rank: int, world_size: int, module: Net, strategy: Any, **options: Any) -> Outcome:
    data = global_batches(rank, world_size, 3)
    fit(strategy, module, data, use_distributed_sampler=False, **{"max_epochs": 4, **options})
    return mean_over_ranks(module.losses), module.seen, weights(module)


def trusted(rank: int, world_size: int, kind: type[Net], options: dict[str, Any]) -> Outcome:
    quiet()
    return outcome(0, 1, kind(), "auto", devices=1, **options)


def problems(
    rank: int, world_size: int, expected: Outcome, kind: type[Net], names: list[str], folder: str, options: Any
) -> dict[str, str]:
    quiet()
    return differences(
        lambda name: outcome(rank, world_size, kind(), strategy_of(name, folder), **options), expected, names
    )


def compare(kind: type[Net], names: Any, folder: Path, **options: Any) -> None:
    expected = once(trusted, 1, kind, options)[0]
    chosen = [name for name in names if name != "int8" and not (kind is WithMomentum and "nvme" in name)]
    found = spawn(problems, 2, expected, kind, chosen, str(folder), options, init_process_group=False, timeout_s=170)
    assert found == [{}, {}], f"{kind.__name__}: {found}"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("kind", "names"), in_turn(NUMBERS, EVERYWHERE))
def test_train_once_unfrozen_as_in_a_plain_trainer(kind: type[Net], names: dict[str, Any], tmp_path: Path) -> None:
    compare(kind, names, tmp_path)


@pytest.mark.slow
def test_within_an_accumulation_and_clipped(tmp_path: Path) -> None:
    names = ["stage 0", "zero1", "zero2", "zero3, small units", "zero3_offload"]
    compare(WithinAnAccumulation, names, tmp_path, accumulate_grad_batches=3, gradient_clip_val=0.1)


# --- 16 bit -----------------------------------------------------------------------------------------------------------


class Counts(OnAndOff):
    """Notes bytes of every step."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        super().on_before_zero_grad(optimizer)
        self.seen += [float(self.bytes["masters"]), float(self.bytes["optimizer"])]


def in_16_bit(rank: int, world_size: int, names: list[str], folder: str) -> list[str]:
    """Bit for bit as at stage 0, and with fp32 masters from the step on that needs them."""
    quiet()
    expected, found = outcome(rank, world_size, Counts(), strategy_of("stage 0"), precision="bf16-true"), []
    for name in names:
        module = Counts()
        ours = outcome(rank, world_size, module, strategy_of(name, folder), precision="bf16-true")
        if ours[0] != expected[0] or any(not torch.equal(ours[2][key], value) for key, value in expected[2].items()):
            found.append(f"{name}: the numbers differ: {ours[0]} and not {expected[0]}")
        masters = ours[1][::2]
        if "nvme" not in name and not masters[2] < masters[3] == masters[-1]:
            found.append(f"{name}: masters {masters}")
        engine = module.trainer.strategy.engine  # type: ignore[attr-defined]
        planned = sum(tier["masters"] for tier in engine.plan.bytes_by_tier().values())
        if "nvme" not in name and planned != masters[-1]:
            found.append(f"{name}: masters {masters[-1]}, planned {planned}")
        if any(f.is_frozen or not f.trainable or f.master_dtype != torch.float32 for f in engine.flats):
            found.append(f"{name}: some do not train")
    return found


@pytest.mark.wide
def test_masters_in_fp32_once_unfrozen(tmp_path: Path) -> None:
    names = [name for name in EVERYWHERE if name not in ("stage 0", "int8")]
    found = spawn(in_16_bit, 2, names, str(tmp_path), init_process_group=False, timeout_s=120)
    assert found == [[], []], "\n".join(found[0])


# --- checkpoints ------------------------------------------------------------------------------------------------------


class FromAnEpoch(Adapted):
    """Unfrozen from an epoch on, also in a run that resumes."""

    epoch = 1

    def on_train_epoch_start(self) -> None:
        self.freeze_matrices(self.current_epoch < self.epoch)


class AfterTheSave(FromAnEpoch):
    epoch = 3


def first_half(rank: int, world_size: int, kind: type[Net], strategy: Any, paths: list[str]) -> None:
    """``paths``: one for a folder or a plain Trainer, two for both formats."""
    quiet()
    for path in paths:
        of = strategy if strategy is None else strategy_of(*strategy, **{"checkpoint.format": Path(path).stem})
        module = kind()
        options = {"devices": 1} if of is None else {}
        data = global_batches(rank, world_size, 3)
        trainer = fit(of or "auto", module, data, use_distributed_sampler=False, max_epochs=2, **options)
        trainer.save_checkpoint(path)


def second_half(rank: int, world_size: int, kind: type[Net], strategies: list[Any], paths: list[str]) -> list[Outcome]:
    quiet()
    found = []
    for strategy in strategies:
        for path in paths:
            of = "auto" if strategy is None else strategy_of(*strategy)
            options = {"devices": 1} if strategy is None else {}
            found.append(outcome(rank, world_size, kind(), of, ckpt=path, **options))
    return found


RESUMES = [
    (FromAnEpoch, "zero1", "zero3, small units"),
    (AfterTheSave, "zero3, small units", "zero2"),
    (OnAndOff, "zero3_nvme", "zero1_offload"),
    (FromAnEpoch, "zero2", "zero3_nvme"),
]


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "name", "then", "sizes"), [(*RESUMES[0], (2,)), *((*each, (2, 3)) for each in RESUMES)]
)
def test_resume_before_and_after_unfreezing(
    kind: type[Net], name: str, then: str, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    plain = [str(tmp_path / "plain.ckpt")]
    spawn(first_half, 1, kind, None, plain, init_process_group=False)
    expected = spawn(second_half, 1, kind, [None], plain, init_process_group=False)[0][0]
    saved = [str(tmp_path / "sharded.ckpt"), str(tmp_path / "file.ckpt")]
    spawn(first_half, 2, kind, (name, str(tmp_path)), saved, init_process_group=False, timeout_s=60)
    for world_size in sizes:
        names = [name, then] if len(sizes) > 1 and world_size == 2 else [then]
        strategies = [(each, str(tmp_path)) for each in names]
        found = spawn(
            second_half, world_size, kind, strategies, [*saved, *plain], init_process_group=False, timeout_s=60
        )
        for ours in found[0]:
            for what, actual, wanted in zip(("losses", "seen", "weights"), ours, expected, strict=True):
                assert_close(actual, wanted, f"{world_size} ranks: {what}")


# --- averages ---------------------------------------------------------------------------------------------------------


class Averaged(FromAnEpoch):
    def configure_callbacks(self) -> Any:
        return [ShardedEMA(0.8)]


def averages(rank: int, world_size: int, names: list[str], folder: str) -> None:
    """The average is that of a run that has everything unfrozen, but at a rate of zero, before."""
    quiet()
    for name in names:
        found = []
        for resumes in (False, True):
            module = Averaged()
            data = global_batches(rank, world_size, 3)
            trainer = fit(strategy_of(name), module, data, use_distributed_sampler=False, max_epochs=3 - resumes)
            if resumes:
                trainer.save_checkpoint(f"{folder}/{name}.ckpt")
                module = Averaged()
                trainer = fit(
                    strategy_of(name),
                    module,
                    data,
                    f"{folder}/{name}.ckpt",
                    use_distributed_sampler=False,
                    max_epochs=3,
                )
            trainer.save_checkpoint(f"{folder}/{name}-{resumes}.ckpt")
            found.append(dict(saved(f"{folder}/{name}-{resumes}.ckpt")["ema_state_dict"]))
        assert found[0].keys() == found[1].keys() == weights(module).keys()
        assert_close(found[1], found[0], name, 1e-7)
        assert all(not torch.equal(found[0][key], value) for key, value in weights(module).items())


@pytest.mark.wide
def test_an_average_follows(tmp_path: Path) -> None:
    spawn(averages, 2, ["zero1", "zero3_offload"], str(tmp_path), init_process_group=False, timeout_s=60)
