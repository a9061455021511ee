"""A dry run of the user's function on shapes: where it uses parameters, and the FLOPs of every block."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ls_strategy._torch import route_calls, tree_iter, uncompiled_code
from ls_strategy.errors import PlanError, StateError
from ls_strategy.parallel.pipeline.meta import meta_blocks, meta_copy
from ls_strategy.parallel.pipeline.partition import Step, Usage
from ls_strategy.parallel.pipeline.placeholder import PlaceholderMode


class _UsageMode(PlaceholderMode):
    """Records which parameters are used before the first block and which later."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.used: tuple[set[int], set[int]] = (set(), set())
        self.phase: int | None = 0
        """0 before the blocks, 1 after or between them, None inside one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.phase is not None and getattr(func, "__name__", "") != "__get__":  # reading a shape is not a use
            self.used[self.phase].update(
                id(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, nn.Parameter)
            )
        return super().__torch_function__(func, types, args, kwargs)


class _Observer:
    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], mode: _UsageMode) -> None:
        self.mode = mode
        self.counter = FlopCounterMode(display=False)
        self.meta_blocks = list(meta_blocks(model, list(blocks.values())))
        self.flops = [0] * len(blocks)
        self.before = 0
        self.done = False
        """Whether the last block has run."""

    def route(self, i: int, _: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a block on shapes."""
        start = self.counter.get_total_flops()
        if self.mode.phase == 0:
            self.before = start
        self.mode.phase = None
        result = self.meta_blocks[i](*args, **kwargs)
        self.mode.phase = 1
        self.flops[i] += self.counter.get_total_flops() - start
        self.done = i == len(self.flops) - 1
        return result


def stand_in(model: nn.Module) -> nn.Module:
    """Return a copy with all parameters on meta, for user code that changes more than tensors (counters, metrics).

    Raises:
        PlanError: Part of the model cannot be copied.
    """
    try:
        return copy.deepcopy(model, {id(p): meta_copy(p) for p in model.parameters()})
    except Exception as error:
        raise PlanError(
            f"{type(model).__name__} cannot be copied to count its operations: {type(error).__name__}: {error}."
        ) from error


def observe(
    model: nn.Module, blocks: Mapping[str, nn.Module], step: Step, micro_batch: Any, device: torch.device
) -> Usage:
    """Call ``step(micro_batch)`` once without values: nothing is computed and nothing is trained.

    User code (counters, logging) still has its side effects; see `stand_in`. The call may end early, where the code
    reads a value; later code is not observed.

    Args:
        model: The full model. Parameters may be on meta.
        blocks: Result of `partition.find_row`.
        step: The user's function.
        micro_batch: A micro-batch of the usual shapes.
        device: Device of the model in training.

    Raises:
        PlanError: ``step`` reads a value before all blocks have run.
        StateError: It does not call all blocks.
    """
    mode = _UsageMode(device)
    observer = _Observer(model, blocks, mode)
    routes = [route_calls(block, partial(observer.route, i)) for i, block in enumerate(blocks.values())]
    seen = False
    try:
        with uncompiled_code(), observer.counter, mode:
            step(micro_batch)
        seen = True
    except PlanError:
        if not observer.done:
            raise
    finally:
        for route in routes:
            route.remove()
    if seen and not observer.done:
        raise StateError(f"step returned without a call of block {list(blocks)[-1]!r}. Call every block once.")
    names = {id(p): name for name, p in model.named_parameters()}
    before, after = (frozenset(names[key] for key in used if key in names) for used in mode.used)
    flops_after = observer.counter.get_total_flops() - observer.before - sum(observer.flops)
    return Usage(tuple(observer.flops), observer.before, flops_after, before, after)
