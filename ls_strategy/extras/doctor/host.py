"""Check the host: processors, memory, limits of this process, and the host name."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from ls_strategy.extras.doctor.finding import Finding, note_if

CGROUP = Path("/sys/fs/cgroup")
OPEN_FILES = 4096  # loaders with many workers share tensors through open files, and connections need more
SHARED_MEMORY = 1 << 30  # bytes that loaders with several workers and NCCL need. Containers have 64 MiB by default.
_MIB = 1 << 20
_GIB = 1 << 30


def host() -> Iterator[Finding]:
    """Run all checks of the host."""
    yield from processors()
    yield from memory()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield open_files(soft, hard)
    yield shared_memory(Path("/dev/shm"))
    yield name_resolves(socket.gethostname())


def processors() -> Iterator[Finding]:
    """Report the cores that this process may use, their instruction set, and torch's threads."""
    import torch

    from ls_strategy.tiers.threads import cpu_quota, usable_cores

    cores, quota, usable = len(os.sched_getaffinity(0)), cpu_quota(CGROUP), usable_cores()
    limited = "" if quota is None else f", {quota:g} by the control group"
    system = f"{_cpu_name()}, {platform.machine()}"
    yield Finding("cpu", f"{system}; {os.cpu_count()} cores, {cores} for this process{limited}")
    yield Finding("instructions", f"torch uses {torch.backends.cpu.get_cpu_capability()}")
    yield threads(torch.get_num_threads(), usable)


def threads(count: int, usable: float) -> Finding:
    """Compare torch's threads per process with the cores that it may use."""
    value = f"{count} per process (OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')})"
    value += f", more than {usable:g} cores" if count > usable else ""
    cure = f"Set OMP_NUM_THREADS to {usable:g} divided by the ranks on this host."
    return note_if(count > usable, "threads", value, cure)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"


def memory() -> Iterator[Finding]:
    """Report the host's memory and what this process may still use."""
    from ls_strategy.extras.planner.sizes import show_bytes
    from ls_strategy.host_memory import free_host_memory

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = cgroup_limit(CGROUP)
    limited = "" if limit is None else f", {show_bytes(limit)} for the control group"
    free = free_host_memory()
    value = f"{show_bytes(total)}{limited}, {'unknown' if free is None else show_bytes(free)} free"
    cure = "End other processes, or raise the limit (docker run --memory=..., sbatch --mem=...)."
    yield note_if(free is not None and free < _GIB, "memory", value, cure)


def cgroup_limit(folder: Path) -> int | None:
    """Return the bytes that the control group may use, or None without a limit."""
    try:
        most = (folder / "memory.max").read_text().strip()
        return None if most == "max" else int(most)
    except (OSError, ValueError):
        return None


def open_files(soft: int, hard: int) -> Finding:
    """Check how many files this process may have open."""
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        return Finding("open files", "unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    most = 65536 if hard == resource.RLIM_INFINITY else hard
    cure = f"`ulimit -n {most}` before the start" if most > soft else "Ask an administrator to raise it in limits.conf"
    return Finding("open files", f"{soft}, of at most {most}", "note", f"{cure}: loaders with workers need many.")


def shared_memory(folder: Path) -> Finding:
    """Check the space for tensors that processes of this host share."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        cure = "Mount it: mount -t tmpfs -o size=8g tmpfs /dev/shm. Loaders with workers fail without it."
        return Finding("shared memory", f"no {folder}: {error.strerror}", "problem", cure)
    value = f"{folder}: {usage.total / _MIB:.0f} MiB, {usage.free / _MIB:.0f} free"
    cure = "docker run --shm-size=8g (or --ipc=host), or mount -o remount,size=8g /dev/shm: loaders and NCCL need it."
    return note_if(usage.free < SHARED_MEMORY, "shared memory", value, cure)


def name_resolves(name: str) -> Finding:
    """Check that the host's name has an address: gloo and NCCL connect to it by default."""
    try:
        found = sorted({str(info[4][0]) for info in socket.getaddrinfo(name, None)})
    except OSError as error:
        cure = (
            f"Add `127.0.0.1 {name}` to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to an interface."
        )
        return Finding("host name", f"{name} does not resolve: {error}", "problem", cure)
    value = f"{name} is {', '.join(found)}"
    cure = (
        "This suffices for one node. For several, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface "
        "between them, or set the name's address in /etc/hosts."
    )
    return note_if(all(a.startswith("127.") or a == "::1" for a in found), "host name", value, cure)
