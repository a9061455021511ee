"""What was chosen for a model's activations, applied to the model from outside: recomputed, offloaded, partitioned.

=====================  ================================================================================================
chosen                 what is saved, and where it is
=====================  ================================================================================================
nothing                all that backward needs, on the device
recompute              the inputs of the modules; with a selective policy also the outputs of some operations
offload                all that backward needs, above a size, on the tier
recompute + offload    the inputs of the modules, on the tier; what a selective policy keeps stays on the device, where
                       ``torch.utils.checkpoint`` holds it out of reach
recompute + partition  1 / size of each input of the modules, on the device
all three              1 / size of each input of the modules, on the tier
=====================  ================================================================================================

Losses and gradients are the same bits in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ls_strategy._compat import storage_key
from ls_strategy.activations.offload import ActivationOffload
from ls_strategy.activations.partition import ActivationPartition
from ls_strategy.activations.recompute import Recompute, apply_recompute
from ls_strategy.activations.saved import Keeper, SavedTensors
from ls_strategy.activations.storage import NVMeFolder
from ls_strategy.config import ActivationOffloadConfig, RecomputeConfig
from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import ConfigError, PlanError

MIN_PARTITIONED_BYTES = 1 << 16
"""Smaller inputs are kept whole: gathering them costs more than they take."""


class Activations:
    """Recompute, offload and partition of one model's activations, from now until `remove`."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        recompute: RecomputeConfig | None = None,
        offload: ActivationOffloadConfig | None = None,
        partition: Axis | None = None,
        protected: Callable[[], Collection[int]] | None = None,
        drive: NVMeFolder | None = None,
    ) -> None:
        """Apply. Not collective.

        Args:
            model: compiled blocks are compiled already.
            device: of the activations.
            recompute: which modules keep their inputs alone.
            offload: where saved tensors rest.
            partition: the axis over which inputs of recomputed modules are replicated; one rank is no partition.
            protected: `storage_key` of memory that stays where it is, beside that of the model's own parameters and
                buffers: what sharded parameters are gathered into. Asked when a forward begins, so it should be cheap.
            drive: for ``offload`` to ``nvme``: the folder.

        Raises:
            ConfigError: partition without recompute, no folder for the drive or an unfit one, an unknown operation.
            PlanError: no module to recompute, or a partition of what compiled code keeps.
        """
        if partition is not None and recompute is None:
            raise ConfigError(
                "Got activations.partitioning without activations.checkpointing, but only the inputs of modules that "
                "are recomputed are the same on all tensor-parallel ranks. Set activations.checkpointing='full' too."
            )
        self._model = model
        self._device = device
        self._protected = protected
        self._own = self._own_storages()
        self.offload = self._make_offload(offload, drive)
        self.partition: ActivationPartition | None = None
        if partition is not None and partition.size > 1:
            self.partition = ActivationPartition(partition, device, self.offload)
        self.saved = self._make_hooks(offload)
        self.recompute: Recompute | None = None
        try:
            if recompute is not None:
                around_inputs = nullcontext if self.saved is None else self.saved.around
                self.recompute = apply_recompute(model, recompute, around_inputs)
            self._check_compiled()
        except BaseException:
            self.remove()
            raise

    def around_forward(self) -> AbstractContextManager[None]:
        """Enter this around the training step's forward.

        Hooks on saved tensors are in force in it where there is offload without recompute, or with recomputed modules
        that are compiled, whose inputs cannot be told apart from outside. Otherwise it does nothing.
        """
        self._own = self._own_storages()
        inputs_only = self.recompute is not None and not self.recompute.compiled
        return nullcontext() if self.saved is None or inputs_only else self.saved.around()

    def describe(self) -> str:
        """One line for the log."""
        words = []
        if self.recompute is not None:
            words.append(f"recomputed: {self.recompute.describe()}")
        if self.partition is not None:
            axis = self.partition.axis
            words.append(f"inputs kept in {axis.size} parts over axis {axis.name!r}")
        if self.offload is not None:
            config = self.offload.config
            what = "everything saved" if self.recompute is None else "inputs of recomputed modules"
            words.append(
                f"{what} from {config.min_bytes / 2**20:g} MiB on offloaded to {self.offload.place.name}, "
                f"{config.in_flight_bytes / 2**20:g} MiB in flight"
            )
        return "; ".join(words) or "kept on the device"

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger: bytes and seconds since the start, peaks, and what is away now."""
        numbers: dict[str, float] = {}
        if self.recompute is not None:
            numbers["recomputed_modules"] = len(self.recompute.modules)
        if self.saved is not None:
            numbers["packed_bytes"] = self.saved.bytes_packed
            numbers["left_bytes"] = self.saved.bytes_left
        if self.partition is not None:
            numbers["partitioned_bytes"] = self.partition.bytes_whole
            numbers["part_bytes"] = self.partition.bytes_kept
            numbers["part_buffer_bytes"] = self.partition.buffer.nbytes
        if self.offload is not None:
            numbers |= self.offload.metrics()
        return numbers

    def remove(self) -> None:
        """Give modules their forwards back, and host memory and files when no graph needs them any more. Idempotent."""
        if self.recompute is not None:
            self.recompute.remove()
        if self.saved is not None:
            # After a backward that failed, torch holds the rest of its graph in a queue until the thread's next
            # backward. At the end of the process it would take handles apart when there is no Python any more.
            with torch.inference_mode(False), torch.enable_grad():
                torch.ones(1, requires_grad=True).sum().backward()
        if self.offload is not None:
            self.offload.close()

    def _make_offload(
        self, config: ActivationOffloadConfig | None, drive: NVMeFolder | None
    ) -> ActivationOffload | None:
        if config is None:
            return None
        if config.tier == "nvme" and (drive is None or not drive.path):
            raise ConfigError(
                "Got activations.offload='nvme' without a folder. Set offload.nvme_path to one on a local drive."
            )
        return ActivationOffload(config, self._device, drive)

    def _make_hooks(self, config: ActivationOffloadConfig | None) -> SavedTensors | None:
        keeper: Keeper | None = self.partition or self.offload
        if keeper is None:
            return None
        return SavedTensors(
            keeper,
            self._device,
            min_bytes=MIN_PARTITIONED_BYTES if config is None else config.min_bytes,
            protected=self._all_protected,
            floating_only=self.partition is not None,
        )

    def _check_compiled(self) -> None:
        if self.partition is not None and self.recompute is not None and self.recompute.compiled:
            raise PlanError(
                "activation partitioning of compiled modules: what compiled code keeps is chosen inside it. Leave "
                "activations.partitioning or torch.compile out."
            )

    def _all_protected(self) -> set[int]:
        return self._own if self._protected is None else self._own.union(self._protected())

    def _own_storages(self) -> set[int]:
        return {storage_key(t) for t in (*self._model.parameters(), *self._model.buffers())}
