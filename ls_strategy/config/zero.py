"""`ZeROConfig`: all groups as the engine reads them, and the checks across groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ls_strategy.checked import check_fields
from ls_strategy.config.activations import ActivationsConfig
from ls_strategy.config.checkpoint import CheckpointConfig
from ls_strategy.config.compile import CompileConfig
from ls_strategy.config.group import Group
from ls_strategy.config.offload import OffloadConfig
from ls_strategy.config.option_names import GROUPS
from ls_strategy.config.parallel import ParallelConfig
from ls_strategy.config.precision import PrecisionConfig
from ls_strategy.config.sharding import ShardingConfig
from ls_strategy.errors import ConfigError

ZeroStage = Literal[0, 1, 2, 3]


@dataclass(frozen=True, kw_only=True)
class ZeROConfig(Group):
    """Every option of the engine."""

    stage: ZeroStage = 3
    """0 replicates everything, 1 shards optimizer states, 2 also gradients, 3 also parameters."""

    sharding: ShardingConfig = field(default_factory=ShardingConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)

    @property
    def updates_in_backward(self) -> bool:
        """Whether an update may begin before backward is over, if nothing reads its gradients."""
        overlap = self.sharding.overlap_step
        possible = overlap == "backward" or (bool(overlap) and self.offload.optimizer is not None)
        return possible and self.offload.delay_after is None

    @classmethod
    def of(cls, stage: Literal[0, 1, 2, 3, "auto"], **groups: Any) -> ZeROConfig:
        """Return the configuration for groups in any form that `ZeROStrategy` accepts; ``auto`` counts as stage 3.

        Raises:
            ConfigError: groups contradict each other.
        """
        number = 3 if stage == "auto" else stage
        config = cls(stage=number, **{name: _full(name, group, number) for name, group in groups.items()})
        if stage == "auto":
            _check_auto(config)
        return config

    def __post_init__(self) -> None:
        """Refuse invalid values, and groups that contradict each other."""
        check_fields(self, group="")
        check_together(self)


def _full(name: str, group: Any, stage: int) -> Any:
    """Return a group without short forms: as it is, or as a mapping."""
    options = None if isinstance(group, (Group, Mapping)) else GROUPS[name].short_form(group, stage)
    return group if options is None else options


def check_together(config: ZeROConfig) -> None:
    """Refuse options that contradict options of another group.

    Raises:
        ConfigError: with both options, the rule and the cure.
    """
    _check_weights(config)
    _check_shard_groups(config)
    if config.sharding.overlap_step == "backward" and config.stage == 0:
        raise ConfigError(
            "Got sharding.overlap_step='backward' with stage=0, where every rank keeps all gradients until the step. "
            "Set stage=2, which frees them, or leave overlap_step out."
        )
    _check_offload(config)
    _check_virtual_ranks(config)
    _check_compile(config)
    _check_fp8(config)
    _check_split_masters(config)
    if config.activations.tiling is not None and config.parallel.tp.sequence_parallel:
        raise ConfigError(
            "Got activations.tiling with parallel.tensor.sequence_parallel=True, which shards the tokens of a layer's "
            "result over the ranks, tile by tile in another order. Leave one of tiling and sequence_parallel out."
        )
    if config.activations.partitioning and config.parallel.tp.size == 1:
        raise ConfigError(
            "Got activations.partitioning=True with parallel.tensor=1, but activations are partitioned over "
            "tensor-parallel ranks, and there is one. Set parallel.tensor, or leave activations.partitioning out."
        )
    if config.parallel.pp.size > 1 and config.checkpoint.format == "file":
        raise ConfigError(
            f"Got checkpoint.format='file' with parallel.pipeline={config.parallel.pp.size}, but no rank has all "
            "layers. Save folders (checkpoint.format='sharded'); `ls-strategy consolidate` makes one file of them."
        )


def _check_fp8(config: ZeROConfig) -> None:
    float8 = config.precision.float8
    if float8 is None or float8.recipe == "rowwise_with_gw_hp":
        return
    splits = {
        "parallel.pipeline": config.parallel.pp.size > 1,
        "parallel.context": config.parallel.context > 1,
        "activations.tiling": config.activations.tiling is not None,
    }
    for option, splits_tokens in splits.items():
        if splits_tokens:
            raise ConfigError(
                f"Got precision.matmul='fp8' with recipe={float8.recipe!r} and {option}, but a scale of several tokens "
                "depends on how the batch is split, and so would the numbers. Set "
                "precision.matmul=Float8Config(recipe='rowwise_with_gw_hp'), which scales every token by itself."
            )


def _check_split_masters(config: ZeROConfig) -> None:
    form = config.precision.split_masters
    if form is None:
        return
    if config.offload.delay_after is not None:
        raise ConfigError(
            f"Got precision.master_weights={form!r} with offload.delay_after={config.offload.delay_after}, but late "
            "updates would change the weights that the next step computes with. Leave one of them out."
        )
    if config.offload.step_on == "cpu" and config.offload.parameters is None:
        raise ConfigError(
            f"Got precision.master_weights={form!r} with offload.step_on='cpu', but the upper parts of the masters are "
            "the weights on the device, where the update runs. Leave step_on out."
        )


def _check_compile(config: ZeROConfig) -> None:
    compiled = config.compile
    if compiled.regions is None:
        return
    if config.stage == 3 and compiled.records_addresses:
        raise ConfigError(
            f"Got compile.mode={compiled.mode!r} with stage=3, but CUDA graphs record where parameters are, and stage "
            "3 gathers them to new addresses. Set compile.mode='max-autotune-no-cudagraphs', or stage 2."
        )
    if config.stage == 3 and compiled.regions == "model" and compiled.fullgraph:
        raise ConfigError(
            "Got compile='model' and compile.fullgraph=True with stage=3, but there graphs end at blocks, whose "
            "parameters are gathered in between. Set compile='blocks', or leave fullgraph out."
        )
    if config.parallel.pp.size > 1 and compiled.regions == "model":
        raise ConfigError(
            f"Got compile='model' with parallel.pipeline={config.parallel.pp.size}, but a pipeline runs the blocks of "
            "a stage one by one. Set compile='blocks'."
        )
    if config.activations.partitioning:
        raise ConfigError(
            f"Got compile={compiled.regions!r} with activations.partitioning=True, but compiled code chooses itself "
            "what it saves for backward. Leave one of them out."
        )


def _check_weights(config: ZeROConfig) -> None:
    weights = config.sharding.rank_weights
    if weights is None:
        return
    if config.stage == 0:
        raise ConfigError(
            f"Got sharding.rank_weights={weights!r} with stage=0, where every rank holds all states. Set stage "
            "to 1, 2 or 3, or leave rank_weights out."
        )
    for axis, size in config.parallel.sizes.items():
        if axis != "context" and size > 1:
            raise ConfigError(
                f"Got sharding.rank_weights={weights!r} with parallel.{axis}={size}, but weights require ranks that "
                "all hold the same layers. Leave rank_weights out, or use ZeRO without model parallelism."
            )


def _check_shard_groups(config: ZeROConfig) -> None:
    sharding = config.sharding
    if sharding.quantized_gathers is not None and config.stage != 3:
        raise ConfigError(
            f"Got sharding.quantized_gathers={sharding.quantized_gathers!r} with stage={config.stage}, but below stage "
            "3 every rank stores the parameters, which stay exact. Set stage=3, or leave quantized_gathers out."
        )
    if sharding.quantized_gradients is not None and config.stage == 0:
        raise ConfigError(
            f"Got sharding.quantized_gradients={sharding.quantized_gradients!r} with stage=0, where every rank keeps "
            "the averages of all gradients. Set stage=1, which also keeps all parameters on every rank, or leave "
            "quantized_gradients out."
        )
    given = [f"sharding.{n}={v!r}" for n in ("shard_size", "hpz") if (v := getattr(sharding, n)) is not None]
    if not given:
        return
    if len(given) > 1:
        raise ConfigError(
            f"Got {given[0]} with {given[1]}, but in groups no gather leaves the group anyway. Set shard_size to store "
            "all states in every group, or hpz to shard them over all ranks."
        )
    if sharding.hpz is not None and config.stage != 3:
        raise ConfigError(
            f"Got {given[0]} with stage={config.stage}, but only stage 3 gathers parameters in backward. Set stage=3, "
            "or leave hpz out."
        )
    if sharding.rank_weights is not None:
        raise ConfigError(
            f"Got {given[0]} with sharding.rank_weights={sharding.rank_weights!r}, but all groups must cut the states "
            "in the same way. Leave one of them out."
        )
    if config.parallel.expert > 1:
        raise ConfigError(
            f"Got {given[0]} with parallel.expert={config.parallel.expert}, but the states of experts are sharded over "
            "fewer ranks than the others. Leave one of them out."
        )


def _check_offload(config: ZeROConfig) -> None:
    offload, stage = config.offload, config.stage
    if offload.any_state and stage == 0:
        raise ConfigError(
            "Got offload with stage=0, but every rank would keep and update a copy of all states on its host. Use "
            "stage 1, which shards them and computes the same."
        )
    if offload.parameters is not None and stage != 3:
        raise ConfigError(
            f"Got offload.parameters with stage={stage}, but parameters are stored in shards only at stage 3; below, "
            "every rank needs them on the device at all times. Use stage=3, or only offload.optimizer."
        )
    if offload.delay_after is not None and stage == 3:
        raise ConfigError(
            f"Got offload.delay_after={offload.delay_after} with stage=3, but late updates need the weights of the "
            "last step apart from the master weights. Use stage 1 or 2, with offload.optimizer."
        )


def _check_virtual_ranks(config: ZeROConfig) -> None:
    virtual = config.parallel.virtual_ranks
    form = config.sharding.quantized_gradients
    if virtual is not None and form is not None:
        raise ConfigError(
            f"Got parallel.virtual_ranks={virtual} with sharding.quantized_gradients={form!r}, but what rounding "
            "changes depends on the number of ranks, and virtual ranks promise the same bits on any. Leave one of them "
            "out."
        )
    for axis, size in config.parallel.sizes.items() if virtual is not None else ():
        if size > 1:
            raise ConfigError(
                f"Got parallel.virtual_ranks={virtual} with parallel.{axis}={size}, but virtual ranks take the place "
                f"of data-parallel ranks that hold the full model. Leave one of virtual_ranks and {axis} out."
            )


def _check_auto(config: ZeROConfig) -> None:
    weights = config.sharding.rank_weights
    if weights is not None:
        raise ConfigError(
            f'Got sharding.rank_weights={weights!r} with stage="auto", but "auto" plans for ranks of equal memory. Set '
            "a stage."
        )
    shards = any(size > 1 for size in config.parallel.sizes.values())
    if config.offload.any_state or config.activations.stored is not None or shards:
        raise ConfigError(
            'Got offload or parallel with stage="auto", but "auto" chooses offload itself and does not plan for '
            "tensor, context, expert or pipeline parallelism. Leave these options out, or set a stage."
        )
