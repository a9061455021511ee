"""A small server on every node, which gives other nodes files of snapshots and takes copies of theirs.

The secret of a request is one that only the ranks of the run know.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from typing_extensions import override

from ls_strategy.distributed.requests import RequestHandler, RequestServer, copy_bytes, read_answer, request_line
from ls_strategy.errors import CheckpointError
from ls_strategy.snapshots.memory import Memory

_TIMEOUT_S = 60.0
"""Seconds without a byte after which a node counts as lost."""

_CONNECT_S = 5.0


class Server:
    """Serves one node's memory. One process per node."""

    def __init__(self, memory: Memory, secret: str) -> None:
        """Listen on a free port."""

        class Handler(_Handler):
            served, key = memory, secret

        self._server = RequestServer(("", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.name = "ls_strategy_snapshots"
        self._thread.start()

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return self._server.server_address[1]

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(RequestHandler):
    served: Memory
    timeout = _TIMEOUT_S

    @override
    def answer(self, request: dict[str, Any]) -> None:
        what = request["what"]
        if what == "hello":
            self.reply({})
        elif what == "read":
            self._read(self.served.path(request["name"], request["file"]), request["offset"], request["length"])
        elif what == "put":
            self._put(request["name"], request["file"], request["length"])
        else:
            raise ValueError(f"unknown request {what!r}")

    def _read(self, path: Path, offset: int, length: int) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = max(0, min(length, size - offset))
            self.reply({"length": length})
            if length:
                self.connection.sendfile(file, offset, length)

    def _put(self, name: str, file: str, length: int) -> None:
        self.served.begin(name)
        path = self.served.path(name, file)
        new = path.with_name(f"{path.name}.tmp")
        with new.open("wb") as target:
            copy_bytes(self.rfile, target, length)
        new.rename(path)
        self.reply({})


class Peer:
    """Another node, as this one reaches it."""

    def __init__(self, addresses: Sequence[str], port: int, secret: str) -> None:
        """``addresses``: under which it may be reached, the likeliest first. The first that answers is used."""
        self._addresses, self._port, self._secret = list(addresses), port, secret

    def _connect(self) -> socket.socket:
        errors: list[str] = []
        for address in list(self._addresses):
            try:
                connection = socket.create_connection((address, self._port), timeout=_CONNECT_S)
            except OSError as error:
                errors.append(f"{address}: {error}")
                continue
            self._addresses = [address]
            connection.settimeout(_TIMEOUT_S)
            return connection
        raise CheckpointError(f"a node with a part of a snapshot cannot be reached ({'; '.join(errors)}).")

    def _ask(self, request: dict[str, Any]) -> tuple[socket.socket, IO[bytes]]:
        connection = self._connect()
        connection.sendall(request_line(self._secret, request))
        return connection, connection.makefile("rb")

    def hello(self) -> None:
        """Check that the node answers.

        Raises:
            CheckpointError: it does not.
        """
        connection, file = self._ask({"what": "hello"})
        with connection, file:
            _answer(file)

    def read(self, name: str, file: str, offset: int, length: int) -> bytes:
        """Return bytes of a file of a snapshot.

        Raises:
            CheckpointError: the node does not answer, or lacks the file.
        """
        try:
            connection, answer = self._ask(
                {"what": "read", "name": name, "file": file, "offset": offset, "length": length}
            )
            with connection, answer:
                promised = _answer(answer)["length"]
                data = answer.read(promised)
        except OSError as error:
            raise CheckpointError(f"a node with {file} of the snapshot {name} was lost: {error}.") from error
        if len(data) != promised:
            raise CheckpointError(f"a node with {file} of the snapshot {name} was lost.")
        return data

    def put(self, name: str, path: Path) -> None:
        """Copy a file of a snapshot into the node's memory, under the same name.

        Raises:
            CheckpointError: the node does not answer, or has no room.
        """
        request = {"what": "put", "name": name, "file": path.name, "length": path.stat().st_size}
        try:
            connection, answer = self._ask(request)
            with connection, answer:
                with path.open("rb") as file:
                    if request["length"]:
                        connection.sendfile(file)
                _answer(answer)
        except OSError as error:
            raise CheckpointError(f"{path.name} could not be copied to another node: {error}.") from error


def _answer(file: IO[bytes]) -> dict[str, Any]:
    answer = read_answer(file)
    if "error" in answer:
        raise CheckpointError(f"another node reports {answer['error']}.")
    return answer


def addresses(main_address: str | None) -> list[str]:
    """Return the addresses under which other nodes may reach this one, the likeliest first.

    Args:
        main_address: of rank 0's node, as all nodes reach it; the interface that leads there is the likeliest.
    """
    found: list[str] = []
    if main_address:
        with contextlib.suppress(OSError):
            family, kind, _, _, where = socket.getaddrinfo(main_address, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(where)  # sends nothing
                found.append(str(probe.getsockname()[0]))
    with contextlib.suppress(OSError):
        named = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found += [str(info[4][0]) for info in named]
    found.append(socket.gethostname())
    return list(dict.fromkeys(found))
