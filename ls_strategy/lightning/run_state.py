"""What a strategy runs: its options, its module and its engine, for the parts of the strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ls_strategy.config import ZeROConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.lockstep import Lockstep
from ls_strategy.engine import Engine
from ls_strategy.errors import StateError
from ls_strategy.lightning.activation_memory import ActivationMemory
from ls_strategy.lightning.parallel import ModelParallel
from ls_strategy.lightning.virtual.ranks import VirtualRanks

if TYPE_CHECKING:
    import lightning.pytorch as pl


@dataclass
class RunState:
    """The state of a strategy that its parts share."""

    config: ZeROConfig
    """Every option, in groups."""

    parallel: ModelParallel
    """The ranks, and what is partitioned over them."""

    activations: ActivationMemory
    """Recomputes and stores activations."""

    virtual: VirtualRanks | None
    """The virtual ranks of this process."""

    lockstep: Lockstep | None = None
    """Keeps the ranks at the same batch; made with the process groups."""

    module: pl.LightningModule | None = None
    """What the Trainer trains or evaluates, or did last."""

    engine: Engine | None = None
    """Made in the strategy's `setup`, for one module on one process group."""

    @property
    def comm(self) -> Comm:
        """All ranks, which are connected."""
        assert self.parallel.world is not None
        return self.parallel.world

    @property
    def data_parallel_size(self) -> int:
        """The number of model replicas, or of virtual ranks; each trains on its own batches."""
        return self.parallel.data_rank[1] if self.virtual is None else self.virtual.count

    def require_module(self) -> pl.LightningModule:
        """Return the module, of which there is one from the beginning of a fit or an evaluation on."""
        assert self.module is not None
        return self.module

    def require_engine(self) -> Engine:
        """Return the engine of the current module.

        Raises:
            StateError: the module is not set up yet.
        """
        if self.engine is None:
            raise StateError("the model is not set up yet: this works from on_fit_start (or on_validation_start) on.")
        return self.engine
