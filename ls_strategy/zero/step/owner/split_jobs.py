"""The element-wise parts of split steps, as jobs for the stream of offloaded updates.

::

    training   |wait | iterate 1 | iterate 2 | iterate 3 | next forward, which waits unit by unit
    stream     | direction 1 | direction 2 | apply 1, direction 3 | apply 2 | apply 3 |

So the host works on one bucket while the device iterates another one, and on the last ones while the next forward runs.
If nothing may come between backward and step, the directions begin in backward, as soon as a buffer has its averages:

::

    training   | backward of 3, 2, 1 | iterate 1 | iterate 2 | iterate 3 | next forward
    stream         | direction 3 | direction 2 | direction 1 | apply 1 | apply 2 | apply 3 |

What is sent between the ranks is sent by the training thread, in the same order on all of them. At most two buckets'
updates wait to be applied (`Applications`), because they are in the device's memory.

The results are those of a step without a stream, bit for bit: what the user's code changes after the step, such as the
learning rate, is not seen here.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ls_strategy.errors import StateError
from ls_strategy.tiers.stream import Job, Stream, Ticket
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.step.owner.full_tensors import FullTensor
from ls_strategy.zero.step.owner.split_tensors import SplitTensors


class Directions(Job):
    """Computes this rank's ranges of the directions of a bucket or of a buffer."""

    def __init__(
        self,
        splitter: SplitTensors,
        members: Sequence[FullTensor],
        gradient: Callable[[FullTensor], Tensor],
        stream: Stream,
    ) -> None:
        """Start computing.

        Args:
            splitter: has the states.
            members: tensors of which this rank sends a range.
            gradient: returns this rank's range of the averaged gradient of one of them. Called on the stream.
            stream: computes.
        """
        self._splitter = splitter
        self._members = members
        self._gradient: Callable[[FullTensor], Tensor] | None = gradient
        self._found: dict[int, Tensor] = {}
        self._ticket = stream.submit([self])

    def read(self) -> None:
        """Let a save that still copies the states finish."""
        for flat in {id(m.flat): m.flat for m in self._members}.values():
            flat.before_change()

    @torch.no_grad()
    def update(self) -> None:
        """Compute."""
        assert self._gradient is not None
        for member in self._members:
            grad, master = self._gradient(member), member.flat.master
            self._found[member.number] = self._splitter.direction(member, grad.to(master.device, master.dtype))
        self._gradient = None  # it holds the gradients

    def take(self, member: FullTensor) -> list[Tensor]:
        """Wait for the directions, and return that of one member."""
        started = time.perf_counter()
        self._ticket.wait()
        member.flat.count_wait(time.perf_counter() - started)
        return [self._found.pop(member.number)]

    def abandon(self) -> None:
        """Wait until nothing reads the gradients any more, and drop the directions."""
        with contextlib.suppress(Exception):  # of the stream, which its next user meets
            self._ticket.wait()
        self._found = {}


class EarlyDirections:
    """The directions that are computed while backward still runs, buffer by buffer."""

    def __init__(self, members: Iterable[FullTensor]) -> None:
        """``members``: all tensors whose steps are split and whose states are in host memory."""
        self._members: defaultdict[int, list[FullTensor]] = defaultdict(list)
        """By ``id`` of their buffer."""
        for member in members:
            if member.sent_by(member.comm.rank):
                self._members[id(member.flat)].append(member)
        self._begun: dict[int, tuple[Directions, int]] = {}
        """By number of the tensor: its directions, and the generation of the averages they are of."""

    def begin(self, flat: FlatBuffer, splitter: SplitTensors, stream: Stream) -> None:
        """Begin the directions of a buffer with complete averages, if it has any. Not collective."""
        averages = flat.averages
        members = [m for m in self._members.get(id(flat), ()) if flat.local.mask[m.index]]  # the others are frozen
        grads, landing, unscale = averages.in_memory() if members else None, averages.landing, averages.unscale
        if grads is None:
            return

        def gradient(member: FullTensor) -> Tensor:
            if landing is not None:
                landing.result()
            part = grads[slice(*member.mine)]
            return part if unscale == 1.0 else part * unscale

        directions = Directions(splitter, members, gradient, stream)
        flat.begin_early_directions()
        for member in members:
            self._begun[member.number] = (directions, averages.generation)

    def pop(self, member: FullTensor) -> Directions | None:
        """Return what computes the direction of a tensor; None if it was not begun.

        Raises:
            StateError: its gradient was changed since.
        """
        directions, generation = self._begun.pop(member.number, (None, 0))
        averages = member.flat.averages
        if directions is not None and (averages.generation != generation or averages.edited):
            self._refuse(member)
        return directions

    def require_none(self, members: Iterable[FullTensor]) -> None:
        """Check that nothing has begun for tensors that are not stepped.

        Raises:
            StateError: something has.
        """
        for member in members:
            if member.number in self._begun:
                self._refuse(member)

    @staticmethod
    def _refuse(member: FullTensor) -> None:
        raise StateError(
            f"the gradient of {member.flat.layout.slots[member.index].name!r} was changed after its step had begun, "
            "while backward ran. Change gradients in on_before_optimizer_step, or set sharding.overlap_step=False on "
            "the strategy."
        )

    def forget(self) -> None:
        """Drop what was begun, after an exception has ended the backward pass."""
        for directions, _ in self._begun.values():
            directions.abandon()
        self._begun = {}


_WAITING = 2
"""Buckets whose updates wait to be applied."""


class Applications:
    """The updates of a step that wait to be applied. One more waits for the oldest."""

    def __init__(self) -> None:
        """Begin with none."""
        self._tickets: deque[Ticket] = deque()

    def submit(self, splitter: SplitTensors, parts: Sequence[tuple[FullTensor, Tensor]], stream: Stream) -> None:
        """Start applying the updates of a bucket, and let everything that needs the master weights wait for it."""
        started = time.perf_counter()
        while len(self._tickets) >= _WAITING:
            self._tickets.popleft().wait()
        parts[0][0].flat.count_wait(time.perf_counter() - started)
        ticket = stream.submit([_Application(splitter, parts)])
        self._tickets.append(ticket)
        for member, _ in parts:
            member.flat.begin_update(ticket)


class _Application(Job):
    """Changes the master weights by the updates of a bucket."""

    def __init__(self, splitter: SplitTensors, parts: Sequence[tuple[FullTensor, Tensor]]) -> None:
        """``parts``: the updates of this rank's ranges, which nobody else changes."""
        self._splitter = splitter
        self._parts = parts
        self._settings = splitter.settings(member for member, _ in parts)
        self._after = parts[0][0].flat.store.link.mark()

    @torch.no_grad()
    def update(self) -> None:
        """Copy the updates to the host, if they are not there, and apply them."""
        for (member, part), settings in zip(self._parts, self._settings, strict=True):
            with member.flat.store.link.aside(self._after, work="update to the host", down=True):
                part_here = part.to(member.flat.master.device)
            self._splitter.write(member, part_here, settings)
        self._parts = ()
