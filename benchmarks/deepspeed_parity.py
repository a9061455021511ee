"""Losses of the GPT recipe through DeepSpeed's configuration files, against DeepSpeed's own runs of them.

``python -m benchmarks.deepspeed_parity --record benchmarks/records/deepspeed_parity.json``

Both sides train the recipe's network on the recipe's text, two gloo ranks, 20 steps: ``recipes/gpt/configs/deepspeed``
as files, and one more configuration at stages 1, 2 and 3 with accumulation and another schedule. What is compared is
every loss of every rank. On a CPU fp16 of a file gives way to fp32, or to bf16. Needs DeepSpeed (the ``bench`` extra).
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks import record
from ls_strategy import ZeROStrategy
from ls_strategy.testing import free_port, spawn
from recipes.gpt.model import GPTModule, OptimConfig, SampleConfig
from recipes.gpt.network import GPTConfig
from tests.dist import deepspeed_side as side
from tests.dist.deepspeed_side import Case
from tests.models import quiet
from tests.trainers import bare_trainer

MINUTES = 6
SPREAD = "none: both sides compute the same steps, and the largest difference is recorded"
SEEDS = "7 for weights and data"
QUICK = ("--cases", "stage2-fp32")

FILES = ("zero2_fp16", "zero2_offload", "zero3_offload")
DRIVE = ("zero3_nvme",)  # last, since DeepSpeed has to be compiled for them
CASES: dict[str, Case] = {
    f"{name}-{precision}": Case(name, precision)
    for precision, names in (
        ("fp32", FILES), ("bf16", FILES), ("fp32", ("stage1", "stage2", "stage3")), ("fp32", DRIVE), ("bf16", DRIVE),
    )
    for name in names
}  # fmt: skip


class Recipe(GPTModule):
    """With `side.network` and the optimizer of the file, if it has one."""

    def __init__(self, case: Case) -> None:
        optim = OptimConfig(lr=side.LR, warmup_steps=side.WARMUP, total_steps=side.STEPS)
        super().__init__(GPTConfig(**side.SHAPE), optim, SampleConfig(max_new_tokens=0))
        self.model = side.network(case.precision)  # pyright: ignore[reportAttributeAccessIssue]
        self.losses: list[float] = []
        self._by_file = "optimizer" in case.config

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The recipe's; the loss is kept."""
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        """None leaves it to the file."""
        return None if self._by_file else super().configure_optimizers()


def fit(rank: int, world_size: int, case: Case, cache: str) -> tuple[list[float], dict[str, Tensor]]:
    """This package's side on one rank: losses, and weights by name. Collective."""
    quiet()
    strategy = ZeROStrategy.from_deepspeed_config(
        case.config, sharding={"min_unit_numel": 0}, offload={"nvme_allow_ram": bool(case.nvme_path)}
    )
    clip = None if "gradient_clipping" in case.config else side.CLIP
    trainer = bare_trainer(strategy, world_size, max_steps=side.STEPS, gradient_clip_val=clip, limit_val_batches=0)
    module = Recipe(case)
    trainer.fit(module, side.text(case, cache))
    weights = strategy.lightning_module_state_dict()
    return module.losses, {name.removeprefix("model."): value.clone() for name, value in weights.items()}


@dataclass(frozen=True)
class Comparison:
    """Of one case, all ranks."""

    largest_difference: float  # of a loss, relative to DeepSpeed's
    weight_difference: float  # largest of any weight
    moved: float  # how far the weight moved that moved least, of the largest element of each tensor
    losses: int
    first_loss: float
    last_loss: float


def compare(case: Case, folder: Path) -> Comparison:
    """Run both sides.

    Args:
        case: which.
        folder: an empty one, on a disk.
    """
    cache, drive = folder / "text", folder / "drive"
    drive.mkdir()
    if "nvme" in case.name:
        case = replace(case, nvme_path=str(drive))
    side.text(case, str(cache)).prepare_data()
    theirs = side.run(case, folder, free_port(), str(cache))
    ours = spawn(fit, side.RANKS, case, str(cache), timeout_s=300, init_process_group=False)
    pairs = [
        pair for (mine, _), rank in zip(ours, theirs, strict=True) for pair in zip(mine, rank["losses"], strict=True)
    ]
    weights, initial = ours[0][1], dict(side.network(case.precision).named_parameters())
    apart = [(weights[name] - value.float()).abs().max().item() for name, value in theirs[0]["weights"].items()]
    moved = [(weights[name] - p.detach()).abs().max().item() for name, p in initial.items()]
    return Comparison(
        max(abs(a - b) / abs(b) for a, b in pairs), max(apart), min(moved), len(pairs), pairs[0][1], pairs[-1][1]
    )


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--directory", type=Path, default=None, help="folder on a disk, for what is offloaded")
    args = parser.parse_args()
    found: dict[str, Any] = {
        **record.header("deepspeed_parity", private=(args.directory,) if args.directory else ()),
        "steps": side.STEPS, "ranks": side.RANKS, "network": side.SHAPE, "results": {},
    }  # fmt: skip
    for name in args.cases:
        case = CASES[name]
        with tempfile.TemporaryDirectory(dir=args.directory) as folder:
            result = compare(case, Path(folder))
        found["results"][name] = {
            "configuration": case.name, "stage": case.stage, "precision": case.precision, **asdict(result)
        }  # fmt: skip
        print(f"{name:20} {result}", flush=True)
        record.write(args.record, found)


if __name__ == "__main__":
    main()
