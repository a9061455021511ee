"""A hub for the page on islands, in the process of rank 0, so that its program has one to connect to."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from ls_strategy.extras.islands.hub import Hub
from ls_strategy.extras.islands.server import HubServer


def address() -> str:
    """Return where it listens. Rank 0 starts it, and tells the others through a file of the working folder."""
    file = Path("hub_address")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        server = HubServer(Hub(1, 60.0), host="127.0.0.1", port=0, secret="")
        threading.Thread(target=server.serve, daemon=True).start()
        (new := file.with_suffix(".new")).write_text(f"127.0.0.1:{server.port}")
        new.rename(file)
    end = time.monotonic() + 60.0
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.05)
    return file.read_text()
