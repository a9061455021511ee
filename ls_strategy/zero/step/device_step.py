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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ls_strategy.ops.moments import Moment
from ls_strategy.ops.split_master import SplitMaster
from ls_strategy.tiers.arrival import Arrival
from ls_strategy.tiers.link import Link, host_empty
from ls_strategy.tiers.stream import Job

State = Tensor | SplitMaster | Moment
_Numbers = list[tuple[Tensor, Callable[[list[float]], object]]]

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
        self._numbers: _Numbers = []
        self._flying: deque[tuple[Arrival, list[tuple[Tensor, Tensor]], _Numbers]] = deque()
        """What is on its way to the host. Results stay alive: another stream than that of their memory reads it."""

    def sending(self) -> AbstractContextManager[None]:
        """Let `send` run ahead of the device's mark, before `operation`."""
        return self._link.enqueued(work="states to the device")

    def send(self, host: Tensor) -> Tensor:
        """Start copying pinned host memory, and return the device's copy, to be used inside `operation` only."""
        return host.to(self._link.device, non_blocking=True)

    def send_state(self, state: State) -> Any:
        """Do what `send` does with the tensors of a state; the upper parts of split masters may be on the device."""
        if isinstance(state, Tensor):
            return self.send(state)
        return replace(state, **{k: self.send(v) for k, v in vars(state).items() if isinstance(v, Tensor)})

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

    def bring_state(self, host: State, result: State) -> None:
        """Do what `bring` does with the tensors of a state, but for those that were on the device."""
        for into, value in zip(_tensors(host), _tensors(result), strict=True):
            if into is not value:
                self.bring(into, value)

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
        self._flying.append((arrival, self._results, self._numbers))
        self._results, self._numbers = [], []
        self._land(_IN_FLIGHT)

    def finish(self) -> None:
        """Wait on the host until all copies have arrived."""
        self._land(0)

    def _land(self, left: int) -> None:
        while len(self._flying) > left:
            arrival, _, numbers = self._flying.popleft()
            arrival.wait_on_host()
            for host, receive in numbers:
                receive(host.tolist())


def _tensors(state: State) -> list[Tensor]:
    return [state] if isinstance(state, Tensor) else [v for v in vars(state).values() if isinstance(v, Tensor)]


@dataclass
class Finish(Job):
    """The job after an update's chunks: their states are in host memory, and readers may follow."""

    step: DeviceStep

    def update(self) -> None:
        """Wait. The next update's states are on their way by now."""
        self.step.finish()
