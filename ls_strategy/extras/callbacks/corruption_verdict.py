"""Decide which rank has computed or stored a wrong value, from digests alone. Pure: nothing here knows a tensor.

::

    electorate          runs            votes for one value         verdict
    one rank, itself    x  x            equal                       nothing to say
                        x  y  y         the odd one                 the rank was wrong once
                        x  y  z         none twice                  the rank does not repeat itself
    several ranks       A:x B:y C:x     two ranks against one       B
                        A:x B:y A:y     A contradicts itself        A
                        A:x B:y A:x B:y none                        A or B: unknown

The one invariant: every rank decides the same, because all decide from the same digests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

Vote = tuple[int, int]  # a rank, and the digest of what it has computed or has stored
Digests = Mapping[int, Sequence[int]]  # digests by buffer, by rank or by virtual rank
TABLES = ("sent", "averaged", "held")
"""What a repetition leaves, in the order in which one follows from the other. See `Repetition`."""


@dataclass(frozen=True)
class Repetition:
    """What one run of forward and backward has come to, on all ranks."""

    by: Mapping[int, int]  # the rank that has computed each virtual rank; without virtual ranks, every rank itself
    sent: Digests  # gradients as they are sent, by virtual rank, or by rank
    averaged: Digests  # averages of the shards that a rank reduces, by rank
    held: Digests  # averages as the optimizer would read them, by rank; at stage 0 they were gathered


@dataclass
class Verdict:
    """What follows from all repetitions so far."""

    right: set[int] = field(default_factory=set)  # which of them are right on all ranks
    wrong: dict[int, set[int]] = field(default_factory=dict)  # buffers that each rank has got wrong once
    # Buffers for which each rank gives other values whenever it is asked.
    unsteady: dict[int, set[int]] = field(default_factory=dict)
    suspects: set[int] = field(default_factory=set)  # ranks of which one is wrong, if nothing says which one


def elect(votes: Sequence[Vote]) -> tuple[int | None, set[int]]:
    """Return the right value, None if it is unknown, and the ranks that have given another one."""
    by_value: dict[int, list[int]] = {}
    for rank, value in votes:
        by_value.setdefault(value, []).append(rank)
    if len(by_value) == 1:
        return votes[0][1], set()
    values_of: dict[int, set[int]] = {}
    for rank, value in votes:
        values_of.setdefault(rank, set()).add(value)
    most = max(map(len, by_value.values()))
    for value, ranks in by_value.items():
        others = {rank for other, voters in by_value.items() if other != value for rank in voters}
        alone = len(ranks) == most and sum(len(voters) == most for voters in by_value.values()) == 1
        decided = len(set(ranks)) > 1 or all(len(values_of[rank]) > 1 for rank in others)
        if most > 1 and alone and decided:
            return value, others
    return None, others_of(values_of)


def others_of(values_of: Mapping[int, set[int]]) -> set[int]:
    """Return the ranks that contradict themselves, or all if none does."""
    return {rank for rank, values in values_of.items() if len(values) > 1} or set(values_of)


def judge(runs: Sequence[Repetition], ignored: Iterable[int] = ()) -> Verdict:
    """Return what the runs say. Buffers that are ``ignored`` do not count."""
    verdict = Verdict()
    left, skip = dict(enumerate(runs)), set(ignored)
    for table in TABLES:
        left = _judge_table(table, left, skip, verdict)
    verdict.right = set(left) if len(left) > 1 else set()  # a value that one run alone has is not confirmed
    return verdict


def _judge_table(table: str, runs: dict[int, Repetition], skip: set[int], verdict: Verdict) -> dict[int, Repetition]:
    """Return the runs that are right in one table, of those that are in the tables before it."""
    right = set(runs)
    for who in dict.fromkeys(each for run in runs.values() for each in getattr(run, table)):
        rows = [getattr(run, table)[who] for run in runs.values()]
        ranks = [run.by[who] if table == "sent" else who for run in runs.values()]
        for buffer, values in enumerate(zip(*rows, strict=True)):
            if buffer in skip:
                continue
            votes = list(zip(ranks, values, strict=True))
            good, others = elect(votes)
            right -= {i for i, value in zip(runs, values, strict=True) if value != good}
            if good is not None:
                for rank in others:
                    verdict.wrong.setdefault(rank, set()).add(buffer)
            elif len(set(values)) > 2:  # three runs of the same bits, three results
                for rank in others:
                    verdict.unsteady.setdefault(rank, set()).add(buffer)
            else:
                verdict.suspects |= {rank for rank, _ in votes}
    return {i: run for i, run in runs.items() if i in right}


def elect_replica(values: Mapping[int, int], more: Iterable[int] = ()) -> tuple[int | None, set[int]]:
    """Return the right digest of what several ranks hold, None if it is unknown, and the ranks that hold another one.

    Args:
        values: the digest by rank.
        more: digests of the same that were taken earlier, when it was new.
    """
    counts: dict[int, int] = {}
    for value in (*values.values(), *more):
        counts[value] = counts.get(value, 0) + 1
    best = max(counts, key=counts.__getitem__)
    if 2 * counts[best] <= sum(counts.values()):
        return None, set(values)
    return best, {rank for rank, value in values.items() if value != best}
