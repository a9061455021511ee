"""Formulas of papers, to hold plans and runs against; nothing here asks the package.

Bytes and traffic: Rajbhandari et al., "ZeRO", SC'20, arXiv:1910.02054: section 5 and figure 1 (bytes), section 7
(traffic).
"""

from __future__ import annotations


def bytes_per_rank(stage: int, numel: int, world_size: int, *, gradient_bytes: int = 2) -> float:
    """Bytes of model state on one rank: 2 per parameter, its gradient, and 12 for Adam in mixed precision."""
    shards = [world_size if stage >= first else 1 for first in (3, 2, 1)]
    return numel * (2 / shards[0] + gradient_bytes / shards[1] + 12 / shards[2])


def elements_sent(stage: int, numel: int, world_size: int, *, micro_batches: int = 1) -> int:
    """Elements one rank sends per optimizer step, for ``numel`` divisible by ``world_size``.

    Stage 0 reduce-scatters and all-gathers gradients, stage 1 reduce-scatters gradients and all-gathers parameters once
    per step, stage 2 reduces every micro-batch, stage 3 gathers for forward and for backward as well.
    """
    volume = {0: 2, 1: 2, 2: 1 + micro_batches, 3: 3 * micro_batches}[stage]
    return volume * numel * (world_size - 1) // world_size


def gpipe_bubble(ranks: int, micro_batches: int) -> float:
    """Share of the time that a rank is idle, of GPipe and of 1F1B: Huang et al., arXiv:1811.06965, section 2.3."""
    return (ranks - 1) / (micro_batches + ranks - 1)
