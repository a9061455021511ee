"""`Stragglers`: says during a fit which rank is slower than others with the same work, where, and since when."""

from __future__ import annotations

import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ls_strategy import device as dev
from ls_strategy._torch import default_store
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import MeshShape
from ls_strategy.extras.callbacks.slow_ranks import SlowRank, SlowRanks
from ls_strategy.host.pytorch import rank_zero_info, rank_zero_warn
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.spans import PHASES, SpanRecorder

# Every rank overwrites its own value, and rank 0 reads what is there. A value is `ROWS` rows of little-endian doubles:
# the number of a step, or -1, and its seconds by phase. It is not a pickle, because anyone who reaches the store's port
# can write to it.

ROWS = 16  # steps in a value: more than pass between two reads
_MOST = 1e15  # above every number of a step, and any time
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


_WRITE_EVERY = 4
_WRITE_EVERY_S = 0.1
"""Steps, and seconds, between two values that a rank writes. Shorter steps are not worth a message each."""

_ON_DEVICE_EVERY = 2  # on an accelerator one step in so many is measured: every wait takes two events
Report = Callable[[SlowRank, str, int | None], None]
"""Gets a rank that has become slow, what it computes on, and None; when it ends, the first step that was not slow."""


class Stragglers:
    """The comparison of the ranks in one fit, one object per rank. Only rank 0 compares; nothing is collective."""

    def __init__(self, strategy: ZeROStrategy, recorder: SpanRecorder, step: int, report: Report) -> None:
        """Begin the first step.

        Args:
            strategy: of the fit, which has begun.
            recorder: measures own times.
            step: ``trainer.global_step``.
            report: called on rank 0.
        """
        self._strategy, self._recorder, self._report = strategy, recorder, report
        self._ended = 0
        self._wrote_at = time.perf_counter()
        self._reads_next = False
        self._last = step
        self._compared: SlowRanks | None = None
        self._board: OwnTimesBoard | None = None
        mesh = strategy.parallel.mesh
        if mesh is None or mesh.world.world_size == 1:
            return
        device = strategy.root_device
        name = "" if dev.is_host(device) else f", {dev.name(device)}"
        self._board = OwnTimesBoard(mesh.world, f"{device}{name}, on {socket.gethostname()}")
        if mesh.world.rank == 0:
            self._compared = SlowRanks(groups_with_same_work(strategy, mesh.shape))
        self.begin()

    def begin(self) -> None:
        """Begin a step: what ran since `end` belongs to none."""
        every = _ON_DEVICE_EVERY if self._recorder.clock.on_device else 1
        if self._board is not None and self._ended % every == 0:
            self._recorder.own_time.begin(self._recorder.phase)

    def end(self, step: int, *, counts: bool) -> None:
        """End a step, and now and then write what this rank has measured. Rank 0 reads, one step later.

        Args:
            step: ``trainer.global_step`` after it.
            counts: whether this rank did the work of a step.
        """
        if self._board is None:
            return
        self._recorder.own_time.end(step if counts else None)
        self._ended += 1
        try:
            self._exchange(self._board)
        except (RuntimeError, OSError) as error:  # of the store, which training does not need
            self._board = None
            rank_zero_info(f"Monitor: ranks are not compared from step {step} on, because the store failed: {error}")

    def _exchange(self, board: OwnTimesBoard) -> None:
        if self._reads_next and self._compared is not None:  # by now the others have written, too
            self._compare(board, self._compared)
        self._reads_next = False
        now = time.perf_counter()
        if self._ended % _WRITE_EVERY == 0 and now - self._wrote_at >= _WRITE_EVERY_S:
            board.write(self._recorder.own_time.take())
            self._wrote_at, self._reads_next = now, True

    def _compare(self, board: OwnTimesBoard, compared: SlowRanks) -> None:
        values = board.read()
        if values is None:
            return
        steps, seconds = common_steps(values, self._last)
        if not steps:
            return
        self._last = steps[-1]
        begun, ended = compared.add(steps, seconds)
        for slow in begun:
            self._report(slow, board.about(slow.rank), None)
        for slow, until in ended:
            self._report(slow, board.about(slow.rank), until)

    @property
    def ratios(self) -> Tensor | None:
        """See `SlowRanks.ratios`. None on other ranks than 0, and before the window is full."""
        return self._compared.ratios() if self._compared is not None and self._compared.is_full else None

    def metrics(self) -> dict[str, float]:
        """Return the scalars, on rank 0: none before the window is full."""
        ratios = self.ratios
        if ratios is None:
            return {}
        assert self._compared is not None
        rank = int(ratios[:, 0].argmax())
        result = {
            "zero_stragglers/slow_ranks": float(len(self._compared.slow)),
            "zero_stragglers/slowest_rank": float(rank),
            "zero_stragglers/slowest_ratio": float(ratios[rank, 0]),
        }
        result |= {f"zero_stragglers/{p}_ratio": float(ratios[:, i].max()) for i, p in enumerate(PHASES, 1)}
        return result


def groups_with_same_work(strategy: ZeROStrategy, shape: MeshShape) -> list[list[int]]:
    """Return the ranks of a run in groups that are compared.

    Such ranks hold the same layers and the same experts, and compute equally many virtual ranks.
    """
    groups: dict[tuple[int, int], list[int]] = {}
    for number, ranks in enumerate(shape.groups("expert_zero")):
        for rank in ranks:
            virtual = strategy.virtual
            steps = 1 if virtual is None else len(virtual.split.ranks_of(shape.coordinates(rank)[1]))
            groups.setdefault((number, steps), []).append(rank)
    return list(groups.values())


def tell(slow: SlowRank, about: str, until: int | None) -> None:
    """Log that a rank has become slow, or with ``until`` that it is not slow any more."""
    if until is not None:
        rank_zero_info(
            f"Monitor: rank {slow.rank} ({about}) is as fast as the others again since step {until}; it was slow since "
            f"step {slow.since}."
        )
        return
    others = "the other rank" if slow.peers == 1 else f"the median of the {slow.peers} others"
    rank_zero_warn(
        f"Monitor: rank {slow.rank} ({about}) is slow since step {slow.since}, most in {slow.phase}: "
        f"{1e3 * slow.seconds:.3g} ms per step instead of {1e3 * slow.others_s:.3g} ms. Without waits, its steps take "
        f"{slow.ratio:.2f} x as long as those of {others} with the same work, and all ranks wait for it."
    )
