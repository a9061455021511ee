"""`CorruptionCheck`: a run with a flipped bit ends with the bits of an undisturbed one, and the rank is named.

The trusted runs are those of this package on the same ranks without the callback and without the flip.
"""

from __future__ import annotations

import ctypes
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ls_strategy import CorruptionCheck, PlanError, StateError, ZeROPrecision, ZeROStrategy
from ls_strategy.distributed.comm import PendingGather, PendingReduce
from ls_strategy.testing import spawn
from tests.dist.ranks import WIDTH, Net, on_ranks, samples
from tests.dist.test_spike_guard import Noisy, assert_same, train
from tests.models import quiet

STEPS = 8


def flip(tensor: Tensor, rng: random.Random) -> None:
    """Flip a bit behind torch's back: no version is counted."""
    byte, bit = rng.randrange(tensor.nbytes), rng.randrange(8)
    assert tensor.is_contiguous()
    at = ctypes.c_uint8.from_address(tensor.data_ptr() + byte)
    at.value ^= 1 << bit


class Flip(Callback):
    """Flips one bit on one rank, once."""

    def __init__(self, kind: str, rank: int, step: int, seed: int) -> None:
        self.kind, self.rank, self.step = kind, rank, step
        self.rng = random.Random(seed)
        self.done = False
        self.hook = self.rng.choice(["on_train_batch_start", "on_before_backward", "on_after_backward"])
        self.undo: list[Callable[[], None]] = []

    def here(self, trainer: Any) -> bool:
        return not self.done and trainer.global_rank == self.rank and trainer.global_step == self.step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.hook == "on_train_batch_start":
            self.weights(trainer)
        if not self.here(trainer):
            return
        if self.kind == "gradient":
            p = self.rng.choice([p for p in module.parameters() if p.requires_grad and p.numel()])
            self.undo.append(p.register_hook(self.once).remove)
        elif self.kind in ("reduced", "gathered"):
            kind, name = (PendingReduce, "finish") if self.kind == "reduced" else (PendingGather, "wait")
            engine, before, skip = trainer.strategy.require_engine(), getattr(kind, name), self.rng.randrange(3)

            def call(pending: Any, *args: Any, **kwargs: Any) -> None:
                nonlocal skip
                gathering = [f for f in engine.flats if pending in (f.gathering, f.local.gathering)]
                before(pending, *args, **kwargs)
                if self.kind == "gathered" and not gathering:
                    return
                skip -= 1
                if skip < 0 and not self.done:
                    self.done = True
                    if args:
                        flip(args[0], self.rng)
                    else:
                        flip(self.arriving(gathering[0], pending), self.rng)

            setattr(kind, name, call)
            self.undo.append(lambda: setattr(kind, name, before))

    @staticmethod
    def arriving(flat: Any, pending: Any) -> Tensor:
        """What a gather has filled."""
        if pending is flat.local.gathering:
            return flat.local.buffer
        return flat.full if flat.wire is None or flat.wire.exact else flat.wire.values

    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        if self.hook == "on_before_backward":
            self.weights(trainer)

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        if self.hook == "on_after_backward":
            self.weights(trainer)

    def weights(self, trainer: Any) -> None:
        if self.kind not in ("weights", "states") or not self.here(trainer):
            return
        self.done, engine = True, trainer.strategy.require_engine()
        if self.kind == "weights":
            flat = self.rng.choice([f for f in engine.flats if f.params])
            flip(flat.full if flat.resident else flat.master, self.rng)
            return
        states = [t for each in engine.optimizers for t in each.sharded.state_tensors() if t.numel()]
        flip(self.rng.choice(states), self.rng)

    def once(self, grad: Tensor) -> Tensor | None:
        if self.done:
            return None
        self.done = True
        grad = grad.clone()
        flip(grad, self.rng)
        return grad

    def on_train_end(self, trainer: Any, module: Any) -> None:
        while self.undo:
            self.undo.pop()()


def data(rank: int, steps: int = STEPS) -> DataLoader:
    x, y = samples(steps * 4, seed=rank + 1)
    return DataLoader(TensorDataset(x, y, torch.ones(len(x))), batch_size=4)


