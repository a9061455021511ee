"""The interface that gloo gets between nodes: where the name of the host leads nowhere, and none that was not asked."""

from __future__ import annotations

import logging
import socket
import sys
from typing import Any

import pytest

from ls_strategy.distributed.launch import interface
from ls_strategy.distributed.launch.interface import VARIABLE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is chosen")

NAME = "this-host"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Addresses by name, and sources by the address that they lead to; this machine's own ones are not asked."""
    known: dict[str, str] = {}

    def resolve(name: str, *_args: Any, **_options: Any) -> list[Any]:
        address = known.get(name, name)
        if not interface._is_number(address):
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))]

    monkeypatch.setattr(socket, "gethostname", lambda: NAME)
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(interface, "_source_towards", lambda address: known.get(f"to {address}"))
    monkeypatch.setattr(interface, "_interface_with", {"10.0.0.5": "eth0", "172.17.0.1": "docker0"}.get)
    return known


def chosen(main: str, **environ: str) -> str | None:
    interface.choose(environ, main)
    return environ.get(VARIABLE)


@pytest.mark.parametrize("own", [{NAME: "127.0.1.1"}, {NAME: "::1"}, {}], ids=str)
def test_it_is_the_one_that_leads_to_the_main_node(names: dict[str, str], own: dict[str, str]) -> None:
    names |= {**own, "to 10.0.0.4": "10.0.0.5", f"to {interface._OUTSIDE}": "172.17.0.1", "main": "10.0.0.4"}
    assert chosen("10.0.0.4") == chosen("main") == "eth0"


def test_on_the_main_node_a_name_may_lead_nowhere(names: dict[str, str]) -> None:
    """Debian's own name is a loopback address there, while the other nodes know the real one."""
    names |= {NAME: "127.0.1.1", "to 127.0.1.1": "127.0.0.1", f"to {interface._OUTSIDE}": "10.0.0.5"}
    assert chosen(NAME) == "eth0"


def test_what_is_set_and_what_works_stays(names: dict[str, str]) -> None:
    names |= {NAME: "127.0.1.1", "to 10.0.0.4": "10.0.0.5"}
    assert chosen("10.0.0.4", **{VARIABLE: "ib0"}) == "ib0"
    assert chosen("127.0.0.1") is chosen("localhost") is None, "all ranks are on this host"
    names[NAME] = "10.0.0.5"
    assert chosen("10.0.0.4") is None


def test_without_any_the_log_says_what_to_set(names: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    names[NAME] = "127.0.1.1"
    with caplog.at_level(logging.WARNING):
        assert chosen("10.0.0.4") is None
    assert "127.0.1.1" in caplog.text
    assert f"Set {VARIABLE} on every node" in caplog.text


def test_the_addresses_of_this_machine() -> None:
    assert interface._source_towards("127.0.0.1") == "127.0.0.1"
    assert interface._interface_with("127.0.0.1") == "lo"
    assert interface._interface_with("203.0.113.7") is interface._interface_with("2001:db8::7") is None
