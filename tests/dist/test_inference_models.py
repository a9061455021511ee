"""The models that DeepSpeed lists for automatic tensor parallelism: each equals one process, or is refused with why."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ls_strategy
from ls_strategy import PlanError
from ls_strategy.testing import spawn
from tests.transformer_models import built

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers"),
]

HIDDEN = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES = {**HIDDEN, "intermediate_size": 128}
GROUPED = {**SIZES, "num_key_value_heads": 2}
EMBD = {"vocab_size": 96, "n_embd": 64, "n_layer": 2, "n_head": 4}
XLM = {"vocab_size": 96, "emb_dim": 64, "n_layers": 2, "n_heads": 4}
T5 = {"vocab_size": 96, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
SIDES = {
    **{"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4},
}
BART = {**SIDES, "vocab_size": 96, "max_position_embeddings": 64, "decoder_start_token_id": 0}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MLA = {
    **{**SIZES, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8},
    **{"v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"n_shared_experts": 1, "first_k_dense_replace": 1},
}
FALCON = {**HIDDEN, "bias": True}

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "falcon, rw": ("Falcon", "ForCausalLM", {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False}),
    "falcon, 7b": ("Falcon", "ForCausalLM", {**HIDDEN, "multi_query": True, "parallel_attn": True}),
    "falcon, 40b": ("Falcon", "ForCausalLM", {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 4}),
    "mixtral": ("Mixtral", "ForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "albert": (
        "Albert",
        "ForMaskedLM",
        {**SIZES, "num_hidden_layers": 4, "embedding_size": 32, "num_hidden_groups": 2, "inner_group_num": 2},
    ),
    "baichuan, internlm, codellama, yuan: as llama": ("Llama", "ForCausalLM", {**GROUPED, "attention_bias": True}),
    "bert": ("Bert", "ForMaskedLM", SIZES),
    "biogpt": ("BioGpt", "ForCausalLM", SIZES),
    "bloom": ("Bloom", "ForCausalLM", {"vocab_size": 96, "hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "camembert": ("Camembert", "ForMaskedLM", SIZES),
    "cohere": ("Cohere", "ForCausalLM", SIZES),
    "deepseek v3": ("DeepseekV3", "ForCausalLM", {**MLA, "q_lora_rank": 16, "n_group": 2, "topk_group": 1}),
    "distilbert": (
        "DistilBert",
        "ForMaskedLM",
        {"vocab_size": 96, "dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
    ),
    "electra": ("Electra", "ForMaskedLM", {**SIZES, "embedding_size": 32}),
    "ernie": ("Ernie", "ForMaskedLM", SIZES),
    "esm": ("Esm", "ForMaskedLM", {**SIZES, "mask_token_id": 1, "position_embedding_type": "rotary"}),
    "exaone4": ("Exaone4", "ForCausalLM", GROUPED),
    "gemma": ("Gemma", "ForCausalLM", {**SIZES, "num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": ("Gemma2", "ForCausalLM", {**GROUPED, "head_dim": 16}),
    "glm (chatglm)": ("Glm", "ForCausalLM", {**GROUPED, "head_dim": 16}),
    "glm4": ("Glm4", "ForCausalLM", {**GROUPED, "head_dim": 16}),
    "gpt": ("OpenAIGPT", "LMHeadModel", EMBD),
    "gpt2": ("GPT2", "LMHeadModel", EMBD),
    "gpt-j": ("GPTJ", "ForCausalLM", {**EMBD, "rotary_dim": 8}),
    "gpt-neo": (
        "GPTNeo",
        "ForCausalLM",
        {
            **{"vocab_size": 96, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "window_size": 4},
            "max_position_embeddings": 64,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "gpt-neox": ("GPTNeoX", "ForCausalLM", SIZES),
    "gpt-neox, japanese": ("GPTNeoXJapanese", "ForCausalLM", {**HIDDEN, "intermediate_multiple_size": 2}),
    "granite": ("Granite", "ForCausalLM", SIZES),
    "llama": ("Llama", "ForCausalLM", GROUPED),
    "longt5": ("LongT5", "ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "m2m100": ("M2M100", "ForConditionalGeneration", BART),
    "marian": ("Marian", "MTModel", BART),
    "mistral": ("Mistral", "ForCausalLM", GROUPED),
    "mpt": ("Mpt", "ForCausalLM", {"vocab_size": 96, "d_model": 64, "n_layers": 2, "n_heads": 4}),
    "mt5": ("MT5", "ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "mvp": ("Mvp", "ForConditionalGeneration", BART),
    "nemotron": ("Nemotron", "ForCausalLM", {**GROUPED, "head_dim": 16}),
    "olmoe": ("Olmoe", "ForCausalLM", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2}),
    "opt": ("OPT", "ForCausalLM", {**HIDDEN, "ffn_dim": 128, "word_embed_proj_dim": 64, "max_position_embeddings": 64}),
    "pegasus": ("Pegasus", "ForConditionalGeneration", BART),
    "phi": ("Phi", "ForCausalLM", SIZES),
    "phi3": ("Phi3", "ForCausalLM", GROUPED),
    "phimoe": ("Phimoe", "ForCausalLM", {**GROUPED, "num_local_experts": 4}),
    "plbart": ("PLBart", "ForConditionalGeneration", BART),
    "qwen2": ("Qwen2", "ForCausalLM", GROUPED),
    "qwen2-moe": ("Qwen2Moe", "ForCausalLM", {**EXPERTS, "shared_expert_intermediate_size": 64}),
    "qwen3": ("Qwen3", "ForCausalLM", {**GROUPED, "head_dim": 16}),
    "qwen3-moe": ("Qwen3Moe", "ForCausalLM", {**EXPERTS, "head_dim": 16}),
    "roberta": ("Roberta", "ForMaskedLM", SIZES),
    "roformer": ("RoFormer", "ForMaskedLM", {**SIZES, "embedding_size": 32}),
    "splinter": ("Splinter", "Model", SIZES),
    "stablelm": ("StableLm", "ForCausalLM", GROUPED),
    "starcoder": ("GPTBigCode", "ForCausalLM", EMBD),
    "starcoder, all heads": ("GPTBigCode", "ForCausalLM", {**EMBD, "multi_query": False}),
    "starcoder2": ("Starcoder2", "ForCausalLM", GROUPED),
    "t5": ("T5", "ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "umt5": ("UMT5", "ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}),
    "xglm": (
        "XGLM",
        "ForCausalLM",
        {
            **{"vocab_size": 96, "d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4},
            "max_position_embeddings": 64,
        },
    ),
    "xlm-roberta": ("XLMRoberta", "ForMaskedLM", SIZES),
    "yoso": ("Yoso", "ForMaskedLM", {**SIZES, "max_position_embeddings": 64}),
}
FIRST = tuple(MODELS)[:5]

REFUSED: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bigbird-pegasus": (
        "BigBirdPegasus",
        "ForConditionalGeneration",
        BART,
        "self_attn.output.*column- or row-parallel",
    ),
    "codegen": ("CodeGen", "ForCausalLM", {**EMBD, "rotary_dim": 8}, "interleaved"),
    "deberta": ("Deberta", "ForMaskedLM", SIZES, "relative positions"),
    "deberta-v2": ("DebertaV2", "ForMaskedLM", SIZES, "relative positions"),
    "deepseek v2": ("DeepseekV2", "ForCausalLM", {**MLA, "q_lora_rank": None}, "both sharded and in full"),
    "falcon, more ranks than groups": (
        "Falcon",
        "ForCausalLM",
        {**HIDDEN, "new_decoder_architecture": True, "num_kv_heads": 1},
        "1 groups of query heads.*not divisible by parallel.tensor=2",
    ),
    "falcon, odd heads": (
        "Falcon",
        "ForCausalLM",
        {**HIDDEN, "hidden_size": 48, "num_attention_heads": 3},
        "3 attention heads, which is not divisible by parallel.tensor=2",
    ),
    "flaubert": ("Flaubert", "WithLMHeadModel", XLM, "separate lists"),
    "fsmt": (
        "FSMT",
        "ForConditionalGeneration",
        {**SIDES, "langs": ["a", "b"], "src_vocab_size": 96, "tgt_vocab_size": 96},
        "time-major",
    ),
    "led": ("LED", "ForConditionalGeneration", {**SIDES, "vocab_size": 96}, "over windows"),
    "longformer": ("Longformer", "ForMaskedLM", {**SIZES, "attention_window": 4}, "over windows"),
    "luke": ("Luke", "ForMaskedLM", {**SIZES, "entity_vocab_size": 50, "entity_emb_size": 16}, "w2e_query"),
    "pegasus-x": ("PegasusX", "ForConditionalGeneration", BART, "blocks of tokens"),
    "perceiver": ("Perceiver", "ForMaskedLM", {"vocab_size": 96, "num_blocks": 1}, "column- or row-parallel"),
    "reformer": ("Reformer", "ModelWithLMHead", {"is_decoder": True}, "hashes tokens"),
    "xlm": ("XLM", "WithLMHeadModel", XLM, "separate lists"),
    "xlnet": ("XLNet", "LMHeadModel", {"vocab_size": 96, "d_model": 64, "n_layer": 2, "n_head": 4}, "einsum"),
}


def build(name: str) -> nn.Module:
    family, head, options = MODELS[name]
    return built(f"{family}{head}", f"{family}Config", options).eval()


def batch() -> dict[str, Tensor]:
    """Two texts, the first padded on the left."""
    tokens = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def output(model: Any) -> Tensor:
    """Logits, or what the model returns first."""
    inputs = batch()
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = torch.tensor([[0, 5, 7]] * 2)
    with torch.no_grad():
        result = model(**inputs)
    return next(v for v in result.to_tuple() if isinstance(v, Tensor) and v.is_floating_point())


def compare(rank: int, world_size: int, names: tuple[str, ...]) -> dict[str, tuple[float, bool]]:
    """Of every model: relative error in fp32, and whether it generates the same tokens where it generates."""
    found: dict[str, tuple[float, bool]] = {}
    for name in names:
        whole: Any = build(name)
        divided = ls_strategy.init_inference(build(name), tensor_parallel_size=world_size)
        expected, actual = output(whole), output(divided)
        assert expected.std() > 0, name
        same = True
        if whole.can_generate():
            options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, **batch()}
            same = bool(whole.generate(**options).equal(divided.generate(**options)))
        weights = [sum(p.numel() for p in model.parameters()) for model in (divided, whole)]
        assert weights[0] < 0.75 * weights[1], name
        found[name] = ((actual - expected).norm() / expected.norm()).item(), same
    return found


def check(names: tuple[str, ...], world_size: int) -> None:
    for found in spawn(compare, world_size, names, timeout_s=60 if len(names) < 10 else 400):
        assert tuple(found) == names
        assert not {name: values for name, values in found.items() if not values[0] <= 1e-5 or not values[1]}


def test_two_ranks_equal_one_process() -> None:
    check(FIRST, 2)


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_model_of_the_table(world_size: int) -> None:
    check(tuple(MODELS), world_size)


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is sent: one process without a group is enough."""
    transformers = pytest.importorskip("transformers")
    family, head, options, words = REFUSED[name]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}{head}")(getattr(transformers, f"{family}Config")(**options))
    with pytest.raises(PlanError, match=words):
        ls_strategy.init_inference(model, tensor_parallel_size=2)
