"""``ZeROStrategy(deepspeed_config=...)``: turns options of the file into constructor arguments.

Invariant: an argument that was passed and the file never override each other. If both set the same option, they must
agree, or it is an error. "Passed" includes arguments equal to the default. Parsers that pass every default themselves
are handled by ``took_default``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import is_dataclass
from types import NoneType, SimpleNamespace
from typing import Any

from ls_strategy.checked import show
from ls_strategy.config import nested
from ls_strategy.config.group import Group
from ls_strategy.config.option_names import GROUPS, default_of, written_options
from ls_strategy.errors import ConfigError
from ls_strategy.extras.deepspeed.config import Translation

TookDefault = Callable[[Any, dict[str, Any]], Collection[str]]  # see `with_file`
_ZERO, _SAVED, _BLOCK = "zero_optimization.", "activation_checkpointing.", "zero_optimization.offload_optimizer."

_FIELDS: dict[str, dict[str, str]] = {
    "offload.optimizer": {f"{_BLOCK}ratio": "ratio"},
    "offload.nvme_io": {
        "aio.block_size": "block_bytes",
        "aio.queue_depth": "queue_depth",
        "aio.intra_op_parallelism": "parallelism",
        "aio.thread_count": "parallelism",
    },
    "precision.loss_scale": {
        "fp16.loss_scale": "static",
        "fp16.initial_scale_power": "initial_power",
        "fp16.loss_scale_window": "window",
        "fp16.hysteresis": "hysteresis",
        "fp16.consecutive_hysteresis": "consecutive_hysteresis",
        "fp16.min_loss_scale": "min_scale",
    },
}
"""For options that are dataclasses: the field that each key decides. The file says nothing about other fields."""

KEYS_OF: dict[str, tuple[str, ...]] = {
    "stage": (f"{_ZERO}stage",),
    "sharding.prefetch_units": (f"{_ZERO}stage3_prefetch_bucket_size",),
    "sharding.hpz": (f"{_ZERO}zero_hpz_partition_size",),
    "sharding.quantized_gathers": (f"{_ZERO}zero_quantized_weights",),
    "sharding.quantized_gradients": (f"{_ZERO}zero_quantized_gradients",),
    "sharding.shard_size": (f"{_ZERO}mics_shard_size",),
    "offload.optimizer": (f"{_BLOCK}device", f"{_ZERO}cpu_offload", f"{_BLOCK}ratio"),
    "offload.parameters": (f"{_ZERO}offload_param.device", f"{_ZERO}cpu_offload_param", f"{_ZERO}cpu_offload_params"),
    "offload.nvme_path": (f"{_BLOCK}nvme_path", f"{_ZERO}offload_param.nvme_path"),
    "offload.nvme_io": tuple(_FIELDS["offload.nvme_io"]),
    "precision.master_weights": ("bf16.bf16_master_weights_and_grads", "bfloat16.bf16_master_weights_and_grads"),
    "precision.loss_scale": tuple(_FIELDS["precision.loss_scale"]),
    "precision.reduce_dtype": ("communication_data_type",),
    "activations.checkpointing": (
        f"{_SAVED}partition_activations",
        f"{_ZERO}partition_activations",
        f"{_SAVED}cpu_checkpointing",
        "pipeline.activation_checkpoint_interval",
    ),
    "activations.offload": (f"{_SAVED}cpu_checkpointing",),
    "activations.partitioning": (f"{_SAVED}partition_activations", f"{_ZERO}partition_activations"),
    "parallel.tensor.size": ("tensor_parallel.autotp_size", "tensor_parallel.tp_size"),
    "parallel.context": ("sequence_parallel_size",),
    "parallel.pipeline.size": ("pipeline.stages",),
    "parallel.pipeline.partition": ("pipeline.partition",),
    "parallel.pipeline.micro_batch_size": ("train_micro_batch_size_per_gpu",),
    "parallel.pipeline.micro_batches": ("gradient_accumulation_steps",),
}
"""The keys of a configuration that decide each option of the strategy."""


_OFF: dict[str, Any] = {
    "sharding.hpz": None,
    "sharding.quantized_gathers": None,
    "sharding.quantized_gradients": None,
    "sharding.shard_size": None,
    "offload.optimizer": None,
    "offload.parameters": None,
    "precision.master_weights": True,
    "activations.offload": None,
    "activations.partitioning": False,
    "parallel.tensor.size": 1,
    "parallel.context": 1,
    "parallel.pipeline.size": 1,
}
"""Value of an option if the file has its key and disables the feature."""


def with_file(made: Any, given: dict[str, Any], translation: Translation, took_default: TookDefault) -> dict[str, Any]:
    """Return constructor arguments that were passed, completed by those that the file sets.

    Args:
        made: the object, in its constructor.
        given: arguments that were passed, by name; a parser passes every default too.
        translation: the file.
        took_default: called with the object and ``{argument: value of the file}`` of arguments that were passed with
            their default value. Returns those that a parser filled in.

    Raises:
        ConfigError: an argument contradicts the file.
    """
    written = _passed(made, _flat(given, translation.strategy["stage"]), translation, took_default)
    options = nested({**written, **merged(translation, written)})
    return {**{name: value for name, value in given.items() if name not in options}, **options}


def _flat(given: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """Return the stage and the options that were given in groups, by dotted name. ``stage`` is the file's.

    Values of other types are checked later.
    """
    result = {"stage": given["stage"]} if "stage" in given else {}
    for name in GROUPS.keys() & given.keys():
        if isinstance(given[name], (Group, Mapping, str, NoneType)):
            result |= written_options(name, given[name], given.get("stage", stage))
    return result


def _passed(
    made: Any,
    given: dict[str, Any],
    translation: Translation,
    took_default: TookDefault,
) -> dict[str, Any]:
    """Return ``given`` without the defaults that a parser filled in."""
    doubtful = {
        name: decided
        for name, decided in _decided(translation).items()
        if name in given and _is_default(given[name], default_of(name)) and given[name] != decided
    }
    filled_in = took_default(made, doubtful) if doubtful else ()
    return {name: value for name, value in given.items() if name not in filled_in}


def _is_default(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default


def _decided(translation: Translation) -> dict[str, Any]:
    """Return every option that the file decides: those that it sets, and those that its keys disable."""
    off = {name: value for name, value in _OFF.items() if _keys(translation, name)}
    if _keys(translation, "sharding.prefetch_units"):
        off["sharding.prefetch_units"] = 1  # or more
    silent = () if _keys(translation, "stage") else ("stage",)  # without the block DeepSpeed uses stage 0
    return {name: value for name, value in {**off, **translation.strategy}.items() if name not in silent}


def _keys(translation: Translation, option: str) -> list[str]:
    """Return the keys of the file that decide ``option``, as ``key=value``."""
    rows = {row.key: row for row in translation.rows}
    there = [rows[key] for key in KEYS_OF[option] if key in rows]
    return [f"{row.key}={show(row.value)}" for row in there if row.outcome != "auto" and row.value is not None]


def merged(translation: Translation, given: dict[str, Any]) -> dict[str, Any]:
    """Return the options that the file sets and ``given`` does not.

    Raises:
        ConfigError: An argument contradicts the file.
    """
    decided = _decided(translation)
    for name in sorted(decided.keys() & given.keys()):
        if not _agree(translation, name, given[name], decided[name]):
            keys = ", ".join(_keys(translation, name))
            raise ConfigError(
                f"Got {name}={show(given[name])}, but deepspeed_config has {keys}, which requires "
                f"{name}={show(decided[name])}. Set {name}={show(decided[name])} or leave it out, or change the "
                "DeepSpeed configuration."
            )
    return {name: value for name, value in translation.strategy.items() if name not in given}


def _agree(translation: Translation, name: str, given: Any, decided: Any) -> bool:
    """Return whether an argument has the file's value, or a more specific one."""
    if name == "activations.checkpointing":
        return given is not None  # the file enables recomputation but does not choose the policy
    if name == "sharding.prefetch_units":
        return (given == 0) == (decided == 0)
    if isinstance(given, dict):
        given = SimpleNamespace(**{"tier": "cpu"} | {str(name): value for name, value in given.items()})
    if isinstance(decided, str) and hasattr(given, "tier"):
        return given.tier == decided
    if not is_dataclass(decided):
        return given == decided
    if isinstance(given, str):  # a tier
        return given == getattr(decided, "tier", None) and getattr(decided, "ratio", 1.0) == 1.0
    there = {row.key for row in translation.rows if row.outcome == "mapped" and row.value is not None}
    fields = {field for key, field in _FIELDS.get(name, {}).items() if key in there}
    fields |= {"tier"} if hasattr(decided, "tier") else set()
    defaults = type(decided)
    return all(getattr(given, field, getattr(defaults, field, None)) == getattr(decided, field) for field in fields)
