"""Private names of torch, so that a new release breaks one file at most.

Those of Lightning are in `ls_strategy.lightning._private`, but for two in `ls_strategy.lightning.checkpointing.files`.
"""

from __future__ import annotations

import inspect
import os
import socket
import stat
import sys
import threading
import weakref
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import CompileContext
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo  # noqa: F401
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_iter as tree_iter
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary as WeakIdKeyDictionary

_NEW = hasattr(dist.ProcessGroup, "all_gather_single")  # torch 2.14 has new names, and warns of the old ones
_gather = getattr(dist.ProcessGroup, "all_gather_single" if _NEW else "_allgather_base")
_reduce_scatter = getattr(dist.ProcessGroup, "reduce_scatter_single" if _NEW else "_reduce_scatter_base")


def _options(kind: type[Any], *, async_op: bool) -> Any:
    options = kind()
    options.asyncOp = async_op
    return options


_GATHER = tuple(_options(AllgatherOptions, async_op=later) for later in (False, True))
_REDUCE_SCATTER = tuple(_options(ReduceScatterOptions, async_op=later) for later in (False, True))


def all_gather_single(full: Tensor, mine: Tensor, *, group: Any, async_op: bool = False) -> Any:
    """Run ``torch.distributed``'s function of this name, of a group that this rank is in.

    A unit at stage 3 takes it three times per step, or its counterpart: around its call of the group, torch's own
    function spends 7 us with logging, and looks whether it is inside of a context that nobody here enters.
    """
    if full.is_complex():
        full, mine = torch.view_as_real(full), torch.view_as_real(mine)
    work = _gather(group, full, mine, _GATHER[async_op])
    return work if async_op or work is None else work.wait()


def reduce_scatter_single(out: Tensor, full: Tensor, *, group: Any, async_op: bool = False) -> Any:
    """Sum over the ranks, as ``torch.distributed``'s function of this name does. See `all_gather_single`."""
    work = _reduce_scatter(group, out, full, _REDUCE_SCATTER[async_op])
    return work if async_op or work is None else work.wait()


def flash_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return torch's flash attention ``(B, H, t, N)``, and the logarithm of every row's sum of exponentials in fp32."""
    if query.device.type == "cpu":
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return attend(query, key, value, 0.0, causal, scale=scale)
    return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)[:2]


def flash_attention_backward(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    result: Tensor,
    log_sum: Tensor,
    *,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value from what `flash_attention` returned, for these keys or for more."""
    log_sum = log_sum.contiguous()
    if grad.device.type == "cpu":
        backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(grad, *inputs, result, log_sum, 0.0, causal, scale=scale)
    unused = torch.empty(2, dtype=torch.int64, device=grad.device)  # the state of dropout
    lengths = (None, None, inputs[0].shape[2], inputs[1].shape[2])
    backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
    return backward(grad, *inputs, result, log_sum, *lengths, 0.0, causal, unused, unused, scale=scale)


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, longest: int, scale: float | None
) -> Tensor:  # fmt: skip
    """Return torch's causal flash attention ``(t, H, N)`` within consecutive sequences, on CUDA in 16 bit.

    Args:
        query: ``(t, H, N)``, the tokens of all sequences.
        key: ``(t, K, N)``; ``K`` divides ``H``.
        value: ``(t, K, N)``.
        ends: the last token of every sequence, exclusive, after a 0; int32.
        longest: length of the longest sequence.
        scale: of the scores. None: ``N ** -0.5``.
    """
    from torch.nn.attention.varlen import varlen_attn  # registers operations: where they are used

    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}  # causal
    shared = query.shape[1] // key.shape[1]
    if shared > 1:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:  # torch 2.11
            key, value = (x.repeat_interleave(shared, 1) for x in (key, value))
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    attend: Any = varlen_attn  # which returns more when asked
    return attend(query, key, value, ends, ends, longest, longest, **options)


@cache
def onednn_linear() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return oneDNN's linear for fp32 CPU tensors without gradients, None if torch does not have it."""
    product = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
    if product is None:
        return None
    return lambda x, weight: product(x, weight, None, "none", [], "")


