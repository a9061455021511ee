"""The experts of a layer: parameters stacked along a first dimension, under the names that one expert gives them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ls_strategy._compat import is_hooked
from ls_strategy.errors import PlanError
from ls_strategy.moe.feed_forward import FeedForward, GatedFeedForward
from ls_strategy.moe.grouped import grouped_linear
from ls_strategy.moe.grouped_feed_forward import Layer, grouped_feed_forward

Expert = nn.Module | Callable[[], nn.Module]

_ELEMENTWISE = (
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid,
)  # fmt: skip
"""What a Sequential may have between its linear layers for all experts to run at once."""

_RECOMPUTED = (nn.GELU, nn.SiLU, nn.ReLU)
"""Between the layers of a feed-forward network, computed once more in backward (on a CPU): cheap, and never cast."""


class Drawing:
    """Where the first values of stacked parameters come from: E copies of a module, or E results of a function."""

    def __init__(self, expert: Expert, num_experts: int) -> None:
        """Build the first expert.

        Raises:
            PlanError: it has buffers, no parameters, or is no module.
        """
        self.num_experts = num_experts
        self.function = None if isinstance(expert, nn.Module) else expert
        first = expert if isinstance(expert, nn.Module) else expert()
        if not isinstance(first, nn.Module):
            raise PlanError(
                f"expert must be a module, or a function without arguments that returns one: got {type(first).__name__}"
            )
        self._check(first)
        self.first: nn.Module | None = first
        self.skeleton = copy.deepcopy(first).to("meta")
        """An expert without values."""
        self._drawn: set[str] = set()
        self._state: list[Tensor] = []

    @staticmethod
    def _check(expert: nn.Module) -> None:
        buffers = [name for name, _ in expert.named_buffers()]
        if buffers:
            raise PlanError(
                f"expert {type(expert).__name__} has buffers ({', '.join(buffers)}), which would be neither stacked "
                "nor exchanged: experts must be functions of their parameters and of the tokens. Use LayerNorm or "
                "RMSNorm in place of BatchNorm, and compute constants in forward."
            )
        if next(expert.parameters(), None) is None:
            raise PlanError(f"expert {type(expert).__name__} has no parameters: its copies would be all the same.")

    def fill_all(self, nodes: dict[str, StackedParameters]) -> None:
        """Give every stacked parameter the values of the experts, each drawn once."""
        for index in range(self.num_experts):
            expert = self.first if index == 0 or self.function is None else self.function()
            assert expert is not None
            for path, node in nodes.items():
                node.set_expert(index, expert.get_submodule(path))
        self.first = None

    def fill(self, path: str, node: StackedParameters) -> None:
        """Give the parameters of one module new values: those they would get if all were filled together."""
        device = next(p.device for p in node.parameters(recurse=False))
        if self.function is None:
            self._fill_from_reset(path, node, device)
            return
        devices = [device] if device.type == "cuda" else []
        if not self._state or path in self._drawn:  # the first module of a new drawing
            self._state = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]
            self._drawn = set()
            self._fill_from_function(path, node, device)
        else:  # draws the same experts again, for its own part of them
            with torch.random.fork_rng(devices):
                torch.set_rng_state(self._state[0])
                for d, state in zip(devices, self._state[1:], strict=True):
                    torch.cuda.set_rng_state(state, d)
                self._fill_from_function(path, node, device)
        self._drawn.add(path)

    def _fill_from_function(self, path: str, node: StackedParameters, device: torch.device) -> None:
        assert self.function is not None
        for index in range(self.num_experts):
            with torch.device(device):
                expert = self.function()
            node.set_expert(index, expert.get_submodule(path))

    def _fill_from_reset(self, path: str, node: StackedParameters, device: torch.device) -> None:
        module = copy.deepcopy(self.skeleton.get_submodule(path)).to_empty(device=device, recurse=False)
        if not callable(getattr(module, "reset_parameters", None)):
            raise PlanError(
                f"module {path!r} ({type(module).__name__}) of an expert has no reset_parameters() to fill its "
                "parameters. Add that method, or give MoE a function that returns an expert."
            )
        with torch.no_grad():
            module.reset_parameters()  # type: ignore[operator]
        for index in range(self.num_experts):
            node.set_expert(index, module)


class StackedParameters(nn.Module):
    """Stands for one module of every expert; its parameters are ``(E, *shape)``, or those of this rank's experts."""

    def __init__(self, path: str, drawing: Drawing, made: dict[int, nn.Parameter]) -> None:
        """Memory for the parameters, without values.

        Args:
            path: of the module in the expert.
            drawing: knows the expert.
            made: what was made, by id of the expert's parameter; shared ones stay shared.
        """
        super().__init__()
        self.path = path
        self.drawing = drawing
        self.first_expert = 0
        """Of this rank, if its parameters are not those of all."""
        source = drawing.first
        assert source is not None
        for name, parameter in source.get_submodule(path).named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in made:
                shape = (drawing.num_experts, *parameter.shape)
                stacked = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                made[id(parameter)] = nn.Parameter(stacked, requires_grad=parameter.requires_grad)
            self.register_parameter(name, made[id(parameter)])

    @torch.no_grad()
    def set_expert(self, index: int, module: nn.Module) -> None:
        """Copy one expert's values of this module, if the expert is here."""
        for name, stacked in self.named_parameters(recurse=False, remove_duplicate=False):
            at = index if len(stacked) == self.drawing.num_experts else index - self.first_expert
            if 0 <= at < len(stacked):
                stacked[at].copy_(module.get_parameter(name))

    def reset_parameters(self) -> None:
        """Draw values anew, as the constructor does: every expert by itself, or all alike if they are copies."""
        self.drawing.fill(self.path, self)

    def extra_repr(self) -> str:
        """Shapes."""
        return ", ".join(f"{name}={tuple(p.shape)}" for name, p in self.named_parameters(recurse=False))


