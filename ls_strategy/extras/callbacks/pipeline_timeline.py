"""`PipelineTimeline`: the timeline of every pipeline stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from ls_strategy.checked import at_least, checked
from ls_strategy.errors import PlanError
from ls_strategy.extras.callbacks.during_fit import zero_strategy
from ls_strategy.extras.callbacks.step_figures import draws
from ls_strategy.extras.plots import pipeline as figure
from ls_strategy.host.pytorch import Callback, pl
from ls_strategy.lightning.pipeline.step import Pipeline
from ls_strategy.parallel.pipeline.simulate import bubble


class PipelineTimeline(Callback):
    """Shows the timeline of every pipeline stage, at regular intervals.

    Loggers with TensorBoard's interface get a plot, ``zero_pipeline/timeline``, with one line per rank over the time in
    ms: forwards blue, backwards green, bubbles grey. All loggers get the share of bubbles, ``zero_pipeline/bubble``.
    The log folder gets ``pipeline_step<N>.json``, for chrome://tracing or ui.perfetto.dev.
    """

    @checked(every_n_steps=at_least(1))
    def __init__(self, every_n_steps: int = 100) -> None:
        """Set the interval.

        Args:
            every_n_steps: optimizer steps between two plots; the first plot shows the second step.
        """
        self.every_n_steps = every_n_steps
        self._draws = False

    def _pipeline(self, trainer: pl.Trainer) -> Pipeline:
        pipeline = zero_strategy(trainer, self).parallel.pipeline
        if pipeline is None:
            raise PlanError(
                "Got PipelineTimeline without a pipeline, but it shows the stages of one. Set parallel.pipeline, or "
                "leave the callback out."
            )
        return pipeline

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a run without a pipeline."""
        self._pipeline(trainer)
        self._draws = draws(trainer, "PipelineTimeline")

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Start recording if this step will be shown."""
        due = trainer.global_step % self.every_n_steps == min(1, self.every_n_steps - 1)
        self._pipeline(trainer).record(on=due)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the recording. Collective over the pipeline, at the same steps on every rank."""
        pipeline = self._pipeline(trainer)
        if pipeline.runner.recorder is None:
            return
        pipeline.record(on=False)
        spans = pipeline.spans()
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # broadcast, so on all ranks
        if not trainer.is_global_zero:
            return
        step = trainer.global_step
        for logger in trainer.loggers:
            logger.log_metrics({"zero_pipeline/bubble": bubble(spans)}, step=step)
            experiment: Any = getattr(logger, "experiment", None)
            if self._draws and hasattr(experiment, "add_image"):
                experiment.add_image("zero_pipeline/timeline", figure.draw(spans), step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"pipeline_step{step}.json").write_text(figure.chrome_trace(spans))
