"""What rank 0 logs of parameters and gradients through ``self.logger.experiment``, a dummy on other ranks.

The numbers are DDP's, and no rank waits for one that the dummy keeps from reading.
"""

from __future__ import annotations

import copy
from datetime import timedelta
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from torch import Tensor, nn

from ls_strategy.config import nested
from ls_strategy.errors import PlanError, StateError
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import WIDTH, assert_close, fit, global_batches, mean_over_ranks, on_ranks, quiet, weights
from tests.dist.test_habits import OPTIONS, Habit

pytest.importorskip("tensorboard")

from torch.utils.tensorboard import SummaryWriter

pytestmark = pytest.mark.wide

STEPS = 4
EVERY = 2


class Experiment:
    """As that of a tracking service: it keeps numbers, and can watch a model as W&B does."""

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def add_histogram(self, name: str, values: Tensor, step: int) -> None:
        self.numbers.append(float(values.detach().cpu().double().abs().sum()))

    def watch(self, model: nn.Module, criterion: Any = None, log: str = "gradients", log_freq: int = 1000) -> None:
        calls = 0

        def look(module: nn.Module, *_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls % log_freq == 0:
                for name, p in module.named_parameters():
                    self.add_histogram(name, p.data, calls)

        model.register_forward_hook(look)


class Numbers(Logger):
    def __init__(self) -> None:
        super().__init__()
        self.kept = Experiment()

    @property
    @rank_zero_experiment
    def experiment(self) -> Experiment:
        return self.kept

    @property
    def name(self) -> str:
        return "numbers"

    @property
    def version(self) -> int:
        return 0

    def log_metrics(self, metrics: Any, step: Any = None) -> None: ...

    def log_hyperparams(self, params: Any, *_: Any, **__: Any) -> None: ...


class Histograms(Habit):
    """As in many a tutorial."""

    def on_after_backward(self) -> None:
        logger: Any = self.logger
        for name, p in self.named_parameters():
            logger.experiment.add_histogram(name, p, self.global_step)
            logger.experiment.add_histogram(f"{name}.grad", p.grad, self.global_step)

    def on_train_epoch_end(self) -> None:
        logger: Any = self.logger
        for name, p in self.blocks.named_parameters():
            logger.experiment.add_histogram(name, p.data, self.global_step)


class OfAPart(Habit):
    """The whole list at once, in an order that is not the model's."""

    def on_train_batch_end(self, *_: Any) -> None:
        logger: Any = self.logger
        for p in reversed(list(self.parameters())):
            logger.experiment.add_histogram("p", p, self.global_step)


class Watched(Habit):
    """As ``wandb_logger.watch(model, log="all")``."""

    def on_fit_start(self) -> None:
        logger: Any = self.logger
        logger.experiment.watch(self.blocks, log="all", log_freq=EVERY)
        logger.experiment.watch(self.blocks[1], None, "parameters", EVERY)

    def build(self) -> None:
        super().build()
        self.blocks = nn.Sequential(*self.blocks)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.first(x)))  # type: ignore[operator]


def outcome(rank: int, world_size: int, habit: type[Habit], strategy: Any) -> tuple[Any, ...]:
    module, logger = habit(), Numbers()
    fit(strategy, module, global_batches(rank, world_size, STEPS), use_distributed_sampler=False, logger=logger)
    return mean_over_ranks(module.losses), logger.kept.numbers, weights(module)


def problems(rank: int, world_size: int, habits: list[type[Habit]]) -> list[str]:
    quiet()
    found = []
    for habit in habits:
        expected = outcome(rank, world_size, habit, "ddp")
        assert (len(expected[1]) > STEPS) == (rank == 0)
        for name, one in OPTIONS.items():
            strategy = ZeROStrategy(explain_waits_after=2.0, timeout=timedelta(seconds=60), **nested(one))
            actual = outcome(rank, world_size, habit, strategy)
            try:
                for what, ours, theirs in zip(("losses", "numbers", "weights"), actual, expected, strict=True):
                    assert_close(ours, theirs, what, 2e-6)
            except AssertionError as error:
                found.append(f"{habit.__name__}, {name}: {str(error)[:300]}")
    return found


@pytest.mark.parametrize("habit", [Histograms, OfAPart, Watched])
def test_numbers_of_rank_0_are_ddps(habit: type[Habit]) -> None:
    found = spawn(problems, 2, [habit], timeout_s=100)
    assert not any(found), "\n".join(found[0])


class Graph(Habit):
    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(1, WIDTH)


class Traces(Habit):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        block = self.blocks[0]
        with pytest.raises(StateError, match=r"copy\.deepcopy"):
            torch.jit.trace(block, batch[0])
        traced: Any = torch.jit.trace(copy.deepcopy(block), batch[0])
        with torch.no_grad():
            assert_close(traced(batch[0]), block(batch[0]), "traced")


@on_ranks(2, init_process_group=True)
def test_tensorboard_takes_histograms_and_refuses_the_graph_of_a_sharded_model(
    rank: int, world_size: int, tmp_path: Any
) -> None:
    root = str(tmp_path)
    written = []
    add = SummaryWriter.add_histogram

    def noted(self: Any, tag: str, values: Any, *args: Any, **kwargs: Any) -> None:
        written.append(tag)
        add(self, tag, values, *args, **kwargs)

    SummaryWriter.add_histogram = noted  # type: ignore[method-assign]
    data = global_batches(rank, world_size, STEPS)
    options = {"use_distributed_sampler": False, "max_epochs": 1}
    strategy = ZeROStrategy(timeout=timedelta(seconds=60), **nested(OPTIONS["zero3, small units"]))
    fit(strategy, Histograms(), data, logger=TensorBoardLogger(root), **options)
    assert bool(written) == (rank == 0)
    fit(ZeROStrategy(2), Graph(), data, logger=TensorBoardLogger(root, log_graph=True), **options)
    fit(ZeROStrategy(3, sharding={"min_unit_numel": 0}), Traces(), data, logger=False, **options)
    with pytest.raises(PlanError, match=r"log_graph=True.*Set log_graph=False"):
        fit(ZeROStrategy(3), Graph(), data, logger=TensorBoardLogger(root, log_graph=True), **options)
