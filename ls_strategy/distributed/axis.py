"""Collectives on activations along one axis of the mesh, such as the ranks that share a layer or a sequence.

They block, except `Axis.start_all_to_all`. Sums are taken in rank order and every rank gets the same bits, so that
replicated tensors stay replicated. All of them exchange pieces point to point, but for two on NCCL: its own
`Axis.all_gather` of equal parts, and its own `Axis.all_reduce`, which sums in an order and a precision of its own, with
the same bits on every rank, too.

Every call is collective: all ranks of the axis make the same calls in the same order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy import spans
from ls_strategy._torch import all_gather_single
from ls_strategy.distributed.comm import Comm, Started, Traffic


class Axis:
    """The ranks of one axis that this rank works with."""

    def __init__(self, name: str, comm: Comm | None = None) -> None:
        """``comm``: the ranks; None stands for this rank alone."""
        self.name = name
        self.comm = comm or Comm(None, None)
        self.waits: Waits | None = None
        """Set it to measure how long computation waits for `start_all_to_all`."""
        self.rank = self.comm.rank
        self.size = self.comm.world_size

    @property
    def traffic(self) -> Traffic:
        """Return the traffic that this rank has sent along the axis."""
        return self.comm.traffic

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over the ranks, a new tensor of the same shape and dtype with the same bits on every rank.

        16-bit terms are summed in fp32 and rounded once; on NCCL they are summed in 16 bit.

        Traffic:
            ``2 * (size - 1) / size`` of the elements sent per rank.
        """
        if self.size == 1 or tensor.numel() == 0:
            return tensor.clone()
        if self.comm.native:
            result = tensor.contiguous().clone()
            # The bytes of a ring; NCCL may choose another algorithm.
            sent = 2 * (self.size - 1) * result.numel() // self.size
            self.traffic.count_elements("all_reduce", sent, result.element_size())
            with self.comm.blocking(f"{self.name} all_reduce"):
                dist.all_reduce(result, group=self.comm.group)
            return result
        flat = tensor.contiguous().reshape(-1)
        shard = -(-flat.numel() // self.size)
        padded = flat
        if flat.numel() != shard * self.size:
            padded = flat.new_zeros(shard * self.size)
            padded[: flat.numel()].copy_(flat)
        mine = self._sum_of_mine(list(padded.chunk(self.size)), "all_reduce")
        full = torch.empty_like(padded)
        full.chunk(self.size)[self.rank].copy_(mine)
        self._exchange([mine] * self.size, list(full.chunk(self.size)), "all_reduce")
        return full[: flat.numel()].view(tensor.shape)

    def all_gather(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """Concatenate the ranks' tensors along ``dim``.

        Args:
            tensor: this rank's part.
            dim: the dimension to concatenate.
            sizes: length of every rank's part along ``dim``. None: equal lengths.

        Traffic:
            ``size - 1`` times this rank's part.
        """
        if self.size == 1:
            return tensor.clone()
        mine = tensor.contiguous()
        if self.comm.native and sizes is None and mine.numel():
            full = mine.new_empty((self.size * mine.shape[0], *mine.shape[1:]))
            self.traffic.count("all_gather", mine, self.size - 1, far=sum(self.comm.far))
            with self.comm.blocking(f"{self.name} all_gather"):
                all_gather_single(full, mine, group=self.comm.group)
            return full if dim == 0 else torch.cat(full.chunk(self.size), dim)
        shapes = [list(tensor.shape) for _ in range(self.size)]
        for shape, length in zip(shapes, sizes or [], strict=False):
            shape[dim] = length
        parts = [mine if r == self.rank else mine.new_empty(shape) for r, shape in enumerate(shapes)]
        self._exchange([mine] * self.size, parts, "all_gather")
        return torch.cat(parts, dim)

    def reduce_scatter(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
        """Sum over the ranks, and keep this rank's part along ``dim``.

        Args:
            tensor: the same shape on every rank.
            dim: the dimension to shard.
            sizes: length of every rank's part along ``dim``. None: equal lengths, which must divide the dimension.

        Traffic:
            the other ranks' parts.
        """
        if self.size == 1:
            return tensor.clone()
        parts = self._split(tensor, dim, sizes)
        return self._sum_of_mine(parts, "reduce_scatter")

    def all_to_all(self, parts: Sequence[Tensor], shapes: Sequence[Sequence[int]] | None = None) -> list[Tensor]:
        """Send ``parts[r]`` to rank ``r``; return the tensors received from every rank, in rank order.

        Args:
            parts: one tensor per rank.
            shapes: of the received tensors, by rank. None: the shapes of ``parts``.

        Traffic:
            every part but this rank's own.
        """
        if self.size == 1:
            return [parts[0].clone()]
        parts = [p.contiguous() for p in parts]
        shapes = [p.shape for p in parts] if shapes is None else shapes
        received = [
            part if r == self.rank else part.new_empty(tuple(shape))
            for r, (part, shape) in enumerate(zip(parts, shapes, strict=True))
        ]
        self._exchange(parts, received, "all_to_all")
        return received

    def start_all_to_all(
        self, parts: Sequence[Tensor], received: Sequence[Tensor], kind: str = "all_to_all"
    ) -> PendingExchange:
        """Start sending ``parts[r]`` to rank ``r``, and receiving ``received[r]`` from it.

        Args:
            parts: one contiguous tensor per rank; do not change them before `PendingExchange.wait`.
            received: one contiguous tensor per rank, of the shape that arrives; do not read them before that.
            kind: the kind under which the bytes are counted.

        Traffic:
            every part but this rank's own.
        """
        received[self.rank].copy_(parts[self.rank])
        return PendingExchange(self, self._start(parts, received, kind), parts)

    def broadcast_(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite the contiguous ``tensor`` with that of rank ``source`` of the axis."""
        self.comm.broadcast_(tensor, source)

    def _split(self, tensor: Tensor, dim: int, sizes: Sequence[int] | None) -> list[Tensor]:
        if sizes is None:
            length = tensor.shape[dim]
            if length % self.size:
                raise ValueError(f"dimension {dim} of {tuple(tensor.shape)} does not divide by {self.size}")
            sizes = [length // self.size] * self.size
        return [part.contiguous() for part in tensor.split(list(sizes), dim)]

    def _sum_of_mine(self, parts: list[Tensor], kind: str) -> Tensor:
        """Send every rank its part of this rank's term, and sum this rank's part over all ranks, in rank order."""
        mine = parts[self.rank]
        received = [mine if r == self.rank else torch.empty_like(mine) for r in range(self.size)]
        self._exchange(parts, received, kind)
        return sum_in_order(received)

    def _exchange(self, sends: list[Tensor], receives: list[Tensor], kind: str) -> None:
        """Send ``sends[r]`` to and receive ``receives[r]`` from every other rank ``r``."""
        works = self._start(sends, receives, kind)
        if works:
            self.comm.wait(works)

    def _start(self, sends: Sequence[Tensor], receives: Sequence[Tensor], kind: str) -> Sequence[Any]:
        operations: list[dist.P2POp] = []
        entry = self.comm.journal.enter(f"{self.name} {kind}")
        group, nbytes, tag = self.comm.group, 0, 0 if self.comm.native else entry.tag
        for distance in range(1, self.size):
            to, frm = (self.rank + distance) % self.size, (self.rank - distance) % self.size
            if sends[to].numel():
                self.traffic.count(kind, sends[to], far=self.comm.far[to])
                nbytes += sends[to].numel() * sends[to].element_size()  # `nbytes` fails where dynamo traces this
                operations.append(dist.P2POp(dist.isend, sends[to], group=group, group_peer=to, tag=tag))
            if receives[frm].numel():
                operations.append(dist.P2POp(dist.irecv, receives[frm], group=group, group_peer=frm, tag=tag))
        works = dist.batch_isend_irecv(operations) if operations else []
        return [Started(spans.followed(works, f"{self.name} {kind}", nbytes), entry, group)] if works else []


class Waits:
    """Measures how long computation waits for exchanges: on the host's thread, or on an accelerator on the stream."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: list[tuple[torch.Event, torch.Event]] = []

    @contextmanager
    def measured(self, device: torch.device) -> Iterator[None]:
        """Measure a wait for data that arrives on ``device``."""
        if not dev.is_accelerator(device):
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        before = dev.record(device, timing=True)
        yield
        self._events.append((before, dev.record(device, timing=True)))

    def take(self) -> float:
        """Return the seconds since the last call. Waits for the device."""
        for before, after in self._events:
            after.synchronize()
            self._seconds += dev.seconds_between(before, after)
        seconds, self._seconds, self._events = self._seconds, 0.0, []
        return seconds


class PendingExchange:
    """An exchange in flight. Its tensors must live until `wait`."""

    def __init__(self, axis: Axis, works: Sequence[Any], sends: Sequence[Tensor]) -> None:
        self._axis = axis
        self._works: Sequence[Any] = works
        self._sends: Sequence[Tensor] = sends

    def wait(self) -> None:
        """Block until the parts have arrived (on CUDA: until the current stream may read them)."""
        waits = self._axis.waits
        with nullcontext() if waits is None else waits.measured(self._sends[0].device):
            self._axis.comm.wait(self._works)
        self._works, self._sends = (), ()


def sum_in_order(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum in the order of the terms; 16-bit terms are summed in fp32 and rounded once."""
    total = terms[0].float() if terms[0].dtype in (torch.float16, torch.bfloat16) else terms[0].clone()
    for term in terms[1:]:
        total += term
    return total.to(terms[0].dtype)


class WithAdjoint(torch.autograd.Function):
    """Apply ``ahead`` in forward and its adjoint ``back`` in backward, which is differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ahead: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: D102
        ctx.ahead, ctx.back = ahead, back
        return ahead(x if ahead is unchanged else x.contiguous())  # the gradient of a sum is expanded, for example

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: D102
        return WithAdjoint.apply(grads[0], ctx.back, ctx.ahead), None, None


def unchanged(x: Tensor) -> Tensor:
    """Return an alias instead of ``x`` itself, which autograd would turn into a view that keeps its base alive."""
    return x.detach()
