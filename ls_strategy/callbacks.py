"""Callbacks that know what is where: what to watch (`Monitor`, `PipelineTimeline`), an average (`ShardedEMA`)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.data import extract_batch_size
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ls_strategy._compat import tree_iter
from ls_strategy.checkpoint.full import full_state_dict, masters_from_state_dict
from ls_strategy.errors import ConfigError, PlanError, StateError
from ls_strategy.lightning_pipeline import Pipeline
from ls_strategy.parallel.pipeline import timeline
from ls_strategy.strategy import ZeROStrategy

_GIB = 1 << 30


def _zero_strategy(trainer: pl.Trainer, callback: Callback) -> ZeROStrategy:
    if not isinstance(trainer.strategy, ZeROStrategy):
        raise PlanError(
            f"{type(callback).__name__} reads shards, and strategy={type(trainer.strategy).__name__} has none. "
            'Use strategy="zero0" to "zero3", or leave the callback out.'
        )
    return trainer.strategy


class Monitor(Callback):
    """Logs how fast the run is and where the memory is, every ``trainer.log_every_n_steps`` steps.

    =============================  ==================================================================================
    scalar                         meaning
    =============================  ==================================================================================
    ``monitor/grad_norm``          global norm of the averaged gradients, before clipping
    ``monitor/loss_scale``         loss scale (fp16 precisions)
    ``monitor/skipped_steps``      steps skipped after an overflow so far
    ``monitor/samples_per_s``      samples of all ranks per second, data loading included
    ``monitor/tokens_per_s``       likewise tokens, where a batch's first tensor is (batch, tokens), int64 or int32
    ``monitor/mfu``                model FLOP utilisation, where the module has ``flops_per_token()`` or
                                   ``flops_per_sample()`` and the peak of the device is known
    ``monitor/sent_mib_per_step``  MiB this rank sent per step
    ``monitor/exposed_update_ms``  milliseconds per step that training waited for updates of offloaded states
    ``monitor/exposed_update``     the same as a share of the step
    ``memory_gib/*``               parameters, masters, gradients, optimizer, communication: model states on this rank;
                                   on CUDA also ``peak`` and ``activations`` (peak less states)
    ``activations/*``              what was kept, offloaded, and waited for, of the tensors that backward needs
    =============================  ==================================================================================
    """

    reads_weights = False
    reads_gradients = False  # the norm comes from the strategy

    def __init__(self, peak_tflops: float | None = None) -> None:
        """Nothing is needed.

        Args:
            peak_tflops: peak of one device in 10^12 FLOP/s, for MFU on devices that Lightning's table does not know.
        """
        if peak_tflops is not None and not peak_tflops > 0:
            raise ConfigError(f"peak_tflops={peak_tflops}: give the device's peak in 10^12 FLOP/s, above 0.")
        self.peak_tflops = peak_tflops
        self._samples = 0
        self._tokens = 0
        self._since = 0.0
        self._sent_before = 0
        self._exposed_before = 0.0
        self._step_before = 0
        self._norms: dict[str, Tensor] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock."""
        strategy = _zero_strategy(trainer, self)
        self._restart(trainer, strategy)

    def _restart(self, trainer: pl.Trainer, strategy: ZeROStrategy) -> None:
        self._samples = self._tokens = 0
        self._since = time.perf_counter()
        self._sent_before = _sent_bytes(strategy)
        self._exposed_before = strategy.exposed_step_s
        self._step_before = trainer.global_step

    def _due(self, trainer: pl.Trainer) -> bool:
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        return bool(trainer.loggers) and every > 0 and (trainer.global_step + 1) % every == 0

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Take the gradient norm. Collective, at the same steps on every rank."""
        if not self._due(trainer):
            return
        strategy = _zero_strategy(trainer, self)
        name = "monitor/grad_norm"
        if len(trainer.optimizers) > 1:
            name += f"_{next(i for i, o in enumerate(trainer.optimizers) if o is optimizer)}"
        try:
            self._norms[name] = strategy.grad_norm(optimizer=optimizer)
        except StateError:
            self._norms.pop(name, None)  # a step without gradients has no norm

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count, and log when it is time."""
        self._samples += extract_batch_size(batch)
        self._tokens += _tokens(batch)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if not trainer.loggers or every < 1 or trainer.global_step < self._step_before + every:
            return
        strategy = _zero_strategy(trainer, self)
        if strategy.root_device.type == "cuda":
            torch.cuda.synchronize(strategy.root_device)  # otherwise the clock stops before the work does
        elapsed = time.perf_counter() - self._since
        steps = trainer.global_step - self._step_before
        sent = _sent_bytes(strategy)
        metrics: dict[str, float] = {k: float(v) for k, v in self._norms.items()}
        metrics["monitor/samples_per_s"] = self._samples * strategy.data_parallel_size / elapsed
        if self._tokens:
            metrics["monitor/tokens_per_s"] = self._tokens * strategy.data_parallel_size / elapsed
        metrics["monitor/sent_mib_per_step"] = (sent - self._sent_before) / steps / (1 << 20)
        if strategy.config.offload_optimizer is not None:
            exposed = strategy.exposed_step_s - self._exposed_before
            metrics["monitor/exposed_update_ms"] = 1e3 * exposed / steps
            metrics["monitor/exposed_update"] = exposed / elapsed
        metrics |= self._utilisation(pl_module, strategy, elapsed)
        if strategy.loss_scale is not None:
            metrics["monitor/loss_scale"] = strategy.loss_scale
            metrics["monitor/skipped_steps"] = strategy.skipped_steps
        metrics |= _memory(strategy)
        metrics |= strategy.activations.metrics()
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)
        self._norms.clear()
        self._restart(trainer, strategy)

    def _utilisation(self, module: pl.LightningModule, strategy: ZeROStrategy, elapsed: float) -> dict[str, float]:
        device = strategy.root_device
        policy = strategy.precision_policy
        peak = self.peak_tflops * 1e12 if self.peak_tflops else None
        if peak is None and device.type == "cuda":
            peak = get_available_flops(device, policy.autocast or policy.compute)
        per_token: Any = getattr(module, "flops_per_token", None)
        per_sample: Any = getattr(module, "flops_per_sample", None)
        flops = 0.0
        if per_token is not None and self._tokens:
            flops = float(per_token()) * self._tokens
        elif per_sample is not None:
            flops = float(per_sample()) * self._samples
        if not flops or not peak:
            return {}
        return {"monitor/mfu": flops / elapsed / peak}


def _tokens(batch: Any) -> int:
    """Elements of a batch's first tensor if it holds token numbers, ``(batch, tokens)`` int64 or int32; else 0."""
    for t in tree_iter(batch):
        if isinstance(t, Tensor):
            return t.numel() if t.dim() == 2 and t.dtype in (torch.int64, torch.int32) else 0
    return 0


def _sent_bytes(strategy: ZeROStrategy) -> int:
    """What this rank has sent so far: for sharded states, and to those that divide its layers and sequences."""
    meters = (strategy.traffic, strategy.tensor_parallel_traffic, strategy.sequence_parallel_traffic)
    return sum(sum(meter.bytes.values()) for meter in {id(m): m for m in meters}.values())


def _memory(strategy: ZeROStrategy) -> dict[str, float]:
    states = strategy.memory_bytes()
    result = {f"memory_gib/{k}": v / _GIB for k, v in states.items()}
    device = strategy.root_device
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        result["memory_gib/peak"] = peak / _GIB
        result["memory_gib/activations"] = max(peak - sum(states.values()), 0) / _GIB
        torch.cuda.reset_peak_memory_stats(device)
    return result


class PipelineTimeline(Callback):
    """Shows what every stage of a pipeline did when, every so many steps.

    Loggers with TensorBoard's interface get a picture, ``pipeline/timeline``, with one line per rank: forwards blue,
    backwards green, bubbles grey; and all loggers the share of bubbles, ``pipeline/bubble``. Beside the logs comes
    ``pipeline_step<N>.json``, for chrome://tracing or ui.perfetto.dev.
    """

    reads_weights = False
    reads_gradients = False

    def __init__(self, every_n_steps: int = 100) -> None:
        """Choose how often.

        Args:
            every_n_steps: optimizer steps between two pictures; the first one is of the second step.
        """
        if every_n_steps < 1:
            raise ConfigError(f"PipelineTimeline(every_n_steps={every_n_steps}): at least 1.")
        self.every_n_steps = every_n_steps

    def _pipeline(self, trainer: pl.Trainer) -> Pipeline:
        pipeline = _zero_strategy(trainer, self).parallel.pipeline
        if pipeline is None:
            raise PlanError(
                "PipelineTimeline shows the stages of a pipeline, and there is none: set pipeline_parallel_size, or "
                "leave the callback out."
            )
        return pipeline

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Refuse a run without a pipeline."""
        self._pipeline(trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to note, if the step that begins is to be shown."""
        due = trainer.global_step % self.every_n_steps == min(1, self.every_n_steps - 1)
        self._pipeline(trainer).record(on=due)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log what was noted. Collective over the pipeline, at the same steps on every rank."""
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
            logger.log_metrics({"pipeline/bubble": timeline.bubble(spans)}, step=step)
            experiment: Any = getattr(logger, "experiment", None)
            if hasattr(experiment, "add_image"):
                experiment.add_image("pipeline/timeline", timeline.picture(spans), step)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"pipeline_step{step}.json").write_text(timeline.chrome_trace(spans))


class ShardedEMA(Callback):
    """Exponential moving average of the weights, kept as fp32 shards: every stage, no communication.

    The average replaces the weights during validation. Checkpoints carry it in full under ``ema_state_dict``, with the
    names and shapes of ``state_dict``, so that ``module.load_state_dict(checkpoint["ema_state_dict"])`` works anywhere.
    """

    reads_weights = False
    reads_gradients = False

    def __init__(self, decay: float = 0.999, every_n_steps: int = 1, validate_with_average: bool = True) -> None:
        """Choose the horizon.

        Args:
            decay: weight of the old average in each update: ``ema = decay * ema + (1 - decay) * weights``.
            every_n_steps: optimizer steps between updates.
            validate_with_average: run validation with the average in place of the weights.
        """
        if not 0.0 <= decay <= 1.0 or every_n_steps < 1:
            raise ConfigError(
                f"ShardedEMA(decay={decay}, every_n_steps={every_n_steps}): "
                "decay must be in [0, 1] and every_n_steps at least 1."
            )
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.validate_with_average = validate_with_average
        self._average: list[Tensor] = []
        self._last_step = 0
        self._swapped = False
        self._loaded: Mapping[str, Tensor] | None = None

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start from the weights, or from the checkpoint's average."""
        engine = _zero_strategy(trainer, self).require_engine()
        self._average = [m.detach().float().clone() for m in engine.trainable_masters()]
        if self._loaded is not None:
            masters_from_state_dict(pl_module, self._loaded, engine.units, self._average)
            self._loaded = None
        self._last_step = trainer.global_step

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Update after every ``every_n_steps`` optimizer steps."""
        if trainer.global_step == self._last_step or trainer.global_step % self.every_n_steps:
            return
        self._last_step = trainer.global_step
        engine = _zero_strategy(trainer, self).require_engine()
        for average, master in zip(self._average, engine.trainable_masters(), strict=True):
            average.lerp_(master.detach().float(), 1.0 - self.decay)

    def _swap(self, trainer: pl.Trainer, *, publish: bool) -> None:
        _zero_strategy(trainer, self).require_engine().exchange_masters(self._average, publish=publish)
        self._swapped = not self._swapped

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the average in place."""
        if self.validate_with_average and self._average and not self._swapped:
            self._swap(trainer, publish=True)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put the weights back, before `ModelCheckpoint` saves."""
        if self._swapped:
            self._swap(trainer, publish=True)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Nothing is collective here: only forget."""
        self._swapped = False

    @override
    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Add the average in full on rank 0. Collective."""
        if not self._average:
            return
        strategy = _zero_strategy(trainer, self)
        if strategy.collection is not None:
            raw = strategy.raw_state_dict()
            checkpoint["ema_state_dict"] = strategy.collection.weights(raw, self._average)
            return
        self._swap(trainer, publish=False)
        try:
            checkpoint["ema_state_dict"] = full_state_dict(
                strategy.raw_state_dict(), strategy.require_engine().units, strategy.require_engine().mesh
            )
        finally:
            self._swap(trainer, publish=False)

    @override
    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Remember the average until the shards exist."""
        self._loaded = checkpoint.get("ema_state_dict")
