"""Wait for a copy between the device and its host, or query whether it is done."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ls_strategy import device as dev
from ls_strategy import spans


class Arrival:
    """A copy in flight. Any thread may wait for it."""

    def __init__(self, event: Any = None, source: Tensor | None = None) -> None:
        """Wrap a recorded event, or None for a copy that is done. Keep ``source`` alive until then."""
        self._event = event
        self._source = source

    def is_over(self) -> bool:
        """Return whether the copy is done. Does not wait."""
        event = self._event
        return event is None or bool(event.query())

    def wait_on_host(self) -> None:
        """Block this thread until the copy is done."""
        event = self._event
        if event is not None:
            with spans.waiting(spans.COPY):
                event.synchronize()
            self._event = self._source = None

    def wait_on_device(self) -> None:
        """Let the device's current stream wait; do not block the host."""
        event = self._event
        if event is not None:
            with spans.waiting(spans.COPY):
                dev.stream(event.device).wait_event(event)


DONE = Arrival()
"""A copy that is already done."""
