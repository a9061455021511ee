"""Calls of a module's ``generate`` at stage 3: the weights are gathered once per call, and not once per token.

::

    gathered at once        a forward sends nothing, so ranks may stop at different lengths
    not enough memory       unit by unit in every forward, as in training: all ranks run equally many forwards, for
                            which ``generate`` of transformers has ``synced_gpus=True``
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ls_strategy import device as dev
from ls_strategy.engine import Engine
from ls_strategy.host_memory import free_host_memory
from ls_strategy.zero.flat.flat_buffer import FlatBuffer

SHARE = 0.5
"""Share of the free memory that gathered weights may take; the rest is for the cache of keys and values."""


def generates(module: nn.Module) -> bool:
    """Return whether a module's class has a method ``generate`` that is no generator or coroutine."""
    method = getattr(type(module), "generate", None)
    lazy = inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method)
    return inspect.isfunction(inspect.unwrap(method)) and not lazy if callable(method) else False


def run_gathered(engine: Engine, module: nn.Module, generate: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call ``generate`` with the weights of ``module`` gathered, if memory allows. Collective, unless they are already.

    Ranks may run a different number of forwards inside. If the weights do not fit, they may not: a ``generate`` with
    an argument ``synced_gpus`` gets True.
    """
    with holding(engine, module) as held:
        if not held and "synced_gpus" in inspect.signature(generate).parameters:
            kwargs = {"synced_gpus": True, **kwargs}
        return generate(*args, **kwargs)


@contextmanager
def holding(engine: Engine, module: nn.Module) -> Iterator[bool]:
    """Hold the weights of ``module`` inside, if they fit on every rank; yield whether they do."""
    params = list(module.parameters())
    wanted = set(map(id, params))
    flats = [f for f in engine.flats if any(id(p) in wanted for p in f.params)]
    if not engine.policy.parameters or all(flat.users and flat.is_gathered for flat in flats):
        yield True
    elif _fits(engine, flats):
        with engine.gathered(params):
            yield True
    else:
        yield False


def _fits(engine: Engine, flats: list[FlatBuffer]) -> bool:
    """Return whether the full buffers fit into the memory of every rank. Collective."""
    needed = sum(flat.full.numel() * flat.full.element_size() for flat in flats if not flat.is_gathered)
    if dev.is_accelerator(engine.device):
        free: float | None = dev.free_bytes(engine.device)
    else:
        host = free_host_memory()
        free = None if host is None else host / engine.mesh.world.world_size  # all ranks may be on one host
    too_large = torch.tensor([free is not None and needed > SHARE * free], dtype=torch.uint8)
    return not engine.mesh.world.agree(too_large).item()
