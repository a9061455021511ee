"""Tables, numbers and figures made from records: ``python -m benchmarks.tables`` rewrites them in place.

A table follows a line ``<!-- record: PATH -->``, or ``<!-- record: PATH#PART -->`` where a record has several. Numbers
in running text are those of `benchmarks.figures`, and SVG files are drawn by `benchmarks.picture`. A test asserts
that rewriting changes nothing, so that no text for users quotes a number without a record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import figures, picture
from benchmarks.record import RECORDS, ROOT

_MARKED = re.compile(r"(<!-- record: (?P<path>[^\s#]+)(?:#(?P<part>\w+))? -->\n)(?:\|[^\n]*(?:\n|\Z))*")
PICTURES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "docs/pictures/memory.svg": ("scaling", picture.memory),
    "docs/pictures/scaling_1b3.svg": ("scaling", picture.scaling("1.3B")),
    "docs/pictures/scaling_7b.svg": ("scaling", picture.scaling("7B")),
    "docs/pictures/scaling_70b.svg": ("scaling", picture.scaling("70B")),
    "docs/pictures/sent.svg": ("scaling", picture.sent),
    "docs/pictures/step_time.svg": (
        "step_time", picture.ratios("Step time of the engine over DDP's (less is faster)", "DDP"),
    ),
    "docs/pictures/trainer_time.svg": (
        "trainer_time", picture.ratios("Step time of whole Trainers over DDP's (less is faster)", "DDP"),
    ),
    "docs/pictures/moe.svg": ("moe", picture.moe),
    "docs/pictures/exposed_update.svg": ("exposed_update", picture.exposed),
    "docs/pictures/activations.svg": ("activations", picture.activations),
    "docs/pictures/memory_kinds.svg": ("memory_kinds", picture.memory_by_choice),
    "docs/pictures/memory_timeline.svg": ("memory_kinds", picture.memory_timeline),
    "docs/pictures/nvme_io.svg": ("nvme_io", picture.drive),
}  # fmt: skip
"""The record and the function that draws it, by path."""


def _documents() -> tuple[str, ...]:
    """Those with tables or figures from records."""
    texts = {path: path.read_text() for path in figures.documents()}
    marked = (p for p, text in texts.items() if _MARKED.search(text) or figures.TRACED.search(text))
    return tuple(str(p.relative_to(ROOT)) for p in marked)


DOCUMENTS = _documents()


def _ratios(record: dict[str, Any]) -> list[list[str]]:
    """One row per contender, one column per model size."""
    sizes = record["results"]
    names = list(next(iter(sizes.values()))["contenders"])
    rows = [["", *(re.sub("M(?= |$)", "M parameters", size) for size in sizes)]]
    for name in names:
        cells = [sizes[size]["contenders"][name] for size in sizes]
        rows.append([f"`{name}`", *(f"{c['ratio']:.3f} [{c['ratio_q1']:.2f}, {c['ratio_q3']:.2f}]" for c in cells)])
    return rows


def _adam(record: dict[str, Any]) -> list[list[str]]:
    """One row per job, times faster than each peer."""

    def cell(job: dict[str, Any], peer: str) -> str:
        ratio = job.get(f"times_faster_than_{peer}")
        return _spread(ratio) if ratio else ""

    peers = ("torch", "deepspeed", "fp32_moments")
    rows = [["job", "over torch fused", "over DeepSpeedCPUAdam", "over fp32 moments"]]
    rows += [[name, *(cell(job, peer) for peer in peers)] for name, job in record["results"].items() if "," not in name]
    rows += [
        [name, *(cell(job, peer) for peer in peers)]
        for name, job in record["results"].items()
        if name.endswith("moments")
    ]
    return [row for row in rows if any(row[1:])]


def _host_memory(record: dict[str, Any]) -> list[list[str]]:
    """Bytes per parameter by format of masters and moments: between two steps, and the most at any time."""
    by_case = {(c.get("master_weights", True), c["moments"], c["clip"]): c for c in record["results"]}
    rows = [["master weights", "moments", "no clipping", "no clipping, peak", "clipping", "clipping, peak"]]
    for masters, moments in dict.fromkeys((masters, moments) for masters, moments, _ in by_case):
        cases = (by_case[masters, moments, False], by_case[masters, moments, True])
        numbers = [case[f"{kind}_per_parameter"] for case in cases for kind in ("resident", "peak")]
        rows.append([f"`{masters}`", f"`{moments}`", *(f"{n:.1f}" for n in numbers)])
    return rows


def _slow_network(record: dict[str, Any]) -> list[list[str]]:
    """By contender: how much faster than full stage 3, and what crosses the link."""
    rows = [["", "times faster", "MB per step"]]
    for name, r in record["results"].items():
        faster = "" if name == record["baseline"] else _spread(r["times_faster"])
        rows.append([name, faster, f"{r['crossed_bytes'] / 1e6:.1f}"])
    return rows


def _exposed_update(record: dict[str, Any]) -> list[list[str]]:
    """Share of a step that training waits for updates, overlapped and not; time over that without overlap."""
    keys = ("strategy", "clip", "setting")
    blocking = {tuple(r[k] for k in keys): r for r in record["results"] if not r["overlap"]}
    rows = [["strategy", "clipping", "waits", "without overlap", "step over that without overlap"]]
    for r in record["results"]:
        if r["overlap"]:
            shares = [f"{100 * each['exposed']:.1f} %" for each in (r, blocking[tuple(r[k] for k in keys)])]
            rows.append([f"`{r['strategy']}`", "yes" if r["clip"] else "no", *shares, f"{r['ratio_to_blocking']:.2f}"])
    return rows


def _checkpoint(record: dict[str, Any]) -> list[list[str]]:
    """One row per way to save."""
    results = record["results"]
    columns = {
        "call_over_folder": "until the call returns, share of a folder's time",
        "stall_over_folder": "training waits, share of a folder's time",
    }
    columns = {key: title for key, title in columns.items() if all(key in r for r in results.values())}
    rows = [["", "speed over DCP", *columns.values(), "peak memory, units"]]
    for name, r in results.items():
        speed = "-" if name == "copy alone" else _between(r["times_faster_than_dcp"])
        peak = max(r["memory_over_unit"], r["first_memory_over_unit"])
        rows.append([name, speed, *(_between(r[key]) for key in columns), f"{peak:.2f}"])
    return rows


def _rare_exchange(record: dict[str, Any]) -> list[list[str]]:
    """One row per contender: validation loss, how far it is above DDP, and the bytes of a rank."""
    rows = [["", "validation loss, nats per byte", "above DDP, by seed", "sent per rank, MiB"]]
    runs = record["runs"]
    for name, cells in record["results"].items():
        above = (run["val"] / runs["DDP"][seed]["val"] - 1 for seed, run in sorted(runs[name].items()))
        margins = "" if name == "DDP" else ", ".join(f"{margin:.1%}" for margin in above)
        rows.append([name, f"{cells['val']:.3f}", margins, f"{cells['sent_mib']:.1f}"])
    return rows


def _muon_step(record: dict[str, Any]) -> list[list[str]]:
    """One row per stage: what Muon adds to a step."""
    rows = [["", "added, over the iterations' share of a rank", "bytes sent per element of a matrix"]]
    for name, cell in record["results"].items():
        rows.append(
            [
                f"{name}, {record['ranks']} ranks",
                _between([cell["ratio_q1"], cell["ratio"], cell["ratio_q3"]]),
                f"{cell['bytes_per_element']:.2f}",
            ]
        )
    return rows


def _planner(record: dict[str, Any]) -> list[list[str]]:
    """One row per combination: the forecast as a multiple of what was measured."""
    rows = [["", "peak, MB", "predicted over measured", "sent per step, MB", "predicted over measured"]]
    for name, r in record["results"].items():
        sent = r["sent_bytes_foretold"] / r["sent_bytes_measured"]
        peak, moved = r["measured_bytes"] / 1e6, r["sent_bytes_measured"] / 1e6
        rows.append([f"`{name}`", f"{peak:.2f}", f"{r['ratio']:.4f}", f"{moved:.2f}", f"{sent:.4f}"])
    return rows


def _amount(nbytes: float) -> str:
    """Three digits and a unit; nothing for nothing."""
    if not nbytes:
        return ""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"


def _parity(record: dict[str, Any]) -> list[list[str]]:
    """One row per configuration and precision."""
    head = ["configuration", "ZeRO stage", "precision", "largest relative difference of a loss"]
    found = record["results"].values()
    rows = [
        [f"`{r['configuration']}`", str(r["stage"]), r["precision"], f"{r['largest_difference']:.1e}"] for r in found
    ]
    return [head, *rows]


def _between(quartiles: Sequence[float], digits: int = 2) -> str:
    low, middle, high = quartiles
    return f"{middle:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def _spread(cell: dict[str, float], digits: int = 2) -> str:
    return _between([cell["q1"], cell["median"], cell["q3"]], digits)


def _long_sequences(record: dict[str, Any]) -> list[list[str]]:
    """One row per choice, one column per length."""
    results = record["results"]
    lengths = list(next(iter(results.values())))
    rows = [["peak memory, MiB", *(f"{int(n):,} tokens" for n in lengths)]]
    return rows + [[name, *(f"{found[n] / 2**20:,.0f}" for n in lengths)] for name, found in results.items()]


def _finetune(record: dict[str, Any]) -> list[list[str]]:
    """One row per run: validation loss, with its range if there are several seeds, and the bytes of a checkpoint."""
    several = len(next(iter(record["runs"].values()))) > 1
    rows = [["", "validation loss", *(["range over seeds"] if several else []), "checkpoint"]]
    for name, r in record["results"].items():
        span = [f"{r['val_lowest']:.3f} to {r['val_highest']:.3f}"] if several else []
        rows.append([f"`{name}`", f"{r['val']:.3f}", *span, _amount(r["checkpoint_bytes"])])
    return rows


_VERDICTS = {
    "equal": "equal",
    "refused": "refused",
    "other, with a warning": "warned",
    "silently other": "**other**",
    "raw error": "error",
    "hang": "**hang**",
    "lost data": "**lost**",
    "not run": "-",
}
"""Words of the conformance suite, as short as in a table."""


def _agreeing(record: dict[str, Any]) -> dict[tuple[str, ...], str]:
    """Labels of the strategies that come to the same verdicts on all habits, of those that run anything."""
    results = record["results"]
    labels: dict[tuple[str, ...], list[str]] = {}
    for label in results["strategies"]:
        verdicts = tuple(_VERDICTS[by[label]["outcome"]] for by in results["verdicts"].values())
        if "equal" in verdicts:
            labels.setdefault(verdicts, []).append(f"`{label}`")
    return {verdicts: ", ".join(each) for verdicts, each in labels.items()}


def _conformance(record: dict[str, Any]) -> list[list[str]]:
    """One row per combination of verdicts that are not all equal, one column per group of strategies that agree."""
    columns = _agreeing(record)
    rows: dict[tuple[str, ...], list[str]] = {}
    for habit, verdicts in zip(record["results"]["verdicts"], zip(*columns, strict=True), strict=True):
        if set(verdicts) != {"equal"}:
            rows.setdefault(verdicts, []).append(f"`{habit}`")
    return [["habits", *columns.values()], *([", ".join(habits), *verdicts] for verdicts, habits in rows.items())]


def _verdict_counts(record: dict[str, Any]) -> list[list[str]]:
    """One row per group of strategies that agree: how many habits have come to each verdict."""
    words = [word for word in _VERDICTS.values() if word != _VERDICTS["not run"]]
    groups = _agreeing(record).items()
    return [
        ["strategies", *words],
        *([labels, *(str(found.count(word)) for word in words)] for found, labels in groups),
    ]


def _verdict_details(record: dict[str, Any]) -> list[list[str]]:
    """One row per verdict that is silent or a loss, with all strategies to which the same happened."""
    rows = [["habit", "strategies", "what happened"]]
    for habit, by in record["results"]["verdicts"].items():
        alike: dict[str, list[str]] = {}
        for label, verdict in by.items():
            if verdict["outcome"] in ("silently other", "lost data"):
                alike.setdefault(_in_short(verdict["detail"]), []).append(f"`{label}`")
        for detail, labels in alike.items():
            rows.append([f"`{habit}`", ", ".join(labels), detail])
    return rows


def _in_short(detail: str) -> str:
    """By how much a number is off, or the first and the last error of a trace."""
    if found := re.fullmatch(r"(.*?): .*\(by (\S+); .*\)", detail):
        return f"{found[1]} is off by {found[2]}"
    if found := re.fullmatch(r"(.*?Exception): .*? (\w+Error)", detail, re.DOTALL):
        return f"{found[1]}, {found[2]}"
    return detail.replace("|", "\\|").replace("<", "\\<")


def _published(record: dict[str, Any]) -> list[list[str]]:
    """One row per program: the largest relative difference of a loss from DDP's, of any strategy."""
    results = list(record["results"].values())
    ours = [name for name in results[0]["all"] if name != "nudged"]
    rows = [["package", "DDP, nudged", "largest of " + ", ".join(f"`{name}`" for name in ours)]]
    for r in results:
        most = max(r["all"][name] for name in ours)
        rows.append([f"{r['package']} {r['version']}", f"{r['all']['nudged']:.0e}", f"{most:.0e}"])
    return rows


