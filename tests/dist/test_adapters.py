"""Adapters of PEFT on a pretrained model: made in ``configure_model`` as without a strategy, and trained as under DDP."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import assert_close, assert_equal, fit, mean_over_ranks, on_ranks, weights
from tests.dist.test_pretrained import LENGTH, VOCABULARY, Pretrained, save, tokens

pytest.importorskip("peft", reason="needs peft")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

LORA = {"peft_type": "LORA", "target_modules": ["q_proj", "v_proj"]}
KINDS: dict[str, dict[str, Any]] = {
    "lora": LORA,
    "gaussian": {**LORA, "init_lora_weights": "gaussian"},
    "orthogonal": {**LORA, "init_lora_weights": "orthogonal"},
    "dora": {**LORA, "use_dora": True},
    "pissa": {**LORA, "init_lora_weights": "pissa"},
    "modules_to_save": {**LORA, "modules_to_save": ["lm_head"]},
    "prompt": {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 3},
}


class Adapted(Pretrained):
    """With adapters of one kind."""

    def __init__(self, folder: Path, kind: str = "lora", lr: float = 0.05) -> None:
        self.kind, self.rate = kind, lr
        super().__init__(folder)

    def load(self) -> Any:
        import peft

        model = super().load()
        adapted = peft.get_peft_model(model, peft.get_peft_config(dict(KINDS[self.kind])))
        self.further(adapted)
        return adapted

    def further(self, model: Any) -> None:
        """Change the model with adapters."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.rate, eps=1e-4, fused=True)


class Switching(Adapted):
    """Two adapters by turns; the first one starts from other values than PEFT gives it."""

    def further(self, model: Any) -> None:
        import peft

        model.add_adapter("other", peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))
        for name, param in model.named_parameters():
            if "lora_B.default" in name:
                nn.init.normal_(param, std=0.1)
            param.requires_grad_("lora_" in name)

    def training_step(self, batch: Any, i: int) -> Any:
        self.model.set_adapter("default" if i % 2 else "other")
        return super().training_step(batch, i)


@on_ranks(2, timeout_s=150)
def _as_ddp(rank: int, world_size: int, folder: str, kinds: list[str]) -> None:
    for kind in kinds:
        make: Any = Switching if kind == "switching" else Adapted
        runs = []
        for strategy in (3, "ddp_find_unused_parameters_true"):
            module = make(Path(folder) / "llama", kind="lora" if kind == "switching" else kind)
            fit(strategy, module, tokens(), max_steps=4)
            runs.append(module)
        ours, trusted = runs
        assert ours.was_on_meta
        assert_equal(ours.at_start, trusted.at_start, f"{kind}, at the start")
        assert_equal(ours.losses, trusted.losses, f"{kind}, losses")
        assert_equal(weights(ours), weights(trusted), f"{kind}, at the end")
        assert len(set(ours.losses)) == 4


@pytest.mark.parametrize(
    "kinds",
    [
        ("lora", "dora"),
        ("prompt", "switching"),
        pytest.param(("gaussian", "orthogonal", "pissa", "modules_to_save"), marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_every_kind_starts_and_trains_as_under_ddp(kinds: tuple[str, ...], tmp_path: Path) -> None:
    save(tmp_path, "llama")
    _as_ddp(folder=str(tmp_path), kinds=list(kinds))
