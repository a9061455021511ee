"""The one place that knows which kind of device a run has: all else is written for any accelerator that torch supports.

CUDA, ROCm, XPU and devices of other packages take one path, through `torch.accelerator`, `torch.Stream` and
`torch.Event`. Without an accelerator, everything is on the host, and nothing here has an effect.

Outside this file, ``torch.cuda`` stands only where something exists for CUDA alone, with a comment that says so.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist

_ON_HOST = frozenset({"gloo", "mpi", "ucc", "fake"})
"""Back ends of `torch.distributed` that move tensors of the host, or both kinds."""


def is_host(device: torch.device) -> bool:
    """Whether tensors of ``device`` are in host memory."""
    return device.type == "cpu"


def current() -> torch.device:
    """Return the accelerator that this thread uses; the host without one."""
    kind = torch.accelerator.current_accelerator()
    return torch.device("cpu") if kind is None else torch.device(kind.type, torch.accelerator.current_device_index())


def moves_device_tensors(group: dist.ProcessGroup) -> bool:
    """Whether the back end of a group sends and sums tensors of the device, and refuses those of the host, as NCCL."""
    native = {"nccl", *dist.Backend.default_device_backend_map.values()} - _ON_HOST
    return any(name in dist.get_backend(group) for name in native)


# pinned memory -------------------------------------------------------------------------------------------------------


def register_host_memory(address: int, nbytes: int) -> int:
    """Pin memory that torch has not allocated. Return the error code, 0 on success. CUDA (and ROCm) only."""
    status = int(_cudart().cudaHostRegister(address, nbytes, 0))
    if status:
        _forget_error()
    return status


def unregister_host_memory(address: int) -> None:
    """Undo `register_host_memory`. No copy may be in flight. CUDA (and ROCm) only."""
    if int(_cudart().cudaHostUnregister(address)):
        _forget_error()


def _cudart() -> Any:
    return torch.cuda.cudart()  # other back ends have no such call


def _forget_error() -> None:
    """Clear the error of a failed call: otherwise the next kernel of this thread would raise it as its own."""
    with suppress(RuntimeError):
        _launch()


def _launch() -> None:
    torch.ones(1, device=current())
