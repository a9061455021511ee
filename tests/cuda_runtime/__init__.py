"""Torch's own allocator of GPU memory, without a GPU: the functions of CUDA that it calls, on addresses alone.

`runtime.cpp` stands in for ``libcudart.so`` and ``libcuda.so.1``. A process that loads it first has two GPUs whose
memory can be allocated and freed, but not used: no kernel runs, no copy is made. So what torch's caching allocator does
with a sequence of sizes, streams and pools can be seen on any machine, of the version of torch that is installed.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from ls_strategy.ops import _build
from tests.limits import wall

FOLDER = Path(__file__).parent


def is_available() -> bool:
    """Return whether torch has the allocator, and the stand-in can be built."""
    return torch.version.cuda is not None and not torch.cuda.is_available()


def call(module: str, argument: Any, folder: Path) -> Any:
    """Run ``python -m module`` with the stand-in. The argument and what it prints last are JSON.

    Args:
        module: it reads the argument from its standard input.
        argument: of the module.
        folder: where the stand-in is built.
    """
    compiler = _build.cpu_recipe().units[0].command[0]
    library = folder / "libcuda.so.1"  # torch opens this one by name; it has the functions of both
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", str(FOLDER / "runtime.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    env = os.environ | {"LD_PRELOAD": str(library), "LD_LIBRARY_PATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(argument), capture_output=True, text=True, env=env, cwd=FOLDER.parents[1], timeout=wall(100),
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def set_total(nbytes: int) -> None:
    """Set the memory of all GPUs together, in a process that has the stand-in."""
    ctypes.CDLL(None).stand_in_total(ctypes.c_size_t(nbytes))


def contexts() -> list[bool]:
    """Return whether each GPU has a context, which takes half a GiB of a real one."""
    return [bool(ctypes.CDLL(None).stand_in_has_context(index)) for index in range(2)]


def used() -> int:
    """Return the bytes that torch has taken of it."""
    library = ctypes.CDLL(None)
    library.stand_in_used.restype = ctypes.c_size_t
    return int(library.stand_in_used())
