"""The user's optimizer, re-pointed at master shards.

The object stays the user's own: schedulers, hooks and loggers keep working on it. Its ``param_groups`` hold one 1-d
view per parameter, the piece of it that this rank steps. During `step` they hold *runs* instead: stretches of adjacent
pieces with the same group and the same history, so that an optimizer meets a few long tensors instead of many short
ones::

    pieces  | a | b |   | c | d | e |        c unused since the start, say: no decay, no momentum, no step count
    runs    |  a b  |       |  d e  |

An element-wise optimizer computes the same either way; `elementwise.py` tries out whether it is one.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ls_strategy.comm import Comm
from ls_strategy.errors import PlanError, StateError
from ls_strategy.layout import Slot
from ls_strategy.zero.elementwise import is_elementwise
from ls_strategy.zero.units import Flat

_FUSED = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers that torch can run as one pass over memory; used where the user left the choice to torch."""

_ELEMENTWISE = "elementwise"
"""Stands for a state tensor with one element per parameter element, kept in the flat store."""


@dataclass
class _Run:
    """Adjacent pieces that are stepped as one tensor."""

    flat: Flat
    flat_number: int
    group: int
    members: list[int]
    start: int
    stop: int
    tensor: Tensor


class ShardedOptimizer:
    """One optimizer of the user and its sharded state."""

    def __init__(self, optimizer: Optimizer, flats: list[Flat], comm: Comm) -> None:
        """Swap the groups' parameters for pieces. State that exists already (Adagrad makes it at once) is cut too."""
        self.optimizer = optimizer
        self.flats = flats
        self.comm = comm
        self.cuts = any(flat.policy.optimizer for flat in flats) or is_elementwise(optimizer)
        """Whether parameters may be cut and joined. Otherwise (stage 0) the optimizer gets each as it is."""
        place = {id(p): (n, i) for n, flat in enumerate(flats) for i, p in enumerate(flat.params)}
        self._offsets = [0]
        for flat in flats:
            self._offsets.append(self._offsets[-1] + len(flat.params))
        self.order: list[int] = []
        """Position of every parameter in ``[p for flat in flats for p in flat.params]``, in the optimizer's order."""
        self.group_of: dict[int, int] = {}
        self.pieces: list[Tensor] = [torch.empty(0)] * self._offsets[-1]
        self._store: list[dict[str, Tensor]] = [{} for _ in flats]
        self._state: dict[int, dict[str, Any]] = {}
        self._runs: list[_Run] = []
        self._run_state: defaultdict[Tensor, Any] = defaultdict(dict)
        self._composed_for: tuple[Any, ...] | None = None
        self._grad_views: dict[int, tuple[Tensor, list[Tensor]]] = {}
        early_state = {k: v for k, v in optimizer.state.items() if v}
        for g, group in enumerate(optimizer.param_groups):
            for j, param in enumerate(group["params"]):
                n, i = place[id(param)]
                number = self._offsets[n] + i
                self.order.append(number)
                self.group_of[number] = g
                self._make_piece(number, flats[n], i, param)
                if param in early_state:
                    self._absorb(number, flats[n], i, early_state[param])
                group["params"][j] = self.pieces[number]
        optimizer.state = defaultdict(dict)
        self._lengths = [len(group["params"]) for group in optimizer.param_groups]

    def _make_piece(self, number: int, flat: Flat, i: int, param: nn.Parameter) -> None:
        piece = flat.pieces[i]
        tensor = flat.master.detach()[piece.start : piece.stop]
        if not self.cuts:
            tensor = tensor.view(param.shape)
        self.pieces[number] = tensor.requires_grad_(param.requires_grad)

    def _locate(self, number: int) -> tuple[int, int]:
        n = next(k for k in range(len(self.flats)) if number < self._offsets[k + 1])
        return n, number - self._offsets[n]

    # step ------------------------------------------------------------------------------------------------------------

    def bind_grads(self, used: list[bool]) -> None:
        """Show the averaged gradients as ``.grad`` of the pieces: what hooks see, and may change, before the step."""
        for n, flat in enumerate(self.flats):
            views = self._views_of(n, flat)
            for i, piece in enumerate(flat.pieces):
                number = self._offsets[n] + i
                shown = used[number] and piece.numel > 0
                self.pieces[number].grad = views[i].to(self.pieces[number].dtype) if shown else None

    def _views_of(self, flat_number: int, flat: Flat) -> list[Tensor]:
        """The averaged gradients cut into pieces; cut again only when the buffer is another one."""
        grads = flat.stepped_grads()
        if self._grad_views.get(flat_number, (None, []))[0] is not grads:
            shapes = [self.pieces[self._offsets[flat_number] + i].shape for i in range(len(flat.pieces))]
            views = [grads[p.start : p.stop].view(s) for p, s in zip(flat.pieces, shapes, strict=True)]
            self._grad_views[flat_number] = (grads, views)
        return self._grad_views[flat_number][1]

    def step(self, used: list[bool], run: Callable[[], Any]) -> Any:
        """Call ``run`` (the optimizer's own step) on the runs of the parameters in ``used``."""
        groups = self.optimizer.param_groups
        if [len(group["params"]) for group in groups] != self._lengths:
            raise PlanError(
                f"{type(self.optimizer).__name__} got parameters after training had started (add_param_group, or a "
                "fine-tuning callback): their states are not sharded. Give all parameters to the optimizer in "
                "configure_optimizers and freeze them with requires_grad_(False) until they are to train."
            )
        self._compose(used)
        pieces = [group["params"] for group in groups]
        piece_state = self.optimizer.state
        fused = [g for i, g in enumerate(groups) if self._may_fuse(i)]
        edited = self._edited_grads(used)
        try:
            for g, group in enumerate(groups):
                group["params"] = [r.tensor for r in self._runs if r.group == g]
            for group in fused:
                group["fused"] = True
            self.optimizer.state = self._run_state
            for r in self._runs:
                grads = r.flat.stepped_grads()[r.start : r.stop]
                r.tensor.grad = grads.view(r.tensor.shape).to(r.tensor.dtype)
            for r, lo, hi, grad in edited:
                assert r.tensor.grad is not None
                r.tensor.grad.view(-1)[lo:hi].copy_(grad.reshape(-1))
            return run()
        finally:
            self._run_state = self.optimizer.state  # type: ignore[assignment]
            self.optimizer.state = piece_state
            for group, members in zip(groups, pieces, strict=True):
                group["params"] = members
            for group in fused:
                group["fused"] = None
            for r in self._runs:
                r.tensor.grad = None

    def _may_fuse(self, group: int) -> bool:
        """Whether the group's update may run as one pass over memory: torch can, and the user has not chosen."""
        settings = self.optimizer.param_groups[group]
        if type(self.optimizer) not in _FUSED or settings.get("fused") is not None or settings.get("foreach"):
            return False
        # torch's fused SGD takes momentum of all tensors or of none; a run that begins late has none yet.
        begun = {bool(self._run_state.get(r.tensor)) for r in self._runs if r.group == group}
        return not (isinstance(self.optimizer, torch.optim.SGD) and len(begun) > 1)

    def _edited_grads(self, used: list[bool]) -> list[tuple[_Run, int, int, Tensor]]:
        """Gradients that the user replaced on a piece since `bind_grads`, and where they belong."""
        result: list[tuple[_Run, int, int, Tensor]] = []
        for r in self._runs:
            base = r.flat.stepped_grads()
            for number in r.members:
                grad = self.pieces[number].grad
                piece = r.flat.pieces[number - self._offsets[r.flat_number]]
                if grad is None or not used[number]:
                    continue
                expected = base.data_ptr() + piece.start * base.element_size()
                if grad.dtype != base.dtype or grad.data_ptr() != expected:
                    result.append((r, piece.start - r.start, piece.stop - r.start, grad))
        return result

    def _compose(self, used: list[bool]) -> None:
        """Cut the used pieces into runs; nothing to do while the same parameters are used."""
        dropped = tuple(
            u and p.numel() > 0 and p.grad is None for u, p in zip(used, self.pieces, strict=True)
        )  # the user set piece.grad = None: plain torch skips such a parameter
        key = (tuple(used), dropped)
        if self._composed_for == key:
            return
        self.dissolve()
        for n, flat in enumerate(self.flats):
            current: _Run | None = None
            current_key: Any = None
            for i, piece in enumerate(flat.pieces):
                number = self._offsets[n] + i
                if not used[number] or dropped[number]:
                    current = None
                    continue
                if piece.numel == 0:
                    continue
                run_key = (self.group_of[number], self._signature(number) if self.cuts else number)
                if current is not None and run_key == current_key:
                    current.stop = piece.stop
                    current.members.append(number)
                    continue
                current = _Run(flat, n, run_key[0], [number], piece.start, piece.stop, flat.master)
                current_key = run_key
                self._runs.append(current)
        for r in self._runs:
            r.tensor = r.flat.master.detach()[r.start : r.stop].view(self._shape_of(r)).requires_grad_()
            self._run_state[r.tensor] = self._state_of_run(r)
        self._composed_for = key

    def _shape_of(self, r: _Run) -> tuple[int, ...]:
        return (r.stop - r.start,) if self.cuts else tuple(self.pieces[r.members[0]].shape)

    def _signature(self, number: int) -> Any:
        """Equal for parameters whose state is equal but for the flat store: they may share a run."""
        state = self._state.get(number, {})
        return tuple(sorted((k, float(v) if isinstance(v, Tensor) else v) for k, v in state.items()))

    def _state_of_run(self, r: _Run) -> dict[str, Any]:
        group = self.optimizer.param_groups[r.group]
        on_device = group.get("capturable") or group.get("fused") or self._may_fuse(r.group)
        result: dict[str, Any] = {}
        for k, v in self._state.get(r.members[0], {}).items():
            if isinstance(v, str) and v == _ELEMENTWISE:
                result[k] = self._store[r.flat_number][k][r.start : r.stop].view(r.tensor.shape)
            elif isinstance(v, Tensor):
                result[k] = v.clone().to(r.tensor.device if on_device else "cpu")
            else:
                result[k] = v
        return result

    def dissolve(self) -> None:
        """Bring the runs' states back to their parameters: element-wise ones into the flat store, the rest per name."""
        for r in self._runs:
            state = self._run_state.get(r.tensor, {})
            for number in r.members:
                self._state[number] = {}
            for k, v in state.items():
                elementwise = isinstance(v, Tensor) and v.shape == r.tensor.shape
                if elementwise:
                    self._store_for(r.flat_number, k, v.dtype)[r.start : r.stop].copy_(v.reshape(-1))
                for number in r.members:
                    self._state[number][k] = (
                        _ELEMENTWISE if elementwise else (v.clone().cpu() if isinstance(v, Tensor) else v)
                    )
        self._runs = []
        self._run_state = defaultdict(dict)
        self._composed_for = None

    def _store_for(self, flat_number: int, key: str, dtype: torch.dtype) -> Tensor:
        store = self._store[flat_number]
        if key not in store:
            store[key] = torch.zeros_like(self.flats[flat_number].master, dtype=dtype)
        return store[key]

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank, without masters."""
        tensors = [t for store in self._store for t in store.values()]
        tensors += [t for state in self._run_state.values() for t in state.values() if isinstance(t, Tensor)]
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    # state dict ------------------------------------------------------------------------------------------------------

    def full_state_dict(self) -> dict[str, Any]:
        """State in torch's own format, with full tensors on the CPU of rank 0; other ranks get no state. Collective.

        A plain optimizer over the unsharded parameters loads it.
        """
        self.dissolve()
        by_rank = self.comm.exchange_objects((self._state, [{k: t.dtype for k, t in s.items()} for s in self._store]))
        scalars: dict[int, dict[str, Any]] = {}
        for state, _ in by_rank:
            for number, entries in state.items():
                scalars.setdefault(number, {}).update(entries)
        full: list[dict[str, Tensor]] = []
        for n, flat in enumerate(self.flats):
            keys = {k: dtype for _, dtypes in by_rank for k, dtype in dtypes[n].items()}
            full.append({k: self._gather(n, flat, k, keys[k]) for k in sorted(keys)})
        packed: dict[int, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        position = 0
        for group in self.optimizer.param_groups:
            members = range(position, position + len(group["params"]))
            groups.append({**{k: v for k, v in group.items() if k != "params"}, "params": list(members)})
            position += len(group["params"])
        if self.comm.rank == 0:
            for index, number in enumerate(self.order):
                n, i = self._locate(number)
                slot = self.flats[n].layout.slots[i]
                if number in scalars:
                    packed[index] = {
                        k: _full_value(full[n].get(k), slot, v) for k, v in scalars[number].items()
                    }  # fmt: skip
        return {"state": packed, "param_groups": groups}

    def _gather(self, flat_number: int, flat: Flat, key: str, dtype: torch.dtype) -> Tensor:
        mine = self._store_for(flat_number, key, dtype)
        if not flat.policy.optimizer:
            return mine.cpu()
        whole = torch.zeros(flat.layout.numel, dtype=dtype, device=mine.device)
        whole[slice(*flat.owned)].copy_(mine)
        self.comm.all_gather(whole).wait()
        return whole.cpu() if self.comm.rank == 0 else torch.empty(0)

    def load_full_state_dict(self, state: dict[str, Any]) -> None:
        """Take this rank's part of a full state (torch's format, from any world size, stage, or plain torch).

        Raises:
            StateError: the state belongs to an optimizer with other parameter groups.
        """
        ours = [len(group["params"]) for group in self.optimizer.param_groups]
        theirs = [len(group["params"]) for group in state["param_groups"]]
        if ours != theirs:
            raise StateError(
                f"the checkpoint's optimizer has {len(theirs)} parameter groups of sizes {theirs}, this run's "
                f"{type(self.optimizer).__name__} has {len(ours)} of sizes {ours}. Build the same groups in "
                "configure_optimizers, or load only the weights."
            )
        self.dissolve()
        self._state.clear()
        for group, saved in zip(self.optimizer.param_groups, state["param_groups"], strict=True):
            group.update({k: v for k, v in copy.deepcopy(saved).items() if k != "params"})
        names = [index for group in state["param_groups"] for index in group["params"]]
        for index, number in zip(names, self.order, strict=True):
            if index in state["state"]:
                n, i = self._locate(number)
                self._absorb(number, self.flats[n], i, state["state"][index])

    def _absorb(self, number: int, flat: Flat, i: int, state: dict[str, Any]) -> None:
        n, _ = self._locate(number)
        shape, piece = flat.layout.slots[i].shape, flat.pieces[i]
        kept: dict[str, Any] = {}
        for k, v in state.items():
            if isinstance(v, Tensor) and k != "step" and tuple(v.shape) == shape:
                dtype = flat.master.dtype if v.is_floating_point() else v.dtype
                store = self._store_for(n, k, dtype)
                part = v.reshape(-1)[piece.param_start : piece.param_start + piece.numel]
                store[piece.start : piece.stop].copy_(part)
                kept[k] = _ELEMENTWISE
            else:
                kept[k] = v.detach().clone().cpu() if isinstance(v, Tensor) else v
        self._state[number] = kept


def _full_value(whole: Tensor | None, slot: Slot, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if value == _ELEMENTWISE and whole is not None:
        return whole[slot.offset : slot.end].view(slot.shape).clone()
    return value
