"""Rank processes that are reused: `spawn` for this project's own tests.

A worker of pytest keeps the ranks that a case has left clean, and sends the next case to them as a message. Each case
gets a new process group, the environment, folder and path of the test, and the random state of a process that has just
started. What a case leaves behind (a replaced function, a thread, a default of torch) is found by comparing the process
with what it was before; such ranks are ended, and so are those of a case that failed or hung, since nobody knows what
it was doing. `left_behind` says which case left what.

    worker ── case ──> rank 0 ─ fn(0, 2, ...) ─ report ─┐
       │                                                ├─ all in: "end" ──> clean up, compare ── left behind ──> worker
       └──── case ──> rank 1 ─ fn(1, 2, ...) ─ report ──┘

A case gets processes of its own, from `ls_strategy.testing.spawn`, if it is wide or slow, if it is marked ``own_ranks``
(it measures or kills the process, or needs that nothing was imported or compiled before), or if it asks for variables
that are read when a process starts.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import logging
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast

from ls_strategy import testing
from ls_strategy.distributed.launch.rendezvous import free_port
from ls_strategy.testing import spawn as spawn_processes
from tests import limits

T = TypeVar("T")

MOST_CASES = 100
"""A rank is replaced after so many cases, so that memory which torch and Python keep does not add up."""

THREADS_S = 2.0
"""So long a rank waits for the end of threads of a case."""

LEAST_S = 150.0
"""A limit of half a minute or more is at least so long: what ends in seconds on a machine that has its files in memory
may take over a minute where transformers comes from a cold disk. Below pytest's own limit."""

_CLEAN_S = 20.0

_WATCHED = ("ls_strategy", "lightning.pytorch", "lightning.fabric", "torch.distributed", "torch.optim", "torch.utils")
"""Packages in whose modules and classes replaced attributes are looked for."""

_WATCHED_TOO = (
    "builtins", "io", "multiprocessing", "os", "pathlib", "pickle", "random", "shutil", "signal", "socket",
    "subprocess", "tempfile", "threading", "time", "torch", "torch.autograd", "torch.autograd.graph", "torch.cuda",
    "torch.nn.functional", "torch.nn.modules.module", "torch.serialization", "torch._tensor",
)  # fmt: skip

_EXPECTED = {
    "lightning.fabric.loggers.logger._DummyExperiment.__getattr__",
    "lightning.fabric.wrappers._FabricModule.zero_grad",
    "torch.nn.functional.scaled_dot_product_attention",
}
"""What the strategy itself replaces for as long as the process lasts, or, with attention, as long as it has the model;
`_Process.restore` undoes the latter."""

left_behind: list[str] = []
"""What cases of this worker left behind, a sentence each."""

own = False
"""Whether the test that runs now gets processes of its own; set by `conftest`."""


def spawn(
    fn: Callable[..., T],
    world_size: int,
    *args: object,
    timeout_s: float = 120,
    env: dict[str, str | None] | None = None,
    init_process_group: bool = True,
) -> list[T]:
    """Do what `ls_strategy.testing.spawn` does, on ranks that may have run other cases before."""
    if timeout_s >= 30:
        timeout_s = max(timeout_s, LEAST_S)
    if own or env or world_size < 1:
        return spawn_processes(
            fn, world_size, *args, timeout_s=timeout_s, env=env, init_process_group=init_process_group
        )
    task = pickle.dumps((fn, args))
    deadline = testing.clock() + timeout_s
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ls_strategy_spawn_") as scratch, _pool.lend(world_size) as ranks:
        for number, each in enumerate(ranks):
            each.rank = number
            setup = testing._Setup(
                rank=number,
                world_size=world_size,
                env=testing._rank_environment(number, world_size, port, {}),
                scratch=scratch,
                timeout_s=timeout_s,
                stack_at=time.monotonic() + deadline - testing.clock() - testing._STACK_LEAD_S,
                init_process_group=init_process_group,
            )
            each.connection.send_bytes(pickle.dumps(_Case(setup, task, str(Path.cwd()), list(sys.path))))
        return cast("list[T]", testing._collect(ranks, deadline, timeout_s, Path(scratch)))


@dataclass
class _Case:
    setup: testing._Setup
    task: bytes
    folder: str
    path: list[str]


# --- worker -----------------------------------------------------------------------------------------------------------


