"""Parts of a model that differ: frozen teachers inside and beside the module, averages of it, two optimizers.

The trusted run is DDP on the same ranks.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy.config import nested
from ls_strategy.errors import PlanError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import (
    OPTIONS,
    WIDTH,
    Block,
    Net,
    assert_equal,
    differences,
    fit,
    mean_over_ranks,
    on_ranks,
    quiet,
    saved,
    weights,
)

pytestmark = [pytest.mark.wide, pytest.mark.dist]


def tower(seed: int, blocks: int = 2) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(blocks)))


class Distilled(Net):
    """A frozen teacher in the same LightningModule."""

    def build(self) -> None:
        self.student = tower(1)
        self.teacher = tower(2, blocks=3).requires_grad_(False).eval()

    def target(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.teacher(x)

    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self.student(batch[0]), self.target(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.student.parameters(), lr=self.lr, eps=1e-4, fused=True)


class DistilledWithGraph(Distilled):
    """The teacher's forward records a graph, through which a part of the student gets its gradient."""

    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self.teacher(self.student(batch[0])), batch[1])


class Beside(Distilled):
    """The teacher is in a plain list: not a part of the module."""

    def build(self) -> None:
        self.student = tower(1)
        self.others = [tower(2, blocks=3).requires_grad_(False).eval()]

    def target(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.others[0](x)


class FromSetup(Distilled):
    """The teacher is made in ``setup``."""

    def build(self) -> None:
        self.student = tower(1)

    def setup(self, stage: str) -> None:
        self.teacher = tower(2, blocks=3).requires_grad_(False).eval()


class ReferenceOfStart(Distilled):
    """A copy of the model as it is when the fit starts, as in preference optimization."""

    def build(self) -> None:
        self.student = tower(1)
        self.others: list[nn.Module] = []

    def on_fit_start(self) -> None:
        self.others = [copy.deepcopy(self.student).requires_grad_(False)]

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            reference = self.others[0](batch[0])
        student = self.student(batch[0])
        return functional.mse_loss(student, batch[1]) + 0.1 * functional.mse_loss(student, reference)


class MeanTeacher(Distilled):
    """The teacher is the average of the student."""

    def build(self) -> None:
        self.student = tower(1)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        return functional.mse_loss(self.student(batch[0]), batch[1]) + super().loss(batch)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, i: int) -> None:
        for mean, now in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.lerp_(now, 0.1)
        self.seen.append(self.teacher[0].weight.norm().item())


class MeanTeacherAtOnce(MeanTeacher):
    """The same, with both gathered at once."""

    def on_train_batch_end(self, outputs: Any, batch: Any, i: int) -> None:
        strategy = self.trainer.strategy
        if not isinstance(strategy, ZeROStrategy):
            super().on_train_batch_end(outputs, batch, i)
            return
        with strategy.gathered_parameters([self.teacher, self.student], modify=True):
            super().on_train_batch_end(outputs, batch, i)


class Gan(Net):
    """Two optimizers that take turns. Both train the layer that both players begin with."""

    manual = True
    shares = True

    def build(self) -> None:
        self.common = nn.Linear(WIDTH, WIDTH)
        self.generator = tower(1)
        self.critic = nn.Sequential(tower(2, blocks=1), nn.Linear(WIDTH, 1))

    def training_step(self, batch: Any, i: int) -> None:
        x, real = batch
        opt_g, opt_c = self.optimizers()
        fake = self.generator(self.common(x))
        self.turn(opt_g, functional.softplus(-self.critic(fake)).mean())
        fake = self.generator(self.common(x))
        loss = functional.softplus(self.critic(fake if self.shares else fake.detach())).mean()
        self.turn(opt_c, loss + functional.softplus(-self.critic(self.common(real))).mean())

    def turn(self, optimizer: Any, loss: Tensor) -> None:
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(self.noted(loss))
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        common = list(self.common.parameters()) if self.shares else []
        return [
            torch.optim.Adam([*common, *self.generator.parameters()], lr=5e-3, eps=1e-3, fused=True),
            torch.optim.Adam([*common, *self.critic.parameters()], lr=5e-3, eps=1e-3, fused=True),
        ]


class GanOfItsOwn(Gan):
    """Each player has its own parameters; the layer in front is frozen."""

    shares = False

    def build(self) -> None:
        super().build()
        self.common.requires_grad_(False)


IN_FULL = {"stage": 3, "sharding.min_unit_numel": 0, "sharding.replicated_modules": ["teacher"]}
FEW = ["zero3, small units", "zero3_offload"]
KINDS: dict[str, tuple[type[Net], list[str]]] = {
    kind.__name__: (kind, FEW)
    for kind in (
        Distilled,
        DistilledWithGraph,
        Beside,
        FromSetup,
        ReferenceOfStart,
        MeanTeacher,
        MeanTeacherAtOnce,
    )
}
KINDS["GanOfItsOwn"] = (GanOfItsOwn, list(OPTIONS))
KINDS["Gan"] = (Gan, [name for name, options in OPTIONS.items() if "offload.optimizer" not in options])


