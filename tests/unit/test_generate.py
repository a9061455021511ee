"""Generation with a cache: each token once, with the numbers of a network that reads everything anew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ls_strategy.errors import ConfigError, PlanError
from ls_strategy.extras.inference.cache import KVCache
from ls_strategy.extras.inference.generate import generate, stream
from ls_strategy.extras.inference.sampling import SamplingConfig, row_seed
from ls_strategy.moe.router import Router
from recipes.gpt.network import GPT, GPTConfig
from recipes.moe.network import Expert, MoEConfig, MoEGPT

SMALL: dict[str, Any] = {"vocab_size": 70, "block_size": 24, "num_layers": 2, "num_heads": 4, "width": 32}
DROPPING = MoEConfig(num_experts=[4], eval_capacity_factor=0.25, min_capacity=1)
VARIANTS: dict[str, Any] = {
    "rotary": {},
    "learned": {"positions": "learned", "mlp": "gelu"},
    "grouped": {"num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1, "tied_embeddings": False},
    "moe": {"moe": DROPPING},
}
variants = pytest.mark.parametrize("variant", VARIANTS)
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [1, 2, 3], [42]]
GREEDY = SamplingConfig(temperature=0)


def build(variant: str = "rotary") -> GPT:
    """With weights large enough that the most likely token is so by far more than rounding."""
    torch.manual_seed(0)
    options = {**SMALL, **VARIANTS[variant]}
    moe = options.pop("moe", None)
    model = GPT(GPTConfig(**options)) if moe is None else MoEGPT(GPTConfig(**options), moe)
    for name, p in model.named_parameters():
        torch.nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model.eval()


@torch.no_grad()
def whole(model: GPT, row: Sequence[int]) -> Tensor:
    """Logits ``(V,)`` after a row that the network reads alone, all at once; experts drop nothing."""
    routers = [m for m in model.modules() if isinstance(m, Router)]
    kept = [r.options for r in routers]
    for r in routers:
        object.__setattr__(r.options, "drop_tokens", False)
    logits = model(torch.tensor([list(row)[-SMALL["block_size"] :]]))[0, -1]
    for r in routers:
        object.__setattr__(r.options, "drop_tokens", True)
    assert [r.options for r in routers] == kept
    return logits


def greedy(model: GPT, row: Sequence[int], count: int) -> list[int]:
    """Trusted: everything is read anew for every token."""
    tokens = list(row)
    for _ in range(count):
        tokens.append(int(whole(model, tokens).argmax()))
    return tokens[len(row) :]


def pad(rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    return torch.tensor([[0] * n + list(row) for n, row in zip(padding, rows, strict=True)]), padding


# --- cache ----------------------------------------------------------------------------------------------------------


@variants
def test_logits_are_those_of_reading_everything_anew_whatever_else_is_in_the_batch(variant: str) -> None:
    model, rows = build(variant), [list(row) for row in PROMPTS]
    cache = model.make_cache()
    tokens, padding = pad(rows)
    cache.begin(padding)
    with torch.no_grad():
        logits = model(tokens, cache=cache)
    for _ in range(12):
        assert logits.shape == (3, 1, 70)
        for row, found in zip(rows, logits[:, -1], strict=True):
            expected = whole(model, row)
            assert expected.std() > 0.5, "logits that are all alike would show nothing"
            assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        new = logits[:, -1].argmax(-1)
        for row, token in zip(rows, new.tolist(), strict=True):
            row.append(token)
        with torch.no_grad():
            logits = model(new[:, None], cache=cache)


@variants
def test_greedy_tokens_are_equal_also_when_the_window_slides(variant: str) -> None:
    """24 tokens fit; the first row outgrows them after 17, the last never does."""
    model = build(variant)
    assert generate(model, PROMPTS, 22, sampling=GREEDY) == [greedy(model, row, 22) for row in PROMPTS]


@variants
def test_a_prompt_without_padding_runs_through_the_blocks_bit_by_bit_as_in_training(variant: str) -> None:
    model, seen = build(variant), list[Any]()
    if variant == "moe":
        model = MoEGPT(model.config, replace(DROPPING, drop_tokens=False)).eval()
    model.blocks[-1].register_forward_hook(lambda _m, _args, output: seen.append(output))
    tokens = torch.tensor([PROMPTS[0], PROMPTS[0][::-1]])
    with torch.no_grad():
        model(tokens)
        model(tokens, cache=model.make_cache())
    assert torch.equal(*seen)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("variant", ["rotary", "grouped"])
def test_a_prompt_may_be_read_in_pieces(variant: str, padded: bool) -> None:
    model = build(variant)
    tokens, padding = pad(PROMPTS if padded else [PROMPTS[0], PROMPTS[0][::-1]])
    with torch.no_grad():
        caches = [model.make_cache() for _ in range(2)]
        for cache in caches:
            cache.begin(padding)
        at_once = model(tokens, cache=caches[0])
        in_pieces = [model(piece, cache=caches[1]) for piece in tokens.split([3, 1, 3], dim=1)][-1]
    torch.testing.assert_close(in_pieces, at_once, rtol=1e-5, atol=1e-5)


def test_memory_is_used_again_and_holds_the_heads_that_are_here() -> None:
    model = build("grouped")
    cache = model.make_cache()
    assert cache.num_bytes == 0
    with torch.inference_mode():
        generate(model, PROMPTS, 3, sampling=GREEDY, cache=cache)
    N = SMALL["width"] // SMALL["num_heads"]
    assert cache.num_bytes == 2 * SMALL["num_layers"] * len(PROMPTS) * 2 * SMALL["block_size"] * N * 4
    places = [layer._storage.data_ptr() for layer in cache.layers]  # type: ignore[union-attr]
    for rows in (PROMPTS, PROMPTS[:1], PROMPTS[1:]):  # outside of inference mode, and fewer rows
        assert generate(model, rows, 5, sampling=GREEDY, cache=cache) == generate(model, rows, 5, sampling=GREEDY)
        assert [layer._storage.data_ptr() for layer in cache.layers] == places  # type: ignore[union-attr]
    generate(model, PROMPTS + PROMPTS, 1, cache=cache)
    assert cache.num_bytes == 2 * SMALL["num_layers"] * 2 * len(PROMPTS) * 2 * SMALL["block_size"] * N * 4


def test_a_cache_has_the_dtype_of_its_keys() -> None:
    model, cache = build().to(torch.bfloat16), build().make_cache()
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        cache.begin()
        with torch.no_grad():
            assert model(torch.tensor([[1, 2]]), cache=cache).dtype == dtype
    assert cache.num_bytes == 2 * SMALL["num_layers"] * SMALL["width"] * SMALL["block_size"] * 4


# --- positions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["rotary", "learned"])
def test_explicit_positions_are_those_that_are_left_out(variant: str) -> None:
    model, tokens = build(variant), torch.randint(70, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(tokens)
        assert torch.equal(model(tokens, positions=torch.arange(12)), expected)
        assert torch.equal(model(tokens, positions=torch.arange(12).expand(2, 12)), expected)
        shifted = model(tokens, positions=torch.tensor([[0], [5]]) + torch.arange(12))
    assert torch.equal(shifted[0], expected[0])
    moved = (shifted[1] - expected[1]).abs().max()
    assert moved > 0.1 if variant == "learned" else moved < 1e-4  # rotary positions are relative


def test_a_block_of_some_tokens_turns_them_by_their_own_positions() -> None:
    """Trusted: tables of the chosen rows, for one row of the batch at a time.

    In fp64: products of one row and of two have other kernels on some CPUs, whose fp32 sums differ by 1e-5.
    """
    model = build("grouped").double()
    block, rotation = model.blocks[0], tuple(table.double() for table in model.rotary(10))  # type: ignore[misc]
    kept = torch.tensor([[0, 3, 4, 9], [1, 2, 5, 8]])
    x = torch.randn(2, 4, 32, dtype=torch.float64)
    with torch.no_grad():
        found = block(x, rotation, positions=kept)
        for i in range(2):
            alone = block(x[i : i + 1], tuple(table[kept[i]] for table in rotation))
            torch.testing.assert_close(found[i : i + 1], alone, rtol=0, atol=1e-12)
        assert torch.equal(block(x[:1], rotation, positions=kept[0]), alone_of(block, x[:1], rotation, kept[0]))


def alone_of(block: torch.nn.Module, x: Tensor, rotation: tuple[Tensor, Tensor], kept: Tensor) -> Tensor:
    return block(x, (rotation[0][kept], rotation[1][kept]))


# --- experts --------------------------------------------------------------------------------------------------------


def test_experts_drop_nothing_while_a_cache_is_read_and_as_ever_otherwise() -> None:
    model = build("moe")
    tokens = torch.randint(70, (2, 20), generator=torch.Generator().manual_seed(1))
    routers = [m for m in model.modules() if isinstance(m, Router)]
    options = [r.options for r in routers]
    with torch.no_grad():
        dropping = model(tokens)[:, -1]
        cached = model(tokens, cache=model.make_cache())[:, -1]
    assert (cached - dropping).abs().max() > 0.1
    torch.testing.assert_close(
        cached, torch.stack([whole(model, row) for row in tokens.tolist()]), rtol=1e-5, atol=1e-4
    )
    with pytest.raises(ValueError, match="fit"), torch.no_grad():
        model(torch.zeros(1, 10, dtype=torch.long), cache=KVCache(2, 4))
    assert len(routers) == 2
    assert all(r.options is o and o.drop_tokens for r, o in zip(routers, options, strict=True))


# --- seeds ---------------------------------------------------------------------------------------------------------


def test_a_row_samples_by_its_own_seed_whatever_else_is_in_the_batch() -> None:
    model, config = build(), SamplingConfig(temperature=1.5, top_k=20)
    seeds = [3, 4, 5]
    together = generate(model, PROMPTS, 12, sampling=config, seed=seeds)
    for row, seed, found in zip(PROMPTS, seeds, together, strict=True):
        assert generate(model, [row], 12, sampling=config, seed=[seed]) == [found]
    assert generate(model, PROMPTS, 12, sampling=config, seed=[3, 4, 6])[:2] == together[:2]
    same = generate(model, [PROMPTS[0]] * 3, 12, sampling=config, seed=7)
    assert same[0] == generate(model, PROMPTS[:1], 12, sampling=config, seed=7)[0]
    assert len({tuple(row) for row in same}) == 3  # one seed, but rows draw other numbers
    assert same[1] == generate(model, PROMPTS[:1], 12, sampling=config, seed=[row_seed(7, 1)])[0]
    with pytest.raises(ConfigError, match="2 seeds for 3 rows"):
        generate(model, PROMPTS, 1, seed=[1, 2])


# --- loop -----------------------------------------------------------------------------------------------------------


class Counting:
    """A network whose next token is one more than the last, and that counts its forwards."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def make_cache(self) -> KVCache:
        return KVCache(1, 8)

    def __call__(self, tokens: Tensor, *, cache: KVCache | None = None) -> Tensor:
        self.lengths.append(tokens.shape[1])
        if cache is not None:
            cache.open(tokens)
            tokens = tokens[:, -1:]
        return torch.nn.functional.one_hot((tokens + 1) % 50, 50).float()


