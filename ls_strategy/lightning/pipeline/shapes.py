"""Runs a step of a pipeline on shapes before its micro-batches are trained with, to know their shares of the loss.

::

    batch           ─> step on shapes ─┐
    micro-batch 0   ─> step on shapes ─┼─> the functions that they called ─> factors of the micro-batches' losses
    micro-batch 1   ─> step on shapes ─┘

Only the last stage does this. What the step logs, prints, draws, sets on the module or counts in metrics has no effect.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from typing import Any

import torch

from ls_strategy.checkpoint.random import RandomStream
from ls_strategy.device import generator_of
from ls_strategy.host.pytorch import pl
from ls_strategy.lightning.pipeline.log import Logged, unchanged_metrics
from ls_strategy.parallel.pipeline.counts import Mean
from ls_strategy.parallel.pipeline.derive import Derivation
from ls_strategy.parallel.pipeline.record import RecordedStep
from ls_strategy.parallel.pipeline.stage import StageRunner


def derive(
    module: pl.LightningModule,
    stages: StageRunner,
    step: Callable[[Any], Any],
    batches: Sequence[Any],
    sizes: Sequence[int],
    begin: Callable[[int], None],
) -> tuple[Derivation, list[list[Mean]]]:
    """Return how the values of a batch follow from those of its micro-batches.

    Args:
        module: the module of the step.
        stages: its stages on this rank.
        step: called with each batch.
        batches: the micro-batches, and last their batch.
        sizes: samples of the micro-batches.
        begin: called with the index of the batch that comes next.

    Returns:
        This, and the losses of the micro-batches that are means over tokens.
    """
    stream = RandomStream()
    records, means = [], []
    answer = False
    with unchanged_metrics(module, stages.device), redirect_stdout(StringIO()):
        while len(records) < len(batches):
            begin(len(records))
            record = RecordedStep(answer=answer)
            with (logged := Logged(module)).recording(), _watched_draws(stages, record):
                means.append(stages.record(step, batches[len(records)], record))
            record.logged, record.batch_sizes = logged.values, logged.batch_sizes
            records.append(record)
            if record.asked and not record.complete and not answer:
                # It raised, for example because not all values seemed finite.
                answer, records, means = True, [], []
    stream.put()
    return Derivation(records[:-1], records[-1], sizes), means[:-1]


@contextmanager
def _watched_draws(stages: StageRunner, record: RecordedStep) -> Generator[None, None, None]:
    """Note whether random numbers are drawn inside, where other numbers come after the blocks."""
    seeded, on_end = _states(stages.device), stages.on_end

    def end() -> None:
        nonlocal seeded
        record.random |= seeded != _states(stages.device)
        on_end()
        seeded = _states(stages.device)

    stages.on_end = end
    try:
        yield
    finally:
        record.random |= seeded != _states(stages.device)
        stages.on_end = on_end


def _states(device: torch.device) -> list[Any]:
    """Return what changes if any generator draws."""
    numpy = sys.modules.get("numpy")
    generators = {generator_of(torch.device("cpu")), generator_of(device)}
    states = [bytes(generator.get_state().numpy()) for generator in generators]
    return [random.getstate(), states, None if numpy is None else pickle.dumps(numpy.random.get_state(legacy=False))]
