"""The cut of a buffer by weights, what NCCL is asked for, and values that are refused."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ls_strategy import ConfigError, ZeROStrategy
from ls_strategy.config import ZeROConfig, nested
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import MeshShape
from ls_strategy.extras.planner.states import ModelStates
from ls_strategy.layout import ALIGN, FlatLayout, weighted_bounds
from ls_strategy.precision import resolve_precision
from ls_strategy.zero.setup import weights as weighing

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=9).map(lambda w: tuple(map(Fraction, w)))


@given(used=st.integers(0, 10**9), weights=WEIGHTS)
def test_shards_tile_the_buffer_by_weight(used: int, weights: tuple[Fraction, ...]) -> None:
    cuts = weighted_bounds(used, weights)
    assert len(cuts) == len(weights) + 1
    assert cuts[0] == 0
    assert cuts[-1] >= used
    assert all(cut % ALIGN == 0 for cut in cuts)
    lengths = [hi - lo for lo, hi in pairwise(cuts)]
    assert all(length > 0 for length in lengths) or used == 0
    if used > 1000 * ALIGN * len(weights):
        for length, weight in zip(lengths, weights, strict=True):
            # Two borders, each rounded by half a line; or pushed aside by ranks that get one line at least.
            assert abs(length - used * weight / sum(weights)) <= ALIGN * (len(weights) + 1)


def test_a_layout_by_weights() -> None:
    layouts = [FlatLayout.pack([("a", (10, 9))], 2, weights=(Fraction(2), Fraction(1)), rank=rank) for rank in range(2)]
    assert [layout.shard for layout in layouts] == [64, 32]
    assert [layout.sizes for layout in layouts] == [(64, 32)] * 2
    assert layouts[0].numel == 96
    assert layouts[1].shard_range(1) == (64, 96)
    assert FlatLayout.pack([("a", (10, 9))], 2).sizes is None


@pytest.mark.parametrize(
    "weights", [[], [2, 0], [2, -1], [2, float("nan")], [2, float("inf")], [True, 1], ["2", 1], "2,1", "Auto", 3, {}]
)
def test_values_that_are_no_weights(weights: Any) -> None:
    with pytest.raises(ConfigError, match=r"Got sharding.rank_weights=.*Set "):
        ZeROStrategy(stage=2, sharding={"rank_weights": weights})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stage": 0}, "stage=0.*Set stage to 1, 2 or 3"),
        ({"stage": "auto"}, "Set a stage"),
        ({"parallel.tensor.size": 2}, "parallel.tensor=2"),
        ({"parallel.pipeline.size": 2}, "parallel.pipeline=2"),
        ({"parallel.expert": 2}, "parallel.expert=2"),
    ],
)
def test_options_that_contradict_weights(options: dict[str, Any], words: str) -> None:
    cases: list[Any] = [[2, 1], "auto"]
    for weights in cases:
        with pytest.raises(ConfigError, match=words):
            ZeROStrategy(**nested({"sharding.rank_weights": weights, **options}))


def test_weights_and_ranks() -> None:
    assert weighing.refusal(None, MeshShape(data=3)) is None
    assert weighing.refusal("auto", MeshShape(data=3)) is None
    assert weighing.refusal((2, 1), MeshShape(data=2)) is None
    assert weighing.refusal((2, 1), MeshShape(data=1, sequence=2)) is None
    assert "2 weights, but there are 1 ranks" in str(weighing.refusal((2, 1), MeshShape(data=1)))
    assert "parallel.tensor=2" in str(weighing.refusal((2, 1), MeshShape(data=1, tensor=2)))
    assert weighing.memory_bytes(torch.device("cpu")) > 1 << 28


class _Native(Comm):
    """Two ranks on NCCL, of which only the calls are seen."""

    def __init__(self) -> None:
        super().__init__(None, None)
        self.rank, self.world_size, self.native = 1, 2, True


class _Done:
    def wait(self) -> None:
        """At once."""


def test_nccl_is_asked_for_shards_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[int], int]] = []

    def all_gather(parts: list[Tensor], mine: Tensor, **_: Any) -> _Done:
        calls.append(("all_gather", [p.numel() for p in parts], mine.numel()))
        assert parts[1].data_ptr() == mine.data_ptr()  # in place
        parts[0].fill_(7)
        return _Done()

    def reduce_scatter(out: Tensor, parts: list[Tensor], **_: Any) -> _Done:
        calls.append(("reduce_scatter", [p.numel() for p in parts], out.numel()))
        out.copy_(parts[1] * 2)
        return _Done()

    monkeypatch.setattr(torch.distributed, "all_gather", all_gather)
    monkeypatch.setattr(torch.distributed, "reduce_scatter", reduce_scatter)
    comm, sizes = _Native(), (32, 16)
    full = torch.ones(48)
    comm.all_gather(full, "", sizes).wait()
    assert full.tolist() == [7.0] * 32 + [1.0] * 16
    out = torch.zeros(16)
    comm.reduce_scatter(full.bfloat16(), torch.float32, "", sizes).finish(out, accumulate=False)
    assert out.tolist() == [1.0] * 16
    assert calls == [("all_gather", [32, 16], 16), ("reduce_scatter", [32, 16], 16)]
    assert comm.traffic.elements == {"all_gather": 16, "reduce_scatter": 32}


def test_the_planner_counts_the_fullest_rank() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(4)))
    states = ModelStates(model, [torch.optim.AdamW(model.parameters())], resolve_precision("32-true"))
    equal = states.plan(ZeROConfig(stage=3), 2)
    weighted = states.plan(ZeROConfig(stage=3, sharding={"rank_weights": (1, 3)}), 2)
    assert weighted.rank == 1
    assert weighted.state_bytes()["optimizer"] == pytest.approx(1.5 * equal.state_bytes()["optimizer"], rel=0.01)
    assert states.plan(ZeROConfig(stage=3, sharding={"rank_weights": (2, 2)}), 2) == equal
