"""Random numbers of the micro-batches and stages of a pipeline.

::

    before the blocks     the same on all stages: inputs and targets that are masked at random fit together
    in a stage's blocks   its own
    after the blocks      its own, also where the step runs on shapes: how many tokens are drawn is known before

The numbers depend on the generators' states and the position in the run, which a checkpoint restores.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch

from ls_strategy.device import generator_of
from ls_strategy.host.pytorch import pl
from ls_strategy.parallel.random import draw, hash64, position, set_state


class PipelineRandom:
    """Seeds the generators inside of steps."""

    def __init__(self, device: torch.device) -> None:
        self.evaluated = 0
        """Batches since the last training batch."""

        self._device = device
        self._micro_batch = 0
        self._streams: list[tuple[torch.Generator, int]] = []
        """Inside of steps, generators and what their seeds depend on."""

    @contextmanager
    def own_numbers(self, trainer: pl.Trainer) -> Generator[None, None, None]:
        """Let micro-batches and stages draw numbers of their own inside, and restore the generators afterwards."""
        place = hash64(trainer.current_epoch << 32 | trainer.fit_loop.epoch_loop.batch_idx + 1)
        generators = {generator_of(torch.device("cpu")), generator_of(self._device)}
        kept = [(generator, position(generator), draw(generator)[0]) for generator in generators]
        self._streams = [(generator, place ^ hash64(self.evaluated) ^ number) for generator, _, number in kept]
        try:
            yield
        finally:
            self._streams = []
            for generator, before, _ in kept:
                set_state(generator, before)

    def begin(self, micro_batch: int) -> None:
        """Draw the numbers of a micro-batch before the blocks from now on."""
        self._micro_batch = micro_batch
        self._seed(0)

    def enter(self, stage: int) -> None:
        """Draw those of a stage from now on; one more than the last stage is what follows the blocks."""
        self._seed(stage + 1)

    def _seed(self, code: int) -> None:
        code = hash64(self._micro_batch << 16 | code)
        for generator, seed in self._streams:
            generator.manual_seed(hash64(seed ^ code) >> 32)
