"""Buffers, started operations and averages of `ls_strategy.distributed.comm`, in one process."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.host_time import join_unsent
from ls_strategy.distributed import buffer_pool
from ls_strategy.distributed import comm as comm_module
from ls_strategy.distributed.buffer_pool import BufferPool
from ls_strategy.distributed.comm import Comm, PendingReduce, Started, Traffic
from ls_strategy.errors import RankFailedError

CPU = torch.device("cpu")


def test_a_buffer_is_used_again() -> None:
    pool = BufferPool()
    first = pool.take(4, torch.float32, CPU)
    pool.give([first])
    assert pool.take(4, torch.float32, CPU) is first
    assert pool.bytes == 16


@pytest.mark.parametrize(("numel", "dtype"), [(5, torch.float32), (4, torch.bfloat16)])
def test_a_buffer_of_another_kind_is_not(numel: int, dtype: torch.dtype) -> None:
    pool = BufferPool()
    first = pool.take(4, torch.float32, CPU)
    pool.give([first])
    other = pool.take(numel, dtype, CPU)
    assert (other.numel(), other.dtype) == (numel, dtype)


def test_a_pool_keeps_no_more_free_buffers_than_it_may() -> None:
    pool = BufferPool(kept=1)
    buffers = [pool.take(4, torch.float32, CPU) for _ in range(2)]
    pool.give(buffers)
    assert pool.take(4, torch.float32, CPU) is buffers[0]
    assert pool.take(4, torch.float32, CPU) is not buffers[1]


class LateCopy:
    """A copy that is over when somebody waits for it."""

    def __init__(self) -> None:
        self.over = False

    def is_over(self) -> bool:
        return self.over

    def wait_on_host(self) -> None:
        self.over = True


def test_a_pool_waits_for_copies_when_too_much_is_late(monkeypatch):
    monkeypatch.setattr(buffer_pool, "LATE_BYTES", 100)
    pool, device = BufferPool(), torch.device("cpu")
    copies = [LateCopy() for _ in range(3)]
    for copy in copies[:2]:
        pool.give_late(pool.take(10, torch.float32, device), copy)
    assert pool.bytes == 80
    third = pool.take(10, torch.float32, device)  # 120 bytes would be late
    assert [copy.over for copy in copies] == [True, False, False]
    assert pool.bytes == 80
    copies[1].over = True
    pool.give_late(third, copies[2])
    pool.take(10, torch.float32, device)  # without a wait
    assert not copies[2].over
    assert pool.bytes == 80


class Work:
    """An operation that fails so many times."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        if self.error is not None and self.waits == 1:
            raise self.error


def test_an_operation_is_waited_for_once() -> None:
    work = Work()
    started = Started([work])
    started.wait()
    started.wait()
    assert work.waits == 1


def test_an_error_is_raised_by_every_wait() -> None:
    started = Started([Work(RuntimeError("closed")), Work()])
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            started.wait()


