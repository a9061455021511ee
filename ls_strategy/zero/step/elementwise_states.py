"""The element-wise optimizer states of one flat buffer, on the tier that the plan assigns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ls_strategy.config import MomentFormat, TierName
from ls_strategy.errors import StateError
from ls_strategy.ops.moments import BLOCK, Moment
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.state_store import chunks

_CODES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


def moment_sizes(
    number: int, numel: int, moments: dict[str, bool], moment_format: MomentFormat
) -> dict[tuple[int, str], tuple[int, torch.dtype]]:
    """Return elements and dtype of the moments of one flat buffer with a fused update, by the tiers' keys."""
    result: dict[tuple[int, str], tuple[int, torch.dtype]] = {}
    for name in moments:
        result[number, name] = (numel, _CODES[moment_format])
        if moment_format == "int8":
            result[number, f"{name}.scales"] = (-(-numel // BLOCK), torch.float32)
    return result


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges in order, adjacent ones as one.

    >>> _joined([(8, 12), (0, 4), (4, 8), (20, 24)])
    [(0, 12), (20, 24)]
    """
    result: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result


class ElementwiseStates:
    """Element-wise optimizer states of one flat buffer's stepped range, by name.

    States of a fused update may be stored in fewer bits (`Moment`), but state dicts show them in fp32.
    """

    def __init__(
        self,
        flat: FlatBuffer,
        moments: dict[str, bool],
        moment_format: MomentFormat,
        spans: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    ) -> None:
        """Start without states.

        Args:
            flat: the buffer.
            moments: names of a fused update's states, and whether they are signed.
            moment_format: of these.
            spans: disjoint ranges, by name, to which states in memory in fp32 are limited. None: they are of all.
        """
        self._spans = {name: _joined(ranges) for name, ranges in (spans or {}).items()}
        self.flat = flat
        self.moments = moments
        self.moment_format: MomentFormat = moment_format
        self.numel = flat.stepped_numel
        self.resident = flat.states_in_memory
        """Whether the states are tensors in memory."""
        self._in_memory: dict[str, Moment] = {}
        self._stored: set[str] = set()

    @property
    def _tier(self) -> TierName:
        """Return the tier of states in memory. Only those of a fused update can be out of memory."""
        return self.flat.optimizer_tier if self.resident else "cpu"

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the names of existing states, with the dtype that a state dict shows."""
        names = [*self._in_memory, *self._stored]
        return {n: torch.float32 if n in self.moments else self._in_memory[n].codes.dtype for n in names}

    def ensure(self, name: str, dtype: torch.dtype) -> None:
        """Create a state of zeros unless it exists. ``dtype`` applies to states without a fused update."""
        if name in self._in_memory or name in self._stored:
            return
        store = self.flat.store
        if not self.resident and name in self.moments:
            self._stored.add(name)
            return
        fused = name in self.moments
        codes_dtype = _CODES[self.moment_format] if fused else dtype
        numel = sum(stop - start for start, stop in self._spans[name]) if name in self._spans else self.numel
        codes = store.resident(self._tier, name, numel, codes_dtype)
        scales = None
        if fused and self.moment_format == "int8":
            blocks = -(-self.numel // BLOCK)
            scales = store.resident(self._tier, f"{name}.scales", blocks, torch.float32)
        self._in_memory[name] = Moment(codes, scales, self.moments.get(name, True))

    def has(self, name: str, start: int, stop: int) -> bool:
        """Return whether the optimizer can have this state for elements ``[start, stop)``."""
        return name not in self._spans or any(lo <= start and stop <= hi for lo, hi in self._spans[name])

    def _place(self, name: str, start: int, stop: int) -> slice:
        """Return where a range is in the tensor of a state."""
        at = 0
        for lo, hi in self._spans.get(name, [(0, self.numel)]):
            if lo <= start and stop <= hi:
                return slice(at + start - lo, at + stop - lo)
            at += hi - lo
        raise StateError(f"Got no parameter in [{start}, {stop}) of {self.flat.name!r} has a state {name!r}.")

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the full state as it is stored, ``(stepped,)``, without a fused update."""
        self.ensure(name, dtype)
        return self._in_memory[name].codes

    def moment(self, name: str, start: int, stop: int) -> Moment:
        """Return elements ``[start, stop)`` of an existing, resident state of a fused update, as a view."""
        moment = self._in_memory[name]
        if name in self._spans:
            where = self._place(name, start, stop)
            start, stop = where.start, where.stop
        return moment if (start, stop) == (0, moment.codes.numel()) else moment.narrow(start, stop)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the full state as a state dict shows it, ``(stepped,)``; read-only."""
        self.flat.require_here("optimizer")
        self.flat.wait_updated()
        self.ensure(name, dtype)
        if name not in self.moments:
            return self._in_memory[name].codes
        if self.resident:
            return self._spread(name)
        store = self.flat.store
        scales = store.read(f"{name}.scales") if self.moment_format == "int8" else None
        return Moment(store.read(name), scales, self.moments[name]).dequantize()

    def _spread(self, name: str) -> Tensor:
        """Return a state in memory, ``(stepped,)``: zero where no parameter has it."""
        values = self._in_memory[name].dequantize()
        if name not in self._spans:
            return values
        full = values.new_zeros(self.numel)
        for lo, hi in self._spans[name]:
            full[lo:hi].copy_(values[self._place(name, lo, hi)])
        return full

    def range(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of an existing state as a state dict shows them, as a view or a copy.

        Any thread may call this while no update is in flight.
        """
        self.flat.require_here("optimizer")
        if name not in self.moments:
            return self._in_memory[name].codes[start:stop]
        if self.resident and self.moment_format == "fp32":
            return self._in_memory[name].codes[self._place(name, start, stop)]
        first = start // BLOCK * BLOCK  # 8-bit codes share scales in blocks
        if self.resident:
            return self._in_memory[name].narrow(first, stop).dequantize()[start - first :]
        store = self.flat.store
        moment = Moment(torch.empty(stop - first, dtype=_CODES[self.moment_format]), None, self.moments[name])
        store.read_into(name, moment.codes, first)
        if self.moment_format == "int8":
            scales = torch.empty(-(-stop // BLOCK) - first // BLOCK)
            store.read_into(f"{name}.scales", scales, first // BLOCK)
            moment = replace(moment, scales=scales)
        return moment.dequantize()[start - first :]

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Replace ``[start, start + n)`` by ``values`` as a state dict shows them. May return before the store."""
        self.flat.require_here("optimizer")
        self.flat.wait_updated()
        self.flat.before_change()
        self.ensure(name, values.dtype)
        stop = start + values.numel()
        if name not in self.moments:
            self._in_memory[name].codes[start:stop].copy_(values)
            return
        if self.resident:
            where = self._place(name, start, stop)
            moment = self._in_memory[name].narrow(where.start, where.stop)
            moment.store_(values.to(moment.codes.device, torch.float32), seed=0)
            return
        store = self.flat.store
        for lo, hi in chunks(start, stop):
            part = Moment(torch.empty(hi - lo, dtype=_CODES[self.moment_format]), None, self.moments[name])
            if self.moment_format == "int8":
                part = replace(part, scales=torch.empty(-(-(hi - lo) // BLOCK)))
            part.store_(values[lo - start : hi - start].float(), seed=0)
            store.write(name, lo, part.codes)
            if part.scales is not None:
                store.write(f"{name}.scales", lo // BLOCK, part.scales)

    def stored(self, name: str) -> list[Tensor]:
        """Return an existing state as it is stored, not as a state dict shows it: numbers or codes, then their scales.

        These are the tensors themselves, or copies from the NVMe tier.
        """
        self.flat.require_here("optimizer")
        self.flat.wait_updated()
        moment = self._in_memory.get(name)
        if moment is not None:
            return [moment.codes] if moment.scales is None else [moment.codes, moment.scales]
        return [self.flat.store.read(each) for each in self._names_of(name)]

    def store(self, name: str, values: Sequence[Tensor]) -> None:
        """Replace a state by what `stored` has returned. May return before it is on the NVMe tier."""
        self.flat.require_here("optimizer")
        self.flat.wait_updated()
        self.flat.before_change()
        self.ensure(name, values[0].dtype)
        if name in self._in_memory:
            for tensor, value in zip(self.stored(name), values, strict=True):
                tensor.copy_(value)
            return
        for each, value in zip(self._names_of(name), values, strict=True):
            self.flat.store.write(each, 0, value)

    def _names_of(self, name: str) -> list[str]:
        return [name, f"{name}.scales"] if self.moment_format == "int8" else [name]

    def forget(self, kept: Collection[str]) -> None:
        """Free the states that are not of a fused update, except those with a name in ``kept``."""
        for name in [n for n in self._in_memory if n not in kept and n not in self.moments]:
            self.flat.before_change()
            del self._in_memory[name]

    def nbytes(self) -> int:
        """Return the bytes in memory."""
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors()}.values())

    def tensors(self) -> list[Tensor]:
        """Return the tensors in memory."""
        held = list(self._in_memory.values())  # the first update may add some from its thread
        return [t for m in held for t in (m.codes, m.scales) if t is not None]
