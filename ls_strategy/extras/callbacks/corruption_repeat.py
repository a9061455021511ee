"""Run forward and backward of one step again from the same bits, on the same rank or, with virtual ranks, on another.

::

    recorded            per micro-batch: the batch (a copy), random states; before the first one also buffers and
                        attributes of the module
    `RecordedStep.run`  gradients are dropped; forward, backward and average of all micro-batches
    `RecordedStep.end`  random states and metrics are put back and, unless the first run was wrong, all that it has left

Nothing is logged, and no metric counts. Of the hooks only ``on_after_backward`` runs, if user code has one.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from lightning_utilities import apply_to_collection
from torch import Tensor, nn
from typing_extensions import override

from ls_strategy.checkpoint.random import RandomStream
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.rounds import Split, VirtualRound
from ls_strategy.engine import Engine
from ls_strategy.extras._lightning import silenced
from ls_strategy.extras.callbacks.before_step import Attributes, BeforeStep, put
from ls_strategy.extras.callbacks.corruption_digest import StoredWeights, bits_of, digests_of_weights, fold, numbers
from ls_strategy.host.pytorch import pl
from ls_strategy.lightning._private import metric_snapshot, training_loaders
from ls_strategy.lightning.loop.call import StepCall
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.lightning.virtual.ranks import VirtualRanks
from ls_strategy.lightning.virtual.step import Buffers

Streams = dict[int, RandomStream]  # random states by virtual rank


class Between:
    """What hooks change in attributes after ``training_step``, and in buffers after backward, until the next one."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._attributes = module, Attributes(module)
        self._buffers = _buffers_of(module)

    def note_backward(self) -> None:
        """Take the buffers, to which recomputation may have written."""
        self._buffers = _buffers_of(self._module)

    def end(self) -> Callable[[], None]:
        """Return a function that changes the same again. Call it before the next micro-batch."""
        attributes, before, now = self._attributes.changes(), self._buffers, _buffers_of(self._module)
        places = [place for place in now if place in before and before[place][0] is now[place][0]]
        digests = numbers([bits_of(at[place][1]) for place in places for at in (before, now)])
        same = {place for place, old, new in zip(places, digests[::2], digests[1::2], strict=True) if old == new}
        changed = [(vars(part)["_buffers"], name, *now[part, name]) for part, name in now if (part, name) not in same]

        def put_again() -> None:
            attributes()
            with torch.no_grad():
                for each in changed:
                    put(*each)

        return put_again


