"""The rendezvous port: choose a free one, and name the process that holds a taken one. Standard library only."""

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
"""Below the kernel's range for outgoing connections, so that none of them takes the port in the meantime."""

_chance = random.SystemRandom()
"""Not the global generator: two runs with one seed would choose one port, and the user's numbers would change."""


_HOLD_S = 120.0
"""The most seconds from the choice of a port until rank 0 listens on it: Python starts slowly on a loaded node."""

_held: dict[int, tuple[float, socket.socket]] = {}
"""Ports that this process has chosen, the time until which it holds them (`time.monotonic`), and what holds them."""


def free_port() -> int:
    """Return a TCP port of this host that is free and that no other caller got in the last 120 s.

    If two runs got the same port at once, their ranks would connect to each other and neither could continue. On Linux
    this holds for all processes of the host, elsewhere within this process.

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
    """Reserve ``port`` among the processes of this host while the returned socket is open; None if it is reserved.

    The reservation is an abstract socket name (Linux), which the kernel frees when the process ends, however it ends.
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
"""Address and port where this process has left its process group after an error, and the error."""


def leave(address: str, port: int, why: str) -> None:
    """Record that this process has closed its connections to the ranks of this rendezvous."""
    _left[address, port] = why


def check_left(address: str, port: int) -> None:
    """Raise if ranks cannot meet here again: the store has the addresses of connections that are closed.

    Raises:
        StateError: with the error that closed them.
    """
    if (address, port) in _left:
        raise StateError(
            f"an earlier run of this process ended with an error that other ranks did not share ({_left[address, port]}"
            f"), so connections were closed, and ranks cannot meet at {address}:{port} again. Restart all processes of "
            "the run."
        )


def check_port(address: str, port: int, rank: int) -> None:
    """Raise if rank 0 cannot listen on ``port``. Call it on every rank before the process group is created.

    It does nothing on other ranks, and under ``torchrun``, where the agent listens on the port.

    Args:
        address: ``MASTER_ADDR``, for the message.
        port: ``MASTER_PORT``.
        rank: global rank of this process.

    Raises:
        PlanError: the port is taken; with the process that holds it and the cure.
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
        return  # a process group of this process; torch shares its store
    who = " and ".join(f"process {pid} ({command})" for pid, command in holders) or "a process of another user"
    cause = ""
    if "SLURM_JOB_ID" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
        cause = " Without MASTER_PORT, Lightning takes 15000 plus the last four digits of the job id: jobs collide."
    raise PlanError(
        f"MASTER_PORT={port} of {address} is taken by {who}, so rank 0 cannot listen there.{cause} "
        f"Set MASTER_PORT to a free port, for example {free_port()}, on every rank, or end that process."
    )


def check_agent(address: str, port: int) -> None:
    """Raise if ranks meet at an agent of ``torchrun``, and it has ended: they would wait for it until their timeout.

    It listens before it starts ranks, so a refused connection means that it has ended.

    Raises:
        StateError: on every rank.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    for pause_s in (0.5, 1.0, 0.0):  # a full queue of connections refuses some, too
        try:
            socket.create_connection((address, port), timeout=5.0).close()
            return
        except ConnectionRefusedError:
            time.sleep(pause_s)
        except OSError:  # torch explains what else prevents a connection
            return
    raise StateError(
        f"Got no answer at {address}:{port}, where the agent of torchrun listens while it runs, so it has ended, and "
        "ranks cannot meet. See its output for the reason, and start the run again."
    )


def listeners(port: int) -> list[tuple[int, str]]:
    """Return the processes of this host that listen on a TCP port, as ``(pid, command line)``.

    Empty on other systems than Linux, and without processes that this user may not inspect.
    """
    wanted = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _inodes(Path("/proc/net") / table, port)}
    found: list[tuple[int, str]] = []
    for process in Path("/proc").glob("[0-9]*") if wanted else ():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
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
    """Return the inodes of the sockets that listen on ``port``, from ``/proc/net/tcp`` or ``tcp6``."""
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == "0A" and int(row[1].rsplit(":", 1)[1], 16) == port]


def _bind_error(port: int) -> OSError | None:
    """Return the error of listening on ``port`` of every address, as torch's store does; None if that works."""
    for family, everywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # this host has no IPv6
            continue
        with probe:
            # As in torch: connections that are closing do not count, listeners do.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((everywhere, port))
                probe.listen(1)
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # IPv6 is disabled
                    continue
                return error
    return None


if __name__ == "__main__":
    print(free_port())
