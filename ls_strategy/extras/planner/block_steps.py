"""Steps of one model in pieces: traced, or told by those on fewer ranks.

Where layers or sequences are sharded, every tensor has a size of one of the forms in `FORMS`. So steps on `SIZES` ranks
tell those on more ranks, if they are made of the same operations, if every parameter has the size that this foretells,
and if the first block allocates, saves and sends in forward what this foretells. Otherwise they are traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

from torch import nn

from ls_strategy.config import RecomputeConfig
from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.parallelism import Parallelism
from ls_strategy.extras.planner.pieces import Law, Pieces, cut, starts_like, told
from ls_strategy.extras.planner.step import resized
from ls_strategy.extras.planner.trace import Tracer

SIZES = (2, 4)  # ranks along the tensor or the context axis on which steps are traced
AXES: tuple[Literal["tensor", "context"], ...] = ("tensor", "context")  # axes along which steps are told
METERS = ("flops", "tensor", "context", "expert")  # what is counted in traces, by the number of the meter
FORMS: dict[Fraction, Callable[[int], Fraction]] = {
    Fraction(1): lambda _size: Fraction(1),
    Fraction(1, 2): lambda size: Fraction(2, size),
    Fraction(3, 2): lambda size: Fraction(2 * (size - 1), size),
    Fraction(3, 4): lambda size: Fraction(4 * (size - 1), size**2),
    Fraction(1, 4): lambda size: Fraction(4, size**2),
    Fraction(2): lambda size: Fraction(size, 2),
    Fraction(3): lambda size: Fraction(size - 1),
}
"""How a size grows from that on two ranks, by the ratio of that on four to it: one that no rank shares; a shard; what
the other ranks hold of a whole and of a shard; a shard of a shard; one number of every rank, and of every other one."""


def sharded_size(size: int) -> Law:
    """Return what tells the bytes of a tensor on ``size`` ranks from those on `SIZES`."""

    def law(two: int, four: int) -> int | None:
        if not two:
            return None if four else 0
        form = FORMS.get(Fraction(four, two))
        return None if form is None else _whole(two * form(size))

    return law


def sharded_count(size: int, *, sent: Literal["tensor", "context"] | None) -> Law:
    """Return what tells a sum over tensors; ``sent``: of what goes to the other ranks of the axis that grows.

    Tensor-parallel ranks send each other whole tensors and numbers, context-parallel ranks shards and parts of them.
    """
    steps = 2 - Fraction(4, size)  # from 1/2 over 1/4 to 1/size

    def law(two: int, four: int) -> int | None:
        if sent is None:
            return _whole(two + (four - two) * steps)
        per_rank = [
            Fraction(count, n - 1) * (1 if sent == "tensor" else n) for count, n in zip((two, four), SIZES, strict=True)
        ]
        found = (per_rank[0] + (per_rank[1] - per_rank[0]) * steps) * (size - 1)
        return round(found if sent == "tensor" else found / size)  # a single number cannot be cut

    return law


def _whole(number: Fraction | int) -> int | None:
    return int(number) if number == int(number) else None


class NotUniform(Exception):  # noqa: N818 - not an error of the user's
    """The blocks of a shortened model do not stand for all: more have to be traced."""


Key = tuple[Parallelism, int, RecomputeConfig | None, int]
"""How layers are sharded, blocks of the trace, recompute, and samples."""


@dataclass
class Known:
    """Results for one model and batch that are reused for other numbers of ranks."""

    pieces: dict[Key, Pieces] = field(default_factory=dict)
    # Elements of every parameter of the first rank, by how layers are sharded and blocks of the trace.
    numels: dict[tuple[Parallelism, int], list[int]] = field(default_factory=dict)
    short: dict[Any, int] = field(default_factory=dict)  # how many blocks stood for all, by which axes are used

    def tells(self, layers: Parallelism) -> bool:
        """Return whether steps on fewer ranks are known from which those of ``layers`` may be extrapolated."""
        traced = {key[0] for key in self.pieces}
        return layers.ring == 1 and any(
            getattr(layers, axis) > SIZES[-1] and all(replace(layers, **{axis: n}) in traced for n in SIZES)
            for axis in AXES
        )


class BlockSteps:
    """Steps of one model whose layers are sharded."""

    def __init__(
        self, tracer: Tracer, module: nn.Module, blocks: Sequence[nn.Module], batch: Any, *,
        parallel: Parallelism, short: int, known: Known,
    ) -> None:  # fmt: skip
        self._tracer, self._blocks, self._batch = tracer, blocks, batch
        self._layers = replace(parallel, pipeline=1, schedule="1f1b")
        self._short, self._known = short, known
        known.numels[self._layers, short] = [p.numel() for p in module.parameters()]

    def pieces(self, recompute: RecomputeConfig | None, samples: int) -> Pieces:
        """Return the step on a number of samples: from those on one and on two, whose storages grow evenly.

        Raises:
            PlanError: the step cannot run on fake tensors, or its blocks are not called one after the other.
            NotUniform: blocks of a shortened model differ.
        """
        key = (self._layers, self._short, recompute, samples)
        if key not in self._known.pieces:
            found = None
            if samples > 2:
                grown: Law = lambda one, two: one + (two - one) * (samples - 1)  # noqa: E731
                found = told(self.pieces(recompute, 1), self.pieces(recompute, 2), grown, [grown] * len(METERS))
            self._known.pieces[key] = found or self._told(recompute, samples) or self._traced(recompute, samples)
        return self._known.pieces[key]

    def _traced(self, recompute: RecomputeConfig | None, samples: int) -> Pieces:
        if self._short and recompute is not None and recompute.every > 1:
            raise NotUniform
        trace = self._tracer.run(resized(self._batch, samples), recompute)
        pieces = cut(trace, len(self._blocks))
        if self._short and not pieces.is_uniform:
            raise NotUniform
        return pieces

    def _told(self, recompute: RecomputeConfig | None, samples: int) -> Pieces | None:
        """Return the step as those on fewer ranks tell it; None if they do not."""
        if self._layers.ring > 1:
            return None  # a ring has a step for each of its ranks
        for axis in AXES:
            size = getattr(self._layers, axis)
            if size <= SIZES[-1]:
                continue
            fewer = [replace(self._layers, **{axis: n}) for n in SIZES]
            one, two = (self._known.pieces.get((layers, self._short, recompute, samples)) for layers in fewer)
            if one is None or two is None or not self._numels_follow(fewer, size):
                continue
            counts = [sharded_count(size, sent=axis if name == axis else None) for name in METERS]
            found = told(one, two, sharded_size(size), counts)
            if found is not None and self._begins_so(found, recompute, samples):
                return found
        return None

    def _numels_follow(self, fewer: Sequence[Parallelism], size: int) -> bool:
        one, two, here = (self._known.numels[layers, self._short] for layers in (*fewer, self._layers))
        law = sharded_size(size)
        return all(law(a, b) == c for a, b, c in zip(one, two, here, strict=True))

    def _begins_so(self, found: Pieces, recompute: RecomputeConfig | None, samples: int) -> bool:
        begun = self._tracer.run(resized(self._batch, samples), recompute, first_block_only=True)
        return starts_like(begun, found)


def can_recompute(steps: BlockSteps) -> bool:
    """Return whether there are blocks to recompute."""
    try:
        steps.pieces(RecomputeConfig(policy="full"), 1)
    except PlanError:
        return False
    return True
