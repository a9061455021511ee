"""A small server on every node, which gives other nodes files of snapshots and takes copies of theirs.

The secret of a request is one that only the ranks of the run know.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import itertools
import os
import shutil
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from typing_extensions import override

from ls_strategy import device as dev
from ls_strategy.errors import CheckpointError
from ls_strategy.extras.requests import (
    RequestHandler,
    RequestServer,
    copy_bytes,
    is_loopback,
    read_answer,
    request_line,
    short_text,
    whole_number,
)
from ls_strategy.extras.snapshots.memory import Memory

_TIMEOUT_S = 60.0  # seconds without a byte after which a node counts as lost
_CONNECT_S = 5.0
_MOST_BYTES = 1 << 50  # of a file


class Server:
    """Serves one node's memory. One process per node."""

    def __init__(self, memory: Memory, secret: str, host: str = "127.0.0.1") -> None:
        """Listen on a free port of the address ``host``; of all addresses if it is empty."""
        select_device = dev.selecting()

        class Handler(_Handler):
            served, key = memory, secret

            @override
            def setup(self) -> None:
                select_device()  # each connection has a thread of its own
                super().setup()

        self._server = RequestServer((host, 0), Handler)
        self._thread = threading.Thread(target=lambda: (select_device(), self._server.serve_forever(0.1)), daemon=True)
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
        what = request.get("what")
        if what == "hello":
            self.reply({})
            return
        if what not in ("read", "put"):
            raise ValueError("an unknown request")
        name, file = short_text(request, "name"), short_text(request, "file")
        length = whole_number(request, "length", _MOST_BYTES)
        path = self.served.path(name, file)
        if what == "read":
            self._read(path, whole_number(request, "offset", _MOST_BYTES), length)
        else:
            self._put(name, path, length)

    def _read(self, path: Path, offset: int, length: int) -> None:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = max(0, min(length, size - offset))
            self.reply({"length": length})
            if length:
                self.connection.sendfile(file, offset, length)

    def _put(self, name: str, path: Path, length: int) -> None:
        free = shutil.disk_usage(self.served.folder).free
        if length > free:
            raise OSError(errno.ENOSPC, f"{length} bytes do not fit into {free}")
        self.served.begin(name)
        new = path.with_name(f"{path.name}.tmp")
        try:
            with new.open("wb") as target:
                copy_bytes(self.rfile, target, length)
            new.rename(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
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
        found += _towards(main_address)
    with contextlib.suppress(OSError):
        named = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        found += [str(info[4][0]) for info in named]
    found.append(socket.gethostname())
    return list(dict.fromkeys(found))


def one_address(own: Sequence[str] | None, of_nodes: Sequence[Sequence[str]]) -> str:
    """Return the address at which other nodes reach this one; empty if it is not known.

    Args:
        own: of this node, the likeliest first.
        of_nodes: of all nodes.
    """
    if not own:
        return ""
    if all(is_loopback(each[0]) for each in of_nodes):  # nodes of one host
        return own[0]
    # The main node's name often leads to itself: the way to another node is another interface.
    others = (address for each in of_nodes for address in each if address not in own and _is_elsewhere(address))
    ways = (way for address in others for way in _towards(address))
    return next((each for each in itertools.chain([own[0]], ways) if _is_elsewhere(each)), "")


def _towards(address: str) -> list[str]:
    """Return this node's address on the interface that leads to ``address``, if there is one. Sends nothing."""
    with contextlib.suppress(OSError):
        family, kind, _, _, where = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return [str(probe.getsockname()[0])]
    return []


def _is_elsewhere(text: str) -> bool:
    """Return whether a text is an address, no name, and reached from other hosts."""
    with contextlib.suppress(ValueError):
        return not ipaddress.ip_address(text.split("%")[0]).is_loopback
    return False
