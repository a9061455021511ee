"""Compiles ``csrc`` at first use into one library per device type, and records the reason if that is impossible.

A library uses only the stable ABI of libtorch, so it works with every torch from 2.11 on. It has code for every
instruction set, so that different nodes can share a cache. The file name contains a hash of everything that determines
the content. The first process to take a file lock builds, and the others wait. The operating system releases the lock
if its holder dies, and only a complete library gets its final name.

Environment:
    LS_STRATEGY_OPS: ``0`` uses the references in torch, ``1`` raises an error if a kernel is not available.
    LS_STRATEGY_CACHE: folder of the libraries. Default: ``ls_strategy`` in ``XDG_CACHE_HOME`` or ``~/.cache``. Other
        users must not be able to write to it or to its parents.
    CXX, CUDA_HOME: the C++ compiler, and the folder of the CUDA toolkit.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ls_strategy.errors import ConfigError
from ls_strategy.ops import _session
from ls_strategy.ops._trust import make_private, reason_against

_log = logging.getLogger("ls_strategy.ops")

TIME_LIMIT_S = 300.0
"""Limit for a build, and for waiting on another process's. One for a CPU takes ten seconds, one for a GPU a minute."""

_SOURCES = Path(__file__).parent / "csrc"
_DIGEST_BYTES = 32  # SHA-256, appended to the library: loading a truncated one would kill the process
_STABLE_ABI = "0x020b000000000000ULL"  # torch 2.11
_lock = threading.RLock()
_status: dict[str, str] = {}


class BuildError(Exception):
    """A library cannot be built or loaded; the message is one line."""


@dataclass(frozen=True)
class CompileUnit:
    """One run of a compiler that produces an object file."""

    name: str
    command: tuple[str, ...]
    """The command without the output."""


@dataclass(frozen=True)
class BuildRecipe:
    """Everything that determines the content of a library."""

    name: str
    units: tuple[CompileUnit, ...]
    link: tuple[str, ...]
    """The link command; object files and output follow its first argument."""

    compiler_version: str

    @property
    def key(self) -> str:
        """Return a hash of the sources, the commands, the compiler and the machine, without the paths of torch."""
        text = [self.compiler_version, platform.machine(), platform.libc_ver()[0]]
        text += [arg for unit in self.units for arg in unit.command if not arg.startswith("-I")]
        text += [arg for arg in self.link if not arg.startswith("-L")]
        text += [p.name + "\n" + p.read_text() for p in sorted(_SOURCES.iterdir())]
        return hashlib.sha256("\0".join(text).replace(str(_SOURCES), "csrc").encode()).hexdigest()[:20]


# --- what to compile, and with what ---------------------------------------------------------------------------------


def cpu_recipe() -> BuildRecipe:
    """Return the recipe of the CPU operations, with kernels for each instruction set."""
    compiler = _chosen_compiler() or [shutil.which("g++") or shutil.which("c++") or "g++"]
    version = _version(compiler)
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    common = ("-std=c++20", "-fPIC", "-O2", f"-DTORCH_TARGET_VERSION={_STABLE_ABI}", *(("-DLS_X86",) if x86 else ()))
    exact = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w")
    sets = {"Portable": ()}
    if x86:
        sets |= {
            "AVX2": ("-mavx2", "-mf16c"),
            "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c", "-mprefer-vector-width=512"),
        }
    units = [
        CompileUnit(f, (*compiler, *common, *_includes(), "-c", str(_SOURCES / f"{f}.cpp"))) for f in ("cpu", "schemas")
    ]
    for name, flags in sets.items():
        command = (*compiler, *common, *exact, *flags, f"-DLS_KERNELS=k{name}", "-c", str(_SOURCES / "kernels.cpp"))
        units.append(CompileUnit(f"kernels_{name.lower()}", command))
    link = (*compiler, "-shared", f"-L{_torch_folder() / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10")
    return BuildRecipe("cpu", tuple(units[::-1]), link, version)


def _chosen_compiler() -> list[str]:
    """Return the command in CXX; empty if there is none."""
    chosen = os.environ.get("CXX", "")
    try:
        return shlex.split(chosen)
    except ValueError as error:
        raise BuildError(
            f"Got CXX={chosen!r}, but it is no command line: {str(error).lower()}. Set CXX to a compiler, such as g++"
        ) from None


