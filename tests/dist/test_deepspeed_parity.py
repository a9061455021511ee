"""The GPT recipe trained through ``deepspeed_config``, against DeepSpeed's own run of the same file, model and data.

As a script it is DeepSpeed's side: ``python test_deepspeed_parity.py OUT PORT STAGE``. Both sides have processes of
their own, since DeepSpeed changes the process that it is imported into.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[2]
STEPS, MICRO, ACCUMULATION, RANKS = 20, 2, 2, 2
SHAPE = {"vocab_size": 64, "block_size": 16, "num_layers": 2, "num_heads": 2, "width": 32}


def configuration(stage: int) -> dict:
    return {
        "train_batch_size": MICRO * ACCUMULATION * RANKS,
        "train_micro_batch_size_per_gpu": MICRO,
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


def tokens() -> torch.Tensor:
    """``(samples, T + 1)``: all that both sides train on; rank r takes every ``RANKS``-th from the r-th on."""
    count = STEPS * ACCUMULATION * MICRO * RANKS
    return torch.randint(0, 64, (count, 17), generator=torch.Generator().manual_seed(3))


def network() -> torch.nn.Module:
    from recipes.gpt.network import GPT, GPTConfig

    torch.manual_seed(7)
    return GPT(GPTConfig(**SHAPE))


def loss_of(model: torch.nn.Module, sample: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(sample[:, :-1]).flatten(0, 1), sample[:, 1:].flatten())


# --- DeepSpeed's side ------------------------------------------------------------------------------------------------


def train_deepspeed(rank: int, out: str, port: int, stage: int) -> None:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), **address)
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    model = network()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=configuration(stage))
    mine, losses = tokens()[rank::RANKS], []
    for start in range(0, len(mine), MICRO):
        loss = loss_of(engine, mine[start : start + MICRO])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters()), enabled=stage == 3):
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    torch.save({"losses": losses, "weights": weights}, f"{out}/rank{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)


def main(out: str, port: str, stage: str) -> None:
    sys.path.insert(0, str(ROOT))
    import torch.multiprocessing as mp

    mp.start_processes(train_deepspeed, (out, int(port), int(stage)), nprocs=RANKS, start_method="spawn")


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.exit(0)


# --- our side --------------------------------------------------------------------------------------------------------

import lightning.pytorch as pl  # noqa: E402
import pytest  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from ls_strategy import ZeROStrategy  # noqa: E402
from ls_strategy.testing import free_port, spawn  # noqa: E402


class Recipe(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = network()
        self.losses: list[float] = []

    def training_step(self, batch, _):
        loss = loss_of(self.model, batch)
        self.losses.append(loss.item())
        return loss

    def train_dataloader(self):
        return DataLoader(tokens()[self.global_rank :: RANKS], batch_size=MICRO)


def fit(rank, world_size, stage):
    strategy = ZeROStrategy.from_deepspeed_config(configuration(stage), min_unit_numel=0)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Recipe()
    trainer.fit(module)
    assert trainer.global_step == STEPS
    weights = strategy.lightning_module_state_dict()
    return module.losses, {name.removeprefix("model."): value.clone() for name, value in weights.items()}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_twenty_steps_of_the_gpt_recipe(stage, tmp_path):
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs deepspeed")
    command = [sys.executable, __file__, str(tmp_path), str(free_port()), str(stage)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    ours = spawn(fit, RANKS, stage, timeout_s=300, init_process_group=False)
    for rank, (losses, _) in enumerate(ours):
        theirs = torch.load(tmp_path / f"rank{rank}.pt")
        assert len(losses) == STEPS * ACCUMULATION
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(theirs["losses"]), rtol=1e-5, atol=0)
    weights = ours[0][1]
    for name, value in theirs["weights"].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=2e-6, msg=lambda text, n=name: f"{n}: {text}")
    moved = [(weights[name] - p.detach()).abs().max().item() for name, p in network().named_parameters()]
    assert min(moved) > 1e-3
