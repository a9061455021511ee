"""The flat options of version 0.1 and their new places: ``offload_optimizer`` is ``offload.optimizer``.

No old name is accepted; the table serves the error that gives the new one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any, TypeVar, cast

from ls_strategy.checked import show
from ls_strategy.config.activations import ActivationsConfig
from ls_strategy.config.checkpoint import CheckpointConfig
from ls_strategy.config.group import Group
from ls_strategy.config.offload import OffloadConfig
from ls_strategy.config.parallel import ParallelConfig
from ls_strategy.config.precision import PrecisionConfig
from ls_strategy.config.sharding import ShardingConfig
from ls_strategy.errors import ConfigError

GROUPS: dict[str, type[Group]] = {
    "sharding": ShardingConfig,
    "precision": PrecisionConfig,
    "offload": OffloadConfig,
    "activations": ActivationsConfig,
    "parallel": ParallelConfig,
    "checkpoint": CheckpointConfig,
}
"""Every group by the name of its argument."""

RENAMED = {
    "unit_classes": "sharding.block_classes",
    "min_unit_numel": "sharding.min_unit_numel",
    "prefetch_units": "sharding.prefetch_units",
    "overlap_step": "sharding.overlap_step",
    "shard_weights": "sharding.rank_weights",
    "master_weights": "precision.master_weights",
    "reduce_dtype": "precision.reduce_dtype",
    "fp32_modules": "precision.fp32_modules",
    "loss_scale": "precision.loss_scale",
    "moments": "precision.moments",
    "offload_optimizer": "offload.optimizer",
    "offload_param": "offload.parameters",
    "offload_gradient": "offload.gradients",
    "nvme_path": "offload.nvme_path",
    "nvme_io": "offload.nvme_io",
    "nvme_allow_ram": "offload.nvme_allow_ram",
    "step_on": "offload.step_on",
    "delayed_update_after": "offload.delay_after",
    "activation_checkpointing": "activations.checkpointing",
    "activation_offload": "activations.offload",
    "activation_partitioning": "activations.partitioning",
    "tensor_parallel_size": "parallel.tensor.size",
    "tensor_parallel_plan": "parallel.tensor.plan",
    "tensor_parallel_sequence": "parallel.tensor.sequence_parallel",
    "sequence_parallel_size": "parallel.context",
    "expert_parallel_size": "parallel.expert",
    "pipeline_parallel_size": "parallel.pipeline.size",
    "micro_batches": "parallel.pipeline.micro_batches",
    "micro_batch_size": "parallel.pipeline.micro_batch_size",
    "pipeline_schedule": "parallel.pipeline.schedule",
    "pipeline_partition": "parallel.pipeline.partition",
    "pipeline_stages_per_rank": "parallel.pipeline.stages_per_rank",
    "pipeline_blocks": "parallel.pipeline.blocks",
    "save_as": "checkpoint.format",
    "async_save": "checkpoint.background",
    "save_frozen": "checkpoint.frozen",
    "on_save_error": "checkpoint.on_error",
}
"""Old name: new name, with dots between groups and options."""


def nested(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dictionaries for dotted names, as on a command line (``{"offload.optimizer": "cpu"}``).

    >>> nested({"stage": 3, "parallel.tensor.size": 2, "parallel.expert": 2})
    {'stage': 3, 'parallel': {'tensor': {'size': 2}, 'expert': 2}}

    A group that is also given itself, in full or short form, is merged with its dotted options.
    """
    partly = {name.partition(".")[0] for name in options if "." in name}
    flat: dict[str, Any] = {}
    for name, value in options.items():
        flat |= written_options(name, value, options.get("stage", 3)) if name in partly else {name: value}
    result: dict[str, Any] = {}
    for name, value in flat.items():
        *groups, last = name.split(".")
        inner = result
        for group in groups:
            inner = inner.setdefault(group, {})
        inner[last] = value
    return result


Init = TypeVar("Init", bound=Callable[..., None])


def takes_groups(init: Init) -> Init:
    """Make a constructor refuse unknown names with a suggestion. Its signature does not change."""
    options = [name for name in inspect.signature(init).parameters if name != "self"]

    @wraps(init)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        refuse_unknown(kwargs, options)
        init(*args, **kwargs)

    return cast("Init", wrapped)


