"""Blocks that run on a rank's tokens compute what they compute on all of them; what cannot work is refused."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError
from ls_strategy.parallel.context.ulysses import SequenceParallel, apply_sequence_parallel
from ls_strategy.parallel.logits import ShardedLogits
from tests.unit.thread_ranks import ThreadAxis, on_ranks

ORIGINAL = functional.scaled_dot_product_attention
TOKENS, WIDTH, CLASSES = 8, 4, 5


@pytest.fixture(autouse=True)
def attention_restored() -> Iterator[None]:
    yield
    functional.scaled_dot_product_attention = ORIGINAL


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + positions
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.output(y.transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([block(), block()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, head: bool = True) -> Tensor:
        positions = torch.linspace(0, 1, x.shape[1])[:, None]
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x) if head else x


def hidden(tokens: int = TOKENS) -> Tensor:
    return torch.randn(2, tokens, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module) -> Tensor:
    return functional.cross_entropy(model(hidden()).flatten(0, 1), torch.arange(2 * TOKENS) % CLASSES)


def on_shards(body: Callable[[Net, SequenceParallel], Any], net: Callable[[], Net] = Net, **options: Any) -> list[Any]:
    """Run ``body`` on two ranks. Blocks are not checked: the check would need a rank's own default generator."""
    models = [net() for _ in range(2)]

    def on_rank(axis: ThreadAxis) -> Any:
        model = models[axis.rank]
        chosen = {"blocks": list(model.blocks), "head": model.head, "check": False, **options}
        return body(model, apply_sequence_parallel(model, axis, **chosen))

    return on_ranks(2, on_rank, "sequence")


