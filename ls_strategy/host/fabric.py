"""The names of Fabric that this package uses, from the host of this process.

The two branches are equal but for the name of the package; a test compares them. Imports no Trainer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ls_strategy import host

if TYPE_CHECKING or host.name() == "lightning":
    from lightning.fabric.accelerators import Accelerator as Accelerator
    from lightning.fabric.plugins import CheckpointIO as CheckpointIO
    from lightning.fabric.plugins import ClusterEnvironment as ClusterEnvironment
    from lightning.fabric.plugins import Precision as Precision
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO as TorchCheckpointIO
    from lightning.fabric.strategies import DDPStrategy as DDPStrategy
    from lightning.fabric.strategies import Strategy as Strategy
    from lightning.fabric.utilities.data import sized_len as sized_len
    from lightning.fabric.utilities.rank_zero import rank_zero_info as rank_zero_info
    from lightning.fabric.utilities.rank_zero import rank_zero_warn as rank_zero_warn
    from lightning.fabric.utilities.seed import pl_worker_init_function as pl_worker_init_function
    from lightning.fabric.utilities.throughput import get_available_flops as get_available_flops
else:
    from lightning_fabric.accelerators import Accelerator as Accelerator
    from lightning_fabric.plugins import CheckpointIO as CheckpointIO
    from lightning_fabric.plugins import ClusterEnvironment as ClusterEnvironment
    from lightning_fabric.plugins import Precision as Precision
    from lightning_fabric.plugins.io.torch_io import TorchCheckpointIO as TorchCheckpointIO
    from lightning_fabric.strategies import DDPStrategy as DDPStrategy
    from lightning_fabric.strategies import Strategy as Strategy
    from lightning_fabric.utilities.data import sized_len as sized_len
    from lightning_fabric.utilities.rank_zero import rank_zero_info as rank_zero_info
    from lightning_fabric.utilities.rank_zero import rank_zero_warn as rank_zero_warn
    from lightning_fabric.utilities.seed import pl_worker_init_function as pl_worker_init_function
    from lightning_fabric.utilities.throughput import get_available_flops as get_available_flops
