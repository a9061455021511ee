"""``uneven="join"``: ranks with different numbers of batches train as one process that has all samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from ls_strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import Net, assert_close, quiet, samples, trainer_of, weights
from tests.dist.trusted import once

LENGTHS = (7, 3)
"""Batches of each rank."""

THREE = (2, 5, 3)
"""The same on three ranks."""

SIZES = (2, 3, 1)
"""Samples in each rank's batches."""

BF16 = ", bf16"


def batches_of(rank: int, lengths: Sequence[int] = LENGTHS, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """All batches of a rank."""
    x, y = samples(lengths[rank] * SIZES[rank], seed + rank)
    return list(zip(x.split(SIZES[rank]), y.split(SIZES[rank]), strict=True))


class Stream(IterableDataset):
    """Batches, of no known length."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def loader(rank: int, *, sized: bool, lengths: Sequence[int] = LENGTHS) -> DataLoader:
    """One rank's own data."""
    batches = batches_of(rank, lengths)
    if not sized:
        return DataLoader(Stream(batches), batch_size=None)
    x, y = (torch.cat(each) for each in zip(*batches, strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=SIZES[rank])


def together(lengths: Sequence[int] = LENGTHS) -> list[list[tuple[Tensor, Tensor]]]:
    """What all ranks have at the same time: one list of batches per step."""
    ranks = [batches_of(rank, lengths) for rank in range(len(lengths))]
    return [[each[i] for each in ranks if i < len(each)] for i in range(max(lengths))]


class All(Net):
    """The trusted run: one process that has the batches of all ranks."""

    by_samples = False

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, tuple) or (len(batch) == 2 and isinstance(batch[0], Tensor)):
            return super().loss(batch)
        losses = torch.stack([super(All, self).loss(each) for each in batch])
        sizes = torch.tensor([len(each[0]) if self.by_samples else 1.0 for each in batch])
        return (losses * sizes).sum() / sizes.sum()

    def configure_optimizers(self) -> Any:
        """Plain torch clips in mixed precision only without the fused kernel."""
        mixed = self.trainer.precision != "32-true"
        return torch.optim.AdamW(self.parameters(), lr=self.lr, eps=1e-4) if mixed else super().configure_optimizers()


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clip_val": 0.05},
    "accumulated": {"accumulate_grad_batches": 2},
    "accumulated, clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05},
    f"accumulated, clipped{BF16}": {
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 0.05,
        "precision": "bf16-mixed",
    },
}


def trusted(
    rank: int, world_size: int, by_samples: bool, names: list[str], lengths: Sequence[int]
) -> dict[str, dict[str, Tensor]]:
    """Weights after two epochs of the run on one process."""
    quiet()
    found = {}
    for name in names:
        module = All()
        module.by_samples = by_samples
        trainer_of("auto", **CASES[name]).fit(module, DataLoader(Stream(together(lengths)), batch_size=None))
        found[name] = weights(module)
    return found


def joined(
    rank: int,
    world_size: int,
    by_samples: bool,
    names: list[str],
    lengths: Sequence[int],
    stages: Sequence[int],
    sized: bool,
) -> dict[str, dict[str, Tensor]]:
    """The same on ranks with their own data."""
    quiet()
    found = {}
    for name in names:
        for stage in stages:
            module = Net()
            mode = "join_samples" if by_samples else "join"
            strategy = ZeROStrategy(stage, sharding={"min_unit_numel": 0}, uneven=mode)  # type: ignore[arg-type]
            trainer = trainer_of(strategy, use_distributed_sampler=False, **CASES[name])
            trainer.fit(module, loader(rank, sized=sized, lengths=lengths))
            every = CASES[name].get("accumulate_grad_batches", 1)
            assert trainer.global_step == 2 * -(-max(lengths) // every)
            assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == 2 * max(lengths)
            found[f"{name}, stage {stage}"] = weights(module)
    return found


def compare(
    names: list[str], stages: Sequence[int], *, by_samples: bool, sized: bool, lengths: Sequence[int] = LENGTHS
) -> None:
    (expected,) = once(trusted, 1, by_samples, names, lengths)
    ranks = spawn(joined, len(lengths), by_samples, names, lengths, stages, sized, init_process_group=False)
    for ours in ranks:
        for what, found in ours.items():
            name = what.rpartition(",")[0]
            if not name.endswith(BF16):
                assert_close(found, expected[name], what)
                continue
            exact = expected[name.removesuffix(BF16)]
            assert distance(found, exact) <= 2 * distance(expected[name], exact), what


def distance(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return max((some[name] - others[name]).abs().max().item() for name in some)


@pytest.mark.parametrize(("by_samples", "stage", "sized"), [(False, 3, True), (True, 1, False)])
def test_as_one_process_with_all_samples(by_samples: bool, stage: int, sized: bool) -> None:
    compare(["accumulated"], [stage], by_samples=by_samples, sized=sized)


@pytest.mark.wide
@pytest.mark.parametrize("sized", [True, False])
@pytest.mark.parametrize("by_samples", [True, False])
def test_every_stage(by_samples: bool, sized: bool) -> None:
    compare(list(CASES), [0, 1, 2, 3], by_samples=by_samples, sized=sized)


@pytest.mark.wide
@pytest.mark.parametrize("by_samples", [True, False])
def test_three_ranks(by_samples: bool) -> None:
    """Two, then one of them have batches."""
    compare(["accumulated, clipped"], [1, 3], by_samples=by_samples, sized=True, lengths=THREE)
