"""Bytes of model states that a rank holds now, measured on its tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from ls_strategy.distributed.buffer_pool import BufferPool
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.parameters import grad_of
from ls_strategy.zero.step.stepper import OptimizerStep


def memory_bytes(
    flats: Sequence[FlatBuffer], optimizers: Sequence[OptimizerStep], pools: Iterable[BufferPool]
) -> dict[str, int]:
    """Return bytes by kind. Memory shared by several tensors counts once, under the first kind. Not collective."""
    seen: set[int] = set()

    def size(*tensors: Tensor | None) -> int:
        total = 0
        for t in tensors:
            if t is not None and t.untyped_storage().nbytes() and t.untyped_storage().data_ptr() not in seen:
                seen.add(t.untyped_storage().data_ptr())
                total += t.untyped_storage().nbytes()
        return total

    return {
        "parameters": sum(
            size(*(() if f.policy.parameters else (f.full,)), f.shard)
            + size(None if f.secondary is None else f.secondary.values)
            for f in flats
        ),
        "gathered": sum(size(f.full, None if f.wire is None else f.wire.values) for f in flats if f.policy.parameters),
        "masters": sum(size(*f.masters_in_memory()) for f in flats),
        "gradients": sum(
            size(
                f.local.buffer,
                f.averages.values,
                *(f.averages.tree.sums if f.averages.tree else ()),
                *map(grad_of, f.params),
            )
            for f in flats
        ),
        "optimizer": sum(s.sharded.state_bytes() for s in optimizers),
        "communication": sum(pool.bytes for pool in pools),
    }
