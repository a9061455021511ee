"""Factories for the ``optimizer`` and ``scheduler`` blocks of a DeepSpeed configuration.

Fills in DeepSpeed's defaults where they differ from torch's: its Adam decouples weight decay by default, as AdamW does,
and its weight decay is 0, not AdamW's 0.01. Lamb is the paper's, in which the bias correction is part of the update
whose norm counts; DeepSpeed's kernel multiplies the rate by it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from ls_strategy.errors import ConfigError
from ls_strategy.extras.deepspeed.schedules import SCHEDULES, Schedule
from ls_strategy.ops.lion import Lion
from ls_strategy.optimizers.layerwise import Lamb
from ls_strategy.optimizers.muon import Muon

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
_AUTO = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "warmup_min_lr": 0.0}
"""Values of "auto" that neither the module nor the Trainer provides: defaults of Hugging Face's Trainer."""

_HARMLESS = {"bias_correction": True, "amsgrad": False, "set_grad_none": True, "fp32_optimizer_states": True}
"""Arguments of DeepSpeed's kernels, with the only value that is supported."""

_NOT_SUPPORTED = {
    "onebitadam": "DeepSpeed itself has removed it",
    "onebitlamb": "DeepSpeed itself has removed it",
    "zerooneadam": "DeepSpeed itself has removed it",
    "muadam": "it needs the package mup",
    "muadamw": "it needs the package mup",
    "musgd": "it needs the package mup",
}


@dataclass(frozen=True)
class OptimizerBlock:
    """Type and arguments of the ``optimizer`` block."""

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kind, arguments = self._resolve()
        accepted = [name for name in inspect.signature(kind).parameters if name != "params"]
        for name in arguments:
            if name not in accepted:
                raise ConfigError(
                    f"Got optimizer.params.{name}, but {kind.__name__} takes {', '.join(accepted)}. Delete it, or "
                    "build the optimizer in configure_optimizers."
                )

    def describe(self) -> str:
        """Return the constructor call, for the report."""
        kind, arguments = self._resolve()
        return f"{kind.__name__}({', '.join(f'{k}={v}' for k, v in arguments.items())})"

    def build(
        self, params: Iterable[Any], auto: Mapping[str, Any] | None = None, names: Mapping[int, str] | None = None
    ) -> Optimizer:
        """Return the optimizer.

        Args:
            params: parameters.
            auto: values of "auto", by argument: ``{"lr": module.lr}``.
            names: ``id(parameter)`` -> its name, by which DeepSpeed chooses what Muon updates.

        Raises:
            ConfigError: The value of an "auto" is unknown.
        """
        kind, arguments = self._resolve()
        given = [((names or {}).get(id(p), ""), p) for p in params] if kind is muon else params
        return kind(given, **_without_auto(arguments, auto or {}, "optimizer"))

    def _resolve(self) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
        arguments, name = dict(self.params), self.type.lower()
        if name in _NOT_SUPPORTED:
            raise ConfigError(
                f"Got optimizer.type={self.type!r}, but {_NOT_SUPPORTED[name]}. Choose AdamW, Lion, Adagrad or an "
                "optimizer of torch.optim, or build one in configure_optimizers."
            )
        if "max_grad_norm" in arguments:
            raise ConfigError("Got optimizer.params.max_grad_norm, which DeepSpeed refuses too. Set gradient_clipping.")
        if "betas" in arguments and arguments["betas"] != "auto":
            arguments["betas"] = tuple(arguments["betas"])
        if name in ("adam", "adamw"):
            return _adam(name, arguments)
        if name in ("lion", "adagrad"):
            _drop_harmless(arguments)
            defaults = {"lr": 1e-3, "betas": (0.9, 0.99)} if name == "lion" else {}
            kind = Lion if name == "lion" else torch.optim.Adagrad
            return kind, {**defaults, **arguments}
        if name == "muon":
            return muon, arguments
        if name == "lamb":
            return _lamb(arguments)
        kind = getattr(torch.optim, self.type, None)
        if not inspect.isclass(kind) or not issubclass(kind, Optimizer):
            raise ConfigError(
                f"Got optimizer.type={self.type!r}. Choose Adam, AdamW, Lion, Adagrad, Muon, Lamb or the exact name of "
                "an optimizer of torch.optim, or build one in configure_optimizers."
            )
        return kind, arguments


