"""What tests ask the system about processes."""

from __future__ import annotations

from pathlib import Path


def is_running(pid: int | str) -> bool:
    """Whether a process is there, and has not ended as a zombie."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def anonymous_bytes() -> int:
    """This process' memory that is no file."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0
