"""One rank's connection to the hub."""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ls_strategy import device as dev
from ls_strategy.errors import ConfigError, StateError
from ls_strategy.extras.islands.link import HubLostError, HubSilentError, Link
from ls_strategy.extras.islands.messages import PROTOCOL
from ls_strategy.extras.requests import ALIVE_S, keep_alive, request_line

_CONNECT_S = 5.0
_PAUSE_S = 0.5
_REFUSALS = 3  # connections that are closed without a word before it counts as a refusal; a busy hub may close one
_LEAST_SILENCE_S = 4 * ALIVE_S  # a hub that waits for islands says so every few seconds: less than this is no silence
_SECRET_CHARACTERS = 16


class HubClient:
    """Asks the hub, one request at a time, and lets it know in between that this rank is there."""

    def __init__(
        self,
        address: tuple[str, int],
        secret: str,
        who: dict[str, int],
        connect_s: float,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        """Connect to nothing yet.

        Args:
            address: of the hub.
            secret: of the hub.
            who: ``island``, ``rank`` and ``ranks``, which begin every request.
            connect_s: how long to try to connect, and how long the hub may be silent.
            warn: is called from any thread.
        """
        self._address, self._secret, self._who, self._connect_s = address, secret, who, connect_s
        self.island, self.ranks = who["island"], who["ranks"]
        self._warn = warn
        self._link: Link | None = None
        self._busy = threading.Lock()
        self._leaving = threading.Event()
        self.sent_bytes = 0  # bytes sent, without the lines that begin requests
        self.received_bytes = 0

    @property
    def _where(self) -> str:
        host, port = self._address
        return f"{host}:{port}"

    def connect(self) -> None:
        """Connect, again and again until the hub is there.

        Raises:
            StateError: it is not there in time.
            ConfigError: it refuses this rank.
        """
        self.close()
        end, refusals = time.monotonic() + self._connect_s, 0
        while True:
            try:
                self._open(end)
                break
            except OSError as error:
                if time.monotonic() > end:
                    raise StateError(
                        f"no hub answers at {self._where} ({error}). Start it there: ls-strategy meet --port "
                        f"{self._address[1]} --islands N; or correct DiLoCo(meet=...)."
                    ) from None
            except HubSilentError as error:
                raise StateError(
                    f"the hub at {self._where} does not answer: {error}. Continue or end its process there "
                    "(ls-strategy meet) if it is stopped, and look at the load of its host."
                ) from None
            except HubLostError:
                refusals += 1
                if refusals >= _REFUSALS:
                    raise ConfigError(
                        f"the hub at {self._where} has closed the connection: its secret is another one, or what "
                        "listens there is no hub. Give DiLoCo(secret=...) and `ls-strategy meet --secret` files with "
                        "the same text."
                    ) from None
            time.sleep(_PAUSE_S)
        self._leaving = threading.Event()
        self._select_device = dev.selecting()
        threading.Thread(target=self._live, args=(self._leaving,), name="ls_strategy_island_alive", daemon=True).start()

    def _open(self, end: float) -> None:
        connection = socket.create_connection(self._address, timeout=_CONNECT_S)
        keep_alive(connection)
        self._link = Link(connection, max(end - time.monotonic(), _CONNECT_S), self._report)
        self.ask("hello", {"protocol": PROTOCOL})
        self._link.silence_s = max(self._connect_s, _LEAST_SILENCE_S)

    def _report(self, silent_s: float) -> None:
        self._warn(
            f"DiLoCo: the hub at {self._where} has said nothing for {silent_s:.0f} s, though it speaks every "
            f"{ALIVE_S:.0f} s: its process is stopped, or the network is interrupted. This rank waits for it up to "
            f"{max(self._connect_s, _LEAST_SILENCE_S):.0f} s."
        )

    def _live(self, leaving: threading.Event) -> None:
        """Send a line every few seconds while nothing is asked: the hub takes a rank that is silent for lost."""
        self._select_device()
        line = request_line(self._secret, {"what": "alive", "length": 0})
        while not leaving.wait(ALIVE_S):
            if self._busy.acquire(blocking=False):
                try:
                    if self._link is not None:
                        self._link.send(line)
                except HubLostError:
                    pass  # the next request will find out
                finally:
                    self._busy.release()

    def ask(
        self, what: str, line: dict[str, Any], data: bytes | memoryview = b""
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """Send a request; return the answer's line and its bytes.

        Raises:
            HubLostError: the connection has ended, or the hub is silent.
            ConfigError: the hub refuses, with the cure; on all ranks of the island.
        """
        request = request_line(self._secret, {"what": what, **self._who, **line, "length": len(data)})
        with self._busy:
            link = self._link
            if link is None:
                raise HubLostError("there is no connection")
            try:
                answer, parts = link.ask(request, data)
            except HubLostError:
                self.close()
                raise
        if "error" in answer:
            raise ConfigError(str(answer["error"]))
        self.sent_bytes += len(data)
        self.received_bytes += sum(map(len, parts))
        return answer, parts

    def close(self) -> None:
        """Leave: the other islands go on without this one. Any thread."""
        self._leaving.set()
        link, self._link = self._link, None
        if link is not None:
            link.close()


def read_secret(path: str | os.PathLike[str]) -> str:
    """Return the secret in a file.

    Raises:
        ConfigError: the file cannot be read, or the secret is too short.
    """
    try:
        secret = Path(path).read_text().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"Got secret={str(path)!r}, which cannot be read ({error}). Make it once, and copy it to every host: "
            "openssl rand -hex 32 > secret"
        ) from None
    if len(secret) < _SECRET_CHARACTERS:
        raise ConfigError(
            f"Got secret={str(path)!r} with {len(secret)} characters, but a secret has {_SECRET_CHARACTERS} or more. "
            "Make one, and copy it to every host: openssl rand -hex 32 > secret"
        )
    return secret


def parse_address(meet: str) -> tuple[str, int]:
    """Return host and port of ``host:port``.

    Raises:
        ConfigError: it is something else.
    """
    host, separator, port = meet.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise ConfigError(
            f"Got meet={meet!r}, but it must be the address where `ls-strategy meet` listens. Set "
            'meet="host:port", such as "10.0.0.1:29400".'
        )
    return host.strip("[]"), int(port)
