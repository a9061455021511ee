"""The experts of a layer: parameters stacked along a first dimension, under the names of one expert's parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ls_strategy import device as dev
from ls_strategy._torch import is_hooked
from ls_strategy.errors import PlanError
from ls_strategy.moe.feed_forward import FeedForward, GatedFeedForward
from ls_strategy.moe.grouped import autocast_dtype, grouped_linear
from ls_strategy.moe.grouped_feed_forward import StackedLinear, grouped_feed_forward

Expert = nn.Module | Callable[[], nn.Module]

_ELEMENTWISE = (
    nn.Identity, nn.Dropout, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid,
)  # fmt: skip
"""Modules allowed between the linear layers of a Sequential if all experts shall run at once."""

_RECOMPUTED = (nn.GELU, nn.SiLU, nn.ReLU)
"""Activations that a CPU computes again in backward: inexpensive, and autocast does not affect them."""


class ExpertSource:
    """Source of the initial values of stacked parameters: E copies of a module, or E results of a function."""

    def __init__(self, expert: Expert, num_experts: int) -> None:
        """Build the first expert.

        Raises:
            PlanError: The expert is not a module, has buffers, or has no parameters.
        """
        self.num_experts = num_experts
        self.function = None if isinstance(expert, nn.Module) else expert
        first = expert if isinstance(expert, nn.Module) else expert()
        if not isinstance(first, nn.Module):
            raise PlanError(
                f"Got an expert of type {type(first).__name__}, but expert must be a module, or a function without "
                "arguments that returns one."
            )
        self._check(first)
        self.first: nn.Module | None = first
        self.skeleton = copy.deepcopy(first).to("meta")
        """One expert on meta."""
        self._filled: set[str] = set()
        self._state: list[Tensor] = []

    @staticmethod
    def _check(expert: nn.Module) -> None:
        buffers = [name for name, _ in expert.named_buffers()]
        if buffers:
            raise PlanError(
                f"expert {type(expert).__name__} has buffers ({', '.join(buffers)}), which are neither stacked nor "
                "exchanged: experts must be functions of their parameters and of the tokens. Use LayerNorm or RMSNorm "
                "instead of BatchNorm, and compute constants in forward."
            )
        if next(expert.parameters(), None) is None:
            raise PlanError(
                f"expert {type(expert).__name__} has no parameters, so all experts would compute the same. Give it "
                "parameters."
            )

    def fill_all(self, nodes: dict[str, StackedParameters]) -> None:
        """Copy the values of the experts into every stacked parameter. Each expert is built once."""
        for index in range(self.num_experts):
            expert = self.first if index == 0 or self.function is None else self.function()
            assert expert is not None
            for path, node in nodes.items():
                node.set_expert(index, expert.get_submodule(path))
        self.first = None

    def fill(self, path: str, node: StackedParameters) -> None:
        """Give the parameters of one module new values, the same as if all modules were filled together."""
        device = next(p.device for p in node.parameters(recurse=False))
        if self.function is None:
            self._fill_from_reset(path, node, device)
            return
        devices = [device] if dev.is_accelerator(device) else []
        if not self._state or path in self._filled:  # the first module of a new fill
            self._state = [torch.get_rng_state(), *map(dev.random_state, devices)]
            self._filled = set()
            self._fill_from_function(path, node, device)
        else:  # build the same experts again, for another of their modules
            with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
                torch.set_rng_state(self._state[0])
                for d, state in zip(devices, self._state[1:], strict=True):
                    dev.set_random_state(state, d)
                self._fill_from_function(path, node, device)
        self._filled.add(path)

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
                f"module {path!r} ({type(module).__name__}) of an expert has no reset_parameters() to initialize its "
                "parameters. Add that method, or give MoE a function that returns an expert."
            )
        with torch.no_grad():
            module.reset_parameters()  # type: ignore[operator]
        for index in range(self.num_experts):
            node.set_expert(index, module)


class StackedParameters(nn.Module):
    """The stacked parameters of one module of the expert: ``(E, *shape)``, or those of this rank's experts."""

    def __init__(self, path: str, source: ExpertSource, created: dict[int, nn.Parameter]) -> None:
        """Allocate the parameters, without values.

        Args:
            path: Name of the module in the expert.
            source: Source of the values.
            created: Stacked parameters so far, by id of the expert's parameter. Shared parameters stay shared.
        """
        super().__init__()
        self.path = path
        self.source = source
        self.first_expert = 0
        """Index of this rank's first expert, if the experts are sharded."""
        assert source.first is not None
        for name, parameter in source.first.get_submodule(path).named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in created:
                shape = (source.num_experts, *parameter.shape)
                stacked = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                created[id(parameter)] = nn.Parameter(stacked, requires_grad=parameter.requires_grad)
            self.register_parameter(name, created[id(parameter)])

    @torch.no_grad()
    def set_expert(self, index: int, module: nn.Module) -> None:
        """Copy one expert's values of this module, if the expert is on this rank."""
        for name, stacked in self.named_parameters(recurse=False, remove_duplicate=False):
            at = index if len(stacked) == self.source.num_experts else index - self.first_expert
            if 0 <= at < len(stacked):
                stacked[at].copy_(module.get_parameter(name))

    def reset_parameters(self) -> None:
        """Initialize again as the constructor does: each expert separately, or all equal if they are copies."""
        self.source.fill(self.path, self)

    def extra_repr(self) -> str:
        """Return the shapes."""
        return ", ".join(f"{name}={tuple(p.shape)}" for name, p in self.named_parameters(recurse=False))


