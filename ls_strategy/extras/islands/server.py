"""The hub's server: reads what ranks ask, and gives it to the hub once it is checked. Standard library only."""

from __future__ import annotations

import io
import select
import socket
import time
from typing import Any

from typing_extensions import override

from ls_strategy.distributed.launch.rendezvous import listeners
from ls_strategy.errors import ConfigError
from ls_strategy.extras.islands import messages
from ls_strategy.extras.islands.decided import Reply
from ls_strategy.extras.islands.hub import Hub
from ls_strategy.extras.requests import (
    ALIVE_S,
    RequestHandler,
    RequestServer,
    copy_bytes,
    keep_alive,
    send_bytes,
    whole_number,
)

_SILENCE_S = 120.0
"""Seconds without a byte after which a rank counts as lost. Ranks that train send a line every few seconds."""


class HubServer:
    """Serves a hub until it is closed."""

    def __init__(self, hub: Hub, *, host: str, port: int, secret: str) -> None:
        """Listen.

        Raises:
            ConfigError: the port is taken, with the process that holds it; or there is no such address here.
        """

        class Handler(_Handler):
            served, key = hub, secret

        try:
            self._server = _Server((host, port), Handler)
        except (OSError, UnicodeError) as error:
            who = " and ".join(f"process {pid} ({command})" for pid, command in listeners(port))
            raise ConfigError(
                f"Got --host {host} --port {port}, but it cannot be listened on: {getattr(error, 'strerror', error)}"
                f"{f'; {who} does' if who else ''}. Give another port, or end that process; several runs need a hub "
                "each."
            ) from None
        self.port = int(self._server.server_address[1])

    def serve(self) -> None:
        """Serve until `close`, or an interrupt."""
        try:
            self._server.serve_forever(0.1)
        finally:
            self._server.server_close()

    def close(self) -> None:
        """Stop serving. Call it from another thread than `serve`."""
        self._server.shutdown()


class _Server(RequestServer):
    allow_reuse_address = True  # of connections that are closing; a listener is still an error


class _Handler(RequestHandler):
    served: Hub
    timeout = _SILENCE_S

    @override
    def setup(self) -> None:
        super().setup()
        keep_alive(self.connection)
        self._said = time.monotonic()

    def ended(self) -> bool:
        """Return whether the other side has closed the connection, or is lost. Does not wait."""
        something = select.poll()  # recv alone would wait for the time-out of the connection
        try:
            something.register(self.connection, select.POLLIN)
            return bool(something.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):
            return True

    def still_waiting(self) -> None:
        """Send a line if the last one was some seconds ago."""
        if time.monotonic() - self._said >= ALIVE_S:
            self.reply({"what": "wait"})
            self._said = time.monotonic()

    @override
    def finish(self) -> None:
        self.served.gone(self)
        super().finish()

    @override
    def answer(self, request: dict[str, Any]) -> None:
        what, self._said = request.get("what"), time.monotonic()
        length = whole_number(request, "length", messages.MOST_BYTES if what in ("exchange", "state") else 0)
        if what == "alive":
            return
        if what == "hello":
            self._answer_with(_hello(request))
        elif what == "join":
            self._answer_with(self.served.join(self, messages.join(request)))
        elif what == "exchange":
            exchange = messages.exchange(request)
            self._answer_with(self.served.exchange(self, exchange, self._data(exchange, length)))
        elif what == "verdict":
            self._answer_with(self.served.verdict(self, messages.verdict(request)))
        elif what == "state":
            state = messages.state(request)
            self._answer_with(self.served.state(self, state, self._data(state, length)))
        else:
            raise ValueError("an unknown request")

    def _data(self, request: messages.Request, length: int) -> memoryview:
        """Return the bytes of a request, which are read only if the rank is in."""
        self.served.check_seat(self, request)
        data = io.BytesIO()
        copy_bytes(self.rfile, data, length)
        return data.getbuffer()

    def _answer_with(self, reply: Reply) -> None:
        self.reply(reply.line)
        for part in reply.parts:
            send_bytes(self.connection, part)


def _hello(request: dict[str, Any]) -> Reply:
    if request.get("protocol") == messages.PROTOCOL:
        return Reply({"protocol": messages.PROTOCOL})
    return Reply({"error": "the hub runs another version of ls_strategy. Install the same one on all hosts."})
