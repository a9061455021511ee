"""Foretold and measured peaks of memory, side by side.

``python -m benchmarks.planner --record benchmarks/records/planner.json``

Two ranks on the CPU train the model of `tests.dist.test_planner` with every combination there of stage, tier,
recomputation and precision. *measured* is the largest sum of live tensor storages of a rank, counted by a dispatch mode
and not by the process' size, which depends on the allocator. *foretold* is the planner's, without running anything.
"""

from __future__ import annotations

from typing import Any

from benchmarks import record
from tests.dist.test_planner import IDS, foretell, measured

MINUTES = 1
SPREAD = "none: bytes are counted"
SEEDS = "none set: bytes do not depend on the values"
QUICK = ()


def bench(ranks: int) -> dict[str, Any]:
    everyones = measured(ranks, tuple(range(len(IDS))))
    results: dict[str, Any] = {}
    for index, name in enumerate(IDS):
        forecast = foretell(index, ranks)
        foretold = forecast.peak.device + forecast.peak.cpu
        peak = max(rank[index][0] for rank in everyones)
        results[name] = {
            "foretold_bytes": foretold,
            "measured_bytes": peak,
            "ratio": round(foretold / peak, 4),
            "sent_bytes_foretold": forecast.traffic.sent,
            "sent_bytes_measured": everyones[0][index][1],
        }
    return results


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    results = bench(args.ranks)
    print(f"{'':60}{'foretold':>12}{'measured':>12}{'ratio':>8}")
    for name, row in results.items():
        print(f"{name:60}{row['foretold_bytes']:>12,}{row['measured_bytes']:>12,}{row['ratio']:>8.3f}")
    record.write(args.record, {**record.header("planner"), "ranks": args.ranks, "results": results})


if __name__ == "__main__":
    main()
