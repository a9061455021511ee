"""Losses made by hand: micro-batches of a pipeline have the shares that make the loss that of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy import loss_is_mean_over
from ls_strategy.errors import StateError
from tests.unit.test_lightning_pipeline import Engine, Module, gradients, make, trainer

CLASSES, TOKENS, SAMPLES = 3, 4, 6
KEPT = (4, 1, 3, 4, 4, 2)
"""Tokens with a loss in every sample."""


class Net(Module):
    """Its loss is one of the functions below, of logits and a batch."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.loss = loss
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.seen: list[Any] = []
        self.prepare: Callable[[Tensor], Tensor] = lambda x: x
        for block in self.blocks:
            block.register_forward_pre_hook(lambda _, args, kwargs: (args, {}), with_kwargs=True)

    def forward(self, x: Tensor, number: Tensor | None = None) -> Tensor:  # type: ignore[override]
        for block in self.blocks:
            x = torch.tanh(block(x, number=number))
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        number = batch["mask"].sum() if self.loss is number_through_the_blocks else None
        return self.loss(self, self(self.prepare(batch["x"]), number), batch)

    validation_step = training_step


def batch_of(samples: int = SAMPLES) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, TOKENS, CLASSES, dtype=torch.float64, generator=rng)
    target = torch.randint(CLASSES, (samples, TOKENS), generator=rng)
    mask = torch.arange(TOKENS) < torch.tensor(KEPT[:samples])[:, None]
    return {"x": x, "target": target, "mask": mask, "ignored": target.where(mask, -100), "weight": mask.double()}


def per_token(logits: Tensor, batch: Any) -> Tensor:
    return functional.cross_entropy(logits.transpose(1, 2), batch["target"], reduction="none")


def both(
    loss: Callable[..., Any], prepare: Callable[[Tensor], Tensor] | None = None, **options: Any
) -> tuple[Net, Tensor, Net, Tensor]:
    """Return modules and losses: in a pipeline, and of the batch."""
    plain = Net(loss)
    plain.prepare = prepare or plain.prepare
    module = copy.deepcopy(plain)
    pipeline = make(module, on=trainer(), **{"micro_batches": 3, **options})
    found = pipeline.train(module, Engine(), module.training_step, (batch_of(), 0), last=True)  # type: ignore[arg-type]
    expected = plain.training_step(batch_of(), 0)
    expected.backward()
    return module, found, plain, expected


@pytest.fixture(autouse=True)
def same_random_numbers() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def of_tokens(m: Net, y: Tensor, b: Any) -> Tensor:
    return (per_token(y, b) * b["mask"]).sum() / b["mask"].sum()


def with_a_number(m: Net, y: Tensor, b: Any) -> Tensor:
    return (per_token(y, b) * b["mask"]).sum() / b["mask"].sum().item()


def times_the_inverse(m: Net, y: Tensor, b: Any) -> Tensor:
    return (1 / b["mask"].sum()) * (per_token(y, b) * b["weight"]).sum()


