"""What the recipes' notebooks show of a run: its report and its images. Needs IPython, which every notebook has."""

from __future__ import annotations

import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ls_strategy.extras.report.page import page
from ls_strategy.extras.report.run import read

if TYPE_CHECKING:
    from IPython.display import HTML, Image


def report(folder: str | Path, *, height: int = 900) -> HTML:
    """Return what ``ls-strategy report`` writes of the run in ``folder``, as the output of a cell."""
    from IPython.display import HTML

    found = Path(folder)
    frame = html.escape(page([read(found, found.name)]))
    # In a div: IPython advises against a lone frame, but its own takes an address only.
    return HTML(f'<div><iframe srcdoc="{frame}" width="100%" height="{height}" style="border: 0"></iframe></div>')


def image(folder: str | Path, tag: str) -> Image:
    """Return the last image that the run in ``folder`` has logged under ``tag``.

    Raises:
        KeyError: it has logged none; the message has the tags of those that it has.
    """
    from IPython.display import Image

    found: dict[str, Any] = read(Path(folder), str(folder)).images
    if tag not in found:
        raise KeyError(f"{folder} has no image {tag!r}; it has {sorted(found)}")
    return Image(data=found[tag].data)
