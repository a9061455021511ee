"""One rank's connection to the hub."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from ls_strategy.distributed.requests import keep_alive, read_answer, request_line
from ls_strategy.errors import ConfigError, StateError

_CONNECT_S = 5.0
_PAUSE_S = 0.5
_SECRET_CHARACTERS = 16


class HubLostError(Exception):
    """The connection to the hub has ended."""


class HubClient:
    """Asks the hub, one request at a time."""

    def __init__(self, address: tuple[str, int], secret: str, who: dict[str, int], connect_s: float) -> None:
        """Connect to nothing yet.

        Args:
            address: of the hub.
            secret: of the hub.
            who: ``island``, ``rank`` and ``ranks``, which begin every request.
            connect_s: how long to try to connect.
        """
        self._address, self._secret, self._who, self._connect_s = address, secret, who, connect_s
        self.island = who["island"]
        self._socket: socket.socket | None = None
        self._file: Any = None
        self.sent_bytes = 0
        """Bytes sent, without the lines that begin requests."""
        self.received_bytes = 0

    def connect(self, answer_s: float | None = None) -> None:
        """Connect, again and again until the hub is there.

        Args:
            answer_s: how long to wait for answers, until `be_patient`. None: as long as the other islands need.

        Raises:
            StateError: it is not there in time.
        """
        self.close()
        end = time.monotonic() + self._connect_s
        while True:
            try:
                self._socket = socket.create_connection(self._address, timeout=_CONNECT_S)
                break
            except OSError as error:
                if time.monotonic() > end:
                    host, port = self._address
                    raise StateError(
                        f"no hub answers at {host}:{port} ({error}). Start it there: ls-strategy meet --port {port} "
                        "--islands N; or correct DiLoCo(meet=...)."
                    ) from None
                time.sleep(_PAUSE_S)
        self._socket.settimeout(answer_s)
        keep_alive(self._socket)
        self._file = self._socket.makefile("rb")
        try:
            self.ask("hello", {})
        except HubLostError:
            raise ConfigError(
                f"the hub at {self._address[0]}:{self._address[1]} has closed the connection: its secret is another "
                "one, or what listens there is no hub. Give DiLoCo(secret=...) and `ls-strategy meet --secret` files "
                "with the same text."
            ) from None

    def ask(
        self, what: str, line: dict[str, Any], data: bytes | memoryview = b""
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request; return the answer's line and its bytes.

        Raises:
            HubLostError: the connection has ended.
            ConfigError: the hub refuses, with the cure; on all ranks of the island.
        """
        if self._socket is None:
            raise HubLostError("there is no connection")
        request = {"what": what, **self._who, **line, "length": len(data)}
        try:
            self._socket.sendall(request_line(self._secret, request))
            self._socket.sendall(data)
            answer = read_answer(self._file)
            parts = [self._read(length) for length in answer.get("lengths", [])]
        except (OSError, json.JSONDecodeError, ValueError) as error:
            self.close()
            raise HubLostError(str(error)) from None
        if "error" in answer:
            raise ConfigError(answer["error"])
        self.sent_bytes += len(data)
        self.received_bytes += sum(map(len, parts))
        return answer, parts

    def be_patient(self) -> None:
        """Wait for answers as long as the other islands need. If the hub's host is lost, the kernel notices."""
        if self._socket is not None:
            self._socket.settimeout(None)

    def _read(self, length: int) -> bytes:
        data = self._file.read(length)
        if len(data) != length:
            raise ConnectionError("the connection ended")
        return data

    def close(self) -> None:
        """Leave: the other islands go on without this one."""
        file, connection = self._file, self._socket
        self._file = self._socket = None
        if connection is not None:
            with contextlib.suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for an answer
            connection.close()
        if file is not None:
            with contextlib.suppress(OSError, ValueError):
                file.close()


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