class Experts(StackedParameters):
    """All experts of a layer, or those of this rank; a tree of the modules of one expert that have parameters.

    ``experts.up.weight`` is ``(E, f, h)`` where the expert's ``up.weight`` is ``(f, h)``.
    """

    def __init__(self, expert: Expert, num_experts: int) -> None:
        """Stack ``num_experts`` copies of a module, or as many results of a function without arguments.

        Raises:
            PlanError: the expert cannot be stacked.
        """
        drawing = Drawing(expert, num_experts)
        assert drawing.first is not None
        made: dict[int, nn.Parameter] = {}
        super().__init__("", drawing, made)
        nodes: dict[str, StackedParameters] = {"": self}
        for path, module in drawing.first.named_modules():
            if path and next(module.parameters(), None) is not None:
                parent, _, name = path.rpartition(".")
                nodes[path] = StackedParameters(path, drawing, made)
                nodes[parent].add_module(name, nodes[path])
        if not next(self.parameters()).is_meta:
            drawing.fill_all(nodes)
        drawing.first = None
        self.runs_grouped = _is_grouped(drawing.skeleton)
        """Whether the linear layers of all experts run as one."""

    @property
    def skeleton(self) -> nn.Module:
        """One expert without values."""
        return self.drawing.skeleton

    def train(self, mode: bool = True) -> Experts:
        """Set the mode; dropout in experts follows it."""
        self.skeleton.train(mode)
        return super().train(mode)  # type: ignore[return-value]

    def input_dtype(self, x: Tensor) -> torch.dtype:
        """In which dtype rows may as well arrive: what the first layer casts them to."""
        device = x.device.type
        if self.runs_grouped and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            return torch.get_autocast_dtype(device)
        return x.dtype

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Each expert on its own rows.

        Args:
            rows: ``(T, hidden)``, ordered by expert.
            counts: rows of each expert that is here.

        Returns:
            ``(T, hidden)``. Experts without rows are not called; their gradients are 0.
        """
        if self.runs_grouped:
            return _run_grouped(self.skeleton, self, rows, counts)
        names = [name for name, _ in self.skeleton.named_parameters()]
        slices = [self.get_parameter(name).unbind(0) for name in names]
        results: list[Tensor] = []
        for index, mine in enumerate(rows.split(list(counts))):
            if len(mine):
                own = {name: each[index] for name, each in zip(names, slices, strict=True)}
                # As it came: ranks must agree on the dtype of what they exchange, also those without rows.
                results.append(functional_call(self.skeleton, own, (mine,)).to(rows.dtype))
        if results:
            return torch.cat(results)
        return rows + sum(each[0].sum() * 0 for each in slices).to(rows.dtype)  # type: ignore[union-attr]


def _is_grouped(expert: nn.Module) -> bool:
    """Whether the expert is a chain of linear layers and functions of single elements."""
    if _computes_as(expert, nn.Linear):
        return True
    if _computes_as(expert, nn.Sequential):
        return all(type(m) in _ELEMENTWISE or _is_grouped(m) for m in expert.children())
    if _computes_as(expert, FeedForward) or _computes_as(expert, GatedFeedForward):
        layers = [m for name, m in expert.named_children() if name != "activation"]
        activation = next(expert.get_submodule("activation").parameters(), None)
        return activation is None and all(_is_grouped(m) for m in layers)
    return False


def _computes_as(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call does what the class ``kind`` says and no more; subclasses may choose other first values."""
    return isinstance(module, kind) and type(module).forward is kind.forward and not is_hooked(module)


