"""Steps of virtual ranks: several batches per rank, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ls_strategy.engine import Engine
from ls_strategy.lightning.loop.call import StepCall
from ls_strategy.lightning.loop.plain import LoopParts, StepLoop

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from ls_strategy.lightning.virtual.ranks import VirtualRanks


class VirtualLoop(StepLoop):
    """Runs the step of every virtual rank of this process (`VirtualRanks`)."""

    updates_early = False  # norms of what early updates take would depend on the number of ranks

    @classmethod
    def of(cls, parts: LoopParts) -> VirtualLoop | None:
        """Return the loop if the options ask for virtual ranks."""
        return None if parts.run.virtual is None else cls(parts)

    @property
    def _virtual(self) -> VirtualRanks:
        virtual = self._run.virtual
        assert virtual is not None
        return virtual

    @override
    def check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._virtual.check(trainer, module, joins=self._uneven.joins)

    @override
    def begin_run(self, trainer: pl.Trainer, *, together: bool) -> None:
        self._virtual.begin_run(self._module, fitting=trainer.state.fn == "fit")

    @override
    def end_run(self) -> None:
        self._virtual.end_run()

    @override
    def loader(self, dataloader: Any, process: Callable[[Any], Any]) -> Any:
        if not self._virtual.applies:
            return super().loader(dataloader, process)
        return self._virtual.loader(dataloader, self._resume)

    @override
    def moving_batch(self) -> AbstractContextManager[Any]:
        return self._virtual.as_first()

    @override
    def train(self, call: StepCall) -> Any:
        def forward(*args: Any) -> Any:
            with self._run.activations.around_forward():
                return self._full_outputs(call.step(*args))

        return self._virtual.train(call.engine, forward, call.args, synchronises=call.synchronises)

    @override
    def evaluate(self, call: StepCall) -> Any:
        if not self._virtual.applies:
            return super().evaluate(call)
        return self._virtual.evaluate(call.engine, lambda *each: self._full_outputs(call.step(*each)), call.args)

    @override
    @contextmanager
    def around_backward(self, engine: Engine, *, synchronises: bool, accumulates: bool) -> Generator[bool, None, None]:
        with (
            self._virtual.around_backward(engine) as (is_last, counts),
            self._between(engine, eager=synchronises and is_last, counts=counts, accumulates=accumulates),
        ):
            yield True
