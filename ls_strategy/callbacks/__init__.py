"""Callbacks that know what is where.

- `Monitor`: how fast the run is, where its time goes, and where the memory is.
- `PipelineTimeline`: what every stage of a pipeline did when.
- `ShardedEMA`: an average of the weights.
"""

from __future__ import annotations

from ls_strategy.callbacks.average import ShardedEMA
from ls_strategy.callbacks.monitor import Monitor
from ls_strategy.callbacks.pipeline_timeline import PipelineTimeline

__all__ = ["Monitor", "PipelineTimeline", "ShardedEMA"]