def _run_grouped(expert: nn.Module, stacked: nn.Module, x: Tensor, counts: Sequence[int]) -> Tensor:
    """The expert's forward, with the linear layers of all experts in place of its own."""
    if isinstance(expert, nn.Linear):
        return grouped_linear(x, *_layer(stacked), counts)
    if x.device.type == "cpu" and _is_plain_feed_forward(expert):
        return _run_in_parts(expert, stacked, x, counts)

    def layer(name: str, rows: Tensor) -> Tensor:
        return _run_grouped(expert.get_submodule(name), stacked.get_submodule(name), rows, counts)

    if isinstance(expert, FeedForward):
        return layer("down", expert.activation(layer("up", x)))
    if isinstance(expert, GatedFeedForward):
        return layer("down", expert.activation(layer("gate", x)) * layer("up", x))
    for name, child in expert.named_children():
        x = child(x) if type(child) in _ELEMENTWISE else layer(name, x)
    return x


def _layer(stacked: nn.Module) -> Layer:
    return Layer(stacked.get_parameter("weight"), getattr(stacked, "bias", None))


def _is_plain_feed_forward(expert: nn.Module) -> TypeGuard[FeedForward | GatedFeedForward]:
    """Whether it is two or three linear layers with a function between them that may be computed twice."""
    if not isinstance(expert, FeedForward | GatedFeedForward):
        return False
    *layers, activation = sorted(expert.children(), key=lambda child: child is expert.activation)
    plain = type(activation) in _RECOMPUTED and not is_hooked(activation) and not getattr(activation, "inplace", False)
    return plain and all(isinstance(m, nn.Linear) for m in layers)


def _run_in_parts(
    expert: FeedForward | GatedFeedForward, stacked: nn.Module, x: Tensor, counts: Sequence[int]
) -> Tensor:
    """The same for networks of which every expert, or a few, can be run from end to end."""

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return expert.activation(gate) * up

    names = ("gate", "up") if isinstance(expert, GatedFeedForward) else ("up",)
    between = gated if len(names) > 1 else expert.activation
    first = [_layer(stacked.get_submodule(name)) for name in names]
    return grouped_feed_forward(x, first, between, _layer(stacked.get_submodule("down")), counts)
