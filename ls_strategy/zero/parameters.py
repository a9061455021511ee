"""What a parameter does while its values are elsewhere: it can be read and written anywhere, by whoever touches it.

A parameter object changes its class, which costs 0.1 us:

=========  =============================================  =============================================================
class      its values                                     what touches it
=========  =============================================  =============================================================
`Present`  in memory; at stage 3 while its unit computes  to torch an ordinary parameter. A look at ``.data`` is
                                                          noted: what is written there does not count in ``_version``
`Absent`   released, in flight, or lent                   any torch function asks its `Home` to gather it, or to wait
=========  =============================================  =============================================================

Questions that need no values (shape, dtype, ``requires_grad``) are answered as they are. A copy or a pickle of either
is a plain `nn.Parameter` with memory of its own.
"""

from __future__ import annotations

import sys
import weakref
from contextlib import AbstractContextManager, nullcontext
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ls_strategy._compat import (
    WeakIdKeyDictionary,
    is_tracing,
    torch_function_is_on,
    tree_iter,
    without_torch_function,
)
from ls_strategy.errors import StateError

_DATA: Any = torch.Tensor.data
_GRAD: Any = torch.Tensor.grad
_DETACH: Any = torch.Tensor.detach

_PROPERTIES = """
    device dtype grad grad_dtype grad_fn is_cpu is_cuda is_leaf is_meta is_mps is_nested is_quantized is_sparse is_xpu
    itemsize layout names nbytes ndim output_nr requires_grad retains_grad shape _backward_hooks
    _post_accumulate_grad_hooks _version
"""
_METHODS = """
    __hash__ __len__ dim element_size get_device has_names is_complex is_floating_point is_signed ndimension nelement
    new_empty new_full new_ones new_tensor new_zeros numel register_hook register_post_accumulate_grad_hook
    requires_grad_ size
"""
_FUNCTIONS = """
    empty_like full_like is_complex is_floating_point is_same_size numel ones_like rand_like randn_like zeros_like
"""


def _ways(names: str, *ways: str) -> set[Any]:
    found = [getattr(torch.Tensor, name) for name in names.split() if hasattr(torch.Tensor, name)]
    return {getattr(f, way) for f in found for way in ways if hasattr(f, way)} if ways else set(found)


NEED_NO_VALUES = (
    _ways(_PROPERTIES, "__get__", "__set__", "__delete__")
    | _ways(_METHODS)
    | {getattr(torch, name) for name in _FUNCTIONS.split()}
)
"""Torch functions that ask a parameter what it is, not what its values are."""


_GIVE_MEMORY = _ways("__array__ __dlpack__ data_ptr detach numpy storage untyped_storage")
"""Torch functions whose results are written to without a trace in ``_version``, as in ``p.detach().numpy()[0] = 1``."""


class Home(Protocol):
    """Where a parameter's values come from."""

    may_be_written: bool
    """Whether somebody has looked at its memory in a way in which writes do not count in ``_version``."""

    lent: bool
    """Whether the values are here for a while only, and every further touch wants to be seen."""

    def touch(self) -> None:
        """Bring the values into memory, and keep them until `touched`. Collective."""
        ...

    def saving(self) -> AbstractContextManager[Any]:
        """Around an operation on them: what autograd saves is found again after they were let go."""
        ...

    def touched(self) -> None:
        """The operation is over."""
        ...

    def hand_out(self, param: nn.Parameter, values: Tensor) -> None:
        """Somebody gets a view of a parameter's memory, which he may go on to use when the parameter has another."""
        ...

    def apart(self, value: Tensor) -> Tensor:
        """What a parameter's ``data`` is set to; a copy, if it is the memory of a parameter, which others will have."""
        ...

    def read_grad(self, param: nn.Parameter) -> Tensor | None:
        """``param.grad``. Collective."""
        ...

    def write_grad(self, param: nn.Parameter, value: Tensor | None) -> None:
        """``param.grad = value``. Collective."""
        ...

    def is_collected(self) -> bool:
        """Whether a state dict is being put together, by hooks that bring the values in their own way."""
        ...


