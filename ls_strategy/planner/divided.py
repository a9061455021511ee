"""One model on one combination of tensor, context and expert parallelism.

It is traced once, then counted for any pipeline, micro-batch size, ZeRO stage and tier.
Blocks that are all alike are traced with five of them, and put together to the full number, see
`pieces`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ls_strategy._compat import copy_of_optimizer, tree_iter, tree_map
from ls_strategy.config import RecomputeConfig, ZeROConfig
from ls_strategy.errors import PlanError
from ls_strategy.parallel.pipeline.balance import balance
from ls_strategy.parallel.pipeline.partition import make_cut
from ls_strategy.parallel.pipeline.schedules import Table, make_table, place, placement_of, stages_per_rank_of
from ls_strategy.plan import FlatPlan, Plan, UnitPlan
from ls_strategy.planner.buffers import Setting
from ls_strategy.planner.candidates import Candidate
from ls_strategy.planner.choice import Question
from ls_strategy.planner.parallelism import Axes, Parallelism, Stack, is_uniform, sharded, shortened, stack_of
from ls_strategy.planner.pieces import (
    SHORT,
    Composer,
    Pieces,
    Rename,
    Span,
    between,
    cut,
    numbers_by_name,
    stand_in,
    whole_step,
)
from ls_strategy.planner.replay import Peak, replay
from ls_strategy.planner.simulated import Simulated, simulated
from ls_strategy.planner.stage_replay import StageReplay
from ls_strategy.planner.states import ModelStates
from ls_strategy.planner.step import training_step
from ls_strategy.planner.trace import Event, Kind, Tracer
from ls_strategy.zero.setup.share import Share

METERS = ("tensor", "context", "expert")
"""Axes whose bytes are metered, from number 1 on."""

_CPU = torch.device("cpu")


def rows_of(batch: Any) -> int:
    """Return the number of samples of a batch: the rows of its first tensor."""
    return next((len(leaf) for leaf in tree_iter(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


def resized(batch: Any, samples: int) -> Any:
    """Return an empty batch of another number of samples: tensors with a row per sample get as many rows."""
    rows = rows_of(batch)

    def other(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != rows:
            return leaf
        return leaf.new_zeros((samples, *leaf.shape[1:]))

    return tree_map(other, batch)


def batch_bytes(batch: Any) -> int:
    """Return the bytes of a batch."""
    return sum(leaf.nbytes for leaf in tree_iter(batch) if isinstance(leaf, Tensor))


@dataclass(frozen=True, kw_only=True)
class Job:
    """How one step is divided."""

    candidate: Candidate
    parallel: Parallelism
    ranks: int
    node_size: int
    samples: int
    """Per micro-batch."""

    micro_batches: int
    """Per step and replica: accumulated, or of the pipeline."""


class DividedModel:
    """See the module. Built by `divided`."""

    def __init__(  # noqa: PLR0913  (what `divided` has made, one by one)
        self, question: Question, parallel: Parallelism, stack: Stack | None, fakes: Simulated, axes: Axes, *,
        optimizers: Sequence[Optimizer], native: bool, short: bool,
    ) -> None:  # fmt: skip
        self.question, self.parallel, self.native, self.short = question, parallel, native, short
        self._module = question.module
        run = question.run
        copies = [fakes.optimizer(o) for o in optimizers]
        self._states = ModelStates(self._module, copies, question.precision, axes.parts, parallel)
        self._specs = self._states.draft(Candidate(0).config(run.config), 1).specs
        self._names = [[name for name, _ in spec.params] for spec in self._specs]
        self._trained = {name for name, p in self._module.named_parameters() if p.requires_grad}
        self._stack = stack_of(self._module) if stack is not None else None
        self.blocks = len(stack.blocks) if stack is not None else 0
        """Blocks of the full model."""
        self._tracer = Tracer(
            self._module, self._specs, training_step(self._module, copies), question.precision,
            run.config.precision.fp32_modules, _CPU, fakes.mode,
            blocks=() if self._stack is None else self._stack.blocks,
            meters=[lambda name=name: axes.sent(name) for name in METERS],
        )  # fmt: skip
        self._buffers = sum(b.nbytes for b in self._module.buffers())
        self.optimizer_bytes = self._states.optimizer_bytes(run.config)
        self._pieces: dict[tuple[RecomputeConfig | None, int], Pieces] = {}
        self._plans: dict[Any, Plan] = {}

    # the step --------------------------------------------------------------------------------------------------------

    def _traced(self, recompute: RecomputeConfig | None, samples: int) -> Pieces:
        key = (recompute, samples)
        if key not in self._pieces:
            trace = self._tracer.run(resized(self.question.batch, samples), recompute)
            assert self._stack is not None
            pieces = cut(trace, len(self._stack.blocks))
            if self.short and not pieces.is_uniform:
                raise NotUniform
            self._pieces[key] = pieces
        return self._pieces[key]

    def pieces(self, recompute: RecomputeConfig | None, samples: int) -> Pieces:
        """Return the step on a number of samples: from those on one and on two, whose storages grow evenly.

        Raises:
            PlanError: the step cannot run on fake tensors, or its blocks are not called one after the other.
        """
        if samples <= 2 or (recompute, samples) in self._pieces:
            return self._traced(recompute, samples)
        found = between(self._traced(recompute, 1), self._traced(recompute, 2), samples)
        return self._traced(recompute, samples) if found is None else found

    @property
    def recomputable(self) -> bool:
        """Whether there are blocks to recompute."""
        try:
            self.pieces(RecomputeConfig(policy="full"), 1)
        except PlanError:
            return False
        return True

    # plans -----------------------------------------------------------------------------------------------------------

    def bounds(self, stages: int) -> tuple[int, ...]:
        """Return which blocks each stage gets, as `make_cut` does by parameters.

        Raises:
            PlanError: there are fewer blocks than stages.
        """
        before, after = self._outside_numel
        weights = [float(self._block_numels[0])] * self.blocks
        if not self.short:
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
        if self.short:
            kept |= {id(p) for n, p in params.items() if n.startswith(f"{self._block_name(0)[:-2]}.")}
        else:
            mine = tuple(f"{self._block_name(b)}." for s in spans for b in range(s.first, s.stop))
            kept |= {id(p) for n, p in params.items() if n.startswith(mine)}
        absent = frozenset(id(p) for p in params.values() if id(p) not in kept)
        replicas = tied if not any(s.is_first for s in spans) else set()
        return Share(absent=absent, tied=frozenset(tied & kept), replicas=frozenset(replicas & kept))

    def plan(self, config: ZeROConfig, job: Job, spans: Sequence[Span]) -> Plan:
        """Return the plan of a rank with these stages.

        Raises:
            PlanError: the ranks cannot be grouped as the options say.
        """
        ends = tuple((s.is_first, s.is_last, s.stop - s.first if self.short else s) for s in spans)
        sizes = (job.ranks, job.node_size, job.parallel.pipeline)
        key = (config.stage, config.sharding, config.precision, config.offload, sizes, ends)
        if key not in self._plans:
            share = self._share(spans) if job.parallel.pipeline > 1 else None
            states = replace(self._states, parallel=job.parallel)
            plan = states.plan(config, job.ranks, job.node_size, share)
            self._plans[key] = self._expanded(plan, spans) if self.short else plan
        return self._plans[key]

    def _expanded(self, plan: Plan, spans: Sequence[Span]) -> Plan:
        """Repeat the units of one block."""
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
            for b in (stand_in(g, self.blocks, SHORT),)
            for unit in blocks[b]
        ]
        before = [unit for after, unit in outside if not after]
        return replace(plan, units=(*before, *middle, *(unit for after, unit in outside if after)))

    def _rename(self, names: Sequence[Sequence[str]]) -> Rename:
        where = numbers_by_name(names)
        prefix = None if self._stack is None else self._stack.name
        single: dict[str, str] = {}
        for name, p in self._module.named_parameters(remove_duplicate=False):
            single.setdefault(name, next(n for n, q in self._module.named_parameters() if q is p))

        def rename(kind: Kind, number: int, amount: int, source: int, block: int) -> Iterator[Event]:
            def moved(name: str) -> str:  # the unit of the next block is fetched before that block begins
                if source == block or prefix is None or not name.startswith(f"{prefix}."):
                    return name
                number, _, rest = name[len(prefix) + 1 :].partition(".")
                return f"{prefix}.{int(number) - source + block}.{rest}"

            if kind == "grad":
                found = where.get(moved(self._names[number][amount]))
                if found is not None:
                    yield Event(kind, *found)
                return
            units = {where[moved(n)][0] for n in self._names[number] if moved(n) in where}
            for unit in sorted(units):
                yield Event(kind, unit)

        return rename

    def fullest_plan(self, config: ZeROConfig, job: Job) -> Plan:
        """Return the plan of the rank with the most parameters."""
        if job.parallel.pipeline == 1:
            return self.plan(config, job, [Span(0, self.blocks, self.blocks)])
        table = table_of(job)
        bounds = self.bounds(table.stages)
        plans = [
            self.plan(config, job, [Span(bounds[s], bounds[s + 1], self.blocks) for s in table.stages_of(rank)])
            for rank in sorted({0, job.parallel.pipeline - 1})
        ]
        return max(plans, key=lambda plan: plan.numel)

    def least(self, job: Job) -> int:
        """Return bytes that the first rank of a pipeline needs at least: its states, and what its blocks save."""
        config = job.candidate.config(self.question.run.config)
        pieces = self.pieces(job.candidate.recompute, job.samples)
        size = job.parallel.pipeline
        bounds = self.bounds(stages_of(job.parallel)) if size > 1 else (0, self.blocks)
        plan = self.plan(
            config, job, [Span(bounds[s], bounds[s + 1], self.blocks) for s in range(0, len(bounds) - 1, size)]
        )
        states = sum(plan.bytes_by_tier(self.optimizer_bytes)["device"].values())
        alive = min(size, job.micro_batches)
        return states + pieces.saved_bytes(stand_in(bounds[1] - 1, self.blocks, pieces.blocks)) * bounds[1] * alive

    # memory ----------------------------------------------------------------------------------------------------------

    def setting(self, config: ZeROConfig, job: Job) -> Setting:
        """Return what a replay depends on."""
        run, precision = self.question.run, self.question.precision
        single = len(self._states.optimizers) == 1
        early = config.offload.optimizer is not None and config.sharding.overlap_step and single and not run.clips
        return Setting(
            optimizer_bytes=self.optimizer_bytes,
            micro_batches=job.micro_batches if job.parallel.pipeline == 1 else 1,
            prefetch_units=config.sharding.prefetch_units,
            early_step=early and not precision.loss_scaling and job.parallel.pipeline == 1,
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
            PlanError: the model cannot be divided so.
        """
        peaks = self.peaks(job)
        return max(peaks, key=lambda peak: peak.device)

    def peaks(self, job: Job, ranks: Sequence[int] | None = None) -> list[Peak]:
        """Return the peak memory of the ranks of a pipeline; by default of the first, the second and the last."""
        config = job.candidate.config(self.question.run.config)
        pieces = self.pieces(job.candidate.recompute, job.samples)
        setting = self.setting(config, job)
        if job.parallel.pipeline == 1:
            setting = replace(setting, micro_batches=min(setting.micro_batches, 2))  # later ones are like the second
            span = Span(0, self.blocks, self.blocks)
            plan = self.plan(config, job, [span])
            names = names_of(plan)
            trace = whole_step(pieces, self.blocks, self._rename(names))
            return [replay(trace, plan, setting, trained=_of(self._trained, names), names=names)]
        size, given = job.parallel.pipeline, job.micro_batches
        if job.parallel.schedule != "gpipe":  # with more than two per stage, the others find what these have left
            job = replace(job, micro_batches=min(job.micro_batches, 2 * stages_of(job.parallel)))
        table = table_of(job)
        bounds = self.bounds(table.stages)
        chosen = sorted({0, min(1, size - 1), size - 1}) if ranks is None else ranks
        whole = batch_bytes(resized(self.question.batch, job.samples)) * given
        setting = replace(setting, buffers=setting.buffers + whole)
        return [self._stage_peak(job, config, setting, pieces, table, bounds, rank) for rank in chosen]

    def _stage_peak(
        self, job: Job, config: ZeROConfig, setting: Setting, pieces: Pieces, table: Table, bounds: Sequence[int],
        rank: int,
    ) -> Peak:  # fmt: skip
        spans = {s: Span(bounds[s], bounds[s + 1], self.blocks) for s in table.stages_of(rank)}
        plan = self.plan(config, job, list(spans.values()))
        names = names_of(plan)
        rename = self._rename(names)
        return StageReplay(
            plan,
            setting,
            _of(self._trained, names),
            row=table.rows[rank],
            stages={s: Composer(pieces, span, rename) for s, span in spans.items()},
            boundary=pieces.boundary_bytes(),
            last_stage=table.stages - 1,
            rank_of=table.rank_of,
        ).run(names)

    # counts ----------------------------------------------------------------------------------------------------------

    def spent(self, job: Job) -> dict[str, int]:
        """Return FLOPs, and bytes per axis, of the busiest rank in one step."""
        pieces = self.pieces(job.candidate.recompute, job.samples)
        bounds = self.bounds(table_of(job).stages) if job.parallel.pipeline > 1 else (0, self.blocks)
        per_rank: list[list[int]] = []
        rank_of = table_of(job).rank_of if job.parallel.pipeline > 1 else (0,)
        for rank in range(job.parallel.pipeline):
            mine = [s for s, r in enumerate(rank_of) if r == rank]
            per_rank.append(
                [
                    sum(pieces.total(meter, bounds[s], bounds[s + 1], self.blocks) for s in mine)
                    for meter in range(1 + len(METERS))
                ]
            )
        most = [max(row[meter] for row in per_rank) * job.micro_batches for meter in range(1 + len(METERS))]
        found = dict(zip(("flops", *METERS), most, strict=True))
        return {**found, "pipeline": pieces.boundary_bytes() * _messages(rank_of) * job.micro_batches}


