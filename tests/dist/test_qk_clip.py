"""MuonClip at every stage, on every tier and with tensor parallelism, against plain torch in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ls_strategy
from ls_strategy.lightning.strategy import ZeROStrategy
from ls_strategy.testing import spawn
from recipes.gpt.network import Attention
from tests.dist.parallel_runs import Module, Outcome, Run, train, unequal
from tests.dist.trusted import once
from tests.marks import wide

pytestmark = pytest.mark.dist
STEPS, LIMIT = 6, 0.01
BOUNDS = {"losses": 1e-5, "norms": 1e-4, "weights": 1e-5}


class Clipped(Module):
    """A GPT whose attention notes its logits. The trusted run clips by a plain hook, on the full weights."""

    def configure_model(self) -> None:
        super().configure_model()
        for block in self.model.blocks:
            attention = block.attention
            if not hasattr(attention, "qk_clip"):
                config = {"head_width": attention.head_width, "num_heads": 4, "num_kv_heads": attention.kv_heads}
                name = "query_key_value.weight"
                attention.qk_clip = ls_strategy.QKClip(name, name, **config)

    def configure_optimizers(self) -> Any:
        hidden = [p for p in self.model.blocks.parameters() if p.dim() >= 2]
        taken = set(map(id, hidden))
        others = [p for p in self.parameters() if id(p) not in taken]
        groups = [{"params": hidden}, {"params": others, "use_muon": False}]
        optimizer = ls_strategy.Muon(groups, lr=2e-3, eps=1e-2, ns_dtype="fp32")
        if isinstance(self.trainer.strategy, ZeROStrategy):
            optimizer.clip_logits(self, limit=LIMIT)
        else:
            optimizer.register_step_post_hook(lambda *_: self.clip_by_hand())
        return optimizer

    @torch.no_grad()
    def clip_by_hand(self) -> None:
        for block in self.model.blocks:
            attention = block.attention
            weight, width = attention.query_key_value.weight, attention.head_width
            gamma = (LIMIT / attention.qk_clip.max_logits).clamp(max=1)
            for head, factor in enumerate(gamma):
                weight[head * width : (head + 1) * width] *= factor.sqrt()
            shared = 4 // attention.kv_heads
            for head in range(attention.kv_heads):
                factor = gamma[head * shared : (head + 1) * shared].min().sqrt()
                weight[(4 + head) * width : (5 + head) * width] *= factor
            attention.qk_clip.max_logits = None
            self.outcome.notes["clipped"] = self.outcome.notes.get("clipped", 0) + int((gamma < 1).sum())


def attend(self: Any, x_BTD: Tensor, rotation: Any, **_: Any) -> Tensor:
    """The recipe's attention, with the one call that a user adds."""
    B, T = x_BTD.shape[:2]
    heads = self.query_key_value(x_BTD).view(B, T, -1, self.head_width).transpose(1, 2)
    q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
    self.qk_clip(q, k)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
    return self.out(y.transpose(1, 2).reshape(B, T, -1))


def runs(rank: int, world_size: int, cases: list[Run]) -> list[Outcome]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Attention, "forward", attend)
        return [train(rank, world_size, run, Clipped) for run in cases]


SHAPES = [wide({}), {"num_kv_heads": 2}]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, [{"stage": 3}, {"stage": 1, "parallel.tensor": 2}, {"stage": 2, "offload.optimizer": "nvme"}]),
        pytest.param(2, [{"stage": 0}, {"stage": 1, "offload.optimizer": "cpu"}], marks=pytest.mark.slow),
        pytest.param(4, [{"stage": 3, "parallel.tensor": 2}], marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_of_plain_torch(ranks: int, options: list[Any], shape: Any, tmp_path: Path) -> None:
    alone = once(runs, 1, [Run(steps=STEPS, shape=shape)])[0][0]
    assert alone.notes["clipped"] > STEPS  # many heads
    cases = [Run({**o, "offload.nvme_path": str(tmp_path)}, steps=STEPS, shape=shape) for o in options]
    found = spawn(runs, ranks, cases, init_process_group=False)[0]
    assert not unequal(alone, cases, found, **BOUNDS)


def test_other_heads_than_those_of_the_weights_are_an_error() -> None:
    attention: Any = nn.Module()
    attention.q, attention.k = nn.Linear(8, 8), nn.Linear(8, 8)
    attention.clip = ls_strategy.QKClip("q.weight", "k.weight", 4, 2)
    optimizer = ls_strategy.Muon([{"params": [attention.q.weight, attention.k.weight]}], lr=0.0)
    optimizer.clip_logits(attention, limit=1.0)
    attention.clip(torch.randn(1, 4, 3, 4), torch.randn(1, 4, 3, 4))
    with pytest.raises(ls_strategy.PlanError, match=r"logits of 4 heads.*has 2 of width 4"):
        optimizer.step()


def test_the_logits_of_a_head_are_at_most_the_limit_after_a_step() -> None:
    """Biases too; other heads stay as they are; nothing is noted in evaluation."""
    torch.manual_seed(0)
    attention: Any = nn.Module()
    attention.q, attention.k = nn.Linear(8, 8), nn.Linear(8, 8)
    attention.clip = ls_strategy.QKClip("q.weight", "k.weight", 4, 2)
    attention.q.weight.data[:4] *= 20
    before = attention.q.weight.detach().clone()
    groups = [{"params": [attention.q.weight, attention.k.weight]},
              {"params": [attention.q.bias, attention.k.bias], "use_muon": False}]  # fmt: skip
    optimizer = ls_strategy.Muon(groups, lr=0.0)
    optimizer.clip_logits(attention, limit=2.0)
    x = torch.randn(2, 5, 8)

    def note() -> Tensor:
        attention.clip(*(layer(x).view(2, 5, 2, 4).transpose(1, 2) for layer in (attention.q, attention.k)))
        return attention.clip.max_logits

    first = note()
    assert first[0] > 2 > first[1]
    optimizer.step()
    assert attention.clip.max_logits is None
    torch.testing.assert_close(note()[0], torch.tensor(2.0))
    assert torch.equal(attention.q.weight[4:], before[4:])
    attention.clip.max_logits = None
    attention.eval()
    assert note() is None
