"""``parallel``: how one model, or one sequence, is partitioned over ranks that work on the same batch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, TypeAlias

from ls_strategy.checked import Range, at_least, check_fields
from ls_strategy.config.group import Group
from ls_strategy.errors import ConfigError
from ls_strategy.registry import EntryOf

Schedule: TypeAlias = (
    Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipe_v"]
    | Annotated[str, EntryOf("schedules")]
)

_RANKS = at_least(1, 1 << 20)


@dataclass(frozen=True, kw_only=True)
class TensorConfig(Group):
    """Tensor parallelism: every layer is partitioned over a group of ranks."""

    size: int
    """Ranks that every layer is partitioned over, on the same batch."""

    plan: Literal["auto"] | Mapping[str, Any] = "auto"
    """How layers are partitioned. ``auto``: by the module's ``tensor_parallel_plan()``, ``parallelize_module`` in its
    ``configure_model``, Hugging Face's plan, or names and shapes.
    ``{"blocks.*.up": "column", "blocks.*.down": "row", ...}`` sets it by module name."""

    sequence_parallel: bool = False
    """Megatron's sequence parallelism: layers in between (norms, dropout) are partitioned along the tokens."""

    def __post_init__(self) -> None:
        check_fields(self, group="parallel.tensor", size=_RANKS)
        if self.size == 1 and (self.sequence_parallel or self.plan != "auto"):
            raise ConfigError(
                "Got parallel.tensor.plan or parallel.tensor.sequence_parallel with parallel.tensor.size=1, but both "
                "need 2 ranks or more. Set parallel.tensor.size=2, or leave them out."
            )


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Group):
    """Pipeline parallelism: the blocks of the model are partitioned into stages over a group of ranks."""

    size: int
    """Ranks that the blocks are partitioned over, on micro-batches of the same batch."""

    micro_batches: int | None = None
    """Micro-batches per batch. None: four per rank of the pipeline."""

    micro_batch_size: int | None = None
    """Samples per micro-batch, instead of their number."""

    schedule: Schedule = "1f1b"
    """Order of forwards and backwards, see `ls_strategy.parallel.pipeline.schedules`."""

    partition: str = "parameters"
    """What is balanced over stages: ``parameters``, ``flops`` (of the forward, counted on one batch), ``uniform`` (the
    number of blocks) or ``type:REGEX`` (blocks of a class with a matching name)."""

    stages_per_rank: int | None = None
    """Stages per rank, for schedules with several. None: two for ``interleaved_1f1b``."""

    blocks: str | None = None
    """Name of the ModuleList or Sequential to partition. None: the model's ``to_layers()``, or the longest one."""

    def __post_init__(self) -> None:
        counts: dict[str, Range] = dict.fromkeys(("micro_batches", "micro_batch_size", "stages_per_rank"), _RANKS)
        check_fields(self, group="parallel.pipeline", size=_RANKS, **counts)
        if self.size == 1:
            self._check_no_pipeline()
        if self.micro_batches is not None and self.micro_batch_size is not None:
            raise ConfigError(
                f"Got parallel.pipeline.micro_batches={self.micro_batches} and "
                f"parallel.pipeline.micro_batch_size={self.micro_batch_size}, but one follows from the other and the "
                "batch. Choose one of micro_batches and micro_batch_size."
            )
        if self.partition not in ("parameters", "uniform", "flops") and not self.partition.startswith("type:"):
            raise ConfigError(
                f"Got parallel.pipeline.partition={self.partition!r}, but it must be 'parameters', 'flops', 'uniform' "
                "(numbers of blocks) or 'type:REGEX' (blocks whose class matches). Set partition='parameters'."
            )
        try:
            re.compile(self.partition.removeprefix("type:"))
        except re.error as error:
            raise ConfigError(
                f"Got parallel.pipeline.partition={self.partition!r}, but what follows type: must be a regular "
                f"expression ({error}). Set a class name, for example partition='type:Block'."
            ) from None

    def _check_no_pipeline(self) -> None:
        if self.micro_batches or self.micro_batch_size:
            raise ConfigError(
                "Got parallel.pipeline.micro_batches with parallel.pipeline.size=1, but micro-batches require a "
                "pipeline. To accumulate gradients of several batches, use Trainer(accumulate_grad_batches=...)."
            )
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name != "size" and value != option.default:
                raise ConfigError(
                    f"Got parallel.pipeline.{option.name}={value!r}, but it requires a pipeline, and "
                    f"parallel.pipeline.size is 1. Set parallel.pipeline.size=2 or more, or leave {option.name} out."
                )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Group):
    """Sizes of tensor, context, expert and pipeline parallelism; 1 disables each."""

    tensor: int | TensorConfig = 1
    """Ranks that every layer is partitioned over."""

    context: int = 1
    """Ranks that the tokens of every sequence are partitioned over; around attention they exchange tokens for heads
    (Ulysses). For models that call ``scaled_dot_product_attention``."""

    expert: int = 1
    """Neighbouring ranks that the experts of every `MoE` layer are partitioned over; they exchange tokens and train on
    different batches."""

    pipeline: int | PipelineConfig = 1
    """Ranks that the blocks of the model are partitioned over."""

    ring: int = 1
    """Context-parallel ranks that form a ring for keys and values (ring attention); the others exchange tokens for
    heads. It must divide ``context``. 1: no ring, and the number of heads limits ``context``. Equal to ``context``: any
    number of heads."""

    virtual_ranks: int | None = None
    """Compute as this many ranks would, on as many or fewer: losses and weights are bitwise identical on any number of
    ranks, at every stage and with any offload. For data parallelism. None: the real ranks."""

    virtual_ranks_per_rank: tuple[int, ...] | None = None
    """For ranks of different speed: ``[3, 5]`` lets rank 0 compute three of eight virtual ranks. Same numbers. None: as
    many on each."""

    @property
    def tp(self) -> TensorConfig:
        """The full form of ``tensor``."""
        assert isinstance(self.tensor, TensorConfig)
        return self.tensor

    @property
    def pp(self) -> PipelineConfig:
        """The full form of ``pipeline``."""
        assert isinstance(self.pipeline, PipelineConfig)
        return self.pipeline

    @property
    def sizes(self) -> dict[str, int]:
        """The number of ranks along every axis."""
        return {"tensor": self.tp.size, "context": self.context, "expert": self.expert, "pipeline": self.pp.size}

    def __post_init__(self) -> None:
        ranks = dict.fromkeys(
            ("tensor", "context", "expert", "pipeline", "virtual_ranks", "virtual_ranks_per_rank", "ring"), _RANKS
        )
        check_fields(self, group="parallel", **ranks)
        if self.context % self.ring:
            raise ConfigError(
                f"Got parallel.ring={self.ring} with parallel.context={self.context}, but rings consist of "
                f"context-parallel ranks, so ring must divide context. Set parallel.context={self.ring}."
            )
        if isinstance(self.tensor, int):
            self._set("tensor", TensorConfig(size=self.tensor))
        if isinstance(self.pipeline, int):
            self._set("pipeline", PipelineConfig(size=self.pipeline))
        self._check_shares()

    def _check_shares(self) -> None:
        shares = self.virtual_ranks_per_rank
        if shares is None:
            return
        if self.virtual_ranks is None:
            raise ConfigError(
                f"Got parallel.virtual_ranks_per_rank={list(shares)!r} without parallel.virtual_ranks, which is their "
                f"number. Set parallel.virtual_ranks={sum(shares) or 8}, or leave virtual_ranks_per_rank out."
            )
        if sum(shares) != self.virtual_ranks:
            raise ConfigError(
                f"Got parallel.virtual_ranks_per_rank={list(shares)!r} with parallel.virtual_ranks="
                f"{self.virtual_ranks}, but the sum must be the number of virtual ranks. Set parallel.virtual_ranks="
                f"{sum(shares) or 8}, or other shares."
            )
