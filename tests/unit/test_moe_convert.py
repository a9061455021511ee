"""Sparse blocks of transformers before and after conversion: outputs, gradients, names, files, generated text."""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.metadata
import importlib.util
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.errors import ConfigError, PlanError, StateError
from ls_strategy.moe.convert import ConvertedMoE, convert_moe
from ls_strategy.moe.families import FAMILIES
from ls_strategy.moe.losses import moe_losses
from tests.dist.ranks import assert_close, assert_equal

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers")

HIDDEN, EXPERTS, K, TOKENS = 16, 4, 2, (2, 7)

TINY = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), K),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 24),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 8),
    "hidden_size": HIDDEN,
    "n_group": 2,
    "topk_group": 1,
    "moe_latent_size": 8,
}
"""Whichever of these a configuration has."""

FOLDERS = {
    "AriaTextMoELayer": "aria",
    "AfmoeSparseMoeBlock": "afmoe",
    "BailingHybridMoE": "bailing_hybrid",
    "DeepseekV2Moe": "deepseek_v2",
    "DeepseekV32MoE": "deepseek_v32",
    "DeepseekV3MoE": "deepseek_v3",
    "Dots1MoE": "dots1",
    "Ernie4_5_MoeSparseMoeBlock": "ernie4_5_moe",
    "ExaoneMoeSparseMoEBlock": "exaone_moe",
    "FlexOlmoSparseMoeBlock": "flex_olmo",
    "FlintSparseMoeBlock": "flint",
    "Glm4MoeLiteMoE": "glm4_moe_lite",
    "Glm4MoeMoE": "glm4_moe",
    "Glm4vMoeTextMoE": "glm4v_moe",
    "GlmMoeDsaMoE": "glm_moe_dsa",
    "GptOssMLP": "gpt_oss",
    "GraniteMoeHybridMoE": "granitemoehybrid",
    "GraniteMoeMoE": "granitemoe",
    "GraniteMoeSharedMoE": "granitemoeshared",
    "HunYuanMoEV1Moe": "hunyuan_v1_moe",
    "JambaSparseMoeBlock": "jamba",
    "KimiLinearMoE": "kimi_linear",
    "LagunaSparseMoeBlock": "laguna",
    "Lfm2MoeSparseMoeBlock": "lfm2_moe",
    "MiMoV2FlashMoE": "mimo_v2_flash",
    "MiniMaxM2SparseMoeBlock": "minimax_m2",
    "MiniMaxSparseMoeBlock": "minimax",
    "Mistral4MoE": "mistral4",
    "MixtralSparseMoeBlock": "mixtral",
    "NemotronHMoE": "nemotron_h",
    "OlmoeSparseMoeBlock": "olmoe",
    "PhimoeSparseMoeBlock": "phimoe",
    "Qwen2MoeSparseMoeBlock": "qwen2_moe",
    "Qwen3MoeSparseMoeBlock": "qwen3_moe",
    "Qwen3NextSparseMoeBlock": "qwen3_next",
    "Qwen3OmniMoeThinkerTextSparseMoeBlock": "qwen3_omni_moe",
    "Qwen3VLMoeTextSparseMoeBlock": "qwen3_vl_moe",
    "Qwen3_5MoeSparseMoeBlock": "qwen3_5_moe",
    "SolarOpenMoE": "solar_open",
}
"""Class of the block -> folder of transformers that has it."""


ROUTERS_OF_5_21 = (
    "AriaTextMoELayer",
    "GraniteMoeHybridMoE",
    "GraniteMoeMoE",
    "GraniteMoeSharedMoE",
    "JambaSparseMoeBlock",
)
"""Blocks whose routers return what all others return only from transformers 5.21 on."""


def has_routers_of_5_21() -> bool:
    """Python 3.10 ends with transformers 5.20."""
    major, minor = importlib.metadata.version("transformers").split(".")[:2]
    return (int(major), int(minor)) >= (5, 21)


