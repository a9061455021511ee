"""Memory and traffic per GPU on 8 to 4,096 of them, on paper, and the same forecast counted on real ranks.

``python -m benchmarks.scaling --record benchmarks/records/scaling.json``

*On paper*: the planner's forecast for GPTs of the recipe, 16-bit parameters with fp32 masters and AdamW, one sequence
of 2,048 tokens per GPU, blocks recomputed in backward. Nothing of a model's size is built.

*Checked*: a small GPT trains on gloo ranks of this host. Bytes are counted where they leave the process, memory is the
peak of live tensor storages, and both are held against the forecast by the same code for that model and those ranks.
What differs on GPUs is that gradients travel in fp32 there (``reduce_dtype``), and in the parameters' dtype on gloo.

*Figure 1* of the ZeRO paper (arXiv:1910.02054): 7.5 billion parameters on 64 ranks, by its formulas and by this
package's own plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks import record
from ls_strategy.config import RecomputeConfig, ShardingConfig, TierConfig, ZeROConfig
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.forecast import RANKS, Forecast, Forecaster, Run
from ls_strategy.extras.planner.hardware import Hardware
from ls_strategy.extras.planner.simulated import simulated
from ls_strategy.extras.planner.states import ModelStates, moment_bytes
from ls_strategy.extras.planner.step import training_step
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.precision import resolve_precision
from ls_strategy.testing import spawn
from ls_strategy.zero_stages import POLICIES
from recipes.gpt.network import GPT, GPTConfig
from tests import papers
from tests.live_bytes import LiveBytes
from tests.models import quiet
from tests.trainers import bare_trainer

MINUTES = 2
SPREAD = "none: bytes are counted"
SEEDS = "none set: bytes do not depend on the values"
QUICK = ("--models", "1.3B", "--ranks", "8", "64", "--check", "2")

GPT2_VOCABULARY = 50304
MODELS: dict[str, GPTConfig] = {
    "1.3B": GPTConfig(vocab_size=GPT2_VOCABULARY, block_size=2048, num_layers=24, num_heads=16, width=2048),
    "7B": GPTConfig(vocab_size=GPT2_VOCABULARY, block_size=2048, num_layers=32, num_heads=32, width=4096),
    "70B": GPTConfig(vocab_size=GPT2_VOCABULARY, block_size=2048, num_layers=86, num_heads=64, width=8192),
}
"""``gpt_1b3.yaml`` and ``gpt_7b.yaml`` of the recipe, and one that is ten times larger."""

SMALL = GPTConfig(vocab_size=96, block_size=32, num_layers=4, num_heads=4, width=96)  # what real ranks train
_FULL, _CPU = RecomputeConfig(policy="full"), TierConfig(tier="cpu")
CANDIDATES = (
    Candidate(0, recompute=_FULL),
    Candidate(1, recompute=_FULL),
    Candidate(2, recompute=_FULL),
    Candidate(3, recompute=_FULL),
    Candidate(2, _CPU, recompute=_FULL),
    Candidate(3, _CPU, _CPU, recompute=_FULL),
)
PRINTED_GB = {0: 120, 1: 31.4, 2: 16.6, 3: 1.9}  # by stage, in figure 1
FIGURE_NUMEL, FIGURE_RANKS = 7_500_000_000, 64
PRECISION, STEPS = "bf16-true", 2


class Trained(pl.LightningModule):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.network = GPT(config)

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """Next-token cross entropy, softmax in fp32."""
        tokens, targets = batch
        return nn.functional.cross_entropy(self.network(tokens).float().flatten(0, 1), targets.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


# --- on paper --------------------------------------------------------------------------------------------------------


@contextmanager
def forecaster_of(config: GPTConfig, *, min_unit_numel: int | None = None) -> Iterator[Forecaster]:
    """The planner, for one sequence per rank of a model without memory."""
    with torch.device("meta"):
        module = Trained(config)
    optimizer = module.configure_optimizers()
    precision = resolve_precision(PRECISION)
    chosen = (
        ZeROConfig() if min_unit_numel is None else ZeROConfig(sharding=ShardingConfig(min_unit_numel=min_unit_numel))
    )
    batch = [torch.zeros(1, config.block_size, dtype=torch.long, device="meta")] * 2
    with simulated(module, precision, (), torch.device("cpu")) as fakes:
        optimizers = [fakes.optimizer(optimizer)]
        yield Forecaster(
            module, optimizers, fakes=fakes, precision=precision, step=training_step(module, optimizers), batch=batch,
            run=Run(config=chosen),
        )  # fmt: skip


def scaled(config: GPTConfig, ranks: Sequence[int]) -> tuple[int, dict[str, dict[str, dict[str, int]]]]:
    """Parameters; and bytes by strategy and number of GPUs."""
    results: dict[str, dict[str, dict[str, int]]] = {}
    with forecaster_of(config) as forecaster:
        for candidate in CANDIDATES:
            results[candidate.strategy] = {
                str(n): _bytes(forecaster.forecast(candidate, Hardware(ranks=n, device="cuda"))) for n in ranks
            }
        return forecaster.numel, results


def _bytes(forecast: Forecast) -> dict[str, int]:
    return {
        "device_bytes": forecast.peak.device,
        "state_bytes": sum(sum(kinds.values()) for kinds in forecast.peak.states.values()),
        "host_bytes": forecast.peak.cpu,
        "sent_bytes": forecast.traffic.sent,
        "bus_bytes": forecast.traffic.bus,
    }


def figure_1() -> dict[str, Any]:
    """Bytes of model states by stage: printed, by formula, and by this package's plan of equal blocks."""
    with torch.device("meta"):
        model = nn.ModuleList([nn.Linear(10_000, 10_000, bias=False) for _ in range(75)])
    optimizer = torch.optim.AdamW(model.parameters())
    states = ModelStates(model, [optimizer], resolve_precision(PRECISION))
    moments = (moment_bytes(optimizer, ZeROConfig()),)
    stages: dict[str, Any] = {}
    for stage in POLICIES:
        plan = states.plan(ZeROConfig(stage=stage), FIGURE_RANKS)
        stages[f"zero{stage}"] = {
            "printed_gb": PRINTED_GB[stage],
            "formula_bytes": round(papers.bytes_per_rank(stage, FIGURE_NUMEL, FIGURE_RANKS)),
            "planned_bytes": sum(sum(kinds.values()) for kinds in plan.bytes_by_tier(moments).values()),
        }
    return {"parameters": FIGURE_NUMEL, "ranks": FIGURE_RANKS, "stages": stages}


