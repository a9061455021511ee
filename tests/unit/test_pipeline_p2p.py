"""Point-to-point communication of a pipeline, with queues in place of process groups."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ls_strategy.distributed.comm import make_comm
from ls_strategy.distributed.mesh import MeshShape, make_mesh
from ls_strategy.errors import PlanError, StateError
from ls_strategy.parallel.pipeline import p2p
from ls_strategy.parallel.pipeline.p2p import LOOKAHEAD, PointToPoint, Shapes, make_links
from ls_strategy.parallel.pipeline.schedules import Action, make_table
from ls_strategy.parallel.pipeline.transfer import StageTransfer
from ls_strategy.testing import spawn

TABLE = make_table("gpipe", 2, 4)


class Queues:
    """Links of one rank: what is sent lies in a queue until its receive is waited for."""

    def __init__(self, rank: int, queues: dict[Any, deque[Tensor]]) -> None:
        self.comm = SimpleNamespace(rank=rank, wait=lambda works: [work() for work in works])
        self.rank, self.queues = rank, queues
        self.posted = 0
        self.waited = 0

    def _queue(self, *key: Any) -> deque[Tensor]:
        return self.queues.setdefault(key, deque())

    def send(self, tensors: list[Tensor], to: int, _: str) -> list[Any]:
        self._queue(self.rank, to).extend(t.clone() for t in tensors)

        def wait() -> None:
            self.waited += 1

        return [wait]

    def receive(self, tensors: list[Tensor], source: int) -> list[Any]:
        self.posted += 1
        return [lambda t=t: t.copy_(self._queue(source, self.rank).popleft()) for t in tensors]

    def send_header(self, header: Tensor, to: int) -> Any:
        self._queue("header", self.rank, to).append(header)
        return lambda: None

    def receive_header(self, source: int) -> Tensor:
        return self._queue("header", source, self.rank).popleft()


@pytest.fixture
def ends() -> tuple[Any, Any]:
    """Both ranks of one run in which all micro-batches have the same key."""
    queues: dict[Any, deque[Tensor]] = {}
    return tuple(PointToPoint(Queues(r, queues), TABLE, ["key"] * 4, {}, "cpu") for r in (0, 1))  # type: ignore[arg-type, return-value]


def activation(value: float, *shape: int) -> tuple[list[Tensor], Shapes]:
    tensor = torch.full(shape or (2, 3), value, requires_grad=True)
    return [tensor], Shapes.of(StageTransfer({0: tensor}, 1))


def test_activations_arrive_with_their_shapes_which_are_sent_once_per_key(
    ends: tuple[PointToPoint, PointToPoint],
) -> None:
    first, second = ends
    for m in range(2):
        assert first.give(Action("F", 0, m), *activation(float(m)))
    assert len(first._links.queues["header", 0, 1]) == 1  # type: ignore[attr-defined]
    for m in range(2):
        tensors, shapes = activation(float(m))
        arrived, described = second.take(Action("F", 1, m))
        assert torch.equal(arrived[0], tensors[0])
        assert described == shapes
    with pytest.raises(StateError, match="must determine those between stages"):
        first.give(Action("F", 0, 2), *activation(0.0, 5, 3))


def test_what_no_other_rank_needs_is_not_sent(ends: tuple[PointToPoint, PointToPoint]) -> None:
    first, second = ends
    assert not first.give(Action("B", 0, 0), *activation(0.0))
    assert not second.expects(Action("B", 1, 0))
    assert second.expects(Action("F", 1, 0))


def test_receives_are_posted_ahead_of_their_use(ends: tuple[PointToPoint, PointToPoint]) -> None:
    first, second = ends
    first.give(Action("F", 0, 0), *activation(0.0))
    second.take(Action("F", 1, 0))  # from here on the shapes are known
    second.look_ahead(0)
    assert second._links.posted == 1 + LOOKAHEAD  # type: ignore[attr-defined]


def test_a_result_frees_the_sends_that_it_follows_from(ends: tuple[PointToPoint, PointToPoint]) -> None:
    first, second = ends
    for m in range(4):
        tensors, shapes = activation(float(m))
        first.shapes[0, m] = shapes
        first.give(Action("F", 0, m), tensors, shapes)
        second.shapes[0, m] = second.take(Action("F", 1, m))[1]
    second.give(Action("B", 1, 0), [torch.full((2, 3), 9.0)], shapes)
    gradient, _ = first.take(Action("B", 0, 0))
    assert gradient[0][0, 0].item() == 9.0
    assert first._links.waited == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", range(2, 10))
def test_a_rank_only_sends_or_only_receives_in_a_group(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL runs the operations of a communicator in order: a waiting receive would block the send that it waits for."""
    monkeypatch.setattr(p2p, "process_group", lambda purpose: purpose)
    monkeypatch.setattr(p2p.Links, "connect", lambda links: None)
    ends: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for rank in range(size):
        comm: Any = SimpleNamespace(native=True, rank=rank, world_size=size)
        for pair, group in make_links(comm)._groups.items():
            assert rank in pair
            ends.setdefault((rank, group), []).append(pair)
    assert all(len(pairs) == 1 for pairs in ends.values())
    neighbors = {(i, (i + way) % size) for i in range(size) for way in (1, -1)}
    assert sorted(pair for pairs in ends.values() for pair in pairs) == sorted(2 * list(neighbors))


def connected(rank: int, world_size: int) -> tuple[int, list[tuple[int, int]], dict[str, int]]:
    """Connect two pipelines; return the groups that were made, the links of this rank, and what it has sent."""
    world = make_comm()
    mesh = make_mesh(MeshShape(data=2, pipeline=world_size // 2), world)
    mesh.pipeline.native = True
    with mock.patch.object(dist, "new_group", wraps=dist.new_group) as made:
        links = make_links(mesh.pipeline)
    return made.call_count, sorted(links._groups), dict(mesh.pipeline.traffic.elements)


@pytest.mark.parametrize(("size", "groups"), [(2, 2), (3, 6), (4, 4)])
def test_all_pipelines_share_a_few_groups(size: int, groups: int) -> None:
    """Each group takes a call of all ranks: one per pair of neighbors would take minutes on some hundred ranks."""
    for made, links, sent in spawn(connected, 2 * size):
        assert made == groups
        assert len(links) == (2 if size == 2 else 4)
        assert not sent


def test_every_later_stage_gets_the_error_of_a_stage_that_refuses_new_shapes() -> None:
    queues: dict[Any, deque[Tensor]] = {}
    table = make_table("interleaved_1f1b", 3, 6)
    links: list[Any] = [Queues(r, queues) for r in range(3)]
    first, *later = (PointToPoint(each, table, ["key"] * 6, {}, "cpu") for each in links)
    first.refuse(Action("F", 0, 0), PlanError("15 tokens: ü" + 2000 * "x"))
    for stage, end in enumerate(later, 1):
        with pytest.raises(PlanError, match="15 tokens: ü"):
            end.take(Action("F", stage, 0))
    assert not any(queues["header", source, to] for source, to in [(0, 1), (1, 2)])
    assert ("header", 2, 0) not in queues  # it has raised


def test_nobody_waits_for_the_error_of_known_shapes(ends: tuple[PointToPoint, PointToPoint]) -> None:
    first, second = ends
    first.give(Action("F", 0, 0), *activation(0.0))
    second.take(Action("F", 1, 0))
    first.refuse(Action("F", 0, 1), PlanError("no"))
    assert not first._links.queues["header", 0, 1]  # type: ignore[attr-defined]
