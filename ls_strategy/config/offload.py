"""``offload``: which model states are stored in host memory or on NVMe, and how they are updated there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from ls_strategy.checked import above, at_least, check_fields
from ls_strategy.config.group import Group
from ls_strategy.errors import ConfigError

TierName = Literal["device", "cpu", "nvme"]
StepDevice = Literal["auto", "cpu", "device"]
StateKind = Literal["optimizer", "parameters", "gradients"]

KINDS: tuple[StateKind, ...] = ("optimizer", "parameters", "gradients")


@dataclass(frozen=True, kw_only=True)
class TierConfig(Group):
    """Where one kind of model state is stored instead of on the device."""

    tier: Literal["cpu", "nvme"]
    """``cpu``: host memory, pinned where there is CUDA. ``nvme``: a file on a local drive."""

    ratio: float = 1.0
    """The share of the bytes that goes; the rest stays on the device, the first units of the model first."""

    def __post_init__(self) -> None:
        """Refuse values outside their sets."""
        check_fields(self, ratio=above(0, 1))


@dataclass(frozen=True, kw_only=True)
class NVMeIOConfig(Group):
    """How files of the NVMe tier are read and written; ``ls-strategy tune-io PATH`` measures what is best."""

    block_bytes: int = 8 << 20
    """Bytes of one read or write call."""

    parallelism: int = 4
    """Threads that read and write at the same time."""

    queue_depth: int = 32
    """Blocks that may wait or be in flight at a time; who asks for more waits."""

    direct: bool = True
    """Go past the page cache (``O_DIRECT``), where the file system allows it."""

    def __post_init__(self) -> None:
        """Refuse values that no file can be read with."""
        check_fields(
            self,
            block_bytes=at_least(4096, 1 << 30, multiple_of=4096),  # direct I/O moves full pages
            parallelism=at_least(1, 1024),
            queue_depth=at_least(1, 65536),
        )


@dataclass(frozen=True, kw_only=True)
class OffloadConfig(Group):
    """Tiers of the model's states. ``"cpu"`` or ``"nvme"`` alone: the optimizer's, at stage 3 the parameters too."""

    RENAMED: ClassVar[dict[str, str]] = {
        "tier": "TierConfig(tier=...), as in OffloadConfig(optimizer=TierConfig(tier='cpu', ratio=0.7))",
        "ratio": "TierConfig(ratio=...), as in OffloadConfig(optimizer=TierConfig(tier='cpu', ratio=0.7))",
    }

    optimizer: Literal["cpu", "nvme"] | TierConfig | None = None
    """Master weights and the optimizer's states are stored on this tier, and updated there.
    ``TierConfig(tier="cpu", ratio=0.7)`` keeps 30 % of the bytes on the device. The numbers are the same."""

    parameters: Literal["cpu", "nvme"] | TierConfig | None = None
    """Stage 3: this rank's shard of the parameters is stored on this tier; units are gathered from there."""

    gradients: Literal["cpu", "nvme"] | TierConfig | None = None
    """Averaged gradients are stored on this tier between backward and step. None: on the optimizer's."""

    nvme_path: str = ""
    """Folder of the NVMe tier, on a local drive, also for activations. Empty: the environment's
    ``LS_STRATEGY_NVME_PATH``, else ``nvme`` in the Trainer's ``default_root_dir``; the log says which."""

    nvme_io: NVMeIOConfig = field(default_factory=NVMeIOConfig)
    """How its files are read and written."""

    nvme_allow_ram: bool = False
    """Accept a folder that is in memory itself (tmpfs), for tests."""

    step_on: StepDevice = "auto"
    """Where offloaded states are updated: by the ``cpu``, or streamed through the ``device``. ``auto`` measures both
    when a fit starts."""

    delay_after: int | None = None
    """Stages 1 and 2: from this step on apply every update one step late, while the next step computes (ZeRO-Offload,
    section 5.2). Changes the numbers. None: never."""

    @classmethod
    def of(cls, option: Literal["cpu", "nvme"] | OffloadConfig | None, stage: int) -> OffloadConfig:
        """Return the group that ``option`` is, or is short for: what ``zero<stage>_offload`` and ``_nvme`` mean."""
        if isinstance(option, OffloadConfig):
            return option
        return cls(optimizer=option, parameters=option if stage == 3 else None)

    def tier_of(self, kind: StateKind) -> TierConfig | None:
        """Return where one kind of state is stored. None: on the device, or, gradients, on the optimizer's tier."""
        option = getattr(self, kind)
        assert option is None or isinstance(option, TierConfig)
        return option

    @property
    def any_state(self) -> bool:
        """Whether any state leaves the device."""
        return any(self.tier_of(kind) for kind in KINDS)

    @property
    def tiers(self) -> set[str]:
        """Names of the tiers in use beside the device."""
        return {config.tier for config in map(self.tier_of, KINDS) if config is not None}

    def __post_init__(self) -> None:
        """Refuse values outside their sets."""
        check_fields(self, group="offload", delay_after=at_least(1))
        for kind in KINDS:
            option = getattr(self, kind)
            if option is not None and not isinstance(option, TierConfig):
                self._set(kind, TierConfig(tier=option))
        if self.gradients is not None and self.optimizer is None:
            raise ConfigError(
                "Got offload.gradients without offload.optimizer, but then the gradients would come back for the step "
                "at once. Set offload.optimizer too."
            )
        if self.delay_after is not None and self.optimizer is None:
            raise ConfigError(
                f"Got offload.delay_after={self.delay_after} without offload.optimizer, but only offloaded states are "
                "updated late. Set offload.optimizer too, or leave offload.delay_after out."
            )
