"""Objects whose pickles do something when they are read: what a reader of untrusted files must not build."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


class Runs:
    """A pickle of this runs a command, which makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.marker}",)


class MakesFolder(Runs):
    """A pickle of this makes a folder, without a shell."""

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)
