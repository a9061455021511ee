"""Models whose blocks see a part of the tokens against the same models on one process."""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import make_comm
from ls_strategy.errors import PlanError
from ls_strategy.parallel.context.ulysses import apply_sequence_parallel
from ls_strategy.parallel.logits import ShardedLogits, gather
from ls_strategy.testing import spawn
from recipes.gpt.network import GPT, GPTConfig
from tests.marks import slow

pytestmark = pytest.mark.wide

B, T, V = 2, 16, 29
HUGGING_FACE = importlib.util.find_spec("transformers") is not None
TORCH_ATTENTION = functional.scaled_dot_product_attention


def tokens(seed: int = 1, length: int = T) -> Tensor:
    return torch.randint(V, (B, length), generator=torch.Generator().manual_seed(seed))


class CheckpointedGPT(GPT):
    """Recomputes every block, hooks and all, as users write it."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.token_embedding(tokens_BT)
        rotation = self.rotary(tokens_BT.shape[1])
        for block in self.blocks:
            x_BTD = checkpoint(block, x_BTD, rotation, use_reentrant=False)
        return self.head(self.norm(x_BTD))


def gpt(kind: type[GPT] = GPT, **options: Any) -> GPT:
    torch.manual_seed(0)
    defaults = {"vocab_size": V, "block_size": T, "num_layers": 2, "num_heads": 4, "width": 32}
    model = kind(GPTConfig(**{**defaults, **options}))
    for parameter in model.parameters():  # far from the small numbers at which attention hardly matters
        parameter.data.mul_(4)
    return model


def gpt_parts(model: GPT) -> tuple[Any, nn.Module]:
    return model.blocks, model.head


def gpt_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x).float().flatten(0, 1), y.flatten())


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    attention = options.pop("attn_implementation", "sdpa")
    config = LlamaConfig(
        vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=T, initializer_range=0.2, attn_implementation=attention,
        **options,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def llama_parts(model: Any) -> tuple[Any, nn.Module]:
    return model.model.layers, model.lm_head


def llama_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(input_ids=x, labels=y).loss


def padded_llama_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    mask = torch.ones_like(x)
    mask[0, -5:] = 0
    mask[1, :3] = 0
    labels = y.masked_fill(mask == 0, -100)
    return model(input_ids=x, attention_mask=mask, labels=labels).loss


class Encoder(nn.Module):
    """torch's own layers, without a head: no causality, a loss over full hidden states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, 32)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True) for _ in range(2)])
        self.out = nn.Linear(32, V)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for layer in self.layers:
            h = layer(h)
        return self.out(h.mean(1))


def encoder_parts(model: Any) -> tuple[Any, None]:
    return model.layers, None


def encoder_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y[:, 0])


def around(block: nn.Module) -> None:
    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


def hf_checkpointing() -> Any:
    model: Any = llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


CASES: dict[str, tuple[Callable[[], Any], Callable[..., Any], Callable[..., Tensor]]] = {
    "rotary": (gpt, gpt_parts, gpt_loss),
    "learned positions": (functools.partial(gpt, positions="learned", mlp="gelu"), gpt_parts, gpt_loss),
    "two kv heads": (functools.partial(gpt, num_kv_heads=2), gpt_parts, gpt_loss),
    "one kv head": (functools.partial(gpt, num_kv_heads=1), gpt_parts, gpt_loss),
    "checkpoint of blocks": (functools.partial(gpt, CheckpointedGPT), gpt_parts, gpt_loss),
    "no head": (gpt, lambda model: (model.blocks, None), gpt_loss),
    "encoder": (Encoder, encoder_parts, encoder_loss),
}
LLAMAS: dict[str, tuple[Callable[[], Any], Callable[..., Any], Callable[..., Tensor]]] = {
    "llama": (llama, llama_parts, llama_loss),
    "llama, padded": (llama, llama_parts, padded_llama_loss),
    "llama, checkpointing": (hf_checkpointing, llama_parts, llama_loss),
}
if HUGGING_FACE:
    CASES |= LLAMAS


