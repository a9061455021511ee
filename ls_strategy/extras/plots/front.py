"""Draw points over two axes: memory against time, say."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ls_strategy.errors import ConfigError
from ls_strategy.extras.plots.figure import figure, require


def check_picture(path: Path) -> None:
    """Refuse a file that `draw_front` cannot write.

    Raises:
        ConfigError: its suffix names no format, or matplotlib is missing.
    """
    require(f"--picture {path}")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ConfigError(
            f"Got --picture {path}, but matplotlib draws {', '.join(sorted(formats))}. Give front.png, say."
        )


def draw_front(points: Sequence[tuple[float, float]], title: str, x_label: str, y_unit: str, path: Path) -> None:
    """Write a picture of points ``(x, y)``, both from 0 on, joined in their order as steps.

    Args:
        points: at least one.
        title: above the picture.
        x_label: name and unit of ``x``.
        y_unit: unit of ``y``.
        path: a file whose suffix names the format, such as ``.png``.
    """
    with figure(720, 480, layout="constrained") as drawn:
        axes = drawn.add_subplot(title=title, xlabel=x_label, ylabel=y_unit)
        axes.step(*zip(*points, strict=True), "o-", where="post", color="#0072b2", label="nothing faster needs less")
        axes.set(xlim=(0, None), ylim=(0, None))
        axes.grid()
        axes.legend()
        undated = {"pdf": "CreationDate", "ps": "CreationDate", "eps": "CreationDate", "svg": "Date", "svgz": "Date"}
        dates = undated.get(path.suffix[1:].lower())
        drawn.savefig(path, dpi=144, metadata={dates: None} if dates else None)
