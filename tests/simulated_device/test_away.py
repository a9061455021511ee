"""States whose device memory is given to something else for a while: what is free then, and that no bit changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ls_strategy import device as dev
from ls_strategy.errors import StateError
from tests.marks import slow
from tests.simulated_device.device import run
from tests.simulated_device.programs import WIDTH, Stack, fit

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "masters are the parameters": ({"stage": 2}, {}, True),
    "fp32 masters": ({"stage": 2}, {"precision": "bf16-true"}, True),
    "own step": ({"stage": 2}, {"precision": "bf16-true"}, False),
    "quantized, stage 2": ({"stage": 2, "precision": {"frozen": "nf4"}}, {}, True),
    "quantized, stage 3": ({"stage": 3, "precision": {"frozen": "nf4"}}, {}, True),
    "shards on the device": (
        {"stage": 3, "offload": {"optimizer": "cpu", "step_on": "cpu"}},
        {"precision": "bf16-true"},
        True,
    ),
    "accumulation": ({"stage": 1}, {"accumulate_grad_batches": 2}, True),
}
"""Options of the strategy and of the Trainer, and whether AdamW is fused."""


class Gives(Stack):
    """Gives everything away before every batch, uses the memory, and takes it back."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        before, model = dev.allocated_bytes(self.device), sum(strategy.memory_bytes().values())
        given = strategy.offload_states()
        left = dev.allocated_bytes(self.device)
        other = torch.full((before - left,), 7, dtype=torch.uint8, device=self.device)
        with pytest.raises(StateError, match=r"after strategy\.offload_states.*reload_states"):
            self.first.weight.sum()
        assert other.sum().item() == 7 * other.numel()
        del other
        strategy.reload_states()
        self.kept = [*(self.kept or []), (given, before - left, left, model)]


class GivesSome(Gives):
    """Offloads what a forward does not need."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if batch_idx == 2:
            expected = self(batch[0]).detach()
            before = strategy.memory_bytes()
            strategy.offload_states("optimizer", "masters", "gradients")
            with torch.no_grad():
                found = self(batch[0])
            self.kept = bool((found == expected).all().item()), before, strategy.memory_bytes()
            strategy.reload_states()


def trained(device: torch.device, name: str, kind: type[Stack], width: int = WIDTH) -> tuple[dict[str, Any], Any]:
    """Return the outcome of a fit, and what the module has kept. `tests.gpu` runs it too."""
    options, trainer, fused = CASES[name]
    module = kind(width=width, fused=fused, habit="frozen matrices" if "quantized" in name else "")
    return fit(device, options, {**trainer, "max_steps": 4}, module=module), module.kept


@pytest.mark.wide
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [slow(name) if name == "own step" else name for name in CASES])
def test_the_device_is_empty_meanwhile_and_no_bit_changes(name: str) -> None:
    width = 2 * WIDTH if "quantized" in name else WIDTH  # so that placeholders are few beside the states
    on_device = run(trained, name, Gives, width)
    assert on_device.hazards == []
    found, kept = on_device.result
    expected, _ = run(trained, name, Stack, width).result
    assert found["losses"] == expected["losses"]
    assert all(torch.equal(found["weights"][k], value) for k, value in expected["weights"].items())
    for given, freed, left, model in kept[1:]:
        assert 0 < given <= freed
        assert left < 0.1 * model  # the batch, and a placeholder per parameter; each tensor takes 512 bytes at least


def test_a_forward_needs_neither_masters_nor_optimizer_states() -> None:
    on_device = run(trained, "fp32 masters", GivesSome)
    assert on_device.hazards == []
    found, (same, before, meanwhile) = on_device.result
    assert found["losses"] == run(trained, "fp32 masters", Stack).result[0]["losses"]
    assert same
    assert before["masters"]
    assert before["optimizer"]
    assert meanwhile == {**dict.fromkeys(before, 0), "parameters": before["parameters"]}