class _Pool:
    """The ranks that this process has started and not ended."""

    def __init__(self) -> None:
        self._resting: list[tuple[testing._Rank, str]] = []
        """With the case that each ran last; it may still clean up."""
        self._cases: dict[int, int] = {}
        self._owner = os.getpid()

    @contextlib.contextmanager
    def lend(self, count: int) -> Iterator[list[testing._Rank]]:
        """Give ``count`` ranks for one case; those it leaves clean are given to later ones."""
        if self._owner != os.getpid():  # a fork of the process that started them
            self.__init__()  # type: ignore[misc]
        ranks = list(self._rested(count))
        ranks += [self._start() for _ in range(count - len(ranks))]
        case, ended = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0], False
        try:
            yield ranks
            ended = True
        finally:
            for each in ranks:
                with contextlib.suppress(OSError):
                    if ended:
                        each.connection.send_bytes(b"end")
                        self._resting.append((each, case))
                        continue
                self._drop(each)

    def _rested(self, most: int) -> Iterator[testing._Rank]:
        """Yield up to ``most`` ranks that are as they were when they started."""
        while self._resting and most:
            each, case = self._resting.pop(0)
            left = [f"it does not end within {_CLEAN_S:g} s"]
            with contextlib.suppress(EOFError, OSError):
                if each.connection.poll(_CLEAN_S):
                    left = pickle.loads(each.connection.recv_bytes())  # from our own child
            pid = each.process.pid or 0
            self._cases[pid] = self._cases.get(pid, 0) + 1
            left_behind.extend(f"{case}, rank {each.rank}: {what}" for what in left)
            if left or self._cases[pid] >= MOST_CASES:
                self._drop(each)
            else:
                most -= 1
                yield each

    def _start(self) -> testing._Rank:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(testing._PRELOAD)  # no effect on a server that already runs
        parent_end, child_end = context.Pipe()
        process = context.Process(target=_serve, args=(child_end,), name="reused_rank")
        process.start()
        child_end.close()
        return testing._Rank(0, process, cast("Connection", parent_end))

    def _drop(self, each: testing._Rank) -> None:
        each.kill()
        each.connection.close()

    def close(self) -> None:
        """End all ranks."""
        if self._owner == os.getpid():
            while self._resting:
                self._drop(self._resting.pop()[0])


_pool = _Pool()
close = _pool.close
atexit.register(close)


# --- rank -------------------------------------------------------------------------------------------------------------


def _serve(connection: Connection) -> None:
    """Run cases until the worker ends."""
    os.setsid()
    threading.Thread(target=testing._end_with_parent, name="parent-watch", daemon=True).start()
    gc.collect()
    gc.freeze()  # what was imported is not looked at again by every collection
    before = _Process()
    while True:
        try:
            case: _Case = pickle.loads(connection.recv_bytes())  # from our own parent
        except (EOFError, OSError):
            os._exit(0)
        with (Path(case.setup.scratch) / f"stack{case.setup.rank}").open("w") as stack_file:
            stack_after_s = max(case.setup.stack_at - time.monotonic(), 0.1)
            faulthandler.dump_traceback_later(stack_after_s, repeat=True, file=stack_file)
            os.environ.clear()
            os.environ.update(case.setup.env)
            os.chdir(case.folder)
            sys.path[:] = case.path
            tempfile.tempdir = None
            before.restore()
            report = testing._run(case.setup, case.task)
            try:
                connection.send_bytes(pickle.dumps(report))
                connection.recv_bytes()  # all ranks have reported
            except (EOFError, OSError):
                os._exit(0)
            faulthandler.cancel_dump_traceback_later()
        del report
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        left = _clean_up() or before.left_behind()
        connection.send_bytes(pickle.dumps(left))


def _clean_up() -> list[str]:
    """End the process group of a case; return what cannot be undone."""
    import torch.distributed as dist

    multiprocessing.set_start_method("forkserver", force=True)
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()
    deadline = time.monotonic() + limits.wall(THREADS_S)
    while threads := [t.name for t in threading.enumerate() if t is not threading.main_thread() and _must_end(t)]:
        if time.monotonic() > deadline:
            return [f"threads {threads}"]
        time.sleep(0.005)
    if children := multiprocessing.active_children():
        return [f"processes {[child.name for child in children]}"]
    return []


