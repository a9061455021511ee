"""Run a function on several ranks of one host, from a test.

The one invariant: `spawn` returns every rank's result or raises, within ``timeout_s``, and leaves no rank running.

    parent ── start ──> rank 0 ─ fn(0, 2, ...) ─ report ─┐
       │                                                 ├─ all in: "end" ──> os._exit(0) on every rank
       └───── start ──> rank 1 ─ fn(1, 2, ...) ─ report ─┘
                                              └─ error, death or timeout: every rank is killed, the parent raises

Ranks are forked from a server process that has already imported torch and Lightning, so two of them start in well
under a second. As with every start method other than ``fork``, a script that calls `spawn` needs the
``if __name__ == "__main__":`` guard. Unix only.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from ls_strategy.distributed.launch.rendezvous import free_port

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from multiprocessing.context import ForkServerContext, ForkServerProcess

__all__ = ["RankDiedError", "RankTimeoutError", "RankTraceback", "free_port", "spawn", "torchrun_env"]

T = TypeVar("T")

_PRELOAD = ["torch", "torch.distributed", "lightning.pytorch", "ls_strategy.lightning.strategy", "pytest", "hypothesis"]
"""What nearly every module of tests imports, once and not on every rank: pytest alone takes 0.4 s. Absent ones are
skipped."""

_KILL_GRACE_S = 10.0
_DEATH_GRACE_S = 0.5  # a peer of a rank that died may report its broken connection before the death itself is seen
_STACK_LEAD_S = 0.5  # ranks write where they stand this long before the deadline


clock: Callable[[], float] = time.monotonic
"""What ``timeout_s`` is measured by. This project's own tests put one here that goes more slowly on a busy machine."""


class RankTraceback(Exception):  # noqa: N818  (it is the cause of an error, not one itself)
    """The cause of an exception that `spawn` re-raises: the rank that raised it, and its traceback."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f'rank {rank} raised:\n"""\n{text}"""')
        self.rank = rank
        self.text = text


class RankDiedError(RuntimeError):
    """A rank ended without a report: it was killed, aborted, or called ``os._exit``."""


class RankTimeoutError(TimeoutError):
    """Some ranks (``missing``) did not report in time; the message shows the stack of each."""

    def __init__(self, message: str, missing: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.missing = list(missing)


# More than 60 lines because of its docstring: this is what users' tests call.
def spawn(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout_s: float = 120,
    env: Mapping[str, str | None] | None = None,
    init_process_group: bool = True,
) -> list[T]:
    """Call ``fn(rank, world_size, *args)`` on ``world_size`` ranks and return their results in rank order.

    Every rank is a process with one compute thread and the environment that ``torchrun`` would set (`torchrun_env`).
    Arguments and results, tensors included, are pickled. When ``fn`` has returned on every rank, the ranks end with
    ``os._exit``: their ``atexit`` handlers do not run.

    A Lightning ``Trainer`` inside ``fn`` takes the environment for torchrun's and starts no processes; pass
    ``init_process_group=False`` to leave the process group to it:

        def fit(rank, world_size, strategy):
            Trainer(accelerator="cpu", devices=world_size, strategy=strategy, max_steps=4).fit(model := BoringModel())
            return {name: p.detach().clone() for name, p in model.named_parameters()}

        first, second = spawn(fit, 2, "zero2", init_process_group=False)

    Args:
        fn: importable by name (a top-level function of a module).
        world_size: number of ranks.
        *args: passed to ``fn``, picklable.
        timeout_s: for everything, process start included. After it all ranks are killed: a hang is a failure.
        env: variables on top of the parent's environment, on every rank; None removes a variable.
        init_process_group: initialise a gloo group of all ranks before ``fn`` is called.

    Raises:
        Exception: what ``fn`` raised on the first rank that failed; ``__cause__`` is a `RankTraceback`.
        RankDiedError: a rank ended without a report, or its exception or result cannot be pickled.
        RankTimeoutError: ``timeout_s`` is over.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size}: at least one rank is needed")
    task = pickle.dumps((fn, args))  # plain pickle: copies tensors, where multiprocessing's would share memory
    deadline = clock() + timeout_s
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)  # no effect on a server that already runs
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ls_strategy_spawn_") as scratch:
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                variables = _rank_environment(rank, world_size, port, env or {})
                stack_at = time.monotonic() + deadline - clock() - _STACK_LEAD_S
                setup = _Setup(rank, world_size, variables, scratch, timeout_s, stack_at, init_process_group)
                ranks.append(_start(context, setup, task))
            results = _collect(ranks, deadline, timeout_s, Path(scratch))
            _end(ranks)
            return cast("list[T]", results)
        finally:
            for each in ranks:
                each.kill()
                each.connection.close()


