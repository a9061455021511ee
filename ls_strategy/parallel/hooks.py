"""Hooks on the modules of a sharded model, and hooks that sum gradients over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ls_strategy.errors import StateError
from ls_strategy.parallel.regions import Map, untraced


@dataclass(frozen=True)
class Owned:
    """A parameter as an attribute of a module."""

    name: str
    module: nn.Module
    key: str

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that the module holds now."""
        parameter = self.module._parameters[self.key]
        assert parameter is not None
        return parameter


class Hooks:
    """The hooks of one sharded model, removed together. `torch.compile` breaks its graph at each of them."""

    def __init__(self) -> None:
        self._removals: list[Callable[[], object]] = []

    def before(self, module: nn.Module, call: Callable[..., Any], *, first: bool = False) -> None:
        """Call ``call(module, args, kwargs)`` before every forward; it returns None or new ``(args, kwargs)``.

        With ``first`` it is called before the hooks that the module has.
        """
        self.on_remove(module.register_forward_pre_hook(untraced(call), with_kwargs=True, prepend=first).remove)

    def after(self, module: nn.Module, call: Callable[..., Any], *, always: bool = False) -> None:
        """Call ``call(module, args, output)`` after every forward; it returns None or a new output.

        With ``always`` it is also called after a forward that raised, with None as the output.
        """
        self.on_remove(module.register_forward_hook(untraced(call), always_call=always).remove)

    def on_remove(self, call: Callable[[], object]) -> None:
        """Call ``call()`` when the hooks are removed."""
        self._removals.append(call)

    def remove(self) -> None:
        """Remove all hooks. Idempotent."""
        for call in self._removals:
            call()
        self._removals.clear()


class NoPickle:
    """A hook without effect, on a model that must not be pickled since it holds local shards."""

    def __call__(self, *_: Any) -> None:
        """Do nothing."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoPickle:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise StateError(
            "this model holds only this rank's shards of its tensor-parallel layers, so it cannot be pickled. Save its "
            "state with trainer.save_checkpoint(path), and load that into a new model."
        )


def change_first(args: Any, kwargs: Any, change: Map, names: Iterable[str] = ("input", "x")) -> tuple[Any, Any]:
    """Apply ``change`` to the first positional tensor of a call, or else to the first tensor among ``names``."""
    for i, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:i], change(value), *args[i + 1 :]), kwargs
    for name in names:
        if isinstance(kwargs.get(name), Tensor):
            return args, {**kwargs, name: change(kwargs[name])}
    raise StateError(
        f"a tensor-parallel module was called without a tensor among its positional arguments or {list(names)}. "
        "Pass its input as the first argument."
    )


def change_output(output: Any, change: Map) -> Any:
    """Apply ``change`` to the first tensor of a module's output: a tensor, or a tuple or list with tensors."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple | list):
        for i, value in enumerate(output):
            if isinstance(value, Tensor):
                values = [*output[:i], change(value), *output[i + 1 :]]
                return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    raise StateError(
        f"a block that is sharded along the tokens returned {type(output).__name__}. Return the hidden states, or a "
        "tuple that begins with them."
    )


class GradientSums:
    """Sum gradients over ranks as soon as backward has computed them, before any other code sees them.

    A hook on the parameter does this once per backward, however often the parameter was used. Allocating memory for a
    parameter on meta drops its hooks, so such a parameter gets its hook when its module first runs with values.
    """

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._added: list[Owned] = []
        self._summed: dict[int, nn.Parameter] = {}

    @property
    def parameters(self) -> set[int]:
        """Return the ``id`` of every parameter that was added."""
        return {id(owned.parameter) for owned in self._added}

    def add(self, owned: Owned, reduce: Map, caller: nn.Module | None = None) -> None:
        """Sum the gradient of a parameter by ``reduce``. Adding a parameter again has no effect.

        ``caller`` is a module that runs whenever the parameter is used, if the owner itself may not be called.
        """
        self._added.append(owned)
        if not owned.parameter.is_meta:
            self._attach(owned.parameter, reduce)
            return

        def attach(_module: nn.Module, _args: Any, _kwargs: Any) -> None:
            if not owned.parameter.is_meta:
                self._attach(owned.parameter, reduce)

        self._hooks.before(caller or owned.module, attach)

    def _attach(self, parameter: nn.Parameter, reduce: Map) -> None:
        if id(parameter) in self._summed:
            return
        self._summed[id(parameter)] = parameter
        # The parameter may be frozen for now, but only a tensor that requires a gradient accepts a hook.
        required = parameter.requires_grad
        parameter.requires_grad_(True)
        self._hooks.on_remove(parameter.register_hook(untraced(lambda grad: reduce(grad.contiguous()))).remove)
        parameter.requires_grad_(required)
