"""Versions of what is imported, and the compilers that the kernels are made with."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from ls_strategy.doctor.finding import Finding, one_line

REQUIRED = ("torch", "lightning", "fsspec")
OPTIONAL = {
    "jsonargparse": "configuration files and the command line of recipes",
    "tensorboard": "TensorBoardLogger",
    "numpy": "recipes",
    "torchvision": "recipes.cifar",
    "transformers": "models of Hugging Face",
    "safetensors": "weights of Hugging Face",
    "tiktoken": "the gpt2 tokenizer of recipes.gpt",
    "deepspeed": "comparisons in tests/bench",
}
"""Packages that are used where they are installed, and for what."""

_PACKAGE = "ls_strategy"


def versions() -> Iterator[Finding]:
    """Python and packages, against what this package's metadata asks for."""
    yield python(sys.version_info[:2])
    yield Finding(_PACKAGE, f"{installed(_PACKAGE) or 'a source tree'}, {Path(__file__).parents[1]}")
    wanted = requirements()
    for name in REQUIRED:
        yield _package(name, wanted.get(name, ""))
    for name, purpose in OPTIONAL.items():
        version = installed(name)
        yield Finding(name, version or f"not installed; for {purpose}")


def installed(name: str) -> str | None:
    """Version of an installed distribution; None if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def python(version: tuple[int, ...]) -> Finding:
    """The interpreter; ``version`` is its major and minor number."""
    value = f"{platform.python_version()}, {sys.executable}"
    if version < (3, 10):
        return Finding("python", value, "problem", "Install Python 3.10 or newer, and this package into it.")
    return Finding("python", value)


def requirements() -> dict[str, str]:
    """What this package asks of others: ``{"torch": ">=2.11", ...}``. Empty for a source tree without metadata."""
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
            return Finding(name, f"{version}, where {specifier} is needed", "problem", f'pip install "{asked}"')
    try:
        importlib.import_module(name)
    except Exception as error:  # a broken installation may raise anything
        return Finding(
            name,
            f"{version} does not import: {type(error).__name__}: {one_line(str(error))}",
            "problem",
            f'Install it anew: pip install --force-reinstall "{asked}"',
        )
    return Finding(name, f"{version}{_build_of(name)}")


def _build_of(name: str) -> str:
    """For which devices torch is built."""
    if name != "torch":
        return ""
    import torch

    kind = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"HIP {torch.version.hip}" if torch.version.hip else ""
    )
    return f", for {kind or 'the CPU alone'}"


def compilers() -> Iterator[Finding]:
    """C++, ninja, and with a CUDA torch nvcc. The kernels work without: references in torch take their place."""
    import torch

    from ls_strategy.ops import _build

    slower = "Without it, the references in torch are used: the same results, slower."
    try:
        recipe = _build.cpu_recipe()
        yield Finding("C++", one_line(recipe.compiler_version.splitlines()[0]))
    except _build.BuildError as error:
        chosen = "CXX names a compiler that cannot be run: correct it" if os.environ.get("CXX") else "Install g++"
        yield Finding("C++", str(error), "note", f"{chosen} (apt install g++, or CXX=/path/to/g++). {slower}")
    ninja = shutil.which("ninja") or shutil.which("ninja", path=str(Path(sys.executable).parent))
    if ninja:
        yield Finding("ninja", _first_line([ninja, "--version"]))
    else:
        yield Finding("ninja", "not found", "note", "pip install ninja: kernels compile in parallel, once, with it.")
    if torch.version.cuda is None:
        yield Finding("nvcc", "not needed: this torch is built without CUDA")
        return
    if not torch.cuda.is_available():
        yield Finding("nvcc", "not needed: no GPU here")
        return
    try:
        version = _build.cuda_recipe((torch.cuda.get_device_capability(),)).compiler_version
        release = [line for line in version.splitlines() if "release" in line]
        yield Finding("nvcc", one_line(release[0]))
    except _build.BuildError as error:
        cure = f"Install the CUDA toolkit {torch.version.cuda}, or set CUDA_HOME to it. {slower}"
        yield Finding("nvcc", str(error), "note", cure)


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} does not run: {error}"
    return one_line(f"{done.stdout.strip()}, {command[0]}")
