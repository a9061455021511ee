"""Collectives on flat buffers against a naive sum in rank order, bit for bit."""

from __future__ import annotations

import functools
import gc
import time

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from ls_strategy.distributed.comm import SUM_CHUNK, Comm, PendingGather, Started, _dropped, make_comm
from ls_strategy.testing import spawn

WORLDS = (2, 3)
# ``name -> dtypes of the terms and of the result``; results are never below fp32.
DTYPES = {
    "fp32": (torch.float32, torch.float32),
    "fp64": (torch.float64, torch.float64),
    "bf16 to fp32": (torch.bfloat16, torch.float32),
    "fp16 to fp32": (torch.float16, torch.float32),
}
SHARDS = (0, 1, 16, 1000, SUM_CHUNK + 7)  # the last is summed in two strides


def buffer(rank: int, world_size: int, shard: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + shard)
    return torch.randn(world_size * shard, generator=generator).to(dtype)


def naive_average(world_size: int, shard: int, dtypes: tuple[torch.dtype, torch.dtype], start: Tensor | None) -> Tensor:
    """Sum in rank order, each term in the dtype of the result and scaled before it is added."""
    terms = [buffer(r, world_size, shard, dtypes[0]) for r in range(world_size)]
    scale = 1.0 / world_size
    total = terms[0].to(dtypes[1]).mul(scale) if start is None else start.add(terms[0], alpha=scale)
    for term in terms[1:]:
        total = total.add(term, alpha=scale)
    return total


def reduce_all(comm: Comm) -> dict[tuple[str, int, bool], bool]:
    """``(dtypes, shard, accumulate) -> whether this rank's shard is the naive one and the input is untouched``."""
    n, result = comm.world_size, {}
    for name, dtypes in DTYPES.items():
        for shard in SHARDS:
            for accumulate in (False, True):
                full = buffer(comm.rank, n, shard, dtypes[0])
                before = full.clone()
                start = torch.full((n * shard,), 0.37, dtype=dtypes[1])
                mine = slice(comm.rank * shard, (comm.rank + 1) * shard)
                out = start[mine].clone() if accumulate else torch.full((shard,), float("nan"), dtype=dtypes[1])
                comm.reduce_scatter(full, torch.float32).finish(out, accumulate=accumulate)
                expected = naive_average(n, shard, dtypes, start if accumulate else None)[mine]
                result[name, shard, accumulate] = torch.equal(out, expected) and torch.equal(full, before)
    return result


def gather_all(comm: Comm) -> dict[tuple[str, int], bool]:
    n, result = comm.world_size, {}
    for name, (dtype, _) in DTYPES.items():
        for shard in SHARDS:
            whole = torch.cat([buffer(r, n, shard, dtype)[r * shard : (r + 1) * shard] for r in range(n)])
            full = torch.full((n * shard,), float("nan"), dtype=dtype)
            mine = slice(comm.rank * shard, (comm.rank + 1) * shard)
            full[mine] = whole[mine]
            comm.all_gather(full).wait()
            result[name, shard] = torch.equal(full, whole)
    return result


