"""Parameters that gather their values when any code uses them, inside and outside their module.

A parameter object changes its class, which takes 0.1 us:

===================  =============================================  ====================================================
class                its values                                     what happens when it is used
===================  =============================================  ====================================================
`ResidentParameter`  in memory; at stage 3 while its unit computes  an ordinary parameter to torch. Access to ``.data``
                                                                    is noted: ``_version`` does not count writes there
`ShardedParameter`   released, in flight, or gathered on demand     any torch function asks its `Home` to gather it,
                                                                    or to wait; what autocast would cast uses the values
                                                                    in 16 bits, if they were gathered so
===================  =============================================  ====================================================

Functions that need no values (shape, dtype, ``requires_grad``) do not gather. A copy or a pickle of either class is a
plain `nn.Parameter` with memory of its own.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from ls_strategy._torch import WeakIdKeyDictionary, is_tracing, torch_function_is_on, tree_iter, without_torch_function
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
"""Torch functions that read or set attributes of a parameter and need no values."""

AUTOCAST_FUNCTIONS = frozenset({functional.linear, torch.conv1d, torch.conv2d, torch.conv3d})
"""Functions that autocast runs in 16 bits on every device, and that layers call with their parameters as they are."""

_FUSED = "_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_ _amp_foreach_non_finite_check_and_unscale_"
_GIVE_MEMORY = _ways("__array__ __dlpack__ data_ptr detach numpy storage untyped_storage") | {
    getattr(torch, name) for name in _FUSED.split() if hasattr(torch, name)
}
"""Torch functions whose writes do not count in ``_version``: to results that share memory, as in
``p.detach().numpy()[0] = 1``, and the updates of ``torch.optim.AdamW(..., fused=True)`` and the like."""


class Writes(Protocol):
    """Detects writes to the parameters of one home."""

    def note_access(self) -> None:
        """Record that their memory was accessed in a way in which writes do not count in ``_version``."""


class Home(Protocol):
    """Provides the values of a parameter."""

    @property
    def writes(self) -> Writes:
        """Return what detects writes to the parameters."""
        ...

    gathered_on_demand: bool
    """Whether the values are in memory only temporarily, and every further use calls `touch`."""

    reports_uses: bool
    """Whether every further use calls `touch` although they are in memory."""

    def touch(self) -> None:
        """Gather the values, and keep them until `touched`. Collective."""

    def saving(self) -> AbstractContextManager[Any]:
        """Wrap an operation on them: autograd gathers again what it saved of them."""
        ...

    def touched(self) -> None:
        """End the operation that `touch` began."""

    def note_data_view(self, param: nn.Parameter, values: Tensor) -> None:
        """Record that user code got a view of a parameter's memory, which it may use after the parameter has moved."""

    def note_view(self, values: Tensor) -> None:
        """Record that user code got another view of a parameter's memory, which it may keep."""

    def unshared(self, value: Tensor) -> Tensor:
        """Return the tensor to set a parameter's ``data`` to: a copy, if ``value`` is a view of a flat buffer."""
        ...

    def read_grad(self, param: nn.Parameter) -> Tensor | None:
        """Return ``param.grad``. Collective."""

    def write_grad(self, param: nn.Parameter, value: Tensor | None) -> None:
        """Set ``param.grad``. Collective."""

    def cast_of(self, param: nn.Parameter) -> Tensor | None:
        """Return a parameter as autocast would cast it now, if it was gathered so. Otherwise None."""
        ...

    def is_collecting(self) -> bool:
        """Return whether a state dict is being collected, for which hooks fetch the values."""
        ...

    def stand_in(self, param: nn.Parameter) -> Tensor:
        """Return what stands for a released parameter in a state dict until hooks fetch the values."""
        ...


