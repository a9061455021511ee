"""The seam for devices: pinned memory whose errors do not appear elsewhere, and which transports are native."""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ls_strategy import _torch
from ls_strategy import device as dev
from ls_strategy.distributed.comm import Comm
from ls_strategy.tiers.buffers import PAGE, AlignedBuffer, BoundedPool
from ls_strategy.tiers.stock import BufferStock

REFUSED = 2
HOST = torch.device("cpu")


class Cuda:
    """The runtime's calls for pinned memory, and its last error, which the next kernel raises and clears."""

    def __init__(self) -> None:
        self.registered: set[int] = set()
        self.refuses = False
        self.last_error = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert nbytes % PAGE == flags == 0
        if self.refuses or address in self.registered:
            self.last_error = REFUSED
            return REFUSED
        self.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.registered:
            self.last_error = REFUSED
            return REFUSED
        self.registered.remove(address)
        return 0

    def launch(self) -> None:
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    monkeypatch.setattr(dev, "_cudart", lambda: fake)
    monkeypatch.setattr(dev, "_launch", fake.launch)
    return fake


def test_a_buffer_that_cannot_be_pinned_leaves_no_error_to_the_next_kernel(cuda, caplog) -> None:
    cuda.refuses = True
    buffer = AlignedBuffer(PAGE, pin=HOST)
    cuda.launch()
    assert f"error {REFUSED}" in caplog.text
    buffer.unpin()
    assert not cuda.last_error


def test_a_buffer_is_unpinned_with_its_end(cuda) -> None:
    buffer = AlignedBuffer(PAGE, pin=HOST)
    assert len(cuda.registered) == 1
    del buffer
    gc.collect()
    assert not cuda.registered
    assert not cuda.last_error


def test_a_thread_that_was_bound_to_no_device_pins_and_unpins_for_the_buffers_own(
    cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each rank of a node would make a context on the first GPU."""
    own, calls, selected = torch.device("cuda", 1), [], []

    @contextmanager
    def select(device: torch.device) -> Generator[None, None, None]:
        selected.append(device)
        yield
        selected.pop()

    def note(name: str, call: Any) -> Any:
        return lambda *args: (calls.append((name, *selected)), call(*args))[1]

    monkeypatch.setattr(dev, "selected", select)
    monkeypatch.setattr(dev, "synchronize", lambda device: calls.append(("synchronize", device)))
    for name in ("cudaHostRegister", "cudaHostUnregister"):
        monkeypatch.setattr(cuda, name, note(name, getattr(cuda, name)))

    def work() -> None:
        pool = BoundedPool(2, PAGE, pin=own)
        first, second = pool.take("a"), pool.take("b")
        pool.give(first)
        pool.close()
        pool.give(second)
        del pool, first, second
        AlignedBuffer(PAGE, pin=own)
        gc.collect()

    with ThreadPoolExecutor(1) as worker:
        worker.submit(work).result()
    register, unregister = ("cudaHostRegister", own), ("cudaHostUnregister", own)
    assert calls == [register, register, unregister, unregister, register, ("synchronize", own), unregister]
    assert not cuda.registered


def test_a_pool_that_closes_unpins_buffers_in_use_when_they_come_back(cuda) -> None:
    pool = BoundedPool(2, PAGE, pin=HOST)
    free, taken = pool.take("a"), pool.take("b")
    pool.give(free)
    pool.close()
    assert cuda.registered == {taken.tensor.data_ptr()}  # a copy may be in flight
    pool.give(taken)
    assert not cuda.registered


def test_a_stock_that_closes_unpins_buffers_in_use_when_they_come_back(cuda) -> None:
    stock = BufferStock(pin=HOST)
    (free, _), (taken, _) = stock.take(PAGE), stock.take(PAGE)
    stock.give(free)
    stock.close()
    assert cuda.registered == {taken.tensor.data_ptr()}
    stock.give(taken)
    assert not cuda.registered
    assert stock.total_bytes == stock.taken_bytes == 0


class Group:
    def __init__(self, name: str, backend: str, aborted: list[str]) -> None:
        self.name, self.backend, self.aborted = name, backend, aborted

    def abort(self) -> None:
        self.aborted.append(self.name)

    def _get_backend(self, _device: torch.device) -> Any:
        if self.backend == "gloo":
            raise RuntimeError("no backend for this device")
        return SimpleNamespace(
            _group_start=lambda: self.aborted.append("start"), _group_end=lambda: self.aborted.append("end")
        )


def test_a_failed_rank_aborts_every_native_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer may wait for it in a group of the mesh, or between two pipeline stages."""
    aborted: list[str] = []
    kinds = {"0": "nccl", "1": "gloo", "tensor": "nccl", "zz p2p": "nccl"}
    groups = {Group(name, kind, aborted): name for name, kind in kinds.items()}
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_names=groups))
    monkeypatch.setattr(dist, "get_backend", lambda group: group.backend)
    comm = Comm(None, None)
    comm.native = True
    comm.break_connections()
    assert aborted == ["start", "zz p2p", "tensor", "0", "end"]


