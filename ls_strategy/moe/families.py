"""Sparse blocks of transformers, by the name of their class: what their parts are called and how they are combined.

Since transformers 5 the blocks differ in little. A router takes tokens ``(T, hidden)`` and returns logits ``(T, E)``,
weights ``(T, k)`` and the numbers of experts ``(T, k)``. Stacked experts take the tokens with both. What is left is
listed here: names, what else the router reads, the dense expert beside, and a factor.

A block's own router goes on deciding, so that its softmax before or after the top k, groups of experts, biases that
only select, scaling and renormalisation need no description.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Family:
    """How one kind of block computes ``factor * experts(after router) + dense expert``. All names are attributes."""

    router: str = "gate"
    """The module that chooses experts."""

    scores: Scores = "softmax"
    """What the router makes of its logits, for the loss that balances experts."""

    router_reads: tuple[str, ...] = ()
    """Tensors of the block that the router takes after the tokens; a name the block does not have is None."""

    batched_router: bool = False
    """The router wants ``(batch, length, hidden)``."""

    shared: str | None = None
    """The dense expert that sees every token; the block may hold None there, or nothing."""

    shared_gate: str | None = None
    """A linear layer to one feature, whose sigmoid multiplies the dense expert's output."""

    factor: str | None = None
    """A number of the block that multiplies what the experts give."""

    jitter: str | None = None
    """A number of the block: while training, its input is multiplied by random numbers in ``1 -+ jitter``."""

    around: tuple[str, str] | None = None
    """Modules before and after the experts, for experts narrower than the model."""

    returns_weights: bool = False
    """The block returns ``(output, weights)``."""


def _named(names: Iterable[str], family: Family) -> dict[str, Family]:
    return dict.fromkeys(names, family)


_PLAIN = Family()
_BESIDE = Family(shared="shared_experts")
_BIASED = replace(_BESIDE, scores="sigmoid")
_GATED = Family(shared="shared_expert", shared_gate="shared_expert_gate")
_ROUTER = Family(router="router")

FAMILIES: dict[str, Family] = {
    **_named(
        (
            *("Qwen3MoeSparseMoeBlock", "Qwen3VLMoeTextSparseMoeBlock", "Qwen3OmniMoeThinkerTextSparseMoeBlock"),
            *("OlmoeSparseMoeBlock", "FlexOlmoSparseMoeBlock"),
        ),
        _PLAIN,
    ),
    **_named(("MixtralSparseMoeBlock", "MiniMaxSparseMoeBlock"), Family(jitter="jitter_noise")),
    **_named(("Qwen2MoeSparseMoeBlock", "Qwen3NextSparseMoeBlock", "Qwen3_5MoeSparseMoeBlock"), _GATED),
    **_named(("DeepseekV2Moe", "Mistral4MoE", "Ernie4_5_MoeSparseMoeBlock"), _BESIDE),
    **_named(
        (
            *("DeepseekV3MoE", "DeepseekV32MoE", "Dots1MoE", "Glm4MoeMoE", "Glm4MoeLiteMoE", "Glm4vMoeTextMoE"),
            *("GlmMoeDsaMoE", "KimiLinearMoE", "SolarOpenMoE", "BailingHybridMoE", "ExaoneMoeSparseMoEBlock"),
        ),
        _BIASED,
    ),
    **_named(("GraniteMoeMoE", "GraniteMoeHybridMoE", "GraniteMoeSharedMoE", "JambaSparseMoeBlock"), _ROUTER),
    "PhimoeSparseMoeBlock": Family(router="router", jitter="input_jitter_noise"),
    "GptOssMLP": Family(router="router", returns_weights=True),
    "HunYuanMoEV1Moe": Family(shared="shared_mlp"),
    "FlintSparseMoeBlock": Family(scores="sigmoid", shared="shared_expert"),
    "MiMoV2FlashMoE": Family(scores="sigmoid"),
    "LagunaSparseMoeBlock": replace(_BIASED, factor="routed_scaling_factor"),
    "AfmoeSparseMoeBlock": replace(_BIASED, router="router", router_reads=("expert_bias",), batched_router=True),
    "AriaTextMoELayer": replace(_ROUTER, shared="shared_experts"),
    "Lfm2MoeSparseMoeBlock": Family(scores="sigmoid", router_reads=("expert_bias",)),
    "MiniMaxM2SparseMoeBlock": Family(
        scores="sigmoid", router_reads=("e_score_correction_bias",), jitter="jitter_noise"
    ),
    "NemotronHMoE": replace(_BIASED, around=("fc1_latent_proj", "fc2_latent_proj")),
}
"""Class of the block -> how it computes."""
