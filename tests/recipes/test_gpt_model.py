"""The GPT is what its configuration says, on any device and in any dtype."""

from __future__ import annotations

import math

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from recipes.gpt.model import GPTModule, OptimConfig, SampleConfig, warmup_cosine
from recipes.gpt.network import GPT, INIT_STD, Block, GPTConfig, Rotary, rotate

SMALL = {"vocab_size": 64, "block_size": 32, "num_layers": 2, "num_heads": 4, "width": 32}
VARIANTS = {
    "rotary-swiglu-tied": {},
    "learned": {"positions": "learned"},
    "gelu": {"mlp": "gelu"},
    "untied": {"tied_embeddings": False},
    "grouped": {"num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1},
}
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


def build(**options) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**{**SMALL, **options}))


def tokens(batch: int = 2, length: int = 32) -> torch.Tensor:
    return torch.randint(SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(1))


@variants
def test_logits_have_the_vocabulary_last(options) -> None:
    assert build(**options)(tokens()).shape == (2, 32, 64)


@variants
def test_a_future_token_changes_no_past_logits(options) -> None:
    model, x = build(**options).eval(), tokens()
    changed = x.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 64
    with torch.no_grad():
        before, after = model(x), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20], rtol=0, atol=0)
    assert not torch.equal(before[:, 20:], after[:, 20:])


@variants
def test_every_parameter_gets_a_gradient(options) -> None:
    model = build(**options)
    model(tokens()).square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_tied_weights_are_one_parameter() -> None:
    tied, untied = build(), build(tied_embeddings=False)
    assert tied.head.weight is tied.token_embedding.weight
    difference = sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
    assert difference == SMALL["vocab_size"] * SMALL["width"]


def test_grouped_heads_equal_full_heads_with_repeated_weights() -> None:
    """Trusted: one key and value head per query head, whose weights repeat those of the group."""
    grouped, full = build(num_kv_heads=2), build()
    state = grouped.state_dict()
    N = grouped.config.head_width
    for name, weight in state.items():
        if name.endswith("query_key_value.weight"):
            q, k, v = weight.split((4 * N, 2 * N, 2 * N))
            repeat = [t.view(2, N, -1).repeat_interleave(2, dim=0).flatten(0, 1) for t in (k, v)]
            state[name] = torch.cat((q, *repeat))
    full.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens()), full(tokens()))


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    rotation = Rotary(block_size=16, head_width=8, base=10000.0)(16)
    q, k = torch.randn(8), torch.randn(8)
    q_TN, k_TN = (rotate(x.expand(16, 8), rotation) for x in (q, k))
    torch.testing.assert_close(q_TN.norm(dim=-1), q.norm().expand(16))
    scores = q_TN @ k_TN.T
    for distance in range(16):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-5)


@variants
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_runs_in_16_bit_throughout(options, dtype: torch.dtype) -> None:
    """As Lightning's true 16-bit precisions: built under another default dtype, then every float cast."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = build(**options).to(dtype)
    finally:
        torch.set_default_dtype(default)
    logits = model(tokens())
    assert logits.dtype == dtype
    logits.float().square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@variants
def test_runs_under_autocast(options) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        logits = build(**options)(tokens())
    torch.testing.assert_close(logits.float(), build(**options)(tokens()), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_tables_come_from_integers_in_fp32(dtype: torch.dtype) -> None:
    """Tables computed in bf16 would be wrong from position 257 on."""
    rotary = Rotary(block_size=1024, head_width=8, base=10000.0)
    expected = torch.cos(torch.arange(1024, dtype=torch.float64))
    rotary.to(dtype).reset_parameters()
    torch.testing.assert_close(
        rotary.cos[:, 0].double(), expected, rtol=0, atol=2e-4 if dtype == torch.float32 else 4e-3
    )


@variants
def test_a_meta_network_gets_its_values_from_its_modules(options) -> None:
    """What a strategy does at stage 3: build without memory, then fill module by module."""
    with torch.device("meta"):
        model = GPT(GPTConfig(**{**SMALL, "width": 128, **options}))
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, torch.full_like(buffer, math.nan, device="cpu"))
        for p in module.parameters(recurse=False):
            if p.is_meta:  # a tied weight has its memory from the first module that owns it
                torch.utils.swap_tensors(p, nn.Parameter(torch.full_like(p, math.nan, device="cpu")))
        if own:
            module.reset_parameters()
    assert all(t.isfinite().all() for t in [*model.parameters(), *model.buffers()])
    reference = build(**{"width": 128, **options})
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert p.std(correction=0).item() == pytest.approx(q.std(correction=0).item(), rel=0.05), name
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), reference.buffers(), strict=True))


def test_layers_that_add_to_the_residual_stream_start_smaller() -> None:
    model = build(width=128, num_layers=8)
    scaled = {n for n, p in model.named_parameters() if p.dim() == 2 and p.std() < INIT_STD / 2}
    assert scaled == {f"blocks.{i}.{layer}.weight" for i in range(8) for layer in ("attention.out", "mlp.down")}
    assert model.blocks[0].mlp.down.weight.std().item() == pytest.approx(INIT_STD / 4, rel=0.05)


def test_flops_are_those_of_the_full_model_on_a_rank_with_a_part_of_it() -> None:
    model = build()
    full = model.flops_per_token()
    for block in model.blocks:
        block.mlp.down.weight = nn.Parameter(block.mlp.down.weight[::2].detach())
    assert model.flops_per_token() == full


def test_flops_are_six_per_weight_and_token_and_the_attention_scores() -> None:
    model = build(mlp="gelu", tied_embeddings=False)
    D, L, T, V = 32, 2, 32, 64
    assert model.flops_per_token() == 6 * (L * 12 * D * D + D * V) + 12 * L * D * T
    tied, learned = build(mlp="gelu"), build(mlp="gelu", positions="learned")
    assert tied.flops_per_token() == learned.flops_per_token() == model.flops_per_token()  # tables do not multiply


def test_flops_agree_with_torch_within_the_causal_half() -> None:
    """Trusted: torch's counter, forward and backward. It counts all scores, too, and no element-wise work."""
    from torch.utils.flop_counter import FlopCounterMode

    model = build()
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(tokens(1)).sum().backward()
    assert counter.get_total_flops() / 32 == pytest.approx(model.flops_per_token(), rel=0.02)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "top_k": 5}, {}])
