"""Sequences sharded twice: by context parallelism, and between the tensor-parallel layers of a rank's share."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy import ZeROStrategy
from ls_strategy.config import nested
from ls_strategy.errors import PlanError
from ls_strategy.testing import spawn
from tests.dist.parallel_runs import (
    Run,
    assert_as_plain,
    assert_less_memory_changes_no_bit,
    assert_resumed,
    attention_plan,
    plain,
    start,
)
from tests.dist.ranks import quiet
from tests.dist.test_expert_parallel import ALONE, ROUTINGS
from tests.marks import few_or_all, slow
from tests.trainers import bare_trainer

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

BOTH: dict[str, Any] = {
    "parallel.context": 2, "parallel.tensor.size": 2, "parallel.tensor.sequence_parallel": True,
}  # fmt: skip
RING = {"parallel.ring": 2}
CHUNKED: dict[str, Any] = {"activations.loss": {"chunk_bytes": 4 * 61 * 5}}


def compare(choices: list[dict[str, Any]], world: int = 4, accumulate: int = 1, steps: int = 8, **shape: Any) -> None:
    trainer = {"accumulate_grad_batches": accumulate, "gradient_clip_val": 0.5}
    runs = [Run({**BOTH, **choice}, shape, steps=steps, trainer=trainer) for choice in choices]
    assert_as_plain(world, runs, timeout_s=250)


@pytest.mark.wide
@pytest.mark.parametrize("steps", few_or_all(3, 8))
def test_losses_norms_and_weights_are_those_of_one_process(steps):
    compare([{"stage": 1}, {"stage": 3, **RING, **CHUNKED}], steps=steps, num_layers=3)


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_every_stage(accumulate):
    compare([{"stage": stage, **ring} for stage in range(4) for ring in ({}, RING)], accumulate=accumulate)


@pytest.mark.slow
def test_with_less_memory():
    full = {"stage": 3, "activations.checkpointing": "full"}
    compare([
        full, {**full, **RING, **CHUNKED}, {**full, "activations.partitioning": True},
        {"stage": 2, "activations.checkpointing": "selective", "activations.offload": "cpu"},
        {"stage": 3, "offload.optimizer": "cpu", "offload.parameters": "cpu", "activations.offload": "cpu"},
    ])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [{"num_kv_heads": 2}, {"positions": "learned"}, {"tied_embeddings": False}, {"num_layers": 1}], ids=str
)
def test_variants_of_the_model(shape):
    """A single block slices on entry and gathers on exit."""
    compare([{"stage": 2}, {"stage": 1, **RING, **CHUNKED}], **shape)


@pytest.mark.slow
def test_two_replicas():
    compare([{"stage": 3}, {"stage": 2, **RING}], world=8)


@pytest.mark.slow
def test_with_experts():
    experts = ROUTINGS["dropless, k=2"] | ALONE
    plan = {"parallel.tensor.plan": attention_plan()}
    runs = [Run({"stage": 2, **BOTH, **plan, "parallel.expert": n}, experts=experts, steps=6) for n in (1, 2)]
    assert_as_plain(4, runs, timeout_s=250)


@pytest.mark.wide
@pytest.mark.parametrize("ring", [{}, slow(RING)], ids=str)
def test_recompute_and_offload_change_no_bit(ring):
    assert_less_memory_changes_no_bit(4, {**BOTH, "stage": 3, **ring}, {}, steps=5)


@pytest.mark.slow
def test_a_checkpoint_goes_on_in_another_layout(tmp_path):
    steps, half = 6, 3
    uninterrupted = plain(Run(steps=steps))
    path = str(tmp_path / "half.ckpt")
    start(4, [Run({"stage": 3, **BOTH}, steps=steps, save=(half, path))])
    layouts: dict[int, list[dict[str, Any]]] = {2: [{"stage": 1}], 4: [{"stage": 2, **BOTH, **RING}]}
    for world, choices in layouts.items():
        assert_resumed(world, [Run(o, steps=steps, resume=path) for o in choices], uninterrupted, half)


# --- transformers ----------------------------------------------------------------------------------------------------


class Llama(pl.LightningModule):
    """Trains on 16 tokens, and validates on 14, which only tensor-parallel ranks can share."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = None
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.model is None:
            hf = pytest.importorskip("transformers")
            torch.manual_seed(0)
            config = hf.LlamaConfig(
                vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
            )
            self.model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")

    def loss(self, tokens: Tensor) -> Tensor:
        loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        self.losses.append(loss.item())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch[0][:, :14])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=2e-3, eps=1e-2)

    def train_dataloader(self) -> DataLoader:
        text = torch.randint(0, 61, (12, 16), generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(text), batch_size=2)

    val_dataloader = train_dataloader


