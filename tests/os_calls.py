"""Functions of `os` replaced for a while, wherever pathlib looks for them."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Inside, ``os.NAME`` is another function for every given name, for pathlib too.

    Python 3.10 took its functions from `os` when pathlib was imported; later versions look them up at each call.
    """
    accessor = getattr(pathlib, "_NormalAccessor", None)
    places: list[Any] = [os]
    before = [(os, name, getattr(os, name)) for name in functions]
    if accessor is not None:
        places.append(accessor)
        before += [(accessor, name, vars(accessor)[name]) for name in functions if name in vars(accessor)]
    try:
        for place in places:
            for name, function in functions.items():
                if place is os or name in vars(place):
                    setattr(place, name, function if place is os else staticmethod(function))
        yield
    finally:
        for place, name, plain in before:
            setattr(place, name, plain)
