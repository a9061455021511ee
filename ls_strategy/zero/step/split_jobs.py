"""The element-wise parts of split steps, as jobs for the stream of offloaded updates.

::

    training   |wait | iterate 1 | iterate 2 | iterate 3 | next forward, which waits unit by unit
    stream     | direction 1 | direction 2 | apply 1, direction 3 | apply 2 | apply 3 |

So the host works on one bucket while the device iterates another one, and on the last ones while the next forward runs.
What is sent between the ranks is sent by the training thread, in the same order on all of them. At most two buckets'
updates wait to be applied, since the direction of a later bucket comes after them on the stream.

The results are those of a step without a stream, bit for bit: what the user's code changes after the step, such as the
learning rate, is not seen here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from ls_strategy.tiers.stream import Job, Stream, Ticket
from ls_strategy.zero.step.split_tensors import SplitTensors
from ls_strategy.zero.step.whole_exchange import WholeTensor


class Directions(Job):
    """Computes this rank's ranges of the directions of a bucket."""

    def __init__(self, splitter: SplitTensors, gradients: Sequence[tuple[WholeTensor, Tensor]], stream: Stream) -> None:
        """Start computing. ``gradients``: of this rank's ranges, of every tensor of which it sends one."""
        self._splitter = splitter
        self._gradients = gradients
        self._found: dict[int, Tensor] = {}
        self._ticket = stream.submit([self])

    def read(self) -> None:
        """Do nothing: the states are in memory."""

    @torch.no_grad()
    def update(self) -> None:
        """Compute."""
        for member, grad in self._gradients:
            master = member.flat.master
            self._found[member.number] = self._splitter.direction(member, grad.to(master.device, master.dtype))
        self._gradients = ()

    def write(self) -> None:
        """Do nothing: the states were changed in place."""

    def take(self, member: WholeTensor) -> list[Tensor]:
        """Wait for the directions, and return that of one member."""
        started = time.perf_counter()
        self._ticket.wait()
        member.flat.waited_s += time.perf_counter() - started
        return [self._found.pop(member.number)]


class Application(Job):
    """Changes the master weights by the updates of a bucket."""

    def __init__(self, splitter: SplitTensors, parts: Sequence[tuple[WholeTensor, Tensor]]) -> None:
        """``parts``: the updates of this rank's ranges, which nobody else changes."""
        self._splitter = splitter
        self._parts = parts
        self._settings = splitter.settings(member for member, _ in parts)
        self._after = parts[0][0].flat.storage.link.mark() if parts else None

    def submit(self, stream: Stream) -> Ticket:
        """Start applying, and let everything that needs the master weights wait for it."""
        ticket = stream.submit([self])
        for member, _ in self._parts:
            member.flat.updating = ticket
        return ticket

    def read(self) -> None:
        """Do nothing: the master weights are in memory."""

    @torch.no_grad()
    def update(self) -> None:
        """Copy the updates to the host, if they are not there, and apply them."""
        for (member, part), settings in zip(self._parts, self._settings, strict=True):
            with member.flat.storage.link.aside(self._after, work="update to the host", down=True):
                part_here = part.to(member.flat.master.device)
            self._splitter.write(member, part_here, settings)
        self._parts = ()

    def write(self) -> None:
        """Do nothing: the master weights were changed in place."""
