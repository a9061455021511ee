"""Habits of people under DDP, FSDP, FSDP2 and this package's strategies: what comes out right.

``python -m benchmarks.conformance --record benchmarks/records/conformance.json``

The suite is `ls_strategy.extras.conformance`, which asks no strategy who it is. Two CPU ranks over gloo.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record
from ls_strategy.extras.conformance.__main__ import main as conformance

MINUTES = 15
SPREAD = "none: verdicts; a kill hits a save at another moment each time"
SEEDS = "1"
QUICK = ("--only", "plain_sgd", "--strategies", "ddp", "zero2")

_FSDP2 = "lightning.pytorch.strategies.ModelParallelStrategy(data_parallel_size=devices, tensor_parallel_size=1{})"
_SHARD = " @ ls_strategy.conformance.fully_shard"
STRATEGIES = {
    "ddp": "ddp",
    "fsdp": "fsdp",
    "fsdp2": f"fsdp2={_FSDP2.format('')}{_SHARD}",
    "fsdp2_file": f"fsdp2_file={_FSDP2.format(', save_distributed_checkpoint=False')}{_SHARD}",
    "zero1": "zero1",
    "zero2": "zero2",
    "zero3": "zero3",
    "zero3_offload": "zero3_offload",
}


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[], help="these habits alone")
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--update", action="store_true", help="replace these verdicts in the record, keep others")
    parser.add_argument("--limit", default="6", help="seconds of a phase; default: %(default)s")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "verdicts.json"
        only = ["--only", *args.only] if args.only else []
        given = [STRATEGIES[label] for label in args.strategies]
        conformance(["--strategy", *given, *only, "--limit", args.limit, "--json", str(path)])
        results = json.loads(path.read_text())
    made = {**record.header("conformance"), "results": results}
    record.write(args.record, _updated(args.record, made) if args.update else made)


def _updated(path: Path, made: dict[str, Any]) -> dict[str, Any]:
    """Return the record at ``path`` with the verdicts of a later run in the place of its own, and what says so."""
    old = json.loads(path.read_text())
    for habit, by in made["results"]["verdicts"].items():
        old["results"]["verdicts"][habit] |= by
    old["results"]["habits"] |= made["results"]["habits"]
    said = {name: made[name] for name in ("command", "commit", "date")}
    old["updated"] = [*old.get("updated", []), said]
    return old


if __name__ == "__main__":
    main()
