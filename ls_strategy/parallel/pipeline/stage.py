"""Runs the user's function for one stage and one micro-batch, so that only the stage's blocks do real work.

::

    step(micro_batch)
      ├─ before the stage's first block   placeholders (`placeholder.PlaceholderMode`); on stage 0 real tensors
      ├─ the stage's blocks               real; the first one gets what the previous stage sent
      └─ the next stage's first block     the call ends here (`_Leave`), and its arguments are sent on;
                                          on the last stage real to the end, with the loss as result

Code between two blocks runs on the stage of the earlier block. Blocks are recognized when they are called, however the
code reaches them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy._torch import (
    compiled_code,
    is_compiled,
    route_calls,
    tree_flatten,
    tree_iter,
    tree_map,
    tree_unflatten,
    uncompiled_code,
    without_function_mode,
)
from ls_strategy.errors import PlanError, StateError
from ls_strategy.parallel.pipeline.counts import Mean
from ls_strategy.parallel.pipeline.meta import MetaBlocks, meta_copy
from ls_strategy.parallel.pipeline.partition import StagePartition, Step, names_above
from ls_strategy.parallel.pipeline.placeholder import READS, PlaceholderMode, is_meta
from ls_strategy.parallel.pipeline.record import RecordedStep
from ls_strategy.parallel.pipeline.transfer import SIDE, SideLoss, StageTransfer, add_side, alias, side_of
from ls_strategy.parallel.pipeline.unchanged import unchanged


class _StageEnd(BaseException):
    """Ends the user's function where the next stage begins. Code that catches Exception does not catch it."""


@dataclass
class _StageCall:
    """A call of the user's function."""

    stage: int
    first: int
    stop: int
    received: StageTransfer | None
    mode: PlaceholderMode
    next: int = 0
    """Index of the block that must be called next."""

    output: StageTransfer | None = None
    ends: tuple[Tensor, ...] = ()
    """What the last block returned."""

    side: Tensor | None = None
    """Side loss of earlier stages, see `SideLoss`."""


def _no_callback(*_: Any) -> None:
    """Do nothing."""


