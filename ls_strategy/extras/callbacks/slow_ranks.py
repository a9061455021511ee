"""`SlowRanks`: finds the ranks that take longer than others with the same work, step by step.

::

    log(own time / median of the others)      x    x x
                                      ----------x-------- 1.1       of every step, cut off so that no outlier decides
          x    x   x        x x    x
       ----------x-------------------------------------
    sum of what exceeds 1.1, from 0    ______________/|           named: beyond the threshold, and 1.2 x since it began
                                                     since

The test is a CUSUM (Page 1954, "Continuous Inspection Schemes"), once upwards and once downwards. Its threshold grows
with the variance from step to step, so that batches of unequal length, slow on another rank every time, do not pass it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ls_strategy.spans import BACKWARD, DATA, FORWARD, OPTIMIZER, PHASES

SLOW = 1.2  # a rank is slow if it takes so many times as long as the median of its peers
WINDOW = 16  # steps over which ratios are reported
_NEITHER = math.log(1.1)  # what lies above speaks for a slow rank, what lies below against it: half way to `SLOW`
_CUT = 0.4  # most that one step counts, as a logarithm
_LEAST_SUM = 0.9  # threshold without noise: a rank 1.3 x as slow passes it in six steps
_LEAST_STEPS = 6

_FALSE_ALARMS = 14.0
"""Logarithm of the steps between two false alarms of one column, if noise were independent and normal."""

_COLUMNS = ("step", FORWARD, BACKWARD, OPTIMIZER, DATA)
"""What is tested. Not what lies between the phases: rank 0 alone logs and draws."""

_SHARE, _LEAST_S = 0.05, 0.002  # an excess below this share of the median step, or below these seconds, does not count
_NOISE_STEPS = 64  # steps over which the variance is averaged


@dataclass(frozen=True)
class SlowRank:
    """A rank that takes longer than its peers."""

    rank: int
    peers: int  # the number of the other ranks with the same work
    since: int  # the first slow step, as ``trainer.global_step`` counts them when they end
    phase: str  # where it loses most
    ratio: float  # own time of a step, over the median of the others
    seconds: float  # own time of a step in the phase
    others_s: float  # the same of the others' median


def median_of_others(values: Tensor) -> Tensor:
    """Return for every rank the median of the other ranks.

    Args:
        values: ``(..., ranks, columns)``.

    Returns:
        The same shape. A rank without others gets its own values.

    >>> median_of_others(torch.tensor([[1.0], [2.0], [5.0], [4.0]])).flatten()
    tensor([4., 4., 2., 2.])
    """
    ranks = values.shape[-2]
    if ranks == 1:
        return values
    ordered, order = values.sort(-2)
    place = order.argsort(-2)

    def at(i: int) -> Tensor:
        return torch.where(place > i, ordered[..., i : i + 1, :], ordered[..., i + 1 : i + 2, :])

    return (at((ranks - 2) // 2) + at((ranks - 1) // 2)) / 2


class SlowRanks:
    """The ranks of a run, in groups of ranks with the same work. Ranks of different groups are not compared."""

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        """``groups``: every rank is in one of them."""
        self._groups = [torch.tensor(group) for group in groups]
        self._peers = {rank: len(group) - 1 for group in groups for rank in group}
        self.slow: dict[int, SlowRank] = {}  # by rank, as they were when they were found
        shape = (len(self._peers), len(_COLUMNS))
        self._sums = _Sums(shape)
        self._is_slow = torch.zeros(shape, dtype=torch.bool)
        self._noise = torch.zeros(shape, dtype=torch.float64)
        self._noise_steps = 0
        self._last = torch.zeros((0, *shape), dtype=torch.float64)  # the logarithms of the last step, if there was one
        self._window: deque[tuple[int, Tensor]] = deque(maxlen=WINDOW)

    def add(self, steps: Sequence[int], seconds: Tensor) -> tuple[list[SlowRank], list[tuple[SlowRank, int]]]:
        """Count steps. Returns the ranks that are slow from now on, and those that are not any more, with since when.

        Args:
            steps: their numbers, in order; at least one.
            seconds: own times, ``(steps, ranks, len(PHASES))`` float64.
        """
        self._window.extend(zip(steps, seconds, strict=True))
        logs = self._logs(_columns(seconds))
        self._sums.add(steps, logs - _NEITHER)
        threshold = (self._noise * (_FALSE_ALARMS / (2 * _NEITHER))).clamp_(min=_LEAST_SUM)
        above, below = self._sums.value >= threshold
        begins, ends = above & ~self._is_slow, below & self._is_slow
        return self._begin(begins), self._end(ends)

    def _begin(self, above: Tensor) -> list[SlowRank]:
        found: list[SlowRank] = []
        for rank, column in above.nonzero().tolist():
            since = int(self._sums.since[0, rank, column])
            median = self._median(since)
            columns = _columns(median)
            if self._count(since) < _LEAST_STEPS or columns[rank, column] < SLOW * self._others(columns)[rank, column]:
                continue
            self._is_slow[rank, column] = True
            self._sums.clear(rank, column)
            if rank not in self.slow:
                self.slow[rank] = self._describe(rank, since, median)
                found.append(self.slow[rank])
        return found

    def _end(self, below: Tensor) -> list[tuple[SlowRank, int]]:
        ended: list[tuple[SlowRank, int]] = []
        for rank, column in below.nonzero().tolist():
            until = int(self._sums.since[1, rank, column])
            if self._count(until) < _LEAST_STEPS:
                continue
            self._is_slow[rank, column] = False
            self._sums.clear(rank, column)
            if not self._is_slow[rank].any():
                ended.append((self.slow.pop(rank), until))
        return ended

    @property
    def is_full(self) -> bool:
        """Whether there were as many steps as the window has."""
        return len(self._window) == WINDOW

    def ratios(self) -> Tensor:
        """Return own times over the others' median in the window: ``(ranks, 1 + len(PHASES))``, the step first.

        Where neither takes `_LEAST_S`, a phase counts as equal.
        """
        median = self._median(since=0)
        columns = torch.cat([median.sum(1, keepdim=True), median], 1).clamp(min=_LEAST_S)
        return columns / self._others(columns)

    def _others(self, values: Tensor) -> Tensor:
        """Return `median_of_others` of every group, of ``(..., ranks, columns)``."""
        if len(self._groups) == 1:
            return median_of_others(values)
        result = torch.empty_like(values)
        for group in self._groups:
            result[..., group, :] = median_of_others(values[..., group, :])
        return result

    def _logs(self, columns: Tensor) -> Tensor:
        """Return logarithms of ratios, of the shape of ``columns``; what is negligible is not above 0."""
        others = self._others(columns)
        logs = (columns.clamp(min=1e-6) / others.clamp(min=1e-6)).log_().clamp_(-_CUT, _CUT)
        # Half of the squared difference from step to step, which a rank that becomes slow changes once.
        squares = torch.cat([self._last, logs]).diff(dim=0).square_().div_(2)
        if len(squares):
            self._noise_steps = min(self._noise_steps + len(squares), _NOISE_STEPS)
            self._noise.lerp_(squares.mean(0), min(len(squares) / self._noise_steps, 1.0))
        self._last = logs[-1:]
        negligible = columns - others < (_SHARE * others[..., :1]).clamp(min=_LEAST_S)
        return torch.where(negligible, logs.clamp(max=0), logs)

    def _count(self, since: int) -> int:
        return sum(step >= since for step, _ in self._window)

    def _median(self, since: int) -> Tensor:
        """Return the medians over the window, without steps before ``since``, ``(ranks, len(PHASES))``."""
        return torch.stack([seconds for step, seconds in self._window if step >= since]).median(0).values

    def _describe(self, rank: int, since: int, median: Tensor) -> SlowRank:
        others, step = self._others(median), median.sum(1, keepdim=True)
        phase = int((median - others)[rank].argmax())
        return SlowRank(
            rank=rank,
            peers=self._peers[rank],
            since=since,
            phase=PHASES[phase],
            ratio=float(step[rank] / self._others(step)[rank]),
            seconds=float(median[rank, phase]),
            others_s=float(others[rank, phase]),
        )


class _Sums:
    """Evidence for a slow rank, and against it: sums that do not fall below 0, and the steps where they left it."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.value = torch.zeros((2, *shape), dtype=torch.float64)
        self.since = torch.zeros((2, *shape), dtype=torch.int64)

    def add(self, steps: Sequence[int], evidence: Tensor) -> None:
        for step, each in zip(steps, torch.stack([evidence, -evidence], 1), strict=True):
            self.since.masked_fill_(self.value <= 0, step)
            self.value.add_(each).clamp_(min=0)

    def clear(self, rank: int, column: int) -> None:
        self.value[:, rank, column] = 0


def _columns(seconds: Tensor) -> Tensor:
    """Return the seconds of `_COLUMNS`, ``(..., ranks, len(_COLUMNS))``, of those of `PHASES`."""
    phases = [PHASES.index(name) for name in _COLUMNS[1:]]
    return torch.cat([seconds.sum(-1, keepdim=True), seconds[..., phases]], -1)