def _start(context: ForkServerContext, setup: _Setup, task: bytes) -> _Rank:
    parent_end, child_end = context.Pipe()
    process = context.Process(target=_rank_main, args=(setup, child_end, task), name=f"rank{setup.rank}")
    process.start()
    child_end.close()
    return _Rank(setup.rank, process, cast("Connection", parent_end))


def _end(ranks: Sequence[_Rank]) -> None:
    """Let ranks that have reported end."""
    for each in ranks:
        with contextlib.suppress(OSError):  # it died after its report, which is here
            each.connection.send_bytes(b"end")
    for each in ranks:
        each.process.join(_KILL_GRACE_S)


def torchrun_env(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables that ``torchrun`` sets for ``rank`` of ``world_size`` ranks on one host."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"ls_strategy_{port}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


# --- parent ---------------------------------------------------------------------------------------------------------


@dataclass
class _RankReport:
    """Result that a rank sends when ``fn`` has ended. ``value`` is a pickle, empty if nothing could be pickled."""

    at: float
    ok: bool
    value: bytes
    text: str


@dataclass
class _Rank:
    """The parent's view of one rank."""

    rank: int
    process: ForkServerProcess
    connection: Connection

    def receive(self) -> _RankReport | None:
        """Return the report, None if the rank closed its end without one."""
        try:
            return pickle.loads(self.connection.recv_bytes())  # from our own child
        except (EOFError, OSError):
            return None

    def kill(self) -> None:
        """Kill the process and the processes it started, if it still runs."""
        pid = self.process.pid
        if pid is None or not self.process.is_alive():
            return
        try:
            os.killpg(pid, signal.SIGKILL)  # the rank leads its own process group
        except (ProcessLookupError, PermissionError):  # it has not created the group yet
            self.process.kill()
        self.process.join(_KILL_GRACE_S)


def _collect(ranks: list[_Rank], deadline: float, timeout_s: float, scratch: Path) -> list[object]:
    """Wait for every rank's report; raise for the first rank that failed."""
    results: dict[int, object] = {}
    failed: list[tuple[_Rank, _RankReport]] = []
    waiting = {each.connection: each for each in ranks}
    until = deadline
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), max(0.0, until - clock()))
        if not ready and clock() < until:
            continue
        if failed and not ready:
            break
        if not ready:
            _raise_timeout(list(waiting.values()), timeout_s, scratch)
        died: list[_Rank] = []
        for connection in ready:
            each = waiting.pop(cast("Connection", connection))
            report = each.receive()
            if report is None:
                died.append(each)
            elif report.ok:
                results[each.rank] = pickle.loads(report.value)
            else:
                failed.append((each, report))
        if died:  # before errors: the death of a peer makes the others fail
            _raise_death(died[0])
        until = clock() + _DEATH_GRACE_S if failed else deadline
    if failed:
        _raise_failure(*min(failed, key=lambda pair: pair[1].at))
    return [results[rank] for rank in range(len(ranks))]


def _raise_failure(each: _Rank, report: _RankReport) -> None:
    cause = RankTraceback(each.rank, report.text)
    try:
        error = pickle.loads(report.value)
    except Exception:
        error = None
    if not isinstance(error, Exception):  # SystemExit and KeyboardInterrupt must not end the caller
        last_line = report.text.strip().rsplit("\n", 1)[-1]
        error = RankDiedError(f"rank {each.rank} failed: {last_line}")
    raise error from cause


