"""Parameters and buffers that the author of a model keeps in fp32, in the 16-bit precisions."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ls_strategy import ZeROStrategy, init_inference
from ls_strategy.testing import spawn
from ls_strategy.zero.setup.kept import kept_in_fp32
from tests.dist.ranks import assert_close, assert_equal, quiet, trainer_of, weights
from tests.marks import wide

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]

STEPS = 4
KEPT = ("gate.weight", "e_score_correction_bias")


def deepseek() -> Any:
    """A small DeepSeek-V3, whose author keeps the routers' weights and biases in fp32."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        vocab_size=32, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, n_shared_experts=1, n_routed_experts=8, kv_lora_rank=8,
        q_lora_rank=8, qk_rope_head_dim=8, v_head_dim=8, qk_nope_head_dim=8, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=0, max_position_embeddings=16,
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(DeepseekV3Config(**sizes))
    for name, buffer in model.named_buffers():
        if name.endswith(KEPT[1]):  # values as in GLM-5: far from zero, close to each other
            buffer.copy_(8 + 0.01 * torch.arange(8) / 8)
    return model


def tokens(rank: int) -> Tensor:
    return torch.randint(32, (2 * STEPS, 8), generator=torch.Generator().manual_seed(7 + rank))


class Language(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = deepseek()
        self.losses: list[float] = []
        self.seen: dict[str, torch.dtype] = {}
        self.final: dict[str, Tensor] = {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen = {n: t.dtype for n, t in (*self.net.named_parameters(), *self.net.named_buffers())}
        loss = self.net(input_ids=batch, labels=batch).loss
        balance(self.net, batch_idx)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def balance(model: nn.Module, step: int) -> None:
    """Change the biases in steps that are much smaller than bf16's distances."""
    for name, buffer in model.named_buffers():
        if name.endswith(KEPT[1]):
            buffer += 1e-3 * torch.arange(8, device=buffer.device) * (-1) ** step


def expected(world_size: int, dtype: torch.dtype) -> tuple[list[list[float]], dict[str, Tensor]]:
    """Train with fp32 masters in one process, on the batches of all ranks: losses by rank, and final weights."""
    model = deepseek()
    masters = {n: nn.Parameter(p.detach().clone()) for n, p in model.named_parameters()}
    kept = {n: b.clone() for n, b in model.named_buffers() if n.endswith(KEPT)}
    optimizer = torch.optim.AdamW(masters.values(), 1e-3)
    model.to(dtype)
    for n, p in model.named_parameters():
        p.data = masters[n].data.clone() if n.endswith(KEPT) else p.data
    for n, b in kept.items():
        setattr(model.get_submodule(n.rpartition(".")[0]), n.rpartition(".")[2], b)
    losses: list[list[float]] = [[] for _ in range(world_size)]
    for step in range(STEPS):
        gradients: list[dict[str, Tensor]] = []
        for rank in range(world_size):
            model.zero_grad()
            batch = tokens(rank)[2 * step : 2 * step + 2]
            loss = model(input_ids=batch, labels=batch).loss
            losses[rank].append(loss.item())
            loss.backward()
            gradients.append({n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None})
        balance(model, step)
        for n, p in masters.items():
            p.grad = torch.stack([g.get(n, torch.zeros_like(p)) for g in gradients]).mean(0)
        optimizer.step()
        for n, p in model.named_parameters():
            p.data.copy_(masters[n])
    return losses, model.state_dict()


def fit(rank: int, options: dict[str, Any], ckpt: Any = None, epochs: int = 1) -> tuple[Language, pl.Trainer]:
    module = Language()
    strategy = ZeROStrategy(**{"sharding": {"min_unit_numel": 0}, **options})
    trainer = trainer_of(strategy, precision="bf16-true", use_distributed_sampler=False, max_epochs=epochs)
    trainer.fit(module, DataLoader(tokens(rank), batch_size=2), ckpt_path=ckpt)  # type: ignore[arg-type]
    module.final = weights(module.net)
    return module, trainer


OPTIONS: list[dict[str, Any]] = [
    *({"stage": stage} for stage in (0, 1, 2, 3)),
    {"stage": 2, "offload": "cpu"},
    {"stage": 3, "offload": "cpu"},
    {"stage": 3, "offload": {"optimizer": "nvme", "parameters": "nvme"}},
    {"stage": 3, "precision": {"moments": "bf16"}},
    {"stage": 1, "precision": {"master_weights": False}},
]


FEW = [OPTIONS[number] for number in (4, 6, 8)]


def runs(
    rank: int, world_size: int, folder: str, choices: list[dict[str, Any]]
) -> list[tuple[list[float], dict[str, Tensor], dict[str, torch.dtype]]]:
    quiet()
    os.environ["LS_STRATEGY_NVME_PATH"] = folder
    modules = [fit(rank, options)[0] for options in choices]
    return [(m.losses, m.final, m.seen) for m in modules]


@pytest.mark.parametrize(
    ("world_size", "choices"), [(2, FEW), wide(1, OPTIONS), wide(2, OPTIONS)], ids=["2-few", "1-all", "2-all"]
)
def test_what_the_author_keeps_in_fp32_is_trained_in_fp32(
    world_size: int, choices: list[dict[str, Any]], tmp_path: Path
) -> None:
    losses, final = expected(world_size, torch.bfloat16)
    ranks: dict[str, Any] = {"init_process_group": False, "timeout_s": 300}
    for rank, found in enumerate(spawn(runs, world_size, str(tmp_path), choices, **ranks)):
        for options, (own, state, seen) in zip(choices, found, strict=True):
            what = f"rank {rank} of {world_size}, {options}"
            assert {n for n, d in seen.items() if d == torch.float32} == {n for n in seen if n.endswith(KEPT)}, what
            for name, value in state.items():
                if name.endswith(KEPT[1]):
                    assert_equal(value, final[name], f"{what}: {name}")
            if "precision" not in options:
                assert_close(own, losses[rank], f"{what}: losses", 1e-3)
                gates = {n: v for n, v in final.items() if n.endswith(KEPT[0])}
                assert_close({n: state[n] for n in gates}, gates, what, 1e-4)


CHANGES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stage": 3}, {"stage": 1}),
    ({"stage": 1, "checkpoint": "file"}, {"stage": 3, "offload": "cpu"}),
]


def resumed(
    rank: int, world_size: int, folder: str, changes: list[tuple[dict[str, Any], dict[str, Any]]]
) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    quiet()
    results = []
    for save, load in changes:
        full, _ = fit(rank, load, epochs=2)
        _, trainer = fit(rank, save)
        path = f"{folder}/{save['stage']}.ckpt"
        trainer.save_checkpoint(path)
        again, _ = fit(rank, load, path, epochs=2)
        results.append((full.final, again.final))
    return results


@pytest.mark.parametrize(("world_size", "changes"), [(1, CHANGES[:1]), wide(2, CHANGES)], ids=["few", "all"])
def test_training_resumes_with_the_same_bits(world_size: int, changes: list[Any], tmp_path: Path) -> None:
    for found in spawn(resumed, world_size, str(tmp_path), changes, init_process_group=False, timeout_s=300):
        for full, again in found:
            assert_equal(again, full, "resumed")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_they_are_those_that_transformers_loads_in_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    model = deepseek()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    in_fp32 = {n for n, t in loaded.state_dict().items() if t.dtype == torch.float32}
    kept = kept_in_fp32(model, (), dtype)
    owners = {f"{prefix}.{key}": (id(m), key) for prefix, m in model.named_modules() for key in m._buffers}
    found = {n for n, p in model.named_parameters() if id(p) in kept.params}
    assert found | {n for n, owner in owners.items() if owner in kept.buffers} == in_fp32
    assert len(in_fp32) == 4


def test_inference_keeps_them_too() -> None:
    engine = init_inference(deepseek(), dtype="bf16")
    state = engine.module.state_dict()
    assert {n for n, t in state.items() if t.dtype == torch.float32} == {n for n in state if n.endswith(KEPT)}
    assert engine(input_ids=tokens(0)).logits.isfinite().all()
