"""A flat buffer whose masters are stored as the parameters and the bits that complete them.

::

    full          | a | b | c      |....|     bf16, read by the forward; this rank's range completes its masters
    param             | b | c  |              stage 3: this rank's shard does, on the tier of parameters
    master.low        | b | c  |              16 or 8 bits per element, on the tier of masters
    master.ties       | b | c  |              with 16 bits, another bit (`ls_strategy.ops.split_master`)

To all others the masters are fp32 numbers: checkpoints, `read_master`, a new engine. A write to the masters changes the
parameters in this rank's range, or its shard of them, at once; below stage 3 as in fp32, where the masters are a slice
of ``full``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor
from typing_extensions import override

from ls_strategy.errors import StateError
from ls_strategy.layout import round_up
from ls_strategy.ops.split_master import PER_BYTE, SplitMaster, split
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.state_store import placeholder_of
from ls_strategy.zero.flat.writes import take_elements


class SplitFlat(FlatBuffer):
    """Parameters whose masters are split, once they train. ``master`` is a placeholder that reads as NaN."""

    _before: Tensor | None = None
    """This rank's range of the parameters before writes of user code that were announced, or that may come."""

    _announced = False

    @override
    def place(self, mine: Tensor) -> None:
        form = self.plan.split_masters
        if form is None:
            super().place(mine)
            return
        parts = split(mine, form)
        if self.has_own_shard:
            self.store.create("param", self.param_tier, parts.high, self.dtype)
            self.shard = self.store.in_memory("param")
        self.store.create("master.low", self.optimizer_tier, parts.low, parts.low.dtype)
        if parts.ties is not None:
            self.store.create("master.ties", self.optimizer_tier, parts.ties, torch.uint8)
        self.master = placeholder_of(self.stepped_numel, self.master_dtype).to(mine.device)

    @override
    def refresh(self) -> None:
        if self.plan.split_masters is None:
            super().refresh()

    @property
    def _is_split_in_full(self) -> bool:
        """Whether the masters are split, and the parameters that they complete are a slice of ``full``."""
        return self.plan.split_masters is not None and not self.policy.parameters

    @property
    @override
    def master_is_slice(self) -> bool:
        return self._is_split_in_full or super().master_is_slice

    @override
    def masters_in_memory(self) -> list[Tensor]:
        if self.plan.split_masters is None:
            return super().masters_in_memory()
        parts = (self.store.in_memory(name) for name in self.plan.master_states(0))
        return [part for part in parts if part is not None]

    # writes of user code ---------------------------------------------------------------------------------------------

    @override
    @contextmanager
    def writing(self) -> Iterator[None]:
        """Keep the parameters of before: elements that are not written to keep their masters."""
        if not self._is_split_in_full or self._announced:
            yield
            return
        self._announced = True
        self.writes.note_access()
        try:
            yield
        finally:
            self._announced, self._before = False, None

    @override
    def watch(self) -> None:
        if not self._is_split_in_full or self._before is not None or self.hidden or self.gathering is not None:
            return
        if self.updating is None and not self.offloaded:
            if self.writes.has_versions_of_writes:
                self.take_writes()  # an error, as without this access
            self.before_change()  # a save in flight would complete what is written to by what was there before
            self._before = self._own_range().clone()

    @override
    def before_change(self) -> None:
        super().before_change()
        self._before = None

    @override
    def start_gather(self) -> None:
        super().start_gather()
        if self._is_split_in_full and (self._announced or self.writes.may_be_written):
            self.writes.note_access()

    @override
    def _reveal(self) -> None:
        super()._reveal()
        if self._announced:
            self.writes.note_access()

    @override
    def take_in_place(self, *, detected: bool) -> bool:
        if not self._is_split_in_full:
            return super().take_in_place(detected=detected)
        if self._before is None:
            if not detected:
                return False
            raise StateError(
                f"a parameter in the buffer of {self.name!r} was written to, but with precision.master_weights="
                f"{self.plan.split_masters!r} its masters cannot tell which elements have changed. Write to it inside "
                "strategy.gathered_parameters(modify=True), or set master_weights=True on the strategy."
            )
        changed = take_elements(self, 0, self._own_range(), self._before)
        if not self._announced:
            self._before = None
        return changed

    def _own_range(self) -> Tensor:
        return self.full.detach()[slice(*self.stepped)]

    # masters ---------------------------------------------------------------------------------------------------------

    @override
    def masters_of(self, start: int, stop: int, held: Mapping[str, Tensor]) -> Tensor | SplitMaster:
        if self.plan.split_masters is None:
            return super().masters_of(start, stop, held)
        parts = {name: held[name] for name in ("param", *self.plan.master_states(0)) if name in held}
        if "param" not in parts:
            own = self.has_own_shard
            parts["param"] = self.store.view("param", start, stop) if own else self._own_range()[start:stop]
        for name in self.plan.master_states(0):
            if name not in parts:
                each = PER_BYTE if name == "master.ties" else 1
                parts[name] = self.store.view(name, start // each, -(-stop // each))
        return SplitMaster(parts["param"], parts["master.low"], parts.get("master.ties"))

    def _parts_around(self, start: int, stop: int) -> tuple[SplitMaster, int]:
        """Return the parts of elements ``[start, stop)`` and those that share a byte with them, and where they begin.

        On NVMe, the parts are copies, but for parameters in ``full``.
        """
        self.require_here("masters")
        self.require_here("parameters")
        first = start // PER_BYTE * PER_BYTE
        masters = self.masters_of(first, min(round_up(stop, PER_BYTE), self.stepped_numel), {})
        assert isinstance(masters, SplitMaster)
        return masters, first

    @override
    def read_master(self) -> Tensor:
        if self.plan.split_masters is None:
            return super().read_master()
        self.wait_updated()
        return self.master_range(0, self.stepped_numel)

    @override
    def master_range(self, start: int, stop: int) -> Tensor:
        if self.plan.split_masters is None:
            return super().master_range(start, stop)
        masters, first = self._parts_around(start, stop)
        return masters.join()[start - first : stop - first]

    @override
    def write_master(self, start: int, values: Tensor) -> None:
        if self.plan.split_masters is None:
            super().write_master(start, values)
            return
        self.wait_updated()
        before = self._before
        self.before_change()
        if self.gathering is not None:
            self.finish_gather()  # it sends the parameters
        masters, first = self._parts_around(start, start + values.numel())
        joined = masters.join()
        joined[start - first : start - first + values.numel()].copy_(values)
        masters.store_(joined)
        if before is not None:
            before[first : first + masters.numel()].copy_(masters.high)
            self._before = before
        if self.has_own_shard:
            self.store.write("param", first, masters.high)
        self.store.write("master.low", first, masters.low)
        if masters.ties is not None:
            self.store.write("master.ties", first // PER_BYTE, masters.ties)
