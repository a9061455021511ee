"""Record what steps of virtual ranks log, combine it over all virtual ranks, and log it once per batch.

With ``sync_dist=True`` the values of all virtual ranks are combined in the order of `tree_sum`, so they are the same
on any number of ranks. Without it, the value of this process's first virtual rank counts, as a rank's own value does
under DDP.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.tree_sum import tree_sum
from ls_strategy.errors import StateError
from ls_strategy.host.pytorch import extract_batch_size, pl
from ls_strategy.lightning.pipeline.log import logging_to


class _LoggedName:
    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.values: dict[int, Any] = {}
        """By virtual rank; the last one that it has logged."""
        self.sizes: dict[int, int] = {}

    @property
    def reduction(self) -> str | None:
        """Return the name of the reduction over ranks, or None if values are not reduced."""
        if not self.options.get("sync_dist") or not isinstance(next(iter(self.values.values())), (Tensor, float, int)):
            return None
        fx = self.options.get("reduce_fx", "mean")
        return str(getattr(fx, "__name__", fx))


class VirtualLog:
    """Records ``self.log`` and ``self.log_dict`` of the steps of one batch."""

    def __init__(self, module: pl.LightningModule) -> None:
        self._module: Any = module
        self._calls: dict[str, _LoggedName] = {}
        self._by_epoch = not module.trainer.training
        """Whether Lightning logs by epoch unless told otherwise."""

    @contextmanager
    def recording(self, rank: int | None, batch: Any) -> Generator[None, None, None]:
        """Record inside. ``rank``: the virtual rank; None: what is logged does not count. ``batch``: its batch."""

        def log(name: str, value: Any, options: dict[str, Any]) -> None:
            if rank is None:
                return
            if options.get("on_epoch") is None:
                options["on_epoch"] = self._by_epoch
            call = self._calls.setdefault(name, _LoggedName(options))
            call.values[rank] = value.detach().clone() if isinstance(value, Tensor) else value
            if options.get("sync_dist"):
                size = options.get("batch_size")
                call.sizes[rank] = size if isinstance(size, int) else _size_of(batch)

        with logging_to(self._module, log):
            yield

    def replay(self, comm: Comm, ranks: Sequence[int], count: int) -> None:
        """Log what was recorded, once. Collective if any of it has ``sync_dist``.

        Args:
            comm: all ranks.
            ranks: the virtual ranks of this process.
            count: the number of all virtual ranks.

        Raises:
            StateError: the ranks have logged different names with ``sync_dist``; on every rank.
        """
        synced = {name: call for name, call in self._calls.items() if call.reduction is not None}
        combined = _combined(synced, comm, ranks, count) if synced else {}
        for name, call in self._calls.items():
            options = dict(call.options)
            if name in combined:
                value, size = combined[name]
                options |= {"sync_dist": False, "batch_size": size}
                self._module.log(name, value.to(self._module.device), **options)
            else:
                self._module.log(name, next(iter(call.values.values())), **options)


def _size_of(batch: Any) -> int:
    try:
        return extract_batch_size(batch)
    except Exception:  # Lightning asks for it only where it needs it
        return 1


def _combined(
    calls: dict[str, _LoggedName], comm: Comm, ranks: Sequence[int], count: int
) -> dict[str, tuple[Tensor, int]]:
    """Return value and batch size over all virtual ranks, by name. Collective."""
    names = list(calls)
    mark = float(zlib.crc32("\n".join(names).encode()))
    table = torch.zeros(2 * len(names) + 1, count, dtype=torch.float64)
    for row, call in enumerate(calls.values()):
        for rank, value in call.values.items():
            table[2 * row, rank] = float(value)
            table[2 * row + 1, rank] = call.sizes[rank]
    for rank in ranks:
        table[-1, rank] = mark if all(rank in call.values for call in calls.values()) else -1.0
    table = comm.agree(table, dist.ReduceOp.SUM)  # every number is that of one rank, and zeros: the sum is exact
    if not bool((table[-1] == mark).all()):
        raise StateError(
            f"the virtual ranks have logged different names with sync_dist=True in one step (here: {names}). Log the "
            "same names in every step, or set sync_dist=False."
        )
    found: dict[str, tuple[Tensor, int]] = {}
    for row, (name, call) in enumerate(calls.items()):
        values, sizes = table[2 * row].tolist(), table[2 * row + 1].tolist()
        total = _reduce(values, sizes, call.reduction or "mean", weighted=bool(call.options.get("on_epoch")))
        dtype = max((_dtype_of(value) for value in call.values.values()), key=lambda each: each.itemsize)
        found[name] = (torch.tensor(total, dtype=dtype), int(sum(sizes)))
    return found


def _dtype_of(value: Any) -> torch.dtype:
    """Return the dtype in which Lightning would have a value, but at least fp32."""
    return torch.float64 if isinstance(value, Tensor) and value.dtype == torch.float64 else torch.float32


def _reduce(values: Sequence[float], sizes: Sequence[float], reduction: str, *, weighted: bool) -> float:
    if reduction in ("max", "min"):
        return max(values) if reduction == "max" else min(values)
    if reduction == "sum":
        return tree_sum(values)
    if reduction not in ("mean", "avg"):
        raise StateError(
            f"Got reduce_fx={reduction!r} with sync_dist=True and parallel.virtual_ranks, but the order of a reduction "
            "over virtual ranks is known for mean, sum, max and min. Use one of these."
        )
    weights = list(sizes) if weighted else [1.0] * len(values)
    return tree_sum([v * w for v, w in zip(values, weights, strict=True)]) / tree_sum(weights)
