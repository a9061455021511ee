"""`PipelineTimeline`: which steps are recorded, and what loggers and the log folder get of them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.extras.callbacks.pipeline_timeline import PipelineTimeline
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.parallel.pipeline.schedules import Action

SPANS = [[(Action("F", 0, 0), 0.0, 1.0), (Action("B", 0, 0), 3.0, 4.0)]]
"""Of one rank, half of whose time is a bubble."""


class Pipeline:
    """Notes which steps are recorded."""

    def __init__(self) -> None:
        self.runner = SimpleNamespace(recorder=None)
        self.asked = 0

    def record(self, *, on: bool) -> None:
        self.runner.recorder = object() if on else None

    def spans(self) -> Any:
        assert self.runner.recorder is None
        self.asked += 1
        return SPANS


class Logger:
    """A logger with TensorBoard's interface."""

    def __init__(self) -> None:
        self.metrics: list[Any] = []
        self.images: list[Any] = []
        self.experiment: Any = SimpleNamespace(add_image=lambda *args: self.images.append(args))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.metrics.append((metrics, step))


def trainer_of(folder: Path, *, pipeline: Any = None, rank_0: bool = True) -> Any:
    strategy = ZeROStrategy(1)
    strategy.parallel.pipeline = pipeline
    return SimpleNamespace(
        strategy=strategy, global_step=0, log_dir=None, default_root_dir=str(folder), is_global_zero=rank_0,
        loggers=[Logger()],
    )  # fmt: skip


def train(callback: PipelineTimeline, trainer: Any, steps: int, batches: int = 1) -> list[int]:
    """Return the steps, from 0, that were recorded. A step is made after ``batches`` batches."""
    found = []
    callback.on_train_start(trainer, None)  # type: ignore[arg-type]
    for _ in range(steps):
        for i in range(batches):
            callback.on_train_batch_start(trainer, None, None, 0)  # type: ignore[arg-type]
            if trainer.strategy.parallel.pipeline.runner.recorder is not None:
                found.append(trainer.global_step)
            trainer.global_step += i == batches - 1
            callback.on_train_batch_end(trainer, None, None, None, 0)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3, 4, 5, 6]), (2, [1, 3, 5]), (3, [1, 4]), (100, [1])])
def test_the_second_step_and_then_every_nth_is_recorded(tmp_path: Path, every: int, expected: list[int]) -> None:
    pipeline = Pipeline()
    assert train(PipelineTimeline(every), trainer_of(tmp_path, pipeline=pipeline), 7) == expected
    assert pipeline.asked == len(expected)
    assert pipeline.runner.recorder is None


def test_loggers_get_the_bubble_and_a_figure(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trainer = trainer_of(tmp_path, pipeline=Pipeline())
    train(PipelineTimeline(), trainer, 3)
    logger = trainer.loggers[0]
    assert logger.metrics == [({"zero_pipeline/bubble": 0.5}, 2)]
    ((name, figure, step),) = logger.images
    assert (name, step) == ("zero_pipeline/timeline", 2)
    assert figure.dtype == torch.uint8


def test_a_logger_without_figures_gets_the_bubble(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, pipeline=Pipeline())
    trainer.loggers[0].experiment = object()
    train(PipelineTimeline(), trainer, 3)
    assert len(trainer.loggers[0].metrics) == 1
    assert trainer.loggers[0].images == []


def test_the_log_folder_gets_a_trace(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, pipeline=Pipeline())
    trainer.log_dir = str(tmp_path / "logs" / "version_0")
    train(PipelineTimeline(), trainer, 3)
    (path,) = tmp_path.rglob("*.json")
    assert path == tmp_path / "logs" / "version_0" / "pipeline_step2.json"
    assert "traceEvents" in json.loads(path.read_text())


def test_other_ranks_take_part_and_write_nothing(tmp_path: Path) -> None:
    pipeline = Pipeline()
    trainer = trainer_of(tmp_path, pipeline=pipeline, rank_0=False)
    train(PipelineTimeline(), trainer, 3)
    assert pipeline.asked == 1
    assert trainer.loggers[0].metrics == list(tmp_path.rglob("*")) == []


def test_a_run_without_a_pipeline_is_refused_at_its_start(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="Got PipelineTimeline without a pipeline"):
        PipelineTimeline().on_train_start(trainer_of(tmp_path), None)  # type: ignore[arg-type]


def test_another_strategy_is_refused() -> None:
    with pytest.raises(PlanError, match="PipelineTimeline reads shards, and strategy=object has none"):
        PipelineTimeline().on_train_start(SimpleNamespace(strategy=object()), None)  # type: ignore[arg-type]


def test_an_interval_of_no_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="every_n_steps=0"):
        PipelineTimeline(0)
