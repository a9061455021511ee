"""Perplexity of a model on a text, to measure the cost of quantization."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ls_strategy.errors import ConfigError
from ls_strategy.parallel.logits import gather


@torch.no_grad()
def perplexity(
    forward: Callable[[Tensor], Any], tokens: Tensor, *, context: int, batch: int = 8, windows: int | None = None
) -> float:
    """Return ``exp`` of the mean cross-entropy in nats per token, over all tokens but the first of each window.

    Collective where ``forward`` is.

    Args:
        forward: from tokens (B, T) to logits (B, T, V), or to an object with ``logits``.
        tokens: the text, (N,) int64, on the model's device.
        context: tokens per window; windows do not overlap. An incomplete last window is omitted.
        batch: windows per forward.
        windows: number of windows, spread evenly over the text. None: all.

    Raises:
        ConfigError: the text is shorter than a window.
    """
    if context < 2 or len(tokens) < context:
        raise ConfigError(
            f"Got {len(tokens)} tokens of text, but windows of {context} tokens (at least 2): give a longer text, or "
            "another context."
        )
    total, count = 0.0, 0
    for rows in _batches(tokens, context, batch, windows):
        output = forward(rows)
        logits = gather(output if isinstance(output, Tensor) else output.logits)
        losses = functional.cross_entropy(logits[:, :-1].float().flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        total, count = total + losses.item(), count + rows[:, 1:].numel()
    return math.exp(total / count)


def _batches(tokens: Tensor, context: int, batch: int, windows: int | None) -> Iterator[Tensor]:
    rows = tokens[: len(tokens) // context * context].view(-1, context)
    if windows is not None and windows < len(rows):
        rows = rows[torch.linspace(0, len(rows) - 1, windows).long().to(rows.device)]
    yield from rows.split(batch)
