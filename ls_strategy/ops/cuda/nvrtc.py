"""NVRTC, the run-time compiler of CUDA, which is installed with torch. It needs no GPU, no ``nvcc`` and no headers."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from ls_strategy.ops._build import BuildError

OPTIONS = ("--std=c++20", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false", "--disable-warnings")
"""Every operation is rounded by itself, as in the references."""


class Compiler:
    """An NVRTC library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Ask for its version and architectures.

        Raises:
            BuildError: it is none, or is broken.
        """
        self._library = library
        major, minor, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        try:
            self._check(library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
            self._check(library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
            numbers = (ctypes.c_int * count.value)()
            self._check(library.nvrtcGetSupportedArchs(numbers))
        except AttributeError as missing:
            raise BuildError(f"NVRTC is too old: {missing}") from missing
        self.version = f"{major.value}.{minor.value}"
        self.architectures = sorted(numbers)
        """Compute capabilities it compiles for, as 10 * major + minor."""

    def architecture(self, capability: tuple[int, int]) -> str:
        """Return what to compile for a GPU: machine code, or PTX for one that is newer than NVRTC.

        Raises:
            BuildError: the GPU is too old.
        """
        number = 10 * capability[0] + capability[1]
        if number in self.architectures:
            return f"sm_{number}"
        older = [a for a in self.architectures if a < number]
        if not older:
            raise BuildError(f"NVRTC {self.version} compiles for sm_{self.architectures[0]} and newer, not sm_{number}")
        return f"compute_{older[-1]}"

    def compile(
        self,
        source: str,
        headers: Mapping[str, str],
        kernels: Sequence[str],
        architecture: str,
        options: Sequence[str] = OPTIONS,
    ) -> tuple[bytes, list[str], str]:
        """Compile kernels.

        Args:
            source: C++.
            headers: text of what it may include, by name.
            kernels: C++ expressions that name them in the global scope: ``scale<float>``.
            architecture: ``sm_90`` for machine code, ``compute_90`` for PTX.
            options: of the compiler.

        Returns:
            the machine code or PTX, the kernels' names in it, and the log.

        Raises:
            BuildError: the compiler refuses them.
        """
        library, program = self._library, ctypes.c_void_p()
        texts, names = _strings(headers.values()), _strings(headers)
        created = library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"ls_strategy.cu", len(headers), texts, names
        )
        self._check(created)
        try:
            for kernel in kernels:
                self._check(library.nvrtcAddNameExpression(program, kernel.encode()))
            flags = _strings([f"--gpu-architecture={architecture}", *options])
            failed = library.nvrtcCompileProgram(program, len(flags), flags)
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if failed:
                lines = [line.strip() for line in log.splitlines() if line.strip()]
                first = next((line for line in lines if "error" in line), lines[0] if lines else self._error(failed))
                raise BuildError(f"NVRTC {self.version} failed for {architecture}: {first}")
            image = self._bytes(program, "CUBIN" if architecture.startswith("sm_") else "PTX")
            return image, [self._lowered(program, kernel) for kernel in kernels], log
        finally:
            library.nvrtcDestroyProgram(ctypes.byref(program))

    def _lowered(self, program: ctypes.c_void_p, kernel: str) -> str:
        name = ctypes.c_char_p()
        self._check(self._library.nvrtcGetLoweredName(program, kernel.encode(), ctypes.byref(name)))
        return (name.value or b"").decode()

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        result = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, result))
        return result.raw

    def _check(self, result: int) -> None:
        if result:
            raise BuildError(f"NVRTC failed: {self._error(result)}")

    def _error(self, result: int) -> str:
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return self._library.nvrtcGetErrorString(result).decode()


def _strings(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


@functools.cache
def compiler() -> Compiler:
    """Return the compiler of torch's CUDA.

    Raises:
        BuildError: there is none.
    """
    major = (torch.version.cuda or "").split(".")[0]
    if not major:
        raise BuildError("this torch is built without CUDA")
    for path in _candidates(major):
        try:
            # It looks for this library by name, and not in its own folder. A mere name has no folder.
            for builtins in path.parent.glob("libnvrtc-builtins*.so*") if path.is_absolute() else ():
                if ".alt." not in builtins.name:
                    ctypes.CDLL(str(builtins))
            return Compiler(ctypes.CDLL(str(path)))
        except OSError:
            continue
    package = "nvidia-cuda-nvrtc" if int(major) >= 13 else f"nvidia-cuda-nvrtc-cu{major}"
    raise BuildError(f"libnvrtc.so.{major}, the compiler of CUDA, is not installed: pip install {package}")


def _candidates(major: str) -> Iterator[Path]:
    """Where wheels of torch, conda and the toolkit put the library."""
    wheels = importlib.util.find_spec("nvidia")
    folders = [
        Path(site, *rest)
        for site in (wheels.submodule_search_locations or [] if wheels else [])
        for rest in ((f"cu{major}", "lib"), ("cuda_nvrtc", "lib"))
    ]
    folders.append(Path(torch.__file__).parent / "lib")
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders += [Path(home, "lib64"), Path(home, "lib")] if home else []
    for folder in folders:
        yield from sorted(folder.glob(f"libnvrtc.so.{major}*"))
        yield from sorted(folder.glob(f"libnvrtc-[0-9a-f]*.so.{major}*"))
    yield Path(f"libnvrtc.so.{major}")  # where the loader looks
