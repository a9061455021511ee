"""For every test: one compute thread, markers by folder, and nothing left behind in the process."""

from __future__ import annotations

import gc
import logging
import os
import sys
import threading
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
import pytest_timeout
from _pytest.logging import catching_logs
from hypothesis import settings

from tests import entry_points, limits, rank_pool
from tests.marks import DEFAULT, LEFT_OUT

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; parity tests compare bit for bit

os.environ["LS_STRATEGY_LEARN"] = "0"  # what a developer's machine has measured changes no plan of a test

settings.register_profile("loaded", deadline=None)  # how long one example takes says more of what else runs here
settings.load_profile("loaded")

NATIVE = "LS_TESTS_ON_NATIVE_DEVICE"
"""Variable: with 1, Trainers on several ranks run on the device and the transport of `tests.native_ranks`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--part``."""
    parser.addoption(
        "--part",
        default="1/1",
        help="K/N: run the K-th of N parts of the selected tests; a test stays in its part as long as it has its name",
    )


def pytest_configure() -> None:
    """Let limits know how busy the machine is, and replace `spawn` before a module of tests imports it."""
    limits.install()
    if "attached_loggers" in catching_logs.__slots__:
        catching_logs.__enter__ = _catch_logs  # type: ignore[method-assign]
    import ls_strategy.testing

    if "tests.frozen" not in ls_strategy.testing._PRELOAD:
        ls_strategy.testing._PRELOAD += ["tests.rank_pool", "tests.frozen"]
    if os.environ.get(NATIVE) == "1":
        from tests.native_ranks import spawn_natively

        ls_strategy.testing.spawn = spawn_natively
    else:
        ls_strategy.testing.spawn = rank_pool.spawn


