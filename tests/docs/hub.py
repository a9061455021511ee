"""A hub for the page on islands, in this process, so that its program has one to connect to."""

from __future__ import annotations

import os
import threading

from ls_strategy.islands.hub import Hub, HubServer

_KEY = "LS_STRATEGY_TESTS_HUB"
"""The second rank inherits the first one's environment."""


def address() -> str:
    """Return where it listens; start it if no rank has."""
    if _KEY not in os.environ:
        server = HubServer(Hub(1, 60.0), host="127.0.0.1", port=0, secret="")
        threading.Thread(target=server.serve, daemon=True).start()
        os.environ[_KEY] = f"127.0.0.1:{server.port}"
    return os.environ[_KEY]
