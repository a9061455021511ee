"""Validation loss, checkpoint size and step time of the fine-tuning recipe: in full, with adapters, from a teacher.

``python -m benchmarks.finetune --record benchmarks/records/finetune.json``

Two CPU ranks, the recipe's own configurations and program. The base model and the student are made first; the teacher
is the fine-tuned base. Every run of a seed has the same base and the same rows.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import record
from benchmarks.record import ROOT

MINUTES = 25
SPREAD = "over seeds of the order of the rows"
SEEDS = "1 to --seeds"
QUICK = ("--seeds", "1", "--steps", "2", "--base_steps", "0", "--records", "200")

RUNS: dict[str, tuple[str, ...]] = {"full": (), "lora": ("lora",), "qlora": ("qlora",), "distilled": ("distill",)}
"""Overlays of base.yaml, by name of the run. The teacher of ``distilled`` is what ``full`` exports."""

CONFIGS = ROOT / "recipes" / "finetune" / "configs"


def program(*arguments: str) -> None:
    """Run ``python -m recipes.finetune``.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "recipes.finetune", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}:\n{done.stderr[-3000:]}")


def fit(folder: Path, overlays: tuple[str, ...], seed: int, *options: str) -> dict[str, float]:
    """One run; losses in nats per predicted token at both ends, bytes of the checkpoint, and seconds."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    configs = [f"--config={CONFIGS / name}.yaml" for name in ("base", *overlays)]
    start = time.perf_counter()
    program("fit", *configs, f"--seed_everything={seed}", f"--trainer.logger.init_args.save_dir={folder}", *options)
    seconds = time.perf_counter() - start
    events = EventAccumulator(str(folder / "finetune" / "version_0"), size_guidance={"scalars": 0}).Reload()
    val = [e.value for e in events.Scalars("val/loss")]
    checkpoint = folder / "finetune" / "version_0" / "checkpoints" / "last.ckpt"
    size = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
    return {"val": round(val[-1], 4), "checkpoint_bytes": size, "seconds": round(seconds, 1)}


def measure(work: Path, args: Any) -> dict[str, dict[str, dict[str, float]]]:
    """Every run with every seed, by name and seed."""
    base, student, teacher = (work / name for name in ("base", "student", "teacher"))
    program("make-base", str(base), f"--steps={args.base_steps}")
    program("make-base", str(student), f"--steps={args.base_steps}", "--layers=2", "--width=64")
    options = [f"--trainer.max_steps={args.steps}", f"--trainer.val_check_interval={args.steps}"]
    options += [] if args.records is None else [f"--data.files.max_records={args.records}"]
    runs: dict[str, dict[str, dict[str, float]]] = {name: {} for name in RUNS}
    for seed in range(1, args.seeds + 1):
        for name, overlays in RUNS.items():
            models = [f"--model.model={base}"]
            if name == "distilled":
                models = [f"--model.model={student}", f"--model.teacher.model={teacher}"]
            folder = work / f"{name}-{seed}"
            runs[name][str(seed)] = fit(folder, overlays, seed, *models, *options)
            print(f"{name} seed {seed}: {runs[name][str(seed)]}", flush=True)
            if name == "full" and not teacher.exists():
                program("export", str(folder / "finetune" / "version_0" / "checkpoints" / "last.ckpt"), str(teacher))
    return runs


def summary(runs: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Means over seeds, and the range of the losses."""
    found = {}
    for name, by_seed in runs.items():
        losses = [run["val"] for run in by_seed.values()]
        found[name] = {
            "val": round(statistics.fmean(losses), 4),
            "val_lowest": min(losses),
            "val_highest": max(losses),
            "checkpoint_bytes": next(iter(by_seed.values()))["checkpoint_bytes"],
            "seconds": round(statistics.median(run["seconds"] for run in by_seed.values()), 1),
        }
    return found


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=2, help="runs of each kind")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--base_steps", type=int, default=300, help="optimizer steps of the base model")
    parser.add_argument("--records", type=int, default=None, help="training lines; all without")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        runs = measure(Path(work), args)
    found = {**record.header("finetune"), "steps": args.steps, "runs": runs, "results": summary(runs)}
    print(json.dumps(found["results"], indent=2))
    record.write(args.record, found)


if __name__ == "__main__":
    main()