class StageRunner:
    """Runs the stages of one rank. Intercepts the calls of all blocks until `remove`."""

    def __init__(
        self, model: nn.Module, cut: StagePartition, device: torch.device, *, side: SideLoss | None = None
    ) -> None:
        """Intercept the calls. Must precede the hooks of ZeRO and tensor parallelism: absent blocks run without them.

        Args:
            model: The model with this rank's parameters, see `partition.keep_own`.
            cut: Partition of the model.
            device: Device of this rank.
            side: Set on all ranks of the pipeline or on none. Without it only activations are sent.
        """
        self.cut = cut
        self.side = side
        self.device = device
        self.last = len(cut.bounds) - 2
        self._blocks = [model.get_submodule(name) for name in cut.blocks]
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._meta_blocks = MetaBlocks(model, self._blocks, device)
        self.on_received: Callable[[Sequence[tuple[Tensor, Tensor]]], None] = _no_callback
        """Called before the first block of a stage with the placeholders of its inputs, which have the shapes that the
        blocks give without hooks, and the tensors that were received for them."""

        self.on_blocks: Callable[[int], None] = _no_callback
        """Called with a stage before its first block."""

        self.on_end: Callable[[], None] = _no_callback
        """Called after the last block, also where the step runs on shapes."""

        self.means: list[Mean] = []
        """The losses of the last stage's latest forward that are means over tokens."""

        self.ends: tuple[Tensor, ...] = ()
        """What the last block returned in the last stage's latest forward, see `runner`."""

        self._results: dict[Any, Any] = {}
        """See `placeholder.PlaceholderMode.memory`."""

        self._model = model
        self._call: _StageCall | None = None
        self._recomputed_call: _StageCall | None = None
        self._sent: dict[int, frozenset[int]] = {}
        """Positions of the arguments that each stage sends in training."""

        self._sent_evaluating: dict[int, frozenset[int]] = {}
        """The same in evaluation."""

        self._inside = tuple(f"{name}." for name in cut.blocks)
        self._outside = _outside(model, cut.blocks)
        parameters = {id(p): meta_copy(p) for p in model.parameters()}
        self._routes = []
        for module in self._outside:
            # Buffers stay real: values that do not depend on parameters are known on every rank.
            meta_module = copy.deepcopy(module, {**parameters, **{id(b): b for b in module.buffers()}})
            self._routes.append(route_calls(module, partial(self._route_outside, module, meta_module)))
        for i, block in enumerate(self._blocks):
            self._routes.append(route_calls(block, partial(self._route, i)))

    def remove(self) -> None:
        """Restore the calls."""
        for route in self._routes:
            route.remove()

    def run(self, stage: int, step: Step, micro_batch: Any, received: StageTransfer | None) -> Any:
        """Run the forward action.

        Args:
            stage: One of this rank's stages.
            step: The user's function.
            micro_batch: The same on every rank of the pipeline.
            received: Transfer from the previous stage.

        Returns:
            A `StageTransfer`, or on the last stage the result of ``step``.

        Raises:
            PlanError: The code needs a value that only another rank has.
            StateError: Blocks were not called in order, each once; or see `SideLoss`.
        """
        mode = PlaceholderMode(self.device)
        mode.parameters = stage > 0
        mode.explain = self._why_unknown  # it gets the mode: a reference from the mode to itself would keep tensors
        mode.known = received.known if received is not None else {}
        mode.means = [] if stage == self.last else None
        call = self._call = _StageCall(stage, self.cut.bounds[stage], self.cut.bounds[stage + 1], received, mode)
        call.side = side_of(received, self.side)
        try:
            with uncompiled_code(), mode:  # compiled code does not support placeholders
                result = step(micro_batch)
        except _StageEnd:
            assert call.output is not None
            add_side(call.output, call.side, self.side)
            return call.output
        finally:
            self._call = None
        if call.next != len(self._blocks):
            missing = self.cut.blocks[call.next]
            raise StateError(
                f"step returned without a call of block {missing!r} (or it caught BaseException). In a pipeline every "
                "block must be called once per micro-batch."
            )
        self._refuse_placeholders(result, "the result of step", mode)
        self.means, self.ends = mode.means or [], call.ends
        return result

    def record(self, step: Step, micro_batch: Any, record: RecordedStep) -> list[Mean]:
        """Run the user's function on shapes, and note what it calls. Nothing is trained.

        Attributes and buffers that the code sets outside of blocks are restored. Where it fails or reads a value that
        is not a number, it ends early.

        Returns:
            The losses that are means over tokens.
        """
        mode = PlaceholderMode(self.device)
        mode.means, mode.record, mode.memory = [], record, self._results
        outside = [m for name, m in self._model.named_modules() if not name.startswith(self._inside)]
        mode.kept = frozenset(id(b) for m in outside for b in m.buffers(recurse=False))
        end = len(self._blocks)
        self._call = call = _StageCall(self.last + 1, end, end, None, mode)
        with unchanged(outside):
            try:
                with uncompiled_code(), mode, torch.enable_grad():
                    record.result = step(micro_batch)
                record.complete = call.next == end
            except Exception:  # in the real run it raises again
                pass
            finally:
                self._call = None
        return mode.means

    @contextmanager
    def recomputing(self, stage: int, received: StageTransfer | None) -> Generator[None, None, None]:
        """Give blocks that activation checkpointing runs again the inputs that they got in `run`."""
        first, stop = self.cut.bounds[stage], self.cut.bounds[stage + 1]
        self._recomputed_call = _StageCall(stage, first, stop, received, PlaceholderMode(self.device))
        try:
            yield
        finally:
            self._recomputed_call = None

    # calls of blocks -------------------------------------------------------------------------------------------------

    def _route(self, i: int, inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call = self._call
        if call is None:
            if self._recomputed_call is not None:
                args, kwargs = self._substitute(i, self._recomputed_call, args, kwargs)
            else:
                _require_values(self._blocks[i])
            return inner(*args, **kwargs)
        self._advance(call, i)
        if i < call.first:
            result = self._meta_blocks.run(i, args, kwargs, call.mode)
            if call.next == len(self._blocks):
                self.on_end()
            return result
        if i == call.stop and call.stage < self.last:
            call.output = self._make_transfer(call, args, kwargs)
            raise _StageEnd
        args, kwargs = self._substitute(i, call, args, kwargs)
        if i == call.first:
            self.on_blocks(call.stage)
        call.mode.parameters = False
        self._refuse_placeholders((args, kwargs), f"block {self.cut.blocks[i]!r}", call.mode)
        with without_function_mode(call.mode), compiled_code():
            result = inner(*args, **kwargs)
        if call.next == len(self._blocks):
            call.ends = tuple(leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor) and leaf.requires_grad)
            self.on_end()
            if self.side is not None:
                self.side.receive(call.side)
        return result

    def _route_outside(
        self,
        module: nn.Module,
        meta_module: nn.Module,
        inner: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Call a module outside of the blocks. Before this stage's blocks its parameters and hooks count as absent."""
        if self._call is not None and self._call.mode.parameters:
            return meta_module(*args, **kwargs)
        if self._call is None:
            if self._recomputed_call is None:
                _require_values(module)
            return inner(*args, **kwargs)
        if not any(is_compiled(m) for m in module.modules()):
            return inner(*args, **kwargs)
        # Compiled code cannot run inside the mode, which is not needed if all values are here.
        args, kwargs = tree_map(self._call.mode.if_known, (args, kwargs))
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(is_meta(tensor) for tensor in (*tensors, *module.parameters())):
            return inner(*args, **kwargs)
        with without_function_mode(self._call.mode), compiled_code():
            return inner(*args, **kwargs)

    def _advance(self, call: _StageCall, i: int) -> None:
        if i != call.next:
            expected = self.cut.blocks[call.next] if call.next < len(self._blocks) else "none"
            raise StateError(
                f"block {self.cut.blocks[i]!r} was called, but the next one must be {expected!r}. In a pipeline every "
                "block must be called once per micro-batch, in the order of the stack."
            )
        call.next += 1

    def _make_transfer(self, call: _StageCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StageTransfer:
        args, kwargs = self._substitute(call.stop, call, args, kwargs)
        leaves = tree_flatten((args, kwargs))[0]
        name = self.cut.blocks[call.stop]
        self._refuse_placeholders((args, kwargs), f"block {name!r}", call.mode)
        tensors = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        first = _first_tensors((args, kwargs))
        if not first:
            raise PlanError(f"block {name!r} gets no tensor, so no activation can be sent to it. Pass it a tensor.")
        if torch.is_grad_enabled():
            chosen = {i for i, t in tensors.items() if t.requires_grad} | first
            self._sent[call.stage] = frozenset(chosen)
        else:
            # Only training shows whether a later argument depends on this stage's parameters. All evaluations send
            # what the first one sent: the next stage expects it.
            known = self._sent.get(call.stage, frozenset(tensors))
            chosen = self._sent_evaluating.setdefault(call.stage, known)
        return StageTransfer({i: t for i, t in tensors.items() if i in chosen}, len(leaves))

    def _substitute(
        self, i: int, call: _StageCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace placeholders among a block's arguments with what was received."""
        received = call.received
        if received is None:
            return args, kwargs
        leaves, structure = tree_flatten((args, kwargs))
        if i == call.first:
            self._place(i, leaves, received)
        else:
            leaves = [received.known[id(leaf)][1] if id(leaf) in received.known else leaf for leaf in leaves]
        return tree_unflatten(leaves, structure)

    def _place(self, i: int, leaves: list[Any], received: StageTransfer) -> None:
        if len(leaves) != received.leaves:
            raise PlanError(
                f"block {self.cut.blocks[i]!r} was called with {len(leaves)} values on this rank and with "
                f"{received.leaves} on that of the previous stage. Its arguments must not depend on the rank."
            )
        pairs: list[tuple[Tensor, Tensor]] = []
        for place, tensor in received.tensors.items():
            if place == SIDE:
                continue
            real = alias(tensor)
            received.known[id(leaves[place])] = (leaves[place], real)
            pairs.append((leaves[place], real))
            leaves[place] = real
        self.on_received(pairs)

    def _refuse_placeholders(self, value: Any, where: str, mode: PlaceholderMode) -> None:
        if any(isinstance(leaf, Tensor) and is_meta(leaf) for leaf in tree_iter(value)):
            raise self._not_here(where, mode)

    def _why_unknown(self, mode: PlaceholderMode, name: str) -> PlanError | None:
        """Return why a value is not here that code after the first blocks of the stage needs."""
        if mode.parameters or (mode.missing is None and name not in READS):
            return None
        return self._not_here(f"the value that {name}() needs", mode)

    def _not_here(self, where: str, mode: PlaceholderMode) -> PlanError:
        absent = self._names.get(id(mode.missing))
        if absent is not None:
            stages = ", ".join(map(str, self.cut.stages_of[absent]))
            return PlanError(
                f"{where} depends on the parameter {absent!r}, which is on another rank (stage {stages}). Register its "
                "module before the blocks if it is used before them, and after them if it is used after them, or set "
                "parallel.pipeline.partition='flops', which looks where the step uses it. Give what is used between "
                "blocks to the blocks."
            )
        return PlanError(
            f"{where} depends on a tensor that is computed on an earlier stage and not passed from block to block. "
            "Pass it through the blocks (for example in a tuple as their first argument), or compute it from buffers."
        )


def _require_values(module: nn.Module) -> None:
    """Refuse calls outside of a step, where no rank computes the missing values.

    Raises:
        StateError: Some of the module's parameters are on another rank.
    """
    if any(p.is_meta for p in module.parameters()):
        raise StateError(
            f"a {type(module).__name__} of another pipeline rank was called outside of training_step, "
            "validation_step, test_step and predict_step. Call the model only in these steps."
        )


def _first_tensors(arguments: tuple[tuple[Any, ...], Mapping[str, Any]]) -> set[int]:
    """Return the positions of the tensors of the first argument that has any."""
    place = 0
    for argument in (*arguments[0], *arguments[1].values()):
        leaves = tree_flatten(argument)[0]
        found = {place + i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
        if found:
            return found
        place += len(leaves)
    return set()


def _outside(model: nn.Module, blocks: Sequence[str]) -> list[nn.Module]:
    """Return the outermost modules with parameters that are not in a block and contain none."""
    above = names_above(blocks)
    found: dict[int, nn.Module] = {}
    for name in above:
        for child, module in model.get_submodule(name).named_children():
            path = f"{name}.{child}" if name else child
            if path not in above and path not in blocks and any(True for _ in module.parameters()):
                found[id(module)] = module
    return list(found.values())
