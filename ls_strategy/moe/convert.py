"""Converts the sparse blocks of transformers models to this package's dispatch and grouped products.

::

    model = AutoModelForCausalLM.from_pretrained("mistralai/Mixtral-8x7B-v0.1")
    convert_moe(model)

A block and its experts change their classes in place, to subclasses of the original ones. Parameters, buffers,
submodules and all names stay, so checkpoint files do not change, and code that looks for the original classes finds
them. The block's own router is still called, so the model's balance loss and router logits keep working.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from ls_strategy.checked import at_least, checked
from ls_strategy.errors import PlanError, StateError
from ls_strategy.moe.capacity import kept_pairs
from ls_strategy.moe.families import FAMILIES, Family
from ls_strategy.moe.grouped import autocast_dtype, grouped_linear
from ls_strategy.moe.router import Routing, RoutingAccounts, RoutingOptions
from ls_strategy.moe.sparse import SparseLayer

_STACKS = (("gate_up_proj", "gate_up_proj_bias"), ("up_proj", "up_proj_bias"), ("down_proj", "down_proj_bias"))
"""Names of stacked weights and of their biases."""


@checked(
    capacity_factor=at_least(0, 1_000_000),
    eval_capacity_factor=at_least(0, 1_000_000),
    min_capacity=at_least(0),
    balance_loss=at_least(0),
    z_loss=at_least(0),
)
def convert_moe(
    model: nn.Module,
    *,
    drop_tokens: bool = False,
    capacity_factor: float = 1.0,
    eval_capacity_factor: float = 1.0,
    min_capacity: int = 4,
    balance_loss: float = 0.0,
    z_loss: float = 0.0,
) -> dict[str, str]:
    """Convert every sparse block of a transformers model to compute as `MoE` does, so that its experts can be sharded.

    Without dropping, outputs and gradients are the same as before up to rounding. Call it before the Trainer gets the
    model, or in ``configure_model``; the model may be on meta. Call it on all ranks with the same arguments.

    Args:
        model: The model, or a module that contains it.
        drop_tokens: Give experts a capacity. A dropped pair contributes 0, and the token's other weights do not change.
            The pairs with the highest weights are kept.
        capacity_factor: Capacity in training, see `MoE`.
        eval_capacity_factor: The same in evaluation.
        min_capacity: Smallest capacity, in pairs.
        balance_loss: Weight of the balance loss for `moe_losses`. The loss is 1 if all E experts get the same number of
            pairs: ``E / k`` times the sum over experts of mean probability times pairs per token (Switch,
            arXiv:2101.03961, equation 4, here with all k choices). 0 disables it.
        z_loss: Weight of the loss that keeps logits small (ST-MoE, arXiv:2202.08906). 0 disables it.

    Returns:
        The original class name of each converted block, by the block's name.

    Raises:
        ConfigError: An option is invalid.
        PlanError: The model has no such block, a block is unknown or cannot be converted, or the model already adds its
            own balance loss. The model is unchanged then.
    """
    blocks = dict(_sparse_blocks(model))
    if not blocks:
        raise PlanError(
            "convert_moe: the model has no sparse block that is not converted yet. A sparse block has a submodule "
            f"'experts'; supported classes are {_known()}."
        )
    if balance_loss:
        _refuse_second_loss(model, balance_loss)
    options: list[RoutingOptions] = []
    for name, block in blocks.items():
        num_experts, k = _check_experts(name, block), _check_router(name, block)
        options.append(
            RoutingOptions(
                num_experts, k, capacity_factor, eval_capacity_factor, min_capacity, drop_tokens,
                score=FAMILIES[type(block).__name__].scores, balance_loss=balance_loss, z_loss=z_loss,
            )
        )  # fmt: skip
    classes = {name: type(block).__name__ for name, block in blocks.items()}
    for block, each in zip(blocks.values(), options, strict=True):
        _convert(block, each)
    return classes


def _known() -> str:
    return ", ".join(sorted(FAMILIES))


def _sparse_blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield every module with experts that is not a `SparseLayer` yet, outermost first."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "experts", None), nn.Module) and not isinstance(module, SparseLayer):
            yield name, module


def _refuse_second_loss(model: nn.Module, weight: float) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        own = getattr(config, "router_aux_loss_coef", 0)
        if getattr(config, "output_router_logits", False) and own:
            raise PlanError(
                f"convert_moe: got balance_loss={weight}, but the model's config has output_router_logits=True with "
                f"router_aux_loss_coef={own}, so the model already adds its own balance loss. Set "
                "config.output_router_logits=False, or balance_loss=0."
            )


def _check_experts(name: str, block: nn.Module) -> int:
    """Return the number of the block's experts.

    Raises:
        PlanError: The class of the block is unknown, or its experts differ from what the class should have.
    """
    kind = type(block).__name__
    what = f"convert_moe: {name or 'the model'!r} is a {kind}"
    if kind not in FAMILIES:
        raise PlanError(f"{what}, which is not supported. Supported classes are {_known()}.")
    experts = block.get_submodule("experts")
    if isinstance(experts, (nn.ModuleList, nn.ModuleDict)):
        raise PlanError(
            f"{what} with one module per expert, as before transformers 5. Stacking their parameters would change the "
            "names in checkpoints. Use transformers >= 5, which loads the same files into stacked parameters."
        )
    if "forward" in vars(block) or "forward" in vars(experts):
        raise PlanError(
            f"{what} with a replaced forward (by accelerate's device_map or by a kernel?), which the conversion would "
            "undo. Load the model without the replacement."
        )
    stacked = dict(experts.named_parameters())
    allowed = {each for pair in _STACKS for each in pair}
    weights = [p for key, p in stacked.items() if not key.endswith("_bias")]
    if not set(stacked) <= allowed or len(weights) != 2 or not all(p.is_floating_point() for p in weights):
        shapes = ", ".join(f"{key} {tuple(p.shape)} {p.dtype}" for key, p in stacked.items())
        raise PlanError(
            f"{what} with experts of {shapes or 'no parameters'}, but the conversion requires gate_up_proj or up_proj, "
            "and down_proj, in floating point, of shape (experts, ...). Load the model without quantization."
        )
    return len(weights[0])


def _check_router(name: str, block: nn.Module) -> int:
    """Return the number of experts per token.

    Raises:
        PlanError: The router does not return what `FAMILIES` expects.
    """
    family = FAMILIES[type(block).__name__]
    router = block.get_submodule(family.router)
    k = getattr(router, "top_k", None)
    if not isinstance(k, int) or not _routes(router, k, block, family):
        raise PlanError(
            f"convert_moe: the router of {name!r} ({type(router).__name__}) does not return (logits, weights, experts) "
            "with top_k columns in the last two. The routers of all supported blocks do from transformers 5.21 on, "
            "which requires Python 3.11. Upgrade transformers."
        )
    return k


def _routes(router: nn.Module, k: int, block: nn.Module, family: Family) -> bool:
    """Run a zero-filled copy of the router on two tokens and check what it returns."""
    probe = copy.deepcopy(router).to_empty(device="cpu").float().eval()
    more = [getattr(block, each, None) for each in family.router_reads]
    with torch.no_grad():
        for tensor in (*probe.parameters(), *probe.buffers()):
            tensor.zero_()
        hidden = next(p.shape[-1] for p in probe.parameters() if p.ndim == 2)
        tokens = torch.zeros((1, 2, hidden) if family.batched_router else (2, hidden))
        result = probe(tokens, *(None if t is None else torch.zeros(t.shape) for t in more))
    if not isinstance(result, tuple) or len(result) != 3:
        return False
    _, weights, experts = result
    return weights.shape == experts.shape == (2, k) and weights.is_floating_point() and experts.dtype == torch.int64


def _convert(block: nn.Module, options: RoutingOptions) -> None:
    experts = block.get_submodule("experts")
    experts.__class__ = _subclass(ConvertedExperts, type(experts))
    family = FAMILIES[type(block).__name__]
    block.__class__ = _subclass(ConvertedMoE, type(block))
    assert isinstance(block, ConvertedMoE)
    block.initialize(family, options)


@functools.cache
def _subclass(converted: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of both classes that computes as ``converted`` does."""
    return type(f"Converted{original.__name__}", (converted, original), {"original": original})


