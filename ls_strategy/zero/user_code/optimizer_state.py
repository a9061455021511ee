"""Handle accesses of user code to an optimizer's state between two steps, while the state is sharded.

Removing states has the same effect as in plain torch: the next update of those parameters starts from a new state. The
full state of a parameter may be replaced. Reading it is refused, since no rank has it::

    optimizer.state.clear()                 ReLoRA, warm restarts; also `optimizer.state = defaultdict(dict)`
    del optimizer.state[p]                  or `pop(p)`
    optimizer.state[p] = {"step": ...}      full tensors, on every rank
    optimizer.state[p]["exp_avg"]           StateError
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from ls_strategy.errors import StateError


class StateOwner(Protocol):
    """Has the states of an optimizer's parameters."""

    def has_state(self) -> bool:
        """Return whether any parameter may have a state, equal on every rank."""
        ...

    def number_of(self, param: Any) -> int | None:
        """Return the number of a parameter, or None if the optimizer does not have it on this rank."""
        ...

    def replace(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the states of parameters by full ones; an empty one starts afresh. Collective."""

    def reset(self) -> None:
        """Remove all states. Collective."""


def sharded_state(what: str) -> StateError:
    """Return the error for a request for the state of parameters. ``what`` was asked for it."""
    return StateError(
        f"{what} was asked for the state of parameters, which is sharded over the ranks. Call "
        "trainer.strategy.optimizer_state(optimizer) on every rank: rank 0 gets the full state. To change it, pass the "
        "full state to optimizer.load_state_dict() on every rank."
    )


class ShardedState(defaultdict[Any, Any]):
    """An optimizer's ``state`` between steps. It holds nothing itself."""

    def __init__(self, name: str, owner: StateOwner | None = None) -> None:
        """``name``: of the optimizer, for messages. A copy has no ``owner``."""
        super().__init__(dict)
        self._name = name
        self._owner = owner

    # removing and replacing ------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove all states. Collective."""
        self._owned("clear()").reset()

    def __delitem__(self, key: Any) -> None:
        owner = self._owned("__delitem__")
        number = owner.number_of(key)
        if number is None:
            raise KeyError(key)
        owner.replace({number: {}})

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove the state of one parameter. Collective.

        Returns:
            ``default``, or a mapping that raises a StateError when it is read: no rank has the values.
        """
        owner = self._owned("pop()")
        number = owner.number_of(key)
        if number is None and not default:
            raise KeyError(key)
        had_state = owner.has_state()
        if number is not None:
            owner.replace({number: {}})
        return default[0] if default and not (had_state and number is not None) else ShardedState(self._name)

    def __setitem__(self, key: Any, value: Any) -> None:
        owner = self._owned("__setitem__")
        number = owner.number_of(key)
        if number is None or not isinstance(value, Mapping):
            raise StateError(
                f"{self._name}.state[...] = {type(value).__name__} has no parameter of the optimizer as its key, or no "
                "dictionary as its value. Assign dictionaries of full tensors to parameters of the model."
            )
        owner.replace({number: value})

    def update(self, *others: Any, **named: Any) -> None:
        """Replace the states of some parameters. Collective."""
        for key, value in dict(*others, **named).items():
            self[key] = value

    # reading ---------------------------------------------------------------------------------------------------------

    def __missing__(self, key: Any) -> Any:
        raise sharded_state(f"{self._name}.state[...]")

    def __contains__(self, key: object) -> bool:
        return self._nothing("[...]")

    def get(self, key: Any, default: Any = None) -> Any:
        """Return ``default`` as long as there is no state."""
        self._nothing(".get()")
        return default

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Refuse: it returns the state of a parameter."""
        raise sharded_state(f"{self._name}.state.setdefault()")

    def popitem(self) -> Any:
        """Refuse: it returns the state of a parameter."""
        raise sharded_state(f"{self._name}.state.popitem()")

    def keys(self) -> Any:
        """Return no keys as long as there is no state."""
        self._nothing(".keys()")
        return super().keys()

    def values(self) -> Any:
        """Return no values as long as there is no state."""
        self._nothing(".values()")
        return super().values()

    def items(self) -> Any:
        """Return no items as long as there is no state."""
        self._nothing(".items()")
        return super().items()

    def __iter__(self) -> Iterator[Any]:
        self._nothing("")
        return super().__iter__()

    def __len__(self) -> int:
        self._nothing("")
        return 0

    def __bool__(self) -> bool:
        return self._owner is not None and self._owner.has_state()

    def __reduce__(self) -> tuple[Any, ...]:
        return (ShardedState, (self._name,))

    def __repr__(self) -> str:
        return f"ShardedState of {self._name}"

    def _nothing(self, what: str) -> bool:
        """Return False: there is no state yet. Otherwise refuse."""
        if self._owner is None or self._owner.has_state():
            raise sharded_state(f"{self._name}.state{what}")
        return False

    def _owned(self, what: str) -> StateOwner:
        if self._owner is None:
            raise sharded_state(f"{self._name}.state.{what}")
        return self._owner


@contextmanager
def showing_no_states(optimizers: Sequence[Optimizer]) -> Generator[None, None, None]:
    """Let optimizers whose states an engine holds appear to have none, while another engine adopts them."""
    held = [(optimizer, optimizer.state) for optimizer in optimizers if isinstance(optimizer.state, ShardedState)]
    empty: defaultdict[Any, Any] = defaultdict(dict)
    for optimizer, _ in held:
        optimizer.state = empty
    try:
        yield
    finally:
        for optimizer, state in held:
            if optimizer.state is empty:
                optimizer.state = state


def replaced_states(state: Any, owner: StateOwner, name: str) -> dict[int, Mapping[str, Any]]:
    """Return what user code has put in the place of a `ShardedState`, by number of parameter.

    Raises:
        StateError: it is not a dictionary of dictionaries.
    """
    if not isinstance(state, Mapping) or not all(isinstance(value, Mapping) for value in state.values()):
        raise StateError(
            f"{name}.state was replaced by a {type(state).__name__}, but a state has a dictionary of full tensors for "
            "each parameter. Assign defaultdict(dict) to start afresh, or call optimizer.load_state_dict()."
        )
    found = {owner.number_of(key): value for key, value in state.items() if isinstance(key, Tensor) and value}
    return {number: value for number, value in found.items() if number is not None}