_HOMES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter -> weak reference to its home. Not an attribute of the parameter, which would go into pickles."""


class Present(nn.Parameter):
    """A parameter of an engine whose values are in memory."""

    @property  # type: ignore[override]
    def data(self) -> Tensor:
        """As of any parameter."""
        self._look()
        with without_torch_function():
            values = _DATA.__get__(self)
        if torch_function_is_on() and (home := home_of(self)) is not None:
            home.hand_out(self, values)
        return values

    @data.setter
    def data(self, value: Tensor) -> None:
        self._look()
        if torch_function_is_on() and (home := home_of(self)) is not None:
            value = home.apart(value)
        with without_torch_function():
            _DATA.__set__(self, value)

    def _read_grad(self) -> Tensor | None:
        home = home_of(self) if torch_function_is_on() and not is_tracing() else None
        return grad_of(self) if home is None else home.read_grad(self)

    def _write_grad(self, value: Tensor | None) -> None:
        home = home_of(self) if torch_function_is_on() else None
        if home is None:
            set_grad(self, value)
        else:
            home.write_grad(self, value)

    def _drop_grad(self) -> None:
        self._write_grad(None)

    grad: Any = property(_read_grad, _write_grad, _drop_grad)
    """After backward the averaged gradient, as under DDP; see `ls_strategy.zero.gradients`."""

    def _look(self) -> None:
        if torch_function_is_on() and (home := home_of(self)) is not None:
            if type(self) is Absent:
                home.touch()
                home.touched()
            home.may_be_written = True
        elif torch_function_is_on() and type(self) is Absent:
            _home_now(self)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """As of any parameter."""
        self._look()
        return super().numpy(*args, **kwargs)

    def detach(self) -> Tensor:
        """As of any parameter."""
        # Torch's own code, such as a checkpointed forward in every step, does not write to what it gets.
        if not torch.compiler.is_dynamo_compiling() and not _is_called_by_torch(sys._getframe(1)):
            self._look()
        return super().detach()

    def untyped_storage(self) -> Any:
        """As of any parameter; of one that is elsewhere it is no question for values."""
        if type(self) is Present:
            self._look()
        return super().untyped_storage()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """As of any parameter."""
        self._look()
        return super().__dlpack__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter with memory of its own."""
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain parameter: the buffer that this one is a part of stays out of pickles."""
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> nn.Parameter:
        with torch.no_grad():
            return nn.Parameter(self.clone(), self.requires_grad)


class Absent(Present):
    """A parameter of an engine whose values are elsewhere, or here for a while only."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Bring the values first; what only asks for shapes and the like needs none."""
        kwargs = kwargs or {}
        if _needs_no_values(func, args):
            with without_torch_function():
                return func(*args, **kwargs)
        params: list[nn.Parameter] = [leaf for leaf in tree_iter((args, kwargs)) if type(leaf) is Absent]
        homes = {id(home): home for home in map(_home_now, params)}
        for home in homes.values():
            home.touch()
        # Torch, and what it calls inside, sees ordinary parameters; others that are absent stay so.
        for p in params:
            p.__class__ = Present
        try:
            if func in _GIVE_MEMORY:
                for home in homes.values():
                    home.may_be_written = True
            with next(iter(homes.values())).saving() if homes else nullcontext():
                return func(*args, **kwargs)
        finally:
            for p in params:
                if (home := home_of(p)) is not None and home.lent:
                    p.__class__ = Absent
            for home in homes.values():
                home.touched()


def _is_called_by_torch(caller: FrameType) -> bool:
    return str(caller.f_globals.get("__name__")).startswith("torch.")


def _needs_no_values(func: Any, args: Any) -> bool:
    """Whether torch can answer from what the parameters are, whatever their values."""
    if func is _DETACH:
        home = home_of(args[0])
        return home is not None and home.is_collected()
    if func is torch.equal and len(args) == 2:
        return args[0].shape != args[1].shape
    return func in NEED_NO_VALUES


def bind_home(param: nn.Parameter, home: Home) -> bool:
    """From now on the parameter's values come from ``home``; False for a class of another library's own."""
    if type(param) not in (nn.Parameter, Present, Absent):
        return False
    _HOMES[param] = weakref.ref(home)
    return True


def unbind_home(param: nn.Parameter) -> None:
    """Make it an ordinary parameter again."""
    if _HOMES.pop(param, None) is not None:
        param.__class__ = nn.Parameter


def home_of(param: Tensor) -> Any:
    """Its home; None for a stranger, and once the engine is gone."""
    reference = _HOMES.get(param)
    return None if reference is None else reference()


def _home_now(param: Tensor) -> Any:
    """The home of one whose values are elsewhere; an error once the engine that had them is gone."""
    home = home_of(param)
    if home is None:
        raise StateError(
            f"a parameter of shape {tuple(param.shape)} was used after the model and the strategy that held its values "
            "(stage 3) were gone. Keep the model, or take model.state_dict() before it goes."
        )
    return home


def point(param: nn.Parameter, values: Tensor) -> None:
    """Let it be at ``values``, of its shape. Inside `unnoticed`."""
    _DATA.__set__(param, values)


def grad_of(param: Tensor) -> Tensor | None:
    """What autograd has put into ``.grad``: of this rank, as it is."""
    with without_torch_function():
        return _GRAD.__get__(param)


def set_grad(param: Tensor, value: Tensor | None) -> None:
    """Put something there, or None."""
    with without_torch_function():
        _GRAD.__set__(param, value)


def values_of(param: nn.Parameter) -> Tensor:
    """What it points at, whatever that is; asks nobody."""
    with without_torch_function():
        return _DATA.__get__(param)


unnoticed = without_torch_function
"""Inside, on this thread, touching a parameter gathers nothing and is not noted: for the engine's own code."""
