"""Virtual ranks: a run computes as if it had ``parallel.virtual_ranks`` ranks, on as many as there are or fewer.

::

    virtual rank    0  1  2  3  4        rank = virtual rank % ranks, round = virtual rank // ranks
    two ranks       0  1  0  1  0
    rounds          '--'  '--'  '        one forward and backward per rank; the last one may be of some ranks only

Every virtual rank has its own batches (`virtual_data`), random numbers and buffers, and its gradient is a leaf of one
fixed tree (`ls_strategy.distributed.tree_sum`). What is done once per batch outside of its steps (hooks, the optimizer)
is done once per process, with random numbers of its own. The idea is that of EasyScale (Li et al., SC'23).

The one invariant: nothing that a step computes depends on which rank computes it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ls_strategy._compat import ForwardValues, active_loaders, metric_snapshot, unflatten_batch
from ls_strategy.checkpoint.random import RandomStream
from ls_strategy.distributed.tree_sum import Round
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError, StateError
from ls_strategy.host.pytorch import TrainerFn, is_overridden, pl
from ls_strategy.lightning.virtual_data import VirtualLoader, check
from ls_strategy.lightning.virtual_log import VirtualLog
from ls_strategy.transient import Method

if TYPE_CHECKING:
    from ls_strategy.lightning.strategy import ZeROStrategy


VIRTUAL = "virtual_ranks"
"""Under which a checkpoint has the random states of virtual ranks, among those of a process."""


_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class VirtualRanks:
    """The virtual ranks of this process."""

    def __init__(self, strategy: ZeROStrategy, count: int) -> None:
        """``count``: the number of all virtual ranks."""
        self._strategy, self.count = strategy, count
        self._streams: dict[int, RandomStream] = {}
        """Random numbers by virtual rank."""
        self._at_epoch: dict[int, RandomStream] = {}
        """The same before the iterators over the training data were made."""
        self._resumed: dict[str, Any] | None = None
        """What a checkpoint holds of them, until iterators are made."""
        self._continued: dict[int, RandomStream] | None = None
        """From the iterators of an epoch to its first batch: the random numbers of a run that continues inside it."""
        self._replaced: Method | None = None
        self._views: dict[int, list[Tensor]] = {}
        """Buffers by virtual rank, between two synchronizing steps."""
        self._current: int | None = None
        self._has_hooks = True
        """Whether user code runs while batches are moved."""
        self._round: tuple[Round, int] | None = None
        """Round and virtual rank of the next backward."""
        self._after_backward: Callable[[], None] | None = None
        """Ends a batch."""

    @classmethod
    def of(cls, strategy: ZeROStrategy) -> VirtualRanks | None:
        """Return the virtual ranks that a strategy's options set, or None."""
        count = strategy.config.parallel.virtual_ranks
        return None if count is None else cls(strategy, count)

    # ranks -----------------------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        return self._strategy.parallel.data_rank[0]

    @property
    def rounds(self) -> list[Round]:
        """Forwards and backwards per batch."""
        return Round.all(self.count, self._strategy.parallel.data_rank[1])

    @property
    def ranks(self) -> list[int]:
        """The virtual ranks of this process."""
        return list(range(self._rank, self.count, self._strategy.parallel.data_rank[1]))

    def check(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Refuse what virtual ranks cannot do, before anything is sharded.

        Raises:
            PlanError: with the cure.
        """
        ranks = self._strategy.parallel.data_rank[1]
        if ranks > self.count:
            raise PlanError(
                f"Got parallel.virtual_ranks={self.count} on {ranks} ranks, but every rank needs a virtual rank. Set "
                f"parallel.virtual_ranks={ranks} or more, or devices={self.count}."
            )
        if not module.automatic_optimization and trainer.state.fn == TrainerFn.FITTING:
            raise PlanError(
                "Got parallel.virtual_ranks with automatic_optimization=False, but the steps of several virtual ranks "
                "run one after the other, before one optimizer step. Set automatic_optimization=True, or leave "
                "virtual_ranks out."
            )
        if self._strategy.uneven.joins:
            raise PlanError(
                "Got parallel.virtual_ranks with uneven='join', but the batches of virtual ranks come from a "
                "DistributedSampler, which gives all of them equally many. Leave one of the two out."
            )
        if self._strategy._layer_sync is not None:
            raise PlanError(
                "Got parallel.virtual_ranks with sync_batchnorm=True, but statistics would be those of the real ranks. "
                "Set sync_batchnorm=False, or use GroupNorm or LayerNorm."
            )

    # random numbers --------------------------------------------------------------------------------------------------

    @contextmanager
    def as_rank(self, rank: int) -> Generator[None, None, None]:
        """Draw the random numbers of a virtual rank inside. A rank that does not exist has none to keep."""
        if self._current is not None:  # hooks inside a step
            yield
            return
        outside = RandomStream()
        trainer = self._trainer
        keeps = rank < self.count and not trainer.sanity_checking
        if keeps:
            self._streams.setdefault(rank, RandomStream()).put()
        self._current = rank
        try:
            yield
        finally:
            self._current = None
            if keeps:
                self._streams[rank].take()
            outside.put()

    def as_first(self) -> AbstractContextManager[None]:
        """Draw the random numbers of this process's first virtual rank inside, unless inside `as_rank`."""
        return self.as_rank(self._rank) if self._has_hooks and self.applies else nullcontext()

    @property
    def _trainer(self) -> pl.Trainer:
        module = self._strategy.lightning_module
        assert module is not None
        return module.trainer

    def saved(self) -> dict[str, Any]:
        """Return the random states of this process's virtual ranks, for a checkpoint."""
        return {
            str(rank): {
                "now": stream.saved(),
                "epoch": self._at_epoch[rank].saved() if rank in self._at_epoch else None,
            }
            for rank, stream in self._streams.items()
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from what all ranks have saved, at the first batch."""
        self._resumed = dict(saved)

    def _make_iterators(self, make: Callable[[], list[Iterator[Any]]]) -> list[Iterator[Any]]:
        """Make iterators over the training data, from the random states that the run had when it made them."""
        if self._continued is None:  # else it is not the first of several loaders
            self._begin_epoch()
        return make()

    def _begin_epoch(self) -> None:
        saved, self._resumed = self._resumed or {}, None
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        in_epoch = self._strategy.resume.between_batches or (
            not progress.is_last_batch and progress.current.processed > 0
        )
        states = {rank: saved[str(rank)] for rank in self.ranks if str(rank) in saved}
        for rank, state in states.items():
            before = state["epoch"] if in_epoch else None
            self._streams[rank] = RandomStream.of(before or state["now"])
        now = RandomStream()
        self._at_epoch = {rank: copy.copy(self._streams.get(rank, now)) for rank in self.ranks}
        self._continued = {rank: RandomStream.of(state["now"]) for rank, state in states.items() if in_epoch}

    def _before_batch(self) -> None:
        """Continue with the random numbers that the run had after it had made its iterators."""
        if self._continued is not None:
            self._streams.update(self._continued)
            self._continued = None

    # data ------------------------------------------------------------------------------------------------------------

    def begin_run(self, module: pl.LightningModule, *, fitting: bool) -> None:
        """Begin a fit or an evaluation."""
        self._streams.clear()
        self._at_epoch.clear()
        self._views.clear()
        self._round = self._current = self._after_backward = self._continued = None
        if not fitting:
            self._resumed = None
        warnings.filterwarnings("ignore", "It is recommended to use `self.log")  # values are the same on all ranks
        self._has_hooks = self._trainer.datamodule is not None or any(  # type: ignore[attr-defined]
            is_overridden(hook, module, parent=pl.LightningModule) for hook in _TRANSFER
        )

        def before_transfer(method: Method, *args: Any, **kwargs: Any) -> Any:
            with self.as_first():
                return method.original(*args, **kwargs)

        self._replaced = Method(module, "_on_before_batch_transfer", before_transfer)

    def end_run(self) -> None:
        """Give the module its own methods back."""
        if self._replaced is not None:
            self._replaced.remove()
            self._replaced = None

    @property
    def applies(self) -> bool:
        """Whether batches are those of virtual ranks: predictions are made once per sample, on the real ranks."""
        return self._trainer.state.fn != TrainerFn.PREDICTING

    def loader(self, loader: Any, continue_in: Callable[[Any], None]) -> VirtualLoader:
        """Return the loader of all virtual ranks of this process.

        Args:
            loader: of the first one.
            continue_in: lets a loader continue where a checkpoint was saved.
        """
        check(loader)
        made = VirtualLoader(loader, self.ranks, self.count, self.as_rank)
        for each in made.loaders:
            continue_in(each)
        if self._trainer.training:
            made.on_iterate, made.on_batch = self._make_iterators, self._before_batch
        return made

    def _others(self, args: Sequence[Any]) -> list[Any]:
        """Return the batches of this process's other virtual ranks, which belong to the one in ``args``."""
        combined = active_loaders(self._trainer)
        loaders = combined.flattened
        if combined._mode == "sequential":
            return loaders[args[2] if len(args) > 2 else 0].waiting.popleft()
        waiting = [loader.waiting.popleft() if loader.waiting else None for loader in loaders]
        return [
            unflatten_batch(combined, [None if each is None else each[n] for each in waiting])
            for n in range(len(self.ranks) - 1)
        ]

    def _prepared(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch as Lightning would give it to a step. Inside `as_rank`."""
        trainer, module = self._trainer, self._strategy.lightning_module
        assert module is not None
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=dataloader_idx)
        return self._strategy.batch_to_device(batch, dataloader_idx=dataloader_idx)

    # steps -----------------------------------------------------------------------------------------------------------

    def train(self, engine: Engine, forward: Callable[..., Any], args: Sequence[Any], *, synchronises: bool) -> Any:
        """Run forward and backward of every round but the last one's backward, which Lightning runs. Collective.

        Args:
            engine: of the module.
            forward: ``training_step``, with what surrounds it.
            args: of ``training_step``.
            synchronises: whether the buffers of virtual rank 0 become those of all before the next step.

        Returns:
            What ``training_step`` has returned for the first virtual rank. Its loss leads to the last round's graph.
        """
        module, rounds = self._strategy.lightning_module, self.rounds
        assert module is not None
        others = self._others(args) if len(self.ranks) > 1 else []
        if len(rounds) > 1:
            self._drop_old_gradients(engine)
        log, metrics = VirtualLog(module), ForwardValues(module)
        buffers = _Buffers(module, self._views)
        output: Any = None
        loss: Tensor | None = None
        for number, now in enumerate(rounds):
            rank = now.first + self._rank
            is_real = rank < self.count
            self._round = now, rank
            engine.begin_step(sync_buffers_after=now.is_last)
            if number == 0:
                buffers.begin()
            if not is_real and not engine.policy.parameters:  # nothing is gathered, so it need not be computed
                loss = None
            else:
                buffers.show(rank if is_real else None)
                with self.as_rank(rank), _counting_metrics(module, counts=is_real):
                    batch = self._prepared(others[number - 1], 0) if number and is_real else args[0]
                    with log.recording(rank if is_real else None, batch):
                        found = forward(batch, *args[1:])
                buffers.keep(rank if is_real else None)
                loss = _loss_of(found, rank)
                if number == 0:
                    output, metrics = found, ForwardValues(module)
            engine.end_forward()
            if not now.is_last:
                self._backward(module, loss)
        self._after_backward = partial(buffers.end, forget=synchronises)
        metrics.restore()
        log.replay(engine.comm, self.ranks, self.count)
        if len(rounds) > 1:
            engine.keeps_gradients = True  # the loop calls zero_grad next, before the last round's backward
        return _with_loss(output, loss)

    def _drop_old_gradients(self, engine: Engine) -> None:
        trainer = self._trainer
        if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            engine.keeps_gradients = False
            for index in range(len(engine.optimizers)):
                engine.zero_grad(index)

    @contextmanager
    def around_backward(self, engine: Engine) -> Generator[bool, None, None]:
        """Surround the backward of a round; yield whether it is the last one of its batch."""
        assert self._round is not None
        now, rank = self._round
        engine.keeps_gradients = False
        engine.reducer.round = now
        try:
            with self.as_rank(rank):
                yield now.is_last
            if now.is_last and self._after_backward is not None:
                self._after_backward()  # now, because autograd may have saved a buffer
                self._after_backward = None
        finally:
            engine.reducer.round = None

    def _backward(self, module: pl.LightningModule, loss: Tensor | None) -> None:
        """Run the backward of a round that is not the last one, without the hooks around it."""
        strategy = self._strategy
        loss = torch.zeros((), requires_grad=True) if loss is None else loss / module.trainer.accumulate_grad_batches
        scaler = strategy.require_engine().scaler
        strategy.zero_precision().backward(loss if scaler is None else loss * scaler.scale, module, None)

    def evaluate(self, engine: Engine, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run a validation or test step for every virtual rank, and return the result of this process's first one.

        Collective if the step is, or logs with ``sync_dist``.
        """
        module = self._strategy.lightning_module
        assert module is not None
        others = self._others(args) if len(self.ranks) > 1 else []
        log, metrics, output = VirtualLog(module), ForwardValues(module), None
        for number, now in enumerate(self.rounds):
            rank = now.first + self._rank
            is_real = rank < self.count
            if not is_real and not engine.policy.parameters:
                continue
            engine.begin_step()
            with self.as_rank(rank), _counting_metrics(module, counts=is_real):
                index = args[2] if len(args) > 2 else 0
                batch = self._prepared(others[number - 1], index) if number and is_real else args[0]
                with log.recording(rank if is_real else None, batch):
                    found = step(batch, *args[1:])
            if number == 0:
                output, metrics = found, ForwardValues(module)
        metrics.restore()
        log.replay(engine.comm, self.ranks, self.count)
        return output


class _Buffers:
    """Buffers of a module, as every virtual rank sees them."""

    def __init__(self, module: pl.LightningModule, views: dict[int, list[Tensor]]) -> None:
        self._buffers = list(module.buffers())
        self._views = views
        self._before: list[Tensor] = []
        self._first: list[Tensor] | None = None

    def begin(self) -> None:
        """Note the values that all virtual ranks without a view of their own begin with."""
        self._before = self._copy()

    def show(self, rank: int | None) -> None:
        """Give the buffers the values of a virtual rank."""
        self._set(self._before if rank is None else self._views.get(rank, self._before))

    def keep(self, rank: int | None) -> None:
        """Note the values that a virtual rank's step has left."""
        if rank is not None:
            self._views[rank] = self._copy()
            self._first = self._views[rank] if self._first is None else self._first

    def end(self, *, forget: bool) -> None:
        """Leave the values of this process's first virtual rank; ``forget`` those of the others."""
        if self._first is not None:
            self._set(self._first)
        if forget:
            self._views.clear()

    def _copy(self) -> list[Tensor]:
        return [b.detach().clone() for b in self._buffers]

    @torch.no_grad()
    def _set(self, values: Sequence[Tensor]) -> None:
        for buffer, value in zip(self._buffers, values, strict=True):
            buffer.copy_(value)


@contextmanager
def _counting_metrics(module: pl.LightningModule, *, counts: bool) -> Generator[None, None, None]:
    """Let metrics count what a step gives them, or not: a rank without a virtual rank only takes part in gathers."""
    restore = None if counts else metric_snapshot(module)
    yield
    if restore is not None:
        restore()


class _Carry(torch.autograd.Function):
    """A loss whose value is another one's."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        return value.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad, None


def _loss_of(output: Any, rank: int) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        raise StateError(
            f"training_step returned {type(loss).__name__} as the loss of virtual rank {rank}, but with "
            "parallel.virtual_ranks every step has a loss. Return a tensor, or a dict with one under 'loss'."
        )
    return loss


def _with_loss(output: Any, loss: Tensor | None) -> Any:
    """Return the output of the first round with the graph of the last one. ``loss``: of the last round, if any."""
    first = output["loss"] if isinstance(output, Mapping) else output
    if loss is first:
        return output
    carried = first.detach().clone().requires_grad_() if loss is None else _Carry.apply(loss, first.detach())
    return {**output, "loss": carried} if isinstance(output, Mapping) else carried