def cuda_recipe(capabilities: tuple[tuple[int, int], ...]) -> BuildRecipe:
    """Return the recipe of the CUDA kernels for GPUs with these compute capabilities."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    found = str(Path(home, "bin", "nvcc")) if home else shutil.which("nvcc")
    compiler = [found or "/usr/local/cuda/bin/nvcc"]
    version = _version(compiler)
    major = (torch.version.cuda or "none").split(".")[0]
    if f"release {major}." not in version:
        raise BuildError(f"{compiler[0]} is not of CUDA {major}, as torch is")
    archs = [f"-gencode=arch=compute_{a}{b},code=sm_{a}{b}" for a, b in capabilities]
    common = ("-std=c++20", "-O3", "-Xcompiler", "-fPIC", "-DUSE_CUDA", f"-DTORCH_TARGET_VERSION={_STABLE_ABI}", *archs)
    exact = ("-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false")
    names = ("update", "norm")
    units = (CompileUnit(f, (*compiler, *common, *exact, *_includes(), "-c", str(_SOURCES / f"{f}.cu"))) for f in names)
    libraries = ("-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10")
    return BuildRecipe(
        "cuda", tuple(units), (*compiler, "-shared", f"-L{_torch_folder() / 'lib'}", *libraries), version
    )


def recipe_for(device_type: str) -> BuildRecipe:
    """Return the recipe of the update kernels for this host's CPU, or for all its GPUs."""
    if device_type == "cpu":
        return cpu_recipe()
    devices = range(torch.cuda.device_count())  # CUDA only
    return cuda_recipe(tuple(sorted({torch.cuda.get_device_capability(d) for d in devices})))  # CUDA only


def _torch_folder() -> Path:
    return Path(torch.__file__).parent


def _includes() -> tuple[str, str]:
    include = _torch_folder() / "include"
    return f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}"


def _version(compiler: list[str]) -> str:
    try:
        result = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise BuildError(f"no compiler {shlex.join(compiler)} ({type(e).__name__})") from e
    if result.returncode:
        raise BuildError(f"{shlex.join(compiler)} --version failed: {_first_line(result.stderr)}")
    return result.stdout


# --- building -------------------------------------------------------------------------------------------------------


@functools.cache
def cache_dir() -> Path:
    """Return the folder of the libraries; a private temporary one if the cache cannot be created."""
    chosen = os.environ.get("LS_STRATEGY_CACHE")
    try:
        path = (
            Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "ls_strategy")
        )
        make_private(path)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return Path(_temporary().name)
    return path


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="ls_strategy-")


def library(recipe: BuildRecipe) -> Path:
    """Return the library of a recipe, built if necessary.

    Raises:
        BuildError: it cannot be built, or other users can write to the cache.
    """
    name = f"{recipe.name}-{recipe.key}.so"
    path = cache_dir() / name
    check_trusted(path.parent)
    if is_complete(path):
        return path
    if not os.access(path.parent, os.W_OK | os.X_OK):
        path = Path(_temporary().name, name)
    deadline = time.monotonic() + TIME_LIMIT_S
    try:
        with _locked(path.with_suffix(".lock"), deadline):
            if not is_complete(path):
                _build(recipe, path, deadline)
    except OSError as e:
        raise BuildError(f"{path.parent}: {e}") from e
    return path


def check_trusted(folder: Path) -> None:
    """Refuse a cache that other users can write to.

    Raises:
        BuildError: with the reason.
    """
    against = reason_against(folder)
    if against is not None:
        raise BuildError(
            f"another user's library could be loaded from the cache {folder}: {against}. Remove the permissions "
            "(chmod go-w), or set LS_STRATEGY_CACHE to a folder that only you may write to"
        )