def _messages(rank_of: Sequence[int]) -> int:
    """Return the messages of the busiest rank of a pipeline per micro-batch, activations and gradients."""
    last = len(rank_of) - 1
    sent = dict.fromkeys(rank_of, 0)
    for stage, rank in enumerate(rank_of):
        sent[rank] += stage < last and rank_of[stage + 1] != rank
        sent[rank] += stage > 0 and rank_of[stage - 1] != rank
    return max(sent.values())


class NotUniform(Exception):  # noqa: N818 - not an error of the user's
    """Five blocks do not stand for all: the full model has to be traced."""


def table_of(job: Job) -> Table:
    """Return the schedule of a pipeline."""
    return _table(job.parallel.schedule, job.parallel.pipeline, job.micro_batches)


@cache
def _table(schedule: str, ranks: int, micro_batches: int) -> Table:
    return make_table(schedule, ranks, micro_batches, stages_per_rank_of(schedule))


def stages_of(parallel: Parallelism) -> int:
    """Return the stages of all ranks of a pipeline."""
    held = stages_per_rank_of(parallel.schedule)
    return len(place(parallel.pipeline, held, placement_of(parallel.schedule)))


def names_of(plan: Plan) -> list[list[str]]:
    """Return the names of the parameters of every unit."""
    return [[slot.name for flat in unit.flats for slot in flat.layout.slots] for unit in plan.units]


