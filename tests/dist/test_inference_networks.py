"""`init_inference` of networks that read with a cache: divided, quantised, streamed, and all of that at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ls_strategy
from ls_strategy import ConfigError, PlanError, StateError
from ls_strategy.extras.inference.generate import generate
from ls_strategy.extras.inference.quantize import weight_bytes
from ls_strategy.extras.inference.sampling import SamplingConfig
from ls_strategy.testing import spawn
from recipes.gpt.model import GPTModule
from recipes.gpt.network import GPT, GPTConfig
from recipes.moe.network import MoEConfig, MoEGPT

pytestmark = pytest.mark.wide

CONFIG = GPTConfig(vocab_size=97, block_size=48, num_layers=3, num_heads=4, num_kv_heads=2, width=64)
PROMPTS = [[5, 9, 33], [60, 2, 71, 14, 8, 90], [41]]
GREEDY = SamplingConfig(temperature=0)


def build(**options: Any) -> GPT:
    torch.manual_seed(0)
    network = GPT(GPTConfig(**{**vars(CONFIG), **options}))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return network.eval()


def with_experts() -> MoEGPT:
    torch.manual_seed(0)
    return MoEGPT(CONFIG, MoEConfig(num_experts=[4], drop_tokens=False)).eval()


def logits(network: Any) -> Tensor:
    with torch.no_grad():
        return network(torch.arange(3, 43).view(2, 20))


def continued(engine: Any, **options: Any) -> list[list[int]]:
    return engine.generate(PROMPTS, 20, **options)


def error(actual: Tensor, expected: Tensor) -> float:
    assert type(actual) is Tensor
    return ((actual - expected).norm() / expected.norm()).item()


def divided(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    network = build()
    expected, tokens = logits(network), generate(network, PROMPTS, 20, sampling=GREEDY)
    whole = weight_bytes(network)
    found: dict[str, Any] = {}
    engine = ls_strategy.init_inference(build(), tensor_parallel_size=world_size)
    assert weight_bytes(engine.module) < 0.7 * whole
    assert error(logits(engine), expected) < 1e-5
    assert continued(engine, sampling=GREEDY) == tokens
    found["sampled"] = continued(engine, sampling=SamplingConfig(temperature=1.3), seed=3)

    module = GPTModule(config=CONFIG)
    module.configure_model()
    module.network.load_state_dict(build().state_dict())
    wrapped = ls_strategy.init_inference(module, tensor_parallel_size=world_size)
    prompt = torch.tensor([PROMPTS[1]])
    assert wrapped.generate(prompt, 20, temperature=0)[0].tolist() == PROMPTS[1] + tokens[1]

    # Experts stay whole on every rank.
    expected_of_experts, experts = with_experts(), ls_strategy.init_inference(with_experts(), tensor_parallel_size=2)
    assert error(logits(experts), logits(expected_of_experts)) < 1e-5
    assert continued(experts, sampling=GREEDY) == generate(expected_of_experts, PROMPTS, 20, sampling=GREEDY)

    with pytest.raises(StateError, match="other arguments on rank"):
        engine.generate([[rank]], 2)
    # The weights of a divided model that never was whole here, in fewer bits, resting elsewhere.
    for quantize in (None, "int8", "int4"):
        alone = ls_strategy.init_inference(build(), quantize=quantize, tensor_parallel_size=world_size)
        with torch.device("meta"):
            empty = GPT(CONFIG)
        full = ls_strategy.init_inference(
            empty, tensor_parallel_size=world_size, quantize=quantize, offload="cpu", fill_from=folder
        )
        assert logits(full).equal(logits(alone))
        found[f"{quantize}"] = continued(full, sampling=GREEDY)
        if quantize:
            assert full.quantization.layers == alone.quantization.layers
            assert full.quantization.bytes_after == alone.quantization.bytes_after
            # A rank has its own scales for its part of a row layer: no fewer.
            undivided = ls_strategy.init_inference(build(), quantize=quantize)
            assert 0 < error(logits(full), expected) < 1.2 * error(logits(undivided), expected)
        full.close()
    assert found["None"] == tokens
    return found


def test_two_ranks(tmp_path: Path) -> None:
    torch.save({"state_dict": build().state_dict()}, tmp_path / "weights.ckpt")
    one, other = spawn(divided, 2, str(tmp_path / "weights.ckpt"))
    assert one == other


@pytest.mark.parametrize("options", [{"offload": "cpu"}, {"offload": "nvme"}, {"quantize": "int8", "offload": "nvme"}])
def test_weights_that_rest_elsewhere(options: dict[str, Any], tmp_path: Path) -> None:
    expected = ls_strategy.init_inference(build(), quantize=options.get("quantize"))
    path = {"nvme_path": tmp_path} if options["offload"] == "nvme" else {}
    engine = ls_strategy.init_inference(build(), **options, **path)
    assert logits(engine).equal(logits(expected))
    assert continued(engine, sampling=GREEDY) == continued(expected, sampling=GREEDY)
    engine.close()


def test_a_model_on_meta_is_filled(tmp_path: Path) -> None:
    torch.save({"state_dict": build().state_dict()}, tmp_path / "weights.ckpt")
    for quantize in (None, "int4"):
        with torch.device("meta"):
            network = GPT(CONFIG)
        engine = ls_strategy.init_inference(network, quantize=quantize, fill_from=tmp_path / "weights.ckpt")
        assert logits(engine).equal(logits(ls_strategy.init_inference(build(), quantize=quantize)))
    with pytest.raises(PlanError, match="has its weights already"):
        ls_strategy.init_inference(build(), fill_from=tmp_path / "weights.ckpt")


def test_dtypes() -> None:
    engine = ls_strategy.init_inference(build(), dtype="bf16")
    assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}
    assert engine.module.rotary.cos.dtype is torch.float32
    assert error(logits(engine).float(), logits(build())) < 0.05
    assert not engine.training
    assert not any(p.requires_grad for p in engine.parameters())
    assert engine.config is engine.module.config


def test_options_that_make_no_sense() -> None:
    for options, words in (
        ({"tensor_parallel_size": 0}, "at least 1"),
        ({"tensor_parallel_size": 2}, "does not divide the 1 ranks.*torchrun"),
        ({"dtype": "int8"}, "Give a torch.dtype"),
        ({"dtype": torch.int8}, "must be a floating-point dtype"),
        ({"quantize": "int3"}, "'int8' or 'int4'"),
        ({"offload": "disk"}, "offload must be 'cpu' or 'nvme'"),
        ({"nvme_path": "/tmp"}, "needs offload='nvme'"),
    ):
        with pytest.raises(ConfigError, match=words):
            ls_strategy.init_inference(build(), **options)
    with pytest.raises(StateError, match="has no method generate"):
        ls_strategy.init_inference(torch.nn.Linear(2, 2)).generate()
