"""Every option of the engine: frozen dataclasses, checked when they are made, standard library only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ls_strategy.checked import above, at_least, check_fields
from ls_strategy.errors import ConfigError

ZeroStage = Literal[0, 1, 2, 3]
ReduceDtype = Literal["fp32", "compute"]
TierName = Literal["device", "cpu", "nvme"]
MomentFormat = Literal["fp32", "bf16", "int8"]
StepDevice = Literal["auto", "cpu", "device"]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dualpipe_v"]

_AXES = ("tensor", "sequence", "expert", "pipeline")
_MOST_RANKS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """Where one kind of model state rests instead of on the device."""

    tier: Literal["cpu", "nvme"] = "cpu"
    """``cpu``: host memory, pinned where there is CUDA. ``nvme``: a file on a local drive."""

    ratio: float = 1.0
    """The share of the bytes that goes; the rest stays on the device, the first units of the model first."""

    def __post_init__(self) -> None:
        """Refuse values outside their sets."""
        check_fields(self, ratio=above(0, 1))


@dataclass(frozen=True, kw_only=True)
class NVMeIOConfig:
    """How files of the NVMe tier are read and written; ``ls-strategy tune-io PATH`` measures what is best."""

    block_bytes: int = 8 << 20
    """Bytes of one read or write call."""

    parallelism: int = 4
    """Threads that read and write at the same time."""

    queue_depth: int = 32
    """Blocks that may wait or be under way at a time; who asks for more waits."""

    direct: bool = True
    """Go past the page cache (``O_DIRECT``), where the file system allows it."""

    def __post_init__(self) -> None:
        """Refuse values that no file can be read with."""
        check_fields(
            self,
            block_bytes=at_least(4096, 1 << 30, multiple_of=4096),  # direct I/O moves whole pages
            parallelism=at_least(1, 1024),
            queue_depth=at_least(1, 65536),
        )


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Loss scale of the fp16 modes. The knobs and their defaults are DeepSpeed's (its ``fp16`` section)."""

    static: float | None = None
    """A constant scale. ``None``: the scale is dynamic and the other fields apply."""

    initial_power: int = 16
    """The first dynamic scale is ``2 ** initial_power``."""

    window: int = 1000
    """The scale doubles after this many steps in a row without an overflow."""

    hysteresis: int = 2
    """Overflows that are tolerated before the scale is halved; the step is skipped each time."""

    consecutive_hysteresis: bool = False
    """Refill the tolerance after every good step instead of only when the scale doubles."""

    min_scale: float = 1.0
    """The scale never falls below this; an overflow at this scale ends the run with an error."""

    def __post_init__(self) -> None:
        """Refuse values that cannot scale a loss."""
        largest = 2.0**127  # of a power of two in fp32
        check_fields(
            self,
            static=above(0, largest),
            initial_power=at_least(-126, 127),
            window=at_least(1),
            hysteresis=at_least(1),
            min_scale=above(0, largest),
        )


