"""Model parallelism under Lightning: which rank gets which batch, and which ranks average with each other.

The ranks of one model replica work on the same batch. What Lightning does per rank (by ``trainer.global_rank`` and over
all ranks) is done per replica here: samplers, seeds of workers, reductions of logged values, metrics.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from ls_strategy._torch import set_timeout
from ls_strategy.checkpoint.random import random_states, restore_random_states
from ls_strategy.config import ParallelConfig, ShardingConfig
from ls_strategy.distributed.axis import Axis
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import Mesh, MeshShape, make_mesh
from ls_strategy.errors import PlanError, StateError
from ls_strategy.host.fabric import pl_worker_init_function
from ls_strategy.host.pytorch import pl
from ls_strategy.layout import TensorPart
from ls_strategy.lightning.parallel_kinds import Partitioning, partition
from ls_strategy.lightning.pipeline.step import Pipeline, refuse
from ls_strategy.meta_init.deferred import share_random_states
from ls_strategy.moe.balance import update_router_bias
from ls_strategy.moe.router import Router
from ls_strategy.parallel.tensor.dtensor import Localized
from ls_strategy.parallel.tensor.shard import TensorParallel, broadcast_values
from ls_strategy.zero.events import Event
from ls_strategy.zero.setup.agreement import agree
from ls_strategy.zero.setup.materialize import refused_buffer
from ls_strategy.zero.setup.share import Share

_CHECKED_FIRST = 8
_CHECKED_EVERY = 100
"""Batches of a run that are compared over the ranks of a replica: the first few, then every n-th."""


class _Sharded:
    """Record of how a module was partitioned, for the next fit."""

    def __init__(self, config: ParallelConfig, ranks: int) -> None:
        self.config = config
        self.ranks = ranks
        self.parts: dict[int, TensorPart] = {}
        self.tensor: TensorParallel | Localized | None = None
        self.pipeline: Pipeline | None = None


_SHARDED: weakref.WeakKeyDictionary[nn.Module, _Sharded] = weakref.WeakKeyDictionary()


class ModelParallel:
    """The mesh of one strategy, and the partitioning of its module."""

    def __init__(self, config: ParallelConfig, sharding: ShardingConfig | None = None) -> None:
        self.config, self._sharding = config, sharding or ShardingConfig()
        self.replica_ranks = config.pp.size * config.tp.size * config.context
        """The number of ranks that work on one batch together."""
        self.mesh: Mesh | None = None
        self.pipeline: Pipeline | None = None
        self.device = torch.device("cpu")
        """This rank's, once it is connected."""
        self._device_mesh: Any = None
        self._batches = 0

    def connect(self, world: Comm, device: torch.device, timeout: timedelta | None = None) -> Mesh:
        """Create the process groups, whose collectives may take ``timeout``. Collective over all ranks.

        Raises:
            PlanError: the sizes do not divide the number of ranks.
        """
        config = self.config
        shape = MeshShape.of(
            world.world_size,
            shard=self._sharding.shard_size,
            hpz=self._sharding.hpz,
            node_size=world.node_size,
            tensor=config.tp.size,
            sequence=config.context,
            pipeline=config.pp.size,
            expert=config.expert,
        )
        self.mesh, self.device = make_mesh(shape, world), device
        if shape.tensor > 1:
            sizes = (world.world_size // shape.tensor, shape.tensor)
            self._device_mesh = init_device_mesh(
                device.type, sizes, mesh_dim_names=("data_parallel", "tensor_parallel")
            )
            if timeout is not None:
                for group in self._device_mesh.get_all_groups():
                    set_timeout(group, timeout)
            world.own_open_sockets()
        return self.mesh

    def show_device_mesh(self, module: pl.LightningModule | None) -> None:
        """Provide ``self.device_mesh`` in ``configure_model``, as Lightning's ModelParallelStrategy does."""
        if module is not None and self._device_mesh is not None:
            module._device_mesh = self._device_mesh

    @property
    def world(self) -> Comm | None:
        """All ranks, once they are connected."""
        return None if self.mesh is None else self.mesh.world

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, or the only one."""
        return self.mesh is None or self.mesh.world.rank == 0

    @property
    def shards(self) -> bool:
        """Return whether anything except batches is partitioned over ranks."""
        return self.replica_ranks > 1 or self.config.expert > 1

    @property
    def splits_model(self) -> bool:
        """Return whether no rank has all parameters, at any ZeRO stage."""
        return max(self.config.pp.size, self.config.tp.size, self.config.expert) > 1

    @property
    def data_rank(self) -> tuple[int, int]:
        """The replica that this rank belongs to, and the number of replicas."""
        assert self.mesh is not None
        shape = self.mesh.shape
        return shape.coordinates(self.mesh.world.rank)[1], shape.data

    @property
    def first_rank(self) -> int:
        """The first rank of this rank's replica."""
        assert self.mesh is not None
        return self.data_rank[0] * self.mesh.shape.sequence * self.mesh.shape.tensor

    # the module ------------------------------------------------------------------------------------------------------

    def shard(self, module: pl.LightningModule, device: torch.device, *, recomputes: bool) -> dict[int, TensorPart]:
        """Partition blocks, layers and sequences, once per module. Collective.

        Args:
            module: the full module, except for what `configure_model` has partitioned.
            device: the device of the module.
            recomputes: whether parts of it are recomputed in backward.

        Returns:
            ``id(parameter)`` -> the part of it on this rank.

        Raises:
            PlanError: the module cannot be partitioned this way; with the cure.
        """
        assert self.mesh is not None
        ranks = self.mesh.world.world_size
        done = _SHARDED.get(module)
        if done is not None:
            if done.config != self.config or done.ranks != ranks:
                raise PlanError(
                    f"the module was partitioned by an earlier run with {done.config} on {done.ranks} ranks, but this "
                    f"run has {self.config} on {ranks}. Save a checkpoint, and load it into a new module."
                )
            self.pipeline = done.pipeline
            return done.parts
        if self.replica_ranks == self.config.expert == 1:
            return {}
        if self.config.pp.size > 1:
            refuse(module, self.config, device)
        self._start_from_rank_0(module)
        assert self.mesh is not None
        # All ranks of a replica draw the same for dropout and the order of the data.
        restore_random_states(self.mesh.model.exchange_objects(random_states())[0])
        done = _Sharded(self.config, ranks)
        if self.config.pp.size > 1:
            done.pipeline = self.pipeline = Pipeline(self.config, module, self.mesh, device, recomputes=recomputes)
        given = Partitioning(self.config, self.mesh, self._device_mesh, self.pipeline)
        done.parts = partition(module, given)
        done.tensor = next(iter(given.layers), None)
        self._average_metrics_over_replicas(module)
        _SHARDED[module] = done
        return done.parts

    @staticmethod
    def tensor_layers(module: nn.Module) -> TensorParallel | Localized | None:
        """Return what has sharded the layers of a module over ranks, if something has."""
        done = _SHARDED.get(module)
        return None if done is None else done.tensor

    def share(self, module: pl.LightningModule, optimizers: list[Any]) -> Share:
        """Return which parameters are on this rank, and remove the others from the optimizers."""
        if self.pipeline is None:
            return Share()
        return self.pipeline.share(module, optimizers)

    def _start_from_rank_0(self, module: nn.Module) -> None:
        """Broadcast rank 0's values, as DDP does, while every rank still has the full model. Collective.

        Raises:
            PlanError: the ranks built different models.
        """
        assert self.mesh is not None
        named = (*module.named_parameters(), *module.named_buffers())
        rows = [(n, tuple(t.shape), str(t.dtype), t.requires_grad, "meta" if t.is_meta else "filled") for n, t in named]
        columns = "(name, shape, dtype, requires_grad, meta or filled)"
        agree(self.mesh.world, refused_buffer(module), "", rows, columns=columns)
        world = Axis("world", self.mesh.world)
        broadcast_values(module, world)
        share_random_states(module, world)

    def balance_experts(self, module: nn.Module, on_stepped: Event) -> None:
        """After every step, update the bias of routers that balance loads without a loss, from the loads of all ranks.

        Collective then, over the ranks that see different tokens. Without such routers nothing subscribes.
        """
        if any(isinstance(m, Router) and m.bias is not None for m in module.modules()):
            assert self.mesh is not None
            comm = self.mesh.stage if self.config.tp.sequence_parallel else self.mesh.zero
            on_stepped.subscribe(partial(_balance, weakref.ref(module), Axis("tokens", comm)))

    def _average_metrics_over_replicas(self, module: nn.Module) -> None:
        """Make torchmetrics count every replica once."""
        assert self.mesh is not None
        for metric in module.modules():
            if hasattr(metric, "process_group") and hasattr(metric, "distributed_available_fn"):
                if self.mesh.data.world_size > 1:
                    metric.process_group = metric.process_group or self.mesh.data.group  # type: ignore[assignment]
                else:
                    metric.distributed_available_fn = _never  # type: ignore[assignment]

    # data ------------------------------------------------------------------------------------------------------------

    def seed_workers(self, dataloader: Any) -> None:
        """Seed the workers of a loader by replica; Lightning would seed them by rank."""
        if self.replica_ranks > 1 and isinstance(dataloader, DataLoader) and dataloader.worker_init_fn is None:
            dataloader.worker_init_fn = partial(pl_worker_init_function, rank=self.data_rank[0])

    def check_batch(self, batch: Any) -> None:
        """Check that the ranks of a replica work on the same batch. Collective over them.

        Raises:
            StateError: they do not; with what differs.
        """
        self._batches += 1
        if self.replica_ranks == 1 or (self._batches > _CHECKED_FIRST and self._batches % _CHECKED_EVERY):
            return
        assert self.mesh is not None
        mine = [(path, _fingerprint(leaf)) for path, leaf in _leaves(batch, "batch")]
        everyones = self.mesh.model.exchange_objects(mine)
        for rank, theirs in enumerate(everyones):
            if theirs == everyones[0]:
                continue
            rows = zip(everyones[0], theirs, strict=False)
            path = next((a[0] for a, b in rows if a != b), "batch")
            world = self.mesh.world.rank
            ranks = next(group for group in self.mesh.shape.groups("model") if world in group)
            raise StateError(
                f"ranks {ranks[0]} and {ranks[rank]} work on the same replica of the model but got different data: "
                f"{path} differs in batch {self._batches} of this run. Samplers, IterableDatasets and augmentation "
                "must depend on the replica (strategy.data_parallel_rank of strategy.data_parallel_size), not on the "
                "global rank."
            )


def _balance(module: weakref.ref[nn.Module], ranks: Axis) -> None:
    model = module()
    assert model is not None
    update_router_bias(model, ranks.all_reduce)


def _never() -> bool:
    return False


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _leaves(inner, f"{path}[{i}]")
    elif hasattr(value, "__dict__") and not isinstance(value, Tensor):
        yield from _leaves(vars(value), path)
    else:
        yield path, value


def _fingerprint(leaf: Any) -> Any:
    """Return a small value that is equal for equal data."""
    if not isinstance(leaf, Tensor):
        return repr(leaf) if isinstance(leaf, (int, float, str, bytes, bool)) else type(leaf).__name__
    if leaf.layout != torch.strided or leaf.numel() == 0:
        return (tuple(leaf.shape), str(leaf.dtype))
    data: Any = leaf.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return (tuple(leaf.shape), str(leaf.dtype), zlib.crc32(data))
