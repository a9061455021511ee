"""Dotted names of options, as in ``offload.optimizer``: what they stand for, and the error for a name that is unknown.

The nearest option to an unknown name is found by its words in any order: ``tensor_parallel_size`` is
``parallel.tensor.size``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar, cast

from ls_strategy.checked import call, inner_kinds, show
from ls_strategy.config.activations import ActivationsConfig
from ls_strategy.config.checkpoint import CheckpointConfig
from ls_strategy.config.compile import CompileConfig
from ls_strategy.config.group import Group
from ls_strategy.config.offload import OffloadConfig
from ls_strategy.config.parallel import ParallelConfig
from ls_strategy.config.precision import PrecisionConfig
from ls_strategy.config.sharding import ShardingConfig
from ls_strategy.errors import ConfigError

GROUPS: dict[str, type[Group]] = {
    "sharding": ShardingConfig,
    "precision": PrecisionConfig,
    "offload": OffloadConfig,
    "activations": ActivationsConfig,
    "parallel": ParallelConfig,
    "checkpoint": CheckpointConfig,
    "compile": CompileConfig,
}
"""Every group by the name of its argument."""


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries for dotted names, as on a command line (``{"offload.optimizer": "cpu"}``).

    >>> nested({"stage": 3, "parallel.tensor.size": 2, "parallel.expert": 2})
    {'stage': 3, 'parallel': {'tensor': {'size': 2}, 'expert': 2}}

    A group that is also given itself, in full or short form, is merged with its dotted options.
    """
    partly = {name.partition(".")[0] for name in options if "." in name}
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= written_options(name, value, options.get("stage", 3)) if name in partly else {name: value}
    result: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, last = name.split(".")
        inner = result
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return result


Init = TypeVar("Init", bound=Callable[..., None])


def takes_groups(init: Init) -> Init:
    """Make a constructor refuse unknown names with a suggestion. Its signature does not change."""
    options = [name for name in inspect.signature(init).parameters if name != "self"]

    @wraps(init)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        refuse_unknown(kwargs, options)
        init(*args, **kwargs)

    return cast("Init", wrapped)


def refuse_unknown(given: Mapping[str, Any], options: Sequence[str]) -> None:
    """Refuse unknown names, and a ``precision`` that is meant for the Trainer.

    Args:
        given: the options that were given.
        options: the names that exist.

    Raises:
        ConfigError: with the option that was most likely meant, or all options.
    """
    for name, value in given.items():
        if name not in options:
            raise ConfigError(
                f"Got {name}={show(value)}, but ZeROStrategy has no option {name!r}. {_nearest(name, options)}"
            )
    precision = given.get("precision")
    if isinstance(precision, (str, int)):
        raise ConfigError(
            f"Got precision={precision!r}, but here it is the group of master weights, sums and moments "
            "(PrecisionConfig): the numbers' precision is Trainer(precision=...). Set "
            f"Trainer(precision={precision!r})."
        )


def option_names() -> list[str]:
    """Return the dotted names of all options in groups, those of inner groups (``parallel.tensor.size``) last."""
    return [f"{path}.{field.name}" for path, kind in _groups().items() for field in fields(kind)]


def is_group(name: str) -> bool:
    """Return whether options are inside the option of this dotted name."""
    return name in _groups()


def _groups() -> dict[str, type[Group]]:
    """Return every group by its dotted name, inner ones (``parallel.tensor``) last."""
    found = [*GROUPS.items()]
    for path, kind in found:  # which grows meanwhile
        found += [(f"{path}.{name}", inner) for name, inner in inner_kinds(kind).items()]
    return dict(found)


def _nearest(name: str, options: Sequence[str]) -> str:
    """Return the most likely meaning of an unknown name: an option, or an option inside a group."""
    meanings = {_words(option): option for option in options}
    for path in option_names():
        parts = path.split(".")
        for first in range(len(parts)):
            meanings.setdefault(_words("_".join(parts[first:])), path)
    near = difflib.get_close_matches(_words(name), meanings, n=1)
    if not near:
        return f"Its options are {', '.join(options)}."
    found = meanings[near[0]]
    return f"Did you mean {found}: {_argument(found)}?" if "." in found else f"Did you mean {found!r}?"


def _words(name: str) -> str:
    """Return the words of a name in alphabetical order, so that ``param_offload`` is ``offload_param``."""
    return " ".join(sorted(name.split("_")))


def _argument(path: str) -> str:
    """Return the argument that sets an option, with all that its groups require.

    >>> _argument("parallel.tensor.plan")
    'parallel=ParallelConfig(tensor=TensorConfig(size=..., plan=...))'
    """
    groups, value = _groups(), "..."
    while "." in path:
        path, _, option = path.rpartition(".")
        value = call(groups[path], option, value)
    return f"{path}={value}"


def written_options(group: str, value: Any, stage: Any = 3) -> dict[str, Any]:
    """Return the dotted options that ``value`` sets: ``offload="cpu"`` sets ``offload.optimizer``, among others.

    Args:
        group: name of the group.
        value: a group, a dictionary, or a short form.
        stage: the ZeRO stage, which the short form of ``offload`` depends on.
    """
    if group in GROUPS and not isinstance(value, (Group, Mapping)):
        value = GROUPS[group].short_form(value, stage)
    result: dict[str, Any] = {}
    for name, option in _items(value).items():
        path = f"{group}.{name}"
        if path in ("parallel.tensor", "parallel.pipeline"):
            inner = {"size": option} if isinstance(option, int) else _items(option)
            result |= {f"{path}.{n}": v for n, v in inner.items()}
        else:
            result[path] = option
    return result


def default_of(name: str) -> Any:
    """Return the default of an option by its dotted name."""
    if name == "stage":
        return 3
    group, *path = name.split(".")
    value: Any = GROUPS[group]()
    for option in path:
        value = getattr(value, option)
    return value


def _items(value: Any) -> dict[str, Any]:
    if isinstance(value, Group):
        return value.written
    return {str(name): option for name, option in value.items()} if isinstance(value, Mapping) else {}