def _buffers_of(module: nn.Module) -> dict[tuple[nn.Module, str], tuple[Tensor, Tensor]]:
    """Return the buffers of a module, and copies of them, by where they are."""
    return {
        (part, name): (buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    }


@dataclass
class MicroBatch:
    """One call of ``training_step``, as it began."""

    call: StepCall
    batch: Any
    others: list[Any]  # batches of this process's other virtual ranks
    random: RandomStream
    streams: Streams
    prepare: Callable[[], None]  # does again what hooks have done since the micro-batch before

    @classmethod
    def of(cls, call: StepCall, strategy: ZeROStrategy, prepare: Callable[[], None]) -> MicroBatch:
        """Take it before it runs."""
        virtual, others = strategy.virtual, []
        if virtual is not None:
            loaders = training_loaders(strategy.lightning_module.trainer)  # type: ignore[union-attr]
            waiting = [loader.waiting for loader in loaders]
            kept = [deque(each) for each in waiting]
            others = virtual.others(call.args) if len(virtual.ranks) > 1 else []
            for queue, before in zip(waiting, kept, strict=True):
                queue.clear()
                queue.extend(before)
        streams = {} if virtual is None else virtual.random.copied()
        return cls(call, cloned(call.args[0]), cloned(others), RandomStream(), streams, prepare)


def cloned(batch: Any) -> Any:
    """Return a copy of a batch, as the step may write to it. Objects that hold tensors in a way of their own stay."""
    return apply_to_collection(batch, Tensor, lambda t: t.clone())


@dataclass(frozen=True)
class Rotated(Split):
    """The split whose rank r computes what rank r + ``shift`` of another one does."""

    shift: int = 0

    @cached_property
    @override
    def rounds(self) -> list[VirtualRound]:  # type: ignore[override]
        """The rounds of the other split, with the ranks rotated."""
        size = len(self.shares)
        return [
            replace(now, leaves=tuple(now.leaves[(rank + self.shift) % size] for rank in range(size)))
            for now in Split(self.shares).rounds
        ]


class MovedRanks(VirtualRanks):
    """The virtual ranks of another process, computed here for one step."""

    def __init__(self, own: VirtualRanks, shift: int) -> None:
        """``own``: those of this process; ``shift``: how many ranks on the other process is."""
        super().__init__(own._parallel, own._strategy, own.count)
        self.random, self._has_hooks = own.random, own._has_hooks
        self._split = Rotated(own.split.shares, shift)
        self._buffers = Buffers(own._module, self.ranks[0])
        self.batches: list[Any] = []  # the batches of all but the first one

    @property
    @override
    def split(self) -> Split:
        return self._split

    @override
    def others(self, args: Sequence[Any]) -> list[Any]:
        return self.batches


def random_mark(strategy: ZeROStrategy) -> Callable[[], None]:
    """Return a function that puts back the random states of now."""
    states, virtual = RandomStream(), strategy.virtual
    of_ranks = None if virtual is None else virtual.random.mark()

    def put_back() -> None:
        states.put()
        if of_ranks is not None:
            of_ranks()

    return put_back


class RecordedStep:
    """The micro-batches of one optimizer step, which can run again."""

    def __init__(
        self,
        strategy: ZeROStrategy,
        module: pl.LightningModule,
        engine: Engine,
        train: Callable[[StepCall], Any],
        stored: StoredWeights | None,
    ) -> None:
        """Take what the first micro-batch begins from.

        ``train`` runs ``training_step``, without recording it; ``stored`` notes writes to weights.
        """
        self._strategy, self._module, self.engine, self._train = strategy, module, engine, train
        self._before = BeforeStep(strategy, module)
        self._attributes = Attributes(module)
        self._micro_batches: list[MicroBatch] = []
        self._between: Between | None = None
        self._weights = digests_of_weights(engine)
        self._writes = 0 if stored is None else len(stored.written)
        # What the first run has left: functions that put back metrics and random states, and the rest.
        self._after: tuple[Callable[[], None], Attributes, BeforeStep, Callable[[], None]] | None = None

    def add(self, call: StepCall) -> None:
        """Record a micro-batch that is about to run."""
        prepare = (lambda: None) if self._between is None else self._between.end()
        self._between = None
        self._micro_batches.append(MicroBatch.of(call, self._strategy, prepare))

    def note_forward(self) -> None:
        """Take what hooks may change before the next micro-batch of the step."""
        self._between = Between(self._module) if self._micro_batches[-1].call.accumulates else None

    def note_backward(self) -> None:
        """Call it after every backward of the first run."""
        if self._between is not None:
            self._between.note_backward()

    def has_written_weights(self, stored: StoredWeights | None) -> bool:
        """Return whether user code has written to weights since the first micro-batch began. Collective.

        What nobody was seen to write counts if it differs on all ranks. ``stored`` notes the writes.
        """
        self.engine.on_demand.take_parameter_writes()
        noted = stored is not None and len(stored.written) > self._writes
        changed = digests_of_weights(self.engine) != self._weights
        said = torch.tensor([noted, not changed], dtype=torch.int64)
        somewhere, unchanged = self.engine.mesh.world.agree(said).tolist()
        return bool(somewhere or not unchanged)

    @property
    def moves(self) -> bool:
        """Return whether other ranks can compute what this one does."""
        return self._strategy.virtual is not None

    def buffers(self) -> int:
        """Return the digest of the module's buffers; with virtual ranks, which have views of their own, 0."""
        return 0 if self.moves else fold(numbers([bits_of(buffer) for buffer in self._module.buffers()]))

    def leaves(self, shift: int) -> list[int]:
        """Return the virtual ranks that this process computes, or its rank."""
        virtual, world = self._strategy.virtual, self.engine.mesh.world
        if virtual is None:
            return [world.rank]
        return Rotated(virtual.split.shares, shift).ranks_of(virtual.rank)

    def run(self, index: int, shift: int, after_backward: Callable[[], None]) -> None:
        """Run all forwards and backwards again, and average. Collective.

        Args:
            index: of the optimizer.
            shift: with virtual ranks: compute those of the rank that many ranks on.
            after_backward: called after every backward.
        """
        if self._after is None:  # the first run is over
            self._after = (
                metric_snapshot(self._module),
                Attributes(self._module),
                BeforeStep(self._strategy, self._module),
                random_mark(self._strategy),
            )
        trainer, strategy, own = self._module.trainer, self._strategy, self._strategy.virtual
        optimizer, loop = trainer.optimizers[0], trainer.fit_loop.epoch_loop
        self._module.optimizer_zero_grad(trainer.current_epoch, loop.batch_idx, optimizer)
        self._before.put_back()
        self._attributes.put_back()
        self._clear_gaps()
        if self.engine.policy.parameters:
            self.engine.gatherer.release_all()  # else the root unit stays as it was gathered for the first run
            for flat in self.engine.flats:
                flat.outdate_casts()  # else weights in fp8 keep the scales of the first run
        moved = None if own is None else MovedRanks(own, shift)
        strategy.virtual = own if moved is None else moved
        progress = loop.batch_progress.current
        batches = progress.ready
        try:
            with silenced(trainer, self._module), torch.enable_grad():
                for i, each in enumerate(self._micro_batches, start=1 - len(self._micro_batches)):
                    progress.ready = batches + i  # what `trainer.fit_loop.batch_idx` is made of
                    self._run(each if not shift else self._moved(each, shift), moved)
                    after_backward()
        finally:
            strategy.virtual, progress.ready = own, batches
        self.engine.finish(index)

    def _clear_gaps(self) -> None:
        """Zero what lies between the gradients in resident buffers: it is sent, and a flipped bit would stay there."""
        for flat in self.engine.flats:
            buffer = flat.local.buffer
            if buffer is not None:
                for lo, hi in flat.layout.gaps():
                    buffer[lo:hi].zero_()

    def _run(self, each: MicroBatch, moved: MovedRanks | None) -> None:
        strategy, module, call = self._strategy, self._module, each.call
        each.random.put()
        if moved is not None:
            moved.random.put_back(each.streams)
            moved.batches = cloned(each.others)
        each.prepare()
        with strategy.block_backward_sync() if call.accumulates else nullcontext():
            output = self._train(replace(call, args=(cloned(each.batch), *call.args[1:])))
            loss = output.get("loss") if isinstance(output, Mapping) else output
            if loss is not None:
                loss = loss / module.trainer.accumulate_grad_batches
                scaler = self.engine.scaler
                strategy.zero_precision().backward(loss if scaler is None else loss * scaler.scale, module, None)

    def _moved(self, each: MicroBatch, shift: int) -> MicroBatch:
        """Return the micro-batch of the rank ``shift`` ranks on. Collective."""
        device = self._strategy.root_device
        given = pass_on((each.batch, each.others, each.streams), self.engine.mesh.world, shift)
        batch, others, streams = given
        return replace(
            each, batch=apply_to_collection(batch, Tensor, lambda t: t.to(device)), others=others, streams=streams
        )

    def end(self, *, wrong: bool) -> None:
        """Leave what the first run has left; if it was ``wrong``, what the last one has."""
        if self._after is None:
            return
        metrics, attributes, after, random = self._after
        if wrong:
            random()
        else:
            after.put_back()
            attributes.put_back()
        metrics()


def pass_on(value: Any, world: Comm, shift: int) -> Any:
    """Return the value of the rank ``shift`` ranks on, and send this rank's to the one before. Collective.

    Traffic:
        The bytes of the value, with tensors in host memory.
    """
    written = io.BytesIO()
    torch.save(apply_to_collection(value, Tensor, lambda t: t.cpu()), written)
    data = world.sendable(torch.frombuffer(bytearray(written.getvalue()), dtype=torch.uint8))
    sizes = torch.zeros(world.world_size, dtype=torch.int64)
    sizes[world.rank] = data.numel()
    world.agree(sizes)
    source, to = (world.rank + shift) % world.world_size, (world.rank - shift) % world.world_size
    sends: list[Tensor | None] = [None] * world.world_size
    receives: list[Tensor | None] = [None] * world.world_size
    sends[to] = data
    memory = bytearray(int(sizes[source]))
    here = torch.frombuffer(memory, dtype=torch.uint8)
    received = receives[source] = world.sendable(here)
    world.wait(world.exchange(sends, receives, "repetition", "batches"))
    here.copy_(received)
    return torch.load(io.BytesIO(memory), weights_only=False)
