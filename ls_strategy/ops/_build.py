"""Compiles ``csrc`` at first use, keeps the result in a cache, and records the reason if that is impossible.

A library for CPUs uses only the stable ABI of libtorch, so it works with every torch from 2.11 on. It has code for
every instruction set, so that different nodes can share a cache. `ls_strategy.ops.cuda` keeps the kernels for GPUs in
the same cache. The file name contains a hash of everything that determines the content. The first process to take a
file lock builds, and the others wait. The operating system releases the lock if its holder dies, and only a complete
file gets its final name.

A platform wheel ships the libraries for CPUs (``hatch_build.py`` compiles them); a shipped one that fits the sources
beside it is loaded, and nothing is compiled.

Environment:
    LS_STRATEGY_OPS: ``0`` uses the references in torch, ``1`` raises an error if a kernel is not available.
    LS_STRATEGY_CACHE: folder of the cache. Default: ``ls_strategy`` in ``XDG_CACHE_HOME`` or ``~/.cache``. Other
        users must not be able to write to it or to its parents.
    CXX: the C++ compiler.
"""

from __future__ import annotations

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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ls_strategy.errors import ConfigError
from ls_strategy.ops import _session
from ls_strategy.ops._trust import locked, make_private, reason_against

_log = logging.getLogger("ls_strategy.ops")

TIME_LIMIT_S = 300.0
"""Limit for a build, and for waiting on another process's. It takes ten seconds."""

SOURCES = Path(__file__).parent / "csrc"
SHIPPED = Path(__file__).parent / "shipped"
"""Libraries of a platform wheel; missing elsewhere."""

CPU_LIBRARIES = ("", "routing", "linear", "quantized")
"""First words of the source files' names, see `cpu_recipe`."""

_DIGEST_BYTES = 32  # SHA-256, appended to a file: loading a truncated one would kill the process
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
        text += [p.name + "\n" + p.read_text(encoding="utf-8") for p in sorted(SOURCES.iterdir())]
        return hashlib.sha256("\0".join(text).replace(str(SOURCES), "csrc").encode()).hexdigest()[:20]


# --- what to compile, and with what ---------------------------------------------------------------------------------


def cpu_recipe(library: str = "") -> BuildRecipe:
    """Return the recipe of a library for this host's CPU, with kernels for each instruction set.

    ``library`` is the first word of its source files' names; empty for the updates and norms.

    Raises:
        BuildError: there is no compiler.
    """
    compiler = _chosen_compiler() or [shutil.which("g++") or shutil.which("c++") or "g++"]
    return _cpu_recipe(library, compiler, _version(compiler))


def _cpu_recipe(library: str, compiler: list[str], version: str) -> BuildRecipe:
    prefix = f"{library}_" * bool(library)
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    common = ("-std=c++20", "-fPIC", "-O2", f"-DTORCH_TARGET_VERSION={_STABLE_ABI}", *(("-DLS_X86",) if x86 else ()))
    exact = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-w")
    sets = {"Portable": ()}
    if x86:
        sets |= {
            "AVX2": ("-mavx2", "-mf16c"),
            "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mf16c", "-mprefer-vector-width=512"),
        }
    units = [CompileUnit("cpu", (*compiler, *common, *_includes(), "-c", str(SOURCES / f"{prefix}cpu.cpp")))]
    for name, flags in sets.items():
        source = str(SOURCES / f"{prefix}kernels.cpp")
        command = (*compiler, *common, *exact, *flags, f"-DLS_KERNELS=k{name}", "-c", source)
        units.append(CompileUnit(f"kernels_{name.lower()}", command))
    link = (*compiler, "-shared", f"-L{Path(torch.__file__).parent / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10")
    return BuildRecipe(f"{prefix}cpu".replace("_", "-"), tuple(units[::-1]), link, version)


def _chosen_compiler() -> list[str]:
    """Return the command in CXX; empty if there is none."""
    chosen = os.environ.get("CXX", "")
    try:
        return shlex.split(chosen)
    except ValueError as error:
        raise BuildError(
            f"Got CXX={chosen!r}, but it is no command line: {str(error).lower()}. Set CXX to a compiler, such as g++"
        ) from None


def _includes() -> tuple[str, str]:
    include = Path(torch.__file__).parent / "include"
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
    return kept(f"{recipe.name}-{recipe.key}.so", functools.partial(_compile, recipe))[0]


def kept(name: str, make: Callable[[Path, float], bytes]) -> tuple[Path, bytes]:
    """Return a file of the cache and its content.

    Args:
        name: with a hash of everything that determines the content.
        make: called if the file is missing or damaged, with an empty folder that goes away afterwards, and the time by
            the monotonic clock at which to give up; returns the content.

    Raises:
        BuildError: it cannot be made, or other users can write to the cache.
    """
    path = cache_dir() / name
    check_trusted(path.parent)
    content = read(path)
    if content is not None:
        return path, content
    if not os.access(path.parent, os.W_OK | os.X_OK):
        path = Path(_temporary().name, name)
    deadline = time.monotonic() + TIME_LIMIT_S
    try:
        with locked(path.with_suffix(".lock"), deadline):
            content = read(path)
            return path, content if content is not None else _make(path, make, deadline)
    except BlockingIOError:
        raise BuildError(
            f"another process has held {path.with_suffix('.lock')} for more than {TIME_LIMIT_S:.0f} s"
        ) from None
    except OSError as e:
        raise BuildError(f"{path.parent}: {e}") from e


