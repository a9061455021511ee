"""Whether the weights of a rollout are gathered at once, and what ``generate`` is told if they are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import Tensor, nn

from ls_strategy.access import rollout
from ls_strategy.access.rollout import generates, run_gathered
from tests.unit.one_rank import adamw, engine_on, network

HOST = {"optimizer": "cpu", "parameters": "cpu"}
"""Makes one rank shard its parameters."""


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def generate(self, x: Tensor) -> Tensor:
        return self.network(x)


class Streams(nn.Module):
    def generate(self) -> Iterator[int]:
        yield 1


def called(monkeypatch: pytest.MonkeyPatch, free_bytes: int | None, **kwargs: Any) -> tuple[Any, list[bool]]:
    """Return what `Generator.generate` was told, and which units were gathered meanwhile."""
    module = Generator()
    engine = engine_on(module, [adamw(module.parameters())], offload=HOST)
    monkeypatch.setattr(rollout, "free_host_memory", lambda: free_bytes)

    def generate(*, synced_gpus: bool | None = None) -> tuple[Any, list[bool]]:
        return synced_gpus, [flat.is_gathered for flat in engine.flats]

    result = run_gathered(engine, module, generate, (), kwargs)
    assert not any(flat.is_gathered or flat.users for flat in engine.flats)
    return result


NEEDED = 3 * (24 * 24 + 32) * 4
"""Bytes of the full buffers."""


@pytest.mark.parametrize("free_bytes", [None, 2 * NEEDED, 1 << 40])
def test_weights_that_fit_are_gathered_once(monkeypatch: pytest.MonkeyPatch, free_bytes: int | None) -> None:
    assert called(monkeypatch, free_bytes) == (None, [True] * 3)


def test_otherwise_ranks_run_equally_many_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert called(monkeypatch, 2 * NEEDED - 8) == (True, [False] * 3)


def test_the_user_may_say_so_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert called(monkeypatch, 0, synced_gpus=False) == (False, [False] * 3)


def test_only_methods_that_are_over_when_they_return_are_wrapped() -> None:
    assert generates(Generator())
    assert not generates(Streams())
    assert not generates(network())
