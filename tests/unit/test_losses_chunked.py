"""Cross-entropy in chunks: the same loss and gradients as with all logits, which are never held."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy import RecomputeConfig, linear_cross_entropy
from ls_strategy.activations.recompute import apply_recompute
from ls_strategy.errors import PlanError, StateError
from ls_strategy.losses.deferred import DeferredLogits, computed, defer
from ls_strategy.losses.head import ChunkedHeads
from tests.live_bytes import LiveBytes

N, D, V = 50, 12, 37


def tensors(dtype: torch.dtype = torch.float64, *, bias: bool = False) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(3)
    hidden = torch.randn(N, D, dtype=dtype)
    weight = torch.randn(V, D, dtype=dtype)
    target = torch.randint(V, (N,))
    target[::7] = -100
    return hidden, weight, torch.randn(V, dtype=dtype) if bias else None, target


def results(loss_of: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    """Return the loss and all gradients."""
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    loss = loss_of(*leaves)
    (loss * torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape)).sum().backward()
    return [loss.detach(), *(t.grad for t in leaves)]


def error(found: list[Tensor], expected: list[Tensor]) -> float:
    return max(
        float((a.double() - b.double()).norm() / b.double().norm()) for a, b in zip(found, expected, strict=True)
    )


LOSSES = {
    "mean": lambda x, t: functional.cross_entropy(x, t),
    "sum": lambda x, t: functional.cross_entropy(x, t, reduction="sum"),
    "none": lambda x, t: functional.cross_entropy(x, t, reduction="none"),
    "smoothing": lambda x, t: functional.cross_entropy(x, t, label_smoothing=0.1),
    "ignored": lambda x, t: functional.cross_entropy(x, t.clamp(min=0), ignore_index=5),
    "class weights": lambda x, t: functional.cross_entropy(x, t, torch.linspace(1, 2, V, dtype=x.dtype)),
    "module": lambda x, t: nn.CrossEntropyLoss()(x, t),
    "cap": lambda x, t: functional.cross_entropy(5 * torch.tanh(x / 5), t),
    "temperature": lambda x, t: functional.cross_entropy(x.div(0.7).sub(1), t),
    "shape": lambda x, t: functional.cross_entropy(x.view(5, 10, V).transpose(1, 2), t.view(5, 10)),
    "shift": lambda x, t: functional.cross_entropy(x.view(5, 10, V)[:, 1:].flatten(0, 1), t.view(5, 10)[:, 1:].ravel()),
    "selected": lambda x, t: functional.cross_entropy(x[t != -100], t[t != -100]),
    "z loss": lambda x, t: functional.cross_entropy(x, t) + 0.1 * x.logsumexp(-1).square().mean(),
    "log softmax": lambda x, t: functional.nll_loss(x.log_softmax(-1), t),
    "probabilities": lambda x, t: functional.cross_entropy(x, functional.one_hot(t.clamp(min=0), V).to(x.dtype)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_losses_and_gradients_are_those_of_all_logits(name, bias, dtype):
    hidden, weight, b, target = tensors(dtype, bias=bias)
    loss = LOSSES[name]
    expected = results(lambda h, w, b=None: loss(functional.linear(h, w, b), target), hidden, weight, b)
    found = results(lambda h, w, b=None: loss(defer(h, w, b, chunk_bytes=4 * V * 8), target), hidden, weight, b)
    assert error(found, expected) <= (1e-12 if dtype == torch.float64 else 1e-6)
    assert found[0].dtype == expected[0].dtype


@pytest.mark.parametrize("name", ["mean", "cap", "smoothing"])
@pytest.mark.parametrize("mode", ["bf16", "fp16", "autocast"])
def test_in_16_bits_the_error_is_at_most_twice_that_of_all_logits(name, mode):
    hidden, weight, _, target = tensors(torch.float32)
    trusted = results(
        lambda h, w: LOSSES[name](functional.linear(h, w), target), hidden.double(), weight.double(), None
    )
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "autocast": torch.float32}[mode]

    def run(product: Any) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            leaves = [t.to(dtype).requires_grad_() for t in (hidden, weight)]
            loss = LOSSES[name](product(*leaves).float(), target)
        loss.backward()
        return [loss.detach(), *(t.grad for t in leaves)]

    plain, chunked = run(functional.linear), run(lambda h, w: defer(h, w, chunk_bytes=4 * V * 8))
    for a, b, c in zip(plain, chunked, trusted, strict=True):
        assert a.dtype == b.dtype
        assert error([b], [c]) <= 2 * error([a], [c]) + 1e-6


@pytest.mark.parametrize("given", ["module", "weight"])
def test_the_function_is_the_loss_with_all_logits(given):
    hidden, weight, bias, target = tensors(bias=given == "module")
    layer = nn.Linear(D, V, bias=given == "module", dtype=torch.float64)

    def run(loss: Any) -> list[Tensor]:
        layer.weight.data.copy_(weight)
        if bias is not None:
            layer.bias.data.copy_(bias)
        layer.zero_grad()
        h = hidden.clone().requires_grad_()
        value = loss(h)
        value.backward()
        return [value.detach(), h.grad, *(p.grad.clone() for p in layer.parameters())]

    def plain(h: Tensor) -> Tensor:
        x = layer(h)
        z = x.logsumexp(-1).square()[target != -100].mean()
        return functional.cross_entropy(x, target, label_smoothing=0.1) + 0.01 * z

    head = layer if given == "module" else layer.weight
    found = run(lambda h: linear_cross_entropy(h, head, target, label_smoothing=0.1, z_loss=0.01))
    assert error(found, run(plain)) <= 1e-12
    assert "forward" not in vars(layer)


def peak_bytes(run: Any) -> int:
    with LiveBytes() as live:
        run()
    return live.peak


def test_the_loss_holds_less_than_an_eighth_of_the_logits():
    tokens, columns, width = 4096, 4096, 16
    layer = nn.Linear(width, columns, bias=False)
    hidden = torch.randn(tokens, width, requires_grad=True)
    target = torch.randint(columns, (tokens,))

    def run() -> None:
        linear_cross_entropy(hidden, layer, target).backward()

    run()
    logits = 4 * tokens * columns
    assert peak_bytes(run) <= logits / 8
    assert peak_bytes(lambda: functional.cross_entropy(layer(hidden), target).backward()) >= logits


class Model(nn.Module):
    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(V, D)
        self.head = nn.Linear(D, V, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_needs_no_change(tied):
    model, tokens = Model(tied), torch.randint(V, (4, 16))

    def run() -> list[Tensor]:
        model.zero_grad()
        logits = model(tokens)
        loss = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    expected = run()
    heads = ChunkedHeads(model, chunk_bytes=4 * V)
    assert type(model(tokens)) is DeferredLogits
    assert error(run(), expected) <= 1e-6
    copied = copy.deepcopy(model)
    assert type(copied(tokens)) is Tensor
    heads.remove()
    assert type(model(tokens)) is Tensor


def test_models_of_transformers_need_no_change():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    for kind, options in (
        ("Llama", {"tie_word_embeddings": True}),
        ("Gemma2", {"final_logit_softcapping": 2.0}),  # logits are divided, capped by tanh, and multiplied
    ):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **options)
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        tokens = torch.randint(40, (3, 17))
        labels = tokens.masked_fill(torch.rand(3, 17) < 0.2, -100)

        def run(model: Any = model, tokens: Tensor = tokens, labels: Tensor = labels) -> tuple[list[Tensor], Tensor]:
            model.zero_grad()
            output = model(tokens, labels=labels)
            output.loss.backward()
            return [output.loss.detach(), *(p.grad.clone() for p in model.parameters())], output.logits

        expected, logits = run()
        assert type(logits) is Tensor
        chunked = ChunkedHeads(model, chunk_bytes=4 * 40 * 5)
        found, deferred = run()
        assert type(deferred) is DeferredLogits
        assert deferred._full is None
        assert error(found, expected) <= 1e-6
        torch.testing.assert_close(deferred.detach().clone() + 0, logits.detach())
        with torch.no_grad():  # tokens of a continuation are few, so their logits are computed at once
            new = model.generate(tokens[:1, :3], max_new_tokens=4, do_sample=False)
        chunked.remove()
        assert torch.equal(new, model.generate(tokens[:1, :3], max_new_tokens=4, do_sample=False))


def test_what_else_is_done_with_logits_gives_the_same():
    hidden, weight, bias, _ = tensors(bias=True)
    plain = functional.linear(hidden, weight, bias)
    for act in (
        lambda x: x.softmax(-1), lambda x: x.argmax(-1), lambda x: x[3], lambda x: x[..., 5], lambda x: x[:, 2:4],
        lambda x: torch.cat([x, x]), lambda x: x.max(1).values, lambda x: x.argmax(-1, keepdim=True), lambda x: x.T,
        lambda x: x.masked_fill(x > 0, 0), lambda x: x + x, lambda x: x[torch.arange(3)], lambda x: x[None, :, None],
        lambda x: x.topk(3).values, lambda x: x.logsumexp(0), lambda x: x.detach().numpy(), lambda x: x.tolist(),
        lambda x: x.mean(), lambda x: x.view(-1), lambda x: copy.deepcopy(x.detach()), lambda x: x.to(torch.float32),
    ):  # fmt: skip
        found = act(defer(hidden, weight, bias, chunk_bytes=4 * V))
        found = torch.as_tensor(computed(found))
        torch.testing.assert_close(found, torch.as_tensor(act(plain)), rtol=1e-12, atol=1e-12)


def test_gradients_survive_a_first_use_without():
    hidden, weight, _, target = tensors()
    leaf = weight.clone().requires_grad_()
    logits = defer(hidden, leaf, chunk_bytes=4 * V)
    with torch.no_grad():
        assert not logits.softmax(-1).requires_grad
    functional.cross_entropy(logits, target).backward()
    expected = weight.clone().requires_grad_()
    functional.cross_entropy(hidden @ expected.T, target).backward()
    assert error([leaf.grad], [expected.grad]) <= 1e-12


def test_changes_in_place_count_or_are_refused():
    hidden, weight, _, target = tensors()
    logits = defer(hidden, weight, chunk_bytes=4 * V)
    logits[:, 3] = -1e9
    plain = hidden @ weight.T
    plain[:, 3] = -1e9
    torch.testing.assert_close(functional.cross_entropy(logits, target), functional.cross_entropy(plain, target))
    logits = defer(hidden, weight, chunk_bytes=4 * V)
    flat = logits.view(-1, V)
    with pytest.raises(StateError, match="out of place"):
        logits[:, 3] = -1e9
    assert flat.shape == (N, V)


def test_logits_of_an_earlier_step_are_refused():
    model, tokens = Model(), torch.randint(V, (2, 8))
    heads = ChunkedHeads(model, chunk_bytes=4 * V)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    used, unused = model(tokens), model(tokens)
    early = used.softmax(-1)
    early.sum().backward()
    optimizer.step()
    assert torch.equal(used.softmax(-1), early)
    with pytest.raises(StateError, match="before the optimizer step"):
        unused.sum()
    heads.remove()


def test_what_cannot_be_is_refused():
    hidden, weight, _, target = tensors()
    with pytest.raises(PlanError, match=r"activations\.loss\.head"):
        ChunkedHeads(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(PlanError, match="no module of that name"):
        ChunkedHeads(Model(), "lm")
    with pytest.raises(PlanError, match="index of one class"):
        linear_cross_entropy(hidden, weight, target[:3])
    with pytest.raises(IndexError):
        linear_cross_entropy(hidden, weight, target.masked_fill(target == -100, V))


def test_nothing_is_written_about_it():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = Model()
        heads = ChunkedHeads(model)
        assert heads.describe() == "logits of 'head' computed in chunks by the loss"
        heads.remove()


def test_selective_recompute_keeps_unchanged_products():
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(D, V, dtype=torch.float64)

        def forward(self, hidden: Tensor, target: Tensor) -> Tensor:
            return linear_cross_entropy(hidden, self.head, target)

    torch.manual_seed(0)
    model, (hidden, _, _, target) = nn.ModuleDict({"loss": Loss()}), tensors()

    def run() -> list[Tensor]:
        model.zero_grad()
        leaf = hidden.clone().requires_grad_()
        loss = model["loss"](leaf, target)
        loss.backward()
        return [loss.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())]

    expected = run()
    recompute = apply_recompute(model, RecomputeConfig(policy="selective", block_classes=("Loss",)))
    assert error(run(), expected) <= 1e-12
    recompute.remove()
