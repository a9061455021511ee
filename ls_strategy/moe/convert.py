"""Sparse blocks of transformers models, made to compute with this package's dispatch and grouped products.

::

    model = AutoModelForCausalLM.from_pretrained("mistralai/Mixtral-8x7B-v0.1")
    convert_moe(model)

A block and its experts change their classes, in place, to subclasses of their own; parameters, buffers, submodules and
all names stay. So files are read and written as before, and whatever looks for the old classes finds them. The block's
router is called as before, too, so that the model's own balance loss and its router logits go on working.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ls_strategy.checked import at_least, checked
from ls_strategy.errors import PlanError
from ls_strategy.moe.capacity import capacity_of, kept_pairs
from ls_strategy.moe.families import FAMILIES, Family
from ls_strategy.moe.grouped import grouped_linear
from ls_strategy.moe.router import Routing, RoutingAccounts, RoutingOptions
from ls_strategy.moe.sparse import SparseLayer
from ls_strategy.moe.statistics import MoEStatistics

_STACKS = (("gate_up_proj", "gate_up_proj_bias"), ("up_proj", "up_proj_bias"), ("down_proj", "down_proj_bias"))
"""Names of stacked weights, each with that of its bias."""


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
    """Let every sparse block of a transformers model compute as `MoE` does, so that its experts can be divided.

    Without dropping, outputs and gradients are the same as before, up to rounding. Call it before the model gets to a
    Trainer, or in ``configure_model``; a model on meta is fine. All ranks alike.

    Args:
        model: or a module that contains it.
        drop_tokens: give experts a capacity. What a dropped pair would add is 0, and the token's other weights stay as
            they are. Those with the highest weights are kept.
        capacity_factor: in training an expert takes ``max(ceil(S / E * capacity_factor * k), min_capacity)`` of the
            pairs that the S tokens of one rank make with it.
        eval_capacity_factor: the same in evaluation.
        min_capacity: pairs.
        balance_loss: weight of a loss, for `moe_losses`, that is 1 where all E experts get as many pairs: ``E / k``
            times the sum over experts of mean probability times pairs per token (Switch, arXiv:2101.03961, equation 4,
            here with all k choices). 0 for none.
        z_loss: weight of the loss that keeps logits small (ST-MoE, arXiv:2202.08906). 0 for none.

    Returns:
        Names of the blocks that were converted, with the names of their former classes.

    Raises:
        ConfigError: an option is wrong.
        PlanError: a block is not known or cannot be converted; there is none; or the model already adds a balance loss
            of its own. The model is then as it was.
    """
    blocks = dict(_sparse_blocks(model))
    if not blocks:
        raise PlanError(
            "convert_moe: the model has no sparse block that is not converted yet. Such blocks have a submodule "
            f"'experts'; known are {_known()}."
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
    """Every module that has experts and is none of this package's, outermost first."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "experts", None), nn.Module) and not isinstance(module, SparseLayer):
            yield name, module


def _refuse_second_loss(model: nn.Module, weight: float) -> None:
    for module in model.modules():
        config = getattr(module, "config", None)
        own = getattr(config, "router_aux_loss_coef", 0)
        if getattr(config, "output_router_logits", False) and own:
            raise PlanError(
                f"convert_moe: balance_loss={weight}, and the model's config has output_router_logits=True with "
                f"router_aux_loss_coef={own}, so that the model adds a balance loss of its own. Set "
                "config.output_router_logits=False, or balance_loss=0."
            )


def _check_experts(name: str, block: nn.Module) -> int:
    """The number of the block's experts.

    Raises:
        PlanError: it is of no known kind, or not as its kind should be.
    """
    kind = type(block).__name__
    what = f"convert_moe: {name or 'the model'!r} is a {kind}"
    if kind not in FAMILIES:
        raise PlanError(f"{what}, which is not known. Known are {_known()}.")
    experts = block.get_submodule("experts")
    if isinstance(experts, (nn.ModuleList, nn.ModuleDict)):
        raise PlanError(
            f"{what} whose experts are modules of their own, as before transformers 5. To stack their parameters would "
            "change names, and so checkpoints. Use transformers >= 5, which reads the same files into stacked ones."
        )
    if "forward" in vars(block) or "forward" in vars(experts):
        raise PlanError(
            f"{what} whose forward was replaced (by accelerate's device_map or by a kernel?), which conversion would "
            "undo. Load the model without that."
        )
    stacked = dict(experts.named_parameters())
    allowed = {each for pair in _STACKS for each in pair}
    weights = [p for key, p in stacked.items() if not key.endswith("_bias")]
    if not set(stacked) <= allowed or len(weights) != 2 or not all(p.is_floating_point() for p in weights):
        shapes = ", ".join(f"{key} {tuple(p.shape)} {p.dtype}" for key, p in stacked.items())
        raise PlanError(
            f"{what} with experts of {shapes or 'no parameters'}: wanted are gate_up_proj or up_proj, and down_proj, "
            "floating point, of shape (experts, ...). Load the model without quantization."
        )
    return len(weights[0])


def _check_router(name: str, block: nn.Module) -> int:
    """Experts per token.

    Raises:
        PlanError: the router does not return what `FAMILIES` is written for.
    """
    family = FAMILIES[type(block).__name__]
    router = block.get_submodule(family.router)
    k = getattr(router, "top_k", None)
    if not isinstance(k, int) or not _routes(router, k, block, family):
        raise PlanError(
            f"convert_moe: the router of {name!r} ({type(router).__name__}) does not return (logits, weights, experts) "
            "with top_k columns in the last two. Routers of all supported blocks do from transformers 5.21 on, which "
            "needs Python 3.11. Upgrade transformers."
        )
    return k


