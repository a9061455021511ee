"""Habits of user code with gradients: the same code under DDP gives the same numbers, at every stage and tier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import grad_norm
from torch import Tensor

from ls_strategy.config import LossScaleConfig, nested
from ls_strategy.errors import StateError
from ls_strategy.lightning.precision import ZeROPrecision
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import Module, Run, train
from tests.dist.ranks import WIDTH, fit, global_batches, on_ranks, quiet
from tests.dist.test_combinations import EXPERTS, LAYOUTS
from tests.dist.test_habits import OPTIONS, STEPS, Habit, outcome, problems
from tests.marks import few_or_all, in_turn


class ByHand(Habit):
    """Manual optimization."""

    manual = True


CLIP = 0.05
"""Below the norms of all steps."""


class Folding(Habit):
    """Its updates multiply the clip factor in."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-2)


class Clips(Habit):
    """In the place where Lightning clips, by torch's own function."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.note(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1))


class ClipsByValue(Habit):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.003)


class ClipsABlock(Habit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note(torch.nn.utils.clip_grad_norm_(self.blocks[1].parameters(), 0.01))


class ClipsByHand(ByHand):
    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.noted_loss(batch))
        self.note(torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1))
        optimizer.step()


class Scales(Habit):
    def on_after_backward(self) -> None:
        for p in self.blocks.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


class ScalesData(Habit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad.data.clamp_(-0.003, 0.003)  # type: ignore[union-attr]


class Drops(Habit):
    """Some gradients are thrown away: no decay, no step."""

    def on_after_backward(self) -> None:
        for p in self.blocks[1].parameters():
            p.grad = None
        self.last.bias.grad = None


class DropsInTurn(Habit):
    """Half of the parameters train in every second step."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.blocks[self.trainer.global_step % 3].parameters():
            p.grad = None


class Replaces(Habit):
    def on_after_backward(self) -> None:
        for p in self.blocks[2].parameters():
            p.grad = p.grad.sign() * 1e-3  # type: ignore[union-attr]


class SkipsNaN(ByHand):
    """A step whose gradients are not finite is left out."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss * float("nan") if self.trainer.global_step == 0 and len(self.losses) == 2 else loss

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().loss(batch)
        if i == 2:
            loss = loss * float("nan")
        else:
            self.losses.append(loss.item())
        self.manual_backward(loss)
        if all(p.grad.isfinite().all() for p in self.parameters() if p.grad is not None):
            optimizer.step()


class LightningsNorm(Habit):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for value in grad_norm(self, 2).values():
            self.note(value)


class Noise(Habit):
    def on_after_backward(self) -> None:
        generator = torch.Generator().manual_seed(len(self.losses))
        for p in self.parameters():
            assert p.grad is not None
            p.grad += 1e-3 * torch.randn(p.shape, generator=generator)


class NoiseInPlace(Habit):
    """More buffers are gathered than stay."""

    def on_after_backward(self) -> None:
        for p in self.parameters():
            assert p.grad is not None
            assert p.grad.abs().max() > 0
            p.grad.add_(1e-3)


class ReadsAfterTheStep(Folding):
    def on_train_batch_end(self, *_: Any) -> None:
        for p in self.parameters():
            assert p.grad is not None
            self.note(p.grad.abs())


class ReadsInTheNextStep(Folding):
    """Before they are dropped, in places that are no hooks between backward and `zero_grad`."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.note(sum(p.grad.sum() for p in self.parameters() if p.grad is not None))

    def training_step(self, batch: Any, i: int) -> Tensor:
        self.note(sum(p.grad.norm() for p in self.blocks.parameters() if p.grad is not None))
        return super().training_step(batch, i)


