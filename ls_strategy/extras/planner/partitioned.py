"""One model on one combination of tensor, context and expert parallelism.

It is traced once, then counted for any pipeline, micro-batch size, ZeRO stage and tier. Blocks that are all alike are
traced with a few of them, and put together to the full number, see `pieces`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ls_strategy._torch import copy_of_optimizer
from ls_strategy.config import RecomputeConfig, ZeROConfig
from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.block_steps import METERS, BlockSteps, Known, NotUniform, can_recompute
from ls_strategy.extras.planner.buffers import Setting
from ls_strategy.extras.planner.candidates import Candidate
from ls_strategy.extras.planner.choice import Question
from ls_strategy.extras.planner.parallelism import (
    Axes,
    Job,
    Parallelism,
    Stack,
    is_uniform,
    messages_of,
    ranks_of_stages,
    sharded,
    shortened,
    stack_of,
    stages_of,
    table_of,
)
from ls_strategy.extras.planner.pieces import (
    SHORT,
    Composer,
    Passes,
    Pieces,
    Rename,
    SamePasses,
    Span,
    numbers_by_name,
    stand_in,
    whole_step,
)
from ls_strategy.extras.planner.replay import Peak, StageReplay, replay
from ls_strategy.extras.planner.simulated import Simulated, in_float8, simulated
from ls_strategy.extras.planner.states import ModelStates
from ls_strategy.extras.planner.step import batch_bytes, resized, training_step
from ls_strategy.extras.planner.trace import Event, Kind, Trace, Tracer, condensed
from ls_strategy.extras.planner.traffic import StepTraffic, saved_bytes, traffic, with_activations
from ls_strategy.parallel.pipeline.balance import balance
from ls_strategy.parallel.pipeline.partition import make_cut
from ls_strategy.parallel.pipeline.schedules import Table
from ls_strategy.plan import FlatPlan, Plan, UnitPlan
from ls_strategy.zero.setup.assembly import Draft
from ls_strategy.zero.setup.kept import kept_in_fp32
from ls_strategy.zero.setup.partition import UnitSpec
from ls_strategy.zero.setup.share import Share
from ls_strategy.zero_stages import policy_of

# Of a shortened model, the units of the blocks that were kept stand for those of all blocks, see `pieces`.


class StagePlans:
    """Plans of one model whose layers are sharded. Built once, for any pipeline, stage of ZeRO and tier."""

    def __init__(self, module: nn.Module, states: ModelStates, stack: Stack | None, *, blocks: int, short: int) -> None:
        """Prepare.

        Args:
            module: the model, perhaps shortened.
            states: of this model.
            stack: its blocks.
            blocks: number of blocks of the full model.
            short: number of blocks of the shortened one; 0 if it is not.
        """
        self._module, self._states, self._stack = module, states, stack
        self._blocks, self._short = blocks, short
        self._plans: dict[Any, Plan] = {}
        self._drafts: dict[Any, Draft] = {}
        self._bounds: dict[int, tuple[int, ...]] = {}
        self._fullest: dict[Any, Plan] = {}
        self._numbers: dict[Any, int] = {}
        self._numbered: dict[int, tuple[ZeROConfig, int]] = {}

    # blocks ----------------------------------------------------------------------------------------------------------

    def bounds(self, stages: int) -> tuple[int, ...]:
        """Return which blocks each stage gets, as `make_cut` does by parameters.

        Raises:
            PlanError: there are fewer blocks than stages.
        """
        if stages not in self._bounds:
            self._bounds[stages] = (0, self._blocks) if stages == 1 else self._balanced(stages)
        return self._bounds[stages]

    def _balanced(self, stages: int) -> tuple[int, ...]:
        before, after = self._outside_numel
        weights = [float(self._block_numels[0])] * self._blocks
        if not self._short:
            weights = [float(n) for n in self._block_numels]
        if len(weights) < stages:
            raise PlanError(f"{len(weights)} blocks are too few for {stages} stages.")
        weights[0] += before
        weights[-1] += after
        return balance(weights, stages)

    def _full(self, name: str, numel: int) -> int:
        """Return the elements of the full parameter: stages are balanced before layers are sharded."""
        part = self._part_of.get(name)
        if part is None:
            return numel
        full = 1
        for length in part.full_shape:
            full *= length
        return full

    @cached_property
    def _part_of(self) -> dict[str, Any]:
        named = self._module.named_parameters()
        return {name: self._states.parts[id(p)] for name, p in named if id(p) in self._states.parts}

    @cached_property
    def _block_numels(self) -> list[int]:
        assert self._stack is not None
        full = {name: self._full(name, p.numel()) for name, p in self._module.named_parameters()}
        return [
            sum(n for name, n in full.items() if name.startswith(f"{self._block_name(b)}."))
            for b in range(len(self._stack.blocks))
        ]

    def _block_name(self, block: int) -> str:
        assert self._stack is not None
        return f"{self._stack.name}.{block}"

    @cached_property
    def _ends(self) -> tuple[set[str], set[str]]:
        """Return the names of the parameters of the first and of the last stage that are not in blocks."""
        assert self._stack is not None
        made = make_cut(self._module, (0, 1), method="uniform", stack=self._stack.name)
        outside = {n for n in made.stages_of if not n.startswith(f"{self._stack.name}.")}
        return ({n for n in outside if 0 in made.stages_of[n]}, {n for n in outside if 1 in made.stages_of[n]})

    @cached_property
    def _outside_numel(self) -> tuple[int, int]:
        first, last = self._ends
        sizes = {name: self._full(name, p.numel()) for name, p in self._module.named_parameters()}
        return sum(sizes.get(n, 0) for n in first), sum(sizes.get(n, 0) for n in last - first)

    def _share(self, spans: Sequence[Span]) -> Share:
        params = dict(self._module.named_parameters(remove_duplicate=False))
        first, last = self._ends
        here = first if any(s.is_first for s in spans) else set()
        here = here | (last if any(s.is_last for s in spans) else set())
        tied = {id(params[n]) for n in first & last}
        kept = {id(params[n]) for n in here}
        if self._short:
            kept |= {id(p) for n, p in params.items() if n.startswith(f"{self._block_name(0)[:-2]}.")}
        else:
            mine = tuple(f"{self._block_name(b)}." for s in spans for b in range(s.first, s.stop))
            kept |= {id(p) for n, p in params.items() if n.startswith(mine)}
        absent = frozenset(id(p) for p in params.values() if id(p) not in kept)
        replicas = tied if not any(s.is_first for s in spans) else set()
        return Share(absent=absent, tied=frozenset(tied & kept), replicas=frozenset(replicas & kept))

    # plans -----------------------------------------------------------------------------------------------------------

    def plan(self, config: ZeROConfig, job: Job, spans: Sequence[Span]) -> Plan:
        """Return the plan of a rank with these stages.

        Raises:
            PlanError: the ranks cannot be grouped as the options say.
        """
        options = self._number_of(config)
        piped = job.parallel.pipeline > 1
        ends = tuple((s.is_first, s.is_last, s.stop - s.first if self._short else s) for s in spans)
        key = (options, job.ranks, job.node_size, job.parallel.pipeline, ends)
        if key not in self._plans:
            states = replace(self._states, parallel=job.parallel)
            outside = (any(s.is_first for s in spans), any(s.is_last for s in spans))
            zero = job.parallel.zero(job.ranks)
            # What a draft checks depends on no more of the options than on this.
            checked = (policy_of(config, zero).optimizer, config.offload.any_state, zero > 1)
            drafted = (checked, piped, outside if self._short else ends)
            if drafted not in self._drafts:
                self._drafts[drafted] = states.draft(config, zero, self._share(spans) if piped else None)
            draft = states.redraft(self._drafts[drafted], config, zero)
            plan = states.resolve(draft, config, job.ranks, job.node_size)
            self._plans[key] = self._expanded(plan, spans) if self._short else plan
        return self._plans[key]

    def _number_of(self, config: ZeROConfig) -> int:
        """Return a number for what a plan depends on: comparing all options takes longer than the rest of a look-up."""
        if id(config) not in self._numbered:
            options = (config.stage, config.sharding, config.precision, config.offload)
            self._numbered[id(config)] = config, self._numbers.setdefault(options, len(self._numbers))
        return self._numbered[id(config)][1]

    def fullest(self, config: ZeROConfig, job: Job) -> Plan:
        """Return the plan of the rank with the most parameters."""
        key = (self._number_of(config), job.parallel, job.ranks, job.node_size)
        if key not in self._fullest:
            self._fullest[key] = self._fullest_of(config, job)
        return self._fullest[key]

    def _fullest_of(self, config: ZeROConfig, job: Job) -> Plan:
        rank_of = ranks_of_stages(job.parallel)
        bounds = self.bounds(len(rank_of))
        plans = [
            self.plan(config, job, [self.span(bounds, s) for s, r in enumerate(rank_of) if r == rank])
            for rank in sorted({0, job.parallel.pipeline - 1})
        ]
        return max(plans, key=lambda plan: plan.numel)

    def span(self, bounds: Sequence[int], stage: int) -> Span:
        """Return the blocks of a stage."""
        return Span(bounds[stage], bounds[stage + 1], self._blocks)

    def _expanded(self, plan: Plan, spans: Sequence[Span]) -> Plan:
        assert self._stack is not None
        prefix = self._stack.name
        blocks: dict[int, list[UnitPlan]] = {}
        outside: list[tuple[bool, UnitPlan]] = []
        for unit in plan.units:
            first = unit.flats[0].layout.slots[0].name
            if not unit.is_root and first.startswith(f"{prefix}."):
                blocks.setdefault(int(first[len(prefix) + 1 :].split(".")[0]), []).append(unit)
            else:
                outside.append((bool(blocks), unit))
        numbers = [g for s in spans for g in range(s.first, s.stop)]
        middle = [
            _moved(unit, f"{prefix}.{b}.", f"{prefix}.{g}.")
            for g in numbers
            for b in (stand_in(g, self._blocks, self._short),)
            for unit in blocks[b]
        ]
        before = [unit for after, unit in outside if not after]
        return replace(plan, units=(*before, *middle, *(unit for after, unit in outside if after)))


def names_of(plan: Plan) -> list[list[str]]:
    """Return the names of the parameters of every unit."""
    return [[slot.name for flat in unit.flats for slot in flat.layout.slots] for unit in plan.units]


def _moved(unit: UnitPlan, old: str, new: str) -> UnitPlan:
    def rename(name: str) -> str:
        return f"{new}{name[len(old) :]}" if name.startswith(old) else new[:-1] if f"{name}." == old else name

    def renamed(flat: FlatPlan) -> FlatPlan:
        slots = tuple(replace(slot, name=rename(slot.name)) for slot in flat.layout.slots)
        return replace(flat, layout=replace(flat.layout, slots=slots))

    return replace(unit, name=rename(unit.name), flats=tuple(map(renamed, unit.flats)))


_CPU = torch.device("cpu")


class PartitionedModel:
    """See the module. Built by `partitioned`."""

    def __init__(  # noqa: PLR0913  (what `partitioned` has made, one by one)
        self, question: Question, parallel: Parallelism, stack: Stack | None, fakes: Simulated, axes: Axes, *,
        optimizers: Sequence[Optimizer], native: bool, short: int, known: Known,
    ) -> None:  # fmt: skip
        self.question, self.parallel, self.native, self.short = question, parallel, native, short
        self._module = question.module
        run = question.run
        copies = [fakes.optimizer(o) for o in optimizers]
        self._states = ModelStates(self._module, copies, question.precision, axes.parts, parallel)
        specs = self._states.draft(Candidate(0).config(run.config), 1).specs
        self._names = [[name for name, _ in spec.params] for spec in specs]
        self._trained = {name for name, p in self._module.named_parameters() if p.requires_grad}
        self._stack = stack_of(self._module) if stack is not None else None
        if short and not _are_units(specs, self._stack):  # shards of a block may be too small for a unit
            raise NotUniform
        self.blocks = len(stack.blocks) if stack is not None else 0  # of the full model
        self.plans = StagePlans(self._module, self._states, self._stack, blocks=self.blocks, short=short)
        blocks = () if self._stack is None else self._stack.blocks
        tracer = Tracer(
            self._module, specs, training_step(self._module, copies), question.precision,
            run.config.precision.fp32_modules, _CPU, fakes.mode, blocks=blocks,
            meters=[lambda name=name: axes.sent(name) for name in METERS[1:]],
        )  # fmt: skip
        self._steps = BlockSteps(
            tracer, self._module, blocks, question.batch, parallel=parallel, short=short, known=known
        )
        self._composed: dict[Any, Passes] = {}
        self._wholes: dict[Any, Trace] = {}
        self._spent: dict[Any, dict[str, int]] = {}
        self._configs: dict[Candidate, ZeROConfig] = {}
        self._traffic: dict[Any, StepTraffic] = {}
        self._held: dict[int, tuple[int, int]] = {}
        self._alive: dict[Any, int] = {}
        self._saved: dict[Any, int] = {}
        self._buffers = sum(b.nbytes for b in self._module.buffers())
        self.optimizer_bytes = self._states.optimizer_bytes(run.config)

    def config(self, candidate: Candidate) -> ZeROConfig:
        """Return the options of a run; made once, because every group of options checks its values."""
        if candidate not in self._configs:
            self._configs[candidate] = candidate.config(self.question.run.config)
        return self._configs[candidate]

    def pieces(self, recompute: RecomputeConfig | None, samples: int) -> Pieces:
        """See `BlockSteps.pieces`."""
        return self._steps.pieces(recompute, samples)

    @property
    def recomputable(self) -> bool:
        """Return whether there are blocks to recompute."""
        return can_recompute(self._steps)

    def _rename(self, names: Sequence[Sequence[str]]) -> Rename:
        where = numbers_by_name(names)
        prefix = None if self._stack is None else self._stack.name

        @cache
        def rename(kind: Kind, number: int, amount: int, source: int, block: int) -> Sequence[Event]:
            def moved(name: str) -> str:  # the unit of the next block is fetched before that block begins
                if source == block or prefix is None or not name.startswith(f"{prefix}."):
                    return name
                number, _, rest = name[len(prefix) + 1 :].partition(".")
                return f"{prefix}.{int(number) - source + block}.{rest}"

            if kind == "grad":
                found = where.get(moved(self._names[number][amount]))
                return [] if found is None else [Event(kind, *found)]
            units = {where[moved(n)][0] for n in self._names[number] if moved(n) in where}
            return [Event(kind, unit) for unit in sorted(units)]

        return rename

    def least(self, job: Job) -> int:
        """Return bytes that the first rank of a pipeline needs at least, for what it holds and its first stage."""
        pieces = self.pieces(job.candidate.recompute, job.samples)
        size = job.parallel.pipeline
        bounds = self.plans.bounds(stages_of(job.parallel))
        spans = [self.plans.span(bounds, s) for s in range(0, len(bounds) - 1, size)]
        plan = self.plans.plan(self.config(job.candidate), job, spans)
        if id(plan) not in self._held:  # `plans` keeps it
            self._held[id(plan)] = _held(plan, self.optimizer_bytes, piped=size > 1)
        held, gradients = self._held[id(plan)]
        if job.candidate.activation_offload is not None:
            return held
        forwards = min(size, job.micro_batches)
        again = forwards if job.micro_batches > forwards else forwards - 1  # when gradients are there already
        alive = [self._alive_bytes(job, pieces, bounds[1], n) for n in (forwards, again)]
        return held + max(alive[0], alive[1] + gradients)

    def _alive_bytes(self, job: Job, pieces: Pieces, stop: int, forwards: int) -> int:
        key = (job.candidate.recompute, job.samples, stop, forwards)
        if key not in self._alive:
            self._alive[key] = pieces.alive_bytes(stop, self.blocks, forwards=forwards) if forwards else 0
        return self._alive[key]

    # memory ----------------------------------------------------------------------------------------------------------

    def setting(self, config: ZeROConfig, job: Job) -> Setting:
        """Return what a replay depends on."""
        run, precision = self.question.run, self.question.precision
        single = len(self._states.optimizers) == 1
        early = config.updates_in_backward and single and not run.clips and not precision.loss_scaling
        # Of sharded layers, the engine does not notice reads of gradients: any hook after backward delays its updates.
        parallel = job.parallel
        early = early and parallel.tensor == parallel.expert == parallel.pipeline == 1
        return Setting(
            optimizer_bytes=self.optimizer_bytes,
            micro_batches=job.micro_batches if job.parallel.pipeline == 1 else 1,
            prefetch_units=config.sharding.prefetch_units,
            early_step=early,
            native=self.native,
            wire_fp32=precision.reduce_in_fp32,
            cuda=self.native,
            step_temporaries=self._states.has_temporaries,
            activation_offload=job.candidate.activation_offload,
            node_size=max(job.node_size // job.parallel.tensor, 1),
            buffers=self._buffers,
        )

    def peak(self, job: Job) -> Peak:
        """Return the peak memory of a rank, of the fullest rank of a pipeline.

        Raises:
            PlanError: the model cannot be partitioned so.
        """
        peaks = self.peaks(job)
        return max(peaks, key=lambda peak: peak.device)

    def peaks(self, job: Job, ranks: Sequence[int] | None = None) -> list[Peak]:
        """Return the peak memory of the ranks of a pipeline; by default of the first, the second and the last."""
        config = self.config(job.candidate)
        setting = self.setting(config, job)
        size, given = job.parallel.pipeline, job.micro_batches
        if size == 1:
            setting = replace(setting, micro_batches=min(setting.micro_batches, 2))  # later ones are like the second
            plan = self.plans.fullest(config, job)
            names = names_of(plan)
            return [replay(self._whole(job, names), plan, setting, trained=_of(self._trained, names), names=names)]
        if job.parallel.schedule != "gpipe":  # with more than two per stage, the others find what these have left
            job = replace(job, micro_batches=min(job.micro_batches, 2 * stages_of(job.parallel)))
        table = table_of(job)
        whole = batch_bytes(resized(self.question.batch, job.samples)) * given
        setting = replace(setting, buffers=setting.buffers + whole)
        chosen = _ranks_that_differ(size) if ranks is None else ranks
        return [self._stage_peak(job, config, setting, table, rank) for rank in chosen]

    def prepare(self, job: Job) -> None:
        """Do what `peak` needs the sharded module for: then it works after the exit from `partitioned`, too."""
        config = self.config(job.candidate)
        self.pieces(job.candidate.recompute, job.samples)
        if job.parallel.pipeline == 1:
            self.plans.fullest(config, job)
        for rank in _ranks_that_differ(job.parallel.pipeline) if job.parallel.pipeline > 1 else ():
            self.plans.plan(config, job, list(self._spans(job, rank).values()))

    def _spans(self, job: Job, rank: int) -> dict[int, Span]:
        rank_of = ranks_of_stages(job.parallel)
        bounds = self.plans.bounds(len(rank_of))
        return {s: self.plans.span(bounds, s) for s, r in enumerate(rank_of) if r == rank}

    def _stage_peak(self, job: Job, config: ZeROConfig, setting: Setting, table: Table, rank: int) -> Peak:
        spans = self._spans(job, rank)
        plan = self.plans.plan(config, job, list(spans.values()))
        names = names_of(plan)
        return StageReplay(
            plan,
            setting,
            _of(self._trained, names),
            row=table.rows[rank],
            stages={s: self._passes(job, span, names) for s, span in spans.items()},
            boundary=self.pieces(job.candidate.recompute, job.samples).boundary_bytes(),
            last_stage=table.stages - 1,
            rank_of=table.rank_of,
        ).run(names)

    def _passes(self, job: Job, span: Span, names: Sequence[Sequence[str]]) -> Passes:
        """Return the passes of a stage, for a replay: put together once for all ZeRO stages."""
        pieces = self.pieces(job.candidate.recompute, job.samples)
        if job.candidate.activation_offload is not None:
            return Composer(pieces, span, self._rename(names))
        key = (job.candidate.recompute, job.samples, span, tuple(map(tuple, names)))
        if key not in self._composed:
            self._composed[key] = SamePasses(Composer(pieces, span, self._rename(names)))
        return self._composed[key]

    def _whole(self, job: Job, names: Sequence[Sequence[str]]) -> Trace:
        """Return the step of all blocks, condensed if the storages do not matter."""
        pieces = self.pieces(job.candidate.recompute, job.samples)
        condenses = job.candidate.activation_offload is None
        key = (job.candidate.recompute, job.samples, condenses, tuple(map(tuple, names)))
        if key not in self._wholes:
            trace = whole_step(pieces, self.blocks, self._rename(names))
            self._wholes[key] = replace(trace, events=condensed(trace.events)) if condenses else trace
        return self._wholes[key]

    # counts ----------------------------------------------------------------------------------------------------------

    def zero_traffic(self, job: Job) -> StepTraffic:
        """Return what ZeRO moves per rank and step."""
        config = self.config(job.candidate)
        plan, early = self.plans.fullest(config, job), self.setting(config, job).early_step
        once = job.parallel.pipeline > 1  # then gradients are added up in fp32
        micro_batches = None if once else job.micro_batches
        key = (id(plan), micro_batches, early)
        if key not in self._traffic:
            self._traffic[key] = traffic(
                plan,
                self.optimizer_bytes,
                micro_batches=micro_batches,
                native_fp32=once or (self.native and self.question.precision.reduce_in_fp32),
                cuda=self.native,
                gradients_stored=not early,
                node_size=max(job.node_size // job.parallel.tensor, 1),
            )
        return self._traffic[key]

    def traffic(self, job: Job) -> StepTraffic:
        """Return `zero_traffic`, and what offload of activations moves."""
        offload, zero = job.candidate.activation_offload, self.zero_traffic(job)
        if offload is None:
            return zero
        key = (job.candidate.recompute, job.samples, stages_of(job.parallel), offload.min_bytes)
        if key not in self._saved:
            pieces, spans = self.pieces(*key[:2]), self._spans(job, 0).values()
            forwards = (Composer(pieces, span, lambda *_: ()).forward(0) for span in spans)
            self._saved[key] = sum(saved_bytes(events, offload.min_bytes) for events in forwards)
        at_once = min(job.parallel.pipeline, job.micro_batches)
        return with_activations(
            zero, offload, saved=self._saved[key], micro_batches=job.micro_batches, at_once=at_once, cuda=self.native
        )

    def spent(self, job: Job) -> dict[str, int]:
        """Return FLOPs, and bytes per axis, of the busiest rank in one step."""
        parallel = job.parallel
        key = (job.candidate.recompute, job.samples, parallel.pipeline, parallel.schedule)
        if key not in self._spent:
            self._spent[key] = self._spent_once(self.pieces(*key[:2]), ranks_of_stages(parallel))
        return {name: count * job.micro_batches for name, count in self._spent[key].items()}

    def _spent_once(self, pieces: Pieces, rank_of: Sequence[int]) -> dict[str, int]:
        bounds = self.plans.bounds(len(rank_of))
        by_rank = {rank: dict.fromkeys(METERS, 0) for rank in rank_of}
        for stage, rank in enumerate(rank_of):
            for meter, name in enumerate(METERS):
                by_rank[rank][name] += pieces.total(meter, bounds[stage], bounds[stage + 1], self.blocks)
        most = {name: max(counts[name] for counts in by_rank.values()) for name in METERS}
        return {**most, "pipeline": pieces.boundary_bytes() * messages_of(rank_of)}


def _held(plan: Plan, optimizer_bytes: Sequence[float], *, piped: bool) -> tuple[int, int]:
    """Return the bytes on the device that a rank holds at least during backward, and those of gradients added to them.

    Stages of pipelines keep their units gathered, and their gradients in fp32 until the last micro-batch.
    """
    held = sum(plan.bytes_by_tier(optimizer_bytes)["device"].values())
    gradients = 0
    for unit in plan.units:
        for flat in unit.flats:
            if plan.policy.parameters and not flat.replicated and (piped or unit.is_root):
                held += flat.layout.numel * flat.dtype.itemsize
            if piped and flat.trainable and plan.policy.optimizer:
                here = 0 if plan.policy.gradients else flat.dtype.itemsize  # stage 1: of each, it is held already
                gradients += flat.layout.numel * max(4 - here, 0)
    return held, gradients


def _ranks_that_differ(ranks: int) -> list[int]:
    """Return the first, the second and the last rank of a pipeline."""
    return sorted({0, min(1, ranks - 1), ranks - 1})


def _of(trained: set[str], names: Sequence[Sequence[str]]) -> set[str]:
    """Return the trained parameters among names, which may be of blocks that were not traced."""
    tails = {_without_numbers(name) for name in trained}
    return {name for its in names for name in its if _without_numbers(name) in tails}


def _without_numbers(name: str) -> str:
    return ".".join("#" if word.isdigit() else word for word in name.split("."))


def _optimizers_of(module: Any, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Copy optimizers with the parameters that the module has."""
    here = {id(p) for p in module.parameters()}
    return [
        copy_of_optimizer(o, [{**g, "params": [p for p in g["params"] if id(p) in here]} for g in o.param_groups])
        for o in optimizers
    ]


