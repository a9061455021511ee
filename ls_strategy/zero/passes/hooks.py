"""All hooks on modules and on autograd: which event calls which part.

==================================  ====================================================================
event                               call
==================================  ====================================================================
a unit's module is about to run     gather it (stage 3), or wait for its newest weights (stages 0 to 2)
it has run                          release it, unless backward begins with it; watch its outputs
the first output gets its gradient  gather it for backward
its last input got its gradient     release it
a parameter's gradient is complete  pass it to the reducer
==================================  ====================================================================
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy import spans
from ls_strategy._torch import (
    current_backward_pass,
    current_transform,
    is_compiled_in_place,
    on_gradient,
    outside_transforms,
    route_calls,
    tree_iter,
)
from ls_strategy.transient import Transient
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.units import Unit
from ls_strategy.zero.passes.gather import Gatherer
from ls_strategy.zero.passes.reduce import Reducer

_ATTACHED: weakref.WeakSet[UnitHooks] = weakref.WeakSet()
"""The hooks of every engine that is attached to a model."""


def _wait_before_steps() -> None:
    """Let all new weights arrive before a step begins. Dynamo calls this when it leaves a hook out of a graph."""
    for hooks in list(_ATTACHED):
        hooks.gatherer.wait_before_steps()


def _run(hook: _Hook, args: tuple[Any, ...]) -> None:
    hook(*args)


@cache
def _run_untraced() -> Callable[[_Hook, tuple[Any, ...]], None]:
    torch.compiler.assume_constant_result(_wait_before_steps)
    return torch.compiler.disable(  # type: ignore[no-any-return]
        _run,
        reason="ZeROStrategy gathers a unit's parameters before its module runs. Compile the blocks of the model, "
        "ZeROStrategy(compile='blocks'), instead of all of it",
    )


class _Hook(Transient):
    """A hook on a module. Copies of the module have none, or one that does nothing.

    Where parameters stay in memory for a whole step, a graph of ``torch.compile`` leaves the hook out, and weights in
    flight arrive before the step. Elsewhere the graph breaks at the hook. A graph that was traced with parameters in
    memory never runs without: then their class is another one, so it is traced again.
    """

    def __init__(
        self, call: Callable[..., Any], *, left_out: bool, in_transforms: Callable[[], Any] | None = None
    ) -> None:
        self._call, self._left_out, self._in_transforms = call, left_out, in_transforms
        self._run_untraced = _run_untraced()

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            if self._left_out:
                _wait_before_steps()
            else:
                self._run_untraced(self, args)
        elif current_transform() is not None:
            with outside_transforms():
                if self._in_transforms is not None:
                    self._in_transforms()
                self._call(*args)
        else:
            self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return (_do_nothing, ())


class _AfterForward(_Hook):
    """A forward hook. Inside `torch.func` hooks may miss the backward, so the unit stays until the next one."""

    def __init__(self, call: Callable[..., Any], unit: Unit) -> None:
        super().__init__(call, left_out=False)
        self._unit = unit

    def __call__(self, *args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            self._run_untraced(self, args)
        elif current_transform() is not None:
            self._unit.pin()
        else:
            self._call(*args)


@dataclass
class _AroundForward:
    """Runs the hooks of a module outside of its compiled call."""

    before: _Hook
    after: _AfterForward | None

    def __call__(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.before(None, args)
        output = call(*args, **kwargs)
        if self.after is not None:
            self.after(None, args, kwargs, output)
        return output


def _do_nothing_hook(*_: Any) -> None:
    """Replace a hook in a copy of its module."""


def _do_nothing() -> Callable[..., None]:
    return _do_nothing_hook


@dataclass
class _BackwardCall:
    """State of one call of a unit's module in backward."""

    sources: int
    sources_left: int = 0
    backward_pass: int = -1


