"""The parameters of an optimizer that need to be stepped whole, each by the one rank that owns it.

::

    averages   | a | b |  ─┐ gather                            ┌─ scatter  ──>  masters   | a | b |
    masters    | a | b |  ─┴────> a with its gradient, whole ──┘
                                  and its states, whole        the optimizer's own step, once in the whole job

If an optimizer's step is split (`split_step.py`), less is sent, and states stay in shards.

Otherwise the owner keeps the states between steps, on the tier of the flat buffer (`owner_states.py`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from ls_strategy._torch import copy_of_optimizer, forget_step_hooks
from ls_strategy.distributed.comm import Comm
from ls_strategy.tiers.stream import Stream
from ls_strategy.zero.flat.flat_buffer import FlatBuffer
from ls_strategy.zero.step.optimizer_state import OptimizerStates, StateRole
from ls_strategy.zero.step.owner.full_tensors import (
    FullTensor,
    FullTensorExchange,
    Gathering,
    PartsOf,
    Scattering,
    ShardOwners,
    balanced,
)
from ls_strategy.zero.step.owner.owner_states import OwnerStates
from ls_strategy.zero.step.owner.split_jobs import Applications, Directions, EarlyDirections
from ls_strategy.zero.step.owner.split_tensors import SplitTensors
from ls_strategy.zero.step.split_step import split_step_of
from ls_strategy.zero.step.updater import StepArguments, Updater

BUCKET = 1 << 24
"""Elements of parameters that are exchanged together: 64 MiB of gradients and as much of master weights in fp32."""

_SENT = 2
"""Values per element that the owner gets: the gradient and the master weight. It sends one back."""


class OwnerUpdater(Updater):
    """Steps the parameters of one optimizer that need to be full, each at the rank that owns it."""

    in_runs = False

    def __init__(
        self,
        optimizer: Optimizer,
        states: OptimizerStates,
        needed: Sequence[bool],
        fused: Sequence[bool] = (),
        *,
        one_by_one: bool,
    ) -> None:
        """Choose an owner for every parameter. Nothing is sent.

        Args:
            optimizer: the user's.
            states: of all its parameters.
            needed: for every group, whether its parameters have to be stepped whole. Empty: none.
            fused: for every group, whether a fused update steps it, on any tier.
            one_by_one: `step` may be called once per bucket. Otherwise all tensors are gathered for one call.
        """
        self._optimizer = optimizer
        self._states = states
        self._fused = fused or [False for _ in needed]
        self._groups = states.group_of
        self.one_by_one = one_by_one
        self.members = self._assigned([n for n in sorted(self._groups) if any(needed) and self._is_whole(n, needed)])
        split = split_step_of(optimizer)
        self._split = None if split is None else SplitTensors(optimizer, states, split, self._groups)
        self._in_shards = frozenset(m.number for m in self.members if split and needed[self._groups[m.number]])
        """Numbers of the parameters whose states are in shards, since their step is split."""
        self._numbers = frozenset(m.number for m in self.members)
        states.owners = {m.number: self._owner(m) for m in self.members if m.number not in self._in_shards}
        self.states = OwnerStates(states, self.members, self._split, self._in_shards)
        self._early = EarlyDirections(m for m in self.members if self._splitter(m) and self._is_on_host(m))
        self._applications = Applications()
        self._shown: dict[int, Tensor] = {}
        self._stepped: list[FullTensor] = []

    def _is_whole(self, number: int, needed: Sequence[bool]) -> bool:
        """Return whether a parameter is stepped as a full tensor.

        It is if its group asks for it, or if its shard is out of memory, where no ``step`` can reach it.
        """
        flat, _ = self._place(number)
        group = self._groups[number]
        return needed[group] or (not self._fused[group] and not flat.states_in_memory)

    def _assigned(self, numbers: Sequence[int]) -> list[FullTensor]:
        """Give every tensor to one of the ranks that hold parts of it, balanced by cost. Collective."""
        holders = ShardOwners(self._states.mesh)
        by_comm: defaultdict[Comm, list[int]] = defaultdict(list)
        for number in numbers:
            flat, index = self._place(number)
            if all(flat.layout.slots[index].full_shape):
                by_comm[holders.comm_of(flat)].append(number)
        result: list[FullTensor] = []
        for comm, members in by_comm.items():
            places = [self._place(n) for n in members]
            held = holders.of(comm, places)
            new = [FullTensor(n, *p, comm, 0, h) for n, p, h in zip(members, places, held, strict=True)]
            groups = [self._optimizer.param_groups[self._groups[m.number]] for m in new]
            costs = [tensor_cost(self._optimizer, group, m.shape) for group, m in zip(groups, new, strict=True)]
            owners = balanced(costs, comm.world_size)
            result += [replace(m, owner=owner) for m, owner in zip(new, owners, strict=True)]
        return sorted(result, key=lambda m: m.number)

    @staticmethod
    def _owner(member: FullTensor) -> StateRole:
        """Return what this rank does with the states of a tensor. One rank of all that have copies saves them."""
        flat = member.flat
        first = flat.policy.optimizer or flat.comm.rank == 0  # without sharding, all of them step it
        across = member.comm is not flat.comm and member.comm.world_size > 1
        return StateRole(saves=member.is_mine and first and (across or flat.axis.rank == 0), loads=member.is_mine)

    def _place(self, number: int) -> tuple[FlatBuffer, int]:
        """Return the buffer of a parameter, and its position there."""
        n, index = self._states.locate(number)
        return self._states.flats[n], index

    @override
    def takes(self, number: int) -> bool:
        return number in self._numbers

    @property
    def elements_sent(self) -> int:
        """Return the elements that all ranks together send in a step that steps all of them."""
        return sum(self._width(m) * m.gathered_numel + m.scattered_numel for m in self.members)

    @property
    def bytes_sent(self) -> int:
        """Return the bytes of them."""
        numels = ((m, self._width(m) * m.gathered_numel + m.scattered_numel) for m in self.members)
        return sum(numel * self._sent(m).itemsize for m, numel in numels)

    def _splitter(self, member: FullTensor) -> SplitTensors | None:
        """Return what runs the element-wise parts of a tensor's step, if it is split."""
        return self._split if member.number in self._in_shards else None

    def _width(self, member: FullTensor) -> int:
        return 1 if self._splitter(member) else _SENT

    def _sent(self, member: FullTensor) -> torch.dtype:
        splitter = self._splitter(member)
        return member.flat.master_dtype if splitter is None else splitter.dtype(member)

    # while backward runs ---------------------------------------------------------------------------------------------

    def begin_early(self, flat: FlatBuffer, stream: Stream) -> None:
        """Begin the element-wise part of the split steps of a buffer with complete averages. Not collective."""
        if self._split is not None and not self.states.collected:
            self._early.begin(flat, self._split, stream)

    def forget_early(self) -> None:
        """Forget what `begin_early` has begun, after an exception has ended the backward pass."""
        self._early.forget()

    # step ------------------------------------------------------------------------------------------------------------

    @override
    def begin(self, step: StepArguments, dropped: frozenset[int], others: Callable[[], None]) -> None:
        """Gather the tensors to step, and step them if the optimizer steps them one by one. Collective.

        The stream runs what is element-wise in a split step, on states in host memory.
        """
        used, stream = step.used, step.stream
        self._early.require_none(m for m in self.members if not used[m.number] or m.number in dropped)
        self.states.restore()
        members = [m for m in self.members if used[m.number] and m.number not in dropped]
        for flat in {id(m.flat): m.flat for m in members}.values():
            flat.wait_updated()
            flat.before_change()
        arriving: list[tuple[list[FullTensor], Gathering]] = []
        leaving: list[Scattering] = []
        for bucket, parts in self._with_parts(members, stream):
            gather = self._exchange(bucket).start_gather(bucket, parts, self._width(bucket[0]))
            arriving.append((bucket, gather))
            if len(arriving) > 1:  # the next bucket is on its way while this one is stepped
                self._take(*arriving.pop(0), leaving, stream)
        for bucket, pending in arriving:
            self._take(bucket, pending, leaving, stream)
        # The next forward needs the embeddings first, which are among the others: they come before the last bucket.
        on_stream = stream is not None and any(self._splitter(m) and self._is_on_host(m) for m in members)
        if on_stream:
            others()
        for pending in leaving:
            self._write(pending, stream)
        if not on_stream:
            others()
        self._stepped = [] if self.one_by_one else [m for m in members if not self._splitter(m)]

    @override
    def agree(self, dropped: frozenset[int]) -> frozenset[int]:
        """Return the parameters that any rank has dropped. Collective."""
        result = set(dropped)
        for n, flat in enumerate(self._states.flats):
            numbers = range(self._states.offsets[n], self._states.offsets[n + 1])
            flags = flat.comm.agree(torch.tensor([i in dropped for i in numbers], dtype=torch.uint8))
            flags = flat.axis.comm.agree(flags)
            result.update(i for i, flag in zip(numbers, flags.tolist(), strict=True) if flag)
        return frozenset(result)

    def _with_parts(
        self, members: Sequence[FullTensor], stream: Stream | None
    ) -> Iterator[tuple[list[FullTensor], PartsOf]]:
        """Yield the buckets, each with what returns their parts. The stream is one bucket ahead."""
        ahead: deque[tuple[list[FullTensor], PartsOf]] = deque()
        for bucket in self._buckets(members):
            ahead.append((bucket, self._parts_on(stream, bucket)))
            if len(ahead) > 1:
                yield ahead.popleft()
        yield from ahead

    def _parts_on(self, stream: Stream | None, bucket: Sequence[FullTensor]) -> PartsOf:
        """Begin the parts of a bucket on the stream, but for what backward has begun; return what returns them."""
        splitter = self._splitter(bucket[0])
        if splitter is None or not self._is_on_host(bucket[0]):
            return self._parts
        sent = [m for m in bucket if m.sent_by(m.comm.rank)]
        begun = {m.number: early.take for m in sent if (early := self._early.pop(m))}
        others = [m for m in sent if m.number not in begun]
        if stream is not None and others:
            gradients = {m.number: _gradient(m.flat, *m.mine) for m in others}
            rest = Directions(splitter, others, lambda m: gradients.pop(m.number), stream)
            begun |= {m.number: rest.take for m in others}
        return lambda m: begun.get(m.number, self._parts)(m)

    @staticmethod
    def _is_on_host(member: FullTensor) -> bool:
        """Return whether the states of a tensor are in host memory, away from the device."""
        return member.flat.steps_in_background and member.flat.states_in_memory

    def _take(
        self, bucket: list[FullTensor], pending: Gathering, leaving: list[Scattering], stream: Stream | None
    ) -> None:
        """Step a bucket that has arrived, or keep its tensors for the optimizer's own call."""
        if not self.one_by_one and not self._splitter(bucket[0]):
            self._shown |= self._tensors(pending, bucket[0].flat.master.device)
            return
        leaving.append(self._step(bucket, pending))
        if len(leaving) > 1:
            self._write(leaving.pop(0), stream)

    @override
    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Show the tensors that wait for the optimizer's own call, and return them to their shards after it."""
        groups, state = self._optimizer.param_groups, self._optimizer.state
        for number, tensor in self._shown.items():
            groups[self._groups[number]]["params"].append(tensor)
            state[tensor] = self.states.held.pop(number, {})
        try:
            yield
        finally:
            for number, tensor in self._shown.items():
                self.states.held[number] = self._optimizer.state.pop(tensor, {})
                tensor.grad = None
        members, self._stepped = self._stepped, []
        for bucket in self._buckets(members):
            self._write(self._exchange(bucket).start_scatter(bucket, lambda m: self._shown[m.number]))
        self._shown = {}

    @override
    def collect(self) -> None:
        self.states.collect()

    @override
    def tensors(self) -> list[Tensor]:
        return self.states.tensors()

    def _buckets(self, members: Sequence[FullTensor]) -> Iterator[list[FullTensor]]:
        """Split tensors into those that are exchanged together: of one communicator and device, in one way."""
        kinds: defaultdict[tuple[Any, ...], list[FullTensor]] = defaultdict(list)
        for member in members:
            flat = member.flat
            how = (self._splitter(member) is None, self._is_on_host(member))
            kind = (id(member.comm), self._sent(member), how, flat.master.device)
            kinds[kind].append(member)
        for same in kinds.values():
            bucket: list[FullTensor] = []
            for member in same:
                if bucket and sum(m.numel for m in bucket) + member.numel > BUCKET:
                    yield bucket
                    bucket = []
                bucket.append(member)
            yield bucket

    def _exchange(self, bucket: Sequence[FullTensor]) -> FullTensorExchange:
        return FullTensorExchange(bucket[0].comm, self._sent(bucket[0]), bucket[0].flat.full.device)

    def _parts(self, member: FullTensor) -> list[Tensor]:
        """Return this rank's parts of gradient and master weights, or of the direction if the step is split."""
        start, stop = member.mine
        splitter, grad = self._splitter(member), _gradient(member.flat, start, stop)
        if splitter is not None:
            return [splitter.direction(member, grad.to(member.flat.master.device, member.flat.master_dtype))]
        return [grad, member.flat.master_range(start, stop)]

    def _tensors(self, pending: Gathering, device: torch.device) -> dict[int, Tensor]:
        """Return this rank's tensors with their gradients, by number, on ``device``."""
        result: dict[int, Tensor] = {}
        for number, (grad, master) in pending(device).items():
            master.requires_grad_().grad = grad
            result[number] = master
        return result

    def _step(self, bucket: list[FullTensor], pending: Gathering) -> Scattering:
        """Step this rank's tensors of one bucket with a copy of the optimizer, and start returning them.

        This runs on the model's device, wherever the states are stored: products of matrices are what it is for.
        """
        device, home = bucket[0].flat.full.device, bucket[0].flat.master.device
        splitter = self._splitter(bucket[0])
        if splitter is not None:
            mine = {m.number: m for m in bucket if m.is_mine}
            tensors = {n: splitter.update(mine[n], full) for n, (full,) in pending(device).items()}
            return self._exchange(bucket).start_scatter(bucket, lambda m: tensors[m.number])
        tensors = self._tensors(pending, device)
        if tensors:
            groups = [
                {**group, "params": [t for n, t in tensors.items() if self._groups[n] == g]}
                for g, group in enumerate(self._optimizer.param_groups)
            ]
            copied = copy_of_optimizer(self._optimizer, groups)
            forget_step_hooks(copied)
            copied.state = defaultdict(
                dict, {t: _moved(self.states.held.pop(n, {}), device) for n, t in tensors.items()}
            )
            type(self._optimizer).step(copied)
            for n, t in tensors.items():
                self.states.held[n] = _moved(copied.state.pop(t, {}), home)
                t.grad = None
        return self._exchange(bucket).start_scatter(bucket, lambda m: tensors[m.number])

    def _write(self, pending: Scattering, stream: Stream | None = None) -> None:
        parts = pending()
        splitter = self._splitter(parts[0][0]) if parts else None
        if stream is not None and splitter is not None and self._is_on_host(parts[0][0]):
            self._applications.submit(splitter, parts, stream)
            return
        for member, part in parts:
            if splitter is None:
                member.flat.write_master(member.mine[0], part)
            else:
                splitter.write(member, part)