def _raise_death(each: _Rank) -> None:
    each.process.join(_KILL_GRACE_S)
    code = each.process.exitcode
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = f"signal {-code} ({signal.Signals(-code).name})"
    raise RankDiedError(f"rank {each.rank} ended with {how} and without a report")


def _raise_timeout(missing: list[_Rank], timeout_s: float, scratch: Path) -> None:
    lines = [f"no report within {timeout_s:g} s from rank(s) {', '.join(str(each.rank) for each in missing)}"]
    for each in missing:
        path = scratch / f"stack{each.rank}"
        stack = path.read_text(errors="replace").rpartition("Timeout (")[2].strip() if path.exists() else ""
        lines.append(f"--- rank {each.rank} stood at:\n{stack or '(no stack: still starting)'}")
    raise RankTimeoutError("\n".join(lines), [each.rank for each in missing])


def _rank_environment(rank: int, world_size: int, port: int, extra: Mapping[str, str | None]) -> dict[str, str]:
    """Return the parent's environment with torchrun's variables, one thread and gloo on loopback, then ``extra``."""
    environment = {**os.environ, **torchrun_env(rank, world_size, port), "OMP_NUM_THREADS": "1"}
    if "lo" in {name for _, name in socket.if_nameindex()}:
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name, value in extra.items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


# --- rank -----------------------------------------------------------------------------------------------------------


@dataclass
class _Setup:
    """Settings that a rank needs before it can unpickle its task."""

    rank: int
    world_size: int
    env: dict[str, str]
    scratch: str
    timeout_s: float
    stack_at: float
    """By ``time.monotonic``, which all processes of a host share: a rank may start late."""
    init_process_group: bool


def _rank_main(setup: _Setup, connection: Connection, task: bytes) -> None:
    """Run the task, report, wait for the parent, and exit."""
    os.setsid()  # one process group per rank: the parent can kill it together with its data loader workers
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    stack_file = (Path(setup.scratch) / f"stack{setup.rank}").open("w")
    # By a timer and not by a signal: Lightning resets signal handlers at the end of every fit.
    faulthandler.dump_traceback_later(max(setup.stack_at - time.monotonic(), 0.1), repeat=True, file=stack_file)
    # The server's environment dates from its start; use the parent's current one.
    os.environ.clear()
    os.environ.update(setup.env)
    tempfile.tempdir = None  # the server's, which TMPDIR of the parent does not change any more
    report = _run(setup, task)
    with contextlib.suppress(OSError, EOFError):  # the parent is gone
        connection.send_bytes(pickle.dumps(report))
        # Wait for all ranks: a rank that exits closes connections that its peers may still read from.
        connection.recv_bytes()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)  # gloo's threads sometimes abort the process in a regular interpreter exit


def _run(setup: _Setup, task: bytes) -> _RankReport:
    try:
        import torch

        # As in a program that was started alone: a rank that a fork server has made would start the workers of its data
        # loaders by another one, each with imports of its own.
        multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]
        torch.set_num_threads(1)
        if setup.init_process_group:
            from torch import distributed as dist

            dist.init_process_group(
                "gloo",
                init_method=f"file://{setup.scratch}/store",
                rank=setup.rank,
                world_size=setup.world_size,
                timeout=datetime.timedelta(seconds=20 * setup.timeout_s),  # the parent ends what hangs, by its clock
            )
        fn, args = pickle.loads(task)  # from our own parent
        value = pickle.dumps(fn(setup.rank, setup.world_size, *args))
        return _RankReport(at=time.monotonic(), ok=True, value=value, text="")
    except BaseException as error:
        at = time.monotonic()
        text = traceback.format_exc()
        try:
            value = pickle.dumps(error)
        except Exception:
            value = b""
        return _RankReport(at=at, ok=False, value=value, text=text)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
