"""Steps between two checks, which run again with the same batches if the second one finds something.

::

    a check finds nothing     a `Copy` of what trains, before the next batch
    every batch since         a copy of it, and the random numbers with which its step begins
    a check finds something   all ranks go back to the copy, the loop gets the same batches, and every step is checked

The one invariant: the loop cannot tell a batch that runs again from one that was fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor

from ls_strategy.extras._lightning import accumulates, around_batches, before_batches
from ls_strategy.extras.callbacks.corruption_repeat import random_mark
from ls_strategy.extras.callbacks.rewind import Copy, report_copy
from ls_strategy.host.pytorch import Callback, pl, rank_zero_warn
from ls_strategy.lightning._private import training_loaders
from ls_strategy.lightning.strategy import ZeROStrategy

MOST_BYTES = 2 << 30  # bytes of batches that one rank keeps


MOST_RETURNS = 2  # how often training goes back to one copy


class StepsAgainError(Exception):
    """Ends a step whose bits are not to be trusted, or those before it: the loop runs them again. No user sees it."""


@dataclass
class _Fetched:
    """A batch, as the loop got it."""

    value: Any
    others: list[Any]  # by loader: the batches of this process's other virtual ranks; None if there are none
    random: Callable[[], None]  # puts back the random states of after the fetch
    is_last: bool


class Replay:
    """Keeps batches from a copy on, and runs them again. It takes part in a fit until `end`."""

    def __init__(
        self, trainer: pl.Trainer, strategy: ZeROStrategy, owner: Callback, went_back: Callable[[], None]
    ) -> None:
        """Begin before the first batch of a fit. ``went_back`` is called when the steps begin again. Collective."""
        self._trainer, self._strategy, self._owner, self._went_back = trainer, strategy, owner, went_back
        self._verified = True  # whether all steps so far are right, as far as a check can say
        self._unchecked = 0  # steps since the copy that no check has seen
        self._returns = 0  # how often the steps since the copy have begun again
        self._copy: Copy | None = None
        self._batches: list[_Fetched] = []
        self._again: deque[_Fetched] = deque()
        self._bytes = self._reported = 0
        self._current: _Fetched | None = None
        self._resumes = False
        self._undo = [
            before_batches(trainer, self._before_batch),
            around_batches(trainer, self._run, self._fetch, self._ended),
        ]

    def end(self) -> None:
        """Leave the fit loop, and free the memory."""
        while self._undo:
            self._undo.pop()()
        self._drop()

    def _ended(self) -> bool | None:
        return None if self._current is None else self._current.is_last

    @property
    def runs_again(self) -> bool:
        """Return whether the running step has run before."""
        return self._current is not None

    @property
    def follows_again(self) -> bool:
        """Return whether the step after this one has run before."""
        return bool(self._again)

    def note_start(self) -> None:
        """Take the random states with which a step begins, if a run that resumes has restored them after the fetch."""
        if self._resumes and self._batches:
            self._batches[-1].random = random_mark(self._strategy)
        self._resumes = False

    def note_check(self) -> None:
        """Record that the step has ended which a check has found right, or made right."""
        self._verified, self._unchecked = True, 0

    def note_unchecked(self) -> None:
        """Record the end of a step that was not checked."""
        self._verified = False
        self._unchecked += 1

    def can_go_back(self) -> bool:
        """Return whether there are unchecked steps, and all ranks have what is needed to run them again. Collective."""
        able = self._unchecked > 0 and self._returns < MOST_RETURNS and self._bytes <= MOST_BYTES
        able = able and self._copy is not None and self._copy.fits
        unable = torch.tensor([not able], dtype=torch.uint8)
        return not self._strategy.require_engine().mesh.world.agree(unable).item()

    @property
    def step(self) -> int:
        """Return the step of the copy."""
        return -1 if self._copy is None else self._copy.step

    def _drop(self) -> None:
        self._copy = self._current = None
        self._batches.clear()
        self._again.clear()
        self._bytes = self._unchecked = self._returns = 0

    def _before_batch(self) -> None:
        """Take a copy if all before it is right. Collective then."""
        if accumulates(self._trainer) or self._again:
            return
        self._current = None
        if self._verified:
            earlier = self._copy
            self._drop()
            self._copy = Copy(self._trainer, self._strategy, self._owner, batches=True, earlier=earlier)
            self._reported = report_copy("CorruptionCheck", self._copy, self._reported)
            self._verified = False
        elif self._copy is not None and (not self._copy.fits or self._copy.epoch != self._trainer.current_epoch):
            self._drop()  # hooks at the end of an epoch, and new parameters, do not come again

    def _fetch(self, fetcher: Any) -> Any:
        """Return the next batch: one that runs again, or a new one."""
        if self._again:
            self._current = self._again.popleft()
            for loader, waiting in zip(self._virtual_loaders(), self._current.others, strict=True):
                if waiting is not None:
                    loader.waiting.appendleft(_copied(waiting))
            self._current.random()
            return _copied(self._current.value)
        self._current = None
        self._resumes = self._strategy.resume.pending
        value = next(fetcher)
        if self._copy is None or self._bytes > MOST_BYTES:
            return value
        others = [loader.waiting[0] if loader.waiting else None for loader in self._virtual_loaders()]
        kept = _Fetched(_copied(value), _copied(others), random_mark(self._strategy), bool(fetcher.done))
        self._bytes += _nbytes((kept.value, kept.others))
        self._batches.append(kept)
        if self._bytes > MOST_BYTES:
            self._batches.clear()
            rank_zero_warn(
                f"CorruptionCheck: the batches since step {self.step} are more than {MOST_BYTES >> 20} MiB on a rank, "
                "so they are not kept, and steps between two checks cannot run again. Set every lower."
            )
        return value

    def _virtual_loaders(self) -> list[Any]:
        return [] if self._strategy.virtual is None else training_loaders(self._trainer)

    def _run(self, once: Callable[[], None]) -> None:
        """Run a batch; if it ends with `StepsAgainError`, the first one since the copy instead. Collective then."""
        while True:
            try:
                once()
                return
            except StepsAgainError:
                assert self._copy is not None
                saved = self._copy.put_back()
                self._again = deque(self._batches)
                self._current, self._unchecked = None, 0
                self._returns += 1
                if saved:
                    rank_zero_warn(f"CorruptionCheck: checkpoints may have wrong values: {', '.join(saved)}.")
                self._went_back()


def _copied(value: Any) -> Any:
    """Return a copy of a batch, as hooks and the step may write to it."""
    return apply_to_collection(value, Tensor, lambda tensor: tensor.clone())


def _nbytes(value: Any) -> int:
    sizes: list[int] = []
    apply_to_collection(value, Tensor, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)
