"""The tiles of quantized weights, and the levels of 4 bits: see `ls_strategy.ops.quantized`."""

from __future__ import annotations

BLOCK = 64
"""Elements with a common scale."""

TILE = 8 * BLOCK
"""Elements of a tile. Parameters and shards start at tiles."""

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Levels of ``nf4``, ascending."""