def test_generation_is_a_function_of_the_seed(options) -> None:
    model, prompt = build().eval(), tokens(2, 4)
    runs = [model.generate(prompt, 40, generator=torch.Generator().manual_seed(3), **options) for _ in range(2)]
    assert torch.equal(*runs)
    assert runs[0].shape == (2, 44)  # beyond block_size: the window slides
    assert torch.equal(runs[0][:, :4], prompt)


def test_top_1_is_the_most_likely_token() -> None:
    model, prompt = build().eval(), tokens(2, 4)
    assert torch.equal(model.generate(prompt, 8, top_k=1), model.generate(prompt, 8, temperature=0))


def test_too_many_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="block_size=32"):
        build()(tokens(1, 33))


@pytest.mark.parametrize(
    ("options", "cure"),
    [
        ({"width": 30}, "multiple of num_heads"),
        ({"width": 36, "num_heads": 4}, "even number"),
        ({"num_kv_heads": 3}, "must divide"),
        ({"dropout": 1.0}, r"\[0, 1\)"),
        ({"num_layers": 0}, "at least 1"),
    ],
)
def test_impossible_shapes_are_refused(options, cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        GPTConfig(**{**SMALL, **options})


def test_schedule_rises_then_falls_to_its_floor() -> None:
    factors = [warmup_cosine(s, warmup_steps=10, total_steps=100, final_ratio=0.1) for s in range(120)]
    assert factors[:10] == [pytest.approx((s + 1) / 10) for s in range(10)]
    assert factors[10:100] == sorted(factors[10:100], reverse=True)
    assert factors[100:] == [pytest.approx(0.1)] * 20


def fit(tmp_path, module: GPTModule, **options) -> pl.Trainer:
    data = DataLoader([(tokens(2, 33)[:, :-1], tokens(2, 33)[:, 1:])] * 4, batch_size=None)  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=4, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path, **options,
    )  # fmt: skip
    trainer.fit(module, data, data)
    return trainer


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-true"])
def test_trains_in_every_precision(tmp_path, precision: str) -> None:
    # 1e-8 is 0 in fp16, and without a master copy of the weights AdamW would divide by it.
    module = GPTModule(GPTConfig(**SMALL), OptimConfig(warmup_steps=1, eps=1e-4))
    trainer = fit(tmp_path, module, precision=precision, enable_checkpointing=False)
    assert trainer.global_step == 4
    assert trainer.callback_metrics["val/loss"].isfinite()
    assert all(p.isfinite().all() for p in module.parameters())


def test_vectors_do_not_decay_and_the_schedule_moves_every_step(tmp_path) -> None:
    module = GPTModule(GPTConfig(**SMALL), OptimConfig(lr=1e-3, warmup_steps=2))
    trainer = fit(tmp_path, module, enable_checkpointing=False)
    (optimizer,) = trainer.optimizers
    decayed, plain = optimizer.param_groups
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in plain["params"]} == {1}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(plain["params"]) == len(list(module.parameters()))
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4


def test_an_endless_run_needs_the_length_of_its_schedule(tmp_path) -> None:
    module = GPTModule(GPTConfig(**SMALL))
    trainer = pl.Trainer(accelerator="cpu", max_steps=-1, max_epochs=-1, logger=False, default_root_dir=tmp_path)
    module.trainer = trainer
    module.configure_model()
    with pytest.raises(ValueError, match=r"model\.optim\.total_steps"):
        module.configure_optimizers()


def test_a_checkpoint_loads_without_its_options(tmp_path) -> None:
    module = GPTModule(GPTConfig(**SMALL, mlp="gelu"), sample=SampleConfig(prompt="x"))
    fit(tmp_path, module).save_checkpoint(tmp_path / "last.ckpt")
    loaded = GPTModule.load_from_checkpoint(tmp_path / "last.ckpt")
    assert (loaded.config, loaded.optim, loaded.sample) == (module.config, module.optim, module.sample)
    loaded.eval(), module.eval()
    assert torch.equal(loaded(tokens()), module(tokens()))


def test_building_twice_builds_once() -> None:
    module = GPTModule(GPTConfig(**SMALL))
    with pytest.raises(RuntimeError, match="configure_model"):
        module(tokens())
    module.configure_model()
    first = module.model
    module.configure_model()
    assert module.model is first
    assert isinstance(first.blocks, nn.ModuleList)
    assert all(isinstance(b, Block) for b in first.blocks)
