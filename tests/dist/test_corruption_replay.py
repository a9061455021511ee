"""`CorruptionCheck(every=N)`: what has happened between two checks and shows at the second one leaves no trace.

The trusted runs are those of this package on the same ranks without the callback and without the flips.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from ls_strategy import CorruptionCheck, PlanError, ShardedEMA, SpikeGuard, StateError, ZeROStrategy
from ls_strategy.extras.callbacks import corruption_replay
from ls_strategy.testing import spawn
from tests.dist.ranks import WIDTH, assert_equal, on_ranks, samples
from tests.dist.test_corruption_check import Flip, Habits
from tests.dist.test_spike_guard import NAN, Noisy, assert_same, flat, train
from tests.models import quiet

EVERY = 4
STEPS = 10


class Augmented(Dataset[tuple[Tensor, ...]]):
    """Draws random numbers when a batch is fetched."""

    def __init__(self, rank: int) -> None:
        self.x, self.y = samples(STEPS * 4, seed=rank + 1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        return self.x[i] + 0.1 * torch.rand(WIDTH) * random.random(), self.y[i], torch.ones(())


def augmented(rank: int) -> DataLoader:
    return DataLoader(Augmented(rank), batch_size=4)


def flips(kind: str, *steps: int) -> list[Flip]:
    """Flips of rank 1 in several steps, in gradients before they are sent or in all replicas that it has."""
    return [Flip(kind, 1, step, seed=step) for step in steps]


@pytest.mark.parametrize("stage", [0, 2, 3])
@on_ranks(2)
def test_a_rank_that_was_wrong_before_a_check_leaves_no_trace(
    rank: int, world_size: int, stage: int, tmp_path: Path
) -> None:
    """Of steps 4 to 7, the last one is checked; what was wrong in step 6 is in the weights by then."""

    def run(*callbacks: Any) -> tuple[Any, Habits]:
        random.seed(5)
        module, average = Habits(), ShardedEMA(0.9)
        options = {"validation": augmented(rank), "val_check_interval": 5, "gradient_clip_val": 0.5}
        return train(stage, augmented(rank), tmp_path, average, *callbacks, module=module, **options), module

    (expected, trusted), check = run(), CorruptionCheck(every=EVERY)
    found, module = run(check, *flips("gradient", 6, 7))
    assert_same(found, expected, "wrong in two steps")
    assert_equal(flat(found["ema_state_dict"]), flat(expected["ema_state_dict"]), "average")
    assert check.failures == {1: 1}
    assert (module.count, module.seen_means, module.noise) == (trusted.count, trusted.seen_means, trusted.noise)
    assert module.trainer.callback_metrics == trusted.trainer.callback_metrics
    loops = [each["loops"]["fit_loop"] for each in (found, expected)]
    assert loops[0] == loops[1]
    quietly = CorruptionCheck(every=EVERY)
    assert_same(run(quietly)[0], expected, "nothing wrong")
    assert quietly.found == 0


@on_ranks(2)
def test_replicas_that_differ_since_a_step_between_two_checks_are_right_again(
    rank: int, world_size: int, tmp_path: Path
) -> None:
    """Two ranks of stage 0, of which nobody can say which one is right: the copy is."""

    def run(*callbacks: Any) -> dict[str, Any]:
        random.seed(5)
        return train(0, augmented(rank), tmp_path, *callbacks, accumulate_grad_batches=2, max_epochs=2)

    expected = run()
    for step in (1, 5, 7, 8):  # between checks, in the second epoch, and before the last step of an epoch
        check = CorruptionCheck(every=EVERY)
        found = run(check, *flips("weights", step))
        assert_same(found, expected, f"step {step}")
        assert check.found == 1, step


@pytest.mark.parametrize("stage", [0, 2])
@on_ranks(2)
def test_an_optimizer_state_that_flips_before_a_checked_step_is_right_again(
    rank: int, world_size: int, stage: int, tmp_path: Path
) -> None:
    """No copy of it is made for the check: all ranks go back to the one of the check before."""
    random.seed(5)
    expected, check = train(stage, augmented(rank), tmp_path), CorruptionCheck(every=EVERY)
    random.seed(5)
    assert_same(train(stage, augmented(rank), tmp_path, check, *flips("states", 7)), expected, f"stage {stage}")
    assert (check.found, check.failures) == (1, {1: 1})


@on_ranks(2)
def test_a_rank_that_is_wrong_in_the_repetition_too_ends_the_run(rank: int, world_size: int, tmp_path: Path) -> None:
    class Again(Flip):
        """In the step's second run."""

        seen = 0

        def here(self, trainer: Any) -> bool:
            self.seen += trainer.global_step == self.step
            return super().here(trainer) and self.seen > 1

    damaged = [*flips("gradient", 7), Again("gradient", 1, 5, seed=5)]
    with pytest.raises(StateError, match=r"rank 1 on .* was wrong for the second time"):
        train(2, augmented(rank), tmp_path, CorruptionCheck(every=EVERY), *damaged)


