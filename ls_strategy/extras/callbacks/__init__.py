"""Callbacks for runs with sharded states.

- `Monitor`: speed of the run, and where time and memory go.
- `PipelineTimeline`: the timeline of every pipeline stage.
- `ShardedEMA`: an average of the weights.
"""

from __future__ import annotations

from ls_strategy.extras.callbacks.average import ShardedEMA
from ls_strategy.extras.callbacks.monitor import Monitor
from ls_strategy.extras.callbacks.pipeline_timeline import PipelineTimeline

__all__ = ["Monitor", "PipelineTimeline", "ShardedEMA"]
