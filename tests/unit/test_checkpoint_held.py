"""What a background save holds of an engine's states is what they were at the call, whatever changes them then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ls_strategy.access.offload import offload_states
from ls_strategy.checkpoint import background, save
from ls_strategy.checkpoint.background import BackgroundSaver, Hold
from ls_strategy.checkpoint.manifest import Manifest
from ls_strategy.checkpoint.reshard import separate
from ls_strategy.checkpoint.source import read_full
from ls_strategy.config import OffloadConfig, PrecisionConfig
from ls_strategy.engine import Engine
from ls_strategy.lightning.checkpointing.contents import Collection
from ls_strategy.optimizers.muon import Muon
from ls_strategy.zero.state_offload import KINDS
from tests.unit.one_rank import adamw, engine_on, network, steps


def sgd(params: Any) -> torch.optim.Optimizer:
    """Steps itself: the package has no operation for this one."""
    return torch.optim.RMSprop(params, lr=1e-3, momentum=0.5)


def muon(params: Any) -> torch.optim.Optimizer:
    return Muon([{"params": [p for p in params if p.dim() == 2]}])


SETTINGS: dict[str, dict[str, Any]] = {
    "stage 0": {"stage": 0},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 2, fp32 masters": {"stage": 2, "trainer_precision": "bf16-true"},
    "stage 3, its own step": {"stage": 3, "make": sgd},
    "stage 3, Muon": {"stage": 3, "make": muon},
    "stage 2, states in host memory": {"stage": 2, "offload": OffloadConfig(optimizer="cpu")},
    "stage 3, 8-bit moments": {"stage": 3, "precision": PrecisionConfig(moments="int8")},
}


def write(engine: Engine) -> None:
    """Write to parameters as user code does."""
    first, *_, last = engine.model.parameters()
    with torch.no_grad():
        last.add_(1)
    first.data.mul_(2)
    first.detach().flatten()[0] = 7
    engine.events.after_user_code()


def give_away(engine: Engine) -> None:
    """Until the save has ended."""
    offload_states(engine, KINDS)


def swap(engine: Engine) -> None:
    """As for a validation with averages."""
    for flat in engine.flats:
        flat.exchange_master(torch.zeros_like(flat.read_master()))


CHANGES: dict[str, Callable[[Engine], Any]] = {
    "a step": lambda engine: steps(engine, 1, first=2),
    "user code writes": write,
    "user code writes before a step": lambda engine: (write(engine), steps(engine, 2, first=2)),
    "states start afresh": lambda engine: engine.optimizers[0].sharded.optimizer.state.clear(),
    "masters are swapped": swap,
    "memory is given away": give_away,
}


def job(engine: Engine, path: Path) -> save.Save:
    """A save of all weights and states."""
    collection = Collection(engine, frozen=True)
    with engine.raw_states():
        weights = collection.weights(engine.model.state_dict())
    checkpoint = {"state_dict": weights, "optimizer_states": [collection.optimizer_state(0)]}
    entries, rest = separate(checkpoint, collection.contents)
    manifest = Manifest(step=2, epoch=0, layout={}, files={})
    return save.Save(str(path), entries, {}, manifest, partial(_write_meta, None, rest), None)


def _write_meta(_first: object, meta: dict[str, Any], path: str) -> None:
    torch.save(meta, path)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else a == b


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_save_that_is_overtaken_is_that_of_its_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """The thread does nothing before everything has changed: the slowest that it can be."""
    opened, plain = threading.Event(), Hold.copy_ahead
    monkeypatch.setattr(Hold, "copy_ahead", lambda *args: (opened.wait(30), plain(*args)))
    saver = BackgroundSaver(0, 1, torch.device("cpu"))
    differ: list[str] = []
    for number, (name, change) in enumerate(CHANGES.items()):
        options = dict(SETTINGS[setting])
        model: nn.Module = network()
        engine = engine_on(model, [options.pop("make", adamw)(model.parameters())], **options)
        steps(engine, 2)
        at_call, behind = tmp_path / f"{number}-now", tmp_path / f"{number}-behind"
        save.run(job(engine, at_call), 0, lambda report: [report])
        opened.clear()
        saver.submit(job(engine, behind), lambda *_: None)
        change(engine)
        opened.set()
        saver.wait()
        engine.state_offload.reload()
        before, found = read_full(at_call), read_full(behind)
        differ += [f"{name}: {key}" for key in before if not same(before[key], found[key])]
        save.run(job(engine, at_call), 0, lambda report: [report])
        after = read_full(at_call)
        assert same(before, after) == (change is give_away), f"{name} changes nothing"
    saver.close()
    assert differ == []


def test_a_call_copies_no_state_that_only_updates_change(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """That is all of them; where the parameters are the masters, two thirds of AdamW's."""
    copied: list[int] = []
    opened, plain, ahead = threading.Event(), background._Held.copy, Hold.copy_ahead
    monkeypatch.setattr(Hold, "copy_ahead", lambda *args: (opened.wait(30), ahead(*args)))
    monkeypatch.setattr(
        background._Held, "copy", lambda self, number: (copied.append(self.sizes[number]), plain(self, number))[1]
    )
    saver = BackgroundSaver(0, 1, torch.device("cpu"))
    shares = {}
    for precision in ("bf16-true", "32-true"):
        model = network()
        engine = engine_on(model, [adamw(model.parameters())], stage=2, trainer_precision=precision)
        steps(engine, 1)
        opened.clear()
        saver.submit(job(engine, tmp_path / precision), lambda *_: None)
        at_call = sum(copied)
        opened.set()
        saver.wait()
        shares[precision] = at_call / sum(copied)
        copied.clear()
    saver.close()
    assert shares == {"bf16-true": 0, "32-true": pytest.approx(1 / 3)}
