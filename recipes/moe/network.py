"""The GPT recipe's network with a Mixture of Experts instead of the MLP in some blocks.

By default an expert is as wide as the dense baseline's MLP divided by the experts that a token visits: experts add
parameters, not computation.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor, nn

from ls_strategy.extras.inference.cache import KVCache
from ls_strategy.moe.feed_forward import GatedFeedForward
from ls_strategy.moe.layer import MoE
from ls_strategy.moe.router import Router
from recipes.gpt.network import GPT, Block, GPTConfig, Linear, Rotation


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Which blocks have experts, how many, and how tokens are routed."""

    every: int = 1
    """Experts in every n-th block, counted from the first: block n, 2n, ... 0: no experts, the dense baseline."""

    num_experts: list[int] = field(default_factory=lambda: [8])
    """Experts per block with experts: one number for all, or one for each, from first to last, as in a pyramid."""

    k: int = 2
    """Experts that a token visits."""

    expert_width: int | None = None
    """Hidden units of an expert. None: those of the dense MLP divided by the experts that a token visits."""

    shared_experts: int = 0
    """Experts that every token visits, fused into one (DeepSeekMoE, Dai et al., arXiv:2401.06066)."""

    residual: bool = False
    """Every token also visits one dense expert; a learned coefficient mixes the two (PR-MoE, arXiv:2201.05596)."""

    drop_tokens: bool = True
    """Limit tokens per expert to its capacity; further tokens skip the layer. False: no limit (dropless)."""

    capacity_factor: float = 1.25
    """Capacity in training, as a multiple of an equal share of tokens."""

    eval_capacity_factor: float = 2.0
    """Capacity factor in validation."""

    min_capacity: int = 4
    """Minimum capacity of an expert, tokens."""

    noisy_gate_policy: Literal["RSample", "Jitter"] | None = None
    """Noise on the choice of experts in training; ``RSample`` needs ``k: 1``."""

    second_expert_sampling: bool = False
    """Sample the second expert in training, with ``k: 2``, as GShard does."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from router logits to expert weights."""

    scale: float = 1.0
    """Multiplies the expert weights."""

    groups: int = 1
    """Groups of experts, of which a token visits ``top_groups`` (DeepSeek-V3)."""

    top_groups: int = 1
    """Groups that a token may visit."""

    balance_loss: float = 0.01
    """Weight of the load-balancing loss."""

    z_loss: float = 0.0
    """Weight of the squared log-partition of the router (ST-MoE, Zoph et al., arXiv:2202.08906)."""

    bias_update_rate: float = 0.0
    """Step of the score bias against an expert's load, which balances without a loss (DeepSeek-V3). 0: no bias."""

    def __post_init__(self) -> None:
        if self.every < 0 or self.shared_experts < 0:
            raise ValueError(
                f"Got every={self.every} and shared_experts={self.shared_experts}, but neither can be negative."
            )
        if not self.num_experts or min(self.num_experts) < 1:
            raise ValueError(f"Got num_experts={self.num_experts}. Give at least one number, each at least 1.")
        if self.residual and self.shared_experts:
            raise ValueError(
                "Got residual and shared_experts, which both add an expert that every token visits. Choose one of them."
            )

    def experts_of(self, num_layers: int) -> list[int]:
        """Return the number of experts of each of ``num_layers`` blocks, 0 where it keeps its MLP.

        >>> MoEConfig(every=2, num_experts=[4, 8]).experts_of(4)
        [0, 4, 0, 8]

        Raises:
            ValueError: the number of entries differs from the number of blocks with experts.
        """
        chosen = [i for i in range(num_layers) if self.every and (i + 1) % self.every == 0]
        counts = self.num_experts * len(chosen) if len(self.num_experts) == 1 else self.num_experts
        if len(counts) != len(chosen) and chosen:
            raise ValueError(
                f"Got num_experts={self.num_experts} with {len(counts)} numbers, but num_layers={num_layers} and "
                f"every={self.every} make {len(chosen)} blocks with experts. Give one number, or one per block."
            )
        by_block = dict(zip(chosen, counts, strict=False))
        return [by_block.get(i, 0) for i in range(num_layers)]

    @property
    def visited(self) -> int:
        """Experts that a token visits, including shared and residual ones."""
        return self.k + self.shared_experts + self.residual


