"""The CUDA kernels on a CPU: their sources, compiled by the host's compiler, as operations on tensors in host memory.

`device.cpp` runs the threads, `memory.cpp` sees each of their accesses, and `torch.h` gives the operators memory. The
sources are compiled as they are, except for what `launches.sed` says in words of C++. They become the operations
``torch.ops.ls_strategy_emulated``.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ls_strategy.ops import _build

FOLDER = Path(__file__).parent
SOURCES = Path(_build.__file__).parent / "csrc"
KERNELS = (*(SOURCES / f"{name}.cu" for name in ("update", "norm", "routing", "quantized")), FOLDER / "faults.cu")

_TRANSLATE = """{ printf '#line 1 "%s"\\n' "$2"; sed -E -f "$1" "$2"; } | { shift 2; "$@"; }"""


class EmulationError(Exception):
    """A kernel did what CUDA leaves undefined."""


def recipe() -> _build.BuildRecipe:
    """Return how the library is built.

    Raises:
        BuildError: there is no compiler.
    """
    updates = _build.cpu_recipe()
    (schemas,) = (unit for unit in updates.units if unit.name == "schemas")
    content = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.is_file()))
    # The digest makes a new library of changed headers. longjmp to another stack is what FORTIFY_SOURCE forbids.
    names = ("-Dls_strategy=ls_strategy_emulated", f"-DLS_EMULATION=0x{content.hexdigest()[:8]}")
    flags = ("-w", "-U_FORTIFY_SOURCE", *names)
    command = (*schemas.command[:-2], *flags, f"-I{FOLDER}", "-iquote", str(SOURCES), "-c")
    exact = ("-Og", "-ffp-contract=off", "-fno-math-errno", "-fsanitize=thread,alignment")
    units = [_build.CompileUnit(path.stem, (*command, str(path))) for path in sorted(FOLDER.glob("*.cpp"))]
    others = [("-include", str(SOURCES / f"{name}_schemas.cpp")) for name in ("routing", "quantized")]
    units.append(_build.CompileUnit("schemas", (*command, "-O0", *sum(others, ()), str(SOURCES / "schemas.cpp"))))
    for path in KERNELS:
        of_torch = () if path.parent == FOLDER else ("-include", str(FOLDER / "torch.h"))
        translate = ("sh", "-c", _TRANSLATE, "sh", str(FOLDER / "launches.sed"), str(path))
        units.append(_build.CompileUnit(path.stem, (*translate, *command, *exact, *of_torch, "-x", "c++", "-")))
    return _build.BuildRecipe("emulated", tuple(units), updates.link, updates.compiler_version)


class Emulation:
    """The operations, and the order of threads and blocks: ascending, descending or random."""

    def __init__(self) -> None:
        path = _build.library(recipe())
        torch.ops.load_library(path)
        self.library = ctypes.CDLL(str(path))
        self.library.emulation_error.restype = ctypes.c_char_p
        self._order = 0

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run an operation, each time in another order; tensors are read, and written where the schema says so.

        Raises:
            EmulationError: a kernel did what CUDA leaves undefined.
        """
        operation = getattr(torch.ops.ls_strategy_emulated, name).default
        arguments = operation._schema.arguments
        values = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        writable = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        self._order += 1
        with self.memory({t: n in writable for n, t in values.items() if isinstance(t, Tensor)}, order=self._order):
            return operation(**values)

    @contextlib.contextmanager
    def memory(self, tensors: dict[Tensor, bool], *, order: int) -> Iterator[None]:
        """Let kernels read tensors, and write those that are True."""
        self.library.emulation_begin(order)
        for t, writable in tensors.items():
            assert t.is_contiguous()
            size = ctypes.c_int64(t.element_size())
            self.library.emulation_allow(ctypes.c_void_p(t.data_ptr()), ctypes.c_int64(t.nbytes), size, writable)
        try:
            yield
        finally:
            self.library.emulation_end()
        message = self.library.emulation_error().decode()
        if message:
            raise EmulationError(message)
