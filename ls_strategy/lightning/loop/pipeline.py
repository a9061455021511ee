"""Steps of a pipeline: all forwards and backwards of a batch inside of ``training_step``."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ls_strategy.engine import Engine
from ls_strategy.lightning.loop.call import StepCall
from ls_strategy.lightning.loop.plain import LoopParts, StepLoop

if TYPE_CHECKING:
    from ls_strategy.lightning.pipeline.step import Pipeline


class PipelineLoop(StepLoop):
    """Shards each batch into micro-batches, which pass through the stages."""

    updates_early = False  # gradients tied over stages have to be summed first

    @classmethod
    def of(cls, parts: LoopParts) -> PipelineLoop | None:
        """Return the loop if the options ask for a pipeline."""
        return cls(parts) if parts.run.config.parallel.pp.size > 1 else None

    @property
    def _pipeline(self) -> Pipeline:
        pipeline = self._run.parallel.pipeline
        assert pipeline is not None
        return pipeline

    @override
    def train(self, call: StepCall) -> Any:
        call.engine.begin_step(sync_buffers_after=call.synchronises)
        with self._run.activations.around_forward():
            last = not call.accumulates
            return self._pipeline.train(self._module, call.engine, call.step, call.args, last=last)

    @override
    def evaluate(self, call: StepCall) -> Any:
        call.engine.begin_step()
        return self._pipeline.evaluate(self._module, call.step, call.args)

    @override
    @contextmanager
    def around_backward(self, engine: Engine, *, synchronises: bool, accumulates: bool) -> Generator[bool, None, None]:
        engine.keeps_gradients = False
        yield False  # it ran in training_step