def _inference(record: dict[str, Any]) -> list[list[str]]:
    """One row per format of weights, one column per batch."""
    results = {(r["format"], r["batch"]): r for r in record["results"]}
    formats, batches = (list(dict.fromkeys(key[i] for key in results)) for i in (0, 1))
    rows = [["weights", "MB read per step", *(f"speedup, batch {batch}" for batch in batches)]]
    for form in formats:
        found = [results[form, batch] for batch in batches]
        speedups = (_between(r["times_faster"]) for r in found)
        rows.append([f"`{form}`", f"{found[0]['weights_mb']:.0f}", *speedups])
    return rows


def _generate(record: dict[str, Any]) -> list[list[str]]:
    """One row per shape; how many times longer transformers takes with its dynamic cache, by batch."""
    by_shape: dict[str, dict[int, Any]] = {}
    for r in record["results"]:
        by_shape.setdefault(r["shape"], {})[r["batch"]] = r
    batches = list(next(iter(by_shape.values())))
    rows = [["network", *(f"batch {batch}" for batch in batches)]]
    for shape, found in by_shape.items():
        rows.append([shape, *(_between(found[batch]["transformers dynamic"]["ratio"]) for batch in batches)])
    return rows


def _host_time(world: str) -> Callable[[dict[str, Any]], list[list[str]]]:
    """One row per contender, with the most units that were measured."""

    def rows_of(record: dict[str, Any]) -> list[list[str]]:
        by_units = record["results"][world]
        units = max(by_units, key=int)
        rows = [[f"{units} units", "us", "over FSDP2's"]]
        for name, row in by_units[units].items():
            if name != "plain":
                rows.append([f"`{name}`", _spread(row["step"]["us"], 0), _spread(row["step"]["over_fsdp2"])])
        return rows

    return rows_of