def _routes(router: nn.Module, k: int, block: nn.Module, family: Family) -> bool:
    """Try a copy of the router, with other values, on two tokens."""
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
    block.become(family, options)


@functools.cache
def _subclass(converted: type[nn.Module], original: type[nn.Module]) -> type[nn.Module]:
    """A class that is both, and computes as ``converted`` does."""
    return type(f"Converted{original.__name__}", (converted, original), {"original": original})


def _empty(converted: type[nn.Module], original: type[nn.Module]) -> nn.Module:
    """What a copy or a pickle starts from: these classes have no name under which a module holds them."""
    cls = _subclass(converted, original)
    return cls.__new__(cls)


class ConvertedExperts(nn.Module):
    """Stacked experts of transformers, on rows that are ordered by expert. ``original`` is the class it was."""

    original: type[nn.Module]

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (ConvertedExperts, self.original), self.__getstate__()  # type: ignore[attr-defined]

    def input_dtype(self, x: Tensor) -> torch.dtype:
        """In which dtype rows may as well arrive: what the first layer casts them to."""
        device = x.device.type
        if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            return torch.get_autocast_dtype(device)
        return x.dtype

    def forward(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Each expert on its own rows.

        Args:
            rows: ``(T, hidden)``, ordered by expert.
            counts: rows of each expert that is here.

        Returns:
            ``(T, hidden)``.
        """
        if "gate_up_proj" in self._parameters:
            inner = self._gated(self._linear("gate_up_proj", rows, counts))
        else:
            inner = self.act_fn(self._linear("up_proj", rows, counts))  # type: ignore[operator]
        return self._linear("down_proj", inner, counts)

    def _gated(self, both: Tensor) -> Tensor:
        """``(T, 2 f)`` to ``(T, f)``."""
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
    """A sparse block of transformers. ``original`` is the class it was; ``family`` says how it computes."""

    original: type[nn.Module]
    family: Family

    def become(self, family: Family, options: RoutingOptions) -> None:
        """Take the place of the constructor, which the block's own class has called."""
        RoutingAccounts.__init__(self, options)
        self.family = family
        self.num_experts = options.num_experts
        self.parallel = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _empty, (ConvertedMoE, self.original), self.__getstate__()

    def extra_repr(self) -> str:
        """What tells blocks apart."""
        o = self.options
        return f"num_experts={o.num_experts}, k={o.k}, drop_tokens={o.drop_tokens}"

    # A compiled block breaks its graph here: the number of rows of each expert is known only when it runs.
    @torch.compiler.disable
    def forward(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """``(..., hidden)`` to the same shape; with the weights ``(S, k)`` where the block returned them.

        Collective over the ranks of ``parallel``, forward and backward.
        """
        x = self._jittered(hidden_states)
        tokens = x.reshape(-1, x.shape[-1])
        routing, weights = self._routed(tokens)
        dense: list[Tensor] = []

        def meanwhile() -> None:
            expert = self._part(self.family.shared)
            if expert is not None:
                dense.append(self._weighed(expert(tokens), tokens))

        before, after = (self._part(name) for name in self.family.around or (None, None))
        inner = tokens if before is None else before(tokens)
        out = self.spread(inner, routing, meanwhile, inner.dtype)
        out = out if after is None else after(out)
        if self.family.factor is not None:
            out = out * getattr(self, self.family.factor)
        out = (out + dense[0] if dense else out).view(x.shape)
        return (out, weights) if self.family.returns_weights else out

    def forward_shapes(self, hidden_states: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """In place of `forward` where another rank of a pipeline computes it: nothing is routed without values."""
        out = torch.empty_like(hidden_states)
        if not self.family.returns_weights:
            return out
        tokens = hidden_states.numel() // hidden_states.shape[-1]
        return out, hidden_states.new_empty(tokens, self.options.k)

    def statistics(self) -> MoEStatistics:
        """Of the forwards in training since `reset_statistics`, on this rank; does not wait for the device."""
        return self.counts.statistics(next(self.parameters()).device)

    def reset_statistics(self) -> None:
        """Begin anew."""
        self.counts.reset()

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

    def _weighed(self, dense: Tensor, tokens: Tensor) -> Tensor:
        gate = self._part(self.family.shared_gate)
        return dense if gate is None else gate(tokens).sigmoid() * dense

    def _routed(self, tokens: Tensor) -> tuple[Routing, Tensor]:
        """The router's choices, less what is dropped; and its weights ``(S, k)`` before that."""
        router = self.get_submodule(self.family.router)
        more = [getattr(self, name, None) for name in self.family.router_reads]
        logits, weights, experts = router(tokens.unsqueeze(0) if self.family.batched_router else tokens, *more)
        kept = self._kept(experts, weights.detach()) if self.options.drop_tokens else None
        if self.training:
            self.account(*self._probabilities(logits), experts, kept)
        return Routing(experts, weights if kept is None else weights * kept, kept), weights

    def _probabilities(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and probabilities ``(S, E)``, in fp32 or wider."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.options.score == "softmax":
            return logits, logits.softmax(-1)
        scores = logits.sigmoid()
        return logits, scores / scores.sum(-1, keepdim=True)

    def _kept(self, experts: Tensor, weights: Tensor) -> Tensor | None:
        o = self.options
        factor = o.capacity_factor if self.training else o.eval_capacity_factor
        capacity = capacity_of(len(experts), o.num_experts, factor * o.k, o.min_capacity)
        return kept_pairs(experts, o.num_experts, capacity, priority=weights)
