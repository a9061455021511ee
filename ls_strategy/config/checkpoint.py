"""``checkpoint``: what checkpoints are, and when they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ls_strategy.checked import check_fields
from ls_strategy.config.group import Group
from ls_strategy.errors import ConfigError

CheckpointFormat = Literal["sharded", "file"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Group):
    """How checkpoints are written. ``"sharded"`` or ``"file"`` alone: ``format``."""

    format: CheckpointFormat = "sharded"
    """``sharded``: a checkpoint is a folder; every rank writes what it has, any other layout loads it. ``file``: one
    file in Lightning's own format, gathered on rank 0, which needs the memory for it."""

    background: bool = False
    """Write checkpoint folders while training goes on. A step waits only for copies of what is on the device; an error
    is raised by the next save, or at the end."""

    frozen: bool = True
    """Put parameters that do not train into checkpoint folders too."""

    on_error: Literal["raise", "continue"] = "raise"
    """``raise``, or ``continue`` training when a checkpoint cannot be written (a full disk); the error is logged, and
    no earlier checkpoint is removed then."""

    @classmethod
    def of(cls, option: CheckpointFormat | CheckpointConfig) -> CheckpointConfig:
        """Return the group that ``option`` is, or is short for."""
        return option if isinstance(option, CheckpointConfig) else cls(format=option)

    def __post_init__(self) -> None:
        """Refuse values outside their sets."""
        check_fields(self, group="checkpoint")
        if self.background and self.format == "file":
            raise ConfigError(
                "Got checkpoint.background=True with checkpoint.format='file', but only folders are written in the "
                "background. Set checkpoint.format='sharded', or leave checkpoint.background out."
            )
