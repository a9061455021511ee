"""Restores the modules after a step that ran on shapes."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

_CONTAINERS = (list, dict, set, deque, defaultdict, Counter, OrderedDict)
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module."""


@contextmanager
def unchanged(modules: Sequence[nn.Module]) -> Generator[None, None, None]:
    """Restore the attributes and buffers of modules afterwards, and what lists, dicts and sets among them contain."""
    before = [(attributes, dict(attributes)) for m in modules for attributes in (vars(m), m._buffers)]
    contents = [
        (value, copy.copy(value))
        for m in modules
        for name, value in vars(m).items()
        if type(value) in _CONTAINERS and name not in _OF_MODULES
    ]
    try:
        yield
    finally:
        for attributes, values in before:
            _restore(attributes, values)
        for value, content in contents:
            _refill(value, content)


def _restore(attributes: dict[str, Any], values: dict[str, Any]) -> None:
    for name in attributes.keys() - values.keys():
        del attributes[name]
    for name, value in values.items():
        if attributes.get(name, attributes) is not value:
            attributes[name] = value


def _refill(value: Any, content: Any) -> None:
    if len(value) != len(content) or any(a is not b for a, b in zip(_elements(value), _elements(content), strict=True)):
        value.clear()
        value.update(content) if isinstance(value, dict | set) else value.extend(content)


def _elements(value: Any) -> Iterable[Any]:
    return [each for pair in value.items() for each in pair] if isinstance(value, dict) else value
