"""A device without a GPU: its memory is not the host's, and what is not waited for has not happened.

``torch.device("sim")`` is a back end of torch (PrivateUse1) that `device.cpp` registers. Its operations are those of
the CPU, on device memory that only they can reach: the host gets a segmentation fault. They are done at once, and
`Timeline` notes what each one reads and writes and what it comes after. Copies from and to pinned memory are late.

There are two of them, and a process has the second one, ``sim:1``, as the second rank of a host would. Every new thread
begins on the first one, so what forgets to say which device it means is done there, and is a hazard.

A process that has the device has no other accelerator, and has it until it ends. So tests call `run`.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import hashlib
import itertools
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import Accelerator
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from ls_strategy import device as dev
from ls_strategy._torch import without_torch_function
from ls_strategy.ops import _build
from ls_strategy.testing import spawn
from ls_strategy.tiers.stock import BufferStock
from tests.simulated_device.timeline import Timeline

NAME = "sim"

_SOURCE = Path(__file__).with_name("device.cpp")
_OF_THE_HOST_TOO = frozenset({"aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_"})
"""Operations that CUDA allows on indices in host memory."""
_COUNTS = frozenset({"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::bincount"})
"""Operations whose result has a shape that the host must wait for."""
_COLLECTIVES = (
    "allreduce_",
    "broadcast_",
    "allgather_",
    "_allgather_base_",
    "reduce_scatter_",
    "_reduce_scatter_base_",
    "alltoall_base_",
)
BACKEND = "sim_collectives"
_POOLS = itertools.count(1)
_CALLS = (
    ("freed", None, ctypes.c_uint64, ctypes.c_int64),
    ("strayed", None, ctypes.c_char_p),
    ("recorded", None, ctypes.c_uint64, ctypes.c_int64),
    ("blocked", None, ctypes.c_uint64, ctypes.c_int64),
    ("waited_for_event", None, ctypes.c_uint64),
    ("waited_for_stream", None, ctypes.c_int64),
    ("used_in_stream", None, ctypes.c_uint64, ctypes.c_int64),
    ("happened", ctypes.c_int, ctypes.c_uint64),
    ("allocating", None),
)


def recipe() -> _build.BuildRecipe:
    """Return how the back end is built.

    Raises:
        BuildError: there is no compiler.
    """
    cpu = _build.cpu_recipe()
    compiler = cpu.units[0].command[0]
    include = Path(torch.__file__).parent / "include"
    includes = (f"-I{include}", f"-I{include / 'torch' / 'csrc' / 'api' / 'include'}")
    # All of torch's operators in one header would take twice as long to compile.
    flags = ("-std=c++20", "-O0", "-fPIC", "-w", "-DTORCH_ASSERT_ONLY_METHOD_OPERATORS")
    version = f"-DSOURCE_{hashlib.sha256(_SOURCE.read_bytes()).hexdigest()[:16]}"  # the key knows the package's sources
    command = (compiler, *flags, version, *includes, "-c", str(_SOURCE))
    return _build.BuildRecipe(
        "simulated_device", (_build.CompileUnit("device", command),), cpu.link, cpu.compiler_version
    )


class SimulatedDevice:
    """The device of this process."""

    here: SimulatedDevice

    def __init__(self) -> None:
        SimulatedDevice.here = self
        path = _build.library(recipe())
        torch.utils.rename_privateuse1_backend(NAME)
        torch.ops.load_library(path)
        self._library = ctypes.CDLL(str(path))
        self.timeline = Timeline(lambda address: self._library.simulated_device_give(ctypes.c_uint64(address)))
        self._calls = self._make_calls()
        self._library.simulated_device_pinned_peak.restype = ctypes.c_uint64
        self.device = torch.device(NAME, 1)
        self._library.simulated_device_begin(ctypes.byref(self._calls), self.device.index)
        atexit.register(self._library.simulated_device_end)
        torch._register_device_module(NAME, _module(self._library.simulated_device_use_pool))
        self._libraries = self._register()

    def pin(self, address: int, nbytes: int) -> int:
        """Stand in for `ls_strategy.device.register_host_memory`."""
        self._library.simulated_device_pin(ctypes.c_uint64(address), ctypes.c_uint64(nbytes))
        self._registered[address] = nbytes
        return 0

    def unpin(self, address: int) -> None:
        """Stand in for `ls_strategy.device.unregister_host_memory`."""
        nbytes = self._registered.pop(address)
        with self.timeline.lock:
            self.timeline.unpin(address, nbytes)
        self._library.simulated_device_unpin(ctypes.c_uint64(address))

    def peak_pinned_bytes(self) -> int:
        """Return the most host memory that was pinned at once, as torch and the runtime of CUDA would count it."""
        return int(self._library.simulated_device_pinned_peak())

    def log(self) -> list[tuple[int, int, int, int]]:
        """Return every allocation so far, and every free, which has 0 bytes: address, bytes, stream, pool."""
        events = ctypes.POINTER(_Event)()
        self._library.simulated_device_log.restype = ctypes.c_uint64
        count = self._library.simulated_device_log(ctypes.byref(events))
        return [(e.address, e.nbytes, e.stream, e.pool) for e in events[:count]]

    # what torch calls ------------------------------------------------------------------------------------------------

    def _make_calls(self) -> ctypes.Structure:
        self._registered: dict[int, int] = {}
        line = self.timeline
        functions: dict[str, Callable[..., Any]] = {
            "strayed": lambda what: line.stray(what.decode()),
            "recorded": line.record,
            "blocked": line.block,
            "waited_for_event": line.wait_for_event,
            "waited_for_stream": lambda stream: line.wait_for_stream(None if stream < 0 else stream),
            "used_in_stream": line.use_in_stream,
            "happened": line.has_happened,
            "allocating": line.give_freed,
        }

        def locked(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: int) -> Any:
                with line.lock:
                    return function(*args)

            return call

        fields = [(name, ctypes.CFUNCTYPE(result, *arguments)) for name, result, *arguments in _CALLS]
        kind = type("Calls", (ctypes.Structure,), {"_fields_": fields})
        # `free` may run inside any other call, in this thread or in one that holds no lock.
        given = {name: locked(function) for name, function in functions.items()} | {"freed": line.free}
        return cast("ctypes.Structure", kind(*(make(given[name]) for name, make in fields)))

    def _register(self) -> list[torch.library.Library]:
        aten = torch.library.Library("aten", "IMPL")
        aten.impl("copy_", _plainly(self._copy), "PrivateUse1")
        aten.impl("resize_", _plainly(_resize), "PrivateUse1")
        aten.impl("record_stream", _plainly(self._record_stream), "PrivateUse1")
        rest = torch.library.Library("_", "IMPL")
        rest.fallback(_plainly(self._run), "PrivateUse1")
        collectives = torch.library.Library("c10d", "IMPL")
        for name in _COLLECTIVES:
            collectives.impl(name, _plainly(self._collective(getattr(torch.ops.c10d, name).default)), "PrivateUse1")
        aten.impl("linear", _linear_under_autocast, "AutocastPrivateUse1")
        rest.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
        return [aten, rest, collectives]

    # operations ------------------------------------------------------------------------------------------------------

    def _run(self, operation: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: C901 - its three functions share names
        """Run any operation on tensors of the device."""
        schema = operation._schema
        if any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns):
            raise NotImplementedError(f"the simulated device has no {schema.name}.{schema.overload_name}: a view")
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | kwargs
        changed = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        written = {id(t) for a in changed for t in tree_leaves(named.get(a.name))}
        outputs = {id(t) for a in changed if a.is_out for t in tree_leaves(named[a.name])}
        outputs -= {id(t) for a in schema.arguments if not a.is_out for t in tree_leaves(named.get(a.name))}
        for tensor in tree_leaves(named):
            if isinstance(tensor, Tensor) and tensor.is_cpu and tensor.dim() and schema.name not in _OF_THE_HOST_TOO:
                raise RuntimeError(f"Expected all tensors to be on the same device, but {schema.name} got one on cpu")
        args = tuple(_as_tensors(a, v, tree_leaves(named)) for a, v in zip(schema.arguments, args, strict=False))
        device = _device_of(schema.name, tree_leaves(named))
        with self.timeline.lock:
            moment = self.timeline.begin(self._stream(device), schema.name)
            here: dict[int, tuple[Tensor, Tensor]] = {}

            def there(value: Any) -> Any:
                if isinstance(value, torch.device):
                    return torch.device("cpu")
                if not isinstance(value, Tensor) or value.device.type != NAME:
                    return value
                if id(value) not in here:
                    self._access(moment, value, writes=id(value) in written)
                    # An operation may give an output another shape, but not in memory that is not its own.
                    is_output = id(value) in outputs
                    here[id(value)] = (value, value.new_empty(0, device="cpu") if is_output else _values(value))
                return here[id(value)][1]

            result = operation(*tree_map(there, args), **tree_map(there, kwargs))
            originals = {id(values): tensor for tensor, values in here.values()}
            for tensor, values in here.values():
                if id(tensor) in outputs:
                    if values.shape != tensor.shape:
                        _resize(tensor, values.shape)
                    _values(tensor).copy_(values)

            def back(value: Any) -> Any:
                if not isinstance(value, Tensor):
                    return value
                if id(value) in originals:
                    return originals[id(value)]
                new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
                self._access(moment, new, writes=True)
                _values(new).copy_(value)
                return new

            if schema.name in _COUNTS or any(isinstance(each, (bool, int, float)) for each in tree_leaves(result)):
                self.timeline.wait_for_stream(moment.stream)
            return tree_map(back, result)

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """See `torch.Tensor.copy_`."""
        if target.numel() == 0:
            return target
        with self.timeline.lock:
            moment = self.timeline.begin(self._stream(_device_of("copy_", (source, target))), "copy_")
            for tensor, writes in ((source, False), (target, True)):
                if tensor.device.type == NAME:
                    self._access(moment, tensor, writes=writes)
            if target.device.type == source.device.type:
                _values(target).copy_(_values(source))
                return target
            host = source if source.is_cpu else target
            same = source.dtype == target.dtype and source.shape == target.shape
            is_late = non_blocking and same and host.is_pinned() and host.is_contiguous()
            if is_late and target.is_cpu:
                self.timeline.copy_to_host(moment, target, _values(source).clone())
            elif is_late:
                address = _address(target)
                self.timeline.copy_to_device(moment, source, _values(target), address)
            else:
                (target if target.is_cpu else _values(target)).copy_(source if source.is_cpu else _values(source))
                if target.is_cpu or not non_blocking:
                    self.timeline.wait_for_stream(moment.stream)
        return target

    def _collective(self, operation: Any) -> Callable[..., Any]:
        """Return a collective that is over when the device's current stream has passed it."""

        def run(*args: Any) -> Any:
            with self.timeline.lock:
                device = _device_of(operation._schema.name, tree_leaves(args))
                moment = self.timeline.begin(self._stream(device), operation._schema.name)
                for tensor in tree_leaves(args):
                    if isinstance(tensor, Tensor):
                        self._access(moment, tensor, writes=True)
            result = operation(*tree_map(lambda t: _values(t) if isinstance(t, Tensor) else t, args))
            work = result[-1] if isinstance(result, tuple) else result
            work.wait()
            return (args[0], work) if isinstance(result, tuple) else work

        return run

    def _record_stream(self, tensor: Tensor, stream: torch.Stream) -> None:
        if tensor.device != stream.device:
            raise RuntimeError(f"Expected a stream of {tensor.device}, but record_stream got one of {stream.device}")
        with self.timeline.lock:
            self.timeline.use_in_stream(_address(tensor), stream.stream_id)

    def _stream(self, device: torch.device) -> int:
        """Return the number of this thread's stream on a device; 1 for the default one of the other device."""
        return torch.accelerator.current_stream(device).stream_id or int(device != self.device)

    def _access(self, moment: Any, tensor: Tensor, *, writes: bool) -> None:
        if tensor.numel() == 0:
            return
        start = tensor.storage_offset()
        last = start + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        size = tensor.element_size()
        self.timeline.access(moment, _address(tensor), start * size, (last + 1) * size, writes=writes)


