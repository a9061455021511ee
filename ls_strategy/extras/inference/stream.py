"""Inference with models larger than memory: each block's weights are stored on a tier and loaded for its forward only.

::

    compute   | 0     | 1     | 2     | ...  | 0     |          the first block follows the last one: the next token
    read      | 1 | 2 ...    | 3 ...         | 1 ...            as soon as a buffer is free

ZeRO-Inference (Aminabadi et al., "DeepSpeed Inference", arXiv:2207.00032, section VI). Every pass reads all blocks
once, whatever the batch size: large batches are more efficient.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ls_strategy._torch import allow_data_on, tree_iter
from ls_strategy.checked import at_least, checked
from ls_strategy.config import NVMeIOConfig
from ls_strategy.errors import ConfigError, PlanError, StateError
from ls_strategy.extras.inference.blocks import BlockModules, followers, streamed_modules, with_own_weights
from ls_strategy.extras.inference.fill import Filler, device_of, needs_filling
from ls_strategy.extras.inference.placeholder import FloatingTarget, StoredTensor, Target, targets_of
from ls_strategy.extras.inference.storage import BlockStorage, Extent, StoredBlocks, pack
from ls_strategy.layout import TensorPart
from ls_strategy.tiers.base import Lease
from ls_strategy.tiers.link import trim_heap


@dataclass
class BlockPreparation:
    """Steps that prepare a block before it is stored: fill its weights, then change them, for example quantize."""

    shared: set[int]
    filler: Filler | None
    prepare: Callable[[str, nn.Module], None] | None


@dataclass
class Block:
    """A streamed block, stored or loaded."""

    index: int
    name: str
    targets: list[Target]
    slots: list[Extent]
    nbytes: int
    nans: list[Tensor] = field(init=False)
    """The NaN elements that the floating-point tensors show, on the CPU, where checking them is free."""

    _values: dict[int, list[Tensor]] = field(default_factory=dict)
    """What its targets show, by the address of the buffer."""

    def __post_init__(self) -> None:
        """Collect the NaN elements."""
        found = {id(t.nan): t.nan for t in self.targets if isinstance(t, FloatingTarget)}
        self.nans = [t for t in found.values() if t.device.type == "cpu" and t.dtype.itemsize > 1]

    def show(self, data: Tensor) -> None:
        """Point the tensors at the block's bytes."""
        values = self._values.get(data.data_ptr())
        if values is None:
            pairs = zip(self.targets, self.slots, strict=True)
            values = self._values[data.data_ptr()] = [t.prepare(s.view(data)) for t, s in pairs]
        for target, value in zip(self.targets, values, strict=True):
            target.show(value)

    def hide(self) -> None:
        """Release the bytes."""
        for target in self.targets:
            target.hide()

    def keep(self, data: Tensor) -> None:
        """Show copies, each with its own memory. The block must not be hidden again."""
        for target, slot in zip(self.targets, self.slots, strict=True):
            target.show(target.prepare(slot.view(data).clone()))

    def changed(self) -> str | None:
        """Return the name of a tensor that was modified or replaced; None if there is none."""
        found = next((target.name for target in self.targets if target.changed()), None)
        if found is None and self.nans:  # writing to ``.data`` does not change a tensor's version
            found = next((f"a weight of {self.name}" for one in self.nans if not one.isnan()), None)
        return found

    def forget(self) -> None:
        """Drop the views of buffers that are about to be freed."""
        self._values.clear()


def store_blocks(
    model: nn.Module, units: Sequence[BlockModules], storage: StoredBlocks, preparation: BlockPreparation
) -> list[Block]:
    """Fill meta tensors and store every block, in the order of registration, in which random weights are drawn."""
    device, host = storage.device, torch.device("cpu")
    of_block = {id(m): unit for unit in units for root in unit.modules.values() for m in root.modules()}
    done: dict[int, Block] = {}
    for name, module in model.named_modules():
        unit = of_block.get(id(module))
        if unit is None:
            if preparation.filler is not None:
                preparation.filler.fill(name, module, device)
        elif unit.index not in done:
            done[unit.index] = _store_block(unit, storage, preparation, host)
    _move_rest(model, device)
    return [done[unit.index] for unit in units]


def _store_block(unit: BlockModules, storage: StoredBlocks, preparation: BlockPreparation, host: torch.device) -> Block:
    for root, block in unit.modules.items():
        if preparation.filler is not None:
            for path, module in block.named_modules():
                preparation.filler.fill(f"{root}.{path}" if path else root, module, host)
        if preparation.prepare is not None:
            preparation.prepare(root, block)
    targets, values = targets_of(unit.modules, storage.device, preparation.shared)
    slots, nbytes = pack(values)
    if nbytes > storage.sizes[unit.index]:
        raise PlanError(
            f"prepare made block {unit.name!r} larger: {nbytes} bytes, but {storage.sizes[unit.index]} are reserved. "
            "Convert it to the larger dtype before stream_blocks()."
        )
    storage.write(unit.index, slots, values)
    result = Block(unit.index, unit.name, targets, slots, nbytes)
    result.hide()
    del values
    trim_heap()  # memory for the next block would not fit into the holes that this one leaves
    return result


