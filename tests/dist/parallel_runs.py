"""One small GPT, trained on the same global batches by any number of ranks, however they divide it among them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy.config import nested
from ls_strategy.extras.cli import main
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.moe.feed_forward import GatedFeedForward
from ls_strategy.moe.layer import MoE
from ls_strategy.moe.losses import moe_losses
from ls_strategy.testing import spawn
from recipes.gpt.network import GPT, GPTConfig
from tests.dist.everywhere import check_every_rank
from tests.dist.ranks import mean_over_ranks, quiet
from tests.dist.trusted import once
from tests.trainers import bare_trainer

SHAPE: dict[str, Any] = {
    "vocab_size": 61,  # of no number of ranks a multiple
    "block_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "width": 32,
}
BATCH = 4
"""Sequences of a step, of all ranks together, unless said otherwise."""


@dataclass
class Run:
    """What is trained, and how. Without options: the trusted run, a plain Trainer on one process."""

    options: dict[str, Any] | None = None
    """Arguments of `ZeROStrategy`."""

    shape: dict[str, Any] = field(default_factory=dict)
    experts: dict[str, Any] | None = None
    """Arguments of `MoE`, which takes the place of every feed-forward then."""

    steps: int = 20
    batch: int = BATCH
    trainer: dict[str, Any] = field(default_factory=dict)
    resume: str | None = None
    save: tuple[int, str] | None = None
    """After which step, and where."""

    def __str__(self) -> str:
        parts = {**(self.options or {}), **self.shape, **(self.experts or {}), **self.trainer}
        return ",".join(f"{k}={v}" for k, v in parts.items())


@dataclass
class Outcome:
    """What a run left behind; ``weights`` on rank 0 only, after `check_every_rank`."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


class Module(pl.LightningModule):
    """A plain LightningModule: no rank, no collective."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.outcome = Outcome()
        self.model: Any = None

    def configure_model(self) -> None:
        if self.model is None:
            with nullcontext() if self.run.experts is None else with_experts(**self.run.experts):
                self.model = GPT(GPTConfig(**{**SHAPE, **self.run.shape}))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens_BT, targets_BT = batch
        loss = functional.cross_entropy(self.model(tokens_BT).float().flatten(0, 1), targets_BT.flatten())
        return loss if self.run.experts is None else loss + moe_losses(self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.outcome.losses.append(outputs["loss"].item())
        if self.run.save and self.trainer.global_step == self.run.save[0]:
            self.trainer.save_checkpoint(self.run.save[1])

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if isinstance(self.trainer.strategy, ZeROStrategy):
            self.outcome.norms.append(self.trainer.strategy.grad_norm().item())
        else:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            self.outcome.norms.append(torch.nn.utils.get_total_norm(grads).item())

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        # Adam divides by |g| + eps, so it multiplies the rounding of an element whose gradient is near zero by 1 / eps.
        # At 1e-4 the trusted run itself is 1.2e-5 away from one in fp64 (with experts, 6 steps), and DDP on four ranks
        # 1.2e-5 from DDP on one; at 1e-2 these are 1.8e-6 and 5e-7, and a gradient that is wrong by a factor, which
        # Adam without eps would not notice, shows in full.
        return torch.optim.AdamW(groups, lr=2e-3, eps=1e-2, weight_decay=0.1, fused=True)

    def train_dataloader(self) -> DataLoader:
        """Batch ``i`` of all replicas together holds the same sequences, however many replicas there are."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.run.steps * self.run.batch, SHAPE["block_size"] + 1)
        text = torch.randint(0, SHAPE["vocab_size"], shape, generator=generator)
        shard = self.trainer.distributed_sampler_kwargs or {"num_replicas": 1, "rank": 0}
        mine = self.run.batch // shard["num_replicas"]
        index = torch.arange(len(text)).view(-1, shard["num_replicas"], mine)[:, shard["rank"]].flatten()
        return DataLoader(TensorDataset(text[index, :-1], text[index, 1:]), batch_size=mine)


def attention_plan() -> dict[str, Any]:
    """Tensor parallelism of the attention alone: experts, in the place of feed-forwards, are divided another way."""
    plan = GPT(GPTConfig(**SHAPE)).tensor_parallel_plan()
    return {f"model.{name}": style for name, style in plan.items() if ".mlp" not in name}


def with_experts(num_experts: int = 4, ffn: int = 40, **options: Any) -> AbstractContextManager[Any]:
    """Inside, a GPT gets a Mixture of Experts in the place of every feed-forward."""

    def build(config: GPTConfig) -> MoE:
        return MoE(config.width, lambda: GatedFeedForward(config.width, ffn), num_experts, **options)

    return mock.patch("recipes.gpt.network.SwiGLU", build)


def train(rank: int, world_size: int, run: Run, kind: type[Module] = Module) -> Outcome:
    """One run; collective."""
    quiet()
    torch.manual_seed(0)
    module = kind(run)
    strategy: Any = (
        "auto" if run.options is None else ZeROStrategy(**nested({"sharding.min_unit_numel": 0, **run.options}))
    )
    trainer = bare_trainer(strategy, world_size, max_epochs=1, use_distributed_sampler=False, **run.trainer)
    trainer.fit(module, ckpt_path=run.resume)
    outcome = module.outcome
    outcome.losses = mean_over_ranks(outcome.losses)
    if isinstance(trainer.strategy, ZeROStrategy):
        outcome.notes["tensor"] = dict(trainer.strategy.tensor_parallel_traffic.elements)
        outcome.notes["sequence"] = dict(trainer.strategy.context_parallel_traffic.elements)
        outcome.notes["expert"] = dict(trainer.strategy.expert_parallel_traffic.elements)
        outcome.notes["zero"] = dict(trainer.strategy.traffic.elements)
        outcome.notes["plan"] = trainer.strategy.require_engine().plan
    weights = trainer.strategy.lightning_module_state_dict()
    if isinstance(trainer.strategy, ZeROStrategy):
        check_every_rank(trainer.strategy, weights)
    if rank == 0:
        outcome.weights = {k: v.detach().cpu().clone() for k, v in weights.items()}
    return outcome


