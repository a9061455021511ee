"""Tables, numbers and figures made from records: ``python -m benchmarks.tables`` rewrites them in place.

A table follows a line ``<!-- record: PATH -->``, or ``<!-- record: PATH#PART -->`` where a record has several. Numbers
in running text are those of `benchmarks.figures`, and SVG files are drawn by `benchmarks.picture`. A test asserts
that rewriting changes nothing, so that no text for users quotes a number without a record.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
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
    rows = [["", *(f"{size} parameters" for size in sizes)]]
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


def _host_memory(record: dict[str, Any]) -> list[list[str]]:
    """Bytes per parameter by format of the moments: between two steps, and the most at any time."""
    by_case = {(c["moments"], c["clip"]): c for c in record["results"]}
    rows = [["moments", "no clipping", "no clipping, peak", "clipping", "clipping, peak"]]
    for moments in dict.fromkeys(c["moments"] for c in record["results"]):
        cases = (by_case[moments, False], by_case[moments, True])
        numbers = [case[f"{kind}_per_parameter"] for case in cases for kind in ("resident", "peak")]
        rows.append([f"`{moments}`", *(f"{n:.1f}" for n in numbers)])
    return rows


def _on_drive(record: dict[str, Any]) -> list[list[str]]:
    """One row per size and case, in MiB: what is on the drive, and what of the process is in memory."""
    rows = [["MiB, parameters", "clipping", "states on NVMe", "peak", "charged to the cgroup"]]
    for case in record["on_drive"]:
        kinds = ("states_bytes", "peak_bytes", "charged_bytes")
        cells = (f"{case[kind] / 2**20:,.0f}" if kind in case else "" for kind in kinds)
        rows.append([f"{case['parameters'] / 1e6:.0f} M", "yes" if case["clip"] else "no", *cells])
    return rows


def _moments(record: dict[str, Any]) -> list[list[str]]:
    """Losses by format, and how far from fp32 they are."""
    rows = [["moments", "validation loss", "difference from fp32"]]
    for name, r in record["results"].items():
        rows.append([f"`{name}`", f"{r['val']:.3f}", f"{r['val_difference']:+.4f}"])
    return rows


def _quantized_traffic(record: dict[str, Any]) -> list[list[str]]:
    """Losses by what is sent in few bits, how far from exact runs they are, and what rounding changes."""
    rows = [["sent", "validation loss", "difference", "change of gradients"]]
    for name, r in record["results"].items():
        error = f"{r['gradient_error']:.1%}" if r["gradient_error"] else "0"
        rows.append([name, f"{r['val']:.3f}", f"{r['val_difference']:+.4f}", error])
    return rows


def _slow_network(record: dict[str, Any]) -> list[list[str]]:
    """Times and bytes by contender: faster than full stage 3, and what crosses the link."""
    rows = [["", "step, s", "times faster", "MB per step"]]
    for name, r in record["results"].items():
        fast = r["times_faster"]
        faster = "" if name == record["baseline"] else f"{fast['median']:.2f} [{fast['q1']:.2f}, {fast['q3']:.2f}]"
        rows.append([name, f"{r['median_s']:.2f}", faster, f"{r['crossed_bytes'] / 1e6:.1f}"])
    return rows


def _deepspeed_network(record: dict[str, Any]) -> list[list[str]]:
    """Those rows of `_slow_network` that DeepSpeed's are compared with, and these."""
    head, *rows = _slow_network(record)
    return [head, *(row for row in rows if row[0] in ("DDP", "stage 3", "hpZ") or row[0].startswith("DeepSpeed"))]


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

    def cell(quartiles: list[float]) -> str:
        low, middle, high = quartiles
        return f"{middle:.2f} [{low:.2f}, {high:.2f}]"

    results = record["results"]
    columns = {
        "call_over_folder": "until the call returns, share of a folder's time",
        "stall_over_folder": "training waits, share of a folder's time",
        "memory_over_unit": "peak memory, units",
        "first_memory_over_unit": "peak memory, first save",
    }
    columns = {key: title for key, title in columns.items() if all(key in r for r in results.values())}
    rows = [["", "speed over DCP", *columns.values()]]
    for name, r in results.items():
        values = [r[key] for key in columns]
        own = [f"{value:.2f}" if isinstance(value, float) else cell(value) for value in values]
        rows.append([name, "-" if name == "copy alone" else cell(r["times_faster_than_dcp"]), *own])
    return rows


def _moe_quality(record: dict[str, Any]) -> list[list[str]]:
    """One row per contender: validation loss, how far it is below the dense one's, and what that takes."""
    rows = [["", "validation loss, nats per byte", "below dense, by seed", "parameters", "seconds per run"]]
    runs = record["runs"]
    for name, cells in record["results"].items():
        below = (runs["dense"][seed]["val"] - run["val"] for seed, run in sorted(runs[name].items()))
        margins = "" if name == "dense" else ", ".join(f"{margin:.3f}" for margin in below)
        million = f"{cells['parameters'] / 1e6:.2f} M"
        rows.append([f"`{name}`", f"{cells['val']:.3f}", margins, million, f"{cells['seconds']:.0f}"])
    return rows