def _move_rest(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for p in module.parameters(recurse=False):
            if p.device != device:
                allow_data_on(p, device)
                p.data = p.data.to(device)
        for key, buffer in list(module.named_buffers(recurse=False)):
            if buffer.device != device:
                module._buffers[key] = buffer.detach().to(device)  # one that is an nn.Parameter stays a buffer


class ReadAhead:
    """The reads in flight, in the order in which the blocks are expected to run: as they ran the last time."""

    def __init__(self, storage: StoredBlocks, sizes: Sequence[int], following: Sequence[int]) -> None:
        """``following``: for each block, the one expected after it."""
        self._storage = storage
        self._sizes = list(sizes)
        self._following = list(following)
        self._in_flight: deque[tuple[int, Lease]] = deque()
        self._last: int | None = None
        self.trace: list[tuple[str, int]] | None = None

    def take(self, index: int) -> Lease:
        """Return the lease of the block that runs now. Its read is in flight, or starts now."""
        if self._last is not None:
            self._following[self._last] = index
        self._last = index
        if not self._in_flight or self._in_flight[0][0] != index:
            self.drop()
            self._start(index)
        return self._in_flight.popleft()[1]

    def fill(self, *, running: bool) -> None:
        """Start as many reads as there are free buffers. ``running``: whether the running block occupies one."""
        assert self._last is not None
        last = self._in_flight[-1][0] if self._in_flight else self._last
        while len(self._in_flight) + running < self._storage.capacity:
            last = self._following[last]
            self._start(last)

    def drop(self) -> None:
        """Release all reads in flight."""
        while self._in_flight:
            self._in_flight.popleft()[1].release()

    def _start(self, index: int) -> None:
        if self.trace is not None:
            self.trace.append(("read", index))
        self._in_flight.append((index, self._storage.start(index, self._sizes[index])))


@checked(prefetch=at_least(0))
def stream_blocks(  # noqa: PLR0913 - options, keyword-only
    model: nn.Module,
    tier: Literal["cpu", "nvme"] = "cpu",
    path: str | Path | None = None,
    *,
    prefetch: int = 1,
    blocks: Sequence[nn.Module] | None = None,
    stream_all: bool = False,
    device: torch.device | str | None = None,
    fill_from: str | os.PathLike[str] | None = None,
    parts: Mapping[int, TensorPart] | None = None,
    prepare: Callable[[str, nn.Module], None] | None = None,
    io: NVMeIOConfig | None = None,
    allow_ram: bool = False,
    verify: bool = False,
) -> StreamedBlocks:
    """Store the weights of a model's repeated blocks on a tier, in place; the model's outputs do not change.

    For inference only: parameters are frozen. A block's parameters and persistent buffers are stored in their own
    dtypes. Other buffers and tensors that a block shares with other modules stay on the device. Not collective: with
    tensor parallelism every rank streams its own shards.

    Args:
        model: any module; of an encoder-decoder model both are streamed. Some or all of it may be on meta. It is then
            filled block by block, which needs memory for two blocks in addition to the buffers.
        tier: host memory, or an NVMe device. For a model on the CPU, host memory saves nothing.
        path: folder on a local NVMe device, for ``nvme``. None: the environment variable ``LS_STRATEGY_NVME_PATH``. The
            file in it has no name and disappears when the process ends, however it ends.
        prefetch: blocks that are read ahead; buffers take ``prefetch + 1`` times the largest block's bytes.
        blocks: the blocks, in the order in which they run. None: those of all module lists.
        stream_all: also stream the modules outside of blocks, one by one: embeddings, the last norm, the head. Only for
            models that use these weights in the modules' own forwards only.
        device: where the model computes. None: the device of its first parameter, or the CPU.
        fill_from: weights for a model on meta, see `fill`. None: the modules initialize themselves with random weights.
        parts: for `fill_from`: ``id(parameter)`` -> the part of it on this rank.
        prepare: called with each block's name and module after it was filled and before it is stored, to quantize it.
            It must not make the block larger.
        io: how the NVMe device is read.
        allow_ram: accept a ``path`` in memory (tmpfs), for tests.
        verify: verify every block that is read by a checksum, which costs one pass over its bytes.

    Raises:
        PlanError: there are no blocks, or a tensor in one cannot be streamed.
        ConfigError: an option is invalid.
        CheckpointError: ``fill_from`` is incomplete, or does not belong to this model.
    """
    where = device_of(model) if device is None else usable_device(device, "device")
    units = streamed_modules(model, blocks, stream_all=stream_all)
    filler = Filler(model, fill_from, parts) if needs_filling(model, fill_from) else None
    units, shared = with_own_weights(model, units)
    sizes = [pack(targets_of(unit.modules, where, shared)[1])[1] for unit in units]
    storage = StoredBlocks(sizes, BlockStorage(tier, path, io, allow_ram, verify), where, prefetch)
    try:
        return StreamedBlocks(model, units, storage, BlockPreparation(shared, filler, prepare))
    except BaseException:
        storage.close()
        raise


def usable_device(device: torch.device | str, option: str) -> torch.device:
    """Return the device if tensors can be created on it.

    Raises:
        ConfigError: it is unknown, or not available on this machine.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # AssertionError: torch without CUDA
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"Got {option}={str(device)!r}, but tensors cannot be created there: {reason}. Set {option}='cpu', or a "
            "GPU of this machine."
        ) from None


class _Hook:
    """A hook that cannot be pickled or copied: a copy of the module would have no weights."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = torch.compiler.disable(call)

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        raise StateError(
            "this model's blocks are stored on a tier, so it cannot be pickled or copied. Use model.state_dict(), or "
            "load all weights with restore() of the handle that stream_blocks() returned."
        )


class StreamedBlocks:
    """The handle of a streamed model, from `stream_blocks`.

    One thread at a time may run the model. After an exception in a forward the model remains usable.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[BlockModules], storage: StoredBlocks, preparation: BlockPreparation
    ) -> None:
        self._storage = storage
        self._frozen = [p for p in model.parameters() if p.requires_grad]
        self._running: Block | None = None
        self._depth = 0
        self._lease: Lease | None = None
        self._thread = threading.current_thread()
        self.waited_s = 0.0  # seconds that forwards have waited for blocks so far
        self._handles: list[Any] = []
        self._blocks = store_blocks(model, units, storage, preparation)
        self._ahead = ReadAhead(storage, [b.nbytes for b in self._blocks], followers(units))
        for p in self._frozen:
            p.requires_grad_(False)
        for unit, block in zip(units, self._blocks, strict=True):
            self._attach(unit, block)

    @property
    def names(self) -> list[str]:
        """Names of the blocks."""
        return [block.name for block in self._blocks]

    @property
    def stored_nbytes(self) -> int:
        """Bytes of all stored blocks."""
        return sum(block.nbytes for block in self._blocks)

    @property
    def buffers_nbytes(self) -> int:
        """Bytes of the buffers that blocks are loaded into."""
        return self._storage.buffers_nbytes

    @property
    def bytes_read(self) -> int:
        """Bytes read from the NVMe device so far."""
        return self._storage.bytes_read

    @property
    def trace(self) -> list[tuple[str, int]] | None:
        """Set to a list to record ``("read" | "compute" | "done", index of the block)`` as it happens."""
        return self._ahead.trace

    @trace.setter
    def trace(self, trace: list[tuple[str, int]] | None) -> None:
        self._ahead.trace = trace

    def describe(self) -> str:
        """Return one line for a log."""
        place = "in host memory" if self._storage.in_host_memory else "on NVMe"
        buffers = f"buffers for {self._storage.capacity} of them take {self.buffers_nbytes / 2**20:.1f} MiB"
        return (
            f"{len(self._blocks)} blocks with a total of {self.stored_nbytes / 2**20:.1f} MiB are stored {place}; "
            f"{buffers if self.buffers_nbytes else 'they compute there, without buffers'}"
        )

    # forward ---------------------------------------------------------------------------------------------------------

    def _attach(self, unit: BlockModules, block: Block) -> None:
        def enter(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self._enter(block, (args, kwargs))

        def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
            self._leave(block)

        def refuse(*_: Any) -> None:
            raise StateError(
                f"Got weights to load into {block.name}, which is stored on a tier and cannot be changed. Load them "
                "before stream_blocks(), or build the model on meta and give fill_from."
            )

        for module in unit.modules.values():
            # Run before and after all other hooks, which may read parameters.
            self._handles.append(module.register_forward_pre_hook(_Hook(enter), prepend=True, with_kwargs=True))
            self._handles.append(module.register_forward_hook(_Hook(leave), always_call=True))
        keys: dict[nn.Module, dict[str, tuple[Target, Extent]]] = {}
        for target, slot in zip(block.targets, block.slots, strict=True):
            for owner, key in target.owners:
                module = owner()
                assert module is not None
                keys.setdefault(module, {})[key] = (target, slot)
        for module, mine in keys.items():
            self._handles.append(module.register_state_dict_post_hook(self._saving(block, mine)))
            self._handles.append(module.register_load_state_dict_pre_hook(_Hook(refuse)))

    def _enter(self, block: Block, inputs: Any) -> None:
        if self._running is block:  # it calls itself
            self._depth += 1
            return
        self._take_over()
        self._refuse_gradients(block, inputs)
        self._refuse_changes(block, "outside of its forward")
        started = time.perf_counter()
        with torch.inference_mode(mode=False):  # buffers are used outside of inference mode too
            lease = self._ahead.take(block.index)
            try:
                block.show(lease.wait())
            except BaseException:
                lease.release()
                block.hide()
                raise
        self.waited_s += time.perf_counter() - started
        self._running, self._lease, self._depth = block, lease, 1
        with torch.inference_mode(mode=False):
            self._ahead.fill(running=True)
        if self.trace is not None:
            self.trace.append(("compute", block.index))

    def _leave(self, block: Block) -> None:
        if self._running is not block:
            return  # its `_enter` raised
        self._depth -= 1
        if self._depth:
            return
        try:
            self._refuse_changes(block, "in its forward")
        finally:
            self._release()
        if self.trace is not None:
            self.trace.append(("done", block.index))
        with torch.inference_mode(mode=False):
            self._ahead.fill(running=False)

    def _release(self) -> None:
        if self._running is not None and self._lease is not None:
            self._running.hide()
            self._lease.release()
        self._running = self._lease = None
        self._depth = 0

    def _take_over(self) -> None:
        """Clean up after a forward that was interrupted, unless another thread is running one."""
        if self._storage.closed:
            raise StateError(
                "the weights of this model are gone: its StreamedBlocks were closed. Build the model again, or call "
                "restore() instead of close()."
            )
        here = threading.current_thread()
        if self._running is not None and here is not self._thread and self._thread.is_alive():
            raise StateError(
                f"block {self._running.name} runs in thread {self._thread.name!r}, and thread {here.name!r} calls "
                "another one, but only one thread at a time may run a streamed model. Use a lock, or a batch."
            )
        self._thread = here
        self._release()

    def _refuse_gradients(self, block: Block, inputs: Any) -> None:
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tree_iter(inputs)):
            raise StateError(
                f"Got inputs that require gradients for block {block.name}, but its weights are not available in a "
                "backward pass. Run the model under torch.no_grad()."
            )

    def _refuse_changes(self, block: Block, when: str) -> None:
        name = block.changed()
        if name is not None:
            raise StateError(
                f"{name} was written to, or moved, {when}, but a tensor that is stored on a tier cannot be changed. "
                "Set model.eval(), change dtype and device before stream_blocks(), or omit the block: blocks=[...]."
            )

    # the stored weights ----------------------------------------------------------------------------------------------

    def _saving(self, block: Block, mine: Mapping[str, tuple[Target, Extent]]) -> Callable[..., None]:
        """Return a hook that puts tensors into a module's state dict that are read when they are used."""

        def save(_module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
            for key, (target, slot) in mine.items():
                if prefix + key in state:
                    state[prefix + key] = StoredTensor(target.like, partial(self._read, block, slot))

        return _Hook(save)

    def _read(self, block: Block, slot: Extent, start: int, stop: int) -> Tensor:
        """Return the elements ``[start, stop)`` of a stored tensor, in the order of its indices."""
        if self._storage.closed:
            raise StateError(f"a weight of {block.name} is read, but its tier is closed and the values are gone.")
        self._ahead.drop()  # frees a buffer
        size = slot.dtype.itemsize
        if slot.is_contiguous:
            data = self._storage.read(block.index, slot.offset + start * size, slot.offset + stop * size)
            return data.view(slot.dtype)
        data = self._storage.read(block.index, slot.offset, slot.offset + slot.nbytes)
        full = data.view(slot.dtype).as_strided(slot.shape, slot.stride)
        return full.reshape(-1)[start:stop]

    def restore(self) -> None:
        """Load all weights and stop streaming: the model is an ordinary one again.

        Raises:
            StateError: the handle was closed.
        """
        if self._storage.closed:
            raise StateError("the weights of this model are gone: its StreamedBlocks were closed before.")
        self._release()
        self._ahead.drop()
        with torch.inference_mode(mode=False):
            for block in self._blocks:
                lease = self._storage.start(block.index, block.nbytes)
                block.keep(lease.wait())
                lease.release()
        for handle in self._handles:
            handle.remove()
        for p in self._frozen:
            p.requires_grad_(True)
        self.close()

    def close(self) -> None:
        """Stop the threads and free buffers and file. The weights are lost unless `restore` was called. Idempotent."""
        if not self._storage.closed:
            self._release()
            self._ahead.drop()
            for block in self._blocks:
                block.forget()
            self._storage.close()