@dataclass(frozen=True, kw_only=True)
class ZeROConfig:
    """What the engine needs to know beside the model and the optimizers."""

    stage: ZeroStage = 3
    """0 replicates everything, 1 shards optimizer states, 2 also gradients, 3 also parameters."""

    unit_classes: tuple[str, ...] = ()
    """Class names whose instances become units. Empty: the children of every ModuleList and Sequential."""

    min_unit_numel: int = 100_000
    """Blocks with fewer parameters join the root unit, which stays gathered during a step. Elements."""

    prefetch_units: int = 1
    """Stage 3: how many units are gathered ahead of the one that computes."""

    master_weights: bool = True
    """Keep fp32 master weights in the ``*-true`` 16-bit modes. False: the optimizer works in 16 bit."""

    reduce_dtype: ReduceDtype = "fp32"
    """NCCL: sum gradients over ranks in fp32, or in the dtype they were computed in. gloo always sums in fp32."""

    fp32_modules: tuple[str, ...] = ()
    """Class names of modules that stay in fp32 in the ``*-true`` 16-bit modes (a router, say).

    Their inputs are cast to fp32 and their outputs back. Batch norms always keep fp32 parameters and statistics.
    """

    offload_optimizer: OffloadConfig | None = None
    """Master weights and the optimizer's states rest on this tier, and the optimizer steps where they are."""

    offload_param: OffloadConfig | None = None
    """Stage 3: this rank's shard of the parameters rests on this tier; units are gathered from there."""

    offload_gradient: OffloadConfig | None = None
    """Averaged gradients rest on this tier between backward and step. None: on the optimizer's."""

    nvme_path: str = ""
    """Folder of the NVMe tier's files."""

    nvme_io: NVMeIOConfig = field(default_factory=NVMeIOConfig)
    """How they are read and written."""

    nvme_allow_ram: bool = False
    """Accept a folder that is in memory itself (tmpfs), for tests."""

    moments: MomentFormat = "fp32"
    """How the optimizer's moments are stored; anything but fp32 rounds stochastically."""

    step_on: StepDevice = "auto"
    """Where offloaded states are updated: by the CPU, or streamed through the device. ``auto`` measures once."""

    overlap_step: bool = True
    """Update offloaded states while backward, or the next forward, runs. The numbers are the same either way."""

    delayed_update_after: int | None = None
    """Stages 1 and 2: after this many steps, apply every update one step late (ZeRO-Offload, section 5.2)."""

    shard_weights: tuple[float, ...] | Literal["auto"] | None = None
    """How much of the sharded states each rank holds, one positive number per rank; ``auto``: by its memory."""

    @property
    def offloads(self) -> bool:
        """Whether any state leaves the device."""
        return any((self.offload_optimizer, self.offload_param, self.offload_gradient))

    @property
    def tiers(self) -> set[str]:
        """Names of the tiers in use beside the device."""
        kinds = (self.offload_optimizer, self.offload_param, self.offload_gradient)
        return {kind.tier for kind in kinds if kind is not None}

    def __post_init__(self) -> None:
        """Refuse values outside their sets."""
        check_fields(
            self,
            named=False,
            min_unit_numel=at_least(0),
            prefetch_units=at_least(0),
            delayed_update_after=at_least(1),
            shard_weights=above(0),
        )
        if self.shard_weights is not None and self.stage == 0:
            raise ConfigError(
                f"Got shard_weights={self.shard_weights!r} with stage=0, where every rank holds all states. Set stage "
                "to 1, 2 or 3, or leave shard_weights out."
            )
        if self.shard_weights == ():
            raise ConfigError("Got shard_weights=[], but it must hold one number per rank. Set [2, 1], for example.")
        self._check_offload()

    def _check_offload(self) -> None:
        if self.offloads and self.stage == 0:
            raise ConfigError(
                "offload with stage=0: every rank would keep and update a copy of all states on its host. Use stage 1, "
                "which shards them and computes the same."
            )
        if self.offload_param is not None and self.stage != 3:
            raise ConfigError(
                f"offload_param with stage={self.stage}: parameters rest in shards only at stage 3; below, every rank "
                "needs them on the device at all times. Use stage=3, or offload_optimizer alone."
            )
        if self.offload_gradient is not None and self.offload_optimizer is None:
            raise ConfigError(
                "offload_gradient without offload_optimizer: the gradients would come back for the step at once. Set "
                "offload_optimizer too."
            )
        after = self.delayed_update_after
        if after is not None and (self.offload_optimizer is None or self.stage == 3):
            raise ConfigError(
                f"delayed_update_after={after} with stage={self.stage}: it needs offload_optimizer, and stage 1 or 2, "
                "where weights of the last step are kept apart from the masters."
            )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How one model, or one sequence, is divided over ranks."""

    tensor_parallel_size: int = 1
    """Ranks that divide the layers among them."""

    tensor_parallel_plan: Literal["auto"] | Mapping[str, Any] = "auto"
    """``auto``, or ``{pattern of module names: style}``."""

    tensor_parallel_sequence: bool = False
    """Also divide what lies between the divided layers (norms, dropout), along the tokens."""

    sequence_parallel_size: int = 1
    """Ranks that divide the tokens of every sequence among them."""

    expert_parallel_size: int = 1
    """Neighbouring ranks that divide the experts of every MoE layer among them, whatever else they share."""

    pipeline_parallel_size: int = 1
    """Ranks that divide the blocks of the model among them, one after the other."""

    micro_batches: int | None = None
    """Parts of every batch that are under way in the pipeline. None: four per rank of it."""

    micro_batch_size: int | None = None
    """Samples of each of them, in place of their number."""

    pipeline_schedule: Schedule = "1f1b"
    """Order of forwards and backwards, see `ls_strategy.parallel.pipeline.schedules`."""

    pipeline_partition: str = "parameters"
    """What is balanced over stages: ``parameters``, ``flops``, ``uniform`` or ``type:REGEX`` of class names."""

    pipeline_stages_per_rank: int | None = None
    """Stages that every rank holds. None: as few as the schedule takes."""

    pipeline_blocks: str | None = None
    """Name of the ModuleList or Sequential that is divided. None: ``to_layers()`` of the model, or the longest."""

    def __post_init__(self) -> None:
        """Refuse values outside their sets."""
        sizes = dict.fromkeys((f"{axis}_parallel_size" for axis in _AXES), at_least(1, _MOST_RANKS))
        counts = dict.fromkeys(("micro_batches", "micro_batch_size", "pipeline_stages_per_rank"), at_least(1, 1 << 20))
        check_fields(self, named=False, **sizes, **counts)
        plan = self.tensor_parallel_plan
        partition = self.pipeline_partition
        if partition not in ("parameters", "uniform", "flops") and not partition.startswith("type:"):
            raise ConfigError(
                f"pipeline_partition={partition!r}: balance 'parameters', 'flops', numbers of blocks ('uniform'), or "
                "of blocks whose class matches ('type:Block')."
            )
        if partition.startswith("type:"):
            _check_pattern(partition)
        if self.pipeline_parallel_size == 1:
            self._check_no_pipeline()
        if self.tensor_parallel_size == 1 and (self.tensor_parallel_sequence or plan != "auto"):
            raise ConfigError(
                "tensor_parallel_plan and tensor_parallel_sequence need tensor_parallel_size of 2 or more; it is 1."
            )

    def _check_no_pipeline(self) -> None:
        if self.micro_batches or self.micro_batch_size:
            raise ConfigError(
                "micro_batches divides a batch for a pipeline, and pipeline_parallel_size is 1. To add up gradients of "
                "several batches, use Trainer(accumulate_grad_batches=...)."
            )
        defaults = {field.name: field.default for field in fields(self)}
        for name in ("pipeline_schedule", "pipeline_partition", "pipeline_stages_per_rank", "pipeline_blocks"):
            if getattr(self, name) != defaults[name]:
                raise ConfigError(
                    f"Got {name}={getattr(self, name)!r}, but it requires a pipeline, and pipeline_parallel_size is 1. "
                    f"Set pipeline_parallel_size=2 or more, or leave {name} out."
                )


def _check_pattern(partition: str) -> None:
    try:
        re.compile(partition.removeprefix("type:"))
    except re.error as error:
        raise ConfigError(
            f"Got pipeline_partition={partition!r}, but what follows type: must be a regular expression ({error}). Set "
            "a class name, for example pipeline_partition='type:Block'."
        ) from None


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """Which modules run their forward a second time in backward, instead of keeping what it computed."""

    policy: Literal["full", "selective"] = "full"
    """``full`` keeps a module's inputs alone. ``selective`` also keeps the outputs of the operations in ``keep``."""

    classes: tuple[str, ...] = ()
    """Class names of the modules, the outermost of each. Empty: the children of every ModuleList and Sequential."""

    every: int = 1
    """Recompute the first of them and each ``every``-th after it; the others keep what they computed."""

    keep: tuple[str, ...] = ("matmul", "attention", "collective")
    """``selective``: what is expensive to compute twice. ``matmul attention convolution collective``, or names of
    operations (``aten.gelu``)."""

    def __post_init__(self) -> None:
        """Refuse values outside their sets."""
        check_fields(self, every=at_least(1))
        if self.policy == "selective" and not self.keep:
            raise ConfigError("policy='selective' with an empty keep keeps nothing: use policy='full'.")


@dataclass(frozen=True, kw_only=True)
class ActivationOffloadConfig:
    """Where tensors that backward will need rest between forward and backward."""

    tier: Literal["cpu", "nvme"] = "cpu"
    """``cpu``: host memory, pinned where there is CUDA. ``nvme``: a file on a local drive."""

    min_bytes: int = 1 << 20
    """Smaller tensors stay on the device: there are few bytes in them, and each copy costs a launch."""

    in_flight_bytes: int = 256 << 20
    """Bound of what is on its way in either direction, on the device. Also what never leaves: the last tensors of the
    forward, which backward needs first. A tensor above it is alone on its way, and training waits for it."""

    staging_bytes: int = 256 << 20
    """``nvme``: bound of the host memory between the device and the drive, in either direction."""

    def __post_init__(self) -> None:
        """Refuse values outside their sets."""
        size = at_least(0)
        check_fields(self, min_bytes=size, in_flight_bytes=size, staging_bytes=size)