def _empty(converted: type[nn.Module], original: type[nn.Module]) -> nn.Module:
    """Return the start of a copy or an unpickled object: the generated classes cannot be imported by name."""
    cls = _subclass(converted, original)
    return cls.__new__(cls)


class ConvertedExperts(nn.Module):
    """Stacked experts of transformers, called with rows ordered by expert. ``original`` is their former class."""

    original: type[nn.Module]

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (ConvertedExperts, self.original), self.__getstate__()  # type: ignore[attr-defined]

    def input_dtype(self, x: Tensor) -> torch.dtype:
        """Return the dtype in which rows may be sent: the one to which the first layer casts them."""
        return autocast_dtype(x)

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Run each expert on its rows.

        Args:
            rows: ``(T, hidden)``, ordered by expert.
            counts: Number of rows of each local expert.

        Returns:
            ``(T, hidden)``.
        """
        if "gate_up_proj" in self._parameters:
            inner = self._gated(self._linear("gate_up_proj", rows, counts))
        else:
            inner = self.act_fn(self._linear("up_proj", rows, counts))  # type: ignore[operator]
        return self._linear("down_proj", inner, counts)

    def _gated(self, both: Tensor) -> Tensor:
        """Apply the gate: ``(T, 2 f)`` to ``(T, f)``."""
        if hasattr(self, "_apply_gate"):
            return self._apply_gate(both)  # type: ignore[operator, no-any-return]
        gate, up = both.chunk(2, -1)
        return self.act_fn(gate) * up  # type: ignore[operator, no-any-return]

    def _linear(self, name: str, rows: Tensor, counts: Sequence[int]) -> Tensor:
        weight = self.get_parameter(name)
        if getattr(self, "is_transposed", False):
            weight = weight.transpose(1, 2)
        return grouped_linear(rows, weight, self._parameters.get(f"{name}_bias"), counts)


class ConvertedMoE(RoutingAccounts, SparseLayer):
    """A sparse block of transformers. ``original`` is its former class, and ``family`` describes its computation."""

    original: type[nn.Module]
    family: Family

    def initialize(self, family: Family, options: RoutingOptions) -> None:
        """Initialize what this class adds. The original class has run its constructor."""
        RoutingAccounts.__init__(self, options)
        self.family = family
        self.num_experts = options.num_experts
        self.parallel = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (ConvertedMoE, self.original), self.__getstate__()

    def extra_repr(self) -> str:
        """Return the number of experts and the routing options."""
        o = self.options
        return f"num_experts={o.num_experts}, k={o.k}, drop_tokens={o.drop_tokens}"

    # A compiled block has a graph break here: the number of rows of each expert is known only at run time.
    @torch.compiler.disable
    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """Map ``(..., hidden)`` to the same shape. Some families also return the weights, ``(S, k)``.

        Collective over the ranks of ``parallel``, forward and backward.
        """
        x = self._jittered(hidden_states)
        tokens = x.reshape(-1, x.shape[-1])
        routing, weights = self._routed(tokens)
        before, after = (self._part(name) for name in self.family.around or (None, None))
        inner = tokens if before is None else before(tokens)
        out, shared = self.dispatch(inner, routing, lambda: self._shared_expert(tokens), inner.dtype)
        out = out if after is None else after(out)
        if self.family.factor is not None:
            out = out * getattr(self, self.family.factor)
        out = (out if shared is None else out + shared).view(x.shape)
        return (out, weights) if self.family.returns_weights else out

    def forward_shapes(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Replace `forward` where another pipeline rank computes it. Routing needs values; shapes do not."""
        out = torch.empty_like(hidden_states)
        if not self.family.returns_weights:
            return out
        tokens = hidden_states.numel() // hidden_states.shape[-1]
        return out, hidden_states.new_empty(tokens, self.options.k)

    @override
    def leave_value(self, loss: Tensor) -> None:
        """Refuse: not every family's output depends on the logits that its router returns.

        Raises:
            StateError: always, with the cure.
        """
        raise StateError(
            "Got a converted MoE layer with balance or z losses inside torch.utils.checkpoint(use_reentrant=True), "
            'whose forward has no gradients. Set gradient_checkpointing_enable({"use_reentrant": False}), use '
            'activations={"checkpointing": "full"} of the strategy, or set balance_loss=0 and z_loss=0.'
        )

    def _part(self, name: str | None) -> Callable[[Tensor], Tensor] | None:
        return None if name is None else getattr(self, name, None)

    def _jittered(self, x: Tensor) -> Tensor:
        width = 0 if self.family.jitter is None else getattr(self, self.family.jitter)
        if not self.training or not width:
            return x
        noise = torch.empty_like(x).uniform_(1 - width, 1 + width)
        if self.parallel is not None and self.parallel.replicas is not None:
            self.parallel.replicas.broadcast_(noise)
        return x * noise

    def _shared_expert(self, tokens: Tensor) -> Tensor | None:
        expert, gate = self._part(self.family.shared), self._part(self.family.shared_gate)
        if expert is None:
            return None
        out = expert(tokens)
        return out if gate is None else gate(tokens).sigmoid() * out

    def _routed(self, tokens: Tensor) -> tuple[Routing, Tensor]:
        """Return the router's choices after dropping, and its weights ``(S, k)`` before it."""
        router = self.get_submodule(self.family.router)
        more = [getattr(self, name, None) for name in self.family.router_reads]
        logits, weights, experts = router(tokens.unsqueeze(0) if self.family.batched_router else tokens, *more)
        kept = self._kept(experts, weights.detach()) if self.options.drop_tokens else None
        if self.training:
            self.account(*self._probabilities(logits), experts, kept)
        return Routing(experts, weights if kept is None else weights * kept, kept), weights

    def _probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and probabilities ``(S, E)``, in fp32 or wider."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.options.score == "softmax":
            return logits, logits.softmax(-1)
        scores = logits.sigmoid()
        return logits, scores / scores.sum(-1, keepdim=True)

    def _kept(self, experts: Tensor, weights: Tensor) -> Tensor | None:
        capacity = self.options.capacity(len(experts), training=self.training)
        return kept_pairs(experts, self.options.num_experts, capacity, priority=weights)
