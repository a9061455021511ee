"""The fused update of one flat buffer, at once or in chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.config import OffloadConfig, PrecisionConfig
from ls_strategy.engine import Engine
from ls_strategy.ops.norm import sum_of_squares, sum_over_chunks
from ls_strategy.zero.flat import averages, state_store
from ls_strategy.zero.flat.state_store import StateStore
from ls_strategy.zero.step.update import CopyOut, Update, UpdatePart
from tests.unit.one_rank import ShelfTier, adamw, backward, engine_on, network, steps


class PartlyUsed(nn.Module):
    """Its second vector gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = (nn.Parameter(torch.linspace(0, 1, n)) for n in (300, 500, 700))
        self.linear = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            return x + (self.first * torch.randn(300)).sum() + (self.last * torch.randn(700)).sum()


def engine_with(model: nn.Module, offload: Any, *, stage: Any = 3, moments: Any = "fp32") -> Engine:
    return engine_on(
        model, [adamw(model.parameters())], stage=stage, offload=offload, precision=PrecisionConfig(moments=moments),
        trainer_precision="bf16-true",
    )  # fmt: skip


def update_of(engine: Engine) -> Update:
    """Return the update of the first buffer, ready to run."""
    backward(engine, 0)
    engine.finish(0)
    sharded = engine.optimizers[0].sharded
    sharded.prepare([True] * len(sharded.pieces), shown=False)
    return sharded.fused.updates(None)[0]


@pytest.mark.parametrize("moments", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("stage", [1, 3])
def test_chunks_give_the_bits_of_one_pass(
    stage: int, moments: str, shelves: list[ShelfTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a parameter in the middle that is not stepped."""
    monkeypatch.setattr(state_store, "NVME_CHUNK", 256)
    model, other = PartlyUsed(), PartlyUsed()
    other.load_state_dict(model.state_dict())
    kinds = OffloadConfig(optimizer="nvme", parameters="nvme" if stage == 3 else None)
    found = steps(engine_with(model, kinds, stage=stage, moments=moments))
    expected = steps(engine_with(other, "cpu", stage=stage, moments=moments))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert len(shelves) == 1


def test_an_update_of_resident_states_is_one_job() -> None:
    model = network()
    assert len(update_of(engine_with(model, "cpu")).jobs()) == 1


def test_an_update_of_other_states_is_a_job_per_chunk(
    shelves: list[ShelfTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_store, "NVME_CHUNK", 256)
    model = network()
    update = update_of(engine_with(model, "nvme"))
    assert len(update.jobs()) == -(-update.flat.stepped_numel // 256)


def test_averages_in_memory_are_summed_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU every call launches kernels."""
    calls: list[int] = []

    def counting(grad: torch.Tensor, *, unscale: float) -> torch.Tensor:
        calls.append(grad.numel())
        return sum_of_squares(grad, unscale=unscale)

    monkeypatch.setattr(state_store, "NVME_CHUNK", 256)
    model = network()
    flat = update_of(engine_with(model, "cpu")).flat
    monkeypatch.setattr(averages, "sum_of_squares", counting)
    flat.averages.sums()
    assert calls == [flat.stepped_numel]
    assert flat.stepped_numel > 256


def test_the_seed_differs_by_buffer_and_step() -> None:
    model = network()
    engine = engine_with(model, "cpu")
    update = update_of(engine)
    part = UpdatePart(0, 1, 1, (), {}, seed_step=1)
    others = [replace(update, flat=flat).seed(part) for flat in engine.flats]
    assert len({*others, update.seed(replace(part, seed_step=2))}) == len(engine.flats) + 1


def test_random_bits_of_the_rounding_follow_the_place_in_the_full_buffer() -> None:
    """Ranks have the same seed, and different shards: equal numbers in them must not be rounded alike."""

    def moments(first: int) -> Tensor:
        model = network()
        engine = engine_with(model, "cpu", moments="bf16")
        update = update_of(engine)
        update.flat.stepped = (first, first + update.flat.stepped_numel)
        update.run()
        return update.states.moment("exp_avg", 0, update.flat.stepped_numel).codes.clone()

    own = moments(0)
    assert torch.equal(own, moments(0))
    assert not torch.equal(own, moments(1024))


def test_sums_are_of_the_gradients_that_the_update_reads() -> None:
    model = network()
    engine = engine_with(model, "cpu")
    update = replace(update_of(engine), sums=[])
    expected = update.flat.averages.sums().clone()
    update.run()
    assert update.sums is not None
    assert torch.equal(sum_over_chunks(update.sums), expected)


def test_a_read_ahead_that_is_over_holds_no_parameters(
    shelves: list[ShelfTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that ran it may be late to forget it, and what it held would count as a view of the user's."""
    remembered: list[Any] = []
    run = StateStore.in_background

    def remembering(store: StateStore, work: Any) -> Any:
        remembered.append(work)
        return run(store, work)

    monkeypatch.setattr(StateStore, "in_background", remembering)
    model = network()
    engine = engine_with(model, OffloadConfig(optimizer="nvme", parameters="nvme"))
    steps(engine, count=1)
    flat = engine.flats[0]
    flat.release()
    remembered.clear()
    flat.start_gather()
    flat.finish_gather()
    assert remembered
    assert not flat.writes.has_memory_views


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_masters_are_copied_out_in_the_parameters_dtype(tier: str, shelves: list[ShelfTier]) -> None:
    model = network()
    engine = engine_with(model, tier, stage=1)
    flat = engine.flats[0]
    flat.write_master(0, torch.arange(flat.stepped_numel, dtype=torch.float32))
    CopyOut(flat, None).update()
    assert torch.equal(flat.full, torch.arange(flat.stepped_numel).bfloat16())