_TABLES: dict[str, Callable[[dict[str, Any]], list[list[str]]]] = {
    "trainer_time": _ratios,
    "published_packages": _published,
    "conformance": _conformance,
    "conformance#counts": _verdict_counts,
    "conformance#details": _verdict_details,
    "finetune": _finetune,
    "cpu_adam": _adam,
    "host_memory": _host_memory,
    "slow_network": _slow_network,
    "exposed_update": _exposed_update,
    "checkpoint": _checkpoint,
    "muon_step": _muon_step,
    "rare_exchange": _rare_exchange,
    "host_time#alone": _host_time("alone"),
    "host_time#unsent": _host_time("unsent"),
    "host_time#gloo": _host_time("gloo"),
    "planner": _planner,
    "deepspeed_parity": _parity,
    "long_sequences": _long_sequences,
    "inference": _inference,
    "generate": _generate,
}


def table(path: str, part: str | None = None) -> str:
    """Markdown table of a record, or of a part of it; of a record that is not there yet, how to make it."""
    if not (ROOT / path).exists():
        return f"| not recorded yet |\n| --- |\n| `python -m benchmarks {Path(path).stem} --record` |"
    record = json.loads((ROOT / path).read_text())
    make = _TABLES[record["benchmark"] + (f"#{part}" if part else "")]
    head, *rows = make(record)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def render(text: str) -> str:
    """``text`` with every marked table and every traced figure made anew."""
    return figures.render(_MARKED.sub(lambda m: f"{m.group(1)}{table(m['path'], m['part'])}\n", text))


def draw(path: str) -> str:
    name, made_by = PICTURES[path]
    return made_by(json.loads((ROOT / RECORDS / f"{name}.json").read_text()))


def main() -> None:
    """Rewrite what is not up to date, and say which files."""
    for document in DOCUMENTS:
        file = ROOT / document
        before = file.read_text()
        after = render(before)
        if after != before:
            file.write_text(after)
            print(document)
    for path in PICTURES:
        file = ROOT / path
        after = draw(path)
        if not file.exists() or file.read_text() != after:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(after)
            print(path)


if __name__ == "__main__":
    main()
