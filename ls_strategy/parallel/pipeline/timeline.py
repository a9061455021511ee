"""Timeline of a run: measured times of all actions."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from ls_strategy import device as dev
from ls_strategy.parallel.pipeline.schedules import Action
from ls_strategy.parallel.pipeline.simulate import Span


@dataclass
class _Mark:
    """A point in time, on the host or in the queue of a GPU."""

    host_s: float
    event: Any = None


class TimelineRecorder:
    """Records start and end of a rank's actions. On CUDA the times are those of the current stream."""

    def __init__(self, device: torch.device) -> None:
        """``device``: where actions run."""
        self._device = device
        self._marks: list[tuple[Action, _Mark, _Mark]] = []

    def mark(self) -> _Mark:
        """Return the current time."""
        event = dev.record(self._device, timing=True) if dev.is_accelerator(self._device) else None
        return _Mark(time.time(), event)

    def add(self, action: Action, start: Any, end: Any) -> None:
        """Record one action."""
        self._marks.append((action, start, end))

    def take(self) -> list[Span]:
        """Return all actions since the last call. On CUDA it waits for the last one.

        Times are those of the system clock. For a common figure the clocks of all hosts must be synchronized.
        """
        marks, self._marks = self._marks, []
        if not dev.is_accelerator(self._device) or not marks:
            return [(action, start.host_s, end.host_s) for action, start, end in marks]
        marks[-1][2].event.synchronize()
        # The GPU may lag behind the host. Both know the end of the last action.
        origin = marks[0][1].event
        shift = time.time() - origin.elapsed_time(marks[-1][2].event) / 1000
        return [
            (a, shift + origin.elapsed_time(s.event) / 1000, shift + origin.elapsed_time(e.event) / 1000)
            for a, s, e in marks
        ]
