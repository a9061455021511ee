"""The CUDA kernels compile with the NVRTC beside torch, for every GPU it knows, and take what Python hands them."""

from __future__ import annotations

import ctypes
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy.ops import _build, native
from ls_strategy.ops.cuda import driver, nvrtc, program, structs
from ls_strategy.ops.cuda.program import Program
from ls_strategy.ops.cuda.update import NORM, UPDATES
from tests.ops.emulation import PROGRAMS

GPUS = (75, 80, 86, 89, 90, 100, 120)
"""From a T4 to an RTX 5090."""


@pytest.fixture
def compiler() -> nvrtc.Compiler:
    if not torch.version.cuda:
        pytest.skip("torch without CUDA brings no NVRTC")
    return nvrtc.compiler()


def compile_(compiler: nvrtc.Compiler, which: Program, architecture: str, *options: str) -> tuple[str, list[str], str]:
    """Compile for real, past the cache."""
    image, names, log = compiler.compile(
        which.source, program.sources(), list(which.kernels), architecture, (*nvrtc.OPTIONS, *options)
    )
    return image.decode("latin-1"), names, log


@pytest.mark.parametrize(
    ("which", "gpu"),
    [
        pytest.param(p, gpu, id=f"{p.name}-{gpu}", marks=() if gpu == GPUS[0] else pytest.mark.wide)
        for p, gpu in itertools.product(PROGRAMS, GPUS)
    ],
)
def test_compiles_and_stays_in_registers(compiler: nvrtc.Compiler, which: Program, gpu: int) -> None:
    if gpu not in compiler.architectures:
        pytest.skip(f"NVRTC {compiler.version} does not know sm_{gpu}")
    image, names, log = compile_(compiler, which, f"sm_{gpu}", "--ptxas-options=-v")
    assert image.startswith("\x7fELF")
    assert all(name in image for name in names)
    spills = re.findall(r"(\d+) bytes spill", log)
    assert len(spills) == 2 * len(names)
    # NVRTC 12.6 has 4 to 12 bytes in one kernel each for sm_60, sm_70 and sm_80.
    assert max(map(int, spills)) <= (0 if int(compiler.version.split(".")[0]) >= 13 else 12)


PARAMETER = re.compile(r"\.param (?:\.align (\d+) )?\.(\w+) \w+(?:\[(\d+)\])?")
SIZES = {"u64": 8, "u32": 4, "u8": 1, "b8": 1}


def parameters(ptx: str, name: str) -> list[tuple[int, int]]:
    """Return size and alignment of each of a kernel's parameters."""
    (text,) = re.findall(rf"\.entry {re.escape(name)}\((.*?)\)", ptx, re.DOTALL)
    found = []
    for align, kind, count in PARAMETER.findall(text):
        size = SIZES[kind] * int(count or 1)
        found.append((size, int(align or size)))
    return found


@pytest.mark.parametrize("which", PROGRAMS, ids=lambda p: p.name)
def test_arguments_are_those_of_the_machine_code(compiler: nvrtc.Compiler, which: Program) -> None:
    """Every kernel's parameters in PTX have the sizes that Python packs; each operation is rounded by itself."""
    ptx, names, _ = compile_(compiler, which, "compute_75")
    for (kernel, signature), name in zip(which.kernels.items(), names, strict=True):
        assert parameters(ptx, name) == [(ctypes.sizeof(t), ctypes.alignment(t)) for t in signature], kernel
    # The exact division of fp32 is made of fused operations; nothing else is.
    exact = ptx if which.name != "quantized" else ptx.split("dequantize8")[0]
    assert not re.search(r"\bfma\.|\s(add|sub|mul)\.f(32|64)\b", exact)  # the latter without .rn may become one
    assert not re.search(r"(div|sqrt)\.(approx|full)", ptx)
    assert ("__assertfail" in ptx) == (which.name == "routing")


