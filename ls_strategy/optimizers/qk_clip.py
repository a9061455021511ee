"""QK clip: query and key weights of attention heads whose logits have become too large are scaled down after a step.

Kimi Team, "Kimi K2: Open Agentic Intelligence", arXiv:2507.20534, section 2.1. With Muon, it is MuonClip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ls_strategy.checked import at_least, checked
from ls_strategy.errors import PlanError


class QKClip(nn.Module):
    """Notes the largest attention logit of every head. Put one into an attention module, and call it before attention.

    It has no parameters and changes nothing by itself: `Muon.clip_logits` scales the weights that it names. In training
    mode a call computes the products of all queries and keys once more, without gradients.

    Args:
        query: name of the projection's weight in the module that contains this one, such as ``"q_proj.weight"``.
        key: the same for keys. Equal names: one projection, with rows of queries first, then of keys, then of values.
        head_width: width of a head.
        num_heads: heads of queries, of all tensor-parallel ranks together.
        num_kv_heads: heads of keys. None: as many.
        scale: of the logits. None: the inverse root of a head's width.
        causal: queries do not see later keys.

    Raises:
        ConfigError: a value is out of range.
    """

    max_logits: Tensor | None
    """``(heads,)`` fp32 on this rank: the largest since the last step; None without a call."""

    @checked(head_width=at_least(1), num_heads=at_least(1), num_kv_heads=at_least(1))
    def __init__(
        self,
        query: str,
        key: str,
        head_width: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        *,
        scale: float | None = None,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.query, self.key = query, key
        self.head_width = head_width
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.scale, self.causal = scale, causal
        self.max_logits = None

    @torch.no_grad()
    def forward(self, query: Tensor, key: Tensor) -> None:
        """Note the largest logits. ``(batch, heads, tokens, width)`` each, as attention gets them; the same tokens."""
        if not self.training:
            return
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        shared = query.shape[1] // key.shape[1]
        largest: list[Tensor] = []
        for head in range(query.shape[1]):
            logits = (query[:, head] @ key[:, head // shared].mT).float() * scale
            if self.causal:
                later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
                logits = logits.masked_fill(later, -math.inf)
            largest.append(logits.amax())
        noted = torch.stack(largest)
        noted = torch.where(noted.isfinite(), noted, -math.inf)  # an overflow, whose step is skipped
        self.max_logits = noted if self.max_logits is None else torch.maximum(self.max_logits, noted)


@dataclass(frozen=True)
class Scaling:
    """Rows of a parameter, and their factors."""

    param: nn.Parameter
    first: int
    factors: Tensor
    """``(rows,)`` fp32."""


@dataclass(frozen=True)
class LogitClip:
    """Arguments of a call of `Muon.clip_logits`, and the scaling of weights that follows from them."""

    module: Callable[[], nn.Module | None]
    """A weak reference."""

    limit: float
    query_share: float

    def scalings(self, steps: Callable[[nn.Parameter], bool], largest: Callable[[Tensor], Tensor]) -> Iterator[Scaling]:
        """Yield what to scale, and forget the logits.

        Args:
            steps: whether the optimizer steps a parameter.
            largest: returns the maximum over ranks of the logits of all modules, ``(n,)`` on the host.

        Raises:
            PlanError: a rank has noted the logits of other heads than those whose weights it has.
        """
        module = self.module()
        found = [] if module is None else [f for parent in module.modules() for f in _clips_in(parent, steps)]
        noted = [_noted(clip, query[0], key[0]) for clip, query, key in found]
        if not found:
            return
        logits = largest(torch.cat(noted)).split([len(each) for each in noted])
        for (clip, query, key), values in zip(found, logits, strict=True):
            clip.max_logits = None
            factors = torch.where(values > self.limit, self.limit / values, 1.0)
            if bool((factors == 1).all()):
                continue
            shared = factors.view(-1, clip.num_heads // clip.num_kv_heads).amin(1)  # of the heads of one key
            fused = query[0] is key[0]
            keys = (key, shared ** (1 - self.query_share), len(values) if fused else 0)
            for params, heads, first in ((query, factors**self.query_share, 0), keys):
                rows = heads.repeat_interleave(clip.head_width)
                yield from (Scaling(param, first * clip.head_width, rows) for param in params)


def _clips_in(
    parent: nn.Module, steps: Callable[[nn.Parameter], bool]
) -> Iterator[tuple[QKClip, list[nn.Parameter], list[nn.Parameter]]]:
    """Yield the clips of a module, with weight and bias of queries and of keys, if the optimizer steps the weights."""
    for clip in parent.children():
        if isinstance(clip, QKClip):
            query, key = (_with_bias(parent, name) for name in (clip.query, clip.key))
            if steps(query[0]) and steps(key[0]):
                yield clip, [p for p in query if steps(p)], [p for p in key if steps(p)]


def _with_bias(parent: nn.Module, name: str) -> list[nn.Parameter]:
    weight, owner = parent.get_parameter(name), parent.get_submodule(name.rpartition(".")[0])
    bias = getattr(owner, "bias", None)
    return [weight, bias] if isinstance(bias, nn.Parameter) else [weight]


def _noted(clip: QKClip, query: nn.Parameter, key: nn.Parameter) -> Tensor:
    """Return the logits that this rank has noted, on the host: none are as small as can be."""
    heads = query.shape[0] // clip.head_width
    if query is key:
        heads = heads * clip.num_heads // (clip.num_heads + 2 * clip.num_kv_heads)
    noted = clip.max_logits
    if noted is not None and len(noted) != heads:
        raise PlanError(
            f"Got logits of {len(noted)} heads, but {clip.query!r} here has {heads} of width {clip.head_width}. "
            "Give QKClip the width and numbers of heads of the model, and call it with the heads of its weights: "
            "sequence parallelism of attention is not supported."
        )
    return torch.full((heads,), -math.inf) if noted is None else noted.detach().float().cpu()