def make_block(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny block with random parameters and buffers, in training."""
    folder = FOLDERS[kind]
    if importlib.util.find_spec(f"transformers.models.{folder}") is None:
        pytest.skip(f"the installed transformers has no {folder}")
    block_class = getattr(importlib.import_module(f"transformers.models.{folder}.modeling_{folder}"), kind)
    config = make_config(folder, block_class)
    torch.manual_seed(0)
    block = block_class(config)
    with torch.no_grad():
        for tensor in (*block.parameters(), *block.buffers()):
            tensor.normal_(0, 0.3)
    return block.to(dtype)


def make_config(folder: str, block_class: Callable[[Any], nn.Module]) -> Any:
    """The configuration among those of a folder with which the block can be built."""
    from transformers import PretrainedConfig

    module = importlib.import_module(f"transformers.models.{folder}.configuration_{folder}")
    for each in vars(module).values():
        if not (isinstance(each, type) and issubclass(each, PretrainedConfig) and each.__module__ == module.__name__):
            continue
        config = each()
        for key, value in TINY.items():
            if hasattr(config, key):
                setattr(config, key, value)
        # NemotronH's own loop adds up in the dtype of the weights, fp32, whatever the model's is.
        config._experts_implementation = "batched_mm" if folder == "nemotron_h" else "eager"
        try:
            block_class(config)
        except (AttributeError, TypeError):  # that of a vision model, say
            continue
        return config
    raise AssertionError(f"no configuration of {folder} fits")


def run(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Outputs, and gradients of the input and of all parameters, for one random loss."""
    torch.manual_seed(1)
    x = x.clone().requires_grad_()
    result = block(x * 1)
    outputs = result if isinstance(result, tuple) else (result,)
    generator = torch.Generator().manual_seed(2)
    block.zero_grad()
    losses = [(out * torch.randn(out.shape, generator=generator, dtype=out.dtype)).sum() for out in outputs]
    torch.stack(losses).sum().backward()
    assert x.grad is not None
    grads = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {**{f"output {i}": out.detach() for i, out in enumerate(outputs)}, "x": x.grad, **grads}


def tokens(dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*TOKENS, HIDDEN, generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(dtype)


def test_every_known_kind_is_tested() -> None:
    assert sorted(FAMILIES) == sorted(FOLDERS)


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_outputs_and_gradients_stay(kind: str, dtype: torch.dtype, limit: float) -> None:
    block = make_block(kind, dtype)
    names = list(block.state_dict())
    converted = nn.ModuleDict({"mlp": copy.deepcopy(block)})
    if kind in ROUTERS_OF_5_21 and not has_routers_of_5_21():
        with pytest.raises(PlanError, match=r"from transformers 5\.21 on"):
            convert_moe(converted)
        return
    assert convert_moe(converted) == {"mlp": kind}
    ours = converted["mlp"]
    assert isinstance(ours, type(block))
    assert list(ours.state_dict()) == names
    assert_equal(ours.state_dict(), block.state_dict(), kind)
    expected = run(block, tokens(dtype))
    assert len(expected) > 4
    assert_close(run(ours, tokens(dtype)), expected, kind, limit)


# --- full models -----------------------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 50,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "experts_implementation": "eager",
    "num_experts_per_tok": K,
}
DEEPSEEK = {
    **SIZES,
    "n_routed_experts": EXPERTS,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_shared_experts": 1,
}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {**SIZES, "num_local_experts": EXPERTS},
    "Qwen2Moe": {**SIZES, "num_experts": EXPERTS, "shared_expert_intermediate_size": 8},
    "Qwen3Moe": {**SIZES, "num_experts": EXPERTS, "head_dim": 8},
    "Olmoe": {**SIZES, "num_experts": EXPERTS},
    "DeepseekV2": {**DEEPSEEK, "topk_method": "group_limited_greedy"},
    "DeepseekV3": DEEPSEEK,
    "GptOss": {**SIZES, "num_local_experts": EXPERTS, "head_dim": 8},
}
HAVE_LOSS = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GptOss")
"""Whose models have a balance loss of their own."""


def make_model(name: str, **options: Any) -> Any:
    import transformers

    config = getattr(transformers, f"{name}Config")(**{**MODELS[name], **options})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "experts" in key or "gate" in key or "router" in key:
                parameter.normal_(0, 0.3)  # uneven loads
    return model.train()


def token_ids() -> Tensor:
    return torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(4))