@contextmanager
def partitioned(
    question: Question, parallel: Parallelism, *, native: bool, short: int = SHORT[-1], known: Known | None = None
) -> Generator[PartitionedModel, None, None]:
    """Yield the model partitioned over tensor-, context- and expert-parallel ranks; restore it at the end.

    Args:
        question: model, batch and run.
        parallel: sizes; that of a pipeline is chosen later, by `Job`.
        native: whether the transport computes sums (NCCL).
        short: blocks to trace in place of all, if they are alike; 0 for all.
        known: what was found with other sizes; more is added.

    Raises:
        PlanError: the model does not support this.
        NotUniform: blocks of the shortened model have no units of their own.
    """
    module = question.module
    stack = stack_of(module)
    alike = stack is not None and is_uniform(stack) and _round_alike(question, stack)
    if stack is None or len(stack.blocks) <= short or not alike:
        short = 0
    with ExitStack() as exit:
        if short:
            assert stack is not None
            exit.enter_context(shortened(module, stack, short))
        optimizers = _optimizers_of(module, question.optimizers)
        options = question.run.config.precision
        at_once = options if parallel.tensor == 1 else None  # else layers are sharded before they multiply in fp8
        fakes = exit.enter_context(simulated(module, question.precision, options.fp32_modules, _CPU, at_once))
        axes = exit.enter_context(sharded(module, parallel, fakes.mode, native=native))
        if at_once is None:
            exit.enter_context(in_float8(module, options, question.precision, _CPU, axes.layers))
        yield PartitionedModel(
            question, parallel, stack, fakes, axes, optimizers=optimizers, native=native, short=short,
            known=Known() if known is None else known,
        )  # fmt: skip


def _round_alike(question: Question, stack: Stack) -> bool:
    """Return whether all blocks keep the same parameters in fp32, and no name in ``fp32_modules`` has an index."""
    names = question.run.config.precision.fp32_modules
    if any(part.isdigit() for name in names for part in name.split(".")):
        return False
    kept = kept_in_fp32(question.module, names, question.precision.compute).params
    return len({tuple(id(p) in kept for p in block.parameters()) for block in stack.blocks}) == 1


def _are_units(specs: Sequence[UnitSpec], stack: Stack | None) -> bool:
    """Return whether every block has units of its own, which can be repeated."""
    assert stack is not None
    roots = [name for spec in specs if spec.is_root for name, _ in spec.params]
    return not any(name.startswith(f"{stack.name}.") for name in roots)