@pytest.mark.parametrize("head", [True, False])
def test_the_loss_and_averaged_gradients_are_those_of_one_process(head: bool) -> None:
    """Without a head, tokens are gathered after the last block."""

    def run(model: Net) -> tuple[Tensor, list[Any]]:
        output = model(hidden(), head=head)
        if head:
            assert not isinstance(output, ShardedLogits) or output.local.shape == (2, TOKENS // 2, CLASSES)
        loss = loss_of(model) if head else output.square().sum()
        loss.backward()
        return (loss if head else output).detach(), [p.grad for p in model.parameters() if p.grad is not None]

    expected, gradients = run(Net())
    found = on_shards(lambda model, _: run(model), **({} if head else {"head": None}))
    assert not head or all(isinstance(y, ShardedLogits) for y in on_shards(lambda model, _: model(hidden())))
    for output, _ in found:
        torch.testing.assert_close(output, expected)
    for gradient, *grads in zip(gradients, *(grads for _, grads in found), strict=True):
        torch.testing.assert_close(sum(grads) / 2, gradient)


@pytest.mark.parametrize("tokens", [1, 3, 7])
def test_without_gradients_other_lengths_run_unsharded(tokens: int) -> None:
    def body(model: Net, _: SequenceParallel) -> Tensor:
        with torch.no_grad():
            return model(hidden(tokens))

    with torch.no_grad():
        expected = Net()(hidden(tokens))
    for output in on_shards(body):
        assert type(output) is Tensor
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("removed", [False, True], ids=["a copy", "after removal"])
def test_all_tokens_run_through(removed: bool) -> None:
    def body(model: Net, parallel: SequenceParallel) -> Tensor:
        if not removed:
            return copy.deepcopy(model)(hidden())
        parallel.remove()
        parallel.remove()
        assert "forward" not in vars(model.blocks[0])
        return model(hidden())

    for output in on_shards(body):
        torch.testing.assert_close(output, Net()(hidden()))


def test_one_rank_changes_nothing() -> None:
    model = Net()
    apply_sequence_parallel(model, Axis("sequence"), blocks=list(model.blocks), head=model.head)
    assert type(model(hidden())) is Tensor
    assert functional.scaled_dot_product_attention is ORIGINAL


@pytest.mark.parametrize(
    ("head", "expected"), [(True, "gathered in the loss of 'head'"), (False, "gathered after the last")]
)
def test_the_summary(head: bool, expected: str) -> None:
    options: dict[str, Any] = {} if head else {"head": None}
    for line in on_shards(lambda _, parallel: parallel.describe(), **options):
        assert line == f"tokens sharded over 2 ranks in 2 blocks (Block), {expected}"


# --- refusals ---------------------------------------------------------------------------------------------------------


def refusal(forward: Callable[[Net], Any], net: Callable[[], Net] = Net) -> str:
    def body(model: Net, _: SequenceParallel) -> str:
        with pytest.raises(PlanError) as caught:
            forward(model)
        return str(caught.value)

    first, second = on_shards(body, net)
    assert first == second
    return first


@pytest.mark.parametrize("tokens", [7, 2])
def test_tokens_that_cannot_be_sharded(tokens: int) -> None:
    message = refusal(lambda model: model(hidden(tokens)))
    assert message.startswith(f"{tokens} tokens cannot be sharded over the 2 ranks of the 'sequence' axis")


def test_a_block_that_drops_tokens() -> None:
    class Drops(Block):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return super().forward(x, positions)[:, :2]

    message = refusal(lambda model: model(hidden()), lambda: Net(Drops))
    assert "block 'blocks.0' got 4 of 8 tokens and returned a tensor of shape (2, 2, 4)" in message


def test_a_block_without_torchs_attention() -> None:
    class Own(Block):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            return x + (x @ x.transpose(1, 2)).softmax(-1) @ x

    message = refusal(lambda model: model(hidden()), lambda: Net(Own))
    assert "block 'blocks.0' is sharded along the tokens, but never called torch.nn.functional" in message


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_a_block_with_flex_attention() -> None:
    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    one_at_a_time = threading.Lock()  # ranks are threads here, and Dynamo of torch 2.11 crashes if two threads trace

    class Flex(Block):
        def forward(self, x: Tensor, positions: Tensor) -> Tensor:
            mask = create_block_mask(causal, None, None, x.shape[1], x.shape[1], device="cpu")
            with one_at_a_time:
                return x + flex_attention(x[:, None], x[:, None], x[:, None], block_mask=mask)[:, 0]  # type: ignore

    message = refusal(lambda model: model(hidden()), lambda: Net(Flex))
    assert "instead of flex_attention and its block mask: attn_mask, for documents" in message


def test_a_head_that_gets_some_tokens() -> None:
    class Last(Net):
        def forward(self, x: Tensor, head: bool = True) -> Tensor:
            return self.head(super().forward(x, head=False)[:, -1])

    message = refusal(lambda model: model(hidden()), Last)
    assert "head 'head' returned shape (2, 5), but each of 2 ranks has 4 of 8 tokens" in message


def test_blocks_that_are_called_outside_their_model() -> None:
    def twice(model: Net) -> None:
        positions = torch.linspace(0, 1, TOKENS)[:, None]
        model.blocks[0](hidden(), positions)
        model.blocks[0](hidden(TOKENS // 2), positions[: TOKENS // 2])

    message = refusal(twice)
    assert "the first block, 'blocks.0', got 4 tokens after a sequence of 8" in message


def test_a_model_without_blocks() -> None:
    with pytest.raises(PlanError, match="needs the transformer blocks of the model, but none were given"):
        apply_sequence_parallel(Net(), Axis("sequence"), blocks=[], head=None)


def test_another_attention_of_transformers() -> None:
    axis, model = Axis("sequence"), Net()
    axis.size = 2  # nothing may be sent
    model.blocks[0].config = SimpleNamespace(_attn_implementation="eager")  # type: ignore[assignment]
    with pytest.raises(PlanError, match=r"Block is set to attn_implementation='eager'. Load the model with"):
        apply_sequence_parallel(model, axis, blocks=list(model.blocks), head=None)