class ClipsTwice(Habit):
    """With `CLIP` both times: the second finds what the first has left."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.clip_gradients(optimizer, CLIP, "norm")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                self.note(p.grad.norm())
                self.note(p.grad[0])


class ClipsTwiceByTheUpdate(Folding):
    on_before_optimizer_step = ClipsTwice.on_before_optimizer_step
    on_before_zero_grad = ClipsTwice.on_before_zero_grad


class ZeroesThem(Habit):
    """After backward, for a part of the model."""

    def on_after_backward(self) -> None:
        self.note(sum(p.grad.norm() for p in self.parameters()))  # type: ignore[union-attr]
        self.blocks[0].zero_grad()
        self.blocks[2].narrow.zero_grad(set_to_none=False)
        for p in self.blocks[1].parameters():
            assert p.grad is not None
            p.grad.zero_()
        self.note(sum(p.grad.norm() for p in self.parameters() if p.grad is not None))


class Conflicts(ByHand):
    """Two losses, two backwards, and the second's gradient without its part against the first's (PCGrad)."""

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        gradients = []
        for target in batch[1], -batch[1]:
            optimizer.zero_grad()
            self.manual_backward(self.noted_loss((batch[0], target)))
            gradients.append([p.grad.clone() for p in self.parameters()])  # type: ignore[union-attr]
        inner = sum((a * b).sum() for a, b in zip(*gradients, strict=True))
        square = sum((a * a).sum() for a in gradients[0])
        self.note(inner)
        for p, a, b in zip(self.parameters(), *gradients, strict=True):
            p.grad = a + b - (inner.clamp(max=0) / square) * a  # type: ignore[union-attr]
        optimizer.step()


class OtherNorms(Habit):
    """Of several orders, of single parameters, between changes of one element and of all."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for order in (1.0, 2.0, 3.5, float("inf"), float("-inf"), 0.0):
            for p in self.parameters():
                assert p.grad is not None
                self.note(torch.linalg.vector_norm(p.grad, order))
        first, second = self.blocks[0].wide, self.blocks[1].narrow
        assert first.weight.grad is not None
        assert second.weight.grad is not None
        first.weight.grad.div_(-4)
        self.note(first.weight.grad.norm())
        first.weight.grad[0, 0] = 0.5  # in one rank's shard
        self.note(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()], 3.0))  # type: ignore[misc]
        second.weight.grad.clamp_(min=0).nan_to_num_()
        self.note(second.weight.grad.norm(1))
        self.note(torch.linalg.norm(second.weight.grad, ord="nuc"))
        self.note(torch.linalg.matrix_norm(second.weight.grad))
        self.note(second.weight.grad.norm(dim=1).max())


class NormThenEdit(Habit):
    """The strategy's norm, then an element that is in one rank's shard, then clipping: what the norm was is no more."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = getattr(self.trainer.strategy, "grad_norm", None)
        if norm is not None:
            norm()
        self.first.weight.grad[0, 0] += 1.0  # type: ignore[index]

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class AsksTwice(Habit):
    """For the strategy's norm, before and after a change of all gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        before = self.total_norm(optimizer)
        for p in self.parameters():
            assert p.grad is not None
            p.grad.mul_(0.5)
        self.note(self.total_norm(optimizer) / before)


class KeepsObjects(Habit):
    """Gradients that were taken in one hook and are changed in others, before and after the engine clips."""

    def on_after_backward(self) -> None:
        self.kept = [p.grad for p in self.parameters()]
        self.kept[0][0] *= 3  # type: ignore[index]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.kept[1].mul_(2)  # type: ignore[union-attr]
        self.kept[2][:1] += 0.01  # type: ignore[index]

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.kept[3].mul_(2)  # type: ignore[union-attr]
        self.kept[4].copy_(self.kept[4].flip(0))  # type: ignore[union-attr]
        self.note(torch.stack([k.norm() for k in self.kept]))  # type: ignore[union-attr]


class GivesItsOwn(Habit):
    """``p.grad`` is a tensor of the user's, which goes on changing."""

    def on_after_backward(self) -> None:
        self.mine = {}
        for name, p in self.named_parameters():
            if "blocks" in name:
                self.mine[name] = p.grad.clone() * 2  # type: ignore[union-attr]
                p.grad = self.mine[name]
                assert p.grad is self.mine[name]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for mine in self.mine.values():
            mine.mul_(0.75)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.note(torch.stack([p.grad.norm() for p in self.parameters()]))  # type: ignore[union-attr]
        self.note(torch.stack([mine.norm() for mine in self.mine.values()]))
        for mine in self.mine.values():
            mine.add_(1e-3)


