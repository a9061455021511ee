"""Choose the distribution of Lightning that this process trains with: ``lightning`` or ``pytorch_lightning``.

Their classes have equal names and are separate, so a strategy is a subclass of one or of the other. Everything of this
package that knows Lightning imports it through `host.pytorch` and `host.fabric`. The one invariant: the choice is made
once, when the first of these is imported, and does not change afterwards.

=====================  ======================  =====================
`name`                 ``lightning``           ``pytorch_lightning``
=====================  ======================  =====================
`pytorch`              ``lightning.pytorch``   ``pytorch_lightning``
`fabric`               ``lightning.fabric``    ``lightning_fabric``
=====================  ======================  =====================

An alias such as ``zero3`` is looked up in the registry of the package whose Trainer or Fabric got it, and that package
is chosen. Otherwise the first of these that gives an answer decides: `VARIABLE`; the nearest module on the stack of
imports that imports one of the packages, be it further down in its file; the package that is loaded; the one that is
installed. Imports neither torch nor Lightning.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType, ModuleType

from ls_strategy.errors import ConfigError

__all__ = [
    "HOSTS",
    "VARIABLE",
    "bind",
    "bound",
    "import_from",
    "import_part",
    "installed",
    "loaded",
    "loaded_part",
    "name",
    "of",
    "refusal",
    "remember_for_children",
]

HOSTS: dict[str, dict[str, str]] = {
    "lightning": {"pytorch": "lightning.pytorch", "fabric": "lightning.fabric"},
    "pytorch_lightning": {"pytorch": "pytorch_lightning", "fabric": "lightning_fabric"},
}
"""Every host with the module of its Trainer and that of its Fabric."""

VARIABLE = "LS_STRATEGY_LIGHTNING"
"""Environment variable with the name of the host, for programs in which it cannot be found otherwise."""

OLDEST, TOO_NEW = (2, 6, 4), (2, 7)
"""The versions of either package that are supported: from the first on, older than the second."""

_ROOTS = {"lightning": "lightning", "pytorch_lightning": "pytorch_lightning", "lightning_fabric": "pytorch_lightning"}
"""The host that a top-level module belongs to."""

_BOUND: list[str] = []
"""The host of this process; empty until it is chosen."""


def bound() -> str | None:
    """Return the host of this process, None while it is not chosen."""
    return _BOUND[0] if _BOUND else None


def name() -> str:
    """Return the host of this process. The first call chooses it.

    Raises:
        ConfigError: `VARIABLE` names neither package, or the package has an unsupported version.
    """
    if not _BOUND:
        chosen = _choose()
        _check_version(chosen)
        _BOUND.append(chosen)
    return _BOUND[0]


def bind(host: str) -> None:
    """Choose ``host``, because a Trainer, Fabric or LightningCLI of it asks for a strategy.

    Raises:
        ConfigError: the other one was chosen before, with the cure; or the package has an unsupported version.
    """
    if bound() is None:
        _check_version(host)
        _BOUND.append(host)
    elif bound() != host:
        raise ConfigError(refusal(host))


def refusal(host: str) -> str:
    """Return why something of ``host`` cannot be used while the other one is the host of this process."""
    other = name()
    return (
        f"Got a strategy of ls_strategy for {host}, but this process uses it with {other}. Their classes are separate, "
        f"so one process can train with one of them. If the program needs only {host}: import ls_strategy in a file "
        f"that imports {host}, or set {VARIABLE}={host} in the environment. If it needs both: import everything from "
        f"{HOSTS[host]['pytorch']}, or run the part with {other} as a process of its own."
    )


def of(value: object) -> str | None:
    """Return the package that the class of ``value``, or a class it inherits from, belongs to."""
    roots = (str(each.__module__).partition(".")[0] for each in type(value).__mro__)
    return next((_ROOTS[root] for root in roots if root in _ROOTS), None)


def loaded(host: str) -> bool:
    """Return whether one of the two modules of ``host`` is imported, or about to be."""
    return any(sys.modules.get(module) is not None for module in HOSTS[host].values())


def installed() -> list[str]:
    """Return the packages that could be the host, in the order in which they are tried."""
    return [host for host in HOSTS if _exists(host)]


def _exists(module: str) -> bool:
    return sys.modules.get(module) is not None or importlib.util.find_spec(module) is not None


def import_part(path: str) -> ModuleType:
    """Import a module of the host: ``pytorch.callbacks``, ``fabric.plugins``."""
    return import_from(name(), path)


def import_from(host: str, path: str) -> ModuleType:
    """Import a module of either package, by its name as for `import_part`."""
    return importlib.import_module(_full_name(host, path))


def loaded_part(path: str) -> ModuleType | None:
    """Return a module of the host if it is imported, else None."""
    return sys.modules.get(_full_name(name(), path))


def _full_name(host: str, path: str) -> str:
    part, dot, rest = path.partition(".")
    return f"{HOSTS[host][part]}{dot}{rest}"


def show_to_others(strategy: type) -> None:
    """Let every Trainer and Fabric that is imported accept ``strategy``, an abstract class's child of one of them.

    A wrong one then sets its accelerator, so that `require_own` can give the cure. Otherwise it says that the strategy
    is "an invalid strategy name".
    """
    for parts in HOSTS.values():
        for module in parts.values():
            base = getattr(sys.modules.get(f"{module}.strategies"), "Strategy", None)
            if base is not None and not issubclass(strategy, base):
                base.register(strategy)


def require_own(accelerator: object, kind: type, cure: str) -> None:
    """Check that the accelerator that a strategy gets is set by a Trainer or Fabric which the strategy is made for.

    Args:
        accelerator: what the strategy gets.
        kind: the class that accelerators for this strategy have.
        cure: what to use in a Fabric instead of a Trainer, or the other way round.

    Raises:
        ConfigError: it belongs to the other package, or to the other kind of loop.
    """
    package = of(accelerator)
    if package is None or isinstance(accelerator, kind):
        return
    raise ConfigError(cure if package == name() else refusal(package))


def remember_for_children() -> None:
    """Let ranks that this process starts choose as it did, where they might not: both packages are loaded here."""
    if all(map(loaded, HOSTS)):
        os.environ[VARIABLE] = f"{name()}:{os.getpid()}"  # not for other programs that this process starts


# --- the choice ------------------------------------------------------------------------------------------------------


def _choose() -> str:
    named, _, parent = os.environ.get(VARIABLE, "").partition(":")
    if named and parent in ("", str(os.getppid())):
        if named not in HOSTS:
            raise ConfigError(f"Got {VARIABLE}={named!r} in the environment. Set it to one of {', '.join(HOSTS)}.")
        return named
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = _named_by(frame)
        if len(found) == 1:
            return found.pop()
        frame = frame.f_back
    present = sorted(filter(loaded, HOSTS), key=lambda host: min(map(_position, HOSTS[host].values())))
    return next(iter([*present, *installed()]), "lightning")


def _named_by(frame: FrameType) -> set[str]:
    """Return the hosts that the code of ``frame`` belongs to or imports."""
    root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if root in _ROOTS:
        return {_ROOTS[root]}
    if root in ("ls_strategy", "importlib"):
        return set()
    roots = {imported.partition(".")[0] for imported in _imports_of(frame.f_code)}
    return {_ROOTS[root] for root in roots & _ROOTS.keys()}


def _imports_of(code: CodeType) -> Iterator[str]:
    """Return the names of the modules that ``code`` itself imports, whether it has come to that yet or not."""
    if not any(named.partition(".")[0] in _ROOTS for named in code.co_names):
        return  # most frames: there is nothing to decode
    import dis

    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield str(instruction.argval)


def _position(module: str) -> int:
    """Return how many modules were imported before ``module``."""
    return next((i for i, each in enumerate(list(sys.modules)) if each == module), len(sys.modules))


def _root(module: str) -> str:
    return module.partition(".")[0]


def _check_version(host: str) -> None:
    """Refuse a version that this package was not made for.

    Raises:
        ConfigError: with the cure.
    """
    from importlib import metadata

    for module in dict.fromkeys(map(_root, HOSTS[host].values())):
        try:
            text = metadata.version(module)
        except metadata.PackageNotFoundError:
            continue  # not installed, or not by pip; then its import says so
        version = tuple(int(digits) for digits in text.split("+")[0].split(".")[:3] if digits.isdigit())
        if not version >= OLDEST or version >= TOO_NEW:
            wanted = f"{module.replace('_', '-')}>={_dotted(OLDEST)},<{_dotted(TOO_NEW)}"
            raise ConfigError(f'Got {module} {text}, but ls_strategy requires {wanted}: pip install "{wanted}"')


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
