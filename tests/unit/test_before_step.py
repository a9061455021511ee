"""`BeforeStep`: what a forward leaves in a module besides gradients is put back."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ls_strategy.extras.callbacks.before_step import BeforeStep
from ls_strategy.moe.router import Router, RoutingOptions
from ls_strategy.optimizers.qk_clip import QKClip

ALONE: Any = SimpleNamespace(virtual=None)


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("written", "behind", "replaced"):
            self.register_buffer(name, torch.zeros(2))
        self.register_buffer("absent", None)
        self.clip = QKClip("q", "k", 2, 2)
        self.router = Router(4, RoutingOptions(num_experts=2))


def test_a_forward_leaves_no_trace() -> None:
    module = Module()
    router_input = torch.randn(8, 4)
    module.router(router_input)
    before = BeforeStep(ALONE, module)
    loads, buffer = module.router.counts.loads, module.replaced
    for _ in range(2):
        before.take()
        drawn = torch.rand(3), random.random()
        module.written += torch.nan
        module.behind.data.add_(1)  # the version of the buffer stays
        module.replaced = torch.ones(2)
        module.clip(torch.ones(1, 2, 3, 2), torch.ones(1, 2, 3, 2))
        module.router(router_input)
        before.put_back()
        assert torch.equal(torch.rand(3), drawn[0])
        assert random.random() == drawn[1]
        assert module.replaced is buffer
        assert all(torch.equal(each, torch.zeros(2)) for each in (module.written, module.behind, module.replaced))
        assert module.clip.max_logits is None
        assert module.router.counts.loads is loads
