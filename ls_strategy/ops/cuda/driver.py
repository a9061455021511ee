"""The part of CUDA's driver that loads and launches kernels, ``libcuda.so.1``."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Generator
from typing import Any

from ls_strategy.ops._build import BuildError

MOST_BLOCKS = 0x7FFFFFFF
"""Blocks of threads that one launch can take."""

_HANDLE = ctypes.c_void_p
_RETURNS_HANDLE = ctypes.POINTER(ctypes.c_void_p)
_UINT = ctypes.c_uint
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (_UINT,),
    "cuDeviceGet": (ctypes.POINTER(ctypes.c_int), ctypes.c_int),
    "cuDevicePrimaryCtxGetState": (ctypes.c_int, ctypes.POINTER(_UINT), ctypes.POINTER(ctypes.c_int)),
    "cuDevicePrimaryCtxRetain": (_RETURNS_HANDLE, ctypes.c_int),
    "cuCtxGetCurrent": (_RETURNS_HANDLE,),
    "cuCtxPushCurrent_v2": (_HANDLE,),
    "cuCtxPopCurrent_v2": (_RETURNS_HANDLE,),
    "cuModuleLoadData": (_RETURNS_HANDLE, ctypes.c_char_p),
    "cuModuleGetFunction": (_RETURNS_HANDLE, _HANDLE, ctypes.c_char_p),
    # function, grid, block, bytes of shared memory, stream, arguments, extra
    "cuLaunchKernel": (_HANDLE, *(_UINT,) * 7, _HANDLE, _RETURNS_HANDLE, _HANDLE),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class Driver:
    """A library with the functions of ``libcuda.so.1``.

    Devices are numbers, as in ``cuda:0``. Kernels belong to the device's primary context, which is torch's.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        for name, types in _CALLS.items():
            getattr(library, name).argtypes = types
        self._library = library
        self._check(library.cuInit(0))
        self._contexts: dict[int, int] = {}

    def is_active(self, device: int) -> bool:
        """Return whether this process already has the context of a device, which takes memory there."""
        flags, active = _UINT(), ctypes.c_int()
        state = self._library.cuDevicePrimaryCtxGetState(
            self._handle(device), ctypes.byref(flags), ctypes.byref(active)
        )
        self._check(state)
        return bool(active.value)

    def load(self, image: bytes, device: int) -> int:
        """Load machine code or PTX; return the module."""
        module = ctypes.c_void_p()
        with self._current(device):
            self._check(self._library.cuModuleLoadData(ctypes.byref(module), image))
        return module.value or 0

    def function(self, module: int, name: str, device: int) -> int:
        """Return a kernel of a module."""
        function = ctypes.c_void_p()
        with self._current(device):
            self._check(self._library.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
        return function.value or 0

    def launch(
        self, function: int, device: int, *, blocks: int, threads: int, shared_bytes: int, stream: int, arguments: Any
    ) -> None:
        """Launch a kernel.

        Args:
            function: from `function`.
            device: its device, on which the stream is.
            blocks: of the grid, 1 to `MOST_BLOCKS`.
            threads: of a block.
            shared_bytes: of a block, beside what the kernel declares.
            stream: the handle.
            arguments: ctypes array of pointers to each.

        Raises:
            RuntimeError: the driver refuses.
        """
        if not 0 < blocks <= MOST_BLOCKS:
            raise ValueError(f"Got a grid of {blocks} blocks, but a launch takes 1 to {MOST_BLOCKS}.")
        library, here = self._library, ctypes.c_void_p()
        library.cuCtxGetCurrent(ctypes.byref(here))
        with contextlib.nullcontext() if here.value == self._contexts.get(device, -1) else self._current(device):
            result = library.cuLaunchKernel(
                function, blocks, 1, 1, threads, 1, 1, shared_bytes, stream, arguments, None
            )  # fmt: skip
        self._check(result)

    @contextlib.contextmanager
    def _current(self, device: int) -> Generator[None, None, None]:
        """Make a device's context that of this thread: a thread that has called nothing of CUDA yet has none."""
        if device not in self._contexts:
            context = ctypes.c_void_p()
            self._check(self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), self._handle(device)))
            self._contexts[device] = context.value or 0
        self._check(self._library.cuCtxPushCurrent_v2(self._contexts[device]))
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def _handle(self, device: int) -> int:
        handle = ctypes.c_int()
        self._check(self._library.cuDeviceGet(ctypes.byref(handle), device))
        return handle.value

    def _check(self, result: int) -> None:
        if result:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(result, ctypes.byref(name))
            raise RuntimeError(
                f"ls_strategy: CUDA's driver returned {(name.value or b'an error').decode()} ({result})."
            )


@functools.cache
def driver() -> Driver:
    """Return the driver of this machine.

    Raises:
        BuildError: there is none.
    """
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError, RuntimeError) as error:
        raise BuildError(f"CUDA's driver does not load: {error}") from error