current_backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Returns a number that identifies the current backward pass; -1 outside of backward."""


_REENTRANT = torch.utils.checkpoint.CheckpointFunction


def in_reentrant_checkpoint() -> bool:
    """Return whether the caller is in a forward or recomputation of ``torch.utils.checkpoint(use_reentrant=True)``."""
    codes = (_REENTRANT.forward.__code__, _REENTRANT.backward.__code__)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def make_wrapper(kind: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Any:
    """Return a tensor of class ``kind`` without storage. ``device``: that it claims to be on; None: the CPU."""
    return torch.Tensor._make_wrapper_subclass(kind, tuple(shape), dtype=dtype, device=device)


def default_store() -> Any:
    """Return the rendezvous store of the default process group. Raises if there is none."""
    return dist.distributed_c10d._get_default_store()


def store_port() -> int | None:
    """Return the port of the rendezvous store of the default process group; None if it is no server."""
    store = default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "port", None)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set how long the collectives of a process group may take from now on. Not collective."""
    if hasattr(dist, "set_timeout"):  # older versions of torch have only the private one
        dist.set_timeout(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


def world_group() -> Any:
    """Return the default process group, None if there is none. A new group is a new object."""
    return dist.group.WORLD if dist.is_initialized() else None


def open_sockets() -> set[tuple[int, int]]:
    """Return the sockets of this process as ``(file descriptor, inode)``. Empty on other systems than Linux."""
    result: set[tuple[int, int]] = set()
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            status = os.fstat(int(entry.name))
        except OSError:  # closed in the meantime
            continue
        if stat.S_ISSOCK(status.st_mode):
            result.add((int(entry.name), status.st_ino))
    return result


def connections(sockets: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Any, Any]]:
    """Return the own and the other address of those sockets that are open TCP connections."""
    result: dict[tuple[int, int], tuple[Any, Any]] = {}
    for fd, inode in sockets:
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                    result[fd, inode] = connection.getsockname()[:2], connection.getpeername()[:2]
        except OSError:  # closed in the meantime, or a socket that listens
            continue
    return result


def shut_sockets(sockets: set[tuple[int, int]], *, except_port: int) -> None:
    """Shut connections down without closing their descriptors, so that gloo gets an error on both sides.

    gloo's groups cannot be aborted: ``ProcessGroup.abort`` has no effect, and ``destroy_process_group`` leaves the
    connections open until the process ends. Connections to or from ``except_port`` stay open.
    """
    for fd, _ in sockets & open_sockets():
        try:
            with socket.socket(fileno=os.dup(fd)) as connection:
                if except_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                    connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError):  # closed in the meantime, or a listening or Unix socket: no rank waits on it
            continue


def copy_of_optimizer(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Return an optimizer with the same settings, state and hooks, on other parameter groups."""
    copied = type(optimizer).__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    copied.param_groups = groups
    return copied


def forget_step_hooks(optimizer: Optimizer) -> None:
    """Give a copy of an optimizer its own, empty step hooks."""
    optimizer._optimizer_step_pre_hooks = OrderedDict()
    optimizer._optimizer_step_post_hooks = OrderedDict()


def has_step_hooks(optimizer: Optimizer, *, besides: Any) -> bool:
    """Return whether any hook but a method of ``besides``, if given, runs before or after the optimizer's ``step``."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return any(besides is None or getattr(hook, "__self__", None) is not besides for hook in hooks)


def put_step_hooks_inside(optimizer: Optimizer, before: Any, after: Any) -> None:
    """Move two hooks, given by their handles, next to ``step``: the last one before it and the first one after it."""
    optimizer._optimizer_step_pre_hooks.move_to_end(before.id)  # type: ignore[attr-defined]
    optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)  # type: ignore[attr-defined]


def run_step_pre_hooks(optimizer: Optimizer, kwargs: dict[str, Any], *, besides: Any) -> dict[str, Any]:
    """Run the optimizer's step pre-hooks except methods of ``besides``; return the step's arguments.

    Raises:
        RuntimeError: as in torch, if a hook returns anything but arguments.
    """
    args: tuple[Any, ...] = (optimizer,)
    for hook in list(optimizer._optimizer_step_pre_hooks.values()):
        if getattr(hook, "__self__", None) is besides:
            continue
        result = hook(optimizer, args, kwargs)
        if result is not None:
            if not (isinstance(result, tuple) and len(result) == 2):
                raise RuntimeError(f"{hook} must return None or a tuple of (new_args, new_kwargs), but got {result}.")
            args, kwargs = result  # type: ignore[assignment]
    return kwargs


