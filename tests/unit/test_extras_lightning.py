"""Hooks of side products into Lightning's fit loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ls_strategy.extras._lightning import before_batches


class Loop:
    """An epoch loop that notes what happens."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def advance(self, batch: str) -> None:
        self.seen.append(batch)


def test_several_callbacks_act_before_a_batch_until_each_ends() -> None:
    loop = Loop()
    module = SimpleNamespace(_current_fx_name=None)
    connector = SimpleNamespace(_current_fx=None)
    trainer: Any = SimpleNamespace(
        fit_loop=SimpleNamespace(epoch_loop=loop), lightning_module=module, _logger_connector=connector
    )
    first, second = (before_batches(trainer, lambda name=name: loop.seen.append(name)) for name in ("first", "second"))
    loop.advance("batch 1")
    first()
    loop.advance("batch 2")
    second()
    loop.advance("batch 3")
    assert loop.seen == ["first", "second", "batch 1", "second", "batch 2", "batch 3"]
    assert vars(loop).keys() == {"seen"}
