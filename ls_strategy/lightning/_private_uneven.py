"""Private names of Lightning that ranks with different numbers of batches need, and nothing else: see `uneven.py`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ls_strategy import host


def _hooks() -> Any:
    return host.import_part("pytorch.trainer.call")


class NoBatch(Exception):  # noqa: N818  (control flow, like StopIteration)
    """Raised instead of a batch on a rank that has none, while other ranks have one."""


class JoinedFetcher:
    """Lightning's data fetcher with another ``__next__``, which agrees with the other ranks."""

    all_done = False
    """Whether no rank has another batch after the one that was fetched last."""

    def __init__(self, inner: Any, fetch: Callable[[JoinedFetcher], Any]) -> None:
        """``fetch`` gets this object and returns the next ``(batch, batch_idx, dataloader_idx)``."""
        vars(self).update(inner=inner, fetch=fetch, done=False)

    def __iter__(self) -> JoinedFetcher:
        iter(self.inner)
        vars(self).update(done=False, all_done=False)
        return self

    def __next__(self) -> Any:
        return self.fetch(self)

    @property
    def has_more(self) -> bool:
        """Return whether this rank has another batch, as far as its loader knows."""
        inner = self.inner
        return not (inner.done or (inner.length is not None and inner.fetched >= inner.length))

    def take(self) -> Any:
        """Return this rank's next item, None at the end."""
        return next(self.inner, None) if self.has_more else None

    def agreed(self, *, done: bool, all_done: bool) -> None:
        """Record whether this rank's loop, and whether all ranks, end after this batch."""
        vars(self).update(done=done, all_done=all_done)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)


def hides_batches(fetcher: Any) -> bool:
    """Return whether the user's step fetches its batches itself (``dataloader_iter``)."""
    return type(fetcher).__name__ == "_DataLoaderIterDataFetcher"


def around_lengths(trainer: Any, agree: Callable[[float, float | None], float]) -> None:
    """Make the fit loop take its number of batches from ``agree`` whenever it has set up its data.

    Args:
        trainer: about to fit.
        agree: gets this rank's number of batches, and after how many it validates (None: by the clock). Returns the
            number of batches of the loop.
    """
    loop = trainer.fit_loop

    def setup_data() -> None:
        before = loop._data_fetcher
        type(loop).setup_data(loop)
        if loop._data_fetcher is before or loop._data_fetcher is None:
            return
        every = trainer.val_check_interval
        timed = getattr(trainer, "_val_check_time_interval", None) is not None
        loop.max_batches = agree(loop.max_batches, None if timed else trainer.val_check_batch)
        if not timed and not isinstance(every, int):
            batches = loop.max_batches
            trainer.val_check_batch = batches if batches == float("inf") else max(1, int(batches * every))

    loop.setup_data = setup_data


def around_evaluation_lengths(trainer: Any, agree: Callable[[float], float]) -> None:
    """Make validation, test and prediction take the number of batches of each loader from ``agree``.

    A rank still ends each loader where it would alone: a limit that is a share is one of its own batches.
    """
    for loop, name in (
        (trainer.fit_loop.epoch_loop.val_loop, "_max_batches"),
        (trainer.validate_loop, "_max_batches"),
        (trainer.test_loop, "_max_batches"),
        (trainer.predict_loop, "max_batches"),
    ):
        own: list[Any] = []

        def setup_data(loop: Any = loop, name: str = name, own: list[Any] = own) -> None:
            before = getattr(loop, name)
            type(loop).setup_data(loop)
            if getattr(loop, name) is not before:
                own[:] = getattr(loop, name)
                setattr(loop, name, [agree(batches) for batches in own])

        def reset(loop: Any = loop, name: str = name, own: list[Any] = own) -> None:
            agreed = getattr(loop, name)
            setattr(loop, name, [*own])
            type(loop).reset(loop)
            setattr(loop, name, agreed)

        loop.setup_data, loop.reset = setup_data, reset


def around_training_batches(trainer: Any, fill: Callable[[], None], after: Callable[[], None]) -> None:
    """Call ``fill()`` in place of a training batch where the fetcher raises `NoBatch`, and ``after()`` after each."""
    loop = trainer.fit_loop.epoch_loop

    def advance(data_fetcher: Any) -> None:
        try:
            type(loop).advance(loop, data_fetcher)
        except NoBatch:
            loop.batch_progress.is_last_batch = data_fetcher.done
            fill()
        after()

    loop.advance = advance


