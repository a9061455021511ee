"""ZeRO 1/2/3 for PyTorch Lightning, on PyTorch's own distributed engine.

    import lightning as L
    import ls_strategy  # registers the aliases zero0 ... zero3

    class Model(L.LightningModule):  # any LightningModule, unchanged
        ...

    trainer = L.Trainer(accelerator="auto", devices=2, strategy="zero3", precision="bf16-mixed")
    trainer.fit(Model(), data)

Importing this package imports neither torch nor Lightning; the names below are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ls_strategy.autoload import install as _install
from ls_strategy.short_paths import install as _install_short_paths

if TYPE_CHECKING:
    from ls_strategy.config import (
        ActivationOffloadConfig,
        ActivationsConfig,
        CheckpointConfig,
        ChunkedLossConfig,
        CompileConfig,
        Float8Config,
        LossScaleConfig,
        NVMeIOConfig,
        OffloadConfig,
        ParallelConfig,
        PipelineConfig,
        PrecisionConfig,
        RecomputeConfig,
        ShardingConfig,
        TensorConfig,
        TierConfig,
        TilingConfig,
    )
    from ls_strategy.errors import CheckpointError, ConfigError, LSError, PlanError, StateError
    from ls_strategy.extras.callbacks import Monitor, PipelineTimeline, ShardedEMA
    from ls_strategy.extras.callbacks.corruption_check import CorruptionCheck
    from ls_strategy.extras.callbacks.diloco import DiLoCo
    from ls_strategy.extras.callbacks.elastic import ElasticTraining
    from ls_strategy.extras.callbacks.expert_monitor import ExpertMonitor
    from ls_strategy.extras.callbacks.huggingface_export import HuggingFaceExport
    from ls_strategy.extras.callbacks.preemption import PreemptionHandler
    from ls_strategy.extras.callbacks.spike_guard import SpikeGuard
    from ls_strategy.extras.data_efficiency.curriculum import SequenceCurriculum
    from ls_strategy.extras.data_efficiency.documents import document_attention
    from ls_strategy.extras.data_efficiency.packing import PackedDocuments, document_mask
    from ls_strategy.extras.data_efficiency.token_dropping import RandomTokenDropping
    from ls_strategy.extras.inference.engine import InferenceEngine, init_inference
    from ls_strategy.extras.inference.stream import stream_blocks
    from ls_strategy.fabric.precision import ZeROFabricPrecision
    from ls_strategy.fabric.strategy import ZeROFabricStrategy
    from ls_strategy.lightning.checkpointing.loading import load_from_checkpoint
    from ls_strategy.lightning.precision import ZeROPrecision
    from ls_strategy.lightning.strategy import ZeROStrategy
    from ls_strategy.losses.head import linear_cross_entropy
    from ls_strategy.losses.mean_over import loss_is_mean_over
    from ls_strategy.moe.balance import update_router_bias
    from ls_strategy.moe.convert import convert_moe
    from ls_strategy.moe.feed_forward import FeedForward, GatedFeedForward
    from ls_strategy.moe.layer import MoE
    from ls_strategy.moe.losses import moe_losses
    from ls_strategy.ops.lion import Lion
    from ls_strategy.optimizers.layerwise import Lamb, Lars
    from ls_strategy.optimizers.muon import Muon
    from ls_strategy.optimizers.qk_clip import QKClip
    from ls_strategy.optimizers.soap import SOAP
    from ls_strategy.pretrained.load import load_safetensors

__version__ = "0.3.0"

__all__ = [
    "SOAP",
    "ActivationOffloadConfig",
    "ActivationsConfig",
    "CheckpointConfig",
    "CheckpointError",
    "ChunkedLossConfig",
    "CompileConfig",
    "ConfigError",
    "CorruptionCheck",
    "DiLoCo",
    "ElasticTraining",
    "ExpertMonitor",
    "FeedForward",
    "Float8Config",
    "GatedFeedForward",
    "HuggingFaceExport",
    "InferenceEngine",
    "LSError",
    "Lamb",
    "Lars",
    "Lion",
    "LossScaleConfig",
    "MoE",
    "Monitor",
    "Muon",
    "NVMeIOConfig",
    "OffloadConfig",
    "PackedDocuments",
    "ParallelConfig",
    "PipelineConfig",
    "PipelineTimeline",
    "PlanError",
    "PrecisionConfig",
    "PreemptionHandler",
    "QKClip",
    "RandomTokenDropping",
    "RecomputeConfig",
    "SequenceCurriculum",
    "ShardedEMA",
    "ShardingConfig",
    "SpikeGuard",
    "StateError",
    "TensorConfig",
    "TierConfig",
    "TilingConfig",
    "ZeROFabricPrecision",
    "ZeROFabricStrategy",
    "ZeROPrecision",
    "ZeROStrategy",
    "__version__",
    "convert_moe",
    "document_attention",
    "document_mask",
    "init_inference",
    "linear_cross_entropy",
    "load_from_checkpoint",
    "load_safetensors",
    "loss_is_mean_over",
    "moe_losses",
    "stream_blocks",
    "update_router_bias",
]

_HOME = {
    name: module
    for module, names in {
        "extras.callbacks": "Monitor PipelineTimeline ShardedEMA",
        "extras.callbacks.corruption_check": "CorruptionCheck",
        "extras.callbacks.expert_monitor": "ExpertMonitor",
        "extras.callbacks.diloco": "DiLoCo",
        "extras.callbacks.elastic": "ElasticTraining",
        "extras.callbacks.huggingface_export": "HuggingFaceExport",
        "extras.callbacks.preemption": "PreemptionHandler",
        "extras.callbacks.spike_guard": "SpikeGuard",
        "config": (
            "ActivationOffloadConfig ActivationsConfig CheckpointConfig ChunkedLossConfig CompileConfig "
            "Float8Config LossScaleConfig NVMeIOConfig OffloadConfig ParallelConfig PipelineConfig PrecisionConfig "
            "RecomputeConfig ShardingConfig TensorConfig TierConfig TilingConfig"
        ),
        "extras.data_efficiency.curriculum": "SequenceCurriculum",
        "extras.data_efficiency.documents": "document_attention",
        "extras.data_efficiency.packing": "PackedDocuments document_mask",
        "extras.data_efficiency.token_dropping": "RandomTokenDropping",
        "errors": "CheckpointError ConfigError LSError PlanError StateError",
        "fabric.precision": "ZeROFabricPrecision",
        "fabric.strategy": "ZeROFabricStrategy",
        "extras.inference.engine": "InferenceEngine init_inference",
        "extras.inference.stream": "stream_blocks",
        "losses.head": "linear_cross_entropy",
        "losses.mean_over": "loss_is_mean_over",
        "lightning.checkpointing.loading": "load_from_checkpoint",
        "lightning.precision": "ZeROPrecision",
        "lightning.strategy": "ZeROStrategy",
        "moe.balance": "update_router_bias",
        "moe.convert": "convert_moe",
        "moe.feed_forward": "FeedForward GatedFeedForward",
        "moe.layer": "MoE",
        "moe.losses": "moe_losses",
        "ops.lion": "Lion",
        "optimizers.layerwise": "Lamb Lars",
        "optimizers.muon": "Muon",
        "optimizers.qk_clip": "QKClip",
        "optimizers.soap": "SOAP",
        "pretrained.load": "load_safetensors",
    }.items()
    for name in names.split()
}
"""The module of every public name."""


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # later accesses do not call this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


_install_short_paths()
_install()
