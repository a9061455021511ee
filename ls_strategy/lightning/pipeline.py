"""A pipeline inside Lightning: ``training_step`` stays as written, and runs once per micro-batch on every stage.

::

    trainer's loop   training_step ───────────────────────────────> zero_grad ─> backward ─> optimizer step
    here             zero the gradients, split the batch,            (kept)       hooks only   as without
                     all forwards and backwards in the schedule's
                     order, loss and logged values to all stages

What the last stage logs is averaged over the micro-batches and logged on every rank, so that callbacks, the progress
bar and checkpoints see the same everywhere; states of torchmetrics follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.data import extract_batch_size
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy._compat import batches_of, is_compiled_function, metric_state, set_metric_state, tree_map
from ls_strategy.checkpoint.random import random_states, restore_random_states
from ls_strategy.config import ParallelConfig
from ls_strategy.distributed.comm import process_group
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.engine import Engine
from ls_strategy.errors import PlanError, StateError
from ls_strategy.moe.losses import LossKeeper
from ls_strategy.parallel.pipeline.batches import has_rows, mean_of, merge, split
from ls_strategy.parallel.pipeline.p2p import make_links
from ls_strategy.parallel.pipeline.partition import Usage, find_row, keep_own, make_cut
from ls_strategy.parallel.pipeline.runner import Callbacks, PipelineRunner
from ls_strategy.parallel.pipeline.sample import sample_batch
from ls_strategy.parallel.pipeline.schedules import Action, least_micro_batches, place, placement_of, stages_per_rank_of
from ls_strategy.parallel.pipeline.stage import StageRunner
from ls_strategy.parallel.pipeline.timeline import Span, TimelineRecorder
from ls_strategy.parallel.pipeline.trace import observe, stand_in
from ls_strategy.parallel.pipeline.transfer import SideLoss
from ls_strategy.parallel.random import draw, generator_of, hash64, position, set_state
from ls_strategy.zero.share import Share

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Pipeline:
    """The stages of one module on this rank, and the way from Lightning's steps to them."""

    def __init__(
        self, config: ParallelConfig, module: pl.LightningModule, mesh: Mesh, device: torch.device, *, recomputes: bool
    ) -> None:
        """Divide the module: what other ranks hold goes to the meta device here. Collective.

        Args:
            config: options.
            module: whole.
            mesh: the ranks.
            device: where it will be.
            recomputes: blocks are computed again in backward, which then is not divided into inputs and weights: they
                would be computed again for each.

        Raises:
            PlanError: the module cannot be divided so.
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
                f"{norms[0]} and others are batch norms: in a pipeline they see one micro-batch at a time, so that "
                "statistics are those of smaller batches. Group norm does not depend on it."
            )
        self._names = {id(p): name for name, p in module.named_parameters()}
        keep_own(module, self.cut, mesh.pipeline.rank)
        self._names |= {id(p): name for name, p in module.named_parameters()}
        self._links = links = make_links(mesh.pipeline, [list(group) for group in mesh.shape.groups("pipeline")])
        self.recorder = TimelineRecorder(device)
        self.runner = PipelineRunner(
            StageRunner(module, self.cut, device, side=_side_loss(module)),
            links,
            config.pp.schedule,
            callbacks=Callbacks(before=self._before, after=self._after, on_last_backward=self._on_last_backward),
            split_backward=not recomputes,
        )
        self._tied_group = self._make_tied_group()
        self._engine: Engine | None = None
        self._last = False
        self._evaluated = 0  # batches since the last one that was trained

    def _dry_run(self, module: pl.LightningModule, stages: int) -> Usage:
        """The user's step once, on the shapes of a batch, on a copy of the module. Collective over all ranks.

        Raises:
            PlanError: it failed on some rank; on all.
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
                    "parallel.pipeline.partition='flops' calls the step once, without values, on a batch, to count "
                    f"operations. That failed: {each} Balance 'parameters' instead."
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
        # The class's own: ours compares the batches of a replica, which are still to come.
        micro_batch = self._split(Strategy.batch_to_device(trainer.strategy, batch))[0][0]
        twin = cast("pl.LightningModule", stand_in(module))
        twin.trainer = trainer
        step = {
            TrainerFn.FITTING: twin.training_step,
            TrainerFn.VALIDATING: twin.validation_step,
            TrainerFn.TESTING: twin.test_step,
            TrainerFn.PREDICTING: twin.predict_step,
        }[cast("TrainerFn", trainer.state.fn)]
        more = [name for name in ("batch_idx", "dataloader_idx") if is_param_in_hook_signature(step, name)]
        with Logged(twin).recording():
            blocks = find_row(twin, stages, self.config.pp.blocks)
            return observe(twin, blocks, lambda part: step(part, *[0] * len(more)), micro_batch, self.device)

    def record(self, *, on: bool) -> None:
        """Note start and end of every action from now on, or no longer."""
        self.runner.recorder = self.recorder if on else None

    def spans(self) -> list[list[Span]]:
        """What all ranks of the pipeline have noted, by rank; forgotten then. Collective over the pipeline."""
        return self.mesh.pipeline.exchange_objects(self.recorder.take())

    @property
    def is_last(self) -> bool:
        """Whether the user's steps run to their end on this rank."""
        return self.mesh.pipeline.rank == self.runner.last_rank

    def break_connections(self) -> None:
        """Make the ranks that wait for this one fail at once. Not collective."""
        self._links.break_connections()

    # what the engine needs -------------------------------------------------------------------------------------------

    def _make_tied_group(self) -> dist.ProcessGroup | None:
        """Of the ranks that hold what is tied, next to each other in every pipeline. Collective over all ranks."""
        members = {tied.ranks for tied in self.cut.tied if len(tied.ranks) > 1}
        if len(members) > 1:
            raise PlanError(f"parameters are tied over different sets of stages: {sorted(members)}. Cut elsewhere.")
        mine = None
        for ranks in self.mesh.shape.groups("pipeline") if members else ():
            group = process_group("tied", [ranks[i] for i in next(iter(members))])
            if self.mesh.world.rank in ranks and self.mesh.pipeline.rank in next(iter(members)):
                assert isinstance(group, dist.ProcessGroup)
                mine = group
        self.mesh.world.own_open_sockets()
        return mine

    def share(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> Share:
        """What this rank holds; takes what it does not out of the optimizers' groups."""
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
        )

    # training --------------------------------------------------------------------------------------------------------

    def train(
        self, module: pl.LightningModule, engine: Engine, step: Callable[..., Any], args: Sequence[Any], *, last: bool
    ) -> Tensor:
        """All micro-batches of one batch, forward and backward. Collective.

        Args:
            module: whose ``training_step`` it is.
            engine: of its parameters.
            step: takes ``args`` with a micro-batch for the batch.
            args: of ``training_step``.
            last: gradients are complete afterwards, and are sent.

        Returns:
            the mean loss, on every rank, without a graph.
        """
        trainer = module.trainer
        parts, sizes = self._split(args[0])
        accumulate = trainer.accumulate_grad_batches
        if trainer.fit_loop.epoch_loop.batch_idx % accumulate == 0:
            engine.keeps_gradients = False
            for index in range(len(engine.optimizers)):
                engine.zero_grad(index)
        scale = engine.scaler.scale if engine.scaler is not None else 1.0
        shares = [size / sum(sizes) for size in sizes]
        self._engine, self._last = engine, last
        logged = Logged(module)
        engine.begin_micro_batches()
        self._evaluated = 0
        with self._own_random_numbers(trainer), logged.recording():
            report = self.runner.train(
                lambda part: step(part, *args[1:]), parts, [share * scale / accumulate for share in shares]
            )
        engine.end_micro_batches(reduce=last)
        engine.keeps_gradients = True  # the loop zeroes them next, before its own, empty, backward
        loss = sum(loss.item() * share for loss, share in zip(report.losses, shares, strict=self.is_last))
        loss, told = self.runner.from_last((loss, logged.summary(shares, sizes) if self.is_last else None))
        logged.replay(told)
        return torch.tensor(loss, device=self.device, requires_grad=True)

    def _before(self, action: Action) -> None:
        if action.kind != "F":
            assert self._engine is not None
            self._engine.begin_backward(eager=False)

    def _after(self, action: Action) -> None:
        if action.kind != "F":
            assert self._engine is not None
            self._engine.end_backward()

    def _on_last_backward(self, stage: int) -> None:
        """With one stage per rank, the last backward sends what it completes, beside what other ranks still compute."""
        assert self._engine is not None
        if self._last and self.cut.rank_of.count(self.mesh.pipeline.rank) == 1:
            self._engine.begin_backward(eager=True)

    # evaluation ------------------------------------------------------------------------------------------------------

    def evaluate(self, module: pl.LightningModule, step: Callable[..., Any], args: Sequence[Any]) -> Any:
        """A validation, test or predict step; what it returns is on every rank. Collective."""
        parts, sizes = self._split(args[0])
        logged = Logged(module)
        self._evaluated += 1
        with self._own_random_numbers(module.trainer), logged.recording():
            results = self.runner.evaluate(lambda part: step(part, *args[1:]), parts)
        shares = [size / sum(sizes) for size in sizes]
        merged = merge(results, shares) if self.is_last else None
        merged, told = self.runner.from_last((merged, logged.summary(shares, sizes) if self.is_last else None))
        logged.replay(told)
        return merged

    # batches ---------------------------------------------------------------------------------------------------------

    def _split(self, batch: Any) -> tuple[list[Any], list[int]]:
        """Micro-batches of as equal sizes as can be, and their sizes.

        Raises:
            StateError: no tensor of the batch has its samples as rows.
        """
        samples = extract_batch_size(batch)
        count = self._count(samples)

        if not has_rows(batch, samples):
            raise StateError(
                "a pipeline shards batches along the first dimension of their tensors, and this one has no tensor "
                f"with {samples} rows."
            )
        return split(batch, samples, count)

    def _count(self, samples: int) -> int:
        """Micro-batches of a batch."""
        number, size = self.config.pp.micro_batches, self.config.pp.micro_batch_size
        wanted = -(-samples // size) if size else number or 4 * self._ranks
        if wanted > samples and number:
            rank_zero_warn(
                f"a batch of {samples} samples makes as many micro-batches, not "
                f"parallel.pipeline.micro_batches={number}."
            )
        found, least = min(wanted, samples), least_micro_batches(self.config.pp.schedule, self._ranks)
        if found < least:
            rank_zero_warn(
                f"a batch of {samples} samples makes {found} micro-batches, {self.config.pp.schedule} needs "
                f"{least}: it goes by zbv."
            )
        return found

    @contextmanager
    def _own_random_numbers(self, trainer: pl.Trainer) -> Generator[None, None, None]:
        """Inside, every stage draws its own numbers; afterwards all go on from where they were.

        The numbers follow from the generator's state and the place in the run, which a checkpoint restores.
        """
        place = hash64(trainer.current_epoch << 32 | trainer.fit_loop.epoch_loop.batch_idx + 1)
        seed = hash64(place ^ hash64(self._evaluated << 16 | self.mesh.pipeline.rank))
        generators = {generator_of(torch.device("cpu")), generator_of(self.device)}
        kept = []
        for generator in generators:
            kept.append((generator, position(generator)))
            number, _ = draw(generator)
            generator.manual_seed(hash64(seed ^ number) >> 32)
        try:
            yield
        finally:
            for generator, before in kept:
                set_state(generator, before)


def _side_loss(module: nn.Module) -> SideLoss:
    """What MoE layers of earlier stages leave for ``moe_losses(self)``, which users call on the last one."""

    @cache  # at the first call, when all that changes layers has done so
    def keepers() -> list[LossKeeper]:
        return [m for m in module.modules() if isinstance(m, LossKeeper)]

    def give() -> Tensor | None:
        losses = [loss for keeper in keepers() for loss in keeper.take()]
        return torch.stack(losses).sum() if losses else None

    def receive(loss: Tensor | None) -> None:
        if loss is not None:
            keepers()[-1].leave(loss)  # whose it is does not matter

    return SideLoss(give=give, receive=receive)


# --- what steps log --------------------------------------------------------------------------------------------------


class Logged:
    """What a module logs while its step runs once per micro-batch, to be logged once."""

    def __init__(self, module: pl.LightningModule) -> None:
        """Record nothing yet."""
        self._module = module
        self._values: dict[str, tuple[list[Any], dict[str, Any]]] = {}
        self._metrics = {name: m for name, m in module.named_modules() if hasattr(m, "metric_state")}
        self._counts = {name: metric_state(m)[0] for name, m in self._metrics.items()}

    @contextmanager
    def recording(self) -> Generator[None, None, None]:
        """Inside, ``self.log`` and ``self.log_dict`` of the module note what they are given."""
        module: Any = self._module

        def log(name: str, value: Any, **options: Any) -> None:
            self._values.setdefault(name, ([], options))[0].append(value)

        def log_dict(values: Any, **options: Any) -> None:
            for name, value in values.items():
                log(name, value, **options)

        module.log, module.log_dict = log, log_dict
        try:
            yield
        finally:
            del module.log, module.log_dict

    def summary(self, shares: Sequence[float], sizes: Sequence[int]) -> Any:
        """What to log, and the metrics' states: small, on the CPU."""
        told: list[tuple[str, Any, dict[str, Any]]] = []
        for name, (values, options) in self._values.items():
            options = dict(options)
            if isinstance(options.get("batch_size"), int):
                options["batch_size"] = sum(sizes)
            metric = next((n for n, m in self._metrics.items() if m is values[0]), None)
            if metric is not None:
                told.append((name, ("metric", metric), options))
            else:
                told.append((name, ("value", mean_of(values, shares, options.get("reduce_fx", "mean"))), options))
        states = {
            name: metric_state(m) for name, m in self._metrics.items() if metric_state(m)[0] != self._counts[name]
        }
        return told, states

    def replay(self, told: Any) -> None:
        """Log it, on every rank alike."""
        values, states = told
        for name, state in states.items():
            set_metric_state(self._metrics[name], state)
        for name, (kind, value), options in values:
            shown: Any = self._metrics[value] if kind == "metric" else value
            self._module.log(name, shown, **options)


def refuse(module: pl.LightningModule, config: ParallelConfig) -> None:
    """What a pipeline cannot do, before anything is divided.

    Raises:
        PlanError: with the cure.
    """
    if not module.automatic_optimization:
        raise PlanError(
            "a pipeline runs all forwards and backwards of a batch together, so manual optimization has no place in "
            "it, nor have several optimizers: use automatic_optimization=True, or parallel.pipeline=1."
        )
    least = least_micro_batches(config.pp.schedule, config.pp.size)
    if (config.pp.micro_batches or least) < least:
        raise PlanError(
            f"Got parallel.pipeline.micro_batches={config.pp.micro_batches}, but {config.pp.schedule} over "
            f"{config.pp.size} ranks needs {least} or more. Set as many, or parallel.pipeline.schedule='zbv'."
        )
    for name in ("forward", "training_step", "validation_step", "test_step", "predict_step"):
        if is_compiled_function(getattr(module, name)):
            raise PlanError(
                f"{name} is compiled (torch.compile(module) compiles all steps), and a pipeline leaves it in the "
                "middle on every stage but the last. Compile the blocks instead: for block in blocks: block.compile()."
            )
    for name, given in (
        ("parallel.context", config.context > 1),
        ("parallel.tensor.sequence_parallel", config.tp.sequence_parallel),
    ):
        if given:
            raise PlanError(
                f"{name} and parallel.pipeline do not go together: blocks that divide tokens must be on one rank "
                "from the first to the last. Leave one of them out."
            )
