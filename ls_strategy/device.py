"""The one place that knows which kind of device a run has: all else is written for any accelerator that torch supports.

CUDA, ROCm, XPU and devices of other packages take one path, through `torch.accelerator`, `torch.Stream` and
`torch.Event`. Without an accelerator everything is on the host: code asks `is_accelerator` before it uses streams.

Outside this file, ``torch.cuda`` stands only where something exists for CUDA alone, in a line that says ``CUDA only``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

_ALLOC_CONF = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables with the settings of torch's allocator."""

_ON_HOST = frozenset({"gloo", "mpi", "ucc", "fake"})
"""Back ends of `torch.distributed` that move tensors of the host, or both kinds."""


def is_host(device: torch.device) -> bool:
    """Return whether tensors of ``device`` are in host memory."""
    return device.type == "cpu"


def is_accelerator(device: torch.device) -> bool:
    """Return whether ``device`` has its own memory, and streams of work that the host does not wait for."""
    return device.type not in ("cpu", "meta")


def current() -> torch.device:
    """Return the accelerator that this thread uses; the host without one."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def select(device: torch.device) -> None:
    """Make ``device`` the accelerator of this thread; a new thread would use the first one."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def selecting() -> Callable[[], None]:
    """Return what a new thread has to call first, also one that only writes files: it selects the caller's device.

    Python's collector runs in any thread. If it destroys an event of another accelerator there, torch goes back to the
    thread's own one afterwards, which is the first one unless another was selected, and takes memory of it.
    """
    return partial(select, current() if is_in_use() else torch.device("cpu"))


@contextmanager
def selected(device: torch.device) -> Generator[None, None, None]:
    """Make ``device`` the accelerator of this thread inside the context, whichever one the thread uses otherwise."""
    if not is_accelerator(device):
        yield
        return
    with torch.accelerator.device_index(device.index):
        yield


def is_in_use() -> bool:
    """Return whether this process has begun to use an accelerator."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return False
    begun = getattr(_module(kind), "is_initialized", None)  # not `current()`: to ask for its index is to begin
    return begun is None or bool(begun())


def synchronize(device: torch.device) -> None:
    """Wait for all work of ``device``; on the host there is none in flight."""
    if is_accelerator(device):
        with selected(device):  # else torch goes back to the first device in a new thread, and uses memory there
            torch.accelerator.synchronize(device)


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def moves_device_tensors(group: dist.ProcessGroup) -> bool:
    """Return whether the backend of a group communicates tensors of the device.

    Such a backend (NCCL, for example) refuses tensors in host memory.
    """
    native = {"nccl", *dist.Backend.default_device_backend_map.values()} - _ON_HOST
    return any(name in dist.get_backend(group) for name in native)


def default_backend() -> str:
    """Return the back end of `torch.distributed` for the accelerator of this process, or for the host."""
    return dist.get_default_backend_for_device(current())


def host_backend() -> str:
    """Return a back end of `torch.distributed` for tensors of the host, in a process that may have an accelerator.

    Torch asks every new group for a back end of the device that the default group is bound to. It takes gloo for one of
    CUDA, and has to be told for others.
    """
    kind = current().type
    return "gloo" if kind in ("cpu", "cuda") else f"cpu:gloo,{kind}:gloo"


# streams and events --------------------------------------------------------------------------------------------------


def new_stream(device: torch.device) -> torch.Stream:
    """Return a new stream of an accelerator."""
    return torch.Stream(device)


def stream(device: torch.device) -> torch.Stream:
    """Return the stream in which this thread's work on an accelerator runs."""
    return torch.accelerator.current_stream(device)


@contextmanager
def on(stream: torch.Stream) -> Generator[None, None, None]:
    """Let this thread's work inside the context run in ``stream``.

    As a context, `torch.Stream` itself refuses a second thread, such as that of updates beside that of training.
    """
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def record(device: torch.device, stream: torch.Stream | None = None, *, timing: bool = False) -> torch.Event:
    """Return a new event that has happened when ``stream`` (None: the current one) has done its work so far.

    ``timing``: `seconds_between` can use it.
    """
    event = torch.Event(device, enable_timing=timing)
    event.record(torch.accelerator.current_stream(device) if stream is None else stream)
    return event


def seconds_between(first: torch.Event, second: torch.Event) -> float:
    """Return the seconds between two events with ``timing``; both must have happened."""
    return first.elapsed_time(second) / 1e3  # milliseconds


