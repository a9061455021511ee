"""Steps of ranks with different numbers of batches: those without one run a step that does not count."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from ls_strategy.engine import Engine
from ls_strategy.lightning.loop.plain import LoopParts, StepLoop

if TYPE_CHECKING:
    import lightning.pytorch as pl


class JoinLoop(StepLoop):
    """Lets ranks that have no more batches wait for the others (`UnevenData`)."""

    @classmethod
    def of(cls, parts: LoopParts) -> JoinLoop | None:
        """Return the loop if the options ask for it."""
        return cls(parts) if parts.uneven.joins else None

    @override
    def begin_run(self, trainer: pl.Trainer, *, together: bool) -> None:
        self._uneven.begin_run(trainer, evaluation=together)

    @override
    def fetcher(self, loop: Any, inner: Any) -> Any:
        return self._uneven.fetcher(loop, super().fetcher(loop, inner))

    @override
    def end_pass(self) -> None:
        self._uneven.end_pass()

    @override
    def around_step(self, args: Sequence[Any]) -> AbstractContextManager[Any]:
        return self._uneven.around_step(args)

    @override
    @contextmanager
    def around_backward(self, engine: Engine, *, synchronises: bool, accumulates: bool) -> Generator[bool, None, None]:
        counts = not self._uneven.runs_filler
        with self._between(engine, eager=synchronises, counts=counts, accumulates=accumulates):
            yield True
        self._uneven.after_backward(engine, synchronizes=synchronises)

    @override
    def state(self) -> dict[str, Any]:
        return self._uneven.position()
