"""Tables of the READMEs, made from records: ``python -m tests.bench.tables`` rewrites them in place.

A table follows a line ``<!-- record: PATH -->`` and ends at the next empty line. A test asserts that rewriting changes
nothing, so that no README quotes a number without a record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md",)
_MARKED = re.compile(r"(<!-- record: (?P<path>\S+) -->\n).*?(?=\n\n)", re.DOTALL)


def _ratios(record: dict[str, Any]) -> list[list[str]]:
    """One row per contender, one column per model size."""
    sizes = record["results"]
    names = list(next(iter(sizes.values()))["contenders"])
    rows = [["", *sizes]]
    for name in names:
        cells = [sizes[size]["contenders"][name] for size in sizes]
        rows.append([f"`{name}`", *(f"{c['ratio']:.3f} [{c['ratio_q1']:.2f}, {c['ratio_q3']:.2f}]" for c in cells)])
    return rows


def _accuracy(record: dict[str, Any]) -> list[list[str]]:
    """One column per strategy, one row per seed."""
    results = record["results"]
    seeds = sorted({seed for by_seed in results.values() for seed in by_seed}, key=int)
    rows = [["seed", *(f"`{name}`" for name in results)]]
    for seed in seeds:
        cells = (f"{100 * by_seed[seed]:.1f} %" if seed in by_seed else "" for by_seed in results.values())
        rows.append([seed, *cells])
    return rows


_TABLES: dict[str, Callable[[dict[str, Any]], list[list[str]]]] = {
    "step_time": _ratios,
    "trainer_time": _ratios,
    "cifar_accuracy": _accuracy,
}


def table(path: str) -> str:
    """Markdown table of a record."""
    record = json.loads((ROOT / path).read_text())
    head, *rows = _TABLES[record["benchmark"]](record)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def render(text: str) -> str:
    """``text`` with every marked table made anew."""
    return _MARKED.sub(lambda m: m.group(1) + table(m.group("path")), text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        file = ROOT / document
        file.write_text(render(file.read_text()))
