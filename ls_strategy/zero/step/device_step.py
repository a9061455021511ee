"""Updates of states in host memory on the device: copied there and back, both ways at the same time.

::

    to the device, and the operation | 1 | 2 | 3 | 4 |
    to the host                          | 1 | 2 | 3 | 4 |

The bus is full duplex, and the host enqueues the next chunk while the device works on the last one. The operation takes
a thirtieth of the time of its copies (28 bytes of device memory per element against 12 of the bus), so it shares their
stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ls_strategy.ops.moments import Moment
from ls_strategy.ops.split_master import SplitMaster
from ls_strategy.tiers.arrival import Arrival
from ls_strategy.tiers.link import Link, host_empty

_IN_FLIGHT = 2
"""Chunks that are on their way back when the host waits for the oldest one. With the one that is sent ahead, at most
four chunks of 1 M elements are in device memory: about 70 MiB for AdamW with fp32 states."""


class DeviceStep:
    """Runs one update's operations on the device. Used by one thread."""

    def __init__(self, link: Link, after: Any = None) -> None:
        """Let operations (not the copies before them) wait for ``after``, a mark of `Link.mark`."""
        self._link = link
        self._after = after
        self._clip: Tensor | None = None
        self._results: list[tuple[Tensor, Tensor]] = []
        self._numbers: list[tuple[Tensor, Callable[[list[float]], object]]] = []
        self._flying: deque[_Flight] = deque()

    def sending(self) -> AbstractContextManager[None]:
        """Let `send` run ahead of the device's mark, before `operation`."""
        return self._link.enqueued(work="states to the device")

    def send(self, host: Tensor) -> Tensor:
        """Start copying pinned host memory, and return the device's copy, to be used inside `operation` only."""
        return host.to(self._link.device, non_blocking=True)

    def send_master(self, master: Tensor | SplitMaster) -> Tensor | SplitMaster:
        """Do what `send` does with masters; the upper parts of split ones may be on the device."""
        if isinstance(master, SplitMaster):
            ties = None if master.ties is None else self.send(master.ties)
            return SplitMaster(self.send(master.high), self.send(master.low), ties)
        return self.send(master)

    def send_moment(self, moment: Moment) -> Moment:
        """Do what `send` does with the tensors of a moment."""
        scales = None if moment.scales is None else self.send(moment.scales)
        return Moment(self.send(moment.codes), scales, moment.signed)

    def send_clip(self, clip: Tensor | None) -> Tensor | None:
        """Return the factor for gradients, ``()``, on the device. Called inside `operation`."""
        if clip is not None and self._clip is None:
            # Filled by the device: a copy of pageable memory would wait for all copies before it.
            on_host = clip.device != self._link.device
            self._clip = torch.full_like(clip, float(clip), device=self._link.device) if on_host else clip
        return self._clip

    def bring(self, host: Tensor, result: Tensor) -> None:
        """Copy ``result`` into ``host`` (pinned) after the `operation` in which this is called."""
        self._results.append((host, result))

    def bring_master(self, host: Tensor | SplitMaster, result: Tensor | SplitMaster) -> None:
        """Do what `bring` does with masters."""
        if isinstance(host, SplitMaster) and isinstance(result, SplitMaster):
            if host.high is not result.high:
                self.bring(host.high, result.high)
            self.bring(host.low, result.low)
            if host.ties is not None and result.ties is not None:
                self.bring(host.ties, result.ties)
        elif isinstance(host, Tensor) and isinstance(result, Tensor):
            self.bring(host, result)

    def bring_moment(self, host: Moment, result: Moment) -> None:
        """Do what `bring` does with the tensors of a moment."""
        self.bring(host.codes, result.codes)
        if host.scales is not None and result.scales is not None:
            self.bring(host.scales, result.scales)

    def bring_numbers(self, result: Tensor, receive: Callable[[list[float]], object]) -> None:
        """Do what `bring` does with a few numbers, and hand them to ``receive`` when they have arrived."""
        host = host_empty(result.numel(), result.dtype, result.device)
        self.bring(host, result)
        self._numbers.append((host, receive))

    @contextmanager
    def operation(self) -> Iterator[None]:
        """Run the device's work inside the context after what was sent; then copy what is to be brought."""
        with self._link.enqueued(self._after):
            yield
            done = self._link.mark()
        with self._link.enqueued(done, work="states to the host", down=True):
            for host, result in self._results:
                host.copy_(result, non_blocking=True)
            arrival = Arrival(self._link.mark())
        self._flying.append(_Flight(arrival, self._results, self._numbers))
        self._results, self._numbers = [], []
        self._land(_IN_FLIGHT)

    def finish(self) -> None:
        """Wait on the host until all copies have arrived."""
        self._land(0)

    def _land(self, left: int) -> None:
        while len(self._flying) > left:
            flight = self._flying.popleft()
            flight.arrival.wait_on_host()
            for host, receive in flight.numbers:
                receive(host.tolist())


@dataclass
class _Flight:
    """What is on its way to the host."""

    arrival: Arrival
    results: list[tuple[Tensor, Tensor]]
    """Kept alive: their memory belongs to another stream than the one that reads it."""

    numbers: list[tuple[Tensor, Callable[[list[float]], object]]]


class Finish:
    """The job after an update's chunks: their states are in host memory, and readers may follow."""

    def __init__(self, step: DeviceStep) -> None:
        """Wait for this step."""
        self._step = step

    def read(self) -> None:
        """Do nothing."""

    def update(self) -> None:
        """Wait. The next update's states are on their way by now."""
        self._step.finish()

    def write(self) -> None:
        """Do nothing."""
