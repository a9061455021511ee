"""Executes this rank's row of a table: forward and backward of micro-batches, and communication between ranks.

::

    F   receive activation ─> StageRunner.run ─> send activation        saves inputs and roots until backward
    B   receive gradient ─> autograd ─> send gradient of the inputs     frees what F saved
    I   the same for the inputs only                                    saves the rest of backward for the weights
    W   gradients of the weights

The loss of every micro-batch is multiplied by its factor before backward, by default ``1 / micro-batches``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ls_strategy._torch import tree_flatten
from ls_strategy.errors import PlanError, StateError
from ls_strategy.parallel.pipeline.p2p import Links, PointToPoint, Shapes, target_of
from ls_strategy.parallel.pipeline.partition import Step
from ls_strategy.parallel.pipeline.schedules import Action, Table, forward_table, least_micro_batches, make_table
from ls_strategy.parallel.pipeline.simulate import simulate
from ls_strategy.parallel.pipeline.split import WeightBackward, backward_inputs
from ls_strategy.parallel.pipeline.stage import StageRunner
from ls_strategy.parallel.pipeline.timeline import TimelineRecorder
from ls_strategy.parallel.pipeline.transfer import StageTransfer

_Result = tuple[list[Tensor], Shapes] | None
"""What an action sends on, and its shapes."""


def _no_callback(*_: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class Callbacks:
    """Called on this rank around its actions, in the order of its row."""

    before: Callable[[Action], None] = _no_callback
    """Called when the inputs of the action from other ranks have arrived."""

    after: Callable[[Action], None] = _no_callback
    """Called when the result of the action is in flight."""

    on_last_backward: Callable[[int], None] = _no_callback
    """Called with a stage, before the action that completes the gradients of its parameters for this step."""


@dataclass(kw_only=True)
class _SavedForward:
    """State of one micro-batch that is saved from its forward to its backward."""

    received: StageTransfer | None
    roots: list[GradientEdge]
    seed: list[Tensor]
    """Gradients of the roots if no other stage sends them: 1 for the loss."""

    weights: WeightBackward | None = None

    def inputs(self) -> list[Tensor]:
        """Return the received tensors that get a gradient."""
        return [] if self.received is None else [t for t in self.received.tensors.values() if t.requires_grad]


@dataclass(frozen=True)
class Report:
    """Result of a training step on this rank."""

    losses: list[Tensor]
    """Loss of every micro-batch, unscaled and detached. Empty on ranks without the last stage."""

    most_alive: int
    """Peak number of saved activations (of one stage and one micro-batch)."""


@dataclass
class _Progress:
    """One run of a table."""

    table: Table
    step: Step
    micro_batches: Sequence[Any]
    p2p: PointToPoint
    training: bool
    factors: Sequence[float | Tensor] = ()
    kept: dict[tuple[int, int], _SavedForward] = field(default_factory=dict)
    local: dict[Action, Any] = field(default_factory=dict)
    """Results for another stage of the same rank, by the action that needs them."""

    results: dict[int, Any] = field(default_factory=dict)
    most_alive: int = 0


class PipelineRunner:
    """Runs batches through the pipeline, together with its other ranks."""

    def __init__(
        self,
        stages: StageRunner,
        links: Links,
        schedule: str,
        *,
        callbacks: Callbacks | None = None,
        split_backward: bool = True,
        recorder: TimelineRecorder | None = None,
    ) -> None:
        """Create the runner, with the same arguments on every rank of the pipeline.

        Args:
            stages: Stages of this rank. ``rank_of`` of its partition must be that of the schedule.
            links: Connections of this rank.
            schedule: One of `schedules.SCHEDULES`.
            callbacks: Called around actions.
            split_backward: False: I computes all gradients and W none. For activation checkpointing, which would
                recompute a block for every group of its weights.
            recorder: Records start and end of every action.

        Raises:
            PlanError: The partition does not have the stages of the schedule.
        """
        self.stages, self.links, self.schedule = stages, links, schedule
        self.callbacks = callbacks or Callbacks()
        self.split_backward = split_backward
        self.recorder = recorder
        self.rank = links.comm.rank
        self.rank_of = stages.cut.rank_of
        self.last_rank = self.rank_of[-1]
        self._per_rank = len(self.rank_of) // links.comm.world_size
        self._tables: dict[tuple[int, bool], Table] = {}
        self._known: dict[Any, Shapes] = {}
        self.table(2 * links.comm.world_size)

    def table(self, micro_batches: int, *, forward_only: bool = False) -> Table:
        """Return the table for a number of micro-batches. Each one is checked once.

        A batch with too few micro-batches for dualpipe_v, such as the last one of an epoch, uses zbv: both place their
        stages on the same ranks.

        Raises:
            PlanError: The schedule cannot run this, or needs other stages than the partition has.
        """
        key = (micro_batches, forward_only)
        if key not in self._tables:
            if forward_only:
                table = forward_table(self.rank_of, micro_batches)
            else:
                ranks = self.links.comm.world_size
                schedule = self.schedule if micro_batches >= least_micro_batches(self.schedule, ranks) else "zbv"
                table = make_table(schedule, ranks, micro_batches, self._per_rank)
            if table.rank_of != self.rank_of:
                raise PlanError(
                    f"{self.schedule} on {table.ranks} ranks has its stages on ranks {table.rank_of}, but the model "
                    f"was partitioned for {self.rank_of}. Use rank_of=place(ranks, per_rank, placement_of(schedule))."
                )
            simulate(table)
            self._tables[key] = table
        return self._tables[key]

    def train(
        self, step: Step, micro_batches: Sequence[Any], factors: Sequence[float | Tensor] | None = None
    ) -> Report:
        """Run forward and backward of one batch, and add to the gradients of the parameters. Collective.

        Args:
            step: The user's function.
            micro_batches: Micro-batches of the same shapes on every rank of the pipeline.
            factors: Factors of the losses. None: ``1 / len(micro_batches)`` each.

        Raises:
            PlanError: See `StageRunner.run`; or the shapes of the batches differ between ranks.
            StateError: See `StageRunner.run`.
            RankFailedError: Another rank failed.
        """
        count = len(micro_batches)
        progress = self._start(self.table(count), step, micro_batches, training=True)
        progress.factors = factors if factors is not None else [1 / count] * count
        with torch.enable_grad():
            self._run(progress)
        losses = [_loss_of(result).detach() for _, result in sorted(progress.results.items())]
        return Report(losses, progress.most_alive)

    @torch.no_grad()
    def evaluate(self, step: Step, micro_batches: Sequence[Any]) -> list[Any]:
        """Run forward only and return the results of ``step`` on the rank of the last stage. Collective.

        Raises:
            PlanError: See `train`.
        """
        table = self.table(len(micro_batches), forward_only=True)
        progress = self._start(table, step, micro_batches, training=False)
        self._run(progress)
        return [result for _, result in sorted(progress.results.items())]

    def from_last(self, value: Any) -> Any:
        """Broadcast a small picklable value from the rank of the last stage. Collective."""
        comm = self.links.comm
        if comm.world_size == 1:
            return value
        values = [value]
        with comm.blocking("broadcast", "outputs", group=comm.control, source=self.last_rank):
            dist.broadcast_object_list(values, group=comm.control, group_src=self.last_rank)
        return values[0]

    def _start(self, table: Table, step: Step, micro_batches: Sequence[Any], *, training: bool) -> _Progress:
        keys = [(training, _signature(batch)) for batch in micro_batches]
        self._agree(keys)
        p2p = PointToPoint(self.links, table, keys, self._known, self.stages.device)
        return _Progress(table, step, micro_batches, p2p, training)

    def _agree(self, keys: Sequence[Any]) -> None:
        """Check that all ranks expect messages of the same shapes. Collective."""
        digest = hashlib.blake2b(repr(keys).encode(), digest_size=7).digest()
        number = int.from_bytes(digest, "little")
        extremes = self.links.comm.agree(torch.tensor([number, -number]))
        if extremes[0] != -extremes[1]:
            raise PlanError(
                f"the ranks of a pipeline have different micro-batches; those of this rank are {keys}. All must get "
                "the same batch: do not use a distributed sampler along the pipeline."
            )

    def _run(self, progress: _Progress) -> None:
        row = progress.table.rows[self.rank]
        actions = {"F": self._forward, "B": self._backward, "I": self._backward_inputs, "W": self._backward_weights}
        gives_weights = ("B", "W") if self.split_backward else ("B", "I")
        final = {action.stage: i for i, action in enumerate(row) if action.kind in gives_weights}
        for i, action in enumerate(row):
            progress.p2p.look_ahead(i)
            arrived = self._arrived(progress, action)
            self.callbacks.before(action)
            if final.get(action.stage) == i:
                self.callbacks.on_last_backward(action.stage)
            start = self.recorder.mark() if self.recorder else None
            result = actions[action.kind](progress, action, arrived)
            if self.recorder:
                self.recorder.add(action, start, self.recorder.mark())
            if result is not None:
                self._pass_on(progress, action, *result)
            self.callbacks.after(action)
        progress.p2p.drain()

    # from and to neighbors -------------------------------------------------------------------------------------------

    def _arrived(self, progress: _Progress, action: Action) -> Any:
        """Return a `StageTransfer` for F, gradients for B and I, or None if the action has no input."""
        if action in progress.local:
            return progress.local.pop(action)
        if not progress.p2p.expects(action):
            return None
        tensors, shapes = progress.p2p.take(action)
        return tensors if action.kind != "F" else _received(tensors, shapes)

    def _pass_on(self, progress: _Progress, action: Action, tensors: list[Tensor], shapes: Shapes) -> None:
        if progress.p2p.give(action, tensors, shapes):
            return
        target = target_of(action, progress.table, progress.table.rows[self.rank])
        assert target is not None
        passed = _received([t.detach() for t in tensors], shapes) if action.kind == "F" else tensors
        progress.local[target] = passed

    # actions ---------------------------------------------------------------------------------------------------------

    def _forward(self, progress: _Progress, action: Action, received: StageTransfer | None) -> _Result:
        _, s, m = action
        try:
            result = self.stages.run(s, progress.step, progress.micro_batches[m], received)
        except PlanError as error:
            progress.p2p.refuse(action, error)
            raise
        shapes = Shapes.of(result) if isinstance(result, StageTransfer) else None
        if shapes is None:
            progress.results[m] = result if not progress.training else _loss_of(result).detach()
        else:
            progress.p2p.shapes[s, m] = shapes
        if progress.training:
            outputs = list(result.tensors.values()) if shapes else [self._scaled(_loss_of(result), progress.factors[m])]
            roots = [get_gradient_edge(t) for t in outputs if t.requires_grad]
            seed = [] if shapes else [torch.ones_like(t) for t in outputs]
            progress.kept[s, m] = _SavedForward(received=received, roots=roots, seed=seed)
            progress.most_alive = max(progress.most_alive, len(progress.kept))
        return (list(result.tensors.values()), shapes) if shapes else None

    def _scaled(self, loss: Tensor, factor: float | Tensor) -> Tensor:
        ends, self.stages.ends = self.stages.ends, ()
        if isinstance(factor, float) and factor == 0 and ends and loss.isnan():
            # A mean over nothing, 0 / 0, whose gradients would be NaN. The batch has a loss, and nothing of it is here.
            return torch.stack([end.sum() * 0 for end in ends]).sum()
        return loss * factor

    def _backward(self, progress: _Progress, action: Action, gradients: list[Tensor] | None) -> _Result:
        _, s, m = action
        kept = progress.kept.pop((s, m))
        with self.stages.recomputing(s, kept.received):
            torch.autograd.backward(kept.roots, kept.seed or gradients)
        return self._input_gradients(progress, action, kept, [t.grad for t in kept.inputs()])

    def _backward_inputs(self, progress: _Progress, action: Action, gradients: list[Tensor] | None) -> _Result:
        if not self.split_backward:
            return self._backward(progress, action, gradients)
        _, s, m = action
        kept = progress.kept[s, m]
        with self.stages.recomputing(s, kept.received):
            found, kept.weights = backward_inputs(kept.roots, kept.seed or gradients or [], kept.inputs())
        result = self._input_gradients(progress, action, kept, found)
        kept.roots = []
        return result

    def _backward_weights(self, progress: _Progress, action: Action, _: Any) -> None:
        if self.split_backward:
            kept = progress.kept.pop((action.stage, action.micro_batch))
            assert kept.weights is not None
            with self.stages.recomputing(action.stage, kept.received):
                kept.weights.run()

    def _input_gradients(
        self, progress: _Progress, action: Action, kept: _SavedForward, found: Sequence[Tensor | None]
    ) -> _Result:
        if kept.received is None:
            return None
        full = [torch.zeros_like(t) if g is None else g for t, g in zip(kept.inputs(), found, strict=True)]
        for tensor in kept.inputs():
            tensor.grad = None
        shapes = progress.p2p.shapes.get((action.stage - 1, action.micro_batch))
        return full, shapes or Shapes((), 0)


def _received(tensors: Sequence[Tensor], shapes: Shapes) -> StageTransfer:
    wanted = torch.is_grad_enabled()
    placed = {
        shape.place: tensor.requires_grad_(wanted and shape.requires_grad)
        for shape, tensor in zip(shapes.tensors, tensors, strict=True)
    }
    return StageTransfer(placed, shapes.leaves)


def _loss_of(result: Any) -> Tensor:
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise StateError(
            f"step returned {type(loss).__name__}, but in a pipeline it must return, for every micro-batch, a loss of "
            'one element or a mapping with such a "loss".'
        )
    return loss


def _signature(batch: Any) -> Any:
    leaves, structure = tree_flatten(batch)
    described = [
        (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else _describe(leaf) for leaf in leaves
    ]
    return (str(structure), tuple(described))


def _describe(leaf: Any) -> Any:
    return leaf if isinstance(leaf, int | float | bool | None) else type(leaf).__name__
