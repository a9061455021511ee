"""Every key of a DeepSpeed configuration and its outcome: mapped, ignored with the reason, or refused.

A key that is not listed is refused as unknown. ``docs/migration.md`` shows this table; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["mapped", "ignored", "refused"]


@dataclass(frozen=True)
class Key:
    """The outcome of one key."""

    outcome: Outcome
    text: str  # mapped: the target. Ignored: why results do not change. Refused: the reason and the cure.
    off: tuple[Any, ...] = ()  # refused: values that disable the feature. With one of them the key is ignored.


@dataclass(frozen=True)
class AnyBlock:
    """A block with inner keys that are not checked."""

    key: Key
    switch: str = ""  # refused: the inner key that enables the block. Empty: the block's presence enables it.


def to(text: str) -> Key:
    """Return a key that is mapped to ``text``."""
    return Key("mapped", text)


def ignored(text: str) -> Key:
    """Return a key that is ignored for the reason ``text``."""
    return Key("ignored", text)


def refused(text: str, *off: Any) -> Key:
    """Return a key that is refused for the reason ``text``, except with the values ``off``."""
    return Key("refused", text, off or (False, None))


Table = dict[str, "Key | AnyBlock | Table"]

_UNITS = ignored("a unit takes the place of a bucket: `sharding.block_classes`, `sharding.min_unit_numel`")
_MODES = ignored("this package has one implementation")
_ALWAYS = ignored("this package always does so")
_CHECKS = ignored("it only debugs DeepSpeed")
_NO_CHECK = ignored("bf16 has the range of fp32: steps with inf or nan are not skipped")
_LOGGER = ignored("set the logger with `Trainer(logger=...)`")
_REPORTS = ignored("use `ls_strategy.Monitor`, which reports times, memory and bytes sent")
_NVME_BUFFERS = ignored("NVMe buffers follow the sizes of units")
_EXPORT = ignored("`ls-strategy consolidate --dtype bf16` exports 16-bit weights")
_LIVE = ignored("the current and prefetched units are gathered: `sharding.prefetch_units`")
_REMOVED = "DeepSpeed itself has removed it. Delete the block"
_DATA_EFFICIENCY = (
    "it changes data and tokens. Use the callbacks `RandomTokenDropping` (`random_ltd`) and `SequenceCurriculum` "
    "(`seqlen`), and sample in the DataModule"
)
_CURRICULUM = "it shortens sequences. Use the callback `SequenceCurriculum`"
_ZEROPP = "quantized communication changes results. Delete it"
_LOCO = "quantized gradients have no error feedback. Delete it; `strategy.gradient_error()` measures what is lost"

_NO_MASTERS = to("`precision.master_weights=False`, both together")

_LOSS_SCALE: Table = {
    "loss_scale": to("`precision.loss_scale.static`; 0 means a dynamic scale"),
    "initial_scale_power": to("`precision.loss_scale.initial_power`"),
    "loss_scale_window": to("`precision.loss_scale.window`"),
    "hysteresis": to("`precision.loss_scale.hysteresis`"),
    "consecutive_hysteresis": to("`precision.loss_scale.consecutive_hysteresis`"),
    "min_loss_scale": to("`precision.loss_scale.min_scale`"),
}

_BF16: Table = {
    "enabled": to("`Trainer(precision='bf16-true')`, as DeepSpeed computes; `bf16-mixed` is accepted"),
    "immediate_grad_update": _MODES,
    "check_grad_overflow": _NO_CHECK,
    "check_overflow": _NO_CHECK,
    "bf16_master_weights_and_grads": _NO_MASTERS,
    "bf16_optimizer_states": _NO_MASTERS,
    **{name: ignored("bf16 needs no loss scale") for name in _LOSS_SCALE},
}

_ZERO: Table = {
    "stage": to("`stage`"),
    "contiguous_gradients": _MODES,
    "reduce_scatter": _ALWAYS,
    "reduce_bucket_size": _UNITS,
    "use_multi_rank_bucket_allreduce": _MODES,
    "allgather_partitions": _ALWAYS,
    "allgather_bucket_size": _UNITS,
    "overlap_comm": _ALWAYS,
    "compute_grad_norm": ignored("the norm is computed only for clipping and `strategy.grad_norm()`"),
    "load_from_fp32_weights": _ALWAYS,
    "elastic_checkpoint": ignored("any number of ranks can load any checkpoint"),
    "offload_param": {
        "device": to("`offload.parameters`"),
        "nvme_path": to("`offload.nvme_path`"),
        "buffer_count": _NVME_BUFFERS,
        "buffer_size": _NVME_BUFFERS,
        "max_in_cpu": _NVME_BUFFERS,
        "pin_memory": _ALWAYS,
    },
    "offload_optimizer": {
        "device": to("`offload.optimizer`"),
        "nvme_path": to("`offload.nvme_path`"),
        "ratio": to("`TierConfig(ratio=...)`"),
        "buffer_count": _NVME_BUFFERS,
        "pin_memory": _ALWAYS,
        "pipeline": _ALWAYS,
        "pipeline_read": _ALWAYS,
        "pipeline_write": _ALWAYS,
        "fast_init": _ALWAYS,
        "super_offload": ignored("updates overlap with backward unless gradients are clipped: `sharding.overlap_step`"),
        "cpuadam_cores_perc": ignored("set `OMP_NUM_THREADS`"),
    },
    "zenflow": AnyBlock(
        refused("it updates with stale gradients. Delete it; `offload.delay_after` delays updates by one step")
    ),
    "sub_group_size": ignored("states are updated unit by unit"),
    "cpu_offload": to("`offload.optimizer='cpu'`"),
    "cpu_offload_param": to("`offload.parameters='cpu'`"),
    "cpu_offload_params": to("`offload.parameters='cpu'`"),
    "cpu_offload_use_pin_memory": _ALWAYS,
    "stage3_prefetch_bucket_size": to("`sharding.prefetch_units`: 0 stays 0, other values become 1, the default"),
    "stage3_param_persistence_threshold": ignored("small blocks share a unit: `sharding.min_unit_numel`"),
    "stage3_model_persistence_threshold": ignored("small blocks share a unit: `sharding.min_unit_numel`"),
    "stage3_max_live_parameters": _LIVE,
    "stage3_max_reuse_distance": _LIVE,
    "stage3_gather_16bit_weights_on_model_save": _EXPORT,
    "stage3_gather_fp16_weights_on_model_save": _EXPORT,
    "stage3_module_granularity_threshold": _UNITS,
    "stage3_use_all_reduce_for_fetch_params": _MODES,
    "stage3_allgather_sequential": _MODES,
    "ignore_unused_parameters": _ALWAYS,
    "legacy_stage1": _MODES,
    "round_robin_gradients": _MODES,
    "parameter_alignment": _MODES,
    "zero_hpz_partition_size": to("`sharding.hpz` if above 1"),
    "zero_quantized_weights": to("`sharding.quantized_gathers='int8'`"),
    "zero_quantized_nontrainable_weights": refused(_ZEROPP),
    "zero_quantized_gradients": to("`sharding.quantized_gradients='int4'`, at stage 3"),
    "zeropp_loco_param": AnyBlock(refused(_LOCO)),
    "mics_shard_size": to("`sharding.shard_size` if above 0"),
    "mics_hierarchical_params_gather": ignored("gathered in one step, inside the group; same results"),
    "memory_efficient_linear": _MODES,
    "pipeline_loading_checkpoint": _MODES,
    "override_module_apply": _MODES,
    "log_trace_cache_warnings": _CHECKS,
    "enable_sanity_checks": _CHECKS,
    "save_muon_momentum_buffer_in_memory": ignored("all states of an optimizer are offloaded"),
    "leaf_module": AnyBlock(ignored("a unit is gathered together, including experts")),
    "partition_activations": to("same as activation_checkpointing.partition_activations"),
}

KEYS: Table = {
    "train_batch_size": to("must equal micro-batch x accumulation x data-parallel ranks; determines a missing one"),
    "train_micro_batch_size_per_gpu": to("must equal the training DataLoader's batch_size"),
    "gradient_accumulation_steps": to("`Trainer(accumulate_grad_batches=...)`"),
    "managed_gradient_accumulation": ignored("every backward before a step is accumulated"),
    "gradient_clipping": to("`Trainer(gradient_clip_val=...)`, by norm"),
    "optimizer": {
        "type": to("the optimizer, if `configure_optimizers` returns none"),
        "params": AnyBlock(to("the arguments, with DeepSpeed's defaults")),
        "legacy_fusion": _MODES,
    },
    "scheduler": {
        "type": to("the schedule, stepped per optimizer step, if `configure_optimizers` returns none"),
        "params": AnyBlock(to("the arguments, with DeepSpeed's defaults")),
    },
    "fp16": {
        "enabled": to("`Trainer(precision='16-true')`, as DeepSpeed computes; `16-mixed` is accepted"),
        "auto_cast": ignored("inputs are always cast to the parameters' dtype"),
        **_LOSS_SCALE,
        "fp16_master_weights_and_grads": refused(
            "an eps of 1e-8 rounds to 0 in fp16. Delete it; `precision.moments='int8'` saves more memory"
        ),
    },
    "bf16": dict(_BF16),
    "bfloat16": dict(_BF16),
    "torch_autocast": {
        "enabled": to("`Trainer(precision='bf16-mixed')` or `'16-mixed'`, by dtype"),
        "dtype": to("selects `bf16-mixed` or `16-mixed`"),
        "lower_precision_safe_modules": ignored("their gradients are reduced in fp32: `precision.reduce_dtype`"),
    },
    "amp": AnyBlock(refused(f"{_REMOVED}, and choose Trainer(precision='16-mixed')"), "enabled"),
    "data_types": {
        "grad_accum_dtype": ignored("gradients are accumulated at the same or higher precision"),
        "param_dtype": ignored("set by fp16 and bf16"),
        "buffer_dtype": refused("buffers keep their dtypes or follow the precision. Delete it"),
        "keep_in_fp32_modules": refused(
            "the model's own lists are honored, in parameters too. For more, name buffers, parameters or modules: "
            "PrecisionConfig(fp32_modules=['*bias']); for less, set model._keep_in_fp32_modules_strict=None",
            "auto",
            None,
        ),
    },
    "zero_optimization": _ZERO,
    "zero_allow_untested_optimizer": ignored("any elementwise torch optimizer is allowed"),
    "zero_force_ds_cpu_optimizer": ignored("the optimizer that you chose always runs, on the CPU too"),
    "communication_data_type": to("`precision.reduce_dtype`: `fp32`, or `compute` for the parameters' dtype"),
    "seq_parallel_communication_data_type": ignored("these gradients are reduced with all others"),
    "prescale_gradients": ignored("the mean does not depend on it"),
    "gradient_predivide_factor": ignored("the mean does not depend on it"),
    "gradient_allreduce_op": refused("gradients are averaged. Multiply the loss by the world size", "mean", None),
    "sparse_gradients": ignored("dense gradients give the same results"),
    "disable_allgather": _MODES,
    "aio": {
        "block_size": to("`offload.nvme_io.block_bytes`"),
        "queue_depth": to("`offload.nvme_io.queue_depth`"),
        "intra_op_parallelism": to("`offload.nvme_io.parallelism`"),
        "thread_count": to("`offload.nvme_io.parallelism`; older name"),
        "single_submit": _MODES,
        "overlap_events": _MODES,
        "use_gds": ignored("I/O goes through host memory"),
    },
    "activation_checkpointing": {
        "partition_activations": to("`activations.checkpointing='full'`, `activations.partitioning` over tensor ranks"),
        "cpu_checkpointing": to("`activations.checkpointing='full'`, `activations.offload='cpu'`"),
        "contiguous_memory_optimization": _MODES,
        "number_checkpoints": ignored("buffers are allocated on demand"),
        "synchronize_checkpoint_boundary": _CHECKS,
        "profile": _REPORTS,
    },
    "pipeline": {
        "stages": to("`parallel.pipeline`; gradient_accumulation_steps becomes its `micro_batches`"),
        "partition": to("`parallel.pipeline.partition`; `best` becomes `parameters`"),
        "activation_checkpoint_interval": to("`activations.checkpointing='full'` if above 0"),
        "seed_layers": refused("layers are initialized as without a pipeline. Delete it"),
        "pipe_partitioned": _MODES,
        "grad_partitioned": _MODES,
        "use_reentrant": _MODES,
    },
    "tensor_parallel": {
        "autotp_size": to("`parallel.tensor`"),
        "tp_size": to("`parallel.tensor`"),
        "tp_overlap_comm": _MODES,
        "preset_model": ignored("`parallel.tensor.plan='auto'` derives the plan from the model"),
        "partition_config": AnyBlock(
            refused("the format differs. Use TensorConfig(plan={'blocks.*.up': 'column', ...})")
        ),
        "vocab_parallel_lm_head": _MODES,
        "vocab_parallel_ce_backend": _MODES,
    },
    "sequence_parallel_size": to("`parallel.context`"),
    "expert_parallel": AnyBlock(
        refused("it replaces Hugging Face layers. Build the model with ls_strategy's MoE, and set parallel.expert"),
        "enabled",
    ),
    "use_data_before_expert_parallelism": _MODES,
    "checkpoint": {
        "tag_validation": ignored("all ranks commit one checkpoint, or none"),
        "load_universal": ignored("any layout can load any checkpoint; `ls-strategy consolidate` reads DeepSpeed's"),
        "use_node_local_storage": refused("all ranks write to one folder. Use a path that all nodes share"),
        "parallel_write": AnyBlock(_ALWAYS),
        "checkpoint_serialization": _MODES,
        "writer": AnyBlock(ignored("use `checkpoint.background=True` to save in the background")),
    },
    "datastates_ckpt": AnyBlock(ignored("use `checkpoint.background=True` to save in the background")),
    "nebula": AnyBlock(ignored("use `checkpoint.background=True` to save in the background")),
    "dataloader_drop_last": ignored("use `DataLoader(drop_last=True)`"),
    "compile": AnyBlock(ignored("use `ZeROStrategy(compile='blocks')` or `torch.compile`")),
    "steps_per_print": _LOGGER,
    "wall_clock_breakdown": _REPORTS,
    "memory_breakdown": _REPORTS,
    "timers": AnyBlock(_REPORTS),
    "dump_state": _CHECKS,
    "log_level": ignored("use Python's `logging`"),
    "disable_python_gc": ignored("Python's garbage collector is not changed"),
    "vocabulary_size": ignored("DeepSpeed uses it only for a warning"),
    "tensorboard": AnyBlock(_LOGGER),
    "wandb": AnyBlock(_LOGGER),
    "csv_monitor": AnyBlock(_LOGGER),
    "comet": AnyBlock(_LOGGER),
    "flops_profiler": AnyBlock(ignored("use `Trainer(profiler=...)`")),
    "comms_logger": AnyBlock(_REPORTS),
    "autotuning": AnyBlock(ignored("a feature of DeepSpeed's launcher")),
    "hybrid_engine": AnyBlock(
        refused("training and generation are separate. Use `init_inference` on a copy of the weights"), "enabled"
    ),
    "weight_quantization": AnyBlock(
        refused("weights are not quantized in training. For inference, use `init_inference(quantize=...)`")
    ),
    "data_efficiency": AnyBlock(refused(_DATA_EFFICIENCY), "enabled"),
    "curriculum_learning": AnyBlock(refused(_CURRICULUM), "enabled"),
    "progressive_layer_drop": AnyBlock(refused(f"{_REMOVED}; drop layers in the model's forward"), "enabled"),
    "eigenvalue": AnyBlock(refused(_REMOVED), "enabled"),
    "compression_training": AnyBlock(refused(_REMOVED)),
    "quantize_training": AnyBlock(refused(_REMOVED), "enabled"),
    "sparse_attention": AnyBlock(refused(f"{_REMOVED}; use flex_attention in the model")),
    "elasticity": AnyBlock(refused(f"{_REMOVED}, and set the batch sizes"), "enabled"),
    "graph_harvesting": refused(_REMOVED),
}


def documented(table: Table = KEYS, prefix: str = "") -> Iterator[tuple[str, Key]]:
    """Yield every key with its dotted name, as ``docs/migration.md`` shows them. An `AnyBlock` is one key."""
    for name, entry in table.items():
        if isinstance(entry, Key):
            yield prefix + name, entry
        elif isinstance(entry, AnyBlock):
            yield f"{prefix}{name}.*", entry.key
        else:
            yield from documented(entry, f"{prefix}{name}.")
