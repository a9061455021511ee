"""Megatron-style sequence parallelism: between the tensor-parallel layers of a block, every rank has its own tokens.

::

    (B, T, D) ─slice─► block: x ──────────────────────────────────── + ─► ... last block ─join─► (B, T, D)
              T/size          └─ norm ─►│gather│ q k v ─ attention ─ o │reduce-scatter│─┘
                                  T/size     T       sharded by heads              T/size

Gather and reduce-scatter together send as many bytes as the all-reduce that they replace. Norms, dropouts and their
saved activations shrink by the number of ranks.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import PlanError
from ls_strategy.parallel.hooks import Hooks, Owned, change_first, change_output
from ls_strategy.parallel.random import Streams
from ls_strategy.parallel.regions import copy_to, gather_from, gather_sequence, scatter_to
from ls_strategy.parallel.styles import Column, Features, Replicate, Row, Vocab
from ls_strategy.parallel.tensor.resolved_plan import Resolved, StyledLayer

NAMES = ("hidden_states", "input", "x", "src", "tgt")
"""Names of the input of blocks and their submodules, if it is not positional."""


class TokenBlocks:
    """The blocks of a model whose activations are sharded along the tokens, and the modules in them that gather."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], resolved: Resolved, elsewhere: Collection[int] = ()
    ) -> None:
        """Check that the plan permits it.

        Args:
            model: the complete model.
            blocks: in the order of their calls. Those of one ``nn.ModuleList`` are a stack with its own entry and exit.
            resolved: the plan, checked against the model.
            elsewhere: ``id`` of parameters that another kind of parallelism shards.

        Raises:
            PlanError: There are no blocks, or the plan does not permit it.
        """
        if not blocks:
            raise PlanError(
                "sequence=True needs the blocks between which activations are sharded along the tokens, but none were "
                "given. Name the repeated blocks of the model."
            )
        self.blocks = list(blocks)
        self.names = resolved.names
        self._inside = {id(m) for block in blocks for m in block.modules()}
        self.layers = [layer for layer in resolved.layers if id(layer.module) in self._inside]
        for layer in self.layers:
            _check(layer)
        self.parents = self._find_parents(model)
        self.partial = self._find_partial(model, resolved, elsewhere)

    def holds(self, module: nn.Module) -> bool:
        """Return whether the module is in one of the blocks."""
        return id(module) in self._inside

    def stacks(self, model: nn.Module) -> list[list[nn.Module]]:
        """Group the blocks by the module that holds them."""
        holder = {id(child): id(m) for m in model.modules() for child in m.children()}
        stacks: dict[int, list[nn.Module]] = {}
        for block in self.blocks:
            stacks.setdefault(holder.get(id(block), 0), []).append(block)
        return list(stacks.values())

    def _find_parents(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that own column-parallel layers: their input is gathered."""
        columns = {id(layer.module): layer for layer in self.layers if isinstance(layer.style, Column)}
        blocks = {id(b) for b in self.blocks}
        parents: dict[int, nn.Module] = {}
        for parent, child in owners(model):
            if id(child) not in columns:
                continue
            if id(parent) in blocks or id(parent) not in self._inside:
                raise PlanError(
                    f"sequence=True gathers the tokens at the input of the module that owns a column-parallel layer, "
                    f"but {columns[id(child)].name!r} belongs to block {self.names[id(parent)]!r} itself. Move "
                    "attention and MLP into submodules, or set sequence=False."
                )
            parents[id(parent)] = parent
        return list(parents.values())

    def _find_partial(
        self, model: nn.Module, resolved: Resolved, elsewhere: Collection[int]
    ) -> list[tuple[Owned, nn.Module]]:
        """Return the replicated parameters in the blocks, each with its block: every rank uses them on its tokens."""
        block_of = {id(m): block for block in self.blocks for m in block.modules()}
        kept = {id(layer.module) for layer in self.layers if isinstance(layer.style, Replicate)}
        done = {id(owned.parameter) for owned, _ in resolved.shards()}
        done |= {id(owned.parameter) for owned, style, _ in resolved.parameters if isinstance(style, Replicate)}
        done |= set(elsewhere)
        found: dict[int, Owned] = {}
        for module in model.modules():
            for key, parameter in module.named_parameters(recurse=False):
                if self.holds(module) and id(module) not in kept and id(parameter) not in done:
                    found.setdefault(id(parameter), Owned(f"{self.names[id(module)]}.{key}", module, key))
        outside = {
            id(parameter): f"{name}.{key}".lstrip(".")
            for name, module in model.named_modules(memo=set(self.blocks))  # does not enter the blocks
            for key, parameter in module.named_parameters(recurse=False)
        }
        for ident, owned in found.items():
            if ident in outside:
                raise PlanError(
                    f"sequence=True: {owned.name} in a block and {outside[ident]} outside the blocks are one "
                    "parameter, whose gradient would mix some tokens with all of them. Set sequence=False."
                )
        return [(owned, block_of[id(owned.module)]) for owned in found.values()]

    def attach(self, model: nn.Module, axis: Axis, hooks: Hooks, streams: Streams, draws: Callable[[], bool]) -> None:
        """Slice the tokens on entry of a stack, gather them inside the blocks and on exit.

        ``draws()`` says whether the model draws random numbers now.
        """
        for block in self.blocks:
            fork_streams(block, hooks, streams, draws)
        for parent in self.parents:
            _attach_parent(parent, axis, hooks, streams)
        for stack in self.stacks(model):
            hooks.before(stack[0], lambda _m, args, kwargs: change_first(args, kwargs, _slicer(axis), NAMES))
            hooks.after(stack[-1], lambda _m, _args, out: change_output(out, lambda x: gather_from(x, axis, 1)))


def owners(model: nn.Module) -> Iterable[tuple[nn.Module, nn.Module]]:
    """Yield ``(module, child that it calls)``. The children of lists and dicts of modules count as their owner's."""

    def below(owner: nn.Module, module: nn.Module) -> Iterable[tuple[nn.Module, nn.Module]]:
        for child in module.children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict):
                yield from below(owner, child)
            else:
                yield owner, child

    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield from below(module, module)


