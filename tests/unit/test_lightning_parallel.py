"""`ModelParallel`: batches that ranks of a replica compare, and the layer that makes logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ls_strategy.config import ParallelConfig
from ls_strategy.distributed.mesh import MeshShape
from ls_strategy.errors import PlanError, StateError
from ls_strategy.lightning.parallel import ModelParallel, _fingerprint
from ls_strategy.parallel.stack import head_after, one_stack


def parallel(rank: int = 0, *, theirs: Any = None, exchanged: list[int] | None = None, **sizes: int) -> ModelParallel:
    """Of two ranks, whose other one has the fingerprints ``theirs``."""
    made = ModelParallel(ParallelConfig(**sizes))
    shape = MeshShape.of(4, tensor=sizes.get("tensor", 1), sequence=sizes.get("context", 1))

    def exchange(mine: Any) -> list[Any]:
        if exchanged is not None:
            exchanged.append(1)
        return [mine, mine if theirs is None else theirs]

    world, model = SimpleNamespace(rank=rank, world_size=4), SimpleNamespace(exchange_objects=exchange)
    made.mesh = SimpleNamespace(shape=shape, world=world, model=model)  # type: ignore[assignment]
    return made


def test_equal_batches_pass() -> None:
    parallel(tensor=2).check_batch({"x": torch.ones(2), "names": ["a"]})


def test_different_batches_are_named_with_ranks_and_place() -> None:
    one = parallel(2, tensor=2, theirs=[("batch['x']", ("other",))])
    with pytest.raises(StateError, match=r"ranks 2 and 3 .* batch\['x'\] differs in batch 1 of this run"):
        one.check_batch({"x": torch.ones(2)})


def test_only_some_batches_are_compared() -> None:
    exchanged: list[int] = []
    one = parallel(tensor=2, exchanged=exchanged)
    for _ in range(200):
        one.check_batch(torch.ones(1))
    assert len(exchanged) == 8 + 2


def test_a_replica_of_one_rank_compares_nothing() -> None:
    exchanged: list[int] = []
    parallel(exchanged=exchanged).check_batch(torch.ones(1))
    assert exchanged == []


def test_replicas_and_their_first_ranks() -> None:
    assert [parallel(rank, tensor=2).data_rank for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [parallel(rank, tensor=2).first_rank for rank in range(4)] == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("sizes", "ranks", "shards"),
    [({}, 1, False), ({"tensor": 2, "context": 2}, 4, True), ({"expert": 2}, 1, True)],
    ids=str,
)
def test_what_is_partitioned(sizes: dict[str, int], ranks: int, shards: bool) -> None:
    made = ModelParallel(ParallelConfig(**sizes))
    assert (made.replica_ranks, made.shards) == (ranks, shards)


def test_workers_are_seeded_by_replica_alone() -> None:
    data = DataLoader([1, 2])  # type: ignore[arg-type]
    parallel(3, tensor=2).seed_workers(data)
    assert data.worker_init_fn.keywords == {"rank": 1}  # type: ignore[union-attr]
    own = DataLoader([1, 2], worker_init_fn=print)  # type: ignore[arg-type]
    parallel(3, tensor=2).seed_workers(own)
    assert own.worker_init_fn is print


@pytest.mark.parametrize(
    "other",
    [torch.tensor([1.0, 3.0]), torch.tensor([[1.0, 2.0]]), torch.tensor([1.0, 2.0], dtype=torch.float64)],
    ids=["value", "shape", "dtype"],
)
def test_fingerprints_tell_tensors_apart(other: torch.Tensor) -> None:
    tensor = torch.tensor([1.0, 2.0])
    assert _fingerprint(tensor) == _fingerprint(tensor.clone())
    assert _fingerprint(tensor) != _fingerprint(other)


def test_fingerprints_of_other_objects_are_values_or_types() -> None:
    assert _fingerprint("a") != _fingerprint("b")
    assert _fingerprint(np.ones(1)) == _fingerprint(np.zeros(1)) == "ndarray"


class Model(nn.Module):
    def __init__(self, *after: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.after = nn.ModuleList(after)


def test_the_head_is_the_only_linear_after_the_blocks() -> None:
    head = nn.Linear(2, 5)
    one = Model(nn.LayerNorm(2), head)
    assert head_after(one, list(one.blocks)) is head
    several = Model(nn.Linear(2, 2), head)
    assert head_after(several, list(several.blocks)) is None


def test_a_model_may_name_its_head() -> None:
    one = Model(nn.Linear(2, 2), nn.Linear(2, 5))
    one.get_output_embeddings = lambda: one.after[1]  # type: ignore[assignment]
    assert head_after(one, list(one.blocks)) is one.after[1]


def test_context_parallelism_needs_one_stack() -> None:
    with pytest.raises(PlanError, match=r"requires one stack of blocks.*found: none"):
        one_stack(nn.Linear(2, 2))