def flipped(rank: int, world_size: int, tmp_path: Path, rounds: int, seed: int) -> None:
    quiet()
    warnings.simplefilter("ignore")
    rng = random.Random(seed)  # the same on all ranks
    expected: dict[tuple[int, int], Any] = {}
    for number in range(rounds):
        stage, every = number % 4, rng.choice([1, 2])
        if (stage, every) not in expected:
            expected[stage, every] = train(stage, data(rank), tmp_path, accumulate_grad_batches=every)
        kind = ("weights", "gradient", "reduced", "gathered", "states")[number % 5]
        bad = rng.randrange(world_size)
        step = rng.randrange(STEPS // every - 1)  # what the last step sends is not compared any more
        step = max(step, kind == "states")  # there are none before the first step
        injected = Flip(kind, bad, step, rng.randrange(1 << 30))
        check = CorruptionCheck(every=1)
        found = train(stage, data(rank), tmp_path, check, injected, accumulate_grad_batches=every)
        what = f"{number}: {kind} of rank {bad}, stage {stage}, step {injected.step}, {injected.hook}"
        assert_same(found, expected[stage, every], what)
        if rank == bad and kind != "gathered":
            assert injected.done, what
        if kind == "gradient" and every == 2:  # the sum over micro-batches may round such a bit away
            assert check.found <= 1, what
        elif kind != "gathered":
            assert check.found == 1, what
        assert check.failures in ({bad: 1}, {}), f"{what}: {check.failures}"
        assert bool(check.failures) == bool(check.found)


def test_a_flipped_bit_leaves_no_trace_and_its_rank_is_named(tmp_path: Path) -> None:
    spawn(flipped, 2, tmp_path, 10, 7, init_process_group=False, timeout_s=150)


def arrived(rank: int, world_size: int, stage: int, tmp_path: Path) -> None:
    """One bit flips in the weights that have come from the other rank, or that this one has sent, on each rank."""
    quiet()
    expected = train(stage, data(rank), tmp_path)
    for number in range(4):
        bad, check = number % 2, CorruptionCheck(every=1)
        injected = Flip("gathered", bad, 2 + number // 2, seed=number)
        assert_same(train(stage, data(rank), tmp_path, check, injected), expected, f"flip {number} on rank {bad}")
        assert rank != bad or injected.done
        assert (check.found, check.failures) == (1, {bad: 1}), number


@pytest.mark.parametrize("stage", [1, 2])
def test_a_bit_flipped_in_weights_that_arrive_is_counted_against_the_rank_that_has_it(
    stage: int, tmp_path: Path
) -> None:
    spawn(arrived, 2, stage, tmp_path, init_process_group=False, timeout_s=60)


@pytest.mark.wide
@on_ranks(4)
def test_a_state_of_a_rank_that_has_more_of_them_than_others_is_restored(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """With AdamW's own step, and shards in which some ranks have nothing of a parameter."""
    expected = train(2, data(rank), tmp_path)
    for bad in (0, 3):
        check = CorruptionCheck(every=1)
        assert_same(train(2, data(rank), tmp_path, check, Flip("states", bad, 3, seed=bad)), expected, f"rank {bad}")
        assert check.failures == {bad: 1}


class Forgets(Noisy):
    """Clears a moment of the first bias, which one rank has in its shard."""

    def __init__(self, every: int = 3) -> None:
        super().__init__()
        self.every = every

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_batch_start(self, batch: Any, i: int) -> None:
        if i % self.every == self.every - 1:
            strategy, optimizer = self.trainer.strategy, self.optimizers().optimizer  # type: ignore[union-attr]
            state = strategy.broadcast(strategy.optimizer_state(optimizer))  # type: ignore[attr-defined]
            state["state"][1]["exp_avg"].zero_()
            optimizer.load_state_dict(state)


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_what_user_code_writes_to_optimizer_states_is_not_taken_for_damage(
    rank: int, world_size: int, stage: int, tmp_path: Path
) -> None:
    check = CorruptionCheck(every=1)
    expected = train(stage, data(rank), tmp_path, module=Forgets())
    assert_same(train(stage, data(rank), tmp_path, check, module=Forgets()), expected, f"stage {stage}")
    with pytest.raises(AssertionError):
        assert_same(train(stage, data(rank), tmp_path, module=Forgets(every=99)), expected, "without the writes")
    assert check.found == 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(11, 24))
@pytest.mark.parametrize("world", [2, 4])
def test_no_flipped_bit_of_many_leaves_a_trace(world: int, seed: int, tmp_path: Path) -> None:
    spawn(flipped, world, tmp_path, 40, seed, init_process_group=False, timeout_s=600)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2, timeout_s=2400)
def test_thousands_of_steps_without_a_false_alarm(rank: int, world_size: int, stage: int, tmp_path: Path) -> None:
    check = CorruptionCheck(every=1)
    options = {"max_epochs": 625, "accumulate_grad_batches": 1}
    found = train(stage, data(rank), tmp_path, check, **options)
    assert found["global_step"] == 625 * STEPS
    assert (check.found, check._ignored) == (0, set())
    assert_same(found, train(stage, data(rank), tmp_path, **options), f"stage {stage}")


class Habits(Noisy):
    """Logs, counts, appends, and draws random numbers of its own in the step; drops out; has BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.seen_means, self.noise = 0, [], torch.zeros(1)

    def training_step(self, batch: Any, i: int) -> Any:
        self.count += 1
        self.noise.add_(torch.rand(1))
        batch[0].add_(random.random() * 0.01)  # the step may write to its batch
        loss = self.loss(batch) * (1 + 0.01 * self.count)
        self.seen_means.append(loss.item())
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_after_backward(self) -> None:
        """User code that changes gradients."""
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(1.5)


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_a_check_leaves_no_trace_in_logs_attributes_and_random_numbers(
    rank: int, world_size: int, stage: int, tmp_path: Path
) -> None:
    def run(*callbacks: Any) -> tuple[Any, Habits]:
        random.seed(5)
        module = Habits()
        options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
        found = train(stage, data(rank), tmp_path, *callbacks, module=module, **options)
        return found, module

    (expected, trusted), check = run(), CorruptionCheck(every=2)
    found, module = run(check)
    assert_same(found, expected, "no flip")
    assert (module.count, module.seen_means, module.noise) == (trusted.count, trusted.seen_means, trusted.noise)
    assert module.trainer.callback_metrics == trusted.trainer.callback_metrics
    assert (check.found, check._ignored) == (0, set())
    flips = Flip("gradient", 1, 1, 3)
    assert_same(run(check, flips)[0], expected, "a flip")
    assert check.failures == {1: 1}
    assert flips.done == (rank == 1)


class Hooks(Noisy):
    """Hooks change what the next batch of a step sees."""

    def build(self) -> None:
        super().build()
        self.register_buffer("factor", torch.ones(1))
        self.generator, self.numpy, self.scale, self.count = torch.Generator(), numpy.random.default_rng(0), 1.0, 0

    def on_train_batch_start(self, batch: Any, i: int) -> None:
        self.scale = 1 + 0.1 * i

    def on_before_backward(self, loss: Tensor) -> None:
        self.count += 1

    def on_train_batch_end(self, *_: Any) -> None:
        self.factor.mul_(1.05)

    def loss(self, batch: Any) -> Tensor:
        drawn = torch.rand(1, generator=self.generator) + self.numpy.random()
        index = self.trainer.fit_loop.batch_idx
        return super().loss(batch) * (self.scale * self.factor + 0.1 * drawn + 0.01 * (self.count + index))


class Teacher(Noisy):
    """Writes to weights in the step, or between two batches of it."""

    between = False

    def build(self) -> None:
        super().build()
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    @torch.no_grad()
    def follow(self) -> None:
        for old, new in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)

    def loss(self, batch: Any) -> Tensor:
        if not self.between:
            self.follow()
        return super().loss(batch) + functional.mse_loss(self(batch[0]), self.teacher(batch[0]))

    def on_train_batch_end(self, *_: Any) -> None:
        if self.between:
            self.follow()


class TeacherBetween(Teacher):
    between = True


@pytest.mark.parametrize("stage", [0, 3])
@on_ranks(2)
def test_what_hooks_and_the_step_change_before_the_optimizer_does_not_count_twice(
    rank: int, world_size: int, stage: int, tmp_path: Path
) -> None:
    for kind in (Hooks, Teacher, TeacherBetween):
        options = {"accumulate_grad_batches": 2}
        expected, check = train(stage, data(rank), tmp_path, module=kind(), **options), CorruptionCheck(every=2)
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            found = train(stage, data(rank), tmp_path, check, module=kind(), **options)
        assert_same(found, expected, kind.__name__)
        assert (check.found, check._ignored) == (0, set())
        texts = [str(each.message) for each in noted if "CorruptionCheck: weights were written" in str(each.message)]
        assert len(texts) == (rank == 0 and kind is not Hooks)


class Virtual(Noisy):
    """Four virtual ranks, with dropout."""

    def build(self) -> None:
        super().build()
        self.last = nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))

    def train_dataloader(self) -> DataLoader:
        x, y = samples(16 * 6)
        dataset = TensorDataset(x, y, torch.ones(len(x)))
        strategy: Any = self.trainer.strategy
        sampler = DistributedSampler(dataset, shuffle=False, **strategy.distributed_sampler_kwargs)
        return DataLoader(dataset, batch_size=4, sampler=sampler)


class Broken(Callback):
    """A rank whose products are wrong from a step on, and the same in every repetition."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self.rank and trainer.global_step == self.step:
            module.first.register_forward_hook(lambda _, __, out: out * 1.001)


@pytest.mark.parametrize("world", [2, 3])
def test_with_virtual_ranks_another_rank_repeats_the_step(world: int, tmp_path: Path) -> None:
    spawn(on_another, world, tmp_path, init_process_group=False, timeout_s=60)


def on_another(rank: int, world_size: int, tmp_path: Path) -> None:
    quiet()
    warnings.simplefilter("ignore")

    def run(*callbacks: Any) -> Any:
        strategy = ZeROStrategy(2, parallel={"virtual_ranks": 4}, sharding={"min_unit_numel": 0}, checkpoint="file")
        return train(strategy, None, tmp_path, *callbacks, module=Virtual(), use_distributed_sampler=True)

    expected, check, flips = run(), CorruptionCheck(every=1), Flip("gradient", 1, 2, 9)
    assert_same(run(check, flips), expected, "a flip")
    assert check.failures == {1: 1}
    # A rank that is wrong in the same way whenever it is asked: its own repetition would not show it.
    who = "rank 1 on" if world_size > 2 else "rank 0 on .* or rank 1 on"
    with pytest.raises(StateError, match=f"{who}.*Start the run again"):
        run(CorruptionCheck(every=1), Broken(1, 2))


@on_ranks(2)
def test_a_rank_that_fails_twice_ends_the_run_on_all_ranks(rank: int, world_size: int, tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    check = CorruptionCheck()
    check.every = 1
    with pytest.raises(StateError, match=r"before step 5, rank 1 on .* had wrong gradients.*for the second time"):
        train(1, data(rank), tmp_path, check, Flip("gradient", 1, 3, 1), Flip("gradient", 1, 5, 2))
    assert check.found == 2


class Unsteady(Noisy):
    """An operation whose bits are others in every run, as those of atomic additions are."""

    def loss(self, batch: Any) -> Tensor:
        generator = torch.Generator()
        generator.seed()
        return super().loss(batch) * (1 + torch.rand(1, generator=generator).item())


@pytest.mark.parametrize("world", [1, 2])
def test_an_operation_that_does_not_repeat_its_bits_is_named_and_no_rank_is(world: int, tmp_path: Path) -> None:
    spawn(unsteady, world, tmp_path, init_process_group=False, timeout_s=60)


def unsteady(rank: int, world_size: int, tmp_path: Path) -> None:
    quiet()
    check = CorruptionCheck(every=1)
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        train(2, data(rank, 4), tmp_path, check, module=Unsteady())
    texts = [str(each.message) for each in noted if "do not repeat their bits" in str(each.message)]
    assert len(texts) == (rank == 0)
    assert check.failures == {}


class Manual(Net):
    manual = True


def test_what_cannot_be_repeated_is_refused() -> None:
    with pytest.raises(PlanError, match="CorruptionCheck with automatic_optimization=False"):
        train(2, data(0), Path(), CorruptionCheck(), module=Manual())
    strategy = ZeROStrategy(2, offload={"optimizer": "cpu", "delay_after": 2})
    with pytest.raises(PlanError, match=r"CorruptionCheck with offload\.delay_after=2"):
        train(strategy, data(0), Path(), CorruptionCheck())


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-true"])
@pytest.mark.wide
@on_ranks(2)
def test_flips_in_16_bits_with_offload_and_recomputation(
    rank: int, world_size: int, precision: str, tmp_path: Path
) -> None:
    warnings.simplefilter("ignore")

    def run(*callbacks: Any, stage: Any) -> Any:
        strategy = ZeROStrategy(
            stage,
            precision={"loss_scale": {"initial_power": 24, "window": 5, "hysteresis": 1}},  # the first steps overflow
            precision_plugin=ZeROPrecision(precision),
            checkpoint="file",
            activations="full",
            sharding={"min_unit_numel": 0},
            offload={"optimizer": "cpu"},
        )
        return train(strategy, data(rank, 16), tmp_path, *callbacks)

    for stage in (1, 3):
        expected = run(stage=stage)
        assert_same(run(CorruptionCheck(every=3), stage=stage), expected, "no flip")
        for kind in ("weights", "gradient"):
            check, flips = CorruptionCheck(every=1), Flip(kind, 1, 14, 5)
            assert_same(run(check, flips, stage=stage), expected, f"{kind}, stage {stage}")
            assert check.failures == {1: 1}, (kind, stage)
