"""Figures that matplotlib draws without its global state: SVG for pages, files, and pixels for loggers.

Sizes are in pixels: a figure has 72 dots per inch, so that a point is a pixel. What the user has set in matplotlib's
``rcParams`` neither changes a figure nor is changed by one.
"""

from __future__ import annotations

import importlib
import io
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ls_strategy.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Colour = tuple[int, int, int]

CURE = 'Run pip install "ls_strategy[report]"'
INK, SOFT, RULE = "#1b1f23", "#50575e", "#d5dadf"
"""Colors of text, of text and lines at axes, and of grids."""

_LONGEST = 48  # maximum characters of a row's name


@dataclass(frozen=True)
class Band:
    """Bars of one color in a row."""

    row: int
    colour: Colour
    bars: Sequence[tuple[float, float]]  # where each begins and ends
    top: float = 0.0  # share of the row that is left free above the bars


def missing(*packages: str) -> str:
    """Import what draws, and return why nothing can be drawn: what cannot be imported. Empty if all can."""
    for module in ("matplotlib", "matplotlib.figure", *packages):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:
            return f"{module.partition('.')[0]} is missing"
        except ImportError as error:
            return f"{module} cannot be imported: {error}"
    return ""


def require(given: str, *packages: str) -> None:
    """Refuse what cannot be drawn.

    Args:
        given: what needs matplotlib.
        packages: further packages that it needs.

    Raises:
        ConfigError: a package is missing.
    """
    if why := missing(*packages):
        raise ConfigError(f"Got {given}, which draws with {' and '.join(('matplotlib', *packages))}; {why}. {CURE}.")


@contextmanager
def figure(width: float, height: float, name: str = "", **options: Any) -> Iterator[Any]:
    """Draw on a new ``matplotlib.figure.Figure`` within the context, in the package's style, and write it there too.

    Args:
        width: in pixels.
        height: in pixels.
        name: of figures on one page, whose SVG must not have the same identifiers.
        **options: of ``Figure``.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    ours = {
        "svg.fonttype": "none", "svg.hashsalt": f"ls_strategy {name!a}", "text.parse_math": False, "font.size": 12,
        "axes.titlesize": 13, "axes.edgecolor": SOFT, "axes.labelcolor": SOFT, "axes.labelsize": "medium",
        "axes.axisbelow": True, "axes.spines.right": False, "axes.spines.top": False, "grid.color": RULE,
        "text.color": INK, "xtick.color": SOFT, "ytick.color": SOFT, "ytick.major.size": 0, "legend.frameon": False,
        "lines.scale_dashes": False,
    }  # fmt: skip
    with style.context(["default", ours]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # browsers have the characters of all languages
        yield Figure((width / 72, height / 72), dpi=72, **options)


def svg(drawn: Any, *, transparent: bool = False) -> str:
    """Return a figure as SVG, from ``<svg>`` on. The same figure gives the same text."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    drawn.savefig(file, format="svg", transparent=transparent, metadata=nothing)
    text = re.sub(r"^.*?(?=<svg)|<style.*?</style>|font-family: [^;<]*; | transform=\"rotate\(-0[^\"]*\"", "",
                  file.getvalue(), flags=re.DOTALL)  # fmt: skip
    text = re.sub(r' d="[^"]*"', lambda way: re.sub(r"(\.\d)\d+", r"\1", way[0]).replace("\n", ""), text)
    return re.sub(r' id="\w+_\d+"|(?<=>)\s+(?=<)', "", text)


def pixels(drawn: Any) -> Tensor:
    """Return a figure as an image, ``(3, H, W)`` uint8, for TensorBoard's ``add_image``."""
    import torch
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    width, height = canvas.get_width_height()
    image = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8).view(height, width, 4)
    return image[..., :3].permute(2, 0, 1)


def rows(
    title: str, names: Sequence[str], bands: Iterable[Band], legend: Sequence[tuple[Colour, str]], x_label: str,
    length: float, *, width: int = 1200,
) -> Tensor:  # fmt: skip
    """Return an image of rows with bars on a gray ground, ``(3, H, W)`` uint8.

    Args:
        title: above.
        names: of the rows, from top to bottom; a long one keeps its end.
        bands: the bars.
        legend: what each color means.
        x_label: what the bars' numbers are.
        length: of the axis, which begins at 0.
        width: of the image, in pixels.
    """
    with figure(width, 24 * len(names) + 100, layout="constrained") as drawn:
        axes = drawn.add_subplot(title=title, xlabel=x_label, xlim=(0, length or 1), ylim=(len(names), 0))
        axes.title.set(ha="left", x=0)
        axes.set_facecolor("#f5f5f5")
        axes.set_yticks([row + 0.5 for row in range(len(names))], map(short_name, names))
        for band in bands:
            bars = [(begin, max(end - begin, length / width)) for begin, end in band.bars]
            place = (band.row + 0.08 + 0.84 * band.top, 0.84 * (1 - band.top))
            axes.broken_barh(bars, place, facecolor=of(band.colour), linewidth=0, antialiased=False)
        add_legend(drawn, legend)
        return pixels(drawn)


def add_legend(drawn: Any, colours: Sequence[tuple[Colour, str]]) -> None:
    """Write the meaning of each color below the axes."""
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=of(colour), edgecolor=SOFT, linewidth=0.5, label=name) for colour, name in colours]
    drawn.legend(handles=patches, loc="outside lower left", ncols=max(len(patches), 1), handlelength=1)


def of(colour: Colour) -> str:
    """Return a color as matplotlib takes it."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def short_name(name: str) -> str:
    """Return the name of a row, of which a long one keeps its end."""
    return name if len(name) <= _LONGEST else "..." + name[3 - _LONGEST :]
