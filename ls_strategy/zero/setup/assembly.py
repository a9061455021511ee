"""Build units from a model and its optimizers: check, agree with all ranks, then build unit by unit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy._torch import allow_data_on
from ls_strategy.config import ZeROConfig
from ls_strategy.distributed.comm import Comm
from ls_strategy.distributed.mesh import Mesh
from ls_strategy.errors import PlanError
from ls_strategy.layout import TensorPart
from ls_strategy.meta_init.deferred import deferred_of
from ls_strategy.meta_init.lazy import LazyTensor, source_of
from ls_strategy.plan import FROZEN, FlatPlan, Plan
from ls_strategy.precision import PrecisionPolicy
from ls_strategy.resolve import ParamFacts, resolve_plan
from ls_strategy.tiers.link import trim_heap
from ls_strategy.zero.flat.cast import CastFlat
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.flat.float8 import Float8Flat
from ls_strategy.zero.flat.quantized import QuantizedFlat
from ls_strategy.zero.flat.split import SplitFlat
from ls_strategy.zero.flat.units import Unit
from ls_strategy.zero.setup import agreement
from ls_strategy.zero.setup import materialize as materials
from ls_strategy.zero.setup.autocast_layers import casts_of
from ls_strategy.zero.setup.frozen import adapter_params, quantized_params
from ls_strategy.zero.setup.kept import KeptInFp32, kept_in_fp32
from ls_strategy.zero.setup.partition import UnitSpec, partition
from ls_strategy.zero.setup.share import Share
from ls_strategy.zero.step.elementwise import is_elementwise, refuse_wrapper, require_one_pass
from ls_strategy.zero.step.offload import Offload
from ls_strategy.zero.step.owner.full_tensor_groups import check_full_tensor_groups
from ls_strategy.zero.step.sparse import SparseGradients
from ls_strategy.zero_stages import StagePolicy


class Draft:
    """The units that this rank would build. Nothing is moved before all ranks have agreed."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        *,
        config: ZeROConfig,
        precision: PrecisionPolicy,
        policy: StagePolicy,
        parts: Mapping[int, TensorPart],
        share: Share,
    ) -> None:
        """Partition the model and check everything that can be checked; `agree` raises the errors.

        The arguments are those of `Engine`, except ``policy``: which states are sharded.
        """
        self.model = model
        self.share = share
        self._parts = parts
        self.precision = precision
        self.policy = policy
        self.specs: list[UnitSpec] = []
        self.kept = KeptInFp32()
        """What stays in fp32, in the 16-bit modes."""
        self._owners: dict[int, tuple[tuple[int, int], ...]] = {}
        self._replicated: set[int] = set()
        """``id`` of the parameters that every rank holds in full if they are frozen."""
        self._shared: dict[tuple[int, ...], int] = {}
        """Number of each set of optimizers with common parameters; these follow the numbers of the optimizers."""
        self._begun = {id(p) for o in optimizers for p, state in o.state.items() if state}
        """``id`` of parameters for which an optimizer has a state already."""
        self._quantized: set[int] = set()
        """``id`` of frozen parameters that are stored in 4 or 8 bits."""
        self.config = config
        # Some send more than others in a step. Stages of a pipeline may have parameters of different ones.
        kinds = [type(optimizer).__name__ for optimizer in optimizers if share.pipeline is None]
        self._options = repr((config.stage, config.sharding, config.precision, config.offload, precision, kinds))
        self._error: PlanError | None = None
        self.sparse: SparseGradients | None = None
        """Who needs the rows of sparse gradients. None after an error."""
        try:
            self._examine(optimizers)
        except PlanError as error:
            self._error = error

    def _examine(self, optimizers: Sequence[Optimizer]) -> None:
        """Partition the model, and check it and its optimizers.

        Raises:
            PlanError: they do not fit together.
        """
        model, config, precision, parts, share = self.model, self.config, self.precision, self._parts, self.share
        self.specs = partition(model, config.sharding.block_classes, config.sharding.min_unit_numel, share.absent)
        self._replicated = _parameters_below(model, config.sharding.replicated_modules)
        kept = kept_in_fp32(model, config.precision.fp32_modules, precision.compute)
        self.kept = kept if precision.rounds else self.kept
        self._owners = agreement.owners_of(model, optimizers)
        self._quantized = quantized_params(model, config.precision, self._owners, kept.params, precision.cast)
        self._number_shared(len(optimizers), single=not parts and share.pipeline is None)
        materials.require_values(model, share.absent)
        for optimizer in optimizers:
            refuse_wrapper(optimizer)
        replicated = not self.policy.optimizer and not parts and share.pipeline is None
        self.sparse = SparseGradients(model, optimizers, by_rows=replicated)
        for optimizer in optimizers:
            require_one_pass(optimizer)
            if self.policy.optimizer or parts:
                names = {id(p): n for n, p in model.named_parameters()}
                check_full_tensor_groups(optimizer, parts, names)
            else:
                is_elementwise(optimizer)

    def _number_shared(self, count: int, *, single: bool) -> None:
        """Number the sets of optimizers that have parameters in common.

        Raises:
            PlanError: an option supports one state per parameter only.
        """
        sets = {tuple(i for i, _ in owners) for owners in self._owners.values() if len(owners) > 1}
        self._shared = {each: count + n for n, each in enumerate(sorted(sets))}
        config = self.config
        split = config.precision.split_masters
        fp32 = config.precision.moments == "fp32"
        if not sets or (single and config.offload.optimizer is None and fp32 and split is None):
            return
        what = (
            "tensor, expert or pipeline parallelism"
            if not single
            else f"precision.master_weights={split!r}" if split is not None
            else f"precision.moments={config.precision.moments!r}"
        )  # fmt: skip
        offloaded = config.offload.tier_of("optimizer")
        if offloaded is not None:
            what = f"offload.optimizer={offloaded.tier!r}"
        shared = next(p for p, owners in self._owners.items() if len(owners) > 1)
        name = next(n for n, p in self.model.named_parameters() if id(p) == shared)
        numbers = " and ".join(str(i) for i, _ in self._owners[shared])
        raise PlanError(
            f"parameter {name!r} is in optimizers {numbers}, but {what} keeps one state per parameter. Give it to one "
            "of them, or remove that option."
        )

    def agree(self, world: Comm) -> None:
        """Raise on every rank if any rank has an error, different options or a different model. Collective.

        Raises:
            PlanError: naming the rank and the first difference.
        """
        rows = [
            (
                name,
                tuple(p.shape) if (part := self._parts.get(id(p))) is None else part.full_shape,
                self._dtype_of(p),
                p.requires_grad,
                self._owners.get(id(p)),
            )
            for spec in self.specs
            for name, p in spec.params
        ]
        stage = None if self.share.pipeline is None else self.share.pipeline.rank
        agreement.agree(world, self._error, self._options, rows, stage)

    def _dtype_of(self, param: nn.Parameter) -> str:
        """Return the dtype, how it will be stored, and where this rank has the values from."""
        rounds = ", stays in fp32" if id(param) in self.kept.params else ""
        stored = f", stored as {self.config.precision.frozen}" if id(param) in self._quantized else ""
        place = "" if source_of(param) is None else ", from a file"
        place = place if deferred_of(param) is None else ", set in configure_model"
        return f"{param.dtype}{rounds}{stored}{place}"

    def refuse(self, error: PlanError | None) -> None:
        """Let `agree` raise ``error``, unless it already has one."""
        self._error = self._error or error

    def resolve(self, mesh: Mesh, held: dict[int, FlatBuffer], weights: Sequence[Fraction] = (), rank: int = 0) -> Plan:
        """Lay out the buffers. ``held`` is as in `setup.shard`, ``weights`` and ``rank`` as in `resolve_plan`."""
        adapters = adapter_params(self.model)
        given = self.config.precision
        gathers_casts = given.gather == "compute" and given.split_masters is None  # else bf16 shards are gathered
        casts = casts_of(self.model, self.precision.autocast) if gathers_casts else {}

        def facts(name: str, p: nn.Parameter) -> ParamFacts:
            dtype = held[id(p)].master_dtype if id(p) in held else p.dtype
            if p.is_floating_point() and self.precision.cast is not None:
                dtype = torch.float32 if id(p) in self.kept.params else self.precision.cast
            owners = self._owners.get(id(p), ((FROZEN, 0),))
            # What trained before is frozen for a while, for example by `toggle_optimizer`.
            trained = id(p) in self._begun or (
                id(p) in held and held[id(p)].has_optimizer and not held[id(p)].is_frozen
            )
            (number, group), together = owners[0], tuple(i for i, _ in owners) if len(owners) > 1 else ()
            return ParamFacts(
                name,
                tuple(p.shape),
                dtype,
                self._shared.get(together, number),
                group,
                part=self._parts.get(id(p)),
                tied=id(p) in self.share.tied,
                replica=id(p) in self.share.replicas,
                shared_by=together,
                replicated=id(p) in self._replicated,
                quantized=self.config.precision.frozen if id(p) in self._quantized else None,
                cast_to=_fewer_bits(casts.get(id(p)), dtype),
                frozen=id(p) in self._owners and not p.requires_grad and not trained,
                adapter=id(p) in adapters,
            )

        return resolve_plan(
            [(spec.name, spec.is_root, [facts(n, p) for n, p in spec.params]) for spec in self.specs],
            policy=self.policy,
            world_size=mesh.shards.world_size,
            group=(mesh.shards.replica, mesh.shards.replicas),
            node=0 if mesh.node is None else mesh.node.world_size,
            expert_world_size=mesh.expert_zero.world_size,
            tensor_size=mesh.tensor.size,
            master_dtype=self.precision.master,
            compute_dtype=self.precision.compute,
            config=self.config,
            weights=weights,
            rank=rank,
        )

    def build(
        self, plan: Plan, mesh: Mesh, device: torch.device, held: dict[int, FlatBuffer], offload: Offload
    ) -> list[Unit]:
        """Move the parameters into units one by one: at stage 3, no rank holds two full units. Collective."""
        units: list[Unit] = []
        maker = materials.Materializer(self.model, device, self._parts, mesh, self.share.absent)
        number = 0
        for spec, planned in zip(self.specs, plan.units, strict=True):
            params = dict(spec.params)
            maker.provide(list(params.values()))
            initial = {id(p): materials.value_of(p, self._parts.get(id(p)), device) for p in params.values()}
            for p in params.values():
                allow_data_on(p, device)
            values = initial | _held_values(list(params.values()), held)
            del initial
            flats: list[FlatBuffer] = []
            for flat_plan in planned.flats:
                members = [params[slot.name] for slot in flat_plan.layout.slots]
                comm, axis = mesh.holders(flat_plan.layout.slots[0].part)
                which = flat_plan.policy(self.policy)
                node = mesh.node if flat_plan.node else None
                store = offload.store(number)
                make = _kind_of(flat_plan, which)
                flat = make(flat_plan, members, policy=which, comm=comm, store=store, axis=axis, node=node)
                number += 1
                flat.load([values[id(p)] for p in members], device)
                flats.append(flat)
            units.append(Unit(spec.name, spec.modules, flats, is_root=spec.is_root))
            # Return the original values, or what was read of files; otherwise set-up may need the size of the model.
            returns = offload.config.offload.any_state or any(isinstance(v, LazyTensor) for v in values.values())
            del values
            if returns:
                trim_heap()
        maker.finish()
        return units


