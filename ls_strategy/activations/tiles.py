"""Tiled execution of layers that treat every token alone, such as feed-forwards: some tokens at a time.

::

    x (B, T, D) ─split─► (B, t, D) ─forward─► (B, t, D) ─join─► (B, T, D)      kept for backward: x
    backward: tile by tile, the forward again, then its backward

What such a layer computes in between is several times as wide as its input, and exists for one tile only. Results are
those of one call up to rounding, which differs with the shapes of matrix products; dropout draws other numbers.

Bekman et al., "Arctic Long Sequence Training", arXiv:2506.13996, section 3.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ls_strategy._torch import checkpoint_options, uncompiled, without_dispatch_modes
from ls_strategy.activations.recompute import STATISTICS, RecomputedForward
from ls_strategy.blocks import container_children, is_block
from ls_strategy.config import TilingConfig
from ls_strategy.device import generator_of
from ls_strategy.errors import PlanError
from ls_strategy.moe.sparse import SparseLayer

NAMES = ("mlp", "feed_forward", "feedforward", "ffn", "ff", "ff_layer")
"""Names of feed-forwards in blocks."""

CHECKED = 1e-3
"""Largest difference of a tile's result from that of two tiles, relative to the largest element."""


class Tiles:
    """The modules that run tile by tile, until `remove`."""

    def __init__(self, model: nn.Module, config: TilingConfig) -> None:
        """Replace the modules' forwards.

        Raises:
            PlanError: No module matches, or one does not treat every token alone.
        """
        self.config = config
        named = dict(_chosen(model, config.modules))
        for name, module in named.items():
            _refuse_mixing(name, uncompiled(module))
        self.modules = list(named.values())
        self._forwards = [TiledForward(name, uncompiled(m), config.tokens) for name, m in named.items()]

    def describe(self) -> str:
        """Return ``12 SwiGLU, 1024 tokens at a time`` or similar for the log."""
        counts = Counter(type(uncompiled(m)).__name__ for m in self.modules)
        return f"{', '.join(f'{n} {name}' for name, n in counts.items())}, {self.config.tokens} tokens at a time"

    def remove(self) -> None:
        """Restore every module's forward. Idempotent."""
        for forward in self._forwards:
            forward.remove()
        self._forwards.clear()


def _chosen(model: nn.Module, patterns: tuple[str, ...]) -> Iterator[tuple[str, nn.Module]]:
    names = [name for name, _ in model.named_modules()]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise PlanError(
                f"Got activations.tiling.modules={list(patterns)}, but no module's name matches {pattern!r}. Names are "
                f"those of model.named_modules(), for example {_examples(names)}; * stands for any letters."
            )
    if patterns:
        yield from ((n, m) for n, m in model.named_modules() if any(fnmatch(n, p) for p in patterns))
        return
    blocks = [(n, m) for n, m in container_children(model, closed=()) if is_block(uncompiled(m))]
    found = [(f"{n}.{c}", child) for n, m in blocks for c, child in m.named_children() if c in NAMES]
    if not found:
        inside = sorted({child for _, block in blocks for child, _ in block.named_children()})
        raise PlanError(
            f"activations.tiling found no feed-forward: none of the children of the model's blocks ({inside}) is named "
            f"{', '.join(NAMES)}. Name the modules: activations.tiling.modules=['*.mlp'], for example."
        )
    yield from found


def _examples(names: list[str]) -> str:
    leaves = [name for name in names if name]
    return ", ".join(map(repr, leaves[-3:])) or "none"


def _refuse_mixing(name: str, module: nn.Module) -> None:
    for child in module.modules():
        statistics = any(getattr(child, key, None) is not None for key in STATISTICS)
        if isinstance(child, SparseLayer) or statistics:
            raise PlanError(
                f"activations.tiling: module {name!r} contains {type(child).__name__}, whose result for a token "
                "depends on the other tokens of the batch. Name modules without it in activations.tiling.modules."
            )


class TiledForward(RecomputedForward):
    """Replaces ``module.forward``: calls it on at most ``tokens`` tokens of each sequence at a time."""

    def __init__(self, name: str, module: nn.Module, tokens: int) -> None:
        super().__init__(module, {"use_reentrant": False})
        self._name = name
        self._tokens = tokens
        self._checked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on all tokens."""
        return _untraced(self._run, args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        x = args[0] if args else None
        dim = max(x.dim() - 2, 0) if isinstance(x, Tensor) else 0
        if len(args) != 1 or kwargs or not isinstance(x, Tensor) or x.dim() < 2 or not x.is_floating_point():
            given = ", ".join([type(a).__name__ for a in args] + [f"{k}=..." for k in kwargs])
            raise PlanError(
                f"activations.tiling: module {self._name!r} was called with ({given}), but only modules of one "
                "floating tensor (..., tokens, width) can run tile by tile. Name others in activations.tiling.modules."
            )
        if x.shape[dim] <= self._tokens:
            return self.__wrapped__(x)
        if not self._checked:
            self._check(x.detach(), dim)
        tiles = x.split(self._tokens, dim)
        if not torch.is_grad_enabled():
            return torch.cat([self._one(tile) for tile in tiles], dim)
        options = {**self._options, **checkpoint_options()}
        return torch.cat([checkpoint(self._one, tile, **options) for tile in tiles], dim)

    def _one(self, tile: Tensor) -> Tensor:
        result = self.__wrapped__(tile)
        if not isinstance(result, Tensor) or result.shape[:-1] != tile.shape[:-1]:
            got = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
            raise PlanError(
                f"activations.tiling: module {self._name!r} returned {got} for {tuple(tile.shape)}, but a layer that "
                "treats every token alone returns (..., tokens, width). Name others in activations.tiling.modules."
            )
        return result

    def _check(self, x: Tensor, dim: int) -> None:
        """Compare one tile with the same tokens among twice as many, in evaluation mode."""
        self._checked = True
        length = min(self._tokens, x.shape[dim] // 2)
        modes = [(module, module.training) for module in self._module.modules()]
        generators = [generator_of(d) for d in {torch.device("cpu"), x.device}]
        states = [generator.get_state() for generator in generators]
        caching = torch.is_autocast_cache_enabled()
        try:
            torch.set_autocast_cache_enabled(False)  # weights cached without gradients would have none later
            self._module.eval()
            with torch.no_grad(), without_dispatch_modes():
                one = self._one(x.narrow(dim, 0, length)).float()
                two = self._one(x.narrow(dim, 0, 2 * length)).narrow(dim, 0, length).float()
        finally:
            torch.set_autocast_cache_enabled(caching)
            for module, training in modes:
                module.training = training
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)
        bound = CHECKED if x.dtype == torch.float32 and not torch.is_autocast_enabled(x.device.type) else 0.05
        if not (one - two).abs().max() <= bound * two.abs().max():
            raise PlanError(
                f"activations.tiling: module {self._name!r} gives another result for {length} tokens than for the same "
                "tokens among twice as many, so it mixes tokens. Name modules that treat every token alone in "
                "activations.tiling.modules."
            )


def _call(call: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return call(args, kwargs)


_untraced: Callable[..., Tensor] = torch.compiler.disable(_call)  # type: ignore[assignment]
