"""Compiles the kernels for CPUs into a platform wheel, with ``HATCH_BUILD_HOOK_ENABLE_CUSTOM=1``.

Without it the wheel is pure, and neither torch nor a compiler is needed to build it. With it both are, so the build is
not isolated: CONTRIBUTING.md has the commands of a release.
"""

from __future__ import annotations

import dataclasses
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CustomBuildHook(BuildHookInterface):
    """Adds one file per library to ``ls_strategy/ops/shipped``; `ls_strategy.ops._build` finds them there."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the libraries of this source tree into files that `finalize` removes; none if it is editable."""
        if version != "standard":
            return
        sys.path.insert(0, self.root)
        try:
            from ls_strategy.ops import _build
        except ImportError as error:
            raise RuntimeError(
                f"Got HATCH_BUILD_HOOK_ENABLE_CUSTOM, but kernels are compiled against torch: {error}. Build in an "
                "environment that has ls_strategy's requirements, with --no-isolation, or unset the variable."
            ) from error
        finally:
            sys.path.remove(self.root)
        self._folder = tempfile.TemporaryDirectory(prefix="ls_strategy-wheel-")
        torch_include = _build._includes()[0].removeprefix("-I")
        # Messages of errors have paths of sources: not those of the machine that builds.
        unmoved = (f"-ffile-prefix-map={_build.SOURCES}=csrc", f"-ffile-prefix-map={torch_include}=include")
        for library in _build.CPU_LIBRARIES:
            recipe = _build.cpu_recipe(library)
            units = tuple(dataclasses.replace(u, command=(*u.command, *unmoved)) for u in recipe.units)
            recipe = dataclasses.replace(recipe, units=units, link=(*recipe.link, "-s"))
            with tempfile.TemporaryDirectory() as empty:
                content = _build._compile(recipe, Path(empty), time.monotonic() + _build.TIME_LIMIT_S)
            path = Path(self._folder.name, _build.shipped_name(library))
            path.write_bytes(_build.with_digest(content))
            build_data["force_include"][str(path)] = f"ls_strategy/ops/shipped/{path.name}"
        build_data["pure_python"] = False
        # No part of Python's C API is used, so neither a version of it (cp310) nor its stable part (abi3) is required.
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiled files; the wheel has them."""
        if version == "standard":
            self._folder.cleanup()
