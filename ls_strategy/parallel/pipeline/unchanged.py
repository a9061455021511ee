"""Restores the modules after a step that ran on shapes, and finds buffers that steps of micro-batches change."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_CONTAINERS = (list, dict, set, deque, defaultdict, Counter, OrderedDict)
_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module."""

_OF_MICRO_BATCHES = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
"""Modules whose statistics are documented to be those of micro-batches."""


class WatchedBuffers:
    """The buffers of a model outside of its blocks, as they are before the steps of the micro-batches of a batch."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        """``blocks``: names of the blocks."""
        inside = tuple(f"{name}." for name in blocks)
        self._before = [
            (module, prefix, name, buffer, _version(buffer))
            for prefix, module in model.named_modules()
            if module._buffers and not f"{prefix}.".startswith(inside) and not isinstance(module, _OF_MICRO_BATCHES)
            for name, buffer in module._buffers.items()
        ]

    def changed(self) -> str | None:
        """Return the name of a buffer that was written to, or replaced if checkpoints have it."""
        for module, prefix, name, buffer, version in self._before:
            replaced = module._buffers.get(name) is not buffer and name not in module._non_persistent_buffers_set
            if replaced or _version(buffer) != version:  # others that are replaced are caches, such as of angles
                return f"{prefix}.{name}" if prefix else name
        return None


def _version(buffer: Tensor | None) -> int:
    return 0 if buffer is None or buffer.is_inference() else buffer._version


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
