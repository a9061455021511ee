"""Checkpoints on web servers: single files can be loaded, as Lightning does, and folders are refused.

HTTP lists no folder, and Lightning's reader caches downloads under the last part of their name: ``meta.pt`` of one
folder would be taken for that of the next.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

from ls_strategy.checkpoint.target import MANIFEST
from ls_strategy.errors import CheckpointError

_ANSWER_S = 10.0
"""Seconds that a server has to answer."""

_LARGEST = 1 << 30
"""Bytes of a manifest that are read at most."""


def is_web(path: object) -> bool:
    """Return whether a path is the address of something on a web server."""
    return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(("http://", "https://"))


def as_on_disk(path: object, weights_only: bool | None) -> bool | None:
    """Return ``weights_only``, or True for an address on a web server where it is None, as ``torch.load`` has it.

    Lightning's own default there is False, with which code in the file runs.
    """
    return True if weights_only is None and is_web(path) else weights_only


def refuse_web_folder(path: str | os.PathLike[str]) -> None:
    """Check that an address is not of a checkpoint folder. Asks the server for the folder's manifest.

    Raises:
        CheckpointError: It is.
    """
    url = os.fspath(path)
    if not _has_manifest(url):
        return
    cached = _cached(url)
    raise CheckpointError(
        f"Got the checkpoint {url!r}, which is a folder, but over HTTP only single files can be loaded. Copy the "
        "folder to this machine and give its path, or make one file of it and serve that: ls-strategy consolidate "
        "FOLDER FILE.ckpt." + (f" torch has cached the server's answer: remove {cached} too." if cached else "")
    )


def _has_manifest(url: str) -> bool:
    parts = urlsplit(url)
    try:
        with urlopen(parts._replace(path=f"{parts.path.rstrip('/')}/{MANIFEST}").geturl(), timeout=_ANSWER_S) as answer:
            return {"files", "layout", "crc32"} <= json.loads(answer.read(_LARGEST)).keys()
    except (OSError, ValueError, AttributeError):  # it does not exist, or is something else
        return False


def _cached(url: str) -> Path | None:
    """Return the file in which ``torch.hub`` keeps what it got for this address; None if there is none."""
    import torch

    path = Path(torch.hub.get_dir(), "checkpoints", Path(urlsplit(url).path).name)
    return path if path.is_file() else None
