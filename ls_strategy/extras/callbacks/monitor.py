"""`Monitor`: speed of the run, and where time and memory go."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ls_strategy import device as dev
from ls_strategy._torch import tree_iter
from ls_strategy.checked import above, at_least, checked
from ls_strategy.errors import PlanError, StateError
from ls_strategy.extras._lightning import around_fetches
from ls_strategy.extras.callbacks.during_fit import zero_strategy
from ls_strategy.extras.callbacks.intervals import MIB, FitTable, Interval, Sample, TimeLeft
from ls_strategy.extras.callbacks.run_file import RunFile
from ls_strategy.extras.callbacks.slow_ranks import SlowRank
from ls_strategy.extras.callbacks.step_figures import StepFigures, log_images
from ls_strategy.extras.callbacks.step_trace import RankTrace, merged
from ls_strategy.extras.callbacks.stragglers import Stragglers, tell
from ls_strategy.extras.plots.charts import ByteUnit, Charts, unit_for
from ls_strategy.extras.plots.ranks import draw_ranks
from ls_strategy.host.fabric import get_available_flops
from ls_strategy.host.pytorch import (
    Callback,
    MisconfigurationException,
    ModelSummary,
    extract_batch_size,
    pl,
    rank_zero_info,
)
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.spans import DATA, PHASES, VALIDATION, SpanRecord, SpanRecorder, Window


def sent_bytes(strategy: ZeROStrategy) -> int:
    """Return the bytes that this rank has sent for sharded states, and to its tensor- and context-parallel groups."""
    meters = (strategy.traffic, strategy.tensor_parallel_traffic, strategy.context_parallel_traffic)
    return sum(sum(meter.bytes.values()) for meter in {id(m): m for m in meters}.values())


def memory_metrics(strategy: ZeROStrategy, unit: ByteUnit) -> dict[str, float]:
    """Return the scalars of the memory in use now, and of the peak since the last call."""
    states = strategy.memory_bytes()
    group = f"zero_memory_{unit.name}"
    result = {f"{group}/{k}": v / unit.nbytes for k, v in states.items()}
    device = strategy.root_device
    if dev.is_accelerator(device):
        peak = dev.peak_bytes(device, reset=True)
        result[f"{group}/peak"] = peak / unit.nbytes
        result[f"{group}/activations"] = max(peak - sum(states.values()), 0) / unit.nbytes
    return result


def bytes_in_use(strategy: ZeROStrategy) -> dict[str, int]:
    """Return the bytes in use now, by category."""
    held = dict(strategy.memory_bytes())
    if dev.is_accelerator(strategy.root_device):
        allocated = dev.allocated_bytes(strategy.root_device)
        held["activations"] = max(allocated - sum(held.values()), 0)
        held["allocated"] = allocated
    offloaded = strategy.activations.metrics().get("zero_activations/stored_bytes")
    if offloaded is not None:
        held["offloaded"] = int(offloaded)
    statistics = Path("/proc/self/statm")  # Linux
    if statistics.exists():
        held["process"] = int(statistics.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return held


_WITHOUT_LOGGING = 50  # steps per interval if nothing is logged
_ALWAYS = ("zero/skipped_steps", "zero/exposed_update_ms", "zero/exposed_update", "zero_stragglers/slowest_rank")
"""Scalars for which 0 is information."""


class Monitor(Callback):
    """Logs the speed of the run, and where time and memory go, every ``trainer.log_every_n_steps`` steps.

    ====================================== =============================================================================
    scalar                                 meaning
    ====================================== =============================================================================
    ``zero/grad_norm``                     global norm of the averaged gradients, before clipping
    ``zero/gather_error``                  relative change of the weights by ``sharding.quantized_gathers``
    ``zero/gradient_error``                relative change of the gradients by ``sharding.quantized_gradients``
    ``zero/loss_scale``                    loss scale (fp16 precisions)
    ``zero/skipped_steps``                 number of steps skipped after an overflow
    ``zero/samples_per_s``                 samples of all ranks per second, data loading included
    ``zero/tokens_per_s``                  tokens of all ranks per second, if a batch's first tensor is (batch, tokens),
                                           int64 or int32
    ``zero/mfu``                           model FLOP utilisation, if the module has ``flops_per_token()`` or
                                           ``flops_per_sample()`` and the peak of the device is known
    ``zero/sent_mib_per_step``             MiB this rank sent per step for sharded states, layers and sequences
    ``zero/exposed_update_ms``             milliseconds per step that training waited for updates of offloaded states
    ``zero/exposed_update``                the same as a share of the step
    ``zero/hours_left``                    until the end of the fit, at the speed of the last interval
    ``zero/hours_left_by_plan``            the same at the speed that was planned, see ``planned_step_s``
    ``zero/step_over_plan``                time of a step over the planned one
    ``zero_time/step_ms``                  milliseconds per optimizer step, without validation
    ``zero_time/forward_ms``               of it in ``training_step``; in a pipeline with the waits between its actions
    ``zero_time/backward_ms``              of it in backward passes
    ``zero_time/optimizer_ms``             of it in ``optimizer.step()``: gradients still in flight, clipping, update
    ``zero_time/data_ms``                  of it waiting for the next batch and copying it to the device
    ``zero_time/other_ms``                 everything else: callbacks, logging, checkpoints, Lightning's own work
    ``zero_time_share/*``                  the same as shares of the step, which add up to 1
    ``zero_time/communication_ms``         time with collectives or messages in flight, in one step of the interval
    ``zero_time/communication_exposed_ms`` of it, computation waited for them
    ``zero_time/communication_hidden_ms``  of it, overlapped with computation
    ``zero_traffic/communication_*``       ``mib_per_step`` that this rank sent in all; ``gb_per_s`` while in flight
    ``zero_traffic/*_mib_per_step``        of it, by kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ...
    ``zero_time/copies*_ms``               the same for copies between device and host memory, and to and from NVMe
    ``zero_traffic/copies_*``              the same for copies
    ``zero_memory_UNIT/*``                 parameters, masters, gradients, optimizer, gathered, communication: model
                                           states on this rank; on CUDA also ``peak``, and ``activations``: peak less
                                           states
    ``zero_memory_after_PHASE_UNIT/*``     the same when forward, backward, optimizer ends, in one step of the interval;
                                           also ``allocated`` (CUDA), ``process`` (resident memory) and ``offloaded``
                                           activations
    ``zero_stragglers/slowest_ratio``      own time of the slowest rank's steps, without waits for others, over the
                                           median of the other ranks with the same work
    ``zero_stragglers/slowest_rank``       its number
    ``zero_stragglers/PHASE_ratio``        the same by phase
    ``zero_stragglers/slow_ranks``         number of ranks that are slow
    ``zero_activations/*``                 tensors that backward needs: kept, offloaded, and waited for
    ====================================== =============================================================================

    UNIT is ``gib``, ``mib`` or ``kib``, chosen by what this rank stores when the fit begins. A scalar gets a chart when
    it is not 0 for the first time: unused features have none.

    Phases are measured in every step and add up to it. Communication and copies are part of a phase as far as they are
    exposed. Recording them takes more work, so it is done in one step in the middle of an interval. Times are those of
    the computation: of the training thread on CPUs, of the current stream on CUDA.

    A rank whose steps, forwards, backwards, updates or data take 1.2 x as long as the median of the others, without
    waits, is named in the log when that begins (within 20 steps if it is 1.3 x), and when it ends. Compared are ranks
    with the same work: the same pipeline stage, the same experts, as many virtual ranks. Times travel through the
    rendezvous store, without a collective. Waits in collectives that user code calls by itself count as work.

    Loggers with TensorBoard's interface also get two images of such a step: ``zero_time/step``, what each rank did, and
    ``zero_memory/step``, bytes by kind on the rank that had the most; and ``zero_stragglers/ranks``, the ratios of
    ranks and phases. At the end of a fit the log shows a table, unless
    ``Trainer(enable_model_summary=False)``. A line in ``zero_run.jsonl`` in the log folder says when a fit began and
    ended, with its versions, for ``ls-strategy report``.
    """

    @checked(
        peak_tflops=above(0), trace_step=at_least(1), picture_every_n_steps=at_least(1), planned_step_s=above(0)
    )  # fmt: skip
    def __init__(
        self,
        peak_tflops: float | None = None,
        *,
        trace_step: int | None = None,
        picture_every_n_steps: int = 1000,
        planned_step_s: float | None = None,
    ) -> None:
        """Set the options; none is required.

        Args:
            peak_tflops: peak of one device in 10^12 FLOP/s, for MFU on devices missing in Lightning's table.
            trace_step: write ``trace_step<N>.json`` to the log folder, for https://ui.perfetto.dev: what all ranks did
                in the step after which ``trainer.global_step`` is N, and memory by category.
            picture_every_n_steps: the least number of optimizer steps between two images of a step.
            planned_step_s: seconds per optimizer step that ``ls-strategy plan`` has predicted, to compare with. None:
                the prediction of ``stage="auto"``, if there is one.
        """
        self.planned_step_s = planned_step_s
        self.peak_tflops = peak_tflops
        self.trace_step = trace_step
        self.picture_every_n_steps = picture_every_n_steps
        self._figures = StepFigures(picture_every_n_steps)
        self._draws = False  # whether the step of the current window is drawn
        self._run_file = RunFile()
        self._stragglers: Stragglers | None = None
        self._ranks_drawn: int | None = None  # the step at which ranks were drawn last
        self._time_left: TimeLeft | None = None
        self._recorder: SpanRecorder | None = None
        self._undo: Callable[[], None] | None = None
        self._table = FitTable()
        self._samples = 0
        self._tokens = 0
        self._since = 0.0
        self._sent_before = 0
        self._exposed_before = 0.0
        self._step_before = 0
        self._last_step = 0
        self._stride = 1  # optimizer steps of the last batch that took any: manual optimization may take several
        self._window_from = 0
        self._window: tuple[Window, int] | None = None  # the recording of this interval, and its steps
        self._norms: dict[str, Tensor] = {}
        self._charts = Charts()
        self._unit: ByteUnit | None = None  # the unit of memory in this fit

    # fit -------------------------------------------------------------------------------------------------------------

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        strategy = zero_strategy(trainer, self)
        monitors = [c for c in trainer.callbacks if isinstance(c, Monitor)]  # type: ignore[attr-defined]
        if len(monitors) > 1:
            raise PlanError(f"Got {len(monitors)} Monitors in callbacks, but a run can have only one. Keep one.")
        self._figures.start(trainer)
        self._run_file.start(trainer, strategy)
        self._recorder = SpanRecorder(strategy.root_device)
        self._undo = around_fetches(
            trainer, partial(self._recorder.enter, DATA), partial(self._recorder.leave, DATA)
        )  # fmt: skip
        self._table = FitTable()
        self._charts, self._unit = Charts(_ALWAYS), None
        self._last_step, self._stride = trainer.global_step, 1
        self._recorder.start()
        self._recorder.measure = partial(bytes_in_use, strategy)
        self._time_left = TimeLeft(trainer, pl_module, self.planned_step_s or strategy.planning.planned_step_s)
        self._restart(trainer, strategy)
        self._look_ahead(trainer)
        self._ranks_drawn = None
        self._stragglers = Stragglers(strategy, self._recorder, trainer.global_step, self._tell)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder is not None and trainer.global_step > self._step_before:
            strategy = zero_strategy(trainer, self)
            self._table.add(self._interval(trainer, strategy, self._utilisation(pl_module, strategy)))
        self._run_file.end(trainer)
        self._stop()
        text = self._table.text()
        if text and any(isinstance(c, ModelSummary) for c in trainer.callbacks):  # type: ignore[attr-defined]
            rank_zero_info(text)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._run_file.end(trainer, exception)
        self._stop()

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None
        if self._undo is not None:
            self._undo()
            self._undo = None
        self._window = self._stragglers = self._time_left = None

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the time that does not count as part of a step."""
        if self._recorder is not None:
            self._recorder.enter(VALIDATION)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._recorder is None:
            return
        self._recorder.leave(VALIDATION)
        if self._recorder.window_start is not None:
            self._recorder.begin_window()

    # intervals -------------------------------------------------------------------------------------------------------

    def _restart(self, trainer: pl.Trainer, strategy: ZeROStrategy) -> None:
        assert self._recorder is not None
        self._recorder.take_phases()
        self._samples = self._tokens = 0
        self._since = time.perf_counter()
        self._sent_before = sent_bytes(strategy)
        self._exposed_before = strategy.exposed_step_s
        self._step_before = trainer.global_step
        self._window = None

    def _every(self, trainer: pl.Trainer) -> int:
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        return every if trainer.loggers and every > 0 else 0

    def _due(self, trainer: pl.Trainer) -> bool:
        every = self._every(trainer)
        return every > 0 and (trainer.global_step + 1) % every == 0

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Take the gradient norm. Collective, at the same steps on every rank."""
        if not self._due(trainer):
            return
        strategy = zero_strategy(trainer, self)
        if strategy.config.sharding.quantized_gathers is not None:
            self._norms["zero/gather_error"] = torch.tensor(strategy.gather_error())
        name = "zero/grad_norm"
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
        """Count, and log at the end of an interval. Collective at the step that is traced."""
        if not getattr(trainer.strategy, "runs_filler", False):
            self._samples += _samples(batch)
            self._tokens += _tokens(batch)
        if self._recorder is None or trainer.global_step == self._last_step:
            return
        assert self._stragglers is not None
        if trainer.global_step < self._last_step:  # SpikeGuard has gone back
            self._begin_again(trainer, self._stragglers)
            return
        self._stride, self._last_step = trainer.global_step - self._last_step, trainer.global_step
        self._stragglers.end(trainer.global_step, counts=not getattr(trainer.strategy, "runs_filler", False))
        self._end_window(trainer)
        if trainer.global_step >= self._step_before + (self._every(trainer) or _WITHOUT_LOGGING):
            self._end_interval(trainer, pl_module)
        self._look_ahead(trainer)
        self._stragglers.begin()

    def _begin_again(self, trainer: pl.Trainer, stragglers: Stragglers) -> None:
        """Begin an interval at a step to which training has gone back, without what has run since the last one."""
        assert self._recorder is not None
        self._last_step = trainer.global_step
        stragglers.end(trainer.global_step, counts=False)
        if self._recorder.window_start is not None:
            self._recorder.end_window()
        self._norms.clear()
        self._restart(trainer, zero_strategy(trainer, self))
        self._look_ahead(trainer)
        stragglers.begin()

    def _end_interval(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        strategy = zero_strategy(trainer, self)
        dev.synchronize(strategy.root_device)  # otherwise the clock stops before the work is done
        utilisation = self._utilisation(module, strategy)
        interval = self._interval(trainer, strategy, utilisation)
        self._table.add(interval)
        assert self._time_left is not None
        time_left = self._time_left.add(interval, trainer.global_step)
        if self._every(trainer):
            assert self._stragglers is not None
            metrics = self._speed(trainer, strategy) | ({} if utilisation is None else {"zero/mfu": utilisation})
            self._unit = self._unit or unit_for(sum(strategy.memory_bytes().values()))
            metrics |= interval.metrics() | memory_metrics(strategy, self._unit) | strategy.activations.metrics()
            if strategy.config.sharding.quantized_gradients is not None:
                metrics["zero/gradient_error"] = strategy.gradient_error()
            if interval.sample is not None:
                metrics |= interval.sample.memory_metrics(self._unit)
            metrics |= time_left | self._stragglers.metrics()
            shown = self._charts.of(metrics)
            for logger in trainer.loggers:
                logger.log_metrics(shown, step=trainer.global_step)
            self._draw_ranks(trainer, self._stragglers)
        self._norms.clear()
        self._restart(trainer, strategy)

    def _tell(self, slow: SlowRank, about: str, until: int | None) -> None:
        """Log an event of a rank on rank 0, and note it for a report."""
        tell(slow, about, until)
        self._run_file.note(
            "slow rank" if until is None else "rank no longer slow",
            step=self._last_step,
            until=until,
            about=about,
            **asdict(slow),
        )
        self._ranks_drawn = None  # show it

    def _draw_ranks(self, trainer: pl.Trainer, stragglers: Stragglers) -> None:
        """Draw ranks by phases, on rank 0 now and then."""
        ratios, step = stragglers.ratios, trainer.global_step
        if ratios is None or not self._figures.on:
            return
        if self._ranks_drawn is None or step >= self._ranks_drawn + self.picture_every_n_steps:
            self._ranks_drawn = step
            title = f"optimizer step {step}: which rank is slower than others"
            log_images(trainer, {"zero_stragglers/ranks": draw_ranks(ratios, ["step", *PHASES], title)}, step)

    def _interval(self, trainer: pl.Trainer, strategy: ZeROStrategy, utilisation: float | None) -> Interval:
        assert self._recorder is not None
        window = self._window
        return Interval(
            trainer.global_step - self._step_before,
            self._recorder.take_phases(),
            None if window is None else Sample(window[0].resolve(), window[1]),
            self._samples * strategy.data_parallel_size,
            self._tokens * strategy.data_parallel_size,
            utilisation,
        )

    def _speed(self, trainer: pl.Trainer, strategy: ZeROStrategy) -> dict[str, float]:
        elapsed = time.perf_counter() - self._since
        steps = trainer.global_step - self._step_before
        metrics: dict[str, float] = {k: float(v) for k, v in self._norms.items()}
        metrics["zero/samples_per_s"] = self._samples * strategy.data_parallel_size / elapsed
        if self._tokens:
            metrics["zero/tokens_per_s"] = self._tokens * strategy.data_parallel_size / elapsed
        metrics["zero/sent_mib_per_step"] = (sent_bytes(strategy) - self._sent_before) / steps / MIB
        if strategy.config.offload.optimizer is not None:
            exposed = strategy.exposed_step_s - self._exposed_before
            metrics["zero/exposed_update_ms"] = 1e3 * exposed / steps
            metrics["zero/exposed_update"] = exposed / elapsed
        if strategy.loss_scale is not None:
            metrics["zero/loss_scale"] = strategy.loss_scale
            metrics["zero/skipped_steps"] = strategy.skipped_steps
        return metrics

    def _utilisation(self, module: pl.LightningModule, strategy: ZeROStrategy) -> float | None:
        device = strategy.root_device
        policy = strategy.precision_policy
        peak = self.peak_tflops * 1e12 if self.peak_tflops else None
        if peak is None and dev.is_accelerator(device):
            peak = get_available_flops(device, policy.autocast or policy.compute)
        per_token: Any = getattr(module, "flops_per_token", None)
        per_sample: Any = getattr(module, "flops_per_sample", None)
        flops = 0.0
        if per_token is not None and self._tokens:
            flops = float(per_token()) * self._tokens
        elif per_sample is not None:
            flops = float(per_sample()) * self._samples
        if not flops or not peak:
            return None
        ranks = strategy.parallel.replica_ranks  # the operations of a batch are spread over them
        return flops / (time.perf_counter() - self._since) / (ranks * peak)

    # full recordings -------------------------------------------------------------------------------------------------

    def _look_ahead(self, trainer: pl.Trainer) -> None:
        """Begin a full recording if the next step needs it; prepare it if the step after the next does."""
        assert self._recorder is not None
        step = trainer.global_step
        if self._wants(trainer, step):
            self._recorder.prepare_window()
            self._draws = self._figures.due(step)
            self._recorder.each_unit = self._is_traced(step) or self._draws
            self._recorder.begin_window()
            self._window_from = step
        elif self._wants(trainer, step + self._stride):
            self._recorder.prepare_window()
        else:
            self._recorder.detail = False

    def _wants(self, trainer: pl.Trainer, step: int) -> bool:
        """Return whether the step that begins when ``global_step`` is ``step`` is recorded in full.

        Such are the step to trace, and the first one in the second half of every interval between two logged steps.
        """
        every = self._every(trainer) or _WITHOUT_LOGGING
        ahead = step - self._step_before
        again = ahead >= every  # the interval after this one
        return self._is_traced(step) or ((self._window is None or again) and ahead % every >= every // 2)

    def _is_traced(self, step: int) -> bool:
        return self.trace_step is not None and step < self.trace_step <= step + self._stride

    def _end_window(self, trainer: pl.Trainer) -> None:
        recorder = self._recorder
        assert recorder is not None
        if recorder.window_start is None:
            return
        window = recorder.end_window()
        if self._window is None:
            self._window = (window, trainer.global_step - self._window_from)
        traced = self.trace_step is not None and self._window_from < self.trace_step <= trainer.global_step
        if traced or self._draws:
            record = window.resolve()
            if traced:
                self._write_trace(trainer, record)
            if self._draws:
                self._draw(trainer, record)

    def _draw(self, trainer: pl.Trainer, record: SpanRecord) -> None:
        """Draw the step on all ranks. Collective."""
        self._draws = False
        self._figures.taken(self._window_from)
        world = zero_strategy(trainer, self).require_engine().mesh.world
        ranks = world.exchange_objects(self._figures.of_rank(record, world.rank))
        if trainer.is_global_zero:
            self._figures.show(trainer, ranks, trainer.global_step)

    def _write_trace(self, trainer: pl.Trainer, record: SpanRecord) -> None:
        """Write the trace of all ranks. Collective."""
        strategy = zero_strategy(trainer, self)
        ranks = strategy.require_engine().mesh.world.exchange_objects(RankTrace.of(record))
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # broadcast, so on all ranks
        if trainer.is_global_zero:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"trace_step{self.trace_step}.json"
            path.write_text(merged(ranks))
            rank_zero_info(f"Monitor: wrote {path}; open it at https://ui.perfetto.dev")


def _samples(batch: Any) -> int:
    """Return the samples of a batch, 0 if it has no tensor to count them by."""
    try:
        return extract_batch_size(batch)
    except MisconfigurationException:
        return 0


def _tokens(batch: Any) -> int:
    """Return the elements of a batch's first tensor if it has token ids, ``(batch, tokens)`` int64 or int32, else 0."""
    for t in tree_iter(batch):
        if isinstance(t, Tensor):
            return t.numel() if t.dim() == 2 and t.dtype in (torch.int64, torch.int32) else 0
    return 0
