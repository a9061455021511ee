"""Virtual ranks: a run computes as if it had ``parallel.virtual_ranks`` ranks, on as many as there are or fewer.

::

    round     0  1  2
    rank 0    0  1  3        one forward and backward per round; a rank may have no virtual rank in some rounds
    rank 1    .  2  4        (`ls_strategy.distributed.rounds`)

Every virtual rank has its own batches (`virtual_data`), random numbers and buffers, and its gradient is a leaf of one
fixed tree (`ls_strategy.distributed.tree_sum`). What is done once per batch outside of its steps (hooks, the optimizer)
is done once per process, with random numbers of its own. The idea is that of EasyScale (Li et al., SC'23).

The one invariant: nothing that a step computes depends on which rank computes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ls_strategy.distributed.rounds import Split, VirtualRound
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError
from ls_strategy.host.pytorch import TrainerFn, is_overridden, pl
from ls_strategy.lightning._private import ForwardValues, active_loaders, unflatten_batch
from ls_strategy.lightning.virtual.data import VirtualLoader, check
from ls_strategy.lightning.virtual.log import VirtualLog
from ls_strategy.lightning.virtual.random import VirtualRandom
from ls_strategy.lightning.virtual.split import check_ranks, split_of
from ls_strategy.lightning.virtual.step import Buffers, counting_metrics, loss_of, with_loss
from ls_strategy.transient import Method
from ls_strategy.zero.passes.reduce import InTree

if TYPE_CHECKING:
    from ls_strategy.lightning.parallel import ModelParallel


class _Strategy(Protocol):
    """What virtual ranks use of a strategy."""

    islands: tuple[int, int]
    lightning_module: Any
    _layer_sync: Any

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any: ...


class Resumes(Protocol):
    """Lets the data of a run continue where a checkpoint was saved."""

    @property
    def between_batches(self) -> bool:
        """Return whether the run continues from a snapshot, inside an epoch whose iterators had been made."""
        ...

    def data(self, dataloader: Any) -> object:
        """Let the training data continue."""
        ...


_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class VirtualRanks:
    """The virtual ranks of this process."""

    def __init__(self, parallel: ModelParallel, strategy: _Strategy, count: int) -> None:
        """``count``: the number of all virtual ranks."""
        self._parallel, self._strategy, self.count = parallel, strategy, count
        self.random = VirtualRandom()
        self._replaced: Method | None = None
        self._loaders: list[VirtualLoader] = []
        """Of the run."""
        self._buffers: Buffers | None = None
        """Of the run's module."""
        self._has_hooks = True
        """Whether user code runs while batches are moved."""
        self._round: VirtualRound | None = None
        """The round of the next backward."""
        self._after_backward: Callable[[], None] | None = None
        """Ends a batch."""
        self.begun = False
        """Whether the fit loop runs. Before it does, user code may ask for the number of batches."""

    @classmethod
    def of(cls, parallel: ModelParallel, strategy: _Strategy) -> VirtualRanks | None:
        """Return the virtual ranks that a strategy's options set, or None."""
        count = parallel.config.virtual_ranks
        return None if count is None else cls(parallel, strategy, count)

    # ranks -----------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This process's number among those that share the virtual ranks."""
        return self._parallel.data_rank[0]

    @property
    def split(self) -> Split:
        """Return the split of the virtual ranks over the ranks."""
        return split_of(self._parallel.config, self._parallel.data_rank[1])

    @property
    def ranks(self) -> list[int]:
        """The virtual ranks of this process."""
        return self.split.ranks_of(self.rank)

    def check(self, trainer: pl.Trainer, module: pl.LightningModule, *, joins: bool) -> None:
        """Refuse what virtual ranks cannot do, before anything is sharded. ``joins``: ranks may have no batch."""
        check_ranks(self._parallel.config, self._parallel.data_rank[1])
        if not module.automatic_optimization and trainer.state.fn == TrainerFn.FITTING:
            raise PlanError(
                "Got parallel.virtual_ranks with automatic_optimization=False, but the steps of several virtual ranks "
                "run one after the other, before one optimizer step. Set automatic_optimization=True, or leave "
                "virtual_ranks out."
            )
        if joins:
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

    def as_first(self) -> AbstractContextManager[None]:
        """Draw the random numbers of this process's first virtual rank inside, unless inside `as_rank`."""
        return self.random.as_rank(self.ranks[0]) if self._has_hooks and self.applies else nullcontext()

    @property
    def _trainer(self) -> pl.Trainer:
        return self._module.trainer

    @property
    def _module(self) -> pl.LightningModule:
        module = self._strategy.lightning_module
        assert module is not None
        return module

    def _keeps_random(self) -> bool:
        return not self._trainer.sanity_checking

    def _make_iterators(self, resume: Resumes, make: Callable[[], list[Iterator[Any]]]) -> list[Iterator[Any]]:
        """Make iterators over the training data, from the random states that the run had when it made them."""
        if not self.begun:
            return self.random.make_early(self.ranks, make)
        inside = resume.between_batches or self._batches_before() > 0
        self.random.begin_epoch(self.ranks, inside=inside)
        return make()

    def _batches_before(self) -> int:
        """Return how many batches of the epoch the run has processed, if it continues inside one."""
        progress: Any = self._trainer.fit_loop.epoch_loop.batch_progress
        return 0 if progress.is_last_batch else progress.current.processed

    # data ------------------------------------------------------------------------------------------------------------

    def begin_run(self, module: pl.LightningModule, *, fitting: bool) -> None:
        """Begin a fit or an evaluation."""
        self.random.begin_run(fitting=fitting)
        self.random.keeps = self._keeps_random
        self._buffers = Buffers(module, self.ranks[0])
        self._round = self._after_backward = None
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
        self.begun = False
        if self._replaced is not None:
            self._replaced.remove()
            self._replaced = None
        for loader in self._loaders:
            loader.end_run()
        self._loaders.clear()

    @property
    def applies(self) -> bool:
        """Return whether batches are those of virtual ranks.

        Those of predictions are not: each sample is predicted once, on the real ranks.
        """
        return self._trainer.state.fn != TrainerFn.PREDICTING

    def loader(self, loader: Any, resume: Resumes) -> VirtualLoader:
        """Return the loader of all virtual ranks of this process.

        Args:
            loader: of the first one.
            resume: lets loaders continue where a checkpoint was saved.
        """
        check(loader)
        islands = self._strategy.islands if self._trainer.training else (0, 1)
        made = VirtualLoader(loader, self.split, self.rank, self.random, islands)
        self._loaders.append(made)
        for each in made.loaders:
            resume.data(each)
        assert self._parallel.world is not None
        made.exchange = self._parallel.world.exchange_objects
        made.begin_run(training=self._trainer.training)
        if self._trainer.training:
            made.first = self._batches_before
            made.on_iterate, made.on_batch = partial(self._make_iterators, resume), self.random.before_batch
        return made

    def others(self, args: Sequence[Any]) -> list[Any]:
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
        trainer, module = self._trainer, self._module
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
        module, rounds = self._module, self.split.rounds
        batches = [args[0], *(self.others(args) if len(self.ranks) > 1 else [])]
        if len(rounds) > 1:
            trainer = self._trainer
            if trainer.fit_loop.epoch_loop.batch_idx % trainer.accumulate_grad_batches == 0:
                engine.keeps_gradients = False
                for index in range(len(engine.optimizers)):
                    engine.zero_grad(index)
        log, buffers, done = VirtualLog(module), self._buffers, 0
        assert buffers is not None
        output: Any = None
        found: Any = None
        metrics = ForwardValues(module)
        for number, now in enumerate(rounds):
            rank = now.leaves[self.rank]
            self._round, found = now, None
            engine.begin_step(sync_buffers_after=now.is_last and synchronises)
            if number == 0:
                buffers.begin()
            if rank is not None or engine.policy.parameters:  # else nothing is gathered, so it need not be computed
                buffers.show(rank)
                with self.random.as_rank(rank), counting_metrics(module, counts=rank is not None):
                    batch = self._prepared(batches[done], 0) if done and rank is not None else batches[0]
                    with log.recording(rank, batch):
                        found = forward(batch, *args[1:])
                buffers.keep(rank)
            if rank is not None and done == 0:
                output, metrics = found, ForwardValues(module)
            done += rank is not None
            engine.end_forward()
            if not now.is_last:
                self._backward(engine, None if found is None else loss_of(found, rank))
        self._after_backward = partial(buffers.end, forget=synchronises)
        metrics.restore()
        log.replay(engine.comm, self.ranks, self.count)
        if len(rounds) > 1:
            engine.keeps_gradients = True  # the loop calls zero_grad next, before the last round's backward
        return with_loss(output, loss_of(found, self.ranks[-1]))

    @contextmanager
    def around_backward(self, engine: Engine) -> Generator[tuple[bool, bool], None, None]:
        """Surround the backward of a round; yield whether it is the last one of its batch, and whether it counts."""
        now = self._round
        assert now is not None
        rank = now.leaves[self.rank]
        engine.keeps_gradients = False
        engine.reducer.round = InTree(now)
        try:
            with self.random.as_rank(rank):
                yield now.is_last, rank is not None
            if now.is_last and self._after_backward is not None:
                self._after_backward()  # now, because autograd may have saved a buffer
                self._after_backward = None
        finally:
            engine.reducer.round = None

    def _backward(self, engine: Engine, loss: Tensor | None) -> None:
        """Run the backward of a round that is not the last one, without the hooks around it."""
        module, plugin = self._module, self._trainer.precision_plugin
        loss = torch.zeros((), requires_grad=True) if loss is None else loss / module.trainer.accumulate_grad_batches
        scaler = engine.scaler
        plugin.backward(loss if scaler is None else loss * scaler.scale, module, None)

    def evaluate(self, engine: Engine, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run a validation or test step for every virtual rank, and return the result of this process's first one.

        Collective if the step is, or logs with ``sync_dist``.
        """
        module = self._module
        batches = [args[0], *(self.others(args) if len(self.ranks) > 1 else [])]
        log, metrics, output, done = VirtualLog(module), ForwardValues(module), None, 0
        buffers = self._buffers
        assert buffers is not None
        rounds = [each for each in self.split.rounds if engine.policy.parameters or each.leaves[self.rank] is not None]
        for number, now in enumerate(rounds):
            rank = now.leaves[self.rank]
            engine.begin_step()
            if number == 0:
                buffers.begin()
            buffers.show(rank)
            with self.random.as_rank(rank), counting_metrics(module, counts=rank is not None):
                index = args[2] if len(args) > 2 else 0
                batch = self._prepared(batches[done], index) if done and rank is not None else batches[0]
                with log.recording(rank, batch):
                    found = step(batch, *args[1:])
            buffers.keep(rank)
            if rank is not None and done == 0:
                output, metrics = found, ForwardValues(module)
            done += rank is not None
        buffers.end(forget=False)
        metrics.restore()
        log.replay(engine.comm, self.ranks, self.count)
        return output
