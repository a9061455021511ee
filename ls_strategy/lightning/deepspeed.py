"""``ZeROStrategy(deepspeed_config=...)``: where `ls_strategy.extras.deepspeed` plugs in.

The constructor asks `ls_strategy.extensions` for ``deepspeed_config``, a function of the strategy and of the arguments
that were passed, by name. It returns the arguments to use, with a `Configuration` as ``deepspeed_config``, of which the
strategy calls the methods. Without the argument nothing is looked up.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar

from ls_strategy.extensions import require
from ls_strategy.host.pytorch import pl
from ls_strategy.lightning.precision import ZeROPrecision

Init = TypeVar("Init", bound=Callable[..., None])


class Configuration(Protocol):
    """What a DeepSpeed configuration sets on the Trainer and the module of a strategy."""

    def precision(self, plugin: ZeROPrecision) -> ZeROPrecision:
        """Return the Trainer's plugin, or one with the configuration's precision."""
        ...

    def connect(self, module: pl.LightningModule) -> None:
        """Make ``configure_optimizers`` return what the configuration has and the module does not."""
        ...

    def disconnect(self, module: pl.LightningModule) -> None:
        """Restore the module's own ``configure_optimizers``."""
        ...

    def resolve(self, trainer: pl.Trainer, replicas: int) -> None:
        """Set clipping and accumulation on the Trainer, or compare them, for so many data-parallel ranks."""
        ...

    def watch(self, schedulers: list[Any], skipped_steps: Callable[[], int]) -> None:
        """Keep the configuration's schedule from advancing on steps that an fp16 overflow skips."""
        ...

    def check_loaders(self, trainer: pl.Trainer) -> None:
        """Compare the training DataLoaders' batch sizes with the configuration."""
        ...


def takes_deepspeed_config(init: Init) -> Init:
    """Fill in constructor arguments from ``deepspeed_config``, which becomes a `Configuration`, before ``init``.

    The signature is kept for parsers that read it.
    """
    signature = inspect.signature(init)
    own_name, *_ = signature.parameters

    @wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        if given.get("deepspeed_config") is not None:
            with_config = require("deepspeed_config", "a deepspeed_config")
            args, kwargs = (), with_config(self, {name: given[name] for name in given if name != own_name})
        init(self, *args, **kwargs)

    return wrapped  # type: ignore[return-value]
