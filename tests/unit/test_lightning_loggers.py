"""The dummy experiment of ranks above 0 reads what the experiment of rank 0 reads, when it does."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn

from ls_strategy.lightning import loggers
from ls_strategy.zero.flat.parameters import ResidentParameter
from ls_strategy.zero.user_code.sharded_gradient import new_gradient


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return ``logger.experiment`` of rank 1."""
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    dummy: Any = CSVLogger(tmp_path).experiment
    monkeypatch.setattr(type(dummy), "__getattr__", type(dummy).__getattr__)  # restored, for it is that of all loggers
    loggers.take_part()
    yield dummy
    dummy.unwatch()


class Parameter(ResidentParameter):
    """A parameter of an engine that counts how often its values are read."""

    reads = 0

    def detach(self) -> Tensor:
        self.reads += 1
        return super().detach()

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        self.reads += 1
        return super().data


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = Parameter(torch.ones(2)), Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        return x

    def reads(self) -> list[int]:
        return [p.reads for p in (self.weight, self.bias)]


def run(model: nn.Module, times: int) -> None:
    for _ in range(times):
        model(torch.ones(2))


class Source:
    """The elements of a gradient, and how often they were gathered."""

    def __init__(self) -> None:
        self.gathered = self.ended = 0

    def gather(self) -> None:
        self.gathered += 1

    def used(self) -> None:
        self.ended += 1


# --- calls ------------------------------------------------------------------------------------------------------------


def test_parameters_are_read_wherever_they_stand_in_a_call_and_models_are_not(experiment: Any) -> None:
    model = Model()
    experiment.add_graph(model, torch.ones(2))
    assert model.reads() == [0, 0]
    experiment.add_histogram("weight", model.weight, 7, extra={"more": [model.bias, model.bias]})
    assert model.reads() == [1, 2]


def test_a_sharded_gradient_is_gathered(experiment: Any) -> None:
    source = Source()
    gradient = new_gradient(torch.Size([2]), torch.zeros(1), source)  # type: ignore[arg-type]
    experiment.add_scalars("norms", {"weight": gradient})
    assert (source.gathered, source.ended) == (1, 1)


def test_a_call_on_a_rank_above_0_returns_nothing_and_takes_anything(experiment: Any) -> None:
    assert experiment.log({"text": "a", "tensor": torch.ones(1), "none": None}, step=1) is None


# --- watch ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "options", "every"),
    [
        ((), {"log": "parameters", "log_freq": 3}, 3),
        ((), {"log": "all", "log_freq": 3}, 3),
        ((None, "parameters", 2, None, False), {}, 2),
        ((), {"log": "all"}, 1000),
    ],
    ids=["parameters", "all", "in order", "without a frequency"],
)
def test_a_watched_model_is_read_after_every_nth_forward(
    experiment: Any, args: tuple[Any, ...], options: Any, every: int
) -> None:
    model = Model()
    experiment.watch(model, *args, **options)
    for count in (0, 1):
        run(model, every - 1)
        assert model.reads() == [count, count]
        run(model, 1)
        assert model.reads() == [count + 1, count + 1]


@pytest.mark.parametrize("options", [{}, {"log": "gradients"}, {"log": None}], ids=str)
def test_parameters_are_not_read_where_rank_0_watches_gradients_only(experiment: Any, options: Any) -> None:
    model = Model()
    experiment.watch(model, log_freq=1, **options)
    run(model, 1)
    assert model.reads() == [0, 0]


@pytest.mark.parametrize("group", [list, tuple])
def test_every_watched_model_counts_its_own_forwards(experiment: Any, group: type[Any]) -> None:
    one, two = Model(), Model()
    experiment.watch(group([one, two, None]), log="all", log_freq=2)
    run(one, 2)
    run(two, 1)
    assert (one.reads(), two.reads()) == ([1, 1], [0, 0])


@pytest.mark.parametrize("all_of_them", [False, True])
def test_unwatch_ends_it_for_one_model_or_for_all(experiment: Any, all_of_them: bool) -> None:
    one, two = Model(), Model()
    experiment.watch([one, two], log="all", log_freq=1)
    experiment.watch(one, log="all", log_freq=1)
    experiment.unwatch(Model())
    experiment.unwatch(*([] if all_of_them else [one]))
    run(one, 1)
    run(two, 1)
    assert (one.reads(), two.reads()) == ([0, 0], [0, 0] if all_of_them else [1, 1])


def test_a_watched_model_can_be_freed(experiment: Any) -> None:
    model = Model()
    experiment.watch(model, log="all")
    reference = weakref.ref(model)
    del model
    assert reference() is None
