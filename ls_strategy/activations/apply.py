"""Applies recompute, offload and partitioning of activations to a model from outside.

=====================  ================================================================================================
configuration          what is saved for backward, and where
=====================  ================================================================================================
none                   everything that backward needs, on the device
recompute              the inputs of the modules; a selective policy also saves the outputs of some operations
offload                everything that backward needs and that is large enough, on the tier
recompute + offload    the inputs of the modules, on the tier; outputs that a selective policy saves stay on the device,
                       where ``torch.utils.checkpoint`` holds them and saved-tensor hooks cannot reach them
recompute + partition  1 / size of each input of the modules, on the device
all three              1 / size of each input of the modules, on the tier
=====================  ================================================================================================

Losses and gradients are bitwise equal in every row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from ls_strategy._torch import storage_key
from ls_strategy.activations.offload import ActivationOffload
from ls_strategy.activations.partition import ActivationPartition
from ls_strategy.activations.recompute import Recompute, apply_recompute
from ls_strategy.activations.saved import Keeper, SavedTensors
from ls_strategy.activations.storage import NVMeFolder
from ls_strategy.config import ActivationOffloadConfig, RecomputeConfig
from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import ConfigError, PlanError

MIN_PARTITIONED_BYTES = 1 << 16
"""Smaller inputs stay replicated: the gather would cost more than the memory is worth."""


class Activations:
    """Recompute, offload and partitioning of one model's activations, from construction until `remove`.

    The constructor is not collective.

    Args:
        model: The model. Blocks that use ``torch.compile`` must be compiled already.
        device: Device of the activations.
        recompute: Selects the modules that are recomputed.
        offload: Selects the tier that saved tensors move to.
        partition: Axis over which the inputs of recomputed modules are replicated. An axis of one rank has no
            effect.
        protected: Returns the `storage_key` of memory that must stay in place, in addition to the model's
            parameters and buffers: the buffers that sharded parameters are gathered into. Called at the start of
            each forward.
        drive: Folder on the NVMe device, required if ``offload`` uses the ``nvme`` tier.

    Raises:
        ConfigError: Partitioning without recompute, a missing or unsuitable folder, or an unknown operation.
        PlanError: The model has no module to recompute, or partitioning was requested for compiled modules.
    """

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
        if partition is not None and recompute is None:
            raise ConfigError(
                "Got activations.partitioning without activations.checkpointing, but only the inputs of modules that "
                "are recomputed are the same on all tensor-parallel ranks. Set activations.checkpointing='full' too."
            )
        if offload is not None and offload.tier == "nvme" and (drive is None or not drive.path):
            raise ConfigError(
                "Got activations.offload='nvme' without a folder. Set offload.nvme_path to a folder on a local NVMe "
                "device."
            )
        self._model = model
        self._protected = protected
        self._own = self._own_storages()
        self.offload = None if offload is None else ActivationOffload(offload, device, drive)
        self.partition: ActivationPartition | None = None
        if partition is not None and partition.size > 1:
            self.partition = ActivationPartition(partition, device, self.offload)
        self.saved: SavedTensors | None = None
        keeper: Keeper | None = self.partition or self.offload
        if keeper is not None:
            self.saved = SavedTensors(
                keeper,
                device,
                min_bytes=MIN_PARTITIONED_BYTES if offload is None else offload.min_bytes,
                protected=self._all_protected,
                floating_only=self.partition is not None,
            )
        self.recompute: Recompute | None = None
        try:
            if recompute is not None:
                around_inputs = nullcontext if self.saved is None else self.saved.around
                self.recompute = apply_recompute(model, recompute, around_inputs)
            if self.partition is not None and self.recompute is not None and self.recompute.compiled:
                raise PlanError(
                    "Got activations.partitioning with compiled modules, but compiled code chooses itself what it "
                    "saves for backward. Remove activations.partitioning or torch.compile."
                )
        except BaseException:
            self.remove()
            raise

    def around_forward(self) -> AbstractContextManager[None]:
        """Return the context manager for the forward of a training step.

        It installs the saved-tensor hooks if offload is used without recompute, or with compiled recomputed modules:
        the hooks cannot tell the inputs of a compiled module from other saved tensors. Otherwise it does nothing.
        """
        self._own = self._own_storages()
        inputs_only = self.recompute is not None and not self.recompute.compiled
        return nullcontext() if self.saved is None or inputs_only else self.saved.around()

    def describe(self) -> str:
        """Return one line for the log."""
        items = []
        if self.recompute is not None:
            items.append(f"recomputed: {self.recompute.describe()}")
        if self.partition is not None:
            axis = self.partition.axis
            items.append(f"inputs partitioned over the {axis.size} ranks of axis {axis.name!r}")
        if self.offload is not None:
            config = self.offload.config
            what = "saved tensors" if self.recompute is None else "inputs of recomputed modules"
            items.append(
                f"{what} of at least {config.min_bytes / 2**20:g} MiB offloaded to {self.offload.storage.name}, "
                f"{config.in_flight_bytes / 2**20:g} MiB in flight"
            )
        return "; ".join(items) or "kept on the device"

    def metrics(self) -> dict[str, float]:
        """Return numbers for a logger: total bytes and seconds, peaks, and bytes stored now."""
        numbers: dict[str, float] = {}
        if self.recompute is not None:
            numbers["recomputed_modules"] = len(self.recompute.modules)
        if self.saved is not None:
            numbers["packed_bytes"] = self.saved.bytes_packed
            numbers["left_bytes"] = self.saved.bytes_left
        if self.partition is not None:
            numbers["partitioned_bytes"] = self.partition.bytes_full
            numbers["part_bytes"] = self.partition.bytes_kept
            numbers["part_buffer_bytes"] = self.partition.buffer.nbytes
        if self.offload is not None:
            numbers |= self.offload.metrics()
        return numbers

    def remove(self) -> None:
        """Restore the modules' forwards, and free host memory and files once no graph needs them. Idempotent."""
        if self.recompute is not None:
            self.recompute.remove()
        if self.saved is not None:
            # After a failed backward, torch keeps the remaining graph in a queue until the thread's next backward.
            # If that never came, the handles would be destroyed after the interpreter has shut down.
            with torch.inference_mode(False), torch.enable_grad():
                torch.ones(1, requires_grad=True).sum().backward()
        if self.offload is not None:
            self.offload.close()

    def _all_protected(self) -> set[int]:
        return self._own if self._protected is None else self._own.union(self._protected())

    def _own_storages(self) -> set[int]:
        return {storage_key(t) for t in (*self._model.parameters(), *self._model.buffers())}
