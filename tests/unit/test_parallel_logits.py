"""Sharded logits: what stays sharded, what is gathered, and what raises an error."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import StateError
from ls_strategy.parallel.logits import ShardedLogits, gather, wrap_sequence, wrap_vocabulary
from tests.unit.thread_ranks import Rank, ThreadAxis, on_ranks

BATCH, TOKENS, CLASSES = 2, 4, 5
FULL = torch.randn(BATCH, TOKENS, CLASSES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def by_vocabulary(axis: Axis) -> ShardedLogits:
    """The shard of one of two ranks: 3 columns, or 2."""
    start, length = ((0, 3), (3, 2))[axis.rank]
    result = wrap_vocabulary(FULL.narrow(-1, start, length), axis, CLASSES, start)
    assert isinstance(result, ShardedLogits)
    return result


def by_tokens(axis: Axis) -> ShardedLogits:
    result = wrap_sequence(FULL.chunk(2, 1)[axis.rank], axis, TOKENS)
    assert isinstance(result, ShardedLogits)
    return result


STAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "scale": lambda x: x * 2,
    "reversed": lambda x: 1 - x,
    "flatten": lambda x: x.flatten(0, 1),
    "slice": lambda x: x[:, 1:3],
    "new dimension": lambda x: x[..., None, :],
    "transpose": lambda x: x.transpose(1, 2),
    "shift": lambda x: x[..., :-1, :].contiguous(),
    "data": lambda x: x.data,
}
GATHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(-1),
    "mask": lambda x: x[torch.tensor([1])],
    "sum of two": lambda x: x + x,
    "cat": lambda x: torch.cat([x, x], 1),
    "step": lambda x: x[:, ::2, ::2],
    "across": lambda x: x.reshape(-1, 8),
}


@pytest.mark.parametrize("shard", [by_vocabulary, by_tokens])
@pytest.mark.parametrize("name", STAYS)
def test_these_stay_sharded_without_communication(name: str, shard: Callable[[Axis], ShardedLogits]) -> None:
    result = STAYS[name](shard(Rank(0, 2)))
    assert isinstance(result, ShardedLogits)
    assert result.shape == STAYS[name](FULL).shape


@pytest.mark.parametrize("shard", [by_vocabulary, by_tokens])
@pytest.mark.parametrize("name", [*STAYS, *GATHERS])
def test_values_are_those_of_full_logits(name: str, shard: Callable[[Axis], ShardedLogits]) -> None:
    operation = {**STAYS, **GATHERS}[name]
    for result in on_ranks(2, lambda axis: gather(operation(shard(axis)))):
        assert type(result) is Tensor
        torch.testing.assert_close(result, operation(FULL))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("shard", [by_vocabulary, by_tokens])
def test_argmax_is_a_plain_tensor(dim: int, shard: Callable[[Axis], ShardedLogits]) -> None:
    for result in on_ranks(2, lambda axis: shard(axis).argmax(dim)):
        assert torch.equal(result, FULL.argmax(dim))


def test_argmax_of_the_vocabulary_sends_no_logits() -> None:
    def body(axis: ThreadAxis) -> list[str]:
        by_vocabulary(axis).argmax(-1)
        return axis.calls

    assert on_ranks(2, body) == [["all_gather"] * 2] * 2


def test_a_loss_is_that_of_full_logits() -> None:
    target = torch.arange(BATCH * TOKENS) % CLASSES
    expected = functional.cross_entropy(FULL.flatten(0, 1), target)
    for loss in on_ranks(2, lambda axis: functional.cross_entropy(by_vocabulary(axis).flatten(0, 1), target)):
        torch.testing.assert_close(loss, expected)


def test_gather_looks_into_dataclasses_and_copies_them() -> None:
    @dataclasses.dataclass(frozen=True)
    class Output:
        logits: Any
        loss: float

    def body(axis: ThreadAxis) -> None:
        output = Output(by_vocabulary(axis), 1.0)
        gathered = gather({"output": [output]})["output"][0]
        assert torch.equal(gathered.logits, FULL)
        assert isinstance(output.logits, ShardedLogits)

    on_ranks(2, body)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: x.__setitem__(0, 0),
        lambda x: x.retain_grad(),
        lambda x: x.data_ptr(),
        lambda x: functional.relu(x, inplace=True),
        lambda x: torch.mul(x, 2, out=x),
        pickle.dumps,
    ],
    ids=["in place", "item", "retain_grad", "data_ptr", "inplace", "out", "pickle"],
)
def test_what_would_act_on_a_copy_is_refused(change: Callable[[Tensor], Any]) -> None:
    with pytest.raises(StateError, match=r"sharded over ranks.*ls_strategy.parallel.logits.gather"):
        change(by_vocabulary(Rank(0, 2)))


def test_a_description_sends_nothing() -> None:
    expected = "ShardedLogits(shape=(2, 4, 5), dtype=torch.float64, shard of test rank 1 of 2 along dimension 2)"
    assert f"{by_vocabulary(Rank(1, 2))}" == expected


def test_a_deep_copy_has_its_own_memory() -> None:
    logits = by_vocabulary(Rank(0, 2))
    copied = copy.deepcopy(logits)
    copied.local.zero_()
    assert torch.equal(logits.local, FULL[..., :3])


def test_one_rank_has_plain_logits() -> None:
    logits = torch.randn(2, 3, 5)
    assert wrap_vocabulary(logits, Axis("tensor"), 5, 0) is logits
    assert wrap_sequence(logits, Axis("sequence"), 3) is logits
    assert gather({"logits": logits})["logits"] is logits


def test_shards_of_unexpected_size_are_refused() -> None:
    with pytest.raises(ValueError, match="equal shards give it 7 from 0 on"):
        wrap_vocabulary(torch.randn(2, 6), Rank(0, 2), 13, 0)
    with pytest.raises(ValueError, match="every rank must hold the same number"):
        wrap_sequence(torch.randn(2, 3, 5), Rank(0, 2), 7)