def _kind_of(plan: FlatPlan, policy: StagePolicy) -> type[FlatBuffer]:
    """Return the class of a buffer: it decides in which format full parameters are gathered."""
    if plan.quantized is not None:
        return QuantizedFlat
    if (plan.unfrozen or plan).split_masters:
        return SplitFlat
    if plan.cast_to is None or not policy.parameters:
        return FlatBuffer
    return Float8Flat if plan.cast_to.itemsize == 1 else CastFlat


def _fewer_bits(to: torch.dtype | None, stored: torch.dtype) -> torch.dtype | None:
    """Return the dtype in which modules read a parameter, if it can be cast to that before it is gathered.

    Autocast leaves parameters in fp64 alone, and so does this.
    """
    return to if to is not None and to.itemsize < stored.itemsize <= torch.float32.itemsize else None


def _parameters_below(model: nn.Module, names: Sequence[str]) -> set[int]:
    """Return ``id`` of the parameters of the modules with these names.

    Raises:
        PlanError: there is no such module.
    """
    modules = dict(model.named_modules())
    for name in names:
        if name not in modules:
            raise PlanError(
                f"Got sharding.replicated_modules={list(names)}, but {type(model).__name__} has no module {name!r}. "
                f"Use names of named_modules(), such as {', '.join(repr(n) for n, _ in model.named_children())}."
            )
    return {id(p) for name in names for p in modules[name].parameters()}


def _held_values(params: list[nn.Parameter], held: dict[int, FlatBuffer]) -> dict[int, Tensor]:
    """Return ``id -> value`` in master precision of parameters in earlier buffers. Collective if there are any."""
    result: dict[int, Tensor] = {}
    current = {id(p): p.detach() for p in params if id(p) in held}
    for flat in {id(held[id(p)]): held[id(p)] for p in params if id(p) in held}.values():
        for p, value in zip(flat.params, flat.split(flat.full_master()), strict=True):
            # A resident parameter may have a newer value, for example from load_state_dict: then keep that one.
            if id(p) in current and (not flat.is_gathered or torch.equal(value.to(p.dtype), p)):
                result[id(p)] = value
    return result
