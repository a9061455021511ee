"""A loss scale that is a power of two changes no bit of fp32 training, whatever it is combined with.

What a gradient is multiplied by is undone exactly, or something is wrong: so fp32 is trained with the loss scale of
fp16, which doubles every second step, and has to be equal bit for bit to the same run without a loss scale.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from ls_strategy.config import TierConfig, nested
from ls_strategy.errors import StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist import parallel_runs
from tests.dist import test_manual_optimization as manual
from tests.dist.parallel_runs import Run
from tests.dist.ranks import Net, fit, global_batches, on_ranks, weights
from tests.marks import covering, slow
from tests.models import GROWING, Case, quiet, run, same_bits, scaled_fp32

pytestmark = pytest.mark.wide

STAGES = (0, 1, 2, 3)
CLIPS: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"clip": "norm", "clip_at": 0.05},
    "value": {"clip": "value", "clip_at": 0.01},
}
TIERS: dict[str, dict[str, Any]] = {
    "none": {},
    "cpu": {"offload.optimizer": "cpu"},
    "nvme": {"offload.optimizer": "nvme"},
    "delayed": {"offload.optimizer": "nvme", "offload.delay_after": 1},
    "mixed": {"offload.optimizer": TierConfig(tier="nvme", ratio=0.6), "offload.gradients": "cpu"},
}


AXES: dict[str, Sequence[Any]] = {
    "stage": STAGES,
    "accumulate": (1, 3),
    "clip": list(CLIPS.values()),
    "optimizer": ("adamw", "sgd", "two"),
    "traits": ((), ("private",)),  # who looks at gradients
    "tier": list(TIERS),
}


def is_possible(row: dict[str, Any]) -> bool:
    if row["stage"] == 0 and row["tier"] != "none":
        return False
    if row["tier"] == "delayed" and (row["optimizer"] == "two" or row["stage"] == 3):
        return False
    return row["optimizer"] != "two" or not row["traits"]


def case_of(row: dict[str, Any]) -> Case:
    # torch's own fused kernel, or ours, which multiplies the scale in itself
    fused = True if row["tier"] == "none" and not row["traits"] else None
    names = ("stage", "traits", "optimizer", "accumulate")
    own = {"fused": fused, "steps": 5, "options": tuple(TIERS[row["tier"]].items())}
    return Case(**{name: row[name] for name in names}, **own, **row["clip"])


def check_cases(rank: int, world_size: int, folder: str, cases: list[Case]) -> list[str]:
    """Which of them differ from the run without a loss scale."""
    problems: list[str] = []
    for case in cases:
        here = replace(case, options=(("offload.nvme_path", folder), *case.options))
        plain, scaled = (run(rank, world_size, replace(here, precision=p)) for p in ("32-true", "32-scaled"))
        if not same_bits(plain, scaled) or plain.norms != scaled.norms:
            problems.append(f"{case!r}: norms {plain.norms} and {scaled.norms}")
    return problems


def check(function: Callable[..., list[str]], world_size: int, *args: Any, timeout_s: float = 150) -> None:
    """Run ``function`` on so many ranks; it reports what differs."""
    with tempfile.TemporaryDirectory() as folder:
        found = spawn(function, world_size, folder, *args, init_process_group=False, timeout_s=timeout_s)
    problems = [p for rank in found for p in rank]
    assert not problems, f"{len(problems)} differ:\n" + "\n".join(problems[:20])


@pytest.mark.parametrize(
    ("world_size", "together"), [(1, 2), (2, 2), slow(1, 3), slow(2, 3)], ids=lambda number: str(number)
)
@pytest.mark.timeout(3600)
def test_a_loss_scale_changes_no_bit(world_size: int, together: int) -> None:
    """With every so many settings."""
    rows = covering(AXES, together, is_possible)
    check(check_cases, world_size, [case_of(row) for row in rows], timeout_s=150 if together == 2 else 3500)


# --- manual optimization ----------------------------------------------------------------------------------------------


class NeverZeroes(manual.AdamW):
    """Every step goes on with the gradients of all steps before."""

    def training_step(self, batch: Any, i: int) -> None:
        self.manual_backward(self.noted_loss(batch))
        optimizer: Any = self.optimizers()
        optimizer.step()


class NeverZeroesAndClips(manual.Manual):
    """The clipped gradients are gone on with."""

    def training_step(self, batch: Any, i: int) -> None:
        opt: Any = self.optimizers()
        self.manual_backward(self.noted_loss(batch))
        how: dict[str, Any] = {"gradient_clip_val": 0.5, "gradient_clip_algorithm": "norm"}
        self.clip_gradients(opt, **(how if i % 2 else {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}))
        opt.step()
        if i % 3 == 2:
            opt.zero_grad(set_to_none=i % 2 == 0)


class TwoBackwardsTwoSteps(manual.Manual):
    """A step between two backward passes whose gradients add up, and one after them."""

    def training_step(self, batch: Any, i: int) -> None:
        opt: Any = self.optimizers()
        self.manual_backward(self.noted_loss(batch))
        opt.step()
        self.manual_backward(0.5 * self(batch[0]).square().mean())
        opt.step()
        opt.step()
        self.zero_grad()


class ZeroesByHalves(manual.AdamW):
    """One module's gradients are kept over the step."""

    def training_step(self, batch: Any, i: int) -> None:
        super().training_step(batch, i)
        self.blocks.zero_grad(set_to_none=i % 2 == 0)