def _tensors(value: Any) -> list[Tensor]:
    """Return every tensor in nested containers and dataclasses."""
    # The usual arguments and results of a module first: torch's walk over them takes 3 us per container.
    if isinstance(value, Tensor):
        return [value]
    if type(value) in (tuple, dict):
        return [tensor for each in (value.values() if type(value) is dict else value) for tensor in _tensors(each)]
    found: list[Tensor] = []
    for leaf in tree_iter(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            for field in fields(leaf):
                found += _tensors(getattr(leaf, field.name))
    return found


@dataclass
class _GradHook:
    """The hook of a parameter's gradient.

    Its references are weak: Python's garbage collection does not see hooks inside autograd, so it could not free a
    reference cycle through one, and every buffer of a finished fit would stay.
    """

    hooks: weakref.ref[UnitHooks]
    unit: weakref.ref[Unit]
    flat: weakref.ref[FlatBuffer]
    index: int

    def __call__(self, param: Tensor) -> None:
        hooks, unit, flat = self.hooks(), self.unit(), self.flat()
        if hooks is not None and unit is not None and flat is not None:
            hooks.on_grad(unit, flat, self.index, param)  # type: ignore[arg-type]


@dataclass
class _RowHook:
    """The hook of a gradient that autograd is about to add to a parameter's. See `_GradHook`."""

    reducer: weakref.ref[Reducer]
    flat: weakref.ref[FlatBuffer]
    index: int

    def __call__(self, grad: Tensor) -> None:
        reducer, flat = self.reducer(), self.flat()
        if reducer is not None and flat is not None:
            reducer.on_rows(flat, self.index, grad)


class UnitHooks:
    """Connects modules and parameters to the gatherer and the reducer."""

    def __init__(
        self, units: list[Unit], gatherer: Gatherer, reducer: Reducer, *, sharded: bool, nested: Collection[int] = ()
    ) -> None:
        """Attach everything.

        Args:
            units: of the model.
            gatherer: gathers and releases them.
            reducer: takes their gradients.
            sharded: parameters are sharded (stage 3).
            nested: ``id`` of the modules that are inside of compiled ones.
        """
        self.gatherer = gatherer
        self.reducer = reducer
        self.sharded = sharded
        self._nested = nested
        self.ended = False
        """Whether the run is over: gradients are the user's from then on, and nothing is sent."""
        self._handles: list[Any] = []
        _ATTACHED.add(self)
        for unit in units:
            for module in unit.modules:
                self._attach_module(unit, module)
            unit.modules.clear()  # the engine must not keep the model alive
            for flat in (f for f in unit.flats if f.has_optimizer):
                for i, param in enumerate(flat.params):
                    hook = _GradHook(weakref.ref(self), weakref.ref(unit), weakref.ref(flat), i)
                    # The parameter may be frozen for now, but only one with requires_grad can have this hook.
                    required = param.requires_grad
                    param.requires_grad_(True)
                    self._handles.append(param.register_post_accumulate_grad_hook(hook))
                    param.requires_grad_(required)

    def watch_rows(self, flats: list[FlatBuffer]) -> None:
        """Note the rows of sparse gradients for the optimizers that need them."""
        for flat in flats:
            for index in flat.local.rows:
                param = flat.params[index]
                required = param.requires_grad
                param.requires_grad_(True)
                self._handles.append(param.register_hook(_RowHook(weakref.ref(self.reducer), weakref.ref(flat), index)))
                param.requires_grad_(required)

    def detach(self) -> None:
        """Remove every hook."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        _ATTACHED.discard(self)

    def _attach_module(self, unit: Unit, module: nn.Module) -> None:
        def before(_module: nn.Module | None, _args: Any) -> None:
            # Inside a backward pass this is a recomputed forward, which runs through the model from its end.
            self.gatherer.fetch(unit, backward=current_backward_pass() >= 0)
            if spans.SpanRecorder.active is not None:
                spans.at_unit(unit.name)

        releases = self.sharded and not unit.is_root
        first = _Hook(before, left_out=not releases, in_transforms=partial(self.gatherer.fetch_exactly, unit))
        around = _AroundForward(first, _AfterForward(partial(self._after_forward, unit), unit) if releases else None)
        if is_compiled_in_place(module) and id(module) not in self._nested:  # or its hooks would be compiled too
            self._handles.append(route_calls(module, around))
            return
        # Before all other hooks, which may read parameters.
        self._handles.append(module.register_forward_pre_hook(around.before, prepend=True))
        if around.after is not None:
            self._handles.append(module.register_forward_hook(around.after, with_kwargs=True))

    def on_grad(self, unit: Unit, flat: FlatBuffer, index: int, param: nn.Parameter) -> None:
        """Handle a finished gradient."""
        if self.ended:
            return
        self.reducer.on_grad(unit, flat, index, param)
        # All gradients of the unit are there: this ends calls the inputs of which need no gradient.
        if self.sharded and unit.waiting_for <= 0 and not unit.is_root and unit.end_unclosable():
            self.gatherer.release(unit)

    # stage 3 ---------------------------------------------------------------------------------------------------------

    def _after_forward(self, unit: Unit, _module: nn.Module | None, args: Any, kwargs: Any, output: Any) -> None:
        if unit.open_backwards:
            return  # recomputed inside backward, which still needs the unit
        results = _tensors(output)
        if any([type(t) is not Tensor and getattr(t, "uses_weights_later", False) for t in results]):
            unit.pin()  # logits that a loss computes later: see `losses.deferred`
            return
        if not torch.is_grad_enabled():
            self.gatherer.release(unit)
            return
        outputs = [t for t in results if t.requires_grad]
        sources = [t for t in _tensors((args, kwargs) if kwargs else args) if t.requires_grad]
        if not outputs:
            if sources or any(p.requires_grad for flat in unit.flats for p in flat.params):
                unit.pin()  # its results do not leave as outputs, but their backward needs the unit
            else:  # a frozen model that runs without no_grad()
                self.gatherer.release(unit)
            return
        self._watch_backward(unit, sources, outputs)
        # A unit that is recomputed inside a backward pass stays until the end of its own backward, which follows.
        if not self.gatherer.is_last(unit) and current_backward_pass() < 0:
            self.gatherer.release(unit)

    def _watch_backward(self, unit: Unit, sources: list[Tensor], outputs: list[Tensor]) -> None:
        """Gather when the first output gets its gradient; release when the last input has got its gradient.

        The hooks hold no tensor, which would keep the call's activations alive in a reference cycle through autograd.
        """
        call = _BackwardCall(len(sources))

        def begins(_: Tensor) -> None:
            backward_pass = current_backward_pass()
            if call.backward_pass == backward_pass:
                return  # another output was first
            call.backward_pass, call.sources_left = backward_pass, call.sources
            unit.begin_call(closable=call.sources > 0)
            if torch.is_grad_enabled():  # create_graph=True: the second derivative needs the unit again
                unit.pin()
                unit.differentiated = True
            self.gatherer.fetch(unit, backward=True)

        def ends(_: Tensor) -> None:
            call.sources_left -= 1
            if call.sources_left:
                return
            if unit.end_call():
                self.gatherer.release(unit)

        for tensor in outputs:
            on_gradient(tensor, begins)
        for tensor in sources:
            on_gradient(tensor, ends)