def test_without_a_native_group_none_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch.dist.distributed_c10d, "_world", None)  # reading it would fail
    Comm(None, None).break_connections()


@pytest.mark.parametrize(
    ("backend", "native"),
    [("nccl", True), ("cpu:gloo,cuda:nccl", True), ("xccl", True), ("gloo", False), ("mpi", False), ("fake", False)],
)
def test_native_transports(backend: str, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda _: backend)
    group: Any = object()
    assert dev.moves_device_tensors(group) is native


def test_allocated_memory_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch has reserved includes what is allocated."""
    gib = 1 << 30
    monkeypatch.setattr(dev, "_module", lambda _: SimpleNamespace(mem_get_info=lambda _: (14 * gib, 80 * gib)))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda _: 66 * gib)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda _: 62 * gib)
    assert dev.free_bytes(torch.device("cuda", 0)) == 18 * gib


def test_without_an_accelerator_the_device_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert dev.current() == torch.device("cpu")
    assert dev.is_host(dev.current())


def test_every_thread_of_a_rank_selects_its_device() -> None:
    """Also one that never uses it, see `ls_strategy.device.selecting`."""
    package = Path(dev.__file__).parent
    starts = ("threading.Thread(", "ThreadPoolExecutor(")
    selects = ("selecting()", "select_device", "dev.select", "on_start", "bind_thread")
    others = {"testing.py", "extras/conformance/ranks.py"}  # processes of tests, from before they have a device
    found = {str(path.relative_to(package)): path.read_text() for path in package.rglob("*.py")}
    threaded = {name: text for name, text in found.items() if any(word in text for word in starts)}
    assert len(threaded) > 10
    assert others <= threaded.keys()
    assert [n for n, text in threaded.items() if n not in others and not any(word in text for word in selects)] == []


def test_only_the_seam_knows_cuda() -> None:
    """Elsewhere a line with ``torch.cuda`` says what exists for CUDA alone."""
    package = Path(dev.__file__).parent
    known = ("torch.cuda", '"nccl" in', ".is_cuda")
    found = [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for path in sorted(package.rglob("*.py"))
        if path.name != "device.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if any(word in line for word in known) and "CUDA only" not in line
    ]
    assert not found


def test_work_goes_back_to_the_stream_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an error, and on two threads in one stream."""
    now = threading.local()
    device = torch.device("cuda", 1)
    first, side = (SimpleNamespace(device=device) for _ in range(2))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: getattr(now, "stream", first))
    monkeypatch.setattr(torch.accelerator, "set_stream", lambda stream: setattr(now, "stream", stream))

    def enter(*_: Any) -> tuple[Any, Any]:
        with suppress(ZeroDivisionError), dev.on(side):
            inside = dev.stream(device)
            raise ZeroDivisionError
        return inside, dev.stream(device)

    with dev.on(side), ThreadPoolExecutor(1) as thread:
        assert thread.submit(enter).result() == (side, first)
        assert enter() == (side, side)
    assert dev.stream(device) is first


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_the_host_and_meta_have_no_streams(kind: str) -> None:
    device = torch.device(kind)
    assert not dev.is_accelerator(device)
    dev.synchronize(device)
    dev.select(device)


def test_random_states_of_the_host() -> None:
    cpu = torch.device("cpu")
    state = dev.random_state(cpu)
    drawn = torch.rand(2)
    dev.set_random_state(state, cpu)
    assert torch.equal(torch.rand(2), drawn)
    assert dev.generator_of(cpu) is torch.random.default_generator


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("cpu", "gloo"), ("cuda", "gloo"), ("xpu", "cpu:gloo,xpu:gloo"), ("npu", "cpu:gloo,npu:gloo")],
)
def test_groups_of_the_host_also_name_the_accelerator(
    kind: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch asks each group for a back end of the default group's device, and gloo is known for CUDA alone."""
    monkeypatch.setattr(dev, "current", lambda: SimpleNamespace(type=kind))
    assert dev.host_backend() == expected


@pytest.mark.parametrize(
    ("backend", "settings", "has_pool"),
    [
        ("native", "", True),
        ("native", "max_split_size_mb:200, expandable_segments:False", True),
        ("native", "max_split_size_mb:200, expandable_segments: True", False),
        ("cudaMallocAsync", "", False),
    ],
)
def test_there_is_a_pool_only_if_its_idle_memory_can_be_lent(
    backend: str, settings: str, has_pool: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SimpleNamespace(get_allocator_backend=lambda: backend, MemPool=lambda use_on_oom: use_on_oom)
    monkeypatch.setattr(torch, "get_device_module", lambda device: made)
    monkeypatch.setattr(dev, "selected", lambda device: nullcontext())
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    assert dev.new_memory_pool(torch.device("cuda", 0)) is (True if has_pool else None)
    assert dev.new_memory_pool(torch.device("cpu")) is None