def _must_end(thread: threading.Thread) -> bool:
    return thread.name not in ("parent-watch", "tqdm_monitor")  # tqdm keeps its own for all later bars


class _Process:
    """What a case may change in a process, as it is at one moment."""

    def __init__(self) -> None:
        import numpy
        import torch

        self.random = (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
        self.attention = torch.nn.functional.scaled_dot_product_attention
        self.warnings = list(warnings.filters)
        self.settings = _settings()
        self.owners: dict[str, _Owner] = {}
        self.look_for_new()

    def restore(self) -> None:
        """Put back the random state, the filters of warnings and attention without sequence parallelism."""
        import numpy
        import torch

        random.setstate(self.random[0])
        numpy.random.set_state(self.random[1])
        torch.set_rng_state(self.random[2])
        torch.nn.functional.scaled_dot_product_attention = self.attention
        warnings.filters[:] = self.warnings  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]

    def left_behind(self) -> list[str]:
        """Return what differs now, and take over what has been imported since."""
        settings = _settings()
        left = [
            f"{name} is {settings[name]!r}, was {value!r}"
            for name, value in self.settings.items()
            if settings[name] != value
        ]
        for name, owner in self.owners.items():
            left += [f"{name}.{what}" for what in owner.changes(name)]
        self.look_for_new()
        return left

    def look_for_new(self) -> None:
        """Look at modules, classes and attributes that are not known yet. There are few of them after a case."""
        for name, module in list(sys.modules.items()):
            if module is None or not (name.startswith(_WATCHED) or name in _WATCHED_TOO):
                continue
            for value in self._owner(name, module).new_attributes():
                if _is_class(value) and value.__module__ == name:
                    self._owner(f"{name}.{value.__qualname__}", value).new_attributes()

    def _owner(self, name: str, owner: Any) -> _Owner:
        if name not in self.owners:
            self.owners[name] = _Owner(owner)
        return self.owners[name]


class _Owner:
    """A module or a class, and its functions and classes in whose place a case may have put others."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.size = -1
        """Of the namespace when it was looked at."""
        self.known: dict[str, Any] = {}

    def changes(self, name: str) -> list[str]:
        """Return what is another or gone, and take it over."""
        namespace, changes = vars(self.owner), []
        if isinstance(self.owner, types.ModuleType) and sys.modules.get(name, self.owner) is not self.owner:
            changes.append("* is another: the module was imported again")
        for each in [each for each, value in self.known.items() if namespace.get(each) is not value]:
            if each not in namespace:
                changes.append(f"{each} is gone")
                del self.known[each]
                continue
            value = self.known[each] = namespace[each]
            # torch wraps `step` with the first optimizer
            if f"{name}.{each}" not in _EXPECTED and not getattr(value, "hooked", False):
                changes.append(f"{each} is another")
        return changes

    def new_attributes(self) -> list[Any]:
        """Return functions and classes that have come since the last call, if the namespace has grown."""
        namespace = vars(self.owner)
        if len(namespace) == self.size:
            return []
        self.size, is_module = len(namespace), isinstance(self.owner, types.ModuleType)
        new = {
            k: v
            for k, v in list(namespace.items())
            if k not in self.known and (type(v) in _CODE or (is_module and (_is_class(v) or k.isupper())))
        }
        self.known |= new
        return list(new.values())


def _settings() -> dict[str, Any]:
    """Return defaults of torch and Python that code may set for the whole process."""
    import torch
    from torch.nn.modules import module
    from torch.utils._python_dispatch import _len_torch_dispatch_stack

    hooks = [name for name in vars(module) if name.startswith("_global_") and len(getattr(module, name) or ()) > 0]
    return {
        "dtype": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "grad mode": torch.is_grad_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "matmul precision": torch.get_float32_matmul_precision(),
        "modes": _len_torch_dispatch_stack(),
        "hooks of all modules": hooks,
        "level of logging": (logging.root.level, logging.root.disabled, logging.root.manager.disable),
        "signals": [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)],
        "trace": (sys.gettrace(), threading.gettrace()),
        "garbage collection": gc.isenabled(),
    }


def _is_class(value: Any) -> bool:
    return issubclass(type(value), type)  # isinstance would ask objects that warn when they are asked


_CODE = {types.FunctionType, types.BuiltinFunctionType, types.MethodType, staticmethod, classmethod, property}