def _catch_logs(self: Any) -> Any:
    """Catch logs at the root, and those of Lightning, which do not get there.

    Pytest itself goes through all loggers of the process, thousands, six times a test.
    """
    root = logging.getLogger()
    if self.level is not None:
        self.handler.setLevel(self.level)
        self.orig_level = root.level
        root.setLevel(min(self.orig_level, self.level))
    for logger in (root, *map(logging.getLogger, ("lightning.pytorch", "lightning.fabric"))):
        if logger is root or not logger.propagate:
            logger.addHandler(self.handler)
            self.attached_loggers.append(logger)
    return self.handler


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give a test that is marked so ranks of its own, and what is wide or slow: many of these change the process."""
    rank_pool.own = any(item.get_closest_marker(name) for name in ("own_ranks", "wide", "slow"))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """End the ranks; a worker of xdist sends what cases left behind to the process that prints."""
    rank_pool.close()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_behind"] = rank_pool.left_behind


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what cases of a worker left behind."""
    rank_pool.left_behind += getattr(node, "workeroutput", {}).get("left_behind", [])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say why ranks were not reused."""
    if rank_pool.left_behind:
        terminalreporter.section("left behind by cases, whose ranks were ended (restore it, or mark them own_ranks)")
        for line in rank_pool.left_behind:
            terminalreporter.write_line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: Any, settings: Any) -> bool | None:
    """Let pytest-timeout count by the clock of `limits`."""
    if settings.method != "thread":
        return None
    act = partial(pytest_timeout.timeout_timer, item, settings)
    item.cancel_timeout = limits.after(settings.timeout, act)
    return True


ROOT = Path(__file__).parent
OTHER_DEVICES = ("simulated_device", "gpu", "gpus")
"""Folders of tests whose ranks have another device: autograd counts devices once in a process."""

FOLDER_MARKERS = ("dist", "gpu", "gpus", "slurm")

# Set by Lightning and its launchers in the process that runs a Trainer, and by libraries when they are imported.
# Restored, and not counted as a leak.
EXPECTED_VARIABLES = {
    "CUBLAS_WORKSPACE_CONFIG",
    "LOCAL_RANK",
    "LS_STRATEGY_LAUNCHER",
    "LS_STRATEGY_LIGHTNING",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NODE_RANK",
    "PL_GLOBAL_SEED",
    "PL_SEED_WORKERS",
    "PYTEST_CURRENT_TEST",
    "PYTORCH_NVML_BASED_CUDA_CHECK",  # by the first import of Lightning
    "RAY_CLIENT_MODE",  # by the first import of ray
    "TORCHINDUCTOR_CACHE_DIR",
    "TF_CPP_MIN_LOG_LEVEL",
    "WORLD_SIZE",
}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What was imported and collected lasts until the end: the garbage collector never looks at it."""
    gc.disable()
    try:
        return (yield)
    finally:
        if "lightning.fabric" in sys.modules:
            entry_points.install()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests under ``tests/<marker>/`` carry that marker; GPU tests are skipped where there is no GPU."""
    names = {item: {mark.name for mark in item.iter_markers()} for item in items}
    _mark_all_but_samples(items, names)
    folders: dict[Path, str] = {}
    for item in items:
        if item.path not in folders:
            inside = ROOT in item.path.parents
            folders[item.path] = item.path.relative_to(ROOT).parts[0] if inside else ""
        folder = folders[item.path]
        if folder in FOLDER_MARKERS:
            item.add_marker(folder)
            names[item].add(folder)
        if folder in OTHER_DEVICES:
            item.add_marker("own_ranks")
        if folder and "gpu" in names[item] and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    config.stash[DEFAULT] = {item.nodeid: names[item].isdisjoint(LEFT_OUT) for item in items}
    _leave_other_parts(config, items)


def _leave_other_parts(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other parts than ``--part`` asks for."""
    part, parts = map(int, str(config.getoption("part")).split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--part={part}/{parts}: the first number is from 1 to the second")
    others = [item for item in items if crc32(item.nodeid.encode()) % parts != part - 1]
    if others:
        items[:] = [item for item in items if crc32(item.nodeid.encode()) % parts == part - 1]
        config.hook.pytest_deselected(items=others)


def _mark_all_but_samples(items: list[pytest.Item], names: dict[pytest.Item, set[str]]) -> None:
    """Mark ``sample(n)``: of a test's parameters, ``n`` at equal distances are in the default run, the rest is wide.

    Args:
        items: what was collected.
        names: of every item's marks; of those that become wide, this is added.
    """
    parameters = defaultdict(list)
    for item in items:
        if "sample" in names[item] and "slow" not in names[item]:
            parameters[item.nodeid.split("[")[0]].append(item)
    for same in parameters.values():
        mark = same[0].get_closest_marker("sample")
        assert mark is not None
        (count,) = mark.args
        chosen = {i * len(same) // count for i in range(count)}
        for i, item in enumerate(same):
            if i not in chosen:
                item.add_marker("wide")
                names[item].add("wide")


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True, scope="module")
def no_environment_of_another_module() -> Iterator[None]:
    """What a module's own fixtures set ends with it: PL_GLOBAL_SEED would shuffle the data of later tests."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def no_changed_environment() -> Iterator[None]:
    """A test gives back the environment it got."""
    before = dict(os.environ)
    yield
    after = dict(os.environ)
    if before == after:
        return
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    for name in changed - {"PYTEST_CURRENT_TEST"}:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    leaked = changed - EXPECTED_VARIABLES
    assert not leaked, f"environment variables changed and not restored: {sorted(leaked)}"


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    """A test ends the threads that would keep the process alive, and this package's own ones."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + limits.wall(2)
    while leaked := [t for t in threading.enumerate() if t not in before and _must_end(t)]:
        if time.monotonic() > deadline:
            raise AssertionError(f"threads still running: {[t.name for t in leaked]}")
        time.sleep(0.01)
        gc.collect()  # a Trainer and its model, whose states on a drive have threads, refer to each other


def _must_end(thread: threading.Thread) -> bool:
    if thread.name.startswith("pytest_timeout"):
        return False
    return not thread.daemon or thread.name.startswith("ls_")


@pytest.fixture(autouse=True)
def no_process_group_left() -> Iterator[None]:
    """A test starts without a process group. Lightning keeps a Trainer's until the process ends, so end it here."""
    yield
    if _has_process_group():
        sys.modules["torch.distributed"].destroy_process_group()


def _has_process_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and dist.is_available() and dist.is_initialized()
