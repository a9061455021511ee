"""What hooks on the modules of a divided model have in common, and the hooks that sum gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from ls_strategy.errors import StateError
from ls_strategy.parallel.regions import untraced
from ls_strategy.parallel.resolved_plan import Owned

Map = Callable[[Tensor], Tensor]


class Hooks:
    """The hooks of one divided model, to be removed together. `torch.compile` breaks its graph at each of them."""

    def __init__(self) -> None:
        """None yet."""
        self._handles: list[Any] = []

    def before(self, module: nn.Module, call: Callable[..., Any]) -> None:
        """``call(module, args, kwargs)`` before every forward; returns None or other ``(args, kwargs)``."""
        self._handles.append(module.register_forward_pre_hook(untraced(call), with_kwargs=True))

    def after(self, module: nn.Module, call: Callable[..., Any], *, always: bool = False) -> None:
        """``call(module, args, output)`` after every forward; returns None or another output.

        Args:
            module: whose forward.
            call: the hook.
            always: also after one that failed; the output is None then.
        """
        self._handles.append(module.register_forward_hook(untraced(call), always_call=always))

    def keep(self, handle: Any) -> None:
        """Something else to ``remove()``."""
        self._handles.append(handle)

    def remove(self) -> None:
        """Take all of them off. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


class Undo:
    """A handle whose removal calls a function."""

    def __init__(self, call: Callable[[], object]) -> None:
        """``call``: what to do."""
        self.remove = call


class NoPickle:
    """A hook that does nothing, on a model that must not be pickled: its copy would compute with a part only."""

    def __call__(self, *_: Any) -> None:
        """Nothing to do."""

    def __deepcopy__(self, memo: dict[int, Any]) -> NoPickle:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise StateError(
            "this model holds only this rank's part of its tensor-parallel layers, so it cannot be pickled. Save its "
            "state with trainer.save_checkpoint(path), and load that into a new model."
        )


def change_first(args: Any, kwargs: Any, change: Map, names: Iterable[str] = ("input", "x")) -> tuple[Any, Any]:
    """Arguments of a call with ``change`` applied to the first tensor: positional, else the first named one."""
    for i, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:i], change(value), *args[i + 1 :]), kwargs
    for name in names:
        if isinstance(kwargs.get(name), Tensor):
            return args, {**kwargs, name: change(kwargs[name])}
    raise StateError(
        f"a tensor-parallel module was called without a tensor among its positional arguments or {list(names)}. "
        "Call it with its input first."
    )


def change_output(output: Any, change: Map) -> Any:
    """What a module returned, a tensor or a tuple or list of some, with ``change`` applied to the first tensor."""
    if isinstance(output, Tensor):
        return change(output)
    if isinstance(output, tuple | list):
        for i, value in enumerate(output):
            if isinstance(value, Tensor):
                values = [*output[:i], change(value), *output[i + 1 :]]
                return type(output)(*values) if hasattr(output, "_fields") else type(output)(values)
    raise StateError(
        f"a block that is divided along the tokens returned {type(output).__name__}. Return the hidden states, or a "
        "tuple that begins with them."
    )


class GradientSums:
    """Gradients that are summed over ranks as soon as backward has them, before anything else sees them.

    By a hook on the parameter: one sum per backward, however often the parameter was used. Parameters on meta get
    theirs when their module first runs with values, since giving them memory drops hooks.
    """

    def __init__(self, hooks: Hooks) -> None:
        """Nothing is summed yet."""
        self._hooks = hooks
        self._summed: dict[int, nn.Parameter] = {}

    def add(self, owned: Owned, reduce: Map, caller: nn.Module | None = None) -> None:
        """Sum the gradient of a parameter by ``reduce``; a parameter that was added before stays as it is.

        Args:
            owned: the parameter.
            reduce: sums a gradient over ranks.
            caller: a module that runs whenever the parameter is used, if its own may not be called.
        """
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
        # It may be frozen for now; only what requires a gradient takes a hook.
        required = parameter.requires_grad
        parameter.requires_grad_(True)
        self._hooks.keep(parameter.register_hook(untraced(lambda grad: reduce(grad.contiguous()))))
        parameter.requires_grad_(required)
