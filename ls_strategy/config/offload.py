"""``offload``: which model states are stored in host memory or on NVMe, and how they are updated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

from ls_strategy.checked import above, at_least, check_fields
from ls_strategy.config.group import Group
from ls_strategy.errors import ConfigError
from ls_strategy.registry import EntryOf

_OtherTier: TypeAlias = Annotated[str, EntryOf("tiers")]
TierName: TypeAlias = Literal["device", "cpu", "nvme"] | _OtherTier
OffloadTier: TypeAlias = Literal["cpu", "nvme"] | _OtherTier
StepDevice = Literal["auto", "cpu", "device"]
StateKind = Literal["optimizer", "parameters", "gradients"]

KINDS: tuple[StateKind, ...] = ("optimizer", "parameters", "gradients")


@dataclass(frozen=True, kw_only=True)
class TierConfig(Group):
    """Where one kind of model state is stored instead of on the device."""

    tier: OffloadTier
    """``cpu``: host memory, pinned with CUDA. ``nvme``: a file on a local NVMe device."""

    ratio: float = 1.0
    """Share of the bytes that is offloaded; the model's first units stay on the device."""

    def __post_init__(self) -> None:
        check_fields(self, ratio=above(0, 1))


@dataclass(frozen=True, kw_only=True)
class NVMeIOConfig(Group):
    """How files of the NVMe tier are read and written; ``ls-strategy tune-io PATH`` measures the best values."""

    block_bytes: int = 8 << 20
    """Bytes of one read or write call."""

    parallelism: int = 4
    """Threads that read and write in parallel."""

    queue_depth: int = 32
    """Blocks queued or in flight; further requests wait."""

    direct: bool = True
    """Bypass the page cache (``O_DIRECT``) where the file system supports it."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            block_bytes=at_least(4096, 1 << 30, multiple_of=4096),  # direct I/O moves full pages
            parallelism=at_least(1, 1024),
            queue_depth=at_least(1, 65536),
        )


@dataclass(frozen=True, kw_only=True)
class OffloadConfig(Group):
    """Tiers of the model states. ``"cpu"`` or ``"nvme"`` is short for ``optimizer``, and at stage 3 ``parameters``."""

    optimizer: OffloadTier | TierConfig | None = None
    """Tier on which master weights and optimizer states are stored and updated. ``TierConfig(tier="cpu", ratio=0.7)``
    keeps 30 % of the bytes on the device. Same numbers."""

    parameters: OffloadTier | TierConfig | None = None
    """Stage 3: tier of this rank's shard of the parameters; units are gathered from there."""

    gradients: OffloadTier | TierConfig | None = None
    """Tier of averaged gradients between backward and step. None: the optimizer's."""

    nvme_path: str = ""
    """Folder on a local NVMe device, also for activations. Empty: the environment's ``LS_STRATEGY_NVME_PATH``, else
    ``nvme`` in the Trainer's ``default_root_dir``; the log shows the choice."""

    nvme_io: NVMeIOConfig = field(default_factory=NVMeIOConfig)
    """How files of the NVMe tier are read and written."""

    nvme_allow_ram: bool = False
    """Accept a folder in memory (tmpfs), for tests."""

    step_on: StepDevice = "auto"
    """Where offloaded states are updated: on the ``cpu``, or streamed through the ``device``. ``auto`` measures both
    when a fit starts."""

    delay_after: int | None = None
    """Stages 1 and 2: from this step on, apply updates one step late, overlapped with the next step (ZeRO-Offload,
    section 5.2). Changes the numbers. None: never."""

    @staticmethod
    def short_form(value: Any, stage: Any) -> dict[str, Any]:
        """Return the options that ``"cpu"``, ``"nvme"`` or None sets at ``stage``."""
        return {"optimizer": value, **({"parameters": value} if stage in (3, "auto") or value is None else {})}

    def tier_of(self, kind: StateKind) -> TierConfig | None:
        """Return the tier of one kind of state. None: the device, or for gradients the optimizer's tier."""
        option = getattr(self, kind)
        assert option is None or isinstance(option, TierConfig)
        return option

    @property
    def any_state(self) -> bool:
        """Whether any state is offloaded."""
        return any(self.tier_of(kind) for kind in KINDS)

    @property
    def tiers(self) -> set[str]:
        """Names of the tiers in use besides the device."""
        return {config.tier for config in map(self.tier_of, KINDS) if config is not None}

    def __post_init__(self) -> None:
        check_fields(self, group="offload", delay_after=at_least(1))
        for kind in KINDS:
            option = getattr(self, kind)
            if option is not None and not isinstance(option, TierConfig):
                self._set(kind, TierConfig(tier=option))
        if self.gradients is not None and self.optimizer is None:
            raise ConfigError(
                "Got offload.gradients without offload.optimizer, but then the step would load the gradients back at "
                "once. Set offload.optimizer too."
            )
        if self.delay_after is not None and self.optimizer is None:
            raise ConfigError(
                f"Got offload.delay_after={self.delay_after} without offload.optimizer, but only offloaded states are "
                "updated late. Set offload.optimizer too, or leave offload.delay_after out."
            )