def _muon(record: dict[str, Any]) -> list[list[str]]:
    """One row per contender: validation loss, and how far it is below AdamW at its best rate."""
    rows = [["optimizer, rate of the matrices", "validation loss, nats per byte", "below AdamW at its best, by seed"]]
    results, runs = record["results"], record["runs"]
    best = min((name for name in results if name.startswith("adamw")), key=lambda name: results[name]["val"])
    for name, cells in results.items():
        below = (runs[best][seed]["val"] - run["val"] for seed, run in sorted(runs[name].items()))
        margins = "" if name == best else ", ".join(f"{margin:.3f}" for margin in below)
        rows.append([f"`{name}`", f"{cells['val']:.3f}", margins])
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
        rows.append([f"{name}, {record['ranks']} ranks", _quartiles(cell, 2), f"{cell['bytes_per_element']:.2f}"])
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


def _quartiles(cell: dict[str, float], digits: int = 3) -> str:
    """Of a ratio."""
    return f"{cell['ratio']:.{digits}f} [{cell['ratio_q1']:.{digits}f}, {cell['ratio_q3']:.{digits}f}]"


def _moe_step(record: dict[str, Any]) -> list[list[str]]:
    """One row per contender."""
    contenders = record["results"]["contenders"]
    return [["", "step time over the dense baseline"], *([f"`{n}`", _quartiles(c, 2)] for n, c in contenders.items())]


def _long_sequences(record: dict[str, Any]) -> list[list[str]]:
    """One row per choice, one column per length."""
    results = record["results"]
    lengths = list(next(iter(results.values())))
    rows = [["peak memory, MiB", *(f"{int(n):,} tokens" for n in lengths)]]
    return rows + [[name, *(f"{found[n] / 2**20:,.0f}" for n in lengths)] for name, found in results.items()]


def _overhead(record: dict[str, Any]) -> list[list[str]]:
    """One row per strategy."""
    results = record["results"]
    head = ["strategy", "CPU time with `Monitor` over without", "share of the training thread spent in hooks"]
    rows = [
        [f"`{name}`", _quartiles(found["cpu"]["with"]), f"{100 * found['inside']['median']:.2f} %"]
        for name, found in results.items()
    ]
    if all("image" in found for found in results.values()):  # records from before images do not have it
        head.append("and for the images of one step in 1,000")
        for row, found in zip(rows, results.values(), strict=True):
            row.append(f"{100 * found['image']['share']['median']:.3f} %")
    return [head, *rows]


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
    """One row per program: the largest relative difference of a loss from DDP's, by strategy."""
    strategies = list(next(iter(record["results"].values()))["all"])
    rows = [["package", "its Lightning", "steps", *(f"`{s}`" if s != "nudged" else "DDP, nudged" for s in strategies)]]
    for r in record["results"].values():
        name = f"{r['package']} {r['version']}"
        rows.append([name, f"`{r['lightning']}`", str(r["steps"]), *(f"{r['all'][s]:.0e}" for s in strategies)])
    return rows


def _adapters(record: dict[str, Any]) -> list[list[str]]:
    """One row per contender."""
    rows = [[f"`{name}`", _quartiles(cell)] for name, cell in record["results"].items()]
    return [["", "step time over adapters by hand"], *rows]


def _auto_choice(record: dict[str, Any]) -> list[list[str]]:
    """One row per model."""
    rows = [["", "chosen", "fastest of all candidates", "candidates", "time of the choice over the fastest"]]
    for model, result in record["results"].items():
        cells = [f"`{model}`", f"`{result['chosen']}`", f"`{result['fastest']}`", str(len(result["seconds"]))]
        rows.append([*cells, _quartiles(result)])
    return rows


def _virtual_ranks(record: dict[str, Any]) -> list[list[str]]:
    """One row per stage."""
    rows = [[f"`{name}`", _quartiles(cell), f"{cell['bytes']:.3f}"] for name, cell in record["results"].items()]
    return [["", "step time with virtual ranks", "bytes sent with virtual ranks"], *rows]


def _elastic(record: dict[str, Any]) -> list[list[str]]:
    """One row."""
    found = record["results"]
    cells = ["{1:.1f} [{0:.1f}, {2:.1f}]".format(*found[key]) for key in ("seconds", "until_the_program_begins_s")]
    repeated = found["repeated_steps"]
    return [
        [
            "ranks",
            "losses",
            "s to the next step",
            "of which until the program begins",
            "steps repeated, median",
            "most",
        ],
        [str(record["ranks"]), str(record["losses"]), *cells, f"{repeated['median']:.0f}", str(repeated["most"])],
    ]


def _snapshots(record: dict[str, Any]) -> list[list[str]]:
    """One row."""
    found = record["results"]
    cells = [
        "{:.3f} [{:.3f}, {:.3f}]".format(*(found[f"{k}{q}"] for q in ("", "_q1", "_q3"))) for k in ("ratio", "cpu")
    ]
    return [
        ["steps", "snapshots", "time over that without", "CPU time over that without"],
        [str(record["steps"]), f"{found['snapshots']:.0f}", *cells],
    ]


