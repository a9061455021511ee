"""How much memory the host, or the control group of this process, has left."""

from __future__ import annotations

from pathlib import Path


def free_host_memory() -> int | None:
    """Return the free bytes of the host, or of its control group if that has fewer. None: unknown."""
    limits = [_available_memory(), _left_in_control_group(Path("/sys/fs/cgroup"))]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _available_memory() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _left_in_control_group(folder: Path) -> int | None:
    try:
        most = (folder / "memory.max").read_text().strip()
        used = (folder / "memory.current").read_text().strip()
        return None if most == "max" else int(most) - int(used)
    except (OSError, ValueError):
        return None