class TurnsThatKeep(manual.Gan):
    """Two optimizers whose gradients come from one loss; each step may change the scale before the other's."""

    def training_step(self, batch: Any, i: int) -> None:
        opt_g, opt_c = self.optimizers()  # type: ignore[misc]
        loss = manual.functional.softplus(self.critic(self.generator(self.shared(batch[0])))).mean()
        self.losses.append(loss.item())
        self.manual_backward(loss)
        opt_g.step()
        if i % 3 == 2:
            opt_c.step()
            opt_c.zero_grad()
        opt_g.zero_grad()


class ClipsByTorch(Net):
    """In the place where Lightning clips, and reads the result once more after the step."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.seen.append(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05).item())

    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        self.seen += [float(p.grad.sum()) for p in self.parameters() if p.grad is not None]


class HasStepHooks(Net):
    """The optimizer's step has a hook, which could look, too."""

    def on_fit_start(self) -> None:
        self.trainer.optimizers[0].register_step_pre_hook(lambda *_: None)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            assert p.grad is not None
            p.grad.add_(0.125)


class StepsItself(Net):
    """The step is the module's own, and gradients are replaced."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            assert p.grad is not None
            p.grad = p.grad.clone().clamp_(-0.01, 0.01)


LOOKING: list[type[Net]] = [ClipsByTorch, HasStepHooks, StepsItself]
"""User code that sees gradients when the loss scale is undone."""


class EditsAfterBackward(Net):
    """It hears of the loss, reads gradients and adds to them."""

    accumulate = 2

    def on_before_backward(self, loss: Any) -> None:
        self.seen.append(loss.item())

    def on_after_backward(self) -> None:
        for p in self.parameters():
            assert p.grad is not None
            self.seen.append(p.grad.abs().max().item())
            p.grad.add_(0.125)


class EditsByHand(manual.Manual):
    """Two passes add up; after each, gradients are changed, replaced and clipped."""

    def training_step(self, batch: Any, i: int) -> None:
        opt: Any = self.optimizers()
        opt.zero_grad()
        for part in batch[0].chunk(2):
            self.manual_backward(self.noted(self(part).square().mean()))
            self.seen.append(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.25).item())
            for p in self.blocks[1].parameters():
                assert p.grad is not None
                p.grad = p.grad.clone().clamp_(-0.015625, 0.015625)
        opt.step()


HIDDEN: list[type[Net]] = [EditsAfterBackward, EditsByHand]
"""User code that sees gradients before the step, where Lightning's strategies have no loss scale (``16-true``)."""

