"""Sparse blocks of transformers, by class name: the names of their submodules and how their outputs are combined.

Since transformers 5 the blocks differ little. A router takes tokens ``(T, hidden)`` and returns logits ``(T, E)``,
weights ``(T, k)`` and expert indices ``(T, k)``. Stacked experts take the tokens with both. A `Family` lists the rest:
names, further inputs of the router, the shared expert, and a factor.

The block's own router is called, so its softmax before or after the top k, groups of experts, selection biases, scaling
and renormalization need no description.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

Scores = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Family:
    """Structure of one kind of MoE block, which computes ``factor * experts(after router) + shared expert``.

    All names are attributes of the block.
    """

    router: str = "gate"
    """The module that selects experts."""

    scores: Scores = "softmax"
    """The function that the router applies to its logits, for the balance loss."""

    router_reads: tuple[str, ...] = ()
    """Tensors of the block that the router takes after the tokens. A missing attribute is passed as None."""

    batched_router: bool = False
    """The router takes ``(batch, length, hidden)``."""

    shared: str | None = None
    """The shared expert, which sees every token. The attribute may be None or absent."""

    shared_gate: str | None = None
    """A linear layer to one feature. Its sigmoid multiplies the output of the shared expert."""

    factor: str | None = None
    """A number of the block that multiplies the output of the experts."""

    jitter: str | None = None
    """A number of the block. In training the input is multiplied by random numbers in ``1 ± jitter``."""

    around: tuple[str, str] | None = None
    """Modules before and after the experts, for experts narrower than the model."""

    returns_weights: bool = False
    """The block returns ``(output, weights)``."""


def _named(names: Iterable[str], family: Family) -> dict[str, Family]:
    return dict.fromkeys(names, family)


_PLAIN = Family()
_SHARED = Family(shared="shared_experts")
_BIASED = replace(_SHARED, scores="sigmoid")
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
    **_named(("DeepseekV2Moe", "Mistral4MoE", "Ernie4_5_MoeSparseMoeBlock"), _SHARED),
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
"""How blocks compute, by class name."""