def splits_tensors_of(flat: FlatBuffer) -> bool:
    """Return whether this rank has only parts of a buffer's parameters.

    That is so if ZeRO shards them, or tensor parallelism splits them.
    """
    parts = (slot.part for slot in flat.layout.slots)
    return flat.policy.optimizer or any(part is not None and part.axis == "tensor" for part in parts)


def tensor_cost(optimizer: Optimizer, group: dict[str, Any], shape: tuple[int, ...]) -> float:
    """Return what stepping a tensor costs, to balance the ranks: multiplications of Newton-Schulz, or elements.

    An optimizer may have a method ``tensor_cost(group, shape)``.
    """
    own: Callable[[dict[str, Any], tuple[int, ...]], float] | None = getattr(optimizer, "tensor_cost", None)
    if own is not None:
        return float(own(group, shape))
    numel = float(torch.Size(shape).numel())
    if "ns_steps" in group and len(shape) == 2:
        few, many = sorted(shape)
        return float(group["ns_steps"] * (2 * few * few * many + few**3))
    return numel


def _gradient(flat: FlatBuffer, start: int, stop: int) -> Tensor:
    """Return elements ``[start, stop)`` of this rank's averaged gradients, without a loss scale."""
    averages = flat.averages
    grads = averages.stepped(start, stop)
    return grads if averages.unscale == 1.0 else grads * averages.unscale


def _moved(state: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a state on ``device``, except for numbers."""
    return {k: v.to(device) if isinstance(v, Tensor) and v.dim() else v for k, v in state.items()}
