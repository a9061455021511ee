"""Copies of blocks on the meta device, which stand for those of other ranks."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy._torch import tree_flatten, tree_iter, tree_map, without_torch_functions
from ls_strategy.parallel.pipeline.placeholder import PlaceholderMode, placeholder


class MetaBlocks:
    """Computes placeholders for the outputs of absent blocks, once per shape of their inputs."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self._blocks = list(meta_blocks(model, blocks))
        self._outputs: list[dict[Any, Any]] = [{} for _ in blocks]
        """For every block, placeholders for its outputs, by the shapes of its inputs."""

        self._device = device

    def run(self, i: int, args: tuple[Any, ...], kwargs: dict[str, Any], mode: PlaceholderMode) -> Any:
        """Return placeholders for the output of a block. ``mode``: the active one, in whose record it is one call."""
        memory, record = self._outputs[i], mode.record
        with without_torch_functions():  # their overhead would dominate
            leaves, structure = tree_flatten((args, kwargs))
            key = (structure, torch.is_autocast_enabled(self._device.type), *map(_signature, leaves))
            if key in memory:
                result = tree_map(self._fresh, memory[key])
                if record is not None:
                    record.add(_block, args, kwargs, [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor)])
                return result
        mode.record = None
        memory[key] = tree_map(self._fresh, self._blocks[i](*args, **kwargs))
        mode.record = record
        return self.run(i, args, kwargs, mode)

    def _fresh(self, leaf: Any) -> Any:
        """Return a new placeholder for a tensor: code may change it in place."""
        return placeholder(leaf.shape, leaf.dtype, self._device) if isinstance(leaf, Tensor) else leaf


def _block(*_: Any) -> None:
    """Stand for a block in records."""


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, int | float | str | bool | None) else type(leaf)


def meta_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterable[nn.Module]:
    """Yield a copy of every block on meta, without the hooks that will be on the block itself.

    A module with a forward that needs values (to sort tokens by experts, say) can have a method ``forward_shapes`` with
    the same arguments. It is called instead and returns tensors of the same shapes.
    """
    tensors = [*model.parameters(), *model.buffers()]
    for block in blocks:
        memo: dict[int, Any] = {id(t): meta_copy(t) for t in tensors}
        meta_module = copy.deepcopy(block, memo)
        for module in meta_module.modules():
            of_shapes: Any = getattr(module, "forward_shapes", None)
            if callable(of_shapes):
                module.forward = of_shapes  # type: ignore[method-assign]
        yield meta_module


def meta_copy(tensor: Tensor) -> Tensor:
    """Return a tensor or parameter of the same shape on meta."""
    empty = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
