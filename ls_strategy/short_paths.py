"""``ls_strategy.ray`` for ``ls_strategy.extras.ray``: programs and YAML files leave out that a side product is one.

Both paths give one and the same module, so classes and settings exist once. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.util import find_spec, spec_from_loader
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.abc import InspectLoader
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

_PACKAGE = "ls_strategy"
_SHORT = frozenset({"callbacks", "cli", "clouds", "conformance", "data_efficiency", "deepspeed", "doctor",
                    "huggingface", "inference", "islands", "planner", "plots", "ray", "report", "slurm",
                    "snapshots"})  # fmt: skip


def full_path(name: str) -> str | None:
    """Return the full path of a module that has a short one.

    >>> full_path("ls_strategy.ray.strategy"), full_path("ls_strategy.zero")
    ('ls_strategy.extras.ray.strategy', None)
    """
    package, _, rest = name.partition(".")
    return f"{package}.extras.{rest}" if package == _PACKAGE and rest.partition(".")[0] in _SHORT else None


class _ShortPathFinder(MetaPathFinder, Loader):
    """Finds the module under its full path, and makes the short one a second name of it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = _spec(fullname)
        if spec is None:
            return None
        # With `python -m`, the origin is what a program has as `sys.argv[0]`.
        is_package = spec.submodule_search_locations is not None
        return spec_from_loader(fullname, self, origin=spec.origin, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        full = full_path(module.__name__)
        assert full is not None
        sys.modules[module.__name__] = import_module(full)  # the import system returns what stands here

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of a program, for ``python -m ls_strategy.cli``."""
        spec = _spec(fullname)
        return None if spec is None else cast("InspectLoader", spec.loader).get_code(spec.name)


def _spec(name: str) -> ModuleSpec | None:
    """Return the spec of the module that a short path means; None if there is none."""
    full = full_path(name)
    try:
        return None if full is None else find_spec(full)
    except ModuleNotFoundError:
        return None


def install() -> None:
    """Add the finder, once."""
    if not any(isinstance(finder, _ShortPathFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _ShortPathFinder())  # before the one that would load the files a second time
