"""The errors of this package, one class per cause. A message says what was given, the rule, and the cure."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

NOTED: ContextVar[list[LSError] | None] = ContextVar("NOTED", default=None)
"""Gets every error that is made while a parser builds objects, for the parser buries it in a text of its own."""


class LSError(Exception):
    """Base class of every error that this package raises on purpose."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        noted = NOTED.get()
        if noted is not None:
            noted.append(self)


class ConfigError(LSError, ValueError):
    """An option is wrong by itself; raised where the option is read, before any process group exists."""


class PlanError(LSError, ValueError):
    """Options cannot work with this model, optimizer or world size; raised on every rank before training."""


class StateError(LSError, RuntimeError):
    """A call came at the wrong time, for example a gradient norm before any backward."""


class RankFailedError(LSError, RuntimeError):
    """Another rank failed and reported it; the message has its rank and its error."""


class CheckpointError(LSError, RuntimeError):
    """A checkpoint could not be written, or what is on the disk is not a complete, undamaged checkpoint."""


class DataError(LSError, RuntimeError):
    """Ranks that wait for each other in every step have different numbers of batches."""


class OutOfStepError(LSError, RuntimeError):
    """Ranks wait for each other in different places, so none can continue; the message says where each one is."""


def of_tensor_class(name: str) -> str:
    """Return the message for a state whose class has parts, and so no bytes of its own, in a checkpoint."""
    return (
        f"an optimizer state is of the class {name}, which checkpoints of this package do not hold. For states in "
        "fewer bits use torch.optim.AdamW with precision.moments='int8' or 'bf16', or leave optimizer states out: "
        "trainer.save_checkpoint(path, weights_only=True), ModelCheckpoint(save_weights_only=True)."
    )