class _Event(ctypes.Structure):
    _fields_ = (
        ("address", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("stream", ctypes.c_int64),
        ("pool", ctypes.c_int64),
    )


class MemPool:
    """A pool of memory, see `torch.cuda.MemPool`."""

    def __init__(self, *, use_on_oom: bool = False) -> None:
        self.id = next(_POOLS)
        self.is_in_use = False


class SimulatedAccelerator(Accelerator):
    """The device, for a Trainer."""

    def setup_device(self, device: torch.device) -> None:
        """Select the device, as Lightning does on CUDA. A plain Trainer, which does not know this one, has the CPU."""
        if device.type == NAME:
            torch.accelerator.set_device_index(device.index)

    def teardown(self) -> None:
        """Do nothing."""

    @staticmethod
    def parse_devices(devices: Any) -> int:
        """Return the number of devices."""
        return int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Return the devices of all processes of this host."""
        return [SimulatedDevice.here.device] * int(devices)

    @staticmethod
    def auto_device_count() -> int:
        """Return one."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Return whether the back end is there."""
        return True

    @staticmethod
    def name() -> str:
        """Return the device's name."""
        return NAME

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Return nothing."""
        return {}


@dataclass
class Outcome:
    """What a function returned on the device, and what the device has to complain about."""

    result: Any
    hazards: list[str]
    peak_pinned_bytes: int = 0
    waits: Counter[str] = field(default_factory=Counter)
    """How often the main thread has waited for the device, by the line."""
    delayed: int = 0
    """How often memory was freed that another stream than its own was said to use."""


def run(
    function: Callable[..., Any], *args: Any, simulated: bool = True, ranks: int = 1, timeout_s: float = 120
) -> Outcome:
    """Call ``function(device, *args)`` in a process of its own, on the simulated device or on the CPU.

    With several ``ranks``, each has a device and a process, and they have a default process group. The outcome is that
    of rank 0, with the hazards of all.
    """
    found = spawn(_call, ranks, function, args, simulated, timeout_s=timeout_s, init_process_group=False)
    return replace(found[0], hazards=[hazard for outcome in found for hazard in outcome.hazards])


def _call(rank: int, world_size: int, function: Callable[..., Any], args: Any, simulated: bool) -> Outcome:
    if not simulated:
        return Outcome(function(torch.device("cpu"), *args), [])
    sim = SimulatedDevice()
    dist.Backend.register_backend(BACKEND, _gloo, devices=["cpu", NAME])
    if world_size > 1:
        dist.init_process_group(BACKEND)
    with (
        mock.patch.object(dev, "can_register", dev.is_accelerator),
        mock.patch.object(dev, "register_host_memory", sim.pin),
        mock.patch.object(dev, "unregister_host_memory", sim.unpin),
        mock.patch.object(BufferStock, "busy_bytes", 0),  # so that few small buffers go round
    ):
        result = function(sim.device, *args)
        gc.collect()
        dev.synchronize(sim.device)
    timeline = sim.timeline
    return Outcome(result, timeline.hazards, sim.peak_pinned_bytes(), timeline.waits, timeline.delayed)


def _plainly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run an operation's implementation without what classes of tensors add to operations."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with without_torch_function():
            return function(*args, **kwargs)

    return run


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout)


def _values(tensor: Tensor) -> Tensor:
    if tensor.device.type != NAME:
        return tensor
    return torch.ops.simulated_device.values(tensor)


def _as_tensors(argument: Any, value: Any, among: list[Any]) -> Any:
    """Return the tensor that torch has made of a number before it called the operation."""
    if isinstance(value, (bool, int, float)) and "Tensor" in str(argument.type):
        if not isinstance(value, float):
            return torch.tensor(value)
        is_double = any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in among)
        return torch.tensor(value, dtype=torch.float64 if is_double else torch.float32)
    return value


def _address(tensor: Tensor) -> int:
    """Return where the storage begins. What a class of parameters does when user code asks must not happen."""
    return Tensor.untyped_storage(tensor).data_ptr()


def _device_of(name: str, values: Iterable[Any]) -> torch.device:
    """Return the device on which an operation runs: that of its tensors, or else the one that it names.

    Raises:
        RuntimeError: they are on several.
    """
    found = {value.device for value in values if isinstance(value, Tensor) and value.device.type == NAME}
    named = [value for value in values if isinstance(value, torch.device) and value.type == NAME]
    if len(found) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got some on {found}")
    for device in (*found, *named):
        return torch.device(NAME, torch.accelerator.current_device_index() if device.index is None else device.index)
    return torch.device(NAME, torch.accelerator.current_device_index())


def _resize(tensor: Tensor, size: Any, memory_format: Any = None) -> Tensor:
    shape = torch.Size(size)
    storage = tensor.untyped_storage()
    needed = (tensor.storage_offset() + shape.numel()) * tensor.element_size()
    if storage.nbytes() < needed:
        storage.resize_(needed)
    stride = torch.empty(shape, device="meta").stride()
    return tensor.set_(storage, tensor.storage_offset(), shape, stride)


def _linear_under_autocast(*args: Any) -> Any:
    """Multiply in 16 bits, as autocast of all real devices does. Other operations run in the dtypes they get."""
    dtype = torch.get_autocast_dtype(NAME)
    with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
        return torch.ops.aten.linear(*(None if t is None else t.to(dtype) for t in args))


def _module(use_pool: Callable[[int], None]) -> types.ModuleType:
    """Return what torch looks for as ``torch.sim``."""

    @contextmanager
    def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
        if pool.is_in_use:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        pool.is_in_use = True
        use_pool(pool.id)
        try:
            yield
        finally:
            use_pool(0)
            pool.is_in_use = False

    here = torch.accelerator.current_device_index

    def index(device: Any) -> int:
        found = device if isinstance(device, int) or device is None else torch.device(device).index
        return here() if found is None else found

    def manual_seed(seed: int) -> None:
        generators[here()].manual_seed(seed)

    def manual_seed_all(seed: int) -> None:
        for each in generators:
            each.manual_seed(seed)

    module = types.ModuleType(f"torch.{NAME}")
    generators = tuple(torch.Generator(device=torch.device(NAME, number)) for number in range(2))
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: 2,
        "current_device": here,
        "set_device": lambda device: torch.accelerator.set_device_index(index(device)),
        "manual_seed": manual_seed,
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=NAME: generators[index(device)].get_state(),
        "set_rng_state": lambda state, device=NAME: generators[index(device)].set_state(state),
        "default_generators": generators,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "mem_get_info": lambda device=None: torch.accelerator.get_memory_info(index(device)),
        "get_device_properties": lambda device=None: types.SimpleNamespace(
            name="simulated", total_memory=torch.accelerator.get_memory_info(index(device))[1]
        ),
        "synchronize": lambda device=None: torch.accelerator.synchronize(index(device)),
        "get_allocator_backend": lambda: "native",
        "is_current_stream_capturing": lambda: False,
        "MemPool": MemPool,
        "use_mem_pool": use_mem_pool,
    }
    for name, value in functions.items():
        setattr(module, name, value)
    return module
