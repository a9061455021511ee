"""The router: which experts a token uses, and with which weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy._torch import current_backward_pass, in_reentrant_checkpoint
from ls_strategy.checked import at_least, check_fields
from ls_strategy.distributed.axis import Axis
from ls_strategy.errors import ConfigError
from ls_strategy.moe.capacity import capacity_of, kept_pairs
from ls_strategy.moe.losses import LossKeeper, balance_loss, z_loss
from ls_strategy.moe.statistics import Counts
from ls_strategy.ops.topk import stable_topk

JITTER = 1e-2
"""Relative width of the noise on the router's input."""


@dataclass(frozen=True)
class RoutingOptions:
    """Options of routing tokens to experts. The fields are the arguments of `MoE` of the same names."""

    num_experts: int
    k: int = 1
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.0
    min_capacity: int = 4
    drop_tokens: bool = True
    drop_policy: Literal["probs", "position"] = "probs"
    noisy_gate_policy: Literal["RSample", "Jitter"] | None = None
    use_rts: bool = True
    second_expert_sampling: bool = True
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool | None = None
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    balance_loss: float = 0.01
    z_loss: float = 0.0
    bias_update_rate: float = 0.0

    def __post_init__(self) -> None:
        """Check the options.

        Raises:
            ConfigError: An option is invalid, or two exclude each other.
        """
        size, factor, weight = at_least(1), at_least(0, 1_000_000), at_least(0)
        check_fields(
            self, group="", num_experts=size, k=size, groups=size, top_groups=size, capacity_factor=factor,
            eval_capacity_factor=factor, min_capacity=at_least(0), balance_loss=weight, z_loss=weight,
            bias_update_rate=weight,
        )  # fmt: skip
        if self.num_experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise ConfigError(
                f"Got groups={self.groups} and top_groups={self.top_groups}, but groups must divide the "
                f"{self.num_experts} experts, and top_groups must lie between 1 and groups."
            )
        usable = self.num_experts // self.groups * self.top_groups
        if not 1 <= self.k <= usable:
            raise ConfigError(
                f"Got k={self.k}, but a token can use between 1 and {usable} experts (num_experts={self.num_experts}, "
                f"top_groups={self.top_groups} of groups={self.groups}). Lower k, or raise num_experts."
            )
        if self.noisy_gate_policy == "RSample" and self.k > 1:
            raise ConfigError(
                f"Got noisy_gate_policy='RSample' with k={self.k}, but it requires k=1. With k=2, "
                "second_expert_sampling=True samples the second expert; 'Jitter' works with any k."
            )

    @property
    def normalizes(self) -> bool:
        """Return whether the weights of a token's experts are scaled to the sum ``scale``."""
        return self.k > 1 if self.normalize is None else self.normalize

    @property
    def is_plain(self) -> bool:
        """Return whether tokens choose experts by the softmax of their logits alone, as in GShard and Switch."""
        return self.score == "softmax" and self.groups == 1 and self.bias_update_rate == 0

    def capacity(self, tokens: int, *, training: bool) -> int:
        """Return the capacity of an expert, in pairs."""
        factor = self.capacity_factor if training else self.eval_capacity_factor
        return capacity_of(tokens, self.num_experts, factor * self.k, self.min_capacity)


@dataclass(frozen=True)
class Routing:
    """The experts that S tokens chose."""

    experts: Tensor
    """``(S, k)`` int64, different for each token."""

    weights: Tensor
    """``(S, k)``, fp32 or wider; 0 for dropped pairs."""

    kept: Tensor | None
    """``(S, k)`` bool; None if no pair is dropped."""


class RoutingAccounts(LossKeeper):
    """Mixin for modules that route: stores losses and counts loads."""

    def __init__(self, options: RoutingOptions) -> None:
        super().__init__()
        self.options = options
        self.counts = Counts(options.num_experts)

    def __getstate__(self) -> dict[str, Any]:
        # Pending losses belong to the graphs of this module; a copy has none.
        return {**super().__getstate__(), "_pending": [], "_owed": []}  # type: ignore[misc, dict-item]

    def account(
        self, logits: Tensor, probabilities: Tensor, experts: Tensor, kept: Tensor | None, *, first_only: bool = False
    ) -> None:
        """Store the losses and count the loads, but not again when backward recomputes the forward.

        Args:
            logits: ``(S, E)``, fp32 or wider.
            probabilities: ``(S, E)``, of the experts.
            experts: ``(S, k)``.
            kept: ``(S, k)`` bool. None: all pairs.
            first_only: The balance loss counts first choices only.
        """
        o = self.options
        routed = per_expert(experts, o.num_experts)
        chosen = per_expert(experts[:, :1], o.num_experts) if first_only and experts.shape[1] > 1 else routed
        # A recomputed forward computes them too, because it must save the same tensors.
        k = 1 if first_only else experts.shape[1]
        balance = balance_loss(probabilities if o.balance_loss else probabilities.detach(), chosen, k)
        z = z_loss(logits if o.z_loss else logits.detach())
        terms = [rate * loss for rate, loss in ((o.balance_loss, balance), (o.z_loss, z)) if rate]
        if current_backward_pass() >= 0:
            if terms and torch.is_grad_enabled() and in_reentrant_checkpoint():
                self.pass_on(torch.stack(terms).sum(), logits)
            return
        if terms and torch.is_grad_enabled():
            self.leave(torch.stack(terms).sum())
        elif terms and in_reentrant_checkpoint():
            self.leave_value(torch.stack(terms).sum())
        with torch.no_grad():
            entropy = -(probabilities * probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()).sum(-1)
            self.counts.add(
                routed=routed,
                kept=None if kept is None else per_expert(experts, o.num_experts, kept),
                values=torch.stack([entropy.sum() / max(len(entropy), 1), balance.detach(), z.detach()]),
            )


