"""HTML and SVG text: everything that comes from a file passes `text` or `attribute`."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from decimal import Decimal


def text(value: object) -> str:
    """Return text for the content of an element. Characters that XML does not allow are replaced."""
    return html.escape("".join(c if _allowed(c) else "\N{REPLACEMENT CHARACTER}" for c in str(value)))


attribute = text
"""The value of an attribute, between double quotes: the same characters are escaped."""


def _allowed(character: str) -> bool:
    code = ord(character)
    return character in "\t\n\r" or (0x20 <= code <= 0xD7FF) or (0xE000 <= code <= 0xFFFD) or code >= 0x10000


def table(
    head: Sequence[str],
    rows: Iterable[Sequence[object]],
    caption: str = "",
    numbers: int | None = None,
    *,
    card: bool = False,
) -> str:
    """Return a table that scrolls by itself where it is too wide.

    Args:
        head: names of the columns.
        rows: cells, which are escaped.
        caption: what it shows.
        numbers: cells from this one on are right-aligned.
        card: stand next to the figures, instead of across the page.
    """
    start = len(head) if numbers is None else numbers
    kind = "scroll card" if card else "scroll"
    lines = [f'<div class="{kind}" tabindex="0" role="region" aria-label="{attribute(caption or head[0])}"><table>']
    if caption:
        lines.append(f"<caption>{text(caption)}</caption>")
    cells = "".join(f'<th scope="col"{_right(i, start)}>{text(name)}</th>' for i, name in enumerate(head))
    lines.append(f"<thead><tr>{cells}</tr></thead><tbody>")
    for row in rows:
        first, *others = row
        cells = "".join(f"<td{_right(i, start)}>{text(cell)}</td>" for i, cell in enumerate(others, 1))
        lines.append(f'<tr><th scope="row">{text(first)}</th>{cells}</tr>')
    lines.append("</tbody></table></div>")
    return "\n".join(lines)


def _right(i: int, start: int) -> str:
    return ' class="number"' if i >= start else ""


def number(value: float | None, digits: int = 4) -> str:
    """Return a number for readers: 0.1235, 12.35, 12,345, 1.235e-06; empty for None."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e9:
        return f"{value:.{digits - 1}e}"
    rounded = Decimal(f"{value:.{digits}g}")
    return f"{rounded.normalize():,f}" if abs(value) < 10**digits else f"{value:,.0f}"


def short(value: float) -> str:
    """Return a round number for an axis: 20k instead of 20,000, and 2e-5 instead of 0.00002."""
    if 0 < abs(value) < 1e-3:
        digits, _, power = f"{value:.3e}".partition("e")
        return f"{float(digits):g}e{int(power)}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.6g}{letter}"
    return f"{value:.6g}"
