"""Validation loss of the GPT recipe on two islands that exchange every 30 steps, against DDP with equal tokens.

``python -m benchmarks.rare_exchange --steps 1500 --record benchmarks/records/rare_exchange.json``

Every contender trains on the same number of tokens with the same learning rates, and all islands validate on all
validation data, with the weights after the last exchange. A seed decides initial weights and order of the text, so
losses are compared in pairs. The bytes are those that a rank has sent to the other island, with the first weights;
for DDP they are computed: a ring's all-reduce of fp32 gradients over two ranks in every step.

``--pretrained N`` begins as the paper does (Douillard et al., arXiv:2311.08105, section 3): all contenders of a seed go
on from the weights of one DDP run of N steps, with new AdamW states and a new schedule.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import threading
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from benchmarks import record
from benchmarks.language import gpt, text
from ls_strategy import DiLoCo, ZeROStrategy
from ls_strategy.extras.islands.hub import Hub
from ls_strategy.extras.islands.server import HubServer
from ls_strategy.testing import free_port, spawn, torchrun_env
from tests.trainers import bare_trainer, quiet

MINUTES = 10
SPREAD = "over seeds"
SEEDS = "1 to --seeds, for weights and the order of the text"
QUICK = ("--seeds", "1", "--steps", "9", "--every", "9")

NETWORK: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "width": 64}
BLOCK, BATCH, LR = 64, 8, 3e-3  # per rank; AdamW with the recipe's schedule. `LR` is that of the pretraining, too.
CONTENDERS: dict[str, dict[str, Any] | None] = {
    "DDP": None,
    "outer momentum 0.9": {},
    "outer momentum 0.5": {"outer_momentum": 0.5},
}
"""Options of `DiLoCo`."""

FIRST = "pretraining"  # the DDP run that the others go on from


def train(rank: int, _: int, contender: str, seed: int, run: dict[str, Any]) -> dict[str, float]:
    """One run of two ranks: one DDP run, or two islands of one rank. Validation loss in nats per byte."""

    quiet()
    options = CONTENDERS.get(contender)
    callbacks = []
    if options is not None:
        os.environ.update(torchrun_env(0, 1, run["ports"][rank]))
        callbacks.append(DiLoCo(run["meet"], island=rank, islands=2, every=run["every"], **options))
    pl.seed_everything(seed, verbose=False)
    trainer = bare_trainer(
        "ddp" if options is None else ZeROStrategy(1),
        2 if options is None else 1,
        max_steps=run["steps"],
        limit_val_batches=0,
        gradient_clip_val=1.0,
        callbacks=[*callbacks, sent := _Sent()],
    )
    data = text(run["cache"], seed, block=BLOCK, batch=BATCH)
    module = gpt(NETWORK, BLOCK, warmup_steps=run["steps"] // 10, lr=run["lr"])
    weights = Path(run["cache"]) / f"pretrained-{seed}.pt"
    if weights.exists():
        module.configure_model()
        module.load_state_dict(torch.load(weights))
    trainer.fit(module, data)
    parameters = sum(p.numel() for p in module.parameters())
    if contender == FIRST and rank == 0:
        torch.save(module.state_dict(), weights)
    sent_bytes = 4 * parameters * run["steps"] if options is None else sent.bytes
    judge = pl.Trainer(accelerator="cpu", devices=trainer.num_devices, strategy="ddp" if options is None else "auto",
                       logger=False, enable_progress_bar=False, use_distributed_sampler=False)  # fmt: skip
    found = judge.validate(module, data, verbose=False)[0]
    return {"val": float(found["val/loss"]), "sent_mib": round(sent_bytes / 2**20, 3)}


class _Sent(pl.Callback):
    bytes = 0

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.bytes = sum(c.sent_bytes for c in trainer.callbacks if isinstance(c, DiLoCo))


Runs = dict[str, dict[str, dict[str, float]]]


def compare(runs: Runs) -> dict[str, dict[str, float]]:
    """Per contender: the mean over seeds, and how far it is above DDP, in pairs."""
    result: dict[str, dict[str, float]] = {}
    for contender, by_seed in runs.items():
        above = [run["val"] / runs["DDP"][seed]["val"] - 1 for seed, run in by_seed.items()]
        result[contender] = {
            "seeds": len(by_seed),
            "val": round(statistics.fmean(run["val"] for run in by_seed.values()), 4),
            "above": round(statistics.fmean(above), 5),
            "above_spread": round(statistics.stdev(above), 5) if len(above) > 1 else 0.0,
            "largest_above": round(max(above), 5),
            "sent_mib": next(iter(by_seed.values()))["sent_mib"],
        }
    return result


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each contender")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--pretrained", type=int, default=0, help="steps of DDP before")
    parser.add_argument("--lr", type=float, default=LR, help="highest learning rate of AdamW")
    parser.add_argument("--every", type=int, default=30, help="steps between exchanges")
    args = parser.parse_args()
    runs: Runs = {}
    found: dict[str, Any] = {
        **record.header("rare_exchange"), "network": NETWORK, "steps": args.steps, "every": args.every,
        "pretrained": args.pretrained, "lr": args.lr, "tokens": 2 * args.steps * BATCH * BLOCK,
        "contenders": CONTENDERS, "results": {}, "runs": runs,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as cache:
        server = HubServer(Hub(2, 120.0), host="127.0.0.1", port=0, secret="")
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            for seed in range(1, args.seeds + 1):
                for contender in (*([FIRST] if args.pretrained else ()), *CONTENDERS):
                    steps, lr = (args.pretrained, LR) if contender == FIRST else (args.steps, args.lr)
                    run = {"meet": f"127.0.0.1:{server.port}", "ports": [free_port(), free_port()], "cache": cache,
                           "steps": steps, "every": args.every, "lr": lr}  # fmt: skip
                    both = spawn(train, 2, contender, seed, run, init_process_group=False, timeout_s=900)
                    assert both[0]["val"] == both[1]["val"], f"{contender}: the islands have different weights"
                    if contender != FIRST:
                        runs.setdefault(contender, {})[str(seed)] = both[0]
                    print(f"{contender}, seed {seed}: {both[0]}", flush=True)
                found["results"] = compare(runs)
                record.write(args.record, found)
        finally:
            server.close()
            thread.join()
    for contender, row in found["results"].items():
        print(contender, row)


if __name__ == "__main__":
    main()
