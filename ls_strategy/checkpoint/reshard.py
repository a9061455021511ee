"""Reshard a checkpoint in both directions: what this rank saves, and what it reads.

During ``trainer.save_checkpoint`` a *placeholder* represents a sharded value: a tensor on the meta device with the
full shape and the saved dtype. Hooks may drop placeholders or move them to other keys. When the checkpoint is written,
each rank replaces a placeholder by the boxes of the value that it owns.

On load a value is a `SavedTensor`. It reads from the files what is needed: a range of elements, or the full tensor for
any torch operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy._torch import make_wrapper, tree_iter, without_torch_function
from ls_strategy.checkpoint.files import Path, RankFile, Reader, read_box, read_range
from ls_strategy.errors import CheckpointError
from ls_strategy.layout import Box, flat_range_to_boxes
from ls_strategy.meta_init.lazy import READ_CHUNK, LazyTensor
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.units import Unit, places_of


@dataclass(eq=False)
class Source:
    """A value of one parameter that is sharded like its flat buffer: a weight, a moment or an average."""

    flat: FlatBuffer
    slot: int
    read: Callable[[int, int], Tensor]
    """``read(start, stop)`` returns elements of this rank's stepped range, 1-d. Callable from any thread."""

    guarded: bool = False
    """Whether everything that changes it calls `FlatBuffer.before_change` first."""

    def ranges(self) -> Iterator[tuple[Box, int, int]]:
        """Yield the boxes that this rank saves, with the range to ``read`` for each.

        Covers the owned range, even where this rank holds all elements. Of replicas along the tensor-parallel axis, the
        first rank saves.
        """
        flat = self.flat
        if not flat.counted:
            return
        piece, shape = flat.layout.pieces(*flat.owned)[self.slot], flat.layout.slots[self.slot].shape
        shift = flat.owned[0] - flat.stepped[0] + piece.start - piece.param_start
        for large in flat_range_to_boxes(shape, piece.param_start, piece.param_start + piece.numel):
            for box in large.split(READ_CHUNK):
                yield box, shift + box.start, shift + box.stop

    def boxes(self) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield ``(offsets, values)`` of these boxes in the full parameter."""
        for box, start, stop in self.ranges():
            yield from self.placed(box, self.read(start, stop).detach())

    def placed(self, box: Box, values: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield where the values of a box of this rank's part belong in the full parameter."""
        part, values = self.flat.layout.slots[self.slot].part, values.view(box.sizes)
        if part is None:
            yield box.offsets, values
            return
        for piece, offsets in part.in_full(box):
            found = values
            for dim, (at, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
                found = found.narrow(dim, at - box.offsets[dim], size)
            yield offsets, found.contiguous()


class StandIn(Tensor):
    """A tensor on meta that stands in a checkpoint for a value of which this rank does not have all elements.

    What is computed from it is a plain tensor on meta. It cannot be pickled.
    """

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype) -> StandIn:
        """Make a new one."""
        return torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute with it as with a plain tensor."""
        with without_torch_function():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        """Return another one: hooks may copy what is saved."""
        return memo.setdefault(id(self), StandIn.of(self.shape, self.dtype))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(
            f"a value of shape {tuple(self.shape)} in the dictionary of a checkpoint (dump_checkpoint(), "
            "on_save_checkpoint) stands for one that is sharded over ranks, so torch.save and pickle would lose its "
            "elements. Save the dictionary by trainer.strategy.save_checkpoint(checkpoint, path) on all ranks, or call "
            "trainer.save_checkpoint(path)."
        )


@dataclass
class Contents:
    """Values that one ``trainer.save_checkpoint`` has collected so far, and the placeholders that stand for them."""

    sources: dict[int, Source] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    """Names of the module's state dict, with those that only other pipeline stages have."""

    _placeholders: list[Tensor] = field(default_factory=list)

    def stand_in(self, source: Source, dtype: torch.dtype) -> Tensor:
        """Return a placeholder for the value."""
        tensor = StandIn.of(source.flat.layout.slots[source.slot].full_shape, dtype)
        self._placeholders.append(tensor)  # keeps the id valid
        self.sources[id(tensor)] = source
        return tensor

    def entries(self) -> list[CheckpointEntry]:
        """Return all placeholders in the order in which they were made, with their sources."""
        made = enumerate(self._placeholders)
        return [CheckpointEntry((str(number),), tensor, self.sources[id(tensor)]) for number, tensor in made]

    def computed_with(self, value: Any) -> bool:
        """Return whether a nest of dictionaries and lists has a tensor that was computed from a placeholder."""
        tensors = (leaf for leaf in tree_iter(value) if isinstance(leaf, Tensor))
        return any(tensor.is_meta and id(tensor) not in self.sources for tensor in tensors)

    def weights(
        self, raw: dict[str, Any], units: list[Unit], *, masters: list[Tensor] | None = None, frozen: bool = True
    ) -> tuple[dict[str, Any], list[str]]:
        """Return a module's state dict with placeholders for its parameters.

        Args:
            raw: ``module.state_dict()``.
            units: The units that hold the parameters.
            masters: Values to save instead of the trainable master weights, in the units' order.
            frozen: Include frozen parameters.

        Returns:
            The state dict, and the names that were left out.
        """
        self.names = list(raw)
        places = places_of(raw, units)
        trainable = [flat for unit in units for flat in unit.trainable_flats]
        others = {} if masters is None else {id(f): m for f, m in zip(trainable, masters, strict=True)}
        result: dict[str, Any] = {}
        left_out: list[str] = []
        made: dict[tuple[int, int], Tensor] = {}
        for key, value in raw.items():
            place = places.get(key)
            if place is None:
                if not (isinstance(value, Tensor) and value.is_meta):  # else it is on another pipeline rank
                    result[key] = value
                continue
            flat, i = place
            if not frozen and not flat.params[i].requires_grad:
                left_out.append(key)
                continue
            if (id(flat), i) not in made:  # tied entries share one placeholder
                other = others.get(id(flat))
                read = flat.master_range if other is None else partial(_slice, other)
                dtype = flat.master_dtype if other is None else other.dtype
                source = Source(flat, i, read, guarded=other is None and flat.master_is_private)
                made[id(flat), i] = self.stand_in(source, dtype)
            result[key] = made[id(flat), i]
        return result, left_out