def run_filler_in_training(
    trainer: Any, batch: Any, callbacks: Sequence[Any], results: Callable[[], AbstractContextManager[None]]
) -> None:
    """Do what Lightning does in a training batch, without the hooks of the batch but those of ``callbacks``.

    Args:
        trainer: in a training epoch.
        batch: on the device.
        callbacks: their hooks of the batch run.
        results: context in which a value that was logged for the other ranks' sake is all there is.
    """
    loop, connector, module = trainer.fit_loop.epoch_loop, trainer._logger_connector, trainer.lightning_module
    index = loop.batch_idx + 1

    def call(hook: str, *args: Any) -> None:
        outer, module._current_fx_name = module._current_fx_name, hook
        for callback in callbacks:
            getattr(callback, hook)(trainer, module, *args)
        module._current_fx_name = outer

    loop.batch_progress.increment_ready()
    connector.on_batch_start(batch)
    call("on_train_batch_start", batch, index)
    loop.batch_progress.increment_started()
    kwargs = loop._build_kwargs(OrderedDict(), batch, index)
    if module.automatic_optimization:
        loop.automatic_optimization.run(trainer.optimizers[0], index, kwargs)
    else:
        loop.manual_optimization.run(kwargs)
    loop.batch_progress.increment_processed()
    loop.update_lr_schedulers("step", update_plateau_schedulers=False)
    if loop._num_ready_batches_reached():
        loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)
    with results():
        call("on_train_batch_end", {}, batch, index)
        connector.on_batch_end()
        loop.batch_progress.increment_completed()
        connector.update_train_step_metrics()


def run_filler_in_evaluation(trainer: Any, loop: Any, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
    """Run the validation, test or prediction step on a batch, and no other hook."""
    predicts = loop is trainer.predict_loop
    name = "predict_step" if predicts else "test_step" if trainer.testing else "validation_step"
    several = loop.num_dataloaders > 1 and (predicts or loop._is_sequential)
    if loop._results is not None:
        loop._results.batch, loop._results.batch_size = batch, None
        loop._results.dataloader_idx = dataloader_idx if several else None
    kwargs = loop._build_kwargs(batch, batch_idx, dataloader_idx if several else None)
    arguments = loop._build_step_args_from_hook_kwargs(kwargs, name)
    _hooks()._call_strategy_hook(trainer, name, *arguments)


def to_device(trainer: Any, batch: Any, dataloader_idx: int) -> Any:
    """Move a batch to the device with the user's transfer hooks, as Lightning's loops do."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
    return _hooks()._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=dataloader_idx)


class Results:
    """Temporary collection of a loop's logged values while a rank runs a batch that does not count.

    Values that are averaged over ranks (``sync_dist``) are the average of the ranks that have a batch, so they are kept
    for loggers and callbacks; all others are dropped. Nothing is added to the averages of the epoch.
    """

    def __init__(self, loop: Any, *, is_first: bool) -> None:
        """Put a new collection in the place of the loop's, which `end` puts back.

        Args:
            loop: a loop over batches.
            is_first: no batch of this rank has logged in this pass. `end` then adds what the other ranks log with
                weight 0, because values are averaged over ranks at the end of the pass.
        """
        self._loop, self._own, self._is_first = loop, loop._results, is_first
        if self._own is not None:
            loop._results = type(self._own)(training=self._own.training)

    @contextmanager
    def shared(self) -> Generator[None, None, None]:
        """Hide what is not averaged over ranks."""
        logged = self._loop._results
        self._loop._results = type(logged)(training=logged.training)
        self._loop._results.update({key: value for key, value in logged.items() if value.meta.sync.should})
        yield
        self._loop._results = logged

    def end(self) -> None:
        """Put the loop's own collection back."""
        logged, self._loop._results = self._loop._results, self._own
        if self._own is None or not self._is_first:
            return
        for key, value in logged.items():
            if value.is_tensor:
                value.reset()
                value._update_count = 1  # else torchmetrics warns of a metric without values
            value.has_reset = False
            value._forward_cache = None
            if key not in self._own or self._own[key].has_reset:  # reset at the end of an earlier pass
                self._own[key] = value
