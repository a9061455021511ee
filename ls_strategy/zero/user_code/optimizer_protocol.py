"""An optimizer's own ``state_dict`` and ``load_state_dict``, with their hooks, around states that are sharded.

Torch's part of the two methods, which the user's part calls by ``super()``, is replaced while one of them runs::

    saving    own state_dict()  ->  super().state_dict() returns the states (full, or stand-ins)  ->  own entries
    loading   own load_state_dict(state)  ->  super().load_state_dict(state) gives every rank its part

Both see states by number, as in torch, whether they are stored by number or by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ls_strategy._torch import OptimizerHooks, has_own_state_dict, torch_state_methods, tree_iter
from ls_strategy.errors import StateError
from ls_strategy.transient import Method

State = dict[str, Any]


class OptimizerProtocol:
    """Runs what an optimizer's class and hooks do with its state dict."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.casts = True
        """Whether loaded states get the dtype of the master weights, as torch's ``load_state_dict`` has it."""

    @property
    def is_own(self) -> bool:
        """Return whether the optimizer has code for its state dict in addition to torch's."""
        found = vars(self._optimizer)
        methods = [found[name] for name in ("state_dict", "load_state_dict") if name in found]
        return has_own_state_dict(self._optimizer) or any(not isinstance(m, Method) or m.has_own for m in methods)

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
        given = state["state"]
        states = {k: given[k] if k in given and _nests(v, given[k]) else v for k, v in states.items()}
        return {**result, "state": states, "param_groups": groups}

    def load(self, state: State, load: Callable[[State], None]) -> None:
        """Pass states by number through the optimizer's ``load_state_dict``. ``load`` is torch's part of it.

        One that does not call torch's may put states and groups in place by itself, as bitsandbytes does.

        Raises:
            StateError: the optimizer's ``load_state_dict`` does neither.
        """
        if not self.is_own:
            load(state)
            return
        optimizer = self._optimizer
        groups, states = optimizer.param_groups, optimizer.state
        hooks, called = OptimizerHooks(self._optimizer), []

        def torchs(given: State) -> None:
            called.append(True)
            hooks.around_load(given, load)

        with torch_state_methods(self._optimizer, load=torchs):
            self._call("load_state_dict", state)
        if not called and optimizer.state is not states:
            taken = _by_number(optimizer, groups)
            optimizer.param_groups, optimizer.state = groups, states
            self.casts = False
            load(taken)
        elif not called:
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


def _nests(saved: Any, given: Any) -> bool:
    """Return whether a class has put states of a parameter into containers, where none would be cut, or found."""
    own = {id(v) for v in given.values() if isinstance(v, Tensor)} if isinstance(given, Mapping) else set()
    nested = [v for v in saved.values() if isinstance(v, (dict, list, tuple))] if isinstance(saved, Mapping) else []
    return any(id(leaf) in own for leaf in tree_iter(nested))


def _by_number(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> State:
    """Return what an optimizer holds as torch's state dict has it. ``groups``: with the parameters in their order."""
    order = count()
    numbers = [[next(order) for _ in group["params"]] for group in groups]
    members = [p for group in groups for p in group["params"]]
    number = {id(p): n for n, p in enumerate(members)}
    return {
        "state": {number.get(id(key), key): value for key, value in optimizer.state.items()},
        "param_groups": [{**g, "params": own} for g, own in zip(optimizer.param_groups, numbers, strict=True)],
    }


def _numbered(state: State, names: Sequence[Sequence[str]]) -> State:
    """Return states by name by their number in ``names``, the parameters of every group."""
    number = {name: i for i, name in enumerate(name for group in names for name in group)}
    groups = [
        {**group, "params": [number[name] for name in own]}
        for group, own in zip(state["param_groups"], names, strict=True)
    ]
    return {**state, "state": {number.get(n, n): v for n, v in state["state"].items()}, "param_groups": groups}