def is_complete(path: Path) -> bool:
    """Return whether the file is a complete library that only this user can have written."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    if reason_against(path) is not None:
        return False
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return len(body) > 0 and hashlib.sha256(body).digest() == digest


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise BuildError(f"another process has held {path} for more than {TIME_LIMIT_S:.0f} s") from None
                time.sleep(0.05)
        yield  # closing the file releases the lock


def _build(recipe: BuildRecipe, path: Path, deadline: float) -> None:
    """Compile in a temporary folder, then rename. The caller holds the lock."""
    for leftover in path.parent.glob(f"{path.stem}.build-*"):  # of a builder that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{path.stem}.build-", dir=path.parent))
    try:
        objects = [f"{unit.name}.o" for unit in recipe.units]
        commands = [[*u.command, "-o", o] for u, o in zip(recipe.units, objects, strict=True)]
        link = [recipe.link[0], *objects, *recipe.link[1:], "-o", path.name]
        start = time.monotonic()
        ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
        if ninja:
            (folder / "build.ninja").write_text(_ninja_file(commands, objects, link, path.name))
            _run([ninja, "--quiet"], folder, deadline)
        else:
            for command in [*commands, link]:
                _run(command, folder, deadline)
        content = (folder / path.name).read_bytes()
        (folder / path.name).write_bytes(content + hashlib.sha256(content).digest())
        (folder / path.name).chmod(0o755)  # not writable by others, for any umask
        (folder / path.name).replace(path)
        _log.info("compiled %s in %.1f s", path, time.monotonic() - start)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _ninja_file(commands: list[list[str]], objects: list[str], link: list[str], target: str) -> str:
    """Return a ninja file with one rule per command."""
    lines: list[str] = []
    for output, command, needs in [
        *((o, c, []) for o, c in zip(objects, commands, strict=True)),
        (target, link, objects),
    ]:
        text = shlex.join(command).replace("$", "$$")
        lines += [f"rule make_{output}", f"  command = {text}", f"build {output}: make_{output} {' '.join(needs)}", ""]
    return "\n".join(lines)


def _run(command: list[str], folder: Path, deadline: float) -> None:
    """Run a command; kill it and all its children at the deadline, and when this process ends."""
    with tempfile.TemporaryFile("w+", dir=folder) as output:
        process = _session.start(command, folder, output)
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except BaseException as e:
            _session.kill_session(process.pid)
            process.wait()
            if isinstance(e, subprocess.TimeoutExpired):
                raise BuildError(f"compiling took more than {TIME_LIMIT_S:.0f} s") from None
            raise
        if code:
            output.seek(0)
            raise BuildError(f"{Path(command[0]).name} failed ({code}): {_first_line(output.read())}")


def _first_line(text: str) -> str:
    """Return the first line with an error, or else the first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")


# --- loading --------------------------------------------------------------------------------------------------------


def load(device_type: str) -> bool:
    """Return whether ``torch.ops.ls_strategy`` has kernels for a device type. The first call builds and loads them.

    Raises:
        ConfigError: they are not available, but ``LS_STRATEGY_OPS=1`` requires them.
    """
    if device_type not in _status:  # no lock once it is known
        with _lock:
            if device_type not in _status:
                _status[device_type] = _load(device_type)
    return _status[device_type].startswith("native")


def status() -> dict[str, str]:
    """Return ``native: <library>`` or ``reference: <reason>``, by requested device type."""
    return dict(_status)


def _load(device_type: str) -> str:
    mode = os.environ.get("LS_STRATEGY_OPS", "")
    if mode not in ("", "0", "1"):
        raise ConfigError(
            f"Got LS_STRATEGY_OPS={mode!r}. Set it to 0 (references in torch) or 1 (kernels or an error), or unset it."
        )
    if mode == "0":
        return "reference: LS_STRATEGY_OPS=0"
    try:
        return f"native: {_load_library(device_type)}"
    except BuildError as e:
        if mode == "1":
            raise ConfigError(f"LS_STRATEGY_OPS=1, but there is no kernel for {device_type}: {e}.") from e
        _log.warning("%s: the slower references in torch are used, no kernel: %s", device_type, e)
        return f"reference: {e}"


def _load_library(device_type: str) -> Path:
    if device_type == "cuda" and torch.version.cuda and torch.cuda.is_available():  # CUDA only
        if not load("cpu"):
            raise BuildError(f"its operations are declared in the library for cpu; {_status['cpu']}")
    elif device_type != "cpu":
        raise BuildError("no kernel is written for this device type")
    path = library(recipe_for(device_type))
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as e:
        raise BuildError(f"{path} does not load: {_first_line(str(e))}") from e
    return path
