"""Writes the checkpoints in this folder, with a real DeepSpeed on CPUs: ``python make_checkpoints.py FOLDER``.

Each case is trained for a few steps on two ranks. Beside DeepSpeed's own files, ``expected.pt`` has what DeepSpeed says
about itself: fp32 weights by its own ``zero_to_fp32``, and the learning rates of the last step.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import torch
import torch.multiprocessing as mp
from torch import nn

STEPS = 4
CASES = {
    "stage1": {"zero_optimization": {"stage": 1}},
    "stage2_bf16": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}, "bf16": {"enabled": True}},
    "stage3": {"zero_optimization": {"stage": 3, "sub_group_size": 30, "stage3_param_persistence_threshold": 0}},
    "stage0": {"zero_optimization": {"stage": 0}},
}


class Net(nn.Module):
    """Odd sizes, a buffer, a frozen weight, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(5, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.register_buffer("calls", torch.zeros(2))
        self.middle = nn.Linear(7, 3)
        self.frozen = nn.Linear(3, 3, bias=False).requires_grad_(False)
        self.up = nn.Linear(3, 5)
        self.tied = nn.Linear(5, 7, bias=False)
        self.tied.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``(N, 5)`` to ``(N, 7)``."""
        self.calls.add_(1)
        return self.tied(self.up(self.frozen(torch.tanh(self.middle(self.norm(self.embed(x)))))))


def groups(model: nn.Module) -> list[dict]:
    """Two optimizer groups."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() == 1], "weight_decay": 0.0},
    ]


def batch(step: int, rank: int) -> torch.Tensor:
    """``(4, 5)``."""
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def train(rank: int, port: int, folder: str, case: str) -> None:
    """One rank of one case."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    import deepspeed
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 6}},
        **CASES[case],
    }
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(STEPS):
        x = batch(step, rank)
        dtype = torch.bfloat16 if "bf16" in case else torch.float32
        engine.backward(engine(x.to(dtype)).float().pow(2).mean())
        engine.step()
    target = Path(folder) / case
    engine.save_checkpoint(str(target), client_state={"note": "from the caller"})
    if rank == 0:
        weights = (
            get_fp32_state_dict_from_zero_checkpoint(str(target)) if case != "stage0" else engine.module.state_dict()
        )
        weights = {k: v.contiguous().clone() for k, v in weights.items()}
        rates = [group["lr"] for group in engine.optimizer.param_groups]
        torch.save({"weights": weights, "rates": rates}, target / "expected.pt")
        for script in target.glob("zero_to_*.py"):  # DeepSpeed's own tools, copied into every checkpoint
            script.unlink()
    torch.distributed.barrier()
    os._exit(0)


def main(folder: str, port: int, cases: list[str]) -> None:
    """Write the cases, one after the other."""
    for i, case in enumerate(cases):
        mp.start_processes(train, (port + i, folder, case), nprocs=2, start_method="spawn")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:] or list(CASES))