def step(model: nn.Module, loss: Callable[..., Tensor], axis: Axis | None) -> dict[str, Tensor]:
    """Two micro-batches, so that the second one runs without the comparison of the first."""
    result: dict[str, Tensor] = {}
    for i in range(2):
        value = loss(model, tokens(2 * i), tokens(2 * i + 1))
        assert type(value) is Tensor
        value.backward()
        result[f"loss {i}"] = value.detach()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        grad = parameter.grad
        result[name] = grad if axis is None else axis.all_reduce(grad) / axis.size
    return result


def all_cases(rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
    axis = Axis("sequence", make_comm())
    results = {}
    for name, (make, parts, loss) in CASES.items():
        for recompute in (False, True):
            model = make().train()
            blocks, head = parts(model)
            parallel = apply_sequence_parallel(model, axis, blocks=blocks, head=head)
            if recompute:
                if name.startswith("llama"):
                    model.config.use_cache = False  # a cache would get all keys twice
                for block in blocks:
                    around(block)
            results[f"{name}, {recompute}"] = step(model, loss, axis)
            parallel.remove()
            assert functional.scaled_dot_product_attention is TORCH_ATTENTION
    return results


@functools.cache
def on_ranks(world_size: int) -> list[dict[str, dict[str, Tensor]]]:
    return spawn(all_cases, world_size, timeout_s=120)


@functools.cache
def expected(case: str) -> dict[str, Tensor]:
    make, _, loss = CASES[case]
    return step(make().train(), loss, None)


@pytest.mark.dist
@pytest.mark.parametrize("world_size", [2, slow(4)])
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_one_process(case, world_size) -> None:
    """With and without recomputation. Four ranks share two key and value heads, or one, too."""
    must = expected(case)
    largest = max(t.abs().max() for name, t in must.items() if not name.startswith("loss"))
    for recompute in (False, True):
        for results in on_ranks(world_size):
            actual = results[f"{case}, {recompute}"]
            assert list(actual) == list(must)
            for name, value in must.items():
                error = (actual[name] - value).abs().max()
                if name.startswith("loss"):
                    assert error <= 1e-6 * value, f"{name}: {error / value:.3g}"
                    assert torch.equal(actual[name], on_ranks(world_size)[0][f"{case}, {recompute}"][name])
                else:
                    assert error <= 2e-6 * largest, f"{name}: {error / largest:.3g}"


# --- traffic and memory -----------------------------------------------------------------------------------------------


def traffic(rank: int, world_size: int) -> list[dict[str, int]]:
    axis = Axis("sequence", make_comm())
    result = []
    for options in ({}, {"num_kv_heads": 2}):
        model = gpt(**options)
        parallel = apply_sequence_parallel(model, axis, blocks=model.blocks, head=model.head, check=False)
        axis.traffic.reset()
        loss = gpt_loss(model, tokens(), tokens())
        forward = axis.traffic.elements["all_to_all"]
        loss.backward()
        result.append({"forward": forward, **axis.traffic.elements})
        parallel.remove()
    return result


@pytest.mark.dist
@pytest.mark.parametrize("n", [2, 4])
def test_traffic(n) -> None:
    """Query, key, value and output, each once forward and once backward, and one number for the loss."""
    each = 2 * B * (T // n) * 32 * (n - 1) // n  # of both blocks
    for plain, grouped in spawn(traffic, n, timeout_s=60):
        assert plain["forward"] == 4 * each
        assert plain["all_to_all"] == 8 * each
        kv_heads = max(2, n)  # two are repeated for four ranks
        assert grouped["all_to_all"] == 4 * each + 4 * each * kv_heads // 4
        assert set(plain) == {"forward", "all_to_all", "all_reduce"}
        assert plain["all_reduce"] == 2 * (n - 1)


# --- what is refused --------------------------------------------------------------------------------------------------


class FromLength(nn.Module):
    """A block that takes positions from the length of its input."""

    def __init__(self, inner: nn.Module, rotary: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.rotary = [rotary]

    def forward(self, x: Tensor, rotation: Any) -> Tensor:
        return self.inner(x, self.rotary[0](x.shape[1]))


class Eager(nn.Module):
    """Attention by hand."""

    def forward(self, x: Tensor, rotation: Any) -> Tensor:
        return x + (x @ x.transpose(1, 2)).softmax(-1) @ x


def refused(rank: int, world_size: int) -> list[str]:
    axis = Axis("sequence", make_comm())
    messages = []

    def attempt(model: Any, x: Tensor, **options: Any) -> None:
        parallel = apply_sequence_parallel(model, axis, blocks=model.blocks, head=model.head, **options)
        axis.traffic.reset()
        with pytest.raises(PlanError) as caught:
            model(x)
        messages.append(f"{dict(axis.traffic.elements)} {caught.value}")
        parallel.remove()

    model = gpt(num_heads=1, width=8)
    attempt(model, tokens(), check=False)
    model = gpt()
    attempt(model, tokens()[:, :-1], check=False)
    model = gpt()
    attempt(model, tokens()[:, :world_size], check=False)
    for layers in (1, 2):
        model = gpt()
        model.blocks = nn.ModuleList([FromLength(model.blocks[i], model.rotary) for i in range(layers)])
        attempt(model, tokens())
    for parameter in model.parameters():
        parameter.data.div_(4)  # as at the start of a training
    with torch.autocast("cpu", torch.bfloat16):
        attempt(model, tokens())
    attempt(model.bfloat16(), tokens())
    model = gpt()
    model.blocks = nn.ModuleList([Eager()])
    attempt(model, tokens(), check=False)
    if HUGGING_FACE:
        hf: Any = llama(attn_implementation="eager")
        with pytest.raises(PlanError, match='attn_implementation="sdpa"'):
            apply_sequence_parallel(hf, axis, blocks=hf.model.layers, head=hf.lm_head)
        hf = llama()
        parallel = apply_sequence_parallel(hf, axis, blocks=hf.model.layers, head=hf.lm_head)
        with pytest.raises(PlanError, match="logits_to_keep"):
            hf(input_ids=tokens(), logits_to_keep=1)
        parallel.remove()
    with pytest.raises(PlanError, match="none were given"):
        apply_sequence_parallel(model, axis, blocks=[], head=None)
    return messages


@pytest.mark.dist
def test_what_cannot_work_is_refused_on_all_ranks() -> None:
    """Heads and tokens before any exchange."""
    for messages in spawn(refused, 2, timeout_s=60):
        heads, odd, short, *lengths, eager = messages
        assert len(lengths) == 4
        assert heads.startswith("{} attention in a block")
        assert "The number of heads, 1, must be a multiple of the 2 ranks" in heads
        assert odd.startswith("{} 15 tokens cannot be sharded over the 2 ranks")
        assert short.startswith("{} 2 tokens cannot be sharded")
        for message in lengths:
            assert "block 'blocks.0' gives another result for 8 of 16 tokens" in message
            assert "pass them in as arguments" in message
        assert "never called torch.nn.functional.scaled_dot_product_attention" in eager


# --- random numbers, buffers, evaluation ------------------------------------------------------------------------------


class Noisy(nn.Module):
    """A block with dropout, a norm with statistics and a counter, which remembers what was dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.norm(x.flatten(0, 1)).view(x.shape)
        heads = x.view(*x.shape[:2], 4, 2).transpose(1, 2)
        mixed = functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)
        kept = self.dropout(torch.ones_like(x))
        if self.training and torch.is_grad_enabled():
            self.seen.append(kept.detach().clone())
        return x + mixed * kept


class NoisyNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Noisy(), Noisy()])
        self.head = nn.Linear(8, V)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def noisy(rank: int, world_size: int) -> dict[str, Any]:
    axis = Axis("sequence", make_comm())
    result: dict[str, Any] = {}
    for checked in (False, True):
        torch.manual_seed(0)
        net = NoisyNet()
        apply_sequence_parallel(net, axis, blocks=net.blocks, head=net.head, check=checked)
        for block in net.blocks:
            around(block)
        torch.manual_seed(1)
        loss = gpt_loss(net, torch.randn(B, T, 8, requires_grad=True), tokens())
        after = torch.rand(3)
        loss.backward()
        seen = [kept for block in net.blocks for kept in block.seen]
        state = {k: v.clone() for k, v in net.state_dict().items()}
        result[f"checked {checked}"] = {"seen": seen, "after": after, "after backward": torch.rand(3), "state": state}
        result[f"loss {checked}"] = loss.detach()
    return result


@pytest.mark.dist
def test_dropout_differs_by_rank_and_the_comparison_leaves_no_trace() -> None:
    first, second = spawn(noisy, 2, timeout_s=60)
    for rank in (first, second):
        one, other = rank["checked False"], rank["checked True"]
        assert torch.equal(rank["loss False"], rank["loss True"])
        for name, value in one["state"].items():
            assert torch.equal(value, other["state"][name]), name
        for a, b in zip(one["seen"], other["seen"], strict=True):
            assert torch.equal(a, b)
    seen = first["checked True"]["seen"]
    assert len(seen) == 4  # two blocks, each computed twice
    assert torch.equal(seen[0], seen[1])  # recomputed in the same way
    assert torch.equal(seen[2], seen[3])
    assert not torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], second["checked True"]["seen"][0])
    assert torch.equal(first["checked True"]["after"], second["checked True"]["after"])
    assert torch.equal(first["checked True"]["after backward"], second["checked True"]["after backward"])


def evaluation(rank: int, world_size: int) -> None:
    axis = Axis("sequence", make_comm())
    plain, model = gpt().eval(), gpt().eval()
    parallel = apply_sequence_parallel(model, axis, blocks=model.blocks, head=model.head)
    assert parallel.describe() == "tokens sharded over 2 ranks in 2 blocks (Block), gathered in the loss of 'head'"
    with torch.no_grad():
        logits = model(tokens())
        assert isinstance(logits, ShardedLogits)
        torch.testing.assert_close(gather(logits), plain(tokens()), rtol=1e-5, atol=1e-5)
        for length in (15, 2, 1):  # unsharded on every rank
            torch.testing.assert_close(model(tokens()[:, :length]), plain(tokens()[:, :length]), rtol=1e-6, atol=1e-6)
    assert torch.equal(
        model.generate(tokens()[:1, :3], 6, temperature=0), plain.generate(tokens()[:1, :3], 6, temperature=0)
    )
    copied = copy.deepcopy(model)
    torch.testing.assert_close(copied(tokens()), plain(tokens()), rtol=1e-6, atol=1e-6)
    parallel.remove()
    parallel.remove()
    assert "forward" not in vars(model.blocks[0])
    assert functional.scaled_dot_product_attention is TORCH_ATTENTION
    torch.testing.assert_close(model(tokens()), plain(tokens()), rtol=1e-6, atol=1e-6)

    if not HUGGING_FACE:
        return
    hf, own = (m.eval() for m in (llama(), llama()))
    apply_sequence_parallel(own, axis, blocks=own.model.layers, head=own.lm_head)
    prompt = tokens()[:, :4]
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(own.generate(prompt, **options), hf.generate(prompt, **options))


def lengths_interleave(rank: int, world_size: int) -> None:
    """Two sequences, the second as long as a part of the first, before one backward through recomputed blocks."""
    axis = Axis("sequence", make_comm())
    grads = []
    for sharded in (False, True):
        model = gpt(CheckpointedGPT).train()
        if sharded:
            apply_sequence_parallel(model, axis, blocks=model.blocks, head=model.head)
        loss = gpt_loss(model, tokens(1), tokens(2)) + gpt_loss(model, tokens(3, T // 2), tokens(4, T // 2))
        with torch.no_grad():
            model(tokens()[:, :3])
        loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for full, mine in zip(*grads, strict=True):
        torch.testing.assert_close(axis.all_reduce(mine) / axis.size, full, rtol=1e-5, atol=1e-5)


def autocast_keeps_gradients(rank: int, world_size: int) -> None:
    """The comparison must not leave weights in autocast's cache: without gradients, in 16 bit."""
    axis = Axis("sequence", make_comm())
    model = gpt().train()
    apply_sequence_parallel(model, axis, blocks=model.blocks, head=model.head)
    with torch.autocast("cpu", torch.bfloat16):
        loss = gpt_loss(model, tokens(1), tokens(2))
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.dist
@pytest.mark.parametrize("body", [evaluation, lengths_interleave, autocast_keeps_gradients])
def test_on_two_ranks(body) -> None:
    spawn(body, 2, timeout_s=60)


def test_one_rank_changes_nothing() -> None:
    model = gpt()
    parallel = apply_sequence_parallel(model, Axis("sequence"), blocks=model.blocks, head=model.head)
    assert type(model(tokens())) is Tensor
    assert functional.scaled_dot_product_attention is TORCH_ATTENTION
    parallel.remove()
