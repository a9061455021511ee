"""The rank's end of a connection to the hub: one that says nothing is noticed, and one that is busy is waited for."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from ls_strategy.extras.islands.messages import MOST_BYTES
from ls_strategy.extras.requests import ALIVE_S, LINE_BYTES

_PIECE_BYTES = 1 << 20

_UNUSUAL_S = 3 * ALIVE_S  # seconds of silence that are reported: whoever waits for a decision hears of it more often
T = TypeVar("T")


class HubLostError(Exception):
    """The connection to the hub has ended."""


class HubSilentError(HubLostError):
    """It stands, but the hub has said nothing for too long."""


class Link:
    """Sends and receives; raises `HubLostError` if the connection ends, and `HubSilentError` if the hub is silent."""

    def __init__(self, connection: socket.socket, silence_s: float, say: Callable[[float], None]) -> None:
        """``silence_s``: how long the hub may say nothing. ``say``: is called once before, with the seconds so far."""
        self._socket, self.silence_s, self._say = connection, silence_s, say
        self._socket.settimeout(min(ALIVE_S, silence_s))
        self._received = bytearray()
        self._heard = 0.0
        self._reported = False

    def ask(self, line: bytes, data: bytes | memoryview = b"") -> tuple[dict[str, Any], list[bytearray]]:
        """Send a request; return the line of its answer, and the bytes that follow."""
        self._heard, self._reported = time.monotonic(), False
        self.send(line)
        self.send(data)
        while (answer := self._line()).get("what") == "wait":
            pass
        lengths = answer.get("lengths", [])
        if not isinstance(lengths, list) or not all(isinstance(n, int) and 0 <= n <= MOST_BYTES for n in lengths):
            raise HubLostError("its answer has no form that is known")
        return answer, [self._bytes(length) for length in lengths]

    def send(self, data: bytes | memoryview) -> None:
        """Send all bytes."""
        rest = memoryview(data)
        while rest:
            piece = rest[:_PIECE_BYTES]
            rest = rest[self._patiently(lambda piece=piece: self._socket.send(piece)) :]

    def _line(self) -> dict[str, Any]:
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > LINE_BYTES:
                raise HubLostError("its answer is longer than any")
            self._more()
        line = self._received[:end]
        del self._received[: end + 1]
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise HubLostError("its answer has no form that is known")
        return answer

    def _bytes(self, length: int) -> bytearray:
        """Return so many bytes. Memory is taken as they arrive."""
        while len(self._received) < length:
            self._more()
        if len(self._received) == length:
            data, self._received = self._received, bytearray()
            return data
        data = self._received[:length]
        del self._received[:length]
        return data

    def _more(self) -> None:
        data = self._patiently(lambda: self._socket.recv(_PIECE_BYTES))
        if not data:
            raise HubLostError("the connection ended")
        self._received += data

    def _patiently(self, attempt: Callable[[], T]) -> T:
        """Try until something moves."""
        while True:
            try:
                result = attempt()
            except TimeoutError:
                self._notice()
            except OSError as error:
                raise HubLostError(str(error)) from None
            else:
                self._heard = time.monotonic()
                return result

    def _notice(self) -> None:
        silent = time.monotonic() - self._heard
        if silent >= self.silence_s:
            raise HubSilentError(f"it has said nothing for {silent:.0f} s")
        if silent >= _UNUSUAL_S and not self._reported:
            self._reported = True
            self._say(silent)

    def close(self) -> None:
        """End the connection; whoever waits for an answer gets an error."""
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
