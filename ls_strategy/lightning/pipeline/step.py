"""Pipelines under Lightning: ``training_step`` is unchanged and runs once per micro-batch on every stage.

::

    trainer's loop   training_step ───────────────────────────────> zero_grad ─> backward ─> optimizer step
    here             zero the gradients, split the batch,            (skipped)    hooks only   unchanged
                     all forwards and backwards in the schedule's
                     order, loss and logged values to all stages

What the last stage logs is averaged over the micro-batches and logged on every rank, so that callbacks, the progress
bar and checkpoints get the same values everywhere. So are the states of torchmetrics.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy._torch import is_compiled_function, tree_iter, tree_map
from ls_strategy.checkpoint.random import random_states, restore_random_states
from ls_strategy.config import ParallelConfig
from ls_strategy.device import host_backend
from ls_strategy.distributed.comm import process_group
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError, StateError
from ls_strategy.host.pytorch import (
    Strategy,
    TrainerFn,
    extract_batch_size,
    is_param_in_hook_signature,
    pl,
    rank_zero_info,
    rank_zero_warn,
)
from ls_strategy.lightning._private import batches_of
from ls_strategy.lightning.pipeline.log import Logged
from ls_strategy.lightning.pipeline.random import PipelineRandom
from ls_strategy.lightning.pipeline.shapes import derive
from ls_strategy.moe.losses import LossKeeper
from ls_strategy.parallel import logits
from ls_strategy.parallel.pipeline.batches import has_rows, merge, split
from ls_strategy.parallel.pipeline.p2p import make_links
from ls_strategy.parallel.pipeline.partition import Usage, find_row, keep_own, make_cut
from ls_strategy.parallel.pipeline.runner import Callbacks, PipelineRunner
from ls_strategy.parallel.pipeline.sample import sample_batch
from ls_strategy.parallel.pipeline.schedules import Action, least_micro_batches, place, placement_of, stages_per_rank_of
from ls_strategy.parallel.pipeline.shares import Shares
from ls_strategy.parallel.pipeline.simulate import Span
from ls_strategy.parallel.pipeline.stage import StageRunner
from ls_strategy.parallel.pipeline.timeline import TimelineRecorder
from ls_strategy.parallel.pipeline.trace import observe, stand_in
from ls_strategy.parallel.pipeline.transfer import SideLoss
from ls_strategy.parallel.pipeline.unchanged import WatchedBuffers
from ls_strategy.precision import at_least_fp32
from ls_strategy.zero.setup.share import Share

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Pipeline:
    """The stages of one module on this rank, which run Lightning's steps."""

    def __init__(
        self, config: ParallelConfig, module: pl.LightningModule, mesh: Mesh, device: torch.device, *, recomputes: bool
    ) -> None:
        """Partition the module: blocks of other ranks go to the meta device. Collective.

        Args:
            config: options.
            module: the full module.
            mesh: the ranks.
            device: the device of the module.
            recomputes: whether blocks are recomputed in backward. Then backward is not split into gradients of inputs
                and of weights, which would recompute twice.

        Raises:
            PlanError: the module cannot be partitioned this way.
        """
        size = mesh.pipeline.world_size
        stages = stages_per_rank_of(config.pp.schedule, config.pp.stages_per_rank)
        rank_of = place(size, stages, placement_of(config.pp.schedule))
        self.config, self.mesh, self.device = config, mesh, device
        self._ranks = size
        method, stack = config.pp.partition, config.pp.blocks
        usage = self._dry_run(module, len(rank_of)) if method == "flops" else None
        self.cut = make_cut(module, rank_of, method=method, stack=stack, usage=usage)
        rank_zero_info(f"ZeROStrategy: {config.pp.schedule} over {size} ranks\n{self.cut.table()}")
        norms = [name for name, m in module.named_modules() if isinstance(m, _BATCH_NORMS)]
        if norms:
            rank_zero_warn(
                f"{norms[0]} and others are batch norms: in a pipeline they see one micro-batch at a time, so their "
                "statistics are those of smaller batches. Group norm does not depend on the batch size."
            )
        self._names = {id(p): name for name, p in module.named_parameters()}
        keep_own(module, self.cut, mesh.pipeline.rank)
        self._names |= {id(p): name for name, p in module.named_parameters()}
        self._links = links = make_links(mesh.pipeline)
        self.recorder = TimelineRecorder(device)
        self.runner = PipelineRunner(
            StageRunner(module, self.cut, device, side=_side_loss(module)),
            links,
            config.pp.schedule,
            callbacks=Callbacks(before=self._before, after=self._after, on_last_backward=self._on_last_backward),
            split_backward=not recomputes,
        )
        stages = self.runner.stages
        self.random = PipelineRandom(device)
        stages.on_blocks = self.random.enter
        stages.on_end = lambda: self.random.enter(stages.last + 1)
        self._tied_group, self._tied_control = self._make_tied_groups()
        self._engine: Engine | None = None
        self._last = False
        self._shares: Shares | None = None

    def _dry_run(self, module: pl.LightningModule, stages: int) -> Usage:
        """Run the user's step once on fake tensors, on a copy of the module. Collective over all ranks.

        Raises:
            PlanError: it failed on some rank; raised on all.
        """
        states = random_states()
        outcome: Usage | str
        try:
            outcome = self._observed(module, stages)
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        finally:
            restore_random_states(states)
        outcomes = self.mesh.world.exchange_objects(outcome)
        for each in outcomes:
            if isinstance(each, str):
                raise PlanError(
                    "parallel.pipeline.partition='flops' runs the step once on fake tensors to count operations. That "
                    f"failed: {each} Set partition='parameters' instead."
                )
        return outcomes[0]  # batches of other replicas may have other shapes

    def _observed(self, module: pl.LightningModule, stages: int) -> Usage:
        trainer = module.trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        loaders = batches_of(trainer)
        if fitting:
            batch = tree_map(sample_batch, loaders)
        else:
            batch = sample_batch(next(iter(loaders)) if isinstance(loaders, list | tuple) else loaders)
        # The base class's method: ours compares the batches of a replica, which are not there yet.
        micro_batch = self._split(Strategy.batch_to_device(trainer.strategy, batch))[0][0]
        fake = cast("pl.LightningModule", stand_in(module))
        fake.trainer = trainer
        step = {
            TrainerFn.FITTING: fake.training_step,
            TrainerFn.VALIDATING: fake.validation_step,
            TrainerFn.TESTING: fake.test_step,
            TrainerFn.PREDICTING: fake.predict_step,
        }[cast("TrainerFn", trainer.state.fn)]
        more = [name for name in ("batch_idx", "dataloader_idx") if is_param_in_hook_signature(step, name)]
        with Logged(fake).recording():
            blocks = find_row(fake, stages, self.config.pp.blocks)
            return observe(fake, blocks, lambda part: step(part, *[0] * len(more)), micro_batch, self.device)

    def record(self, *, on: bool) -> None:
        """Start or stop recording the start and end of every action."""
        self.runner.recorder = self.recorder if on else None

    def spans(self) -> list[list[Span]]:
        """Return and clear the recordings of all ranks of the pipeline, by rank. Collective over the pipeline."""
        return self.mesh.pipeline.exchange_objects(self.recorder.take())

    @property
    def is_last(self) -> bool:
        """Return whether this rank holds the last stage, where the user's steps end."""
        return self.mesh.pipeline.rank == self.runner.last_rank

    # what the engine needs -------------------------------------------------------------------------------------------

    def _make_tied_groups(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Return two groups of the ranks with tied parameters, the second one on the host. Collective over all ranks.

        Other ranks get None.
        """
        members = {tied.ranks for tied in self.cut.tied if len(tied.ranks) > 1}
        if len(members) > 1:
            raise PlanError(
                f"Got parameters tied over different sets of stages: {sorted(members)}, but all must be tied over the "
                "same stages. Set another parallel.pipeline.partition or size."
            )
        group, control = None, None
        for ranks in self.mesh.shape.groups("pipeline") if members else ():
            tied = [ranks[i] for i in next(iter(members))]
            made = process_group("tied", tied), process_group("tied control", tied, backend=host_backend())
            if self.mesh.world.rank in tied:
                group, control = made
        self.mesh.world.own_open_sockets()
        return group, control

    def share(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> Share:
        """Return which parameters are on this rank, and remove the others from the optimizers' groups."""
        here = self.cut.names_of(self.mesh.pipeline.rank)
        params = dict(module.named_parameters(remove_duplicate=False))
        absent = frozenset(id(p) for name, p in params.items() if name not in here)
        tied = [t for t in self.cut.tied if len(t.ranks) > 1 and t.names[0] in here]
        replicas = [t for t in tied if self.mesh.pipeline.rank != t.ranks[0]]
        group_names: list[list[list[str]]] = []
        for optimizer in optimizers:
            group_names.append([[self._names[id(p)] for p in group["params"]] for group in optimizer.param_groups])
            for group in optimizer.param_groups:
                group["params"] = [p for p in group["params"] if id(p) not in absent]
        stages = [s for s, rank in enumerate(self.cut.rank_of) if rank == self.mesh.pipeline.rank]
        mine = [b for s in stages for b in self.cut.blocks[self.cut.bounds[s] : self.cut.bounds[s + 1]]]
        return Share(
            absent=absent,
            tied=frozenset(id(params[t.names[0]]) for t in tied),
            replicas=frozenset(id(params[t.names[0]]) for t in replicas),
            blocks=tuple(f"{name}." for name in mine),
            all_blocks=tuple(f"{name}." for name in self.cut.blocks),
            pipeline=self.mesh.pipeline,
            group_names=group_names,
            tied_group=self._tied_group,
            tied_control=self._tied_control,
        )

    # training --------------------------------------------------------------------------------------------------------

    def train(
        self, module: pl.LightningModule, engine: Engine, step: Callable[..., Any], args: Sequence[Any], *, last: bool
    ) -> Tensor:
        """Run forward and backward of all micro-batches of one batch. Collective.

        Args:
            module: the module.
            engine: the engine of its parameters.
            step: ``training_step``; called with a micro-batch instead of the batch.
            args: arguments of ``training_step``.
            last: whether gradients are complete afterwards and are reduced.

        Returns:
            The mean loss, on every rank, without a graph.
        """
        trainer = module.trainer
        parts, sizes = self._split(args[0])
        accumulate = trainer.accumulate_grad_batches
        if trainer.fit_loop.epoch_loop.batch_idx % accumulate == 0:
            engine.keeps_gradients = False
            for index in range(len(engine.optimizers)):
                engine.zero_grad(index)
        scale = engine.scaler.scale if engine.scaler is not None else 1.0
        self._engine, self._last = engine, last
        self._shares = shares = Shares(sizes)
        buffers = WatchedBuffers(module, self.cut.blocks)
        engine.begin_micro_batches()
        self.random.evaluated = 0

        def run(part: Any) -> Any:
            return step(part, *args[1:])

        with self.random.own_numbers(trainer):
            weights = shares.samples
            if self.is_last and len(parts) > 1:
                batches = [*parts, args[0]]
                shares.derivation, means = derive(module, self.runner.stages, run, batches, sizes, self.random.begin)
                weights = shares.of_loss(means)
            with (logged := Logged(module)).recording():
                report = self.runner.train(run, parts, [weight * scale / accumulate for weight in weights])
        engine.end_micro_batches(reduce=last)
        engine.keeps_gradients = True  # the loop calls zero_grad next, before its own, empty backward
        result = None
        if self.is_last:
            shares.losses = losses = [loss.item() for loss in report.losses]
            loss = sum(loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)  # NaN if no token
            dtype = at_least_fp32(report.losses[0].dtype)
            result = (loss, dtype, logged.summary(shares), shares.check() or _refusal(buffers))
        loss, dtype, summary, problem = self.runner.from_last(result)
        if problem is not None:
            raise StateError(problem)
        logged.replay(summary)
        return torch.tensor(loss, dtype=dtype, device=self.device, requires_grad=True)

    def _before(self, action: Action) -> None:
        if action.kind == "F":
            self.random.begin(action.micro_batch)
        else:
            assert self._engine is not None
            self._engine.begin_backward(eager=False)

    def _after(self, action: Action) -> None:
        stages = self.runner.stages
        if action.kind == "F":
            if action.stage == stages.last and self._shares is not None:
                self._shares.means[action.micro_batch] = stages.means
        else:
            assert self._engine is not None
            self._engine.end_backward()

    def _on_last_backward(self, stage: int) -> None:
        """Reduce gradients during the last backward, while other ranks still compute.

        This requires that the rank has only one stage.
        """
        assert self._engine is not None
        if self._last and self.cut.rank_of.count(self.mesh.pipeline.rank) == 1:
            self._engine.begin_backward(eager=True)

    # evaluation ------------------------------------------------------------------------------------------------------

    def evaluate(self, module: pl.LightningModule, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Run a validation, test or predict step and return its result on every rank. Collective."""
        parts, sizes = self._split(args[0])
        logged, buffers = Logged(module), WatchedBuffers(module, self.cut.blocks)
        self._shares = shares = Shares(sizes)
        self.random.evaluated += 1
        result = None

        def run(part: Any) -> Any:
            return step(part, *args[1:])

        with self.random.own_numbers(module.trainer):
            with logged.recording():
                results = self.runner.evaluate(lambda part: logits.gather(run(part)), parts)
            if self.is_last:
                if len(parts) > 1:
                    stages, batches = self.runner.stages, [*parts, args[0]]
                    shares.derive = lambda: derive(module, stages, run, batches, sizes, self.random.begin)[0]
                result = (merge(results, sizes, shares.of_batch), logged.summary(shares), _refusal(buffers))
        merged, summary, problem = self.runner.from_last(result)
        if problem is not None:
            raise StateError(problem)
        logged.replay(summary)
        return merged

    # batches ---------------------------------------------------------------------------------------------------------

    def _split(self, batch: Any) -> tuple[list[Any], list[int]]:
        """Return micro-batches of sizes as equal as possible, and their sizes.

        Raises:
            StateError: no tensor of the batch has its samples as rows.
        """
        tensors = any(isinstance(leaf, Tensor) for leaf in tree_iter(batch))
        samples = extract_batch_size(batch) if tensors else 0  # it raises for a batch without tensors
        if not has_rows(batch, samples):
            raise StateError(
                "a pipeline shards batches along the first dimension of their tensors, and this one has no tensor"
                + (f" with {samples} rows." if tensors else ".")
            )
        return split(batch, samples, self._number(samples))

    def _number(self, samples: int) -> int:
        number, size = self.config.pp.micro_batches, self.config.pp.micro_batch_size
        wanted = -(-samples // size) if size else number or 4 * self._ranks
        if wanted > samples and number:
            rank_zero_warn(
                f"Got parallel.pipeline.micro_batches={number}, but this batch has only {samples} samples: it is split "
                f"into {samples} micro-batches."
            )
        found, least = min(wanted, samples), least_micro_batches(self.config.pp.schedule, self._ranks)
        if found < least:
            rank_zero_warn(
                f"{self.config.pp.schedule} needs {least} micro-batches, but this batch of {samples} samples has only "
                f"{found}: it uses the schedule zbv."
            )
        return found


def _refusal(buffers: WatchedBuffers) -> str | None:
    name = buffers.changed()
    return name and (
        f"the step changes the buffer {name!r}. In a pipeline steps run once per micro-batch and stage, and end early "
        "on every stage but the last, so its value would be neither that of DDP nor the same on all ranks. Change it "
        "in a hook, such as on_train_batch_end, which gets the loss of the batch as outputs['loss']."
    )


def _side_loss(module: nn.Module) -> SideLoss:
    """Return how losses of MoE layers on earlier stages reach ``moe_losses(self)``, called on the last stage."""

    @cache  # on the first call, after everything that replaces layers
    def keepers() -> list[LossKeeper]:
        return [m for m in module.modules() if isinstance(m, LossKeeper)]

    def give() -> Tensor | None:
        losses = [loss for keeper in keepers() for loss in keeper.take()]
        return torch.stack(losses).sum() if losses else None

    def receive(loss: Tensor | None) -> None:
        if loss is not None:
            keepers()[-1].leave(loss)  # any keeper will do

    return SideLoss(give=give, receive=receive)


def refuse(module: pl.LightningModule, config: ParallelConfig, device: torch.device | None = None) -> None:
    """Refuse what a pipeline cannot do, before anything is partitioned."""
    if not module.automatic_optimization:
        raise PlanError(
            "Got a pipeline with automatic_optimization=False, but a pipeline runs all forwards and backwards of a "
            "batch together, without manual optimization and with one optimizer. Set automatic_optimization=True, or "
            "parallel.pipeline=1."
        )
    least = least_micro_batches(config.pp.schedule, config.pp.size)
    if (config.pp.micro_batches or least) < least:
        raise PlanError(
            f"Got parallel.pipeline.micro_batches={config.pp.micro_batches}, but {config.pp.schedule} over "
            f"{config.pp.size} ranks needs {least} or more. Set as many, or parallel.pipeline.schedule='zbv'."
        )
    if device is not None and device.type == "cuda" and os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        raise PlanError(
            "Got a pipeline with CUDA_LAUNCH_BLOCKING=1 in the environment, but a rank that waits for every launch "
            "waits for a receive before it sends what the sender needs, and all ranks would wait for ever. Unset it; "
            "to find a kernel that fails, train on one rank."
        )
    for name in ("forward", "training_step", "validation_step", "test_step", "predict_step"):
        if is_compiled_function(getattr(module, name)):
            raise PlanError(
                f"{name} is compiled (torch.compile(module) compiles all steps), but a pipeline exits it early on "
                "every stage but the last. Compile the blocks instead: for block in blocks: block.compile()."
            )