_HOMES: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter -> weak reference to its home. An attribute of the parameter would go into pickles."""


class ResidentParameter(nn.Parameter):
    """A parameter of an engine whose values are in memory."""

    @property  # type: ignore[override]
    def data(self) -> Tensor:
        """Return the values, and record the access."""
        self._record_access()
        with without_torch_function():
            values = _DATA.__get__(self)
        if torch_function_is_on() and (home := home_of(self)) is not None:
            home.note_data_view(self, values)
        return values

    @data.setter
    def data(self, value: Tensor) -> None:
        self._record_access()
        if torch_function_is_on() and (home := home_of(self)) is not None:
            value = home.unshared(value)
        with without_torch_function():
            _DATA.__set__(self, value)

    def _read_grad(self) -> Tensor | None:
        home = home_of(self) if torch_function_is_on() and not is_tracing() else None
        if home is None:
            return grad_of(self)
        grad = home.read_grad(self)
        if isinstance(sys._getframe(1).f_locals.get("self"), Optimizer):
            home.writes.note_access()  # one of the user's own: fused updates do not count in ``_version``
        return grad

    def _write_grad(self, value: Tensor | None) -> None:
        home = home_of(self) if torch_function_is_on() else None
        if home is None:
            set_grad(self, value)
        else:
            home.write_grad(self, value)

    grad: Any = property(_read_grad, _write_grad, lambda self: self._write_grad(None))
    """The averaged gradient after backward, as under DDP; see `ls_strategy.zero.user_code.gradients`."""

    def _record_access(self) -> None:
        if torch_function_is_on() and (home := home_of(self)) is not None:
            if type(self) is ShardedParameter:
                home.touch()
                home.touched()
            home.writes.note_access()
        elif torch_function_is_on() and type(self) is ShardedParameter:
            _home_now(self)

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """Return the values as an array, and record the access."""
        self._record_access()
        return super().numpy(*args, **kwargs)

    def detach(self) -> Tensor:
        """Return a view of the values, and record the access if the caller is outside torch."""
        # Torch's own code, such as a checkpointed forward in every step, does not write to the result.
        if torch.compiler.is_dynamo_compiling() or str(sys._getframe(1).f_globals.get("__name__")).startswith("torch."):
            return super().detach()
        self._record_access()
        values = super().detach()
        if torch_function_is_on() and (home := home_of(self)) is not None:
            home.note_view(values)
        return values

    def untyped_storage(self) -> Any:
        """Return the storage. The access is recorded if the values are in memory."""
        if type(self) is ResidentParameter:
            self._record_access()
        return super().untyped_storage()

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Export the values, and record the access."""
        self._record_access()
        return super().__dlpack__(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain parameter with memory of its own."""
        if id(self) not in memo:
            memo[id(self)] = self._plain()
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain parameter, without the flat buffer."""
        return self._plain().__reduce_ex__(protocol)

    def _plain(self) -> nn.Parameter:
        with torch.no_grad():
            return nn.Parameter(self.clone(), self.requires_grad)


class ShardedParameter(ResidentParameter):
    """A parameter of an engine whose values are released, in flight or gathered on demand."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Gather the values first, unless the function needs none."""
        kwargs = kwargs or {}
        if func in AUTOCAST_FUNCTIONS:
            with without_torch_function():
                args = [_as_cast(arg) if type(arg) is ShardedParameter else arg for arg in args]
            if ShardedParameter not in map(type, (*args, *kwargs.values())):
                return func(*args, **kwargs)
        if func is _DETACH and (home := home_of(args[0])) is not None and home.is_collecting():
            return home.stand_in(args[0])
        sizes_tell = func is torch.equal and len(args) == 2 and args[0].shape != args[1].shape
        if sizes_tell or func in NEED_NO_VALUES:
            with without_torch_function():
                return func(*args, **kwargs)
        return _with_values(func, args, kwargs)


def _with_values(func: Any, args: Any, kwargs: Any) -> Any:
    """Gather the sharded parameters among the arguments, and call a torch function."""
    params: list[nn.Parameter] = [leaf for leaf in tree_iter((args, kwargs)) if type(leaf) is ShardedParameter]
    homes = {id(home): home for home in map(_home_now, params)}
    for home in homes.values():
        home.touch()
    # Inside the call torch sees ordinary parameters; all other absent ones stay absent.
    for p in params:
        p.__class__ = ResidentParameter
    try:
        if func in _GIVE_MEMORY:
            for home in homes.values():
                home.writes.note_access()
        released_later = next((home for home in homes.values() if home.gathered_on_demand), None)
        with nullcontext() if released_later is None else released_later.saving():
            return func(*args, **kwargs)
    finally:
        for p in params:
            if (home := home_of(p)) is not None and (home.gathered_on_demand or home.reports_uses):
                p.__class__ = ShardedParameter
        for home in homes.values():
            home.touched()


def _as_cast(param: nn.Parameter) -> Tensor:
    """Return what autocast would cast a sharded parameter to, if it was gathered so. Otherwise the parameter."""
    cast = _home_now(param).cast_of(param)
    return param if cast is None else cast


def bind_home(param: nn.Parameter, home: Home) -> bool:
    """Let ``home`` provide the parameter's values. Return False for a parameter class of another library."""
    if type(param) not in (nn.Parameter, ResidentParameter, ShardedParameter):
        return False
    _HOMES[param] = weakref.ref(home)
    return True


def unbind_home(param: nn.Parameter) -> None:
    """Make ``param`` an ordinary parameter again."""
    if _HOMES.pop(param, None) is not None:
        param.__class__ = nn.Parameter


def home_of(param: Tensor) -> Any:
    """Return the home of ``param``, or None if no engine holds it (any more)."""
    reference = _HOMES.get(param)
    return None if reference is None else reference()


def _home_now(param: Tensor) -> Any:
    """Return the home of a sharded parameter.

    Raises:
        StateError: the engine that held its values was freed.
    """
    home = home_of(param)
    if home is None:
        raise StateError(
            f"a parameter of shape {tuple(param.shape)} was used after the model and the strategy that held its values "
            "(stage 3) were freed. Keep the model, or take model.state_dict() before."
        )
    return home


point: Callable[[nn.Parameter, Tensor], None] = _DATA.__set__
"""Makes a parameter point at values of its shape. Call it inside `unnoticed`."""


def grad_of(param: Tensor) -> Tensor | None:
    """Return this rank's ``.grad`` as autograd has set it."""
    if type(param) is ResidentParameter:  # for which torch calls no function; a context takes longer than the rest
        return _GRAD.__get__(param)
    with without_torch_function():
        return _GRAD.__get__(param)


def set_grad(param: Tensor, value: Tensor | None) -> None:
    """Set this rank's ``.grad``."""
    if type(param) is ResidentParameter:
        _GRAD.__set__(param, value)
        return
    with without_torch_function():
        _GRAD.__set__(param, value)


def values_of(param: nn.Parameter) -> Tensor:
    """Return the tensor that ``param`` points at, without gathering."""
    with without_torch_function():
        return _DATA.__get__(param)


unnoticed = without_torch_function
"""Context for the engine's own code: on this thread, using a parameter gathers nothing and is not recorded."""