class Experts(StackedParameters):
    """All experts of a layer, or those of this rank: a tree of the expert's modules that have parameters.

    ``experts.up.weight`` is ``(E, f, h)`` where the expert's ``up.weight`` is ``(f, h)``.
    """

    def __init__(self, expert: Expert, num_experts: int) -> None:
        """Stack ``num_experts`` copies of a module, or as many results of a function without arguments.

        Raises:
            PlanError: The expert cannot be stacked.
        """
        source = ExpertSource(expert, num_experts)
        assert source.first is not None
        created: dict[int, nn.Parameter] = {}
        super().__init__("", source, created)
        nodes: dict[str, StackedParameters] = {"": self}
        for path, module in source.first.named_modules():
            if path and next(module.parameters(), None) is not None:
                parent, _, name = path.rpartition(".")
                nodes[path] = StackedParameters(path, source, created)
                nodes[parent].add_module(name, nodes[path])
        source.fill_all(nodes)  # on meta too, where a strategy may record it
        self.runs_grouped = _is_grouped(source.skeleton)
        """Whether the linear layers of all experts run as grouped products."""

    @property
    def skeleton(self) -> nn.Module:
        """One expert on meta."""
        return self.source.skeleton

    def train(self, mode: bool = True) -> Experts:
        """Set the mode. Dropout in the experts follows it."""
        self.skeleton.train(mode)
        return super().train(mode)  # type: ignore[return-value]

    def input_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype in which rows may be sent: the one to which the first layer casts them."""
        return autocast_dtype(x) if self.runs_grouped else x.dtype

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Run each expert on its rows.

        Args:
            rows: ``(T, hidden)``, ordered by expert.
            counts: Number of rows of each local expert.

        Returns:
            ``(T, hidden)``. Experts without rows are not called; their gradients are 0.
        """
        if self.runs_grouped:
            return _run_grouped(self.skeleton, self, rows, counts)
        names = [name for name, _ in self.skeleton.named_parameters()]
        slices = [self.get_parameter(name).unbind(0) for name in names]
        results: list[Tensor] = []
        for index, own_rows in enumerate(rows.split(list(counts))):
            if len(own_rows):
                own = {name: each[index] for name, each in zip(names, slices, strict=True)}
                # Keep the dtype: all ranks must send the same one, also those without rows.
                results.append(functional_call(self.skeleton, own, (own_rows,)).to(rows.dtype))
        if results:
            return torch.cat(results)
        return rows + sum(each[0].sum() * 0 for each in slices).to(rows.dtype)  # type: ignore[union-attr]


def _is_grouped(expert: nn.Module) -> bool:
    """Return whether the expert consists of linear layers and elementwise functions."""
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
    """Return whether a call computes exactly what the class ``kind`` does. Subclasses may change the initialization."""
    return isinstance(module, kind) and type(module).forward is kind.forward and not is_hooked(module)


def _run_grouped(expert: nn.Module, stacked: nn.Module, x: Tensor, counts: Sequence[int]) -> Tensor:
    """Run the expert's forward with grouped products in place of its linear layers."""
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


def _layer(stacked: nn.Module) -> StackedLinear:
    return StackedLinear(stacked.get_parameter("weight"), getattr(stacked, "bias", None))


def _is_plain_feed_forward(expert: nn.Module) -> TypeGuard[FeedForward | GatedFeedForward]:
    """Return whether the expert has two or three linear layers and an activation that may be computed twice."""
    if not isinstance(expert, FeedForward | GatedFeedForward):
        return False
    *layers, activation = sorted(expert.children(), key=lambda child: child is expert.activation)
    plain = type(activation) in _RECOMPUTED and not is_hooked(activation) and not getattr(activation, "inplace", False)
    return plain and all(isinstance(m, nn.Linear) for m in layers)


def _run_in_parts(
    expert: FeedForward | GatedFeedForward, stacked: nn.Module, x: Tensor, counts: Sequence[int]
) -> Tensor:
    """Run a network whose activation is computed again in backward, a few experts at a time."""

    def gated(gate: Tensor, up: Tensor) -> Tensor:
        return expert.activation(gate) * up

    names = ("gate", "up") if isinstance(expert, GatedFeedForward) else ("up",)
    between = gated if len(names) > 1 else expert.activation
    first = [_layer(stacked.get_submodule(name)) for name in names]
    return grouped_feed_forward(x, first, between, _layer(stacked.get_submodule("down")), counts)
