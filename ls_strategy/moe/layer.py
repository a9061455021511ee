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
from ls_strategy.moe.statistics import MoEStatistics


class MoE(SparseLayer):
    """A feed-forward layer of which every token uses ``k`` of ``num_experts`` parts, which a router chooses for it.

    Takes and returns one tensor ``(..., hidden_size)``, so that it stands where any feed-forward layer does. Its losses
    wait for `moe_losses`.
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
        """Build router and experts. Names and defaults of the options are DeepSpeed's where it has them.

        Args:
            hidden_size: features of a token.
            expert: a module, of which the experts are copies; or a function without arguments that returns one, called
                for each. Gets ``(n, hidden_size)`` and returns the same shape. Linear layers, `FeedForward`,
                `GatedFeedForward` and Sequentials of linear layers and activations run for all experts at once.
            num_experts: E, over all ranks.
            k: experts of each token. 1: Switch (arXiv:2101.03961); 2: GShard (arXiv:2006.16668).
            capacity_factor: in training an expert takes ``max(ceil(S / E * capacity_factor * k), min_capacity)`` of the
                pairs that the S tokens of one rank make with it. The rest is dropped: what it would add is 0.
            eval_capacity_factor: the same in evaluation.
            min_capacity: pairs.
            drop_tokens: False computes every pair, and has no capacity.
            drop_policy: who stays where ``k > 2``: "probs", the pairs with the highest weights, or "position", the
                first tokens. With ``k = 2`` all first choices come before all second ones, each in order.
            noisy_gate_policy: in training. "RSample" draws the expert with the probabilities of the router (``k = 1``),
                "Jitter" multiplies the router's input by numbers between 0.99 and 1.01.
            use_rts: random token selection: who stays where ``k = 1``, in training, is drawn and does not depend on the
                position (Kim et al. 2021, arXiv:2109.10465). False, and in evaluation: the first tokens.
            second_expert_sampling: with ``k = 2``, in training, the second expert is drawn, by the Gumbel-max trick,
                where tokens choose by softmax alone (no groups, no bias).
            use_residual: add a dense expert, and mix both by ``softmax(coefficient(x))`` (PR-MoE, arXiv:2201.05596).
            shared_expert: added to the result of the others; every token uses it (DeepSeekMoE, arXiv:2401.06066).
            score: of an expert, from the router's logits: "softmax" over experts, or "sigmoid" (DeepSeek-V3).
            normalize: make the weights of a token's experts sum to ``scale``; without, where ``k > 1``.
            scale: factor of the weights.
            groups: of experts, neighbours.
            top_groups: a token chooses in its best groups only (DeepSeek-V2, arXiv:2405.04434).
            balance_loss: weight of the loss that grows with uneven loads. 0 for none.
            z_loss: weight of the loss that keeps logits small (ST-MoE, arXiv:2202.08906). 0 for none.
            bias_update_rate: step of the router's bias, see `update_router_bias` (DeepSeek-V3, arXiv:2412.19437). 0:
                there is no bias.

        Raises:
            ConfigError: an option is wrong, or two do not go together.
            PlanError: the expert has buffers or no parameters.
        """
        super().__init__()
        if use_residual and shared_expert is not None:
            raise ConfigError("use_residual=True and shared_expert: both are an expert of all tokens. Give one.")
        options = RoutingOptions(
            num_experts=num_experts, k=k, capacity_factor=capacity_factor, eval_capacity_factor=eval_capacity_factor,
            min_capacity=min_capacity, drop_tokens=drop_tokens, drop_policy=drop_policy,
            noisy_gate_policy=noisy_gate_policy, use_rts=use_rts, second_expert_sampling=second_expert_sampling,
            score=score, normalize=normalize, scale=scale, groups=groups, top_groups=top_groups,
            balance_loss=balance_loss, z_loss=z_loss, bias_update_rate=bias_update_rate,
        )  # fmt: skip
        self.num_experts = num_experts
        # In the order in which their values are drawn: what fills a model that was built without memory keeps it.
        self.experts = Experts(expert, num_experts)
        self.shared_expert = shared_expert
        self.residual_expert: nn.Module | None = None
        if use_residual:
            self.residual_expert = copy.deepcopy(expert) if isinstance(expert, nn.Module) else expert()
        self.router = Router(hidden_size, options)
        self.coefficient = nn.Linear(hidden_size, 2) if use_residual else None

    def shard(self, parallel: ExpertParallel) -> None:
        """Learn which ranks to work with; the experts' parameters are divided by the caller."""
        super().shard(parallel)
        for node in self.experts.modules():
            assert isinstance(node, StackedParameters)
            node.first_expert = self.num_experts // parallel.experts.size * parallel.experts.rank

    # A compiled block breaks its graph here: the number of rows of each expert is known only when it runs.
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """``(..., hidden_size)`` to the same shape. Collective over the ranks of ``parallel``, forward and backward."""
        tokens = x.reshape(-1, x.shape[-1])
        routing: Routing = self.router(tokens, None if self.parallel is None else self.parallel.replicas)
        dense: list[Tensor] = []

        def meanwhile() -> None:
            expert = self.shared_expert if self.shared_expert is not None else self.residual_expert
            if expert is not None:
                dense.append(expert(x))

        out = self.spread(tokens, routing, meanwhile).view(x.shape)
        if self.coefficient is not None:
            share = self.coefficient(x).softmax(-1)
            return out * share[..., :1] + dense[0] * share[..., 1:]
        return out + dense[0] if dense else out

    def forward_shapes(self, x: Tensor) -> Tensor:
        """In place of `forward` where another rank of a pipeline computes it: nothing is routed without values."""
        return torch.empty_like(x)

    def statistics(self) -> MoEStatistics:
        """Of the forwards in training since `reset_statistics`, on this rank; does not wait for the device."""
        return self.router.counts.statistics(self.router.weight.device)

    def reset_statistics(self) -> None:
        """Begin anew."""
        self.router.counts.reset()
