"""Activation recompute: modules save their inputs and run their forward again in backward.

The module's ``forward`` is replaced, not the module. Names in ``state_dict`` and ``named_parameters`` do not change,
and hooks on the module run once, around the replaced forward::

    module(x) ─► pre-hooks ─► forward: save x, compute, discard intermediates ─► hooks
    backward  ─► hook on the output's gradient ─► load x, compute again, run backward ─► hook on x's gradient

So the hooks of a unit with sharded parameters gather it before its forward runs again, and no third time.

Losses and gradients are bitwise equal: ``torch.utils.checkpoint`` replays random numbers and autocast, and buffers that
a forward updates (running statistics) are updated once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ls_strategy._torch import (
    checkpoint_options,
    is_compiled,
    tree_flatten,
    tree_unflatten,
    uncompiled,
    version_of,
    without_dispatch_modes,
)
from ls_strategy.activations.policy import SelectivePolicy
from ls_strategy.blocks import container_children, instances, is_block
from ls_strategy.config import RecomputeConfig
from ls_strategy.errors import PlanError
from ls_strategy.transient import Forward

_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")
"""Arguments in which transformers models pass keys and values from one call to the next."""
STATISTICS = ("running_mean", "running_var")
"""Buffers of norms, which their kernels change without a new version for autograd."""

AroundInputs = Callable[[], AbstractContextManager[None]]
_Place = tuple[nn.Module, str]
"""A module and the name of one of its own buffers."""


class Recompute:
    """The modules whose forward is recomputed, until `remove`."""

    def __init__(self, modules: list[nn.Module], config: RecomputeConfig, around_inputs: AroundInputs) -> None:
        """Replace the forwards. See `apply_recompute`."""
        self.modules = modules
        self.config = config
        self.compiled = any(is_compiled(m) for m in modules)
        """Whether some modules are compiled. Compiled code chooses itself what it saves."""
        options: dict[str, Any] = {"use_reentrant": False}
        if config.policy == "selective":
            # One object for all modules: torch.compile would recompile for another one.
            options["context_fn"] = SelectivePolicy(config.keep).contexts()
        self._forwards = [RecomputedForward(uncompiled(m), options, around_inputs) for m in modules]

    def describe(self) -> str:
        """Return ``12 Block, full`` or similar for the log."""
        counts = Counter(type(uncompiled(m)).__name__ for m in self.modules)
        classes = ", ".join(f"{n} {name}" for name, n in counts.items())
        kept = f" (keeps {', '.join(self.config.keep)})" if self.config.policy == "selective" else ""
        return f"{classes}, {self.config.policy}{kept}"

    def remove(self) -> None:
        """Restore every module's forward. Idempotent."""
        for forward in self._forwards:
            forward.remove()
        self._forwards.clear()


def apply_recompute(model: nn.Module, config: RecomputeConfig, around_inputs: AroundInputs = nullcontext) -> Recompute:
    """Recompute the forwards of modules of ``model`` in backward.

    Forwards without gradients, and in evaluation with a key-value cache, run as usual. In training the cache is
    disabled: the second run of the forward would append to it again.

    Args:
        model: The model, before or after its parameters are sharded, and after ``block.compile()`` if that is used.
        config: Selects the modules and what they save in addition to their inputs.
        around_inputs: Context manager that is entered around each call. Saved-tensor hooks in it see the module's
            inputs and nothing else.

    Raises:
        ConfigError: A name in ``config.keep`` is unknown.
        PlanError: The model has no such module.
    """
    modules = list(dict(_chosen(model, config.block_classes)).values())[:: config.every]
    if not modules:
        present = sorted({type(uncompiled(m)).__name__ for m in model.modules()})
        raise PlanError(
            "activation checkpointing: the model has no ModuleList or Sequential whose children are blocks (modules "
            f"with parameters and submodules). Its classes are {', '.join(present)}. Name the classes to recompute: "
            'RecomputeConfig(policy="full", block_classes=["Block"]).'
        )
    return Recompute(modules, config, around_inputs)


