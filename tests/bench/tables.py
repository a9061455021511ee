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


def _adam(record: dict[str, Any]) -> list[list[str]]:
    """One row per job, times faster than each peer."""

    def cell(job: dict[str, Any], peer: str) -> str:
        ratio = job.get(f"times_faster_than_{peer}")
        return f"{ratio['median']:.2f} [{ratio['q1']:.2f}, {ratio['q3']:.2f}]" if ratio else ""

    peers = ("torch", "deepspeed", "fp32_moments")
    rows = [["job", "over torch fused", "over DeepSpeedCPUAdam", "over fp32 moments"]]
    rows += [[name, *(cell(job, peer) for peer in peers)] for name, job in record["results"].items() if "," not in name]
    rows += [
        [name, *(cell(job, peer) for peer in peers)]
        for name, job in record["results"].items()
        if name.endswith("moments")
    ]
    return [row for row in rows if any(row[1:])]


def _drive(record: dict[str, Any]) -> list[list[str]]:
    """One row per way to read and write."""
    results = record["results"]
    rows = [["", "read, GB/s", "over the best fio", "write, GB/s", "over the best fio"]]
    for name, both in results.items():
        cells = [f"{both[way]['gbs']:.2f}|{both[way]['ratio']:.2f}" for way in ("read", "write")]
        rows.append([name, *"|".join(cells).split("|")])
    return rows


def _host_memory(record: dict[str, Any]) -> list[list[str]]:
    """Bytes per parameter by format of the moments."""
    by_case = {(c["moments"], c["clip"]): c for c in record["results"]}
    rows = [["moments", "no clipping", "clipping", "highest, clipping"]]
    for moments in dict.fromkeys(c["moments"] for c in record["results"]):
        plain, clipped = by_case[moments, False], by_case[moments, True]
        numbers = (plain["resident_per_parameter"], clipped["resident_per_parameter"], clipped["peak_per_parameter"])
        rows.append([f"`{moments}`", *(f"{n:.1f}" for n in numbers)])
    return rows


def _moments(record: dict[str, Any]) -> list[list[str]]:
    """Losses by format, and how far from fp32 they are."""
    rows = [["moments", "validation loss", "difference from fp32", "spread of fp32 over seeds"]]
    for name, r in record["results"].items():
        rows.append([f"`{name}`", f"{r['val']:.3f}", f"{r['val_difference']:+.4f}", f"{r['val_noise']:.4f}"])
    return rows


def _exposed(record: dict[str, Any]) -> list[list[str]]:
    """One row per strategy and setting: the share of a step, with overlap and without."""
    shares = {(r["setting"], r["strategy"], r["clip"], r["overlap"]): r["exposed"] for r in record["results"]}
    rows = [["setting", "strategy", "clipping", "overlapped", "`overlap_step=False`"]]
    for setting, name, clip, overlap in shares:
        if overlap:
            blocking = shares.get((setting, name, clip, False))
            cells = (
                f"{100 * shares[setting, name, clip, True]:.1f} %",
                "" if blocking is None else f"{100 * blocking:.1f} %",
            )
            rows.append([setting, f"`{name}`", "yes" if clip else "no", *cells])
    return rows


def _checkpoint(record: dict[str, Any]) -> list[list[str]]:
    """One row per way to save."""

    def cell(quartiles: list[float]) -> str:
        low, middle, high = quartiles
        return f"{middle:.2f} [{low:.2f}, {high:.2f}]"

    rows = [["", "over `torch.save`", "over DCP", "training waits, of a folder's time", "memory, units"]]
    for name, r in record["results"].items():
        speeds = [cell(r[f"times_faster_than_{peer}"]) for peer in ("torch.save", "dcp")]
        stall = cell(r["stall_over_folder"]) if name.startswith("folder") else ""
        rows.append([name, *speeds, stall, f"{r['memory_over_unit']:.2f}"])
    return rows


def _activations(record: dict[str, Any]) -> list[list[str]]:
    """One row per choice."""
    rows = [["choice", "step, times that of none", "kept at the end of forward"]]
    for name, result in record["results"].items():
        q1, median, q3 = result["time"]
        rows.append([name, f"{median:.2f} [{q1:.2f}, {q3:.2f}]", f"{result['kept_bytes'] / 2**20:.0f} MiB"])
    return rows


def _moe_quality(record: dict[str, Any]) -> list[list[str]]:
    """One row per contender: validation loss, how far it is below the dense one's, and what that takes."""
    rows = [["", "validation loss, nats per byte", "below the dense one, by seed", "parameters", "seconds per run"]]
    runs = record["runs"]
    for name, cells in record["results"].items():
        below = (runs["dense"][seed]["val"] - run["val"] for seed, run in sorted(runs[name].items()))
        margins = "" if name == "dense" else ", ".join(f"{margin:.3f}" for margin in below)
        million = f"{cells['parameters'] / 1e6:.2f} M"
        rows.append([f"`{name}`", f"{cells['val']:.3f}", margins, million, f"{cells['seconds']:.0f}"])
    return rows


_TABLES: dict[str, Callable[[dict[str, Any]], list[list[str]]]] = {
    "step_time": _ratios,
    "trainer_time": _ratios,
    "cifar_accuracy": _accuracy,
    "cpu_adam": _adam,
    "nvme_io": _drive,
    "host_memory": _host_memory,
    "moments": _moments,
    "exposed_update": _exposed,
    "activations": _activations,
    "checkpoint": _checkpoint,
    "moe_quality": _moe_quality,
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