def test_structures_have_the_layout_of_the_compiler(compiler: nvrtc.Compiler) -> None:
    """Notices a field that Python has at another place than the kernel."""
    checks = []
    for kind in structs.STRUCTURES:
        struct = kind.__name__.removesuffix("Struct")
        checks.append(f'static_assert(sizeof({struct}) == {ctypes.sizeof(kind)}, "{struct}");')
        for name, *_ in kind._fields_:
            at = getattr(kind, name).offset
            place = f"__INTADDR__(&(({struct}*)0)->{name})"  # offsetof, without its header
            checks.append(f'static_assert({place} == {at}, "{struct}.{name}");')
    headers = '#include "buffers.h"\n#include "routing.h"\n#include "quantized.h"\nusing namespace ls;\n'
    compiler.compile(headers + "\n".join(checks), program.sources(), [], "compute_75")
    with pytest.raises(_build.BuildError, match=r"static assertion"):
        compiler.compile(headers + checks[0].replace("==", "!="), program.sources(), [], "compute_75")


# --- which architecture -----------------------------------------------------------------------------------------------


def test_a_gpu_newer_than_the_compiler_gets_ptx(compiler: nvrtc.Compiler) -> None:
    newest = compiler.architectures[-1]
    assert compiler.architecture(divmod(newest, 10)) == f"sm_{newest}"
    assert compiler.architecture((99, 0)) == f"compute_{newest}"
    with pytest.raises(_build.BuildError, match=r"compiles for sm_\d+ and newer, not sm_30"):
        compiler.architecture((3, 0))


def test_what_does_not_compile_is_named(compiler: nvrtc.Compiler) -> None:
    with pytest.raises(_build.BuildError, match=r"NVRTC .* failed for sm_90: .*no_such_type"):
        compiler.compile("no_such_type x;", {}, [], "sm_90")


def test_a_missing_compiler_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(nvrtc, "_candidates", lambda major: [Path(f"/none/libnvrtc.so.{major}")])
    with pytest.raises(_build.BuildError, match=r"libnvrtc.so.12.*pip install nvidia-cuda-nvrtc-cu12$"):
        nvrtc.compiler.__wrapped__()


