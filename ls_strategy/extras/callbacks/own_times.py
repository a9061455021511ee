"""`OwnTimesBoard`: the last own times of every rank, in the rendezvous store. No collective, and nobody waits.

Every rank overwrites its own value, and rank 0 reads what is there. A value is `ROWS` rows of little-endian doubles:
the number of a step, or -1, and its seconds by phase. It is not a pickle, because anyone who reaches the store's port
can write to it.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ls_strategy._torch import default_store
from ls_strategy.distributed.comm import Comm
from ls_strategy.spans import PHASES

ROWS = 16
"""Steps in a value: more than pass between two reads."""

_MOST = 1e15
"""Above every number of a step, and any time."""

_COLUMNS = 1 + len(PHASES)
_FORMAT = f"<{ROWS * _COLUMNS}d"
_NO_STEP = (-1.0,) + (0.0,) * len(PHASES)


class OwnTimesBoard:
    """Own times of the ranks of one run, one object per rank."""

    def __init__(self, world: Comm, about: str) -> None:
        """``about``: what this rank computes on, for messages."""
        self._rank = world.rank
        key = f"ls_strategy/own_times/{world.where.era}"  # the same number on all ranks, another one in every run
        self._keys = [f"{key}/{r}" for r in range(world.world_size)]
        self._are_written = False
        self._rows: deque[tuple[float, ...]] = deque([_NO_STEP] * ROWS, maxlen=ROWS)
        self._store = default_store().clone()  # its own connection: waits on another one block it
        self._store.set(f"{self._keys[self._rank]}/about", about)

    def write(self, steps: Iterable[tuple[int, Mapping[str, float]]]) -> None:
        """Add steps of this rank, each with its number and own seconds by phase."""
        for step, seconds in steps:
            self._rows.append((float(step), *(seconds.get(phase, 0.0) for phase in PHASES)))
        self._store.set(self._keys[self._rank], struct.pack(_FORMAT, *(number for row in self._rows for number in row)))

    def read(self) -> Tensor | None:
        """Return what all ranks have written last, ``(ranks, ROWS, 1 + len(PHASES))``; None before all have."""
        self._are_written = self._are_written or self._store.check(self._keys)
        if not self._are_written:
            return None
        values: Sequence[bytes] = self._store.multi_get(self._keys)
        if any(len(value) != struct.calcsize(_FORMAT) for value in values):
            return None
        return torch.frombuffer(bytearray(b"".join(values)), dtype=torch.float64).view(len(values), ROWS, _COLUMNS)

    def about(self, rank: int) -> str:
        """Return what a rank computes on."""
        key = f"{self._keys[rank]}/about"
        return bytes(self._store.get(key)).decode(errors="replace") if self._store.check([key]) else "unknown"


def common_steps(values: Tensor, after: int) -> tuple[list[int], Tensor]:
    """Return the steps after ``after`` that all ranks have, in order, and their own times.

    Args:
        values: of `OwnTimesBoard.read`.
        after: not negative.

    Returns:
        Numbers, and ``(steps, ranks, len(PHASES))``. Steps with times that cannot be are left out.
    """
    steps = values[:, :, 0]
    everywhere = set.intersection(*(set(row) for row in steps.tolist()))
    numbers = torch.tensor(sorted(s for s in everywhere if after < s < _MOST), dtype=torch.float64)
    rows = (steps[:, :, None] == numbers).int().argmax(1)
    seconds = values[:, :, 1:].gather(1, rows[:, :, None].expand(-1, -1, len(PHASES))).transpose(0, 1)
    possible = ((seconds >= 0) & (seconds < _MOST)).flatten(1).all(1)  # and not NaN
    return numbers[possible].long().tolist(), seconds[possible]
