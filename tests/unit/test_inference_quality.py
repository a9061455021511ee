"""What quantisation costs a trained model: a small GPT on the source of Python, the text of the recipe."""

from __future__ import annotations

import copy
import functools
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import ls_strategy
from ls_strategy.extras.inference.measure import perplexity
from ls_strategy.extras.inference.quantize import weight_bytes
from recipes.gpt.model import warmup_cosine
from recipes.gpt.network import GPT, GPTConfig

CONTEXT, STEPS = 128, 200


@functools.cache
def text() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and others."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    data = b"".join(file.read_bytes() for file in files)
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    return tokens[:-200_000], tokens[-200_000:]


@functools.cache
def trained() -> GPT:
    """Half a minute on a core."""
    torch.manual_seed(0)
    network = GPT(GPTConfig(block_size=CONTEXT, num_layers=4, num_heads=4, width=128, tied_embeddings=False))
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        rate = warmup_cosine(step, warmup_steps=30, total_steps=STEPS, final_ratio=0.1)
        optimizer.param_groups[0]["lr"] = 3e-3 * rate
        starts = torch.randint(len(text()[0]) - CONTEXT - 1, (8,))
        rows = torch.stack([text()[0][s : s + CONTEXT + 1] for s in starts.tolist()])
        loss = functional.cross_entropy(network(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return network.eval()


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute where nothing else runs
@pytest.mark.parametrize(("format", "part", "limit"), [("int8", 1 / 4, 0.01), ("int4", 1 / 8, 0.05)])
def test_a_trained_model_hardly_changes(format: Any, part: float, limit: float) -> None:
    exact, held_out = trained(), text()[1]
    rows = held_out[: 16 * CONTEXT].view(16, CONTEXT)
    before = perplexity(exact, held_out, context=CONTEXT, windows=64)
    assert before < 12  # 256 for one that has learned nothing
    engine = ls_strategy.init_inference(copy.deepcopy(exact), quantize=format)
    after = perplexity(engine, held_out, context=CONTEXT, windows=64)
    assert abs(after / before - 1) < limit
    with torch.no_grad():
        expected, found = exact(rows), engine(rows)
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < limit
    layers = [m for m in engine.module.blocks.modules() if hasattr(m, "scales")]
    floats = sum(out * width * 4 for out, width in (m.features for m in layers))
    assert sum(m.weight.untyped_storage().nbytes() for m in layers) == floats * part
    scales = sum(m.scales.untyped_storage().nbytes() for m in layers)
    assert scales <= floats * {"int8": 1 / 128, "int4": 2 / 128}[format]
    norms = sum(p.nbytes for p in engine.module.blocks.parameters())
    assert weight_bytes(engine.module.blocks) == floats * part + scales + norms