def losses_of_llama(_rank: int, world: int) -> list[float]:
    quiet()
    strategy = "auto" if world == 1 else ZeROStrategy(2, **nested(BOTH))
    trainer = bare_trainer(strategy, world, max_epochs=1, use_distributed_sampler=False, num_sanity_val_steps=0)
    module = Llama()
    trainer.fit(module)
    return module.losses


@pytest.mark.slow
def test_a_model_of_transformers():
    pytest.importorskip("transformers")
    expected = spawn(losses_of_llama, 1, init_process_group=False)[0]
    assert len(expected) == 12
    for losses in spawn(losses_of_llama, 4, init_process_group=False):
        assert losses == pytest.approx(expected, rel=2e-6)


# --- a model of one's own --------------------------------------------------------------------------------------------

WIDTH, TOKENS = 16, 8


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        self.drawn = self.dropout(torch.ones(64))
        return self.proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts = counts
        self.norm, self.attention = nn.LayerNorm(WIDTH), Mixer()
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            x = x + torch.arange(x.shape[1], dtype=x.dtype)[:, None]
        self.drawn = self.dropout(torch.ones(64))
        return x + self.attention(self.norm(x))


class Net(pl.LightningModule):
    blocks: Any
    drawn: Any

    def __init__(self, counts: bool = False, tokens: int = TOKENS, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = tokens
        self.embedding = nn.Embedding(31, WIDTH)
        self.blocks = nn.ModuleList(Block(counts) for _ in range(2))
        self.head = nn.Linear(WIDTH, 31)
        for module in self.modules():
            if isinstance(module, nn.Dropout):
                module.p = dropout
        self.plan = {f"blocks.*.attention.{name}": style for name, style in (("qkv", "column"), ("proj", "row"))}
        self.drawn = []

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = functional.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())
        self.drawn += [(block.drawn, block.attention.drawn) for block in self.blocks]
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> DataLoader:
        text = torch.randint(0, 31, (4, self.tokens), generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(text, text), batch_size=2)


def fit(_rank: int, _world: int, options: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    quiet()
    pl.seed_everything(3)
    net = Net(**options)
    parallel = {**BOTH, "parallel.tensor.plan": {f"{k}": v for k, v in net.plan.items()}}
    trainer = bare_trainer(ZeROStrategy(2, **nested(parallel)), 4, max_steps=2)
    trainer.fit(net)
    return net.drawn


def test_a_block_that_counts_its_own_tokens_is_found():
    with pytest.raises(PlanError, match=r"block 'blocks.0' gives another result for 4 of 8 tokens"):
        spawn(fit, 4, {"counts": True}, init_process_group=False)


@pytest.mark.slow
def test_tokens_that_do_not_divide_name_both_kinds_of_ranks():
    with pytest.raises(PlanError, match=r"6 tokens .* 2 ranks .* and the 2 of tensor parallelism.* multiple of 4"):
        spawn(fit, 4, {"tokens": 6}, init_process_group=False)


@pytest.mark.slow
def test_every_rank_draws_its_own_numbers_for_its_own_tokens():
    """All four have other tokens between the layers, and other heads or other tokens between column and row layers."""
    ranks = spawn(fit, 4, {"dropout": 0.5}, init_process_group=False)
    assert len(ranks[0]) == 4, "two steps of two blocks"
    for call in zip(*ranks, strict=True):
        for drawn in zip(*call, strict=True):
            assert len({tuple(each.tolist()) for each in drawn}) == 4
