"""Point-to-point communication between pipeline ranks: activations forward, gradients backward.

All ranks know the full table, so every rank knows what each peer sends it, and in which order. Receives are posted in
that order, a few actions before they are needed; sends are asynchronous. Only shapes must be exchanged. The first time
that micro-batches have new shapes, a header with the shapes of the activation precedes it. It uses the control group
(gloo), so that the GPU is not synchronized. Gradients have the shapes of the activations. A stage that refuses the new
shapes sends its error in the header, and every later stage passes it on, so that no rank waits for an activation that
never comes.

NCCL runs the operations of one communicator in order, and a waiting receive would block the sends after it. So in each
group a rank only sends to one peer, or only receives from one (`make_links`). gloo uses the group of the pipeline.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy.distributed.comm import Comm, Started, process_group
from ls_strategy.distributed.watchdog.wait_report import CollectiveEntry
from ls_strategy.errors import LSError, PlanError, StateError
from ls_strategy.parallel.pipeline.schedules import Action, Table
from ls_strategy.parallel.pipeline.transfer import StageTransfer

LOOKAHEAD = 2
"""How many actions before its use a receive is posted."""

_TENSORS, _DIMENSIONS = 16, 8
_REFUSED = -1
"""In the place of the number of leaves in a header that has an error instead of shapes."""

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DTYPES += (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@dataclass(frozen=True)
class Message:
    """The result of an action that an action of another rank needs."""

    source: Action
    """F: an activation; B or I: the gradient of one."""

    target: Action
    to: int
    """Receiving rank."""

    sent_at: int
    """Index of the source in its rank's row."""

    used_at: int
    """Index of the target in its rank's row."""

    @property
    def boundary(self) -> int:
        """The stage before the boundary that the message crosses."""
        return self.source.stage if self.source.kind == "F" else self.source.stage - 1


def plan_messages(table: Table) -> dict[tuple[int, int], list[Message]]:
    """Return all messages by sending and receiving rank, in the order in which they are sent."""
    where = {action: (r, i) for r, row in enumerate(table.rows) for i, action in enumerate(row)}
    result: dict[tuple[int, int], list[Message]] = {}
    for action, (rank, i) in where.items():
        target = target_of(action, table, where)
        if target is None:
            continue
        peer, j = where[target]
        if peer != rank:
            result.setdefault((rank, peer), []).append(Message(action, target, peer, i, j))
    return {pair: sorted(messages, key=lambda m: m.sent_at) for pair, messages in result.items()}


def target_of(action: Action, table: Table, actions: Container[Action]) -> Action | None:
    """Return the one of ``actions``, of the neighboring stage, that needs the result."""
    kind, s, m = action
    if kind == "F":
        return Action("F", s + 1, m) if s < table.stages - 1 else None
    if kind == "W" or s == 0:
        return None
    backward = Action("B", s - 1, m)
    return backward if backward in actions else Action("I", s - 1, m)


