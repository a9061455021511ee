"""Cross-entropy from shards of the logits is torch's, in every reduction, and leaves to torch what it cannot do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ls_strategy.distributed.axis import Axis
from ls_strategy.parallel.cross_entropy import Options, TokenLoss, cross_entropy, token_losses
from ls_strategy.parallel.dim_shard import DimShard
from tests.unit.thread_ranks import ThreadAxis, on_ranks

TOKENS, CLASSES = 6, 5
TARGET = torch.tensor([0, 4, -100, 3, 2, 2])


def logits() -> Tensor:
    return 3 * torch.randn(TOKENS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def on_shards(dim: int, sizes: tuple[int, ...], target: Tensor = TARGET, weight: Any = None, **options: Any) -> Any:
    """``(loss, gradient of the local logits)`` of every rank."""

    def body(axis: ThreadAxis) -> Any:
        shard = DimShard(axis, dim, sizes, averaged=dim == 0)
        local = shard.shard(logits()).requires_grad_()
        loss = cross_entropy(logits(), local, [shard], target, weight, Options(**options))
        return loss.detach(), torch.autograd.grad(loss.sum(), local)[0]

    return on_ranks(len(sizes), body)


def expected(target: Tensor = TARGET, weight: Any = None, **options: Any) -> tuple[Tensor, Tensor]:
    x = logits().requires_grad_()
    loss = functional.cross_entropy(x, target, weight, **options)
    return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_loss_of_all_columns_is_torchs(dtype, smoothing) -> None:
    torch.manual_seed(0)
    logits = (5 * torch.randn(6, 13)).to(dtype).requires_grad_()
    target = torch.tensor([0, 12, -100, 3, 7, 7])
    weight = torch.rand(6, dtype=torch.float64)
    loss = token_losses(logits, target, TokenLoss(Axis("alone"), 0, 13, smoothing=smoothing))
    (grad,) = torch.autograd.grad((loss * weight).sum(), logits)
    exact = logits.detach().double().requires_grad_()
    expected = functional.cross_entropy(exact, target, reduction="none", label_smoothing=smoothing)
    (expected_grad,) = torch.autograd.grad((expected * weight).sum(), exact)
    limit = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-6}[dtype]
    assert ((loss - expected).abs().max() / expected.max()).item() < limit
    limit = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 2**-8}[dtype]  # the gradient is in 16 bit
    assert ((grad - expected_grad).abs().max() / expected_grad.abs().max()).item() < limit


def test_a_target_out_of_range_is_not_a_number() -> None:
    loss = token_losses(torch.randn(2, 5), torch.tensor([5, 1]), TokenLoss(Axis("alone"), 0, 5))
    assert loss.isnan().tolist() == [True, False]


WAYS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.2},
    {"ignore_index": 2},
    {"weight": torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)},
]


@pytest.mark.parametrize("options", WAYS, ids=lambda o: ",".join(o) or "mean")
@pytest.mark.parametrize(("dim", "sizes"), [(1, (3, 2)), (1, (5, 0)), (0, (3, 3))])
def test_the_loss_and_the_gradient_of_shards(dim, sizes, options) -> None:
    """Along the tokens every rank gives ``size`` times its gradient, since these are averaged."""
    target = TARGET.clamp(min=0) if "ignore_index" in options else TARGET
    found = on_shards(dim, sizes, target, **options)
    loss, grad = expected(target, **options)
    for mine, _ in found:
        torch.testing.assert_close(mine, loss, rtol=1e-12, atol=1e-12)
        assert torch.equal(mine, found[0][0]), "all ranks have the same bits"
    scale = len(sizes) if dim == 0 else 1
    grads = torch.cat([grad for _, grad in found], dim)
    torch.testing.assert_close(grads, scale * grad, rtol=1e-12, atol=1e-12)


def possible(target: Tensor = TARGET, weight: Any = None, **options: Any) -> bool:
    shard = DimShard(Axis("alone"), 1, (CLASSES,), averaged=False)
    return cross_entropy(logits(), logits(), [shard], target, weight, Options(**options)) is not NotImplemented


@pytest.mark.parametrize(
    "options",
    [
        {"target": logits().softmax(1)},
        {"size_average": False},
        {"reduce": True},
        {"reduction": "batchmean"},
        {"weight": torch.ones(CLASSES), "label_smoothing": 0.1},
        {"weight": torch.ones(CLASSES, requires_grad=True)},
    ],
    ids=["probabilities", "size_average", "reduce", "batchmean", "weights with smoothing", "trained weights"],
)
def test_only_class_indices_with_plain_options_are_not_left_to_torch(options) -> None:
    assert possible()
    assert not possible(**options)


def test_classes_that_share_a_dimension_are_left_to_torch() -> None:
    shard = DimShard(Axis("alone"), 1, (CLASSES,), averaged=False, inner=2)
    assert cross_entropy(logits(), logits(), [shard], TARGET, None, Options()) is NotImplemented


def test_a_target_out_of_range_raises_torchs_error() -> None:
    with pytest.raises(IndexError, match="Target 5 is out of bounds"):
        possible(torch.tensor([0, 5, 0, 0, 0, 0]))
