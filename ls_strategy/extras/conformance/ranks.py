"""One phase of a habit on its ranks: processes that are forked, watched, and gone at the end.

The one invariant: `run_phase` returns within the limit and leaves no process running.

    suite ── fork ──> rank 0 ─ code ─ report file ─ waits to be killed: peers may still need its sockets
       │
       └──── fork ──> rank 1 ─ code ─ error ─ report file ─ ends at once, as a program does that raises

A process that only imports torch and Lightning forks them, so a rank starts in a tenth of a second. Nobody tells a rank
that another one has failed: a launcher would, but a strategy that leaves its peers waiting should be seen.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ls_strategy.extras.conformance.case import Case, Notes
from ls_strategy.extras.conformance.habit import Phase
from ls_strategy.extras.conformance.habits import MODULES, all_habits
from ls_strategy.extras.conformance.specification import Specification

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess

_SLOWEST = 10.0
_KILLED_WAIT_S = 5.0
_STACK_S = 0.5


@dataclass
class Report:
    """How the code of a phase has ended on a rank."""

    notes: Notes
    at: float = 0.0  # seconds since the epoch
    error: str = ""  # type of the exception; empty if there was none
    message: str = ""


@dataclass
class Ending:
    """How a phase has ended."""

    reports: list[Report | None]  # by rank; None: the process ended, or was ended, without one
    exit_codes: list[int | None]
    hung: list[int] = field(default_factory=list)  # ranks that had not ended at the limit
    stood_at: str = ""  # where the first of these was
    said: str = ""  # what the ranks have written to their standard output and error


@dataclass(frozen=True)
class Job:
    """One phase of a habit under a strategy."""

    habit: str
    index: int
    ranks: int
    folder: Path
    specification: Specification | None
    accelerator: str
    limit_s: float  # on a machine that runs nothing else
    # Of processes that a rank starts itself, such as workers of loaders: the default, as in a program of its own.
    start_method: str
    one_process: bool = False  # the trusted run on one process, which has the rows of all ranks

    @property
    def phase(self) -> Phase:
        """Its description."""
        return all_habits()[self.habit].phases[self.index]

    @property
    def processes(self) -> int:
        """How many are started."""
        return 1 if self.one_process or self.phase.ranks == "one" else self.ranks

    def report(self, rank: int, index: int | None = None) -> Path:
        """Return the file of a rank's report."""
        return self.folder / f"phase{self.index if index is None else index}.rank{rank}.report"


class Clock:
    """Seconds, counted more slowly on a busy machine, so that waiting for a processor is not taken for a hang."""

    def __init__(self) -> None:
        self._at = time.monotonic()
        self._now = 0.0

    def __call__(self) -> float:
        """Return the seconds that a machine that runs nothing else would have had."""
        at = time.monotonic()
        slowness = min(max(os.getloadavg()[0] / len(os.sched_getaffinity(0)), 1.0), _SLOWEST)
        self._now += (at - self._at) / slowness
        self._at = at
        return self._now


def preload(modules: list[str]) -> None:
    """Have modules imported once, before the first rank is forked, and not by every rank."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__, *MODULES, *modules])


def run_phase(job: Job) -> Ending:
    """Start the ranks, wait for their reports, kill what is left."""
    context = multiprocessing.get_context("forkserver")
    job.folder.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    processes = [context.Process(target=run_rank, args=(job, rank, port)) for rank in range(job.processes)]
    hung: list[int] = []
    stood_at = ""
    try:
        for process in processes:
            process.start()
        hung = _wait(job, processes)
        stood_at = _stack(job, processes, hung[0]) if hung else ""
    finally:
        for process in processes:
            _kill(process)
    reports = [_read(job.report(rank)) for rank in range(job.processes)]
    said = "\n".join(_log(job, rank).read_text(errors="replace") for rank in range(job.processes))
    return Ending(reports, [process.exitcode for process in processes], hung, stood_at, said)


def _wait(job: Job, processes: list[ForkServerProcess]) -> list[int]:
    """Return the ranks that have neither reported nor ended at the limit."""
    clock = Clock()
    killer = None if job.phase.killed_rank is None or job.one_process else _Killer(job, processes)
    while True:
        left = [r for r, p in enumerate(processes) if p.is_alive() and not job.report(r).exists()]
        if not left or (killer is not None and killer.is_done()):
            return []
        if clock() > job.limit_s:
            return left
        if killer is not None:
            killer.look()
        time.sleep(0.0005 if killer is not None else 0.01)


class _Killer:
    """Kills a rank as soon as something under the habit's saves changes after it was armed."""

    def __init__(self, job: Job, processes: list[ForkServerProcess]) -> None:
        rank = job.phase.killed_rank
        assert rank is not None
        self.folder, self.victim = job.folder, processes[rank]
        self.seen: dict[str, tuple[int, int]] | None = None
        self.at: float | None = None

    def look(self) -> None:
        if self.at is not None or not (self.folder / "armed").exists():
            return
        now = self.listing()
        if self.seen is None:
            self.seen = now
        elif now != self.seen:
            os.kill(self.victim.pid or 0, signal.SIGKILL)
            self.at = time.monotonic()

    def is_done(self) -> bool:
        """Return whether the others have had time to end by themselves: a launcher would have ended them."""
        return self.at is not None and time.monotonic() > self.at + _KILLED_WAIT_S

    def listing(self) -> dict[str, tuple[int, int]]:
        found = {}
        for parent, _, files in os.walk(self.folder / "saves"):
            for name in files:
                path = os.path.join(parent, name)  # noqa: PTH118  (this loop is in a race)
                try:
                    status = os.stat(path)  # noqa: PTH116
                except FileNotFoundError:
                    continue
                found[path] = (status.st_size, status.st_mtime_ns)
        return found


