"""Kernels of one source file: compiled into the cache, loaded at first use on each device, launched by name."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ls_strategy.ops import _build, schemas
from ls_strategy.ops._build import BuildError
from ls_strategy.ops.cuda import nvrtc
from ls_strategy.ops.cuda.driver import driver

Pointer = ctypes.c_void_p
Int64 = ctypes.c_int64

Signature = tuple[type[Any], ...]
"""Types of a kernel's arguments: `Pointer`, `Int64`, or a structure of `structs`."""


class Program:
    """Kernels of ``csrc/<name>.cu``."""

    def __init__(self, name: str, kernels: Mapping[str, Signature]) -> None:
        """Compile nothing yet.

        Args:
            name: of the source file.
            kernels: what each of them is given, by C++ expression: ``scale<float>``.
        """
        self.name = name
        self.kernels = dict(kernels)
        self._functions: dict[tuple[str, int], int] = {}
        self._modules: dict[int, tuple[int, dict[str, str]]] = {}
        self._lock = threading.Lock()

    @property
    def source(self) -> str:
        """What is compiled."""
        return f'#include "{self.name}.cu"\nusing namespace ls;\n'

    def prepare(self, capabilities: Sequence[tuple[int, int]]) -> list[str]:
        """Compile for GPUs of these compute capabilities, where the cache has nothing; return what for.

        Raises:
            BuildError: that is not possible.
        """
        architectures = sorted({nvrtc.compiler().architecture(capability) for capability in capabilities})
        for architecture in architectures:
            self.image(architecture)
        return architectures

    def image(self, architecture: str) -> tuple[bytes, dict[str, str]]:
        """Return the compiled kernels, and their names in there.

        Raises:
            BuildError: they cannot be compiled.
        """
        compiler = nvrtc.compiler()
        text = [self.source, *self.kernels, compiler.version, architecture, *nvrtc.OPTIONS, *sources().values()]
        key = hashlib.sha256("\0".join(text).encode()).hexdigest()[:20]

        def make(_folder: Path, _deadline: float) -> bytes:
            image, names, _ = compiler.compile(self.source, sources(), list(self.kernels), architecture)
            return json.dumps(dict(zip(self.kernels, names, strict=True))).encode() + b"\n" + image

        content = _build.kept(f"{self.name}-{architecture}-{key}.image", make)[1]
        names, _, image = content.partition(b"\n")
        return image, json.loads(names)

    def image_for(self, device: int) -> tuple[bytes, dict[str, str]]:
        """Return `image` for a GPU of this machine."""
        capability = torch.cuda.get_device_capability(device)  # CUDA only
        return self.image(nvrtc.compiler().architecture(capability))

    def load(self, device: int) -> None:
        """Load the kernels on a device; the first launch does otherwise.

        Raises:
            BuildError: the cache has no such kernels, and they cannot be compiled.
            RuntimeError: the driver refuses them.
        """
        with self._lock:
            if device in self._modules:
                return
            image, names = self.image_for(device)
            self._modules[device] = driver().load(image, device), names

    def launch(
        self, kernel: str, like: Tensor, blocks: int, threads: int, *arguments: Any, shared_bytes: int = 0
    ) -> None:
        """Launch a kernel on the current stream of the device of ``like``.

        Args:
            kernel: one of `kernels`.
            like: a tensor on the device.
            blocks: of threads.
            threads: of a block.
            arguments: numbers, addresses and structures, as the kernel's signature says.
            shared_bytes: of a block, beside what the kernel declares.
        """
        device = like.get_device()
        function = self._functions.get((kernel, device)) or self._find(kernel, device)
        signature = self.kernels[kernel]
        held = [a if type(a) is t else t(a) for a, t in zip(arguments, signature, strict=True)]
        pointers = (ctypes.c_void_p * len(held))(*map(ctypes.addressof, held))
        driver().launch(
            function, device, blocks=blocks, threads=threads, shared_bytes=shared_bytes,
            stream=stream_of(device), arguments=pointers,
        )  # fmt: skip

    def _find(self, kernel: str, device: int) -> int:
        self.load(device)
        module, names = self._modules[device]
        return self._functions.setdefault((kernel, device), driver().function(module, names[kernel], device))


@functools.cache
def sources() -> dict[str, str]:
    """Return the text of kernels and headers by file name."""
    return {p.name: p.read_text() for p in sorted(_build.SOURCES.iterdir()) if p.suffix in (".cu", ".cuh", ".h")}


def stream_of(device: int) -> int:
    """Return the handle of torch's current stream."""
    return torch.cuda.current_stream(device).cuda_stream  # CUDA only


class Operations:
    """Operations that these programs compute on GPUs."""

    def __init__(self, programs: tuple[Program, ...], functions: Mapping[str, Callable[..., Any]]) -> None:
        """Register nothing yet.

        Args:
            programs: their kernels.
            functions: the host's side of each, by name in `ls_strategy.ops.schemas`.
        """
        self.programs = programs
        self.functions = functions
        self._library: torch.library.Library | None = None

    def load(self) -> str:
        """Compile the kernels for all GPUs of this machine and register the operations; return what for.

        Raises:
            BuildError: that is not possible.
        """
        if not (torch.version.cuda and torch.cuda.is_available()):  # CUDA only
            raise BuildError("no kernel is written for this device type")
        count = torch.cuda.device_count()  # CUDA only
        capabilities = [torch.cuda.get_device_capability(d) for d in range(count)]  # CUDA only
        prepared = [program.prepare(capabilities) for program in self.programs]
        here = torch.cuda.current_device()  # CUDA only
        try:
            if driver().is_active(here):  # on no other: a context takes half a GiB of its device
                for program in self.programs:
                    program.load(here)
        except RuntimeError as error:
            raise BuildError(f"{error} The kernels do not load") from error
        self.register()
        return " ".join(dict.fromkeys(a for architectures in prepared for a in architectures))

    def register(self) -> None:
        """Register the operations for tensors on GPUs."""
        if self._library is None:
            self._library = torch.library.Library(schemas.LIBRARY.ns, "IMPL", "CUDA")
            for name, function in self.functions.items():
                self._library.impl(name, function)