def _of(trained: set[str], names: Sequence[Sequence[str]]) -> set[str]:
    """Return the trained parameters among names, which may be of blocks that were not traced."""
    tails = {_without_numbers(name) for name in trained}
    return {name for its in names for name in its if _without_numbers(name) in tails}


def _without_numbers(name: str) -> str:
    return ".".join("#" if word.isdigit() else word for word in name.split("."))


def _moved(unit: UnitPlan, old: str, new: str) -> UnitPlan:
    def rename(name: str) -> str:
        return f"{new}{name[len(old) :]}" if name.startswith(old) else new[:-1] if f"{name}." == old else name

    def renamed(flat: FlatPlan) -> FlatPlan:
        slots = tuple(replace(slot, name=rename(slot.name)) for slot in flat.layout.slots)
        return replace(flat, layout=replace(flat.layout, slots=slots))

    return replace(unit, name=rename(unit.name), flats=tuple(map(renamed, unit.flats)))


def _optimizers_of(module: Any, optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Copy optimizers with the parameters that the module has."""
    here = {id(p) for p in module.parameters()}
    return [
        copy_of_optimizer(o, [{**g, "params": [p for p in g["params"] if id(p) in here]} for g in o.param_groups])
        for o in optimizers
    ]


@contextmanager
def divided(
    question: Question, parallel: Parallelism, *, native: bool, short: bool = True
) -> Generator[DividedModel, None, None]:
    """Yield the model divided over tensor-, context- and expert-parallel ranks; restore it at the end.

    Args:
        question: model, batch and run.
        parallel: sizes; that of a pipeline is chosen later, by `Job`.
        native: whether the transport computes sums (NCCL).
        short: trace five blocks in place of all, if they are alike.

    Raises:
        PlanError: the model does not support this.
    """
    module = question.module
    stack = stack_of(module)
    short = short and stack is not None and len(stack.blocks) > SHORT and is_uniform(stack) and _are_units(question)
    with ExitStack() as exit:
        if short:
            assert stack is not None
            exit.enter_context(shortened(module, stack, SHORT))
        optimizers = _optimizers_of(module, question.optimizers)
        classes = question.run.config.precision.fp32_modules
        fakes = exit.enter_context(simulated(module, question.precision, classes, _CPU))
        axes = exit.enter_context(sharded(module, parallel, fakes.mode, native=native))
        yield DividedModel(question, parallel, stack, fakes, axes, optimizers=optimizers, native=native, short=short)


def _are_units(question: Question) -> bool:
    """Whether every block has units of its own, which can be repeated."""
    states = ModelStates(question.module, question.optimizers, question.precision)
    specs = states.draft(Candidate(0).config(question.run.config), 1).specs
    stack = stack_of(question.module)
    assert stack is not None
    roots = [name for spec in specs if spec.is_root for name, _ in spec.params]
    return not any(name.startswith(f"{stack.name}.") for name in roots)


Progress = Callable[[str], None]
"""Told what is being traced."""
