"""Ranks that take the branches for NCCL, over gloo, with a device that is told apart from the host.

The device is ``cpu:0``, the host is ``cpu``. Torch allocates both in the same memory, but an operation still sees the
index of the device that its caller named. So every new storage is known to be on the device or on the host, and

* ``tensor.device`` is ``cpu:0`` for what is on the device, and ``to`` and ``cpu`` copy between the two,
* an operation on tensors of both raises an error, as on CUDA,
* a collective of the process group refuses tensors of the host, as NCCL does.

What this does not show: streams, and operations that run late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.fabric.strategies import Strategy as FabricStrategy
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ls_strategy import device as dev
from ls_strategy._torch import StorageWeakRef, without_dispatch_modes, without_torch_function
from ls_strategy.fabric.strategy import ZeROFabricStrategy
from ls_strategy.lightning import module_state
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.parallel.context import token_check
from ls_strategy.testing import spawn

DEVICE = torch.device("cpu", 0)
HOST = torch.device("cpu")
BACKEND = "gloo_as_nccl"

_DEVICE_OF: Any = Tensor.device
_TO: Any = Tensor.to
_MIXES = frozenset({"copy_", "_to_copy", "set_", "index", "index_put_", "index_put", "_index_put_impl_", "barrier"})
"""Operations that CUDA allows on tensors of the device and of the host together."""

_BY_TORCH = frozenset({"_to_copy", "new_empty_strided"})
"""Called by torch itself with the device of a tensor, which it takes for the host: casts of autocast, and copies of
gradients by ``AccumulateGrad``. `Moves` has seen the copies that Python asks for."""


class Memory:
    """Which storages are on the device; all others are on the host."""

    def __init__(self) -> None:
        self.host_may_be_sent = False
        """For a strategy of Lightning's on the same group: DDP makes tensors of its own inside torch."""

        self._on_device: dict[int, StorageWeakRef] = {}
        self._lock = threading.Lock()
        self._purge_at = 4096

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is on the device."""
        return _key(tensor) in self._on_device

    def take(self, tensor: Tensor) -> None:
        """Put the new storage of ``tensor`` on the device."""
        key = _key(tensor)
        if key is None:
            return
        with self._lock, without_torch_function():
            # A weak reference keeps the address, so no later storage is taken for this one.
            self._on_device[key] = StorageWeakRef(tensor.untyped_storage())
            if len(self._on_device) > self._purge_at:
                self._on_device = {k: ref for k, ref in self._on_device.items() if not ref.expired()}
                self._purge_at = 2 * len(self._on_device) + 4096

    def leave(self, tensor: Tensor) -> None:
        """Put the new storage of ``tensor`` on the host."""
        with self._lock:
            self._on_device.pop(_key(tensor) or 0, None)


def _key(tensor: Tensor) -> int | None:
    """Return the address of a storage; None for tensors without memory: on meta, sparse, or wrappers."""
    try:
        with without_torch_function():
            return None if tensor.is_meta else tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


class Moves:
    """Tells ``cpu`` from ``cpu:0`` where torch does not: in ``tensor.device`` and in moves."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def device(self, tensor: Tensor) -> torch.device:
        """Replaces ``tensor.device``."""
        with without_torch_function():  # which would not know this function, and gather a parameter for it
            return DEVICE if self.memory.holds(tensor) else _DEVICE_OF.__get__(tensor)

    def cpu(self, tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        """Replaces ``tensor.cpu()``."""
        return self._moved(tensor, HOST, options)

    def to(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Replaces ``tensor.to()``."""
        device, options = self._parse(list(args), dict(kwargs))
        if device is None or torch.device(device).type != "cpu" or tensor.is_meta:
            return _TO(tensor, *args, **kwargs)
        return self._moved(tensor, torch.device(device), options)

    def _parse(self, args: list[Any], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the device that the arguments of ``to`` name, and its other options."""
        device = options.pop("device", None)
        if args and isinstance(args[0], Tensor):
            other = args.pop(0)
            device, options["dtype"] = other.device, other.dtype
        elif args and not isinstance(args[0], torch.dtype):
            device = args.pop(0)
        if args and isinstance(args[0], (torch.dtype, type(None))):
            options["dtype"] = args.pop(0)
        options.update(zip(("non_blocking", "copy"), args, strict=False))
        return device, {key: value for key, value in options.items() if value is not None}

    def _moved(self, tensor: Tensor, device: torch.device, options: dict[str, Any]) -> Tensor:
        if self.memory.holds(tensor) == (device.index is not None):
            return _TO(tensor, **options) if options else tensor
        result = _TO(tensor, HOST, **{**options, "copy": True})
        if result is not tensor:
            self.memory.take(result) if device.index is not None else self.memory.leave(result)
        return result


class Operations(TorchDispatchMode):
    """Finds where results are, and refuses what the device would refuse."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        name = func.__name__.split(".")[0]
        held = [self.memory.holds(t) for t in before]
        collective = func.namespace in ("c10d", "_c10d_functional") and name != "barrier"
        if collective and not self.memory.host_may_be_sent and _is_native(func, args):
            for tensor, on_device in zip(before, held, strict=True):
                if not on_device:
                    raise RuntimeError(
                        f"{func}: no backend type associated with device type cpu: {tuple(tensor.shape)}"
                    )
        if any(held) and name not in _MIXES:
            strangers = [t for t, h in zip(before, held, strict=True) if not h and t.dim() and _key(t) is not None]
            if strangers:
                shapes = [tuple(t.shape) for t in strangers]
                raise RuntimeError(f"{func}: expected all tensors to be on {DEVICE}, found {shapes} on the host")
        result = func(*args, **kwargs)
        device = kwargs.get("device")
        if name in _BY_TORCH and device == HOST:
            device = None
        if any(held) if device is None else device == DEVICE:
            keys = {_key(t) for t in before}
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and _key(tensor) not in keys:
                    self.memory.take(tensor)
        return result


def _is_native(func: Any, args: Any) -> bool:
    """Whether a collective uses a group that stands for NCCL."""
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name == "process_group":
            value = dist.ProcessGroup.unbox(value).group_name
        elif argument.name != "group_name":
            continue
        return dist.get_backend(distributed_c10d._resolve_process_group(value)) == BACKEND
    return False


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


_all_gather = dist.all_gather


def _all_gather_uneven(tensors: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False) -> Any:
    """Gather tensors of different lengths, which gloo cannot: as NCCL, with a broadcast from every rank."""
    if len({t.numel() for t in tensors}) == 1:
        return _all_gather(tensors, tensor, group=group, async_op=async_op)
    tensors[dist.get_rank(group)].copy_(tensor)
    works = [dist.broadcast(t, group=group, group_src=r, async_op=True) for r, t in enumerate(tensors)]
    for work in works[:-1]:
        work.wait()
    return works[-1]


@contextmanager
def native_device() -> Iterator[Memory]:
    """Make our strategies on the CPU believe that its device is no host, and its process group NCCL's."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _gloo, devices=["cpu"])
    memory = Memory()
    moves = Moves(memory)
    run_thread = threading.Thread.run
    setup_environment, setup_of_fabric = Strategy.setup_environment, FabricStrategy.setup_environment

    def run(thread: threading.Thread) -> None:  # a mode is per thread
        with Operations(memory):
            run_thread(thread)

    def setup(strategy: Strategy, *args: Any) -> None:
        memory.host_may_be_sent = not isinstance(strategy, ZeROStrategy)
        setup_environment(strategy, *args)

    def setup_fabric(strategy: FabricStrategy, *args: Any) -> None:
        memory.host_may_be_sent = not isinstance(strategy, ZeROFabricStrategy)
        setup_of_fabric(strategy, *args)

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return moves.to(tensor, *args, **kwargs)

    def cpu(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return moves.cpu(tensor, *args, **kwargs)

    @contextmanager
    def only_ours() -> Iterator[None]:
        with without_dispatch_modes(), Operations(memory):
            yield

    with ExitStack() as stack:
        for owner, name, value in (
            (threading.Thread, "run", run),
            (Strategy, "setup_environment", setup),
            (FabricStrategy, "setup_environment", setup_fabric),
            (Tensor, "device", property(moves.device)),
            (Tensor, "to", to),
            (Tensor, "cpu", cpu),
            (token_check, "without_dispatch_modes", only_ours),
            (module_state, "_CONVERSIONS", module_state._CONVERSIONS | {to, cpu}),
            (dist, "all_gather", _all_gather_uneven),
            (distributed_c10d, "_get_object_coll_device", lambda group=None: str(DEVICE)),
            (dev, "current", lambda: DEVICE),
            (dev, "is_host", lambda device: device != DEVICE and device.type == "cpu"),
            *((kind, "root_device", property(lambda _: DEVICE)) for kind in (ZeROStrategy, ZeROFabricStrategy)),
            *((kind, "_get_process_group_backend", lambda _: BACKEND) for kind in (ZeROStrategy, ZeROFabricStrategy)),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(Operations(memory))
        yield memory


def on_native_device(rank: int, world_size: int, fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn(rank, world_size, *args)`` inside `native_device`: the first argument of `spawn`."""
    with native_device():
        return fn(rank, world_size, *args)


def spawn_natively(fn: Callable[..., Any], world_size: int, *args: Any, **options: Any) -> list[Any]:
    """Replace `ls_strategy.testing.spawn`: runs of a Trainer on several ranks are on the native device."""
    if world_size == 1 or options.get("init_process_group", True):
        return spawn(fn, world_size, *args, **options)
    options["timeout_s"] = 5 * options.get("timeout_s", 120)  # every operation passes through Python
    return spawn(on_native_device, world_size, fn, *args, **options)