def train_all(rank: int, world_size: int, runs: list[Run], kind: type[Module] = Module) -> list[Outcome]:
    """One run after the other."""
    return [train(rank, world_size, run, kind) for run in runs]


def differences(trusted: Outcome, ours: Outcome) -> dict[str, float]:
    """Largest relative difference of losses and norms, and of any weight relative to its tensor's largest."""
    assert len(trusted.losses) == len(ours.losses)
    assert len(trusted.norms) == len(ours.norms)
    assert trusted.weights.keys() == ours.weights.keys()
    found = {
        kind: max(abs(a - b) / abs(a) for a, b in zip(getattr(trusted, kind), getattr(ours, kind), strict=True))
        for kind in ("losses", "norms")
    }
    pairs = [(v.double(), ours.weights[k].double()) for k, v in trusted.weights.items()]
    assert all(a.shape == b.shape for a, b in pairs)
    return {**found, "weights": max(((a - b).abs().max() / a.abs().max()).item() for a, b in pairs)}


def unequal(expected: Outcome, runs: list[Run], found: list[Outcome], **limits: float) -> list[str]:
    """What differs from the trusted run by more than it may; 2e-6 unless said otherwise, 4e-6 for weights."""
    problems: list[str] = []
    for run, outcome in zip(runs, found, strict=True):
        for kind, difference in differences(expected, outcome).items():
            limit = limits.get(kind, 4e-6 if kind == "weights" else 2e-6)
            if not difference <= limit:
                problems.append(f"{run}: {kind} differ by {difference:.3g} (limit {limit:g})")
    return problems


def plain(run: Run, kind: type[Module] = Module, ranks: int = 1) -> Outcome:
    """The trusted run of ``run``: the same without options and checkpoints, in one process or in DDP on more."""
    return once(train, ranks, replace(run, options=None, resume=None, save=None), kind)[0]


def start(ranks: int, runs: list[Run], kind: type[Module] = Module, timeout_s: float = 150) -> list[Outcome]:
    """What the runs, one after the other in the same ranks, leave behind on rank 0."""
    return spawn(train_all, ranks, runs, kind, init_process_group=False, timeout_s=timeout_s)[0]


def assert_as_plain(
    ranks: int,
    runs: list[Run],
    kind: type[Module] = Module,
    *,
    plain_ranks: int = 1,
    timeout_s: float = 150,
    **limits: float,
) -> list[Outcome]:
    """Every run comes to the numbers of its trusted one, on ``plain_ranks``; returns what the runs left behind."""
    found = start(ranks, runs, kind, timeout_s)
    each = zip(runs, found, strict=True)
    assert not [p for run, outcome in each for p in unequal(plain(run, kind, plain_ranks), [run], [outcome], **limits)]
    return found


def assert_same_bits(outcomes: list[Outcome]) -> None:
    """Losses and weights of all of them are equal bit for bit."""
    for outcome in outcomes[1:]:
        assert outcome.losses == outcomes[0].losses
        assert all(torch.equal(v, outcomes[0].weights[k]) for k, v in outcome.weights.items())


def assert_resumed(
    world: int, runs: list[Run], whole: Outcome, half: int, kind: type[Module] = Module, **limits: float
) -> None:
    """Runs that go on from a checkpoint of the first ``half`` of the steps end as the one that was not interrupted."""
    found = start(world, runs, kind)
    for outcome in found:
        outcome.losses = whole.losses[:half] + outcome.losses
        outcome.norms = whole.norms[:half] + outcome.norms
    assert not unequal(whole, runs, found, **limits)


def assert_consolidates(folder: str, file: str, target: str) -> None:
    """The folder of a run that was saved in parts, as one file, is the file that the same run saves."""
    assert main(["consolidate", folder, target]) == 0
    expected, found = torch.load(file, weights_only=True), torch.load(target, weights_only=True)
    assert found["state_dict"].keys() == expected["state_dict"].keys()
    assert all(torch.equal(found["state_dict"][k], v) for k, v in expected["state_dict"].items())
    theirs, ours = expected["optimizer_states"][0]["state"], found["optimizer_states"][0]["state"]
    assert all(torch.equal(ours[i][k], v) for i, state in theirs.items() for k, v in state.items())


def assert_less_memory_changes_no_bit(world: int, options: dict[str, Any], shape: dict[str, Any], steps: int) -> None:
    """Recomputation and offload of activations, with dropout, so that what is drawn again counts too."""
    more: list[dict[str, Any]] = [
        {},
        {"activations.checkpointing": "full"},
        {"activations.checkpointing": "selective"},
        {"activations.offload": "cpu"},
    ]
    runs = [Run({**options, **each}, {"dropout": 0.2, **shape}, steps=steps) for each in more]
    assert_same_bits(start(world, runs, timeout_s=250))