def test_a_step_is_handed_out_after_its_own_forward() -> None:
    network = Counting()
    steps = stream(network, [[4, 5], [9]], 3, sampling=GREEDY)
    assert network.lengths == []
    assert next(steps) == [6, 10]
    assert network.lengths == [2]
    assert torch.is_grad_enabled()
    assert list(steps) == [[7, 11], [8, 12]]
    assert network.lengths == [2, 1, 1]


def test_every_step_is_one_forward_also_when_the_window_slides() -> None:
    network = Counting()
    assert generate(network, [[1, 2, 3, 4, 5, 6]], 6, sampling=GREEDY) == [[7, 8, 9, 10, 11, 12]]
    assert network.lengths == [6, 1, 1, 8, 8, 8]


@pytest.mark.parametrize("all_steps", [None, True])
def test_rows_end_before_a_stop_token(all_steps: bool | None) -> None:
    network = Counting()
    options: dict[str, Any] = {"sampling": GREEDY, "stop_tokens": [8, 12], "all_steps": all_steps}
    assert generate(network, [[4], [9], [20], [7]][:2], 10, **options) == [[5, 6, 7], [10, 11]]
    assert len(network.lengths) == (10 if all_steps else 4)
    assert generate(network, [[7]], 3, **options) == [[]]


