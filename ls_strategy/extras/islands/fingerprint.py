"""Compare the fingerprints of islands, which must agree before they exchange a byte. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

OWN = "own "  # begins the keys of what every island needs for itself
_MOST_CHARACTERS = 300  # of one value in a message, which all islands get


def disagreement(prints: Mapping[int, Mapping[int, Mapping[str, Any]]]) -> str | None:
    """Return why islands do not fit together, or None.

    Args:
        prints: by island (-1: those that train already) and rank.
    """
    first, *others = sorted(prints)
    for other in others:
        for rank in sorted(prints[first].keys() | prints[other].keys()):
            ours, theirs = prints[first].get(rank), prints[other].get(rank)
            if ours is None or theirs is None:
                return _message("ranks", first, len(prints[first]), other, len(prints[other]))
            for key in {**ours, **theirs}:
                if key.startswith(OWN):
                    if ours.get(key) is not None and ours.get(key) == theirs.get(key):
                        return _shared(key.removeprefix(OWN), first, other, ours[key])
                elif ours.get(key) != theirs.get(key):
                    return _message(key, first, ours.get(key), other, theirs.get(key))
    return None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _name(island: int) -> str:
    return "the running islands" if island < 0 else f"island {island}"


def _message(key: str, one: int, ours: Any, other: int, theirs: Any) -> str:
    return (
        f"Got islands that do not fit together: {_short(key)} is {_short(ours)} on {_name(one)} and "
        f"{_short(theirs)} on {_name(other)}. Start "
        f"all islands with the same model, options of DiLoCo and number of ranks. {_CURES.get(key, '')}"
    ).rstrip()


def _shared(key: str, one: int, other: int, value: Any) -> str:
    return (
        f"Got the same {_short(key)} on {_name(one)} and {_name(other)}: {_short(value)}. {_CURES.get(key, '')}"
    ).rstrip()


_CURES = {
    "frozen parameters": "Those that do not train are not exchanged: load the same file, or seed all islands equally.",
    "parameters that train": "Freeze and unfreeze the same ones at the same step; an island that is started again "
    "needs a checkpoint from after that step.",
    "folder": "Their checkpoints and logs would overwrite each other: give every island its own "
    "Trainer(default_root_dir=...).",
    "first batches": "Every island would train on the same data: leave the sampler to Lightning "
    "(use_distributed_sampler=True), or make a DistributedSampler with num_replicas=islands * ranks and "
    "rank=island * ranks + rank.",
}