MANUAL: list[type[Net]] = [
    *(case for group in manual.GROUPS.values() for case in group),
    NeverZeroes,
    NeverZeroesAndClips,
    TwoBackwardsTwoSteps,
    ZeroesByHalves,
    TurnsThatKeep,
]
ADDING = [manual.AccumulateByHand, manual.AccumulateToggled, manual.RawBackward, manual.TwoOptimizersOneBackward]
EDITS = (manual.EditsInPlace, manual.EditsByReplacing)  # not of what rests on a drive


def train_manual(rank: int, world_size: int, net: type[Net], stage: int, **options: Any) -> tuple[Any, Any, Any]:
    """Losses, what was seen, and weights."""
    module = net()
    strategy = ZeROStrategy(stage, **nested({"sharding.min_unit_numel": 0, **options}))  # type: ignore[arg-type]
    data = global_batches(rank, world_size, 5)
    options = {"accumulate_grad_batches": getattr(net, "accumulate", 1), "use_distributed_sampler": False}
    fit(strategy, module, data, max_epochs=1, **options)
    return module.losses, module.seen, weights(module)


def check_manual(rank: int, world_size: int, folder: str, runs: list[tuple[type[Net], int, str]]) -> list[str]:
    """Which of these modules, stages and tiers differ from the run without a loss scale."""
    quiet()
    problems: list[str] = []
    for net, stage, tier in runs:
        if (stage == 0 and tier != "none") or (tier != "none" and net in EDITS):
            continue
        options = {**TIERS[tier], "offload.nvme_path": folder}
        plain = train_manual(rank, world_size, net, stage, **options)
        with scaled_fp32():
            scaled = train_manual(rank, world_size, net, stage, **options, **{"precision.loss_scale": GROWING})
        equal = plain[:2] == scaled[:2] and all(torch.equal(v, scaled[2][k]) for k, v in plain[2].items())
        if not equal:
            problems.append(f"{net.__name__}, stage {stage}, {tier}: {plain[:2]} and {scaled[:2]}")
    return problems


@pytest.mark.parametrize(
    ("world_size", "stages", "tier"), [(1, [0], "none"), (2, [0, 1, 2], "none"), (2, [2], "nvme"), (1, [1], "cpu")]
)
def test_a_loss_scale_changes_no_bit_of_manual_optimization(world_size: int, stages: list[int], tier: str) -> None:
    nets = MANUAL if world_size == 1 else [*ADDING, *MANUAL[-5:]]
    check(check_manual, world_size, [(net, stage, tier) for net in nets for stage in stages])


@pytest.mark.parametrize(("world_size", "tiers"), [(2, ("nvme",)), (1, ("none", "nvme")), slow(2, tuple(TIERS))])
def test_a_loss_scale_is_undone_where_user_code_looks(world_size: int, tiers: Sequence[str]) -> None:
    rows = [(net, stage, tier) for net in LOOKING for stage in (1, 2, 3) for tier in tiers]
    check(check_manual, world_size, [row for row in rows if row[1:] != (3, "delayed")])


@pytest.mark.parametrize(("world_size", "tier"), [(2, "none"), (1, "none"), slow(2, "cpu"), (2, "nvme")])
def test_a_loss_scale_that_ddp_does_not_have_is_never_seen(world_size: int, tier: str) -> None:
    check(check_manual, world_size, [(net, stage, tier) for net in HIDDEN for stage in STAGES])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loss_scale_changes_no_bit_of_any_manual_optimization(world_size: int) -> None:
    """Every module with every stage and every tier, and every stage with every tier."""
    rows = covering({"net": MANUAL, "stage": STAGES, "tier": ("none", "cpu", "nvme", "mixed")})
    check(check_manual, world_size, [(row["net"], row["stage"], row["tier"]) for row in rows], timeout_s=3500)


# --- divided models ---------------------------------------------------------------------------------------------------