def test_no_library_is_taken_from_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def refuse(name: str) -> None:
        loaded.append(name)
        raise OSError

    for name in ("libnvrtc-builtins.so.13.0", "libnvrtc.so.13"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(nvrtc.ctypes, "CDLL", refuse)
    monkeypatch.setattr(nvrtc.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    with pytest.raises(_build.BuildError, match=r"pip install nvidia-cuda-nvrtc$"):
        nvrtc.compiler.__wrapped__()
    assert loaded == ["libnvrtc.so.13"]  # by name, which the loader looks for elsewhere


# --- the cache --------------------------------------------------------------------------------------------------------

MAKE = """
import json, logging, sys
lines = []
class Keep(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger("ls_strategy.ops").addHandler(Keep())
logging.getLogger("ls_strategy.ops").setLevel(logging.INFO)
from ls_strategy.ops.cuda.update import NORM
image, names = NORM.image("sm_80")
print(json.dumps({"bytes": len(image), "names": names, "lines": lines}))
"""


def make(cache: Path) -> subprocess.Popen[str]:
    environment = {"LS_STRATEGY_CACHE": str(cache), "PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/none"}
    return subprocess.Popen([sys.executable, "-c", MAKE], env=environment, stdout=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("compiler")
def test_two_ranks_compile_once_without_any_tool(tmp_path: Path) -> None:
    """Nothing is on PATH: no compiler, no ninja."""
    ranks = [make(tmp_path) for _ in range(2)]
    results = [json.loads(rank.communicate(timeout=100)[0]) for rank in ranks]
    assert sorted(bool(r["lines"]) for r in results) == [False, True]
    assert results[0]["bytes"] == results[1]["bytes"]
    assert set(results[0]["names"]) == set(NORM.kernels)
    (image,) = tmp_path.glob("*.image")
    assert image.stat().st_mode & 0o22 == 0
    assert not list(tmp_path.glob("*.build-*"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_build, "cache_dir", lambda: tmp_path)
    return tmp_path


def test_a_damaged_image_is_made_again(compiler: nvrtc.Compiler, cache: Path) -> None:
    expected = NORM.image("sm_80")
    (path,) = cache.glob("*.image")
    content = path.read_bytes()
    for damage in (b"", content[: len(content) // 2], content[:-40] + b"?" + content[-39:]):
        path.write_bytes(damage)
        assert NORM.image("sm_80") == expected
        assert path.read_bytes() == content


def test_an_image_is_of_one_source_architecture_and_compiler(
    compiler: nvrtc.Compiler, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    def compile_(_source: str, _headers: Any, kernels: list[str], architecture: str) -> tuple[bytes, list[str], str]:
        calls.append(architecture)
        return b"image", kernels, ""

    monkeypatch.setattr(compiler, "compile", compile_)
    for _ in range(2):
        NORM.image("sm_80")
    assert calls == ["sm_80"]
    NORM.image("sm_90")
    monkeypatch.setattr(compiler, "version", "99.0")
    NORM.image("sm_90")
    monkeypatch.setattr(program, "sources", lambda: {"norm.cu": "another"})
    NORM.image("sm_90")
    assert calls == ["sm_80", "sm_90", "sm_90", "sm_90"]
    assert len(list(cache.glob("*.image"))) == 4


def test_another_users_cache_is_refused(compiler: nvrtc.Compiler, cache: Path) -> None:
    cache.chmod(0o777)
    with pytest.raises(_build.BuildError, match="all users may write"):
        NORM.image("sm_80")


# --- a machine with a GPU, as far as one without can be ---------------------------------------------------------------


class Driver:
    """Loads kernels or does not."""

    def __init__(self, loads: bool) -> None:
        self.loads, self.active = loads, [1]
        self.loaded: list[int] = []

    def is_active(self, device: int) -> bool:
        return device in self.active

    def load(self, image: bytes, device: int) -> int:
        if not self.loads:
            raise RuntimeError("CUDA's driver returned CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222).")
        assert image.startswith(b"\x7fELF")
        self.loaded.append(device)
        return 1


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Driver:
    """Two unlike GPUs, of which this rank has the second."""
    fake = Driver(request.param)
    answers = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "current_device": lambda: 1,
        "get_device_capability": lambda device: [(8, 0), (9, 0)][device],
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    monkeypatch.setattr(program, "driver", lambda: fake)
    monkeypatch.setattr(UPDATES, "programs", tuple(Program(p.name, p.kernels) for p in (NORM,)))
    monkeypatch.setattr(_build, "_status", {})
    monkeypatch.setattr(native, "available", native.available.__wrapped__)
    return fake


@pytest.mark.usefixtures("compiler", "cache")
@pytest.mark.parametrize("gpus", [True], indirect=True)
@pytest.mark.parametrize("active", [[1], []])
def test_a_rank_compiles_for_all_gpus_and_loads_on_its_own(gpus: Driver, active: list[int]) -> None:
    """The context of another rank's GPU would take half a GiB there, so none is made to load."""
    gpus.active = active
    assert native.available("cuda")
    assert _build.status()["cuda"] == "native: sm_80 sm_90"
    assert gpus.loaded == active


@pytest.mark.usefixtures("compiler", "cache")
@pytest.mark.parametrize("gpus", [False], indirect=True)
def test_kernels_that_do_not_load_leave_the_references(gpus: Driver, caplog: pytest.LogCaptureFixture) -> None:
    assert not native.available("cuda")
    assert "UNSUPPORTED_PTX_VERSION" in _build.status()["cuda"]
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == 1


def test_no_driver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(driver.ctypes, "CDLL", refuse)
    with pytest.raises(_build.BuildError, match=r"CUDA's driver does not load: libcuda\.so\.1"):
        driver.driver.__wrapped__()
