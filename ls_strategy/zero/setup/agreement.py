"""Checks before anything is sharded, with one verdict for all ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import PlanError


def owners_of(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[int, tuple[tuple[int, int], ...]]:
    """Return ``id(parameter) -> ((optimizer, group), ...)`` for every parameter that optimizers update, in order.

    Raises:
        PlanError: a parameter is in one optimizer twice, or not in the model.
    """
    names = {id(p): n for n, p in model.named_parameters()}
    owners: dict[int, tuple[tuple[int, int], ...]] = {}
    for i, optimizer in enumerate(optimizers):
        for g, group in enumerate(optimizer.param_groups):
            for p in group["params"]:
                if id(p) not in names:
                    raise PlanError(
                        f"optimizer {i} ({type(optimizer).__name__}) holds a parameter of shape {tuple(p.shape)} that "
                        "is not in the LightningModule. Register it there (self.name = nn.Parameter(...))."
                    )
                before = owners.get(id(p), ())
                if before and before[-1][0] == i:
                    raise PlanError(
                        f"parameter {names[id(p)]!r} is in optimizer {i} ({type(optimizer).__name__}) twice, in groups "
                        f"{before[-1][1]} and {g}, but has only one state. Remove it from one of them."
                    )
                owners[id(p)] = (*before, (i, g))
    return owners


OWNED = "(name, shape, dtype, requires_grad, ((optimizer, group), ...))"
"""Columns of the rows of `Draft.agree`, for the message."""


def agree(
    comm: Comm,
    error: PlanError | None,
    options: str,
    params: Sequence[tuple[Any, ...]],
    group_key: Any = None,
    columns: str = OWNED,
) -> None:
    """Raise on every rank if any rank has an error, different options or a different model. Collective.

    Args:
        comm: the process group.
        error: this rank's error, if any.
        options: this rank's options, as text.
        params: one row per parameter, ``(name, shape, dtype, ...)``, in order.
        group_key: ranks with equal values hold the same parameters.
        columns: the columns of a row, for the message.

    Raises:
        PlanError: naming the rank and the first difference.
    """
    digest = hashlib.sha256(repr(params).encode()).hexdigest()
    verdicts = comm.exchange_objects((str(error) if error else None, (group_key, digest), options))
    for rank, (message, _, _) in enumerate(verdicts):
        if message is not None:
            raise error if rank == comm.rank and error else PlanError(f"rank {rank}: {message}")
    if len({o for _, _, o in verdicts}) > 1:
        raise PlanError(
            "the ranks were started with different options: "
            + "; ".join(f"rank {r}: {o}" for r, (_, _, o) in enumerate(verdicts))
            + ". Start every rank with the same configuration."
        )
    digests = {d for _, d, _ in verdicts}
    if len(digests) > len({its_group_key for its_group_key, _ in digests}):
        by_group: dict[Any, dict[int, Any]] = {}
        for rank, (its_group_key, rows) in enumerate(comm.exchange_objects((group_key, list(params)))):
            by_group.setdefault(its_group_key, {})[rank] = rows
        for by_rank in by_group.values():
            _raise_first_difference(by_rank, columns)


def _raise_first_difference(by_rank: dict[int, Any], columns: str) -> None:
    for row in range(max(len(f) for f in by_rank.values())):
        entries = {r: f[row] if row < len(f) else None for r, f in by_rank.items()}
        if len(set(map(repr, entries.values()))) > 1:
            raise PlanError(
                f"the ranks built different models. First difference, parameter {row} as {columns}: "
                + "; ".join(f"rank {r}: {e}" for r, e in entries.items())
                + ". Build the same model on every rank, whatever its rank or data."
            )