def dense_width(config: GPTConfig) -> int:
    """Return the hidden units of the dense SwiGLU MLP."""
    return -(-8 * config.width // (3 * 64)) * 64


def expert_width(config: GPTConfig, moe: MoEConfig) -> int:
    """Return the hidden units of an expert: the dense MLP's, divided by the visited experts, in multiples of 8."""
    if moe.expert_width is not None:
        return moe.expert_width
    return -(-dense_width(config) // (8 * moe.visited)) * 8


class Expert(GatedFeedForward):
    """A SwiGLU with the initial weights of the dense MLP."""

    def __init__(self, width: int, hidden: int, *, residual_std: float) -> None:
        """``residual_std``: initial deviation of the layer that adds to the residual stream."""
        super().__init__(width, hidden)
        self.gate, self.up = Linear(width, hidden), Linear(width, hidden)
        self.down = Linear(hidden, width, std=residual_std)


def moe_layer(config: GPTConfig, moe: MoEConfig, num_experts: int) -> MoE:
    """Return the layer that replaces a block's MLP."""
    hidden, std = expert_width(config, moe), config.residual_std
    shared = moe.shared_experts * hidden
    return MoE(
        config.width,
        lambda: Expert(config.width, hidden, residual_std=std),
        num_experts,
        k=moe.k,
        capacity_factor=moe.capacity_factor,
        eval_capacity_factor=moe.eval_capacity_factor,
        min_capacity=moe.min_capacity,
        drop_tokens=moe.drop_tokens,
        noisy_gate_policy=moe.noisy_gate_policy,
        second_expert_sampling=moe.second_expert_sampling,
        use_residual=moe.residual,
        shared_expert=Expert(config.width, shared, residual_std=std) if shared else None,
        score=moe.score,
        scale=moe.scale,
        groups=moe.groups,
        top_groups=moe.top_groups,
        balance_loss=moe.balance_loss,
        z_loss=moe.z_loss,
        bias_update_rate=moe.bias_update_rate,
    )


@contextmanager
def nothing_dropped(network: nn.Module) -> Generator[None, None, None]:
    """Make experts accept all tokens, until the exit.

    Their capacity depends on how many tokens are read at once: on batch size, padding and the cache.
    """
    routers = [m for m in network.modules() if isinstance(m, Router) and m.options.drop_tokens]
    kept = [router.options for router in routers]
    for router in routers:
        router.options = replace(router.options, drop_tokens=False)
    try:
        yield
    finally:
        for router, options in zip(routers, kept, strict=True):
            router.options = options


class MoEGPT(GPT):
    """Tokens in, next-token logits out."""

    def __init__(self, config: GPTConfig, moe: MoEConfig) -> None:
        """``config`` is the network's shape, ``moe`` that of its experts.

        Raises:
            ValueError: the MLP is not SwiGLU, as the experts are.
        """
        if config.mlp != "swiglu":
            raise ValueError(f"Got mlp={config.mlp!r}, but experts are SwiGLU. Set mlp: swiglu.")
        self.moe = moe
        self.experts_per_block = moe.experts_of(config.num_layers)
        super().__init__(config)

    def block(self, layer: int) -> Block:
        """Build a block with experts, or a dense one."""
        num_experts = self.experts_per_block[layer]
        return Block(self.config, partial(moe_layer, self.config, self.moe, num_experts) if num_experts else None)

    def cached_blocks(self, x_BTD: Tensor, rotation: Rotation | None, cache: KVCache) -> Tensor:
        """See `GPT.cached_blocks`. Experts drop no tokens here, whatever the options: see `nothing_dropped`."""
        with nothing_dropped(self):
            return super().cached_blocks(x_BTD, rotation, cache)

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """See `GPT.tensor_parallel_plan`. Experts are replicated on every tensor-parallel rank."""
        plan = super().tensor_parallel_plan()
        mlp = {pattern: plan.pop(pattern) for pattern in list(plan) if pattern.startswith("blocks.*.mlp.")}
        for i, num_experts in enumerate(self.experts_per_block):
            if not num_experts:
                plan |= {pattern.replace("*", str(i), 1): style for pattern, style in mlp.items()}
        return plan

    def flops_per_token(self) -> int:
        """See `GPT.flops_per_token`. Counts only the experts that a token visits."""
        config, moe = self.config, self.moe
        D, hidden = config.width, expert_width(config, moe)
        attention = (config.num_heads + 2 * config.kv_heads) * config.head_width * D + D * D
        weights = D * config.vocab_size
        for num_experts in self.experts_per_block:
            if num_experts:
                coefficients = 2 * D if moe.residual else 0
                weights += attention + 3 * D * hidden * moe.visited + D * num_experts + coefficients
            else:
                weights += attention + 3 * D * dense_width(config)
        return 6 * weights + 12 * config.num_layers * config.num_heads * config.head_width * config.block_size