def use_in_stream(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Let the memory of a device tensor be reused only when ``stream`` has done its work so far."""
    tensor.record_stream(stream)


def name(device: torch.device) -> str:
    """Return what a device is called: the model of an accelerator, or ``cpu``."""
    describe = None if is_host(device) else getattr(_module(device), "get_device_name", None)
    return str(device.type) if describe is None else str(describe(device))


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the architecture of an NVIDIA GPU, ``(9, 0)`` for an H100; ``(0, 0)`` of other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


# memory --------------------------------------------------------------------------------------------------------------


def total_bytes(device: torch.device) -> int:
    """Return the size of an accelerator's memory."""
    return int(_module(device).get_device_properties(device).total_memory)


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process can still allocate on an accelerator: also what torch keeps for later."""
    kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return int(_module(device).mem_get_info(device)[0] + kept)


def allocated_bytes(device: torch.device) -> int:
    """Return the bytes of all tensors on an accelerator now."""
    return torch.accelerator.memory_allocated(device)


def peak_bytes(device: torch.device, *, reset: bool = False) -> int:
    """Return the maximum of `allocated_bytes` since the last ``reset``, and begin again if ``reset``."""
    peak = torch.accelerator.max_memory_allocated(device)
    if reset:
        torch.accelerator.reset_peak_memory_stats(device)
    return peak


def free_cached(device: torch.device) -> None:
    """Return memory that torch keeps for later to the device, so that other processes can allocate it."""
    if is_accelerator(device):
        empty = getattr(_module(device), "empty_cache", None)
        if empty is not None:
            empty()


def new_memory_pool(device: torch.device) -> Any:
    """Return memory of a device for `allocating_in`; None if its allocator has no such pools.

    The memory goes back to the device when nothing refers to the pool and no tensor uses it. Meanwhile torch takes it
    for other tensors before it runs out of memory. With expandable segments it would not, so there is no pool then.
    """
    module = _module(device) if is_accelerator(device) else None
    backend = getattr(module, "get_allocator_backend", None)
    if module is None or backend is None or backend() != "native":  # cudaMallocAsync, or one of another package
        return None
    if any("expandable_segments:True" in os.environ.get(name, "").replace(" ", "") for name in _ALLOC_CONF):
        return None
    with selected(device):
        return module.MemPool(use_on_oom=True)


def allocating_in(pool: Any, device: torch.device) -> AbstractContextManager[None]:
    """Let what this thread allocates on ``device`` inside the context be in ``pool``. One thread at a time."""
    return cast("AbstractContextManager[None]", _module(device).use_mem_pool(pool, device))


def is_capturing(device: torch.device) -> bool:
    """Return whether this thread's work on ``device`` is being captured in a graph."""
    return bool(_module(device).is_current_stream_capturing())


# random numbers ------------------------------------------------------------------------------------------------------


def generator_of(device: torch.device) -> torch.Generator:
    """Return the default generator of a device."""
    if device.type == "cpu":
        return torch.random.default_generator
    module = _module(device)
    return module.default_generators[module.current_device() if device.index is None else device.index]


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's default generator, in host memory."""
    return torch.get_rng_state() if device.type == "cpu" else _module(device).get_rng_state(device)


def set_random_state(state: torch.Tensor, device: torch.device) -> None:
    """Set what `random_state` returned."""
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        _module(device).set_rng_state(state, device)


# pinned memory -------------------------------------------------------------------------------------------------------


def can_register(device: torch.device) -> bool:
    """Return whether `register_host_memory` supports a device. It does on CUDA and ROCm."""
    return device.type == "cuda"


def registering(device: torch.device) -> torch.device | None:
    """Return a device for which host memory is pinned by `register_host_memory`; None if it is not."""
    return device if can_register(device) else None


def register_host_memory(address: int, nbytes: int) -> int:
    """Pin memory that torch has not allocated. Return the error code, 0 on success. CUDA (and ROCm) only.

    The runtime does it for the accelerator of this thread, and begins to use that one: select the right one before.
    """
    status = int(_cudart().cudaHostRegister(address, nbytes, 0))
    if status:
        _forget_error()
    return status


def unregister_host_memory(address: int) -> None:
    """Undo `register_host_memory`. No copy may be in flight. CUDA (and ROCm) only."""
    if int(_cudart().cudaHostUnregister(address)):
        _forget_error()


def _cudart() -> Any:
    return torch.cuda.cudart()  # CUDA only


def _forget_error() -> None:
    """Clear the error of a failed call: otherwise the next kernel of this thread would raise it as its own."""
    with suppress(RuntimeError):
        _launch()


def _launch() -> None:
    torch.ones(1, device=current())