def several_at_once(comm: Comm) -> bool:
    """Started in one order and finished in another: each gets its own values."""
    n = comm.world_size
    fulls = [buffer(comm.rank, n, shard, torch.float32) for shard in (16, 16, 32)]
    pending = [comm.reduce_scatter(f) for f in fulls]
    outs = [torch.empty(f.numel() // n) for f in fulls]
    for i in (2, 0, 1):
        pending[i].finish(outs[i], accumulate=False)
    pairs = (torch.float32, torch.float32)
    return all(
        torch.equal(out, naive_average(n, out.numel(), pairs, None)[comm.rank * out.numel() :][: out.numel()])
        for out in outs
    )


def small_things(comm: Comm) -> dict[str, object]:
    tensor = torch.arange(5.0) + comm.rank
    comm.broadcast_(tensor, source=comm.world_size - 1)
    return {
        "broadcast": tensor.tolist(),
        "most": comm.agree(torch.tensor([comm.rank, -comm.rank])).tolist(),
        "sum": comm.agree(torch.tensor([comm.rank]), dist.ReduceOp.SUM).tolist(),
        "objects": comm.exchange_objects({"rank": comm.rank}),
    }


def pool_stays(comm: Comm) -> tuple[int, int]:
    """Bytes in the pool after one reduction, and after nine more of the same size."""
    full, out = torch.randn(comm.world_size * 64), torch.empty(64)
    before = comm.pool.bytes
    sizes = []
    for _ in range(10):
        comm.reduce_scatter(full).finish(out, accumulate=False)
        sizes.append(comm.pool.bytes - before)
    return sizes[0], sizes[-1]


def on_each_rank(rank: int, world_size: int) -> dict[str, object]:
    comm = make_comm()
    assert (comm.rank, comm.world_size) == (rank, world_size)
    result = {"gather": gather_all(comm), "reduce": reduce_all(comm), "several": several_at_once(comm)}
    result["small"] = small_things(comm)
    comm.traffic.reset()
    comm.reduce_scatter(torch.ones(world_size * 16, dtype=torch.bfloat16)).finish(torch.empty(16), accumulate=False)
    comm.all_gather(torch.ones(world_size * 16)).wait()
    result["traffic"] = dict(comm.traffic.elements), dict(comm.traffic.bytes)
    result["pool"] = pool_stays(comm)
    return result


@functools.cache
def results(world_size: int) -> list[dict]:
    return spawn(on_each_rank, world_size, timeout_s=60)


@pytest.mark.parametrize("world_size", WORLDS)
def test_reduce_scatter_is_the_sum_in_rank_order(world_size) -> None:
    """Of 16-bit terms too, summed in the dtype of the result; added to what is there where asked."""
    for rank in results(world_size):
        assert rank["reduce"] == dict.fromkeys(rank["reduce"], True)


@pytest.mark.parametrize("world_size", WORLDS)
def test_all_gather_brings_every_shard(world_size) -> None:
    for rank in results(world_size):
        assert rank["gather"] == dict.fromkeys(rank["gather"], True)


@pytest.mark.parametrize("world_size", WORLDS)
def test_collectives_may_be_finished_in_another_order(world_size) -> None:
    assert all(rank["several"] for rank in results(world_size))


@pytest.mark.parametrize("world_size", WORLDS)
def test_broadcast_agree_and_exchange(world_size) -> None:
    last = world_size - 1
    for rank in results(world_size):
        assert rank["small"] == {
            "broadcast": [last + float(i) for i in range(5)],
            "most": [last, 0],
            "sum": [sum(range(world_size))],
            "objects": [{"rank": r} for r in range(world_size)],
        }


@pytest.mark.parametrize("world_size", WORLDS)
def test_traffic_is_one_shard_to_every_other_rank(world_size) -> None:
    sent = 16 * (world_size - 1)
    for rank in results(world_size):
        elements, size = rank["traffic"]
        assert elements == {"reduce_scatter": sent, "all_gather": sent}
        assert size == {"reduce_scatter": 2 * sent, "all_gather": 4 * sent}


@pytest.mark.parametrize("world_size", WORLDS)
def test_receive_buffers_are_used_again(world_size) -> None:
    for first, last in (rank["pool"] for rank in results(world_size)):
        assert first == last


def drop_in_flight(rank: int, world_size: int, late: int) -> int:
    """Drop collectives before they are done, on every rank, and go on. Returns how many are still kept at the end."""
    comm = make_comm()
    for number in range(6):
        if rank == late:
            time.sleep(0.05)
        full = torch.full((1 << 16 if number % 2 else 64,), float(rank + 1))
        pending = comm.reduce_scatter(full) if number % 3 else comm.all_gather(full)
        del pending, full
        gc.collect()
        value = torch.full((8,), float(rank))
        comm.broadcast_(value)
        assert value.tolist() == [0.0] * 8
    full = torch.full((64,), float(rank + 1))
    out = torch.empty(64 // world_size)
    comm.reduce_scatter(full).finish(out, accumulate=False)
    assert out.tolist() == [sum(range(1, world_size + 1)) / world_size] * out.numel()
    return len(_dropped.get(comm.group, ()))


@pytest.mark.parametrize("late", [0, 1])
def test_what_is_dropped_in_flight_blocks_nothing(late: int) -> None:
    """As where a program drops an engine after a backward pass without a step, or changes models after an error."""
    assert spawn(drop_in_flight, 2, late, timeout_s=30) == [0, 0]


def test_one_rank_needs_no_process_group() -> None:
    comm = make_comm()
    assert (comm.rank, comm.world_size, comm.is_alive()) == (0, 1, True)
    full, out = torch.randn(32), torch.empty(32)
    comm.reduce_scatter(full).finish(out, accumulate=False)
    comm.all_gather(full).wait()
    assert torch.equal(out, full)
    assert comm.exchange_objects(3) == [3]
    assert not comm.traffic.elements


class Work:
    """As gloo's: a second wait for the same work would never end."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1
        assert self.waits == 1, "waited for twice"
        if self.error is not None:
            raise self.error


def test_no_work_is_waited_for_twice_after_an_error() -> None:
    """The error comes again: what was to arrive is not there."""
    works = [Work(), Work(RuntimeError("connection closed")), Work()]
    pending = PendingGather([Started(works)], Comm(None, None))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="connection closed"):
            pending.wait()
    assert [w.waits for w in works] == [1, 1, 0]


def test_after_an_interrupt_the_next_wait_goes_on_with_what_is_left() -> None:
    works = [Work(), Work(KeyboardInterrupt()), Work()]
    pending = PendingGather([Started(works)], Comm(None, None))
    with pytest.raises(KeyboardInterrupt):
        pending.wait()
    pending.wait()
    pending.wait()
    assert [w.waits for w in works] == [1, 1, 1]