@on_ranks(2)
def test_batches_that_are_too_large_are_not_kept(rank: int, world_size: int, tmp_path: Path) -> None:
    most, corruption_replay.MOST_BYTES = corruption_replay.MOST_BYTES, 200
    try:
        check = CorruptionCheck(every=EVERY)
        train(2, augmented(rank), tmp_path, check, *flips("gradient", 7))
    finally:
        corruption_replay.MOST_BYTES = most
    assert check.failures == {1: 1}


@on_ranks(1)
def test_two_callbacks_that_go_back_are_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"every=4.*rewind_steps=3.*Set every=1"):
        train(2, augmented(0), tmp_path, SpikeGuard(rewind_steps=3), CorruptionCheck(every=4))


@on_ranks(2)
def test_a_spike_in_steps_that_run_again_is_left_out_again(rank: int, world_size: int, tmp_path: Path) -> None:
    class Spike(Augmented):
        def __getitem__(self, i: int) -> tuple[Tensor, ...]:
            x, y, one = super().__getitem__(i)
            return x, y, one * (NAN if i // 4 == 5 else 1)

    def run(*callbacks: Any) -> dict[str, Any]:
        random.seed(5)
        return train(2, DataLoader(Spike(rank), batch_size=4), tmp_path, *callbacks)

    first, second = SpikeGuard(8), SpikeGuard(8)
    expected, check = run(first), CorruptionCheck(every=EVERY)
    assert_same(run(check, second, *flips("gradient", 6, 7)), expected, "with a spike")
    assert check.failures == {1: 1}
    assert second.state_dict() == first.state_dict()


class Virtual(Noisy):
    def train_dataloader(self) -> DataLoader:
        x, y = samples(STEPS * 16)
        dataset = TensorDataset(x, y, torch.ones(len(x)))
        strategy: Any = self.trainer.strategy
        sampler = DistributedSampler(dataset, shuffle=False, **strategy.distributed_sampler_kwargs)
        return DataLoader(dataset, batch_size=4, sampler=sampler)


def virtual(rank: int, world_size: int, tmp_path: Path, flip: bool) -> tuple[dict[str, Any], int]:
    quiet()
    strategy = ZeROStrategy(2, parallel={"virtual_ranks": 4}, checkpoint="file")
    check = CorruptionCheck(every=EVERY)
    callbacks = [check, *(Flip("gradient", 1, step, seed=2) for step in (6, 7))] if flip else []
    options = {"use_distributed_sampler": True, "module": Virtual()}
    return train(strategy, None, tmp_path, *callbacks, **options), check.found


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.wide
def test_virtual_ranks_run_their_batches_again(world: int, tmp_path: Path) -> None:
    expected, _ = spawn(virtual, 1, tmp_path, False, init_process_group=False, timeout_s=60)[0]
    found, checks = spawn(virtual, world, tmp_path, True, init_process_group=False, timeout_s=60)[0]
    assert checks == 1
    assert_same(found, expected, f"{world} ranks")