class ReusesItsOwn(Habit):
    """``p.grad`` is a buffer that lives on from step to step: an average of gradients."""

    def on_after_backward(self) -> None:
        if not hasattr(self, "averages"):
            self.averages = [torch.zeros(p.shape) for p in self.parameters()]
        for p, average in zip(self.parameters(), self.averages, strict=True):
            average.lerp_(p.grad, 0.5)  # type: ignore[arg-type]
            p.grad = average


class ViewsOfAll(Habit):
    """Views of every gradient at once, written to after that."""

    def on_after_backward(self) -> None:
        views = [p.grad.view(-1) for p in self.parameters()]  # type: ignore[union-attr]
        for view in views:
            view.mul_(0.5)
        self.note(torch.cat(views).norm())


class PointsElsewhere(Habit):
    def on_after_backward(self) -> None:
        for p in self.blocks[1].parameters():
            p.grad.data = p.grad.sign() * 1e-3  # type: ignore[union-attr]


class ChangesThenAdds(ByHand):
    """Two backwards before the step; in between gradients are clipped, changed and dropped, and then added to."""

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.noted_loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.blocks[0].wide.weight.grad.mul_(3)
        self.blocks[1].wide.weight.grad = None
        self.first.weight.grad[0] = 0.01  # type: ignore[index]
        self.manual_backward(self.noted_loss((batch[0], -batch[1])))
        self.note(torch.stack([p.grad.norm() for p in self.parameters()]))  # type: ignore[union-attr]
        self.clip_gradients(optimizer, gradient_clip_val=0.003, gradient_clip_algorithm="value")
        self.manual_backward(self.noted_loss((batch[0] * 2, batch[1])))
        optimizer.step()


class SetsAside(ByHand):
    """The gradients of one backward are put aside by name, not copied, while another one runs."""

    def training_step(self, batch: Any, i: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.noted_loss(batch))
        aside = [p.grad.float() * 1 for p in self.parameters()]  # type: ignore[union-attr]
        for p in self.parameters():
            p.grad = None
        self.manual_backward(self.noted_loss((batch[0], -batch[1])))
        for p, other in zip(self.parameters(), aside, strict=True):
            p.grad = p.grad + other  # type: ignore[operator]
        optimizer.step()
        optimizer.zero_grad(set_to_none=i % 2 == 0)


class HooksOfParameters(Habit):
    """``register_post_accumulate_grad_hook`` before the fit: what the hook sees and changes is this rank's own."""

    def __init__(self) -> None:
        super().__init__()
        for p in self.blocks[1].parameters():
            p.register_post_accumulate_grad_hook(self.halve)

    @staticmethod
    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)


HABITS = [
    Clips, ClipsByValue, ClipsABlock, ClipsByHand, Scales, ScalesData, Drops, DropsInTurn, Replaces, SkipsNaN,
    LightningsNorm, Noise, ReadsAfterTheStep, ReadsInTheNextStep, ZeroesThem, Conflicts, OtherNorms, NormThenEdit,
    AsksTwice, KeepsObjects, GivesItsOwn, ReusesItsOwn, ViewsOfAll, PointsElsewhere, ChangesThenAdds, SetsAside,
    HooksOfParameters,
]  # fmt: skip

AND_STAGE_0 = {"zero0": {"stage": 0}, **OPTIONS}