def _slicer(axis: Axis) -> Callable[[Tensor], Tensor]:
    def slice_tokens(x: Tensor) -> Tensor:
        if x.dim() < 3 or x.shape[1] % axis.size:
            raise PlanError(
                f"sequence=True shards the tokens of hidden states (B, T, D) over {axis.size} ranks, but the first "
                f"block got {tuple(x.shape)}. Pad T to a multiple of {axis.size}, or set sequence=False."
            )
        return scatter_to(x, axis, 1)

    return slice_tokens


def fork_streams(module: nn.Module, hooks: Hooks, streams: Streams, draws: Callable[[], bool]) -> None:
    """Make every rank draw different random numbers in the module's forward, where ``draws()`` is true."""
    opened: list[Any] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        opened.clear()
        x = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        if x is not None and module.training and draws() and streams.open(x.device):
            opened.append(x.device)

    def leave(_module: nn.Module, _args: Any, _output: Any) -> None:
        while opened:
            streams.close(opened.pop())

    hooks.before(module, enter)
    hooks.after(module, leave, always=True)


def _attach_parent(parent: nn.Module, axis: Axis, hooks: Hooks, streams: Streams) -> None:
    def enter(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Gather the input. Other hidden states (an encoder's) are replicated, but their gradients are partial."""
        gathered: list[Tensor] = []

        def gather(x: Tensor) -> Tensor:
            streams.common(x.device)
            gathered.append(gather_sequence(x, axis))
            return gathered[0]

        args, kwargs = change_first(args, kwargs, gather, NAMES)

        def other(value: Any) -> Any:
            is_other = (
                isinstance(value, Tensor) and value.dim() == 3 and value.requires_grad and value is not gathered[0]
            )
            return copy_to(value, axis) if is_other else value

        return tuple(other(v) for v in args), {name: other(v) for name, v in kwargs.items()}

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple | list) else output
        if isinstance(first, Tensor):
            streams.own(first.device)

    hooks.before(parent, enter)
    hooks.after(parent, leave)


def _check(layer: StyledLayer) -> None:
    style = layer.style
    if (isinstance(style, Column | Features) and style.gather) or (isinstance(style, Row) and style.split):
        raise PlanError(
            f"sequence=True: layer {layer.name!r} is {style}, which needs the full features next to it. Shard it by "
            "`sections`, or set sequence=False."
        )
    if isinstance(style, Vocab):
        raise PlanError(
            f"sequence=True: layer {layer.name!r} in a block is {style}, but a vocabulary can only be sharded outside "
            "the blocks. Replicate the layer, or set sequence=False."
        )
