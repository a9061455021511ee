"""``checkpoint``: the format of checkpoints, and when they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ls_strategy.checked import check_fields
from ls_strategy.config.group import Group
from ls_strategy.errors import ConfigError

CheckpointFormat = Literal["sharded", "file"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Group):
    """How checkpoints are written. The short form ``"sharded"`` or ``"file"`` sets ``format``."""

    format: CheckpointFormat = "sharded"
    """``sharded``: a checkpoint is a folder; every rank writes what it stores, and any other layout can load it.
    ``file``: one file in Lightning's own format, gathered on rank 0, which needs the memory for it."""

    background: bool = False
    """Write checkpoint folders while training continues. A step waits only for copies from the device; the next save,
    or the end of the run, raises an error of the write."""

    frozen: bool = True
    """Include parameters that do not train in checkpoint folders."""

    on_error: Literal["raise", "continue"] = "raise"
    """``raise`` when a checkpoint cannot be written (a full disk), or ``continue`` training: the error is logged and no
    earlier checkpoint is removed."""

    @staticmethod
    def short_form(value: Any, stage: Any) -> dict[str, Any]:
        """Return the options that ``"sharded"`` or ``"file"`` sets."""
        return {"format": value}

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        check_fields(self, group="checkpoint")
        if self.background and self.format == "file":
            raise ConfigError(
                "Got checkpoint.background=True with checkpoint.format='file', but only folders are written in the "
                "background. Set checkpoint.format='sharded', or leave checkpoint.background out."
            )