def _adam(name: str, arguments: dict[str, Any]) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    decoupled = arguments.pop("adam_w_mode", True) or name == "adamw"
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    if arguments.pop("torch_adam", False):  # with torch's defaults
        arguments.pop("fp32_optimizer_states", None)
        return kind, arguments
    _drop_harmless(arguments)
    return kind, {**_ADAM, **arguments}


def muon(  # noqa: PLR0913  (the arguments of the block)
    params: Iterable[tuple[str, Any]],
    lr: float = 2e-2,
    muon_lr: float | None = None,
    adam_lr: float | None = None,
    *,
    momentum: float = 0.95,
    weight_decay: float = 0.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-10,
) -> Optimizer:
    """Return Muon with DeepSpeed's defaults, and its choice: matrices without "embed" or "lm_head" in their names."""
    pairs = list(params)
    chosen = [p for n, p in pairs if p.dim() >= 2 and not any(word in n.lower() for word in ("embed", "lm_head"))]
    taken = set(map(id, chosen))
    others = [p for _, p in pairs if id(p) not in taken]
    groups = [
        {"params": chosen, "lr": lr if muon_lr is None else muon_lr},
        {"params": others, "lr": lr if adam_lr is None else adam_lr, "use_muon": False},
    ]
    settings: dict[str, Any] = {"momentum": momentum, "weight_decay": weight_decay, "betas": betas, "eps": eps}
    return Muon([group for group in groups if group["params"]], lr=lr, adjust_lr="original", **settings)


def _lamb(arguments: dict[str, Any]) -> tuple[Callable[..., Optimizer], dict[str, Any]]:
    _drop_harmless(arguments)
    for theirs, ours in (("max_coeff", "max_ratio"), ("min_coeff", "min_ratio")):
        if theirs in arguments:
            arguments[ours] = arguments.pop(theirs)
    return Lamb, {"eps": 1e-8, "max_ratio": 10.0, "min_ratio": 0.01, **arguments}


def _drop_harmless(arguments: dict[str, Any]) -> None:
    for name, harmless in _HARMLESS.items():
        value = arguments.pop(name, harmless)
        if value != harmless:
            raise ConfigError(
                f"Got optimizer.params.{name}={value!r}, but only {harmless!r} is supported. Delete it, or build the "
                "optimizer in configure_optimizers."
            )


@dataclass(frozen=True)
class SchedulerBlock:
    """Type and arguments of the ``scheduler`` block."""

    type: str
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.type not in SCHEDULES:
            raise ConfigError(
                f"Got scheduler.type={self.type!r}, but DeepSpeed has {', '.join(SCHEDULES)}. Return a torch schedule "
                "from configure_optimizers."
            )
        signature = inspect.signature(SCHEDULES[self.type]).parameters
        accepted = [name for name in signature if name != "optimizer"]
        for name in self.params:
            if name not in accepted:
                raise ConfigError(
                    f"Got scheduler.params.{name}, but {self.type} takes {', '.join(accepted)}. Delete it."
                )
        for name in accepted:
            if signature[name].default is inspect.Parameter.empty and name not in self.params:
                raise ConfigError(f"Got no scheduler.params.{name}, but {self.type} requires it. Add it.")

    def describe(self) -> str:
        """Return the constructor call, for the report."""
        return f"{self.type}({', '.join(f'{k}={v}' for k, v in self.params.items())})"

    def build(self, optimizer: Optimizer, auto: Mapping[str, Any] | None = None) -> Schedule:
        """Return the schedule, which sets the optimizer's first learning rate. ``auto`` has the values of "auto".

        Raises:
            ConfigError: The value of an "auto" is unknown, or a value is out of range.
        """
        known = {"warmup_max_lr": [group["lr"] for group in optimizer.param_groups], **(auto or {})}
        return SCHEDULES[self.type](optimizer, **_without_auto(self.params, known, "scheduler"))


def _without_auto(arguments: Mapping[str, Any], auto: Mapping[str, Any], block: str) -> dict[str, Any]:
    known = {**_AUTO, **auto}
    result = {}
    for name, value in arguments.items():
        if value == "auto" and known.get(name) is None:
            cure = "Give the module an attribute lr or learning_rate, or write" if name == "lr" else "Write"
            raise ConfigError(f'Got {block}.params.{name}="auto", but its value is unknown. {cure} a number.')
        result[name] = known[name] if isinstance(value, str) and value == "auto" else value
    return result
