"""An optimizer's own ``state_dict`` and ``load_state_dict``, with their hooks, around states that are sharded.

Torch's part of the two methods, which the user's part calls by ``super()``, is replaced while one of them runs::

    saving    own state_dict()  ->  super().state_dict() returns the states (full, or stand-ins)  ->  own entries
    loading   own load_state_dict(state)  ->  super().load_state_dict(state) gives every rank its part

Both see states by number, as in torch, whether they are stored by number or by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from ls_strategy._torch import OptimizerHooks, has_own_state_dict, torch_state_methods
from ls_strategy.errors import StateError
from ls_strategy.transient import Method

State = dict[str, Any]


class OptimizerProtocol:
    """Runs what an optimizer's class and hooks do with its state dict."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    @property
    def is_own(self) -> bool:
        """Return whether the optimizer has code for its state dict in addition to torch's."""
        return has_own_state_dict(self._optimizer) or any(
            not isinstance(own, Method) or own.has_own for own in self._own_methods()
        )

    def _own_methods(self) -> list[Any]:
        found = vars(self._optimizer)
        return [found[name] for name in ("state_dict", "load_state_dict") if name in found]

    def saved(self, state: State) -> State:
        """Return what the optimizer's ``state_dict`` makes of the states by number."""
        if not self.is_own:
            return state
        hooks = OptimizerHooks(self._optimizer)
        with torch_state_methods(self._optimizer, save=lambda: hooks.around_save(state)):
            result = self._call("state_dict")
        if not isinstance(result, Mapping) or not {"state", "param_groups"} <= result.keys():
            raise StateError(
                f"{self._name}.state_dict() returned no dictionary with 'state' and 'param_groups', which a checkpoint "
                "needs. Add entries to what super().state_dict() returns."
            )
        return dict(result)

    def saved_by_name(self, state: State, names: Sequence[Sequence[str]]) -> State:
        """Return what the optimizer's ``state_dict`` makes of states by name. ``names``: of every group."""
        if not self.is_own:
            return state
        result = self.saved(_numbered(state, names))
        flat = [name for group in names for name in group]
        groups = [
            {**group, "params": [flat[i] if isinstance(i, int) else i for i in group["params"]]}
            for group in result["param_groups"]
        ]
        states = {flat[i] if isinstance(i, int) and i < len(flat) else i: v for i, v in result["state"].items()}
        return {**result, "state": states, "param_groups": groups}

    def load(self, state: State, load: Callable[[State], None]) -> None:
        """Pass states by number through the optimizer's ``load_state_dict``. ``load`` is torch's part of it.

        Raises:
            StateError: the optimizer's ``load_state_dict`` does not call torch's.
        """
        if not self.is_own:
            load(state)
            return
        hooks, called = OptimizerHooks(self._optimizer), []

        def torchs(given: State) -> None:
            called.append(True)
            hooks.around_load(given, load)

        with torch_state_methods(self._optimizer, load=torchs):
            self._call("load_state_dict", state)
        if not called:
            raise StateError(
                f"{self._name}.load_state_dict() did not call super().load_state_dict(), which gives every rank its "
                "part of the states. Call it with the entries 'state' and 'param_groups'."
            )

    def load_by_name(self, state: State, names: Sequence[Sequence[str]], load: Callable[[State], None]) -> None:
        """Pass states by name through ``load_state_dict``. ``names``: of every group of the optimizer."""
        if not self.is_own:
            load(state)
            return
        flat = [name for group in names for name in group]

        def by_name(given: State) -> None:
            states = {flat[i] if isinstance(i, int) and i < len(flat) else i: v for i, v in given["state"].items()}
            load({**given, "state": states})

        self.load(_numbered(state, names), by_name)

    def _call(self, name: str, *args: Any) -> Any:
        found = vars(self._optimizer).get(name)
        call = found.original if isinstance(found, Method) else getattr(self._optimizer, name)
        return call(*args)

    @property
    def _name(self) -> str:
        return type(self._optimizer).__name__


def _numbered(state: State, names: Sequence[Sequence[str]]) -> State:
    """Return states by name by their number in ``names``, the parameters of every group."""
    number = {name: i for i, name in enumerate(name for group in names for name in group)}
    groups = [
        {**group, "params": [number[name] for name in own]}
        for group, own in zip(state["param_groups"], names, strict=True)
    ]
    return {**state, "state": {number.get(n, n): v for n, v in state["state"].items()}, "param_groups": groups}
