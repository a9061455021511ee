"""One training step as a list of events: storages that grow and shrink, units that start and end, gradients.

The step runs forward and backward on fake tensors, in seconds for a model of any size. What the engine does around it
(gathering units, reducing gradients, stepping) is not in the list but in `replay`: one trace serves every ZeRO stage,
tier and number of ranks. Only recomputation of activations changes the step itself.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ls_strategy._torch import tree_iter
from ls_strategy.activations.recompute import apply_recompute
from ls_strategy.config import RecomputeConfig
from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.live import StorageWatch, is_wrapped
from ls_strategy.extras.planner.simulated import simulated_batch
from ls_strategy.extras.planner.work import Work
from ls_strategy.precision import PrecisionPolicy
from ls_strategy.zero.flat.units import Unit
from ls_strategy.zero.passes.hooks import UnitHooks
from ls_strategy.zero.setup.autocast_layers import casts_of
from ls_strategy.zero.setup.kept import kept_in_fp32
from ls_strategy.zero.setup.materialize import Fp32Boundary
from ls_strategy.zero.setup.partition import UnitSpec

Kind = Literal[
    "bytes", "saved", "fetch", "refetch", "release", "grad", "begin", "end_forward", "end_backward",
    "into", "back", "spent", "run",
]  # fmt: skip

Step = Callable[[Any, Callable[[Tensor], None]], None]
"""A training step: takes a batch, and a function that runs backward on its loss."""


class Event(NamedTuple):
    """One event."""

    kind: Kind
    """What happened.

    ``bytes``: storage ``number`` grew by ``amount``. ``saved``: autograd keeps it for backward. ``fetch``: unit
    ``number`` is about to run forward; ``refetch``: in backward. ``release``: it is no longer needed. ``grad``: unit
    ``number`` got the gradient of its parameter ``amount``.

    Only with blocks to mark: ``into``: block ``number`` is about to run forward on storage ``amount``. ``back``: the
    gradient of its input is there. Both come once more after the last block. ``spent``: meter ``number`` has counted
    ``amount`` since its last event.

    Only in `condensed` lists: ``run``: storages have grown by ``amount`` together, and by ``number`` at most meanwhile.
    """

    number: int = 0
    amount: int = 0


@dataclass(frozen=True)
class Trace:
    """One micro-batch of one rank, without the engine."""

    events: tuple[Event, ...]
    flops: int  # forward and backward, including recomputation
    # Lines of code, as ``file:line``, that branched by a tensor's value, which was taken to be False.
    assumed: tuple[str, ...] = ()
    # Numbers of the storages that hold a parameter as autocast casts it. There are none where it is gathered so.
    casts: frozenset[int] = frozenset()
    forward: Work = field(default_factory=Work)
    backward: Work = field(default_factory=Work)  # what those of the backward do, including recomputation
    recomputed: int = 0  # modules whose forward runs again in backward


def condensed(events: Iterable[Event]) -> tuple[Event, ...]:
    """Return the events that a replay without offload of activations needs, with a run of sizes in one event."""
    result: list[Event] = []
    net = high = 0
    running = False
    for event in events:
        kind, _, amount = event
        if kind == "bytes":
            net += amount
            high = max(high, net) if running else net
            running = True
        elif kind not in ("saved", "into", "back", "spent"):
            if running:
                result.append(Event("run", high, net))
                net, running = 0, False
            result.append(event)
    if running:
        result.append(Event("run", high, net))
    return tuple(result)


@dataclass
class _Flat:
    """All parameters of a unit, as far as `UnitHooks` needs them."""

    params: list[nn.Parameter]
    trainable: bool = True
    has_optimizer: bool = True


class _Recorder:
    """Replaces the engine's gatherer and reducer, and records their calls."""

    def __init__(self, units: list[Unit], watch: StorageWatch, events: list[Event]) -> None:
        self._number = {id(u): i for i, u in enumerate(units)}
        self._units = units
        self._events = events
        self._watch = watch
        self._seen: list[Unit] = []
        self._gradients: dict[int, int] = {}
        for unit in units:
            unit.waiting_for = sum(p.requires_grad and p.numel() > 0 for f in unit.flats for p in f.params)

    def fetch(self, unit: Unit, *, backward: bool = False) -> None:
        if not backward and not unit.is_root and unit not in self._seen:
            self._seen.append(unit)
        self._events.append(Event("refetch" if backward else "fetch", self._number[id(unit)]))

    def fetch_exactly(self, unit: Unit) -> None:
        """See `Gatherer`. A trace does not tell the two ways apart."""

    def release(self, unit: Unit) -> None:
        if not unit.pinned:
            self._events.append(Event("release", self._number[id(unit)]))

    def is_last(self, unit: Unit) -> bool:
        blocks = [u for u in self._units if not u.is_root]
        return bool(blocks) and (self._seen if len(self._seen) == len(blocks) else blocks)[-1] is unit

    def on_grad(self, unit: Unit, flat: _Flat, index: int, param: nn.Parameter) -> None:
        """See `Reducer`: the gradient is freed immediately."""
        if param.grad is None:
            return
        if param.numel():
            unit.waiting_for -= 1
        self._events.append(Event("grad", self._number[id(unit)], index))
        param.grad = None


