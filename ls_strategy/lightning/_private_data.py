"""Private names of Lightning that following the training data needs; all others are in `_private`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from ls_strategy import host
from ls_strategy.host.fabric import sized_len
from ls_strategy.lightning._private import Once


class Observer(Protocol):
    """Follows the passes over the training data."""

    def making(self) -> None:
        """Take note that iterators over the data are about to be made."""

    def made(self) -> None:
        """Take note that they are made."""

    def fetching(self) -> None:
        """Take note that a batch is about to be fetched."""

    def fetched(self, batch: Any) -> None:
        """Take note of a batch that was fetched."""

    def ended(self) -> None:
        """Take note that there is no further batch."""


class ObservedLoaders:
    """Stands for the CombinedLoader of a data fetcher, for an `Observer`."""

    def __init__(self, inner: Any, observer: Observer) -> None:
        self.inner = inner
        self._observer = observer

    def __iter__(self) -> Iterator[Any]:
        self._observer.making()
        iter(self.inner)
        self._observer.made()
        return self

    def __next__(self) -> Any:
        self._observer.fetching()
        try:
            item = next(self.inner)
        except StopIteration:
            self._observer.ended()
            raise
        self._observer.fetched(item[0])
        return item

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def observe(fetcher: Any, observer: Observer) -> bool:
    """Let ``observer`` follow what a data fetcher fetches from now on. Return False if it does already."""
    if isinstance(fetcher._combined_loader, ObservedLoaders):
        return False
    fetcher._combined_loader = ObservedLoaders(fetcher._combined_loader, observer)
    if fetcher.iterator is not None:
        fetcher.iterator = fetcher._combined_loader
    return True


def fetched_ahead(fetcher: Any) -> list[Any]:
    """Return the batches that a data fetcher holds because it looks for the end of data without a length."""
    return [item[0] for item in getattr(fetcher, "batches", [])]


def is_exhausted(fetcher: Any) -> bool:
    """Return whether a data fetcher has met the end of its data already, while it looked ahead."""
    return bool(fetcher.done) and fetcher.length is None and not fetched_ahead(fetcher)


def read_on(fetcher: Any, count: int) -> int:
    """Fetch ``count`` batches and drop them, before the loop counts. Return how many there were."""
    source = getattr(fetcher, "iterator_wrapper", fetcher)  # of steps that fetch their batches themselves
    for number in range(count):
        if next(source, None) is None:
            return number
    fetcher.fetched -= count  # the loop adds them
    return count


def around_loader_states(trainer: Any, around: Callable[[Callable[[], None]], None]) -> None:
    """Make the fit loop call ``around(load)`` before it makes its first iterators over the training data.

    That is when data were set up, also if user code causes that early, and again when the progress is restored.
    ``load`` loads the states of loaders that a checkpoint has.
    """
    loop, name = trainer.fit_loop, "_load_combined_loader_states"

    def load_states() -> None:
        around(lambda: type(loop)._load_combined_loader_states(loop))

    before = vars(loop).get(name)
    if isinstance(before, Once):
        before.own = load_states
    else:
        setattr(loop, name, load_states)


def drop_loader_states(trainer: Any) -> None:
    """Do not load the states that Lightning has saved of rank 0's loaders."""
    trainer.fit_loop._combined_loader_states_to_load = []


def reloads_for(trainer: Any, epoch: int) -> bool:
    """Return whether a run without interruption makes its training data again for ``epoch``.

    It then also makes the iterators twice: once with the data, and once for the epoch.
    """
    every = trainer.reload_dataloaders_every_n_epochs
    return bool(every) and epoch > 0 and epoch % every == 0


def follow_reloads(trainer: Any) -> None:
    """Let a fit that resumes make its training data again in the epochs in which the interrupted one would."""
    every, loop = trainer.reload_dataloaders_every_n_epochs, trainer.fit_loop
    if every:
        progress = loop.epoch_progress.current
        epoch, is_due = (
            progress.processed,
            progress.ready == progress.processed and reloads_for(trainer, progress.processed),
        )
        loop._last_train_dl_reload_epoch = epoch - every if is_due else epoch - epoch % every


def make_iterators(trainer: Any) -> None:
    """Make iterators over the training data and drop them, for what they draw, as the first batch does.

    A data fetcher fetches that at once where the end of the data can only be found by looking.
    """
    loader = trainer.fit_loop._combined_loader
    iterator = iter(loader)
    if sized_len(loader) is None:
        next(iterator, None)


def has_begun_again(trainer: Any) -> bool:
    """Return whether one of several loaders has reached its end in this pass, where others go on."""
    iterator = getattr(trainer.fit_loop._combined_loader, "_iterator", None)
    return any(getattr(iterator, "_consumed", ()))


def set_sampler_epoch(loader: Any, epoch: int) -> None:
    """Tell the samplers of a loader which epoch comes, as the loop does later than some loaders take their order."""
    host.import_part("fabric.utilities.data")._set_sampler_epoch(loader, epoch)


def is_resuming(trainer: Any) -> bool:
    """Return whether a fit has restored its progress and trained on no batch yet, also between two epochs."""
    return trainer.fit_loop._loaded_from_state_dict


def untrained_epoch(trainer: Any) -> int | None:
    """Return the epoch that Lightning leaves out when it resumes, None if none.

    In ``on_train_epoch_start`` the progress of batches is still that of the epoch before, at its end. Call it when the
    progress is restored.
    """
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress.current
    begins = epochs.ready == epochs.started + 1 and epochs.started == epochs.processed
    return epochs.processed if begins and batches.ready else None


def leaves_out_validation(trainer: Any) -> bool:
    """Return whether Lightning resumes behind a validation that had not ended when the checkpoint was saved.

    Call it when the progress is restored and the data are there.
    """
    loop, epochs = trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_progress.current
    batches, validated = loop.batch_progress.current, loop.val_loop.batch_progress
    if epochs.started == epochs.processed or not batches.ready == batches.processed > 0:
        return False  # between two epochs, or inside a step
    before = batches.completed < batches.processed  # in on_train_batch_end
    ended = validated.is_last_batch and validated.current.ready == validated.current.processed
    return (before or not ended) and loop._should_check_val_fx(trainer.fit_loop._data_fetcher)
