"""Every option of the engine: frozen dataclasses, checked when they are made, standard library only.

One file per group. `ls_strategy.config.zero` joins the groups and refuses options that contradict each other.
"""

from ls_strategy.config.activations import (
    ActivationOffloadConfig,
    ActivationsConfig,
    ChunkedLossConfig,
    RecomputeConfig,
    TilingConfig,
)
from ls_strategy.config.checkpoint import CheckpointConfig
from ls_strategy.config.compile import CompileConfig
from ls_strategy.config.offload import NVMeIOConfig, OffloadConfig, OffloadTier, StepDevice, TierConfig, TierName
from ls_strategy.config.option_names import nested
from ls_strategy.config.parallel import ParallelConfig, PipelineConfig, Schedule, TensorConfig
from ls_strategy.config.precision import (
    Float8Config,
    FrozenFormat,
    LossScaleConfig,
    MasterWeights,
    MomentFormat,
    PrecisionConfig,
    ReduceDtype,
    SplitFormat,
)
from ls_strategy.config.sharding import ShardingConfig
from ls_strategy.config.zero import ZeROConfig, ZeroStage

__all__ = [
    "ActivationOffloadConfig",
    "ActivationsConfig",
    "CheckpointConfig",
    "ChunkedLossConfig",
    "CompileConfig",
    "Float8Config",
    "FrozenFormat",
    "LossScaleConfig",
    "MasterWeights",
    "MomentFormat",
    "NVMeIOConfig",
    "OffloadConfig",
    "OffloadTier",
    "ParallelConfig",
    "PipelineConfig",
    "PrecisionConfig",
    "RecomputeConfig",
    "ReduceDtype",
    "Schedule",
    "ShardingConfig",
    "SplitFormat",
    "StepDevice",
    "TensorConfig",
    "TierConfig",
    "TierName",
    "TilingConfig",
    "ZeROConfig",
    "ZeroStage",
    "nested",
]