@contextmanager
def without_step_pre_hooks(optimizer: Optimizer, *, besides: Any) -> Generator[None, None, None]:
    """Disable the optimizer's step pre-hooks inside, except methods of ``besides``."""
    hooks = optimizer._optimizer_step_pre_hooks
    kept = [(key, hook) for key, hook in hooks.items() if getattr(hook, "__self__", None) is besides]
    optimizer._optimizer_step_pre_hooks = OrderedDict(kept)
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks = hooks


def has_own_state_dict(optimizer: Optimizer) -> bool:
    """Return whether the class or a hook of an optimizer extends torch's ``state_dict`` or ``load_state_dict``."""
    kind = type(optimizer)
    methods = ("state_dict", "load_state_dict")
    hooks = ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post")
    return (
        any(getattr(kind, name) is not getattr(Optimizer, name) for name in methods)
        or any(getattr(optimizer, f"_optimizer_{name}_hooks") for name in hooks)
        or not kind.__setstate__.__module__.startswith(("torch.", "ls_strategy."))
    )


class OptimizerHooks:
    """Calls an optimizer's hooks of ``state_dict`` and ``load_state_dict`` as torch's methods do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def around_save(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return ``state`` as the hooks change it."""
        for before in self._optimizer._optimizer_state_dict_pre_hooks.values():
            before(self._optimizer)
        for after in self._optimizer._optimizer_state_dict_post_hooks.values():
            changed = after(self._optimizer, state)
            state = state if changed is None else changed
        return state

    def around_load(self, state: dict[str, Any], load: Callable[[dict[str, Any]], None]) -> None:
        """Call ``load`` with ``state`` as the hooks change it, then ``__setstate__`` of the user's class."""
        optimizer = self._optimizer
        state = state.copy()
        for before in optimizer._optimizer_load_state_dict_pre_hooks.values():
            changed = before(optimizer, state)
            state = state if changed is None else changed
        load(state)
        if not type(optimizer).__setstate__.__module__.startswith(("torch.", "ls_strategy.")):
            elsewhere = optimizer.state
            optimizer.__setstate__({"state": defaultdict(dict), "param_groups": optimizer.param_groups})
            optimizer.state = elsewhere
        for after in optimizer._optimizer_load_state_dict_post_hooks.values():
            after(optimizer)


_STATE_METHODS = threading.RLock()


@contextmanager
def torch_state_methods(
    optimizer: Optimizer,
    *,
    save: Callable[[], dict[str, Any]] | None = None,
    load: Callable[[dict[str, Any]], None] | None = None,
) -> Generator[None, None, None]:
    """Replace torch's ``Optimizer.state_dict`` and ``load_state_dict`` for one optimizer, inside the context.

    Subclasses reach them by ``super()``, past what is attached to the object.
    """
    _STATE_METHODS.acquire()
    saves, loads = Optimizer.state_dict, Optimizer.load_state_dict

    def state_dict(self: Optimizer) -> dict[str, Any]:
        return save() if self is optimizer and save is not None else saves(self)

    def load_state_dict(self: Optimizer, state_dict: dict[str, Any]) -> None:
        if self is optimizer and load is not None:
            load(state_dict)
        else:
            loads(self, state_dict)

    torchs: Any = Optimizer
    torchs.state_dict, torchs.load_state_dict = state_dict, load_state_dict
    try:
        yield
    finally:
        torchs.state_dict, torchs.load_state_dict = saves, loads
        _STATE_METHODS.release()


def persistent_buffer_names(model: nn.Module) -> set[str]:
    """Return the names of the buffers in ``model.state_dict()``."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, _ in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def sync_batch_norm_error() -> str | None:
    """Return why ``torch.nn.SyncBatchNorm`` cannot run on this machine, None if it can."""
    available = torch.accelerator.is_available()
    return None if available else "torch.nn.SyncBatchNorm has no CPU implementation"


@contextmanager
def without_crc32() -> Generator[None, None, None]:
    """Make ``torch.save`` skip the checksums of its zip records, which ``torch.load`` does not read."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies the storage; all views share it, and it survives a resize.

    A `StorageWeakRef` to the storage prevents the reuse of the number.
    """
    with without_torch_function():  # reading the key of a released parameter must not gather it
        return tensor.untyped_storage()._cdata


_refuse_access: Any = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_allow_access: Any = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)
REFUSES_FREED_MEMORY = _refuse_access is not None and _allow_access is not None
"""Whether `refuse_views` works: from torch 2.12 on, where it can be taken back."""

refuse_views: Any = _refuse_access if REFUSES_FREED_MEMORY else lambda *_: None
"""Let the use of a storage without memory, of this `storage_key`, raise a message until `allow_views` is called.

