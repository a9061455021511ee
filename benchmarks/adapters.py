"""Step time of LoRA by PEFT at stage 3, against the same adapters written by hand, and against DDP.

``python -m benchmarks.adapters --record benchmarks/records/adapters.json``

Whole Trainers on two ranks, interleaved in one run as in `benchmarks.trainer_time`: a Llama of transformers whose
weights are frozen, with equal adapters in the same layers. What PEFT costs by itself is in ``ddp`` too.

``by hand``  zero3; the adapters are part of the layer's module
``peft``     zero3; PEFT's modules
``quantized``  as ``peft``, and the frozen weights in nf4
``ddp``      PEFT's modules under DDP
"""

from __future__ import annotations

import gc
import math
import statistics
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import record
from benchmarks.contest import against, turns
from benchmarks.trainer_time import Clock
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.trainers import bare_trainer, quiet

MINUTES = 8
SPREAD = "quartiles over rounds"
SEEDS = "0 for weights and data"
QUICK = ("--rounds", "2", "--steps", "4", "--width", "64", "--batch", "1", "--block", "32")

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 16, 32
CONTENDERS = ("by hand", "peft", "quantized", "ddp")


class ByHand(nn.Linear):
    """A linear layer with an adapter."""

    def __init__(self, plain: nn.Linear) -> None:
        """Take the weight of ``plain``, which has no bias."""
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        self.weight = plain.weight
        self.down = nn.Parameter(torch.empty(RANK, plain.in_features))
        self.up = nn.Parameter(torch.zeros(plain.out_features, RANK))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))

    def forward(self, input: Tensor) -> Tensor:
        """Return the layer's output and the adapter's."""
        low = functional.linear(input, self.down)
        return functional.linear(input, self.weight) + functional.linear(low, self.up) * (ALPHA / RANK)


class Adapted(pl.LightningModule):
    def __init__(self, *, by_hand: bool, width: int, layers: int) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=width // 32, tie_word_embeddings=False,
        )  # fmt: skip
        self.model: Any = LlamaForCausalLM(config).requires_grad_(False)
        if by_hand:
            for owner in list(self.model.modules()):
                for name, child in list(owner.named_children()):
                    if name in TARGETS:
                        setattr(owner, name, ByHand(child))
        else:
            import peft

            self.model = peft.get_peft_model(
                self.model, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(TARGETS))
            )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0], use_cache=False).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


def strategy_of(name: str) -> Any:
    """What is given to the Trainer."""
    return {"ddp": "ddp", "quantized": ZeROStrategy(3, precision={"frozen": "nf4"})}.get(name, "zero3")


def run_rank(rank: int, world_size: int, args: dict[str, Any]) -> Any:
    """Measure on one rank; returns seconds per contender and round, and the trainable parameters."""
    quiet()
    torch.set_num_threads(1)
    steps, batch = args["steps"], args["batch"]
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randint(256, (steps * batch * world_size, args["block"]), generator=generator))
    times: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    trained: dict[str, int] = {}
    for _, name in turns(CONTENDERS, args["rounds"]):
        pl.seed_everything(0, verbose=False)
        module = Adapted(by_hand=name == "by hand", width=args["width"], layers=args["layers"])
        trained[name] = sum(p.numel() for p in module.parameters() if p.requires_grad)
        clock = Clock()
        trainer = bare_trainer(strategy_of(name), world_size, max_steps=steps, callbacks=[clock])
        trainer.fit(module, DataLoader(data, batch_size=batch))
        times[name].append(statistics.median(clock.seconds))
        del trainer, module
        gc.collect()
    assert len(set(trained.values())) == 1
    return times, trained["peft"]


def main() -> None:
    from ls_strategy.testing import spawn

    parser = record.parser(__doc__, rounds=12, rounds_help="Trainers per contender")
    parser.add_argument("--steps", type=int, default=8, help="steps per Trainer")
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank and step")
    parser.add_argument("--block", type=int, default=128, help="tokens per sequence")
    parser.add_argument("--width", type=int, default=256, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model")
    args = parser.parse_args()
    options = {k: v for k, v in vars(args).items() if k != "record"}
    times, trained = spawn(run_rank, 2, options, timeout_s=3600, init_process_group=False)[0]
    table = against(times, CONTENDERS[0])
    for name, row in table.items():
        print(f"{name:10} x {row['ratio']:.3f}  [{row['ratio_q1']:.3f}, {row['ratio_q3']:.3f}]")
    record.write(
        args.record,
        {**record.header("adapters"), **options, "trained": trained, "baseline": CONTENDERS[0], "results": table},
    )


if __name__ == "__main__":
    main()