def _slice(values: Tensor, start: int, stop: int) -> Tensor:
    return values[start:stop]


# --- writing ---------------------------------------------------------------------------------------------------------


@dataclass
class CheckpointEntry:
    """A value and its path in the checkpoint."""

    path: Path
    value: Any
    source: Source | None


def separate(checkpoint: dict[str, Any], contents: Contents) -> tuple[list[CheckpointEntry], dict[str, Any]]:
    """Split a Lightning checkpoint into entries for the ranks' files and small remaining data.

    Raises:
        CheckpointError: A hook computed with a placeholder.
    """
    remaining = dict(checkpoint)
    entries = list(_entries(("model",), remaining.pop("state_dict"), contents, depth=1))
    for index, state in enumerate(remaining.pop("optimizer_states", [])):
        for key, value in state.items():
            entries += _entries((f"optimizer_{index}", key), value, contents, depth=2 if key == "state" else 0)
    for key, value in list(remaining.items()):
        sharded = isinstance(value, dict) and any(id(v) in contents.sources for v in value.values())
        if sharded or id(value) in contents.sources:
            entries += _entries((key,), remaining.pop(key), contents, depth=1)
    for key, value in remaining.items():
        if any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_iter(value)):
            raise _without_elements(key)
    return entries, remaining


def _entries(prefix: Path, value: Any, contents: Contents, *, depth: int) -> Iterator[CheckpointEntry]:
    if depth and isinstance(value, dict) and all(isinstance(k, str) for k in value):
        for key, inner in value.items():
            yield from _entries((*prefix, key), inner, contents, depth=depth - 1)
        return
    if isinstance(value, Tensor) and value.is_meta and id(value) not in contents.sources:
        raise _without_elements(".".join(prefix))
    yield CheckpointEntry(prefix, value, contents.sources.get(id(value)))


def _without_elements(key: str) -> CheckpointError:
    return CheckpointError(
        f"{key}: a hook that runs during a save (on_save_checkpoint) has computed with a sharded value, of which no "
        "rank has all elements, or nested it deeper than one dictionary. Do that in on_load_checkpoint, or save with "
        'checkpoint.format="file".'
    )


