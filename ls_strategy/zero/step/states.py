"""The element-wise optimizer states of one flat buffer, on the tier that the plan assigns."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from ls_strategy.config import MomentFormat, TierName
from ls_strategy.ops.moments import BLOCK, Moment
from ls_strategy.tiers import TIERS
from ls_strategy.zero.flat.storage import chunks
from ls_strategy.zero.flat.units import Flat

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


class FlatStates:
    """Element-wise optimizer states of one flat buffer's stepped range, by name.

    States of a fused update may be stored in fewer bits (`Moment`), but state dicts show them in fp32.
    """

    def __init__(self, flat: Flat, moments: dict[str, bool], moment_format: MomentFormat) -> None:
        """Start without states. ``moments`` are the names of a fused update's states, and whether they are signed."""
        self.flat = flat
        self.moments = moments
        self.moment_format: MomentFormat = moment_format
        self.numel = flat.stepped_numel
        self._in_memory: dict[str, Moment] = {}
        self._stored: set[str] = set()

    @property
    def resident(self) -> bool:
        """Whether the states are tensors in memory."""
        return TIERS[self.flat.optimizer_tier].resident

    @property
    def _tier(self) -> TierName:
        """Return the tier of states in memory. Only those of a fused update can be out of memory."""
        tier = self.flat.optimizer_tier
        return tier if TIERS[tier].resident else "cpu"

    def dtypes(self) -> dict[str, torch.dtype]:
        """Return the names of existing states, with the dtype that a state dict shows."""
        names = [*self._in_memory, *self._stored]
        return {n: torch.float32 if n in self.moments else self._in_memory[n].codes.dtype for n in names}

    def ensure(self, name: str, dtype: torch.dtype) -> None:
        """Create a state of zeros unless it exists. ``dtype`` applies to states without a fused update."""
        if name in self._in_memory or name in self._stored:
            return
        storage = self.flat.storage
        if not self.resident and name in self.moments:
            self._stored.add(name)
            return
        fused = name in self.moments
        codes_dtype = _CODES[self.moment_format] if fused else dtype
        codes = storage.resident(self._tier, name, self.numel, codes_dtype)
        scales = None
        if fused and self.moment_format == "int8":
            blocks = -(-self.numel // BLOCK)
            scales = storage.resident(self._tier, f"{name}.scales", blocks, torch.float32)
        self._in_memory[name] = Moment(codes, scales, self.moments.get(name, True))

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the full state as it is stored, ``(stepped,)``, without a fused update."""
        self.ensure(name, dtype)
        return self._in_memory[name].codes

    def moment(self, name: str) -> Moment:
        """Return a resident state of a fused update, ``(stepped,)``."""
        self.ensure(name, torch.float32)
        return self._in_memory[name]

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return the full state as a state dict shows it, ``(stepped,)``; read-only."""
        self.flat.require_here("optimizer")
        self.flat.wait_updated()
        self.ensure(name, dtype)
        if name not in self.moments:
            return self._in_memory[name].codes
        if self.resident:
            return self._in_memory[name].dequantize()
        storage = self.flat.storage
        scales = storage.read(f"{name}.scales") if self.moment_format == "int8" else None
        return Moment(storage.read(name), scales, self.moments[name]).dequantize()

    def range(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements ``[start, stop)`` of an existing state as a state dict shows them, as a view or a copy.

        Any thread may call this while no update is in flight.
        """
        self.flat.require_here("optimizer")
        if name not in self.moments:
            return self._in_memory[name].codes[start:stop]
        if self.resident and self.moment_format == "fp32":
            return self._in_memory[name].codes[start:stop]
        first = start // BLOCK * BLOCK  # 8-bit codes share scales in blocks
        if self.resident:
            return self._in_memory[name].narrow(first, stop).dequantize()[start - first :]
        storage = self.flat.storage
        moment = Moment(torch.empty(stop - first, dtype=_CODES[self.moment_format]), None, self.moments[name])
        storage.read_into(name, moment.codes, first)
        if self.moment_format == "int8":
            scales = torch.empty(-(-stop // BLOCK) - first // BLOCK)
            storage.read_into(f"{name}.scales", scales, first // BLOCK)
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
            moment = self._in_memory[name].narrow(start, stop)
            moment.store_(values.to(moment.codes.device, torch.float32), seed=0)
            return
        storage = self.flat.storage
        for lo, hi in chunks(start, stop):
            part = Moment(torch.empty(hi - lo, dtype=_CODES[self.moment_format]), None, self.moments[name])
            if self.moment_format == "int8":
                part = replace(part, scales=torch.empty(-(-(hi - lo) // BLOCK)))
            part.store_(values[lo - start : hi - start].float(), seed=0)
            storage.write(name, lo, part.codes)
            if part.scales is not None:
                storage.write(f"{name}.scales", lo // BLOCK, part.scales)

    def forget(self, kept: Collection[str]) -> None:
        """Free the states that are not of a fused update, except those with a name in ``kept``."""
        for name in [n for n in self._in_memory if n not in kept and n not in self.moments]:
            del self._in_memory[name]

    def nbytes(self) -> int:
        """Return the bytes in memory."""
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors()}.values())

    def tensors(self) -> list[Tensor]:
        """Return the tensors in memory."""
        held = list(self._in_memory.values())  # the first update may add some from its thread
        return [t for m in held for t in (m.codes, m.scales) if t is not None]
