"""What tests of gathers in few bits share: settings, what user code does with weights, and two runs with equal bits."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ls_strategy.config import nested
from ls_strategy.lightning.strategy import ZeROStrategy
from tests.dist.ranks import Net, assert_equal, fit, weights

OFFLOAD = {"offload.optimizer": "cpu", "offload.parameters": "cpu"}
NVME = {"offload.optimizer": "nvme", "offload.parameters": "nvme", "offload.nvme_allow_ram": True}
SETTINGS: list[dict[str, Any]] = [
    {}, OFFLOAD, NVME, {"activations": "full"}, {"activations": "selective", **OFFLOAD},
    {"activations.offload": "cpu"}, {"sharding.prefetch_units": 0}, {"sharding.prefetch_units": 3},
    {"sharding.overlap_step": False}, {"sharding.min_unit_numel": 10**9}, {"sharding.rank_weights": (1.0, 2.0)},
]  # fmt: skip


class Counts(Net):
    """Counts the bytes of each step's gathers."""

    strategy: Any = property(lambda self: self.trainer.strategy)
    given: ClassVar[dict[str, Any]] = {}
    """Options of every run."""

    precision = "32-true"
    """Of the Trainer, where a run gives none."""

    def on_train_start(self) -> None:
        self.traffic = self.strategy.engine.comm.traffic.bytes
        self.before = self.traffic["all_gather"]
        self.bytes: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.bytes.append(self.traffic["all_gather"] - self.before)
        self.before = self.traffic["all_gather"]

    def note(self, value: Tensor) -> None:
        self.seen.append(float(value.detach()))


class ClampsInBlocks(Counts):
    """Clamps a weight in every forward of a block, also in one that is recomputed."""

    clamped, limit = "wide", 0.2

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.register_forward_pre_hook(self.clamp)

    def clamp(self, block: nn.Module, _: Any) -> None:
        with torch.no_grad():
            block.get_submodule(self.clamped).weight.clamp_(-self.limit, self.limit)  # type: ignore[union-attr,operator]


class OldGraph(Counts):
    """Goes back through a forward that ran before a step."""

    manual = True

    def training_step(self, batch: Any, i: int) -> Any:
        optimizer: Any = self.optimizers()
        before = self.loss(batch)
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.manual_backward(before)


class OwnHooks(Counts):
    """Keeps what autograd saves in hooks, for which autograd checks no versions."""

    def training_step(self, batch: Any, i: int) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            return super().training_step(batch, i)


def trained(module: Counts, gather: str, options: dict[str, Any] | None = None, **trainer: Any) -> Any:
    given = {"sharding.min_unit_numel": 0, **module.given, "precision.gather": gather, **(options or {})}
    fit(ZeROStrategy(3, **nested(given)), module, **{"precision": module.precision, **trainer})
    return module


def compare(kind: type[Counts], options: dict[str, Any] | None = None, **trainer: Any) -> tuple[Any, Any]:
    """Return the run with gathers in full and the one with few bits, after they have had the same bits."""
    full, sent = (trained(kind(), gather, options, **trainer) for gather in ("fp32", "compute"))
    assert (sent.losses, sent.seen) == (full.losses, full.seen), kind
    assert_equal(weights(sent), weights(full), str(kind))
    return full, sent
