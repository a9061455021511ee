"""Draw ranks by phases: how much longer each takes than others with the same work. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ls_strategy.extras.plots.figure import figure, of, pixels

SHOWN_RANKS = 32  # if there are more, the slowest ones are shown
_MOST = 1.5  # ratio of the darkest color
_EQUAL, _DARK = (240, 240, 240), (213, 94, 0)


def draw_ranks(ratios: Tensor, columns: Sequence[str], title: str) -> Tensor:
    """Return a heat map as an image, ``(3, H, W)`` uint8.

    Args:
        ratios: time over the median of the others, ``(ranks, len(columns))``; the first column orders the ranks.
        columns: names.
        title: above the map.
    """
    from matplotlib.colors import LinearSegmentedColormap

    shown = sorted(ratios[:, 0].topk(min(SHOWN_RANKS, len(ratios))).indices.tolist())
    some = "" if len(shown) == len(ratios) else f"; the slowest {len(shown)} of {len(ratios)} ranks"
    colours = LinearSegmentedColormap.from_list("ratio", [of(_EQUAL), of(_DARK)])
    with figure(130 * max(len(columns), 3) + 160, 24 * len(shown) + 130, layout="constrained") as drawn:
        axes = drawn.add_subplot(xlim=(0, len(columns)), ylim=(len(shown), 0))
        axes.set_title(f"{title}{some}", loc="left")
        cells = axes.pcolormesh(ratios[shown].numpy(), cmap=colours, vmin=1, vmax=_MOST, edgecolors="white")
        names = [f"rank {rank}: {float(ratios[rank, 0]):.2f} x" for rank in shown]
        axes.set_yticks([row + 0.5 for row in range(len(shown))], names)
        axes.set_xticks([column + 0.5 for column in range(len(columns))], columns)
        axes.set_xlabel("own time, over the median of the other ranks with the same work")
        drawn.get_layout_engine().set(h_pad=0.1)  # inches: labels of a colorbar would pass the edge by a pixel
        bar = drawn.colorbar(cells, ax=axes, location="bottom", aspect=60)
        bar.set_ticks([1, _MOST], labels=["1 x or less", f"{_MOST} x or more"])
        return pixels(drawn)
