"""Numbers and texts as readers see them, in tables and at axes."""

from __future__ import annotations

import math
import re
from decimal import Decimal

_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def allowed(text: str) -> str:
    """Return a text with a replacement for characters that XML does not allow."""
    return _FORBIDDEN.sub("\N{REPLACEMENT CHARACTER}", text)


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
