"""The state of a strategy, for its parts alone."""

from __future__ import annotations

from typing import Any

from ls_strategy.config import ZeROConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.lightning.activation_memory import ActivationMemory
from ls_strategy.lightning.parallel import ModelParallel
from ls_strategy.lightning.run_state import RunState


def run_state(config: ZeROConfig | None = None, *, rank: int = 0, **attributes: Any) -> RunState:
    """Return the state on one rank, connected to no other, with these attributes."""
    config = config or ZeROConfig.of(3)
    parallel = ModelParallel(config.parallel, config.sharding)
    comm = Comm(None, None)
    comm.rank = rank
    parallel.mesh = Mesh.data_only(comm)
    return RunState(config, parallel, ActivationMemory(config.activations), None, **attributes)
