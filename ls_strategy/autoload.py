"""Registers the aliases and checkpoint folders with Lightning, without importing Lightning or torch.

The one invariant: nothing here can make ``import torch`` or ``import lightning`` fail.

    import torch ── entry point "torch.backends" ──> install() ──> one finder on sys.meta_path
    import lightning.pytorch ... strategies has executed ──> register(StrategyRegistry)
    import lightning.fabric ... strategies has executed ──> register(STRATEGY_REGISTRY)
    import lightning.fabric.utilities.cloud_io ... has executed ──> its checkpoint reader accepts our folders
    import lightning.pytorch.cli ... has executed ──> its parser will import ls_strategy.aliases when it is made
    Trainer(strategy="zero2") ── StrategyRegistry.get ──> only now ls_strategy.lightning.strategy is imported

The same goes for ``pytorch_lightning`` and ``lightning_fabric``. Which of the two packages asks settles which classes
the strategy is made of: see `ls_strategy.host`.

torch intends this entry point group for device back ends. It is the only one that runs early enough: Lightning
validates the strategy's name before it loads its own entry points. ``import ls_strategy`` has the same effect and is
the documented way. ``LS_STRATEGY_AUTOLOAD=0`` disables both (call `register` then), and
``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` disables the entry point.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Protocol

from ls_strategy import host
from ls_strategy.distributed.launch import launcher as _launcher  # noqa: F401  (it notes the parent of this process)
from ls_strategy.lightning.checkpointing import files as lightning_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    from ls_strategy.errors import ConfigError
    from ls_strategy.fabric.strategy import ZeROFabricStrategy
    from ls_strategy.lightning.strategy import ZeROStrategy

__all__ = ["ALIASES", "install", "register"]

_REGISTRIES = {"pytorch": "StrategyRegistry", "fabric": "STRATEGY_REGISTRY"}
"""The names of the registries of Trainers and of Fabrics, in the modules ``strategies`` of both."""

ALIASES: dict[str, dict[str, object]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    # For packages that look for "ddp" in the name before they treat a Trainer as distributed.
    "ddp_zero1": {"stage": 1},
    "ddp_zero2": {"stage": 2},
    "ddp_zero3": {"stage": 3},
    # The fastest configuration that fits, planned when a fit begins.
    "zero_auto": {"stage": "auto"},
    # Master weights and optimizer states in host memory; at stage 3 parameters too, unless the name says which.
    "zero1_offload": {"stage": 1, "offload": "cpu"},
    "zero2_offload": {"stage": 2, "offload": "cpu"},
    "zero3_offload": {"stage": 3, "offload": "cpu"},
    "zero3_offload_optimizer": {"stage": 3, "offload": {"optimizer": "cpu"}},
    "zero3_offload_param": {"stage": 3, "offload": {"parameters": "cpu"}},
    # The same on a local NVMe device (ZeRO-Infinity).
    "zero1_nvme": {"stage": 1, "offload": "nvme"},
    "zero2_nvme": {"stage": 2, "offload": "nvme"},
    "zero3_nvme": {"stage": 3, "offload": "nvme"},
    "zero3_nvme_optimizer": {"stage": 3, "offload": {"optimizer": "nvme"}},
    "zero3_nvme_param": {"stage": 3, "offload": {"parameters": "nvme"}},
    # Ranks forked from the running process, as Lightning's own *_notebook aliases.
    "zero0_notebook": {"stage": 0, "start_method": "fork"},
    "zero1_notebook": {"stage": 1, "start_method": "fork"},
    "zero2_notebook": {"stage": 2, "start_method": "fork"},
    "zero3_notebook": {"stage": 3, "start_method": "fork"},
    # LightningCLI passes a lone `--trainer.strategy=ls_strategy.ZeROStrategy` on as a name in lower case.
    "zerostrategy": {},
    "ls_strategy.zerostrategy": {},
}
"""Every alias with its arguments for `ZeROStrategy`. In lower case, as Lightning looks names up."""


class _Registry(Protocol):
    """The part of Lightning's strategy registry that is used here."""

    def register(
        self,
        name: str,
        strategy: Callable[..., object] | None = None,
        description: str | None = None,
        override: bool = False,
        **init_params: Any,
    ) -> object: ...

    def available_strategies(self) -> Sequence[str]: ...


