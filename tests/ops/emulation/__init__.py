"""The CUDA kernels on a CPU: their sources, compiled by the host's compiler, behind the functions of CUDA's driver.

`device.cpp` runs the threads, `memory.cpp` sees each of their accesses, and `driver.cpp` is what the package calls in
the place of ``libcuda.so.1``. So grids, arguments, their order, types and sizes are those that a GPU would get. The
sources are compiled as they are, except for what `words.sed` says in words of C++.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ls_strategy.ops import _build
from ls_strategy.ops.cuda import program, quantized, routing, update
from ls_strategy.ops.cuda.driver import Driver
from ls_strategy.ops.cuda.program import Pointer, Program

FOLDER = Path(__file__).parent
OPERATIONS = (update.UPDATES, routing.OPERATIONS, quantized.OPERATIONS)
PROGRAMS = tuple(each for operations in OPERATIONS for each in operations.programs)
ON_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
FAULTS = Program(
    "faults",
    {
        "sum_kernel": (Pointer, Pointer, ctypes.c_bool, ctypes.c_bool),
        "divergent_barrier_kernel": (),
        "divergent_lanes_kernel": (Pointer,),
        "two_meetings_kernel": (Pointer,),
        "copy_kernel": (Pointer, Pointer, ctypes.c_int, ctypes.c_int),
        "same_element_kernel": (Pointer,),
        "count_kernel": (Pointer, ctypes.c_bool),
        "assert_kernel": (),
    },
)

# Runs the command in $4... on the source $2, translated by $1, and followed by $3.
_TRANSLATE = """{ printf '#line 1 "%s"\\n' "$2"; sed -E -f "$1" "$2"; printf '%s' "$3"; } | { shift 3; "$@"; }"""


class EmulationError(Exception):
    """A kernel did what CUDA leaves undefined."""


def recipe() -> _build.BuildRecipe:
    """Return how the library is built.

    Raises:
        BuildError: there is no compiler.
    """
    cpu = _build.cpu_recipe()
    content = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.is_file()))
    # The digest makes a new library of changed headers. longjmp to another stack is what FORTIFY_SOURCE forbids.
    flags = ("-std=c++20", "-fPIC", "-w", "-U_FORTIFY_SOURCE", f"-DLS_EMULATION=0x{content.hexdigest()[:8]}")
    command = (cpu.units[0].command[0], *flags, f"-I{FOLDER}", "-iquote", str(_build.SOURCES), "-c")
    exact = ("-Og", "-ffp-contract=off", "-fno-math-errno", "-fsanitize=thread,alignment")
    units = [_build.CompileUnit(path.stem, (*command, "-O2", str(path))) for path in sorted(FOLDER.glob("*.cpp"))]
    for each in (*PROGRAMS, FAULTS):
        path = (FOLDER if each is FAULTS else _build.SOURCES) / f"{each.name}.cu"
        translate = ("sh", "-c", _TRANSLATE, "sh", str(FOLDER / "words.sed"), str(path), _entries(each))
        words = ("-include", str(FOLDER / "cuda_runtime.h"), "-x", "c++", "-")
        units.append(_build.CompileUnit(each.name, (*translate, *command, *exact, *words)))
    return _build.BuildRecipe("emulated", tuple(units), (cpu.link[0], "-shared"), cpu.compiler_version)


def _entries(of: Program) -> str:
    """Return C++ that tells the driver of the kernels."""
    entries = [f'{{"{k}", emulation::Kernel<{k}>::launch}}' for k in of.kernels]
    table = f"static const emulation::Entry entries[] = {{{', '.join(entries)}}};"
    return f"namespace ls {{}} using namespace ls; {table}"


class Allocations(TorchDispatchMode):
    """Lets kernels use the memory that the host's code takes, which holds nothing yet."""

    def __init__(self, library: ctypes.CDLL, known: Sequence[Tensor]) -> None:
        super().__init__()
        self._library = library
        self._held = list(known)  # no address is used twice
        self._known = {t.untyped_storage().data_ptr() for t in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and t.numel() and t.untyped_storage().data_ptr() not in self._known:
                if "empty" in func.__name__:
                    ctypes.memset(t.data_ptr(), 0xAB, t.nbytes)
                self._held.append(t)
                self._known.add(t.untyped_storage().data_ptr())
                allow(self._library, t, writable=True)
        return result


def allow(library: ctypes.CDLL, t: Tensor, *, writable: bool) -> None:
    """Let kernels read a tensor, or write it too."""
    size = ctypes.c_int64(t.element_size())
    library.emulation_allow(ctypes.c_void_p(t.data_ptr()), ctypes.c_int64(t.nbytes), size, writable)


class Emulation:
    """The operations, and the order of threads and blocks: ascending, descending or random."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(_build.library(recipe())))
        self.library.emulation_error.restype = ctypes.c_char_p
        self.driver = Driver(self.library)
        for each in OPERATIONS:
            each.register()
        self._order = 0

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run an operation as torch calls it on a GPU, each time in another order of threads and blocks.

        Tensors are read, and written where the schema says so.

        Raises:
            EmulationError: a kernel did what CUDA leaves undefined.
        """
        operation = getattr(torch.ops.ls_strategy, name).default
        arguments = operation._schema.arguments
        values = dict(zip((a.name for a in arguments), args, strict=False)) | kwargs
        writable = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        self._order += 1
        tensors = {t: n in writable for n, t in values.items() if isinstance(t, Tensor)}
        with self.memory(tensors, order=self._order), Allocations(self.library, list(tensors)):
            return operation.redispatch(ON_CUDA, *(values[a.name] for a in arguments if a.name in values))

    @contextlib.contextmanager
    def memory(self, tensors: dict[Tensor, bool], *, order: int) -> Iterator[None]:
        """Let kernels read tensors, and write those that are True."""
        self.library.emulation_begin(order)
        for t, writable in tensors.items():
            assert t.is_contiguous()
            allow(self.library, t, writable=writable)
        try:
            with self.in_place_of_cuda():
                yield
        finally:
            self.library.emulation_end()
        message = self.library.emulation_error().decode()
        if message:
            raise EmulationError(message)

    @contextlib.contextmanager
    def in_place_of_cuda(self) -> Iterator[None]:
        """Launch kernels here."""

        def image_for(self: Program, _device: int) -> tuple[bytes, dict[str, str]]:
            return b"emulated", {kernel: kernel for kernel in self.kernels}

        with (
            mock.patch.object(program, "driver", return_value=self.driver),
            mock.patch.object(program, "stream_of", return_value=0),
            mock.patch.object(Program, "image_for", image_for),
        ):
            yield
