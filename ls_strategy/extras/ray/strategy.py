"""`RayZeROStrategy`: ZeRO on the workers of a Ray Train trainer.

The one invariant: the ranks are Ray's. ``num_nodes`` and ``devices`` of the Trainer only name the kind of device.

::

    Ray     starts the workers, makes a process group, calls the train function in a thread of each
    here    leaves that group and makes one at another port: its connections are known, so that a rank that fails can
            close those that other ranks wait on, and options such as ``timeout`` hold
    Ray     ends the group, and restarts the workers after a failure, perhaps on fewer nodes
"""

from __future__ import annotations

import json
import math
import os
import time
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from ls_strategy._torch import default_store
from ls_strategy.distributed.comm import is_shared
from ls_strategy.distributed.launch import rendezvous
from ls_strategy.distributed.launch.ray_worker import in_train_function
from ls_strategy.errors import ConfigError, RankFailedError
from ls_strategy.extras.ray.environment import RayEnvironment
from ls_strategy.extras.ray.train import RayDDPStrategy, ray_torch, train
from ls_strategy.host.fabric import ClusterEnvironment
from ls_strategy.lightning.strategy import ZeROStrategy

_MEETING_S = 120.0  # seconds that ranks, which have just met in Ray's process group, may be apart


class RayZeROStrategy(ZeROStrategy, RayDDPStrategy):
    """`ls_strategy.ZeROStrategy` with all its options, in the train function of a ``ray.train.torch.TorchTrainer``.

    ``ray.train.lightning.prepare_trainer`` accepts it. World size, ranks and devices are Ray's; the Trainer needs
    neither ``devices`` nor ``num_nodes``. Inside a train function an alias such as ``"zero3"`` is this class.
    """

    _takes_any_size = True
    _per_node: int | None = None
    _environment: ClusterEnvironment | None = None

    @property
    def cluster_environment(self) -> ClusterEnvironment | None:
        """Ranks and world size, as Ray knows them."""
        return self._environment

    @cluster_environment.setter
    def cluster_environment(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, environment: ClusterEnvironment | None
    ) -> None:
        """Take what the Trainer chose, which is never what Ray knows.

        Raises:
            ConfigError: this is no train function of Ray Train, or ranks are to be forked.
        """
        if environment is None or isinstance(environment, RayEnvironment):
            self._environment = environment
            return
        if not in_train_function():
            raise ConfigError(
                "Got RayZeROStrategy outside of a train function of Ray Train. Make the Trainer inside the function "
                "that ray.train.torch.TorchTrainer gets, or use ls_strategy.ZeROStrategy."
            )
        if self._start_method != "popen":
            raise ConfigError(
                f"Got start_method={self._start_method!r} in a train function of Ray Train, whose ranks Ray has "
                "started. Leave it out, and use aliases without _notebook."
            )
        self._environment = RayEnvironment()

    @property
    @override
    def root_device(self) -> torch.device:
        """The device that Ray gave to this worker."""
        return ray_torch.get_device()

    @property
    @override
    def num_processes(self) -> int:
        """Ranks per node; where nodes have different numbers, the largest number of neighbours that all nodes have."""
        if self._per_node is not None:
            return self._per_node
        return train.get_context().get_local_world_size() if in_train_function() else 1

    @override
    def setup_environment(self) -> None:
        """Replace Ray's process group by one whose connections are known. Collective."""
        if dist.is_initialized() and not is_shared(dist.group.WORLD):
            self._process_group_backend = self._process_group_backend or dist.get_backend()
            self._per_node = self._meet_elsewhere()
            self.num_nodes = max(train.get_context().get_world_size() // self._per_node, 1)
        super().setup_environment()

    @override
    def _check_size(self) -> None:
        """Compare nothing with the Trainer's options: they yield to Ray's."""

    @override
    def _check_launcher(self) -> None:
        """Compare nothing with SLURM's variables: Ray may run inside a job, whose tasks are Ray's."""

    def _meet_elsewhere(self) -> int:
        """Leave Ray's process group, agree on the address of another one, and return the ranks per node. Collective.

        Raises:
            RankFailedError: a rank did not come.
        """
        context, store = train.get_context(), default_store()
        rank, ranks = context.get_world_rank(), context.get_world_size()
        if ranks > 1:
            mine = {"per_node": context.get_local_world_size(), "host": "", "port": 0}
            if rank == 0:
                mine.update(host=os.environ.get("MASTER_ADDR") or _own_address(), port=rendezvous.free_port())
            store.set(f"ls_strategy/extras/ray/{rank}", json.dumps(mine))
            everyone = [json.loads(store.get(f"ls_strategy/extras/ray/{r}")) for r in range(ranks)]
            store.add("ls_strategy/extras/ray/read", 1)
            deadline = time.monotonic() + _MEETING_S
            while rank == 0 and store.add("ls_strategy/extras/ray/read", 0) < ranks:  # it ends with rank 0's group
                if time.monotonic() > deadline:
                    raise RankFailedError(f"not all {ranks} workers of Ray have come within {_MEETING_S:.0f} s.")
                time.sleep(0.01)
            dist.destroy_process_group()
            os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = everyone[0]["host"], str(everyone[0]["port"])
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # of torchrun, in local mode: no agent is here
            return math.gcd(*(each["per_node"] for each in everyone))
        return 1


def _own_address() -> Any:
    """Return the address of this node; Ray sets MASTER_ADDR unless TorchConfig(init_method="tcp")."""
    from ray.util import get_node_ip_address

    return get_node_ip_address()