class Router(RoutingAccounts, nn.Module):
    """A linear map from a token to one score per expert, and the selection by these scores.

    Computed in fp32 (fp64 for fp64 tokens), whatever the dtype of weights and autocast: Switch, arXiv:2101.03961,
    section 2.4.
    """

    def __init__(self, hidden_size: int, options: RoutingOptions) -> None:
        """``weight`` is ``(E, hidden_size)``. ``bias``, ``(E,)`` fp32 or None, affects the selection only."""
        nn.Module.__init__(self)
        RoutingAccounts.__init__(self, options)
        self.weight = nn.Parameter(torch.empty(options.num_experts, hidden_size))
        has_bias = options.bias_update_rate > 0
        self.register_buffer("bias", torch.empty(options.num_experts, dtype=torch.float32) if has_bias else None)
        self.reset_parameters()

    bias: Tensor | None

    def reset_parameters(self) -> None:
        """Initialize as ``nn.Linear`` does, with a bias of 0."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Return sizes and options."""
        o = self.options
        return f"{self.weight.shape[-1]}, num_experts={o.num_experts}, k={o.k}, score={o.score}"

    def forward(self, tokens: Tensor, replicas: Axis | None = None) -> Routing:
        """Choose experts for tokens.

        Args:
            tokens: ``(S, hidden)``.
            replicas: Ranks that route the same tokens with the same random numbers. Collective over them if random
                numbers are used.
        """
        o = self.options
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        with torch.autocast(tokens.device.type, enabled=False):
            x = tokens.to(dtype)
            if self.training and o.noisy_gate_policy == "Jitter":
                x = x * _synchronized(torch.empty_like(x).uniform_(1 - JITTER, 1 + JITTER), replicas)
            logits = functional.linear(x, self.weight.to(dtype))
            scores = logits.softmax(-1) if o.score == "softmax" else logits.sigmoid()
            experts = self._choose(logits.detach(), scores.detach(), replicas)
            weights = scores.gather(1, experts)
            kept = self._kept(experts, weights.detach(), replicas) if o.drop_tokens else None
            if kept is not None:
                weights = weights * kept
            if o.normalizes:
                weights = weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(dtype).eps)
            if o.scale != 1:
                weights = weights * o.scale
            if self.training:
                probabilities = scores if o.score == "softmax" else scores / scores.sum(-1, keepdim=True)
                self.account(logits, probabilities, experts, kept, first_only=o.k <= 2)
        return Routing(experts, weights, kept)

    def _choose(self, logits: Tensor, scores: Tensor, replicas: Axis | None) -> Tensor:
        """Return the chosen experts, ``(S, k)``, best first."""
        o = self.options
        choice = scores if self.bias is None else scores + self.bias.to(scores.dtype)
        if o.groups > 1:
            choice = self._in_best_groups(choice)
        if self.training and o.noisy_gate_policy == "RSample":  # Gumbel-max: samples with the scores' probabilities
            noise = _synchronized(gumbel(logits), replicas)
            choice = logits + noise if o.is_plain else choice.clamp(min=0).log() + noise
        if o.k > 2:
            # Ties go to the first expert on every device. Only tests use fp64.
            return stable_topk(choice, o.k)[1] if choice.dtype == torch.float32 else choice.topk(o.k, -1).indices
        first = choice.argmax(-1, keepdim=True)
        if o.k == 1:
            return first
        if o.is_plain:
            samples = self.training and o.second_expert_sampling
            choice = logits + _synchronized(gumbel(logits), replicas) if samples else logits
        return torch.cat([first, choice.scatter(-1, first, -math.inf).argmax(-1, keepdim=True)], -1)

    def _in_best_groups(self, choice: Tensor) -> Tensor:
        """Set the scores outside the token's ``top_groups`` best groups to -inf.

        With softmax, the score of a group is that of its best expert (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).
        With sigmoid it is the sum of its two best ones (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
        """
        o = self.options
        grouped = choice.unflatten(-1, (o.groups, -1))
        best = min(1 if o.score == "softmax" else 2, grouped.shape[-1])
        groups = grouped.topk(best, -1).values.sum(-1).topk(o.top_groups, -1).indices
        outside = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=choice.device).scatter_(-1, groups, False)
        return grouped.masked_fill(outside.unsqueeze(-1), -math.inf).flatten(-2)

    def _kept(self, experts: Tensor, weights: Tensor, replicas: Axis | None) -> Tensor | None:
        o = self.options
        capacity = o.capacity(len(experts), training=self.training)
        priority = None
        if o.k == 1 and o.use_rts and self.training:
            priority = _synchronized(torch.rand_like(weights), replicas)
        elif o.k > 2 and o.drop_policy == "probs":
            priority = weights
        return kept_pairs(experts, o.num_experts, capacity, priority=priority, ranks_first=o.k == 2)


def gumbel(like: Tensor) -> Tensor:
    """Sample the standard Gumbel distribution: the argmax of logits plus these is a sample from their softmax."""
    return -torch.empty_like(like).exponential_().log()


def _synchronized(noise: Tensor, replicas: Axis | None) -> Tensor:
    """Broadcast the random numbers of the first replica."""
    if replicas is not None:
        replicas.broadcast_(noise)
    return noise


def per_expert(experts: Tensor, num_experts: int, kept: Tensor | None = None) -> Tensor:
    """Return the pairs of each expert, ``(E,)`` int64. Unlike ``bincount``, it does not wait for the device."""
    flat = experts.reshape(-1)
    ones = torch.ones_like(flat) if kept is None else kept.reshape(-1).to(flat.dtype)
    return flat.new_zeros(num_experts).scatter_add_(0, flat, ones)