def install() -> None:
    """Register the aliases now if Lightning's strategies are loaded, otherwise when they are. Never raises."""
    with _harmless():
        if os.environ.get("LS_STRATEGY_AUTOLOAD", "1") == "0":
            return
        for name, action in _AFTER.items():
            if name in sys.modules:
                action(sys.modules[name])
        if not any(isinstance(finder, _LightningFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _LightningFinder())


def register(registry: _Registry | None = None) -> None:
    """Add every alias to ``registry``, by default to those of the package that the program uses.

    Names that exist are left alone.
    """
    if registry is not None:
        modules = (sys.modules.get(f"{parts['fabric']}.strategies") for parts in host.HOSTS.values())
        fabric = any(getattr(module, _REGISTRIES["fabric"], None) is registry for module in modules)
        _register(registry, host.of(registry) or host.name(), "fabric" if fabric else "pytorch")
        return
    for part in _REGISTRIES:
        _register_module(host.name(), part, host.import_part(f"{part}.strategies"))
    _take_folders(host.import_part("fabric.utilities.cloud_io"))


def _register(registry: _Registry, package: str, part: str) -> None:
    """Add every alias to a registry of ``package``, of its Trainer or of its Fabric."""
    taken = set(registry.available_strategies())
    kind = "ZeROStrategy" if part == "pytorch" else "ZeROFabricStrategy"
    for name, init_params in ALIASES.items():
        if name not in taken:
            arguments = ", ".join(f"{key}={value!r}" for key, value in init_params.items())
            make = partial(_CREATE[part], package)
            registry.register(name, make, description=f"{kind}({arguments})", override=False, **init_params)
    available = type(registry).available_strategies
    registry.available_strategies = lambda: _Names(available(registry))  # type: ignore[method-assign]


class _Names(list[str]):
    """Names of strategies. Looking up a misspelt alias raises an error with the correct one.

    Lightning looks the name up before it raises its own error, which does not mention our aliases.
    """

    def __contains__(self, name: object) -> bool:
        if super().__contains__(name) or not isinstance(name, str):
            return super().__contains__(name)
        import difflib

        near = difflib.get_close_matches(name, self, n=1, cutoff=0.6)
        if not name.startswith("zero") and (not near or near[0] not in ALIASES):
            return False
        raise unknown_name(name, near)


def unknown_name(name: str, near: Sequence[str]) -> ConfigError:
    """Return the error for a name that is not an alias, with the first of ``near`` that is one as the cure."""
    from ls_strategy.errors import ConfigError

    ours = [alias for alias in ALIASES if "strategy" not in alias]
    cure = next((alias for alias in near if alias in ALIASES), "zero3")
    return ConfigError(
        f"Got strategy={name!r}, but it is not the name of a strategy. Set strategy={cure!r}; the names of "
        f"ls_strategy are {', '.join(ours)}."
    )


def _create(package: str, **init_params: object) -> ZeROStrategy:
    """Make the strategy. Its module is imported here: a registry entry must not cost an import of torch."""
    host.bind(package)
    from ls_strategy.distributed.launch.ray_worker import in_train_function

    if in_train_function():
        from ls_strategy.extensions import require

        return require("strategy_in_ray", "a strategy by its alias in a train function of Ray")(**init_params)
    from ls_strategy.lightning.strategy import ZeROStrategy

    return ZeROStrategy(**init_params)  # pyright: ignore[reportArgumentType]  (the table's values; tests check them)


def _create_for_fabric(package: str, **init_params: object) -> ZeROFabricStrategy:
    host.bind(package)
    from ls_strategy.fabric.strategy import ZeROFabricStrategy

    return ZeROFabricStrategy(**init_params)  # pyright: ignore[reportArgumentType]


_CREATE: dict[str, Callable[..., object]] = {"pytorch": _create, "fabric": _create_for_fabric}


def _register_module(package: str, part: str, module: ModuleType) -> None:
    registry = getattr(module, _REGISTRIES[part], None)
    if registry is not None:
        _register(registry, package, part)


def _load_aliases(package: str, module: ModuleType) -> None:
    """Import the aliases as classes when a LightningCLI makes its parser: then it is certain whose parser it is."""
    parser = getattr(module, "LightningArgumentParser", None)
    if parser is None or hasattr(parser.__init__, "__ls_strategy__"):
        return
    init = parser.__init__

    @wraps(init)
    def init_with_aliases(self: Any, *args: Any, **kwargs: Any) -> None:
        with _harmless("give its strategies to LightningCLI"):
            if host.bound() in (None, package):
                host.bind(package)
                from importlib import import_module

                import_module("ls_strategy.aliases").explain_mistakes(parser)
        init(self, *args, **kwargs)

    init_with_aliases.__ls_strategy__ = True  # type: ignore[attr-defined]
    parser.__init__ = init_with_aliases


def _take_folders(module: ModuleType) -> None:
    with _harmless("let Lightning read its checkpoint folders"):
        lightning_files.take_folders(module)


_AFTER: dict[str, Callable[[ModuleType], None]] = {
    **{
        f"{parts[part]}.strategies": partial(_register_module, package, part)
        for package, parts in host.HOSTS.items()
        for part in _REGISTRIES
    },
    **{f"{parts['pytorch']}.cli": partial(_load_aliases, package) for package, parts in host.HOSTS.items()},
    **dict.fromkeys(lightning_files.MODULES, _take_folders),
}
"""What to do as soon as a module has executed."""


class _LightningFinder:
    """Finds modules of Lightning through the other finders, and acts after they have executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _AFTER:
            return None
        with _harmless():
            for finder in sys.meta_path:
                spec = None if finder is self else finder.find_spec(fullname, path, target)
                if spec is not None:
                    _act_after(spec.loader, _AFTER[fullname])
                    return spec
        return None


def _act_after(loader: Loader | None, action: Callable[[ModuleType], None]) -> None:
    """Make ``loader`` call ``action`` when it has executed its module."""
    if loader is None:
        return
    execute = loader.exec_module

    def execute_and_act(module: ModuleType) -> None:
        execute(module)
        with _harmless():
            action(module)

    loader.exec_module = execute_and_act


@contextlib.contextmanager
def _harmless(what: str = "register its strategy aliases"):  # noqa: ANN202  (every process with torch would import the type's module)
    """Turn an exception into a warning, and ignore a warning that is an exception (``-W error``)."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):
            warnings.warn(f"ls_strategy could not {what}: {error!r}", stacklevel=3)
