"""Models of transformers, divided by `init_inference`, generate what they generate in one process."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ls_strategy
from ls_strategy.testing import spawn
from tests.transformer_models import built

pytestmark = pytest.mark.wide

needs_transformers = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
T5 = {"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**SIZES, "ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", {**SIZES, "intermediate_size": 128, "num_key_value_heads": 2}),
    "gpt-neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", {**SIZES, "intermediate_size": 128}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {**T5, "decoder_start_token_id": 0}),
    "t5, gated, untied": (
        "T5ForConditionalGeneration",
        "T5Config",
        {**T5, "decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"vocab_size": 97, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "mpt": ("MptForCausalLM", "MptConfig", {"vocab_size": 97, "d_model": 64, "n_layers": 2, "n_heads": 4}),
    "qwen2": (
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**SIZES, "intermediate_size": 128, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", {**SIZES, "intermediate_size": 128}),
    "gptj": (
        "GPTJForCausalLM",
        "GPTJConfig",
        {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            **{"vocab_size": 97, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2},
            **{"encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64},
        },
    ),
}
FIRST = ("opt", "llama", "gpt-neox", "t5")

POLICIES: dict[str, Any] = {
    "opt": {"OPTDecoderLayer": ("self_attn.out_proj", "fc2")},
    "llama": {"LlamaDecoderLayer": ("o_proj", "down_proj")},
    "gpt-neox": {"GPTNeoXLayer": ("attention.dense", "mlp.dense_4h_to_h")},
    "t5": {"T5Block": ("SelfAttention.o", "EncDecAttention.o", "DenseReluDense.wo")},
}
"""As the examples of DeepSpeed name them."""


def build(name: str) -> nn.Module:
    return built(*MODELS[name], spread=0.2).eval()


def batch() -> dict[str, Tensor]:
    """Three texts, two of them padded on the left."""
    tokens = torch.randint(3, 97, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    mask[1, :1] = 0
    return {"input_ids": tokens.masked_fill(mask == 0, 0), "attention_mask": mask}


GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
SAMPLED = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": True, "temperature": 0.7, "top_k": 20}


def generate_all(
    rank: int, world_size: int, cases: list[tuple[str, Any]], size: int
) -> dict[str, tuple[list[list[int]], list[list[int]], list[list[int]]]]:
    """Of every case: greedy tokens expected and found, and sampled ones."""
    found = {}
    for name, policy in cases:
        whole = build(name)
        expected = whole.generate(**batch(), **GREEDY)
        engine = ls_strategy.init_inference(build(name), tensor_parallel_size=size, injection_policy=policy)
        actual = engine.generate(**batch(), **GREEDY)
        torch.testing.assert_close(logits(engine), logits(whole), atol=2e-4, rtol=2e-4)
        torch.manual_seed(rank)  # on purpose: that of the first rank of each copy counts
        sampled = engine.generate(**batch(), **SAMPLED)
        torch.manual_seed(rank // size * size)
        assert sampled.equal(whole.generate(**batch(), **SAMPLED)), name
        found[f"{name}, {'auto' if policy is None else 'policy'}"] = (
            expected.tolist(), actual.tolist(), sampled.tolist()
        )  # fmt: skip
    return found


def logits(model: nn.Module) -> Tensor:
    inputs = batch()
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor([[0, 5, 7]] * 3)
    with torch.no_grad():
        result = model(**inputs).logits
    assert type(result) is Tensor
    return result


def check(world_size: int, cases: list[tuple[str, Any]], size: int | None = None) -> None:
    ranks = spawn(generate_all, world_size, cases, size or world_size, timeout_s=120 if len(cases) < 10 else 400)
    assert len(ranks[0]) == len(cases)
    for case, (expected, found, _) in ranks[0].items():
        assert found == expected, case
    for other in ranks[1:]:
        if size in (None, world_size):
            assert other == ranks[0]  # sampled tokens, too
        else:
            assert {case: values[:2] for case, values in other.items()} == {c: v[:2] for c, v in ranks[0].items()}


@needs_transformers
def test_two_ranks_generate_what_one_does() -> None:
    check(2, [*((name, None) for name in FIRST), ("t5", POLICIES["t5"])])


@needs_transformers
@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_number_of_ranks_generates_what_one_does(world_size: int) -> None:
    check(world_size, [*((name, None) for name in MODELS), *POLICIES.items()])


@needs_transformers
def test_copies_of_a_divided_model() -> None:
    check(4, [("llama", None)], size=2)


def quantized(rank: int, world_size: int, format: Any) -> dict[str, tuple[float, float]]:
    """Relative errors of the logits, divided and on one rank."""
    found = {}
    for name in FIRST:
        whole = build(name)
        exact = logits(whole)
        alone = ls_strategy.init_inference(copy.deepcopy(whole), quantize=format)
        engine = ls_strategy.init_inference(whole, quantize=format, tensor_parallel_size=world_size)
        assert engine.quantization is not None
        assert alone.quantization is not None
        assert engine.quantization.layers == alone.quantization.layers
        assert engine.quantization.bytes_after < 0.7 * alone.quantization.bytes_after
        ours, one_rank = (((logits(m) - exact).norm() / exact.norm()).item() for m in (engine, alone))
        found[name] = (ours, one_rank)
        assert engine.generate(**batch(), **GREEDY).shape[1] > 10
    return found


@needs_transformers
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_divided_layers_are_quantised(format: Any) -> None:
    one, other = spawn(quantized, 2, format)
    assert one == other
    for name, (divided, alone) in one.items():
        assert 0 < divided < 1.25 * alone, name  # a rank has scales of its own for its part of a row layer