def run(kind: type[Net], name: str) -> tuple[list[float], list[float], dict[str, Tensor]]:
    module = kind()
    fit(name if name not in OPTIONS else ZeROStrategy(**nested(OPTIONS[name])), module)
    return mean_over_ranks(module.losses), module.seen, weights(module)


def compared(rank: int, world_size: int) -> dict[str, dict[str, str]]:
    quiet()
    return {
        title: differences(lambda name, kind=kind: run(kind, name), run(kind, "ddp_find_unused_parameters_true"), names)
        for title, (kind, names) in KINDS.items()
    }


@pytest.fixture(scope="module")
def found() -> list[dict[str, dict[str, str]]]:
    return spawn(compared, 2, init_process_group=False, timeout_s=170)


@pytest.mark.parametrize("title", KINDS)
def test_equals_ddp(found: list[dict[str, dict[str, str]]], title: str) -> None:
    assert [rank[title] for rank in found] == [{}, {}]


class Counts(Distilled):
    """Notes the bytes of gradients and optimizer states where both are there."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.bytes = self.trainer.strategy.memory_bytes()  # type: ignore[attr-defined]


@on_ranks(2, timeout_s=120)
def test_a_teacher_has_no_gradients_and_no_optimizer_states(rank: int, world_size: int) -> None:
    elements: dict[bool, int] = {}
    for name in ("zero2", "zero3, small units"):
        module = Counts()
        trainer = fit(ZeROStrategy(**nested({**OPTIONS[name], "sharding.min_unit_numel": 0})), module)
        flats = trainer.strategy.engine.flats
        assert {p for f in flats if not f.trainable for p in f.params} == set(module.teacher.parameters())
        for trainable in (False, True):
            elements[trainable] = sum(f.layout.shard for f in flats if f.trainable == trainable)
        assert elements[False] > 0.5 * elements[True]
        assert module.bytes["gradients"] == 4 * elements[True], module.bytes
        own = sum(piece.numel for f in flats if f.trainable for piece in f.pieces)  # without padding
        counters = 4 * len(list(module.student.parameters()))  # of steps
        assert 8 * own <= module.bytes["optimizer"] <= 8 * elements[True] + counters, module.bytes
        assert module.bytes["masters"] == (4 * sum(elements.values()) if "zero3" in name else 0), module.bytes


@on_ranks(2, timeout_s=120)
def test_a_teacher_may_be_in_full_on_every_rank(rank: int, world_size: int, tmp_path: Path) -> None:
    mean = run(MeanTeacher, "zero3, small units")
    module = MeanTeacher()
    trainer = fit(ZeROStrategy(**nested(IN_FULL)), module)
    assert_equal((mean_over_ranks(module.losses), module.seen), mean[:2], "losses")
    assert_equal(weights(module), mean[2], "weights")
    trainer.save_checkpoint(tmp_path / "in full")
    assert_equal(
        dict(sorted(saved(tmp_path / "in full")["state_dict"].items())), dict(sorted(mean[2].items())), "saved"
    )
    resumed = MeanTeacher()
    fit(3, resumed, ckpt=tmp_path / "in full", max_epochs=2)  # the same epochs: nothing is trained
    assert_equal(weights(resumed), mean[2], "loaded where the teacher is sharded")
    for more in ({}, {"offload.optimizer": "cpu", "offload.parameters": "cpu"}):
        expected = run(Distilled, "zero3_offload" if more else "zero3, small units")
        module = Counts()
        trainer = fit(ZeROStrategy(**nested({**IN_FULL, **more})), module)
        assert_equal((mean_over_ranks(module.losses), module.seen), tuple(expected[:2]), "losses")
        assert_equal(weights(module), expected[2], "weights")
        engine: Any = trainer.strategy.engine
        teacher = [f for f in engine.flats if not f.trainable]
        student = [f for f in engine.flats if f.trainable]
        full = 4 * sum(f.layout.numel for f in teacher)
        assert full >= 4 * sum(p.numel() for p in module.teacher.parameters())
        assert more or module.bytes["gradients"] + module.bytes["masters"] == 8 * sum(f.layout.shard for f in student)
        planned = engine.plan.bytes_by_tier()
        shard = 0 if more else 4 * sum(f.layout.shard for f in student)
        assert planned["device"]["parameters"] + planned["device"]["masters"] == full + shard
        steps = len(module.losses)
        sent = sum(trainer.strategy.traffic.elements[kind] for kind in ("all_gather", "reduce_scatter"))  # type: ignore[attr-defined]
        gathered_after = sum(f.layout.shard for f in student)  # by weights(): the teacher is there
        assert sent <= steps * engine.plan.elements_sent() + 2 * gathered_after
        assert sum(f.plan.gathered_numel for f in teacher) == 0
        exactly = dict(trainer.strategy.full_weights())  # type: ignore[attr-defined]
        assert all(torch.equal(exactly[name], value) for name, value in expected[2].items())
    with pytest.raises(PlanError, match=r"has no module 'techer'.*'student', 'teacher'"):
        fit(ZeROStrategy(3, sharding={"replicated_modules": ["techer"]}), Distilled())