def at_least_one(m: Net, y: Tensor, b: Any) -> Tensor:
    return (per_token(y, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1)


def biased(m: Net, y: Tensor, b: Any) -> Tensor:
    """The numbers of the micro-batches do not add up to that of the batch."""
    return (per_token(y, b) * b["mask"]).sum() / (b["mask"].sum() + 8)


def weights_that_add_up_to_one(m: Net, y: Tensor, b: Any) -> Tensor:
    return (per_token(y, b) * (b["weight"] / b["weight"].sum())).sum()


def chosen(m: Net, y: Tensor, b: Any) -> Tensor:
    return functional.cross_entropy(y[b["mask"]], b["target"][b["mask"]])


def chosen_losses(m: Net, y: Tensor, b: Any) -> Tensor:
    return per_token(y, b)[b["mask"]].mean()


def chosen_by_a_function(m: Net, y: Tensor, b: Any) -> Tensor:
    return torch.masked_select(per_token(y, b), b["mask"]).mean()


def chosen_by_indices(m: Net, y: Tensor, b: Any) -> Tensor:
    return y.flatten(0, 1)[b["mask"].flatten().nonzero()[:, 0]].square().mean()


def set_to_zero(m: Net, y: Tensor, b: Any) -> Tensor:
    losses = per_token(y, b)
    losses[~b["mask"]] = 0
    return losses.sum() / b["mask"].sum()


def a_sum(m: Net, y: Tensor, b: Any) -> Tensor:
    return functional.cross_entropy(y.flatten(0, 1), b["ignored"].flatten(), reduction="sum")


def a_sum_over_a_constant(m: Net, y: Tensor, b: Any) -> Tensor:
    return per_token(y, b).sum() / 1024


def a_sum_over_samples(m: Net, y: Tensor, b: Any) -> Tensor:
    return per_token(y, b).sum() / len(y)


def a_mean_of_means(m: Net, y: Tensor, b: Any) -> Tensor:
    return ((per_token(y, b) * b["mask"]).sum(1) / b["mask"].sum(1)).mean()


def weighted(m: Net, y: Tensor, b: Any) -> Tensor:
    return torch.einsum("bt,bt->", per_token(y, b), b["weight"]) / b["weight"].sum() * m.scale


def two_terms(m: Net, y: Tensor, b: Any) -> Tensor:
    squares = (y.square().mean(-1) * b["mask"]).sum() / b["mask"].sum()
    return functional.cross_entropy(y.flatten(0, 1), b["ignored"].flatten()) + 0.1 * squares + 0.01 * m.scale.square()


def summed_up(m: Net, y: Tensor, b: Any) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    total += of_tokens(m, y, b)
    return total + sum([of_tokens(m, y, b), 2 * of_tokens(m, y, b)])


def in_a_list(m: Net, y: Tensor, b: Any) -> Tensor:
    losses = torch.zeros(2, dtype=torch.float64)
    losses[0] = of_tokens(m, y, b)
    losses[1] = of_tokens(m, y, b)
    return losses.sum() + torch.stack([of_tokens(m, y, b)] * 2).mean()


def number_through_the_blocks(m: Net, y: Tensor, b: Any) -> Tensor:
    """As transformers passes ``num_items_in_batch``."""
    return functional.cross_entropy(y.flatten(0, 1), b["ignored"].flatten(), reduction="sum") / b["mask"].sum()


def last_token(m: Net, y: Tensor, b: Any) -> Tensor:
    last = b["mask"].sum(1) - 1
    return functional.cross_entropy(y[torch.arange(len(y)), last], b["target"].gather(1, last[:, None])[:, 0])


def log_and_read(m: Net, y: Tensor, b: Any) -> Tensor:
    loss = of_tokens(m, y, b)
    m.seen.append(loss.item())
    m.log("read", 2 * loss.item())
    if loss.item() > 100 or loss.isnan():
        raise ValueError
    print(f"{loss.item():.3f}")
    return loss


def cut_to_the_longest(m: Net, y: Tensor, b: Any) -> Tensor:
    longest = int(b["mask"].sum(1).max())
    losses, mask = per_token(y, b)[:, :longest], b["mask"][:, :longest]
    return (losses * mask).sum() / mask.sum()


def lengths(m: Net, y: Tensor, b: Any) -> Tensor:
    return y.log_softmax(-1).gather(-1, b["target"][..., None])[..., 0].mul(b["mask"]).sum().neg() / b["mask"].sum()


def binary(m: Net, y: Tensor, b: Any) -> Tensor:
    return functional.binary_cross_entropy_with_logits(y[..., 0], b["weight"])


def divergence(m: Net, y: Tensor, b: Any) -> Tensor:
    return functional.kl_div(y.log_softmax(-1), b["x"].softmax(-1), reduction="batchmean")


def asks_first(m: Net, y: Tensor, b: Any) -> Tensor:
    loss = of_tokens(m, y, b)
    assert torch.isfinite(loss)
    if torch.isnan(loss):
        raise ValueError
    return loss


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(y, mask)
        return (y.square().sum(-1) * mask).sum() / mask.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        y, mask = ctx.saved_tensors
        return gradient * 2 * y * mask[..., None] / mask.sum(), None


def in_a_function(m: Net, y: Tensor, b: Any) -> Tensor:
    return Squares.apply(y, b["mask"])  # type: ignore[no-any-return]


RIGHT = [
    of_tokens, with_a_number, times_the_inverse, at_least_one, biased, weights_that_add_up_to_one, chosen,
    chosen_losses, chosen_by_a_function, chosen_by_indices, set_to_zero, a_sum, a_sum_over_a_constant,
    a_sum_over_samples, a_mean_of_means, weighted, two_terms, summed_up, in_a_list, log_and_read, cut_to_the_longest,
    number_through_the_blocks, last_token, lengths, binary, divergence, in_a_function, asks_first,
]  # fmt: skip


@pytest.mark.parametrize("loss", RIGHT)
def test_the_loss_and_its_gradients_are_those_of_the_batch(loss: Callable[..., Any]) -> None:
    """Micro-batches of 2, 2, 1 and 1 samples."""
    module, found, plain, expected = both(loss, micro_batches=4)
    assert found.item() == pytest.approx(expected.item(), rel=1e-7)  # it is returned in fp32
    for ours, theirs in zip(gradients(module), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mse": lambda y, b, **o: functional.mse_loss(y, b["x"], **o),
    "l1": lambda y, b, **o: functional.l1_loss(y, b["x"], **o),
    "smooth_l1": lambda y, b, **o: functional.smooth_l1_loss(y, b["x"], **o),
    "huber": lambda y, b, **o: functional.huber_loss(y, b["x"], **o),
    "bce": lambda y, b, **o: functional.binary_cross_entropy(y.sigmoid(), b["x"].sigmoid(), **o),
    "kl": lambda y, b, **o: functional.kl_div(y.log_softmax(-1), b["x"].softmax(-1), **o),
    "poisson": lambda y, b, **o: functional.poisson_nll_loss(y, b["x"].exp(), **o),
    "gaussian": lambda y, b, **o: functional.gaussian_nll_loss(y, b["x"], b["x"].exp(), **o),
    "soft_margin": lambda y, b, **o: functional.soft_margin_loss(y, b["x"].sign(), **o),
    "margin_ranking": lambda y, b, **o: functional.margin_ranking_loss(y, b["x"], b["x"].sign(), **o),
    "hinge": lambda y, b, **o: functional.hinge_embedding_loss(y, b["x"].sign(), **o),
    "cosine": lambda y, b, **o: functional.cosine_embedding_loss(y[:, 0], b["x"][:, 0], b["weight"][:, 0].sign(), **o),
    "triplet": lambda y, b, **o: functional.triplet_margin_loss(y[:, 0], y[:, 1], y[:, 2], **o),
    "multi_margin": lambda y, b, **o: functional.multi_margin_loss(y[:, 0], b["target"][:, 0], **o),
    "multilabel": lambda y, b, **o: functional.multilabel_soft_margin_loss(y[:, 0], b["x"][:, 0].sign().relu(), **o),
    "ctc": lambda y, b, **o: functional.ctc_loss(
        y.log_softmax(-1).transpose(0, 1), b["target"][:, :1] % 2 + 1, (TOKENS,) * len(y), (1,) * len(y), **o
    ),
    "probabilities": lambda y, b, **o: functional.cross_entropy(y[:, 0], b["x"][:, 0].softmax(-1), **o),
    "classes_count": lambda y, b, **o: functional.cross_entropy(
        y.flatten(0, 1), b["ignored"].flatten(), torch.arange(1.0, 4.0, dtype=torch.float64), **o
    ),
    "nll": lambda y, b, **o: functional.nll_loss(y.log_softmax(-1).flatten(0, 1), b["ignored"].flatten(), **o),
}


@pytest.mark.wide
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_torch_are_those_of_the_batch(name: str, reduction: str) -> None:
    if reduction == "none" and name in ("gaussian", "ctc"):
        pytest.skip("it needs values to compute shapes, and is refused")

    def loss(m: Net, y: Tensor, b: Any) -> Tensor:
        found = LOSSES[name](y, b, reduction=reduction)
        return found.mean() if reduction == "none" else found

    module, found, plain, expected = both(loss, micro_batches=4)
    assert found.item() == pytest.approx(expected.item(), rel=1e-7)
    for ours, theirs in zip(gradients(module), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


NOTHING = [of_tokens, with_a_number, times_the_inverse, at_least_one, weights_that_add_up_to_one, chosen, chosen_losses]


@pytest.mark.parametrize("loss", NOTHING)
def test_micro_batches_without_a_token_add_nothing(loss: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "KEPT", (4, 1, 3, 4, 0, 2))
    module, found, plain, expected = both(loss, micro_batches=4)
    assert found.item() == pytest.approx(expected.item(), rel=1e-7)
    for ours, theirs in zip(gradients(module), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("loss", [of_tokens, chosen])
def test_a_batch_without_a_token_has_no_loss(loss: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "KEPT", (0,) * SAMPLES)
    _, found, _, expected = both(loss, micro_batches=4)
    assert found.isnan()
    assert expected.isnan()


def root(m: Net, y: Tensor, b: Any) -> Tensor:
    return (y - b["x"]).square().mean().sqrt()


def contrastive(m: Net, y: Tensor, b: Any) -> Tensor:
    flat = y.flatten(1)
    return functional.cross_entropy(flat @ flat.T, torch.arange(len(y)))


def different_shares(m: Net, y: Tensor, b: Any) -> Tensor:
    return of_tokens(m, y, b) + y.square().mean()


def sum_and_regularizer(m: Net, y: Tensor, b: Any) -> Tensor:
    return per_token(y, b).sum() + m.scale.square()


def centered(m: Net, y: Tensor, b: Any) -> Tensor:
    return (y - y.mean(0)).square().mean()


def advantages(m: Net, y: Tensor, b: Any) -> Tensor:
    rewards = b["weight"].sum(1)
    return (y.mean((1, 2)) * (rewards - rewards.mean())).mean()


def hardest(m: Net, y: Tensor, b: Any) -> Tensor:
    return per_token(y, b).flatten().topk(3).values.mean()


def over_the_predicted(m: Net, y: Tensor, b: Any) -> Tensor:
    found = (y[..., 0] > 0).detach()
    return (per_token(y, b) * found).sum() / found.sum()


def other_half(m: Net, y: Tensor, b: Any) -> Tensor:
    first, second = y.chunk(2)
    return (first - second).square().mean()


def neighbours(m: Net, y: Tensor, b: Any) -> Tensor:
    return (y - y.roll(1, 0)).square().mean()


def delayed(m: Net, y: Tensor, b: Any) -> Tensor:
    return (y[1:] - y[:-1]).square().mean()


def softmax_over_samples(m: Net, y: Tensor, b: Any) -> Tensor:
    return (y.softmax(0) * b["x"]).sum()


def distances(m: Net, y: Tensor, b: Any) -> Tensor:
    return functional.pdist(y.flatten(1)).mean()


def first_sample(m: Net, y: Tensor, b: Any) -> Tensor:
    return per_token(y, b)[0].mean()


def order(m: Net, y: Tensor, b: Any) -> Tensor:
    return (y[torch.arange(len(y)).flip(0)] * b["x"]).mean()


WRONG = {
    other_half: r"chunk\(\) of different samples",
    neighbours: r"roll\(\) of different samples",
    delayed: r"getitem\(\) of different samples",
    softmax_over_samples: r"softmax\(\) of different samples",
    distances: r"pdist\(\) of different samples",
    first_sample: r"getitem\(\) of different samples",
    order: "rows that depend on other rows",
    root: r"sqrt\(\)",
    contrastive: r"matmul\(\) of different samples",
    different_shares: "different shares",
    sum_and_regularizer: "different shares",
    centered: r"sub\(\) of single samples and of a value over all samples",
    advantages: "rows that depend on other rows",
    hardest: r"topk\(\) of different samples",
    over_the_predicted: r"div\(\) of a value over all samples",
}


@pytest.mark.parametrize("loss", WRONG)
def test_what_does_not_follow_from_micro_batches_is_refused(loss: Callable[..., Any]) -> None:
    with pytest.raises(StateError, match=rf"{WRONG[loss]}.*micro_batches=1"):
        both(loss)
    _, found, _, expected = both(loss, micro_batches=1)
    assert found.item() == pytest.approx(expected.item(), rel=1e-7)


def test_inputs_that_are_normalized_over_the_batch_are_refused() -> None:
    with pytest.raises(StateError, match="rows that depend on other rows"):
        both(of_tokens, lambda x: (x - x.mean(0)) / x.std(0))


def test_inputs_that_are_scaled_or_cut_alone_are_not_refused() -> None:
    for prepare in (lambda x: x / x.norm(dim=-1, keepdim=True), lambda x: x.flip(0).flip(0), lambda x: x[:, :TOKENS]):
        _, found, _, expected = both(of_tokens, prepare)
        assert found.item() == pytest.approx(expected.item(), rel=1e-7)


def counts_predictions(m: Net, y: Tensor, b: Any) -> Tensor:
    assert int((y[..., 0] > 0).sum()) >= 0  # a number that is not known
    return (per_token(y, b) * b["mask"]).sum() / b["mask"].sum()


def test_what_cannot_be_followed_is_refused_unless_it_is_declared() -> None:
    with pytest.raises(StateError, match=r"loss_is_mean_over\(number\)"):
        both(counts_predictions)

    def prepare(x: Tensor) -> Tensor:
        rows = (x[:, None] == batch_of()["x"][None]).all((-1, -2))
        loss_is_mean_over((rows[..., None] & batch_of()["mask"]).sum())
        return x

    module, found, plain, expected = both(counts_predictions, prepare)
    assert found.item() == pytest.approx(expected.item(), rel=1e-7)
    for ours, theirs in zip(gradients(module), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_a_loss_of_torch_is_enough_where_the_step_cannot_be_followed() -> None:
    def loss(m: Net, y: Tensor, b: Any) -> Tensor:
        found = functional.cross_entropy(y.flatten(0, 1), b["ignored"].flatten())
        assert int(y.numel() * found) >= 0
        return found

    _, found, _, expected = both(loss)
    assert found.item() == pytest.approx(expected.item(), rel=1e-7)


# --- what steps leave -------------------------------------------------------------------------------------------------


def logs(m: Net, y: Tensor, b: Any) -> dict[str, Tensor]:
    values = {
        "tokens": of_tokens(m, y, b),
        "twice": 2 * of_tokens(m, y, b).detach(),
        "right": (y.argmax(-1) == b["target"]).double().mean(),
        "right_of_tokens": ((y.argmax(-1) == b["target"]) & b["mask"]).sum() / b["mask"].sum(),
        "sum": per_token(y, b).sum(),
    }
    for name, value in values.items():
        m.log(name, value)
    m.log("read", values["tokens"].item())
    print("a line")
    m.seen.append(len(y))
    m.counts["steps"] = m.counts.get("steps", 0) + 1
    return {"loss": values["tokens"], **values}


@pytest.mark.parametrize("training", [True, False])
def test_values_that_are_logged_and_returned_are_those_of_the_batch(
    training: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Runs on shapes leave nothing: no line, no element of a list or dict."""
    plain, module = Net(logs), Net(logs)
    plain.counts, module.counts = {}, {}
    expected = plain.training_step(batch_of(), 0)
    pipeline = make(module, on=trainer(), micro_batches=4)
    capsys.readouterr()
    if training:
        pipeline.train(module, Engine(), module.training_step, (batch_of(), 0), last=True)  # type: ignore[arg-type]
    else:
        found = pipeline.evaluate(module, module.validation_step, (batch_of(), 0))
        assert {name: value.item() for name, value in found.items()} == pytest.approx(
            {name: value.item() for name, value in expected.items()}, rel=1e-12
        )
    for name, (value, _) in module.logged.items():
        same = "tokens" if name == "read" else name
        assert value.item() == pytest.approx(expected[same].item(), rel=1e-6), name  # it is logged in fp32
    assert capsys.readouterr().out == "a line\n" * 4
    assert module.seen == [2, 2, 1, 1]
    assert module.counts == {"steps": 4}


# --- random numbers ---------------------------------------------------------------------------------------------------


def drawn_mask(m: Net, y: Tensor, b: Any) -> Tensor:
    mask = torch.rand(y.shape[:2]) < 0.5
    mask[:, 0] = True
    m.seen.append((per_token(y, b), mask))
    return (per_token(y, b) * mask).sum() / mask.sum()


def test_tokens_that_are_drawn_are_counted() -> None:
    module, found, _, _ = both(drawn_mask)
    seen = module.seen[-3:]  # those of the micro-batches; runs on shapes leave nothing
    assert len(module.seen) == 3
    total = sum((losses * mask).sum() for losses, mask in seen) / sum(mask.sum() for _, mask in seen)
    assert found.item() == pytest.approx(total.item(), rel=1e-7)


def mixed_samples(m: Net, y: Tensor, b: Any) -> Tensor:
    share, order = torch.rand(()), torch.randperm(len(y))
    other = functional.cross_entropy(y.transpose(1, 2), b["target"][order])
    return share * functional.cross_entropy(y.transpose(1, 2), b["target"]) + (1 - share) * other


def noisy(m: Net, y: Tensor, b: Any) -> Tensor:
    return (y - torch.randn_like(b["x"])).square().mean()


@pytest.mark.parametrize("loss", [mixed_samples, noisy])
def test_random_losses_are_averaged_by_samples(loss: Callable[..., Any]) -> None:
    module = Net(loss)
    pipeline = make(module, on=trainer(), micro_batches=4)
    seen: list[Tensor] = []

    def step(batch: Any, batch_idx: int) -> Tensor:
        seen.append(module.training_step(batch, batch_idx).detach())
        return seen[-1] * module.scale

    found = pipeline.train(module, Engine(), step, (batch_of(), 0), last=True)  # type: ignore[arg-type]
    expected = sum(value * share for value, share in zip(seen[-4:], (2 / 6, 2 / 6, 1 / 6, 1 / 6), strict=True))
    assert found.item() == pytest.approx(expected.item(), rel=1e-7)  # type: ignore[union-attr]
