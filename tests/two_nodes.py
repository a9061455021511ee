"""Two nodes on one host: network namespaces, joined by a link with a limited rate. Linux only, as root.

::

    node 0: 10.77.0.1 ── nodes0 ── rate in each direction ── nodes0 ── 10.77.0.2 :node 1

A process that calls `enter` is on a node, with all sockets that it opens from then on. Connections inside a node do not
use the link. What crosses it is counted by the kernel, with headers and repeated packets.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

LINK = "nodes0"
"""Name of the interface on both nodes."""

_CLONE_NEWNET = 0x40000000
_PREFIX = "ls-nodes-"
_FOLDER = Path("/run/netns")


class TwoNodesError(RuntimeError):
    """This host cannot have them."""


def address(node: int) -> str:
    """Of a node."""
    return f"10.77.0.{node + 1}"


def _run(*command: str) -> None:
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise TwoNodesError(f"{' '.join(command)} failed ({found.returncode}): {found.stderr.strip()}")


def require() -> None:
    """Find out whether this host can have them.

    Raises:
        TwoNodesError: with the reason.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise TwoNodesError(f"{' and '.join(missing)} not found. Install iproute2.")
    if os.geteuid():
        raise TwoNodesError("network namespaces with a link between them need root. Run it as root, in a container.")
    with two_nodes("1gbit"):
        pass


@contextlib.contextmanager
def two_nodes(rate: str) -> Iterator[tuple[str, str]]:
    """Create two nodes, and remove them in the end. Those of a process that was killed are removed here, too.

    Args:
        rate: of the link in each direction, as `tc` reads it: ``1gbit``.

    Yields:
        Their names, for `enter`.

    Raises:
        TwoNodesError: there is no right to do so, or something is missing.
    """
    _remove_of_others()
    names = (f"{_PREFIX}{os.getpid()}-0", f"{_PREFIX}{os.getpid()}-1")
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", LINK, "netns", names[0], "type", "veth", "peer", "name", LINK, "netns", names[1])
        for node, name in enumerate(names):
            _run("ip", "-n", name, "addr", "add", f"{address(node)}/24", "dev", LINK)
            _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "-n", name, "link", "set", LINK, "up")
            # The bucket has room for a packet that is cut only later (64 kB), and for what passes between two ticks.
            _run("tc", "-n", name, "qdisc", "add", "dev", LINK, "root",
                 "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")  # fmt: skip
        yield names
    finally:
        for name in names:
            _remove(name)


def _remove(name: str) -> None:
    """Remove one, with its end of the link; the last process that is on it takes it along."""
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _remove_of_others() -> None:
    for path in _FOLDER.glob(f"{_PREFIX}*") if _FOLDER.is_dir() else ():
        owner = path.name.removeprefix(_PREFIX).split("-")[0]
        if not Path("/proc", owner).exists():
            _remove(path.name)


def enter(name: str) -> None:
    """Put this thread, and what it starts from now on, on a node: call it first, while there is one thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    place = os.open(_FOLDER / name, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(place, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {name}")
    finally:
        os.close(place)


def environment(rank: int, per_node: int) -> dict[str, str]:
    """What torchrun would set on two nodes, for a process that was started as one of several on one host."""
    return {
        "MASTER_ADDR": address(0),
        "GLOO_SOCKET_IFNAME": LINK,
        "LOCAL_RANK": str(rank % per_node),
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": str(rank // per_node),
        "GROUP_WORLD_SIZE": "2",
    }


def sent_bytes() -> int:
    """What the node that this process is on has sent over the link, counted by the kernel."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == LINK:
            return int(numbers.split()[8])
    raise TwoNodesError(f"this process is not on a node: it has no interface {LINK!r}.")