# --- on real ranks ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """Of one rank and strategy."""

    sent: int  # bytes that left the process in the last step
    peak: int  # bytes of live tensor storages, at most, from the first step on


class Count(pl.Callback):
    """Peaks count from the first step on: before, the original values are there, too."""

    def __init__(self, live: LiveBytes) -> None:
        self.live = live
        self.now = 0
        self.sent: list[int] = [0]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, what is given to the transport is counted: on gloo all of the engine's exchanges are sends."""
        exchange = dist.batch_isend_irecv

        def counted(operations: list[dist.P2POp]) -> Any:
            self.now += sum(o.tensor.nbytes for o in operations if o.op is dist.isend)
            return exchange(operations)

        dist.batch_isend_irecv = counted
        try:
            yield
        finally:
            dist.batch_isend_irecv = exchange

    def on_train_start(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.live.reset_peak()

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.sent.append(self.now)


def count(rank: int, world_size: int) -> dict[str, Counted]:
    """Train `SMALL` with every strategy on this rank; collective."""
    quiet()
    tokens = torch.randint(SMALL.vocab_size, (STEPS * world_size, SMALL.block_size + 1))
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    result: dict[str, Counted] = {}
    for candidate in CANDIDATES:
        with LiveBytes(ignore=list(data.tensors)) as live:
            counter = Count(live)
            trainer = bare_trainer(
                ZeROStrategy(**candidate.arguments(), sharding={"min_unit_numel": 0}),
                world_size,
                precision=PRECISION,
                max_steps=STEPS,
                callbacks=[counter],
            )
            with counter.counting():
                trainer.fit(Trained(SMALL), DataLoader(data, batch_size=1))
        result[candidate.strategy] = Counted(counter.sent[-1] - counter.sent[-2], live.peak)
    return result


def checked(ranks: int) -> dict[str, dict[str, int]]:
    """By strategy: what real ranks sent and held, the highest of them, and what was foretold."""
    everyones = spawn(count, ranks, init_process_group=False, timeout_s=170)
    rows: dict[str, dict[str, int]] = {}
    with forecaster_of(SMALL, min_unit_numel=0) as forecaster:
        for candidate in CANDIDATES:
            forecast = forecaster.forecast(candidate, Hardware(ranks=ranks, device="cpu"))
            each = [by_strategy[candidate.strategy] for by_strategy in everyones]
            rows[candidate.strategy] = {
                "sent_counted": max(c.sent for c in each),
                "sent_foretold": forecast.traffic.sent,
                "peak_measured": max(c.peak for c in each),
                "peak_foretold": forecast.peak.device + forecast.peak.cpu,  # the same memory here
            }
    return rows


# --- the record ------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="on paper")
    parser.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), help="GPUs on paper")
    parser.add_argument("--check", nargs="*", type=int, default=[2, 3, 4], help="numbers of real ranks")
    args = parser.parse_args()
    found: dict[str, Any] = {
        **record.header("scaling"), "ranks": args.ranks, "precision": PRECISION, "recompute": "full",
        "models": {}, "results": {}, "figure_1": figure_1(),
    }  # fmt: skip
    for name in args.models:
        numel, found["results"][name] = scaled(MODELS[name], args.ranks)
        found["models"][name] = {"parameters": numel, **asdict(MODELS[name])}
        print(f"{name}: {numel:,} parameters, GB on each of {args.ranks} GPUs")
        for strategy, by_ranks in found["results"][name].items():
            print(f"  {strategy:16}" + "".join(f"{row['device_bytes'] / 1e9:>10.2f}" for row in by_ranks.values()))
    found["checked"] = {"model": asdict(SMALL), "ranks": {str(n): checked(n) for n in args.check}}
    for n, rows in found["checked"]["ranks"].items():
        print(f"{n} real ranks, foretold over counted: bytes sent, peak of memory")
        for strategy, row in rows.items():
            sent, peak = row["sent_foretold"] / row["sent_counted"], row["peak_foretold"] / row["peak_measured"]
            print(f"  {strategy:16}{sent:>10.4f}{peak:>10.4f}")
    record.write(args.record, found)


if __name__ == "__main__":
    main()