Otherwise it reads at address 0, which ends the process.
"""


allow_views: Any = _allow_access if REFUSES_FREED_MEMORY else lambda *_: None
"""Undo `refuse_views` of this `storage_key`: the storage gets memory."""


def allow_data_on(tensor: Tensor, device: torch.device) -> None:
    """Let ``tensor.data`` be set to tensors of ``device``.

    It can be at once between torch's own devices. To and from a device of another package, the tensor is moved.
    """
    there = torch.empty(0, device=device)
    if not torch._has_compatible_shallow_copy_type(tensor, there):
        there = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            there = nn.Parameter(there, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, there)


def drop_references(model: nn.Module) -> None:
    """Drop what keeps ``torch.utils.swap_tensors`` from replacing parameters on meta; `renew_references` renews it.

    These are weak references of recurrent layers to their weights; and the weights that torch's old ``weight_norm`` and
    ``spectral_norm`` compute from parameters before every forward, whose graphs refer to these.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = []
        for value in vars(module).values():
            if type(value) is Tensor and value.is_meta and value.grad_fn is not None and not value._is_view():
                value.detach_()


def renew_references(model: nn.Module) -> None:
    """Undo `drop_references`, for the parameters that the layers have now."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()


def foreach_function(name: str) -> Callable[..., Any]:
    """Return a function on lists of tensors as torch's clipping uses it: ``norm``, ``mul_``, ``clamp_min_``, ..."""
    return getattr(torch, f"_foreach_{name}")


def abort_process_groups(wanted: Callable[[Any], bool]) -> None:
    """Abort all ``wanted`` process groups of this process, the newest first.

    NCCL aborts them together: one after the other, each might wait for operations of the next.
    """
    names = dist.distributed_c10d._world.pg_names
    groups = [group for group in sorted(names, key=lambda g: names[g], reverse=True) if wanted(group)]
    nccl = next((b for b in map(_device_backend, groups) if hasattr(b, "_group_start")), None)
    if nccl is not None:
        nccl._group_start()
    for group in groups:
        group.abort()
    if nccl is not None:
        nccl._group_end()


def _device_backend(group: Any) -> Any:
    try:
        return group._get_backend(torch.accelerator.current_accelerator() or torch.device("cpu"))
    except RuntimeError:
        return None


def storage_users(tensor: Tensor) -> int:
    """Return the number of references to the storage of this tensor."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


without_torch_function: Callable[[], AbstractContextManager[Any]] = torch._C.DisableTorchFunctionSubclass
"""Context that disables ``__torch_function__`` of tensor subclasses on this thread."""

torch_function_is_on: Callable[[], bool] = torch._C._is_torch_function_enabled
"""Returns whether ``__torch_function__`` works on this thread: it does outside of `without_torch_function`."""


def is_tracing() -> bool:
    """Return whether dynamo compiles on this thread. It then reads parameters, and with torch 2.11 their gradients."""
    return CompileContext.try_get() is not None


current_transform: Callable[[], object | None] = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]
"""Returns the innermost transform of `torch.func` (grad, vmap, ...) that this thread is inside of, or None."""


def outside_transforms() -> AbstractContextManager[Any]:
    """Hide operations on plain tensors from the transforms of `torch.func`."""
    return temporarily_clear_interpreter_stack()


def on_gradient(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Call ``hook`` with the gradient of a tensor, as ``Tensor.register_hook`` does, without a handle to remove it.

    The handle would take two thirds of the time, for two tensors of every call of a sharded module.
    """
    if type(tensor) is not Tensor or not tensor.requires_grad:
        tensor.register_hook(hook)
        return
    hooks: Any = tensor._backward_hooks
    if hooks is None:
        hooks = tensor._backward_hooks = OrderedDict()
        if tensor.grad_fn is not None:
            tensor.grad_fn._register_hook_dict(tensor)  # type: ignore[attr-defined]
    hooks[hook] = hook