EXPERTS = {"num_experts": 4, "k": 2, "drop_tokens": False, "second_expert_sampling": False}
FOUR = {"num_layers": 4}


def divided(world_size: int) -> dict[str, list[Run]]:
    """Every kind of division that so many ranks have, by name."""
    pipeline = {"parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2}
    kinds: dict[str, Run] = {
        "tensor": Run({"parallel.tensor.size": 2}),
        "megatron": Run({"parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True}),
        "ulysses": Run({"parallel.context": 2}),
        "pipeline": Run(pipeline),
        "interleaved": Run({**pipeline, "parallel.pipeline.schedule": "interleaved_1f1b"}, FOUR),
        "zero_bubble": Run({**pipeline, "parallel.pipeline.schedule": "zero_bubble"}, FOUR),
        "expert": Run({"parallel.expert": 2}, experts=EXPERTS),
    }
    stages = {1: (1, 3), 2: (1, 3), 4: STAGES}[world_size]
    found: dict[str, list[Run]] = {}
    for kind, one in kinds.items():
        for stage, accumulate, clip in itertools.product(stages, (1, 3), (None, 0.3)):
            trainer: dict[str, Any] = {"accumulate_grad_batches": accumulate, "gradient_clip_val": clip}
            options = {"stage": stage, **(one.options or {})}
            found.setdefault(kind, []).append(
                replace(one, options=options, steps=5 * accumulate, batch=world_size * 2, trainer=trainer)  # type: ignore[operator]
            )
    return found


class Quick(parallel_runs.Module):
    """No hook of it runs between backward and the next forward, so that it has no losses and norms either."""

    on_train_batch_end = pl.LightningModule.on_train_batch_end  # type: ignore[assignment]
    on_before_optimizer_step = pl.LightningModule.on_before_optimizer_step


def check_divided(rank: int, world_size: int, folder: str, runs: list[Run]) -> list[str]:
    """Which of them differ from the run without a loss scale."""
    problems: list[str] = []
    for number, one in enumerate(runs):
        kind = parallel_runs.Module if number % 2 else Quick
        scaled = replace(one, options={**(one.options or {}), "precision.loss_scale": GROWING})
        a = parallel_runs.train(rank, world_size, one, kind)
        with scaled_fp32():
            b = parallel_runs.train(rank, world_size, scaled, kind)
        same = (a.losses, a.norms) == (b.losses, b.norms)
        if not same or not all(torch.equal(v, b.weights[k]) for k, v in a.weights.items()):
            problems.append(f"{one}: norms {a.norms} and {b.norms}")
    return problems


def every_other(runs: list[Run]) -> list[Run]:
    """A run of every kind with accumulation and one without; one clips, one does not."""
    return [runs[0], runs[-1]]


@pytest.mark.slow
def test_a_loss_scale_changes_no_bit_of_divided_models() -> None:
    runs = [one for kind in divided(2).values() for one in every_other(kind)]
    check(check_divided, 2, runs)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_loss_scale_changes_no_bit_of_divided_models_with_replicas() -> None:
    runs = [one for kind in divided(4).values() for one in kind[::3]]
    check(check_divided, 4, runs, timeout_s=3500)


# --- what must not pass silently --------------------------------------------------------------------------------------


class MixesBackwards(manual.Manual):
    """Adds gradients of a loss that nobody scaled to those of one that was."""

    def training_step(self, batch: Any, i: int) -> None:
        self.manual_backward(self.noted_loss(batch))
        (0.5 * self(batch[0]).square().mean()).backward()
        optimizer: Any = self.optimizers()
        optimizer.step()


@on_ranks(2)
def test_unscaled_gradients_are_not_added_to_scaled_ones(rank: int, world_size: int) -> None:
    for stage in STAGES:
        with scaled_fp32(), pytest.raises(StateError, match=r"loss\.backward\(\).*Call self\.manual_backward\(loss\)"):
            train_manual(rank, world_size, MixesBackwards, stage, **{"precision.loss_scale": GROWING})
