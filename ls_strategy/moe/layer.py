"""The Mixture-of-Experts layer."""

from __future__ import annotations

import copy
from typing import Literal

import torch
from torch import Tensor, nn

from ls_strategy.checked import at_least, checked
from ls_strategy.errors import ConfigError
from ls_strategy.moe.experts import Expert, Experts, StackedParameters
from ls_strategy.moe.router import Router, Routing, RoutingOptions
from ls_strategy.moe.sparse import ExpertParallel, SparseLayer


class MoE(SparseLayer):
    """A feed-forward layer in which a router selects ``k`` of ``num_experts`` experts for every token.

    It maps one tensor ``(..., hidden_size)`` to the same shape, like any feed-forward layer. `moe_losses` collects its
    losses. Names and defaults of the options are DeepSpeed's where DeepSpeed has them.

    Args:
        hidden_size: Features of a token.
        expert: A module, which is copied for each expert, or a function without arguments that is called for each
            expert and returns a module. The module maps ``(n, hidden_size)`` to the same shape. Linear layers,
            `FeedForward`, `GatedFeedForward`, and Sequentials of linear layers and activations run for all experts at
            once.
        num_experts: E, over all ranks.
        k: Experts of each token. 1: Switch (arXiv:2101.03961); 2: GShard (arXiv:2006.16668).
        capacity_factor: In training an expert takes ``max(ceil(S / E * capacity_factor * k), min_capacity)`` of the
            pairs that the S tokens of one rank form with it. Other pairs are dropped: they contribute 0.
        eval_capacity_factor: The same in evaluation.
        min_capacity: Smallest capacity, in pairs.
        drop_tokens: False computes every pair, without a capacity.
        drop_policy: Which pairs are kept if ``k > 2``: "probs", those with the highest weights, or "position", those of
            the first tokens. With ``k = 2`` all first choices come before all second ones, each in order.
        noisy_gate_policy: Noise in training. "RSample" samples the expert from the router's probabilities (``k = 1``).
            "Jitter" multiplies the router's input by numbers between 0.99 and 1.01.
        use_rts: Random token selection: in training with ``k = 1``, the kept pairs are chosen at random and not by
            position (Kim et al. 2021, arXiv:2109.10465). Otherwise, and in evaluation, the first tokens are kept.
        second_expert_sampling: In training with ``k = 2``, sample the second expert by the Gumbel-max trick. Applies
            only if tokens choose by softmax alone (no groups, no bias).
        use_residual: Add a dense expert, and mix both by ``softmax(coefficient(x))`` (PR-MoE, arXiv:2201.05596).
        shared_expert: A module that every token uses, added to the result (DeepSeekMoE, arXiv:2401.06066).
        score: Scores of the experts from the router's logits: "softmax", or "sigmoid" (DeepSeek-V3).
        normalize: Scale the weights of a token's experts to the sum ``scale``. None: only if ``k > 1``.
        scale: Factor of the weights.
        groups: Number of groups of adjacent experts.
        top_groups: Number of groups that a token chooses from, its best ones (DeepSeek-V2, arXiv:2405.04434).
        balance_loss: Weight of the loss that grows with uneven loads. 0 disables it.
        z_loss: Weight of the loss that keeps logits small (ST-MoE, arXiv:2202.08906). 0 disables it.
        bias_update_rate: Step of the router's bias, see `update_router_bias` (DeepSeek-V3, arXiv:2412.19437). 0: no
            bias.

    Raises:
        ConfigError: An option is invalid, or two exclude each other.
        PlanError: The expert has buffers or no parameters.
    """

    @checked(hidden_size=at_least(1), num_experts=at_least(1))
    def __init__(  # noqa: PLR0913  (one argument per option)
        self,
        hidden_size: int,
        expert: Expert,
        num_experts: int = 1,
        *,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        drop_tokens: bool = True,
        drop_policy: Literal["probs", "position"] = "probs",
        noisy_gate_policy: Literal["RSample", "Jitter"] | None = None,
        use_rts: bool = True,
        second_expert_sampling: bool = True,
        use_residual: bool = False,
        shared_expert: nn.Module | None = None,
        score: Literal["softmax", "sigmoid"] = "softmax",
        normalize: bool | None = None,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int = 1,
        balance_loss: float = 0.01,
        z_loss: float = 0.0,
        bias_update_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if use_residual and shared_expert is not None:
            raise ConfigError(
                "Got use_residual=True and a shared_expert, but both add an expert for all tokens. Choose one."
            )
        options = RoutingOptions(
            num_experts=num_experts, k=k, capacity_factor=capacity_factor, eval_capacity_factor=eval_capacity_factor,
            min_capacity=min_capacity, drop_tokens=drop_tokens, drop_policy=drop_policy,
            noisy_gate_policy=noisy_gate_policy, use_rts=use_rts, second_expert_sampling=second_expert_sampling,
            score=score, normalize=normalize, scale=scale, groups=groups, top_groups=top_groups,
            balance_loss=balance_loss, z_loss=z_loss, bias_update_rate=bias_update_rate,
        )  # fmt: skip
        self.num_experts = num_experts
        # This order is that of the random draws. Initialization of a model built on meta follows it.
        self.experts = Experts(expert, num_experts)
        self.shared_expert = shared_expert
        self.residual_expert: nn.Module | None = None
        if use_residual:
            self.residual_expert = copy.deepcopy(expert) if isinstance(expert, nn.Module) else expert()
        self.router = Router(hidden_size, options)
        self.counts = self.router.counts
        self.coefficient = nn.Linear(hidden_size, 2) if use_residual else None

    def shard(self, parallel: ExpertParallel) -> None:
        """See `SparseLayer.shard`."""
        super().shard(parallel)
        for node in self.experts.modules():
            assert isinstance(node, StackedParameters)
            node.first_expert = self.num_experts // parallel.experts.size * parallel.experts.rank

    # A compiled block has a graph break here: the number of rows of each expert is known only at run time.
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """Map ``(..., hidden_size)`` to the same shape. Collective over the ranks of ``parallel``, also in backward."""
        tokens = x.reshape(-1, x.shape[-1])
        routing: Routing = self.router(tokens, None if self.parallel is None else self.parallel.replicas)
        expert = self.shared_expert if self.shared_expert is not None else self.residual_expert
        out, shared = self.dispatch(tokens, routing, lambda: None if expert is None else expert(x))
        out = out.view(x.shape)
        if self.coefficient is not None:
            share = self.coefficient(x).softmax(-1)
            return out * share[..., :1] + shared * share[..., 1:]
        return out if shared is None else out + shared

    def forward_shapes(self, x: Tensor) -> Tensor:
        """Replace `forward` where another pipeline rank computes it. Routing needs values; shapes do not."""
        return torch.empty_like(x)
