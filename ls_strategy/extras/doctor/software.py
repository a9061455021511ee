"""Check versions of Python and packages, and the compilers of the kernels."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ls_strategy.extras.doctor.finding import Finding, one_line, run

REQUIRED = ("torch", "lightning", "fsspec")
OPTIONAL = {
    "jsonargparse": "configuration files and the command line of recipes",
    "tensorboard": "TensorBoardLogger",
    "numpy": "recipes",
    "torchvision": "recipes.cifar",
    "transformers": "models of Hugging Face",
    "safetensors": "weights of Hugging Face",
    "tiktoken": "the gpt2 tokenizer of recipes.gpt",
    "deepspeed": "comparisons in benchmarks/",
}
"""Optional packages and their uses."""

_PACKAGE = "ls_strategy"


def versions() -> Iterator[Finding]:
    """Compare Python and packages with this package's requirements."""
    yield python(sys.version_info[:2])
    yield Finding(_PACKAGE, f"{installed(_PACKAGE) or 'a source tree'}, {Path(__file__).parents[2]}")
    wanted = requirements()
    for name in REQUIRED:
        other = name == "lightning" and installed(name) is None and installed("pytorch_lightning") is not None
        yield _package("pytorch_lightning" if other else name, wanted.get(name, ""))
    for name, purpose in OPTIONAL.items():
        version = installed(name)
        yield Finding(name, version or f"not installed; for {purpose}")


def installed(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def python(version: tuple[int, ...]) -> Finding:
    """Check the interpreter. ``version`` is its major and minor number."""
    value = f"{platform.python_version()}, {sys.executable}"
    if version < (3, 10):
        return Finding("python", value, "problem", "Install Python 3.10 or newer, and this package into it.")
    return Finding("python", value)


def requirements() -> dict[str, str]:
    """Return this package's requirements: ``{"torch": ">=2.11", ...}``. Empty for a source tree without metadata."""
    try:
        from packaging.requirements import Requirement

        listed = importlib.metadata.requires(_PACKAGE) or []
    except (ImportError, importlib.metadata.PackageNotFoundError):
        return {}
    parsed = [Requirement(text) for text in listed]
    return {r.name.lower(): str(r.specifier) for r in parsed if r.marker is None}


def _package(name: str, specifier: str) -> Finding:
    version = installed(name)
    asked = f"{name}{specifier}"
    if version is None:
        return Finding(name, "not installed", "problem", f'Install it: pip install "{asked}"')
    if specifier:
        from packaging.specifiers import SpecifierSet

        if not SpecifierSet(specifier).contains(version, prereleases=True):
            return Finding(name, f"{version}, but {specifier} is required", "problem", f'pip install "{asked}"')
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken installation may raise anything
        return Finding(
            name,
            f"{version} does not import: {type(error).__name__}: {one_line(str(error))}",
            "problem",
            f'Reinstall it: pip install --force-reinstall "{asked}"',
        )
    return Finding(name, f"{version}, for {_torch_devices()}" if name == "torch" else version)


def _torch_devices() -> str:
    import torch

    if torch.version.cuda:
        return f"CUDA {torch.version.cuda}"
    return f"HIP {torch.version.hip}" if torch.version.hip else "the CPU only"


def compilers() -> Iterator[Finding]:
    """Check C++ and ninja, unless the wheel has the kernels for CPUs, and NVRTC with a GPU.

    Without kernels, torch references take their place.
    """
    import torch

    from ls_strategy.ops import _build
    from ls_strategy.ops.cuda import nvrtc

    slower = "Without it, torch references are used: the same results, but slower."
    if all(_build.shipped(name) for name in _build.CPU_LIBRARIES):
        yield Finding("C++", "not needed: the kernels for CPUs came with the wheel")
    else:
        yield from _cpu_compilers(slower)
    if torch.version.cuda is None or not torch.cuda.is_available():  # CUDA only: kernels
        reason = "this torch is built without CUDA" if torch.version.cuda is None else "this host has no GPU"
        yield Finding("NVRTC", f"not needed: {reason}")
        return
    try:
        compiler = nvrtc.compiler()
        target = compiler.architecture(torch.cuda.get_device_capability())  # CUDA only
        yield Finding("NVRTC", f"{compiler.version}, for {target}")
    except _build.BuildError as error:
        cure = f"Install torch with its CUDA packages, or a torch for older GPUs. {slower}"
        yield Finding("NVRTC", str(error), "note", cure)


def _cpu_compilers(slower: str) -> Iterator[Finding]:
    from ls_strategy.ops import _build

    try:
        recipe = _build.cpu_recipe()
        yield Finding("C++", one_line(recipe.compiler_version.splitlines()[0]))
    except _build.BuildError as error:
        chosen = "CXX names a compiler that does not run: correct it" if os.environ.get("CXX") else "Install g++"
        yield Finding("C++", str(error), "note", f"{chosen} (apt install g++, or CXX=/path/to/g++). {slower}")
    ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    if ninja:
        output, error = run([ninja, "--version"], 30)
        yield Finding("ninja", one_line(f"{output or error}, {ninja}"))
    else:
        yield Finding("ninja", "not found", "note", "pip install ninja: it compiles kernels in parallel.")
