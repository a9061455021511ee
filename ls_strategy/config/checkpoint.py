"""``checkpoint``: the format of checkpoints, and when they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ls_strategy.checked import check_fields
from ls_strategy.config.group import Group

CheckpointFormat = Literal["auto", "sharded", "file"]


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Group):
    """How checkpoints are written. The short form ``"auto"``, ``"sharded"`` or ``"file"`` sets ``format``."""

    format: CheckpointFormat = "auto"
    """``sharded``: a folder, to which every rank writes what it stores; any other layout can load it. ``file``: one
    file as DDP writes it. Ranks of one host write it together; otherwise, and for hooks and plugins that get
    checkpoints, it is gathered on rank 0, which needs the memory. ``auto``: a file while weights and optimizer states
    have at most 2 GiB together, a folder beyond, and with pipelines and ``frozen=False``."""

    background: bool = False
    """Write while training continues. States are copied during the next forward and backward; an update waits for
    what is not copied by then. The next save, or the end of the run, raises an error of the write."""

    frozen: bool = True
    """Include frozen parameters in checkpoint folders; a file always has them."""

    on_error: Literal["raise", "continue"] = "raise"
    """When a checkpoint cannot be written (a full disk): ``raise``, or ``continue`` training: the error is logged and
    no earlier checkpoint is removed."""

    @staticmethod
    def short_form(value: Any, stage: Any) -> dict[str, Any]:
        """Return the options that ``"auto"``, ``"sharded"`` or ``"file"`` sets."""
        return {"format": value}

    def __post_init__(self) -> None:
        check_fields(self, group="checkpoint")
