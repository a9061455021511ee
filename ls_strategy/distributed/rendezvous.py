"""The port on which ranks meet: choose one that is free, and say who holds one that is not. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
import sys
import time
from pathlib import Path

from ls_strategy.errors import PlanError, StateError

PORTS = range(20_000, 32_000)
"""Below the range that the kernel hands out to outgoing connections, so that none of these takes the port meanwhile."""

_chance = random.SystemRandom()
"""Not the global generator: two runs with one seed would choose one port, and the user's random numbers would move."""


_HOLD_S = 120.0
"""Seconds from the choice of a port to the moment rank 0 listens there, at most: starting Python on a loaded node."""

_held: dict[int, tuple[float, socket.socket]] = {}
"""Ports this process has chosen, until when it holds them (`time.monotonic`), and what holds them."""


def free_port() -> int:
    """A TCP port of this host that nobody listens on now, and that no other caller has been given in the last 120 s.

    The second matters: the ranks of two runs that were given one port at the same moment meet each other, and neither
    run goes on. On Linux this holds among all processes of the host; elsewhere within this process.

    Raises:
        PlanError: every port that was tried is taken.
    """
    now = time.monotonic()
    for port in [port for port, (until, _) in _held.items() if until < now]:
        _held.pop(port)[1].close()
    for _ in range(1000):
        port = _chance.choice(PORTS)
        if port not in _held and (holder := _hold(port)) is not None:
            if _bind_error(port) is None:
                _held[port] = (now + _HOLD_S, holder)
                return port
            holder.close()
    raise PlanError(
        f"found no free TCP port between {PORTS.start} and {PORTS.stop - 1} on {socket.gethostname()}. "
        "Set MASTER_PORT to one that is."
    )


def _hold(port: int) -> socket.socket | None:
    """Tell the processes of this host that ``port`` is chosen, as long as the socket is open. None: one has it already.

    By a name without a file (Linux's abstract sockets): the kernel forgets it when the process ends, however it ends.
    """
    holder = socket.socket(socket.AF_UNIX if hasattr(socket, "AF_UNIX") else socket.AF_INET, socket.SOCK_DGRAM)
    if sys.platform != "linux":
        return holder
    try:
        holder.bind(f"\0ls_strategy/port/{port}")
    except OSError:
        holder.close()
        return None
    return holder


_left: dict[tuple[str, int], str] = {}
"""Where this process has left its process group after an error, and the error."""


def leave(address: str, port: int, why: str) -> None:
    """Note that this process has closed its connections to the ranks that met there."""
    _left[address, port] = why


def check_left(address: str, port: int) -> None:
    """Raise where ranks cannot meet again: the store there has the addresses of connections that are closed.

    Raises:
        StateError: with the error that closed them.
    """
    if (address, port) in _left:
        raise StateError(
            f"an earlier run of this process ended with an error that other ranks did not share ({_left[address, port]}"
            f"), so connections were closed, and ranks cannot meet at {address}:{port} again. Start all processes of "
            "the run anew."
        )


def check_port(address: str, port: int, rank: int) -> None:
    """Raise before the process group is made if rank 0 cannot listen on ``port``. Call it on every rank.

    Does nothing on other ranks, and under ``torchrun``, whose agent listens there by itself.

    Args:
        address: ``MASTER_ADDR``, for the message.
        port: ``MASTER_PORT``.
        rank: global rank of this process.

    Raises:
        PlanError: the port is taken, by whom, and what to do.
    """
    if rank != 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    error = _bind_error(port)
    if error is None:
        return
    if error.errno != errno.EADDRINUSE:
        raise PlanError(
            f"rank 0 cannot listen on MASTER_PORT={port} of {socket.gethostname()}: {error.strerror}. "
            f"Set MASTER_PORT to a free port from 1024 on, for example {free_port()}, on every rank."
        )
    holders = listeners(port)
    if any(pid == os.getpid() for pid, _ in holders):
        return  # a process group of this very process; torch shares its store
    who = " and ".join(f"process {pid} ({command})" for pid, command in holders) or "somebody else's process"
    cause = ""
    if "SLURM_JOB_ID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        cause = " Without MASTER_PORT, Lightning takes 15000 plus the last four digits of the job id: jobs collide."
    raise PlanError(
        f"MASTER_PORT={port} of {address} is taken by {who}, so rank 0 cannot listen there.{cause} "
        f"Set MASTER_PORT to a free port, for example {free_port()}, on every rank, or end that process."
    )


def listeners(port: int) -> list[tuple[int, str]]:
    """Processes of this host that listen on a TCP port, as ``(pid, command line)``.

    Linux; empty elsewhere, and for processes that this user may not look at.
    """
    wanted = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _inodes(Path("/proc/net") / table, port)}
    found: list[tuple[int, str]] = []
    for process in Path("/proc").glob("[0-9]*") if wanted else ():
        with contextlib.suppress(OSError):  # it ended meanwhile, or belongs to somebody else
            if wanted.isdisjoint(_links(process / "fd")):
                continue
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
            found.append((int(process.name), " ".join(words)[:120]))
    return sorted(found)


def _links(folder: Path) -> set[str]:
    result: set[str] = set()
    for entry in folder.iterdir():
        with contextlib.suppress(OSError):
            result.add(str(entry.readlink()))
    return result


def _inodes(table: Path, port: int) -> list[str]:
    """Inodes of the listening sockets in ``/proc/net/tcp`` or ``tcp6``."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == "0A" and int(row[1].rsplit(":", 1)[1], 16) == port]


def _bind_error(port: int) -> OSError | None:
    """What stands in the way of listening on ``port`` of every address, as torch's store does."""
    for family, everywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # no IPv6 here
            continue
        with probe:
            # As torch does: connections that are still winding down do not count, listeners do.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((everywhere, port))
                probe.listen(1)
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # IPv6 is switched off
                    continue
                return error
    return None


if __name__ == "__main__":
    print(free_port())