def step(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Loss, its parts and all gradients."""
    torch.manual_seed(5)
    out = model(input_ids=token_ids(), labels=token_ids(), **options)
    model.zero_grad()
    out.loss.backward()
    parts = {"loss": out.loss.detach(), "logits": out.logits.detach()}
    if options.get("output_router_logits"):
        parts |= {"aux": out.aux_loss.detach()}
        parts |= {f"router logits {i}": logits.detach() for i, logits in enumerate(out.router_logits)}
    return {**parts, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def converted(model: nn.Module, **options: Any) -> Any:
    ours = copy.deepcopy(model)
    assert convert_moe(ours, **options)
    return ours


@pytest.mark.parametrize("name", MODELS)
def test_models_train_and_generate_as_before(name: str) -> None:
    model = make_model(name)
    ours = converted(model)
    assert_close(step(ours), step(model), name, 1e-12)
    model.eval()
    ours.eval()
    options = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}
    torch.manual_seed(6)
    text = model.generate(token_ids(), do_sample=True, **options)
    torch.manual_seed(6)
    assert_equal(ours.generate(token_ids(), do_sample=True, **options), text, name)


@pytest.mark.parametrize("name", HAVE_LOSS)
def test_balance_loss_of_the_model_stays(name: str) -> None:
    model = make_model(name, router_aux_loss_coef=0.5)
    expected = step(model, output_router_logits=True)
    assert len([key for key in expected if key.startswith("router logits")]) == 2
    assert_close(step(converted(model), output_router_logits=True), expected, name, 1e-12)
    assert not torch.equal(expected["loss"], step(model)["loss"])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    model = make_model("Qwen2Moe", use_cache=False)
    expected = step(model)
    ours = converted(model)
    ours.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_close(step(ours), expected, "Qwen2Moe", 1e-12)


def test_losses_in_reentrant_checkpointing_are_refused() -> None:
    ours = make_model("Qwen2Moe", use_cache=False)
    convert_moe(ours, balance_loss=0.1)
    ours.train().gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(StateError, match='"use_reentrant": False'):
        step(ours)


@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3", "GptOss"])
def test_files_stay(name: str, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    model = make_model(name)
    ours = converted(model)
    model.save_pretrained(tmp_path / "before")
    ours.save_pretrained(tmp_path / "after")
    files = [load_file(tmp_path / folder / "model.safetensors") for folder in ("before", "after")]
    assert_equal(files[1], files[0], name)
    again = type(model).from_pretrained(tmp_path / "after", dtype=torch.float64).train()
    assert convert_moe(again)
    again.config._experts_implementation = "eager"
    assert_close(step(again), step(model), name, 1e-12)


def test_noise_on_the_input() -> None:
    block = make_block("MixtralSparseMoeBlock")
    calm = run(block, tokens())["output 0"]
    block.jitter_noise = 0.1
    expected = run(block, tokens())
    assert not torch.equal(expected["output 0"], calm)
    ours = copy.deepcopy(block)
    convert_moe(nn.ModuleList([ours]))
    assert_close(run(ours, tokens()), expected, "jitter", 1e-12)
    ours.eval()
    assert_close(ours(tokens()), calm, "evaluation", 1e-12)


@pytest.mark.parametrize("kind", ["MixtralSparseMoeBlock", "GptOssMLP", "NemotronHMoE"])
def test_half_precision(kind: str) -> None:
    """bf16 weights, and bf16 autocast: no farther from fp64 than the block itself, rounding aside."""
    exact = run(make_block(kind).to(torch.bfloat16).double(), tokens(torch.bfloat16).double())["output 0"]
    for weights, autocast in ((torch.bfloat16, False), (torch.float32, True)):
        block = make_block(kind).to(torch.bfloat16).to(weights)
        ours = copy.deepcopy(block)
        convert_moe(nn.ModuleList([ours]))
        x = tokens(torch.bfloat16).to(weights)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            results = [run(each, x)["output 0"] for each in (block, ours)]
        assert results[0].dtype == results[1].dtype
        theirs, mine = ((result.double() - exact).norm() / exact.norm() for result in results)
        assert 0 < mine <= 1.2 * theirs, (kind, weights, mine, theirs)


def test_any_number_of_tokens_and_dimensions() -> None:
    block = make_block("Qwen2MoeSparseMoeBlock")
    ours = copy.deepcopy(block)
    convert_moe(nn.ModuleList([ours]))
    x = tokens()
    assert_close(ours(x.flatten(0, 1)), block(x).flatten(0, 1), "two dimensions", 1e-12)
    assert_close(ours(x.unsqueeze(1)), block(x).unsqueeze(1), "four dimensions", 1e-12)
    assert ours(x[:0]).shape == (0, *x.shape[1:])
    ours(x[:0]).sum().backward()
    assert ours.experts.down_proj.grad.count_nonzero() == 0


@pytest.mark.parametrize("kind", ["MixtralSparseMoeBlock", "DeepseekV3MoE", "GptOssMLP"])
def test_dropping_keeps_the_highest_weights(kind: str) -> None:
    """Against the block itself, whose router gives weight 0 to what has no room."""
    block = make_block(kind)
    ours = copy.deepcopy(block)
    convert_moe(nn.ModuleList([ours]), drop_tokens=True, capacity_factor=0.5, eval_capacity_factor=1.0, min_capacity=1)
    number = TOKENS[0] * TOKENS[1]
    for training, capacity in ((True, -(-number * K // EXPERTS // 2)), (False, number * K // EXPERTS)):
        block.train(training)
        ours.train(training)
        router = block.get_submodule(FAMILIES[kind].router)
        dropped: list[int] = []

        def drop(_module: nn.Module, _args: Any, out: Any, capacity: int = capacity, dropped: Any = dropped) -> Any:
            logits, weights, experts = out
            keep = torch.zeros_like(weights)
            for e in range(EXPERTS):
                pairs = (experts == e).nonzero().tolist()
                pairs.sort(key=lambda at: -float(weights[tuple(at)].detach()))
                for token, j in pairs[:capacity]:
                    keep[token, j] = 1
                dropped.append(len(pairs[capacity:]))
            return logits, weights * keep, experts

        handle = router.register_forward_hook(drop)
        expected = run(block, tokens())
        handle.remove()
        assert sum(dropped) > 0
        actual = run(ours, tokens())
        for results in (actual, expected):
            results.pop("output 1", None)  # weights before dropping
        if kind != "GptOssMLP":  # where they are part of the loss
            assert_close(actual, expected, kind, 1e-12)
        assert_close(actual["output 0"], expected["output 0"], kind, 1e-12)
        if training:
            assert ours.statistics().kept.sum() == number * K - sum(dropped)


@pytest.mark.parametrize("name", ["Mixtral", "DeepseekV3"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_losses_of_our_own(name: str, checkpointing: bool) -> None:
    """The balance loss is the models' own over k, for softmax; its gradient reaches the routers, once."""
    model = make_model(name, num_hidden_layers=3, use_cache=False)
    ours = converted(model, balance_loss=2.0, z_loss=0.25)
    blocks = [m for m in ours.modules() if isinstance(m, ConvertedMoE)]
    if checkpointing:
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    routed: list[tuple[Tensor, Tensor]] = []
    for module in model.modules():
        if type(module).__name__ in ("MixtralTopKRouter", "DeepseekV3TopkRouter"):
            module.register_forward_hook(lambda _m, _a, out: routed.append((out[0], out[2])))
    out = model(input_ids=token_ids(), labels=token_ids())
    extra = torch.zeros((), dtype=torch.float64)
    for each, experts in routed:
        scores = each.double().softmax(-1) if name == "Mixtral" else each.double().sigmoid()
        chosen = experts.flatten().bincount(minlength=EXPERTS)
        mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
        extra = extra + 2.0 * EXPERTS * (mean * chosen / len(each)).sum() / K
        extra = extra + 0.25 * each.double().logsumexp(-1).square().mean()
    (out.loss + extra).backward()
    expected = {key: p.grad for key, p in model.named_parameters()}
    assert len(routed) == len(blocks) >= 2

    loss = ours(input_ids=token_ids(), labels=token_ids()).loss
    mine = moe_losses(ours)
    assert_close(mine, extra, "losses", 1e-6 if name == "DeepseekV3" else 1e-12)
    (loss + mine).backward()
    assert float(moe_losses(ours)) == 0
    grads = {key: p.grad for key, p in ours.named_parameters()}
    assert_close(grads, expected, name, 1e-6 if name == "DeepseekV3" else 1e-12)
    for block in blocks:
        assert block.statistics().calls == 1
        assert int(block.statistics().routed.sum()) == token_ids().numel() * K
        block.reset_statistics()
        assert block.statistics().calls == 0


def test_copies_and_pickles() -> None:
    model = make_model("DeepseekV2")
    ours = converted(model, balance_loss=1.0)
    expected = step(ours)
    block = next(m for m in ours.modules() if isinstance(m, ConvertedMoE))
    assert type(block).__name__ == "ConvertedDeepseekV2Moe"
    file = io.BytesIO()
    torch.save(ours, file)
    file.seek(0)
    for again in (copy.deepcopy(ours), torch.load(file, weights_only=False)):
        assert float(moe_losses(again)) == 0
        assert {type(m) for m in again.modules()} == {type(m) for m in ours.modules()}
        assert_equal(step(again), expected, "copy")
    assert moe_losses(ours).detach() > 0


def test_meta() -> None:
    model = make_model("Qwen3Moe")
    with torch.device("meta"):
        ours = type(model)(model.config)
    convert_moe(ours)
    assert all(p.is_meta for p in ours.parameters())
    ours.load_state_dict(model.state_dict(), assign=True)
    ours.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # buffers that no file has
    assert_close(step(ours.train()), step(model), "meta", 1e-12)


class Other(nn.Module):
    """An unknown sparse block."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 2)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])


class MixtralSparseMoeBlock(Other):
    """As it was before transformers 5: experts are modules."""


def with_forward_replaced(block: nn.Module, of: str) -> nn.Module:
    module = block.get_submodule(of)
    module.forward = functools.partial(type(module).forward, module)  # type: ignore[method-assign]
    return block


def quantized(block: Any) -> nn.Module:
    block.experts.gate_up_proj = nn.Parameter(torch.zeros(EXPERTS, 48, HIDDEN, dtype=torch.int8), requires_grad=False)
    return block


def with_router(block: Any, router: Any) -> nn.Module:
    router.top_k = K
    block.gate = router
    return block


def without_k(block: Any) -> nn.Module:
    del block.gate.top_k
    return block


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda _: Other(), "a Other, which is not supported. Supported classes are AfmoeSparseMoeBlock, .*Qwen3Moe"),
        (lambda _: MixtralSparseMoeBlock(), "with one module per expert, as before transformers 5"),
        (lambda b: with_forward_replaced(b, ""), "with a replaced forward"),
        (lambda b: with_forward_replaced(b, "experts"), "with a replaced forward"),
        (quantized, "gate_up_proj .4, 48, 16. torch.int8.*without quantization"),
        (lambda b: with_router(b, nn.Linear(HIDDEN, EXPERTS)), r"router of .1. .Linear. does not return"),
        (without_k, r"router of .1. .MixtralTopKRouter. does not return .logits, weights, experts."),
    ],
)
def test_refused_blocks(bad: Callable[[nn.Module], nn.Module], message: str) -> None:
    good = make_block("MixtralSparseMoeBlock")
    model = nn.Sequential(good, bad(copy.deepcopy(good)))
    classes = [type(m) for m in model.modules()]
    with pytest.raises(PlanError, match=message):
        convert_moe(model)
    assert [type(m) for m in model.modules()] == classes


def test_refused_models() -> None:
    with pytest.raises(PlanError, match="no sparse block that is not converted yet"):
        convert_moe(nn.Linear(2, 2))
    model = make_model("Mixtral")
    ours = converted(model)
    with pytest.raises(PlanError, match="no sparse block that is not converted yet"):
        convert_moe(ours)
    with pytest.raises(ConfigError, match="capacity_factor=-1"):
        convert_moe(model, capacity_factor=-1)
    with pytest.raises(PlanError, match=r"output_router_logits=True with router_aux_loss_coef=0\.5"):
        convert_moe(make_model("Mixtral", router_aux_loss_coef=0.5, output_router_logits=True), balance_loss=0.1)
    assert convert_moe(model) == {f"model.layers.{i}.mlp": "MixtralSparseMoeBlock" for i in range(2)}


def test_compiled_blocks() -> None:
    block = make_block("Qwen2MoeSparseMoeBlock")
    ours = copy.deepcopy(block)
    convert_moe(nn.ModuleList([ours]))
    compiled = torch.compile(nn.Sequential(nn.Identity(), ours), backend="eager")
    assert_close(compiled(tokens()), block(tokens()), "compiled", 1e-12)