def version_of(tensor: Tensor) -> int:
    """Return how often the tensor, or another view of its memory, was changed in place."""
    return tensor._version


set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = torch._C._autograd._unsafe_set_version_counter  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
"""Sets what `version_of` returns: autograd refuses a tensor whose version is not that with which it was saved."""


class VersionedTensor:
    """A tensor that hooks leave in autograd's graph, where autograd itself would check its version, but does not."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, None if tensor.is_inference() else tensor._version

    def get(self) -> Tensor:
        """Return the tensor, or raise autograd's error if it was changed in place."""
        now = self._tensor._version if self._version is not None else None
        if now != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._tensor.type()} {list(self._tensor.shape)}] is at version {now}; expected version "
                f"{self._version} instead."
            )
        return self._tensor


_RECOMPUTES = "torch.utils.checkpoint"
_saving_hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks  # type: ignore[attr-defined]


def saved_by_hooks_of_others() -> bool:
    """Return whether autograd passes what it saves now to hooks that are neither this package's nor of recomputation.

    Those may return the tensor itself, and autograd does not check versions of what hooks return.
    """
    hooks = _saving_hooks(False)
    owner = "" if hooks is None else str(getattr(hooks[0], "__module__", "?"))
    return not (hooks is None or owner == _RECOMPUTES or owner.startswith("ls_strategy."))


def saved_for_recomputation() -> bool:
    """Return whether autograd passes what it saves now to the hooks of recomputation: it runs twice, with them."""
    hooks = _saving_hooks(False)
    return hooks is not None and getattr(hooks[0], "__module__", "?") == _RECOMPUTES


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """Hide operations from every ``TorchDispatchMode``."""
    return _disable_current_modes()


def fake_tensors() -> AbstractContextManager[Any]:
    """Give tensors shapes, dtypes and devices, but no memory; real tensors that they meet count as fake."""
    return _fake_tensor_mode()(allow_non_fake_inputs=True)


@cache
def _fake_tensor_mode() -> Any:
    """Return torch's mode, made to ask for GPUs once per mode: without any, every question searches for a driver."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    asked = getattr(FakeTensorMode, "avoid_device_init", None)
    if not isinstance(asked, property) or asked.fget is None:
        return FakeTensorMode
    remembered = cached_property(asked.fget)
    remembered.__set_name__(FakeTensorMode, "avoid_device_init")
    return type("FakeTensorModeThatRemembers", (FakeTensorMode,), {"avoid_device_init": remembered})


def is_fake(tensor: Tensor) -> bool:
    """Return whether a tensor is one of `fake_tensors`."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile(module)`` wraps; any other module is returned as it is."""
    while "_orig_mod" in module._modules:
        module = module.get_submodule("_orig_mod")
    return module


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile(module)`` or ``module.compile()`` was called."""
    return "_orig_mod" in module._modules or is_compiled_in_place(module)


def inside_compiled(model: nn.Module) -> set[int]:
    """Return ``id`` of the modules inside of a compiled one. Its graph calls them without what `route_calls` sets."""
    return {id(inner) for m in model.modules() if is_compiled(m) for inner in m.modules() if inner is not m}


def is_compiled_function(function: Any) -> bool:
    """Return whether a function or method is the result of ``torch.compile``."""
    return hasattr(function, "_torchdynamo_orig_callable")


def uncompiled_code() -> AbstractContextManager[Any]:
    """Run compiled code eagerly inside. Imports no compiler if none was used."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


def compiled_code() -> AbstractContextManager[Any]:
    """Undo `uncompiled_code` inside of it."""
    return torch.compiler.set_stance("default") if "torch._dynamo" in sys.modules else nullcontext()


