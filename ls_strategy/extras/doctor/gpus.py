"""Check the GPUs that torch and the driver see, and NCCL."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import NamedTuple

from ls_strategy.extras.doctor.finding import Finding, note_if, one_line, run

_QUERY = ("index", "name", "driver_version", "memory.total", "memory.used")


class Seen(NamedTuple):
    """A GPU as ``nvidia-smi`` lists it. Memory in MiB."""

    number: str
    name: str
    driver: str
    total: str
    used: str


def gpus() -> Iterator[Finding]:
    """Check devices, driver and NCCL."""
    import torch

    seen, failure = driver_list()
    if failure:
        cure = "The driver does not answer: check dmesg (NVRM), load the kernel module or restart the host."
        yield Finding("driver", failure, "problem", cure)
    elif seen:
        yield Finding("driver", f"{seen[0].driver}, {len(seen)} GPUs")
    if not torch.cuda.is_available():  # CUDA only, like this file
        yield unavailable(len(seen), torch.version.cuda, torch.__version__)
        return
    yield Finding("CUDA", f"{torch.version.cuda} (torch's)")
    for index in range(torch.cuda.device_count()):  # CUDA only
        yield device(index)
    yield nccl()


def unavailable(seen: int, cuda: str | None, version: str) -> Finding:
    """Report why torch has no GPU, given the GPUs that the driver lists and torch's CUDA version and version."""
    if not seen:
        return Finding("GPUs", "none; training runs on the CPU")
    if cuda is None:
        cure = "Install torch for CUDA as pytorch.org/get-started describes. This build supports only the CPU."
        return Finding("GPUs", f"{seen} in this host, but torch {version} is built without CUDA", "problem", cure)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        cure = "Unset CUDA_VISIBLE_DEVICES, or list the GPUs to use."
        return Finding("GPUs", f"{seen} in this host, hidden by CUDA_VISIBLE_DEVICES={visible!r}", "note", cure)
    cure = f"Update the driver to one for CUDA {cuda}, or install torch for an older CUDA. `nvidia-smi` shows both."
    return Finding("GPUs", f"{seen} in this host, but torch with CUDA {cuda} can use none", "problem", cure)


def driver_list() -> tuple[list[Seen], str]:
    """Return what ``nvidia-smi`` lists, and its error. Both are empty if there is no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [], ""
    output, error = run([program, f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader,nounits"], 30)
    rows = [[field.strip() for field in line.split(",")] for line in output.splitlines()]
    return [Seen(*row) for row in rows if len(row) == len(Seen._fields)], f"nvidia-smi: {error}" if error else ""


def device(index: int) -> Finding:
    """Check one GPU that torch sees."""
    import torch

    from ls_strategy.extras.planner.sizes import show_bytes

    properties = torch.cuda.get_device_properties(index)  # CUDA only
    name = f"GPU {index}"
    try:
        free, total = torch.cuda.mem_get_info(index)  # CUDA only
    except RuntimeError as error:
        cure = "Another process may use it in exclusive mode, or it has failed: check nvidia-smi and dmesg."
        return Finding(name, f"{properties.name} cannot be used: {one_line(str(error))}", "problem", cure)
    value = (
        f"{properties.name}, {properties.major}.{properties.minor}, {show_bytes(total)}, {show_bytes(free)} free, "
        f"bf16 {'yes' if properties.major >= 8 else 'no: use 16-mixed'}"
    )
    return note_if(free < 0.9 * total, name, value, "Another process uses its memory: nvidia-smi shows which.")


def nccl() -> Finding:
    """Check that torch has NCCL."""
    import torch
    import torch.distributed as dist
    from torch.cuda.nccl import version as nccl_version  # CUDA only

    if not dist.is_nccl_available():
        cure = "Install torch from pytorch.org: this build lacks NCCL, which several GPUs need."
        several = torch.cuda.device_count() > 1  # CUDA only
        return Finding("NCCL", "not in this torch", "problem" if several else "note", cure)
    return Finding("NCCL", ".".join(str(part) for part in nccl_version()))