# --- shapes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorShape:
    """One tensor of a message."""

    place: int
    """Position among the arguments of the block, see `StageTransfer`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Shapes:
    """All tensors of one activation."""

    tensors: tuple[TensorShape, ...]
    leaves: int

    @classmethod
    def of(cls, transfer: StageTransfer) -> Shapes:
        """Describe a transfer."""
        found = [TensorShape(i, tuple(t.shape), t.dtype, t.requires_grad) for i, t in transfer.tensors.items()]
        return cls(tuple(found), transfer.leaves)

    def differentiable(self) -> list[TensorShape]:
        """Return the tensors that get a gradient."""
        return [t for t in self.tensors if t.requires_grad]

    def encode(self) -> Tensor:
        """Encode as integers, in a tensor of fixed size.

        Raises:
            PlanError: There are too many tensors or dimensions, or a dtype is not supported.
        """
        numbers = [self.leaves, len(self.tensors)]
        for t in self.tensors:
            if len(t.shape) > _DIMENSIONS or t.dtype not in _DTYPES or len(self.tensors) > _TENSORS:
                raise PlanError(
                    f"Got {len(self.tensors)} tensors between two stages, one of {t.dtype} and shape {t.shape}, but a "
                    f"pipeline sends at most {_TENSORS} tensors of at most {_DIMENSIONS} dimensions, of the usual "
                    "dtypes. Place the boundary between other blocks."
                )
            padded = [*t.shape, *[0] * (_DIMENSIONS - len(t.shape))]
            numbers += [t.place, _DTYPES.index(t.dtype), int(t.requires_grad), len(t.shape), *padded]
        header = empty_header()
        header[: len(numbers)] = torch.tensor(numbers)
        return header

    @classmethod
    def decode(cls, header: Tensor) -> Shapes:
        """Invert `encode`."""
        leaves, count, *rest = header.tolist()
        width = 4 + _DIMENSIONS
        tensors: list[TensorShape] = []
        for i in range(count):
            place, dtype, requires_grad, dimensions, *shape = rest[i * width : (i + 1) * width]
            tensors.append(TensorShape(place, tuple(shape[:dimensions]), _DTYPES[dtype], bool(requires_grad)))
        return cls(tuple(tensors), leaves)


def empty_header() -> Tensor:
    """Return a tensor for one header, int64 on the CPU."""
    return torch.zeros(2 + _TENSORS * (4 + _DIMENSIONS), dtype=torch.int64)


def encode_refusal(error: PlanError) -> Tensor:
    """Encode the message of an error as a header; what does not fit is cut off."""
    header = empty_header()
    room = header[2:].view(torch.uint8)
    text = str(error).encode()[: len(room)]
    header[0], header[1] = _REFUSED, len(text)
    room[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    return header


def refusal_in(header: Tensor) -> PlanError | None:
    """Return the error that a header has instead of shapes, if it has one."""
    if header[0] != _REFUSED:
        return None
    text = bytes(header[2:].view(torch.uint8)[: int(header[1])].tolist())
    return PlanError(text.decode(errors="ignore"))


# --- transport -------------------------------------------------------------------------------------------------------


class Links:
    """Point-to-point connections of one pipeline rank. Created by `make_links`."""

    def __init__(self, comm: Comm, groups: dict[tuple[int, int], Any]) -> None:
        """``groups``: by source and target rank of the pipeline. Missing pairs use the group of ``comm``."""
        self.comm = comm
        self._groups = groups

    def send(self, tensors: Sequence[Tensor], to: int, kind: str) -> list[Any]:
        """Start sending. The tensors must not change until the returned works have been waited for."""
        works: list[Any] = []
        with self.comm.naming_failures():
            for tensor in tensors:
                if tensor.numel():
                    self.comm.traffic.count(kind, tensor, far=self.comm.far[to])
                    works.append(self._start(dist.isend, tensor, self.comm.rank, to, to))
        return works

    def receive(self, tensors: Sequence[Tensor], source: int) -> list[Any]:
        """Start receiving."""
        with self.comm.naming_failures():
            return [self._start(dist.irecv, t, source, self.comm.rank, source) for t in tensors if t.numel()]

    def connect(self) -> None:
        """Send a number over each connection. NCCL waits for the peer at the first one: all do so in the same order."""
        for source, to in self._groups:
            operation, peer = (dist.isend, to) if source == self.comm.rank else (dist.irecv, source)
            with self.comm.naming_failures():
                work = self._start(operation, torch.zeros(1, device=dev.current()), source, to, peer)
            self.comm.wait([work])

    def _start(self, operation: Any, tensor: Tensor, source: int, to: int, peer: int) -> Any:
        group = self._groups.get((source, to), self.comm.group)
        group_rank = _group_rank(group, self.comm, peer)
        entry = self._enter("activations", source, to)
        if operation is dist.isend:
            return Started([operation(tensor, group=group, group_dst=group_rank)], entry, group)
        return Started([operation(tensor, group=group, group_src=group_rank)], entry, group)

    def _enter(self, what: str, source: int, to: int) -> CollectiveEntry:
        """Note a message for reports on where this rank waits. Both ends give it the same number."""
        ranks = self.comm.journal.ranks[source], self.comm.journal.ranks[to]
        name = f"transfer of {what} from rank {ranks[0]} to {ranks[1]}"
        return self.comm.where.journal(name, ranks).enter(name)

    def send_header(self, header: Tensor, to: int) -> Any:
        """Start sending a header."""
        self.comm.traffic.count("control", header)
        entry = self._enter("shapes", self.comm.rank, to)
        with self.comm.naming_failures():
            return Started([dist.isend(header, group=self.comm.control, group_dst=to)], entry, self.comm.control)

    def receive_header(self, source: int) -> Tensor:
        """Return the next header from ``source``. Blocking."""
        header = empty_header()
        entry = self._enter("shapes", source, self.comm.rank)
        with self.comm.naming_failures():
            work = dist.irecv(header, group=self.comm.control, group_src=source)
        self.comm.wait([Started([work], entry)])
        return header


def _group_rank(group: Any, comm: Comm, peer: int) -> int:
    """Return the rank in ``group`` of the pipeline rank ``peer``."""
    if group is comm.group:
        return peer
    assert comm.group is not None
    return dist.get_group_rank(group, dist.get_global_rank(comm.group, peer))


def make_links(comm: Comm) -> Links:
    """Connect the ranks of every pipeline with their neighbors in a ring. Collective over all ranks of the run.

    The pipelines share the groups: one per direction for links between which no rank is shared. So there are four,
    however many ranks there are; two for pipelines of two ranks, six where the ring is odd.

    Args:
        comm: Group of this rank's pipeline. All pipelines have the same size.
    """
    groups: dict[tuple[int, int], Any] = {}
    if not comm.native:
        return Links(comm, groups)
    size = comm.world_size
    links = [(i, (i + 1) % size) for i in range(1 if size == 2 else size)]
    apart = [links[0::2], links[1::2]] if size % 2 == 0 else [links[0:-1:2], links[1::2], links[-1:]]
    for number, some in enumerate(filter(None, apart)):
        for way, pairs in (("up", some), ("down", [(j, i) for i, j in some])):
            group = process_group(f"p2p {way} {number}")
            for source, to in pairs:
                if comm.rank in (source, to):
                    groups[source, to] = group
    result = Links(comm, groups)
    result.connect()
    return result


@dataclass
class _Receiving:
    tensors: list[Tensor]
    works: list[Any]
    shapes: Shapes


@dataclass
class _Sending:
    used_at: int
    works: list[Any]
    tensors: list[Tensor]


class PointToPoint:
    """The messages of one rank in one run of a table."""

    def __init__(self, links: Links, table: Table, keys: Sequence[Any], known: dict[Any, Shapes], device: Any) -> None:
        """Prepare the messages. Nothing is posted yet.

        Args:
            links: Connections of this rank.
            table: Table of this run.
            keys: For every micro-batch, what the shapes of activations depend on.
            known: Shapes by boundary and key, from earlier runs. New ones are added.
            device: Device of received tensors.
        """
        self._links, self._keys, self._known, self._device = links, keys, known, device
        self._rank_of = table.rank_of
        rank = links.comm.rank
        plan = plan_messages(table)
        self._coming = {source: messages for (source, to), messages in plan.items() if to == rank}
        self._leaving = {m.source: m for (source, _), messages in plan.items() if source == rank for m in messages}
        self._posted = dict.fromkeys(self._coming, 0)
        self._waiting: dict[Action, _Receiving] = {}
        self._by_target = {m.target: (source, m) for source, messages in self._coming.items() for m in messages}
        self._sending: dict[int, list[_Sending]] = {}
        self._headers: list[Any] = []
        self.shapes: dict[tuple[int, int], Shapes] = {}
        """Shapes of the activations by boundary and micro-batch."""

    def expects(self, action: Action) -> bool:
        """Return whether ``action`` needs a message from another rank."""
        return action in self._by_target

    def look_ahead(self, at: int) -> None:
        """Post the receives that are needed soon after action ``at`` and have known shapes."""
        for source, messages in self._coming.items():
            while (i := self._posted[source]) < len(messages) and messages[i].used_at <= at + LOOKAHEAD:
                shapes = self._shapes_of(messages[i])
                if shapes is None:
                    break
                self._post(source, messages[i], shapes)

    def take(self, action: Action) -> tuple[list[Tensor], Shapes]:
        """Return the message that ``action`` needs. Blocking; with NCCL only the current stream waits."""
        source, message = self._by_target[action]
        messages = self._coming[source]
        while action not in self._waiting:
            due = messages[self._posted[source]]
            self._post(source, due, self._shapes_of(due) or self._receive_shapes(source, due))
        receiving = self._waiting.pop(action)
        self._links.comm.wait(receiving.works)
        # A result of that action is here, so the peer has used what was sent up to it.
        sends = self._sending.get(source, [])
        for sending in [s for s in sends if s.used_at <= message.sent_at]:
            self._links.comm.wait(sending.works)
            sends.remove(sending)
        return receiving.tensors, receiving.shapes

    def give(self, action: Action, tensors: Sequence[Tensor], shapes: Shapes) -> bool:
        """Send the result of ``action``. Returns False if no other rank needs it."""
        message = self._leaving.get(action)
        if message is None:
            return False
        if action.kind == "F":
            self._send_shapes(message, shapes)
        tensors = [t.detach().contiguous() for t in tensors]
        works = self._links.send(tensors, message.to, "pipeline")
        self._sending.setdefault(message.to, []).append(_Sending(message.used_at, works, tensors))
        return True

    def refuse(self, action: Action, error: PlanError) -> None:
        """Send an error in the place of the result of a forward, if its receiver waits for new shapes.

        Ranks of earlier stages are left out: they raise by themselves, or do not wait for shapes.
        """
        message = self._leaving.get(action)
        if message is None or action.kind != "F" or self._shapes_of(message) is not None:
            return
        if message.to in self._rank_of[: action.stage + 1]:
            return
        with suppress(LSError):  # if the receiver has failed, too
            self._links.comm.wait([self._links.send_header(encode_refusal(error), message.to)])

    def drain(self) -> None:
        """Wait for all sends."""
        for sends in self._sending.values():
            for sending in sends:
                self._links.comm.wait(sending.works)
        self._links.comm.wait(self._headers)
        self._sending, self._headers = {}, []

    def _shapes_of(self, message: Message) -> Shapes | None:
        m = message.source.micro_batch
        if message.source.kind == "F":
            return self._known.get((message.boundary, self._keys[m]))
        return self.shapes.get((message.boundary, m))

    def _receive_shapes(self, source: int, message: Message) -> Shapes:
        assert message.source.kind == "F"
        header = self._links.receive_header(source)
        refusal = refusal_in(header)
        if refusal is not None:
            self.refuse(message.target, refusal)
            raise refusal
        shapes = Shapes.decode(header)
        self._known[message.boundary, self._keys[message.source.micro_batch]] = shapes
        return shapes

    def _send_shapes(self, message: Message, shapes: Shapes) -> None:
        """Send a header if the shapes are new. Otherwise check that they are the known ones."""
        key = (message.boundary, self._keys[message.source.micro_batch])
        if key not in self._known:
            self._headers.append(self._links.send_header(shapes.encode(), message.to))
            self._known[key] = shapes
        elif self._known[key] != shapes:
            raise StateError(
                f"stage {message.boundary} sends {shapes}, but for another micro-batch of the same shapes it sent "
                f"{self._known[key]}. In a pipeline the shapes of the batch must determine those between stages."
            )

    def _post(self, source: int, message: Message, shapes: Shapes) -> None:
        wanted = shapes.tensors if message.source.kind == "F" else shapes.differentiable()
        tensors = [torch.empty(t.shape, dtype=t.dtype, device=self._device) for t in wanted]
        works = self._links.receive(tensors, source)
        self._waiting[message.target] = _Receiving(tensors, works, shapes)
        self._posted[source] += 1