def test_a_wait_after_an_interrupt_goes_on_with_the_next() -> None:
    works = [Work(KeyboardInterrupt()), Work()]
    started = Started(works)
    with pytest.raises(KeyboardInterrupt):
        started.wait()
    started.wait()
    assert [work.waits for work in works] == [1, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_a_reduction_averages_in_the_dtype_of_the_result(dtype: torch.dtype, accumulate: bool) -> None:
    comm = Comm(None, None)
    comm.world_size = 4
    parts = [torch.full((70_000,), float(value), dtype=dtype) for value in (1, 2, 3, 7)]  # more than one chunk
    out = torch.full((70_000,), 0.5)
    PendingReduce((), parts, parts[1:], comm).finish(out, accumulate=accumulate)
    assert out.eq(13 / 4 + 0.5 * accumulate).all()
    assert comm.pool.take(70_000, dtype, CPU) is parts[3]


def test_a_reduction_waits_for_its_terms() -> None:
    """Sums are taken of what has arrived, and what arrives is not waited for again."""

    class Arriving(Work):
        def wait(self) -> None:
            super().wait()
            late.fill_(6)

    comm = Comm(None, None)
    comm.world_size = 2
    late, out = torch.full((4,), torch.nan), torch.empty(4)
    work = Arriving()
    PendingReduce([Started([work])], [torch.full((4,), 2.0), late], [late], comm).finish(out, accumulate=False)
    assert out.eq(4).all()
    assert work.waits == 1


def test_nccl_sums_in_the_wire_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16 gradients go to NCCL in fp32 if that is the dtype of the sum, and the result arrives in it."""
    seen: list[torch.dtype] = []

    def reduce_scatter(out: torch.Tensor, wire: torch.Tensor, **_: Any) -> Work:
        seen.append(wire.dtype)
        out.copy_(wire[: out.numel()])
        return Work()

    monkeypatch.setattr(comm_module, "reduce_scatter_single", reduce_scatter)
    comm = Comm(None, None)
    comm.native, comm.world_size, comm.far = True, 2, (False, False)
    out = torch.empty(4)
    comm.reduce_scatter(torch.ones(8, dtype=torch.bfloat16), torch.float32).finish(out, accumulate=False)
    comm.reduce_scatter(torch.ones(8, dtype=torch.bfloat16)).finish(out, accumulate=False)
    assert seen == [torch.float32, torch.bfloat16]


_AT = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:543]"


@pytest.mark.parametrize(
    "broken",
    [
        RuntimeError("Connection reset by peer"),
        RuntimeError(f"{_AT} Connection closed by peer [127.0.0.1]:2"),
        RuntimeError(f"{_AT} writev [127.0.0.1]:2: Broken pipe"),  # what a rank gets that sends before it reads the end
        RuntimeError(f"{_AT} Socket closed [127.0.0.1]:2"),
        dist.DistBackendError("remote process exited or there was a network error"),
        RuntimeError("NCCL communicator was aborted on rank 1."),
    ],
    ids=str,
)
def test_a_broken_connection_is_named_and_another_error_is_not(broken: RuntimeError) -> None:
    comm = Comm(None, None)
    asked: list[Any] = []

    def raise_if_any(error: Exception) -> None:
        asked.append(error)
        raise RankFailedError("rank 1")

    comm.failures = SimpleNamespace(raise_if_any=raise_if_any)  # type: ignore[assignment]
    with pytest.raises(RankFailedError), comm.naming_failures():
        raise broken
    with pytest.raises(RuntimeError, match="size mismatch"), comm.naming_failures():
        raise RuntimeError("size mismatch")
    assert len(asked) == 1


def test_a_process_without_a_group_agrees_with_itself() -> None:
    comm = Comm(None, None)
    assert comm.agree(torch.tensor([3])).tolist() == [3]
    assert comm.exchange_objects("a") == ["a"]
    assert comm.is_alive()


def test_traffic_counts_by_kind() -> None:
    traffic = Traffic()
    traffic.count("all_gather", torch.ones(3, dtype=torch.bfloat16), times=2)
    traffic.count("all_gather", torch.ones(1))
    traffic.count("control", torch.ones(5, dtype=torch.uint8))
    assert dict(traffic.elements) == {"all_gather": 7, "control": 5}
    assert dict(traffic.bytes) == {"all_gather": 16, "control": 5}
    traffic.reset()
    assert not traffic.bytes


def test_torch_has_no_complaint_about_the_collectives_of_a_gpu() -> None:
    """Torch 2.14 warns of the old names of two of them, once per process and line."""
    join_unsent()
    try:
        comm = Comm(dist.group.WORLD, dist.group.WORLD)  # type: ignore[arg-type]
        comm.native = True
        full, out = torch.ones(8), torch.empty(4)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            comm.all_gather(full).wait()
            comm.reduce_scatter(full).finish(out, accumulate=False)
    finally:
        dist.destroy_process_group()