def is_hooked(module: nn.Module) -> bool:
    """Return whether a call of the module does more than the ``forward`` of its class."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module)


class _Route:
    """Replaces `Module._call_impl` of a module; the call that the route gets includes hooks."""

    def __init__(self, module: nn.Module, route: Callable[..., Any]) -> None:
        self.compiled: Any = vars(module).get("_compiled_call_impl")
        self._module = weakref.ref(module)
        self.call = self.compiled or module._call_impl
        self._route: Callable[..., Any] | None = route

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs) if self._route is None else self._route(self.call, args, kwargs)

    def remove(self) -> None:
        """Undo the route, also where another one was set after it."""
        self._route = None
        module = self._module()
        if module is not None and vars(module).get("_compiled_call_impl") is self:
            vars(module)["_compiled_call_impl"] = self.compiled


def route_calls(module: nn.Module, route: Callable[..., Any]) -> _Route:
    """Make ``module(...)`` call ``route(call, args, kwargs)``, where ``call`` is the module's own, hooks included.

    The result has ``remove()``. Copies and pickles of the module do not have the route: torch omits this attribute,
    which ``module.compile()`` sets.
    """
    made = vars(module)["_compiled_call_impl"] = _Route(module, route)
    return made


class CompiledCall:
    """What ``module.compile()`` does, inside of all routes, while ``on``: from construction until `remove`."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self._module = weakref.ref(module)
        self._plain = module._call_impl
        self._compiled = torch.compile(self._plain, **options)
        self._on = False
        self.on = True

    @property
    def on(self) -> bool:
        """Whether the module runs compiled."""
        return self._on

    @on.setter
    def on(self, on: bool) -> None:
        self._on = on
        module = self._module()
        if module is None:
            return
        outer = vars(module).get("_compiled_call_impl")
        if isinstance(outer, _Route):
            while isinstance(outer.compiled, _Route):
                outer = outer.compiled
            if on and _is_free(outer.compiled):  # when it is off, it stays there and calls the plain module
                outer.call = outer.compiled = self
        elif on and _is_free(outer):
            vars(module)["_compiled_call_impl"] = self
        elif not on and outer is self:
            del vars(module)["_compiled_call_impl"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (self._compiled if self._on else self._plain)(*args, **kwargs)

    def remove(self) -> None:
        """Let the module run plainly."""
        self.on = False


def _is_free(call: Any) -> bool:
    """Return whether nothing else compiles the calls of the module with this ``_compiled_call_impl``."""
    return call is None or (isinstance(call, CompiledCall) and not call.on)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether ``module.compile()`` was called, so that the module's hooks are part of what is compiled."""
    call = vars(module).get("_compiled_call_impl")
    while isinstance(call, _Route):
        call = call.compiled
    return not _is_free(call)


def without_torch_functions() -> AbstractContextManager[Any]:
    """Disable ``__torch_function__`` of tensor subclasses and every ``TorchFunctionMode``."""
    return torch._C.DisableTorchFunction()


def function_mode() -> Any:
    """Return the innermost active ``TorchFunctionMode``, or None."""
    return torch.overrides._get_current_function_mode()


@contextmanager
def without_function_mode(mode: Any) -> Generator[None, None, None]:
    """Disable ``mode``, an active ``TorchFunctionMode``, unless another one was entered after it."""
    if function_mode() is not mode:
        yield
        return
    with torch.overrides._pop_mode_temporarily():
        yield


def checkpoint_options() -> dict[str, Any]:
    """Return arguments of ``torch.utils.checkpoint.checkpoint`` for equal behaviour in all releases of torch.

    Newer releases have an option to pass what a selective policy keeps through the active hooks on saved tensors, and
    warn if it is not set. Older releases never do so.
    """
    asked = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters
    return {"respect_saved_tensors_hooks": False} if asked else {}


MAKES_ITERATOR = "_get_iterator"
"""The method with which a DataLoader makes its iterator, also where a subclass calls ``super().__iter__()``."""


def around_fetch(before: Callable[[Any], None]) -> None:
    """Call ``before`` with the indices of every batch that this worker process of a DataLoader loads."""
    from torch.utils.data._utils.fetch import _MapDatasetFetcher

    plain = _MapDatasetFetcher.fetch

    def fetch(self: Any, possibly_batched_index: Any) -> Any:
        before(possibly_batched_index)
        return plain(self, possibly_batched_index)

    _MapDatasetFetcher.fetch = fetch  # type: ignore[method-assign]


SHARED_BY_LOADERS = (
    "dataset",
    "collate_fn",
    "worker_init_fn",
    "_iterator",
    "_DataLoader__multiprocessing_context",
    MAKES_ITERATOR,
)
"""Attributes of a DataLoader that copies of it share."""