class _Watch(StorageWatch):
    """Also counts operations, and returns 0 for values that the step reads."""

    def __init__(self, events: list[Event], model: nn.Module) -> None:
        super().__init__(lambda number, change: events.append(Event("bytes", number, change)))
        self._own = [t.untyped_storage() for t in (*model.parameters(), *model.buffers())]
        self._own_ids = {id(storage) for storage in self._own}
        self.flops = self.touched = self.operations = 0
        self.backward = Work()  # what was done in backward passes
        self.assumed: dict[str, None] = {}  # lines that branched by a value, in order
        cast = casts_of(model, torch.bfloat16)
        # In which dtype modules read a parameter, by its storage.
        self._read_in = {id(p.untyped_storage()): cast[id(p)] for p in model.parameters() if id(p) in cast}
        self._in_float8 = {key for key, dtype in self._read_in.items() if dtype.itemsize == 1}
        self.casts: set[int] = set()

    def note(self, tensor: Tensor) -> None:
        """Ignore views of parameters, which are not activations."""
        if id(tensor.untyped_storage()) not in self._own_ids:
            super().note(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return 0 for a value that the step reads; run other operations."""
        if is_wrapped(types):
            return NotImplemented
        if func is torch.ops.prim.device.default and type(args[0]) is not Tensor:
            return args[0].device  # half of all calls: what torch asks of every fake tensor
        if func is torch.ops.aten._local_scalar_dense.default and type(args[0]) is not Tensor:
            if args[0].dtype == torch.bool:
                self._assume(sys._getframe(1))
            return _zero(args[0])
        if func in _SELECTIONS and any(type(t) is not Tensor for t in tree_iter(args) if isinstance(t, Tensor)):
            func, args, kwargs = _selecting_all(func, args)
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if self._casts(func, args):
            found = (self.number_of(t) for t in tree_iter(output) if isinstance(t, Tensor))
            self.casts.update(number for number in found if number is not None)
        self.flops += _flops(func, args, kwargs or {}, output)
        self.operations += func is not _aten.detach.default  # `_saving` detaches what autograd saves
        if not getattr(func, "is_view", False):  # operations of higher order have no such attribute
            tensors = (t for t in tree_iter((args, output)) if isinstance(t, Tensor) and t.layout == torch.strided)
            self.touched += sum(t.nbytes for t in tensors)
        return output

    def _casts(self, func: Any, args: Any) -> bool:
        """Return whether an operation is part of the cast of a parameter to what its module reads.

        Autocast's is one. For one to fp8, a scale is computed before: all that reads nothing else is part of it, until
        it is in fp8.
        """
        if func is _aten._to_copy.default and id(args[0].untyped_storage()) in self._read_in:
            return True
        tensors = [t for t in tree_iter(args) if isinstance(t, Tensor)] if self._in_float8 else []
        return bool(tensors) and all(
            t.dtype.itemsize > 1 and (id(t.untyped_storage()) in self._in_float8 or self.number_of(t) in self.casts)
            for t in tensors
        )

    @property
    def work(self) -> Work:
        return Work(self.flops, self.touched, self.operations)

    def _assume(self, frame: FrameType | None) -> None:
        """Note which line reads a truth value, unless it is of this package, which branches alike in training."""
        while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
            frame = frame.f_back
        if frame is not None and not frame.f_code.co_filename.startswith(_HERE):
            self.assumed[f"{frame.f_code.co_filename}:{frame.f_lineno}"] = None


class _Enough(BaseException):
    """The part of the step that was asked for has run. Passes the handlers of the step's own code."""


class _Marks:
    """Marks in the events where forward and backward pass from one block to the next."""

    def __init__(
        self, blocks: Sequence[nn.Module], watch: StorageWatch, events: list[Event],
        meters: Sequence[Callable[[], int]], stop_at: int,
    ) -> None:  # fmt: skip
        self._watch, self._events, self._meters = watch, events, meters
        self._counted = [meter() for meter in meters]
        self._last = len(blocks)
        self._stop_at = stop_at
        self._next = 0
        self._handles = [
            block.register_forward_pre_hook(self._before(i), with_kwargs=True, prepend=True)
            for i, block in enumerate(blocks)
        ]
        self._handles.append(blocks[-1].register_forward_hook(self._after))

    def _before(self, i: int) -> Callable[..., None]:
        def mark(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if i == self._next:  # not when it is recomputed
                self._mark(i, (args, kwargs))

        return mark

    def _after(self, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._next == self._last:
            self._mark(self._last, output)

    def _mark(self, i: int, value: Any) -> None:
        self._next = i + 1
        self.count()
        tensors = [t for t in tree_iter(value) if isinstance(t, Tensor)]
        passed = next((t for t in tensors if t.requires_grad), tensors[0] if tensors else None)
        number = None if passed is None else self._watch.number_of(passed)
        self._events.append(Event("into", i, -1 if number is None else number))
        if i == self._stop_at:
            raise _Enough
        if passed is not None and passed.requires_grad:
            passed.register_hook(lambda _grad: self._back(i))

    def _back(self, i: int) -> None:
        self.count()
        self._events.append(Event("back", i))

    def count(self) -> None:
        """Write down what the meters have counted since the last mark."""
        for number, meter in enumerate(self._meters):
            now = meter()
            if now != self._counted[number]:
                self._events.append(Event("spent", number, now - self._counted[number]))
                self._counted[number] = now

    def remove(self) -> None:
        """Remove the hooks, and count the rest."""
        self.count()
        for handle in self._handles:
            handle.remove()


_TORCH, _HERE = (f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2]))

_aten = torch.ops.aten
_SELECTIONS = {_aten.nonzero.default, _aten.masked_select.default, _aten.index.Tensor}
"""Operations whose result is as large as values say."""


def _selecting_all(func: Any, args: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Return an operation that gives the largest result a selection by a mask can have: of a mask that is all True."""
    if func is _aten.nonzero.default:
        (values,) = args
        return _aten.new_empty.default, (values, [values.numel(), values.dim()]), {"dtype": torch.int64}
    if func is _aten.masked_select.default:
        values, mask = args
        return _aten.new_empty.default, (values, [torch.broadcast_shapes(values.shape, mask.shape).numel()]), {}
    values, indices = args
    found: list[Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            found.append(index)
        else:
            found += [index.new_zeros(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
    return func, (values, found), {}


def _zero(tensor: Tensor) -> float | int | bool:
    if tensor.dtype == torch.bool:
        return False
    return 0.0 if tensor.is_floating_point() else 0


def _flops(func: Any, args: Any, kwargs: Any, output: Any) -> int:
    packet = func.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=output))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(t.shape for t in args[:3])))
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*(t.shape for t in args[:4])))
    return 0


@dataclass
class Tracer:
    """Runs steps of one simulated model (`simulated.simulated`)."""

    model: nn.Module
    specs: Sequence[UnitSpec]
    step: Step
    precision: PrecisionPolicy
    fp32_names: tuple[str, ...]
    device: torch.device
    mode: Any
    blocks: Sequence[nn.Module] = ()  # blocks that run one after the other, at which the trace is marked
    # Each returns a count that only grows. A marked trace has their growth by block, after that of FLOPs.
    meters: Sequence[Callable[[], int]] = ()

    def run(
        self, batch: Any, recompute: RecomputeConfig | None = None, *, first_block_only: bool = False
    ) -> Trace:  # fmt: skip
        """Trace one step, from the shapes and dtypes of ``batch``.

        Args:
            batch: one rank's.
            recompute: what is computed again in backward.
            first_block_only: end the step where the second of `blocks` begins.

        Raises:
            PlanError: the step cannot run on fake tensors; with the cause.
        """
        events: list[Event] = []
        watch = _Watch(events, self.model)
        flats: list[Any] = [_Flat([p for _, p in s.params]) for s in self.specs]
        units = [Unit(s.name, s.modules, [f], is_root=s.is_root) for s, f in zip(self.specs, flats, strict=True)]
        modules = [list(s.modules) for s in self.specs]
        recorder: Any = _Recorder(units, watch, events)
        hooks = UnitHooks(units, recorder, recorder, sharded=True)
        boundaries = [
            Fp32Boundary(m, self.precision.compute)
            for m in kept_in_fp32(self.model, self.fp32_names, self.precision.compute).bounded
            if self.precision.rounds
        ]
        saving = _saving(watch, events)
        stop_at = 1 if first_block_only else -1
        meters = (lambda: watch.flops, *self.meters)
        marks = _Marks(self.blocks, watch, events, meters, stop_at) if self.blocks else None
        applied = None if recompute is None else apply_recompute(self.model, recompute, saving)
        recomputed = 0 if applied is None else len(applied.modules)
        try:
            self._run_step(watch, events, batch, saving if recompute is None else nullcontext, marks)
        except _Enough:
            del events[max(i for i, event in enumerate(events) if event.kind == "into") + 1 :]
        except PlanError:
            raise
        except Exception as error:
            raise PlanError(
                f"the training step cannot be counted on tensors without values: {type(error).__name__}: {error}. It "
                "must not convert tensors to numbers or lists (tolist, numpy), and its shapes must not depend on "
                "values. Change it, or choose the strategy by hand."
            ) from error
        finally:
            if marks is not None:
                marks.remove()
            if applied is not None:
                applied.remove()
            hooks.detach()
            for boundary in boundaries:
                boundary.remove()
            for spec, its in zip(self.specs, modules, strict=True):
                spec.modules[:] = its  # `UnitHooks` has cleared the list
        return Trace(
            tuple(events), watch.flops, tuple(watch.assumed), frozenset(watch.casts),
            forward=watch.work.less(watch.backward), backward=watch.backward, recomputed=recomputed,
        )  # fmt: skip

    def _run_step(
        self, watch: _Watch, events: list[Event], batch: Any, around: Callable[[], AbstractContextManager[None]],
        marks: _Marks | None,
    ) -> None:  # fmt: skip
        def backward(loss: Tensor) -> None:
            if marks is not None:
                marks.count()
            events.append(Event("end_forward"))
            before = watch.work
            loss.backward()
            watch.backward = watch.backward.more(watch.work.less(before))
            events.append(Event("end_backward"))

        with self.mode, watch:
            simulated = simulated_batch(batch, self.precision, self.device)
            events.append(Event("begin"))
            with self._forward_context(), around():
                self.step(simulated, backward)
            del simulated

    @contextmanager
    def _forward_context(self) -> Generator[None, None, None]:
        """Set autocast or the default dtype, as the precision plugin does."""
        if self.precision.autocast is not None:
            with torch.autocast(self.device.type, dtype=self.precision.autocast, cache_enabled=False):
                yield
            return
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.precision.cast or before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def _saving(watch: StorageWatch, events: list[Event]) -> Callable[[], AbstractContextManager[None]]:
    """Return hooks that record what autograd saves."""

    def pack(tensor: Tensor) -> Tensor:
        number = watch.number_of(tensor)
        if number is not None:
            events.append(Event("saved", number))
        return tensor.detach()  # the tensor itself would reference the node that saves it

    def around() -> AbstractContextManager[None]:
        return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)  # type: ignore[return-value]

    return around
