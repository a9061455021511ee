"""``ZeROStrategy(deepspeed_config=...)``: options from a file become arguments before the constructor sees them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from ls_strategy.deepspeed.config import Translation, translate
from ls_strategy.errors import ConfigError

_REFINABLE = frozenset(("activation_checkpointing", "activation_offload", "nvme_io", "nvme_path"))
"""Options of which a file says less than an argument can: the argument counts."""

Init = TypeVar("Init", bound=Callable[..., None])


def takes_deepspeed_config(init: Init) -> Init:
    """Fill in the arguments of a constructor from its argument ``deepspeed_config``, which becomes a `Translation`.

    An argument that has its default gives way to the file. The signature stays what it is, for parsers that read it.

    Raises:
        ConfigError: an argument and the file say different things.
    """
    signature = inspect.signature(init)

    @wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        source = given.get("deepspeed_config")
        if source is not None:
            translation = source if isinstance(source, Translation) else translate(source)
            given.update(merged(translation, given, signature), deepspeed_config=translation)
            first, *_ = signature.parameters
            kwargs = {name: value for name, value in given.items() if name != first}
            args = ()
        init(self, *args, **kwargs)

    return wrapped  # type: ignore[return-value]


def merged(translation: Translation, given: dict[str, Any], signature: inspect.Signature) -> dict[str, Any]:
    """The translation's options, where ``given`` leaves them at their defaults or agrees."""
    options = {}
    for name, value in translation.strategy.items():
        default = signature.parameters[name].default
        there = given.get(name, default)
        if there in (default, value):
            options[name] = value
        elif name not in _REFINABLE:
            raise ConfigError(
                f"{name}={there!r}, and the DeepSpeed configuration says {name}={value!r}. Delete one of them."
            )
    return options