@pytest.mark.parametrize("variant", ["rotary", "learned"])
def test_without_a_cache_whole_sequences_of_a_multiple_are_read(variant: str) -> None:
    model = build(variant)
    lengths: list[int] = []
    model.register_forward_pre_hook(lambda _m, args: lengths.append(args[0].shape[1]))
    found = generate(model, PROMPTS, 20, sampling=GREEDY, full_sequences=4)
    assert set(lengths) == {8, 12, 16, 20, 24}
    assert found == [greedy(model, row, 20) for row in PROMPTS]


def test_prompts_and_numbers_without_a_meaning_are_refused() -> None:
    for prompts, cure in (([], "no prompts"), ([[1], []], "prompt 1 without tokens")):
        with pytest.raises(ConfigError, match=cure):
            stream(Counting(), prompts, 1)
    with pytest.raises(ConfigError, match="max_new_tokens=-1"):
        stream(Counting(), [[1]], -1)
    with pytest.raises(ConfigError, match="fewer tokens"):
        stream(Counting(), [[1]], 1, full_sequences=16)
    assert generate(Counting(), [[1]], 0) == [[]]
    model = build()
    model.blocks[1].to("meta")
    with pytest.raises(PlanError, match=r"blocks\.1\.attention_norm\.weight is on another rank"):
        stream(model, [[1]], 1)


# --- experts ---------------------------------------------------------------------------------------------------------


def test_layers_of_experts_are_plain_products_which_all_experts_compute_at_once() -> None:
    """What the layer with experts asks of a linear layer before it groups them."""
    expert = Expert(32, 16, residual_std=0.1)
    assert all(type(m).forward is torch.nn.Linear.forward for m in expert.modules() if isinstance(m, torch.nn.Linear))
