"""Where the memory of a training step goes, by kind and by option, as `Monitor` records it.

``python -m benchmarks.memory_kinds --record benchmarks/records/memory_kinds.json``

Ranks on this host train a GPT of the recipe in bf16-true with AdamW, once with each choice of options. `Monitor`
records one step in full. Its readings are the bytes of model states; what else is alive (activations, temporary
tensors) is the sum of all live storages, counted by a dispatch mode, less these states and the batch. On GPUs that
would be the allocator's counter. Reported is the moment at which a rank had the most. Offloaded states are in host
memory, which is not the device's: they are listed as ``host_bytes`` and are no part of the sum.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import record
from benchmarks.scaling import Trained
from ls_strategy import Monitor
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.spans import SpanRecord
from ls_strategy.testing import spawn
from recipes.gpt.network import GPTConfig
from tests.live_bytes import LiveBytes
from tests.models import quiet

MINUTES = 5
SPREAD = "none: bytes of tensors are counted"
SEEDS = "none set: bytes do not depend on the values"
QUICK = ("--width", "64", "--layers", "2", "--vocabulary", "256", "--block", "64")

CHOICES: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero3, recompute": {"stage": 3, "activations": {"checkpointing": "full"}},
    "zero3, recompute, chunked loss": {"stage": 3, "activations": {"checkpointing": "full", "loss": "chunked"}},
    "zero3, recompute, chunked loss, int8 moments": {
        "stage": 3, "activations": {"checkpointing": "full", "loss": "chunked"}, "precision": {"moments": "int8"},
    },
    "zero3, recompute, chunked loss, offload": {
        "stage": 3, "activations": {"checkpointing": "full", "loss": "chunked"}, "offload": {"optimizer": "cpu"},
    },
}  # fmt: skip

TIMELINE = "zero3"  # the choice of which the record has every reading of the step
ON_HOST = ("masters", "optimizer", "gradients")  # kinds that `offload.optimizer` moves to host memory


class Measured(Monitor):
    """A `Monitor` that also counts live tensors at each reading, and keeps the record of one step."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live
        self.record: SpanRecord | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        recorder: Any = self._recorder
        plain: Callable[[], dict[str, int]] = recorder.measure

        def measure() -> dict[str, int]:
            states = dict(plain())
            states.pop("process", None)
            # Storages freed by a resize are counted by the mode as well, so the rest is what is no state.
            return {**states, "activations": max(self._live.now - sum(states.values()), 0)}

        recorder.measure = measure

    def _look_ahead(self, trainer: pl.Trainer) -> None:
        super()._look_ahead(trainer)
        recorder: Any = self._recorder
        recorder.each_unit = True

    def _end_window(self, trainer: pl.Trainer) -> None:
        super()._end_window(trainer)
        if self._window is not None and self.record is None:
            self.record = self._window[0].resolve()


def run_rank(
    rank: int, world_size: int, sizes: dict[str, int], options: dict[str, Any]
) -> list[tuple[float, str, dict[str, int]]]:
    """Train four steps, and return the readings of the third: seconds, place, bytes by kind."""
    quiet()
    torch.manual_seed(0)
    config = _config(sizes)
    tokens: Tensor = torch.randint(config.vocab_size, (4 * world_size * sizes["batch"], config.block_size + 1))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    with LiveBytes(ignore=[tokens]) as live, tempfile.TemporaryDirectory() as folder:
        monitor = Measured(live)
        trainer = pl.Trainer(
            accelerator="cpu", devices=world_size, precision="bf16-true", max_steps=4, log_every_n_steps=4,
            strategy=ZeROStrategy(**options), logger=CSVLogger(folder), callbacks=[monitor], enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Trained(config), DataLoader(data, batch_size=sizes["batch"]))
    assert monitor.record is not None
    start = monitor.record.start
    return [(round(at - start, 6), where, held) for at, where, held in monitor.record.memory]


def on_device(held: dict[str, int], options: dict[str, Any]) -> dict[str, int]:
    """Return the bytes by kind that a GPU would hold."""
    moved = ON_HOST if options.get("offload") else ()
    return {kind: nbytes for kind, nbytes in held.items() if kind not in moved and nbytes}


def most(readings: list[tuple[float, str, dict[str, int]]], options: dict[str, Any]) -> dict[str, Any]:
    """Return the moment with the most bytes on the device."""
    _, where, held = max(readings, key=lambda reading: sum(on_device(reading[2], options).values()))
    kinds = on_device(held, options)
    host = sum(nbytes for kind, nbytes in held.items() if kind not in kinds)
    return {"kinds": kinds, "sum": sum(kinds.values()), "host_bytes": host, "at": where}


def main() -> None:
    parser: argparse.ArgumentParser = record.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--block", type=int, default=512, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=1, help="sequences per rank and step")
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name in ("width", "layers", "vocabulary", "block", "batch")}
    found: dict[str, Any] = {**record.header("memory_kinds"), "ranks": args.ranks, **sizes, "results": {}}
    for name, options in CHOICES.items():
        ranks = spawn(
            run_rank, args.ranks, sizes, options, timeout_s=1200, init_process_group=False, env={"OMP_NUM_THREADS": "1"}
        )
        found["results"][name] = max((most(each, options) for each in ranks), key=lambda r: r["sum"])
        if name == TIMELINE:
            found["timeline"] = {"choice": name, "readings": ranks[0]}
        row = found["results"][name]
        print(
            f"{name:34}{row['sum'] / 2**20:9.1f} MiB  "
            + ", ".join(f"{k} {v / 2**20:.1f}" for k, v in row["kinds"].items())
        )
    with torch.device("meta"):
        found["parameters"] = sum(p.numel() for p in Trained(_config(sizes)).parameters())
    record.write(args.record, found)


def _config(sizes: dict[str, int]) -> GPTConfig:
    return GPTConfig(
        vocab_size=sizes["vocabulary"], block_size=sizes["block"], num_layers=sizes["layers"],
        num_heads=max(sizes["width"] // 64, 1), width=sizes["width"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