def _chosen(model: nn.Module, classes: tuple[str, ...]) -> Iterator[tuple[int, nn.Module]]:
    """Yield the modules to recompute with their ids, in order of registration."""

    def class_of(module: nn.Module) -> type:
        return type(uncompiled(module))

    if classes:
        found = instances(model, classes, option="activations.checkpointing.block_classes", class_of=class_of)
    else:
        found = ((n, m) for n, m in container_children(model, closed=()) if is_block(uncompiled(m)))
    return ((id(uncompiled(module)), module) for _, module in found)


class RecomputedForward(Forward):
    """Runs ``module.forward`` again in backward."""

    def __init__(self, module: nn.Module, options: dict[str, Any], around_inputs: AroundInputs = nullcontext) -> None:
        super().__init__(module)
        self._options = options
        self._around_inputs = around_inputs
        self._buffers = [(m, name) for m in module.modules() for name, _ in m.named_buffers(recurse=False)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward on the same arguments, with the same results."""
        forward = self.__wrapped__
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        caches = [name for name in _CACHES if kwargs.get(name) is not None]
        if caches and not self._module.training:
            return forward(*args, **kwargs)
        for name in caches:
            kwargs[name] = None
        if caches and "use_cache" in kwargs:
            kwargs["use_cache"] = False
        if torch.compiler.is_compiling():
            return checkpoint(forward, *args, **self._options, **kwargs)
        call = _ForwardCall(forward, args, kwargs, self._buffers)
        with self._around_inputs():
            return checkpoint(call, *call.tensors, **self._options, **checkpoint_options())


class _ForwardCall:
    """One call of a forward. It runs first with the caller's own arguments, then with tensors in their places.

    All tensors in the arguments become arguments of ``checkpoint``, which saves them through the saved-tensor hooks.
    This includes keyword arguments and the contents of tuples, lists and dicts. A tensor that is passed twice is one
    object in the second run too, as forwards that test ``query is key`` expect.
    """

    def __init__(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], buffers: list[_Place]
    ) -> None:
        self._forward = forward
        self._first: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._buffers = buffers
        self._updated: list[_Place] = []
        leaves, self._structure = tree_flatten((args, kwargs))
        places: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in places:
                places[id(leaf)] = len(self.tensors)
                self.tensors.append(leaf)
        self._leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._at = {i: places[id(leaf)] for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}

    def __call__(self, *tensors: Tensor) -> Any:
        if self._first is not None:
            (args, kwargs), self._first, self.tensors = self._first, None, []
            before = [_state_of(place) for place in self._buffers]
            output = self._forward(*args, **kwargs)
            self._updated = [
                place
                for place, state in zip(self._buffers, before, strict=True)
                if place[1] in STATISTICS or _state_of(place) != state
            ]
            return output
        leaves = [tensors[self._at[i]] if i in self._at else leaf for i, leaf in enumerate(self._leaves)]
        args, kwargs = tree_unflatten(leaves, self._structure)
        with _unchanged(self._updated):
            return self._forward(*args, **kwargs)


def _state_of(place: _Place) -> tuple[int, int]:
    buffer = getattr(*place)
    return (id(buffer), version_of(buffer) if isinstance(buffer, Tensor) and not buffer.is_inference() else 0)


@contextmanager
def _unchanged(buffers: list[_Place]) -> Generator[None, None, None]:
    """Restore the current values of buffers afterwards: the first run has updated them already."""
    with without_dispatch_modes():  # hide these copies from a selective policy
        saved = [(place, getattr(*place), getattr(*place).clone()) for place in buffers]
    try:
        yield
    finally:
        with torch.no_grad(), without_dispatch_modes():
            for (module, name), buffer, value in saved:
                if name in module._buffers:  # also one that is an nn.Parameter
                    module._buffers[name] = buffer.copy_(value)
                else:
                    setattr(module, name, buffer.copy_(value))