def write_entries(
    file: RankFile, entries: Iterable[CheckpointEntry], writes: Callable[[Path], bool]
) -> dict[Path, Path]:
    """Append the boxes of sharded values that this rank owns, and the other values for which ``writes`` returns True.

    Returns:
        ``{path: path it was written under}`` of further paths of the same values, for tied parameters.
    """
    written: dict[int, Path] = {}
    aliases: dict[Path, Path] = {}
    for entry in by_flat(entries):
        if entry.source is None:
            # Only the rank with a parameter's first element has the scalars of its optimizer state (step counts).
            if writes(entry.path) or entry.path[1:2] == ("state",):
                value = entry.value
                if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
                    value = value.detach().to("cpu")
                    file.add_tensor(entry.path, value.shape, (0,) * value.dim(), value)
                else:
                    file.add_object(entry.path, value)
            continue
        if id(entry.value) in written:
            aliases[entry.path] = written[id(entry.value)]
            continue
        written[id(entry.value)] = entry.path
        for offsets, values in entry.source.boxes():
            file.add_tensor(entry.path, entry.value.shape, offsets, values.to("cpu"))
    return aliases


def by_flat(entries: Iterable[CheckpointEntry]) -> list[CheckpointEntry]:
    """Sort entries by flat buffer, so that a step that waits for the save waits for one buffer, not for all."""
    numbers: dict[int, int] = {}
    keyed = [(-1 if e.source is None else numbers.setdefault(id(e.source.flat), len(numbers)), e) for e in entries]
    return [entry for _, entry in sorted(keyed, key=lambda pair: pair[0])]


# --- reading ---------------------------------------------------------------------------------------------------------


class SavedTensor(LazyTensor):
    """A tensor of a sharded checkpoint that is read from the files when it is used."""

    reader: Reader
    path: Path

    @staticmethod
    def __new__(cls: Any, reader: Reader, path: Path) -> SavedTensor:  # noqa: D102
        metadata = reader.tensor_metadata(path)
        assert metadata is not None
        self = make_wrapper(cls, metadata.size, metadata.properties.dtype)
        self.reader, self.path = reader, path
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SavedTensor({'.'.join(self.path)}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @override
    def load(self, start: int, stop: int) -> Tensor:
        return read_range(self.reader, self.path, start, stop)

    @override
    def load_box(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
        return read_box(self.reader, self.path, offsets, sizes)


def assemble(reader: Reader, meta: dict[str, Any], *, weights_only: bool | None) -> dict[str, Any]:
    """Return a Lightning checkpoint with tensors that are still in the files."""
    checkpoint: dict[str, Any] = dict(meta)
    optimizers: dict[int, dict[str, Any]] = {}
    state_dict: dict[str, Any] = {}
    for path in reader.paths:
        head, *keys = path
        if head in ("model", "state_dict"):  # Lightning's FSDPStrategy and ModelParallelStrategy
            target: dict[str, Any] = state_dict
            keys = [".".join(keys)]
        elif head.startswith("optimizer_") and head[10:].isdigit():
            target = optimizers.setdefault(int(head[10:]), {})
        else:
            target, keys = checkpoint, list(path)
        for key in keys[:-1]:
            target = target.setdefault(key, {})
        target[keys[-1]] = _value(reader, path, weights_only)
    checkpoint["state_dict"] = state_dict
    if optimizers or "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [_with_groups(optimizers[i]) for i in sorted(optimizers)]
    return checkpoint


def _with_groups(state: dict[str, Any]) -> dict[str, Any]:
    """Restore the list of parameter groups, which DCP's planner stores as separate entries."""
    groups = state.get("param_groups", [])
    if isinstance(groups, dict):
        groups = [groups[key] for key in sorted(groups, key=int)]
    return {**state, "param_groups": groups}


def _value(reader: Reader, path: Path, weights_only: bool | None) -> Any:
    metadata = reader.tensor_metadata(path)
    if metadata is None:
        return reader.read_object(path, weights_only=weights_only)
    if not metadata.size:  # a step count
        return reader.read_chunk(path, ()).clone()
    return SavedTensor(reader, path)
