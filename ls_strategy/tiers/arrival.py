"""Wait for a copy between the device and its host, or query whether it is done."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ls_strategy import device as dev
from ls_strategy import spans


class Arrival:
    """A copy in flight. Any thread may wait for it."""

    def __init__(
        self, event: Any = None, source: Tensor | None = None, memory: Tensor | None = None, stream: Any = None
    ) -> None:
        """Wrap a copy.

        Args:
            event: recorded after it. None: the copy is done.
            source: kept alive until the host knows that the copy is done.
            memory: of the device, source or target, kept alive until somebody waits. Whoever changes or frees it waits
                on the host, or in the stream in which it was allocated.
            stream: of the copy.
        """
        self._event = event
        self._source = source
        self._memory: tuple[Tensor, ...] = () if memory is None else (memory,)
        self._stream = stream

    def follow(self, earlier: Arrival) -> None:
        """Stand for an ``earlier`` copy in the same stream, too: whoever waits for this one has waited for both."""
        self._memory, earlier._memory = self._memory + earlier._memory, ()

    def is_over(self) -> bool:
        """Return whether the copy is done. Does not wait."""
        event = self._event
        if event is not None and not event.query():
            return False
        self._memory = ()
        return True

    def wait_on_host(self) -> None:
        """Block this thread until the copy is done."""
        event = self._event
        if event is not None:
            with spans.waiting(spans.COPY):
                event.synchronize()
            self._event = self._source = None
            self._memory = ()

    def wait_on_device(self) -> None:
        """Let the device's current stream wait; do not block the host."""
        event = self._event
        if event is not None:
            with spans.waiting(spans.COPY):
                dev.stream(event.device).wait_event(event)
            self._memory = ()

    def __del__(self) -> None:
        """Protect the memory of a copy that nobody has waited for.

        Always to do so, with `torch.Tensor.record_stream`, would make memory pile up: what is freed could be used again
        only after the device has got there, and the host runs ahead of it (17 to 32 gathered buffers instead of 3).
        """
        for tensor in self._memory:
            dev.use_in_stream(tensor, self._stream)


DONE = Arrival()
"""A copy that is already done."""
