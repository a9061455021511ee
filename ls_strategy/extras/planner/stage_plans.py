"""The plan of every rank of a pipeline: which blocks its stages have, and their units.

Of a shortened model, the units of the blocks that were kept stand for those of all blocks, see `pieces`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from torch import nn

from ls_strategy.config import ZeROConfig
from ls_strategy.errors import PlanError
from ls_strategy.extras.planner.job import Job, ranks_of_stages
from ls_strategy.extras.planner.parallelism import Stack
from ls_strategy.extras.planner.pieces import Span, stand_in
from ls_strategy.extras.planner.states import ModelStates
from ls_strategy.parallel.pipeline.balance import balance
from ls_strategy.parallel.pipeline.partition import make_cut
from ls_strategy.plan import FlatPlan, Plan, UnitPlan
from ls_strategy.zero.setup.assembly import Draft
from ls_strategy.zero.setup.share import Share
from ls_strategy.zero_stages import policy_of


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