def shipped_name(library: str) -> str:
    """Return the name of a library of `CPU_LIBRARIES` in a wheel, with a hash of the sources, flags and machine.

    The compiler is not part of it: only the machine that builds the wheel has it. The name is an identifier, as
    checkers of wheels expect of a file that Python might import.
    """
    recipe = _cpu_recipe(library, [], "")
    return f"{recipe.name}-{recipe.key}.so".replace("-", "_")


def shipped(library: str) -> Path | None:
    """Return a library that came with the wheel; None if there is none that is complete and fits the sources.

    Its owner is not asked, unlike that of a file in the cache: whoever may write to it may write to this module.
    """
    path = SHIPPED / shipped_name(library)
    try:
        return path if _body(path.read_bytes()) is not None else None
    except OSError:
        return None


def with_digest(content: bytes) -> bytes:
    """Return the content of a file that `read` and `shipped` accept."""
    return content + hashlib.sha256(content).digest()


def _body(content: bytes) -> bytes | None:
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    return body if len(body) > 0 and hashlib.sha256(body).digest() == digest else None


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


def read(path: Path) -> bytes | None:
    """Return the content of a complete file that only this user can have written; None otherwise."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if reason_against(path) is not None:
        return None
    return _body(content)


def _make(path: Path, make: Callable[[Path, float], bytes], deadline: float) -> bytes:
    """Make a file in a temporary folder, then rename it. The caller holds the lock."""
    for leftover in path.parent.glob(f"{path.stem}.build-*"):  # of a builder that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{path.stem}.build-", dir=path.parent))
    try:
        start = time.monotonic()
        content = make(folder, deadline)
        complete = folder / "complete"
        complete.write_bytes(with_digest(content))
        complete.chmod(0o755)  # not writable by others, for any umask
        complete.replace(path)
        _log.info("compiled %s in %.1f s", path, time.monotonic() - start)
        return content
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compile(recipe: BuildRecipe, folder: Path, deadline: float) -> bytes:
    """Return a library, compiled in an empty folder."""
    objects = [f"{unit.name}.o" for unit in recipe.units]
    commands = [[*u.command, "-o", o] for u, o in zip(recipe.units, objects, strict=True)]
    target = f"{recipe.name}.so"
    link = [recipe.link[0], *objects, *recipe.link[1:], "-o", target]
    ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    if ninja:
        (folder / "build.ninja").write_text(_ninja_file(commands, objects, link, target))
        _run([ninja, "--quiet"], folder, deadline)
    else:
        for command in [*commands, link]:
            _run(command, folder, deadline)
    return (folder / target).read_bytes()


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


def load(device_type: str, load_kernels: Callable[[], str] | None = None) -> bool:
    """Return whether ``torch.ops.ls_strategy`` has kernels for a device type. The first call builds and loads them.

    Args:
        device_type: of tensors.
        load_kernels: does it and returns what they are; the default is for CPUs.

    Raises:
        ConfigError: they are not available, but ``LS_STRATEGY_OPS=1`` requires them.
    """
    if device_type not in _status:  # no lock once it is known
        with _lock:
            if device_type not in _status:
                _status[device_type] = _load(device_type, load_kernels)
    return _status[device_type].startswith("native")


def status() -> dict[str, str]:
    """Return ``native: <library or architectures>`` or ``reference: <reason>``, by requested device type."""
    return dict(_status)


def _load(device_type: str, load_kernels: Callable[[], str] | None = None) -> str:
    mode = os.environ.get("LS_STRATEGY_OPS", "")
    if mode not in ("", "0", "1"):
        raise ConfigError(
            f"Got LS_STRATEGY_OPS={mode!r}. Set it to 0 (references in torch) or 1 (kernels or an error), or unset it."
        )
    if mode == "0":
        return "reference: LS_STRATEGY_OPS=0"
    try:
        if load_kernels is not None:
            return f"native: {load_kernels()}"
        if device_type != "cpu":
            raise BuildError("no kernel is written for this device type")
        return f"native: {load_library('')}"
    except BuildError as e:
        if mode == "1":
            raise ConfigError(f"LS_STRATEGY_OPS=1, but there is no kernel for {device_type}: {e}.") from e
        _log.warning(
            "%s: the slower references in torch are used, no kernel: %s. Updates and norms have the same bits, but "
            "read and write 6 to 60 times as much memory; ls-strategy doctor names the cure",
            device_type,
            e,
        )
        return f"reference: {e}"


def load_library(name: str) -> Path:
    """Load a library for CPUs, of `CPU_LIBRARIES`: the wheel's if it fits, else one that is built if necessary.

    Raises:
        BuildError: that is not possible.
    """
    path = shipped(name)
    if path is not None:
        try:
            torch.ops.load_library(path)
            return path
        except OSError as e:  # not for this libc, for example
            _log.info("%s does not load, and one is compiled instead: %s", path, _first_line(str(e)))
    path = library(cpu_recipe(name))
    try:
        torch.ops.load_library(path)
    except (OSError, RuntimeError) as e:
        raise BuildError(f"{path} does not load: {_first_line(str(e))}") from e
    return path
