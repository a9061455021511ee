"""DeepSpeed's side of a comparison, and what both sides have in common: cases, network, text, optimizer.

As a script it trains one case: ``python deepspeed_side.py JOB``, JOB a JSON file that `run` writes. It has processes of
its own, since DeepSpeed changes the process that it is imported into.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "gpt" / "configs" / "deepspeed"
STEPS, RANKS = 20, 2
SHAPE: dict[str, Any] = {"vocab_size": 256, "block_size": 32, "num_layers": 2, "num_heads": 2, "width": 32}
LR, WARMUP, CLIP = 3e-3, 6, 1.0
"""Of the recipe's own optimizer and Trainer, for files that say nothing about them; 1.0 is DeepSpeed's default."""


@dataclass(frozen=True)
class Case:
    """One configuration, as it is run on the CPU."""

    name: str
    """Of a file in `CONFIGS`, or ``stage1`` to ``stage3``."""

    precision: str = "fp32"
    """Or ``bf16``: in the place of what the file says, since fp16 needs a GPU, or a CPU that has it."""

    nvme_path: str = ""
    """For a file that names a folder on a drive."""

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, with the precision and the folder of the case."""
        config = _stage(int(self.name[-1])) if self.name.startswith("stage") else _file(self.name)
        config.pop("fp16", None)
        if self.precision == "bf16":
            config["bf16"] = {"enabled": True}
        for name, block in config["zero_optimization"].items():
            if isinstance(block, dict) and "nvme_path" in block:
                block["nvme_path"] = self.nvme_path
                if name == "offload_param":
                    block["buffer_size"] = 1_000_000  # DeepSpeed's default takes 2 GB of page-locked memory per rank
        return config

    @property
    def stage(self) -> int:
        """Of ZeRO."""
        return self.config["zero_optimization"]["stage"]

    @property
    def micro(self) -> int:
        """Samples of a micro-batch."""
        return self.config["train_micro_batch_size_per_gpu"]

    @property
    def accumulation(self) -> int:
        """Micro-batches of a step."""
        whole = self.config.get("train_batch_size")
        return whole // (self.micro * RANKS) if whole else 1


def _file(name: str) -> dict[str, Any]:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def _stage(stage: int) -> dict[str, Any]:
    """What the files have not: accumulation, another clipping and another schedule, at every stage."""
    return {
        "train_batch_size": 2 * 2 * RANKS,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {"total_num_steps": 30, "warmup_max_lr": 5e-3, "warmup_num_steps": 6},
        },
    }


def text(case: Case, cache: str) -> Any:
    """The recipe's data module, over a part of the standard library's source."""
    from recipes.gpt.corpus import CorpusConfig
    from recipes.gpt.data import TextData

    corpus = CorpusConfig(max_bytes=300_000, cache_dir=cache)
    return TextData(corpus=corpus, block_size=SHAPE["block_size"], batch_size=case.micro, val_crops=1)


def network(precision: str = "fp32") -> nn.Module:
    """The recipe's network, the same weights everywhere.

    For bf16 they are rounded: DeepSpeed makes fp32 masters of what it has rounded, and this package of what it was
    given, which would be two different models.
    """
    from recipes.gpt.network import GPT, GPTConfig

    torch.manual_seed(7)
    model = GPT(GPTConfig(**SHAPE))
    if precision == "bf16":
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.bfloat16())
    return model


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The recipe's."""
    return functional.cross_entropy(model(tokens).float().flatten(0, 1), targets.flatten())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """The recipe's optimizer groups: vectors do not decay."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def rate(step: int) -> float:
    """The recipe's schedule, as a part of `LR`."""
    from recipes.gpt.model import warmup_cosine

    return warmup_cosine(step, warmup_steps=WARMUP, total_steps=STEPS, final_ratio=0.1)


# --- the parent ------------------------------------------------------------------------------------------------------


def run(case: Case, folder: Path, port: int, cache: str) -> list[dict[str, Any]]:
    """Train a case with DeepSpeed; per rank ``{"losses": floats, "weights": tensors by name}``.

    Args:
        case: which.
        folder: for what the ranks leave.
        port: of the rendezvous.
        cache: folder of the tokenised text, which has to be there.

    Raises:
        RuntimeError: with the end of its output.
    """
    job = folder / "job.json"
    job.write_text(json.dumps({"case": asdict(case), "folder": str(folder), "port": port, "cache": cache}))
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, __file__, str(job)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path, "DS_ACCELERATOR": "cpu"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"DeepSpeed ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(RANKS)]


# --- DeepSpeed's processes -------------------------------------------------------------------------------------------


def leave(rank: int, job: dict[str, Any]) -> None:
    """One rank, which ends here: with threads for a drive, DeepSpeed's processes do not come out of a regular exit."""
    status = 1
    try:
        train(rank, job)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def train(rank: int, job: dict[str, Any]) -> None:
    """Leave losses and weights in a file."""
    case = Case(**job["case"])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    import deepspeed  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    engine = make_engine(case)
    losses: list[float] = []
    for tokens, targets in batches(case, job["cache"], rank):
        loss = loss_of(engine, tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=case.stage == 3):
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    torch.save({"losses": losses, "weights": weights}, f"{job['folder']}/rank{rank}.pt")
    torch.distributed.barrier()


def make_engine(case: Case) -> Any:
    """With the optimizer of the file, or with the recipe's in the class that DeepSpeed asks for with offload."""
    import deepspeed  # pyright: ignore[reportMissingImports]

    model, config = network(case.precision), case.config
    if "optimizer" in config:
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    from deepspeed.ops.adam import DeepSpeedCPUAdam  # pyright: ignore[reportMissingImports]
    from torch.optim.lr_scheduler import LambdaLR

    optimizer = DeepSpeedCPUAdam(groups(model), lr=LR, betas=(0.9, 0.95), eps=1e-8, adamw_mode=True)
    return deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=lambda o: LambdaLR(o, rate), config=config
    )[0]


def batches(case: Case, cache: str, rank: int) -> Any:
    """What the recipe's loader gives this rank."""
    from itertools import islice

    from recipes.gpt.data import Crops, CropSampler, ResumableLoader

    data = text(case, cache)
    data.setup("fit")
    tokens, _ = data._opened()
    block = SHAPE["block_size"]
    sampler = CropSampler(len(tokens), block, seed=data.seed, num_replicas=RANKS, rank=rank)
    loader = ResumableLoader(Crops(tokens, block, stride=1), sampler, batch_size=case.micro, num_workers=0)
    return islice(loader, STEPS * case.accumulation)


def main(path: str) -> None:
    """Start the ranks."""
    import torch.multiprocessing as mp

    mp.start_processes(leave, (json.loads(Path(path).read_text()),), nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    main(*sys.argv[1:])