def refuse_unknown(given: Mapping[str, Any], options: Sequence[str]) -> None:
    """Refuse names of version 0.1, unknown names, and a ``precision`` that is meant for the Trainer.

    Args:
        given: the options that were given.
        options: the names that exist.

    Raises:
        ConfigError: with the new names and the equivalent call.
    """
    old = {name: value for name, value in given.items() if name in RENAMED}
    if old:
        written = ", ".join(f"{name}={show(value)}" for name, value in old.items())
        raise ConfigError(f"Got {written}, but {in_new_words(old)}")
    for name, value in given.items():
        if name not in options:
            raise ConfigError(
                f"Got {name}={show(value)}, but ZeROStrategy has no option {name!r}. {_nearest(name, options)}"
            )
    precision = given.get("precision")
    if isinstance(precision, (str, int)):
        raise ConfigError(
            f"Got precision={precision!r}, but here it is the group of master weights, sums and moments "
            "(PrecisionConfig): the numbers' precision is Trainer(precision=...). Set "
            f"Trainer(precision={precision!r})."
        )


def _nearest(name: str, options: Sequence[str]) -> str:
    """Return the most likely meaning of an unknown name: an option, or an option inside a group."""
    inside = {field.name: f"{group}.{field.name}" for group, kind in GROUPS.items() for field in fields(kind)}
    known = {**inside, **{option: option for option in options}}
    near = difflib.get_close_matches(name, known, n=1)
    if not near:
        return f"Its options are {', '.join(options)}."
    found = known[near[0]]
    group, _, option = found.partition(".")
    return (
        f"Did you mean {found}: {group}={GROUPS[group].__name__}({option}=...)?"
        if option
        else f"Did you mean {found!r}?"
    )


def written_options(group: str, value: Any, stage: Any = 3) -> dict[str, Any]:
    """Return the dotted options that ``value`` sets: ``offload="cpu"`` sets ``offload.optimizer``, among others.

    Args:
        group: name of the group.
        value: a group, a dictionary, or a short form.
        stage: the ZeRO stage, which the short form of ``offload`` depends on.
    """
    if group in GROUPS and not isinstance(value, (Group, Mapping)):
        value = GROUPS[group].short_form(value, stage)
    result: dict[str, Any] = {}
    for name, option in _items(value).items():
        path = f"{group}.{name}"
        if path in ("parallel.tensor", "parallel.pipeline"):
            inner = {"size": option} if isinstance(option, int) else _items(option)
            result |= {f"{path}.{n}": v for n, v in inner.items()}
        else:
            result[path] = option
    return result


def default_of(name: str) -> Any:
    """Return the default of an option by its dotted name."""
    if name == "stage":
        return 3
    group, *path = name.split(".")
    value: Any = GROUPS[group]()
    for option in path:
        value = getattr(value, option)
    return value


def _items(value: Any) -> dict[str, Any]:
    if isinstance(value, Group):
        return value.written
    return {str(name): option for name, option in value.items()} if isinstance(value, Mapping) else {}


def in_new_words(old: Mapping[str, Any]) -> str:
    """Return the new names of options and the equivalent call."""
    names = " and ".join(f"{name} is {RENAMED[name]}" for name in old)
    return f"{names} since 0.2: ZeROStrategy({_call(nested({RENAMED[n]: v for n, v in old.items()}))})"


def _call(groups: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={GROUPS[name].__name__}({_arguments(options)})" for name, options in groups.items())


def _arguments(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_value(name, value)}" for name, value in options.items())


def _value(name: str, value: Any) -> str:
    kinds = {"tensor": "TensorConfig", "pipeline": "PipelineConfig"}
    if value is Ellipsis:
        return "..."
    if name not in kinds or not isinstance(value, Mapping):
        return show(value)
    if value.keys() == {"size"}:
        return _value("size", value["size"])
    more = {"size": "..."} if "size" not in value else {}
    inner = ", ".join([*(f"{n}={v}" for n, v in more.items()), _arguments(value)])
    return f"{kinds[name]}({inner})"