@pytest.mark.sample(5)
@pytest.mark.parametrize(("habit", "options"), in_turn(HABITS, AND_STAGE_0))
def test_on_two_ranks_as_under_ddp(habit: type[Habit], options: dict[str, Any]) -> None:
    found = spawn(problems, 2, habit, options, timeout_s=100)
    assert not any(found), "\n".join(found[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize(("habit", "options"), in_turn([Scales, Clips, Drops, LightningsNorm, NoiseInPlace], OPTIONS))
def test_with_accumulation_as_under_ddp(habit: type[Habit], options: dict[str, Any]) -> None:
    """Hooks after every backward see what has come so far."""
    found = spawn(problems, 2, habit, options, {"accumulate_grad_batches": 2}, timeout_s=100)
    assert not any(found), "\n".join(found[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("habit", "options"),
    in_turn([ReadsAfterTheStep, ReadsInTheNextStep, ClipsTwice, ClipsTwiceByTheUpdate], AND_STAGE_0),
)
def test_with_clipping_as_under_ddp(habit: type[Habit], options: dict[str, Any], ranks: int) -> None:
    """The factor that updates multiply in is in ``p.grad`` after the step too."""
    found = spawn(problems, ranks, habit, options, {"gradient_clip_val": CLIP}, timeout_s=100)
    assert not any(found), "\n".join(found[0])


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("habit", "stages"),
    [
        (Clips, (2,)),
        *((each, (1, 2, 3)) for each in (Clips, ClipsByValue, Replaces, KeepsObjects, GivesItsOwn, ChangesThenAdds)),
    ],
)
def test_where_gradients_rest_on_a_drive(habit: type[Habit], stages: tuple[int, ...], tmp_path: Path) -> None:
    drive: dict[str, Any] = {
        "offload.optimizer": "nvme",
        "offload.nvme_path": str(tmp_path),
        "sharding.min_unit_numel": 0,
    }
    options = {f"zero{stage}_nvme": {"stage": stage, **drive} for stage in stages}
    found = spawn(problems, 2, habit, options, timeout_s=100)
    assert not any(found), "\n".join(found[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("habit", "options"),
    in_turn([Clips, Replaces, ScalesData, KeepsObjects, GivesItsOwn, ReusesItsOwn, OtherNorms], OPTIONS),
)
def test_on_one_rank_as_a_plain_trainer(habit: type[Habit], options: dict[str, Any]) -> None:
    found = spawn(problems, 1, habit, options, timeout_s=100)
    assert not any(found), "\n".join(found[0])


class TwoNorms(Habit):
    """Torch's own norm of ``p.grad`` beside the strategy's, where gradients are scaled, and where they are not."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        strategy: Any = self.trainer.strategy
        before = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])  # type: ignore[misc]
        self.note(before / strategy.grad_norm() - 1)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        after = torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])  # type: ignore[misc]
        self.note(strategy.grad_norm() / after - 1)
        self.note(after.clamp(min=0.1) / 0.1 - 1)


FEW = ("zero2", "zero3_offload")
"""Of the options: of both ways to shard gradients, and of both tiers, one."""


def norms(rank: int, world_size: int, precision: str, names: Sequence[str]) -> list[str]:
    quiet()
    found = []
    for name in names:
        options = OPTIONS[name]
        module = TwoNorms()
        data = global_batches(rank, world_size, STEPS)
        plugin, scale = ZeROPrecision(precision), LossScaleConfig(initial_power=6)
        strategy = ZeROStrategy(precision_plugin=plugin, **nested({**options, "precision.loss_scale": scale}))
        fit(strategy, module, data, use_distributed_sampler=False, max_epochs=1)
        worst = max(map(abs, module.seen))
        found += [f"{name}: {worst}, {len(module.seen)} norms"] * (not worst < 1e-6 or len(module.seen) < 2 * STEPS)
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("precision", "names"),
    [("16-mixed", FEW), *((each, tuple(OPTIONS)) for each in ("bf16-true", "16-mixed", "16-true"))],
)
def test_norms_and_clipping_in_16_bit(precision: str, names: Sequence[str]) -> None:
    found = spawn(norms, 2, precision, names, timeout_s=100)
    assert not any(found), found[0]


def refused(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    quiet()
    run = Run(layout, {"num_layers": 4}, EXPERTS if "parallel.expert" in layout else None, 2)
    with pytest.raises(StateError, match=r"grad was read under (tensor|pipeline|expert) parallelism.*grad_norm\(\)"):
        train(rank, world_size, run, ClipsParts)


class ClipsParts(Module):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "sequence"])
def test_norms_over_a_part_of_the_model_are_refused(name: str) -> None:
    """Not under sequence parallelism, which leaves every rank with the whole model."""
    spawn(refused, 2, LAYOUTS[name], init_process_group=False, timeout_s=60)


@pytest.mark.parametrize("names", few_or_all(FEW, tuple(OPTIONS)))
@on_ranks(2, timeout_s=100, init_process_group=True)
def test_a_lambda_callback_is_user_code(rank: int, world_size: int, names: Sequence[str]) -> None:
    """Though its class is Lightning's: it sees gradients without the loss scale."""
    seen: list[float] = []

    def look(trainer: Any, module: Any, optimizer: Any) -> None:
        gradients = [p.grad for p in module.parameters()]
        seen.append(float(torch.nn.utils.get_total_norm(gradients) / trainer.strategy.grad_norm() - 1))

    for name in names:
        strategy = ZeROStrategy(
            precision_plugin=ZeROPrecision("16-mixed"),
            **nested({**OPTIONS[name], "precision.loss_scale": LossScaleConfig(initial_power=6)}),
        )
        callback = LambdaCallback(on_before_optimizer_step=look)
        data = global_batches(rank, world_size, 2)
        fit(strategy, Habit(), data, use_distributed_sampler=False, max_epochs=1, callbacks=[callback])
    assert len(seen) == 2 * len(names)
    assert max(map(abs, seen)) < 1e-6


class LooksOnOneRank(Habit):
    """At stage 0 gradients are on every rank, as under DDP."""

    def on_after_backward(self) -> None:
        if self.global_rank == 0:
            self.note(sum(p.grad.norm() for p in self.parameters() if p.grad is not None))


class UsedOnOneRank(LooksOnOneRank):
    """A layer that only rank 1 has used has a gradient on rank 0."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.global_rank == 1:
            loss = loss + self.extra(batch[0]).square().mean()
        return loss

    def build(self) -> None:
        super().build()
        self.extra = torch.nn.Linear(WIDTH, 3)


@on_ranks(2, init_process_group=True)
def test_one_rank_may_look_alone_where_all_have_them(rank: int, world_size: int) -> None:
    found = []
    for habit in (LooksOnOneRank, UsedOnOneRank):
        data = global_batches(rank, world_size, STEPS)
        seen = []
        for strategy in ("ddp_find_unused_parameters_true", ZeROStrategy(0)):
            module = habit()
            fit(strategy, module, data, use_distributed_sampler=False, max_epochs=1)
            seen.append(torch.tensor(module.seen))
        assert len(seen[0]) == (STEPS if rank == 0 else 0)
        if not torch.allclose(*seen, rtol=1e-6):
            found.append(f"{habit.__name__}: {seen}")
    assert not found, found


# --- what it costs ----------------------------------------------------------------------------------------------------


def traffic_of(strategy: Any) -> dict[str, int]:
    return dict(strategy.require_engine().comm.traffic.bytes)


class Counts(Habit):
    """Bytes that torch's clipping sends, and gradients in full that are in memory while all are read."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[dict[str, int]] = []
        self.largest = 0

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        engine = self.trainer.strategy.require_engine()  # type: ignore[attr-defined]
        engine.finish(0)
        before = traffic_of(self.trainer.strategy)
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        torch.nn.utils.clip_grad_value_(self.parameters(), 0.05)
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        after = traffic_of(self.trainer.strategy)
        self.sent.append({kind: after[kind] - before.get(kind, 0) for kind in after if after[kind] != before.get(kind)})

    def on_train_batch_end(self, *_: Any) -> None:
        gradients = self.trainer.strategy.require_engine().gradients  # type: ignore[attr-defined]
        for p in self.parameters():
            assert p.grad is not None
            self.note(p.grad.sum())
            self.largest = max(self.largest, sum(s.full is not None for s in gradients._shown.values()))


@pytest.mark.parametrize("names", few_or_all(FEW, tuple(OPTIONS)))
@on_ranks(2, timeout_s=100, init_process_group=True)
def test_torchs_clipping_sends_a_number_per_parameter_and_reading_takes_few_buffers(
    rank: int, world_size: int, names: Sequence[str]
) -> None:
    """8 bytes of its norm, and the flags of what has a gradient; two buffers that stay and the one that is read."""
    found = []
    for name in names:
        options, module = OPTIONS[name], Counts()
        data = global_batches(rank, world_size, 2)
        fit(ZeROStrategy(**nested(options)), module, data, use_distributed_sampler=False, max_epochs=1)
        parameters = len(list(module.parameters()))
        found += [f"{name} sent {s}" for s in module.sent if set(s) - {"control"} or s["control"] > 30 * parameters]
        found += [f"{name}: {module.largest} gathered buffers"] * (module.largest > 3)
    assert not found, found


# --- what is refused --------------------------------------------------------------------------------------------------


class UsesWhatIsGone(Habit):
    def on_after_backward(self) -> None:
        self.kept = [p.grad for p in self.parameters()]

    def on_train_batch_start(self, *_: Any) -> None:
        if hasattr(self, "kept"):
            self.trainer.optimizers[0].zero_grad()
            self.kept[0].sum()  # type: ignore[union-attr]


class UsesItInBackward(ByHand):
    def training_step(self, batch: Any, i: int) -> None:
        self.manual_backward(self.noted_loss(batch))
        kept = self.first.weight.grad
        output = self(batch[0])
        output.register_hook(lambda grad: grad * kept.sum())  # type: ignore[union-attr]
        self.manual_backward(output.sum())


class KeepsAView(Habit):
    def on_after_backward(self) -> None:
        self.view = self.first.weight.grad.view(-1)  # type: ignore[union-attr]

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.view.mul_(2)


class GivesAnotherShape(Habit):
    def on_after_backward(self) -> None:
        self.first.weight.grad = torch.zeros(1)


class HooksTooLate(Habit):
    def on_train_start(self) -> None:
        for p in self.blocks[1].parameters():
            p.register_post_accumulate_grad_hook(HooksOfParameters.halve)


REFUSED = {
    UsesWhatIsGone: r"was used after zero_grad\(\).*Keep p\.grad\.clone\(\)",
    UsesItInBackward: r"kept from an earlier backward was used where gradients are not averaged",
    KeepsAView: r"a view of first\.weight\.grad.*Write to p\.grad itself",
    GivesAnotherShape: r"Got a gradient of shape \(1,\) for 'first\.weight'",
}


def refuse(rank: int, world_size: int, habit: type[Habit], message: str, each: dict[str, Any]) -> None:
    quiet()
    for options in each.values():
        with pytest.raises(StateError, match=message):
            outcome(rank, world_size, habit, ZeROStrategy(**nested(options)))


@pytest.mark.sample(2)
@pytest.mark.parametrize(("habit", "options"), in_turn(list(REFUSED), OPTIONS))
def test_what_cannot_be_had_is_an_error_with_the_cure(habit: type[Habit], options: dict[str, Any]) -> None:
    spawn(refuse, 2, habit, REFUSED[habit], options, timeout_s=100)


@pytest.mark.parametrize("names", few_or_all(FEW, tuple(OPTIONS)))
@on_ranks(2, timeout_s=100, init_process_group=True)
def test_hooks_that_come_too_late_are_refused_or_count(rank: int, world_size: int, names: Sequence[str]) -> None:
    """What is neither equal to DDP nor refused."""
    cure, options = "Register such hooks in __init__", {name: OPTIONS[name] for name in names}
    found = [problem for problem in problems(rank, world_size, HooksTooLate, options) if cure not in problem]
    assert not found, found
