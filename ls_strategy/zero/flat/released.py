"""The values of a released parameter in a state dict: gathered when a hook computes with them, else never."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from ls_strategy._torch import make_wrapper, tree_map
from ls_strategy.meta_init.lazy import LazyTensor
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import NEED_NO_VALUES
from ls_strategy.zero.parts import full_of


class Released(LazyTensor):
    """Stands for the full values of a parameter. To compute with it is collective: every rank collects a state dict."""

    flat: FlatBuffer
    slot: int
    gathered: Tensor | None

    @staticmethod
    def __new__(cls: Any, flat: FlatBuffer, index: int, dtype: torch.dtype) -> Released:  # noqa: D102 - see the class
        self = make_wrapper(cls, flat.layout.slots[index].full_shape, dtype, flat.full.device)
        self.flat, self.slot, self.gathered = flat, index, None
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Released({self.flat.layout.slots[self.slot].name}, shape={tuple(self.shape)})"

    @override
    def load(self, start: int, stop: int) -> Tensor:
        if self.gathered is None:
            place = self.flat.layout.slots[self.slot]
            mine = self.flat.full_master()[place.offset : place.end].view(place.shape)
            full = full_of(mine, place.part, self.flat.axis)
            self.gathered = full.detach().to(self.dtype, copy=True).reshape(-1)
        return self.gathered[start:stop]


class ShowingReleased(TorchFunctionMode):
    """Gives code that uses parameters, while a state dict is collected, stand-ins for them."""

    def __init__(self, places: Mapping[int, tuple[FlatBuffer, int]]) -> None:
        """``places``: buffer and slot, by ``id`` of the parameter."""
        super().__init__()
        self._places = places

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DETACH and id(args[0]) in self._places:
            return self._stand_in(args[0])
        if func in NEED_NO_VALUES:
            return func(*args, **(kwargs or {}))
        return func(*tree_map(self._stand_in, args), **tree_map(self._stand_in, kwargs or {}))

    def _stand_in(self, value: Any) -> Any:
        if id(value) not in self._places:
            return value
        flat, index = self._places[id(value)]
        return Released(flat, index, flat.master_dtype)


_DETACH: Any = Tensor.detach