def _virtual_shares(record: dict[str, Any]) -> list[list[str]]:
    """One row per split."""
    names = {"even": "two virtual ranks on each", "shares": "`virtual_ranks_per_rank: [1, 3]`"}
    rows = [[text, _quartiles(record["results"][name])] for name, text in names.items()]
    return [["", "step time over that of the ideal split"], *rows]


def _inference(record: dict[str, Any]) -> list[list[str]]:
    """One row per format of weights, one column per batch."""
    results = {(r["format"], r["batch"]): r for r in record["results"]}
    formats, batches = (list(dict.fromkeys(key[i] for key in results)) for i in (0, 1))
    rows = [["weights", "MB read per step", *(f"speedup, batch {batch}" for batch in batches)]]
    for form in formats:
        found = [results[form, batch] for batch in batches]
        speedups = ("{1:.2f} [{0:.2f}, {2:.2f}]".format(*r["times_faster"]) for r in found)
        rows.append([f"`{form}`", f"{found[0]['weights_mb']:.0f}", *speedups])
    return rows


def _generate(record: dict[str, Any]) -> list[list[str]]:
    """One row per shape; how many times longer transformers takes, by cache and batch."""
    by_shape: dict[str, dict[int, Any]] = {}
    for r in record["results"]:
        by_shape.setdefault(r["shape"], {})[r["batch"]] = r
    batches = list(next(iter(by_shape.values())))
    caches = ("static", "dynamic")
    rows = [["network", *(f"{cache}, batch {batch}" for cache in caches for batch in batches)]]
    for shape, found in by_shape.items():
        ratios = (found[batch][f"transformers {cache}"]["ratio"] for cache in caches for batch in batches)
        rows.append([shape, *("{1:.2f} [{0:.2f}, {2:.2f}]".format(*ratio) for ratio in ratios)])
    return rows


def _streaming(record: dict[str, Any]) -> list[list[str]]:
    """One row per batch."""
    rows = [["batch", "read, GB/s", "share of the tier's own speed", "tokens per second"]]
    for batch, r in record["results"]["batches"].items():
        share = r["of_tier"]
        of_tier = f"{share['median']:.2f} [{share['q1']:.2f}, {share['q3']:.2f}]"
        rows.append([batch, f"{r['gbs']['median']:.2f}", of_tier, f"{r['tokens_per_s']['median']:.1f}"])
    return rows


def _host_time(world: str) -> Callable[[dict[str, Any]], list[list[str]]]:
    """One row per contender, with the most units that were measured."""

    def cell(spread: dict[str, float], digits: int) -> str:
        return f"{spread['median']:.{digits}f} [{spread['q1']:.{digits}f}, {spread['q3']:.{digits}f}]"

    def rows_of(record: dict[str, Any]) -> list[list[str]]:
        by_units = record["results"][world]
        units = max(by_units, key=int)
        rows = [[f"{units} units", "forward, us", "backward, us", "update, us", "step over FSDP2's"]]
        for name, row in by_units[units].items():
            if name != "plain":
                parts = [cell(row[part]["us"], 0) for part in ("forward", "backward", "update")]
                rows.append([f"`{name}`", *parts, cell(row["step"]["over_fsdp2"], 2)])
        return rows

    return rows_of


_TABLES: dict[str, Callable[[dict[str, Any]], list[list[str]]]] = {
    "trainer_time": _ratios,
    "adapters": _adapters,
    "auto_choice": _auto_choice,
    "virtual_ranks": _virtual_ranks,
    "elastic": _elastic,
    "virtual_shares": _virtual_shares,
    "published_packages": _published,
    "conformance": _conformance,
    "conformance#counts": _verdict_counts,
    "conformance#details": _verdict_details,
    "finetune": _finetune,
    "cifar_accuracy": _accuracy,
    "cpu_adam": _adam,
    "host_memory": _host_memory,
    "host_memory#on_drive": _on_drive,
    "moments": _moments,
    "quantized_traffic": _quantized_traffic,
    "slow_network": _slow_network,
    "slow_network#deepspeed": _deepspeed_network,
    "exposed_update": _exposed_update,
    "checkpoint": _checkpoint,
    "moe_quality": _moe_quality,
    "muon": _muon,
    "muon_step": _muon_step,
    "rare_exchange": _rare_exchange,
    "snapshots": _snapshots,
    "host_time#alone": _host_time("alone"),
    "host_time#unsent": _host_time("unsent"),
    "host_time#gloo": _host_time("gloo"),
    "planner": _planner,
    "deepspeed_parity": _parity,
    "long_sequences": _long_sequences,
    "moe_step": _moe_step,
    "monitor_overhead": _overhead,
    "inference": _inference,
    "generate": _generate,
    "stream_inference": _streaming,
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
    """The picture that belongs there."""
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
