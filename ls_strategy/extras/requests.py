"""Requests over TCP between processes that know a secret, each a line of JSON and then bytes, if any.

The one invariant: nothing of a request is looked at before its secret has been compared, and nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import socket
import socketserver
import threading
import time
from collections.abc import Mapping
from typing import IO, Any

from typing_extensions import override

LINE_BYTES = 64 * 1024  # the longest line
ALIVE_S = 5.0
"""Seconds between two lines of one who has nothing to say yet, so that the other side knows that it is there."""

_CHUNK_BYTES = 1 << 20

_STRANGER_S = 10.0  # seconds in which a new connection has to send the secret
_MOST_STRANGERS = 64  # connections that have not sent the secret yet: each takes a file descriptor of this process


class RequestServer(socketserver.ThreadingTCPServer):
    """Serves every connection in a thread of its own.

    Of connections without the secret, it keeps the newest: one that knows it sends it at once.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # ranks come all at once; beyond the queue, the kernel lets them try again after a second

    def __init__(self, address: tuple[str, int], *args: Any, **kwargs: Any) -> None:
        """Listen at host and port; the arguments are those of the base class."""
        # Connections that have not sent the secret, and since when they are there, by id, the oldest first.
        self._strangers: dict[int, tuple[socket.socket, float]] = {}
        self._changing = threading.Lock()
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, *args, **kwargs)

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changing:
            self._strangers[id(request)] = request, time.monotonic()
            while len(self._strangers) > _MOST_STRANGERS:
                self._end_oldest()
        super().process_request(request, client_address)

    @override
    def service_actions(self) -> None:
        """End connections whose time is over, also those that send a letter now and then. Called all the time."""
        with self._changing:
            while self._strangers and time.monotonic() - next(iter(self._strangers.values()))[1] > _STRANGER_S:
                self._end_oldest()

    def _end_oldest(self) -> None:
        oldest, _ = self._strangers.pop(next(iter(self._strangers)))
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it

    def admit(self, request: Any) -> None:
        """Note that a connection has sent the secret."""
        with self._changing:
            self._strangers.pop(id(request), None)

    @override
    def shutdown_request(self, request: Any) -> None:
        self.admit(request)
        super().shutdown_request(request)

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: whoever asked reports the failure, and a lost node closes connections anywhere."""


class RequestHandler(socketserver.StreamRequestHandler):
    """Answers the requests of one connection, one after the other. Subclasses define `answer`."""

    key: str

    @override
    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(_STRANGER_S)

    @override
    def handle(self) -> None:
        while line := self.rfile.readline(LINE_BYTES):
            request = _parsed(line)
            if request is None or not hmac.compare_digest(str(request.pop("secret", None)).encode(), self.key.encode()):
                return
            self.connection.settimeout(self.timeout)
            self.server.admit(self.request)  # type: ignore[attr-defined]
            try:
                self.answer(request)
            except (OSError, ValueError) as error:
                self.reply({"error": f"{type(error).__name__}: {error}"})
                return  # bytes of the request may still be in the connection

    def answer(self, request: dict[str, Any]) -> None:
        """Answer one request, which no longer has the secret, by `reply`.

        Raises:
            OSError, ValueError: the connection is closed after the text of the error was sent.
        """
        raise NotImplementedError

    def reply(self, answer: dict[str, Any]) -> None:
        """Send a line."""
        self.wfile.write(json.dumps(answer).encode() + b"\n")


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return a request; None if it is none."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


def whole_number(request: Mapping[str, Any], name: str, most: int) -> int:
    """Return an entry of a request that is an integer from 0 to ``most``.

    Raises:
        ValueError: it is something else, or not there.
    """
    value = request.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"{name} is not an integer from 0 to {most}")
    return value


def short_text(request: Mapping[str, Any], name: str, most: int = 255) -> str:
    """Return an entry of a request that is a text of up to ``most`` characters.

    Raises:
        ValueError: it is something else, or not there.
    """
    value = request.get(name)
    if not isinstance(value, str) or len(value) > most:
        raise ValueError(f"{name} is not a text of up to {most} characters")
    return value


def copy_bytes(source: Any, target: IO[bytes], length: int) -> None:
    """Copy ``length`` bytes from a connection. Memory is taken as bytes arrive, not as they are announced.

    Raises:
        OSError: it ended earlier.
    """
    while length:
        data = source.read(min(length, _CHUNK_BYTES))
        if not data:
            raise OSError("the connection ended")
        target.write(data)
        length -= len(data)


def send_bytes(connection: socket.socket, data: bytes | memoryview) -> None:
    """Send all bytes; the time-out of the connection counts from piece to piece, not for all of them."""
    rest = memoryview(data)
    while rest:
        rest = rest[connection.send(rest[:_CHUNK_BYTES]) :]


def request_line(secret: str, request: dict[str, Any]) -> bytes:
    """Return the line that begins a request."""
    return json.dumps({"secret": secret, **request}).encode() + b"\n"


def read_answer(file: IO[bytes]) -> dict[str, Any]:
    """Return the line that begins an answer, which may have an entry ``error``.

    Raises:
        ConnectionError: there is none.
    """
    line = file.readline(LINE_BYTES)
    if not line:
        raise ConnectionError("the connection ended")
    return json.loads(line)


def is_loopback(host: str) -> bool:
    """Return whether an address, or what a name leads to, is reached from this host only."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(each[4][0]).split("%")[0]).is_loopback for each in found)


def keep_alive(connection: socket.socket) -> None:
    """Let the kernel end an idle connection whose other side is lost without a word, after about half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
