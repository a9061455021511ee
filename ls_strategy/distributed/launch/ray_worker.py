"""Detect a train function of Ray Train in this process, without importing Ray where the program has not."""

from __future__ import annotations

import sys
from typing import Any


def in_train_function() -> bool:
    """Return whether a trainer of Ray Train runs this code on one of its workers."""
    train: Any = sys.modules.get("ray.train")
    if train is None:
        return False
    try:
        train.get_context().get_world_size()
    except Exception:  # different ones on the driver, in a trial of Tune, and before Ray's own import is done
        return False
    return True
