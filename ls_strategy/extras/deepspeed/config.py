"""Translate a DeepSpeed configuration: options of the strategy, Trainer settings, optimizer and schedule.

`translate` is a pure function: it needs no DeepSpeed, no process group and no Trainer. Every key of the configuration
ends in one row of the report: mapped, left to the Trainer ("auto"), or ignored, with the reason. Unknown keys raise,
and so do keys that would change results if they were ignored.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ls_strategy.checked import accept
from ls_strategy.config import LossScaleConfig, NVMeIOConfig, TierConfig
from ls_strategy.errors import ConfigError
from ls_strategy.extras.deepspeed.keys import KEYS, AnyBlock, Key, Table
from ls_strategy.extras.deepspeed.optimizers import OptimizerBlock, SchedulerBlock


@dataclass(frozen=True)
class TrainerSettings:
    """Settings of the configuration. None leaves a setting to the Trainer."""

    precision: str | None = None  # the ``Trainer(precision=...)`` with DeepSpeed's arithmetic
    accepted_precisions: tuple[str, ...] = ()  # precisions that do not contradict the configuration
    gradient_clip_val: float | None = None  # largest norm of all gradients; 0 disables clipping
    accumulate_grad_batches: int | None = None
    micro_batch_size: int | None = None  # samples per batch of one rank's DataLoader
    train_batch_size: int | None = None  # samples per optimizer step over all data-parallel ranks

    def choose_precision(self, given: str) -> str:
        """Return the precision to train in. The configuration replaces ``32-true``, the Trainer's default.

        Raises:
            ConfigError: ``given``, the Trainer's precision, contradicts the configuration.
        """
        if self.precision is not None and given == "32-true":
            return self.precision
        if self.accepted_precisions and given not in self.accepted_precisions:
            wanted = self.precision or self.accepted_precisions[0]
            raise ConfigError(
                f"Got Trainer(precision={given!r}), but the DeepSpeed configuration requires "
                f"{' or '.join(self.accepted_precisions)}. Pass precision={wanted!r}, or set enabled of fp16 and bf16 "
                'to "auto" in the configuration.'
            )
        return given

    def choose_clipping(self, given: float | None, *, by_value: bool) -> float | None:
        """Return the norm to clip to.

        Args:
            given: The Trainer's ``gradient_clip_val``.
            by_value: Whether the Trainer clips values instead of the norm.

        Raises:
            ConfigError: They contradict the configuration.
        """
        wanted = self.gradient_clip_val
        if wanted is None:
            return given
        if by_value and wanted > 0:
            raise ConfigError(
                f"Got Trainer(gradient_clip_algorithm='value'), but gradient_clipping={wanted:g} of the DeepSpeed "
                "configuration clips by norm. Delete one of them."
            )
        if given is not None and float(given) != wanted:
            raise ConfigError(
                f"Got Trainer(gradient_clip_val={given}), but gradient_clipping={wanted:g} in the DeepSpeed "
                f'configuration. Pass gradient_clip_val={wanted:g}, or write "gradient_clipping": "auto".'
            )
        return wanted

    def choose_batches(self, accumulate_grad_batches: int, replicas: int) -> tuple[int, int | None]:
        """Return micro-batches per step and samples per micro-batch (None: any), from two of the three numbers.

        The configuration replaces ``accumulate_grad_batches=1``, the default. ``replicas`` are data-parallel ranks.

        Raises:
            ConfigError: The numbers contradict each other or the Trainer.
        """
        micro, steps, total = self.micro_batch_size, self.accumulate_grad_batches, self.train_batch_size
        if steps is None and micro is not None and total is not None:
            steps = self._quotient(total, micro * replicas, "train_micro_batch_size_per_gpu x ranks", replicas)
        if steps is not None and accumulate_grad_batches not in (1, steps):
            raise ConfigError(
                f"Got Trainer(accumulate_grad_batches={accumulate_grad_batches}), but the DeepSpeed configuration "
                f"accumulates {steps} micro-batches. Pass accumulate_grad_batches={steps}, or write "
                '"gradient_accumulation_steps": "auto" and leave train_batch_size out.'
            )
        steps = accumulate_grad_batches if steps is None else steps
        if total is not None:
            found = self._quotient(total, steps * replicas, "gradient_accumulation_steps x ranks", replicas)
            if micro is not None and micro != found:
                raise ConfigError(
                    f"train_batch_size={total} is not train_micro_batch_size_per_gpu={micro} x accumulation {steps} x "
                    f"{replicas} data-parallel ranks = {micro * steps * replicas}. Correct one, or leave it out."
                )
            micro = found
        return steps, micro

    @staticmethod
    def _quotient(total: int, by: int, name: str, replicas: int) -> int:
        if total % by:
            raise ConfigError(
                f"Got train_batch_size={total}, but it must be a multiple of {name} = {by} ({replicas} data-parallel "
                f'ranks). Use a multiple of {by}, or write "auto" for it.'
            )
        return total // by

    def check_loader(self, batch_size: int | None, micro_batch_size: int | None) -> None:
        """Compare a DataLoader's ``batch_size`` (None: unknown) with the ``micro_batch_size`` of `choose_batches`.

        Raises:
            ConfigError: They differ.
        """
        if batch_size is None or micro_batch_size is None or batch_size == micro_batch_size:
            return
        raise ConfigError(
            f"the training DataLoader has batch_size={batch_size}, but the DeepSpeed configuration has "
            f"{micro_batch_size} samples per rank and micro-batch. Use the same number, or write "
            '"train_micro_batch_size_per_gpu": "auto" and leave train_batch_size out.'
        )


@dataclass(frozen=True)
class Row:
    """The outcome of one key."""

    key: str
    value: Any
    outcome: Literal["mapped", "auto", "ignored"]
    text: str


@dataclass
class Found:
    """The values of mapped keys, by dotted key, and a row for every key."""

    values: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, Row] = field(default_factory=dict)

    def read(self, config: Mapping[str, Any], table: Table, prefix: str) -> None:
        """Read one block.

        Raises:
            ConfigError: A key is unknown or refused.
        """
        for name, value in config.items():
            key = prefix + name
            entry = table.get(name)
            if entry is None:
                raise _unknown(key, name, table, prefix)
            if isinstance(entry, Key):
                self._key(key, value, entry)
            elif isinstance(entry, AnyBlock):
                self._block(key, value, entry)
            elif isinstance(value, Mapping):
                self.read(value, entry, f"{key}.")
            elif value is not None:
                raise ConfigError(f"Got {key}={value!r}, but {key} is a block with the keys {', '.join(entry)}.")

    def _key(self, key: str, value: Any, entry: Key) -> None:
        if entry.outcome == "refused" and not any(value == off and type(value) is type(off) for off in entry.off):
            raise ConfigError(f"Got {key}={value!r} in the DeepSpeed configuration, but {entry.text}.")
        if value == "auto" and entry.outcome == "mapped":
            self.rows[key] = Row(key, value, "auto", f"{entry.text}: left to the Trainer, or the default")
        else:
            self._accept(key, value, entry)

    def _block(self, key: str, value: Any, entry: AnyBlock) -> None:
        on = value.get(entry.switch, False) if entry.switch and isinstance(value, Mapping) else bool(value)
        if entry.key.outcome == "refused" and on:
            raise ConfigError(f"Got {key} in the DeepSpeed configuration, but {entry.key.text}.")
        self._accept(key, value, entry.key)

    def _accept(self, key: str, value: Any, entry: Key) -> None:
        mapped = entry.outcome == "mapped"
        text = "it is disabled" if entry.outcome == "refused" else entry.text
        self.rows[key] = Row(key, value, "mapped" if mapped else "ignored", text)
        if mapped and value is not None:
            self.values[key] = value

    def note(self, key: str, text: str, *, ignored: bool = False) -> None:
        """Replace the text of a key that is present."""
        if key in self.rows:
            row = self.rows[key]
            self.rows[key] = Row(key, row.value, "ignored" if ignored else row.outcome, text)

    def flag(self, key: str) -> bool | None:
        """Return a boolean, or None if the key is missing.

        Raises:
            ConfigError: The value is not a boolean.
        """
        value = self.values.get(key)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f'Got {key}={value!r}. Use true, false or "auto".')
        return value

    def number(self, key: str, *, least: float, integer: bool = False) -> Any:
        """Return a number of at least ``least``, or None if the key is missing. Integers may be given as ``5e8``.

        Raises:
            ConfigError: The value is not such a number.
        """
        value = self.values.get(key)
        if value is None:
            return None
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least
        if not good or (integer and value != int(value)):
            kind = "an integer" if integer else "a number"
            raise ConfigError(f"Got {key}={value!r}. Use {kind} of at least {least:g}.")
        return int(value) if integer else float(value)


def _unknown(key: str, name: str, table: Table, prefix: str) -> ConfigError:
    elsewhere = [f"{block}.{name}" for block, inner in KEYS.items() if isinstance(inner, dict) and name in inner]
    close = difflib.get_close_matches(name, table, n=1, cutoff=0.5)
    if prefix and name in KEYS:
        hint = f"Did you mean {name}, outside of {prefix.rstrip('.')}?"
    elif elsewhere:
        hint = f"Did you mean {elsewhere[0]}?"
    elif close:
        hint = f"Did you mean {prefix}{close[0]}?"
    else:
        hint = f"Delete it; the known keys are {', '.join(table)}."
    return ConfigError(f"Got {key}, but DeepSpeed has no such key. {hint}")


PathOrDict = str | os.PathLike[str] | Mapping[str, Any]

_WITHOUT_PREFIX = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
"""Keys of ``zero_optimization`` that DeepSpeed also accepts without ``stage3_``."""


@dataclass(frozen=True)
class Translation:
    """A DeepSpeed configuration, translated to this package."""

    strategy: dict[str, Any]  # options of ``ZeROStrategy``, by dotted name: ``offload.optimizer``
    trainer: TrainerSettings  # settings of the Trainer and batch sizes
    optimizer: OptimizerBlock | None
    scheduler: SchedulerBlock | None
    rows: tuple[Row, ...]

    def report(self) -> str:
        """Return one line per key, with its value and outcome; mapped keys first."""
        order = {"mapped": 0, "auto": 1, "ignored": 2}
        rows = sorted(self.rows, key=lambda row: order[row.outcome])
        cells = [(row.key, _short(row.value), row.outcome, row.text) for row in rows]
        widths = [max((len(cell[i]) for cell in cells), default=0) for i in range(3)]
        lines = ["  ".join([*(c.ljust(w) for c, w in zip(cell, widths, strict=False)), cell[3]]) for cell in cells]
        return "\n".join(["DeepSpeed configuration:", *(f"  {line}" for line in lines)])


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."


def load(source: PathOrDict) -> dict[str, Any]:
    """Return the configuration as a dictionary.

    Raises:
        ConfigError: The file does not exist or is not JSON.
    """
    source = accept("deepspeed_config", source, str | os.PathLike[str] | Mapping[str, Any])
    if isinstance(source, Mapping):
        return dict(source)
    path = accept("deepspeed_config", source, Path)
    try:
        config = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise ConfigError(
            f"deepspeed_config={str(path)!r} cannot be read: {error}. Give a JSON file or a dict."
        ) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not valid JSON ({error}). Remove comments and trailing commas.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}. The outermost value must be an object ({{...}}).")
    return config


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"the DeepSpeed configuration has {name!r} twice in one block. Delete one of them.")
    return dict(pairs)


def translate(source: PathOrDict) -> Translation:
    """Translate a DeepSpeed configuration, a dictionary or the path of a JSON file.

    Raises:
        ConfigError: A key is unknown, a value is out of range, or ignoring a feature would change results.
    """
    found = Found()
    found.read(_normalized(load(source)), KEYS, "")
    strategy = {
        **_zero(found),
        **_offload(found),
        **_precision_options(found),
        **_activations(found),
        **_parallel(found),
    }
    return Translation(
        strategy=strategy,
        trainer=_trainer(found),
        optimizer=_block(found, "optimizer", OptimizerBlock),
        scheduler=_block(found, "scheduler", SchedulerBlock),
        rows=tuple(found.rows.values()),
    )


def _normalized(config: dict[str, Any]) -> dict[str, Any]:
    """Replace older and shorter spellings by those in `KEYS`."""
    config = dict(config)
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        config["zero_optimization"] = {"stage": int(zero)}
    elif isinstance(zero, Mapping):
        names = {name: f"stage3_{name}" if name in _WITHOUT_PREFIX else name for name in zero}
        config["zero_optimization"] = {names[name]: value for name, value in zero.items()}
    return config


# --- sections --------------------------------------------------------------------------------------------------------


def _zero(found: Found) -> dict[str, Any]:
    stage = found.number("zero_optimization.stage", least=0, integer=True) or 0
    if stage > 3:
        raise ConfigError(f"Got zero_optimization.stage={stage}. Use 0, 1, 2 or 3.")
    options: dict[str, Any] = {"stage": stage}
    if found.number("zero_optimization.stage3_prefetch_bucket_size", least=0) == 0:
        options["sharding.prefetch_units"] = 0
    return {**options, **_groups(found, stage)}


def _groups(found: Found, stage: int) -> dict[str, Any]:
    """Return how ranks are grouped on slow networks. DeepSpeed groups them at stage 3 alone."""
    hpz, mics = "zero_optimization.zero_hpz_partition_size", "zero_optimization.mics_shard_size"
    copies, shards = found.number(hpz, least=0, integer=True), found.number(mics, least=-1, integer=True)
    options: dict[str, Any] = {}
    for key, option, size, least in ((hpz, "sharding.hpz", copies, 2), (mics, "sharding.shard_size", shards, 1)):
        if size is not None and (size < least or stage != 3):
            found.note(key, "it is disabled" if size < least else "DeepSpeed uses it at stage 3 only", ignored=True)
        elif size is not None:
            options[option] = size
    for name, option, form in (("weights", "gathers", "int8"), ("gradients", "gradients", "int4")):
        key = f"zero_optimization.zero_quantized_{name}"
        if found.flag(key) and stage == 3:
            options[f"sharding.quantized_{option}"] = form
        else:
            found.note(key, "it is disabled" if stage == 3 else "DeepSpeed uses it at stage 3 only", ignored=True)
    return options


_STATES = {"offload_optimizer": "offload.optimizer", "offload_param": "offload.parameters"}
"""Blocks of a configuration and the options they map to."""


def _offload(found: Found) -> dict[str, Any]:
    options: dict[str, Any] = {}
    older_names = {"offload_optimizer": ("cpu_offload",), "offload_param": ("cpu_offload_param", "cpu_offload_params")}
    for option, older in older_names.items():
        tier = found.values.get(f"zero_optimization.{option}.device", "none")
        if tier not in ("none", "cpu", "nvme"):
            raise ConfigError(f"Got zero_optimization.{option}.device={tier!r}. Use 'none', 'cpu' or 'nvme'.")
        if any(found.flag(f"zero_optimization.{name}") for name in older) and tier == "none":
            tier = "cpu"
        ratio = found.number(f"zero_optimization.{option}.ratio", least=0)  # of the optimizer only
        if tier != "none" and ratio != 0:
            options[_STATES[option]] = tier if ratio is None or ratio >= 1 else TierConfig(tier=tier, ratio=ratio)
    return {**options, **_nvme(found, options)}


def _nvme(found: Found, offload: dict[str, Any]) -> dict[str, Any]:
    paths = {}
    for option in ("offload_optimizer", "offload_param"):
        key = f"zero_optimization.{option}.nvme_path"
        tier = getattr(offload.get(_STATES[option]), "tier", offload.get(_STATES[option]))
        if tier == "nvme" and key in found.values:
            paths[key] = str(found.values[key])
        else:
            found.note(key, "these states are not on NVMe", ignored=True)
    if len(set(paths.values())) > 1:
        raise ConfigError(
            f"Got {' and '.join(f'{k}={v!r}' for k, v in paths.items())}, but all states share one folder. Use the "
            "same path for both."
        )
    options: dict[str, Any] = {"offload.nvme_path": next(iter(paths.values()))} if paths else {}
    threads = "aio.intra_op_parallelism" if "aio.intra_op_parallelism" in found.values else "aio.thread_count"
    io = {
        "block_bytes": found.number("aio.block_size", least=4096, integer=True),
        "queue_depth": found.number("aio.queue_depth", least=1, integer=True),
        "parallelism": found.number(threads, least=1, integer=True),
    }
    io = {name: value for name, value in io.items() if value is not None}
    if "nvme" in (getattr(tier, "tier", tier) for tier in offload.values()):
        return {**options, **({"offload.nvme_io": NVMeIOConfig(**io)} if io else {})}
    for key in ("aio.block_size", "aio.queue_depth", "aio.intra_op_parallelism", "aio.thread_count"):
        found.note(key, "no states are on NVMe", ignored=True)
    return options


def _bf16(found: Found) -> str:
    return "bf16" if any(key.startswith("bf16.") for key in found.rows) else "bfloat16"


def _precision_options(found: Found) -> dict[str, Any]:
    options: dict[str, Any] = {}
    fp16, block = found.flag("fp16.enabled"), _bf16(found)
    masters = found.flag(f"{block}.bf16_master_weights_and_grads") or False
    states = found.flag(f"{block}.bf16_optimizer_states") or False
    if masters != states:
        raise ConfigError(
            f"Got {block}.bf16_master_weights_and_grads={masters} and bf16_optimizer_states={states}, but both must be "
            "equal. Enable both or neither; precision.moments='bf16' stores only the moments in 16 bit."
        )
    if masters:
        options["precision.master_weights"] = False
    scale = _loss_scale(found)
    if scale is not None and fp16 is not False:
        options["precision.loss_scale"] = scale
    elif scale is not None:
        for name in KEYS["fp16"]:  # type: ignore[union-attr]
            if name != "enabled":
                found.note(f"fp16.{name}", "fp16 is off", ignored=True)
    return {**options, **_reduce_dtype(found, fp16=fp16, bf16=found.flag(f"{block}.enabled"))}


def _loss_scale(found: Found) -> LossScaleConfig | None:
    static = found.number("fp16.loss_scale", least=0)
    values = {
        "static": static or None,
        "initial_power": found.number("fp16.initial_scale_power", least=0, integer=True),
        "window": found.number("fp16.loss_scale_window", least=0, integer=True),
        "hysteresis": found.number("fp16.hysteresis", least=1, integer=True),
        "consecutive_hysteresis": found.flag("fp16.consecutive_hysteresis"),
        "min_scale": found.number("fp16.min_loss_scale", least=0),
    }
    values = {name: value for name, value in values.items() if value is not None}
    return LossScaleConfig(**values) if values or static is not None else None


def _reduce_dtype(found: Found, *, fp16: bool | None, bf16: bool | None) -> dict[str, Any]:
    wanted = found.values.get("communication_data_type")
    if wanted is None:
        return {}
    known = {"fp32": "fp32", "fp16": "compute", "bf16": "compute"}
    other = (wanted == "fp16" and (fp16 is False or bf16)) or (wanted == "bf16" and (bf16 is False or fp16))
    if wanted not in known or other:
        raise ConfigError(
            f"Got communication_data_type={wanted!r}, but gradients are reduced in 'fp32' or in the parameters' 16-bit "
            "dtype. Use 'fp32', or delete it."
        )
    return {"precision.reduce_dtype": known[wanted]}


def _activations(found: Found) -> dict[str, Any]:
    block = "activation_checkpointing."
    partition = found.flag(f"{block}partition_activations") or found.flag("zero_optimization.partition_activations")
    to_cpu = found.flag(f"{block}cpu_checkpointing")
    interval = found.number("pipeline.activation_checkpoint_interval", least=0, integer=True)
    options: dict[str, Any] = {}
    if partition or to_cpu or interval:
        options["activations.checkpointing"] = "full"
    if to_cpu:
        options["activations.offload"] = "cpu"
    if partition and _tensor_ranks(found) > 1:
        options["activations.partitioning"] = True
    elif partition:
        for key in (f"{block}partition_activations", "zero_optimization.partition_activations"):
            found.note(key, "`activations.checkpointing='full'`; partitioning needs several tensor-parallel ranks")
    return options


def _tensor_ranks(found: Found) -> int:
    sizes = [found.number(f"tensor_parallel.{name}", least=0, integer=True) for name in ("autotp_size", "tp_size")]
    return max(1, *(size or 0 for size in sizes))


def _parallel(found: Found) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if _tensor_ranks(found) > 1:
        options["parallel.tensor.size"] = _tensor_ranks(found)
    sequence = found.number("sequence_parallel_size", least=1, integer=True) or 1
    if sequence > 1:
        options["parallel.context"] = sequence
    stages = found.number("pipeline.stages", least=1, integer=True) or 1
    if stages > 1:
        partition = found.values.get("pipeline.partition", "best")
        options["parallel.pipeline.size"] = stages
        options["parallel.pipeline.partition"] = "parameters" if partition == "best" else partition
        micro, accumulation, _ = _batches(found)
        if micro:
            options["parallel.pipeline.micro_batch_size"] = micro
        elif accumulation:
            options["parallel.pipeline.micro_batches"] = accumulation
    else:
        found.note("pipeline.partition", "there is only one pipeline stage", ignored=True)
    return options


def _batches(found: Found) -> tuple[int | None, int | None, int | None]:
    """Return samples per micro-batch, micro-batches per step, and samples per step over all ranks."""
    micro = found.number("train_micro_batch_size_per_gpu", least=1, integer=True)
    accumulation = found.number("gradient_accumulation_steps", least=1, integer=True)
    return micro, accumulation, found.number("train_batch_size", least=1, integer=True)


def _trainer(found: Found) -> TrainerSettings:
    micro, accumulation, total = _batches(found)
    precision, accepted = _precision(found)
    if "gradient_clipping" not in found.rows:
        text = "missing; DeepSpeed's default depends on its version, 1.0 or none: set `Trainer(gradient_clip_val=...)`"
        found.rows["gradient_clipping"] = Row("gradient_clipping", None, "auto", text)
    if (found.number("pipeline.stages", least=1) or 1) > 1:
        micro = micro * accumulation if micro and accumulation else None  # one DataLoader batch holds all
        accumulation, total = 1, total if micro else None
    return TrainerSettings(
        precision=precision,
        accepted_precisions=accepted,
        gradient_clip_val=found.number("gradient_clipping", least=0),
        accumulate_grad_batches=accumulation,
        micro_batch_size=micro,
        train_batch_size=total,
    )


def _precision(found: Found) -> tuple[str | None, tuple[str, ...]]:
    fp16, bf16 = found.flag("fp16.enabled"), found.flag(f"{_bf16(found)}.enabled")
    autocast = found.flag("torch_autocast.enabled")
    if sum(map(bool, (fp16, bf16, autocast))) > 1:
        raise ConfigError("Got more than one of fp16, bf16 and torch_autocast enabled. Enable one of them.")
    if fp16:
        return "16-true", ("16-true", "16-mixed")
    if bf16:
        return "bf16-true", ("bf16-true", "bf16-mixed")
    if autocast:
        dtype = str(found.values.get("torch_autocast.dtype", "")).removeprefix("torch.")
        known = dict.fromkeys(("fp16", "float16", "half"), "16-mixed")
        known |= dict.fromkeys(("bf16", "bfloat16"), "bf16-mixed")
        if dtype not in known:
            raise ConfigError(f"Got torch_autocast.dtype={dtype!r}. Use 'bfloat16' or 'float16'.")
        return known[dtype], (known[dtype],)
    accepted = ["32-true"]
    accepted += [] if fp16 is False else ["16-true", "16-mixed"]
    accepted += [] if bf16 is False else ["bf16-true", "bf16-mixed"]
    return None, tuple(accepted)


def _block(found: Found, name: str, kind: type[Any]) -> Any:
    given = found.values.get(f"{name}.type")
    if given is None:
        if f"{name}.params" in found.rows:
            found.note(f"{name}.params", f"there is no {name}.type", ignored=True)
        return None
    params = found.values.get(f"{name}.params") or {}
    if not isinstance(given, str) or not isinstance(params, Mapping):
        raise ConfigError(f'Got {name} type={given!r}, params={params!r}. Give {{"type": "name", "params": {{...}}}}.')
    block = kind(given, dict(params))
    found.note(f"{name}.type", f"{block.describe()}, if `configure_optimizers` returns none")
    return block
