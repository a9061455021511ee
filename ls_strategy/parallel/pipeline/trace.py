"""A dry run of the user's function on shapes: which parameters it uses where, and how much every block computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ls_strategy._compat import route_calls, tree_iter, uncompiled_code, unroute_calls
from ls_strategy.errors import PlanError, StateError
from ls_strategy.parallel.pipeline.partition import Step, Usage
from ls_strategy.parallel.pipeline.placeholder import Absent
from ls_strategy.parallel.pipeline.stage import meta_copy, meta_twins


class _Noting(Absent):
    """Notes what parameters are used, before the first block and afterwards."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.used: tuple[set[int], set[int]] = (set(), set())
        self.phase: int | None = 0
        """0 before the blocks, 1 after or between them, None inside one."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.phase is not None and getattr(func, "__name__", "") != "__get__":  # its shape alone is no use
            self.used[self.phase].update(
                id(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, nn.Parameter)
            )
        return super().__torch_function__(func, types, args, kwargs)


class _Observer:
    def __init__(self, model: nn.Module, blocks: Mapping[str, nn.Module], mode: _Noting) -> None:
        self.mode = mode
        self.counter = FlopCounterMode(display=False)
        self.twins = list(meta_twins(model, list(blocks.values())))
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
        result = self.twins[i](*args, **kwargs)
        self.mode.phase = 1
        self.flops[i] += self.counter.get_total_flops() - start
        self.done = i == len(self.flops) - 1
        return result


def stand_in(model: nn.Module) -> nn.Module:
    """A copy with all parameters on meta, for user code that changes more than tensors (counters, metrics).

    Raises:
        PlanError: something in the model cannot be copied.
    """
    try:
        return copy.deepcopy(model, {id(p): meta_copy(p) for p in model.parameters()})
    except Exception as error:
        raise PlanError(
            f"{type(model).__name__} cannot be copied, to count operations with: {type(error).__name__}: {error}."
        ) from error


def observe(
    model: nn.Module, blocks: Mapping[str, nn.Module], step: Step, micro_batch: Any, device: torch.device
) -> Usage:
    """Call ``step(micro_batch)`` once, without values: nothing is computed, nothing is trained.

    The call has the side effects of user code (counters, logging) on what it uses; see `stand_in`. It may end early,
    where the code reads a value; what comes after that is not seen.

    Args:
        model: whole; parameters may be on meta.
        blocks: of `cut.find_row`.
        step: the user's function.
        micro_batch: of the usual shapes.
        device: where the model will be.

    Raises:
        PlanError: ``step`` asks for a value before all blocks have run.
        StateError: it leaves a block out.
    """
    mode = _Noting(device)
    observer = _Observer(model, blocks, mode)
    for i, block in enumerate(blocks.values()):
        route_calls(block, partial(observer.route, i))
    seen = False
    try:
        with uncompiled_code(), observer.counter, mode:
            step(micro_batch)
        seen = True
    except PlanError:
        if not observer.done:
            raise
    finally:
        for block in blocks.values():
            unroute_calls(block)
    if seen and not observer.done:
        raise StateError(f"step returned without having called block {list(blocks)[-1]!r}.")
    names = {id(p): name for name, p in model.named_parameters()}
    before, after = (frozenset(names[key] for key in used if key in names) for used in mode.used)
    rest = observer.counter.get_total_flops() - observer.before - sum(observer.flops)
    return Usage(tuple(observer.flops), observer.before, rest, before, after)
