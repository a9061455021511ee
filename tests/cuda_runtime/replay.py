"""Allocate and free what a fit on the simulated device did, with torch's own allocator, see `tests.cuda_runtime`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from random import Random
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy.distributed.buffer_pool import BufferPool
from ls_strategy.tiers.arrival import Arrival
from ls_strategy.tiers.buffers import AlignedBuffer
from ls_strategy.tiers.link import Link
from tests.cuda_runtime import contexts, set_total, used

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)


def replay(log: list[list[int]], marks: list[list[int]], factor: int) -> dict[str, Any]:
    """Return the addresses of gathered buffers, step by step, and what torch has taken of the device.

    Args:
        log: as of `SimulatedDevice.log`. Other sizes than those of gathers vary, as with sequences of other lengths.
        marks: how long it was when each step began, and ended.
        factor: by which all sizes are multiplied.
    """
    pool, random = BufferPool(), Random(7)
    streams: dict[int, Any] = {0: torch.cuda.default_stream(DEVICE)}
    held: dict[int, Tensor] = {}
    found: dict[int, int] = {}
    for number, (address, nbytes, stream, pooled) in enumerate(log):
        if not nbytes:
            held.pop(address, None)
            continue
        with torch.cuda.stream(streams.setdefault(stream, streams.get(stream) or torch.cuda.Stream(DEVICE))):
            if pooled:
                held[address] = without_memory(nbytes * factor)
                pool.allocate(held[address])
                found[number] = held[address].data_ptr()
            else:
                size = int(nbytes * factor * random.uniform(1, 2))
                held[address] = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    return {
        "steps": [[found[number] for number in range(*step) if number in found] for step in marks],
        "reserved": torch.cuda.max_memory_reserved(DEVICE),
    }


def out_of_memory() -> dict[str, Any]:
    """Return what happens when the device has no more memory for gathers, or for other tensors, in MiB.

    There are 1000 MiB: a gather of 300 finds 800 that torch keeps for other tensors; then others need more than are
    left; then there is no memory for a gather in its pool, but elsewhere; then there is none.
    """
    set_total(1000 * MIB)
    pool, found = BufferPool(), dict[str, Any]()
    gathered = without_memory(300 * MIB)
    made(800)
    pool.allocate(gathered)
    found["gathered"] = torch.cuda.memory_reserved(DEVICE) // MIB
    found["in pools"] = in_pools()
    gathered.untyped_storage().resize_(0)
    others = [made(600), made(290)]
    found["lent"] = torch.cuda.memory_reserved(DEVICE) // MIB
    del others[1]
    pool.allocate(gathered)
    found["gathered again"] = torch.cuda.memory_reserved(DEVICE) // MIB
    gathered.untyped_storage().resize_(0)
    others.append(made(290))
    try:
        pool.allocate(gathered)
    except torch.OutOfMemoryError as error:
        found["refused"] = "out of memory" in str(error)
    del others
    pool.allocate(gathered)
    keeps = gathered.data_ptr()
    pool.clear()
    found["kept by a view"] = gathered.data_ptr() == keeps
    gathered.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    return {**found, "left": used()}


def other_device() -> dict[str, Any]:
    """Gather on the second GPU, from this thread and from one that has selected none. Return what each GPU has then."""
    pool, buffer = BufferPool(), torch.empty(1, dtype=torch.uint8, device="cuda:1").expand(4 * MIB)
    found = [_address(pool, buffer)]
    thread = Thread(target=lambda: found.append(_address(pool, buffer)))
    thread.start()
    thread.join()
    return {
        "same address": found == found[:1] * 2,
        "in pools": in_pools(),
        "current": torch.cuda.current_device(),
    }


def not_in_use() -> dict[str, bool]:
    """Ask whether the device is in use, before it is and afterwards."""
    found = {"before": dev.is_in_use(), "begun": torch.cuda.is_initialized()}
    torch.cuda.init()
    return {**found, "after": dev.is_in_use()}


def second_device() -> dict[str, list[bool]]:
    """Use the second GPU, from this thread and from new ones. Return which GPUs have a context after each use."""
    device, found = torch.device("cuda", 1), dict[str, list[bool]]()
    torch.cuda.init()
    found["nothing"] = contexts()
    dev.select(device)
    link, pool = Link(device), BufferPool()
    _address(pool, torch.empty(1, dtype=torch.uint8, device=device).expand(4 * MIB))

    def use(name: str, action: Callable[[], object], start: Callable[[], object] = lambda: None) -> None:
        thread = Thread(target=lambda: (start(), action()))
        thread.start()
        thread.join()
        found[name] = contexts()

    use("pinned memory", lambda: AlignedBuffer(1 << 12, pin=device))
    use("a wait for the device", lambda: dev.synchronize(device))
    use("the states of generators", lambda: dev.set_random_state(dev.random_state(device), device))
    use("an event", lambda: Arrival(dev.record(device)).wait_on_device(), link.bind_thread)
    use("an event, in a thread without a device", lambda: Arrival(dev.record(device)).wait_on_device())
    return found


def _address(pool: BufferPool, buffer: Tensor) -> int:
    buffer.untyped_storage().resize_(0)
    pool.allocate(buffer)
    return buffer.data_ptr()


def in_pools() -> list[int]:
    """Return how many segments of each GPU are in pools."""
    pooled = [s["device"] for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] != (0, 0)]
    return [pooled.count(0), pooled.count(1)]


def made(mebibytes: int) -> Tensor:
    """Return a tensor that was not gathered."""
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device=DEVICE)


def without_memory(nbytes: int) -> Tensor:
    """Return a buffer of one dimension whose storage is empty."""
    buffer = torch.empty(1, dtype=torch.uint8, device=DEVICE).expand(nbytes)
    buffer.untyped_storage().resize_(0)
    return buffer


if __name__ == "__main__":
    given = json.load(sys.stdin)
    program = {
        "replay": replay,
        "out of memory": out_of_memory,
        "other device": other_device,
        "second device": second_device,
        "not in use": not_in_use,
    }[given.pop("program")]
    print(json.dumps(program(**given)))
