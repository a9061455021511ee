"""Islands with random numbers, with other kinds of parallelism inside, and what they refuse during a fit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ls_strategy import PlanError, ZeROStrategy
from tests.dist.islands import diloco, hub, on_islands
from tests.dist.parallel_runs import Module, Outcome, Run, train, unequal
from tests.dist.ranks import Net, batches, samples, trainer_of

pytestmark = [pytest.mark.dist, pytest.mark.wide]


# --- random numbers --------------------------------------------------------------------------------------------------


def draws() -> list[float]:
    """One number of each generator: of torch, Python and numpy."""
    return [torch.rand(()).item(), random.random(), numpy.random.rand()]


class Augmented(Dataset[Any]):
    """Draws random numbers for every sample."""

    def __init__(self) -> None:
        self.x, self.y = samples(96)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[i], self.y[i], torch.tensor(draws(), dtype=torch.float64)


class Draws(Net):
    """Remembers what was drawn for its data, and draws in its steps and for the making of its data."""

    def __init__(self, workers: int, *, asks: bool) -> None:
        super().__init__()
        self.workers, self.asks = workers, asks
        self.drawn: dict[str, list[list[float]]] = {"data": [], "steps": [], "split": []}

    def train_dataloader(self) -> DataLoader[Any]:
        self.drawn["split"].append(draws())
        return DataLoader(Augmented(), batch_size=2, num_workers=self.workers)

    def configure_optimizers(self) -> Any:
        """With ``asks``, the number of steps comes from loaders that Lightning makes here."""
        assert not self.asks or self.trainer.estimated_stepping_batches
        return super().configure_optimizers()

    def training_step(self, batch: Any, i: int) -> Any:
        self.drawn["data"] += batch[2].tolist()
        self.drawn["steps"].append(draws())
        return super().training_step(batch[:2], i)


WAYS = [(workers, asks) for workers in (0, 1) for asks in (False, True)]


def draw(island: int, rank: int, meet: str) -> list[list[Any]]:
    """By number of workers and whether it is asked for steps; on island 0 also without `DiLoCo`."""
    found: list[list[Any]] = []
    for workers, asks in WAYS:
        found.append([])
        for callbacks in ([diloco(meet, island, every=2)], *([[]] if island == 0 else [])):
            pl.seed_everything(3, workers=True, verbose=False)
            module = Draws(workers, asks=asks)
            trainer_of(1, callbacks=callbacks, max_steps=2, max_epochs=1).fit(module)
            found[-1].append(module.drawn)
    return found


def test_islands_draw_other_random_numbers_and_the_first_one_those_of_a_run_alone() -> None:
    with hub() as meet:
        (first,), (second,) = on_islands(1, draw, meet, timeout_s=150)
    for way, (ours, alone), (theirs,) in zip(WAYS, first, second, strict=True):
        assert ours == alone, way
        assert theirs["split"] == ours["split"], "what makes the data is equal everywhere"
        for where in ("data", "steps"):
            assert len(theirs[where]) == len(ours[where]) > 0
            for generator, values in enumerate(zip(*theirs[where], strict=True)):
                same = {row[generator] for row in ours[where]} & set(values)
                assert not same, f"{way} {where}: generator {generator} draws as on island 0"


# --- other kinds of parallelism --------------------------------------------------------------------------------------

STEPS, HALF = 7, 4
MOE = {"drop_tokens": False, "k": 2, "balance_loss": 0.0, "second_expert_sampling": False}
PARALLEL: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "context": ({"stage": 3, "parallel.context": 2}, None),
    "tensor": ({"stage": 2, "parallel.tensor": 2}, None),
    "pipeline": ({"stage": 1, "parallel.pipeline.size": 2, "parallel.pipeline.micro_batches": 2}, None),
    "experts": ({"stage": 2, "parallel.expert": 2}, MOE),
    "experts, stage 3": ({"stage": 3, "parallel.expert": 2}, MOE),
}


def divided(island: int, rank: int, meet: str, folder: Path, options: Any, experts: Any) -> list[Outcome]:
    """Without other parallelism, with it, and with it again from a checkpoint."""
    path = str(folder / str(island))
    runs = [
        Run({"stage": 2}, experts=experts, steps=STEPS),
        Run(options, experts=experts, steps=STEPS, save=(HALF, path)),
        Run(options, experts=experts, steps=STEPS, resume=path),
    ]
    found = []
    for run in runs:
        run.trainer = {"callbacks": [diloco(meet, island, every=3)]}
        found.append(train(rank, 2, run, Module))
    return found


@pytest.mark.parametrize("name", PARALLEL)
def test_islands_whose_ranks_divide_layers_or_experts_train_the_same(name: str, tmp_path: Path) -> None:
    options, experts = PARALLEL[name]
    with hub() as meet:
        islands = on_islands(2, divided, meet, tmp_path, options, experts)
    for ranks in islands:
        plain, ours, again = ranks[0]
        assert not unequal(plain, [Run(options)], [ours])
        assert ours.losses[HALF:] == again.losses
        assert all(torch.equal(v, again.weights[k]) for k, v in ours.weights.items())
        assert all(torch.equal(v, islands[0][0][1].weights[k]) for k, v in ours.weights.items())
    assert islands[0][0][1].losses != islands[1][0][1].losses


# --- errors ----------------------------------------------------------------------------------------------------------


class Adds(Callback):
    """Gives the optimizer more parameters after the second step, as fine-tuning callbacks do."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.optimizers[0].add_param_group({"params": list(pl_module.first.parameters()), "lr": 1e-3})


class Without(Net):
    """The first layer is in no optimizer."""

    def configure_optimizers(self) -> Any:
        params = [p for n, p in self.named_parameters() if not n.startswith("first")]
        return torch.optim.AdamW(params, lr=self.lr)


def refused(island: int, rank: int, meet: str) -> dict[str, str]:
    errors = {}
    for name, kind, stage, strategy, trainer_options, callbacks in (
        ("add_param_group", Without, 1, {}, {}, [Adds()]),
        ("add_param_group, stage 3", Without, 3, {}, {}, [Adds()]),
        ("16-bit masters", Net, 2, {"precision": {"master_weights": False}}, {"precision": "bf16-true"}, []),
    ):
        options: dict[str, Any] = {"sharding": {"min_unit_numel": 0}, **strategy}
        trainer = trainer_of(
            ZeROStrategy(stage, **options),  # type: ignore[arg-type]
            callbacks=[*callbacks, diloco(meet, island, every=3)],
            max_steps=7, max_epochs=-1, **trainer_options,
        )  # fmt: skip
        with pytest.raises(PlanError) as caught:
            trainer.fit(kind(), batches(96, 2))
        errors[name] = str(caught.value)
    return errors


def test_what_cannot_be_exchanged_is_an_error_on_every_rank_with_the_cure() -> None:
    with hub() as meet:
        found = on_islands(2, refused, meet)
    for ranks in found:
        for errors in ranks:
            for name in ("add_param_group", "add_param_group, stage 3"):
                assert "parameters were added since (add_param_group" in errors[name]
                assert "freeze those that train later by requires_grad_(False)" in errors[name]
            assert "master weights in torch.bfloat16" in errors["16-bit masters"]
            assert "Set precision.master_weights=True" in errors["16-bit masters"]
