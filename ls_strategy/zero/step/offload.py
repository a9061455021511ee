"""The offload of one engine: its tiers, the link between device and host, and the stream of updates."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from ls_strategy import device as dev
from ls_strategy.config import TierName, ZeROConfig
from ls_strategy.distributed.buffer_pool import BufferPool
from ls_strategy.distributed.comm import Comm
from ls_strategy.errors import LSError, PlanError
from ls_strategy.plan import FlatPlan, Plan
from ls_strategy.tiers import TIERS
from ls_strategy.tiers.base import Key, Tier
from ls_strategy.tiers.link import Link
from ls_strategy.tiers.nvme_folder import nvme_wear
from ls_strategy.tiers.stream import Stream
from ls_strategy.tiers.threads import use_share_of_cores
from ls_strategy.zero.flat.state_store import StateStore, gradient_buffers
from ls_strategy.zero.step.elementwise_states import moment_sizes
from ls_strategy.zero.step.fused_optimizers import FUSED_NAMES, kernel_for, kernels_of
from ls_strategy.zero.step.owner.full_tensor_groups import full_tensor_groups
from ls_strategy.zero.step.split_step import streamed_states
from ls_strategy.zero.step.where_to_step import measure
from ls_strategy.zero_stages import StagePolicy


def states_by_tier(
    plan: Plan, optimizers: Sequence[Optimizer], config: ZeROConfig
) -> dict[TierName, dict[Key, tuple[int, torch.dtype]]]:
    """Return elements and dtype of every state that one rank stores on each tier.

    Raises:
        PlanError: an option needs a fused update, but an optimizer has none.
    """
    return _states_by_tier(enumerate(f for u in plan.units for f in u.flats), plan.policy, optimizers, config)


def _states_by_tier(
    flats: Iterable[tuple[int, FlatPlan]], policy: StagePolicy, optimizers: Sequence[Optimizer], config: ZeROConfig
) -> dict[TierName, dict[Key, tuple[int, torch.dtype]]]:
    """Return what `states_by_tier` does, of some numbered buffers."""
    result: dict[TierName, dict[Key, tuple[int, torch.dtype]]] = {tier: {} for tier in TIERS}
    for number, flat in flats:
        numel = flat.layout.shard if policy.optimizer else flat.layout.numel
        masters = flat.master_states(numel)
        if flat.quantized is not None:
            masters = {"master": (flat.stored_bytes(policy), torch.uint8)}
        result[flat.optimizer_tier] |= {(number, name): size for name, size in masters.items()}
        if flat.has_own_shard(policy):
            result[flat.param_tier][number, "param"] = (numel, flat.dtype)
        if not TIERS[flat.gradient_tier].resident:
            result[flat.gradient_tier][number, "grad"] = (numel, torch.float32)
        for optimizer in (optimizers[i] for i in flat.owners):
            result[flat.optimizer_tier] |= _moments(number, numel, flat, optimizer, config)
    return {tier: sizes for tier, sizes in result.items() if TIERS[tier].open is not None}


def _moments(
    number: int, numel: int, flat: FlatPlan, optimizer: Optimizer, config: ZeROConfig
) -> dict[Key, tuple[int, torch.dtype]]:
    """Return elements and dtype of one optimizer's states, of one buffer.

    Raises:
        PlanError: an option needs a fused update, but the optimizer has none.
    """
    stepped = flat.unfrozen or flat
    kernel, tier = kernel_for(optimizer), stepped.optimizer_tier
    fp32 = stepped.master_dtype == torch.float32
    if kernel is None and stepped.split_masters:
        name = type(optimizer).__name__
        raise _without_kernel(f"precision.master_weights={stepped.split_masters!r}", name, "leave master_weights out")
    if kernel is None and not TIERS[tier].resident and any(full_tensor_groups(optimizer)):
        _refuse_without_kernel(optimizer, "cpu", config, fp32=True)  # other states are in host memory
        moments = streamed_states(optimizer)  # and what a fused update of some groups has
        for group, each in zip(optimizer.param_groups, kernels_of(optimizer), strict=True):
            moments |= {} if each is None else each.moments(group)
        return moment_sizes(number, numel, moments, "fp32") if fp32 and flat.trainable else {}
    if kernel is None or not fp32:
        _refuse_without_kernel(optimizer, tier, config, fp32=fp32)
        return {}
    moments = {n: s for group in optimizer.param_groups for n, s in kernel.moments(group).items()}
    return moment_sizes(number, numel, moments, config.precision.moments) if flat.trainable else {}


def _refuse_without_kernel(optimizer: Optimizer, tier: TierName, config: ZeROConfig, *, fp32: bool) -> None:
    moments = config.precision.moments
    if moments != "fp32" or not TIERS[tier].resident:
        option = f"precision.moments={moments!r}" if TIERS[tier].resident else f"offload.optimizer={tier!r}"
        given = type(optimizer).__name__ if fp32 else f"{type(optimizer).__name__} without fp32 master weights"
        cure = "offload to 'cpu' with moments='fp32', which supports any element-wise optimizer"
        raise _without_kernel(option, given, cure)


def _without_kernel(option: str, given: str, cure: str) -> PlanError:
    return PlanError(
        f"Got {option} with {given}, but it needs a fused update, which exists for {', '.join(FUSED_NAMES)} "
        "(exactly these classes, fp32 masters, without amsgrad, capturable, differentiable, foreach=True or "
        f"fused=False). Use one of them, or {cure}."
    )


_PATIENCE_S = 10.0
"""How long the end of a run waits for updates: after a failure, a drive may hang."""


@dataclass
class Offload:
    """Tiers and threads of one engine."""

    config: ZeROConfig
    link: Link
    stream: Stream
    tiers: dict[TierName, Tier]
    ring: BufferPool
    worker: ThreadPoolExecutor | None
    rank: int = 0
    more_tiers: list[Tier] = field(default_factory=list)
    """Tiers of buffers that were unfrozen."""

    writes: deque[Future[None]] = field(default_factory=deque)
    """Gradients on their way to a drive."""

    streamed: bool = False
    """States in host memory are copied to the device, updated there and copied back."""

    reason: str = ""
    """Why `streamed` is what it is."""

    threads: int = 0
    """Threads that the host's updates got instead of one; 0 where nothing was changed."""

    finalizer: Any = None

    @classmethod
    def prepare(
        cls, plan: Plan, optimizers: list[Optimizer], config: ZeROConfig, comm: Comm, device: torch.device
    ) -> Offload:
        """Check the NVMe folder, reserve space in it, and start threads. Collective.

        Raises:
            LSError: the states do not fit, or an optimizer does not. An error of one rank is raised on all ranks.
        """
        link = Link(device)
        leased = any(not kind.resident and name in config.offload.tiers for name, kind in TIERS.items())
        if leased:
            # A Trainer and its model are a circle, so files and threads of an earlier fit wait for the collector. What
            # tensors held in such circles is seen when they are gone.
            gc.collect()
            gc.collect()
        tiers: dict[TierName, Tier] = {}
        error: LSError | None = None
        try:
            sizes = states_by_tier(plan, optimizers, config)
            for name, kind in TIERS.items():
                if kind.open is not None and name in config.offload.tiers:
                    tiers[name] = kind.open(sizes[name], config.offload, device, comm.rank)
        except LSError as found:
            error = found
        for rank, message in enumerate(comm.exchange_objects(None if error is None else str(error))):
            if message is not None:
                raise (error if rank == comm.rank and error else PlanError(f"rank {rank}: {message}"))
        background = leased or (config.offload.any_state and dev.is_accelerator(device))
        worker = ThreadPoolExecutor(1, "ls_strategy-background", link.bind_thread) if background else None
        result = cls(
            config,
            link,
            Stream(threaded=bool(config.sharding.overlap_step), on_start=link.bind_thread),
            tiers,
            gradient_buffers(device),
            worker,
            comm.rank,
        )
        result.threads = use_share_of_cores(device) if config.offload.any_state else 0
        result.choose_where_to_step(device)
        result.finalizer = weakref.finalize(result, _close, result.stream, worker, tiers, result.more_tiers)
        return result

    def choose_where_to_step(self, device: torch.device) -> None:
        """Choose where offloaded states are updated; ``auto`` measures. The result is bitwise equal either way."""
        if self.config.offload.optimizer is None or not dev.is_accelerator(device):
            return
        if self.config.precision.split_masters is not None and self.config.offload.parameters is None:
            self.streamed, self.reason = True, "where the upper parts of split master weights are"
            return
        self.streamed = self.config.offload.step_on == "device"
        self.reason = f"offload.step_on={self.config.offload.step_on}"
        if self.config.offload.step_on == "auto":
            speed = measure(device, self.link)
            self.streamed = speed.device_is_faster
            self.reason = f"measured: {speed}"

    def describe(self, plan: Plan) -> str:
        """Return the lines of the log about offload; empty without offload."""
        lines: list[str] = []
        if self.config.offload.optimizer is not None and self.reason:
            place = "streamed through the device" if self.streamed else "updated by the CPU"
            lines.append(f"  offloaded states are {place} ({self.reason})")
        if self.threads:
            lines.append(
                f"  the host updates with {self.threads} threads per rank, not with the one of torchrun's default "
                "OMP_NUM_THREADS=1; another number there is kept"
            )
        if "nvme" in self.config.offload.tiers:
            read, written = plan.drive_bytes_per_step(gradients_stored=True)
            lines.append(
                f"  NVMe ({self.config.offload.nvme_path}): up to {read / 1e9:.3f} GB read per step and rank. "
                f"{nvme_wear(written)}"
            )
        return "\n".join(lines)

    def store(self, number: int) -> StateStore:
        """Return the store of flat buffer ``number``."""
        return StateStore(number, self.tiers, self.link, self.ring, self.worker, self.writes)

    def stores_of_unfrozen(
        self, plans: Mapping[int, FlatPlan], policy: StagePolicy, optimizers: Sequence[Optimizer]
    ) -> dict[int, StateStore]:
        """Reserve space for buffers that begin to train, by number; return their stores. Not collective.

        Raises:
            LSError: the states do not fit on a tier.
        """
        sizes = _states_by_tier(plans.items(), policy, optimizers, self.config)
        tiers: dict[TierName, Tier] = {}
        for name, kind in TIERS.items():
            if kind.open is not None and sizes[name]:
                tiers[name] = kind.open(sizes[name], self.config.offload, self.link.device, self.rank)
                self.more_tiers.append(tiers[name])
        return {number: StateStore(number, tiers, self.link, self.ring, self.worker, self.writes) for number in plans}

    def rest(self) -> None:
        """End the thread of updates, which the next update starts again. States stay where they are."""
        self.stream.close(_PATIENCE_S)

    def close(self) -> None:
        """End the threads, and free memory and files. The states are lost."""
        self.finalizer()


def _close(
    stream: Stream, worker: ThreadPoolExecutor | None, tiers: dict[TierName, Tier], more_tiers: list[Tier]
) -> None:
    stream.close()
    if worker is not None:
        worker.shutdown(wait=True)
    for tier in (*tiers.values(), *more_tiers):
        tier.close()
