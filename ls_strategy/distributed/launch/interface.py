"""The network interface of gloo between nodes, where its default reaches this host only. Standard library only.

Without ``GLOO_SOCKET_IFNAME`` gloo listens on the address of the host's name (torch, ``ProcessGroupGloo``). Debian and
Ubuntu map the name to 127.0.1.1, and many containers to nothing. Then ranks on other nodes cannot connect: rank 0 fails
after its timeout, and the others wait on. NCCL looks for an interface itself, but its control groups are of gloo.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
import struct
import sys
from collections.abc import MutableMapping
from pathlib import Path

_log = logging.getLogger(__name__)

VARIABLE = "GLOO_SOCKET_IFNAME"

_OUTSIDE = "192.0.2.1"
"""An address of no host (RFC 5737): the way to it is the default one. Nothing is sent."""

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface, see netdevice(7)."""


def choose(environ: MutableMapping[str, str], main_address: str) -> None:
    """Set `VARIABLE` to the interface that leads to the main node, if it is needed. Not collective.

    Args:
        environ: of this process, which is one of several nodes.
        main_address: of rank 0's node, as all ranks know it.
    """
    if environ.get(VARIABLE) or sys.platform != "linux":
        return
    own = _first_address(socket.gethostname())
    if own is not None and not _is_loopback(own):
        return
    main = _first_address(main_address)
    if main_address == "localhost" or (_is_number(main_address) and _is_loopback(main_address)):
        return  # all "nodes" are this host
    for address in (main, _OUTSIDE):  # on its own node, a name of the main node may be a loopback address
        source = None if address is None else _source_towards(address)
        name = None if source is None or _is_loopback(source) else _interface_with(source)
        if name is not None:
            environ[VARIABLE] = name
            return
    _log.warning(
        "the name of this host, %s, is %s, where ranks of other nodes cannot reach it, and no interface leads to %s. "
        "Set %s on every node to the interface between them.",
        socket.gethostname(), own or "no address", main_address, VARIABLE,
    )  # fmt: skip


def _first_address(name: str) -> str | None:
    """Return the first address of a host, which gloo takes; None if the name is not known."""
    try:
        return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _source_towards(address: str) -> str | None:
    """Return this host's address on the way to another one; None if there is no way. Nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))
            return str(probe.getsockname()[0])
    except OSError:  # also where the kernel has no IPv6
        return None


def _interface_with(address: str) -> str | None:
    """Return the name of the interface that has an address."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.version == 6:
        known = Path("/proc/net/if_inet6")
        for line in known.read_text().splitlines() if known.is_file() else ():
            digits, *_, name = line.split()
            if int(digits, 16) == int(wanted):
                return name
        return None
    import fcntl  # there is none on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an address
            if found[20:24] == wanted.packed:
                return name
    return None
