"""Generation inside ``training_step``: ranks stop at different lengths, and gather weights once a rollout."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy.access import rollout
from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from tests.dist.ranks import Block, Net, assert_close, fit, mean_over_ranks, quiet, weights

pytestmark = [pytest.mark.wide, pytest.mark.dist]

VOCABULARY, WIDTH, STOP = 11, 8, 3
OFFLOAD = {"offload.optimizer": "cpu", "offload.parameters": "cpu"}
OPTIONS = {"stage 3": {}, "one root unit": {"sharding.min_unit_numel": 10**6}, "offload": OFFLOAD}


class Policy(nn.Module):
    """A language model with a loop of its own, as transformers has one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.forwards = 0

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).cumsum(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens: Tensor, limit: int) -> Tensor:
        for _ in range(limit):
            self.forwards += 1
            following = self(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, following], 1)
            if bool((following == STOP).all()):
                break
        return tokens


class Rollouts(Net):
    """Rewards tokens that it has generated itself. Each rank stops after a number of tokens of its own."""

    def build(self) -> None:
        self.policy = Policy()
        self.sent: list[int] = []
        self.lengths: list[int] = []

    def rollout(self, tokens: Tensor, limit: int) -> Tensor:
        return self.policy.generate(tokens, limit)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.policy(tokens)

    def training_step(self, batch: Any, i: int) -> Tensor:
        prompt = (batch[0][:, :2].abs() * 10).long() % VOCABULARY
        strategy: Any = self.trainer.strategy
        before = strategy.traffic.elements["all_gather"] if isinstance(strategy, ZeROStrategy) else 0
        tokens = self.rollout(prompt, limit=2 + 5 * ((i + self.trainer.global_rank) % 2))
        if isinstance(strategy, ZeROStrategy):
            self.sent.append(strategy.traffic.elements["all_gather"] - before)
        self.lengths.append(tokens.shape[1])
        reward = torch.sin(tokens[:, 1:].float())
        chosen = functional.log_softmax(self.logits(tokens[:, :-1]), -1).gather(-1, tokens[:, 1:, None])[..., 0]
        return self.noted(-(reward * chosen).mean())


class ByHand(Rollouts):
    """A loop in the LightningModule, inside a context."""

    def rollout(self, tokens: Tensor, limit: int) -> Tensor:
        strategy: Any = self.trainer.strategy
        if not isinstance(strategy, ZeROStrategy):
            return self.policy.generate(tokens, limit)
        with strategy.gathered_parameters(self.policy):
            return Policy.generate(self.policy, tokens, limit)


def runs(rank: int, world_size: int) -> dict[str, Any]:
    quiet()
    trusted = Rollouts()
    fit("ddp", trusted, max_epochs=1)
    expected = weights(trusted)
    found: dict[str, Any] = {}
    for name, options in OPTIONS.items():
        for kind in (Rollouts, ByHand):
            module = kind()
            strategy = ZeROStrategy(**nested({"stage": 3, "sharding.min_unit_numel": 0, **options}))
            trainer = fit(strategy, module, max_epochs=1)
            assert_close(mean_over_ranks(module.losses), mean_over_ranks(trusted.losses), name)
            assert_close(weights(module), expected, name)
            assert module.policy.forwards == trusted.policy.forwards
            assert type(copy.deepcopy(module.policy)).generate is Policy.generate
            shards = sum(flat.layout.shard for flat in trainer.strategy.engine.flats)
            assert max(module.sent) <= shards, f"{name}: {module.sent}, but {shards} are all weights"
            assert "generate" not in vars(module.policy)
        found[name] = module.lengths
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return spawn(runs, 2, init_process_group=False, timeout_s=120)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_rollout_gathers_once_and_may_stop_on_any_rank(found: list[dict[str, Any]], name: str) -> None:
    first, second = (rank[name] for rank in found)
    assert all(a != b for a, b in zip(first, second, strict=True))  # otherwise this would show nothing


# --- a model of transformers -----------------------------------------------------------------------------------------


class Llama(Rollouts):
    """A causal model with its own ``generate``."""

    def build(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().build()
        shape = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
        ids = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
        torch.manual_seed(0)
        self.policy = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=2, **ids))

    def rollout(self, tokens: Tensor, limit: int) -> Tensor:
        return self.policy.generate(tokens, max_new_tokens=limit, do_sample=False)

    def logits(self, tokens: Tensor) -> Tensor:
        return self.policy(tokens).logits


def llamas(rank: int, world_size: int) -> list[list[int]]:
    quiet()
    trusted = Llama()
    fit("ddp", trusted, max_epochs=1)
    lengths = []
    for share in (rollout.SHARE, 0.0):  # at once, or unit by unit
        rollout.SHARE = share
        module = Llama()
        trainer = fit(3, module, max_epochs=1)
        assert_close(mean_over_ranks(module.losses), mean_over_ranks(trusted.losses), "losses", 2e-6)
        assert_close(weights(module), weights(trusted), "weights", 4e-6)
        assert module.lengths == trusted.lengths
        shards = sum(flat.layout.shard for flat in trainer.strategy.engine.flats)
        assert (max(module.sent) <= shards) == bool(share)
        lengths.append(module.lengths)
    return lengths


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")
def test_generate_of_transformers_gathers_once_or_keeps_ranks_in_step() -> None:
    first, second = spawn(llamas, 2, init_process_group=False, timeout_s=120)
    assert first != second
