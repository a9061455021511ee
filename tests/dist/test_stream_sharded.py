"""Streamed models that are divided over ranks: every rank's own part rests on its own tier."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from ls_strategy import init_inference
from ls_strategy.testing import spawn
from recipes.gpt.network import GPT, GPTConfig
from tests.dist.ranks import quiet
from tests.marks import slow

pytestmark = pytest.mark.wide


def build() -> GPT:
    config = GPTConfig(num_layers=3, width=64, num_heads=4, num_kv_heads=2, vocab_size=64, block_size=32)
    torch.manual_seed(0)
    return GPT(config).eval()


def generate(rank: int, world_size: int, folder: str, quantize: Any) -> list[list[list[int]]]:
    quiet()
    resident = build()
    if rank == 0:
        torch.save({"state_dict": resident.state_dict()}, f"{folder}/weights.ckpt")
    torch.distributed.barrier()
    prompts = [[1, 2, 3, 4], [7, 8]]
    found: list[list[list[int]]] = []
    options = {"tensor_parallel_size": world_size, "quantize": quantize}
    drive = {"offload": "nvme", "nvme_path": f"{folder}/drive{rank}"}
    with torch.device("meta"):
        empty = build()
    cases: list[tuple[GPT, dict[str, Any]]] = [
        (copy.deepcopy(resident), {}),
        (copy.deepcopy(resident), drive),
        (empty, {**drive, "fill_from": f"{folder}/weights.ckpt"}),
    ]
    for model, more in cases:
        engine = init_inference(model, **options, **more)
        found.append(engine.generate(prompts, max_new_tokens=5))  # type: ignore[arg-type]
        engine.close()
    return found


@pytest.mark.parametrize("quantize", [slow(None), "int8"])
def test_divided_models_generate_the_same_tokens_from_a_drive(quantize: Any, tmp_path: Path) -> None:
    """Divided over two ranks, quantised or not; moved to the drive, or filled there from a file."""
    for resident, moved, filled in spawn(generate, 2, str(tmp_path), quantize, timeout_s=100):
        assert moved == resident
        assert filled == resident