def _kill(process: ForkServerProcess) -> None:
    """End a rank and what it has started."""
    if process.pid is None:
        return
    try:
        os.killpg(process.pid, signal.SIGKILL)  # the rank leads its own group
    except (ProcessLookupError, PermissionError):  # it has ended, or has not made the group yet
        process.kill()
    process.join(10.0)


def _stack(job: Job, processes: list[ForkServerProcess], rank: int) -> str:
    """Return where a rank stands: its innermost line of Python."""
    try:
        os.kill(processes[rank].pid or 0, signal.SIGUSR2)
    except ProcessLookupError:
        return ""
    time.sleep(_STACK_S)
    path = _log(job, rank)
    lines = path.read_text(errors="replace").splitlines() if path.exists() else []
    return next((line.strip() for line in lines if line.startswith("  File ")), "")


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _read(path: Path) -> Report | None:
    return torch.load(path, weights_only=False) if path.exists() else None  # written by our own ranks


def _log(job: Job, rank: int) -> Path:
    return job.folder / f"phase{job.index}.rank{rank}.log"


# --- in a rank --------------------------------------------------------------------------------------------------------


def run_rank(job: Job, rank: int, port: int) -> None:
    """Run the phase as one of its ranks. Does not return."""
    os.setpgid(0, 0)
    threading.Thread(target=_end_with_suite, daemon=True).start()
    log = _log(job, rank).open("w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.register(signal.SIGUSR2, file=log, all_threads=False)
    _set_environment(job, rank, port)
    multiprocessing.set_start_method(job.start_method, force=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    report = _report(job, rank)
    path = job.report(rank)
    torch.save(report, path.with_suffix(".partial"))
    path.with_suffix(".partial").rename(path)
    if report.error:
        os._exit(1)
    while True:  # until the suite has all reports, and ends this process
        time.sleep(60)


def _end_with_suite() -> None:
    """End this process as soon as the suite is gone, so that killing it leaves no ranks that hang."""
    suite = multiprocessing.parent_process()
    assert suite is not None
    suite.join()
    os._exit(1)


def _report(job: Job, rank: int) -> Report:
    phase = job.phase
    specification = {"own": job.specification, "ddp": Specification("ddp", "ddp"), "none": None}[phase.strategy]
    before = None if job.index == 0 else _read(job.report(rank, job.index - 1))
    case = Case(
        rank=rank,
        processes=job.processes,
        ranks=job.ranks,
        folder=job.folder,
        specification=None if job.one_process else specification,
        accelerator=job.accelerator,
        before=None if before is None else before.notes,
    )
    try:
        phase.code(case)
    except BaseException as error:  # KeyboardInterrupt and SystemExit too: Lightning raises them
        traceback.print_exc()
        return Report(case.made, time.time(), type(error).__name__, str(error))
    return Report(case.made, time.time())


def _set_environment(job: Job, rank: int, port: int) -> None:
    """As a launcher does where there are several ranks, and as a plain start is where there is one."""
    if "lo" in {name for _, name in socket.if_nameindex()}:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in _LAUNCHER:
        os.environ.pop(name, None)
    if job.one_process or job.phase.strategy == "none":
        return
    world = str(job.processes)
    values = (str(rank), str(rank), "0", world, world, "1", "127.0.0.1", str(port), f"conformance_{port}")
    os.environ.update(zip(_LAUNCHER, values, strict=True))


_LAUNCHER = ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR",
             "MASTER_PORT", "TORCHELASTIC_RUN_ID")  # fmt: skip
